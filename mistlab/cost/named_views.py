"""The views that have names: predictors that do not know something.

``serial`` and ``ideal`` see another machine, on which streams slow one another down by as much as
if they took turns, or not at all. So a slot takes the sum of its streams, or its longest stream.
``average`` and ``blind`` see the true machine, but not that the first and the last micro-batch take
longer: they spread the difference over all micro-batches, or drop it.
"""

from collections.abc import Mapping
from dataclasses import replace

from mistlab.cost.views import Extras, View
from mistlab.machine.cluster import Cluster
from mistlab.machine.slowdowns import SHARED_SETS, GroupSlowdowns, Interference, Slowdown
from mistlab.values.errors import InputError, near_matches


def _sharing(cluster: Cluster, *, taking_turns: bool) -> Cluster:
    """The cluster with other slowdowns: of streams that take turns, or that do not meet.

    While n streams take turns, each of them runs at an n-th of its speed.
    """
    slowdowns = tuple(
        Slowdown(
            streams=streams, factors=(float(len(streams) if taking_turns else 1),) * len(streams)
        )
        for streams in SHARED_SETS
    )
    alike = GroupSlowdowns(gpus_in_node=1, nodes=1, slowdowns=slowdowns)
    interference = Interference(groups=(alike,))
    others = tuple(
        replace(group, hardware=replace(group.hardware, interference=interference))
        for group in cluster.others
    )
    hardware = replace(cluster.hardware, interference=interference)
    return replace(cluster, hardware=hardware, others=others)


def _taking_turns(cluster: Cluster) -> Cluster:
    return _sharing(cluster, taking_turns=True)


def _undisturbed(cluster: Cluster) -> Cluster:
    return _sharing(cluster, taking_turns=False)


FULL = "full"
VIEWS: Mapping[str, View] = {
    FULL: View(),
    "serial": View(of_cluster=_taking_turns),
    "ideal": View(of_cluster=_undisturbed),
    "average": View(extras=Extras(spread=1.0)),
    "blind": View(extras=Extras(spread=0.0)),
}


def view_of(name: str) -> View:
    """The view of a name; refuses an unknown name."""
    if name in VIEWS:
        return VIEWS[name]
    message = f"view {name!r} is unknown{near_matches(name, VIEWS)}"
    raise InputError(message)
