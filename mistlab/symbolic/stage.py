"""A stage summed up from its layers: what it holds, its fullest moments, and its work.

L blocks, the last c of them computed again in the backward pass; q micro-batches in flight; e and
t are 1 where the stage holds the embedding or the head. All bytes are of one rank. What comes and
goes beside a block that computes, and when layers step, is the engine's.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import sympy

from mistlab.engines.engine_memory import EngineMemory
from mistlab.symbolic.graph import LAYERS, PHASES, Phase
from mistlab.symbolic.layer import LayerSums
from mistlab.symbolic.maximum import largest
from mistlab.symbolic.states import States, gradients, optimizer, sharded, weights
from mistlab.symbolic.symbols import choice_symbol, size_symbol
from mistlab.values.dimensions import DIMENSIONS, states_as_changed

L, c, q = choice_symbol("L"), choice_symbol("c"), choice_symbol("q")
e, t = choice_symbol("e"), choice_symbol("t")
ww, wg, wo, wa = (choice_symbol(name) for name in ("ww", "wg", "wo", "wa"))


@dataclass(frozen=True, slots=True, kw_only=True)
class StageExpressions:
    """A stage's memory and work.

    ``buffers_bytes`` is the room for what is gathered from other ranks or fetched from the host,
    ``step_buffer_bytes`` what the step takes beside states and buffers. ``activations`` are kept
    between forward and backward passes; ``moments`` are what each phase's fullest moments hold of
    activations and temporaries, kept ones included. ``logits_bytes`` is what the head keeps for its
    backward pass beyond its input.
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
        """Bytes in host memory."""
        held = (self.weights, self.gradients, self.optimizer, self.activations)
        return sympy.Add(*(states.host for states in held))


def stage_expressions(memory: EngineMemory, *, tied_embeddings: bool) -> StageExpressions:
    """The sums over a stage's layers, in symbols of the layers' own sums."""
    memory = states_as_changed(memory, lambda name: choice_symbol(DIMENSIONS[name].symbol))
    embedding, block, head = (LayerSums.symbols(name) for name in LAYERS)
    blocks = L * block.parameters
    ends = e * embedding.parameters + t * head.parameters
    if tied_embeddings:
        # A stage with both ends has the one table that they share once.
        table = size_symbol("V") * size_symbol("h") / size_symbol("tp")
        ends -= e * t * table
    step_buffer = _step_buffer(blocks + ends, block, memory)
    return StageExpressions(
        parameters=blocks + ends,
        weights=weights(blocks, ends, memory),
        gradients=gradients(blocks, ends, memory),
        optimizer=optimizer(blocks, ends, memory),
        activations=_activations(embedding, block),
        buffers_bytes=_buffers(blocks + ends, embedding, block, head, memory),
        step_buffer_bytes=step_buffer,
        logits_bytes=t * _logits(head),
        largest_parameters=_largest(embedding, block, head),
        head_parameters=t * head.parameters,
        moments=_moments(embedding, block, head, step_buffer, memory),
        work={
            f"{phase}_{what}": _work(embedding, block, head, phase, what)
            for phase in PHASES
            for what in ("flop", "moved_bytes", "collective_bytes")
        },
    )


def _kept(block: LayerSums) -> sympy.Expr:
    """What the blocks keep of one micro-batch."""
    return (L - c) * block.saved_bytes + c * block.checkpointed_bytes


def _activations(embedding: LayerSums, block: LayerSums) -> States:
    kept = q * _kept(block)
    return States(device=(1 - wa) * kept + q * e * embedding.saved_bytes, host=wa * kept)


def _largest(embedding: LayerSums, block: LayerSums, head: LayerSums) -> sympy.Expr:
    """Parameters of the stage's largest layer."""
    return largest([block.parameters, e * embedding.parameters, t * head.parameters])


def _buffers(
    parameters: sympy.Expr,
    embedding: LayerSums,
    block: LayerSums,
    head: LayerSums,
    memory: EngineMemory,
) -> sympy.Expr:
    """Rings of two: ZeRO lets all layers come and go, offloading blocks alone. From ZeRO-2 on
    gradients do both, whole until they are reduced, and the rank's part until the host has it.
    Engines without rings let gathered weights stay, as many as they like and a layer at least."""
    layer = _largest(embedding, block, head)
    if not memory.rings:
        gathered = sympy.Max(layer, sympy.Min(parameters, memory.gathered_elements))
        return memory.weight * sympy.Piecewise((gathered, _shards(3)), (0, True))

    def ring(level: int, offloaded: sympy.Expr) -> sympy.Expr:
        return sympy.Piecewise(
            (2 * layer, _shards(level)), (2 * block.parameters, offloaded > 0), (0, True)
        )

    sums = 2 * sharded(block.parameters, level=2)
    sums = sympy.Piecewise((sums, sympy.And(_shards(2), wg > 0)), (0, True))
    return memory.weight * ring(3, ww) + memory.gradient * (ring(2, wg) + sums)


