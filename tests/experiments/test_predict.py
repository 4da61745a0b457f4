"""Plan files in, predictions out: in order, as JSON and in words."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from experiments import predict
from experiments.cli.commandline import run
from experiments.prediction import disturbed
from experiments.prediction import predict as predictions
from experiments.prediction.disturbed import samples_of
from experiments.prediction.lanes import TASK_COLOURS
from experiments.prediction.predict import predicted, sentence
from mistlab.core.units import GIB_BYTES
from mistlab.core.values import InputError
from mistlab.cost.memory import room_bytes
from mistlab.job.job import Job, dump_job
from mistlab.job.prediction import PARTS, Breakdown, Prediction, StepParts
from mistlab.machine.cluster import Cluster
from mistlab.plan.plan import Plan
from mistlab.plan.workload import Workload
from mistlab.schedule.slots import KINDS
from simulators.registry import PREDICTORS
from simulators.symbolic import SymbolicPredictor
from tests.simulators.test_played_pipelines import CASES

GOOD = """\
workload:
  {model: gpt3-2.7b, sequence_length: 2048, global_batch: 8, attention: flash, precision: fp16}
cluster: {hardware: l4-24gb, nodes: 1, gpus_per_node: 4}
plan:
  micro_batches: 4
  stages:
  - {layers: 16, checkpointed_layers: 4, data_parallel: 2, tensor_parallel: 1, micro_batch: 1,
     zero: 1}
  - {layers: 16, data_parallel: 2, tensor_parallel: 1, micro_batch: 1, zero: 1}
