"""The table of dimensions, with one row for each choice that a plan makes for a stage, and the mesh
of a stage's ranks.

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
    """The offload ratios for weights, gradients and optimizer states that an engine supports: any
    (None), or only 0.
    """
    return None if engine.offloads else (0.0,)


def _all_or_none(engine: Engine, _: bool) -> tuple[float, ...] | None:
    """The offload ratios for activations that an engine supports: any (None), 0 and 1, or only
    0.
    """
    if engine.offloads:
        return None
    return (0.0, 1.0) if engine.offloads_activations else (0.0,)


def _why_none(*_: object) -> str:
    return "keeps everything on the GPU"


def _why_not_some(engine: Engine, _: bool) -> str:
    choices = "offloads all activations or none"
    return choices if engine.offloads_activations else _why_none()


_IN_PART = EngineLimit(
    runs=_any_or_none, why=_why_none, remedy="leave it out, or give mistlab", is_level=True
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
    """Words for the states that an engine shards at its highest ZeRO level."""
    highest = engine.highest_zero_of(in_pipeline=in_pipeline)
    what = ("nothing", "optimizer state alone", "optimizer state and gradients alone")[highest]
    return f"shards {what}{' in a pipeline' if highest < engine.highest_zero else ''}"


# The order of rows is that of columns, of the choices that searchers try, and of reports.
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
            runs=lambda engine, _: engine.context_exchanges, why=lambda *_: "does not"
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
            why=lambda *_: "has tensor ranks side by side",
            remedy="leave it out, or give mistlab",
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
            why=lambda *_: "runs plain operators",
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
            why=lambda *_: "runs plain operators",
            remedy="leave it out, or give mistlab",
            is_level=True,
        ),
    ),
    # Proofs split a set of candidates along the dimension with the largest weight: optimizer states
    # are six times as large as weights, and activations are copied with every micro-batch. With
    # equal weights the proof of the default problem needs a quarter more predictor calls.
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
    """The names of the dimensions in one group (layers, mesh or savings), in the table's order."""
    return _OF_PARTS[part]


def counts_of_blocks() -> tuple[str, ...]:
    """The names of dimensions that count blocks run in a certain way, such as recomputed blocks."""
    return _COUNTS


def counts_within(counts: Mapping[str, float], layers: int) -> dict[str, int]:
    """Counts of blocks by the way to run them, reduced until they add up to at most ``layers``; the
    last in the table's order are reduced first.
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
    """The reason why an engine does not support a value of a dimension; empty if it does."""
    row = DIMENSIONS[name]
    runs = None if row.limit is None else row.limit.runs(engine, in_pipeline)
    if row.limit is None or runs is None or value in runs:
        return ""
    why = f"engine {engine.name} {row.limit.why(engine, in_pipeline)}"
    if row.limit.remedy:
        return f"{why}: {row.limit.remedy}"
    known = one_of([_number_with_words(row, one) for one in runs])
    return f"{_number_with_words(row, value)}, but {why}: give {known}"


def _number_with_words(row: Dimension, value: float) -> str:
    return f"{value} ({row.words[int(value)]})" if row.words else f"{value}"


def label_of(name: str) -> str:
    """The short name of a dimension, for searchers' choices."""
    return DIMENSIONS[name].label or name


def amount_words(name: str, value: float) -> str:
    """A value of a dimension in words, without its noun: "ZeRO-2", "12.5%"."""
    row = DIMENSIONS[name]
    return row.words[int(value)] if row.words else row.amount.format(value)


def dimension_words(name: str, value: float, layers: int) -> str:
    """A value of a stage of so many blocks in words: "ZeRO-2", "3 of 8 blocks recomputed", "no
    blocks recomputed"."""
    if name in counts_of_blocks():
        return _blocks_words(int(value), layers, DIMENSIONS[name].noun)
    return f"{_short_amount(name, value)} {_noun(name)}".strip()


def _noun(name: str) -> str:
    """The noun after a dimension's amount; the dimension's name where neither amount nor words
    identify it.
    """
    row = DIMENSIONS[name]
    is_bare = row.amount == "{}" and not row.noun and not row.words
    return name.replace("_", " ") if is_bare else row.noun


def _blocks_words(count: int, layers: int, noun: str) -> str:
    """A number of a stage's blocks in words, with the noun in the plural."""
    if count == 0:
        return f"no {noun}"
    if layers == 1:
        return f"its {noun.replace('blocks', 'block', 1)}"
    return f"all {layers} {noun}" if count == layers else f"{count} of {layers} {noun}"


def brief_words(name: str, value: float) -> str:
    """A dimension's value as in the one-line form of a plan; different values have different
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
    """A change of a dimension in words: "2 instead of 3 blocks recomputed"."""
    noun = DIMENSIONS[name].noun
    if name in counts_of_blocks() and then == 0:
        return f"no {noun} instead of {int(now)}"
    return f"{_short_amount(name, then)} instead of {_short_amount(name, now)} {noun}".rstrip()


def _short_amount(name: str, value: float) -> str:
    """A dimension's value as in ``amount_words``, with percentages rounded to integers: "50%"."""
    return amount_words(name, value).replace(".0%", "%")


def states_as_changed(memory: States, value: Callable[[str], Any]) -> States:
    """The engine's bytes of weights, gradients and optimizer states per parameter, multiplied by
    the factors that values of dimensions put on them.

    ``value`` gives the value of a dimension: numbers or a symbol.
    """
    changed: dict[str, Any] = {}
    for name, row in DIMENSIONS.items():
        for state, factor in row.of_states.items():
            changed[state] = changed.get(state, getattr(memory, state)) * factor(value(name))
    return replace(memory, **changed) if changed else memory


