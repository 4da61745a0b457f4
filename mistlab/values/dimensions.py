"""Dimensions: what a plan chooses for each of its stages, one row of a table for each choice.

A row says how the choice is called in plan files and in expressions, which numbers it may be, how
people say it, and which tasks and states it changes. Stages of plans, columns of candidates, spaces
and searchers take their choices from the table: a dimension is added by adding its row.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from mistlab.values.errors import refuse
from mistlab.values.value import Metadata, bounded, checked_number, ratio

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

States = TypeVar("States", bound="DataclassInstance")

# How blocks are treated and how many there are; GPUs, and the sequences of each; all the rest.
Part = Literal["layers", "mesh", "savings"]
# From the values of a dimension, numbers or a symbol, to what a quantity is multiplied with.
Factor = Callable[[Any], Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Dimension:
    """A choice of a stage; its key in ``DIMENSIONS`` is the name of its column.

    ``path`` is where a stage of a plan file has it, where that is not its name; ``symbol`` stands
    for it in expressions, those of layer graphs where it ``is_size``. A stage that does not say has
    the ``default``; without one every stage must say. With ``is_ratio`` it is a share of a whole,
    without a whole number. A choice ``shared_by`` the ranks of a group means nothing to one rank.

    ``amount`` and ``noun`` say a value: "ZeRO-2", "3" of "blocks recomputed". ``label`` is its
    short name in searchers' choices.

    ``of_tasks`` multiplies what a kind of task of the slot table moves (U, R, P, G, O, A) or takes
    (F, B, S); ``of_states`` multiplies bytes a parameter: of a weight, a gradient, or the optimizer
    (fields of ``mistlab.engines.memory.EngineMemory``).
    """

    part: Part
    path: str = ""
    symbol: str = ""
    is_size: bool = False
    is_ratio: bool = False
    minimum: float = 0
    maximum: float | None = None
    default: float | None = None
    shared_by: str = ""
    label: str = ""
    amount: str = "{}"
    noun: str = ""
    of_tasks: Mapping[str, Factor] = field(default_factory=dict)
    of_states: Mapping[str, Factor] = field(default_factory=dict)

    @property
    def numbers(self) -> Metadata:
        """Where its numbers lie: metadata of a field."""
        return ratio() if self.is_ratio else bounded(minimum=self.minimum, maximum=self.maximum)

    def number(self, value: float) -> float:
        """A value from a column as Python's own number."""
        return float(value) if self.is_ratio else int(value)


def _offloaded(symbol: str, kind: str, task: str) -> Dimension:
    return Dimension(
        part="savings",
        path=f"offload.{kind}",
        symbol=symbol,
        is_ratio=True,
        maximum=1,
        default=0.0,
        label=kind,
        amount="{:.1%}",
        noun=f"of {kind} offloaded",
        of_tasks={task: _as_it_is},
    )


def _as_it_is(ratio: Any) -> Any:
    return ratio


# In the order of columns. Those of one part are chosen, and listed in reports, in this order.
DIMENSIONS: dict[str, Dimension] = {
    "layers": Dimension(part="layers", symbol="L", minimum=1),
    "data_parallel": Dimension(part="mesh", symbol="dp", minimum=1),
    "tensor_parallel": Dimension(part="mesh", symbol="tp", is_size=True, minimum=1),
    "micro_batch": Dimension(part="mesh", symbol="b", is_size=True, minimum=1),
    "zero": Dimension(
        part="savings", symbol="z", maximum=3, default=0, shared_by="gather", amount="ZeRO-{}"
    ),
    "checkpointed_layers": Dimension(
        part="layers", symbol="c", default=0, label="checkpointed", noun="blocks recomputed"
    ),
    "offload_weights": _offloaded("ww", "weights", "P"),
    "offload_gradients": _offloaded("wg", "gradients", "G"),
    "offload_optimizer": _offloaded("wo", "optimizer", "O"),
    "offload_activations": _offloaded("wa", "activations", "A"),
}
BUILT_IN = tuple(DIMENSIONS)


def names_of(part: Part) -> tuple[str, ...]:
    """The dimensions of a part, in the table's order."""
    return _names_of(part, tuple(DIMENSIONS.values()))


def counts_of_blocks() -> tuple[str, ...]:
    """The dimensions that say how many of a stage's blocks are treated in some way."""
    return names_of("layers")[1:]


@cache
def _names_of(part: Part, _: tuple[Dimension, ...]) -> tuple[str, ...]:
    # Asked for with every stage of a plan: worked out again when rows have changed.
    return tuple(name for name, row in DIMENSIONS.items() if row.part == part)


def added() -> tuple[str, ...]:
    """The dimensions beyond those that stages of plans have as fields."""
    if len(DIMENSIONS) == len(BUILT_IN):
        return ()
    return tuple(name for name in DIMENSIONS if name not in BUILT_IN)


def label_of(name: str) -> str:
    """The short name of a dimension."""
    return DIMENSIONS[name].label or name


def amount_words(name: str, value: float) -> str:
    """A value of a dimension without its noun: "ZeRO-2", "12.5%"."""
    return DIMENSIONS[name].amount.format(value)


def change_words(name: str, now: float, then: float) -> str:
    """Another value of a dimension: "2 instead of 3 blocks recomputed"."""
    noun = DIMENSIONS[name].noun
    return f"{amount_words(name, then)} instead of {amount_words(name, now)} {noun}".rstrip()


def checked_value(name: str, value: object) -> float:
    """A value of an added dimension as a number; raises ``FieldError`` for any other."""
    if name not in added():
        refuse(name, f"is no dimension of stages: add its row, or give {', '.join(BUILT_IN)}")
    row = DIMENSIONS[name]
    return checked_number(name, value, row.numbers, is_whole=not row.is_ratio)


def checked_others(others: Mapping[str, object]) -> tuple[tuple[str, float], ...]:
    """Values of added dimensions, checked and in order; those that are the default are left out."""
    checked = [(name, checked_value(name, value)) for name, value in sorted(others.items())]
    return tuple(pair for pair in checked if pair[1] != DIMENSIONS[pair[0]].default)


def states_as_changed(memory: States, value: Callable[[str], Any]) -> States:
    """Bytes a parameter as dimensions change them, given their values: numbers or symbols."""
    changed: dict[str, Any] = {}
    for name, row in DIMENSIONS.items():
        for state, factor in row.of_states.items():
            changed[state] = changed.get(state, getattr(memory, state)) * factor(value(name))
    return replace(memory, **changed) if changed else memory
