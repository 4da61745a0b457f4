"""The parts of a large space with which its search begins.

A search of a large space tries coarse choices of everything, and a budget may be spent before it
has what a search of a smaller space finds at once. So it begins with smaller spaces: their plans
are its own, and what they find leaves out much of the rest.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from mistlab.values.dimensions import DIMENSIONS, names_of
from mistlab.values.made_fields import Recomputation
from mistlab.values.mesh import ranks_of
from mistlab.values.plan import Plan
from mistlab.values.space import SearchSpace, space_of
from searchers.meshes import other_names

# Whole searches of these spaces are quick, or are proven best.
FIRST = ("3d", "mist")
# Where meshes have other choices, such as sequence parallelism: a space of stages that are alike
# with these choices. Its search asks a hundredth of what one of unlike stages asks.
ALIKE = "moe"
# Numbers of recomputed blocks that a space allows, from few to many.
_RECOMPUTED: tuple[Recomputation, ...] = ("all", "none_or_all", "any")


def parts_of(space: SearchSpace) -> Iterator[SearchSpace]:
    """The parts to search before the whole space, the smallest first; none if its stages have equal
    meshes, whose search is quick.

    The last part has the meshes' other choices, such as sequence parallelism, in a small space; a
    part before has some of them where stages are alike, so a budget that ends early has seen them.
    """
    if not space.unequal_meshes:
        return
    # A single rank takes the lowest ZeRO level, and what it takes matters where it offloads: so the
    # lowest one is the whole space's. It goes with every pipeline, too.
    lowest = min(space.zero)
    others_of_mesh = {name: space.lists[name] for name in other_names()}
    has_others = any(len(listed or ()) > 1 for listed in others_of_mesh.values())
    first, *others = FIRST
    smaller = [space_of(name) for name in (first, *[ALIKE] * has_others, *others)]
    found = [common(space, replace(one, zero=tuple({lowest, *one.zero}))) for one in smaller]
    last = found[-1]
    if last is not None:
        found.append(last.with_lists(others_of_mesh))
    earlier: list[SearchSpace] = []
    for part in found:
        if part is not None and replace(part, name="") not in earlier:
            earlier.append(replace(part, name=""))
            yield part


def as_in(plan: Plan, space: SearchSpace) -> Plan:
    """A plan of a part as the whole space says it: where a single rank shares a choice with nobody,
    such as a ZeRO level, with the lowest value of the space."""
    stages = []
    for stage in plan.stages:
        lowest = {
            name: min(space.listed(name) or (0,))
            for name in names_of("savings")
            if (group := DIMENSIONS[name].shared_by) and ranks_of(group, stage.degree) == 1
        }
        stages.append(stage.with_values(lowest) if lowest else stage)
    return replace(plan, stages=tuple(stages))


def common(space: SearchSpace, other: SearchSpace) -> SearchSpace | None:
    """The plans of a space that another space has too, whatever the engine; None if there are
    none."""
    lists = {name: _both(listed, other.lists[name]) for name, listed in space.lists.items()}
    of_plans: dict[str, Any] = {
        name: _both(getattr(space, name), getattr(other, name)) for name in _OF_PLANS
    }
    if () in (*lists.values(), *of_plans.values()):
        return None
    off_balance = [
        one.layers_off_balance for one in (space, other) if one.layers_off_balance is not None
    ]
    flags: dict[str, Any] = {name: getattr(space, name) and getattr(other, name) for name in _FLAGS}
    return replace(
        space.with_lists(lists),
        **of_plans,
        recomputation=min(space.recomputation, other.recomputation, key=_RECOMPUTED.index),
        layers_off_balance=min(off_balance, default=None),
        **flags,
        tensor_parallel_in_node=space.tensor_parallel_in_node or other.tensor_parallel_in_node,
    )


def _both(some: Sequence[float] | None, others: Sequence[float] | None) -> tuple[float, ...] | None:
    """The values in both lists; None stands for every value."""
    if some is None or others is None:
        either = others if some is None else some
        return None if either is None else tuple(either)
    return tuple(value for value in some if value in others)


# The fields of a space that list what is of whole plans, and those that are true or false.
_OF_PLANS = ("pipeline", "micro_batches", "orders")
_FLAGS = ("unequal_stages", "unequal_meshes")
