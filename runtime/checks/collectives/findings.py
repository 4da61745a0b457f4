"""Finds collectives that would deadlock, from the calls of all ranks, before anything runs.

All ranks of a group must take part in its first call, and make all its calls in one order and of
one size. A receiver must expect the messages that its sender sends, in the same order. Ranks must
not wait for one another in a cycle.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Literal

from mistlab.plan.plan import Plan
from mistlab.plan.workload import Workload
from mistlab.schedule.orders import GROUPS_PLAYED, REPEATING, is_order_path, repeat_of
from mistlab.schedule.stage_passes import LANES
from runtime.checks.collectives.calls import calls_of
from runtime.checks.collectives.deadlock import Waiting, deadlock
from runtime.checks.collectives.world_calls import Call, RankCalls, WorldCalls

Trouble = Literal["groups", "first call", "order", "messages", "deadlock"]
# The number of micro-batches that are checked beyond those that fill the pipeline; more would only
# repeat the same passes.
MOST_STEADY = 4
# The most tasks that a message about a cycle names.
MOST_TOLD = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveFinding:
    """Calls of a group that its ranks make differently; ``words`` states the problem and the
    remedy.
    """

    trouble: Trouble
    group: str
    ranks: tuple[int, ...]
    calls: tuple[str, ...]
    words: str

    def __str__(self) -> str:
        return f"{self.trouble}: {self.words}"


def collective_findings(
    plan: Plan,
    workload: Workload,
    *,
    clips: bool = False,
    steps_on_host: bool = False,
    queues: int = len(LANES),
) -> tuple[CollectiveFinding, ...]:
    """The collectives of a plan's run that would deadlock, or would combine unrelated tensors.

    ``clips`` says that a step needs the norm of all gradients. Lanes (queues of work) are assigned
    to ``queues`` hardware queues in turn; by default each has its own.
    """
    calls = calls_of(few_batches(plan), workload, clips=clips, steps_on_host=steps_on_host)
    return findings_of(calls, queues=queues)


def few_batches(plan: Plan) -> Plan:
    """The plan with fewer micro-batches, but with enough for every kind of task and wait to
    occur.
    """
    if is_order_path(plan.order):
        # An order file lists all micro-batches, so the plan keeps their number.
        return plan
    groups = GROUPS_PLAYED if plan.order in REPEATING else 2
    most = groups * plan.num_stages + MOST_STEADY
    most += (plan.micro_batches - most) % repeat_of(plan.order, plan.num_stages)
    return replace(plan, micro_batches=min(plan.micro_batches, most))


def findings_of(world: WorldCalls, *, queues: int = len(LANES)) -> tuple[CollectiveFinding, ...]:
    """The mismatches and deadlocks among the calls of all ranks."""
    judged = _Comparison(world)
    return (
        *judged.groups_made(),
        *judged.parts(),
        *judged.first_calls(),
        *judged.orders(),
        *judged.messages(),
        *judged.deadlocks(queues),
    )


class _Comparison:
    """Compares the calls of all ranks in the phases ``connecting`` and ``training``."""

    def __init__(self, world: WorldCalls) -> None:
        self.groups, self.made = world.groups, world.made
        self.phases = {"connecting": world.connecting, "training": world.training}
        self._known: dict[tuple[int, str, bool], tuple[tuple[Call, str], ...]] = {}

    def groups_made(self) -> Iterator[CollectiveFinding]:
        """The first rank that creates other groups than rank 0, or in another order."""
        for rank, made in enumerate(self.made):
            if made is not self.made[0] and made != self.made[0]:
                pairs = zip_longest(self.made[0], made)
                pair = next(pair for pair in pairs if pair[0] != pair[1])
                both = ["none" if one is None else _group_text(*one) for one in pair]
                text = (
                    f"rank 0 makes {both[0]} where rank {rank} makes {both[1]}: let all ranks make "
                    "all groups in one order"
                )
                yield _finding("groups", "world", (0, rank), both, text)
                return

    def parts(self) -> Iterator[CollectiveFinding]:
        """Groups that should contain exactly the ranks with the same shard of gradients or weights,
        but lack such a rank, or contain a rank with another shard.
        """
        holders: dict[tuple[str, str], list[int]] = defaultdict(list)
        for calls in self.phases["training"]:
            for group, part in calls.parts.items():
                holders[group, part].append(calls.rank)
        members = {(group, rank): ranks for group, ranks in self.groups for rank in ranks}
        for (group, part), ranks in holders.items():
            for rank in ranks:
                there = members.get((group, rank), (rank,))
                if set(there) != set(ranks):
                    text = (
                        f"{_group_text(group, there)} average {part}, which {_ranks_text(ranks)} "
                        "hold: let these ranks and no others be a group"
                    )
                    yield _finding("groups", group, tuple(ranks), (str(there),), text)
                    break

    def first_calls(self) -> Iterator[CollectiveFinding]:
        """Groups that some of their ranks call, and other ranks never call."""
        for group, ranks in self.groups:
            firsts = {rank: self._first_call(rank, group) for rank in ranks}
            absent = tuple(rank for rank, first in firsts.items() if first is None)
            made = [f"rank {rank}: {first}" for rank, first in firsts.items() if first is not None]
            if absent and made:
                text = (
                    f"{_group_text(group, ranks)}: {_ranks_text(absent)} not in its first call "
                    f"({made[0]}), in which NCCL waits for all: let all its ranks call it while "
                    "they connect"
                )
                yield _finding("first call", group, absent, made, text)

    def orders(self) -> Iterator[CollectiveFinding]:
        """For each group, the first rank whose calls differ from those of the group's first
        rank.
        """
        for phase, calls in self.phases.items():
            for group, ranks in self.groups:
                for rank in ranks[1:]:
                    pair = [
                        self._calls_of(calls[rank_of_pair], group, messages=False)
                        for rank_of_pair in (ranks[0], rank)
                    ]
                    if pair[0] is not pair[1] and _kinds(pair[0]) != _kinds(pair[1]):
                        yield _order(
                            f"{_group_text(group, ranks)}, {phase}",
                            group,
                            (ranks[0], rank),
                            pair,
                        )
                        break

    def messages(self) -> Iterator[CollectiveFinding]:
        """For each pair of ranks, the first message for which sender and receiver differ."""
        for phase, calls in self.phases.items():
            for group, ranks in self.groups:
                for link in self._links(group, [calls[rank] for rank in ranks]):
                    for pair in _pairs([calls[rank] for rank in ranks], link):
                        mismatch = self._message(
                            *(f"{link}, {phase}", group, link), *(calls[one] for one in pair)
                        )
                        if mismatch is not None:
                            yield mismatch

    def deadlocks(self, queues: int) -> Iterator[CollectiveFinding]:
        """Ranks that wait for one another and never finish, although their calls match."""
        connecting, training = self.phases.values()
        phases = (("connecting", connecting, ()), ("training", training, connecting))
        for phase, calls, greeted in phases:
            # Shared hardware queues are reported as the cause only if all ranks finish with one
            # queue per lane.
            for given in dict.fromkeys((len(LANES), min(queues, len(LANES)))):
                waiting = deadlock(calls, self.groups, greeted, queues=given)
                if waiting:
                    yield _circle(phase, waiting, given)
                    break

    def _calls_of(
        self, rank: RankCalls, group: str, *, messages: bool
    ) -> tuple[tuple[Call, str], ...]:
        """A rank's calls of a group, with their tasks: with ``messages`` only exchanges of
        messages, otherwise only the other calls.
        """
        key = (id(rank.steps), group, messages)
        if key not in self._known:
            self._known[key] = tuple(
                (call, step.task)
                for step in rank.steps
                for call in step.calls
                if call.group == group and (call.kind == "exchange") == messages
            )
        return self._known[key]

    def _links(self, group: str, ranks: Sequence[RankCalls]) -> dict[str, None]:
        """The links on which ranks of a group exchange messages."""
        links = {group: None}
        for steps in {id(one.steps): one for one in ranks}.values():
            made = self._calls_of(steps, group, messages=True)
            links |= dict.fromkeys(call.link for call, _ in made)
        return links

    def _first_call(self, rank: int, group: str) -> Call | None:
        for calls in self.phases.values():
            calls_of_rank = calls[rank]
            links = self._links(group, [calls_of_rank])
            exchanges = any(
                messages.get(link)
                for messages in (calls_of_rank.sends, calls_of_rank.receives)
                for link in links
            )
            firsts = self._calls_of(calls_of_rank, group, messages=False)[:1]
            firsts += self._calls_of(calls_of_rank, group, messages=True)[:1] if exchanges else ()
            if firsts:
                return firsts[0][0]
        return None

    def _message(
        self, where: str, group: str, link: str, sender: RankCalls, receiver: RankCalls
    ) -> CollectiveFinding | None:
        pair = sender.rank, receiver.rank
        sizes = (
            sender.sends.get(link, {}).get(pair[1]),
            receiver.receives.get(link, {}).get(pair[0]),
        )
        if sizes[0] != sizes[1]:
            sizes_told = [str(size or "nothing") for size in sizes]
            text = (
                f"{where}: rank {pair[0]} sends {sizes_told[0]} at a time to rank {pair[1]}, which "
                f"expects {sizes_told[1]}: let both agree on whom and how much"
            )
            return _finding("messages", link, pair, sizes_told, text)
        sent, due = (self._calls_of(one, group, messages=True) for one in (sender, receiver))
        if sent is not due and _kinds(sent) != _kinds(due):
            return _order(where, link, pair, [sent, due], "messages")
        return None


Calls = Sequence[tuple[Call, str]]


def _kinds(calls: Calls) -> list[tuple[str, str]]:
    return [(call.kind, f"{call.what} {call.route}".strip()) for call, _ in calls]


def _pairs(ranks: Sequence[RankCalls], link: str) -> dict[tuple[int, int], None]:
    """The pairs of sender and receiver on a link, from the messages that its ranks send or
    expect.
    """
    sent = [(one.rank, peer) for one in ranks for peer in one.sends.get(link, ())]
    due = [(peer, one.rank) for one in ranks for peer in one.receives.get(link, ())]
    return dict.fromkeys((*sent, *due))


def _order(
    where: str,
    group: str,
    ranks: tuple[int, int],
    pair: Sequence[Calls],
    trouble: Trouble = "order",
) -> CollectiveFinding:
    """A finding about the first call in which two ranks of a group differ."""
    kinds = zip_longest(*map(_kinds, pair))
    number = next(number for number, (one, other) in enumerate(kinds) if one != other)
    made = [calls[number] if number < len(calls) else None for calls in pair]
    calls_told = ["nothing more" if one is None else f"{one[0]} in {one[1]}" for one in made]
    text = (
        f"{where}: call {number + 1} is {calls_told[0]} by rank {ranks[0]} and {calls_told[1]} by "
        f"rank {ranks[1]}: let both make the calls of the group in one order, of one size"
    )
    return _finding(trouble, group, ranks, calls_told, text)


def _circle(phase: str, waiting: Sequence[Waiting], queues: int) -> CollectiveFinding:
    """A finding about ranks that wait for one another in a cycle, or for a call that no rank
    makes.
    """
    waits_told = [str(one) for one in waiting]
    more = f" (and {len(waits_told) - MOST_TOLD} more)" if len(waits_told) > MOST_TOLD else ""
    remedy = (
        "issue on every rank what another waits for before what waits for it"
        if queues >= len(LANES)
        else f"let lanes have a queue each: CUDA_DEVICE_MAX_CONNECTIONS=32, not {queues}"
    )
    text = (
        f"{phase}: each waits for the next, the last for the first or for nobody: "
        f"{', '.join(waits_told[:MOST_TOLD])}{more}: {remedy}"
    )
    ranks = tuple(dict.fromkeys(one.rank for one in waiting))
    group = next((one.call.group for one in waiting if one.call is not None), "")
    return _finding("deadlock", group, ranks, waits_told, text)


def _finding(
    trouble: Trouble, group: str, ranks: tuple[int, ...], calls: Sequence[str], text: str
) -> CollectiveFinding:
    return CollectiveFinding(
        trouble=trouble, group=group, ranks=ranks, calls=tuple(calls), words=text
    )


def _group_text(group: str, ranks: Sequence[int]) -> str:
    return f"{group} of {_ranks_text(ranks)}"


def _ranks_text(ranks: Sequence[int]) -> str:
    """Rank numbers as text; if there are many, only the first few."""
    names = [str(rank) for rank in ranks[:MOST_TOLD]] + ["..."] * (len(ranks) > MOST_TOLD)
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(names)}"
