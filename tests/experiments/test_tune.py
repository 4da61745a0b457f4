"""One searcher's plan, as a file that other commands take."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from experiments import compare_searchers, predict, tune, will_it_fit
from experiments.cli.commandline import run
from experiments.tuning import tune as tuning
from experiments.tuning.explain import StageLimit
from experiments.tuning.search_words import limits_in_words
from experiments.tuning.tune import budget_for
from mistlab.job.job import load_job
from mistlab.job.search import Budget
from mistlab.plan.dimensions import change_words
from mistlab.plan.named_spaces import space_of
from mistlab.plan.plan import Offload, Plan, StagePlan
from mistlab.plan.plan_words import plan_words
from searchers.exact import branches
from searchers.registry import SEARCHERS
from simulators.symbolic import SymbolicPredictor

OFFLOADED = ("weights", "gradients", "optimizer", "activations")
Tune = Callable[..., int]


@pytest.fixture
def tuned(small_options: tuple[str, ...]) -> Tune:
    """The command on a small problem."""

    def command(out: Path, *options: str, searcher: str = "random") -> int:
        given = ("--searcher", searcher, "--out", str(out))
        return run(tune.main, [*small_options, *given, *options])

    return command


def test_the_plan_is_predicted_as_promised(
    tuned: Tune, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "plan.yaml"
    assert tuned(out, "--json") == 0
    row = json.loads(capsys.readouterr().out)
    assert run(predict.main, [str(out), "--json"]) == 0
    prediction = json.loads(capsys.readouterr().out)
    assert prediction["fits"]
    assert prediction["iteration_s"] == row["predicted_s"]
    parts = row["why"]["breakdown"]["parts"]
    assert sum(parts.values()) == pytest.approx(row["predicted_s"], rel=1e-9)
    assert row["why"]["stages"][0]["limit"] in {"compute", "exposed communication", "memory"}


def test_one_page_tells_the_plan_and_why(
    tuned: Tune, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.yaml"
    assert tuned(out) == 0
    page = capsys.readouterr().out
    rate = re.search(r"s an iteration \(.* ([\d,]+) tokens/s, ([\d,]+) a GPU, MFU \d+%;", page)
    assert rate
    whole, each = (int(number.replace(",", "")) for number in rate.groups())
    assert each == pytest.approx(whole / load_job(out).cluster.num_gpus, abs=1)
    assert "stage 0: blocks 0 to" in page
    assert "Stage 0 is limited by" in page
    goes = re.search(r"Where a GPU's time goes: (.*)\.\n", page)
    assert goes
    shares = [int(share) for share in re.findall(r"(\d+)%", goes[1])]
    assert sum(shares) == pytest.approx(100, abs=0.5 * len(shares))
    assert page.endswith(f"plan: {out}\n")


def test_the_page_tells_how_probable_it_is_that_the_plan_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is kept free is room for a peak above its prediction."""
    asked = (
        *("--model", "llama3-8b", "--hardware", "rtx-3090-24gb", "--gpus-per-node", "2"),
        *("--precision", "bf16", "--sequence-length", "4096", "--train", "lora", "--base", "4bit"),
        *("--engine", "fsdp", "--out", str(tmp_path / "plan.yaml")),
    )
    percents, margins = [], []
    for gib in ("0", "4", "9"):
        assert run(tune.main, [*asked, "--keep-free-gib", gib]) == 0
        page = capsys.readouterr().out
        told = re.search(r"\nIt fits with a probability of (\d+)% \(90 % of .*GiB\)(.*)\.\n", page)
        assert told
        percents.append(int(told[1]))
        asks = re.search(r": --keep-free-gib (\d+) asks for 90%, and gives (.*)", told[2])
        assert bool(asks) == (percents[-1] < 90)
        if asks:
            margins.append(asks[1])
            gives = re.match(r"[\d.]+ s \(\+[\d.]+%\) at ([\d.]+) GiB, .* with (\d+)% \(", asks[2])
            assert gives
            assert float(gives[1]) <= 24 - int(asks[1])
            assert int(gives[2]) >= 90
    assert set(margins) == {"9"}
    assert percents == sorted(percents)
    assert percents[0] < 60
    assert percents[-1] > 90


