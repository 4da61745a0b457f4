"""Whether a plan fits: yes or no, what fills it, and a change that makes it fit."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments import predict, will_it_fit
from experiments.bench.problem import sure_words
from experiments.budget import will_it_fit as fitting
from experiments.budget.changes import single, together
from experiments.cli.command import EXAMPLE
from experiments.cli.commandline import run
from mistlab import catalog
from mistlab.job.job import dump_job, load_job
from mistlab.machine.cluster import Cluster
from simulators.symbolic import SymbolicPredictor

FITS = EXAMPLE.resolve()


def answer(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert run(will_it_fit.main, [*map(str, arguments), "--quick", "--json"]) == 0
    content: dict[str, Any] = json.loads(capsys.readouterr().out)
    return content


def test_a_plan_that_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, FITS, "--out", tmp_path)
    (row,) = found["rows"]
    assert found["fits"] is row["fits"] is True
    assert found["cheapest"] is None
    assert row["reserved_bytes"] <= row["room_bytes"]
    assert sum(row["memory"].values()) <= row["reserved_bytes"]
    assert not (tmp_path / "plan.yaml").exists()
    assert "Yes: the fullest GPU" in (tmp_path / "report.md").read_text(encoding="utf-8")
    assert f"experiments.will_it_fit {FITS}" in (tmp_path / "README.md").read_text()


def test_a_plan_that_fits_without_what_is_kept_free_does_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Three kinds of GPUs have more memory than these: each is tried with all changes.
    options = ["--hardware", "mi300x-192gb", "--keep-free-gib", "181"]
    found = answer(capsys, FITS, *options, "--out", tmp_path)
    asked, *others = found["rows"]
    assert found["fits"] is asked["fits"] is False
    assert all(row["fits"] == (row["reserved_bytes"] <= row["room_bytes"]) for row in others)
    page = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "GiB too much. Plans may take 6.7 GiB: a GPU's 188.0 less 0.3 outside of torch" in page
    assert sum(row["kind"] == "elsewhere" for row in others) > 3
    assert not any(row["change"].endswith("on 4 mi300x-192gb") for row in others)


def test_a_plan_is_asked_about_on_other_hardware_and_nothing_else_of_it_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = answer(capsys, FITS, "--hardware", "a100-40gb", "--out", tmp_path)
    assert found["rows"][0]["room_bytes"] > 35 * 2**30
    page = (tmp_path / "report.md").read_text(encoding="utf-8")
    # What was asked, defaults among it, stands before the verdict.
    assert page.index(
        "1 node of 4 a100-40gb; 8 sequences of 4,096 tokens a step, fp16"
    ) < page.index("Yes: the fullest GPU")
    # The hardware that is no option's default is the plan's.
    assert run(will_it_fit.main, [str(FITS), "--out", str(tmp_path / "own"), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["room_bytes"] < 22 * 2**30


@pytest.mark.parametrize(
    "words",
    [["--engine", "fsdp"], ["--gpus-per-node=4"], ["--stages", "1"], ["--precision", "fp32"]],
)
def test_options_that_a_plan_says_itself_are_refused(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(will_it_fit.main, [str(FITS), *words, "--out", str(tmp_path / "out")]) == 2
    option = words[0].partition("=")[0]
    assert (
        f"the plan file already determines {option}: leave these options out"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "out").exists()


def test_how_probable_it_is_that_a_plan_fits_grows_with_what_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = load_job(FITS)
    probabilities = []
    for memory_gib in (22.0, 16.1, 7.0):
        plan = tmp_path / f"{memory_gib}.yaml"
        dump_job(replace(job, cluster=replace(job.cluster, memory_gib=memory_gib)), plan)
        found = answer(capsys, plan, "--out", tmp_path / f"{memory_gib}")
        page = (tmp_path / f"{memory_gib}" / "report.md").read_text(encoding="utf-8")
        assert f"It fits with a probability of {found['fit_probability']:.0%} (90 % of" in page
        probabilities.append(found["fit_probability"])
    assert 0.7 < probabilities[0] < 0.95
    assert 0.3 < probabilities[1] < 0.6
    assert probabilities[2] < 0.05


@pytest.mark.parametrize("kept", ["5.7", "6.5"])
def test_commands_agree_how_probably_a_plan_fits_whatever_is_kept_free(
    kept: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is kept free is a margin that a run may take, so it changes what counts as a plan that
    fits and not how probably the plan runs.
    """

    def predicted(*options: str) -> dict[str, Any]:
        assert run(predict.main, [str(FITS), *options, "--json"]) == 0
        row: dict[str, Any] = json.loads(capsys.readouterr().out)
        return row

    freely = predicted()
    keeping = predicted("--keep-free-gib", kept)
    asked = answer(capsys, FITS, "--keep-free-gib", kept, "--out", tmp_path)
    assert keeping["fits"] == asked["fits"] == (kept == "5.7")
    for found in (keeping, asked):
        assert found["fit_probability"] == freely["fit_probability"]
    job = load_job(FITS)
    kept_job = replace(job, cluster=replace(job.cluster, keep_free_gib=float(kept)))
    prediction = SymbolicPredictor(workload=job.workload, cluster=kept_job.cluster).predict(
        job.plan
    )
    sentence = sure_words(kept_job, prediction)
    assert sentence.partition(":")[0] in (tmp_path / "report.md").read_text(encoding="utf-8")
    assert f", counting the {kept} GiB kept free as room" in sentence


