import re
from dataclasses import replace

import pytest

from mistlab import catalog
from mistlab.core.values import FieldError
from mistlab.machine.cluster import Cluster, NodeGroup

L4 = catalog.hardware("l4-24gb")


def test_a_cluster_has_the_numbers_of_its_hardware() -> None:
    cluster = Cluster(hardware=L4, nodes=2, gpus_per_node=4)
    assert cluster.num_gpus == 8
    assert cluster.memory_bytes == L4.gpu.memory_bytes
    assert cluster.memory_bytes_per_s == L4.gpu.memory_bytes_per_s
    assert cluster.peak_flop_per_s("fp32") == L4.gpu.peak_flop_per_s("fp32")
    assert cluster.host_memory_bytes == L4.node.host_memory_bytes
    assert cluster.intra_node_bytes_per_s == L4.node.intra_node_bytes_per_s
    assert cluster.inter_node_bytes_per_s == L4.node.inter_node_bytes_per_s


def test_overrides_replace_them() -> None:
    cluster = Cluster(
        hardware=L4,
        nodes=1,
        gpus_per_node=8,
        memory_gib=10,
        host_memory_gib=20,
        intra_node_gbytes_per_s=30,
        inter_node_gbytes_per_s=40,
    )
    assert cluster.memory_bytes == 10 * 2**30
    assert cluster.host_memory_bytes == 20 * 2**30
    assert cluster.intra_node_bytes_per_s == 30e9
    assert cluster.inter_node_bytes_per_s == 40e9


def test_a_node_has_no_more_gpus_than_its_hardware() -> None:
    message = "gpus_per_node: 9 is more than a node of l4-24gb has: give at most 8"
    with pytest.raises(FieldError, match=message):
        Cluster(hardware=L4, nodes=1, gpus_per_node=9)


def test_memory_that_is_kept_free_is_none_for_plans() -> None:
    cluster = Cluster(hardware=L4, nodes=1, gpus_per_node=4, memory_gib=10, keep_free_gib=2.5)
    assert cluster.memory_bytes == 7.5 * 2**30
    assert cluster.whole_memory_bytes == 10 * 2**30
    many = NodeGroup(hardware=catalog.hardware("a100-40gb"), nodes=1)
    both = Cluster(hardware=L4, nodes=2, gpus_per_node=4, keep_free_gib=2, others=(many,))
    for one, plain in zip(both.of_groups, replace(both, keep_free_gib=None).of_groups, strict=True):
        assert one.memory_bytes == plain.memory_bytes - 2 * 2**30


@pytest.mark.parametrize(
    ("free_gib", "message"),
    [
        (-1.0, "keep_free_gib: -1.0 is too small: give a number of at least 0"),
        (21.9, "21.9 leaves plans nothing of the 21.7 GiB of a GPU of l4-24gb: give less, such as"),
        (30.0, "keep_free_gib: 30 leaves plans nothing"),
    ],
)
def test_no_more_is_kept_free_than_there_is(free_gib: float, message: str) -> None:
    """On unlike nodes the smallest GPU counts."""
    large = catalog.hardware("a100-40gb")
    for hardware, other in ((L4, large), (large, L4)):
        others = (NodeGroup(hardware=other, nodes=1),)
        with pytest.raises(FieldError, match=re.escape(message)):
            Cluster(
                hardware=hardware, nodes=2, gpus_per_node=4, keep_free_gib=free_gib, others=others
            )
