"""The steps of the breakdown, and the searches in which one of them is left out."""

from dataclasses import dataclass, replace

from mistlab.cost.views import FULL
from mistlab.plan.space import OffloadRatios, SearchSpace, space_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A space to search, and the view in which it is searched."""

    name: str
    space: SearchSpace
    view: str


def steps(unaware: str) -> list[Step]:
    """The steps, each with a component more than the one before; all but the last are searched in
    the view ``unaware``."""
    all_recomputed = replace(space_of("3d"), name="3d, all recomputed", recomputation="all")
    sharded = replace(space_of("+zero"), name="+zero, all recomputed", recomputation="all")
    return [
        Step(name="3D parallelism", space=all_recomputed, view=unaware),
        Step(name="+ ZeRO-2 and 3", space=sharded, view=unaware),
        Step(name="+ flexible checkpointing", space=space_of("+checkpointing"), view=unaware),
        Step(name="+ offloading", space=space_of("+offload"), view=unaware),
        Step(name="+ uneven blocks", space=space_of("mist"), view=unaware),
        Step(name="+ imbalance-aware", space=space_of("mist"), view=FULL),
    ]


def left_out(unaware: str) -> list[Step]:
    """The whole with one component missing."""
    mist = space_of("mist")

    def without(name: str, **changes: object) -> Step:
        space = replace(mist, name=f"mist without {name}", **changes)  # type: ignore[arg-type]
        return Step(name=name, space=space, view=FULL)

    return [
        without("ZeRO-2 and 3", zero=(1,)),
        without("flexible checkpointing", recomputation="all"),
        without("offloading", offload=OffloadRatios()),
        without("uneven blocks", layers_off_balance=0),
        without("a choice for each stage", unequal_stages=False),
        Step(name="imbalance awareness", space=mist, view=unaware),
    ]
