"""Calls every group of ranks once, before training, so that all ranks connect in the same order.

NCCL makes a group's communicator at the group's first call, and holds every rank there until all
ranks of the group have come. A batch of messages may be the first call only if every rank of the
group sends or receives in it. Likewise, the first message between two ranks makes their channels,
and holds one rank until the other comes. So every group is called here, and ranks of neighbouring
stages exchange a message, before a rank issues anything else. Afterwards no rank waits for a
connection, and the memory that communicators need is already taken.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from runtime.comm.group import Channel, Group, finished


def enter(groups: Iterable[Group], device: torch.device) -> None:
    """Call each group once; every rank must give its groups in the same order."""
    for group in groups:
        if group.size > 1:
            finished(group.all_reduce(_smallest(device)))


def greet(
    link: Channel, receivers: Sequence[int], senders: Sequence[int], device: torch.device
) -> None:
    """Send one message to each receiver, and receive one from each sender.

    Receivers and senders are numbered within the group.
    """
    if receivers or senders:
        sends = [(_smallest(device), rank) for rank in receivers]
        receives = [(_smallest(device), rank) for rank in senders]
        finished(link.exchange(sends, receives))


def _smallest(device: torch.device) -> Tensor:
    return torch.zeros(1, device=device)
