"""Computes the iteration time of a pipeline in any order of passes: its critical path, and lower
bounds that are faster to compute.

Axes: C candidates, P parts of the model in order, S stages, V chunks of a stage.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Self

import numpy as np

from mistlab.core.arrays import Floats
from mistlab.cost.chains import Chains
from mistlab.network.shared_sends import BusyLinks, PartCollectives, Sends, SharedNetworks
from mistlab.schedule.order_text import PassKind
from mistlab.schedule.placement import Placement, StageChunk
from mistlab.schedule.stage_passes import PassKey, StagePass, StagePasses, in_turn
from mistlab.stages.part_times import (
    BesideSends,
    EndTimes,
    HostTimes,
    LateTurns,
    SlowedTimes,
    SplitTimes,
    TurnTimes,
    columns_of,
)
from mistlab.stages.stage_batch import StageTimes

# Computes the iteration time in any order of passes as the critical path through all passes.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OrderPath:
    """The passes of one iteration of a pipeline, from which its critical path is computed.

    If a ``host`` is given, all other times are the GPU's alone; ``at_end`` has the work after each
    part's last pass.

    A pass ends at the later of two times: its full time (t) after its stage's previous pass, and
    its shorter latency (l) after its input has arrived. The latency excludes fetches before the
    pass and work after it, for which only the stage's next pass waits. A pass is longer if it
    follows one whose last gradients are still to be reduced. The first forward pass of a chunk also
    waits for the chunk's optimizer step, and its last backward pass is followed by the other work
    that occurs once an iteration, as in ``mistlab.cost.pipeline``. Where weight gradients have
    separate passes, the backward pass is shorter by their time.

    If a host issues passes, it issues a stage's passes in sequence from the beginning, without
    waiting for the GPU: while a stage waits for its input, its host gets ahead.

    With ``steps_apart`` a stage begins the next iteration when its own passes are over, so the
    iteration takes as long as the longest of all stages, each from its own beginning.
    """

    times: StageTimes
    passes: tuple[StagePasses, ...]
    split: SplitTimes | None
    host: HostTimes | None
    at_end: EndTimes
    turned: TurnTimes | None
    slowed: Mapping[PassKind, SlowedTimes]
    steps_apart: bool

    def iteration_s(self, networks: SharedNetworks | None = None) -> Floats:
        """The seconds of one iteration, for each candidate.

        If stages share ``networks``, their sends slow one another down, and passes are computed in
        order of time.
        """
        in_any_order = in_turn(self.passes)
        longest_s, ends = self._walked(in_any_order, None)
        if networks is None or not networks.weights:
            return longest_s
        in_time = sorted(in_any_order, key=lambda one: float(np.ravel(ends[one.key])[0]))
        return self._walked(in_time, networks)[0]

    def _walked(
        self, in_order: Sequence[StagePass], networks: SharedNetworks | None
    ) -> tuple[Floats, Mapping[PassKey, Any]]:
        """The seconds of an iteration for each candidate, and the end of each pass.

        Passes are computed in an order in which each comes after those that it waits for.
        """
        walk = _PassEnds(self, networks)
        for stage_pass in in_order:
            walk.run(stage_pass)
        longest = walk.ends_of_stages.longest_s(walk.free, walk.begun)
        is_single = len(self.times.forward_s) == 1
        return np.array([longest]) if is_single else np.asarray(longest), walk.ends

    @property
    def collectives(self) -> Sequence[PartCollectives]:
        """The collectives of each part of the model that may delay sends."""
        ends = self.at_end
        nothing_s = np.zeros_like(ends.gathers_s)
        first_s = nothing_s if self.split is None else self.split.first_s
        of_parts = (ends.gathers_s, ends.reductions_s, ends.steady_s(self.turned), first_s)
        return [*map(PartCollectives, *map(columns_of, of_parts))]


class _PassEnds:
    """The end of each pass and of each stage's work so far, while the passes of an order are
    computed one after another.
    """

    def __init__(self, path: OrderPath, networks: SharedNetworks | None) -> None:
        # For a single candidate, plain numbers are ten times faster than arrays with one entry.
        is_single = len(path.times.forward_s) == 1
        self.maximum: Callable[[Any, Any], Any] = max if is_single else np.maximum
        self.seconds = _PassSeconds(path.times, path.passes, path.split)
        self.ends: dict[PassKey, Any] = {}
        self.free: dict[int, Any] = {}
        self.begun: dict[int, Any] = {}
        self.steps_apart = path.steps_apart
        self.hosts = None if path.host is None else _HostSeconds(path.host)
        rests_s = path.at_end.rests_s(path.times, path.split)
        self.ends_of_stages = _StageEnds(path.at_end, rests_s, self.hosts, self.maximum)
        self.turns = LateTurns(path.turned, path.passes, self.maximum)
        self.slowed, self.sends = BesideSends(path.slowed, self.maximum), Sends(networks)
        reduced = self.ends_of_stages.reduced
        links = BusyLinks(path.collectives, path.passes, reduced, self.maximum)
        self.outputs = _Outputs(self.seconds, self.sends, links)

    def run(self, stage_pass: StagePass) -> None:
        """Compute the end of a pass and of its send; those that it waits for are known."""
        stage, seconds = stage_pass.stage, self.seconds
        part, left = seconds.part(stage_pass), seconds.left_s(stage_pass)
        _, through, extra = seconds.of(stage_pass)
        end, last_block_s = self._computed(stage_pass, part) + extra, 0.0
        if self.hosts is not None:
            since_first_s, last_block_s = self.hosts.least_s(stage_pass, part, through + extra)
            end = self.maximum(end, since_first_s)
        computed = end
        end = self.maximum(end, last_block_s)
        self.free[stage], self.ends[stage_pass.key] = end + left, end
        if stage_pass.is_sent:
            self.outputs.send(stage_pass, end)
        if stage_pass.phase == "first_forward":
            self.free[stage] = end + left + seconds.after_first_s[part]
        if stage_pass.phase == "last_backward":
            self.ends_of_stages.add(stage, part, computed + left, last_block_s)

    def _computed(self, stage_pass: StagePass, part: int) -> Any:
        """The end of a pass without its extra seconds as a first or last pass, and without its
        host.
        """
        stage, seconds = stage_pass.stage, self.seconds
        pass_s, through, _ = seconds.of(stage_pass)
        free = begin = self.free.get(stage, 0.0)
        comes = None
        if stage_pass.needs is not None:
            comes = self.sends.come_s(stage_pass, self.ends[stage_pass.needs])
            comes = comes + seconds.late_s(stage_pass)
            begin = self.maximum(free, comes)
        lost_s = self.slowed.lost_s(stage_pass, part, self.sends.going_on(stage, begin))
        end = through
        if stage in self.free:
            turned_s = self.turns.before_s(stage_pass, part)
            end = free + (pass_s + turned_s - seconds.left_s(stage_pass) + lost_s)
        if stage_pass.phase == "first_forward":
            end = end + seconds.begin_s[part]
        if comes is None:
            return end
        if self.steps_apart and stage not in self.free:
            self.begun[stage] = comes - seconds.begin_s[part]
        return self.maximum(end, comes + (through + lost_s))


class _Outputs:
    """Sends the outputs of passes to other stages, later where collectives use the link too."""

    def __init__(self, seconds: "_PassSeconds", sends: Sends, links: BusyLinks) -> None:
        self.seconds, self.sends, self.links = seconds, sends, links

    def send(self, stage_pass: StagePass, end: Any) -> None:
        """Send the output of a pass that ends at a given time."""
        alone_s, sent_s = self.seconds.sent_s(stage_pass)
        # A send that runs beside a pass is late by the collectives of that pass already.
        late_s = alone_s + self.links.late_s(stage_pass, end, alone_s)
        sent_s = self.seconds.maximum(sent_s, late_s)
        self.sends.add(stage_pass, end, sent_s, queue=self.seconds.sends_queue)


class _StageEnds:
    """Computes when each stage has finished its last gradient reductions and optimizer steps."""

    def __init__(
        self,
        at_end: EndTimes,
        rests_s: Floats,
        hosts: "_HostSeconds | None",
        maximum: Callable[[Any, Any], Any],
    ) -> None:
        self.reductions_s, self.steps_s = (
            columns_of(at_end.reductions_s),
            columns_of(at_end.steps_s),
        )
        self.rests_s, self.tied_s = columns_of(rests_s), columns_of(at_end.tied_s)
        self.blocks = None if hosts is None else hosts.blocks
        self.maximum = maximum
        self.reduced: dict[int, Any] = {}
        self.stepping_s: dict[int, Any] = {}

    def add(self, stage: int, part: int, computed: Any, last_block: Any) -> None:
        """Record that the last backward pass of a part of the model has computed.

        If a host issues passes, only the ``last_block`` of the part has just computed: the
        gradients of the other blocks were reduced while the pass waited for its host.
        """
        queued = self.reduced.get(stage, 0.0) + self.reductions_s[part] + self.tied_s[part]
        self.reduced[stage] = self.maximum(computed + self.rests_s[part], queued)
        self.stepping_s[stage] = self.stepping_s.get(stage, 0.0) + self.steps_s[part]
        if self.blocks is not None:
            of_block_s = self.reductions_s[part] / self.blocks[part]
            last_s = of_block_s - self.maximum(of_block_s - self.rests_s[part], 0.0)
            self.reduced[stage] = self.maximum(self.reduced[stage], last_block + last_s)

    def longest_s(self, ends: Mapping[int, Any], begun: Mapping[int, Any]) -> Any:
        """The time from a stage's first pass to the end of its work, for the slowest stage."""
        longest: Any = 0.0
        for stage, end in ends.items():
            over = self.maximum(end, self.reduced[stage]) + self.stepping_s[stage]
            longest = self.maximum(longest, over - begun.get(stage, 0.0))
        return longest


