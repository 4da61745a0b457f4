"""Tracing a model of one's own: from the command to a plan that is analysed without torch."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sympy

torch = pytest.importorskip("torch")

from experiments import trace  # noqa: E402
from experiments.cli.commandline import run  # noqa: E402
from mistlab.graph.layer_types import expressions_of  # noqa: E402
from mistlab.graph.library import Variant, graph_of, shipped  # noqa: E402
from mistlab.graph.symbols import size_symbol  # noqa: E402
from mistlab.plan.workload import (  # noqa: E402
    ModelSpec,
    Workload,
)

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

PLAN = """
workload:
  model: {model}
  sequence_length: {sequence_length}
  global_batch: 4
  attention: flash
  precision: bf16
cluster: {{hardware: a100-40gb, nodes: 1, gpus_per_node: 2}}
plan:
  micro_batches: 2
  stages:
    - {{layers: {layers}, data_parallel: 1, tensor_parallel: {tensor_parallel}, micro_batch: 2}}
"""


ONE_GRAPH = "--attention", "flash", "--precision", "bf16"


@pytest.fixture
def own_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(HERE)
    monkeypatch.setattr(sys, "path", list(sys.path))


# What was traced already, by source and options: tracing takes seconds.
TRACED: dict[tuple[str, ...], str] = {}


def traced(source: str, out: Path, *options: str) -> dict[str, Any]:
    """The content of a trace, which is at ``out``; each is made once."""
    if (source, *options) not in TRACED:
        assert run(trace.main, [source, "--out", str(out), *options]) == 0
        TRACED[source, *options] = out.read_text(encoding="utf-8")
    out.write_text(TRACED[source, *options], encoding="utf-8")
    content: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return content


def workload(content: dict[str, Any], path: Path, **others: Any) -> Workload:
    spec = ModelSpec.from_mapping({**content["spec"], "graph_file": str(path)})
    given = {"sequence_length": 128, "attention": "flash", "precision": "bf16", **others}
    return Workload(model=spec, global_batch=4, **given)


@pytest.mark.usefixtures("own_models")
def test_a_module_of_ones_own_becomes_a_custom_model(tmp_path: Path) -> None:
    content = traced("own_models:plain", tmp_path / "m.json")

    spec = content["spec"]
    assert (spec["name"], spec["family"], spec["hidden"], spec["layers"], spec["vocab"]) == (
        "plain",
        "custom",
        64,
        3,
        512,
    )
    assert spec["tensor_parallel_degrees"] == [1]
    graph = graph_of(workload(content, tmp_path / "m.json"))
    b, s = size_symbol("b"), size_symbol("s")
    block = expressions_of(graph.block)
    # Products of (b s, 64) with 3 and with 1 times 64 x 64.
    assert block.work["forward", "matmul"].flop == 2 * b * s * 64 * 4 * 64
    assert block.input_bytes == 2 * 64 * b * s
    assert graph.assumptions == ("s <= 256",)
    counts = [layer.parameter_count for layer in graph.layers]
    assert counts == [512 * 64 + 256 * 64, 4 * 64 * 64 + 4 * 64 + 2 * 64, 512 * 64]


@pytest.mark.usefixtures("own_models")
def test_a_model_that_makes_its_own_loss_gets_its_targets(tmp_path: Path) -> None:
    def losses(source: str) -> set[str]:
        content = traced(source, tmp_path / "m.json", "--precision", "bf16")
        graph = graph_of(workload(content, tmp_path / "m.json"))
        return {o.dtype for o in graph.head.of_phase("forward") if "softmax" in o.name}

    assert losses("own_models:with_loss") == {"bfloat16"}
    assert losses("own_models:plain") == {"float32"}  # added, as frameworks add it


@pytest.mark.usefixtures("own_models")
def test_a_factory_that_takes_a_degree_is_split(tmp_path: Path) -> None:
    content = traced("own_models:split", tmp_path / "m.json", *ONE_GRAPH)

    assert content["spec"]["tensor_parallel_degrees"] == [1, 2, 4]
    graph = graph_of(workload(content, tmp_path / "m.json"))
    values = {"h": 512, "n": 8, "k": 8, "d": 64, "r": 64, "f": 2048, "V": 1024}
    family = shipped(Variant(family="gpt", attention="flash", precision="half"))
    numbers = {size_symbol(name): value for name, value in values.items()}
    assert sympy.expand(family.block.saved_bytes.subs(numbers)) == graph.block.saved_bytes


@pytest.mark.parametrize(
    ("source", "status", "message"),
    [
        ("asks_for_values", 1, r"aten\._local_scalar_dense .*own_models\.py:\d+ \(if x\.sum"),
        ("chooses_rows", 1, r"aten\.index .*own_models\.py:\d+ \(x = self\.tokens\(tokens\[tok"),
        (
            "fixes_the_batch",
            1,
            r"size b \(batch size\) was fixed to 4 by operator aten\.view, at .*own_models",
        ),
        ("without_blocks", 1, r"no torch\.nn\.ModuleList of blocks: keep its repeated layers"),
        ("unlike_blocks", 1, r"block 2 of blocks has parameters of other names or shapes"),
        ("not_a_model", 1, r"not_a_model returned 3: return a torch\.nn\.Module"),
        ("needs_an_argument", 1, r"the factory's arguments size have no defaults: give them"),
        ("not_a_function", 2, r"3 is not a function: give the name of a function"),
        ("plian", 2, r"own_models has no function 'plian': did you mean 'plain'"),
    ],
)
@pytest.mark.usefixtures("own_models")
def test_what_cannot_be_traced_is_named_with_its_place(
    source: str, status: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "m.json"

    assert run(trace.main, [f"own_models:{source}", "--out", str(out)]) == status

    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    assert re.search(message, captured.err), captured.err
    assert not out.exists()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere:model", "there is no module 'nowhere': run from the folder that holds it"),
        ("nowhere.json", "nowhere.json: there is no such file"),
        ("nowhere.yaml", "nowhere.yaml: there is no such file"),
        ("nonsense", "'nonsense' is nothing to trace: give package.module:factory"),
    ],
)
def test_sources_that_are_not_there_are_wrong_usage(
    source: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(trace.main, [source, "--out", str(tmp_path / "m.json")]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("own_models")
def test_a_longer_sequence_than_the_code_allows_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "m.json"
    content = traced("own_models:plain", out)
    with pytest.raises(ValueError, match=r"sequence_length: 512 breaks s <= 256, .* trace the"):
        graph_of(workload(content, out, sequence_length=512))

    arguments = ["own_models:plain", "--out", str(out), "--sequence-length", "512"]
    assert run(trace.main, arguments) == 1
    assert "ValueError: too long, at" in capsys.readouterr().err


@pytest.mark.usefixtures("own_models")
def test_one_precision_alone_can_be_traced(tmp_path: Path) -> None:
    content = traced("own_models:plain", tmp_path / "m.json", "--precision", "fp32")
    assert [graph["precision"] for graph in content["graphs"]] == ["single"]
    with pytest.raises(ValueError, match=r"no graph for attention flash in half precision"):
        graph_of(workload(content, tmp_path / "m.json"))


@pytest.mark.usefixtures("own_models")
def test_blocks_that_differ_in_a_setting_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    traced("own_models:unlike_settings", tmp_path / "m.json", *ONE_GRAPH)
    assert "the blocks of unlike_settings differ in norm.eps: all are counted as the first" in (
        capsys.readouterr().err
    )


@pytest.mark.usefixtures("own_models")
def test_json_is_one_object_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "m.json")
    assert run(trace.main, ["own_models:plain", "--out", out, "--json", *ONE_GRAPH]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["graphs"][0]["block"]["checkpointed_bytes"] == "128*b*s"


CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 704,
        "vocab_size": 1024,
        "rope_theta": 500_000.0,
    },
    "gpt2": {"n_embd": 256, "n_layer": 3, "n_head": 8, "vocab_size": 1024},
    "mistral": {
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 704,
        "vocab_size": 1024,
    },
}


# One of them in one precision, the other in both.
OF_KIND = {"llama": ("--precision", "bf16"), "gpt2": ()}
KINDS = ["llama", pytest.param("gpt2", marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=KINDS)
def configuration(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration in a folder of its kind's name, and its trace beside it."""
    path = written_config(request.param, tmp_path_factory.mktemp("configurations"))
    traced(str(path), path.with_name("model.json"), *OF_KIND[request.param])
    return path


