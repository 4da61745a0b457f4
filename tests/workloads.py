"""Workloads of the catalogue's models."""

from dataclasses import replace
from typing import Any

from mistlab import catalog
from mistlab.engines.engine import Precision
from mistlab.plan.workload import Attention, Workload


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


def with_long_head(work: Workload) -> Workload:
    """A workload whose head takes about as long as one whose loss goes over its logits ten times,
    as when plans of tests were found: its vocabulary is 1.6 times as large."""
    model = replace(work.model, name="", vocab=work.model.vocab * 8 // 5)
    return replace(work, model=model)
