"""The table of dimensions, with one row for each choice that a plan makes for a stage; and the
device mesh of a stage's ranks.

A row has the choice's names in plan files and in expressions, its possible numbers, its words for
people, and the tasks and states that it changes. The fields of stages and of spaces are made from
the rows, columns of candidates and searchers take their choices from them: a dimension is added by
adding its row.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from mistlab.core.values import one_of
from mistlab.engines.engine import Engine
from mistlab.plan import dimension as checks
from mistlab.plan import lean_sets
from mistlab.plan.dimension import Dimension, EngineLimit, Part
from mistlab.schedule.context_ways import WORDS

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from numpy.typing import NDArray


States = TypeVar("States", bound="DataclassInstance")


_STAYS = {
    "weights": checks.weights_stay,
    "gradients": checks.gradients_stay,
    "optimizer": checks.optimizer_stays,
}


def _any_or_none(engine: Engine, _: bool) -> tuple[float, ...] | None:
    """The shares of weights, gradients or optimizer states that an engine can offload to the host:
    only 0, or None for any share.
    """
    return None if engine.offloads else (0.0,)


def _all_or_none(engine: Engine, _: bool) -> tuple[float, ...] | None:
    """The shares of activations that an engine can offload to the host: only 0, 0 and 1, or None
    for any share.
    """
    if engine.offloads:
        return None
    return (0.0, 1.0) if engine.offloads_activations else (0.0,)


def _why_none(*_: object) -> str:
    return "is modelled with everything on the GPU"


def _why_not_some(engine: Engine, _: bool) -> str:
    choices = "offloads all activations or none"
    return choices if engine.offloads_activations else _why_none()


_IN_PART = EngineLimit(
    runs=_any_or_none, why=_why_none, remedy="leave it out, or give engine: mistlab", is_level=True
)


def _offloaded(
    symbol: str,
    kind: str,
    task: str,
    *,
    coarse_parts: int = 2,
    box_weight: int = 1,
    limit: EngineLimit = _IN_PART,
) -> Dimension:
    return Dimension(
        part="savings",
        path=f"offload.{kind}",
        symbol=symbol,
        is_ratio=True,
        maximum=1,
        default=0.0,
        is_trained=True,
        label=kind,
        limit=limit,
        amount="{:.1%}",
        noun=f"of {'optimizer state' if kind == 'optimizer' else kind} offloaded",
        brief=f"{{}} of {kind}",
        coarse_parts=coarse_parts,
        box_weight=box_weight,
        of_tasks={task: _as_it_is},
        checks={"states": _STAYS[kind]} if kind in _STAYS else {},
    )


def _as_it_is(ratio: Any) -> Any:
    return ratio


def _levels(engine: Engine, in_pipeline: bool) -> tuple[float, ...]:
    return tuple(range(engine.highest_zero_of(in_pipeline=in_pipeline) + 1))


def _sharded(engine: Engine, in_pipeline: bool) -> str:
    """The states that an engine shards at its highest ZeRO level, as text for messages."""
    highest = engine.highest_zero_of(in_pipeline=in_pipeline)
    what = ("nothing", "optimizer state only", "optimizer state and gradients only")[highest]
    return f"shards {what}{' in a pipeline' if highest < engine.highest_zero else ''}"


# The dimensions (choices for a stage) by name. Columns of candidates, searchers and reports have
# them in this order.
DIMENSIONS: dict[str, Dimension] = {
    "layers": Dimension(part="layers", symbol="L", minimum=0, brief="{} blocks", is_listed=False),
    "data_parallel": Dimension(
        part="mesh",
        symbol="dp",
        minimum=1,
        brief="{} data",
        is_trained=True,
        checks={"states": checks.averaging_problem},
        axes=("data",),
    ),
    "tensor_parallel": Dimension(
        part="mesh",
        symbol="tp",
        is_size=True,
        minimum=1,
        brief="{} tensor",
        is_trained=True,
        checks={"tensors": checks.tensor_problem, "experts": checks.tokens_of_experts_problem},
        axes=("tensor", "state tensor"),
    ),
    "context_parallel": Dimension(
        part="mesh",
        symbol="cp",
        is_size=True,
        minimum=1,
        default=1,
        noun="context parallel",
        is_trained=True,
        checks={"tokens": checks.context_problem},
        axes=("context", "state context"),
    ),
    "context_exchange": Dimension(
        part="mesh",
        symbol="ce",
        chooses_graph=True,
        maximum=2,
        default=0,
        shared_by="context",
        label="context exchange",
        words=WORDS,
        is_trained=True,
        checks={"tokens": checks.exchange_problem},
        limit=EngineLimit(
            runs=lambda engine, _: engine.context_exchanges, why=lambda *_: "does not run it"
        ),
    ),
    "axis_order": Dimension(
        part="mesh",
        symbol="ao",
        maximum=1,
        default=0,
        shared_by="tensor",
        label="order of axes",
        words=("tensor ranks side by side", "tensor ranks furthest apart"),
        is_trained=True,
        checks={"states": checks.axis_order_problem},
        limit=EngineLimit(
            runs=lambda engine, _: None if engine.orders_axes else (0,),
            why=lambda *_: "needs adjacent tensor-parallel ranks",
            remedy="leave it out, or give engine: mistlab",
            is_level=True,
        ),
    ),
    lean_sets.CHOICE: Dimension(
        part="mesh",
        symbol="lo",
        chooses_graph=True,
        maximum=len(lean_sets.WORDS) - 1,
        default=0,
        label="lean operators",
        words=lean_sets.WORDS,
        is_trained=True,
        limit=EngineLimit(
            runs=lambda engine, _: None if engine.runs_lean else (0,),
            why=lambda *_: "runs plain operators only",
            is_level=True,
        ),
    ),
    "micro_batch": Dimension(
        part="mesh",
        symbol="b",
        is_size=True,
        minimum=1,
        brief="micro-batch {}",
        is_trained=True,
        checks={"batch": checks.batch_problem},
    ),
    "sequence_parallel": Dimension(
        part="mesh",
        symbol="sp",
        chooses_graph=True,
        maximum=1,
        default=0,
        shared_by="tensor",
        amount="",
        noun="sequence parallelism",
        brief="sequence parallel",
        is_trained=True,
        checks={"tokens": checks.sequence_problem},
    ),
    "expert_parallel": Dimension(
        part="mesh",
        symbol="ep",
        is_size=True,
        minimum=1,
        default=1,
        label="experts",
        noun="expert parallel",
        is_trained=True,
        checks={"experts": checks.experts_problem},
        axes=("expert",),
    ),
    "expert_tensor_parallel": Dimension(
        part="mesh",
        symbol="et",
        is_size=True,
        minimum=1,
        default=1,
        label="expert tensor",
        noun="expert tensor parallel",
        is_trained=True,
        checks={"experts": checks.expert_widths_problem},
        axes=("expert tensor",),
    ),
    "state_replicas": Dimension(
        part="mesh",
        symbol="rp",
        minimum=1,
        default=1,
        shared_by="gather",
        experts_shared_by="gather experts",
        noun="replicas of the states",
        brief="{} replicas of states",
        checks={"states": checks.replicas_problem},
        is_tried=checks.replicas_are_nodes,
        axes=("expert replica", "replica"),
    ),
    "zero": Dimension(
        part="savings",
        symbol="z",
        maximum=3,
        default=0,
        shared_by="gather",
        experts_shared_by="gather experts",
        amount="ZeRO-{}",
        is_told=True,
        is_trained=True,
        checks={"states": checks.level_problem},
        limit=EngineLimit(runs=_levels, why=_sharded, is_level=True),
    ),
    "checkpointed_layers": Dimension(
        part="layers",
        symbol="c",
        default=0,
        label="checkpointed",
        noun="blocks recomputed",
        brief="{} recomputed",
        is_told=True,
        is_listed=False,
    ),
    "core_recomputed_layers": Dimension(
        part="layers",
        symbol="cc",
        default=0,
        label="core recomputed",
        noun="blocks with attention's core recomputed",
        brief="{} with attention's core recomputed",
    ),
    "products_recomputed_layers": Dimension(
        part="layers",
        symbol="ca",
        default=0,
        label="products recomputed",
        noun="blocks with every second product recomputed",
        brief="{} with every second product recomputed",
    ),
    "lean_layers": Dimension(
        part="layers",
        symbol="cl",
        default=0,
        label="lean",
        noun="blocks with lean operators",
        brief="{} with lean operators",
        limit=EngineLimit(
            runs=lambda engine, _: None if engine.runs_lean else (0,),
            why=lambda *_: "runs plain operators only",
            remedy="leave it out, or give engine: mistlab",
            is_level=True,
        ),
    ),
    # ``box_weight``: exact searches split a set of candidates along the dimension of largest
    # weight. Optimizer states are six times as large as weights; activations are copied per
    # micro-batch. With equal weights, the proof of the default problem needs a quarter more
    # predictor calls.
    "offload_weights": _offloaded("ww", "weights", "P", coarse_parts=1),
    "offload_gradients": _offloaded("wg", "gradients", "G", coarse_parts=1),
    "offload_optimizer": _offloaded("wo", "optimizer", "O", box_weight=2),
    "offload_activations": _offloaded(
        *("wa", "activations", "A"),
        box_weight=6,
        limit=replace(_IN_PART, runs=_all_or_none, why=_why_not_some),
    ),
}
RECOMPUTED = "checkpointed_layers"
AXIS_ORDER = "axis_order"
OFFLOADS = tuple(name for name, row in DIMENSIONS.items() if row.path.startswith("offload."))


def names_of(part: Part) -> tuple[str, ...]:
    """The names of the dimensions in a group: "layers", "mesh" or "savings"."""
    return _OF_PARTS[part]


def counts_of_blocks() -> tuple[str, ...]:
    """The names of dimensions that count a stage's blocks run in some way, such as recomputed."""
    return _COUNTS