"""


def plan_file(folder: Path, name: str, *changes: tuple[str, str]) -> str:
    text = GOOD
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_plans_are_answered_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [
        plan_file(tmp_path, "a.yaml"),
        plan_file(tmp_path, "b.yaml", ("model: gpt3-2.7b", "model: llama-2.7b")),
        plan_file(tmp_path, "c.yaml", ("checkpointed_layers: 4", "checkpointed_layers: 16")),
    ]
    assert run(predict.main, [*paths, "--json"]) == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [answer["plan"] for answer in answers] == paths
    for answer in answers:
        assert answer["iteration_s_low"] < answer["iteration_s"] < answer["iteration_s_high"]
        assert len(answer["stages"]) == 2
    assert answers[2]["iteration_s"] > answers[0]["iteration_s"]
    peaks = [answer["stages"][0]["peak_allocated_bytes"] for answer in answers]
    assert peaks[2] < peaks[0]


class Refusing:
    """Knows what it is asked; refuses plans of stages that recompute."""

    def __init__(self, workload: Workload, cluster: Cluster) -> None:
        self.predictor = SymbolicPredictor(workload=workload, cluster=cluster)
        self.asked: list[int] = []
        MADE.append(self)

    def predict_many(self, plans: Sequence[Plan]) -> Sequence[Prediction]:
        self.asked.append(len(plans))
        if any(stage.checkpointed_layers for plan in plans for stage in plan.stages):
            message = "cannot recompute"
            raise InputError(message)
        return self.predictor.predict_many(plans)


MADE: list[Refusing] = []


def test_plans_of_a_workload_are_predicted_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PREDICTORS, "symbolic", Refusing)
    plain = ("checkpointed_layers: 4, ", "")
    paths = [
        plan_file(tmp_path, f"{model}-{number}.yaml", plain, ("gpt3-2.7b", model))
        for number in range(3)
        for model in ("gpt3-2.7b", "llama-2.7b")
    ]
    MADE.clear()
    answers = predicted([Path(path) for path in paths])
    assert [str(answer.path) for answer in answers] == paths
    assert [made.asked for made in MADE] == [[3], [3]]


def test_a_plan_that_is_refused_is_told_from_those_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PREDICTORS, "symbolic", Refusing)
    plain = ("checkpointed_layers: 4, ", "")
    names = ("a.yaml", "b.yaml", "c.yaml")
    changes = (plain,), (), (plain,)
    paths = [plan_file(tmp_path, name, *own) for name, own in zip(names, changes, strict=True)]
    answers = predicted([Path(path) for path in paths])
    assert [answer.error for answer in answers] == ["", f"{paths[1]}: cannot recompute", ""]
    assert [answer.prediction is None for answer in answers] == [False, True, False]


def test_a_bad_plan_does_not_stop_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [
        plan_file(tmp_path, "bad.yaml", ("layers: 16", "layers: 15")),
        plan_file(tmp_path, "good.yaml"),
        str(tmp_path / "missing.yaml"),
    ]
    assert run(predict.main, [*paths, "--json"]) == 1
    bad, good, missing = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert "plan.stages: layers sum to 30, but the model has 32" in bad["error"]
    assert good["iteration_s"] > 0
    assert "missing.yaml" in missing["error"]


def test_figures_of_a_datasheet_alone_are_predicted_and_their_lender_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = tmp_path / "bare.yaml"
    bare.write_text(
        "name: bare\n"
        "gpu: {memory_gib: 22, memory_gbytes_per_s: 300, "
        "peak_tflops: {fp16: 121, bf16: 121, fp32: 30}}\n"
        "node: {gpus: 8, host_memory_gib: 384, intra_node_gbytes_per_s: 30, "
        "inter_node_gbytes_per_s: 12, host_link_gbytes_per_s: 30}\n"
        "provenance: {gpu: {kind: datasheet, source: a}, node: {kind: datasheet, source: b}}\n",
        encoding="utf-8",
    )
    path = plan_file(tmp_path, "plan.yaml", ("hardware: l4-24gb", "hardware: bare.yaml"))
    assert run(predict.main, [path]) == 0
    told = "note: nobody measured bare: rates of l4-24gb, scaled by datasheets"
    assert told in capsys.readouterr().out


def test_words_say_what_fits_and_what_the_bounds_tell_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fast = plan_file(tmp_path, "fast.yaml")
    slow = plan_file(
        tmp_path,
        "slow.yaml",
        ("layers: 16, data", "layers: 16, checkpointed_layers: 16, data"),
        ("checkpointed_layers: 4", "checkpointed_layers: 16"),
    )
    near = plan_file(tmp_path, "near.yaml", ("checkpointed_layers: 4", "checkpointed_layers: 5"))
    assert run(predict.main, [slow, fast, near]) == 0
    out = capsys.readouterr().out
    assert out.count("fits 21.7 GiB: a GPU's 22.0 less 0.3 outside of torch's allocator\n") == 3
    assert f"{fast} is" in out
    beyond, within = (next(x for x in out.splitlines() if f"than {p}," in x) for p in (slow, near))
    assert beyond.endswith("beyond what the bounds leave open")
    assert within.endswith("within what the bounds leave open")


def test_what_a_slower_network_would_cost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = plan_file(tmp_path, "plan.yaml")

    def seconds(*options: str) -> float:
        assert run(predict.main, [path, *options, "--json"]) == 0
        return float(json.loads(capsys.readouterr().out)["iteration_s"])

    assert seconds("--intra-node-gbytes-per-s", "2") > 1.05 * seconds()
    # It is one node.
    assert seconds("--inter-node-gbytes-per-s", "2") == seconds()
    assert run(predict.main, [path, "--intra-node-gbytes-per-s", "0"]) == 2
    assert "--intra-node-gbytes-per-s: 0.0" in capsys.readouterr().err


def test_without_arguments_the_example_is_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(predict.main, []) == 0
    assert "gpt3-2.7b-4xl4.yaml" in capsys.readouterr().out


def test_iterations_that_something_disturbs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = plan_file(tmp_path, "plan.yaml")

    def played(variability: str) -> dict[str, Any]:
        options = ("--simulator", "events", "--variability", variability, "--json")
        assert run(predict.main, [path, *options]) == 0
        answer: dict[str, Any] = json.loads(capsys.readouterr().out)
        return answer

    usual = played("clock_factor=1")
    assert usual["disturbed"]["mean_s"] == usual["iteration_s"]
    slow = played("slow_stage=1,slow_stage_factor=2")["disturbed"]
    assert slow["by"] == {"slow_stage": 1, "slow_stage_factor": 2.0}
    assert slow["samples"] == 1
    assert slow["mean_s"] > 1.5 * usual["iteration_s"]
    shaken = played("jitter=0.2,samples=20,seed=4")["disturbed"]
    assert (shaken["samples"], shaken["seed"]) == (20, 4)
    assert shaken["q05_s"] < shaken["q50_s"] < shaken["q95_s"]
    assert shaken == played("jitter=0.2,samples=20,seed=4")["disturbed"]


def test_what_disturbs_is_told_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = plan_file(tmp_path, "plan.yaml")

    def told(variability: str) -> str:
        options = ("--simulator", "events", "--variability", variability)
        assert run(predict.main, [path, *options]) == 0
        (line,) = re.findall("disturbed by .*", capsys.readouterr().out)
        return str(line)

    assert re.fullmatch(
        r"disturbed by nothing: [\d.]+ s an iteration, \+0.0%", told("slow_links_factor=1")
    )
    assert re.fullmatch(
        r"disturbed by jitter 0.1, slow_links_factor 2: [\d.]+ s an iteration, \+[\d.]+%; "
        r"90 % of 9 take [\d.]+ to [\d.]+ s",
        told("jitter=0.1,slow_links_factor=2,samples=9"),
    )


@pytest.mark.parametrize(
    ("variability", "status", "message"),
    [
        ("jiter=1", 2, "--variability 'jiter' is unknown: did you mean 'jitter'?"),
        ("jitter", 2, "--variability 'jitter' gives no number to jitter: write it as jitter=0.1"),
        ("jitter=-1", 2, "--variability jitter: -1.0 is too small: give"),
        ("jitter=1,samples=0", 2, "--variability samples: 0 is too small: give"),
        ("slow_stage_factor=2", 2, "--variability slow_stage_factor: 2 needs slow_stage: give"),
        ("slow_stage=9", 1, "--variability slow_stage: 9 is not a stage of the plan: give 0 to 1"),
    ],
)
def test_what_cannot_disturb_is_refused(
    variability: str, status: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--simulator", "events", "--variability", variability)
    assert run(predict.main, [plan_file(tmp_path, "plan.yaml"), *options]) == status
    assert message in capsys.readouterr().err


def test_only_what_is_played_can_be_disturbed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(predict.main, ["--variability", "jitter=0.1"]) == 2
    assert "--variability: works only with --simulator events" in capsys.readouterr().err


def test_a_breakdown_adds_up_to_the_iteration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, played = plan_file(tmp_path, "plan.yaml"), str(tmp_path / "played.yaml")
    plan, work, cluster, *_ = CASES["sends of both directions queue"]
    dump_job(Job(workload=work, cluster=cluster, plan=plan), played)
    for given in (path, played):
        assert run(predict.main, [given, "--breakdown", "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)
        found = answer["breakdown"]
        for parts in (found["parts"], *found["stages"]):
            assert sum(parts.values()) == pytest.approx(answer["iteration_s"], rel=1e-9)
    assert run(predict.main, [path, "--json"]) == 0
    assert "breakdown" not in json.loads(capsys.readouterr().out)


def test_a_table_tells_the_parts_that_are_not_negligible(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = plan_file(tmp_path, "plan.yaml")
    assert run(predict.main, [path, "--breakdown"]) == 0
    lines = capsys.readouterr().out.splitlines()
    first = next(place for place, line in enumerate(lines) if "where a GPU's time goes" in line)
    assert "stage 0, the busiest: s" in lines[first]
    last = next(place for place, line in enumerate(lines) if line.startswith("the iteration"))
    parts = lines[first + 1 : last]
    shares = [float(share) for line in parts for share in re.findall(r"([\d.]+)%", line)]
    assert sum(shares) == pytest.approx(100, abs=0.05 * 15)
    assert not any("offloading" in line for line in parts)
    assert len(parts) == len(shares)


def test_only_the_closed_form_is_broken_down(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(predict.main, ["--breakdown", "--simulator", "events"]) == 2
    assert "leave out --simulator or --breakdown" in capsys.readouterr().err


def test_a_sentence_sums_up_what_is_small() -> None:
    small = dict.fromkeys(PARTS, 0.01)
    parts = StepParts(**{**small, "arithmetic_s": 0.55, "sends_s": 0.32})
    assert sentence(Breakdown(parts=parts, busiest_stage=0, stages=(parts,))) == (
        "Where a GPU's time goes: 54% the model's arithmetic at the peak rate, "
        "32% sends between stages, 14% the rest."
    )


@pytest.mark.parametrize(("memory_gib", "fits"), [(22, True), (17, False), (15, False)])
def test_the_stage_that_binds_memory_is_named(
    memory_gib: float, fits: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    memory = ("gpus_per_node: 4", f"gpus_per_node: 4, memory_gib: {memory_gib}")
    # The first stage recomputes all of its blocks, the last one none.
    larger = ("checkpointed_layers: 4", "checkpointed_layers: 16")
    path = plan_file(tmp_path, "a.yaml", memory, larger)
    ((answer,), text) = predicted([Path(path)]), _told(path, capsys)
    assert answer.prediction is not None
    assert answer.job is not None
    assert answer.prediction.fits == fits
    reserved = [stage.peak_reserved_bytes for stage in answer.prediction.stages]
    room = room_bytes(answer.job.cluster)
    assert reserved[1] > reserved[0]
    takes = f"it takes {reserved[1] / GIB_BYTES:.2f} of {room / GIB_BYTES:.2f} GiB"
    rest = f"{abs(room - reserved[1]) / GIB_BYTES:.2f}"
    if fits:
        assert f"\nstage 1 binds memory: {takes}, {rest} are left; most in the backward" in text
    else:
        lacking = sum(size > room for size in reserved)
        assert f"\nstage 1 lacks {rest} GiB: {takes}" in text
        assert ("2 stages in all lack memory" in text) == (lacking == 2)
    assert "of host memory" not in text


def test_a_node_that_lacks_host_memory_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    offloads = ("checkpointed_layers: 4", "checkpointed_layers: 4, offload: {optimizer: 1.0}")
    path = plan_file(
        tmp_path, "a.yaml", offloads, ("gpus_per_node: 4", "gpus_per_node: 4, host_memory_gib: 4")
    )
    ((answer,), text) = predicted([Path(path)]), _told(path, capsys)
    assert answer.prediction is not None
    held = sum(stage.host_bytes for stage in answer.prediction.stages)
    assert f"\nthe fullest node lacks {held / GIB_BYTES - 4:.2f} GiB of host memory\n" in text


def _told(path: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert run(predict.main, [path]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("tasks", "samples"), [(1, 100), (20_000, 100), (40_000, 50), (10**6, 20), (10**8, 20)]
)
def test_fewer_long_iterations_are_played(tasks: int, samples: int) -> None:
    assert samples_of(tasks) == samples


def test_the_iterations_of_a_disturbed_plan_are_counted_on_standard_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer of a long one, where nobody says how many, and as many as are asked for."""
    monkeypatch.setattr(disturbed, "MOST_TASKS", 1)
    path = plan_file(tmp_path, "a.yaml")
    for given, count in (("", 20), (",samples=3", 3)):
        options = ["--simulator", "events", "--variability", f"jitter=0.1{given}", "--json"]
        assert run(predict.main, [path, *options]) == 0
        captured = capsys.readouterr()
        assert json.loads(captured.out)["disturbed"]["samples"] == count
        assert f"iterations played: {count} of {count}\n" in captured.err
    assert run(predict.main, [path, "--simulator", "events", "--variability", "slow_stage=0"]) == 0
    assert capsys.readouterr().err == ""


