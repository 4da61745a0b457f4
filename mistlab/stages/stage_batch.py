"""Holds candidates for stages of plans as columns: their choices and positions in a pipeline, their
memory, times and costs, and the chunks of interleaved stages.

Array axis: C is the number of candidates.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import prod
from typing import Any, Literal, Self, get_args

import numpy as np

from mistlab.core.arrays import Bools, Column, Floats, Ints, Rows
from mistlab.core.columns import ColumnSet
from mistlab.plan.dimensions import DIMENSIONS, counts_of_blocks
from mistlab.plan.plan import Plan, reader_of_degrees, reader_of_values
from mistlab.schedule.placement import NEXT, PREVIOUS, Placement
from mistlab.stages.plan_orders import HeldMoments, ends_of_plan, in_flight_of_plan, moments_in
from mistlab.stages.stage_shape import parts_of_plan

# Says at which position in a pipeline each candidate stage is, for a named order of passes.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StagesInOrder:
    """The position of each candidate stage in a pipeline with a named order of passes.

    ``stage`` is its number, from 0, in a pipeline of ``num_stages`` stages. If the model's blocks
    are of several kinds, ``first_blocks`` has the first block of each chunk of each stage.
    """

    order: str
    num_stages: int
    micro_batches: int
    stage: Ints
    first_blocks: Ints | None = None

    def __len__(self) -> int:
        return len(self.stage)

    def chosen(self, rows: Bools | Rows) -> Self:
        """The pipeline positions of the candidates that a mask or indices select."""
        return replace(self, stage=self.stage[rows])

    @property
    def columns(self) -> Mapping[str, Ints]:
        """The candidates' stage numbers as a column; its name says which order and sizes of a
        pipeline they are for.
        """
        return {f"{self.order} {self.num_stages} {self.micro_batches}": self.stage}

    @property
    def placement(self) -> Placement:
        """Which stage of these pipelines holds each part of the model."""
        return self._moments[0].placement

    @property
    def splits_backward(self) -> bool:
        """Whether stages compute weight gradients in passes of their own (W) in this order of
        passes.
        """
        return any(one.splits_backward for one in self._moments)

    def by_stage(self) -> Iterator[tuple[HeldMoments, Rows]]:
        """The largest numbers of micro-batches in flight, and the indices of the candidates, for
        each stage number among the candidates.
        """
        for stage in np.unique(self.stage).tolist():
            yield self._moments[stage], np.flatnonzero(self.stage == stage)

    @property
    def _moments(self) -> tuple[HeldMoments, ...]:
        return moments_in(self.order, self.num_stages, self.micro_batches)


# Holds candidates for stages as columns, with their memory, work, times and costs.


# Columns that say where in the pipeline a candidate is, each with its symbol in expressions (empty
# if it has none).
POSITIONS: Mapping[str, str] = {
    "in_flight": "q",  # micro-batches whose activations are held at once, including the running one
    "has_embedding": "e",  # 1 on the stage that has the embedding, else 0
    "has_head": "t",  # 1 on the stage that has the head, else 0
    "first_rank": "",
    # the index of the stage's first block in the model; it matters if kinds of blocks take turns
    "first_block": "",
    "micro_batches": "",  # micro-batches of the pipeline; 0 where they make no difference
    # the step from this stage to the one that sends its input: -1, 0 (itself) or 1
    "comes_from": "",
    "goes_to": "",  # the step from this stage to the one that takes its output
    "shares_table": "",  # 1 if embedding and head are two parts of one stage, else 0
}


def column_names() -> tuple[str, ...]:
    """The names of all columns of candidates: the choices of a stage, then its position in the
    pipeline.
    """
    return (*DIMENSIONS, *POSITIONS)


@dataclass(frozen=True, slots=True, eq=False, init=False)
class StageBatch:
    """Candidates for stages of plans as columns: each row is a stage's choices and its position in
    the pipeline.

    Columns are named as in ``DIMENSIONS`` and ``POSITIONS`` and are attributes: ``batch.zero``.
    ``in_flight`` is the number of micro-batches whose activations are held at once, including the
    running one. ``has_embedding`` and ``has_head`` are 1 on the stages that have them, else 0.
    Ranks fill nodes in order; the stage's ranks begin at ``first_rank``.
    """

    columns: Mapping[str, Column]

    def __init__(self, **columns: Column | float) -> None:
        """Make candidates from columns, or from scalars that apply to all candidates.

        Omitted dimensions have their default. The default position is a stage in the middle with
        one micro-batch.
        """
        given = {**_DEFAULTS, **_defaults(), **columns}
        rows = {len(column) for column in given.values() if isinstance(column, np.ndarray)}
        assert len(rows) == 1, f"columns of unlike lengths: {rows}"
        names = column_names()
        assert given.keys() == set(names), f"not the columns: {sorted(given.keys() ^ set(names))}"
        self._take({name: _column(given[name], *rows) for name in names})

    def _take(self, columns: Mapping[str, Column]) -> None:
        object.__setattr__(self, "columns", columns)

    def __len__(self) -> int:
        return len(self.columns["layers"])

    def __getattr__(self, name: str) -> Column:
        """The column of candidates with this name, as an attribute."""
        if name == "columns" or name not in self.columns:
            raise AttributeError(name)
        return self.columns[name]

    def value(self, name: str) -> Column:
        """The column of candidates with this name."""
        return self.columns[name]

    @classmethod
    def of_columns(cls, columns: Mapping[str, Column]) -> Self:
        """Make a batch of candidates from a mapping with all columns."""
        batch = cls.__new__(cls)
        batch._take(columns)
        return batch

    @classmethod
    def of_plan(cls, plan: Plan) -> Self:
        """The stages of a plan as candidates, in order."""
        return cls.of_plans([plan])

    @classmethod
    def of_plans(cls, plans: Sequence[Plan]) -> Self:
        """The stages of several plans as candidates, one plan after another."""
        return cls.of_rows([row for plan in plans for row in rows_of(plan)])

    @classmethod
    def of_rows(cls, rows: Sequence["StageRow"]) -> Self:
        """Make candidates from rows, each with a value for every column in order."""
        columns = map(np.array, zip(*rows, strict=True))
        return cls.of_columns(dict(zip(column_names(), columns, strict=True)))

    @classmethod
    def joined(cls, batches: Sequence["StageBatch"]) -> Self:
        """Concatenate several batches of candidates."""
        return cls.of_columns(
            {
                name: np.concatenate([batch.columns[name] for batch in batches])
                for name in batches[0].columns
            }
        )

    def chosen(self, rows: Bools | Rows | slice) -> Self:
        """Select the candidates by a mask or indices."""
        return self.of_columns({name: column[rows] for name, column in self.columns.items()})

    def with_columns(self, **columns: Column | float) -> Self:
        """A copy of these candidates with some columns replaced."""
        return type(self)(**{**self.columns, **columns})

    def by_symbol(self, symbols: Iterable[str]) -> Mapping[str, Column]:
        """The columns that have one of these symbols in expressions, by symbol."""
        names = {symbol: name for name, symbol in symbols_of_columns().items()}
        return {symbol: self.columns[names[symbol]] for symbol in symbols if symbol in names}


def symbols_of_columns() -> Mapping[str, str]:
    """The symbol of each column in expressions, for the columns that have one."""
    symbols = {**{name: row.symbol for name, row in DIMENSIONS.items()}, **POSITIONS}
    return {name: symbol for name, symbol in symbols.items() if symbol}


_DEFAULTS: Mapping[str, float] = {
    "in_flight": 1,
    "has_embedding": 0,
    "has_head": 0,
    "first_rank": 0,
    "first_block": 0,
    "micro_batches": 0,
    "comes_from": PREVIOUS,
    "goes_to": NEXT,
    "shares_table": 0,
}


def _defaults() -> Mapping[str, float]:
    return {name: row.default for name, row in DIMENSIONS.items() if row.default is not None}


def _column(given: Column | float, rows: int) -> Column:
    return given if isinstance(given, np.ndarray) else np.full(rows, given)


# The default position of a stage that is not cut into chunks: its inputs come from the previous
# stage, its outputs go to the next, and embedding and head do not share a table.
_WAYS = PREVIOUS, NEXT, 0
# A candidate as a row: a value for each column, in the order of columns.
StageRow = tuple[float, ...]


def rows_of(plan: Plan, period: int | None = None) -> list[StageRow]:
    """The stages of a plan as rows of column values, in order.

    If block kinds repeat with a ``period``, first blocks are counted modulo the period, and the
    number of micro-batches is left out, so that different plans can have equal rows.
    """
    rows: list[StageRow] = []
    first_rank, first_block = 0, 0
    first, last = ends_of_plan(plan)
    count = 0 if period else plan.micro_batches
    held, values, degrees = in_flight_of_plan(plan), reader_of_values(), reader_of_degrees()
    for index, stage in enumerate(plan.stages):
        ends = int(index == first), int(index == last)
        block = first_block % period if period else first_block
        rows.append((*values(stage), held[index], *ends, first_rank, block, count, *_WAYS))
        first_rank += int(prod(degrees(stage)))
        first_block += stage.layers
    return rows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StagePeaks:
    """The memory figures that decide whether each candidate stage fits on its GPUs."""

    feasible: Bools
    held_bytes: Floats
    largest_parameters: Floats
    head_parameters: Floats
    forward_peak_bytes: Floats
    backward_peak_bytes: Floats
    step_peak_bytes: Floats
    host_bytes: Floats

    @property
    def peak_bytes(self) -> Floats:
        """The highest of the memory peaks of forward passes, backward passes and the optimizer
        step.
        """
        passes = np.maximum(self.forward_peak_bytes, self.backward_peak_bytes)
        return np.asarray(np.maximum(passes, self.step_peak_bytes))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageFigures(StagePeaks):
    """The memory of each candidate stage on one rank, and a rank's operations and bytes for one
    micro-batch.

    ``feasible`` is false if sizes do not divide; then the other figures mean nothing. The peaks
    include everything: states, buffers, activations and temporaries. The step's peak is that of the
    optimizer step alone, even where it overlaps with passes. ``held_bytes`` are held all the time:
    states and buffers. Kernels read and write ``moved_bytes``, tensor-parallel ranks exchange
    ``collective_bytes``. ``largest_parameters`` counts trained parameters of the largest layer,
    ``head_parameters`` those of the head; both are 0 where adapters alone are trained.
    """

    parameters: Floats
    weights_bytes: Floats
    gradients_bytes: Floats
    optimizer_bytes: Floats
    activations_bytes: Floats
    buffers_bytes: Floats
    step_buffer_bytes: Floats
    logits_bytes: Floats
    forward_flop: Floats
    backward_flop: Floats
    forward_moved_bytes: Floats
    backward_moved_bytes: Floats
    forward_collective_bytes: Floats
    backward_collective_bytes: Floats


# What a stage's time describes: steady passes, the first or last pass ("edge"), waits for other
# stages ("wait"), or the host's issue of kernels ("host").
Role = Literal["steady", "edge", "wait", "host"]


def _in_role(role: Role, *, is_send: bool = False) -> Mapping[str, Any]:
    """Metadata for a field of ``StageTimes``: what its time describes, and whether the time is one
    of sends to the next stage.
    """
    return {"role": role, "is_send": is_send}


_STEADY, _EDGE, _WAIT, _HOST = map(_in_role, get_args(Role))
_SENT, _SENT_FIRST = _in_role("steady", is_send=True), _in_role("edge", is_send=True)
_SENT_IN_ROUNDS = _in_role("wait", is_send=True)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageTimes(ColumnSet):
    """The times of pipeline stages from which an iteration's time is computed: of steady passes, of
    first and last passes, and of waits for sends and hosts. Columns are (C) or (C, S).

    Of a steady pass, ``through`` is the time from a micro-batch's arrival until it can go on,
    without fetches before it and work after it. ``left_backward_s`` is how long a steady backward
    pass still reduces weight gradients after its input gradient can be sent.

    ``delta`` is how much longer than a steady pass the first forward takes, and the last backward
    with the optimizer step. Its part ``within`` makes the pass itself longer; the rest may come
    before or after the micro-batch. ``after_first_s``, a part of the first delta, lies between the
    first forward and the stage's next pass.

    ``point_to_point_s`` is a send to the next stage and one back, unless sends are part of passes;
    ``received_s`` is a send from the previous stage, and as long as one to it. Passes and sends
    that overlap slow one another. ``first_send_late_s`` is what the first micro-batch's send takes
    beyond half of ``point_to_point_s``; not above zero are ``end_send_late_s``, what the first and
    the last one's do if less, and ``end_return_late_s``, what the last gradient does. A round trip
    there and back, in a pipeline bound by sends, gets longer by ``within_round_s`` at the stage's
    passes, and by ``round_late_s`` at sends that outlast one. ``queued_late_s`` is how much longer
    a micro-batch's passes take if its send waited. Where sends block both stages, those after
    passes are ``held_forward_s`` and ``held_backward_s``, parts of the steady passes.

    The ``issued`` times are those of the host, which issues passes without waiting for the GPU: the
    seconds to issue a forward and a backward pass; the least seconds from then until the GPU has
    run the pass (``late``); and the seconds from when all passes were issued until the stage is
    over. They are 0 where no host is modelled, or the host never gets ahead of its GPU.
    """

    forward_s: Floats = field(metadata=_STEADY)
    backward_s: Floats = field(metadata=_STEADY)
    through_forward_s: Floats = field(metadata=_STEADY)
    through_backward_s: Floats = field(metadata=_STEADY)
    within_forward_s: Floats = field(metadata=_EDGE)
    within_backward_s: Floats = field(metadata=_EDGE)
    after_first_s: Floats = field(metadata=_EDGE)
    delta_forward_s: Floats = field(metadata=_EDGE)
    delta_backward_s: Floats = field(metadata=_EDGE)
    point_to_point_s: Floats = field(metadata=_SENT)
    first_send_late_s: Floats = field(metadata=_SENT_FIRST)
    end_send_late_s: Floats = field(metadata=_SENT_FIRST)
    end_return_late_s: Floats = field(metadata=_SENT_FIRST)
    received_s: Floats = field(metadata=_WAIT)
    within_round_s: Floats = field(metadata=_WAIT)
    round_late_s: Floats = field(metadata=_SENT_IN_ROUNDS)
    queued_late_s: Floats = field(metadata=_SENT_IN_ROUNDS)
    held_forward_s: Floats = field(metadata=_SENT_IN_ROUNDS)
    held_backward_s: Floats = field(metadata=_WAIT)
    left_backward_s: Floats = field(metadata=_WAIT)
    issued_forward_s: Floats = field(metadata=_HOST)
    issued_backward_s: Floats = field(metadata=_HOST)
    issued_forward_late_s: Floats = field(metadata=_HOST)
    issued_backward_late_s: Floats = field(metadata=_HOST)
    issued_end_s: Floats = field(metadata=_HOST)

    @classmethod
    def of(cls, seconds: "StageTimes", *shape: int) -> Self:
        """The same times as tables with a row for each pipeline and a column for each of its
        stages.
        """
        return cls(**{name: getattr(seconds, name).reshape(shape) for name in TIMES})

    def of_stage(self, stage: int) -> Self:
        """Select the times of one stage from tables with a column for each stage."""
        return type(self)(**{name: getattr(self, name)[:, stage] for name in TIMES})

    @property
    def begin_s(self) -> Floats:
        """The seconds of work before the first forward pass that need not wait for the first
        micro-batch.
        """
        first_s = self.forward_s + self.delta_forward_s - self.after_first_s
        return np.asarray(np.maximum(first_s - self.through_forward_s - self.within_forward_s, 0.0))

    @property
    def end_s(self) -> Floats:
        """The seconds of work after the last backward pass, for which no other stage waits."""
        return np.asarray(np.maximum(self.delta_backward_s - self.within_backward_s, 0.0))

    @property
    def gone_backward_s(self) -> Floats:
        """The seconds of a backward pass until its input gradient can be sent back."""
        return np.asarray(self.backward_s - self.left_backward_s)

    @property
    def issued_s(self) -> Floats:
        """The seconds in which the host issues both passes of a micro-batch."""
        return self.issued_forward_s + self.issued_backward_s


TIMES = tuple(entry.name for entry in fields(StageTimes))
LOST = "lost_forward_s", "lost_backward_s"
MOVED = "moved_forward_s", "moved_backward_s", "moved_through_s", "moved_left_s"
LATE = "late_forward_s", "late_backward_s", "late_turned_s"
SENDS = tuple(entry.name for entry in fields(StageTimes) if entry.metadata["is_send"])


def times_of(*roles: Role) -> tuple[str, ...]:
    """The names of the stage times with any of these roles (such as "steady")."""
    return tuple(entry.name for entry in fields(StageTimes) if entry.metadata["role"] in roles)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageSeconds(StageTimes):
    """The times of each candidate stage; the closed form of 1F1B needs ``StageTimes`` alone.

    A forward pass that follows a forward pass is shorter by ``turned_s``, as no gradients are still
    being reduced. The ``again`` times are those of ``longer_again``, ``step_s`` the arithmetic of
    the optimizer step, even beside passes. ``exposed_communication_s`` is the time of a steady
    micro-batch beyond its computation. The ``lost`` times are how much sends lengthen passes, the
    ``late`` times how much a whole pass, or the reductions of ``turned_s``, lengthens the send
    beside it. ``sent_s`` is a send to the next stage beside no pass. Where data leaves passes, the
    ``moved`` times are what forward passes after backward ones, backward after forward ones, idle
    stages' forward passes and ``left_backward_s`` take beyond the closed form's times, which keep
    to their bounds. The ``stepped`` times are those of ``left_by_steps``.
    """

    turned_s: Floats
    again_forward_s: Floats
    again_backward_s: Floats
    moved_forward_s: Floats
    moved_backward_s: Floats
    moved_through_s: Floats
    moved_left_s: Floats
    stepped_s: Floats
    stepped_late_s: Floats
    step_s: Floats
    exposed_communication_s: Floats
    lost_forward_s: Floats
    lost_backward_s: Floats
    late_forward_s: Floats
    late_backward_s: Floats
    late_turned_s: Floats
    sent_s: Floats

    @property
    def stable_s(self) -> Floats:
        """The seconds of a steady forward and backward pass of a micro-batch, or of issuing both on
        the host if that takes longer.
        """
        return np.maximum(self.forward_s + self.backward_s, self.issued_s)

    @property
    def without_turns(self) -> Self:
        """The stage times for orders in which it is not known yet what a pass follows: no gradients
        are being reduced or offloaded, and nothing is being sent when it begins.
        """
        return replace(
            self,
            forward_s=self.forward_s - self.turned_s - self.lost_forward_s,
            backward_s=self.backward_s - self.lost_backward_s,
            delta_forward_s=self.delta_forward_s + self.turned_s + self.lost_forward_s,
            turned_s=np.zeros_like(self.turned_s),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageCosts(ColumnSet):
    """The costs of each candidate stage: its times, and the memory of its fullest GPU.

    ``fits`` is false if memory is short or if sizes do not divide. ``host_bytes`` are those of one
    rank.
    """

    seconds: StageSeconds
    fits: Bools
    peak_allocated_bytes: Floats
    peak_reserved_bytes: Floats
    host_bytes: Floats


# Cuts stages into their chunks (the parts of the model on a stage), each of which is costed like a
# stage of its own.


def batch_of_parts(plans: Sequence[Plan], placement: Placement) -> StageBatch:
    """The parts of the models of several plans as candidates: plan after plan, in the order of the
    model.
    """
    parts = [(plan, part) for plan in plans for part in parts_of_plan(plan, placement)]
    first = np.cumsum([0, *(plan.num_stages for plan in plans)])[:-1]
    numbers = range(len(placement.stages))
    places = np.repeat(first, len(numbers))
    stages = StageBatch.of_plans(plans).chosen(places + np.array([one.stage for _, one in parts]))
    of_parts = {
        "layers": [len(one.blocks) for _, one in parts],
        **{name: [one.treated[name] for _, one in parts] for name in parts[0][1].treated},
        "has_embedding": [int(one.has_embedding) for _, one in parts],
        "has_head": [int(one.has_head) for _, one in parts],
        "first_block": [one.blocks.start - 1 for _, one in parts],
        "comes_from": [placement.comes_from(part) for part in numbers] * len(plans),
        "goes_to": [placement.goes_to(part) for part in numbers] * len(plans),
        "shares_table": [int(placement.ends_meet)] * len(parts),
    }
    columns = {name: np.array(column) for name, column in of_parts.items()}
    return StageBatch.of_columns({**stages.columns, **columns})


def parts_of_stages(batch: StageBatch, placement: Placement) -> StageBatch:
    """Cut the stages of pipelines into the parts of the model that they hold.

    Candidates are sorted by stage (S, C), and the result by part of the model (P, C). A stage has
    the same number of blocks in all pipelines.
    """
    stages = np.split(np.arange(len(batch)), placement.num_stages)
    parts: list[StageBatch] = []
    first_block = 0
    for part, (stage, chunk) in enumerate(placement.places):
        of_stage = batch.chosen(stages[stage])
        blocks = placement.shares_of_blocks(int(of_stage.layers[0]), stage)
        parts.append(
            of_stage.with_columns(
                layers=np.full(len(of_stage), blocks[chunk]),
                first_block=np.full(len(of_stage), first_block),
                **_treated(of_stage, sum(blocks[:chunk]), sum(blocks[: chunk + 1])),
                has_embedding=np.full(len(of_stage), int(part == 0)),
                has_head=np.full(len(of_stage), int(part == len(placement.stages) - 1)),
                comes_from=placement.comes_from(part),
                goes_to=placement.goes_to(part),
                shares_table=int(placement.ends_meet),
            )
        )
        first_block += blocks[chunk]
    return StageBatch.joined(parts)


def chunk_of_loop(batch: StageBatch, chunk: int, chunks: int) -> StageBatch:
    """Chunk number ``chunk`` of each candidate as a stage of its own, in interleaved pipelines with
    ``chunks`` chunks per stage.
    """
    return _chunk(batch, chunk, chunks, rest_is_last=batch.has_embedding > 0)


def chunk_in_order(batch: StageBatch, chunk: int, in_order: StagesInOrder) -> StageBatch:
    """Chunk number ``chunk`` of each candidate as a stage of its own, in a named order."""
    placement, first_blocks = in_order.placement, in_order.first_blocks
    if first_blocks is not None:
        batch = batch.with_columns(first_block=first_blocks[in_order.stage, chunk])
    if placement.is_loop:
        return chunk_of_loop(batch, chunk, placement.chunks)
    chunks = _chunk(
        batch, chunk, placement.chunks, rest_is_last=np.zeros(len(batch), dtype=np.bool_)
    )
    parts = [placement.of_stage(stage)[chunk] for stage in range(in_order.num_stages)]
    return chunks.with_columns(
        comes_from=np.array([placement.comes_from(part) for part in parts])[in_order.stage],
        goes_to=np.array([placement.goes_to(part) for part in parts])[in_order.stage],
        shares_table=int(placement.ends_meet),
    )


def _chunk(batch: StageBatch, chunk: int, chunks: int, *, rest_is_last: Bools) -> StageBatch:
    """Chunk number ``chunk`` of each candidate as a stage of its own.

    If blocks do not divide evenly, the last chunks have one more block where ``rest_is_last``,
    otherwise the first chunks.
    """
    each, rest = np.divmod(batch.layers, chunks)
    begin, end = (
        count * each
        + np.where(rest_is_last, np.maximum(count - (chunks - rest), 0), np.minimum(count, rest))
        for count in (chunk, chunk + 1)
    )
    return batch.with_columns(
        layers=end - begin,
        **_treated(batch, begin, end),
        has_embedding=batch.has_embedding * (chunk == 0),
        has_head=batch.has_head * (chunk == chunks - 1),
    )


def _treated(batch: StageBatch, begin: Column | int, end: Column | int) -> dict[str, Column]:
    """The numbers of blocks that are run in each way (such as recomputed), among each stage's
    blocks from ``begin`` to ``end``.

    In a stage, plain blocks come first, then those run in each other way, in the order of columns.
    """
    names = counts_of_blocks()
    after = batch.layers - sum(batch.value(name) for name in names)
    treated: dict[str, Column] = {}
    for name in names:
        before, after = after, after + batch.value(name)
        within = np.minimum(end, after) - np.maximum(begin, before)
        treated[name] = np.maximum(within, 0).astype(np.int64)
    return treated
