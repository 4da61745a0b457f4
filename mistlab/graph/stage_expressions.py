"""Builds expressions for the memory and work of a pipeline stage: weights and other states,
buffers, activations, peaks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import sympy

from mistlab.core.units import MIB_BYTES
from mistlab.engines.engine import EngineMemory
from mistlab.graph.graph import PHASES, Phase
from mistlab.graph.layer_types import (
    BLOCKS,
    EMBEDDING,
    HEAD,
    LARGEST_BLOCK,
    LARGEST_EXPERTS,
    LayerSums,
    type_of,
)
from mistlab.graph.sums import largest
from mistlab.graph.symbols import choice_symbol, size_symbol
from mistlab.graph.treatments import Treatment
from mistlab.plan.dimensions import AXES, DIMENSIONS, GROUPS, STATE_AXES, Axis, states_as_changed

# Builds expressions for the bytes of weights, gradients and optimizer states on a rank, by ZeRO
# level and offload ratio.


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """The bytes of one rank's weights, gradients, optimizer states or activations: those on its GPU
    and those on its host.
    """

    device: sympy.Expr
    host: sympy.Expr


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """The numbers of parameters on one rank: of all parameters, and of those in experts.

    Both numbers are needed, since an expert is shared by other ranks than the rest of a layer.
    """

    every: sympy.Expr
    experts: sympy.Expr

    def __add__(self, other: Self) -> Self:
        return type(self)(every=self.every + other.every, experts=self.experts + other.experts)

    def times(self, factor: sympy.Expr) -> Self:
        """Multiply both numbers of parameters (all, and those in experts) by a factor."""
        return type(self)(every=self.every * factor, experts=self.experts * factor)


def weights(blocks: Parameters, ends: Parameters, memory: EngineMemory) -> States:
    """The bytes of a rank's weights on GPU and host; from ZeRO-3 on, data-parallel ranks shard
    them.
    """
    if memory.frozen_weight:
        blocks = blocks.times(sympy.Float(memory.frozen_weight / memory.weight))
    return _states(blocks, ends, memory.weight, level=3, ratio="ww")


def gradients(blocks: Parameters, ends: Parameters, memory: EngineMemory) -> States:
    """The bytes of a rank's accumulated gradients on GPU and host; sharded from ZeRO-2 on."""
    return _states(blocks, ends, memory.gradient, level=2, ratio="wg")


def optimizer(blocks: Parameters, ends: Parameters, memory: EngineMemory) -> States:
    """The bytes of a rank's optimizer states on GPU and host; sharded from ZeRO-1 on.

    The states of a local-SGD outer optimizer stay on the device.
    """
    states = _states(blocks, ends, memory.optimizer, level=1, ratio="wo")
    if not memory.outer:
        return states
    return replace(states, device=states.device + sharded(blocks + ends, level=1) * memory.outer)


def sharded(whole: Parameters, *, level: int) -> sympy.Expr:
    """The number of parameters whose state a rank holds, if data-parallel ranks shard the state
    from this ZeRO ``level`` on.

    Ranks that have the same experts divide the experts' state.
    """
    zero, ranks = choice_symbol("z"), ranks_that_share()
    same_experts = ranks * size_symbol("tp") / (size_symbol("ep") * size_symbol("et"))
    parts = (whole.every - whole.experts) / ranks + whole.experts / same_experts
    return sympy.Piecewise((parts, zero >= level), (whole.every, True))


def ranks_that_share() -> sympy.Expr:
    """The number of ranks that shard the same states among them, as an expression of parallel
    degrees.
    """
    others = [axis for name, axis in STATE_AXES.items() if name not in GROUPS["gather"]]
    return _degree(AXES.values()) / _degree(others)


def _degree(axes: Iterable[Axis]) -> sympy.Expr:
    return sympy.Mul(*(choice_symbol(DIMENSIONS[axis.dimension].symbol) for axis in axes))


def _states(blocks: Parameters, ends: Parameters, each: float, *, level: int, ratio: str) -> States:
    local = sharded(blocks, level=level) * each
    kept = sharded(ends, level=level) * each
    share = choice_symbol(ratio)
    return States(device=local * (1 - share) + kept, host=local * share)


# Builds expressions for a stage's memory, its peaks and its work, as sums over its layers.


L, q = choice_symbol("L"), choice_symbol("q")
e, t = choice_symbol("e"), choice_symbol("t")
ww, wg, wo, wa = (choice_symbol(name) for name in ("ww", "wg", "wo", "wa"))


