"""Search spaces, which say from which plans a search may choose, and the named spaces."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from mistlab.engines.engine import Engine
from mistlab.engines.table import ENGINES, names_for_plans
from mistlab.schedule.orders import DEFAULT_ORDER, INTERLEAVED, ORDERS
from mistlab.values import dimension_fields
from mistlab.values.dimensions import DIMENSIONS, counts_of_blocks, engine_problem
from mistlab.values.errors import InputError, near_matches, refuse
from mistlab.values.made_fields import check_lists
from mistlab.values.mesh import ranks_of

OffloadRatios = dimension_fields.OffloadRatios


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpace(dimension_fields.SpaceFields):
    """Allowed degrees, ratios and features; None allows every degree that divides.

    A plan takes all GPUs, and each of its stages lies inside one node or fills whole nodes. Its
    passes have one of the ``orders`` that its numbers allow. ``recomputation`` says how many of its
    blocks a stage may recompute, or recompute attention's core or every second product of, as far
    as ``core_recomputed_layers`` and ``products_recomputed_layers`` allow these (None: always).
    Without ``unequal_stages`` all
    stages have the same ZeRO level, ratios and number of recomputed blocks (or all blocks, if they
    have fewer); with it, each stage chooses for itself. Whether stages may have unequal numbers of
    blocks is said apart: up to ``layers_off_balance`` fewer or more than an even share, or any
    number with None. With ``unequal_meshes`` degrees may differ too. Of
    ``state_replicas`` a stage has one, or one in each node that it fills, if this is listed. A
    single rank shards nothing, and takes the lowest ZeRO level. Plans may name ``other_engines``,
    too; each of them has the choices that it can run.
    """

    def __post_init__(self) -> None:
        check_lists(self)
        self._check_engines()
        if self.unequal_meshes and not self.unequal_stages:
            problem = (
                "False does not go with unequal_meshes: stages with unequal degrees cannot be "
                "alike: give True, or leave both out"
            )
            refuse("unequal_stages", problem)

    def _check_engines(self) -> None:
        """Refuse unknown engines, and choices that none of the engines can run."""
        known = names_for_plans()
        for name in self.other_engines:
            if name not in known:
                refuse("other_engines", f"{name!r} is unknown{near_matches(name, known)}")
        if len(set(self.engines)) < len(self.engines):
            refuse("other_engines", "names an engine twice: name each once, and not engine's own")
        rows = [ENGINES[name] for name in self.engines]
        for order in self.orders:
            if order not in ORDERS:
                refuse("orders", f"{order!r} is unknown{near_matches(order, ORDERS)}")
            if problem := _order_problem(rows, order):
                refuse("orders", problem)
        for name, read in _LIMITED.items():
            row, listed = DIMENSIONS[name], read(self)
            assert row.limit is not None
            for value in (min(listed),) if row.limit.is_level else listed:
                problems = (engine_problem(name, value, one, in_pipeline=True) for one in rows)
                if problem := _of_all(problems):
                    refuse(row.holder or name, problem)

    @property
    def engines(self) -> tuple[str, ...]:
        """The engines that plans may name."""
        return (self.engine, *self.other_engines)

    @property
    def of_engines(self) -> tuple["SearchSpace", ...]:
        """The plans of each engine as a space of their own."""
        is_one = not self.other_engines
        return (self,) if is_one else tuple(self.on(name) for name in self.engines)

    def on(self, *engines: str) -> "SearchSpace":
        """The plans of some engines: the space's own plans as far as any of them runs them."""
        rows = [ENGINES[name] for name in engines]
        lists = {name: _run_by(rows, name, read(self)) for name, read in _LIMITED.items()}
        return replace(
            self.with_lists(lists),
            engine=engines[0],
            other_engines=engines[1:],
            orders=tuple(order for order in self.orders if not _order_problem(rows, order))
            or (DEFAULT_ORDER,),
        )

    @property
    def lists(self) -> Mapping[str, tuple[float, ...] | None]:
        """What the space lists of each dimension that it lists, as it was given; None allows any
        value."""
        return {name: read(self) for name, read in _READERS.items()}

    def with_lists(self, lists: Mapping[str, tuple[Any, ...] | None]) -> "SearchSpace":
        """The space with other lists of values of some dimensions."""
        changes: dict[str, Any] = {}
        held: dict[str, Any] = {}
        for name, values in lists.items():
            row = DIMENSIONS[name]
            if row.holder:
                held[row.label] = values
            else:
                changes[name] = values
        if held:
            changes["offload"] = replace(self.offload, **held)
        return replace(self, **changes)

    def listed(self, dimension: str) -> tuple[float, ...] | None:
        """The values of a dimension that the space lists, sorted; None allows any value."""
        read = _READERS.get(dimension)
        values = None if read is None else read(self)
        return None if values is None else tuple(sorted(set(values)))

    def choices(
        self, dimension: str, *, layers: int, degree: Callable[[str], int], in_pipeline: bool
    ) -> tuple[float, ...]:
        """The values of a dimension that a stage may choose, in order.

        The stage has ``layers`` blocks and the degrees ``degree``. If ranks share the choice, a
        single rank takes the lowest value. Counts of blocks follow ``recomputation``.
        """
        listed = self.listed(dimension)
        if dimension in counts_of_blocks():
            return tuple(
                count
                for count in self._counts(layers, of_whole=dimension == "checkpointed_layers")
                if listed is None or count in listed
            )
        assert listed is not None, f"{dimension} has no end"
        row = DIMENSIONS[dimension]
        if row.limit is not None:
            runs = row.limit.runs(ENGINES[self.engine], in_pipeline)
            listed = listed if runs is None else tuple(v for v in listed if v in runs)
        shared_by = row.shared_by
        return listed[:1] if shared_by and ranks_of(shared_by, degree) == 1 else listed

    def _counts(self, layers: int, *, of_whole: bool) -> Iterable[int]:
        """How many of its ``layers`` blocks a stage may treat in one way; only whole recomputation
        may be asked of all stages."""
        if self.recomputation == "any":
            return range(layers + 1)
        return (layers,) if self.recomputation == "all" and of_whole else (0, layers)