def _shards(level: int) -> sympy.Basic:
    """Whether several ranks share out what they do from a level of ZeRO on."""
    return sympy.And(choice_symbol("z") >= level, choice_symbol("dp") > 1)


def _logits(head: LayerSums) -> sympy.Expr:
    """What the head keeps for its backward pass beyond its input."""
    return head.saved_bytes - head.checkpointed_bytes


def _bucket(memory: EngineMemory) -> sympy.Expr:
    """What a ZeRO optimizer reduces from, however many ranks there are."""
    size = memory.gradient * memory.bucket_elements
    return sympy.Piecewise((size, choice_symbol("z") >= 1), (0, True))


def _step_buffer(parameters: sympy.Expr, block: LayerSums, memory: EngineMemory) -> sympy.Expr:
    """With rings, offloaded optimizer state that is back on the device: of a block that steps, and
    of the one before it, which leaves. Without, the scratch of a step of all layers, or before it
    the bucket from which a pipeline reduces."""
    if not memory.rings:
        scratch = sharded(parameters * memory.step_scratch, level=1)
        return sympy.Max(scratch, (1 - e * t) * _bucket(memory))
    blocks = sympy.Piecewise((2, L > 1), (1, True))
    return blocks * wo * sharded(block.parameters * memory.optimizer, level=1)


def _moments(
    embedding: LayerSums,
    block: LayerSums,
    head: LayerSums,
    step_buffer: sympy.Expr,
    memory: EngineMemory,
) -> Mapping[Phase, tuple[sympy.Expr, ...]]:
    """The last block and the head when every block has been kept; the first block that is computed
    again, beside a plain one; the embedding when only other micro-batches are. With rings blocks
    step in the first forward, when one micro-batch is in flight; without, when none is.

    A block that runs has its own activations on the device whole, and its neighbour's, which are on
    their way out or in; what runs before the first block or after the last has that one's. A stage
    of one block is its own neighbour, in another micro-batch.
    """
    saved, checkpointed = block.saved_bytes, block.checkpointed_bytes
    last = sympy.Piecewise((checkpointed, c > 0), (saved, True))
    # Of the micro-batches in flight, what was sent to the next stage is held until it comes back.
    sent = (q - 1) * (1 - t) * block.output_bytes
    all_kept = _activations(embedding, block).device + sent
    has_neighbour = sympy.Or(L > 1, q > 1)
    others = all_kept - (1 - wa) * last + sympy.Piecewise((wa * last, has_neighbour), (0, True))
    before_again = all_kept - (1 - wa) * c * checkpointed + wa * saved
    older = (q - 1) * ((1 - wa) * _kept(block) + embedding.saved_bytes) + sent
    leaving = sympy.Piecewise((wa * last, q > 1), (0, True))
    wide = _logits(head) if memory.wide_logits else sympy.Integer(0)
    again = sympy.Piecewise((block.forward_peak_bytes + block.output_bytes, c > 0), (0, True))

    def of_blocks(*running: sympy.Expr) -> tuple[sympy.Expr, ...]:
        beside_plain = sympy.And(c > 0, c < L)
        return (
            *(others + peak for peak in running),
            *(sympy.Piecewise((before_again + peak, beside_plain), (0, True)) for peak in running),
        )

    forward = (
        *of_blocks(block.forward_peak_bytes),
        t * (all_kept + wa * last + head.forward_peak_bytes + wide),
        e * (older + leaving + embedding.forward_peak_bytes),
    )
    backward = (
        *of_blocks(block.backward_peak_bytes, again),
        t * (all_kept + wa * last + head.backward_peak_bytes + wide),
        e * (older + embedding.backward_peak_bytes),
    )
    if memory.rings:
        forward = (*forward, *(step_buffer + moment.subs(q, 1) for moment in forward))
    bucket = e * t * _bucket(memory)
    return {"forward": forward, "backward": tuple(bucket + moment for moment in backward)}


def _work(
    embedding: LayerSums, block: LayerSums, head: LayerSums, phase: Phase, what: str
) -> sympy.Expr:
    name = f"{phase}_{what}"
    total = L * getattr(block, name) + e * getattr(embedding, name) + t * getattr(head, name)
    return total + c * getattr(block, f"forward_{what}") if phase == "backward" else total
