"""Counts of slots against a walk through the layers one by one, and the tables of slots."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from mistlab.core.distinct import NOTHING, slot_counts
from mistlab.engines.engine import ENGINES
from mistlab.graph.layer_types import LayerTypes
from mistlab.graph.treatments import TREATMENTS
from mistlab.machine.slowdowns import STREAMS
from mistlab.plan.dimensions import counts_of_blocks
from mistlab.schedule.slots import PHASES

STAGES = [
    (layers, checkpointed, embedding, head, first)
    for layers, checkpointed, embedding, head, first in product(
        (1, 2, 3, 5), (0, 1, 2), (0, 1), (0, 1), (0, 1)
    )
    if checkpointed <= layers
]
PATTERNS = (("block",), ("block", "experts"), ("block", "block", "experts"))


def walked(types: list[int], depth: int) -> Counter:
    def at(place: int) -> int:
        return types[place] if 0 <= place < len(types) else NOTHING

    slots = Counter(
        (at(place - depth), at(place), at(place + depth))
        for place in range(-depth, len(types) + depth)
    )
    slots.pop((NOTHING, NOTHING, NOTHING), None)
    return slots


def types_of(pattern: tuple[str, ...], stage: tuple[int, ...]) -> list[int]:
    layers, checkpointed, embedding, head, first = stage
    kinds = list(dict.fromkeys(pattern))
    ways = 1 + len(TREATMENTS)
    blocks = [
        1 + ways * kinds.index(pattern[(first + block) % len(pattern)]) for block in range(layers)
    ]
    for block in range(layers - checkpointed, layers):
        blocks[block] += 1
    return [0] * embedding + blocks + [1 + ways * len(kinds)] * head


@pytest.mark.parametrize("pattern", PATTERNS, ids=len)
@pytest.mark.parametrize("depth", [0, 1, 2, 3, 7])
def test_counts_are_those_of_a_walk(depth: int, pattern: tuple[str, ...]) -> None:
    kinds, counts = slot_counts(*LayerTypes.of(pattern).runs(columns_of(STAGES)), depth)
    for stage, column in zip(STAGES, counts.T, strict=True):
        rows = zip(map(tuple, kinds.tolist()), column, strict=True)
        found = Counter({kind: int(count) for kind, count in rows if count})
        assert found == walked(types_of(pattern, stage), depth), stage


def columns_of(stages: Sequence[tuple[float, ...]]) -> dict[str, np.ndarray]:
    names = ("layers", "checkpointed_layers", "has_embedding", "has_head", "first_block")
    others = {name: np.zeros(len(stages), int) for name in counts_of_blocks()}
    return {**others, **dict(zip(names, map(np.array, zip(*stages, strict=True)), strict=True))}


def test_broken_numbers_of_layers_lie_between_whole_ones() -> None:
    stages = [(layers, 1, 1, 1, 0) for layers in (2.0, 2.5, 3.0)]
    _, counts = slot_counts(*LayerTypes.of(("block",)).runs(columns_of(stages)), 0)
    assert counts[:, 1] == pytest.approx((counts[:, 0] + counts[:, 2]) / 2)


@pytest.mark.parametrize("engine", ["mistlab", "megatron", "deepspeed"])
@pytest.mark.parametrize("overlaps", [False, True])
def test_every_table_computes_and_steps(engine: str, overlaps: bool) -> None:
    template = ENGINES[engine].template(overlap_communication=overlaps)
    assert set(template.phases) == set(PHASES)
    for phase, kind in (("first_forward", "F"), ("forward", "F"), ("backward", "B")):
        assert [task.kind for task in template.phases[phase]].count(kind) == 1
    assert sum(task.kind == "S" for tasks in template.phases.values() for task in tasks) == 1
    assert {task.stream for tasks in template.phases.values() for task in tasks} <= set(STREAMS)


def test_the_overlapped_table_is_the_published_one() -> None:
    phases = ENGINES["mistlab"].template().phases
    written = {
        phase: {
            stream: {
                f"{task.kind}{task.direction or ''} {task.place}"
                for task in tasks
                if task.stream == stream
            }
            for stream in STREAMS
        }
        for phase, tasks in phases.items()
    }
    assert written["first_forward"] == {
        "compute": {"S ahead", "F here"},
        "gpu_to_gpu": {"U ahead"},
        "host_to_device": {"G< ahead", "O< ahead"},
        "device_to_host": {"O> here", "P> here", "A> behind"},
    }
    assert written["forward"] == {
        "compute": {"F here"},
        "gpu_to_gpu": {"U ahead"},
        "host_to_device": {"P< ahead"},
        "device_to_host": {"A> behind"},
    }
    assert written["backward"] == {
        "compute": {"B here"},
        "gpu_to_gpu": {"U ahead", "R behind"},
        "host_to_device": {"P< ahead", "G< ahead", "A< ahead"},
        "device_to_host": {"G> behind"},
    }


def test_an_engine_s_sends_are_those_of_its_slot_tables() -> None:
    template = replace(ENGINES["megatron"], sends="blocking").template()
    assert template.sends == "blocking"
    assert template.phases == ENGINES["megatron"].template().phases
