"""Describes a plan: in a single line for tables, or in a line for the plan and one for each
stage.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from mistlab.plan.dimensions import (
    AXES,
    DIMENSIONS,
    OFFLOADS,
    brief_words,
    counts_of_blocks,
    dimension_words,
    dimensions_of_axes,
    names_of,
)
from mistlab.plan.made_fields import DEFAULT_ENGINE
from mistlab.plan.plan import Plan, StagePlan
from mistlab.schedule.orders import DEFAULT_ORDER


def plan_line(plan: Plan) -> str:
    """A plan in one line of text; different plans have different texts.

    Equal neighbouring stages share their words, and default values are left out.

    >>> stage = StagePlan(layers=8, data_parallel=2, tensor_parallel=1, micro_batch=1, zero=1)
    >>> plan_line(Plan(micro_batches=4, stages=(stage, stage)))
    '4 micro-batches: 2 x (8 blocks, 2 data x 1 tensor, micro-batch 1, ZeRO-1)'
    """
    head = [count_words(plan.micro_batches, "micro-batch")]
    if plan.engine != DEFAULT_ENGINE:
        head.append(f"engine {plan.engine}")
    if plan.order != DEFAULT_ORDER:
        head.append(f"order {plan.order}")
    if not plan.overlap_communication:
        head.append("nothing overlapped")
    parts = []
    for run in runs_of(plan.stages):
        stage_text = _stage_brief(plan.stages[run[0]])
        parts.append(f"{len(run)} x ({stage_text})" if len(run) > 1 else stage_text)
    return f"{', '.join(head)}: {'; '.join(parts)}"


def _stage_brief(stage: StagePlan) -> str:
    """A stage as a short text: parallel degrees, micro-batch size and ZeRO level always, other
    values if they are not the default.

    The number of blocks is first, the ZeRO level before all optional values, and offloading last.
    """
    rows = DIMENSIONS.items()
    blocks, *mesh = [name for name, row in rows if row.default is None]
    levels = [name for name, row in rows if row.is_told and row.part == "savings"]
    known = (blocks, *mesh, *levels)
    changed = [n for n, row in rows if n not in known and stage.value(n) != row.default]

    def brief(names: Iterable[str]) -> list[str]:
        return [brief_words(name, stage.value(name)) for name in names]

    degrees = [name for name in mesh if name in dimensions_of_axes()]
    parts = [
        *brief([blocks]),
        " x ".join(brief(degrees)),
        *brief(name for name in (*mesh, *levels, *changed) if name not in (*degrees, *OFFLOADS)),
    ]
    if offloaded := brief(name for name in OFFLOADS if name in changed):
        parts.append(f"offloads {', '.join(offloaded)}")
    return ", ".join(parts)


def plan_words(plan: Plan) -> list[str]:
    """A plan as text, with a line for the plan and one for each stage; consecutive equal stages
    share a line.
    """
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
    """The range of a stage's blocks in the model, as text: ``blocks 8 to 15``."""
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
        *(
            dimension_words(name, stage.value(name), stage.layers)
            for name in _mentioned_dimensions(stage)
        ),
    ]
    offloaded = [
        dimension_words(name, stage.value(name), stage.layers).removesuffix(" offloaded")
        for name in OFFLOADS
        if stage.value(name)
    ]
    parts.append(f"offloads {', '.join(offloaded)}" if offloaded else "offloads nothing")
    return ", ".join(parts)


def _mentioned_dimensions(stage: StagePlan) -> Iterator[str]:
    """The dimensions (besides degrees, micro-batch size and offload ratios) that a stage's text
    mentions: some always, such as ZeRO, others only if they are not the default.
    """
    for name in (*names_of("mesh"), *names_of("savings"), *counts_of_blocks()):
        row = DIMENSIONS[name]
        is_elsewhere = row.default is None or row.holder or name in dimensions_of_axes()
        if not is_elsewhere and (row.is_told or stage.value(name) != row.default):
            yield name


def runs_of(things: Sequence[object]) -> Iterator[range]:
    """The index ranges of consecutive equal items, such as equal stages of a plan."""
    first = 0
    for _, run in groupby(things):
        count = len([*run])
        yield range(first, first + count)
        first += count


def count_words(number: int, noun: str) -> str:
    """A number with its noun: ``1 stage``, ``4 stages``."""
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{plural if number != 1 else ''}"
