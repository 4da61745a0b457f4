"""Runs Megatron-core on CPUs, although its code names CUDA devices.

Within ``on_cpu`` tensors for CUDA devices are made on the CPU, the random state of a GPU is the
CPU's, and waiting for a GPU does nothing. Functions of torch are replaced one by one, because
torch's modes are not active in backward passes.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch

_CPU = torch.device("cpu")


def _device(value: Any) -> Any:
    """The CPU in place of a CUDA device; any other value as it is."""
    if isinstance(value, torch.device) and value.type == "cuda":
        return _CPU
    return _CPU if isinstance(value, str) and value.startswith("cuda") else value


def _sent_to_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """A torch function whose CUDA device arguments are replaced by the CPU."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        named = {name: _device(value) for name, value in kwargs.items()}
        return function(*map(_device, args), **named)

    return call


def _type(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """The type name that a tensor would have on a GPU, which Megatron-core uses to group
    parameters.
    """
    type_name = _TYPE(tensor, *args, **kwargs)
    return type_name.replace("torch.", "torch.cuda.") if isinstance(type_name, str) else type_name


def _nothing(*_: Any, **__: Any) -> None:
    pass


_TYPE = torch.Tensor.type
# Functions of torch that make tensors on a device given as an argument.
_MAKERS = ("arange", "empty", "full", "ones", "rand", "randn", "tensor", "zeros")

# Functions of torch.cuda, each with its replacement on a CPU.
_PATCHES: Mapping[str, Callable[..., Any]] = {
    "current_device": lambda: _CPU,
    "synchronize": _nothing,
    "manual_seed": torch.manual_seed,
    "get_rng_state": lambda *_: torch.get_rng_state(),
    "set_rng_state": lambda state, *_: torch.set_rng_state(state),
    "current_stream": _nothing,
    "stream": lambda *_: nullcontext(),
    "empty_cache": _nothing,
}


@contextmanager
def on_cpu() -> Iterator[None]:
    """Within the ``with`` block, every CUDA device becomes the CPU."""
    from megatron.core.tensor_parallel import random  # noqa: PLC0415 (its package)

    with ExitStack() as stack:
        stack.enter_context(patch.object(torch._dynamo.config, "disable", True))
        for name, stand_in in _PATCHES.items():
            stack.enter_context(patch.object(torch.cuda, name, stand_in))
        states = {
            "_get_cuda_rng_state": lambda *_, **__: torch.get_rng_state(),
            "_set_cuda_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
        }
        for name, state in states.items():
            stack.enter_context(patch.object(random, name, state))
        for name in _MAKERS:
            stack.enter_context(patch.object(torch, name, _sent_to_cpu(getattr(torch, name))))
        of_tensors = {
            "cuda": lambda tensor, *_, **__: tensor,
            "to": _sent_to_cpu(torch.Tensor.to),
            "type": _type,
        }
        for name, method in of_tensors.items():
            stack.enter_context(patch.object(torch.Tensor, name, method))
        yield
