"""Lanes: the queues of a GPU, and one of its host, which run the tasks of a stage in order."""

from collections.abc import Mapping
from typing import Literal, get_args

from mistlab.schedule.order_text import PassKind
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
    "send_forward_up",
    "send_backward_up",
    "receive_forward_up",
    "receive_backward_up",
]
# Lanes of messages between stages. Where parts of the model lie on the way back to the first stage,
# a stage has a second neighbour for messages of each kind, with lanes of its own.
Transfer = Literal["send", "receive"]
LANES: tuple[Lane, ...] = get_args(Lane)


def lane_of(row: Task) -> Lane:
    """The lane of a row of the slot table: its stream, but each kind of collective has a lane."""
    if row.stream != "gpu_to_gpu":
        return row.stream
    return "all_gather" if row.kind == "U" else "reduce_scatter"


def lane_of_transfer(
    way: Transfer, kind: PassKind, sender: int, receiver: int, stages: int
) -> Lane:
    """The lane on which a stage sends or receives what passes of a kind make.

    >>> lane_of_transfer("send", "F", 2, 0, 3), lane_of_transfer("send", "F", 2, 1, 3)
    ('send_forward', 'send_forward_up')
    """
    above, below = (sender, receiver) if kind == "F" else (receiver, sender)
    goes_down = below == (above + 1) % stages
    return _TRANSFERS[way, kind, goes_down]


_TRANSFERS: Mapping[tuple[Transfer, PassKind, bool], Lane] = {
    ("send", "F", True): "send_forward",
    ("send", "B", True): "send_backward",
    ("receive", "F", True): "receive_forward",
    ("receive", "B", True): "receive_backward",
    ("send", "F", False): "send_forward_up",
    ("send", "B", False): "send_backward_up",
    ("receive", "F", False): "receive_forward_up",
    ("receive", "B", False): "receive_backward_up",
}
