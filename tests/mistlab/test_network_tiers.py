"""Networks of several tiers: their files, times of collectives over them, and plans on them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mistlab import catalog
from mistlab.core.distinct import Known
from mistlab.core.values import InputError, from_mapping
from mistlab.cost.breakdown import breakdown_of
from mistlab.cost.links import LinkTimes
from mistlab.graph.graph import Collective
from mistlab.job.job import Job, job_from_mapping, job_to_mapping, network_from
from mistlab.machine.cluster import Cluster
from mistlab.network.link_times import NETWORK_HOP_S, RATE_OF_TREES
from mistlab.network.tiers import Network
from mistlab.plan.dimensions import GROUPS, groups_of
from mistlab.plan.plan import StagePlan
from mistlab.stages.stage_batch import StageBatch
from mistlab.stages.stage_shape import shapes_of
from simulators.events import EventSimulator
from simulators.symbolic import SymbolicPredictor

EXAMPLES = Path(__file__).parents[2] / "examples" / "networks"
H100 = catalog.hardware("h100-80gb")
NODE_RATE = H100.node.inter_node_gbytes_per_s
NODE = {"name": "node", "gpus": 8}
# So large that latencies do not count.
LARGE = np.array([1e18])


def network(*tiers: dict[str, Any]) -> Network:
    return from_mapping(Network, {"tiers": [NODE, *tiers]})


def leaves(over: float = 1.0, **more: Any) -> Network:
    """Leaves of four nodes, below a spine of eight of them."""
    spine = {"name": "spine", "gpus": 256, "oversubscription": over, **more}
    return network({"name": "leaf", "gpus": 32}, spine)


def links(net: Network | None, nodes: int = 32) -> LinkTimes:
    return LinkTimes.of(Cluster(hardware=H100, nodes=nodes, gpus_per_node=8, network=net))


def job(net: Network | None, nodes: int = 32, **stage: int) -> Job:
    stage = {"layers": 32, "data_parallel": 8 * nodes // 8, "tensor_parallel": 8, **stage}
    return job_from_mapping(
        {
            "workload": {
                "model": "llama3-8b",
                "sequence_length": 4096,
                "global_batch": 512,
                "attention": "flash",
                "precision": "bf16",
            },
            "cluster": {"hardware": H100, "nodes": nodes, "gpus_per_node": 8, "network": net},
            "plan": {
                "micro_batches": 512 // stage["data_parallel"],
                "stages": [{"micro_batch": 1, "zero": 1, **stage}] * (32 // stage["layers"]),
            },
        }
    )


FLAT = network({"name": "leaf", "gpus": 4096})


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_two_tiers_cost_what_they_cost_without_a_network(kind: Collective) -> None:
    sizes = np.array([1.0, 1e5, 1e9])
    for gpus, nodes in ((8, 1), (1, 32), (8, 32), (2, 4)):
        plain, tiers = (
            links(net).collective(kind, gpus_in_node=gpus, nodes=nodes) for net in (None, FLAT)
        )
        assert (plain(sizes) == tiers(sizes)).all()


@pytest.mark.parametrize("predictor", [SymbolicPredictor, EventSimulator])
def test_plans_within_the_lowest_tiers_cost_the_same_to_the_digit(predictor: Any) -> None:
    stages: list[dict[str, int]] = [
        {},
        {"layers": 16, "data_parallel": 16},
        {"tensor_parallel": 4, "data_parallel": 64, "zero": 3},
    ]
    for stage in stages:
        found = [job(net, **stage) for net in (None, FLAT)]
        plain, tiers = (
            predictor(workload=one.workload, cluster=one.cluster).predict(one.plan) for one in found
        )
        assert replace(plain, notes=()) == replace(tiers, notes=())


def test_groups_across_leaves_share_what_the_leaves_send() -> None:
    """One rank of each leaf is in a group, so all GPUs of a leaf send through its links."""
    flat, narrow = (
        links(net).collective("all_gather", gpus_in_node=1, nodes=8, units=units)
        for net, units in ((None, ()), (leaves(3.0), (8,)))
    )
    assert narrow.s_per_byte / flat.s_per_byte == pytest.approx(3.0)
    assert (flat.tier, narrow.tier) == ("network", "spine")


def test_links_as_fast_as_all_below_bind_nothing() -> None:
    flat, full = (
        links(net).collective("all_gather", gpus_in_node=8, nodes=32, units=units)
        for net, units in ((None, ()), (leaves(), (8,)))
    )
    assert full.s_per_byte == flat.s_per_byte
    assert full.tier == "leaf"


def test_a_ring_in_the_order_of_leaves_crosses_each_once() -> None:
    """Four nodes below a leaf send through links of a quarter of their rate, one ring through each
    of which passes: as fast as between two nodes of a leaf. Scattered, every node sends through
    them."""
    whole = links(None).collective("all_gather", gpus_in_node=8, nodes=32)
    filled, scattered = (
        links(leaves(4.0, scattered=apart)).collective(
            "all_gather", gpus_in_node=8, nodes=32, units=(8,)
        )
        for apart in (False, True)
    )
    assert filled.s_per_byte == pytest.approx(whole.s_per_byte)
    assert scattered.s_per_byte == pytest.approx(4 * whole.s_per_byte)


def test_two_leaves_in_place_of_one_take_up_to_half_the_rate() -> None:
    """Published: none without oversubscription, up to half with twice as much below as above."""
    one = links(None, 8).collective("all_reduce", gpus_in_node=8, nodes=8)
    two = {"name": "leaf", "gpus": 32}
    rates = {
        over: one(LARGE)[0]
        / links(
            network(two, {"name": "s", "gpus": 64, "oversubscription": over, "scattered": True}), 8
        ).collective("all_reduce", gpus_in_node=8, nodes=8, units=(2,))(LARGE)[0]
        for over in (1, 2)
    }
    assert rates == pytest.approx({1: 1.0, 2: 0.5})


def test_rails_in_place_of_leaves_save_rings_the_spine() -> None:
    """Below a leaf are four nodes, below the same ports as rails are 32: one rank a node."""
    rails = network(
        {"name": "rail", "gpus": 256, "rails": True, "forwards": False},
        {"name": "spine", "gpus": 512, "oversubscription": 2},
    )
    ring: dict[str, Any] = {"gpus_in_node": 1, "nodes": 32}
    tree, rail = (
        links(net, 32).collective("all_reduce", units=units, **ring)(LARGE)[0]
        for net, units in ((leaves(2.0, scattered=True), (8,)), (rails, (1,)))
    )
    assert tree / rail == pytest.approx(2.0)
    whole: dict[str, Any] = {"gpus_in_node": 8, "nodes": 32, "units": (1,)}
    across = links(rails).collective("all_to_all", **whole)
    # Of 31 in 32 messages that leave a node, seven in eight go to other rails.
    share = 8 / NODE_RATE / 1e9
    assert across.s_per_byte == pytest.approx(max(31 / 32, 2 * 31 * 7 / 256) * share)
    assert across.tier == "spine"


def test_messages_to_other_rails_are_forwarded_inside_nodes() -> None:
    rails = network({"name": "rail", "gpus": 256, "rails": True})
    found = [links(net).collective("all_to_all", gpus_in_node=8, nodes=32) for net in (FLAT, rails)]
    inside = links(FLAT).collective("all_to_all", gpus_in_node=8, nodes=1)
    assert found[1].s_per_byte == pytest.approx(max(found[0].s_per_byte, inside.s_per_byte))


def test_switches_that_add_up_help_all_reduces_alone() -> None:
    plain, adding = (
        network(
            {"name": "leaf", "gpus": 32, "reduces": adds},
            {"name": "spine", "gpus": 256, "oversubscription": 1, "reduces": adds},
        )
        for adds in (False, True)
    )
    shape: dict[str, Any] = {"gpus_in_node": 1, "nodes": 32, "units": (8,)}
    ring, summed = (links(net).collective("all_reduce", **shape) for net in (plain, adding))
    assert ring(LARGE)[0] / summed(LARGE)[0] == pytest.approx(2 * 31 / 32)
    assert summed.latency_s == pytest.approx(2 * NETWORK_HOP_S)
    gathers = [links(net).collective("all_gather", **shape) for net in (plain, adding)]
    assert gathers[0] == gathers[1]


def test_latencies_are_those_of_the_tiers_that_hops_pass() -> None:
    slow = network(
        {"name": "leaf", "gpus": 32, "latency_us": 20},
        {"name": "site", "gpus": 256, "gbytes_per_s": 1, "latency_us": 5000},
    )
    shape: dict[str, Any] = {"gpus_in_node": 1, "nodes": 32, "units": (8,)}
    ring = links(slow).collective("all_gather", **shape)
    flat = network({"name": "leaf", "gpus": 256, "latency_us": 20})
    usual = links(flat).collective("all_gather", gpus_in_node=1, nodes=32)
    assert ring.latency_s - usual.latency_s == pytest.approx(7 * (5000e-6 - 20e-6))
    # A tree of 32 nodes has five levels, three of them between leaves.
    tree = links(slow).collective("all_reduce", **shape).instead
    flat_tree = links(flat).collective("all_reduce", gpus_in_node=1, nodes=32).instead
    assert tree is not None
    assert flat_tree is not None
    assert tree.latency_s - flat_tree.latency_s == pytest.approx(2 * 3 * (5000e-6 - 20e-6))
    # Of the eight groups of a leaf each sends twice a message through a link of 1 GB/s, if that
    # falls short of its rate as links between nodes do.
    slower = usual.s_per_byte / (31 / 32 * 8 / NODE_RATE / 1e9)
    assert slower >= 1
    assert tree.s_per_byte == pytest.approx(slower * 8 * 2 / RATE_OF_TREES / 1e9)


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("group", [*GROUPS])
def test_units_of_groups_are_those_of_ranks_one_by_one(group: str, *, scattered: bool) -> None:
    net = leaves(scattered=scattered)
    cluster = Cluster(hardware=H100, nodes=32, gpus_per_node=8, network=net)
    meshes = [(t, c, d) for t in (1, 4) for c in (1, 2) for d in (1, 4, 16)]
    rows = [(*mesh, p * int(np.prod(mesh))) for mesh in meshes for p in (0, 1)]
    tensor, context, data, first = map(np.array, zip(*rows, strict=True))
    batch = StageBatch(
        layers=np.ones(len(rows)),
        tensor_parallel=tensor,
        context_parallel=context,
        data_parallel=data,
        micro_batch=1,
        first_rank=first,
    )
    found = shapes_of(Known(), batch.columns, cluster).groups[group][2]
    for row, (t, c, d, begin) in enumerate(rows):
        degrees = {"tensor_parallel": t, "context_parallel": c, "data_parallel": d}
        stage = StagePlan.of_values({"layers": 1, "micro_batch": 1, **degrees})
        nodes = [
            {(begin + rank) // 8 for rank in ranks} for ranks in groups_of(group, stage.degree)
        ]
        units = [{node % 8 if scattered else node // 4 for node in of_one} for of_one in nodes]
        assert found[row] == max(map(len, units)), (t, c, d, begin)


def test_sends_between_sites_wait_for_the_slowest_link() -> None:
    net = network(
        {"name": "leaf", "gpus": 128, "latency_us": 14},
        {"name": "site", "gpus": 256, "gbytes_per_s": 1.25, "latency_us": 20000},
    )
    found = job(net, layers=16, data_parallel=16)
    breakdown = breakdown_of(found)
    tiers = {one.part: one.tier for one in breakdown.tiers}
    assert tiers == {
        "tensor_exchange_s": "node",
        "data_parallel_s": "leaf",
        "sends_s": "site",
    }
    link = LinkTimes.of(found.cluster).send(across_nodes=True, at_once=8, tier=2, senders=128)
    assert link.s_per_byte == pytest.approx(128 / 1.25e9)
    assert link.latency_s >= 0.019
    closed, played = (
        one(workload=found.workload, cluster=found.cluster).predict(found.plan)
        for one in (SymbolicPredictor, EventSimulator)
    )
    assert closed.iteration_s == pytest.approx(played.iteration_s, rel=0.05)
    plain = job(None, layers=16, data_parallel=16)
    usual = SymbolicPredictor(workload=plain.workload, cluster=plain.cluster).predict(plain.plan)
    assert closed.iteration_s > 1.5 * usual.iteration_s


def test_examples_are_networks_and_plan_files_keep_them() -> None:
    for path in sorted(EXAMPLES.glob("*.yaml")):
        net = network_from(str(path), Path())
        assert isinstance(net, Network)
        whole = job(net)
        assert job_from_mapping(job_to_mapping(whole)) == whole


@pytest.mark.parametrize(
    ("tiers", "words"),
    [
        (
            [{"name": "leaf", "gpus": 100}],
            "tiers.1.gpus: 100 GPUs of tier leaf are .* 96 or 104",
        ),
        ([{"name": "leaf", "gpus": 8}], "single unit of tier node: give a larger"),
        ([], "1 is too few: give one inside a node and one between nodes"),
        ([{"name": "leaf", "gpus": 16, "oversubscription": 2}], "give gbytes_per_s, a node's rate"),
        (
            [{"name": "leaf", "gpus": 16}, {"name": "spine", "gpus": 64}],
            "tiers.2.oversubscription: missing: give 1",
        ),
        (
            [
                {"name": "leaf", "gpus": 16, "latency_us": 20},
                {"name": "spine", "gpus": 64, "oversubscription": 1, "latency_us": 2},
            ],
            "tiers.2.latency_us: 2 is less than the 20 of tier leaf",
        ),
        ([{"name": " ", "gpus": 16}], "name: is empty: give what"),
        (
            [
                {"name": "leaf", "gpus": 16},
                {"name": "leaf", "gpus": 64, "oversubscription": 1},
            ],
            "is not unique among the tiers",
        ),
        (
            [
                {"name": "leaf", "gpus": 16},
                {"name": "rail", "gpus": 64, "oversubscription": 1, "rails": True},
            ],
            "only the tier between nodes can have rails",
        ),
    ],
)
def test_networks_that_do_not_nest_are_refused(tiers: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(InputError, match=words):
        network(*tiers)


def test_networks_of_other_clusters_are_refused() -> None:
    with pytest.raises(
        InputError,
        match=r"nodes: 32 is more than the 4 nodes that network given connects: give at most 4",
    ):
        job(network({"name": "leaf", "gpus": 32}))
    with pytest.raises(InputError, match="a node of h100-80gb has 8: give 8"):
        job(from_mapping(Network, {"tiers": [{"name": "n", "gpus": 4}, {"name": "l", "gpus": 64}]}))
    with pytest.raises(InputError, match=r"is not the path of a \.yaml file: give one"):
        network_from("fat-tree", Path())
