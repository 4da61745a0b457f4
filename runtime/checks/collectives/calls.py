"""Lists every rank's calls of collectives in order, derived from a plan without running it.

The calls that ranks make while connecting, and to average gradients or weights, are recorded from
the runtime's code with stand-ins for the groups. The other calls of training follow from the ranks'
tasks. All ranks of a stage have the same tasks, but exchange messages with different ranks.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from mistlab.core.values import reject
from mistlab.plan.dimensions import ranks_of
from mistlab.plan.model_parts import Experts
from mistlab.plan.plan import Plan, StagePlan
from mistlab.plan.workload import Workload
from mistlab.schedule.context_ways import GATHER, HEADS, RING
from mistlab.stages.stage_program import Op
from mistlab.stages.stage_shape import EMBEDDING, StageShape
from runtime.checks.collectives.noted_calls import NotedCalls, one_of_each
from runtime.checks.collectives.reduction_calls import (
    ReductionCalls,
    parts_of,
    reduction_calls,
    steps_of_program,
)
from runtime.checks.collectives.world_calls import (
    Call,
    Kind,
    RankCalls,
    Step,
    WorldCalls,
)
from runtime.comm.replicas import ReplicaRanks
from runtime.comm.topology import Connections, Topology
from runtime.engine.storage.boundary import link_of_message
from runtime.engine.work.layer_passes import LAYER_RUNS, layer_treatments
from runtime.engine.work.router_notes import routers_of

# The iterations whose calls are listed: the first, and a second one, which equals all later ones.
ITERATIONS = 2
# How many all-reduces over tensor-parallel ranks a block's forward or backward pass has: in a plain
# block, and in a block whose attention and network run in parallel. GATHERS_OF_BLOCK is the number
# of a block's GEMMs that take whole sequences.
SUMS_OF_BLOCK, SUMS_OF_PARALLEL_BLOCK = 2, 1
GATHERS_OF_BLOCK = 2
# Names of tensors that tensor-parallel ranks reduce.
ACTIVATIONS, THEIR_GRADIENTS = "activations", "gradients of activations"
# Names of tensors of multi-token prediction heads, which concatenate two vectors per token;
# tensor-parallel ranks split the columns of their GEMM. LOSS names the tensors of the loss.
JOINED, OF_JOINED, COLUMNS = "joined vectors", "gradients of joined vectors", "columns of products"
LOSS = ("largest logits", "sums of powers and logits at targets")
# CHOICES names the experts chosen for each token, OF_VECTORS the gradients of vectors that all
# tensor-parallel ranks hold whole, of which each rank has the gradients from its own tokens.
CHOICES = "choices of tokens"
OF_VECTORS, OF_POSITIONS = "gradients of shared vectors, layer", "gradients of positions"


def calls_of(
    plan: Plan, workload: Workload, *, clips: bool = False, steps_on_host: bool = False
) -> WorldCalls:
    """Every rank's calls of collectives under a plan; ``clips`` says that a step needs the norm of
    all gradients.
    """
    usual = {"train": "all", "loss": "whole"}
    for name, value in usual.items():
        if (given := getattr(workload, name)) != value:
            reject(
                f"workload.{name}: {given}, whose collectives this check cannot derive yet: give "
                f"{value}"
            )
    model, tied = workload.model, workload.model.head_has_table
    replicas = ReplicaRanks.of(plan, workload)
    topology = Topology(plan=replicas.plan, tied=tied, experts=model.experts is not None)
    stages = [
        _Stage(
            topology=topology,
            shape=StageShape.of(
                *(replicas.plan, stage),
                clips=clips,
                tied=tied,
                steps_on_host=steps_on_host,
                routers=routers_of(model),
            ),
            sums=SUMS_OF_PARALLEL_BLOCK if model.parallel_block else SUMS_OF_BLOCK,
            learns_positions=model.position_embedding == "absolute",
            has_head_norms=model.qk_norm,
            experts=model.experts,
            routed=frozenset(one + 1 for one in range(model.layers) if model.has_experts_in(one)),
            drops=workload.expert_capacity is not None,
            further=model.further_tokens,
            blocks=model.layers,
            everybody="world" if replicas.count == 1 else "replica",
        )
        for stage in range(plan.num_stages)
    ]
    made, connecting, training = [], [], []
    known: dict[tuple[int, ReductionCalls], tuple[Step, ...]] = {}
    for rank in range(plan.num_gpus):
        notes, connections, groups, calls = NotedCalls.connecting(plan, workload, rank)
        position = connections.place
        reductions = ReductionCalls()
        if not workload.reduces_plainly:
            stage_plan = replicas.plan.stages[position.stage]
            reductions = reduction_calls(
                notes, workload.reduction, connections, stage_plan, clips=clips
            )
        key = position.stage, reductions
        if key not in known:
            stage = replace(stages[position.stage], reductions=reductions, known={})
            known[key] = stage.steps()
        made.append(groups)
        connecting.append(calls)
        training.append(_training(replicas, connections, notes, reductions, known[key]))
    same = one_of_each(made)
    return WorldCalls(
        groups=same[0], made=same, connecting=tuple(connecting), training=tuple(training)
    )


def _training(
    replicas: ReplicaRanks,
    connections: Connections,
    notes: NotedCalls,
    reductions: ReductionCalls,
    steps: tuple[Step, ...],
) -> RankCalls:
    topology, rank = connections.topology, connections.rank
    replica, _ = replicas.place(notes.rank)
    traffic = {
        link: topology.traffic(rank, link) for link, ranks in topology.links() if rank in ranks
    }
    sends, receives = (
        {link: {t.peer: t.end - t.begin for t in both[way]} for link, both in traffic.items()}
        for way in (0, 1)
    )
    for messages, peers in zip((sends, receives), topology.context_peers(rank), strict=True):
        messages["context"] = dict.fromkeys(peers, 1)
    sends, receives = (
        {
            link: {replicas.rank(replica, peer): size for peer, size in of_link.items()}
            for link, of_link in messages.items()
        }
        for messages in (sends, receives)
    )
    return RankCalls(
        rank=notes.rank,
        steps=steps,
        sends=sends | notes.sends,
        receives=receives | notes.receives,
        parts=parts_of(reductions, connections, replica, replicas.count),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """Lists the tasks of one stage's ranks, each with its calls of collectives.

    ``sums`` is the number of all-reduces over tensor-parallel ranks in a block, forward or
    backward. Layers in ``routed`` have experts. The model has ``blocks`` blocks, and its head
    predicts ``further`` tokens beyond the next.
    """

    topology: Topology
    shape: StageShape
    sums: int
    learns_positions: bool = False
    has_head_norms: bool = False
    experts: Experts | None = None
    routed: frozenset[int] = frozenset()
    drops: bool = False
    further: int = 0
    blocks: int = 0
    everybody: str = "world"
    reductions: ReductionCalls = field(default_factory=ReductionCalls)
    known: dict[tuple[object, ...], tuple[Call, ...]] = field(default_factory=dict)

    def steps(self) -> tuple[Step, ...]:
        """The tasks of the stage's ranks in order, with their calls."""
        return steps_of_program(self.shape, self._calls, self.reductions, ITERATIONS)

    def gather(self, op: Op) -> tuple[Call, ...]:
        """Calls of task U: all-gathers of a layer's weights, the weights of experts last."""
        return self._of_sections("gather", "all_gather", "weights", op)

    def reduce(self, op: Op) -> tuple[Call, ...]:
        """Calls of task R: reductions of a layer's gradients, the gradients of experts last."""
        if self.reductions.late:
            return ()
        if self.reductions.of_layer:
            sections = ("", *("experts of ",) * self._has_experts(op))
            return tuple(
                replace(call, what=f"gradients of {section}layer {op.layer}: {call.what}")
                for section, calls in zip(sections, self.reductions.of_layer, strict=False)
                for call in calls
            )
        kind: Kind = "reduce_scatter" if self.shape.zero >= 1 else "all_reduce"
        return self._of_sections("reduce", kind, "gradients", op)

    def _of_sections(self, group: str, kind: Kind, what: str, op: Op) -> tuple[Call, ...]:
        call = Call(group=group, kind=kind, what=f"{what} of layer {op.layer}")
        if not self._has_experts(op) or self._ranks(f"{group} experts") == 1:
            return (call,)
        what = f"{what} of experts of layer {op.layer}"
        return (call, replace(call, group=f"{group} experts", what=what))

    def _has_experts(self, op: Op) -> bool:
        """Whether a layer has experts. The head has them if it contains multi-token prediction
        blocks and the last block has experts.
        """
        if self.experts is None or not self._has_blocks(op):
            return False
        return min(op.layer, self.blocks) in self.routed

    def _has_blocks(self, op: Op) -> bool:
        """Whether a layer is a block, or a head that contains multi-token prediction blocks."""
        is_head = op.layer > self.blocks
        return self.shape.has_block(op.layer) or (is_head and self.further > 0)

    def _ranks(self, group: str) -> int:
        return ranks_of(group, self._own.degree)

    def exchange(self, op: Op) -> tuple[Call, ...]:
        """Calls of task X (send a message to another stage) or Y (receive one)."""
        link = link_of_message(op)
        what = ACTIVATIONS if link.startswith("forward") else THEIR_GRADIENTS
        what = f"{what} of micro-batch {op.micro_batch}"
        if len(self.shape.chunks) > 1:
            what = f"{what} behind layer {self._above(op)}"
        return (Call(group=link, kind="exchange", what=what),)

    def _above(self, op: Op) -> int:
        """The index of the layer whose output (or its gradient) a message contains."""
        assert op.of is not None
        is_output = (op.of.kind == "F") == (op.name == "X")
        return op.layer if is_output else op.layer - 1

    def forward(self, op: Op) -> tuple[Call, ...]:
        """Calls of task F, a layer's forward pass: the exchange of keys over context-parallel
        ranks, all-reduces where tensor-parallel regions end, and reductions of the loss.
        """
        if op.layer == EMBEDDING:
            return self._of_embedded()
        if self.shape.has_block(op.layer):
            return self._forward_of_block(op)
        loss = (*self._gathers(ACTIVATIONS), *self._sums(*LOSS))
        ranks = self._ranks("tensor")
        columns = Call(group="tensor", kind="all_gather", what=COLUMNS)
        joint = (*self._of_embedded(), *self._gathers(JOINED), *(columns,) * (ranks > 1))
        return (*loss, *(*joint, *self._forward_of_block(op), *loss) * self.further)

    def _of_embedded(self) -> tuple[Call, ...]:
        """The reduction of token vectors over tensor-parallel ranks, each of which holds a part of
        the embedding table.
        """
        return self._scatters(ACTIVATIONS) if self._splits_tokens else self._sums(ACTIVATIONS)

    def _forward_of_block(self, op: Op) -> tuple[Call, ...]:
        if self._splits_tokens:
            return self._forward_of_parts(op)
        if self._has_experts(op):
            sums = self._sums(ACTIVATIONS)
            shared = sums if self._has_shared else ()
            return (*self._keys("forward"), *sums, *self._experts("forward"), *shared)
        return (*self._keys("forward"), *self._sums(*(ACTIVATIONS,) * self.sums))

    def backward(self, op: Op) -> tuple[Call, ...]:
        """Calls of task B, a layer's backward pass: all-reduces of gradients where tensor-parallel
        regions begin, and before them the calls of the forward pass if the layer is recomputed.
        """
        splits = self.shape.passes.splits_backward
        if op.layer == EMBEDDING:
            return () if splits else self._of_embedding(op)
        again: tuple[Call, ...] = ()
        if self.shape.has_block(op.layer):
            treatment = layer_treatments(self._own, self.shape.blocks)[op.layer]
            again = self.forward(op) if LAYER_RUNS[treatment].runs_again else ()
        of_vectors = () if splits else self._of_vectors(op)
        of_block = self._backward_of_block(op) if self._has_blocks(op) else ()
        if self.shape.has_block(op.layer):
            return (*again, *of_block, *of_vectors)
        of_product = self._backward_of_product(op)
        of_joint = self._backward_of_product(op, JOINED, OF_JOINED)
        parts = self._gathers(THEIR_GRADIENTS)
        further = (*of_product, *of_block, *parts, *of_joint, *parts)
        return (*further * self.further, *of_product, *of_vectors)

    def _backward_of_block(self, op: Op) -> tuple[Call, ...]:
        if self._splits_tokens:
            return self._backward_of_parts(op)
        # Attention is first in a block, so the all-reduce of its input's gradient is the last of
        # the backward pass.
        last = self._sums(THEIR_GRADIENTS)
        attention = (*self._keys("backward"), *last)
        if self._has_experts(op):
            shared = last if self._has_shared else ()
            return (*shared, *self._experts("backward"), *attention)
        return (*last * (self.sums - 1), *attention)

    def of_weights(self, op: Op) -> tuple[Call, ...]:
        """Calls of task W, a separate backward pass for weights: under sequence parallelism GEMMs
        gather their inputs again, and gradients of norms and biases are reduced.
        """
        if op.layer == EMBEDDING:
            return self._of_embedding(op)
        if not self._splits_tokens:
            return self._of_vectors(op)
        in_b = self.shape.adds_table_in_b(op.layer)
        return (*(() if in_b else self._taken_again(op)), *self._of_vectors(op))

    @property
    def _own(self) -> StagePlan:
        return self.topology.plan.stages[self.shape.stage]

    @property
    def _splits_tokens(self) -> bool:
        return self._own.splits_tokens

    def _taken_again(self, op: Op) -> tuple[Call, ...]:
        """The all-gathers of the inputs of a layer's GEMMs under sequence parallelism, repeated in
        the backward pass, last GEMM first.
        """
        gathers, of_block = self._gathers(ACTIVATIONS), GATHERS_OF_BLOCK
        if self._has_experts(op):
            of_block = 1 + self._has_shared
        if self.shape.has_block(op.layer):
            return gathers * of_block
        further = (*gathers * (1 + of_block), *self._gathers(JOINED))
        return (*further * self.further, *gathers)

    def _forward_of_parts(self, op: Op) -> tuple[Call, ...]:
        """Calls of a block's forward pass under sequence parallelism: sequences are gathered before
        GEMMs, and results are reduce-scattered where tensor-parallel regions end.
        """
        gather, scatter = self._gathers(ACTIVATIONS), self._scatters(ACTIVATIONS)
        keys = self._keys("forward")
        if self.sums == SUMS_OF_PARALLEL_BLOCK:
            return (*gather, *keys, *gather, *scatter)
        network = (*gather, *scatter)
        if self._has_experts(op):
            network = (*self._experts("forward"), *(network if self._has_shared else ()))
        return (*gather, *keys, *scatter, *network)

    def _backward_of_parts(self, op: Op) -> tuple[Call, ...]:
        """Calls of a block's backward pass under sequence parallelism: gradients are gathered where
        regions end; each GEMM gathers its input again, unless a separate pass for weights does, and
        its input's gradient is reduce-scattered.
        """
        of_region, product = self._gathers(THEIR_GRADIENTS), self._backward_of_product(op)
        keys = self._keys("backward")
        if self.sums == SUMS_OF_PARALLEL_BLOCK:
            return (*of_region, *product, *keys, *product)
        network = (*of_region, *product)
        if self._has_experts(op):
            network = (*(network if self._has_shared else ()), *self._experts("backward"))
        return (*network, *of_region, *keys, *product)

    def _backward_of_product(
        self, op: Op, taken: str = ACTIVATIONS, gradients: str = THEIR_GRADIENTS
    ) -> tuple[Call, ...]:
        """Calls of the backward pass of one GEMM under sequence parallelism."""
        if not self._splits_tokens:
            return self._sums(gradients)
        keeps = self.shape.passes.splits_backward and not self.shape.adds_table_in_b(op.layer)
        again = () if keeps else self._gathers(taken)
        return (*again, *self._scatters(gradients, beside=not keeps))

    @property
    def _has_shared(self) -> bool:
        return self.experts is not None and self.experts.shared_ffn > 0

    def _experts(self, phase: "Passes") -> tuple[Call, ...]:
        """Calls of a layer's experts. Forward, all-to-alls send the numbers of rows, the copies of
        tokens and their weights to the experts, and the outputs back; backward, gradients take the
        same routes. Without sequence parallelism each tensor-parallel rank sends a share of the
        tokens, so ranks gather the outputs, and the gradients.
        """
        chosen: tuple[Call, ...] = ()
        if self.experts is not None and (self.drops or self.experts.router.balance_loss):
            # If several ranks hold parts of a sequence, they gather the choices of experts of all
            # its tokens.
            chosen = tuple(
                Call(group=group, kind="all_gather", what=f"{CHOICES} by {group} ranks")
                for group in ("tensor", "context")
                if self._ranks(group) > 1
            )
        there = tuple(
            Call(group=group, kind="all_to_all", what="rows")
            for group in ("experts", "expert tensor")
            if self._ranks(group) > 1
        )
        back = there[::-1]
        gathered: tuple[Call, ...] = ()
        if self._ranks("tensor") > 1 and not self._splits_tokens:
            what = ACTIVATIONS if phase == "forward" else THEIR_GRADIENTS
            gathered = (Call(group="tensor", kind="all_gather", what=what),)
        ways = (*chosen, *there * 3, *back) if phase == "forward" else (*there, *back * 2)
        return (*ways, *gathered)

    def _keys(self, phase: "Passes") -> tuple[Call, ...]:
        """Calls of context-parallel ranks for the keys and values of a block's attention."""
        ranks, way = self._own.token_split
        return () if ranks == 1 else _KEYS[way](ranks)[phase]

    def _of_embedding(self, op: Op) -> tuple[Call, ...]:
        """Calls of the embedding's backward pass under sequence parallelism: ranks gather the
        gradient of its output, and reduce the gradient of position embedding.
        """
        if not self._splits_tokens:
            return ()
        of_positions = self._sums(OF_POSITIONS) if self.learns_positions else ()
        return (*of_positions, *self._gathers(THEIR_GRADIENTS))

    def _of_vectors(self, op: Op) -> tuple[Call, ...]:
        """The reduction of the gradients of a layer's norms and biases over tensor-parallel ranks,
        once per iteration. Under sequence parallelism it covers all vectors that each rank holds
        whole; otherwise head norms and routers, for which each rank has the gradients from its own
        heads or tokens.
        """
        of_heads = self.has_head_norms and self._has_blocks(op)
        has_any = self._splits_tokens or of_heads or self._has_experts(op)
        is_last = op.phase == "last_backward" and has_any
        return self._sums(f"{OF_VECTORS} {op.layer}") if is_last else ()

    def _gathers(self, what: str) -> tuple[Call, ...]:
        """Under sequence parallelism, one all-gather for each sequence of a micro-batch."""
        if not self._splits_tokens:
            return ()
        call = Call(group="tensor", kind="all_gather", what=what)
        return (call,) * self._own.micro_batch

    def _scatters(self, what: str, *, beside: bool = False) -> tuple[Call, ...]:
        call = Call(group="tensor", kind="reduce_scatter", what=what, beside=beside)
        return (call,) * self._own.micro_batch

    def tied(self, _: Op) -> tuple[Call, ...]:
        """The reduction of the gradients of a token table that embedding and head share, over the
        ranks of both.
        """
        sizes = {name: len(ranks) for name, ranks in self.topology.groups()}
        size = sizes.get("tied", sizes["world"])
        group = "tied" if "tied" in sizes else self.everybody
        call = Call(group=group, kind="all_reduce", what="gradients of a table")
        return (call,) if size > 1 else ()

    def report(self, _: Op) -> tuple[Call, ...]:
        """The reduction of losses and of squared gradient norms at the end of an iteration."""
        call = Call(group=self.everybody, kind="all_reduce", what="losses and squares")
        return (call,) if self.topology.plan.num_gpus > 1 else ()

    def _calls(self, op: Op) -> tuple[Call, ...]:
        if op.name not in _CALLS:
            return ()
        of = () if isinstance(op.task, str) else (op.layer, op.micro_batch)
        key = (op.name, op.lane, op.phase, *of)
        if key not in self.known:
            self.known[key] = _CALLS[op.name](self, op)
        return self.known[key]

    def _sums(self, *whats: str) -> tuple[Call, ...]:
        if self._own.tensor_parallel == 1:
            return ()
        # Where the backward pass for weights is separate, no GEMMs overlap with a reduction, which
        # then is one call.
        is_whole = not self.shape.passes.splits_backward
        return tuple(
            Call(
                group="tensor",
                kind="all_reduce",
                what=what,
                beside=is_whole and what in {THEIR_GRADIENTS, OF_JOINED},
            )
            for what in whats
        )


