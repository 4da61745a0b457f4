"""Links: measured shapes as they are, others by the rate of the links, sends and copies."""

from dataclasses import replace

import numpy as np
import pytest

from mistlab import catalog
from mistlab.core.values import InputError
from mistlab.cost.links import PCIE_HOP_S, LinkTimes
from mistlab.graph.graph import Collective
from mistlab.machine.cluster import Cluster
from mistlab.machine.hardware import GroupTransfers, Line, Transfers
from mistlab.network.link_times import NETWORK_HOP_S


def line(gbytes_per_s: float, latency_us: float = 10.0) -> Line:
    return Line(latency_us=latency_us, gbytes_per_s=gbytes_per_s, smallest_mib=1, largest_mib=1024)


def links_of(*groups: GroupTransfers, nodes: int = 4, **others: object) -> LinkTimes:
    hardware = catalog.hardware("l4-24gb")
    transfers = Transfers(
        groups=groups,
        **{k: v for k, v in others.items() if k in ("in_node", "across_nodes")},  # type: ignore[arg-type]
    )
    overrides = {k: v for k, v in others.items() if k.endswith("per_s")}
    return LinkTimes.of(
        Cluster(
            hardware=replace(hardware, transfers=transfers),
            nodes=nodes,
            gpus_per_node=8,
            **overrides,  # type: ignore[arg-type]
        )
    )


INSIDE = GroupTransfers(gpus_in_node=4, nodes=1, all_gather=line(6.0), all_reduce=line(3.0))
ACROSS = GroupTransfers(gpus_in_node=8, nodes=2, all_gather=line(4.0, 1000.0))


def test_a_measured_shape_is_its_line() -> None:
    link = links_of(INSIDE).collective("all_gather", gpus_in_node=4, nodes=1)
    assert link(np.array([6e9]))[0] == pytest.approx(1.00001)
    assert link(np.array([0.0]))[0] == 0


def test_several_messages_have_a_latency_each() -> None:
    link = links_of(INSIDE).collective("all_reduce", gpus_in_node=4, nodes=1)
    assert link(np.array([3e9]), 5)[0] == pytest.approx(1.00005)


def test_another_shape_moves_its_own_share_past_each_link() -> None:
    near, other = (
        links_of(INSIDE).collective("all_gather", gpus_in_node=gpus, nodes=1) for gpus in (4, 2)
    )
    assert other.s_per_byte / near.s_per_byte == pytest.approx((1 / 2) / (3 / 4))


def test_groups_of_a_node_share_its_network() -> None:
    links = links_of(INSIDE, ACROSS)
    whole = links.collective("all_gather", gpus_in_node=8, nodes=2)
    half = links.collective("all_gather", gpus_in_node=4, nodes=2)
    assert half.s_per_byte / whole.s_per_byte == pytest.approx(2 * (7 / 8) / (15 / 16))
    assert whole.latency_s == pytest.approx(1e-3)


def test_latency_grows_with_the_hops_of_a_ring() -> None:
    links = links_of(INSIDE, ACROSS, nodes=128)
    # L4 GPUs reach one another over PCIe: from 8 ranks on 2 nodes to 4 on 2, 8 hops fewer inside.
    near, half = (links.collective("all_gather", gpus_in_node=g, nodes=2) for g in (8, 4))
    assert near.latency_s - half.latency_s == pytest.approx(8 * PCIE_HOP_S)
    far = links.collective("all_gather", gpus_in_node=8, nodes=128)
    hops_s = 126 * (7 * PCIE_HOP_S + NETWORK_HOP_S)
    assert far.latency_s - near.latency_s == pytest.approx(hops_s)
    assert far(np.array([1.0]))[0] == pytest.approx(far.latency_s)
    inside = [links.collective("all_reduce", gpus_in_node=g, nodes=1).latency_s for g in (4, 8)]
    assert inside[1] - inside[0] == pytest.approx(2 * 4 * PCIE_HOP_S)


def test_a_small_all_reduce_over_many_nodes_takes_a_tree() -> None:
    link = links_of(INSIDE, nodes=128).collective("all_reduce", gpus_in_node=8, nodes=128)
    ring = replace(link, instead=None)
    small, large = np.array([1e3]), np.array([1e10])
    # Up seven levels and down, instead of twice round 128 nodes.
    fewer_s = 2 * (7 * 127 * PCIE_HOP_S + (127 - 7) * NETWORK_HOP_S)
    assert ring(small)[0] - link(small)[0] == pytest.approx(fewer_s, rel=1e-3)
    assert link(large)[0] == ring(large)[0]
    gather = links_of(INSIDE, nodes=128).collective("all_gather", gpus_in_node=8, nodes=128)
    assert gather.instead is None


def test_the_network_is_measured_in_latency_too() -> None:
    """What was measured beyond its own hops is part of every other shape."""
    slow = replace(ACROSS, all_gather=line(4.0, 5000.0))
    usual, slower = (
        links_of(INSIDE, one, nodes=64).collective("all_gather", gpus_in_node=8, nodes=64)
        for one in (ACROSS, slow)
    )
    assert slower.latency_s - usual.latency_s == pytest.approx(4e-3)