def counts_within(counts: Mapping[str, float], layers: int) -> dict[str, int]:
    """The number of blocks run in each way (such as recomputed), reduced until all of them together
    are at most ``layers``.
    """
    within, left = {}, layers
    for name in counts_of_blocks():
        within[name] = min(int(counts[name]), left)
        left -= within[name]
    return within


_OF_PARTS: dict[Part, tuple[str, ...]] = {
    part: tuple(name for name, row in DIMENSIONS.items() if row.part == part)
    for part in get_args(Part)
}
_COUNTS = _OF_PARTS["layers"][1:]


def engine_problem(name: str, value: float, engine: Engine, *, in_pipeline: bool) -> str:
    """The reason why an engine does not support a dimension's value; empty if it does."""
    row = DIMENSIONS[name]
    runs = None if row.limit is None else row.limit.runs(engine, in_pipeline)
    if row.limit is None or runs is None or value in runs:
        return ""
    why = f"engine {engine.name} {row.limit.why(engine, in_pipeline)}"
    if row.limit.remedy:
        kind = f"{row.label} " if row.holder else ""
        return f"{kind}{_number_with_words(row, value)}, but {why}: {row.limit.remedy}"
    known = one_of([_number_with_words(row, one) for one in runs])
    return f"{_number_with_words(row, value)}, but {why}: give {known}"


