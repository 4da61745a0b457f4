"""Runs a stage's tasks in training: issues each task to its stream, behind the events that the task
waits for.

The host never waits for the device here. It chooses a task's tensors, and allocates temporary
memory, when it issues the task, while the compute stream is the current one. It drops such memory
only after the compute stream has been made to wait for the memory's last use.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mistlab.graph.treatments import PLAIN
from mistlab.plan.lean_sets import CHOICE, SETS
from mistlab.plan.plan import Plan
from mistlab.plan.workload import Workload
from mistlab.stages.stage_program import Op, flush, iterations
from mistlab.stages.stage_shape import EMBEDDING, StageShape
from runtime.comm.group import Pending, finished, then
from runtime.comm.topology import Connections, Sharers
from runtime.engine.storage.boundary import Boundary, SentShape
from runtime.engine.storage.layout import Layout
from runtime.engine.storage.state import Section, StageState, Types
from runtime.engine.streams.context_lanes import StreamedContext
from runtime.engine.streams.expert_lanes import StreamedExperts
from runtime.engine.streams.lanes import Event, StreamedRanks, Streams
from runtime.engine.training import Training
from runtime.engine.work.adamw import MOMENTS, Rate
from runtime.engine.work.averages import averages_of
from runtime.engine.work.frozen_products import multiply_frozen
from runtime.engine.work.gradient_averages import GradientAverages
from runtime.engine.work.layer_passes import LAYER_RUNS, Passes, layer_treatments
from runtime.engine.work.optimizer import (
    FrozenSwaps,
    Stepper,
    Swaps,
    Works,
    later,
    works_of_sections,
)
from runtime.engine.work.own_layers import own_layers
from runtime.engine.work.parameters import Parameters, Squares
from runtime.engine.work.products import add_up_inside, add_up_shared
from runtime.engine.work.router_notes import Lopsided, RouterNotes, routers_of
from runtime.engine.work.scaling import Scaling
from runtime.engine.work.stage_modules import (
    HOST,
    LayerModule,
    layer_modules,
    let_attend_in_place,
    let_draw,
)
from runtime.engine.work.turn_server import LateServers, TurnServer
from runtime.models.config import TYPE_OF_PRECISION, sums_of
from runtime.models.dropout import Draws
from runtime.models.lean_operators import make_lean
from runtime.models.transformer import let_fuse, with_further
from runtime.models.wide_attention import Documents

# How many layers draw initial weights at once; this takes 8 bytes per parameter on the host.
MOST_DRAWN = 4
# The tokens and targets (sequences, positions) of each micro-batch on this rank; empty on a stage
# that needs neither.
Batches = Sequence[tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The results of a training iteration, equal on all ranks. Only loss scales may differ: between
    replicas that average weights, and between ranks of an asynchronous server.

    ``gradient_norm`` is None if none was computed, or if gradients overflowed and the step is
    skipped. ``loss`` is None if a stage without the head ran alone. ``loss`` excludes routers'
    auxiliary losses, although their gradients are used; ``router_loss`` is their sum over blocks.
    """

    loss: float | None
    gradient_norm: float | None
    loss_scale: float
    skipped: bool
    router_loss: float | None = None
    lopsided: tuple[Lopsided, ...] = ()


def _shape_of(workload: Workload, plan: Plan, stage: int, training: Training) -> StageShape:
    shape = StageShape.of(
        plan,
        stage,
        clips=training.needs_norm,
        tied=workload.model.head_has_table,
        steps_on_host=training.steps_on_host,
        routers=routers_of(workload.model),
    )
    # If both copies of a tied embedding table are frozen, they stay equal without an exchange.
    return shape if workload.train == "all" else replace(shape, ties=False)