_READERS = {name: attrgetter(row.path or name) for name, row in DIMENSIONS.items() if row.is_listed}


_LIMITED = {name: read for name, read in _READERS.items() if DIMENSIONS[name].limit is not None}


def _run_by(engines: Sequence[Engine], name: str, listed: tuple[float, ...]) -> tuple[float, ...]:
    """The listed values of a dimension that an engine runs; if none does, the highest level that
    runs, or else the first value."""
    limit = DIMENSIONS[name].limit
    assert limit is not None
    of_engines = [limit.runs(engine, False) for engine in engines]
    if None in of_engines:
        return listed
    runs = [value for values in of_engines if values is not None for value in values]
    default = max(runs) if limit.is_level else runs[0]
    return tuple(value for value in listed if value in runs) or (default,)


def space_of(name: str) -> SearchSpace:
    """The space of a name; refuses an unknown name.

    >>> space_of("mist").layers_off_balance
    2
    """
    if name in SPACES:
        return SPACES[name]
    message = f"space {name!r} is unknown{near_matches(name, SPACES)}"
    raise InputError(message)


def _order_problem(engines: Sequence[Engine], order: str) -> str:
    """Why no engine can run an order of passes; empty if one can."""
    return _of_all(row.order_problem(order, default=DEFAULT_ORDER) for row in engines)


def _of_all(problems: Iterable[str]) -> str:
    """The first problem if every engine has one; else nothing."""
    found = list(problems)
    return found[0] if all(found) else ""


_POWERS = tuple(2**i for i in range(14))
_EIGHTHS = tuple(i / 8 for i in range(9))