def _number_with_words(row: Dimension, value: float) -> str:
    return f"{value} ({row.words[int(value)]})" if row.words else f"{value}"


def label_of(name: str) -> str:
    """The short name of a dimension in searchers' lists of choices."""
    return DIMENSIONS[name].label or name


def amount_words(name: str, value: float) -> str:
    """A dimension's value as text without a noun: "ZeRO-2", "12.5%"."""
    row = DIMENSIONS[name]
    return row.words[int(value)] if row.words else row.amount.format(value)


def dimension_words(name: str, value: float, layers: int) -> str:
    """A dimension's value as text, for a stage of ``layers`` blocks: "3 of 8 blocks recomputed"."""
    if name in counts_of_blocks():
        return _blocks_words(int(value), layers, DIMENSIONS[name].noun)
    return f"{_short_amount(name, value)} {_noun(name)}".strip()


def _noun(name: str) -> str:
    """The noun that follows a dimension's value in a text; the dimension's name if its row has
    neither a noun nor other wording.
    """
    row = DIMENSIONS[name]
    is_bare = row.amount == "{}" and not row.noun and not row.words
    return name.replace("_", " ") if is_bare else row.noun


def _blocks_words(count: int, layers: int, noun: str) -> str:
    """How many of a stage's blocks are run in a certain way, as text; ``noun`` is in the plural."""
    if count == 0:
        return f"no {noun}"
    if layers == 1:
        return f"its {noun.replace('blocks', 'block', 1)}"
    return f"all {layers} {noun}" if count == layers else f"{count} of {layers} {noun}"