@dataclass(frozen=True, slots=True, kw_only=True)
class StageExpressions:
    """Expressions for the memory and work of one rank of a stage, in sizes and in the plan's
    choices.

    ``buffers_bytes`` is the memory for weights and gradients that are gathered from other ranks or
    fetched from the host. ``step_buffer_bytes`` is the memory of the optimizer step beyond states
    and these buffers. ``activations`` are those kept from the forward to the backward pass.
    ``moments`` has, for each pass, the bytes of activations (kept ones included) and temporaries at
    each moment at which memory may peak. ``logits_bytes`` is what the head keeps for its backward
    pass beyond its input.
    """

    parameters: sympy.Expr
    weights: States
    gradients: States
    optimizer: States
    activations: States
    buffers_bytes: sympy.Expr
    step_buffer_bytes: sympy.Expr
    logits_bytes: sympy.Expr
    largest_parameters: sympy.Expr
    head_parameters: sympy.Expr
    moments: Mapping[Phase, tuple[sympy.Expr, ...]]
    work: Mapping[str, sympy.Expr]

    @property
    def host_bytes(self) -> sympy.Expr:
        """The bytes of the rank's weights, gradients, optimizer states and activations in host
        memory.
        """
        held = (self.weights, self.gradients, self.optimizer, self.activations)
        return sympy.Add(*(states.host for states in held))


