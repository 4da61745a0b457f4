"""Workloads of the catalogue's models."""

from dataclasses import replace
from typing import Any

from mistlab import catalog
from mistlab.values.precision import Precision
from mistlab.values.workload import Attention, Workload


def workload_of(
    model: str,
    sequence_length: int,
    global_batch: int,
    precision: Precision = "fp16",
    *,
    attention: Attention = "flash",
    **changes: Any,
) -> Workload:
    """A workload of a model by its name, with some of the model's fields changed."""
    return Workload(
        model=replace(catalog.model(model), **changes),
        sequence_length=sequence_length,
        global_batch=global_batch,
        attention=attention,
        precision=precision,
    )