def written_config(kind: str, folder: Path, **given: Any) -> Path:
    pytest.importorskip("transformers", reason="transformers is not installed: make extras")
    path = folder / kind / "config.json"
    path.parent.mkdir()
    said = {name: v for name, v in {**CONFIGS[kind], **given}.items() if v is not None}
    path.write_text(json.dumps({"model_type": kind, **said}), encoding="utf-8")
    return path


def test_a_hugging_face_configuration_is_traced_with_both_attentions(configuration: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415

    out = configuration.with_name("model.json")
    content = json.loads(out.read_text(encoding="utf-8"))

    assert content["spec"]["name"] == configuration.parent.name
    precisions = ("half",) if OF_KIND[configuration.parent.name] else ("half", "single")
    assert [(g["attention"], g["precision"]) for g in content["graphs"]] == [
        (attention, precision) for attention in ("flash", "math") for precision in precisions
    ]
    flash, math = (graph_of(workload(content, out, attention=a)) for a in ("flash", "math"))
    s = size_symbol("s")
    assert sympy.degree(flash.block.saved_bytes, s) == 1
    assert sympy.degree(math.block.saved_bytes, s) == 2
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(configuration.parent))
    layers = content["spec"]["layers"]
    counts = [int(layer.parameter_count) for layer in flash.layers]
    shared = 256 * 1024 if content["spec"].get("tied_embeddings") else 0
    total = counts[0] + layers * counts[1] + counts[2] - shared
    assert total == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("configuration", ["llama"], indirect=True)
