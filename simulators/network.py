"""Slows down sends of different stages that use the network of one node at the same time.

A node's network sends and receives at the same bandwidth. A send's time alone assumes that only its
own stage uses the network. If sends of several stages together ask for more than the bandwidth, all
of them slow down by the same factor. Collectives across nodes are not slowed: a group never has
more than its own ranks' share of the network, whether others use it or not.
"""

from collections.abc import Sequence
from typing import Protocol

# A link's number, and the share of the link that a send takes when it is alone.
Use = tuple[int, float]


class Sender(Protocol):
    """A stage whose running tasks can be slowed down."""

    def crowd(self, stream: int, factor: float, now: float) -> None:
        """Let a stream's task take ``factor`` times as long from now on."""


class Network:
    """The sends that use each link now, and the sum of the shares that they ask for."""

    __slots__ = ("_asked", "_users")

    def __init__(self) -> None:
        self._asked: dict[int, float] = {}
        self._users: dict[int, dict[tuple[Sender, int], Sequence[Use]]] = {}

    def enter(self, sender: Sender, stream: int, uses: Sequence[Use], now: float) -> None:
        """Note that a send has begun, and slow down all sends on its links as needed."""
        for link, part in uses:
            self._asked[link] = self._asked.get(link, 0.0) + part
            self._users.setdefault(link, {})[sender, stream] = uses
        self._share(uses, now)

    def leave(self, sender: Sender, stream: int, uses: Sequence[Use], now: float) -> None:
        """Note that a send has ended, and speed up the others on its links."""
        for link, part in uses:
            self._asked[link] -= part
            del self._users[link][sender, stream]
            if not self._users[link]:
                self._asked[link] = 0.0
        self._share(uses, now)

    def _share(self, uses: Sequence[Use], now: float) -> None:
        """Tell all sends on some links how much slower they are now."""
        told = {user: of_user for link, _ in uses for user, of_user in self._users[link].items()}
        for (sender, stream), of_user in told.items():
            slowest = max(1.0, *(self._asked[link] for link, _ in of_user))
            sender.crowd(stream, slowest, now)
