"""Turns the recorded operators of a layer into a layer graph with expressions for sizes."""

from collections.abc import Iterable, Sequence

import sympy
import torch
from torch import nn

from mistlab.symbolic.graph import (
    PHASES,
    LayerGraph,
    Operator,
    Parameter,
    Peak,
    Phase,
    SavedTensor,
    Shape,
)
from mistlab.symbolic.maximum import undominated
from runtime.models.sizes import Size
from runtime.sizes import expression_of
from runtime.tracing.recorder import Recorder, Step, Storage


def layer_graph(
    layer: str, recorder: Recorder, parameters: Iterable[tuple[str, nn.Parameter]], output: Size
) -> LayerGraph:
    """The graph of one layer; ``output`` is the layer's output in bytes."""
    steps = [step for step in recorder.steps if step.layer == layer]
    storages = [x for x in recorder.storages.values() if x.owner == layer]
    inputs = [expression_of(x.size_bytes) for x in storages if x.is_input]
    return LayerGraph(
        name=layer,
        operators=tuple(map(_operator, steps)),
        saved=tuple(_saved(x) for x in storages if x.kept_by is not None),
        parameters=tuple(Parameter(name=n, shape=_shape(p.shape)) for n, p in parameters),
        peaks=tuple(peak for phase in PHASES for peak in _peaks(phase, steps)),
        input_bytes=sympy.Add(*inputs),
        output_bytes=expression_of(output),
    )


def _operator(step: Step) -> Operator:
    return Operator(
        name=step.name,
        kind=step.kind,
        phase=step.phase,
        module=step.module,
        dtype=_name(step.dtype),
        inputs=tuple(map(_shape, step.inputs)),
        outputs=tuple(map(_shape, step.outputs)),
        flop=expression_of(step.flop),
        read_bytes=expression_of(step.read_bytes),
        written_bytes=expression_of(step.written_bytes),
    )


def _saved(storage: Storage) -> SavedTensor:
    return SavedTensor(
        module=storage.kept_by or "",
        shape=_shape(storage.shape),
        dtype=_name(storage.dtype),
        size_bytes=expression_of(storage.size_bytes),
        is_input=storage.is_input,
    )


def _peaks(phase: Phase, steps: Sequence[Step]) -> list[Peak]:
    candidates = (
        Peak(
            phase=phase,
            operator=step.name,
            size_bytes=sympy.Add(*map(expression_of, step.alive)),
        )
        for step in steps
        if step.phase == phase
    )
    return undominated(candidates, lambda peak: peak.size_bytes)


def _shape(sizes: Iterable[Size]) -> Shape:
    return tuple(map(expression_of, sizes))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