class _HostSeconds:
    """Computes when the host of each stage has issued its passes, one after another."""

    def __init__(self, times: HostTimes) -> None:
        self.of_kind = {"F": columns_of(times.forward_s), "B": columns_of(times.backward_s)}
        self.blocks = columns_of(times.blocks)
        self.issued_s: dict[int, Any] = {}

    def least_s(self, stage_pass: StagePass, part: int, through: Any) -> tuple[Any, Any]:
        """Two lower bounds of the time at which the pass that a stage's host issues next will end.

        The host issues a pass block by block. After its first block was issued, the pass takes at
        least the time of all its blocks; after its last block was issued, at least that of one
        block (``through``). Weight gradients are issued together with their backward pass.
        """
        before = self.issued_s.get(stage_pass.stage, 0.0)
        issue_s = 0.0 if stage_pass.kind == "W" else self.of_kind[stage_pass.kind][part]
        self.issued_s[stage_pass.stage] = before + issue_s
        blocks = self.blocks[part]
        return before + issue_s / blocks + through, before + issue_s + through / blocks


class _PassSeconds:
    """The seconds of each pass: those for which it occupies its stage, and those from the arrival
    of its input to its output.

    For a single candidate, these are plain numbers instead of columns.
    """

    def __init__(
        self, times: StageTimes, passes: Sequence[StagePasses], split: SplitTimes | None
    ) -> None:
        candidates, count = times.forward_s.shape
        parts = range(count)
        placement = passes[0].placement
        self.num_stages, self.parts = len(passes), placement.parts
        self.maximum: Callable[[Any, Any], Any] = max if candidates == 1 else np.maximum
        self.splits = [passes[stage].splits_backward for stage in placement.stages]
        of_part = [times.of_stage(part) for part in parts]

        def plain(column: Floats) -> Any:
            return column.item() if candidates == 1 else column

        self.begin_s = [plain(one.begin_s) for one in of_part]
        self.end_s = [plain(one.end_s) for one in of_part]
        self.after_first_s = [plain(one.after_first_s) for one in of_part]
        self.crossed_s = [plain(one.point_to_point_s / 2) for one in of_part]
        received_s = [*(one.received_s for one in of_part[1:]), of_part[-1].point_to_point_s]
        self.alone_s = [
            plain(np.minimum(times_of_part.point_to_point_s / 2, alone_s))
            for times_of_part, alone_s in zip(of_part, received_s, strict=True)
        ]
        # A send that takes longer than a pass may still run when the stage's next output is ready,
        # so sends queue.
        fastest = np.minimum(times.through_forward_s, times.through_backward_s)
        self.sends_queue = bool((times.point_to_point_s / 2).max() > fastest.min())
        self.late_by_phase = {
            "first_forward": [
                plain(one.first_send_late_s + one.end_send_late_s) for one in of_part
            ],
            "last_backward": [plain(one.end_return_late_s) for one in of_part],
        }
        self.within_s = [
            (plain(one.within_forward_s), plain(one.within_backward_s)) for one in of_part
        ]
        self.own_s: dict[tuple[PassKind, int], tuple[Any, Any]] = {}
        self.left: dict[tuple[PassKind, int], Any] = {}
        for part, part_times in zip(parts, of_part, strict=True):
            self.left["B", part] = 0.0 if self.splits[part] else plain(part_times.left_backward_s)
            self.own_s["F", part] = plain(part_times.forward_s), plain(part_times.through_forward_s)
            backward = part_times.backward_s, part_times.through_backward_s
            if self.splits[part]:
                assert split is not None, "an order with W asks for the times of its parts"
                weights_s, less_s = split.weights_s[:, part], split.less_s[:, part]
                # Gradient reductions that follow a whole backward pass follow the separate
                # weight-gradient pass instead.
                backward = backward[0], backward[1] + part_times.left_backward_s
                shorter = [np.maximum(own - less_s, 0.0) for own in backward]
                backward = shorter[0], shorter[1]
                self.own_s["W", part] = plain(weights_s), plain(weights_s)
            self.own_s["B", part] = plain(backward[0]), plain(backward[1])

    def of(self, stage_pass: StagePass) -> tuple[Floats | float, Floats | float, Floats | float]:
        """Three times of a pass: the seconds after the end of its stage's previous pass, the
        seconds after its input has arrived, and extra seconds if it is a first or last pass.
        """
        part = self.part(stage_pass)
        pass_s, through = self.own_s[stage_pass.kind, part]
        extra: Floats | float = 0.0
        if stage_pass.phase in ("first_forward", "last_backward"):
            extra = self.within_s[part][stage_pass.kind != "F"]
        return pass_s, through, extra

    def left_s(self, stage_pass: StagePass) -> Any:
        """The seconds for which a pass still reduces gradients after it has computed its output."""
        return self.left.get((stage_pass.kind, self.part(stage_pass)), 0.0)

    def sent_s(self, stage_pass: StagePass) -> tuple[Any, Any]:
        """The seconds in which a pass's output is sent to another stage: alone, and beside the
        sender's next pass.
        """
        goal = stage_pass.goes_to
        assert goal is not None, "it sends nothing"
        lower = stage_pass if stage_pass.kind == "F" else goal
        part = self.parts[StageChunk(lower.stage, lower.chunk)]
        return self.alone_s[part], self.crossed_s[part]

    def late_s(self, stage_pass: StagePass) -> Any:
        """The seconds by which the input of a first forward or last backward pass arrives later
        than other inputs, since other passes of the sender slow the send, or none.
        """
        source, late_s = stage_pass.comes_from, self.late_by_phase.get(stage_pass.phase)
        if late_s is None or source is None or source.stage == stage_pass.stage:
            return 0.0
        lower = source if stage_pass.kind == "F" else stage_pass
        return late_s[self.parts[StageChunk(lower.stage, lower.chunk)]]

    def part(self, stage_pass: StagePass) -> int:
        """The index of the part of the model that a pass computes."""
        return self.parts[StageChunk(stage_pass.stage, stage_pass.chunk)]


