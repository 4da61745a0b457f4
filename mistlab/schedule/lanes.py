"""Lanes: the queues of a GPU, and one of its host, which run the tasks of a stage in order."""

from typing import Literal, get_args

from mistlab.schedule.slot_table import Task

Lane = Literal[
    "compute",
    "host_to_device",
    "device_to_host",
    "all_gather",
    "reduce_scatter",
    "send_forward",
    "send_backward",
    "receive_forward",
    "receive_backward",
    "host",
    "tensor_parallel",
]
LANES: tuple[Lane, ...] = get_args(Lane)


def lane_of(row: Task) -> Lane:
    """The lane of a row of the slot table: its stream, but each kind of collective has a lane."""
    if row.stream != "gpu_to_gpu":
        return row.stream
    return "all_gather" if row.kind == "U" else "reduce_scatter"
