"""Makes a stand-in device behave like CUDA where torch treats other makers' devices differently.

On CUDA torch makes a tensor on the CPU first, when a number is assigned to an element and when a
tensor is made from numbers. And a tensor's ``is_cuda`` is true.
"""

from collections.abc import Callable, Mapping
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from runtime.checks.fake.hidden_waits import is_on_device
from runtime.checks.fake.watch import Watch

Way = Callable[[Watch, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class CudaWays(TorchFunctionMode):
    """A mode in which torch treats all devices but the CPU as CUDA devices."""

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
        """Call a function of torch, the way that it works on CUDA."""
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
    """``tensor[index]``: a list of numbers as index becomes a tensor on the CPU."""
    tensor, index, *value = args
    parts = index if isinstance(index, tuple) else (index,)
    parts = tuple(torch.tensor(part) if isinstance(part, list) else part for part in parts)
    return func(tensor, parts, *value, **kwargs)


def _set_item(
    watch: Watch, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``tensor[index] = value``: one element copies a number, several elements are filled."""
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
    """A tensor from numbers is made on the CPU and copied to its device."""
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
    """Whether an index consists of numbers and slices, so that its elements are a view."""
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
