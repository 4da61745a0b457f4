"""Nodes whose GPUs exchange weights and gradients by copy engines instead of NCCL."""

from dataclasses import replace

from mistlab.machine.hardware import GroupTransfers, Hardware, Line

# The share of PCIe's rate that large copies reach, as on links known by datasheets only.
OF_LINK = 0.7
# Links at least this fast connect GPUs directly, not through the host.
NVLINK_GBYTES_PER_S = 100.0


def with_copy_engines(hardware: Hardware) -> Hardware:
    """Hardware whose GPUs communicate within a node at the rate of their host links.

    NCCL's rates of GPUs that do not reach one another were measured on virtual machines, whose
    host copies each message once more; an all-reduce is a reduction and a gather.
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