def brief_words(name: str, value: float) -> str:
    """A dimension's value as text for a plan's one-line form; different values have different
    texts.
    """
    row = DIMENSIONS[name]
    if row.words:
        return row.words[int(value)]
    short = f"{value:g}"
    number = short if float(short) == value else repr(value)
    text = row.brief.format(number) or f"{row.amount.format(number)} {_noun(name)}".rstrip()
    return text.removesuffix("s") if value == 1 and text.endswith(" blocks") else text


def change_words(name: str, now: float, then: float) -> str:
    """A change of a dimension's value as text: "2 instead of 3 blocks recomputed"."""
    noun = DIMENSIONS[name].noun
    if name in counts_of_blocks() and then == 0:
        return f"no {noun} instead of {int(now)}"
    return f"{_short_amount(name, then)} instead of {_short_amount(name, now)} {noun}".rstrip()


def _short_amount(name: str, value: float) -> str:
    """A dimension's value as a short text, with whole percentages as integers: "50%"."""
    return amount_words(name, value).replace(".0%", "%")


def states_as_changed(memory: States, value: Callable[[str], Any]) -> States:
    """An engine's bytes of weights, gradients and optimizer states per parameter, multiplied by the
    factors in ``of_states`` of each dimension.

    ``value`` gives the value of a dimension: numbers or a symbol.
    """
    changed: dict[str, Any] = {}
    for name, row in DIMENSIONS.items():
        for state, factor in row.of_states.items():
            changed[state] = changed.get(state, getattr(memory, state)) * factor(value(name))
    return replace(memory, **changed) if changed else memory


# The device mesh of a stage: the axes along which its GPUs divide the work, and the groups of ranks
# that communicate.
#
# Ranks are numbered along the axes in the order of ``AXES``, the first axis fastest; then come the
# ranks of the next stage. A communication group is defined by a set of axes: ranks that differ only
# along these axes communicate. To add an axis, name it in a dimension's row, in the table of axes
# and in the groups that contain it.
#
# In blocks with experts the same ranks are divided along ``EXPERT_AXES`` instead. For sharded
# states they are divided along ``STATE_AXES``, which split the data-parallel ranks into replicas of
# the states. An axis without a dimension takes the ranks that the other axes leave.
#
# The argument ``value`` of a function gives the degree of a dimension: ``stage.value`` for a stage
# of a plan, ``batch.value`` for columns of candidates.


Degree = TypeVar("Degree", int, "NDArray[Any]")
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Axis:
    """An axis of a stage's device mesh: the dimension that gives its size, and its displayed name.

    An axis without a dimension has all ranks that the other axes of its table leave.
    """

    dimension: str
    words: str


_DIMENSIONS_OF = {axis: name for name, row in DIMENSIONS.items() for axis in row.axes}


def _axes(*names: str) -> dict[str, Axis]:
    """A table of mesh axes by name, each with the dimension that gives its size, if any."""
    return {
        name: Axis(dimension=_DIMENSIONS_OF.get(name, ""), words=name.removeprefix("state "))
        for name in names
    }


AXES = _axes("tensor", "context", "data")
EXPERT_AXES = _axes("expert tensor", "expert", "expert data", "expert replica")
STATE_AXES = _axes("state tensor", "state context", "shard", "replica")

# For each kind of communication group, its mesh axes. In this order: ranks that reduce partial
# activations; ranks that exchange keys and values; ranks that shard states under ZeRO and gather
# weights; ranks with the same shard, which add up its gradients; ranks that reduce gradients. Then
# for experts: ranks that have parts of the same experts; ranks with different experts, which
# exchange tokens; ranks that shard the experts' states; ranks that reduce the experts' gradients.
GROUPS: dict[str, tuple[str, ...]] = {
    "tensor": ("tensor",),
    "context": ("context",),
    "gather": ("state context", "shard"),
    "state replicas": ("replica",),
    "reduce": ("context", "data"),
    "expert tensor": ("expert tensor",),
    "experts": ("expert",),
    "gather experts": ("expert data",),
    "reduce experts": ("expert data", "expert replica"),
}


