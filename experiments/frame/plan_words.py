"""A plan in words: a line for the whole, and one for each stage or run of equal stages."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from mistlab.schedule.orders import DEFAULT_ORDER
from mistlab.values.dimensions import (
    DIMENSIONS,
    OFFLOADS,
    RECOMPUTED,
    counts_of_blocks,
    dimension_words,
    names_of,
)
from mistlab.values.mesh import AXES, dimensions_of_axes
from mistlab.values.plan import Plan, StagePlan


def plan_words(plan: Plan) -> list[str]:
    """A plan, a line for the whole and one for each stage; stages that follow one another and are
    alike share a line."""
    stages = count_words(plan.num_stages, "stage")
    lines = [f"engine {plan.engine}, {stages}, {count_words(plan.micro_batches, 'micro-batch')}"]
    if plan.order != DEFAULT_ORDER:
        lines[0] += f", order {plan.order}"
    first = 0
    for run in runs_of(plan.stages):
        stage = plan.stages[run[0]]
        blocks = _blocks_from(first, stage.layers)
        if len(run) > 1:
            blocks = f"{count_words(stage.layers, 'block')} each"
        lines.append(f"{_called(run)}: {blocks}, {_stage_words(stage)}")
        first += stage.layers * len(run)
    return lines


def _blocks_from(first: int, count: int) -> str:
    """The blocks of a stage by their numbers."""
    if count == 0:
        return "no blocks"
    return f"block {first}" if count == 1 else f"blocks {first} to {first + count - 1}"


def _called(run: range) -> str:
    return f"stages {run[0]} to {run[-1]}" if len(run) > 1 else f"stage {run[0]}"


def _stage_words(stage: StagePlan) -> str:
    axes = (
        f"{degree} {axis.words}"
        for axis in reversed(AXES.values())
        if (degree := stage.degree(axis.dimension)) != DIMENSIONS[axis.dimension].default
    )
    parts = [
        f"{' x '.join(axes)} parallel",
        f"micro-batch {stage.micro_batch}",
        *(dimension_words(name, stage.value(name), stage.layers) for name in _of_mesh(stage)),
        *(dimension_words(name, stage.value(name), stage.layers) for name in _said(stage)),
    ]
    offloaded = [
        dimension_words(name, stage.value(name), stage.layers).removesuffix(" offloaded")
        for name in OFFLOADS
        if stage.value(name)
    ]
    parts.append(f"offloads {', '.join(offloaded)}" if offloaded else "offloads nothing")
    return ", ".join(parts)


def _of_mesh(stage: StagePlan) -> Iterator[str]:
    """The dimensions of a stage's mesh besides degrees and micro-batch, if not the default."""
    for name in names_of("mesh"):
        default = DIMENSIONS[name].default
        is_degree = name in dimensions_of_axes()
        if not is_degree and default is not None and stage.value(name) != default:
            yield name


def _said(stage: StagePlan) -> Iterator[str]:
    """The dimensions besides mesh and offloading that a stage's text says: ZeRO and recomputed
    blocks always, others if they are not the default."""
    for name in (*names_of("savings"), *counts_of_blocks()):
        is_default = stage.value(name) == DIMENSIONS[name].default
        if name not in OFFLOADS and (name in ("zero", RECOMPUTED) or not is_default):
            yield name


def runs_of(things: Sequence[object]) -> Iterator[range]:
    """Ranges of places in a sequence whose things are equal and follow one another."""
    first = 0
    for _, run in groupby(things):
        count = len([*run])
        yield range(first, first + count)
        first += count


def count_words(number: int, noun: str) -> str:
    """A number with its noun: ``1 stage``, ``4 stages``."""
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{plural if number != 1 else ''}"
