"""The optimizer step of a layer, and the copies of its states between host and device."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from torch import Tensor

from mistlab.stages.stage_program import Op
from runtime.comm.group import Pending, in_turn, own_part, then, together
from runtime.comm.topology import Sharers
from runtime.engine.storage.moment_codes import CODES
from runtime.engine.storage.state import Section
from runtime.engine.storage.stepped import Split
from runtime.engine.streams.lanes import LaneWork, Streams
from runtime.engine.training import Training
from runtime.engine.work.adamw import Rate, step_adamw
from runtime.engine.work.gradient_averages import GradientAverages
from runtime.engine.work.parameters import Squares
from runtime.engine.work.scaling import Scaling
from runtime.engine.work.turn_server import TurnServer

# The optimizer step of a layer (task S), which runs in the iteration after its gradients.
#
# The host never waits for a step: the divisor of gradients, and whether the step is skipped, are
# tensors on the device.


# The type of a function that makes the work of a task when the task is issued.
MakeWork = Callable[[Op], LaneWork]
Works = Mapping[str, MakeWork]


def later(run: Callable[[Op], Pending | None]) -> MakeWork:
    """A function that makes a task's work only when its lane (queue) reaches the task, not when the
    task is issued.
    """
    return partial(partial, run)


# How many elements are stepped at once, which limits the memory for 32-bit copies of gradients and
# moments. If moments are quantised, which takes more copies, a quarter as many are stepped at once.
CHUNK = 2**24


class Stepper:
    """Runs optimizer steps on the layers of a section (the parameters that one group of ranks
    shards), with the gradients of the previous iteration.

    ``learning_rate`` is that of the previous iteration. Before the first gradients it is None, and
    a step only rounds the 32-bit master weights to weights.
    """

    def __init__(
        self, state: Section, training: Training, scaling: Scaling, streams: Streams
    ) -> None:
        self.state = state
        self.training = training
        self.scaling = scaling
        self.streams = streams
        self.learning_rate: Rate | None = None
        self.works: Works = {"S": self.step, "host step": self.step_on_host}

    def step(self, op: Op) -> LaneWork:
        """The part of a layer's optimizer step that runs on the device."""
        learning_rate = self.learning_rate
        return lambda: self._step(op, learning_rate)

    def step_on_host(self, op: Op) -> LaneWork:
        """The part of a layer's optimizer step that runs on the host: it takes reduced gradients,
        and writes updated weights.
        """
        learning_rate = self.learning_rate
        return lambda: self._step_on_host(op, learning_rate)

    def _step(self, op: Op, learning_rate: Rate | None) -> None:
        state, layer = self.state, op.layer
        pieces = self._pieces(op)
        if learning_rate is not None:
            layer_state = state.layers[layer]
            gradients = state.stepped_gradients(layer, op.entry)
            self._update(pieces, gradients, layer_state.step, learning_rate)
        if state.shape.rings_weights(layer):
            self.streams.spoil(state.whole_weights(layer, op.entry))
        begin = 0
        for master, *_ in pieces:
            state.set_stepped(layer, op.entry, begin, master)
            begin += master.numel()

    def _step_on_host(self, op: Op, learning_rate: Rate | None) -> None:
        layer_state = self.state.layers[op.layer]
        master, *_ = tail = [split.tail for split in layer_state.optimizer]
        if learning_rate is not None:
            self._update([tail], layer_state.exchange, layer_state.host_step, learning_rate)
        layer_state.exchanged_weights.copy_(master)

    def _pieces(self, op: Op) -> list[list[Tensor]]:
        """The master weights and moments that are stepped on the device: the states that stay on
        the device, and the offloaded states that were copied to it.
        """
        splits = self.state.layers[op.layer].optimizer
        pieces = [[split.resident for split in splits]]
        if self.state.shape.stages_tail(op.layer):
            pieces.append(self.state.staged(op.layer, op.entry))
        return [piece for piece in pieces if piece[0].numel()]

    def _update(
        self, pieces: list[list[Tensor]], gradients: Tensor, step: Tensor, learning_rate: Rate
    ) -> None:
        training, begin = self.training, 0
        scaling = self.scaling.said(step.device) if training.needs_norm else (None, None)
        step += 1
        for vectors in (chunk for piece in pieces for chunk in chunks(piece)):
            numel = vectors[0].numel()
            gradient = gradients[begin : begin + numel].float()
            begin += numel
            step_adamw(training, vectors, gradient, step, learning_rate, scaling)
        if scaling[1] is not None:
            step -= scaling[1]