def axes_of(group: str) -> dict[str, Axis]:
    """The table of mesh axes (that of dense layers, of sharded states or of experts) to which a
    communication group's axes belong.
    """
    first, *_ = GROUPS[group]
    return next(axes for axes in (AXES, EXPERT_AXES, STATE_AXES) if first in axes)


def degrees(axes: Mapping[str, Axis], value: Callable[[str], Degree]) -> dict[str, Degree]:
    """The number of ranks along each axis of a stage's mesh."""
    ranks: dict[str, Any] = {
        name: value(axis.dimension) for name, axis in axes.items() if axis.dimension
    }
    for name, axis in axes.items():
        if not axis.dimension:
            # If the other degrees do not divide the stage's GPUs, this axis gets one rank; checks
            # elsewhere refuse such a mesh.
            left: Any = num_gpus(value) // prod(ranks.values())
            ranks[name] = left + (left < 1)
    return {name: ranks[name] for name in axes}


def dimensions_of_axes() -> tuple[str, ...]:
    """For each axis of a stage's mesh, the name of the dimension that gives its number of ranks."""
    return tuple([axis.dimension for axis in AXES.values()])


def num_gpus(value: Callable[[str], Degree]) -> Degree:
    """The number of GPUs of a stage: the product of its degrees along the mesh axes."""
    # A plain loop is faster than ``prod``, and this runs for every stage of every plan.
    gpus: Any = 1
    for axis in AXES.values():
        gpus = gpus * value(axis.dimension)
    product: Degree = gpus
    return product


def ranks_of(group: str, value: Callable[[str], Degree]) -> Degree:
    """The number of ranks in a communication group of a stage, such as "tensor" or "reduce"."""
    of_axes: Mapping[str, Any] = degrees(axes_of(group), value)
    ranks: Degree = prod(of_axes[axis] for axis in GROUPS[group])
    return ranks


def groups_of(group: str, value: Callable[[str], int]) -> Iterator[list[int]]:
    """All communication groups of one kind (such as "tensor") in a stage, each as a list of ranks
    counted from the stage's first rank.
    """
    axes = axes_of(group)
    of_axes, steps = degrees(axes, value), _steps(axes, value)

    def ranks(names: list[str]) -> list[int]:
        ways = ([place * steps[name] for place in range(of_axes[name])] for name in reversed(names))
        return [sum(way) for way in product(*ways)]

    inside = ranks([axis for axis in axes if axis in GROUPS[group]])
    for first in ranks([axis for axis in axes if axis not in GROUPS[group]]):
        yield sorted(first + rank for rank in inside)


def position_of(rank: int, value: Callable[[str], int]) -> dict[str, int]:
    """The coordinate of a stage's rank along each mesh axis."""
    position = {}
    for name, axis in in_order(AXES, value(AXIS_ORDER)).items():
        rank, position[name] = divmod(rank, value(axis.dimension))
    return position


def rank_of(position: dict[str, int], value: Callable[[str], int]) -> int:
    """The rank with these coordinates along the mesh axes, counted from the stage's first rank."""
    steps = _steps(AXES, value)
    return sum(position.get(name, 0) * step for name, step in steps.items())


def in_order(axes: Mapping[str, Item], order: int) -> dict[str, Item]:
    """A mapping by mesh axis, sorted from the innermost axis, along which adjacent ranks lie, to
    the outermost; with ``axis_order`` 1 the table's first axis is the outermost, except for
    experts.
    """
    first, *others = axes
    names = [*others, first] if order and first not in EXPERT_AXES else axes
    return {name: axes[name] for name in names}


def _steps(axes: Mapping[str, Axis], value: Callable[[str], int]) -> dict[str, int]:
    """For each mesh axis, the difference in rank number between neighbours along it."""
    steps, step = {}, 1
    for name, degree in in_order(degrees(axes, value), value(AXIS_ORDER)).items():
        steps[name] = step
        step *= degree
    return steps
