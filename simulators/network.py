"""Sends of several stages that share a node's network: each gets on with less of it.

A node's network takes in and gives out equally much at once. A stage's own senders have it to
themselves in what their sends take alone; when those of another stage use it at the same time, and
they ask for more than there is, all of them slow down alike. Collectives across nodes are not among
them: a group never has more than its own ranks' part of a node's network, others there or not.
"""

from collections.abc import Sequence
from typing import Protocol

# Which link, and what part of it a send takes by itself.
Use = tuple[int, float]


class Sender(Protocol):
    """What can be slowed down while it sends."""

    def crowd(self, stream: int, factor: float, now: float) -> None:
        """Let a stream's task take ``factor`` times as long from now on."""


class Network:
    """Who uses which link at the moment, and how much of it they ask for."""

    __slots__ = ("_asked", "_users")

    def __init__(self) -> None:
        self._asked: dict[int, float] = {}
        self._users: dict[int, dict[tuple[Sender, int], Sequence[Use]]] = {}

    def enter(self, sender: Sender, stream: int, uses: Sequence[Use], now: float) -> None:
        """A send has begun."""
        for link, part in uses:
            self._asked[link] = self._asked.get(link, 0.0) + part
            self._users.setdefault(link, {})[sender, stream] = uses
        self._share(uses, now)

    def leave(self, sender: Sender, stream: int, uses: Sequence[Use], now: float) -> None:
        """A send has ended."""
        for link, part in uses:
            self._asked[link] -= part
            del self._users[link][sender, stream]
            if not self._users[link]:
                self._asked[link] = 0.0
        self._share(uses, now)

    def _share(self, uses: Sequence[Use], now: float) -> None:
        """Tell all users of some links how much slower they are."""
        told = {user: of_user for link, _ in uses for user, of_user in self._users[link].items()}
        for (sender, stream), of_user in told.items():
            slowest = max(1.0, *(self._asked[link] for link, _ in of_user))
            sender.crowd(stream, slowest, now)