KEYS, THEIR_SUMS, OF_HEADS = "keys and values", "gradients of keys and values", "heads"
Passes = Literal["forward", "backward"]


def _ring_calls(ranks: int) -> Mapping[Passes, tuple[Call, ...]]:
    """Calls of ring attention: each rank sends its keys to the next in every step except the last.
    Backward, gradients of keys follow one step behind, and then return to their own rank.
    """
    keys = Call(group="context", kind="exchange", what=KEYS, beside=True)
    return {
        "forward": (keys,) * (ranks - 1),
        "backward": (*(keys,) * (ranks - 1), *(replace(keys, what=THEIR_SUMS),) * 2),
    }


def _gathering_calls(_: int) -> Mapping[Passes, tuple[Call, ...]]:
    """Calls of attention on gathered keys: an all-gather in each pass, and in the backward pass a
    reduce-scatter of gradients.
    """
    keys = Call(group="context", kind="all_gather", what=KEYS)
    sums = Call(group="context", kind="reduce_scatter", what=THEIR_SUMS)
    return {"forward": (keys,), "backward": (keys, sums)}


def _exchanging_calls(_: int) -> Mapping[Passes, tuple[Call, ...]]:
    """Calls of head exchange: before attention an all-to-all trades parts of sequences for parts of
    heads, and after it the reverse.
    """
    heads = Call(group="context", kind="exchange", what=OF_HEADS)
    return {"forward": (heads,) * 2, "backward": (heads,) * 2}


# Calls inside attention for a number of context-parallel ranks, by the way in which these exchange
# keys (``context_exchange``).
_KEYS: Mapping[int, Callable[[int], Mapping[Passes, tuple[Call, ...]]]] = {
    RING: _ring_calls,
    GATHER: _gathering_calls,
    HEADS: _exchanging_calls,
}
_CALLS: Mapping[str, Callable[[_Stage, Op], tuple[Call, ...]]] = {
    "U": _Stage.gather,
    "R": _Stage.reduce,
    "X": _Stage.exchange,
    "Y": _Stage.exchange,
    "F": _Stage.forward,
    "B": _Stage.backward,
    "W": _Stage.of_weights,
    "tied": _Stage.tied,
    "report": _Stage.report,
}
