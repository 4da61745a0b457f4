"""Clusters with groups of unlike nodes: what they are, and how plan files say them."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from mistlab import catalog
from mistlab.core.values import FieldError
from mistlab.cost.memory import host_bytes_of, host_bytes_over, room_bytes, room_of_plan
from mistlab.job.job import dump_job, groups_named, job_from_mapping, job_to_mapping, load_job
from mistlab.machine.cluster import Cluster, NodeGroup
from simulators.symbolic import SymbolicPredictor

L4, A100 = catalog.hardware("l4-24gb"), catalog.hardware("a100-40gb")
CLUSTER = Cluster(
    hardware=L4, nodes=5, gpus_per_node=4, others=(NodeGroup(hardware=A100, nodes=2),)
)
STAGE = {"layers": 16, "data_parallel": 1, "tensor_parallel": 4, "micro_batch": 1}
PLAN: dict[str, Any] = {
    "workload": {
        "model": "gpt3-2.7b",
        "sequence_length": 2048,
        "global_batch": 8,
        "attention": "flash",
        "precision": "fp16",
    },
    "cluster": {
        "hardware": [
            {"hardware": "l4-24gb", "nodes": 1},
            {"hardware": "a100-40gb", "nodes": 1},
        ],
        "gpus_per_node": 4,
    },
    "plan": {"micro_batches": 8, "stages": [STAGE, STAGE]},
}


def test_ranks_fill_the_groups_in_order() -> None:
    assert [(group.hardware.name, group.nodes) for group in CLUSTER.groups] == [
        ("l4-24gb", 3),
        ("a100-40gb", 2),
    ]
    assert CLUSTER.ranks_of_groups == (range(12), range(12, 20))
    assert [CLUSTER.group_of(rank) for rank in (0, 11, 12, 19)] == [0, 0, 1, 1]
    assert CLUSTER.name == "l4-24gb:3,a100-40gb:2"


def test_each_group_has_figures_of_its_own() -> None:
    ours = [group.memory_bytes for group in CLUSTER.of_groups]
    assert ours == [L4.gpu.memory_bytes, A100.gpu.memory_bytes]
    assert {group.num_gpus for group in CLUSTER.of_groups} == {CLUSTER.num_gpus}


def test_one_group_is_the_cluster_itself() -> None:
    equal = Cluster(hardware=L4, nodes=2, gpus_per_node=4)
    assert equal.of_groups == (equal,)
    assert equal.name == "l4-24gb"
    assert equal.in_one_group(2, 4)


@pytest.mark.parametrize(
    ("first_rank", "num_gpus", "like"),
    [
        # In the middle of its group: as from the second node, at the same place in the node.
        (8, 2, 4),
        (6, 1, 2),
        # At a border of its group.
        (0, 4, 0),
        (8, 4, 8),
        (12, 2, 12),
        (18, 2, 18),
        # Beyond the border, in the middle of the second group.
        (16, 2, 16),
        (17, 2, 13),
    ],
)
def test_a_stage_costs_the_same_from_the_first_rank_like_it(
    first_rank: int, num_gpus: int, like: int
) -> None:
    assert CLUSTER.like_rank(first_rank, num_gpus) == like


def test_a_plan_file_lists_the_groups(tmp_path: Path) -> None:
    job = job_from_mapping(PLAN)
    assert job.cluster == Cluster(
        hardware=L4, nodes=2, gpus_per_node=4, others=(NodeGroup(hardware=A100, nodes=1),)
    )
    dump_job(job, tmp_path / "plan.yaml")
    assert load_job(tmp_path / "plan.yaml") == job
    assert job_to_mapping(job)["cluster"]["hardware"] == PLAN["cluster"]["hardware"]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "nodes that do not add up": (
        {"nodes": 3},
        "cluster.nodes: 3, but the groups in cluster.hardware have 2 nodes: give 2, or leave it",
    ),
    "an unknown group": (
        {"hardware": [{"hardware": "l4-24gb", "nodes": 1}, {"hardware": "a100-41gb", "nodes": 1}]},
        r"cluster.hardware\[1\].hardware: 'a100-41gb' is unknown: did you mean 'a100-40gb'",
    ),
    "a group without nodes": (
        {"hardware": [{"hardware": "l4-24gb"}]},
        r"cluster.hardware\[0\].nodes: missing: give a whole number",
    ),
    "a group of no nodes": (
        {"hardware": [{"hardware": "l4-24gb", "nodes": 0}]},
        r"cluster.hardware\[0\].nodes: 0 is too small",
    ),
    "no groups": ({"hardware": []}, "cluster.hardware: is an empty list: give at least one group"),
    "a name in the list": (
        {"hardware": ["l4-24gb"]},
        r"cluster.hardware\[0\]: 'l4-24gb' is not a group of nodes: give a mapping with",
    ),
    "groups under another key": (
        {"others": []},
        "cluster.others: unknown key: list all groups of nodes in cluster.hardware",
    ),
    "more GPUs than a node of the second group has": (
        {
            "gpus_per_node": 8,
            "hardware": [
                {"hardware": "l4-24gb", "nodes": 1},
                {"hardware": "gh200-96gb", "nodes": 1},
            ],
        },
        "cluster.gpus_per_node: 8 is more than a node of gh200-96gb has: give at most 4",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_cluster_that_does_not_add_up_is_refused(name: str) -> None:
    changes, message = REFUSED[name]
    mapping = deepcopy(PLAN)
    mapping["cluster"] |= changes
    with pytest.raises(FieldError, match=message):
        job_from_mapping(mapping)


def test_a_stage_over_two_groups_is_refused() -> None:
    mapping = deepcopy(PLAN)
    mapping["plan"]["stages"] = [{**STAGE, "tensor_parallel": 2}, STAGE]
    message = (
        r"plan.stages\[1\]: takes GPUs 2 to 5, which are l4-24gb before GPU 4 and "
        "a100-40gb from there on: give degrees with which a stage begins at GPU 4"
    )
    with pytest.raises(FieldError, match=message):
        job_from_mapping(mapping)


def test_a_cluster_of_other_groups_alone_is_refused() -> None:
    with pytest.raises(FieldError, match="nodes: 2 is not more than the 2 nodes in others"):
        Cluster(hardware=L4, nodes=2, gpus_per_node=4, others=(NodeGroup(hardware=A100, nodes=2),))


def test_a_command_line_names_groups_with_their_nodes() -> None:
    assert groups_named("l4-24gb", Path()) == []
    assert groups_named("l4-24gb:1,a100-40gb:2", Path()) == [
        NodeGroup(hardware=L4, nodes=1),
        NodeGroup(hardware=A100, nodes=2),
    ]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("l4-24gb:1,a100-40gb", "a100-40gb"),
        ("l4-24gb,a100-40gb:1", "l4-24gb"),
        (":1,l4-24gb:2", ":1"),
        ("l4-24gb:1,a100-40gb:x", "a100-40gb:x"),
    ],
)
def test_a_command_line_that_leaves_nodes_out_is_refused(text: str, part: str) -> None:
    problem = f"{part!r} lacks a number of nodes: give each group as hardware:nodes"
    with pytest.raises(FieldError, match=problem):
        groups_named(text, Path())


def test_a_number_alone_is_a_name_and_no_number_of_nodes() -> None:
    assert groups_named("4090", Path()) == []


def test_a_stage_s_room_is_that_of_its_own_gpus() -> None:
    job = job_from_mapping(PLAN)
    room = room_of_plan(job.cluster, job.plan)
    assert room.tolist() == [room_bytes(group) for group in job.cluster.of_groups]
    assert room[0] < room[1]


def test_the_fullest_host_is_the_one_that_holds_most() -> None:
    """The second of two stages, each on a node of its own, offloads; the first holds nothing."""
    content = deepcopy(PLAN)
    content["plan"]["stages"] = [STAGE, {**STAGE, "offload": {"optimizer": 1.0}}]
    job = job_from_mapping(content)
    predictor = SymbolicPredictor(workload=job.workload, cluster=job.cluster)
    prediction = predictor.predict(job.plan)
    held = [stage.host_bytes for stage in prediction.stages]
    assert held[0] == 0
    assert host_bytes_of(job.plan, prediction, job.cluster) == held[1] > 0
    rooms = [group.host_memory_bytes for group in job.cluster.of_groups]
    over = [mine - room for mine, room in zip(held, rooms, strict=True)]
    assert host_bytes_over(job.plan, prediction, job.cluster) == max(over)