def test_a_timeline_without_a_place_is_refused_before_anything_is_played(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predictions, "predicted", None)
    (tmp_path / "file").touch()
    there = tmp_path / "file" / "drawn"
    options = ["--simulator", "events", "--timeline", str(there)]
    assert run(predict.main, [plan_file(tmp_path, "a.yaml"), *options]) == 2
    problem = f"--timeline {there}: cannot be written: Not a directory: give another folder"
    assert capsys.readouterr().err == f"error: {problem}\n"


def test_every_kind_of_task_has_a_colour_of_its_own() -> None:
    assert set(TASK_COLOURS) == set(KINDS)
    assert len(set(TASK_COLOURS.values())) == len(KINDS)


@pytest.mark.parametrize("options", [[], ["--json"]])
@pytest.mark.parametrize("change", ["malformed", "mapping for a name", "missing"])
def test_a_single_malformed_plan_is_wrong_usage(
    tmp_path: Path, change: str, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = plan_file(
        tmp_path, "bad.yaml", ("  micro_batches: 4", "  engine: {}\n  micro_batches: 4")
    )
    if change == "malformed":
        Path(path).write_text("plan: [")
    elif change == "missing":
        Path(path).unlink()
    assert run(predict.main, [path, *options]) == 2
    captured = capsys.readouterr()
    error = json.loads(captured.out)["error"] if options else captured.err.removeprefix("error: ")
    assert error.startswith(f"{path}: ")
    if change == "mapping for a name":
        assert "plan.engine: {} is unknown: give a name such as mistlab" in error
    assert run(predict.main, [path, path, *options]) == 1
