"""What the row of a dimension says: its numbers, words, checks, and what it changes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from mistlab.engines.engine import Engine
from mistlab.values.value import Metadata, bounded, ratio
from mistlab.values.workload import Workload

# The parts of a stage's choices: numbers of blocks and their treatment; its GPUs, and the sequences
# of each; ways to save memory.
Part = Literal["layers", "mesh", "savings"]
# The steps in which a stage is checked against the rest of its job; each reports one problem.
Step = Literal["batch", "tensors", "experts", "states", "tokens"]
# Turns values of a dimension (numbers or a symbol) into a factor on a quantity.
Factor = Callable[[Any], Any]


class Setting(NamedTuple):
    """What a stage's values are checked against: its other values, its GPUs, and its job."""

    degree: Callable[[str], int]
    gpus: int
    gpus_per_node: int
    workload: Workload
    micro_batches: int


# Why a stage cannot have its value of a dimension in a setting; empty if it can.
Check = Callable[[Setting], str]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EngineLimit:
    """The fact of an engine that limits a dimension.

    ``runs`` gives the values that an engine runs, in a pipeline of several stages or not; None
    stands for all. ``why`` says, behind the engine's name, why others do not run; ``remedy`` stands
    for a list of those that do. Of values that are levels (``is_level``) a space needs one that is
    low enough, of others each has to run.
    """

    runs: Callable[[Engine, bool], tuple[float, ...] | None]
    why: Callable[[Engine, bool], str]
    remedy: str = ""
    is_level: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Dimension:
    """A choice of a stage; its key in ``DIMENSIONS`` is the name of its column.

    ``path`` is its place in a stage of a plan file, if this is not its name. ``symbol`` stands for
    it in expressions, also in those of layer graphs if it ``is_size``. If it ``chooses_graph``, a
    stage with the value 1 runs other graphs of its layers. A stage without a value has the
    ``default``; if there is none, every stage must have a value. Spaces list its values unless
    another field of theirs chooses it (``is_listed``), and this package's runtime trains by values
    besides the default if it ``is_trained``, or counts blocks. With ``is_ratio`` it is a
    share of a whole, otherwise a whole number. It is the degree of the ``axes`` of
    a mesh (``mistlab.values.mesh``). A choice ``shared_by`` the ranks of a group has no
    effect if the group has one rank; where blocks have experts, whose states other ranks share, the
    group ``experts_shared_by`` has to have one rank, too.

    ``amount`` and ``noun`` put a value into words: "ZeRO-2", or "3" and "blocks recomputed"; or
    each value has its ``words``. ``brief`` does the same in the one line of a plan, if not like
    this; values that ``is_told`` are told at length even if they are the default.
    ``label`` is the dimension's short name in searchers' choices.

    ``checks`` tell by step why a stage cannot have its value; a search tries a value that
    ``is_tried`` alone. A coarse look divides ratios into ``coarse_parts``; a step between choices
    counts ``box_weight`` beside steps of others where a proof splits boxes. ``limit`` is the fact
    of engines that limits it.

    ``of_tasks`` has factors by kind of task, on the bytes that it moves (U, R, P, G, O, A) or on
    its time (F, B, S). ``of_states`` has factors on the bytes of weight, gradient or optimizer
    state (fields of ``mistlab.engines.memory.EngineMemory``).
    """

    part: Part
    path: str = ""
    symbol: str = ""
    is_size: bool = False
    chooses_graph: bool = False
    is_ratio: bool = False
    minimum: float = 0
    maximum: float | None = None
    default: float | None = None
    is_listed: bool = True
    is_trained: bool = False
    axes: tuple[str, ...] = ()
    shared_by: str = ""
    experts_shared_by: str = ""
    label: str = ""
    amount: str = "{}"
    noun: str = ""
    words: tuple[str, ...] = ()
    brief: str = ""
    is_told: bool = False
    checks: Mapping[Step, Check] = field(default_factory=dict)
    is_tried: Callable[[Setting], bool] | None = None
    coarse_parts: int = 2
    box_weight: int = 1
    limit: EngineLimit | None = None
    of_tasks: Mapping[str, Factor] = field(default_factory=dict)
    of_states: Mapping[str, Factor] = field(default_factory=dict)

    @property
    def holder(self) -> str:
        """The field of a stage that holds the choice beside others, such as ``offload``, or ""."""
        return self.path.rpartition(".")[0]

    @property
    def changes_passes(self) -> bool:
        """Whether a value changes the seconds of passes themselves."""
        return not self.of_tasks.keys().isdisjoint("FB")

    @property
    def numbers(self) -> Metadata:
        """The range of its numbers, as metadata of a field."""
        return ratio() if self.is_ratio else bounded(minimum=self.minimum, maximum=self.maximum)

    def number(self, value: float) -> float:
        """A value from a column, as Python's own type of number."""
        return float(value) if self.is_ratio else int(value)
