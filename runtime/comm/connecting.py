"""The first calls of a group, while its ranks connect: by all of them, in one order.

NCCL makes a group's communicator at its first call, and holds every rank there until all ranks of
the group have come. A batch of messages may be that call only if all of them send or receive in it.
Likewise the first message between two ranks makes their channels, and holds the one until the other
comes. So every group is called here first, and ranks of neighbouring stages exchange a message,
before anything else is issued: nobody waits for what is issued later, and the memory is taken.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from runtime.comm.group import Channel, Group, finished


def enter(groups: Iterable[Group], device: torch.device) -> None:
    """Call each group once; all ranks give theirs in one order."""
    for group in groups:
        if group.size > 1:
            finished(group.all_reduce(_smallest(device)))


def greet(
    link: Channel, receivers: Sequence[int], senders: Sequence[int], device: torch.device
) -> None:
    """Send each receiver of a group a message, and get one from each sender."""
    if receivers or senders:
        sends = [(_smallest(device), rank) for rank in receivers]
        receives = [(_smallest(device), rank) for rank in senders]
        finished(link.exchange(sends, receives))


def _smallest(device: torch.device) -> Tensor:
    return torch.zeros(1, device=device)