def stage_expressions(
    memory: EngineMemory,
    *,
    tied_embeddings: bool,
    treatments: Sequence[tuple[str, Treatment]],
) -> StageExpressions:
    """Build the expressions for a stage from symbols that stand for the sums over its layers.

    A stage has L blocks, some of them treated (recomputed, offloaded, ...), and q micro-batches in
    flight; e and t are 1 where it has the embedding or the head. The engine decides which bytes are
    allocated only while a block computes, and when layers step.
    """
    memory = states_as_changed(memory, lambda name: choice_symbol(DIMENSIONS[name].symbol))
    embedding, block = (LayerSums.symbols(name) for name in (EMBEDDING, BLOCKS))
    head = head_of(memory)
    gates = _gates(memory)
    block = _with_gates(block, gates, keeps=True)
    treated = [_Treated.of(name, row, gates) for name, row in treatments]
    plain = _Treated(layer=block, count=L - sum(one.count for one in treated))
    every = [plain, *treated]
    blocks = _parameters(block).times(L)
    ends = _parameters(embedding).times(e) + _parameters(head).times(t)
    if tied_embeddings:
        # A stage with both embedding and head stores their shared table only once.
        table = size_symbol("V") * size_symbol("h") / size_symbol("tp")
        ends = replace(ends, every=ends.every - e * t * table)
    largest_block = replace(
        block,
        parameters=sympy.Symbol(LARGEST_BLOCK, nonnegative=True),
        expert_parameters=sympy.Symbol(LARGEST_EXPERTS, nonnegative=True),
    )
    step_buffer = _step_buffer(blocks, ends, largest_block, memory)
    return StageExpressions(
        parameters=(blocks + ends).every,
        weights=weights(blocks, ends, memory),
        gradients=gradients(blocks, ends, memory),
        optimizer=optimizer(blocks, ends, memory),
        activations=_activations(embedding, every),
        buffers_bytes=_buffers(blocks, ends, embedding, largest_block, head, memory)
        + memory.fixed_mib * MIB_BYTES
        + memory.remembered * (blocks + ends).every
        + memory.arriving * _largest(embedding, largest_block, head),
        step_buffer_bytes=step_buffer,
        logits_bytes=t * _logits(head),
        largest_parameters=_largest(embedding, largest_block, head),
        head_parameters=t * head.parameters,
        moments=_moments(embedding, every, head, step_buffer, memory),
        work={
            f"{phase}_{what}": _work(embedding, every, head, f"{phase}_{what}")
            for phase in PHASES
            for what in ("flop", "moved_bytes", "collective_bytes")
        },
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Treated:
    """The blocks of a stage that are run in one way (plain, recomputed, ...): the bytes and
    operations of one such block, and their number.
    """

    layer: LayerSums
    count: sympy.Expr
    peaks_as_plain: bool = True

    @classmethod
    def of(cls, name: str, row: Treatment, gates: sympy.Expr) -> Self:
        """The blocks of a stage that are run in one way other than plain.

        ``gates`` are the bytes that the engine keeps of a block beyond its layer graph's: they
        count at each block's peaks, and in what the block keeps if its treatment keeps them.
        """
        layer = LayerSums.symbols(type_of(BLOCKS, name))
        return cls(
            layer=_with_gates(layer, gates, keeps=not row.peaks_as_plain),
            count=choice_symbol(DIMENSIONS[row.dimension].symbol),
            peaks_as_plain=row.peaks_as_plain,
        )


def _parameters(layer: LayerSums) -> Parameters:
    """The numbers of a layer's parameters on a rank: of all, and of those in experts."""
    return Parameters(every=layer.parameters, experts=layer.expert_parameters)


def _gates(memory: EngineMemory) -> sympy.Expr:
    """The bytes that this engine keeps of a block beyond those of its layer graph: results of
    gates, and tensors that are whole under sequence parallelism.
    """
    b, s, f, h, tp = (size_symbol(name) for name in ("b", "s", "f", "h", "tp"))
    gates = memory.kept_gates * b * s * f / tp
    # Of the tensors that the engine keeps whole, the layer graph already counts the rank's own
    # part.
    whole = memory.whole_tensors * choice_symbol("sp") * b * s * h * (1 - 1 / tp)
    ahead = memory.blocks_ahead / sympy.Max(memory.blocks_ahead, L * q)
    return memory.weight * sympy.sympify(gates + whole * ahead)


def _with_gates(block: LayerSums, gates: sympy.Expr, *, keeps: bool) -> LayerSums:
    """A block that needs ``gates`` bytes more while it runs and, if it ``keeps`` them, until its
    backward pass.
    """
    return replace(
        block,
        saved_bytes=block.saved_bytes + (gates if keeps else 0),
        forward_peak_bytes=block.forward_peak_bytes + gates,
        backward_peak_bytes=block.backward_peak_bytes + gates,
    )


def head_of(memory: EngineMemory) -> LayerSums:
    """The sums over the head as this engine runs it: with logits of all tokens at once or of one
    chunk after another, and with what it needs at its peaks beyond its layer graph.
    """
    head = LayerSums.symbols(HEAD)
    head = _recomputed_in_chunks(head, memory) if memory.loss_again else _in_chunks(head, memory)
    wide = _wide_logits(memory) * _logits(head)
    return replace(
        head,
        forward_peak_bytes=head.forward_peak_bytes + wide,
        backward_peak_bytes=head.backward_peak_bytes + wide,
    )


def _share_of_tokens(tokens: int) -> sympy.Expr:
    """The share of a micro-batch's tokens that is in a chunk of ``tokens`` tokens, at most 1."""
    # SymPy would simplify Min(1, n / x) to 1 for an integer x, so cases are distinguished instead.
    every = size_symbol("b") * size_symbol("s")
    return sympy.Piecewise((tokens / every, every > tokens), (1, True))


def _recomputed_in_chunks(head: LayerSums, memory: EngineMemory) -> LayerSums:
    """A head that keeps only its input and recomputes its forward pass in its backward pass, one
    chunk of tokens after another.

    At its peak it has the logits of one chunk, or twice that if its loss is not fused.
    """
    b, s, vocab, tp = (size_symbol(name) for name in ("b", "s", "V", "tp"))
    logits = memory.weight * b * s * vocab / tp
    tensors = 1 if memory.fuses_loss else 2
    gone = tensors * (1 - _share_of_tokens(memory.loss_tokens)) * logits
    return replace(
        head,
        saved_bytes=head.input_bytes,
        forward_peak_bytes=head.forward_peak_bytes - gone,
        backward_peak_bytes=head.backward_peak_bytes + (tensors - 1) * logits - gone,
    )


def _in_chunks(head: LayerSums, memory: EngineMemory) -> LayerSums:
    """A head that computes logits for one chunk of tokens after another, or for all at once.

    What it holds besides its input shrinks in proportion to the chunk, but for the gradient of its
    weight: each chunk has a whole one, which is added to the sum of those before it.
    """
    if not memory.loss_tokens:
        return head
    share = _share_of_tokens(memory.loss_tokens)

    def held(whole: sympy.Expr, kept: sympy.Expr) -> sympy.Expr:
        return kept + share * (whole - kept)

    gradient = memory.weight * head.parameters if memory.gradient else sympy.Integer(0)
    return replace(
        head,
        saved_bytes=held(head.saved_bytes, head.input_bytes),
        forward_peak_bytes=held(head.forward_peak_bytes, head.input_bytes),
        backward_peak_bytes=held(head.backward_peak_bytes, head.input_bytes + gradient),
    )


def _kept(blocks: Sequence[_Treated]) -> sympy.Expr:
    """The bytes that all blocks of a stage keep for the backward pass of one micro-batch."""
    return sympy.Add(*(one.count * one.layer.saved_bytes for one in blocks))


def _last(blocks: Sequence[_Treated], name: str) -> sympy.Expr:
    """The value called ``name`` of the last block of a stage; ``blocks`` are in the stage's
    order.
    """
    first, *others = blocks
    choices = [(getattr(one.layer, name), one.count > 0) for one in reversed(others)]
    return sympy.Piecewise(*choices, (getattr(first.layer, name), True))


def _activations(embedding: LayerSums, blocks: Sequence[_Treated]) -> States:
    kept = q * _kept(blocks)
    return States(device=(1 - wa) * kept + q * e * embedding.saved_bytes, host=wa * kept)


def _largest(embedding: LayerSums, block: LayerSums, head: LayerSums) -> sympy.Expr:
    """The number of parameters of the stage's largest layer."""
    return largest([block.parameters, e * embedding.parameters, t * head.parameters])


def _buffers(
    blocks: Parameters,
    ends: Parameters,
    embedding: LayerSums,
    block: LayerSums,
    head: LayerSums,
    memory: EngineMemory,
) -> sympy.Expr:
    """The bytes of a stage's buffers for weights and gradients that are gathered from ranks or
    fetched from the host.

    Some engines have ring buffers of two layers each: for weights if these are sharded (ZeRO-3) or
    offloaded, for gradients if these are (sharded from ZeRO-2 on). Under ZeRO all layers pass
    through them; with offloading alone only blocks do. With ZeRO-2 and offloaded gradients there is
    a further pair of buffers, for the rank's own part of a block's gradients until it is on the
    host.

    Other engines keep weights gathered that ZeRO-3 shards: at least one layer, and up to
    ``gathered_elements`` in all. Or, if ``gathered_blocks`` is not 0, they keep the embedding, the
    head and so many blocks gathered, and also hold the gradients of embedding, head and two blocks
    whole until these are reduced.
    """
    parameters = (blocks + ends).every
    layer = _largest(embedding, block, head)
    if memory.frozen_weight:
        packed = block.parameters * sympy.Float(memory.frozen_weight / memory.weight)
        layer = _largest(embedding, replace(block, parameters=packed), head)
        parameters = parameters - L * (block.parameters - packed)
        block = replace(block, parameters=packed)
    if memory.gathered_blocks:
        gathered = ends.every + memory.gathered_blocks * block.parameters
        if memory.gradient:
            gathered += ends.every + 2 * block.parameters
        return memory.weight * sympy.Piecewise((gathered, _shards(3)), (0, True))
    if not memory.rings:
        gathered = sympy.Max(layer, sympy.Min(parameters, memory.gathered_elements))
        return memory.weight * sympy.Piecewise((gathered, _shards(3)), (0, True))

    def ring(level: int, offloaded: sympy.Expr) -> sympy.Expr:
        return sympy.Piecewise(
            (2 * layer, _shards(level)), (2 * block.parameters, offloaded > 0), (0, True)
        )

    sums = 2 * sharded(_parameters(block), level=2)
    sums = sympy.Piecewise((sums, sympy.And(_shards(2), wg > 0)), (0, True))
    return memory.weight * ring(3, ww) + memory.gradient * (ring(2, wg) + sums)


def _shards(level: int) -> sympy.Basic:
    """The condition that the ZeRO level is at least ``level``, and that several ranks share a
    stage's states.
    """
    return sympy.And(choice_symbol("z") >= level, ranks_that_share() > 1)


def _logits(head: LayerSums) -> sympy.Expr:
    """The bytes that the head keeps for its backward pass beyond its input: logits, or what its
    loss keeps instead.
    """
    return head.saved_bytes - head.input_bytes


def _wide_logits(memory: EngineMemory) -> sympy.Expr:
    """The further bytes that the head needs at its peaks beyond its layer graph, in multiples of a
    rank's logits.

    That is for a 32-bit copy and, where tensor-parallel ranks do not split the vocabulary, for the
    whole logits on each rank.
    """
    copies = int(memory.wide_logits)
    if not memory.whole_logits:
        return sympy.Integer(copies)
    return (1 + copies) * size_symbol("tp") - 1


def _bucket(memory: EngineMemory) -> sympy.Expr:
    """The bytes of the buffer in which a ZeRO optimizer collects gradients to reduce them; they do
    not depend on the number of ranks.
    """
    return sympy.Piecewise((memory.bucket_bytes, choice_symbol("z") >= 1), (0, True))


def _step_buffer(
    blocks: Parameters, ends: Parameters, largest: LayerSums, memory: EngineMemory
) -> sympy.Expr:
    """The bytes that a stage's optimizer step needs beyond its states and buffers.

    An engine with ring buffers needs memory for offloaded optimizer state: of the block that steps,
    and of the block before it, whose state is on its way to the host: at most of all its blocks.
    Another engine needs the scratch memory of a step over all layers or, if that is more, the
    bucket in which a pipeline's stage reduces gradients before the step.
    """
    if not memory.rings:
        scratch = sharded(blocks + ends, level=1) * memory.step_scratch
        return sympy.Max(scratch, (1 - e * t) * _bucket(memory))
    both = 2 * sharded(_parameters(largest), level=1)
    return wo * sympy.Min(both, sharded(blocks, level=1)) * memory.optimizer


def _moments(
    embedding: LayerSums,
    blocks: Sequence[_Treated],
    head: LayerSums,
    step_buffer: sympy.Expr,
    memory: EngineMemory,
) -> Mapping[Phase, tuple[sympy.Expr, ...]]:
    """The bytes of activations and temporaries at each moment at which a stage's memory may peak,
    by pass.

    There are three kinds of moments: the stage's last block or its head runs while the activations
    of all blocks are kept; the first block of a treatment (recomputed, ...) runs after a block of
    another; the embedding runs while only other micro-batches are kept. With ring buffers,
    optimizer steps run in the first forward pass, with one micro-batch in flight; without, they run
    when none is in flight.

    Where activations are offloaded, those of the running block are entirely on the device, and so
    are those of the block beside it, which are on their way to or from the host. While the
    embedding or the head runs, the activations of the nearest block are on the device. In a stage
    of one block, the block beside it is the same block in another micro-batch.
    """
    last = _last(blocks, "saved_bytes")
    # A stage keeps the outputs that it has sent until their gradients return.
    sent = (q - 1) * (1 - t) * blocks[0].layer.output_bytes
    all_kept = _activations(embedding, blocks).device + sent
    has_neighbour = sympy.Or(L > 1, q > 1)
    others = all_kept - (1 - wa) * last + sympy.Piecewise((wa * last, has_neighbour), (0, True))
    older = (q - 1) * ((1 - wa) * _kept(blocks) + embedding.saved_bytes) + sent
    leaving = sympy.Piecewise((wa * last, q > 1), (0, True))

    def of_blocks(peak: str) -> tuple[sympy.Expr, ...]:
        return (others + _last(blocks, peak), *_between(blocks, all_kept, peak))

    forward = (
        *of_blocks("forward_peak_bytes"),
        t * (all_kept + wa * last + head.forward_peak_bytes),
        e * (older + leaving + embedding.forward_peak_bytes),
    )
    backward = (
        *of_blocks("backward_peak_bytes"),
        t * (all_kept + wa * last + head.backward_peak_bytes),
        e * (older + embedding.backward_peak_bytes),
    )
    if memory.rings:
        forward = (*forward, *(step_buffer + moment.subs(q, 1) for moment in forward))
    bucket = e * t * _bucket(memory)
    return {"forward": forward, "backward": tuple(bucket + moment for moment in backward)}


def _between(blocks: Sequence[_Treated], all_kept: sympy.Expr, peak: str) -> Iterator[sympy.Expr]:
    """The bytes at the moments at which memory may peak where a stage's blocks change from one way
    to run them to another.

    The first block of a treatment (recomputed, ...) runs after the block before it, and that block
    itself runs, if its peak can be higher.
    """
    for number in range(1, len(blocks)):
        before, block, after = blocks[:number], blocks[number], blocks[number:]
        beside = _last(before, "saved_bytes")
        is_there = sympy.And(block.count > 0, sympy.Add(*(one.count for one in after)) < L)
        gone = all_kept - (1 - wa) * _kept(after)
        running = gone + wa * beside + getattr(block.layer, peak)
        yield sympy.Piecewise((running, is_there), (0, True))
        if not block.peaks_as_plain:
            running = gone - (1 - 2 * wa) * beside + _last(before, peak)
            yield sympy.Piecewise((running, is_there), (0, True))


def _work(
    embedding: LayerSums, blocks: Sequence[_Treated], head: LayerSums, name: str
) -> sympy.Expr:
    of_blocks = sympy.Add(*(one.count * getattr(one.layer, name) for one in blocks))
    return of_blocks + e * getattr(embedding, name) + t * getattr(head, name)