# Computes lower bounds of the iteration time in an order of passes, faster than its critical path.


# A lower bound is computed from these times of each part of the model; if one of them grows, no
# pipeline gets faster.
OF_PARTS = (
    *("forward_s", "backward_s", "through_forward_s", "through_backward_s"),
    *("within_forward_s", "within_backward_s", "begin_s", "end_s", "gone_backward_s"),
)
OF_CHUNKS = (*OF_PARTS, "issued_s")
OF_SENDS = "point_to_point_s", "end_send_late_s", "end_return_late_s"


def order_bound_s(
    times: StageTimes,
    placement: Placement,
    micro_batches: Floats | int,
    *,
    issued_s: Floats | None = None,
    splits: bool = False,
    steps_apart: bool = False,
) -> Floats:
    """A lower bound of the seconds of an iteration in an order of passes, for each candidate.

    It is the longest of several times that no order can avoid, made from the times of the model's
    parts (C, P) and the seconds ``issued_s`` in which hosts issue both passes of a micro-batch.

    A stage runs all its passes. The first is a forward pass of its first chunk, and waits until the
    first micro-batch has passed through the first chunks of the stages in front. The last backward
    pass is of its first chunk too, and its gradient returns through the same chunks. A micro-batch
    also passes through all parts of the model, forward and back. Parts lie in a loop or in a V
    (``mistlab.schedule.placement``): in both, the first chunks are the first parts.

    A host issues all passes of its stage in sequence from the beginning of the iteration, so a
    stage's last pass ends no earlier than its host has issued everything. Work after that pass may
    overlap with a pass that waits for its host. A stage's sends are in sequence too, from the end
    of its first pass.

    With ``splits`` weight gradients have separate passes: a backward pass and its weight-gradient
    pass together take at least as long as one whole pass. With ``steps_apart`` no stage waits for
    the beginning of another.
    """
    goes_back = not (splits or steps_apart)
    of_chunks = _OfChunks(times, placement, issued_s)
    stages = InOrder.of(of_chunks.chunks, np.asarray(micro_batches)[..., None], goes_back=goes_back)
    before_s = stages.begin_s if steps_apart else of_chunks.way_in_s(stages)
    goes_s = of_chunks.way_out_s(stages) if goes_back else np.zeros_like(stages.end_s)
    passed_s = before_s + stages.all_s + np.maximum(stages.end_s, goes_s)
    issued_s = stages.issued_within_s(steps_apart=steps_apart) + goes_s
    further = np.asarray(micro_batches)[..., None] - 1
    sent_s = before_s + stages.first_s + of_chunks.sends_s(further)
    if steps_apart:
        # Where stages begin their iterations independently, the receiver of the last send may have
        # started later, so sends give no lower bound.
        sent_s = np.zeros_like(sent_s)
    longest = np.asarray(np.maximum.reduce([passed_s, issued_s, sent_s]).max(axis=1))
    return np.maximum(longest, of_chunks.there_and_back_s()) if goes_back else longest


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InOrder:
    """The seconds of stages from which lower bounds of the iteration time are computed.

    ``all_s`` are those of all passes, from the arrival of the first input until the last gradient
    can be sent; the host issues all passes in ``issued_s``. The first micro-batch passes through in
    ``first_s``, the last gradient goes back in ``last_s``. Work of ``begin_s`` comes before the
    first pass, work of ``end_s`` after the last one.
    """

    all_s: Floats
    issued_s: Floats
    first_s: Floats
    last_s: Floats
    begin_s: Floats
    end_s: Floats

    @classmethod
    def of(
        cls,
        chunks: Sequence[Mapping[str, Floats]],
        micro_batches: Floats | int,
        *,
        goes_back: bool,
    ) -> Self:
        """Add up the seconds of stages from the times of their chunks of layers.

        The times are named in ``OF_CHUNKS``. Unless the last gradient ``goes_back`` to the first
        stage, work after a stage's last pass counts as part of its passes.
        """
        first, nothing = chunks[0], np.zeros_like(chunks[0]["end_s"])
        both_s = sum((one["forward_s"] + one["backward_s"] for one in chunks), nothing)
        once_s = sum(
            (one["within_forward_s"] + one["within_backward_s"] for one in chunks), nothing
        )
        once_s = once_s + sum((one["begin_s"] for one in chunks[1:]), nothing)
        all_s = micro_batches * both_s + once_s + first["through_forward_s"] - first["forward_s"]
        if goes_back:
            all_s = all_s - first["backward_s"] + first["gone_backward_s"]
        last_s = first["through_backward_s"] + first["within_backward_s"]
        issued_s = micro_batches * sum((one["issued_s"] for one in chunks), nothing)
        after_s = nothing if goes_back else first["end_s"]
        return cls(
            all_s=np.asarray(all_s + after_s),
            issued_s=np.asarray(issued_s),
            first_s=first["through_forward_s"] + first["within_forward_s"],
            last_s=last_s if goes_back else nothing,
            begin_s=first["begin_s"],
            end_s=first["end_s"] if goes_back else nothing,
        )

    def issued_within_s(self, *, steps_apart: bool) -> Floats:
        """A lower bound of the iteration time: the seconds in which a stage's host issues all
        passes of an iteration.

        Zero with ``steps_apart``, where a stage's iteration may begin after its host has begun to
        issue it.
        """
        return np.zeros_like(self.issued_s) if steps_apart else self.issued_s


