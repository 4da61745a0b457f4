"""A stand-in on the CPU for a CUDA graph: it records operators during a capture, and replays them.

A replay runs the noted operators on the tensors that they had, as a graph runs kernels on the
addresses that it captured. No line of Python between them runs again: a number that Python has made
stays what it was, and memory that was handed on outside of the graph is read where it lay. What a
capture changes is put back, as a graph runs nothing while it is captured.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from runtime.checks.fake.hidden_waits import tensors_in
from runtime.engine.storage.saved import storage_of
from runtime.engine.streams.lanes import Streams

_Call = tuple[OpOverload, tuple[Any, ...], dict[str, Any], Any]
_NUMBERS = (torch.ops.aten._local_scalar_dense.default,)


@final
class RecordedGraph(TorchDispatchMode):
    """Records the operators that run in its ``with`` block, to replay them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        # Storages that recorded operators made, which the records keep alive; below, the contents
        # of other storages before the capture.
        self._made: set[int] = set()
        self._before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run and record an operator; refuse one that returns a number to the host."""
        kwargs = kwargs or {}
        if func in _NUMBERS or torch.Tag.dynamic_output_shape in func.tags:
            message = f"{func}: the host reads what a graph has not computed while it is captured"
            raise RuntimeError(message)
        for tensor in _written(func, args, kwargs):
            self._keep(tensor)
        # The graph keeps the address that a tensor has now, since the tensor may move to other
        # memory later.
        addresses = _addresses(args), _addresses(kwargs)
        result = func(*args, **kwargs)
        given = {storage_of(one) for one in tensors_in(addresses)}
        self._made |= {storage_of(one) for one in tensors_in(result)} - given
        if func.overloadpacket is not torch.ops.aten.set_:
            self.calls.append((func, *addresses, _addresses(result)))
        return result

    def _keep(self, tensor: Tensor) -> None:
        key = storage_of(tensor)
        if key not in self._made and key not in self._before:
            whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            self._before[key] = (whole, whole.clone())

    def put_back(self) -> None:
        """Restore memory that existed before the capture to the contents that it had before the
        capture.
        """
        for whole, before in self._before.values():
            whole.copy_(before)
        self._before.clear()

    @torch.no_grad()
    def replay(self) -> None:
        """Run all operators again, each on the memory of its recorded tensors."""
        for func, args, kwargs, result in self.calls:
            given = {storage_of(one) for one in tensors_in((args, kwargs))}
            results = [*tensors_in(result)]
            writes = bool(_written(func, args, kwargs))
            is_view = not writes and all(storage_of(one) in given for one in results)
            if is_view or "empty" in func.name():
                continue
            again = func(*args, **kwargs)
            if not writes:
                for output, values in zip(results, tensors_in(again), strict=True):
                    output.copy_(values)


def _addresses(given: Any) -> Any:
    """Nested arguments or results, with each tensor replaced by a view of the tensor's memory."""
    return tree_map(lambda one: one.detach() if isinstance(one, Tensor) else one, given)


def _written(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors to which an operator writes."""
    arguments = func._schema.arguments
    named = {one.name: value for one, value in zip(arguments, args, strict=False)} | kwargs
    return [
        tensor
        for argument in arguments
        if argument.alias_info is not None and argument.alias_info.is_write
        for tensor in tensors_in(named.get(argument.name))
    ]


@final
class RecordedLanes:
    """Simulated lanes (queues of the runtime's work) that support the capture of a graph."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self.graphs: list[RecordedGraph] = []

    @contextmanager
    def captured(self) -> Iterator[RecordedGraph]:
        """Record the operators that run in the ``with`` block as a graph."""
        graph = RecordedGraph()
        self._streams.synchronize()
        with graph:
            yield graph
            self._streams.synchronize()
        graph.put_back()
        self.graphs.append(graph)