def test_a_hugging_face_llama_multiplies_as_ours_does(configuration: Path) -> None:
    out = configuration.with_name("model.json")
    theirs = graph_of(workload(json.loads(out.read_text(encoding="utf-8")), out))
    ours = shipped(Variant(family="llama", attention="flash", precision="half"))
    values = {"h": 256, "n": 8, "k": 4, "d": 32, "f": 704, "tp": 1}
    numbers = {size_symbol(name): value for name, value in values.items()}
    for phase in ("forward", "backward"):
        for kind in ("matmul", "attention"):
            flop = [expressions_of(g.block).work[phase, kind].flop for g in (theirs, ours)]
            assert sympy.expand(flop[1].subs(numbers)) == flop[0]


def rotary(content: dict[str, Any]) -> tuple[float, str, float]:
    spec = ModelSpec.from_mapping(content["spec"])
    return spec.rotary_base, spec.position_embedding, spec.rotary_fraction


@pytest.mark.parametrize("configuration", ["llama"], indirect=True)
def test_a_hugging_face_configuration_brings_its_rotary_base(configuration: Path) -> None:
    content = json.loads(configuration.with_name("model.json").read_text(encoding="utf-8"))
    assert rotary(content) == (500_000, "rotary", 1)


@pytest.mark.slow
def test_a_hugging_face_configuration_need_not_say_its_rotary_base(tmp_path: Path) -> None:
    path = written_config("llama", tmp_path, rope_theta=None)
    content = traced(str(path), tmp_path / "model.json", *ONE_GRAPH)
    assert rotary(content) == (10_000, "rotary", 1)


def test_a_sliding_window_limits_the_sequence(tmp_path: Path) -> None:
    path = written_config("mistral", tmp_path)
    out = tmp_path / "model.json"
    content = traced(str(path), out, *ONE_GRAPH)
    assert graph_of(workload(content, out)).assumptions == ("s < 4096",)
    with pytest.raises(ValueError, match="8192 breaks s < 4096"):
        graph_of(workload(content, out, sequence_length=8192))


def test_an_unknown_kind_of_configuration_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: make extras")
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "lama"}', encoding="utf-8")
    assert run(trace.main, [str(path), "--out", str(tmp_path / "m.json")]) == 2
    assert "model_type 'lama' is not one that transformers knows: give one such as llama" in (
        capsys.readouterr().err
    )


def test_a_structure_that_no_family_has_is_traced_in_every_size(tmp_path: Path) -> None:
    described = {"family": "gpt", "hidden": 512, "layers": 4, "heads": 8}
    source = tmp_path / "rms.yaml"
    source.write_text(
        "".join(f"{k}: {v}\n" for k, v in {**described, "norm": "rmsnorm"}.items()),
        encoding="utf-8",
    )
    out = tmp_path / "rms.json"
    plain = ModelSpec.of(**described, norm="rmsnorm")
    work = Workload(
        model=plain, sequence_length=128, global_batch=4, attention="math", precision="fp32"
    )
    with pytest.raises(
        ValueError, match=r"trace the model by python -m experiments\.trace MODEL\.yaml"
    ):
        graph_of(work)

    content = traced(str(source), out, "--attention", "math", "--precision", "fp32")

    graph = graph_of(workload(content, out, attention="math", precision="fp32"))
    assert size_symbol("tp") in graph.block.saved_bytes.free_symbols
    assert not any("layer_norm" in operator.name for operator in graph.block.operators)


@pytest.mark.usefixtures("own_models")
def test_a_plan_of_a_traced_model_needs_no_torch(tmp_path: Path) -> None:
    traced("own_models:plain", tmp_path / "m.json", "--precision", "bf16")
    plan = tmp_path / "plan.yaml"
    plan.write_text(
        PLAN.format(model="m.json", sequence_length=128, layers=3, tensor_parallel=1),
        encoding="utf-8",
    )
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from mistlab import StageBatch, load_job\n"
        "from mistlab.graph.stage_model import StageModel\n"
        f"job = load_job({str(plan)!r})\n"
        "figures = StageModel.of(job.workload).figures(StageBatch.of_plan(job.plan))\n"
        "print(int(figures.parameters[0]), figures.feasible[0])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.split() == [str(512 * 64 + 256 * 64 + 3 * 16768 + 512 * 64), "True"]


@pytest.mark.usefixtures("own_models")
def test_a_plan_that_splits_an_unsplit_model_is_refused(tmp_path: Path) -> None:
    from mistlab import load_job  # noqa: PLC0415

    traced("own_models:plain", tmp_path / "m.json", "--precision", "bf16")
    plan = tmp_path / "plan.yaml"
    text = PLAN.format(model="m.json", sequence_length=128, layers=3, tensor_parallel=2)
    plan.write_text(text, encoding="utf-8")
    with pytest.raises(
        ValueError, match=r"stages\[0\]\.tensor_parallel: 2, but .* supports only 1"
    ):
        load_job(plan)
