"""Computes how long each task of a schedule takes when it runs alone: a layer's pass, a collective,
a host copy, an optimizer step.

A time depends on a candidate's strategy (degrees, ZeRO level, offload ratios) and on the type of
the layer. The closed form sums these times by slots, and the event simulator plays them; the two
share nothing else.

Axes: S strategies, T types of layers (``mistlab.graph.layer_types``), C stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from mistlab.core.arrays import Bools, Floats, Ints, Rows
from mistlab.core.distinct import Known
from mistlab.core.values import UncalibratedError
from mistlab.cost.kernels import (
    class_of,
    compute_of,
    host_of,
    makes_weight_gradient,
    rule_of,
    slowdown_of,
    slowdown_of_8_bits,
    slowdowns_of_group,
    with_dequantised,
)
from mistlab.cost.layers import (
    KernelRules,
    LayerExchanges,
    LayerFigures,
    LayerModel,
    LayerWork,
    Pass,
    bytes_factor,
    figures_of_layers,
    waits_for_hosts_s,
    work_of,
)
from mistlab.cost.links import Copy, LinkTimes, exchanged_s, late_s
from mistlab.cost.reductions import ReductionTimes
from mistlab.cost.side_by_side import SlowedBy, factors_of, lowered, raised
from mistlab.engines.engine import Engine, EngineMemory, ExpertExchange, HostTime
from mistlab.graph.adapted import with_loss_again
from mistlab.graph.compiled import Compiled, compile_sums, kept
from mistlab.graph.graph import PHASES as GRAPH_PHASES
from mistlab.graph.graph import Collective, LayerGraph
from mistlab.graph.graph import Phase as GraphPhase
from mistlab.graph.layer_types import LayerTypes, graphs_of
from mistlab.graph.library import graph_of, sequence_graph_of
from mistlab.graph.stored_graph import StoredGraph
from mistlab.graph.sums import Sum, Value
from mistlab.graph.symbols import GraphChoice, by_graph, layer_columns, size_columns, size_names
from mistlab.graph.treatments import TREATMENTS, Treatment
from mistlab.machine.cluster import Cluster
from mistlab.machine.hardware import OperatorClass
from mistlab.network.link_times import GroupSpread, LinkTime
from mistlab.network.tiers import NETWORK, NODE
from mistlab.plan.dimensions import DIMENSIONS, names_of, states_as_changed
from mistlab.plan.reducing import replicated
from mistlab.plan.workload import Workload
from mistlab.schedule.context_ways import RING
from mistlab.schedule.slots import SHARDED_GRADIENTS, Template
from mistlab.stages.stage_shape import Shapes, shapes_of

# Which slowdown factors of concurrent streams are used: fitted ones ("own"), lower bounds for this
# or any greater work ("least"), or upper bounds for this or any lesser work ("most").
Kept = Literal["own", "least", "most"]
_CHANGED: Mapping[Kept, Callable[[Floats], Floats]] = {"least": lowered, "most": raised}
_NAMES = {"F": "forward", "B": "backward", "S": "step", "U": "gather", "R": "reduce"}


def task_columns() -> tuple[str, ...]:
    """The names of the plan's choices on which the times of tasks depend."""
    return (*names_of("mesh"), *names_of("savings"), "first_rank")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskModel:
    """Computes the times of a workload's tasks on a cluster of equal nodes, under one engine's
    schedule.

    ``meet`` changes the times of stages whose neighbours are on nodes of another kind. Sends
    between stages take ``send_factor`` times as long as usual.
    """

    workload: Workload
    cluster: Cluster
    template: Template
    types: LayerTypes
    layers: LayerModel
    links: LinkTimes
    memory: EngineMemory
    host: HostTime | None
    kernels: KernelRules
    step_s_a_parameter: float
    moved_s_a_byte: float
    expert_exchange: ExpertExchange
    meet: Callable[[TaskSeconds], TaskSeconds] | None = None
    send_factor: float = 1.0
    known_layers: Known[Mapping[str, LayerFigures]] = field(
        default_factory=Known, init=False, repr=False, compare=False
    )
    known_shapes: Known[Shapes] = field(
        default_factory=Known, init=False, repr=False, compare=False
    )
    _factors: dict[tuple[int, int, Kept], Floats] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _links: dict[tuple[object, ...], LinkTime] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @classmethod
    def of(
        cls,
        workload: Workload,
        cluster: Cluster,
        engine: Engine,
        *,
        overlap_communication: bool = True,
    ) -> Self:
        """Make a workload's model of task times; refuses hardware without measured rates."""
        hardware = cluster.hardware
        if hardware.compute is None:
            remedy = "profile operators and run python -m experiments.calibrate --operators"
            message = f"cluster.hardware: {hardware.name} has no compute rates: {remedy} TABLE.csv"
            raise UncalibratedError(message)
        engine = workload.trained_by(engine)
        memory = engine.memory_in(workload.precision, workload.optimizer)
        step_moved = engine.step_moved_in(workload.precision, workload.optimizer)
        rules = engine.rules_in(workload.precision)
        moved_s_a_byte = hardware.compute.rate("step").s_per_byte
        return cls(
            workload=workload,
            cluster=cluster,
            template=engine.template(overlap_communication=overlap_communication),
            types=LayerTypes.of(graph_of(workload).pattern),
            layers=LayerModel(
                work=_work_of(workload, rules, memory),
                compute=with_dequantised(
                    compute_of(hardware, hardware.compute, engine), hardware, workload
                ),
                slowdown=slowdown_of(hardware.gpu.peak_tflops, workload.precision),
                of_8_bits=slowdown_of_8_bits(hardware.gpu.peak_tflops),
            ),
            links=LinkTimes.of(cluster),
            memory=memory,
            host=host_of(engine, graph_of(workload).block_operators, hardware.compute),
            kernels=rules,
            expert_exchange=engine.expert_exchange,
            step_s_a_parameter=step_moved * moved_s_a_byte,
            moved_s_a_byte=moved_s_a_byte,
        )

    def factors_of_group(self, gpus_in_node: int, nodes: int, kept: Kept = "own") -> Floats:
        """How much streams slow one another down while a group of this shape communicates."""
        key = gpus_in_node, nodes, kept
        if key not in self._factors:
            hardware = self.cluster.hardware
            machine = hardware.interference
            if machine is None:
                message = (
                    f"cluster.hardware: {hardware.name} has no measured slowdowns of concurrent "
                    "streams: run python -m experiments.profile_hardware, or give a table "
                    "to python -m experiments.calibrate --interference TABLE.csv"
                )
                raise UncalibratedError(message)
            group = slowdowns_of_group(machine, gpus_in_node=gpus_in_node, nodes=nodes)
            factors = factors_of(group)
            self._factors[key] = _CHANGED[kept](factors) if kept in _CHANGED else factors
        return self._factors[key]

    def collective(
        self, kind: Collective, shape: GroupSpread, *, inside_layer: bool = False
    ) -> LinkTime:
        """The time of a collective over groups of ranks of this shape."""
        link = self.links.inside_layer if inside_layer else self.links.collective
        gpus, nodes, units = shape
        return self._link(
            (kind, shape, inside_layer),
            lambda: link(kind, gpus_in_node=gpus, nodes=nodes, units=units),
        )

    def copy(self, direction: Copy) -> LinkTime:
        """The time of a copy between a GPU and its host."""
        return self._link((direction,), lambda: self.links.copy(direction))

    def send(
        self, *, across_nodes: bool, at_once: int, tier: int = NETWORK, senders: int = 1
    ) -> LinkTime:
        """The time of a send to the next stage.

        ``at_once`` GPUs of a node send, and ``senders`` GPUs use the network tier ``tier``.
        """
        return self._link(
            ("send", across_nodes, at_once, tier, senders),
            lambda: self.links.send(
                across_nodes=across_nodes, at_once=at_once, tier=tier, senders=senders
            ),
        )

    def _link(self, key: tuple[object, ...], looked_up: Callable[[], LinkTime]) -> LinkTime:
        """The time of a link, computed once for each key and then cached."""
        if key not in self._links:
            self._links[key] = looked_up()
        return self._links[key]

    def seconds(self, columns: Mapping[str, NDArray[Any]]) -> TaskSeconds:
        """The times of tasks, given columns of candidates named in ``task_columns``."""
        if self.workload.averages_weights:
            columns = replicated(columns, self.workload.reduction)
        seconds = TaskSeconds(self, columns)
        return seconds if self.meet is None else self.meet(seconds)


