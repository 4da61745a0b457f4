"""The reference pages: their examples load, and they name every field."""

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from mistlab import catalog
from mistlab.core.files import parse_yaml
from mistlab.core.values import from_mapping
from mistlab.job.job import Job, job_from_mapping
from mistlab.job.prediction import (
    Breakdown,
    MemoryByClass,
    MemoryByPhase,
    Prediction,
    StagePrediction,
    StepParts,
)
from mistlab.machine.cluster import Cluster
from mistlab.machine.hardware import (
    Allocator,
    Compute,
    EngineCalibration,
    Gpu,
    GroupTransfers,
    Hardware,
    Line,
    MeasuredAt,
    Node,
    PeakTflops,
    Provenance,
    Rate,
    Source,
    Transfers,
)
from mistlab.machine.slowdowns import GroupSlowdowns, Interference, Slowdown
from mistlab.plan.plan import Offload, Plan, StagePlan
from mistlab.plan.workload import ModelSpec, Workload
from mistlab.stages.stage_batch import StageFigures

PAGES = Path(__file__).parents[2] / "docs" / "reference"
TYPES = {
    "plan-file.md": (Job, Workload, ModelSpec, Cluster, Plan, StagePlan, Offload),
    "json-output.md": (
        StageFigures,
        Prediction,
        StagePrediction,
        MemoryByClass,
        MemoryByPhase,
        Breakdown,
        StepParts,
    ),
    "hardware-file.md": (
        Hardware,
        Gpu,
        PeakTflops,
        Node,
        Interference,
        GroupSlowdowns,
        Slowdown,
        Line,
        GroupTransfers,
        Transfers,
        Compute,
        Rate,
        Allocator,
        EngineCalibration,
        MeasuredAt,
        Provenance,
        Source,
    ),
}


def text_of(page: str) -> str:
    return (PAGES / page).read_text(encoding="utf-8")


def examples(page: str) -> list[dict[str, Any]]:
    blocks = re.findall(r"^```yaml\n(.*?)^```", text_of(page), re.MULTILINE | re.DOTALL)
    return [parse_yaml(block, page) for block in blocks]


def test_the_plan_files_load() -> None:
    whole = [example for example in examples("plan-file.md") if "plan" in example]
    assert whole
    for example in whole:
        assert job_from_mapping(example).plan.stages


def test_the_models_load() -> None:
    models = [example["model"] for example in examples("plan-file.md") if "model" in example]
    assert models
    for model in models:
        assert ModelSpec.from_mapping(model).layers


def test_the_hardware_files_load() -> None:
    whole = [example for example in examples("hardware-file.md") if "gpu" in example]
    assert whole
    for example in whole:
        assert from_mapping(Hardware, example).name == example["name"]


@pytest.mark.parametrize(
    ("page", "name"),
    [
        (page, entry.name)
        for page, kinds in TYPES.items()
        for kind in kinds
        for entry in fields(kind)
    ],
)
def test_every_field_has_its_entry(page: str, name: str) -> None:
    """A field stands before the colon of an entry of a list."""
    heads = re.findall(r"^- (.*?): ", text_of(page).replace("\n  ", " "), re.MULTILINE)
    assert any(f"`{name}`" in head.partition(" (")[0] for head in heads)


@pytest.mark.parametrize(
    ("page", "names"),
    [("plan-file.md", catalog.model_names()), ("hardware-file.md", catalog.hardware_names())],
)
def test_the_catalogue_is_listed(page: str, names: tuple[str, ...]) -> None:
    assert [name for name in names if f"`{name}`" not in text_of(page)] == []