def test_an_unmeasured_network_has_its_datasheets_rate() -> None:
    links = links_of(INSIDE)
    link = links.collective("all_reduce", gpus_in_node=8, nodes=2)
    assert link.s_per_byte == pytest.approx(2 * 15 / 16 / 12.5e9)
    assert links.collective("all_gather", gpus_in_node=1, nodes=1).s_per_byte == 0


@pytest.mark.parametrize(
    ("group", "kind", "gbytes_per_s"),
    [
        (GroupTransfers(gpus_in_node=4, nodes=1, all_gather=line(6.0)), "reduce_scatter", 6.0),
        (GroupTransfers(gpus_in_node=4, nodes=1, all_gather=line(6.0)), "all_reduce", 3.0),
        (GroupTransfers(gpus_in_node=4, nodes=1, all_reduce=line(3.0)), "all_gather", 6.0),
    ],
)
def test_one_collective_says_what_the_others_take(
    group: GroupTransfers, kind: str, gbytes_per_s: float
) -> None:
    link = links_of(group).collective(kind, gpus_in_node=4, nodes=1)  # type: ignore[arg-type]
    assert link.s_per_byte == pytest.approx(1 / gbytes_per_s / 1e9)


def test_a_plan_file_can_give_another_network() -> None:
    usual, faster = (
        links_of(INSIDE, ACROSS, **others).collective("all_gather", gpus_in_node=8, nodes=2)
        for others in ({}, {"inter_node_gbytes_per_s": 25.0})
    )
    assert faster.s_per_byte == pytest.approx(usual.s_per_byte / 2)


def test_sends_across_nodes_share_the_network() -> None:
    links = links_of(INSIDE, in_node=line(10.0), across_nodes=line(5.0))
    assert links.send(across_nodes=False, at_once=8).s_per_byte == pytest.approx(1e-10)
    assert links.send(across_nodes=True, at_once=1).s_per_byte == pytest.approx(2e-10)
    assert links.send(across_nodes=True, at_once=8).s_per_byte == pytest.approx(8 / 12.5e9)


def test_parts_for_other_nodes_take_the_rank_s_share_of_the_network() -> None:
    links = links_of(INSIDE)
    one_a_node = links.to_all(gpus_in_node=1, nodes=2)
    # Half of a rank's bytes go to the other node, over an eighth of its node's network.
    assert one_a_node.s_per_byte * 12.5e9 == pytest.approx(8 / 2)
    assert one_a_node.latency_s == pytest.approx(NETWORK_HOP_S)
    assert links.to_all(gpus_in_node=2, nodes=4).s_per_byte * 12.5e9 == pytest.approx(8 * 3 / 4)
    # Of two copies of a token both go to the same node in half of all cases, and one is sent then.
    twice = links.to_all(gpus_in_node=1, nodes=2, copies=2)
    assert twice.s_per_byte == pytest.approx(one_a_node.s_per_byte * 3 / 4, abs=0)


def test_parts_that_stay_in_a_node_may_take_longest() -> None:
    slow = replace(INSIDE, gpus_in_node=8, all_gather=line(0.5), all_reduce=None)
    links = links_of(slow)
    inside = links.collective("all_to_all", gpus_in_node=8, nodes=1)
    across = links.to_all(gpus_in_node=8, nodes=2)
    assert across.s_per_byte == pytest.approx(inside.s_per_byte / 2, abs=0)
    assert across.latency_s == pytest.approx(inside.latency_s + NETWORK_HOP_S)
    passed_on = links.to_all(gpus_in_node=8, nodes=2, copies=2)
    assert passed_on.s_per_byte == pytest.approx(inside.s_per_byte, abs=0)


@pytest.mark.parametrize(
    ("kind", "nodes", "has_another"),
    [
        ("all_gather", 1, True),
        ("reduce_scatter", 2, True),
        ("all_reduce", 1, False),
        ("all_to_all", 1, True),
        ("all_to_all", 2, False),
    ],
)
def test_inside_a_layer_half_of_an_all_reduce_is_another_estimate(
    kind: Collective, nodes: int, has_another: bool
) -> None:
    links = links_of(INSIDE)
    link = links.inside_layer(kind, gpus_in_node=4, nodes=nodes)
    both = links.collective("all_reduce", gpus_in_node=4, nodes=nodes)
    assert link.s_per_byte == links.collective(kind, gpus_in_node=4, nodes=nodes).s_per_byte
    if has_another:
        assert link.instead is not None
        assert link.instead.s_per_byte == both.s_per_byte / 2
        assert link.instead.latency_s == both.latency_s / 2
    else:
        assert link.instead == links.collective(kind, gpus_in_node=4, nodes=nodes).instead


def test_what_was_not_measured_is_named_with_the_remedy() -> None:
    hardware = catalog.hardware("l4-24gb")
    provenance = replace(hardware.provenance, transfers=None)
    bare = replace(hardware, transfers=None, provenance=provenance)
    with pytest.raises(
        InputError, match=r"l4-24gb has no transfers .*: measure them .* --bandwidth"
    ):
        LinkTimes.of(Cluster(hardware=bare, nodes=1, gpus_per_node=8))
    links = links_of(ACROSS)
    with pytest.raises(InputError, match=r"no all_reduce inside a node: measure this .*--collect"):
        links.collective("all_reduce", gpus_in_node=4, nodes=1)
    with pytest.raises(InputError, match="no host_to_device copies: measure them"):
        links.copy("host_to_device")