class Executor:
    """Executes one rank's part of a training plan."""

    _replica_counts: Tensor | None = None

    def __init__(
        self,
        workload: Workload,
        plan: Plan,
        connections: Connections,
        streams: Streams,
        training: Training,
        *,
        device: torch.device,
        seed: int | None,
    ) -> None:
        """Allocate the state and prepare the tasks; without a seed, the caller sets the weights."""
        stage = connections.place.stage
        self.model = workload.model
        self.own = plan.stages[stage]
        self.shape = _shape_of(workload, plan, stage, training)
        self.programs = iterations(self.shape, 2)
        self.flushing = flush(self.shape)
        self.connections, self.streams, self.training = connections, streams, training
        ranks = StreamedRanks(
            connections.tensor, streams, splits_tokens=self.own.sequence_parallel == 1
        )
        context = StreamedContext(connections.context, streams, self.own.token_split.way)
        experts = StreamedExperts(connections.experts, connections.expert_tensor, streams)
        self.layers = self._modules(workload, (ranks, context, experts), device, seed)
        self.device, self.own_tokens = device, context.own_tokens
        length = workload.sequence_length
        self.draws = Draws.of(training.dropout_seed, length, ranks, context, device)
        self.packed = let_draw(self.layers, self.draws)
        dtype = TYPE_OF_PRECISION[workload.precision]
        types = Types(dtype, sums_of(workload), MOMENTS[workload.optimizer])
        self.state = StageState.build(
            *(self.shape, self._layouts(types.alignment), types, device),
            frozen=self._frozen_layouts(),
        )
        self.parameters = Parameters(workload, self.shape, self.state, self.layers, connections)
        self.scaling = Scaling(training, device)
        self.squares = [self._squares_of(workload, *owned) for owned in self._owned()]
        self.steppers = [Stepper(one, training, self.scaling, streams) for one, _ in self._owned()]
        self.averages, self.weight_averages = averages_of(
            *(workload.reduction, connections, self.state.sections, training),
            scaling=self.scaling,
            device=device,
            replicas=self.shape.replicas,
        )
        self.late = LateServers.of(self.averages)
        self.swaps = self._swaps()
        self.passes = self._passes(ranks)
        parts = context.size * (ranks.size if ranks.splits_tokens else 1)
        sent = SentShape.of(self.own.micro_batch, workload, parts, self.packed)
        self.boundary = Boundary(connections, sent, dtype, device, streams, self.shape.rooms)
        self._works = self._work_of_each_task()
        self.steps, self._events = 0, list[Event]()
        self._flow: Tensor | None = None
        self._batches: Batches = ()
        self._losses = torch.zeros((), device=device)
        self._reported = torch.zeros(2, device=device)
        self.issued: Sequence[Op] = ()
        self._issuing: Op | None = None
        if seed is not None:
            self._draw_on_host(seed)

    def _modules(
        self,
        workload: Workload,
        ranks: tuple[StreamedRanks, StreamedContext, StreamedExperts],
        device: torch.device,
        seed: int | None,
    ) -> dict[int, LayerModule]:
        """The stage's layers: the runtime's models, or a user's own code."""
        if workload.model.family != "custom":
            return layer_modules(workload, self.shape, *ranks, device)
        drawn = self.training.dropout_seed if seed is None else seed
        return own_layers(workload, drawn, self.own.micro_batch, self.shape.layers, device)

    def _squares_of(self, workload: Workload, section: Section, sharers: Sharers) -> Squares:
        """The sums of squared gradients, by which gradients are clipped; with an asynchronous
        server, each rank's gradients are clipped separately.
        """
        each = workload.reduction.asynchronous
        counted = self.parameters.counted(section, sharers, each=each)
        return Squares(counted, self.device, wanted=self.training.needs_norm)

    def _passes(self, ranks: StreamedRanks) -> Passes:
        """The passes of the stage's layers, which get their parameters and the runtime's
        operators.
        """
        treatments = layer_treatments(self.own, self.shape.blocks)
        modules = {layer: one.module for layer, one in self.layers.items()}
        self.routers = RouterNotes(self.model, modules, self._share, self.device)
        for layer, module in modules.items():
            add_up_inside(module, ranks)
            multiply_frozen(module, self.layers[layer].packings, ranks)
            let_attend_in_place(module)
            let_fuse(module)
            if LAYER_RUNS[treatments.get(layer, PLAIN)].is_lean:
                make_lean(module, SETS[self.own.degree(CHOICE)])
        # A user's own code may save other tensors in each micro-batch.
        has_own_code = self.model.family == "custom"
        passes = Passes(
            *(self.state, modules, treatments, ranks, self.streams, self.device),
            alike=frozenset(() if has_own_code else modules),
        )
        for module in modules.values():
            add_up_shared(module, ranks)
        return passes

    def draw_on_device(self, seed: int) -> None:
        """Draw the initial weights on the device; they depend only on the seed and on the kind of
        device.
        """
        for layer in self.layers:
            self._fill(layer, seed, self.device)
        self.streams.synchronize()

    def iterate(self, batches: Batches, documents: Sequence[Documents] = ()) -> None:
        """Issue the deferred optimizer step, and the passes of micro-batches of ``documents``."""
        self._batches, self.packed.of_step = batches, documents
        for averages in self.averages:
            averages.step = self.steps
        if self.weight_averages is not None and self.weight_averages.begin():
            # Other streams do not wait for earlier work on the compute stream, so the host does.
            self.streams.synchronize()
        self.issued = self.programs[1 if self._events else 0]
        self._issue(self.issued)
        self.count_step()

    @property
    def follows(self) -> bool:
        """Whether the next iteration begins with the optimizer step that this one deferred."""
        return bool(self._events)

    @property
    def learning_rate(self) -> Rate | None:
        """The learning rate of the deferred optimizer step."""
        return self.steppers[0].learning_rate

    def learn_at(self, rate: Rate) -> None:
        """Set the learning rate of the deferred optimizer step."""
        self._learn_at(rate)

    def count_step(self) -> None:
        """Count a training iteration that has been launched or replayed."""
        self._learn_at(self.training.learning_rate_at(self.steps))
        self.steps += 1

    def report(self) -> Report:
        """Wait for all issued tasks, and return the results of the last iteration. Replicas then
        average their weights if an average is due, and report the mean of their losses.
        """
        self.streams.synchronize()
        self._average_weights()
        scaling = self.scaling
        skipped = bool(scaling.overflow.item())
        if self.late is not None:
            skipped = self.late.serve()
        loss, _ = self._reported.tolist()
        has_norm = self.training.needs_norm and not skipped
        return Report(
            loss=loss,
            gradient_norm=scaling.norm.item() if has_norm else None,
            loss_scale=scaling.scale.item(),
            skipped=skipped,
            router_loss=self.routers.reported_loss,
            lopsided=self.routers.lopsided(),
        )

    def flush(self) -> None:
        """Run the optimizer step that was deferred to the next iteration, so that weights and
        optimizer states are up to date.
        """
        self.streams.synchronize()
        self._events.clear()
        if self.steppers[0].learning_rate is not None:
            self._issue(self.flushing)
            self.streams.synchronize()
            self._events.clear()
            self._learn_at(None)

    def kept_by_averages(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors that averages over replicas keep from step to step, by checkpoint name."""
        for section, averages in enumerate(self.averages):
            averages.settle()
            for name, vector in averages.named():
                yield f"remembered.{section}.{name}", vector
        if self.weight_averages is not None:
            self.weight_averages.begin()
            for name, vector in self.weight_averages.named():
                yield f"outer.{name}", vector
        if self.training.loss_scale is not None and self.cycle:
            # Replicas, and ranks of an asynchronous server, each have their own loss scale.
            self._replica_counts = self.counts()
            yield "counts", self._replica_counts

    def _average_weights(self) -> None:
        averages, peers = self.weight_averages, self.connections.peers
        if averages is None:
            return
        # The means over replicas of losses and (where the step is not skipped) gradient norms.
        steps = 1 - self.scaling.overflow
        norm = torch.where(steps > 0, self.scaling.norm, 0.0)
        sums = torch.stack([self._reported[0], norm, steps])
        finished(peers.all_reduce(sums))
        loss, norms, stepping = sums.unbind()
        self._reported[0] = loss / peers.size
        self.scaling.norm.copy_(norms / stepping.clamp(min=1))
        if averages.is_due(self.steps):
            self.issued = (*self.issued, *self.flushing)
            self.flush()
            averages.average(self.steps)

    @property
    def cycle(self) -> int:
        """The number of iterations after which the schedule of weight averages repeats; 1 if
        servers step after each iteration's passes, 0 if nothing follows the passes.
        """
        if self.weight_averages is not None:
            return self.weight_averages.cycle
        return int(self.late is not None)

    @property
    def issuing(self) -> Op | None:
        """The task that was issued last, for error messages; None before the first task."""
        return self._issuing

    def release(self) -> None:
        """Return the pinned host memory; all work must have ended."""
        self.streams.synchronize()
        self.state.host.release()
        self.passes.host.release()

    def counts(self) -> Tensor:
        """The counters in a checkpoint: steps done, steps tried, and the loss scale with its
        counters.
        """
        done = next(iter(self.state.layers.values())).step.cpu()
        scaling = torch.stack([self.scaling.scale, self.scaling.good_steps.float()]).cpu()
        return torch.cat([torch.tensor([float(self.steps)]), done, scaling]).double()

    def set_counts(self, counts: Tensor) -> None:
        """Restore the counters: ``counts``, or this replica's counters if there are several."""
        if self._replica_counts is not None:
            counts = self._replica_counts
        for averages in self.averages:
            if isinstance(averages, TurnServer):
                averages.take_up()
        steps, done, scale, good_steps = counts.tolist()
        self.steps = int(steps)
        for section in self.state.sections:
            for layer in section.layers.values():
                layer.step.fill_(done)
                layer.host_step.fill_(done)
        self.scaling.scale.fill_(scale)
        self.scaling.overflow.zero_()
        self.scaling.good_steps.fill_(int(good_steps))
        self.streams.synchronize()

    def held_bytes(self) -> dict[str, int]:
        """The bytes now on the device, by class of memory (weights, gradients, ..)."""
        held = {**self.state.held_bytes(), "activations": self.passes.held_bytes}
        held["buffers"] += sum(one.nbytes for one in self.averages)
        if self.weight_averages is not None:
            held["optimizer"] += self.weight_averages.nbytes
        return held

    @property
    def host_bytes(self) -> int:
        """The bytes of offloaded states and activations in host memory."""
        return self.state.host.size_bytes + self.passes.host.size_bytes

    @property
    def peak_bytes(self) -> int:
        """The peak bytes of states, ring buffers and saved activations, without temporaries."""
        remembered = sum(one.nbytes for one in self.averages)
        outer = 0 if self.weight_averages is None else self.weight_averages.nbytes
        return self.state.device.size_bytes + self.passes.peak_bytes + remembered + outer

    def _work_of_each_task(self) -> Works:
        """For each kind of task, the function that prepares work when such a task is issued."""
        return {
            **self._works_of(self.state.all_sections()),
            "F": later(self._forward),
            "B": later(self._backward),
            "W": later(self._of_weights),
            "open": lambda op: self.state.staging.open,
            "close": lambda op: lambda: self.state.staging.close(self.streams),
            "A>": self.passes.leave,
            "A<": lambda op: self.passes.come_back(op.layer, op.micro_batch),
            "let go": lambda op: self.passes.let_go,
            "X": self.boundary.send,
            "Y": self.boundary.receive,
            "tied": lambda op: self.parameters.add_up(self.squares[0]),
            "drop table": lambda op: self.parameters.drop_table,
            "report": lambda op: self._report,
        }

    def _issue(self, program: Sequence[Op]) -> None:
        for op in program:
            self._issuing = op
            waits = [self._events[-back] for back in op.waits]
            work = self._works[op.name](op)
            self._events.append(self.streams.submit(op.lane, work, waits))
        del self._events[: -2 * len(self.programs[1])]

    def _forward(self, op: Op) -> None:
        layer, shape, targets = op.layer, self.shape, None
        self._draw_for(op)
        layers = self._layers_of(op)
        if layer == layers[0]:
            self._flow = self._input(op)
        if shape.has_head and layer == shape.last_layer:
            targets = self._targets(self._batches[op.micro_batch][1])
        assert self._flow is not None
        y = self.passes.forward(layer, op.micro_batch, op.entry, self._flow, targets)
        self._flow = None if layer == layers[-1] else y
        if targets is not None:
            loss = self.packed.weighed(y)
            self._losses.copy_(loss if op.is_of_first else self._losses + loss)
        elif layer == layers[-1]:
            self.boundary.leave(op, y)

    def _targets(self, whole: Tensor) -> Tensor:
        """This rank's target tokens, with the targets of multi-token prediction heads."""
        further = self.model.further_tokens
        if not further:
            return self.own_tokens(whole)
        return torch.stack([self.own_tokens(one) for one in with_further(whole, further)])

    def _draw_for(self, op: Op) -> None:
        """Select the packed documents and dropout masks of the micro-batch of a pass."""
        self.packed.select(op.micro_batch)
        if self.packed.now is not None:
            self.draws.cover(self.packed.now.positions.shape[1])
        if not (self.model.dropout or self.model.attention_dropout):
            return
        connections = self.connections
        self.draws.step = self.steps
        self.draws.sequence = connections.topology.sequences(connections.place, op.micro_batch)

    def _layers_of(self, op: Op) -> range:
        assert op.of is not None
        return self.shape.chunks[op.of.chunk].layers

    def _input(self, op: Op) -> Tensor:
        if op.layer == EMBEDDING:
            return self.own_tokens(self._batches[op.micro_batch][0])
        return self.boundary.taken(op)

    def _backward(self, op: Op) -> None:
        layer, shape, layers = op.layer, self.shape, self._layers_of(op)
        self._draw_for(op)
        if layer == layers[-1]:
            is_head = shape.has_head and layer == shape.last_layer
            self._flow = self._share(self.packed.weight) if is_head else self.boundary.taken(op)
        assert self._flow is not None
        gradient = self.passes.backward(op, self._flow)
        self._flow = gradient
        if layer == layers[0]:
            if gradient is not None:
                self.boundary.leave(op, gradient)
            self._flow = None
        self._square(op)

    def _of_weights(self, op: Op) -> None:
        self.passes.of_weights(op)
        self._square(op)

    def _square(self, op: Op) -> None:
        """Sum the squares of the gradients that no collective reduces."""
        if op.phase == "last_backward" and self.shape.replicas == 1:
            for section, squares in zip(self.state.sections, self.squares, strict=True):
                if op.layer in section.layers:
                    squares.take(op.layer, section.stepped_gradients(op.layer, op.entry))

    def _share(self, weight: float = 1.0) -> Tensor:
        """The factor of a micro-batch's loss: its share of the total loss, times the loss scale."""
        return self.scaling.scale / (self.shape.micro_batches * self.shape.replicas / weight)

    def _report(self) -> Pending | None:
        position, shape = self.connections.place, self.shape
        micro_batches = shape.micro_batches * shape.replicas
        mine = torch.zeros(2, device=self.device)
        if shape.has_head and position.tensor == 0:
            mine[0] = self._losses / micro_batches
        squares = torch.stack([one.total() for one in self.squares]).sum()
        mine[1] = squares
        ranks = 0
        if self.late is not None:
            of_ranks = self.late.squares(squares)
            mine, ranks = torch.cat([mine, of_ranks]), len(of_ranks)
        if shape.routers != "none":
            mine = torch.cat([mine, self.routers.taken(micro_batches)])

        def take() -> None:
            self._reported.copy_(mine[:2])
            if self.late is not None:
                self.late.judge(mine[2 : 2 + ranks])
            elif self.training.needs_norm:
                self.scaling.judge(mine[1])
            if shape.routers != "none":
                self.routers.learn(mine[2 + ranks :], self.scaling.overflow)

        return then(self.connections.world.all_reduce(mine), take)

    def _layouts(self, alignment: int) -> list[dict[int, Layout]]:
        """Each layer's layouts, one per sharding group of ranks; the layout of experts is last."""
        zero, layouts = self.shape.zero, []
        for is_of_experts, sharers in enumerate(self.connections.sharers):
            parts = sharers.reduce.size if zero else 1
            part = sharers.replica if zero else 0
            shapes_of_layers = {
                layer: {
                    name: shape
                    for name, shape in module.trained_shapes.items()
                    if module.is_of_experts(name) == bool(is_of_experts)
                }
                for layer, module in self.layers.items()
            }
            layouts.append(
                {
                    layer: Layout.of(shapes, parts=parts, part=part, alignment=alignment)
                    for layer, shapes in shapes_of_layers.items()
                    if shapes or not is_of_experts
                }
            )
        return layouts

    def _frozen_layouts(self) -> dict[int, Layout]:
        """The layouts of each layer's frozen weights; None where all weights are trained."""
        ranks = self.connections.sharers[0].reduce
        sharded = self.shape.zero >= 3
        shapes = {layer: one.frozen_shapes for layer, one in self.layers.items()}
        if not any(shapes.values()):
            return {}
        return {
            layer: Layout.of(
                of_layer,
                parts=ranks.size if sharded else 1,
                part=self.connections.sharers[0].replica if sharded else 0,
            )
            for layer, of_layer in shapes.items()
        }

    def _learn_at(self, rate: Rate | None) -> None:
        if any(isinstance(one, TurnServer) for one in self.averages):
            # The server has already applied the step to these weights; they are only rounded.
            rate = None
        for stepper in self.steppers:
            stepper.learning_rate = rate

    def _owned(self) -> Iterator[tuple[Section, Sharers]]:
        """The groups of parameters that different groups of ranks shard, each with these ranks."""
        return zip(self.state.sections, self.connections.sharers, strict=True)

    def _swaps(self) -> list[Swaps]:
        averages: list[GradientAverages | TurnServer | None]
        averages = [*self.averages] or [None] * len(self.squares)
        swaps = [
            Swaps(*owned, squares, self.streams, section_averages)
            for owned, squares, section_averages in zip(
                self._owned(), self.squares, averages, strict=True
            )
        ]
        frozen = self.state.frozen
        if frozen is not None:
            shared = self.connections.sharers[0], self.squares[0], self.streams
            swaps.append(FrozenSwaps(frozen, *shared))
        return swaps

    def _works_of(self, sections: Sequence[Section]) -> Works:
        """For each kind of task, the function that makes the work of all groups of parameters."""
        steps = [stepper.works for stepper in self.steppers] + [{}]
        works = zip([swaps.works for swaps in self.swaps], steps, strict=False)
        return works_of_sections(
            [
                (section, {**of_step, **of_swaps})
                for section, (of_swaps, of_step) in zip(sections, works, strict=True)
            ]
        )

    def _draw_on_host(self, seed: int) -> None:
        """Draw the initial weights on the host; they depend only on the seed. Several layers are
        drawn at the same time: drawing takes a second per hundred million weights.
        """

        def fill(layer: int) -> None:
            self._fill(layer, seed, HOST)

        with ThreadPoolExecutor(min(MOST_DRAWN, torch.get_num_threads())) as threads:
            list(threads.map(fill, self.layers))

    def _fill(self, layer: int, seed: int, device: torch.device) -> None:
        tensors = self.layers[layer].initial(seed, tied=self.model.tied_embeddings, device=device)
        self.parameters.set_masters(layer, tensors)
