"""Copies between device and host, and collectives of weights and gradients.

These are the tasks P, G, O, U and R.
"""

from collections.abc import Callable

from torch import Tensor

from mistlab.schedule.stage_program import Op
from runtime.comm.group import Pending, own_part, then
from runtime.comm.topology import Connections
from runtime.engine.storage.state import Split, StageState
from runtime.engine.streams.lanes import LaneWork, Streams
from runtime.engine.work.norm import Squares


class Swaps:
    """Makes the work of each copy and collective of a stage's layers."""

    def __init__(
        self, state: StageState, connections: Connections, squares: Squares, streams: Streams
    ) -> None:
        self.state = state
        self.gatherers, self.reducers = connections.gather, connections.reduce
        self.squares = squares
        self.streams = streams
        self.works: dict[str, Callable[[Op], LaneWork]] = {
            "P<": lambda op: lambda: self._fetch_weights(op),
            "P>": lambda op: lambda: self._keep_weights(op),
            "G<": lambda op: lambda: self._fetch_gradients(op),
            "G>": lambda op: lambda: self._keep_gradients(op),
            "O<": self._fetch_optimizer,
            "O>": self._keep_optimizer,
            "U": lambda op: lambda: self._gather(op),
            "R": lambda op: lambda: self._reduce(op),
        }
        if state.shape.steps_on_host:
            # Optimizer state stays on the host: gradients leave, and stepped weights come.
            self.works["O>"] = lambda op: lambda: self._give_gradients(op)
            self.works["O<"] = lambda op: lambda: self._take_weights(op)

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
        own = self.state.layers[op.layer]
        gradients = self.state.stepped_gradients(op.layer, op.entry)
        own.exchange.copy_(gradients[own.optimizer[0].kept :], non_blocking=True)

    def _take_weights(self, op: Op) -> None:
        own = self.state.layers[op.layer]
        self.state.set_stepped(op.layer, op.entry, own.optimizer[0].kept, own.exchange)
        self.streams.spoil(own.exchange)

    def _staged(self, op: Op) -> list[tuple[Split, Tensor]]:
        splits = self.state.layers[op.layer].optimizer
        staged = self.state.staging.of(op.entry, splits[0].tail.numel())
        return list(zip(splits, staged, strict=True))

    def _gather(self, op: Op) -> Pending | None:
        state, layer = self.state, op.layer
        whole = state.whole_weights(layer, op.entry)
        own = own_part(whole, self.gatherers)
        is_elsewhere = state.shape.zero >= 3 and not state.shape.offload_of(layer).weights
        if is_elsewhere and op.phase != "first_forward":
            own = state.layers[layer].weights.resident
            self.streams.spoil(whole)
        return self.gatherers.all_gather(whole, own)

    def _reduce(self, op: Op) -> Pending | None:
        whole = self.state.whole_gradients(op.layer, op.entry)
        ranks = self.reducers
        sharded = self.state.shape.zero >= 1
        reduction = ranks.reduce_scatter(whole) if sharded else ranks.all_reduce(whole)
        return then(reduction, lambda: self._reduced(op, whole))

    def _reduced(self, op: Op, whole: Tensor) -> None:
        shape = self.state.shape
        if shape.zero >= 2:
            sums, own = self.state.sums(op.layer, op.entry), own_part(whole, self.reducers)
            starts = op.is_of_first and not shape.offload_of(op.layer).gradients
            sums.copy_(own) if starts else sums.add_(own)
            self.streams.spoil(whole)
        if op.phase == "last_backward":
            self.squares.take(op.layer, self.state.stepped_gradients(op.layer, op.entry))
