"""A stage summed up from its layers: what it holds, its fullest moments, and its work.

L blocks, the last c of them computed again in the backward pass; q micro-batches in flight; e and
t are 1 where the stage holds the embedding or the head. All bytes are of one rank. The schedule is
the overlapped one: while a block computes, its neighbour's states are on their way in or out.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import sympy

from mistlab.symbolic.compiled import with_constants
from mistlab.symbolic.graph import KINDS, PHASES, Kind, ModelGraph, Phase
from mistlab.symbolic.layer import LayerExpressions, expressions_of
from mistlab.symbolic.maximum import largest
from mistlab.symbolic.states import States, StateSizes, gradients, optimizer, sharded, weights
from mistlab.symbolic.symbols import choice_symbol, size_symbol

L, c, q = choice_symbol("L"), choice_symbol("c"), choice_symbol("q")
e, t = choice_symbol("e"), choice_symbol("t")
ww, wg, wo, wa = (choice_symbol(name) for name in ("ww", "wg", "wo", "wa"))


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWork:
    """What the operators of one class do in one phase of one micro-batch."""

    flop: sympy.Expr
    moved_bytes: sympy.Expr


@dataclass(frozen=True, slots=True, kw_only=True)
class StageExpressions:
    """A stage's memory and work.

    ``buffers_bytes`` is the room for what is gathered from other ranks or fetched from the host:
    twice the largest layer where weights or gradients come and go, and one block's optimizer
    state. ``activations`` are kept between forward and backward passes; ``moments`` are what each
    phase's fullest moments hold of activations and temporaries, kept ones included.
    """

    parameters: sympy.Expr
    weights: States
    gradients: States
    optimizer: States
    activations: States
    buffers_bytes: sympy.Expr
    moments: Mapping[Phase, tuple[sympy.Expr, ...]]
    work: Mapping[tuple[Phase, Kind], StageWork]

    @property
    def host_bytes(self) -> sympy.Expr:
        """Bytes in host memory."""
        held = (self.weights, self.gradients, self.optimizer, self.activations)
        return sympy.Add(*(states.host for states in held))


def stage_expressions(
    graph: ModelGraph,
    sizes: StateSizes,
    *,
    tied_embeddings: bool,
    constants: Mapping[str, int],
) -> StageExpressions:
    """The sums over a stage's layers; ``constants`` are the sizes that are the same everywhere."""
    embedding, block, head = (
        expressions_of(layer).with_constants(constants) for layer in graph.layers
    )
    parameters = L * block.parameters + e * embedding.parameters + t * head.parameters
    if tied_embeddings:
        # A stage with both ends has the one table that they share once.
        table = size_symbol("V") * size_symbol("h") / size_symbol("tp")
        parameters -= e * t * with_constants(table, constants)
    return StageExpressions(
        parameters=parameters,
        weights=weights(parameters, sizes),
        gradients=gradients(parameters, sizes),
        optimizer=optimizer(parameters, sizes),
        activations=_activations(embedding, block),
        buffers_bytes=_buffers(embedding, block, head, sizes),
        moments=_moments(embedding, block, head),
        work={
            (phase, kind): _work(embedding, block, head, phase, kind)
            for phase in PHASES
            for kind in KINDS
            if any((p, kind) in layer.work for layer in (embedding, block, head) for p in PHASES)
        },
    )


def _kept(block: LayerExpressions) -> sympy.Expr:
    """What the blocks keep of one micro-batch."""
    return (L - c) * block.saved_bytes + c * block.checkpointed_bytes


def _activations(embedding: LayerExpressions, block: LayerExpressions) -> States:
    kept = q * _kept(block)
    return States(device=(1 - wa) * kept + q * e * embedding.saved_bytes, host=wa * kept)


def _buffers(
    embedding: LayerExpressions, block: LayerExpressions, head: LayerExpressions, sizes: StateSizes
) -> sympy.Expr:
    z = choice_symbol("z")
    layer = largest([block.parameters, e * embedding.parameters, t * head.parameters])
    weights_come_and_go = sympy.Or(z >= 3, ww > 0)
    gradients_come_and_go = sympy.Or(z >= 2, wg > 0)
    return (
        sympy.Piecewise((2 * layer * sizes.weight, weights_come_and_go), (0, True))
        + sympy.Piecewise((2 * layer * sizes.gradient, gradients_come_and_go), (0, True))
        + wo * sharded(block.parameters * sizes.optimizer, level=1)
    )


def _moments(
    embedding: LayerExpressions, block: LayerExpressions, head: LayerExpressions
) -> Mapping[Phase, tuple[sympy.Expr, ...]]:
    """The last block and the head when every block has been kept; the embedding when only other
    micro-batches are."""
    saved, checkpointed = block.saved_bytes, block.checkpointed_bytes
    running = sympy.Piecewise((checkpointed, c > 0), (saved, True))
    all_kept = _activations(embedding, block).device
    # A block that runs has its own activations on the device whole, and its neighbour's.
    others = all_kept - (1 - wa) * running + sympy.Piecewise((wa * running, L > 1), (0, True))
    older = (q - 1) * ((1 - wa) * _kept(block) + embedding.saved_bytes)
    again = sympy.Piecewise((block.forward_peak_bytes + block.output_bytes, c > 0), (0, True))
    return {
        "forward": (
            others + block.forward_peak_bytes,
            t * (all_kept + head.forward_peak_bytes),
            e * (older + embedding.forward_peak_bytes),
        ),
        "backward": (
            others + block.backward_peak_bytes,
            others + again,
            t * (all_kept + head.backward_peak_bytes),
            e * (older + embedding.backward_peak_bytes),
        ),
    }


def _work(
    embedding: LayerExpressions,
    block: LayerExpressions,
    head: LayerExpressions,
    phase: Phase,
    kind: Kind,
) -> StageWork:
    parts = [(L, block, phase), (e, embedding, phase), (t, head, phase)]
    if phase == "backward":
        parts.append((c, block, "forward"))
    works = [(n, layer.work[p, kind]) for n, layer, p in parts if (p, kind) in layer.work]
    return StageWork(
        flop=sympy.Add(*(n * work.flop for n, work in works)),
        moved_bytes=sympy.Add(*(n * work.moved_bytes for n, work in works)),
    )