# The mesh of a stage: axes along which its GPUs divide the work, and groups of ranks that
# communicate.
#
# Ranks are numbered along the axes in the table's order, the first axis fastest; then come the
# ranks of the next stage. A group is a set of axes: ranks that differ only along these axes
# communicate. A dimension's row adds an axis by naming it, its position among the axes, and the
# groups that contain it.
#
# In blocks with experts the same ranks have other axes, those of ``EXPERT_AXES``, which regroup the
# ranks of the first ones. Ranks that share states use ``STATE_AXES``, which divide data-parallel
# ranks into replicas of the states. The axis without a dimension takes the remaining ranks.
#
# The argument ``value`` of a function gives the degree of a dimension: ``stage.value`` for a stage
# of a plan, ``batch.value`` for columns of candidates.


Degree = TypeVar("Degree", int, "NDArray[Any]")
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Axis:
    """An axis of a mesh: the dimension that gives its number of ranks, and its displayed name.

    An axis without a dimension has all ranks that the other axes of its table leave.
    """

    dimension: str
    words: str


_DIMENSIONS_OF = {axis: name for name, row in DIMENSIONS.items() for axis in row.axes}


def _axes(*names: str) -> dict[str, Axis]:
    """A table of mesh axes by name; each axis has the dimension whose row defines it."""
    return {
        name: Axis(dimension=_DIMENSIONS_OF.get(name, ""), words=name.removeprefix("state "))
        for name in names
    }


AXES = _axes("tensor", "context", "data")
EXPERT_AXES = _axes("expert tensor", "expert", "expert data", "expert replica")
STATE_AXES = _axes("state tensor", "state context", "shard", "replica")

# The mesh axes of each group of ranks, by the group's name, in this order: ranks that reduce
# partial activations; ranks that exchange keys and values; ranks that share states under ZeRO and
# gather weights; ranks that have the same shard, whose gradients are summed; ranks that reduce
# gradients. Then for experts: ranks that have parts of the same experts; ranks with different
# experts, which exchange tokens; ranks that share the experts' states; ranks that reduce the
# experts' gradients.
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
    """The table of axes (of layers, states or experts) that contains a group's axes."""
    first, *_ = GROUPS[group]
    return next(axes for axes in (AXES, EXPERT_AXES, STATE_AXES) if first in axes)


def degrees(axes: Mapping[str, Axis], value: Callable[[str], Degree]) -> dict[str, Degree]:
    """The number of ranks along each axis of a mesh."""
    ranks: dict[str, Any] = {
        name: value(axis.dimension) for name, axis in axes.items() if axis.dimension
    }
    for name, axis in axes.items():
        if not axis.dimension:
            # A mesh whose degrees do not divide its GPUs is marked as infeasible elsewhere; here it
            # gets one rank.
            left: Any = num_gpus(value) // prod(ranks.values())
            ranks[name] = left + (left < 1)
    return {name: ranks[name] for name in axes}


def dimensions_of_axes() -> tuple[str, ...]:
    """The dimension that gives each mesh axis its number of ranks."""
    return tuple([axis.dimension for axis in AXES.values()])


def num_gpus(value: Callable[[str], Degree]) -> Degree:
    """The number of GPUs of a stage: the product of its axes' degrees."""
    # A plain loop instead of ``prod``: it runs for every stage of every plan.
    gpus: Any = 1
    for axis in AXES.values():
        gpus = gpus * value(axis.dimension)
    product: Degree = gpus
    return product


def ranks_of(group: str, value: Callable[[str], Degree]) -> Degree:
    """The number of ranks in a group of a stage's mesh."""
    of_axes: Mapping[str, Any] = degrees(axes_of(group), value)
    ranks: Degree = prod(of_axes[axis] for axis in GROUPS[group])
    return ranks


def groups_of(group: str, value: Callable[[str], int]) -> Iterator[list[int]]:
    """The groups of ranks with this name in a stage's mesh, each as ranks relative to the stage's
    first.
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
    """The position of a stage's rank along each mesh axis."""
    position = {}
    for name, axis in in_order(AXES, value(AXIS_ORDER)).items():
        rank, position[name] = divmod(rank, value(axis.dimension))
    return position


def rank_of(position: dict[str, int], value: Callable[[str], int]) -> int:
    """The rank at a position along the mesh axes, relative to the stage's first rank."""
    steps = _steps(AXES, value)
    return sum(position.get(name, 0) * step for name, step in steps.items())


def in_order(axes: Mapping[str, Item], order: int) -> dict[str, Item]:
    """The values of mesh axes from the innermost to the outermost axis, by a stage's
    ``axis_order``: the table's first axis is the innermost or the outermost. Axes of experts have a
    fixed order.
    """
    first, *others = axes
    names = [*others, first] if order and first not in EXPERT_AXES else axes
    return {name: axes[name] for name in names}


def _steps(axes: Mapping[str, Axis], value: Callable[[str], int]) -> dict[str, int]:
    """The distance in rank numbers between neighbours along each mesh axis."""
    steps, step = {}, 1
    for name, degree in in_order(degrees(axes, value), value(AXIS_ORDER)).items():
        steps[name] = step
        step *= degree
    return steps