def chunks(piece: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """Cut the weights, moments and scales of some parameters into chunks, one tuple for each range
    of parameters; a scale belongs to several parameters.
    """
    numel = len(piece[0])
    most = CHUNK // 4 if piece[1].dtype == CODES else CHUNK
    for begin in range(0, numel, most):
        end = min(begin + most, numel)
        yield tuple(one[begin * len(one) // numel : end * len(one) // numel] for one in piece)


# Copies between device and host, and collectives of weights and gradients: tasks P, G, O, U and R.


class Swaps:
    """Runs the copies and collectives of a section, that is, of the parameters that one group of
    ranks shards.
    """

    def __init__(
        self,
        state: Section,
        sharers: Sharers,
        squares: Squares,
        streams: Streams,
        averages: GradientAverages | TurnServer | None = None,
    ) -> None:
        self.state, self.averages = state, averages
        self.gatherers, self.reducers = sharers.gather, sharers.reduce
        self.squares = squares
        self.streams = streams
        self.works: dict[str, MakeWork] = {
            "P<": later(self._fetch_weights),
            "P>": later(self._keep_weights),
            "G<": later(self._fetch_gradients),
            "G>": later(self._keep_gradients),
            "O<": self._fetch_optimizer,
            "O>": self._keep_optimizer,
            "U": later(self._gather),
            "R": later(self._reduce),
        }
        if state.shape.steps_on_host:
            # The host steps the optimizer states, so gradients go to the host and updated weights
            # come back.
            self.works["O>"] = later(self._give_gradients)
            self.works["O<"] = later(self._take_weights)

    def _fetch_weights(self, op: Op) -> None:
        self.streams.spoil(self.state.whole_weights(op.layer, op.entry))
        self.state.layers[op.layer].weights.load(self.state.own_weights(op.layer, op.entry))

    def _keep_weights(self, op: Op) -> None:
        self.state.layers[op.layer].weights.store(self.state.own_weights(op.layer, op.entry))

    def _fetch_gradients(self, op: Op) -> None:
        sums = self.state.sums(op.layer, op.entry)
        if op.phase != "first_forward" and op.is_of_first:
            sums.zero_()
        else:
            self.state.layers[op.layer].gradients.load(sums)

    def _keep_gradients(self, op: Op) -> None:
        sums = self.state.sums(op.layer, op.entry)
        self.state.layers[op.layer].gradients.store(sums)
        self.streams.spoil(sums)

    def _fetch_optimizer(self, op: Op) -> LaneWork:
        pairs = self._staged(op)

        def work() -> None:
            for split, staged in pairs:
                staged.copy_(split.tail, non_blocking=True)
                self.streams.spoil(split.tail)

        return work

    def _keep_optimizer(self, op: Op) -> LaneWork:
        pairs = self._staged(op)

        def work() -> None:
            for split, staged in pairs:
                split.tail.copy_(staged, non_blocking=True)
                self.streams.spoil(staged)

        return work

    def _give_gradients(self, op: Op) -> None:
        layer_state = self.state.layers[op.layer]
        gradients = self.state.stepped_gradients(op.layer, op.entry)
        layer_state.exchange.copy_(gradients[layer_state.optimizer[0].kept :], non_blocking=True)

    def _take_weights(self, op: Op) -> None:
        layer_state = self.state.layers[op.layer]
        kept = layer_state.optimizer[0].kept
        self.state.set_stepped(op.layer, op.entry, kept, layer_state.exchanged_weights)
        self.streams.spoil(layer_state.exchange)

    def _staged(self, op: Op) -> list[tuple[Split, Tensor]]:
        splits = self.state.layers[op.layer].optimizer
        staged = self.state.staged(op.layer, op.entry)
        return list(zip(splits, staged, strict=True))

    def _gather(self, op: Op) -> Pending | None:
        state, layer = self.state, op.layer
        whole = state.whole_weights(layer, op.entry)
        if not whole.numel():
            # A layer without trained parameters gathers nothing.
            return None
        part = own_part(whole, self.gatherers)
        is_elsewhere = state.shape.zero >= 3 and not state.shape.offload_of(layer).weights
        if is_elsewhere and op.phase != "first_forward":
            part = state.layers[layer].weights.resident
            self.streams.spoil(whole)
        return self.gatherers.all_gather(whole, part)

    def _reduce(self, op: Op) -> Pending | None:
        whole = self.state.whole_gradients(op.layer, op.entry)
        if self.averages is not None:
            reduction = in_turn(self.averages.average(op.layer, whole))
            return then(reduction, lambda: self._reduced(op, whole))
        ranks = self.reducers
        if not whole.numel():
            return then(None, lambda: self._reduced(op, whole))
        sharded = self.state.shape.zero >= 1
        reduction = ranks.reduce_scatter(whole) if sharded else ranks.all_reduce(whole)
        return then(reduction, lambda: self._reduced(op, whole))

    def _reduced(self, op: Op, whole: Tensor) -> None:
        shape = self.state.shape
        if shape.zero >= 2:
            sums, part = self.state.sums(op.layer, op.entry), own_part(whole, self.reducers)
            starts = op.is_of_first and not shape.offload_of(op.layer).gradients
            sums.copy_(part) if starts else sums.add_(part)
            self.streams.spoil(whole)
        if op.phase == "last_backward":
            self.squares.take(op.layer, self.state.stepped_gradients(op.layer, op.entry))


class FrozenSwaps(Swaps):
    """Copies and gathers of frozen weights. They are fetched or gathered also where trained weights
    would be left in place by an optimizer step.
    """

    def __init__(
        self, state: Section, sharers: Sharers, squares: Squares, streams: Streams
    ) -> None:
        super().__init__(state, sharers, squares, streams)
        fetches = {"P<": self.works["P<"], "S": later(self._fetch_for_step)}
        self.works = {**fetches, "U": self.works["U"]} if state.shape.zero >= 3 else fetches

    def _fetch_for_step(self, op: Op) -> None:
        if self.state.shape.rings_weights(op.layer):
            self._fetch_weights(op)


def works_of_sections(of_each: Sequence[tuple[Section, Works]]) -> Works:
    """For each kind of task, a function that makes the work of a task for all sections of its
    layer. A section has the parameters that one group of ranks shards.
    """

    if len(of_each) == 1:
        # A single section contains every layer, so no section must be chosen by layer.
        return of_each[0][1]

    def work_of(name: str, op: Op) -> LaneWork:
        of_layer = [works for section, works in of_each if op.layer in section.layers]
        works = [makers[name](op) for makers in of_layer if name in makers]
        return works[0] if len(works) == 1 else lambda: together([work() for work in works])

    names = dict.fromkeys(name for _, makers in of_each for name in makers)
    return {name: partial(work_of, name) for name in names}