# The published space, built up feature by feature (Mist, EuroSys 2025). Degrees and micro-batches
# are powers of two, and so is the number of micro-batches if the global batch is a power of two.
# From ZeRO on, each stage chooses for itself.
_3D = SearchSpace(
    name="3d",
    data_parallel=_POWERS,
    tensor_parallel=_POWERS,
    micro_batch=(1, 2, 4),
    zero=(1,),
)
_ZERO = replace(_3D, name="+zero", zero=(1, 2, 3), unequal_stages=True)
_CHECKPOINTING = replace(_ZERO, name="+checkpointing", recomputation="any")
_OFFLOAD = replace(
    _CHECKPOINTING,
    name="+offload",
    offload=OffloadRatios(
        weights=_EIGHTHS, gradients=_EIGHTHS, optimizer=_EIGHTHS, activations=_EIGHTHS
    ),
)
_MIST = replace(_OFFLOAD, name="mist", layers_off_balance=2)
_WIDE = replace(
    _MIST,
    name="wide",
    data_parallel=None,
    tensor_parallel=None,
    tensor_parallel_in_node=False,
    micro_batch=None,
    zero=(0, 1, 2, 3),
    layers_off_balance=None,
    unequal_meshes=True,
)
# The spaces of other systems' users, on the engine that comes closest to their system: of a user
# who tunes, and of the published evaluation, whose baselines recompute every block and shard the
# optimizer's state.
_MEGATRON = SearchSpace(
    name="megatron",
    engine="megatron",
    tensor_parallel=_POWERS,
    micro_batch=(1, 2, 4, 8, 16),
    zero=(0, 1),
)
# What Megatron-LM's users have since: tokens split over tensor-parallel ranks, sequences over
# context-parallel ones, attention's core recomputed, chunks of stages in turn.
_MEGATRON_TODAY = replace(
    _MEGATRON,
    name="megatron-today",
    context_parallel=(1, 2, 4, 8, 16),
    sequence_parallel=(0, 1),
    orders=(DEFAULT_ORDER, *INTERLEAVED),
    recomputation="any",
    core_recomputed_layers=None,
)
# The part of it that every launch line of Megatron-core says and a search proves: one order. On
# sequences of usual length more than two context-parallel ranks were hardly measured.
_MEGATRON_CORE = replace(
    _MEGATRON_TODAY,
    name="megatron-core",
    engine="megatron-core",
    context_parallel=(1, 2),
    orders=(DEFAULT_ORDER,),
    core_recomputed_layers=(0,),
)
# Pipelines whose gradients of weights fill their waits, as Megatron-LM's fork runs them.
_ZERO_BUBBLE = replace(
    _MEGATRON,
    name="zero-bubble",
    engine="zero-bubble",
    orders=(DEFAULT_ORDER, *ENGINES["zero-bubble"].orders),
    recomputation="any",
)
_DEEPSPEED = replace(
    _MEGATRON, name="deepspeed", engine="deepspeed", tensor_parallel=(1,), zero=(0, 1, 2, 3)
)
_AS_PUBLISHED = tuple(
    replace(tuned, name=f"{tuned.name}:published", recomputation="all", zero=(1,))
    for tuned in (_MEGATRON, _DEEPSPEED)
)
_ACESO = SearchSpace(
    name="aceso",
    engine="aceso",
    data_parallel=_POWERS,
    tensor_parallel=_POWERS,
    recomputation="any",
    unequal_stages=True,
    layers_off_balance=None,
    unequal_meshes=True,
)
_ALPA = replace(_ACESO, name="alpa", engine="megatron", recomputation="none_or_all")
# How models are trained today: with experts, by Megatron, whose layouts of pipelines give the stage
# with the head fewer blocks; with sharded weights, by torch; and all that there is to choose on
# this package's own engine.
_MOE = SearchSpace(
    name="moe",
    engine="megatron-core",
    data_parallel=_POWERS,
    tensor_parallel=_POWERS[:4],
    micro_batch=(1, 2, 4, 8),
    sequence_parallel=(0, 1),
    expert_parallel=_POWERS[:7],
    zero=(1,),
    layers_off_balance=2,
)
_FSDP = SearchSpace(
    name="fsdp",
    engine="fsdp",
    tensor_parallel=_POWERS[:4],
    pipeline=(1,),
    micro_batch=_POWERS[:6],
    sequence_parallel=(0, 1),
    expert_parallel=_POWERS[:7],
    state_replicas=_POWERS,
    zero=(2, 3),
)
_EVERYTHING = replace(
    _WIDE,
    name="everything",
    sequence_parallel=(0, 1),
    expert_parallel=_POWERS[:7],
    state_replicas=_POWERS,
)
# Its pipelines in any order.
_IN_ANY_ORDER = replace(_EVERYTHING, name="everything:orders", orders=tuple(ORDERS))

SPACES: Mapping[str, SearchSpace] = {
    **{space.name: space for space in (_3D, _ZERO, _CHECKPOINTING, _OFFLOAD, _MIST, _WIDE)},
    "+imbalance": _MIST,
    **{
        space.name: space
        for space in (
            *(_MEGATRON, _MEGATRON_TODAY, _MEGATRON_CORE, _ZERO_BUBBLE, _DEEPSPEED),
            *(*_AS_PUBLISHED, _ACESO, _ALPA),
            *(_MOE, _FSDP, _EVERYTHING, _IN_ANY_ORDER),
        )
    },
}
