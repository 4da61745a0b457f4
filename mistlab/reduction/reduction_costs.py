"""The seconds, message bytes and buffers of each kind of gradient reduction over data-parallel
ranks.

A message occupies its sender and its receiver for a latency and its bytes over the rate; a rank
sends one at a time and receives one at a time. ``simulators.messages`` plays the same, message by
message.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Literal, get_args

from mistlab.core.values import Checked, bounded, check_fields, one_of, refuse
from mistlab.reduction.compression import VALUE_BYTES, Compressor
from mistlab.reduction.neighbours import Topology, offsets_of, parts_of_graph
from mistlab.reduction.outer_schedule import OuterSchedule

ReductionKind = Literal["all_reduce", "server", "gossip", "local", "outer"]
Feedback = Literal["none", "memory", "double", "ef21", "neolithic"]
REDUCTION_KINDS: tuple[ReductionKind, ...] = get_args(ReductionKind)
# Kinds of reduction with which ranks have different weights between two exchanges.
APART = ("gossip", "local", "outer")
# The highest ZeRO level that each kind of gradient reduction allows.
MOST_SHARDED = {"all_reduce": 3, "server": 0, "gossip": 0, "local": 0, "outer": 3}
MOST_SHARDED_COMPRESSED = 1
# For each field of a reduction, the kinds of reduction to which it applies; other kinds refuse it.
OF_KINDS: Mapping[str, tuple[ReductionKind, ...]] = {
    "topology": ("gossip",),
    "offsets": ("gossip",),
    "every": ("local", "outer"),
    "compressor": ("all_reduce", "server"),
    "feedback": ("all_reduce", "server"),
    "rounds": ("all_reduce", "server"),
    "shards": ("server",),
    "trimmed": ("all_reduce", "server"),
    "liars": ("all_reduce", "server"),
    "asynchronous": ("server",),
    "replicas": ("outer",),
    **dict.fromkeys(("outer_bits", "fragments", "delay", "mixed", "rate", "momentum"), ("outer",)),
}
# The default number of messages that the error feedback ``neolithic`` sends in each step.
ROUNDS = 2
# The compressor that leaves gradients uncompressed.
WHOLE = Compressor()
# For each error feedback, the number of vectors as long as the gradients that a rank keeps, such as
# compression errors; below, the number that are kept for the mean, on the server (or on every rank,
# where messages are gathered).
VECTORS_KEPT: Mapping[Feedback, int] = {
    "none": 0, "memory": 1, "double": 1, "ef21": 1, "neolithic": 1,
}  # fmt: skip
OF_THE_MEAN: Mapping[Feedback, int] = {
    "none": 0, "memory": 0, "double": 1, "ef21": 1, "neolithic": 1,
}  # fmt: skip
# Error feedbacks that compress the mean of gradients, too, on its way back to the ranks.
BOTH_WAYS: tuple[Feedback, ...] = ("double", "neolithic")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLink(Checked):
    """The link from a rank to other ranks: the latency of a message, and bytes per second in each
    direction.
    """

    latency_s: float = field(metadata=bounded(minimum=0))
    bytes_per_s: float = field(metadata=bounded(above=0))

    def message_s(self, size: float) -> float:
        """The seconds that a message of ``size`` bytes takes over the link."""
        return self.latency_s + size / self.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """A gradient reduction: how data-parallel ranks combine their gradients or weights.

    Gradients are summed in every step, among all ranks (kind ``all_reduce``) or by ``shards``
    parameter servers (``server``), whole or compressed with error ``feedback`` (``neolithic`` sends
    ``rounds`` messages a step). Of each value, the ``trimmed`` smallest and largest may be left
    out, so that as many ``liars`` (ranks that send ten times their gradient with the opposite sign)
    do little harm. ``asynchronous`` servers step with each rank's gradients as they arrive and send
    it the current weights, so that no rank waits for another.

    With the other kinds ranks step by themselves, and average weights. ``gossip`` averages with
    neighbours on a graph in every step, by a ``topology`` or by given ``offsets``. ``local``
    averages with all ranks once in ``every`` steps. ``outer`` takes outer steps as often, with
    ``outer_bits`` per value, for one of ``fragments`` of the weights at a time, with an outer
    learning ``rate`` and Nesterov ``momentum``. A fragment's change may be sent while ``delay``
    further steps run; then a rank continues from the new weights, with the share ``mixed`` of its
    own. Outer steps are among ``replicas``, each of which trains by the plan, or among all
    data-parallel ranks.
    """

    kind: ReductionKind = "all_reduce"
    topology: Topology = "one_peer"
    offsets: tuple[int, ...] = field(default=(), metadata=bounded(minimum=1))
    every: int = field(default=1, metadata=bounded(minimum=1))
    compressor: Compressor = WHOLE
    feedback: Feedback = "none"
    rounds: int = field(default=ROUNDS, metadata=bounded(minimum=1))
    shards: int = field(default=1, metadata=bounded(minimum=1))
    trimmed: int = field(default=0, metadata=bounded(minimum=0))
    liars: tuple[int, ...] = field(default=(), metadata=bounded(minimum=0))
    asynchronous: bool = False
    replicas: int | None = field(default=None, metadata=bounded(minimum=2))
    outer_bits: int = field(default=32, metadata=bounded(minimum=2, maximum=32))
    fragments: int = field(default=1, metadata=bounded(minimum=1))
    delay: int = field(default=0, metadata=bounded(minimum=0))
    mixed: float = field(default=0.0, metadata=bounded(minimum=0, maximum=1))
    rate: float = field(default=0.7, metadata=bounded(above=0))
    momentum: float = field(default=0.9, metadata=bounded(minimum=0, maximum=1))

    def __post_init__(self) -> None:
        check_fields(self)
        self._check_kind()
        if self.feedback != "none" and self.compressor.kind == "none":
            refuse(
                "feedback",
                f"{self.feedback}, but without a compressor there is no error to feed back: give a "
                "compressor, or leave it out",
            )
        if self.rounds != ROUNDS and self.feedback != "neolithic":
            refuse(
                "rounds",
                f"{self.rounds}, but feedback {self.feedback} sends one message a step: give "
                "feedback: neolithic, or leave rounds out",
            )
        if self.feedback == "ef21" and self.compressor.is_unbiased:
            refuse(
                "feedback",
                f"ef21 needs a contractive compressor, but {self.compressor.kind} is unbiased: "
                "give compressor top_k, sign or power, or feedback: memory",
            )
        self._check_robust()
        if self.kind == "outer":
            _ = self.schedule

    def _check_robust(self) -> None:
        """Refuse robust means (``trimmed``) of compressed gradients or on asynchronous servers,
        error feedback on asynchronous servers, and ranks listed twice in ``liars``.
        """
        if self.trimmed and self.compressor.kind != "none":
            refuse(
                "trimmed",
                f"{self.trimmed}, but compressed gradients cannot be compared by value: leave the "
                "compressor out, or give 0",
            )
        if self.trimmed and self.asynchronous:
            refuse(
                "trimmed",
                f"{self.trimmed}, but an asynchronous server gets one gradient at a time: give "
                "0, or asynchronous: false",
            )
        if self.asynchronous and self.feedback != "none":
            refuse(
                "feedback",
                f"{self.feedback}, but an asynchronous server has no mean to correct: leave it out",
            )
        if len(set(self.liars)) < len(self.liars):
            listed = ", ".join(map(str, self.liars))
            refuse("liars", f"{listed} names a rank twice: give each rank once")

    def _check_kind(self) -> None:
        """Refuse fields that apply only to other kinds of reduction."""
        for entry in fields(self):
            kinds = OF_KINDS.get(entry.name, REDUCTION_KINDS)
            given = getattr(self, entry.name)
            if self.kind in kinds or given == entry.default:
                continue
            if isinstance(given, Compressor):
                given = given.kind
            if isinstance(given, tuple):
                given = ", ".join(map(str, given))
            if entry.name == "every":
                refuse(
                    "every",
                    f"{given}, but kind {self.kind} exchanges in every step: give kind: "
                    f"{one_of(kinds)}, or leave every out",
                )
            problem = f"{given}, but kind {self.kind} does not use {entry.name}"
            remedy = f"give kind: {one_of(kinds)}, or leave {entry.name} out"
            refuse(entry.name, f"{problem}: {remedy}")

    @property
    def is_plain(self) -> bool:
        """Whether all ranks all-reduce uncompressed gradients in every step, as engines do by
        default.
        """
        is_whole = self.kind == "all_reduce" and self.compressor.kind == "none"
        return is_whole and not self.trimmed and not self.liars

    @property
    def is_beside_steps(self) -> bool:
        """Whether ranks exchange gradients or weights while they compute later steps, or step at
        different times.
        """
        return self.delay > 0 or self.asynchronous

    @property
    def is_apart(self) -> bool:
        """Whether each rank or replica steps independently, and they average their weights
        afterwards.
        """
        return self.kind in APART

    @property
    def schedule(self) -> OuterSchedule:
        """The schedule by which fragments of the model take outer steps."""
        return OuterSchedule(every=self.every, fragments=self.fragments, delay=self.delay)

    def replicas_of(self, ranks: int) -> int:
        """The number of copies of the weights, each stepped independently, that ``ranks``
        data-parallel ranks hold.
        """
        if not self.is_apart:
            return 1
        return ranks if self.replicas is None else self.replicas

    def neighbours(self, ranks: int, step: int = 0) -> Sequence[int]:
        """The offsets of the ranks from which each rank receives in a step of ``gossip``."""
        if not self.offsets:
            return offsets_of(self.topology, ranks, step)
        offsets = dict.fromkeys(offset % ranks for offset in self.offsets)
        return [offset for offset in offsets if offset]

    def rounds_of_neighbours(self, ranks: int) -> Sequence[Sequence[int]]:
        """The offsets of the ranks from which each rank receives in ``gossip``, for each step of a
        cycle.
        """
        changes = self.topology == "one_peer" and not self.offsets and ranks > 1
        steps = math.ceil(math.log2(ranks)) if changes else 1
        return [self.neighbours(ranks, step) for step in range(steps)]

    def ranks_problem(self, ranks: int) -> str:
        """The reason why ``ranks`` data-parallel ranks cannot average in this way; empty if they
        can.
        """
        replicas = self.replicas_of(ranks)
        if self.replicas is not None and ranks % replicas:
            return (
                f"{ranks} data-parallel ranks do not divide into {replicas} replicas: give a "
                f"multiple of {replicas}, or other workload.reduction.replicas"
            )
        if self.shards > ranks:
            return (
                f"shards {self.shards} asks for as many servers among {ranks} ranks: give "
                f"workload.reduction.shards of at most {ranks}"
            )
        if self.kind != "gossip" or ranks == 1 or not self.offsets:
            return self._robust_problem(ranks)
        parts = parts_of_graph(self.offsets, ranks)
        if parts == 1:
            return ""
        listed = ", ".join(map(str, self.offsets))
        return (
            f"offsets {listed} divide {ranks} ranks into {parts} groups that never exchange "
            "weights: add an offset that connects them, such as 1, to workload.reduction.offsets"
        )

    def _robust_problem(self, ranks: int) -> str:
        """The reason why ``ranks`` ranks are too few for a robust mean with this many trimmed
        values or lying ranks; empty if they are enough.
        """
        if ranks > 1 and 2 * self.trimmed >= ranks:
            most = (ranks - 1) // 2
            return (
                f"trimmed {self.trimmed} leaves out all of {ranks} values, as many at each end: "
                f"give workload.reduction.trimmed of at most {most}"
            )
        if any(rank >= ranks for rank in self.liars):
            return (
                f"liars has rank {max(self.liars)}, but there are {ranks} ranks: give "
                f"workload.reduction.liars below {ranks}"
            )
        return ""

    def sharding_problem(self, level: int) -> str:
        """The reason why ZeRO level ``level`` is incompatible with the reduction; empty if it is
        compatible.
        """
        most = self.most_sharded
        if level <= most:
            return ""
        why = "each rank keeps weights of its own"
        if not self.is_apart:
            compresses = self.compressor.kind != "none"
            why = "ranks compress whole gradients" if compresses else "servers sum whole gradients"
            why = "ranks compare whole gradients" if self.trimmed or self.liars else why
        return f"ZeRO-{level} shards what {self.kind} needs whole ({why}): give ZeRO-{most} at most"

    @property
    def most_sharded(self) -> int:
        """The highest ZeRO level that is compatible with the reduction."""
        is_whole = self.compressor.kind == "none" and not self.trimmed and not self.liars
        most = MOST_SHARDED[self.kind]
        return most if is_whole else min(most, MOST_SHARDED_COMPRESSED)

    def message_bytes(self, values: int) -> float:
        """The bytes of a rank's message in one exchange of ``values`` gradients or weights; outer
        steps send one fragment at a time.
        """
        if self.kind == "outer":
            return values / self.fragments * self.outer_bits / 8
        rounds = self.rounds if self.feedback == "neolithic" else 1
        return float(rounds * self.compressor.sent_bytes(values))

    def answer_bytes(self, values: int, ranks: int) -> float:
        """The bytes that servers return to a rank: the mean, which some error feedbacks compress;
        otherwise the messages of all ranks, or the uncompressed mean if that is shorter.
        """
        sent = self.message_bytes(values)
        if self.compressor.kind == "none" or self.feedback in BOTH_WAYS:
            return sent
        if self.asynchronous:
            # An asynchronous server returns weights that other ranks have changed, too, so it sends
            # them uncompressed.
            return float(VALUE_BYTES * values)
        return min(VALUE_BYTES * values, ranks * sent)

    def exchange_s(self, values: int, ranks: int, link: RankLink) -> float:
        """The seconds in which ``ranks`` ranks exchange ``values`` gradients or weights once."""
        if ranks == 1:
            return 0.0
        size = self.message_bytes(values)
        if self.kind == "server":
            return ranks * sum(self._served_s(values, ranks, link))
        if self.kind == "gossip":
            return len(self.neighbours(ranks)) * link.message_s(size)
        if self.compressor.is_summable or self.kind == "outer":
            return 2 * (ranks - 1) * link.message_s(size / ranks)
        return (ranks - 1) * link.message_s(size)

    def step_s(self, compute_s: float, values: int, ranks: int, link: RankLink) -> float:
        """The mean seconds of a step that computes for ``compute_s``, with its exchanges; with an
        asynchronous server, the time until it has applied one gradient of every rank.
        """
        if self.asynchronous and ranks > 1:
            sent, answered = self._served_s(values, ranks, link)
            both_s = self.shards * (sent + answered)
            return self.asynchronous_step_s(compute_s, both_s, ranks * max(sent, answered))
        return self.mean_step_s(compute_s, self.exchange_s(values, ranks, link))

    def mean_step_s(self, step_s: float, exchange_s: float) -> float:
        """The mean seconds of a step with its exchanges, given the seconds of a step without
        exchange and those of an exchange.

        An exchange may overlap the ``delay`` steps after it; only the rest of its time is exposed.
        """
        late_s = max(0.0, exchange_s - self.delay * step_s)
        return step_s + self.exchanges_a_step * late_s

    def asynchronous_step_s(self, compute_s: float, both_s: float, busy_s: float) -> float:
        """The mean seconds in which every rank computes, sends and receives once: a rank's own time
        or, if longer, that in which a server handles the messages of all ranks.
        """
        return max(compute_s + both_s, busy_s)

    def _served_s(self, values: int, ranks: int, link: RankLink) -> tuple[float, float]:
        """The seconds of a rank's message to a parameter server, and of the server's answer."""
        sizes = self.message_bytes(values), self.answer_bytes(values, ranks)
        sent, answered = (link.message_s(one / self.shards) for one in sizes)
        return sent, answered

    @property
    def exchanges_a_step(self) -> float:
        """The mean number of exchanges per step; an exchange of one fragment counts as one."""
        return self.fragments / self.every

    def vectors_kept(self, ranks: int = 2) -> int:
        """The number of vectors as long as the gradients that a rank keeps between steps, for error
        feedback.
        """
        if ranks == 1 or self.is_apart:
            return 0
        mean = 0 if self.kind == "server" else OF_THE_MEAN[self.feedback]
        return VECTORS_KEPT[self.feedback] + mean

    @property
    def outer_vectors(self) -> int:
        """The number of vectors as long as the weights that outer steps keep: the shared weights,
        the momentum and, with a delay, the averaged change.
        """
        return 0 if self.kind != "outer" else 2 + (self.delay > 0)

    def buffer_bytes(self, values: int, ranks: int) -> int:
        """The bytes that a rank keeps in addition to plain training: compression errors, arriving
        weights or gradients of other ranks, and the outer steps' weights and momentum.
        """
        kept = self.vectors_kept(ranks)
        if (self.kind == "gossip" or self.trimmed) and ranks > 1:
            kept += 1
        return VALUE_BYTES * values * (kept + self.outer_vectors)

    def __str__(self) -> str:
        return self.words

    @property
    def words(self) -> str:
        """The gradient reduction as text: what is averaged, among which ranks, and how often."""
        if self.kind == "gossip":
            by = f"offsets {', '.join(map(str, self.offsets))}" if self.offsets else self.topology
            return f"weights averaged with neighbours ({by.replace('_', ' ')}) after every step"
        if self.kind == "local":
            return f"weights averaged over all ranks every {self.every} steps"
        if self.kind == "outer":
            return self._outer_words
        how = "by all ranks" if self.kind == "all_reduce" else f"by {self.shards} servers"
        if self.kind == "server" and self.shards == 1:
            how = "by a server"
        trimmed = f", without the {self.trimmed} smallest and largest" if self.trimmed else ""
        waits = " that waits for none" if self.asynchronous else ""
        lies = f", of which ranks {', '.join(map(str, self.liars))} lie" if self.liars else ""
        return f"gradients averaged {how}{waits}{trimmed}{lies}{self._compressed_words}"

    @property
    def _outer_words(self) -> str:
        whose = "of every rank" if self.replicas is None else f"of {self.replicas} replicas"
        parts = f" in {self.fragments} fragments" if self.fragments > 1 else ""
        late = f", {self.delay} steps late" if self.delay else ""
        bits = f", {self.outer_bits} bits a value" if self.outer_bits < 32 else ""
        return f"outer steps {whose} every {self.every} steps{parts}{late}{bits}"

    @property
    def _compressed_words(self) -> str:
        compressor = self.compressor
        kinds = {
            "none": "",
            "qsgd": f", quantised to {compressor.levels} levels",
            "top_k": f", the largest {compressor.share:.2%} of each".replace(".00%", "%"),
            "sign": ", their signs alone",
            "power": f", as factors of rank {compressor.rank}",
        }
        rounds = f" in {self.rounds} rounds" if self.feedback == "neolithic" else ""
        back = "" if self.feedback == "none" else f", with feedback {self.feedback}{rounds}"
        return f"{kinds[compressor.kind]}{back}"


PLAIN_REDUCTION = Reduction()


def fitted_rate(seconds: float, values: int, ranks: int) -> float:
    """The bytes per second at which a ring all-reduce of ``values`` values takes these seconds, if
    latencies are ignored.
    """
    return 2 * (ranks - 1) / ranks * VALUE_BYTES * values / seconds