def test_a_plan_keeps_free_what_it_was_asked_to(
    tuned: Tune, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The search, the plan file and whoever predicts the file heed it."""
    out = tmp_path / "plan.yaml"
    given = ("--keep-free-gib", "16")
    assert tuned(out, *given) == 0
    assert "\n16 GiB of every GPU are kept free.\n" in capsys.readouterr().out
    job = load_job(out)
    assert job.cluster.keep_free_gib == 16
    assert job.cluster.memory_bytes == job.cluster.whole_memory_bytes - 16 * 2**30

    def fits(*options: str) -> tuple[bool, str]:
        assert run(predict.main, [str(out), *options, "--json"]) == 0
        verdict = json.loads(capsys.readouterr().out)["fits"]
        assert run(predict.main, [str(out), *options]) == 0
        return verdict, capsys.readouterr().out

    kept, words = fits()
    assert kept
    whole = "a GPU's 22.0 less 0.3 outside of torch's allocator"
    assert f"; fits 5.7 GiB: {whole} and 16 kept free\n" in words
    kept, words = fits("--keep-free-gib", "21.5")
    assert not kept
    assert f"; does not fit 0.2 GiB: {whole} and 21.5 kept free\n" in words
    assert tuned(out, "--json") == 0
    freely = json.loads(capsys.readouterr().out)["plan"]
    assert "keep_free_gib" not in freely["cluster"]


def test_where_too_much_is_kept_free_it_is_said_with_how_much_less_a_plan_fits(
    tuned: Tune, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tuned(tmp_path / "plan.yaml", "--space", "3d", "--keep-free-gib", "21.6") == 1
    said = capsys.readouterr().err
    assert "10.8 GiB of every GPU kept free (--keep-free-gib 10.8)" in said
    assert "21.6 GiB of every GPU are kept free." in said


def test_links_may_be_other_than_the_hardware_s(tuned: Tune, tmp_path: Path) -> None:
    """The plan file says so, and its prediction knows."""

    def seconds(rate: str) -> float:
        out = tmp_path / f"{rate}.yaml"
        assert tuned(out, "--intra-node-gbytes-per-s", rate) == 0
        job = load_job(out)
        assert job.cluster.intra_node_gbytes_per_s == float(rate)
        predictor = SymbolicPredictor(workload=job.workload, cluster=job.cluster)
        return predictor.predict(job.plan).iteration_s

    assert seconds("0.5") > seconds("31.5")


@pytest.mark.parametrize("option", ["--intra-node-gbytes-per-s", "--inter-node-gbytes-per-s"])
@pytest.mark.parametrize("rate", ["0", "-1", "nan", "inf"])
def test_links_without_a_rate_are_refused(
    option: str, rate: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tune.main, [option, rate]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {option}: ")
    assert said.endswith("give a number above 0\n")


@pytest.mark.parametrize("command", [tune, predict, will_it_fit, compare_searchers])
@pytest.mark.parametrize("free_gib", ["-1", "nan"])
def test_memory_that_cannot_be_kept_free_is_refused(
    command: ModuleType, free_gib: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(command.main, ["--keep-free-gib", free_gib]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: --keep-free-gib: ")
    assert said.endswith("give a number of at least 0\n")


# What nobody but a searcher of whole plans takes: kinds of blocks that take turns.
HYBRID = """\
family: llama
hidden: 256
layers: 4
heads: 4
ffn: 512
vocab: 1024
experts: {count: 4, active: 2, ffn: 128, dense_blocks: 1}
"""


def test_a_hybrid_is_proven_where_stages_are_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = tmp_path / "model.yaml", tmp_path / "plan.yaml"
    model.write_text(HYBRID, encoding="utf-8")
    options = (
        *("--model", str(model), "--hardware", "h100-80gb", "--sequence-length", "128"),
        *("--precision", "bf16", "--space", "megatron-today", "--engine", "megatron-core"),
        *("--budget-evaluations", "20", "--out", str(out)),
    )
    assert run(tune.main, options) == 0
    assert load_job(out).plan.engine == "megatron-core"
    assert capsys.readouterr().out.startswith("Proven: no plan of space megatron-today")


def test_a_search_that_mist_refuses_is_left_to_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where nothing bounds an engine's stages in the orders of a space."""
    monkeypatch.setattr(branches, "has_bounds", lambda *_: False)
    model, out = tmp_path / "model.yaml", tmp_path / "plan.yaml"
    model.write_text(HYBRID, encoding="utf-8")
    options = (
        *("--model", str(model), "--hardware", "h100-80gb", "--sequence-length", "128"),
        *("--precision", "bf16", "--space", "megatron-today", "--engine", "megatron-core"),
        *("--budget-evaluations", "5", "--out", str(out)),
    )
    assert run(tune.main, options) == 0
    assert "; aceso searches in its place" in capsys.readouterr().err
    assert run(tune.main, [*options, "--searcher", "mist"]) == 1
    assert "ask a searcher of whole plans" in capsys.readouterr().err


def test_a_precision_that_no_plan_has_is_refused_with_an_engine_that_has_it(
    tuned: Tune, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--hardware", "h100-80gb", "--precision", "fp8")
    assert tuned(tmp_path / "plan.yaml", *options) == 2
    assert "fp16, bf16, fp32 or tf32, or --engine megatron-core" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("layers", "treated", "words"),
    [
        (1, {}, "block 0, 1 data x 1 tensor parallel, micro-batch 1, ZeRO-0, no blocks recomputed"),
        (1, {"checkpointed_layers": 1}, "ZeRO-0, its block recomputed"),
        (3, {"checkpointed_layers": 3}, "blocks 0 to 2, *, ZeRO-0, all 3 blocks recomputed"),
        (3, {"checkpointed_layers": 2}, "ZeRO-0, 2 of 3 blocks recomputed"),
        (
            3,
            {"core_recomputed_layers": 3},
            "no blocks recomputed, all 3 blocks with attention's core recomputed",
        ),
    ],
)
@pytest.mark.parametrize(
    ("offload", "offloads"),
    [
        (Offload(), "nothing"),
        (Offload(weights=0.5, activations=0.125), "50% of weights, 12.5% of activations"),
        (Offload(optimizer=1.0), "100% of optimizer state"),
    ],
)
def test_a_stage_is_told_as_a_person_would(
    layers: int, treated: dict[str, Any], words: str, offload: Offload, offloads: str
) -> None:
    """Nothing is said of what no block has."""
    stage = StagePlan.of_values(
        {"layers": layers, "data_parallel": 1, "tensor_parallel": 1, "micro_batch": 1, **treated}
    )
    stage = replace(stage, offload=offload)
    (_, told) = plan_words(Plan(micro_batches=1, stages=(stage,)))
    assert fnmatch(told, f"stage 0: *{words}, offloads {offloads}")


def test_a_change_to_no_block_is_told_as_such() -> None:
    assert change_words("checkpointed_layers", 1, 0) == "no blocks recomputed instead of 1"
    assert change_words("checkpointed_layers", 3, 2) == "2 instead of 3 blocks recomputed"
    less = change_words("offload_optimizer", 0.25, 0.125)
    assert less == "12.5% instead of 25% of optimizer state offloaded"


def test_stages_that_are_alike_share_a_line() -> None:
    alike = StagePlan(layers=2, data_parallel=1, tensor_parallel=1, micro_batch=1)
    other = replace(alike, layers=3)
    plan = Plan(micro_batches=4, stages=(alike, alike, other), order="gpipe")
    whole, first, last = plan_words(plan)
    assert whole.endswith("3 stages, 4 micro-batches, order gpipe")
    assert first.startswith("stages 0 to 1: 2 blocks each, 1 data x 1 tensor parallel")
    assert last.startswith("stage 2: blocks 4 to 6, 1 data x 1 tensor parallel")
    limits = [
        StageLimit(
            limit="compute",
            compute_s=1.0,
            exposed_communication_s=seconds,
            share_of_slowest=1.0,
            memory_bytes=held * 2**30,
            room_bytes=8 * 2**30,
        )
        for seconds, held in ((0.0, 3), (0.0, 2), (0.5, 1))
    ]
    told = [*limits_in_words(limits)]
    assert told[0].startswith("Stages 0 to 1 are each limited by compute: 1.000 s")
    assert told[0].endswith("2.00 to 3.00 of 8.00 GiB.")
    assert told[1].startswith("Stage 2 is limited by compute: 1.500 s")


def test_an_interrupt_keeps_the_plan(
    tuned: Tune,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    strategies: dict[str, Any],
) -> None:
    monkeypatch.setitem(SEARCHERS, "stopped", strategies["interrupted"])  # type: ignore[arg-type]
    out = tmp_path / "plan.yaml"
    assert tuned(out, searcher="stopped") == 130
    assert load_job(out).plan
    assert "interrupted: the plan is the best until then" in capsys.readouterr().err


def test_nothing_fits_leaves_the_file_alone(
    tuned: Tune, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.yaml"
    out.write_text("mine", encoding="utf-8")
    # Whoever proves nothing claims nothing.
    claims = {"mist": "fits: the one", "random": "was found that fits: of those tried the one"}
    for searcher, claim in claims.items():
        assert tuned(out, "--space", "3d", "--model", "gpt3-7b", searcher=searcher) == 1
        err = capsys.readouterr().err
        assert (
            "No plan of space 3d, which is modelled without offloading what blocks keep or states"
            in err
        )
        assert f", {claim} that comes nearest needs" in err
        # A node has eight GPUs, of which four are used.
        assert re.search(r"(8 GPUs \(--gpus-per-node 8|GPUs \(--gpus-per-node 8 --nodes)", err)
    assert out.read_text(encoding="utf-8") == "mine"


def test_an_unknown_name_of_a_model_is_answered_with_what_to_give(
    tuned: Tune, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, said in (
        ("unsloth/llama-3-8b-bnb-4bit", "give --model unsloth/llama-3-8b, and --base 4bit or 8bit"),
        ("me/mine-7b", "nothing is fetched: give a catalogue name of these sizes, or the path"),
        ("qwen2.5-7", "did you mean 'qwen2.5-7b'"),
    ):
        assert tuned(tmp_path / "plan.yaml", "--model", name) == 2
        assert said in capsys.readouterr().err


def test_models_with_experts_are_tuned_with_expert_parallelism(
    tuned: Tune, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unless another space is named."""
    dense, experts = tmp_path / "dense.yaml", tmp_path / "experts.yaml"
    sizes = "family: llama\nhidden: 256\nlayers: 4\nheads: 4\nvocab: 512\n"
    dense.write_text(sizes, encoding="utf-8")
    experts.write_text(f"{sizes}experts: {{count: 4, active: 2, ffn: 256}}\n", "utf-8")

    def space(*options: str) -> tuple[str, str]:
        assert tuned(tmp_path / "plan.yaml", "--json", *options) == 0
        row = json.loads(capsys.readouterr().out)
        return row["space"], row["engine"]

    assert space("--model", str(dense)) == ("mist", "mistlab")
    assert space("--model", str(experts)) == ("moe", "megatron-core")
    assert space("--model", str(experts), "--space", "mist") == ("mist", "mistlab")
    on_fsdp = ("--engine", "fsdp", "--precision", "bf16")
    assert space("--model", str(experts), *on_fsdp) == ("moe", "fsdp")


def test_the_event_simulator_is_asked_by_those_who_need_plans_alone(
    tuned: Tune, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = ("--predictor", "events", "--budget-evaluations", "10")
    assert tuned(tmp_path / "plan.yaml", *events, "--json") == 0
    row = json.loads(capsys.readouterr().out)
    assert row["predicted_s"] == row["simulated_s"]
    assert tuned(tmp_path / "other.yaml", *events, searcher="mist") == 2
    refusal = capsys.readouterr().err
    assert "--predictor events: predicts whole plans only" in refusal
    assert "random" in refusal
    assert "alpa" not in refusal


def test_a_space_of_a_file_is_searched_and_refused_where_its_ratios_are_too_fine(
    tuned: Tune, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "own.yaml", tmp_path / "plan.yaml"
    path.write_text("{like: mist, name: own, zero: [2], data_parallel: [2]}", encoding="utf-8")
    assert tuned(out, "--space", str(path)) == 0
    assert [stage.zero for stage in load_job(out).plan.stages] == [2]
    fine = ", ".join(f"{kind}: {[n / 400 for n in range(401)]}" for kind in OFFLOADED)
    path.write_text(f"{{like: mist, name: fine, offload: {{{fine}}}}}", encoding="utf-8")
    capsys.readouterr()
    assert tuned(out, "--space", str(path), searcher="exact") == 1
    said = capsys.readouterr().err
    assert "error: space fine has 77,570,884,803 ways to save memory on a stage" in said
    assert "158,935.7 GiB, and" in said
    assert "No searcher found" not in said


def test_several_engines_are_searched_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ("--model", "gpt3-350m", "--gpus-per-node", "2", "--space", "3d")
    seconds = {}
    for names in ("mistlab", "megatron", "deepspeed", "deepspeed,mistlab,megatron"):
        where = ("--engine", names, "--out", str(tmp_path / "plan.yaml"), "--json")
        assert run(tune.main, [*small, *where]) == 0
        row = json.loads(capsys.readouterr().out)
        assert row["status"] == "OPTIMAL"
        assert row["engine"] == names
        seconds[names] = row["predicted_s"]
    *alone, together = seconds.values()
    assert together == min(alone) < max(alone)
    assert (
        run(tune.main, [*small, "--engine", "mistlab,megatron", "--out", str(tmp_path / "p.yaml")])
        == 0
    )
    engines = "on any of the engines mistlab, megatron"
    words = f"Proven: no plan of space 3d {engines} that uses all 2 GPUs is predicted faster"
    assert capsys.readouterr().out.startswith(words)
    assert run(tune.main, [*small, "--engine", "mistlab,megatorn"]) == 2
    assert "'megatorn' is unknown: did you mean" in capsys.readouterr().err


def test_an_engine_is_no_space_and_a_tool_no_engine(
    tuned: Tune, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for option, name, remedy in (
        ("--space", "ddp", "it is an engine: give --engine ddp, in any space"),
        ("--space", "axolotl", "give trainer, the space of plans for axolotl"),
        ("--engine", "trl", "'trl' is unknown: trl is --engine trainer here"),
        ("--engine", "unsloth", "'unsloth' is unknown: unsloth is --engine trainer-fused here"),
        ("--space", "zero3", "'zero3' is unknown: give deepspeed, the space of plans for zero3"),
        ("--space", "ZeRO3", "'ZeRO3' is unknown: give deepspeed, the space of plans for ZeRO3"),
    ):
        assert tuned(tmp_path / "plan.yaml", option, name) == 2
        assert remedy in capsys.readouterr().err


BY_ADAPTERS = ("--model", "llama3-8b", "--gpus-per-node", "4", "--train", "lora", "--base", "4bit")


def test_a_file_whose_every_plan_divides_weights_of_few_bits_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "space.yaml"
    for content, listed in (
        ("{like: fsdp, name: mine, tensor_parallel: [2, 4]}", "tensor_parallel 2, 4"),
        ("{like: mist, name: mine, engine: trainer, pipeline: [2]}", "pipeline 2"),
    ):
        path.write_text(content, encoding="utf-8")
        given = ("--hardware", "l4-24gb", "--space", str(path), "--budget-seconds", "5")
        assert run(tune.main, [*BY_ADAPTERS, *given, "--out", str(tmp_path / "p.yaml")]) == 2
        told = capsys.readouterr().err
        assert "--base: 4bit, but engine" in told
        assert f"space mine lists {listed}: list 1 too, or take engine mistlab" in told


def test_each_of_two_engines_divides_what_it_can(tmp_path: Path) -> None:
    out = tmp_path / "p.yaml"
    sizes = ("--sequence-length", "16384", "--global-batch", "1", "--precision", "bf16")
    given = (*sizes, "--hardware", "h100-80gb", "--engine", "trainer-fused,megatron")
    assert run(tune.main, [*BY_ADAPTERS, *given, "--quick", "--out", str(out)]) == 0
    plan = load_job(out).plan
    # One sequence on four GPUs: only megatron can divide the weights, which one plan must.
    assert (plan.engine, plan.num_gpus) == ("megatron", 4)


@pytest.mark.parametrize("command", [tune, compare_searchers, will_it_fit])
def test_an_optimizer_that_an_engine_lacks_is_refused_by_its_option(
    command: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("--engine", "megatron", "--optimizer", "adamw-8bit", "--out", str(tmp_path / "out"))
    assert run(command.main, [*asked]) == 2
    assert capsys.readouterr().err.endswith(
        "error: --optimizer: adamw-8bit, but engine megatron does not train with it: give adamw, "
        "or --engine mistlab\n"
    )
    assert not (tmp_path / "out").exists()


def test_each_engine_has_the_seconds_of_one() -> None:
    several = space_of("mist").on("mistlab", "megatron", "deepspeed")
    found = budget_for(tuning.BUDGET, several)
    assert found == Budget(evaluations=300_000, seconds=180)
    assert budget_for(tuning.BUDGET, space_of("mist")) == tuning.BUDGET


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        (
            ("--model", "llama3-8b", "--hardware", "rtx-4090-24gb", "--sequence-length", "2048"),
            "adapters alone (--train lora)",
        ),
        (
            ("--model", "qwen2.5-14b", "--hardware", "rtx-4090-24gb", "--sequence-length", "512"),
            "adapters on 4 bits (--train lora --base 4bit)",
        ),
        (
            ("--model", "llama3.2-1b", "--hardware", "a100-40gb", "--sequence-length", "32768"),
            "a loss in chunks (--loss chunked)",
        ),
        (
            ("--model", "llama3.2-3b", "--hardware", "a100-40gb", "--sequence-length", "2048"),
            "space mist, whose engine mistlab offloads (--space mist)",
        ),
    ],
)
def test_a_refusal_names_the_way_to_train_and_the_space_that_would_do(
    changes: tuple[str, ...], remedy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = ("--gpus-per-node", "1", "--global-batch", "1", "--precision", "bf16")
    line = [*changes, *one, "--space", "fsdp", "--out", str(tmp_path / "plan.yaml")]
    assert run(tune.main, line) == 1
    told = capsys.readouterr().err
    assert remedy in told
    if "loss in chunks" in remedy:
        assert "adapters" in told
    flags = re.findall(r"--[a-z]+ \w+", remedy)
    assert run(tune.main, [*line, *(word for flag in flags for word in flag.split())]) == 0


@pytest.mark.parametrize("space", ["megatron-core", "deepspeed"])
def test_a_refusal_names_the_limits_of_its_space_and_a_plan_of_one_without(
    space: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    million = ("--model", "llama3-8b", "--sequence-length", "1048576", "--global-batch", "1")
    gpus = ("--hardware", "h100-80gb", "--gpus-per-node", "8", "--precision", "bf16")
    line = [*million, *gpus, "--out", str(tmp_path / "plan.yaml")]
    assert run(tune.main, [*line, "--space", space]) == 1
    told = capsys.readouterr().err
    limits = "which is modelled without offloading what blocks keep or states and has the logits of"
    assert f"No plan of space {space}, {limits} all tokens at once (--loss whole), fits" in told
    found = re.search(
        r"space (\w+), whose engine fsdp offloads \(--space fsdp\) and a loss in chunks "
        r"\(--loss chunked\): engine fsdp, 1 stage.* at ([\d.]+) GiB of a GPU",
        told,
    )
    assert found is not None
    assert float(found[2]) < 70
    # In chunks and in that space there is a plan, so nothing of the limits is told.
    assert run(tune.main, [*line, "--space", found[1], "--loss", "chunked"]) == 0


def test_a_gpu_may_be_called_without_its_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.yaml"
    line = ("--model", "llama3.2-1b", "--gpus-per-node", "2", "--global-batch", "4")
    line = (*line, "--space", "3d", "--out", str(out))
    assert run(tune.main, [*line, "--hardware", "GeForce RTX 4090"]) == 0
    remark = "--hardware GeForce RTX 4090: is taken as rtx-4090-24gb\n"
    assert remark in capsys.readouterr().err
    assert load_job(out).cluster.hardware.name == "rtx-4090-24gb"
    assert run(tune.main, [*line, "--hardware", "v100"]) == 2
    assert "'v100' is unknown: did you mean 'v100-16gb' or 'v100-32gb'?" in capsys.readouterr().err
    for name, remedy in (
        ("8xH100", "give --hardware h100-80gb --gpus-per-node 8"),
        ("A100 x 4", "give --hardware a100-40gb or a100-80gb --gpus-per-node 4"),
        ("p4d.24xlarge", "give --hardware a100-40gb, and --gpus-per-node"),
    ):
        assert run(tune.main, [*line, "--hardware", name]) == 2
        assert remedy in capsys.readouterr().err


def test_the_page_says_of_this_runtime_alone_that_no_gpu_has_timed_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["--model", "llama3.2-1b", "--hardware", "h100-80gb", "--gpus-per-node", "1"]
    for engine, is_untimed in (("mistlab", True), ("megatron", False), ("fsdp", False)):
        assert run(tune.main, [*line, "--engine", engine, "--out", str(tmp_path / "p.yaml")]) == 0
        assert ("which no GPU has run" in capsys.readouterr().out) == is_untimed
    lora, named = ["--train", "lora", "--global-batch", "4"], "; engine trainer predicts TRL"
    assert run(tune.main, [*line, *lora, "--out", str(tmp_path / "p.yaml")]) == 0
    assert f"which no GPU has run{named}" in capsys.readouterr().out
    assert run(will_it_fit.main, [*line, *lora, "--quick", "--out", str(tmp_path)]) == 0
    assert named in capsys.readouterr().out


def test_where_nothing_fits_a_shorter_sequence_is_named_that_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["--model", "llama3-8b", "--hardware", "rtx-4090-24gb", "--gpus-per-node", "1"]
    line += ["--train", "lora", "--base", "4bit", "--space", "fsdp", "--global-batch", "2"]
    line += ["--out", str(tmp_path / "p.yaml")]
    assert run(tune.main, [*line, "--sequence-length", "32768"]) == 1
    named = re.search(r"tokens \(--sequence-length (\d+)\)", capsys.readouterr().err)
    assert named
    assert run(tune.main, [*line, "--sequence-length", named[1]]) == 0
    assert run(tune.main, [*line, "--sequence-length", str(2 * int(named[1]))]) == 1
