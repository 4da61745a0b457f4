"""Detects operators that make the host wait for a GPU although their names do not say so.

The rules are those of torch's operators on CUDA. The host waits for a number that it reads, and for
a size that depends on values. It waits for a copy between device and host, unless the copy is
``non_blocking`` and the host's memory is pinned and in one piece.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from runtime.checks.fake.driver import FakeDriver
from runtime.checks.fake.watch import Kind, Watch
from runtime.models import operators

aten = torch.ops.aten
# Kinds of devices that are no stand-in for a GPU.
_ELSEWHERE = ("cpu", "meta")
Arguments = Mapping[str, Any]
# Operators that neither compute nor move anything.
_IDLE = (aten.lift_fresh, aten.lift, aten.set_)
_CHOOSING = (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_)


class HiddenWaits(TorchDispatchMode):
    """A mode that judges all operators; it needs a mode of fake tensors below it.

    A number that is read is zero. An operator that consists of others, such as the project's own,
    is judged by these. ``ways`` is a mode that torch leaves before it calls this one, so it is
    entered again for them.
    """

    def __init__(
        self, driver: FakeDriver, watch: Watch, ways: AbstractContextManager[object]
    ) -> None:
        super().__init__()
        self._driver, self._watch, self._ways = driver, watch, ways
        self._bodies: dict[OpOverload, Callable[..., Any]] = {
            one._opoverload: one._init_fn
            for one in vars(operators).values()
            if isinstance(one, CustomOpDef)
        }

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Judge an operator, then run it."""
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        if func in self._bodies:
            with self, self._ways:
                return self._bodies[func](*args, **kwargs)
        if _consists_of_others(func):
            with self:
                return func.decompose(*args, **kwargs)
        kind = hidden_wait(func, args, kwargs, self._driver.is_pinned)
        try:
            result = self._run(func, args, kwargs)
        except Exception as error:
            places = {tensor.device.type for tensor in tensors_in((args, kwargs))}
            ending: Kind = "wrong device" if len(places) > 1 else "failure"
            self._watch.stop(kind or ending, str(func), error)
            raise
        if kind is not None:
            self._watch.note(kind, str(func))
        elif _works_on_cpu(func, (args, kwargs, result)):
            self._watch.note("work on the CPU", str(func))
        return result

    def _run(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is aten._local_scalar_dense.default:
            return 0.0 if args[0].is_floating_point() else 0
        if not kwargs.get("pin_memory"):
            return func(*args, **kwargs)
        result = func(*args, **{**kwargs, "pin_memory": False})
        self._driver.pin(result)
        return result


def hidden_wait(
    func: OpOverload, args: Sequence[Any], kwargs: Arguments, is_pinned: Callable[[Tensor], bool]
) -> Kind | None:
    """How an operator makes the host wait; None if it does not."""
    packet = func.overloadpacket
    if packet is aten._to_copy:
        return _wait_of_move(args[0], kwargs, is_pinned)
    if not any(map(is_on_device, tensors_in((args, kwargs)))):
        return None
    if packet is aten.copy_:
        target, source, *rest = args
        by_itself = rest[0] if rest else kwargs.get("non_blocking", False)
        return _wait_of_copy(target, source, is_pinned, by_itself=by_itself)
    if packet in _CHOOSING:
        return _wait_of_indexing(args)
    if torch.Tag.data_dependent_output in func.tags:
        return "value read"
    return "size from values" if torch.Tag.dynamic_output_shape in func.tags else None


def tensors_in(given: Any) -> Iterator[Tensor]:
    """All tensors in nested arguments or results."""
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, Mapping):
        yield from tensors_in(tuple(given.values()))
    elif isinstance(given, list | tuple):
        for one in given:
            yield from tensors_in(one)


@cache
def _consists_of_others(func: OpOverload) -> bool:
    """Whether torch replaces an operator by others on every device."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def _wait_of_copy(
    target: Tensor, source: Tensor, is_pinned: Callable[[Tensor], bool], *, by_itself: bool
) -> Kind | None:
    if is_on_device(target) == is_on_device(source):
        return None
    on_host = source if is_on_device(target) else target
    if not by_itself:
        return "blocking copy"
    return None if is_pinned(on_host) and on_host.is_contiguous() else "unpinned copy"


def _wait_of_move(
    source: Tensor, kwargs: Arguments, is_pinned: Callable[[Tensor], bool]
) -> Kind | None:
    wanted = kwargs.get("device")
    if wanted is None or (wanted.type in _ELSEWHERE) != is_on_device(source):
        return None
    if not kwargs.get("non_blocking", False):
        return "blocking copy"
    if wanted.type == "cpu":
        # Torch makes pinned memory for the copy's result.
        return "memory pinned"
    return None if is_pinned(source) and source.is_contiguous() else "unpinned copy"


def _wait_of_indexing(args: Sequence[Any]) -> Kind | None:
    """Indexing with tensors: a mask needs sizes from values, an index on the CPU is copied."""
    indices = [index for index in args[1] if index is not None]
    if not all(is_on_device(index) for index in indices):
        return "blocking copy"
    fills = len(args) > 2 and args[2].numel() == 1 and args[2].device.type == "cpu"
    masks = any(index.dtype in (torch.bool, torch.uint8) for index in indices)
    return "size from values" if masks and not (fills and not any(args[3:])) else None


def _works_on_cpu(func: OpOverload, given: Any) -> bool:
    if func.is_view or func.overloadpacket in _IDLE:
        return False
    return {tensor.device.type for tensor in tensors_in(given)} == {"cpu"}


def is_on_device(tensor: Tensor) -> bool:
    """Whether a tensor is on the stand-in for a GPU."""
    return tensor.device.type not in _ELSEWHERE
