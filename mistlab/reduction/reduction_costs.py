"""Seconds, bytes and buffers of one reduction of data parallelism, by kind.

A message occupies its sender and its receiver for a latency and its bytes over the rate; a rank
sends one at a time and receives one at a time. ``simulators.messages`` plays the same, message by
message.
"""

from dataclasses import dataclass, field
from typing import Literal, get_args

from mistlab.core.values import Checked, bounded, check_fields, near_matches, refuse
from mistlab.reduction.compressors import VALUE_BYTES, Compressor
from mistlab.reduction.feedbacks import FEEDBACKS, VECTORS_KEPT
from mistlab.reduction.graphs import TOPOLOGIES, degree_of

Kind = Literal["all_reduce", "server", "gossip", "local", "outer"]
REDUCTION_KINDS: tuple[Kind, ...] = get_args(Kind)
# Kinds whose ranks do not hold equal weights between two exchanges, or not exactly.
APART = ("gossip", "local", "outer")
# The highest level of ZeRO that goes with each.
MOST_SHARDED = {"all_reduce": 3, "server": 0, "gossip": 0, "local": 0, "outer": 3}
MOST_SHARDED_COMPRESSED = 1
# Gradients whole, as they are.
WHOLE = Compressor()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLink(Checked):
    """A rank's link to the others: the latency of a message, and bytes a second each way."""

    latency_s: float = field(metadata=bounded(minimum=0))
    bytes_per_s: float = field(metadata=bounded(above=0))

    def message_s(self, size: float) -> float:
        """The seconds of a message of so many bytes."""
        return self.latency_s + size / self.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """How ranks of data parallelism bring their gradients or weights together.

    ``every`` is the number of steps between two exchanges (tau). ``shards`` are the servers that
    share the gradients. Outer steps average in ``outer_bits`` a value, of one of ``fragments`` at a
    time; with ``overlapped`` the inner steps go on meanwhile.
    """

    kind: Kind = "all_reduce"
    topology: str = "one_peer"
    every: int = field(default=1, metadata=bounded(minimum=1))
    compressor: Compressor = WHOLE
    feedback: str = "none"
    shards: int = field(default=1, metadata=bounded(minimum=1))
    outer_bits: int = field(default=32, metadata=bounded(minimum=1, maximum=32))
    fragments: int = field(default=1, metadata=bounded(minimum=1))
    overlapped: bool = False

    def __post_init__(self) -> None:
        if self.kind not in REDUCTION_KINDS:
            refuse("kind", f"{self.kind!r} is unknown{near_matches(self.kind, REDUCTION_KINDS)}")
        check_fields(self)
        if self.topology not in TOPOLOGIES:
            named = near_matches(self.topology, TOPOLOGIES)
            refuse("topology", f"{self.topology!r} is unknown{named}")
        if self.feedback not in FEEDBACKS:
            named = near_matches(self.feedback, FEEDBACKS)
            refuse("feedback", f"{self.feedback!r} is unknown{named}")
        if self.every > 1 and self.kind not in ("local", "outer"):
            problem = f"{self.every}: {self.kind} exchanges in every step: give 1, or kind local"
            refuse("every", problem)

    def sharding_problem(self, level: int) -> str:
        """Why a level of ZeRO does not go with the reduction; empty if it does."""
        most = MOST_SHARDED[self.kind]
        if self.compressor.kind != "none":
            most = min(most, MOST_SHARDED_COMPRESSED)
        if level <= most:
            return ""
        why = "each rank keeps weights of its own" if self.kind in APART else "it is compressed"
        return f"ZeRO-{level} shards what {self.kind} needs whole ({why}): give ZeRO-{most} at most"

    def message_bytes(self, values: int) -> float:
        """The bytes of a whole exchange's message of so many values."""
        if self.kind == "outer":
            return values / self.fragments * self.outer_bits / 8
        return float(self.compressor.sent_bytes(values))

    def exchange_s(self, values: int, ranks: int, link: RankLink) -> float:
        """The seconds of one exchange among so many ranks."""
        if ranks == 1:
            return 0.0
        size = self.message_bytes(values)
        if self.kind == "server":
            return 2 * ranks * link.message_s(size / self.shards)
        if self.kind == "gossip":
            return degree_of(self.topology, ranks) * link.message_s(size)
        if self.compressor.is_summable or self.kind == "outer":
            return 2 * (ranks - 1) * link.message_s(size / ranks)
        return (ranks - 1) * link.message_s(size)

    def step_s(self, compute_s: float, values: int, ranks: int, link: RankLink) -> float:
        """The mean seconds of a step whose computation takes so long."""
        exchange_s = self.exchange_s(values, ranks, link)
        # Every fragment is exchanged once in each cycle.
        if self.kind == "outer":
            exchange_s *= self.fragments
        if self.overlapped:
            return max(compute_s, exchange_s / self.every)
        return compute_s + exchange_s / self.every

    def buffer_bytes(self, values: int, ranks: int) -> int:
        """The bytes that a rank keeps for it beyond what training needs: memories of what was cut
        off, weights of a neighbour that arrive, and the outer steps' weights and momenta."""
        kept = VECTORS_KEPT[self.feedback]
        if self.kind == "gossip" and ranks > 1:
            kept += 1
        if self.kind == "outer":
            kept += 2
        return VALUE_BYTES * values * kept


def fitted_rate(seconds: float, values: int, ranks: int) -> float:
    """The bytes a second at which a ring's all-reduce of so many values takes these seconds, with
    no latency."""
    return 2 * (ranks - 1) / ranks * VALUE_BYTES * values / seconds
