"""The order in which a pipeline's stages take micro-batches, as actions that print and parse back.

1F1B (Narayanan et al. 2019): each stage runs ahead by as many forwards as there are stages after
it, then alternates. GPipe (Huang et al. 2019): all forwards, then all backwards.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Literal

from mistlab.schedule.slot_table import Action
from mistlab.values.errors import InputError

Order = Literal["1f1b", "gpipe"]
StageOrder = tuple[Action, ...]


def in_flight(stage: int, num_stages: int, micro_batches: int) -> int:
    """Micro-batches whose activations a stage of a 1F1B pipeline holds at once."""
    return min(micro_batches, num_stages - stage)


def pipeline_order(
    num_stages: int, micro_batches: int, order: Order = "1f1b"
) -> tuple[StageOrder, ...]:
    """What each stage runs, in order: forwards and backwards of whole micro-batches.

    >>> [str(action) for action in pipeline_order(2, 3)[0]]
    ['0Fm0', '0Fm1', '0Bm0', '0Fm2', '0Bm1', '0Bm2']
    """
    of_stage = _ORDERS[order]
    return tuple(of_stage(stage, num_stages, micro_batches) for stage in range(num_stages))


def most_in_flight(actions: Sequence[Action]) -> int:
    """The most micro-batches that have run forward and not yet backward, at any time."""
    held = most = 0
    for action in actions:
        held += {"F": 1, "B": -1}.get(action.kind, 0)
        most = max(most, held)
    return most


def to_text(stages: Sequence[StageOrder]) -> str:
    """A line a stage, actions separated by spaces."""
    return "".join(f"{' '.join(map(str, actions))}\n" for actions in stages)


def from_text(text: str) -> tuple[StageOrder, ...]:
    """The stages that ``to_text`` printed."""
    stages = []
    for number, line in enumerate(text.splitlines()):
        actions = tuple(Action.parse(word) for word in line.split())
        strangers = [str(action) for action in actions if action.stage != number]
        if strangers:
            message = f"line {number + 1}: {strangers[0]} is not of stage {number}: move it"
            raise InputError(message)
        stages.append(actions)
    return tuple(stages)


def _one_forward_one_backward(stage: int, num_stages: int, micro_batches: int) -> StageOrder:
    ahead = in_flight(stage, num_stages, micro_batches)
    forwards = [_action(stage, "F", m) for m in range(micro_batches)]
    backwards = [_action(stage, "B", m) for m in range(micro_batches)]
    # After the forwards that run ahead, one of each until the forwards are used up.
    pairs = zip(backwards, forwards[ahead:], strict=False)
    remaining = backwards[micro_batches - ahead :]
    return (*forwards[:ahead], *chain.from_iterable(pairs), *remaining)


def _all_forwards_then_backwards(stage: int, num_stages: int, micro_batches: int) -> StageOrder:
    assert stage < num_stages
    return tuple(_action(stage, kind, m) for kind in ("F", "B") for m in range(micro_batches))


def _action(stage: int, kind: Literal["F", "B"], micro_batch: int) -> Action:
    return Action(stage=stage, kind=kind, micro_batch=micro_batch)


_ORDERS: Mapping[Order, Callable[[int, int, int], StageOrder]] = {
    "1f1b": _one_forward_one_backward,
    "gpipe": _all_forwards_then_backwards,
}
