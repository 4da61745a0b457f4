"""What an export says of itself: exact in every figure, fitting, or no longer so."""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from experiments import export
from experiments.bench.problem import predicted
from experiments.cli.commandline import run
from experiments.interchange import fidelity
from experiments.interchange.fidelity import exported, fits, same_figures
from mistlab.core.values import InputError
from mistlab.export.target import read_back
from mistlab.export.targets import TARGETS
from mistlab.job.job import Job, dump_job, job_from_mapping
from mistlab.job.prediction import Prediction
from tests.mistlab.drawn_plans import drawn_jobs
from tests.mistlab.plans_of_today import job_of, jobs_of_today

pytestmark = pytest.mark.usefixtures("predicted_once")

MEGATRON = TARGETS["megatron"]
OFFLOADED = {"weights": 1.0, "gradients": 1.0, "optimizer": 1.0, "activations": 0.5}


def job_on(hardware: str, model: str, layers: list[int], **stage: Any) -> Job:
    """A pipeline on one node, a GPU a stage, near the end of its memory."""
    stages = [
        {"layers": own, "micro_batch": 1, "data_parallel": 1, "tensor_parallel": 1, **stage}
        for own in layers
    ]
    return job_from_mapping(
        {
            "workload": {
                "model": model,
                "sequence_length": 2048,
                "global_batch": 8,
                "attention": "flash",
                "precision": "bf16",
                "gradients": "16bit",
            },
            "cluster": {"hardware": hardware, "nodes": 1, "gpus_per_node": len(layers)},
            "plan": {"micro_batches": 8, "stages": stages},
        }
    )


def test_an_exact_export_costs_the_same_in_every_figure_and_fits_as_before() -> None:
    exact = inexact = 0
    for job in chain(drawn_jobs(12, seed=9), jobs_of_today(12, seed=4)):
        for name in ("megatron", "deepspeed", "accelerate"):
            made = exported(job, TARGETS[name])
            back = fidelity.predicted(read_back(TARGETS[name], made.text, made.found.job))
            if isinstance(made.given, InputError) or isinstance(back, InputError):
                continue
            exact += made.is_exact
            inexact += not made.is_exact
            if made.is_exact:
                assert back.iteration_s == pytest.approx(made.given.iteration_s, rel=1e-9)
                assert [stage.peak_reserved_bytes for stage in back.stages] == [
                    stage.peak_reserved_bytes for stage in made.given.stages
                ]
            assert made.no_longer_fits == (made.given.fits and not back.fits)
    assert exact > 2 < inexact


@pytest.mark.parametrize("figure", ["iteration_s", "mfu", "fits"])
def test_predictions_that_differ_in_a_figure_are_not_the_same(figure: str) -> None:
    first = predicted(job_of("llama3-8b"))
    assert isinstance(first, Prediction)
    assert same_figures(first, replace(first, notes=("another",)))
    value = getattr(first, figure)
    other = not value if figure == "fits" else value * (1 + 3e-9)
    assert not same_figures(first, replace(first, **{figure: other}))


def test_a_byte_of_a_stage_is_a_figure() -> None:
    first = predicted(job_of("llama3-8b", {}, {}))
    assert isinstance(first, Prediction)
    *others, last = first.stages
    more = replace(last, peak_reserved_bytes=int(last.peak_reserved_bytes * 1.001))
    assert not same_figures(first, replace(first, stages=(*others, more)))


def test_another_engine_is_not_exact_though_every_choice_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.yaml"
    for engine, status, words in (
        ("megatron", 0, "cost: said exactly under engine megatron "),
        ("mistlab", 1, "cost: every choice said, but under engine megatron "),
    ):
        dump_job(job_of("llama3-8b", engine=engine), path)
        assert run(export.main, [str(path), "--to", "megatron", "--strict"]) == status
        assert words in capsys.readouterr().err


def test_a_text_without_a_flag_is_not_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of("llama3-8b", {"zero": 1})
    assert exported(job, MEGATRON).is_exact

    def forgetful(of: Callable[[Job], str]) -> Callable[[Job], str]:
        return lambda one: of(one).replace("--use-distributed-optimizer ", "")

    made = exported(job, replace(MEGATRON, write=forgetful(MEGATRON.write)))
    assert not made.is_exact
    assert "from the exported text: it differs in zero" in str(made.found.remarks[-1])


def test_a_plan_that_does_not_fit_any_more_ends_with_a_status_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Llama 13B on two L4: Megatron-LM keeps weights and gradients on the GPU."""
    path = tmp_path / "plan.yaml"
    job = job_on("l4-24gb", "llama-13b", [20, 20], offload=OFFLOADED, checkpointed_layers=20)
    dump_job(job, path)
    assert run(export.main, [str(path), "--to", "megatron"]) == 3
    out, err = capsys.readouterr()
    assert out.startswith("torchrun ")
    told = err.splitlines()[-1]
    assert told.startswith("does not fit any more: stage 1 lacks ")
    assert "GiB: it takes " in told
    assert told.endswith("can say make it fit: exit status 3")
    assert run(export.main, [str(path), "--to", "megatron", "--strict", "--json"]) == 3
    answer = json.loads(capsys.readouterr().out)
    assert answer["no_longer_fits"] is True
    assert answer["fits"] == {"given": True, "nearest": False}
    assert answer["lacks"][0].startswith("stage 1 lacks ")


def test_a_form_that_fits_is_written_where_the_nearest_one_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_on("a100-40gb", "llama-7b", [8, 8, 8, 8])
    made = exported(job, TARGETS["accelerate"])
    assert fits(made.given)
    assert fits(made.near)
    (told, *_) = [str(each) for each in made.found.remarks if "so that the plan fits" in each.text]
    assert told.startswith("approximated: ")
    assert "without this change it lacks " in told
    back = predicted(read_back(made.target, made.text, made.found.job))
    assert fits(back)
    monkeypatch.setattr(fidelity, "STEPS", 0)
    assert exported(job, TARGETS["accelerate"]).no_longer_fits
    path = tmp_path / "plan.yaml"
    dump_job(job, path)
    assert run(export.main, [str(path), "--to", "accelerate"]) == 3
    assert "does not fit any more: " in capsys.readouterr().err


def test_a_plan_that_never_fitted_is_exported_without_that_status() -> None:
    made = exported(job_on("l4-24gb", "llama-13b", [20, 20]), MEGATRON)
    assert fits(made.given) is False
    assert not made.no_longer_fits
    assert fidelity.fits(made.near) is False
