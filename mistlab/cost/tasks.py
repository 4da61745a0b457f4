"""How long the single tasks of a schedule take by themselves.

Durations depend on a candidate's strategy (degrees, ZeRO level, offload ratios) and on the type of
the layer. The closed form sums them by slots, the event simulator plays them: both take them from
here, and share nothing else.

Axes: S strategies, T types of layers (``mistlab.schedule.slot_kinds.LAYER_TYPES``).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from mistlab.cost.layers import KernelRules, LayerFigures, LayerModel, slowdown_of, work_of
from mistlab.cost.links import Collective, LinkTime, LinkTimes
from mistlab.cost.side_by_side import Factors, factors_of
from mistlab.engines.engine import Engine
from mistlab.engines.engine_memory import EngineMemory
from mistlab.machine.cluster import Cluster
from mistlab.schedule.slot_kinds import LAYER_TYPES
from mistlab.schedule.slot_table import SHARDED_GRADIENTS, Template
from mistlab.symbolic.distinct import Known
from mistlab.symbolic.graph import PHASES as GRAPH_PHASES
from mistlab.symbolic.graph import Phase as GraphPhase
from mistlab.symbolic.library import graph_of
from mistlab.symbolic.sizes import size_columns
from mistlab.values.errors import UncalibratedError
from mistlab.values.workload import Workload

Values = NDArray[np.float64]
Whole = NDArray[np.int64]

TASK_COLUMNS = (
    *("data_parallel", "tensor_parallel", "micro_batch", "zero", "first_rank"),
    *("offload_weights", "offload_gradients", "offload_optimizer", "offload_activations"),
)

CHECKPOINTED = LAYER_TYPES.index("checkpointed")
# Which types of layers are blocks.
BLOCKS = np.array([1.0 if name in ("block", "checkpointed") else 0.0 for name in LAYER_TYPES])

_WORDS = {"F": "forward", "B": "backward", "S": "step", "U": "gather", "R": "reduce"}
_RATIOS = {
    "P": "offload_weights",
    "G": "offload_gradients",
    "O": "offload_optimizer",
    "A": "offload_activations",
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shapes:
    """Where the groups of each strategy lie (S each): ranks in a node, and nodes.

    Its neighbours are taken to be as large as the stage itself.
    """

    data: tuple[Whole, Whole]
    tensor: tuple[Whole, Whole]
    crosses_to_next: NDArray[np.bool_]
    crosses_from_previous: NDArray[np.bool_]
    senders_of_node: Whole


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskModel:
    """The single tasks of a workload on a cluster under one engine's schedule."""

    workload: Workload
    cluster: Cluster
    template: Template
    layers: LayerModel
    links: LinkTimes
    memory: EngineMemory
    kernels: KernelRules
    step_s_a_parameter: float
    known_layers: Known[Mapping[str, LayerFigures]] = field(
        default_factory=Known, init=False, repr=False, compare=False
    )
    _factors: dict[tuple[int, int], Factors] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _collectives: dict[tuple[Collective, int, int], LinkTime] = field(
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
        """Compile the layers, look up the links."""
        hardware = cluster.hardware
        if hardware.compute is None:
            message = (
                f"cluster.hardware: {hardware.name} has no compute: profile its operators and run "
                "python -m experiments.calibrate --operators TABLE.csv"
            )
            raise UncalibratedError(message)
        step_moved = engine.step_moved[workload.precision]
        return cls(
            workload=workload,
            cluster=cluster,
            template=engine.template(overlap_communication=overlap_communication),
            layers=LayerModel(
                work=work_of(graph_of(workload), engine.kernels),
                compute=hardware.compute,
                slowdown=slowdown_of(hardware.gpu.peak_tflops, workload.precision),
            ),
            links=LinkTimes.of(cluster),
            memory=engine.memory[workload.precision],
            kernels=engine.kernels,
            step_s_a_parameter=step_moved * hardware.compute.rate("memory").s_per_byte,
        )

    def factors_of_group(self, gpus_in_node: int, nodes: int) -> Factors:
        """The slowdowns of streams side by side under a shape of communicating group."""
        shape = gpus_in_node, nodes
        if shape not in self._factors:
            hardware = self.cluster.hardware
            if hardware.interference is None:
                message = (
                    f"cluster.hardware: {hardware.name} has no interference: measure streams side "
                    "by side and run python -m experiments.calibrate --interference TABLE.csv"
                )
                raise UncalibratedError(message)
            group = hardware.interference.of_group(gpus_in_node=gpus_in_node, nodes=nodes)
            self._factors[shape] = factors_of(group)
        return self._factors[shape]

    def collective(self, kind: Collective, *, gpus_in_node: int, nodes: int) -> LinkTime:
        """The link of a collective over groups of this shape."""
        key = kind, gpus_in_node, nodes
        if key not in self._collectives:
            self._collectives[key] = self.links.collective(
                kind, gpus_in_node=gpus_in_node, nodes=nodes
            )
        return self._collectives[key]

    def seconds(self, columns: Mapping[str, NDArray[Any]]) -> "TaskSeconds":
        """The durations for columns of ``STRATEGY``."""
        return TaskSeconds(self, columns)


class TaskSeconds:
    """How long each task takes by itself, for each strategy and type of layer.

    ``tensor_s`` (T, S) is what the collectives of tensor-parallel ranks take in one pass of a
    layer, which waits for them; ``send_s`` and ``receive_s`` (S) what a micro-batch's activations
    take to the next stage and from the one before; ``tied_s`` (S) the reduction of the gradient of
    a table that the embedding and the head of different stages share.
    """

    def __init__(self, model: TaskModel, columns: Mapping[str, NDArray[Any]]) -> None:
        self.model = model
        self.columns = columns
        self.zero = columns["zero"]
        self.shapes = _shapes(columns, model.cluster)
        self.layers = _layer_figures(model, columns)
        self.of_type = [self.layers[name] for name in ("embedding", "block", "block", "head")]
        self.send_s = self._sends(self.shapes.crosses_to_next)
        self.receive_s = self._sends(self.shapes.crosses_from_previous)
        self.tied_s = self._tied()
        self.parameters = np.stack([layer.parameters for layer in self.of_type])
        self.tensor_s: dict[str, Values] = {}
        self.hidden_s: Values = np.zeros_like(self.parameters)
        for phase in GRAPH_PHASES:
            self.tensor_s[phase] = self._tensor_parallel(phase)
        self._found: dict[tuple[str, str], Values] = {}

    def alone(self, kind: str, direction: str) -> Values:
        """Seconds (T, S) of a kind of task in a direction, by itself."""
        key = kind, direction
        if key not in self._found:
            self._found[key] = (
                self._swap(kind, direction) if direction else getattr(self, f"_{_WORDS[kind]}")()
            )
        return self._found[key]

    def _forward(self) -> Values:
        return np.stack([layer.passes["forward"].compute_s for layer in self.of_type])

    def _backward(self) -> Values:
        seconds = np.stack([layer.passes["backward"].compute_s for layer in self.of_type])
        seconds[CHECKPOINTED] += self.alone("F", "")[CHECKPOINTED]
        return seconds

    def _step(self) -> Values:
        a_parameter_s = self.model.step_s_a_parameter
        return np.asarray(self.parameters / self._share(1) * a_parameter_s)

    def _gather(self) -> Values:
        size_bytes = self.parameters * self.model.memory.weight
        return self._over(self.shapes.data, "all_gather", size_bytes)

    def _reduce(self) -> Values:
        size_bytes = self.parameters * self.model.memory.gradient
        scattered, reduced = (
            self._over(self.shapes.data, collective, size_bytes)
            for collective in ("reduce_scatter", "all_reduce")
        )
        return np.asarray(np.where(self.zero >= 1, scattered, reduced))

    def _swap(self, kind: str, direction: str) -> Values:
        """Copies of a ratio of the blocks' local bytes; the embedding's and the head's stay."""
        memory = self.model.memory
        if kind == "A":
            local_bytes = np.stack([layer.saved_bytes for layer in self.of_type])
            local_bytes[CHECKPOINTED] = self.layers["block"].input_bytes
        else:
            a_parameter, level = {
                "P": (memory.weight, 3),
                "G": (memory.gradient, 2),
                "O": (memory.optimizer, 1),
            }[kind]
            local_bytes = self.parameters * a_parameter / self._share(level)
        moved = local_bytes * self.columns[_RATIOS[kind]] * BLOCKS[:, None]
        if not moved.any():
            return np.asarray(moved)
        copy = self.model.links.copy("host_to_device" if direction == "<" else "device_to_host")
        return copy(moved)

    def _share(self, level: int) -> Whole:
        """Over how many ranks a ZeRO level shares out what it shards."""
        return np.asarray(np.where(self.zero >= level, self.columns["data_parallel"], 1))

    def _over(
        self,
        shapes: tuple[Whole, Whole],
        collective: Collective,
        size_bytes: Values,
        messages: int = 1,
    ) -> Values:
        """Seconds of a collective over each strategy's group."""
        seconds = np.zeros_like(size_bytes)
        in_node, nodes = shapes
        for gpus, spanned in {*zip(in_node.tolist(), nodes.tolist(), strict=True)}:
            if gpus * spanned > 1:
                rows = (in_node == gpus) & (nodes == spanned)
                link = self.model.collective(collective, gpus_in_node=gpus, nodes=spanned)
                seconds[..., rows] = link(size_bytes[..., rows], messages)
        return seconds

    def _tensor_parallel(self, phase: GraphPhase) -> Values:
        """Seconds (T, S) of the collectives over tensor-parallel ranks in one pass of a layer."""
        passes = [layer.passes[phase] for layer in self.of_type]
        seconds = np.stack(
            [
                self._over(self.shapes.tensor, "all_reduce", one.message_bytes, one.messages)
                for one in passes
            ]
        )
        if phase == "backward":
            if self.model.template.overlaps_tensor_backward:
                beside_s = np.stack([one.beside_s for one in passes])
                self.hidden_s = np.minimum(seconds, beside_s)
                seconds -= self.hidden_s
            seconds[CHECKPOINTED] += self.tensor_s["forward"][CHECKPOINTED]
        return seconds

    def factors(self) -> Iterator[tuple[NDArray[np.bool_], Factors]]:
        """The slowdowns of streams side by side: for each shape of group, of which strategies."""
        in_node, nodes = self.shapes.data
        for gpus, spanned in sorted({*zip(in_node.tolist(), nodes.tolist(), strict=True)}):
            rows = (in_node == gpus) & (nodes == spanned)
            yield rows, self.model.factors_of_group(gpus, spanned)

    def _sends(self, crosses: NDArray[np.bool_]) -> Values:
        """Seconds (S) of a micro-batch's activations between stages; one GPU has no neighbour.

        Each of the receivers gets all of them, or a part that it then gathers with the others.
        """
        size_bytes = self.layers["block"].output_bytes
        seconds = np.zeros_like(size_bytes)
        if self.model.cluster.num_gpus == 1:
            return seconds
        if self.model.template.sends == "split":
            seconds += self._over(self.shapes.tensor, "all_gather", size_bytes)
            size_bytes = size_bytes / self.columns["tensor_parallel"]
        at_once = self.shapes.senders_of_node
        for across, senders in {*zip(crosses.tolist(), at_once.tolist(), strict=True)}:
            rows = (crosses == across) & (at_once == senders)
            link = self.model.links.send(across_nodes=across, at_once=senders)
            seconds[rows] += link(size_bytes[rows])
        return seconds

    def _tied(self) -> Values:
        """Seconds (S) of reducing a tied table's gradient between the first stage and the last.

        Each rank does it with its peer of the other stage, which lies in another node if there is
        one. As much for the last stage as for the first if they are alike; the first counts.
        """
        workload, cluster = self.model.workload, self.model.cluster
        if not workload.model.tied_embeddings or cluster.num_gpus == 1:
            return np.zeros(len(self.zero))
        tensor = self.columns["tensor_parallel"]
        padded = np.array([workload.model.padded_vocab(int(ranks)) for ranks in tensor])
        local = padded * workload.model.hidden / tensor / self._share(SHARDED_GRADIENTS)
        nodes = 2 if cluster.nodes > 1 else 1
        link = self.model.collective("all_reduce", gpus_in_node=2 // nodes, nodes=nodes)
        return link(local * self.model.memory.gradient)


def _layer_figures(
    model: TaskModel, columns: Mapping[str, NDArray[Any]]
) -> Mapping[str, LayerFigures]:
    """The figures of each layer for each strategy, worked out once for each (b, tp)."""
    figures, rows = model.known_layers(
        [columns["micro_batch"], columns["tensor_parallel"]],
        lambda sizes: model.layers(size_columns(model.workload, *sizes)),
    )
    return {name: _taken(layer, rows) for name, layer in figures.items()}


def _taken(layer: LayerFigures, index: Whole) -> LayerFigures:
    plain = {
        entry.name: getattr(layer, entry.name)[index]
        for entry in fields(layer)
        if entry.name != "passes"
    }
    passes = {
        phase: type(one)(
            compute_s=one.compute_s[index],
            beside_s=one.beside_s[index],
            messages=one.messages,
            message_bytes=one.message_bytes[index],
        )
        for phase, one in layer.passes.items()
    }
    return LayerFigures(passes=passes, **plain)


def _shapes(columns: Mapping[str, NDArray[Any]], cluster: Cluster) -> Shapes:
    """Ranks fill nodes in order: tensor fastest, then data, then stage."""
    gpus = cluster.gpus_per_node
    first, data, tensor = (
        columns[name].astype(np.int64)
        for name in ("first_rank", "data_parallel", "tensor_parallel")
    )
    ranks = data * tensor

    def spanned(step: Whole, count: Whole) -> tuple[Whole, Whole]:
        nodes = np.where(
            step < gpus, (first + (count - 1) * step) // gpus - first // gpus + 1, count
        )
        return -(-count // nodes), nodes

    def crosses(before: Whole) -> NDArray[np.bool_]:
        """Whether a rank of ``before`` and its peer in an equal stage after it are of two nodes."""
        apart = (before + 2 * ranks - 1) // gpus != before // gpus
        return np.asarray((cluster.nodes > 1) & ((ranks >= gpus) | apart))

    return Shapes(
        data=spanned(tensor, data),
        tensor=spanned(np.ones_like(tensor), tensor),
        crosses_to_next=crosses(first),
        crosses_from_previous=crosses(first - ranks),
        senders_of_node=np.minimum(ranks, gpus),
    )