class TaskSeconds:
    """The time that each task takes alone, for each type of layer and each strategy (a combination
    of a plan's choices).

    ``tensor_s`` (T, S) is the time of tensor-parallel collectives in one pass of a layer, which
    waits for them. ``send_s`` and ``receive_s`` (S) are the times of a micro-batch's activations to
    the next stage and from the stage before; both include ``late_s`` (S), a slow cluster's delay.
    ``tied_s`` (S) is the time to reduce the gradient of a table that two stages share.
    """

    def __init__(self, model: TaskModel, columns: Mapping[str, NDArray[Any]]) -> None:
        self.model = model
        self.columns = columns
        self.zero = columns["zero"]
        self.memory = states_as_changed(model.memory, columns.__getitem__)
        self.shapes = shapes_of(model.known_shapes, columns, model.cluster)
        self.layers = figures_of_layers(model.known_layers, model.layers, model.workload, columns)
        names, blocks = model.types.names, model.types.of_blocks
        self.of_type = [self.layers[name] for name in names]
        # A column with 1 for each type of layer that is a block, and 0 for embedding and head.
        self.of_blocks = np.array([[float(name in blocks)] for name in names])
        batch = model.workload.global_batch
        self.late_s = model.send_factor * late_s(columns.__getitem__, model.cluster, batch)
        self.send_s = self._sends(self.shapes.place_to_next)
        self.receive_s = self._sends(self.shapes.place_from_previous)
        self.tied_s = self._tied()
        self.parameters = np.stack([layer.parameters for layer in self.of_type])
        self.experts = np.stack([layer.experts for layer in self.of_type])
        self.reductions = ReductionTimes(
            how=model.workload.reduction,
            shapes=self.shapes,
            over=self._over,
            send=model.send,
            tiers=model.links.tiers,
            gpus_per_node=model.cluster.gpus_per_node,
            gradient=self.memory.reduced_gradient,
            remembered=self.memory.remembered,
            moved_s=model.moved_s_a_byte,
        )
        self.tensor_s: dict[str, Floats] = {}
        self.hidden_s: Floats = np.zeros_like(self.parameters)
        self.exchanges = LayerExchanges(self._over, self._to_experts, self.shapes.of_several)
        hosts = model.workload, model.expert_exchange.operator_s, self.of_type
        for phase in GRAPH_PHASES:
            sent_s = self._tensor_parallel(phase, self.exchanges)
            self.tensor_s[phase] = sent_s + waits_for_hosts_s(*hosts, phase, sent_s)
        self._found: dict[tuple[str, str], Floats] = {}
        self._moved_bytes: dict[str, Floats] = {}
        self._slowed_by: dict[Kept, SlowedBy] = {}

    def alone(self, kind: str, direction: str) -> Floats:
        """The seconds of a kind of task by itself, for each type of layer and strategy."""
        key = kind, direction
        if key not in self._found:
            alone_s = (
                self._swap(kind, direction) if direction else getattr(self, f"_{_NAMES[kind]}")()
            )
            self._found[key] = alone_s
        return self._found[key]

    def _factored(self, kind: str, amounts: Floats) -> Floats:
        """Multiply the bytes or seconds of a kind of task by factors from the plan's choices."""
        for name, row in DIMENSIONS.items():
            if kind in row.of_tasks:
                amounts = amounts * row.of_tasks[kind](self.columns[name])
        return amounts

    def _forward(self) -> Floats:
        seconds = np.stack([layer.passes["forward"].compute_s for layer in self.of_type])
        return self._factored("F", seconds)

    def _backward(self) -> Floats:
        seconds = np.stack([layer.passes["backward"].compute_s for layer in self.of_type])
        seconds = self._factored("B", seconds)
        for layer_type, again in self._again():
            seconds[layer_type] += self._factored("F", again.compute_s)
        return seconds

    def _again(self) -> Iterator[tuple[int, Pass]]:
        """The indices of the layer types that recompute, each with its recomputed pass."""
        for number, layer in enumerate(self.of_type):
            if layer.again is not None:
                yield number, layer.again

    def _step(self) -> Floats:
        a_parameter_s = self.model.step_s_a_parameter
        stepped_s = self._own_parameters(1) * a_parameter_s
        if (host := self.model.host) is not None:
            sharded = np.where(self._share(1) > 1, host.sharded_step_s, 0.0)
            stepped_s = stepped_s + self.of_blocks * (host.step_s + sharded)
        return self._factored("S", stepped_s)

    def _gather(self) -> Floats:
        return self._of_states("gather", "all_gather", "U", self.memory.kept_weight)

    def _reduce(self) -> Floats:
        gradient, work = self.memory.reduced_gradient, self.model.workload
        if not (work.reduces_plainly or work.averages_weights):
            less = self.reductions.sent_less_s("reduce", self.parameters - self.experts)
            return less + self.reductions.sent_less_s("reduce experts", self.experts)
        scattered = self._of_states("gather", "reduce_scatter", "R", gradient)
        if not work.averages_weights:
            # While replicas reduce their shards of one block's gradients over the network, the next
            # block's gradients are reduce-scattered.
            shards = self._factored("R", self._own_parameters(1) * gradient)
            scattered = np.maximum(scattered, self._over("state replicas", "all_reduce", shards))
        whole = "gather" if work.averages_weights else "reduce"
        reduced = self._of_states(whole, "all_reduce", "R", gradient)
        return np.asarray(np.where(self.zero >= 1, scattered, reduced))

    def _of_states(self, group: str, collective: Collective, kind: str, bytes_each: Any) -> Floats:
        """The seconds of a collective over all parameters of a layer, for each type of layer and
        strategy.

        Parameters of experts use a group of ranks of their own.
        """
        others = self._factored(kind, (self.parameters - self.experts) * bytes_each)
        seconds = self._over(group, collective, others)
        if self.experts.any():
            experts = self._factored(kind, self.experts * bytes_each)
            seconds = seconds + self._over(f"{group} experts", collective, experts)
        return seconds

    def asynchronous_s(self) -> tuple[Floats, Floats]:
        """The seconds in which a layer's gradients go to asynchronous parameter servers and back,
        and those for which a server is busy with all ranks' messages.

        The result is (2, T, S).
        """
        parts = [
            self.reductions.asynchronous_s("reduce", self.parameters - self.experts),
            self.reductions.asynchronous_s("reduce experts", self.experts),
        ]
        both_s, busy_s = (sum(one) for one in zip(*parts, strict=True))
        return np.asarray(both_s), np.asarray(busy_s)

    def averaged_s(self) -> Floats:
        """The seconds in which ranks that step separately exchange a layer's weights once."""
        return self.reductions.averaged_s(self._own_parameters(1))

    def averaging_s(self, counts: Floats, strategies: Rows | slice) -> Floats:
        """The mean seconds per step in which stages average their weights after all passes; zero if
        other steps hide it.

        Stages have ``counts`` layers of each type (T, C).
        """
        how = self.model.workload.reduction
        if not self.model.workload.averages_weights or how.delay:
            return np.zeros(counts.shape[1])
        return np.asarray((counts * self.averaged_s()[:, strategies]).sum(axis=0) / how.every)

    def _own_parameters(self, level: int) -> Floats:
        """The parameters whose states a rank has, if ZeRO shards them from this level on."""
        if not self.experts.any():
            return self.parameters / self._share(level)
        others = (self.parameters - self.experts) / self._share(level)
        return np.asarray(others + self.experts / self._share(level, "gather experts"))

    def _swap(self, kind: str, direction: str) -> Floats:
        """The seconds of copying the offloaded part of a layer's states to or from the host."""
        moved = self._moved(kind)
        if not moved.any():
            return moved
        copy = self.model.copy("host_to_device" if direction == "<" else "device_to_host")
        return copy(moved)

    def _moved(self, kind: str) -> Floats:
        """The bytes of each type of layer that are offloaded to the host and fetched back."""
        if kind not in self._moved_bytes:
            memory = self.memory
            if kind == "A":
                local_bytes = np.stack([layer.saved_bytes for layer in self.of_type])
            else:
                a_parameter, level = {
                    "P": (memory.kept_weight, 3),
                    "G": (memory.gradient, 2),
                    "O": (memory.optimizer, 1),
                }[kind]
                local_bytes = self._own_parameters(level) * a_parameter
            self._moved_bytes[kind] = self._factored(kind, local_bytes) * self.of_blocks
        return self._moved_bytes[kind]

    def _share(self, level: int, group: str = "gather") -> Ints:
        """The number of ranks that share states which ZeRO shards from this level on."""
        return np.asarray(np.where(self.zero >= level, self.shapes.ranks[group], 1))

    def _over(
        self,
        group: str,
        collective: Collective,
        size_bytes: Floats,
        messages: Floats | None = None,
    ) -> Floats:
        """The seconds of a collective over each strategy's group of ranks."""
        seconds = np.zeros_like(size_bytes)
        for rows, shape in self.shapes.of_several(group):
            link = self.model.collective(collective, shape, inside_layer=messages is not None)
            count = 1 if messages is None else messages[..., rows]
            seconds[..., rows] = link(size_bytes[..., rows], count)
        return seconds

    def _tensor_parallel(self, phase: GraphPhase, exchanges: LayerExchanges) -> Floats:
        """The exposed seconds of a pass's tensor-parallel collectives, for each type of layer."""
        passes = [layer.passes[phase] for layer in self.of_type]
        if not exchanges.any_in([*passes, *(again for _, again in self._again())]):
            return np.zeros_like(self.parameters)
        overlaps = self.model.template.overlaps_tensor_backward
        if phase == "backward" and overlaps:
            self.hidden_s = np.stack([exchanges.hidden_s(one, "weights") for one in passes])
        return np.stack(
            [
                exchanges.unhidden_s(layer, phase, overlaps_products=overlaps)
                for layer in self.of_type
            ]
        )

    def _to_experts(self, size_bytes: Floats, messages: Floats) -> Floats:
        """The seconds in which ranks with different experts exchange tokens, for each strategy."""
        model, shape = self.model, self.shapes.groups["experts"]
        of_pass = exchanged_s(model.links, model.expert_exchange, model.workload.model, shape)
        return of_pass(size_bytes, messages)

    def factors(self, kept: Kept = "own") -> Iterator[tuple[Bools, Floats]]:
        """The slowdown factors of concurrent streams, for each shape of communicating group, with a
        mask of the strategies that have it.
        """
        for rows, shape in self.shapes.by_shape("reduce"):
            yield rows, self.model.factors_of_group(shape.gpus_in_node, shape.nodes, kept)

    def slowed_by(self, kept: Kept = "own") -> SlowedBy:
        """How much the four streams of each strategy slow one another down."""
        if kept not in self._slowed_by:
            self._slowed_by[kept] = SlowedBy.of_groups(self.factors(kept), len(self.zero))
        return self._slowed_by[kept]

    def _sends(self, places: Ints) -> Floats:
        """The seconds in which a micro-batch's activations are sent between stages, for each
        strategy.

        They go through the network tiers with the indices ``places`` (S); the time is 0 on a single
        GPU.

        Each receiver gets all activations, or gets a part and gathers the other parts.
        """
        size_bytes = self.layers["block"].output_bytes
        seconds = np.zeros_like(size_bytes)
        if self.model.cluster.num_gpus == 1:
            return seconds
        if self.model.template.sends == "split":
            # Without sequence parallelism every tensor-parallel rank has all of the activations.
            whole = self.columns["sequence_parallel"] == 0
            seconds += self._over("tensor", "all_gather", np.where(whole, size_bytes, 0.0))
            size_bytes = size_bytes / np.where(whole, self.shapes.ranks["tensor"], 1)
        at_once, senders = self.shapes.senders_of_node, self.shapes.senders
        ways = places, at_once, np.where(places > NETWORK, senders, 1)
        for tier, in_node, count in {*zip(*(way.tolist() for way in ways), strict=True)}:
            rows = (places == tier) & (at_once == in_node) & (ways[2] == count)
            link = self.model.send(
                across_nodes=tier != NODE, at_once=in_node, tier=tier, senders=count
            )
            seconds[rows] += link(size_bytes[rows])
        usual_s = seconds + self.model.template.send_wait_s
        return self.model.send_factor * usual_s + self.late_s

    def _tied(self) -> Floats:
        """The seconds in which two stages reduce the gradient of their shared embedding table.

        Each rank reduces with the corresponding rank of the other stage, which is in another node
        if there is one. If the two stages differ, the first stage's time counts.
        """
        workload, cluster = self.model.workload, self.model.cluster
        if not workload.model.head_has_table or cluster.num_gpus == 1:
            return np.zeros(len(self.zero))
        tensor = self.columns["tensor_parallel"]
        padded = np.array([workload.model.padded_vocab(int(ranks)) for ranks in tensor])
        local = padded * workload.model.hidden / tensor / self._share(SHARDED_GRADIENTS)
        nodes = 2 if cluster.nodes > 1 else 1
        link = self.model.collective("all_reduce", GroupSpread(2 // nodes, nodes))
        if (tiers := self.model.links.tiers) is not None and nodes > 1:
            size_bytes, seconds = local * self.memory.gradient, np.zeros(len(self.zero))
            for count in np.unique(self.shapes.senders).tolist():
                rows = self.shapes.senders == count
                seconds[rows] = tiers.between_ends(link, count)(size_bytes[rows])
            return seconds
        return link(local * self.memory.gradient)


# Computes the part of a layer's backward pass that makes weight gradients, for orders of passes in
# which this part is a pass of its own.


# GEMMs with weights are of these operator classes: in 16 and 8 bits, dense and of experts.
PRODUCTS: tuple[OperatorClass, ...] = (
    *("matmul", "grouped_matmul"),
    *("matmul_8bit", "grouped_matmul_8bit"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sums:
    flop: Sum
    moved_bytes: Sum


def _work_of(workload: Workload, rules: KernelRules, memory: EngineMemory) -> LayerWork:
    """The operations, bytes and messages of a workload's layers; if the engine recomputes the loss,
    the head runs a second forward pass.
    """
    graph = graph_of(workload, fuses_loss=memory.fuses_loss)
    split = sequence_graph_of(workload, fuses_loss=memory.fuses_loss)
    if memory.loss_again:
        graph, split = with_loss_again(graph), None if split is None else with_loss_again(split)
    return work_of(graph, rules, split)


def weight_gradients_s(seconds: TaskSeconds) -> Floats:
    """The seconds of all weight-gradient GEMMs, for each type of layer and strategy.

    These are the GEMMs whose result has no token dimension. Everything else stays in the backward
    pass: gradients of vectors, the second forward pass of a recomputed block, and launch time in
    excess of compute time.
    """
    model, columns = seconds.model, seconds.columns
    treatments = tuple((name, TREATMENTS[name]) for name in model.types.treatments)

    plain, split = graph_of(model.workload), sequence_graph_of(model.workload)

    def products(choice: GraphChoice) -> Compiled:
        # How context-parallel ranks exchange keys does not change the GEMMs for weight gradients.
        graph = split if split is not None and choice.splits_tokens else plain
        return _products(graph, model.kernels, treatments)

    compiled = products(GraphChoice(splits_tokens=False, exchange=RING))
    sizes = size_columns(
        model.workload, {symbol: columns[name] for symbol, name in layer_columns().items()}
    )
    values = dict(zip(compiled.names, by_graph(compiled, products, sizes), strict=True))
    alone = np.stack([_seconds(model, values, name) for name in model.types.names])
    whole = np.stack([layer.passes["backward"].compute_s for layer in seconds.of_type])
    return np.minimum(alone, whole)


def _seconds(model: TaskModel, values: dict[str, Floats], name: str) -> Floats:
    layers = model.layers
    seconds = np.zeros(1)
    for product in PRODUCTS:
        rate = layers.compute.rate(product)
        s_per_flop = rate.s_per_flop * layers.times_slower(product)
        s_per_flop *= layers.slowdown / layers.compute.sustained
        moved_s = values[f"{name} {product} bytes"] * rate.s_per_byte
        seconds = seconds + values[f"{name} {product} flop"] * s_per_flop + moved_s
    return np.asarray(seconds)


@kept
def _products(
    graph: StoredGraph, rules: KernelRules, treatments: tuple[tuple[str, Treatment], ...]
) -> Compiled:
    expressions: dict[str, Value] = {}
    for name, layer in graphs_of(graph.counts, treatments).items():
        for product in PRODUCTS:
            sums = _sums(layer, rules, graph.attention, product)
            expressions[f"{name} {product} flop"] = sums.flop
            expressions[f"{name} {product} bytes"] = sums.moved_bytes
    return compile_sums(expressions, columns=size_names())


def _sums(layer: LayerGraph, rules: KernelRules, attention: str, product: OperatorClass) -> _Sums:
    flop = moved = Sum.of(0)
    for operator in layer.of_phase("backward"):
        if makes_weight_gradient(operator) and class_of(operator) == product:
            rule = rule_of(operator, layer, rules, attention)
            if not rule.runs:
                continue
            flop += operator.flop
            factor = bytes_factor(rule)
            moved += (operator.read_bytes + operator.written_bytes) * factor
    return _Sums(flop=flop, moved_bytes=moved)