def test_the_cheapest_change_fits_and_none_that_was_tried_is_faster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = answer(capsys, "--out", tmp_path)
    assert found["fits"] is False
    asked, *singles, cheapest = found["rows"]
    assert asked["reserved_bytes"] > asked["room_bytes"]
    assert cheapest["kind"] == "cheapest"
    assert cheapest["change"] == found["cheapest"]
    page = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert f"The plan is {tmp_path.name}/plan.yaml." in page
    job = load_job(tmp_path / "plan.yaml")
    predictor = SymbolicPredictor(workload=job.workload, cluster=job.cluster)
    prediction = predictor.predict(job.plan)
    assert prediction.fits
    assert prediction.iteration_s == pytest.approx(cheapest["iteration_s"])
    fitting = [row["iteration_s"] for row in singles if row["fits"]]
    assert min(fitting) >= cheapest["iteration_s"]
    pictures = {path.stem for path in tmp_path.glob("*.svg")}
    assert pictures == {"will_it_fit", "will_it_fit-changed"}


def test_what_no_change_here_makes_fit_needs_more_gpus(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("--gpus-per-node", "1", "--engine", "megatron")
    found = answer(capsys, *asked, "--out", tmp_path)
    assert found["fits"] is False
    assert found["cheapest"].startswith("on 4 l4-24gb, ")
    assert found["rows"][-1]["fits"]


@pytest.mark.parametrize(
    ("nodes", "gpus", "times", "larger"),
    [
        *((1, 1, 2, (1, 2)), (1, 1, 8, (1, 8)), (1, 1, 16, (2, 8))),
        *((1, 4, 8, (4, 8)), (2, 8, 2, (4, 8)), (1, 3, 4, (2, 6))),
    ],
)
def test_more_gpus_fill_the_nodes_first(
    nodes: int, gpus: int, times: int, larger: tuple[int, int]
) -> None:
    hardware = catalog.hardware("h100-80gb")
    cluster = Cluster(hardware=hardware, nodes=nodes, gpus_per_node=gpus)
    several = fitting._larger(cluster, times)
    assert (several.nodes, several.gpus_per_node) == larger


def test_as_many_gpus_of_smaller_nodes_are_on_more_nodes() -> None:
    eight = Cluster(hardware=catalog.hardware("h100-80gb"), nodes=1, gpus_per_node=8)
    there = fitting._as_many_gpus(eight, catalog.hardware("gh200-96gb"))
    assert there is not None
    assert (there.hardware.name, there.nodes, there.gpus_per_node) == ("gh200-96gb", 2, 4)
    six = replace(eight, gpus_per_node=6)
    assert fitting._as_many_gpus(six, catalog.hardware("gh200-96gb")) is None


def test_changes_of_a_pipeline_are_plans_that_can_be() -> None:
    job = load_job(FITS)
    plans = [one.job.plan for one in (*single(job), *together(job, 2))]
    assert len(plans) > 100
    assert job.plan not in plans
    for plan in plans:
        assert plan.layers == job.plan.layers
        assert plan.num_gpus == job.plan.num_gpus


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nope.yaml"], "nope.yaml: there is no such file"),
        (["--stages", "3"], "--stages 3 --tensor-parallel 1: their product 3 does not divide"),
        (["--stages", "40"], "--stages 40: gpt3-2.7b has only 32 blocks"),
        (["--stages", "0"], "--stages: 0 is too small"),
        (
            ["--micro-batch", "3"],
            "--global-batch 8: cannot be divided equally among 4 data-parallel",
        ),
        (["--zero", "4"], "--zero: 4 is too large"),
        (["--zero", "2", "--engine", "megatron"], "--zero: "),
        (["--checkpointed-layers", "-1"], "--checkpointed-layers: -1 is too small"),
        (["--model", "gpt3-2"], "--model: 'gpt3-2' is unknown"),
        (["--tensor-parallel", "-4"], "--tensor-parallel: -4 is too small"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert run(will_it_fit.main, [*arguments, "--out", str(out)]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


QLORA = (
    *("--model", "llama3-8b", "--hardware", "rtx-3090-24gb", "--gpus-per-node", "1"),
    *("--precision", "bf16", "--sequence-length", "2048", "--train", "lora"),
)


def test_a_training_that_fits_is_told_by_its_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = answer(capsys, *QLORA, "--out", tmp_path)
    assert found["fits"] is False
    assert found["otherwise"] == "adapters on 4 bits (--train lora --base 4bit)"
    page = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert f"Another training fits here: {found['otherwise']}. An iteration takes" in page
    # What is told is true: the options that it names make the plan fit.
    fitting = answer(capsys, *QLORA, "--base", "4bit", "--out", tmp_path)
    assert (fitting["fits"], fitting["otherwise"]) == (True, None)


def test_logits_in_32_bits_are_told_as_such(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = (*QLORA, "--base", "4bit", "--engine", "trainer", "--checkpointed-layers", "all")
    line = (*line, "--micro-batch", "2", "--out", tmp_path)
    answer(capsys, *line)
    page = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "all 32 blocks recomputed" in page
    (told,) = re.findall(r"([\d.]+) GiB of logits and temporaries are the logits of all", page)
    held = dict(re.findall(r"\| (logits|temporaries) +\| +([\d.]+) \|", page))
    # Of 4,096 tokens and 128,256 words: what is kept in 16 bits is a small part.
    assert float(held["logits"]) == pytest.approx(4096 * 128256 * 2 / 2**30, rel=0.01)
    assert float(told) > 4 * float(held["logits"])
    assert float(told) <= float(held["logits"]) + float(held["temporaries"])
    answer(capsys, *line, "--loss", "chunked")
    assert "logits of all" not in (tmp_path / "report.md").read_text(encoding="utf-8")


LONG_LORA = (
    *("--model", "llama3-8b", "--hardware", "rtx-4090-24gb", "--gpus-per-node", "2"),
    *("--sequence-length", "32768", "--global-batch", "4", "--train", "lora"),
)


def test_two_changes_of_the_training_are_told_if_they_are_faster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = answer(capsys, *LONG_LORA, "--out", tmp_path)
    assert asked["cheapest"] is not None
    assert asked["otherwise"] == (
        "a loss in chunks (--loss chunked) and adapters on 4 bits (--train lora --base 4bit) and "
        "all blocks recomputed"
    )
    # With the options that are named, the change of the plan makes it fit.
    answer(capsys, *LONG_LORA, "--loss", "chunked", "--base", "4bit", "--out", tmp_path)
    page = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert re.search(r"\| all blocks recomputed +\| yes ", page)


def test_a_slower_training_is_not_told() -> None:
    job = load_job(FITS)
    tight = replace(job, cluster=replace(job.cluster, keep_free_gib=15.0))
    other = fitting.trained_otherwise(tight, as_options=True)
    assert other is not None
    within_s = other.prediction.iteration_s
    assert fitting.trained_otherwise(tight, as_options=True, within_s=within_s) != other


def test_a_training_that_fits_is_told_by_the_fields_of_a_plan_file() -> None:
    job = load_job(FITS)
    tight = replace(job, cluster=replace(job.cluster, keep_free_gib=15.0))
    told = fitting.trained_otherwise(tight, as_options=False)
    assert told is not None
    assert told.prediction.fits
    assert "(workload: train: adapters" in told.words
    assert told.job.workload.train == "adapters"
