"""Plan files of a model so small that tests train it, and what ``run_plan`` says of wrong ones."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from experiments import run_plan
from experiments.cli.commandline import run
from mistlab.core.files import write_yaml

MODEL = {"family": "gpt", "hidden": 32, "layers": 3, "heads": 4, "vocab": 97}
STAGE = {"layers": 3, "data_parallel": 1, "tensor_parallel": 1, "micro_batch": 2}
# Stages of a pipeline with the middle one on two ranks, and two stages of unlike sharding.
PIPELINE = ({"layers": 1}, {"layers": 2, "data_parallel": 2, "micro_batch": 1}, {"layers": 1})
UNLIKE = ({"layers": 1, "data_parallel": 2, "micro_batch": 1, "zero": 2}, {"layers": 2})


def plan_file(folder: Path, *stages: Mapping[str, Any], **workload: Any) -> Path:
    """A plan of four sequences a step, in two micro-batches."""
    work = {
        "model": MODEL,
        "sequence_length": 16,
        "global_batch": 4,
        "attention": "flash",
        "precision": "fp32",
        **workload,
    }
    made = [{**STAGE, **stage} for stage in stages or ({},)]
    ranks = sum(one["data_parallel"] * one["tensor_parallel"] for one in made)
    content = {
        "workload": work,
        "cluster": {"hardware": "l4-24gb", "nodes": 1, "gpus_per_node": ranks},
        "plan": {"micro_batches": 2, "stages": made},
    }
    path = folder / f"plan-{len(list(folder.glob('plan-*')))}.yaml"
    write_yaml(content, path)
    return path


def refusal(capsys: pytest.CaptureFixture[str], status: int, *arguments: object) -> str:
    assert run(run_plan.main, [str(argument) for argument in arguments]) == status
    captured = capsys.readouterr()
    assert not captured.out
    return captured.err
