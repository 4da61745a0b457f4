"""Finds the module that an operator belongs to, in the forward and in the backward pass."""

import bisect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook


class ModulePaths:
    """Follows the calls of a model's modules.

    An operator of the backward pass belongs to the module whose forward made its autograd node.
    Autograd numbers nodes in order of creation. For each forward operator the number at the time of
    its call is noted.
    """

    def __init__(self, names: Mapping[nn.Module, str]) -> None:
        self._names = names
        self._owner = {
            id(parameter): name
            for module, name in names.items()
            for parameter in module.parameters(recurse=False)
        }
        self._stack: list[str] = [""]
        self._numbers: list[int] = []
        self._paths: list[str] = []

    @contextmanager
    def following(self) -> Iterator[None]:
        """Within the ``with`` block, keep track of the innermost module whose forward runs."""
        entering = register_module_forward_pre_hook(self._enter)
        leaving = register_module_forward_hook(self._leave)
        try:
            yield
        finally:
            entering.remove()
            leaving.remove()

    @property
    def running(self) -> str:
        """The path of the innermost running module."""
        return self._stack[-1]

    def forward_path(self) -> str:
        """The path of the innermost running module; it is noted for the backward pass."""
        self._numbers.append(torch._C._autograd._get_sequence_nr())
        self._paths.append(self.running)
        return self.running

    def backward_path(self) -> str:
        """The path of the module whose forward made the autograd node that is running."""
        node = torch._C._current_autograd_node()
        if node is None:
            return ""
        if node.name() == "torch::autograd::AccumulateGrad":
            return self._owner.get(id(node.variable), "")  # type: ignore[attr-defined]
        # A node is made just before its operator runs, so the operator's noted number is one more.
        place = bisect.bisect_right(self._numbers, node._sequence_nr())
        return self._paths[place] if place < len(self._paths) else ""

    def _enter(self, module: nn.Module, _inputs: Any) -> None:
        self._stack.append(self._names.get(module, self.running))

    def _leave(self, _module: nn.Module, _inputs: Any, _output: Any) -> None:
        self._stack.pop()