def in_front_s(
    stage: InOrder,
    sent_s: tuple[Floats, Floats],
    after: Chains[Floats],
    *,
    is_last: bool,
    steps_apart: bool,
) -> Chains[Floats]:
    """Extend lower bounds of the iteration time of later stages by one stage in front of them, for
    each candidate.

    They are the fields ``through``, ``through_begun`` and ``whole`` of ``Chains``, whose other
    fields are zero. ``sent_s`` are the seconds of sends to the next stage and back.

    ``through`` begins when the first micro-batch arrives, and ends when the last gradient is sent
    back or, if no stage waits for it, when all stages have finished. ``through_begun`` ends at the
    same time, and begins with the iteration.
    """
    through_s, issued_s = stage.all_s, stage.issued_within_s(steps_apart=steps_apart)
    begun_s = np.zeros_like(through_s)
    if not (is_last or steps_apart):
        there_s, back_s = stage.first_s + sent_s[0], stage.last_s + sent_s[1]
        through_s = np.maximum(through_s, there_s + back_s + after.through)
        begun_s = back_s + after.through_begun
    begun_s = np.maximum(begun_s, stage.begin_s + through_s)
    whole_s = np.maximum.reduce([begun_s + stage.end_s, issued_s, after.whole])
    begun_s = np.maximum(begun_s, issued_s)
    nothing = Chains.of_nothing(np.zeros_like(whole_s))
    return replace(nothing, through=through_s, through_begun=begun_s, whole=whole_s)


