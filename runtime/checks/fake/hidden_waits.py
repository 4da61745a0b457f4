"""Detects operators that make the host wait for a GPU although their names do not say so.

The rules are those of torch's operators on CUDA. The host waits for a number that it reads, and for
a size that depends on values. It also waits for a copy between device and host, unless the copy is
``non_blocking`` and the host memory is pinned and contiguous.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from runtime.checks.fake.fake_driver import FakeDriver
from runtime.checks.fake.watch import Kind, Watch
from runtime.models import operators, residuals

aten = torch.ops.aten
# Kinds of devices that do not stand in for a GPU.
_ELSEWHERE = ("cpu", "meta")
Arguments = Mapping[str, Any]
# Operators that neither compute nor move data; below, operators that copy, and that select
# elements.
_IDLE = (aten.lift_fresh, aten.lift, aten.set_)
_COPYING = (aten.copy_, aten._foreach_copy_)
_CHOOSING = (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_)


class HiddenWaits(TorchDispatchMode):
    """A dispatch mode that reports operators which make the host wait; a fake-tensor mode must be
    active around it.

    A number that the host reads is 0. For an operator composed of other operators, such as the
    project's own, the other operators are checked. torch leaves the mode ``ways`` before it calls
    this mode, so ``ways`` is entered again for them.
    """

    def __init__(
        self, driver: FakeDriver, watch: Watch, ways: AbstractContextManager[object]
    ) -> None:
        super().__init__()
        self._driver, self._watch, self._ways = driver, watch, ways
        self._bodies: dict[OpOverload, Callable[..., Any]] = {
            made._opoverload: made._init_fn
            for value in (*vars(operators).values(), *vars(residuals).values())
            if isinstance(made := getattr(value, "operator", None), CustomOpDef)
        }

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Look for a hidden wait in an operator, then run the operator."""
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
        if func is aten._fused_adamw_.tensor_lr:
            # torch would reject a stand-in tensor as the learning rate of a fused optimizer step.
            assert is_on_device(kwargs["lr"])
            return aten._fused_adamw_.default(*args, **{**kwargs, "lr": 0.0})
        if not kwargs.get("pin_memory"):
            return func(*args, **kwargs)
        result = func(*args, **{**kwargs, "pin_memory": False})
        self._driver.pin(result)
        return result


def hidden_wait(
    func: OpOverload, args: Sequence[Any], kwargs: Arguments, is_pinned: Callable[[Tensor], bool]
) -> Kind | None:
    """How an operator makes the host wait for the GPU; None if it does not."""
    packet = func.overloadpacket
    if packet is aten._to_copy:
        return _wait_of_move(args[0], kwargs, is_pinned)
    if not any(map(is_on_device, tensors_in((args, kwargs)))):
        return None
    if packet in _COPYING:
        targets, sources, *rest = args
        by_itself = rest[0] if rest else kwargs.get("non_blocking", False)
        pairs = zip(tensors_in(targets), tensors_in(sources), strict=True)
        waits = (_wait_of_copy(*pair, is_pinned, by_itself=by_itself) for pair in pairs)
        return next((wait for wait in waits if wait is not None), None)
    if packet in _CHOOSING:
        return _wait_of_indexing(args)
    if torch.Tag.data_dependent_output in func.tags:
        return "value read"
    return "size from values" if torch.Tag.dynamic_output_shape in func.tags else None


def tensors_in(given: Any) -> Iterator[Tensor]:
    """All tensors in nested lists, tuples and mappings of arguments or results."""
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, Mapping):
        yield from tensors_in(tuple(given.values()))
    elif isinstance(given, list | tuple):
        for item in given:
            yield from tensors_in(item)


@cache
def _consists_of_others(func: OpOverload) -> bool:
    """Whether torch decomposes an operator into other operators on every device; then those
    operators are checked.
    """
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
        # For this operator torch allocates pinned memory for the result.
        return "memory pinned"
    return None if is_pinned(source) and source.is_contiguous() else "unpinned copy"


def _wait_of_indexing(args: Sequence[Any]) -> Kind | None:
    """How indexing by tensors makes the host wait, if it does: by a mask, whose values decide the
    result's size, or by an index on the CPU, which must be copied.
    """
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


# Makes a stand-in device behave like CUDA where torch treats devices that are not built in
# differently.
#
# On CUDA, torch makes a CPU tensor first when a number is assigned to an element, or a tensor is
# made from numbers; and a tensor's ``is_cuda`` is true.


Way = Callable[[Watch, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class CudaWays(TorchFunctionMode):
    """A mode in which torch treats every device except the CPU as a CUDA device."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call a torch function so that it behaves as on CUDA."""
        way = _WAYS.get(func, _call)
        try:
            return way(self._watch, func, args, kwargs or {})
        except NotImplementedError as error:
            self._watch.stop("failure", getattr(func, "__name__", str(func)), error)
            raise


def _call(
    _watch: Watch, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    return func(*args, **kwargs)


def _get_item(
    _watch: Watch, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``tensor[index]`` as on CUDA, where an index given as a list of numbers becomes a CPU
    tensor.
    """
    tensor, index, *value = args
    parts = index if isinstance(index, tuple) else (index,)
    parts = tuple(torch.tensor(part) if isinstance(part, list) else part for part in parts)
    return func(tensor, parts, *value, **kwargs)


def _set_item(
    watch: Watch, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``tensor[index] = value`` as on CUDA: a number for one element is copied from the host, for
    several elements it is filled in.
    """
    tensor, index, value = args
    is_number = not isinstance(value, Tensor) and is_on_device(tensor)
    if is_number and isinstance(index, Tensor) and index.dtype is torch.bool:
        return tensor.masked_fill_(index, value)
    if not is_number or not _is_plain(index):
        return _get_item(watch, func, args, kwargs)
    elements = tensor[index]
    if elements.dim() == 0:
        watch.note("scalar copied", "Tensor.__setitem__")
    return elements.fill_(value)


def _make_tensor(
    watch: Watch, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """A tensor from numbers as on CUDA: made on the CPU, and then copied to the device."""
    device = kwargs.get("device")
    if func is Tensor.new_tensor and device is None:
        device = args[0].device
    goes = device is not None and torch.device(device).type != "cpu"
    if not goes or isinstance(args[-1], Tensor):
        return func(*args, **kwargs)
    watch.note("blocking copy", f"{func.__name__}(..., device=)")
    on_host = func(*args, **{**kwargs, "device": "cpu"})
    return torch.empty(on_host.shape, dtype=on_host.dtype, device=device)


def _is_cuda(
    _watch: Watch, _func: Callable[..., Any], args: tuple[Any, ...], _kwargs: dict[str, Any]
) -> bool:
    return is_on_device(args[0])


def _is_plain(index: Any) -> bool:
    """Whether an index has only numbers and slices, so that its elements form a view."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(
        isinstance(part, int | slice | EllipsisType) and not isinstance(part, bool)
        for part in parts
    )


_WAYS: Mapping[Any, Way] = {
    Tensor.__getitem__: _get_item,
    Tensor.__setitem__: _set_item,
    torch.tensor: _make_tensor,
    torch.as_tensor: _make_tensor,
    Tensor.new_tensor: _make_tensor,
    Tensor.is_cuda.__get__: _is_cuda,  # type: ignore[attr-defined]
}
