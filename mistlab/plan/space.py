"""Search spaces: the plans that a search may choose from."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from mistlab.core.values import near_matches, refuse
from mistlab.engines.adapters import Base
from mistlab.engines.engine import ENGINES, Engine, names_for_plans
from mistlab.plan import dimension_fields
from mistlab.plan.dimensions import (
    AXES,
    DIMENSIONS,
    OFFLOADS,
    RECOMPUTED,
    counts_of_blocks,
    engine_problem,
    ranks_of,
)
from mistlab.plan.made_fields import check_lists
from mistlab.reduction.reduction_costs import Reduction
from mistlab.schedule.orders import DEFAULT_ORDER, ORDERS

OffloadRatios = dimension_fields.OffloadRatios
# Offload ratios that must be 0 under a gradient reduction that averages weights or keeps vectors on
# the GPU.
STAYS = ("offload_weights", "offload_gradients", "offload_optimizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpace(dimension_fields.SpaceFields):
    """A search space: the parallel degrees, offloaded shares and features that plans may have; a
    degree list of None allows every divisor of the GPUs.

    A plan uses all GPUs, and each of its stages lies inside one node or fills whole nodes. Its
    passes have one of the ``orders``, if its numbers of stages and micro-batches allow this order.
    ``recomputation`` says how many of its blocks a stage may recompute. It holds for blocks that
    recompute attention's core, or every second GEMM, too, if ``core_recomputed_layers`` or
    ``products_recomputed_layers`` is allowed (None: always).

    Without ``unequal_stages`` all stages have the same ZeRO level, offload ratios and number of
    recomputed blocks (or recompute all blocks, if they have fewer). Numbers of blocks may differ
    from an even share by up to ``layers_off_balance``; None means by any number. With
    ``unequal_meshes`` parallel degrees of stages may differ, too. ``state_replicas`` of a stage are
    one, or one in each node that it fills, if this is listed. A single rank shards nothing, and
    gets the lowest ZeRO level. Plans may also have one of the ``other_engines``, each with the
    choices that it supports. With a ``base`` of 8 or 4 bits, engines that do not divide such
    weights have plans without tensor parallelism and pipelines alone (``holding`` sees to it).
    """

    base: Base = "16bit"

    def __post_init__(self) -> None:
        check_lists(self)
        self._check_engines()
        if self.unequal_meshes and not self.unequal_stages:
            refuse(
                "unequal_stages",
                "false, but unequal_meshes is true, by which stages differ: give true, or leave "
                "both out",
            )

    def _check_engines(self) -> None:
        """Refuse unknown engines, and choices that none of the space's engines supports."""
        known = names_for_plans()
        for name in self.other_engines:
            if name not in known:
                refuse("other_engines", f"{name!r} is unknown{near_matches(name, known)}")
        if len(set(self.engines)) < len(self.engines):
            twice = next(name for name in self.engines if self.engines.count(name) > 1)
            where = "field engine names it too" if twice == self.engine else "it is listed twice"
            refuse("other_engines", f"{twice!r}, but {where}: name each other engine once")
        rows = [ENGINES[name] for name in self.engines]
        for order in self.orders:
            if order not in ORDERS:
                refuse("orders", f"{order!r} is unknown{near_matches(order, ORDERS)}")
            if problem := _order_problem(rows, order):
                refuse("orders", problem)
        for name, read in _LIMITED.items():
            row, listed = DIMENSIONS[name], read(self)
            assert row.limit is not None
            for value in _hardest(listed, is_level=row.limit.is_level):
                problems = (
                    engine_problem(name, value, engine, in_pipeline=self.pipeline != (1,))
                    for engine in rows
                )
                if problem := _of_all(problems):
                    refuse(row.holder or name, problem)

    @property
    def engines(self) -> tuple[str, ...]:
        """The names of the engines that plans of the space may use."""
        return (self.engine, *self.other_engines)

    @property
    def of_engines(self) -> tuple["SearchSpace", ...]:
        """Divide the search space by engine: for each engine, the space of the plans that it
        runs.
        """
        is_one = not self.other_engines
        return (self,) if is_one else tuple(self.on(name) for name in self.engines)

    def on(self, *engines: str) -> "SearchSpace":
        """The search space of those plans that at least one of the given engines can run.

        From a space of an engine that offloads in part, engines that offload all or nothing take
        nothing: such plans have no bounds, and are in spaces that are made for them alone.
        """
        rows = [ENGINES[name] for name in engines]
        lists = {name: _run_by(rows, name, read(self)) for name, read in _LIMITED.items()}
        if ENGINES[self.engine].offloads and not any(row.offloads for row in rows):
            lists |= dict.fromkeys(OFFLOADS, (0.0,))
        recomputation = self.recomputation
        if not any(row.recomputes_some for row in rows):
            lists |= {name: (0,) for name in counts_of_blocks() if name != RECOMPUTED}
            recomputation = "none_or_all" if recomputation == "any" else recomputation
        run_by_them = replace(
            self.with_lists(lists),
            recomputation=recomputation,
            engine=engines[0],
            other_engines=engines[1:],
            orders=tuple(order for order in self.orders if not _order_problem(rows, order))
            or (DEFAULT_ORDER,),
        )
        return run_by_them.holding(self.base)

    @property
    def lists(self) -> Mapping[str, tuple[float, ...] | None]:
        """The list of allowed values for each dimension; None allows any value."""
        return {name: read(self) for name, read in _READERS.items()}

    def with_lists(self, lists: Mapping[str, tuple[Any, ...] | None]) -> "SearchSpace":
        """A copy of the space with other lists of values for some dimensions."""
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

    def beside(self, how: Reduction) -> "SearchSpace":
        """The search space restricted to plans that are compatible with a gradient reduction."""
        if how.is_plain:
            return self
        if how.delay:
            refuse(
                "reduction",
                f"delay {how.delay}, but a search cannot overlap exchanges with later steps: "
                f"search with delay 0, then predict the plan with delay {how.delay}",
            )
        if how.asynchronous:
            refuse(
                "reduction",
                "asynchronous servers cannot be searched, since ranks share no steps: search "
                "without reduction, then predict the plan with it",
            )
        most = how.most_sharded
        levels = tuple(level for level in self.zero if level <= most) or (most,)
        stays = dict.fromkeys(STAYS, (0.0,))
        spaces_beside = self.with_lists({"zero": levels, "state_replicas": (1,), **stays})
        # Where each replica of the model has one rank of every stage, all stages need equal meshes.
        are_replicas = how.is_apart and how.replicas is None
        return replace(spaces_beside, unequal_meshes=False) if are_replicas else spaces_beside

    def holding(self, base: Base) -> "SearchSpace":
        """The search space restricted to plans that the engines can run with frozen weights of this
        many bits: without tensor parallelism and pipelines on engines that do not divide such
        weights, and unsharded, if the space allows that, where they have 8 bits, which FSDP2
        does not shard.

        An engine of which no listed plan is left leaves the space; without any, it is refused.
        """
        if base == "16bit":
            return self
        undivided: dict[str, Any] = {AXES["tensor"].dimension: (1,), "pipeline": (1,)}
        lists = {name: getattr(self, name) for name in undivided}
        lacks_one = [name for name, listed in lists.items() if listed and 1 not in listed]
        dividing = tuple(name for name in self.engines if ENGINES[name].divides_quantised)
        if lacks_one and not dividing:
            name = lacks_one[0]
            known = ", ".join(str(degree) for degree in lists[name])
            refuse(
                "base",
                f"{base}, but engine {self.engine} divides no such weights, and space {self.name} "
                f"lists {name} {known}: list 1 too, or take engine mistlab, which does",
            )
        if lacks_one and dividing != self.engines:
            return self.on(*dividing).holding(base)
        if base == "8bit" and 0 in self.zero:
            undivided["zero"] = (0,)
        held = replace(self, base=base)
        # Of several engines, each has its restriction where the space is divided by engine.
        return held if dividing else replace(held, **undivided)

    def listed(self, dimension: str) -> tuple[float, ...] | None:
        """The values of a dimension that the space lists, sorted; None allows any value."""
        read = _READERS.get(dimension)
        values = None if read is None else read(self)
        return None if values is None else tuple(sorted(set(values)))

    def choices(
        self, dimension: str, *, layers: int, degree: Callable[[str], int], in_pipeline: bool
    ) -> tuple[float, ...]:
        """The values of a dimension among which a stage of the space can choose, in ascending
        order.

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
        """The numbers of a stage's ``layers`` blocks that may be run in one way, such as
        recomputed.
        """
        if self.recomputation == "any":
            return range(layers + 1)
        return (layers,) if self.recomputation == "all" and of_whole else (0, layers)


_READERS = {name: attrgetter(row.path or name) for name, row in DIMENSIONS.items() if row.is_listed}


_LIMITED = {name: read for name, read in _READERS.items() if DIMENSIONS[name].limit is not None}


def _hardest(listed: tuple[float, ...] | None, *, is_level: bool) -> tuple[float, ...]:
    """The listed values of a dimension that at least one engine must support: the lowest if values
    are levels such as ZeRO's, otherwise all.
    """
    if listed is None:
        return ()
    return (min(listed),) if is_level else listed


def _run_by(
    engines: Sequence[Engine], name: str, listed: tuple[float, ...] | None
) -> tuple[float, ...] | None:
    """The values of a dimension that are listed and that these engines support; if none is, the
    engines' highest level or first value.
    """
    limit = DIMENSIONS[name].limit
    assert limit is not None
    of_engines = [limit.runs(engine, False) for engine in engines]
    if None in of_engines:
        return listed
    runs = [value for values in of_engines if values is not None for value in values]
    if listed is None:
        return tuple(runs)
    default = max(runs) if limit.is_level else runs[0]
    return tuple(value for value in listed if value in runs) or (default,)


def _order_problem(engines: Sequence[Engine], order: str) -> str:
    """The reason why none of the engines can run a pipeline schedule; empty if one can."""
    return _of_all(row.order_problem(order, default=DEFAULT_ORDER) for row in engines)


def _of_all(problems: Iterable[str]) -> str:
    """The first engine's problem if every engine has a problem; empty otherwise."""
    known_problems = list(problems)
    return known_problems[0] if all(known_problems) else ""
