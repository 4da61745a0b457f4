"""Nodes in which copy engines instead of NCCL exchange weights and gradients between GPUs."""

from dataclasses import replace

from mistlab.machine.hardware import GroupTransfers, Hardware, Line

# The share of PCIe's rate that large copies reach; it is an assumption for links that are known
# only from datasheets.
OF_LINK = 0.7
# A link at least this fast connects GPUs directly, not through the host.
NVLINK_GBYTES_PER_S = 100.0


def with_copy_engines(hardware: Hardware) -> Hardware:
    """The hardware with communication between GPUs of a node at the rate of their links to the
    host.

    Measured NCCL rates of GPUs without direct links do not apply to copy engines: they are from
    virtual machines, whose host copies each message once more. The time of an all-reduce is that of
    a reduce-scatter and an all-gather.
    """
    transfers, node = hardware.transfers, hardware.node
    if transfers is None or node.intra_node_gbytes_per_s > NVLINK_GBYTES_PER_S:
        return hardware
    rate = OF_LINK * node.intra_node_gbytes_per_s

    def line(fitted: Line | None, share: float) -> Line | None:
        return fitted and replace(fitted, gbytes_per_s=max(fitted.gbytes_per_s, share * rate))

    def group(measured: GroupTransfers) -> GroupTransfers:
        if measured.nodes > 1:
            return measured
        return replace(
            measured,
            all_gather=line(measured.all_gather, 1.0),
            reduce_scatter=line(measured.reduce_scatter, 1.0),
            all_reduce=line(measured.all_reduce, 0.5),
        )

    groups = tuple(map(group, transfers.groups))
    return replace(hardware, transfers=replace(transfers, groups=groups))
