"""A stand-in on the CPU for a CUDA graph: it records operators during a capture, and replays them.

A replay runs the recorded operators on the same memory, as a CUDA graph runs kernels on the
addresses that it captured. Python code between the operators does not run again: a number that
Python computed stays what it was, and an operator reads the memory where a tensor lay, not where it
is now. Changes that the capture made in memory are undone at its end, since a CUDA graph runs
nothing while it is captured.
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
    """A dispatch mode that records the operators that run in its ``with`` block, and can replay
    them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        # Storages that recorded operators allocated, which the records keep alive; and the contents
        # that other storages had before the capture.
        self._made: set[int] = set()
        self._before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run and record an operator; raises an error if it returns a number to the host."""
        kwargs = kwargs or {}
        if func in _NUMBERS or torch.Tag.dynamic_output_shape in func.tags:
            message = f"{func}: the host reads what a graph has not computed while it is captured"
            raise RuntimeError(message)
        for tensor in _written(func, args, kwargs):
            self._keep(tensor)
        # A graph keeps the address that a tensor has now, even if the tensor moves later.
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
        """Restore what tensors held before the graph of operators was captured."""
        for whole, before in self._before.values():
            whole.copy_(before)
        self._before.clear()

    @torch.no_grad()
    def replay(self) -> None:
        """Run all recorded operators again, on the memory that their tensors had."""
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
    """Nested arguments or results, in which each tensor is replaced by a view of its memory."""
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
    """Simulated lanes (queues of work) on a CPU that also support the capture of a graph."""

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