def least_sends_of(times: StageTimes) -> Sequence[Floats]:
    """The least seconds of any micro-batch's send to the next stage and of its gradient's send
    back, for each candidate stage.
    """
    both_s, *late_s = (getattr(times, name) for name in OF_SENDS)
    return [both_s / 2 + one_way_s for one_way_s in late_s]


class _OfChunks:
    """The times of the model's parts that stages hold: a table for each chunk of the stages, a
    column for each stage.
    """

    def __init__(self, times: StageTimes, placement: Placement, issued_s: Floats | None) -> None:
        num_stages = placement.num_stages
        assert placement.stages[:num_stages] == (*range(num_stages),), "the first parts are first"
        of = {name: getattr(times, name) for name in OF_PARTS}
        of["issued_s"] = np.zeros_like(times.forward_s) if issued_s is None else issued_s
        parts_of = [
            [placement.of_stage(stage)[chunk] for stage in range(num_stages)]
            for chunk in range(placement.chunks)
        ]
        self.chunks = [{name: table[:, parts] for name, table in of.items()} for parts in parts_of]
        self.each_s, self.least_s = times.point_to_point_s / 2, least_sends_of(times)
        several = float(num_stages > 1)
        self.crossed_s = [[several * one[:, parts] for one in self.least_s] for parts in parts_of]
        self.last_stage, self.placement = placement.last_stage, placement

    def sends_s(self, further: Floats) -> Floats:
        """The least seconds in which each stage sends the activations and gradients of the first or
        the last micro-batch, and of ``further`` ones (C, 1).
        """
        sends_s: Floats = np.zeros_like(self.crossed_s[0][0])
        for part, (here, there) in enumerate(pairwise(self.placement.stages)):
            if here != there:
                for stage, least_s in zip((here, there), self.least_s, strict=True):
                    sends_s[:, stage] += (further * self.each_s + least_s)[:, part]
        return sends_s

    def way_in_s(self, stages: InOrder) -> Floats:
        """The seconds from the beginning of an iteration until each stage's first pass can
        start.
        """
        ready_s = stages.begin_s.copy()
        passed_s = stages.first_s + self.crossed_s[0][0]
        for stage in range(1, ready_s.shape[1]):
            comes_s = ready_s[:, stage - 1] + passed_s[:, stage - 1]
            ready_s[:, stage] = np.maximum(ready_s[:, stage], comes_s)
        return ready_s

    def way_out_s(self, stages: InOrder) -> Floats:
        """The seconds from the end of each stage's last backward pass until all stages in front of
        it are finished.
        """
        goes_s = np.zeros_like(stages.end_s)
        passed_s = self.crossed_s[0][1] + stages.last_s
        for stage in range(1, goes_s.shape[1]):
            left_s = np.maximum(stages.end_s[:, stage - 1], goes_s[:, stage - 1])
            goes_s[:, stage] = passed_s[:, stage - 1] + left_s
        return goes_s

    def there_and_back_s(self) -> Floats:
        """The seconds of one micro-batch through all parts of the model, forward and back, for each
        candidate.
        """
        names = ("through_forward_s", "within_forward_s", "through_backward_s")
        passed_s = sum(one[name].sum(axis=1) for one in self.chunks for name in names)
        sent_s = sum(each_s.sum(axis=1) for both_s in self.crossed_s for each_s in both_s)
        of_last_s = sum(each_s[:, self.last_stage] for each_s in self.crossed_s[-1])
        return np.asarray(passed_s + sent_s - of_last_s)
