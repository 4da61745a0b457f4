"""Records the operators of a model's forward and backward pass, and the module of each."""

import bisect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from mistlab.graph.graph import Kind, Phase
from runtime.models.ranks import Size
from runtime.tracing.symbolic_sizes import SizeSpace, refusal, running_place
from runtime.tracing.traced_operators import (
    TracedCall,
    flop_of,
    key_of,
    kind_of,
    read_bytes,
    written_bytes,
)

# Finds the module that an operator belongs to, in the forward and in the backward pass.


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


# Records every operator of a running model, and the memory that is alive while it runs.
#
# Bytes are counted by storage, not by tensor: views share a storage. A storage is gone when its
# last tensor is gone, exactly as in eager execution.


@dataclass(slots=True)
class Storage:
    """A piece of memory in the trace, and the layer that it counts for.

    ``kept_by`` is the module that first kept it for the backward pass, if one did.
    """

    reference: StorageWeakRef
    owner: str
    size_bytes: Size
    shape: tuple[Size, ...]
    dtype: torch.dtype
    is_input: bool = False
    kept_by: str | None = None


@dataclass(frozen=True, slots=True)
class RecordedOperator:
    """One operator of the trace; ``alive`` has the sizes of its layer's living storages."""

    layer: str
    phase: Phase
    module: str
    name: str
    kind: Kind
    dtype: torch.dtype
    inputs: tuple[tuple[Size, ...], ...]
    outputs: tuple[tuple[Size, ...], ...]
    flop: Size
    read_bytes: Size
    written_bytes: Size
    alive: tuple[Size, ...]


class OperatorRecorder(TorchDispatchMode):
    """A dispatch mode that records the operators of a model that runs under it.

    The code that runs the model sets ``layer`` and ``phase`` on the way. ``constants`` are tensors
    that are no activations: parameters, their gradients and buffers.
    """

    def __init__(self, space: SizeSpace, paths: ModulePaths, constants: Iterable[Tensor]) -> None:
        super().__init__()
        self.layer = ""
        self.phase: Phase = "forward"
        self.steps: list[RecordedOperator] = []
        self.storages: dict[int, Storage] = {}
        self._space = space
        self._paths = paths
        # The weak references also keep the addresses of storages from being used again.
        self._constants = {
            key_of(tensor): StorageWeakRef(tensor.untyped_storage()) for tensor in constants
        }

    def adopt(self, tensor: Tensor) -> None:
        """Count a tensor that another layer made for this layer.

        It is the layer's input in the forward pass, its output's gradient in the backward pass.
        """
        storage = self._note(tensor)
        if storage is not None:
            storage.owner = self.layer
            storage.is_input = self.phase == "forward"

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within the ``with`` block, record operators and the tensors kept for backward."""
        saved = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor)
        with self, self._paths.following(), saved:
            yield

    def __torch_dispatch__(
        self,
        operator: OpOverload,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operator and record it."""
        call = TracedCall(operator, args, kwargs or {}, None)
        path = self._paths.forward_path if self.phase == "forward" else self._paths.backward_path
        module = path()
        try:
            result = operator(*args, **(kwargs or {}))
        except Exception as error:
            raise refusal(call.name, module, error) from error
        if self._space.replacements:
            self._space.refuse_fixed(f"operator {call.name}", running_place())
        self._record(replace(call, result=result), module)
        return result

    def _record(self, call: TracedCall, module: str) -> None:
        for tensor in call.outputs:
            self._note(tensor)
        if not call.works:
            return
        dtypes = [tensor.dtype for tensor in (*call.outputs, *call.inputs)]
        self.steps.append(
            RecordedOperator(
                layer=self.layer,
                phase=self.phase,
                module=module,
                name=call.name,
                kind="accumulate" if self._accumulates(call) else kind_of(call),
                dtype=next((x for x in dtypes if x.is_floating_point), dtypes[0]),
                inputs=tuple(tuple(tensor.shape) for tensor in call.inputs),
                outputs=tuple(tuple(tensor.shape) for tensor in call.outputs),
                flop=flop_of(call),
                read_bytes=read_bytes(call),
                written_bytes=written_bytes(call),
                alive=self._alive(),
            )
        )

    def _accumulates(self, call: TracedCall) -> bool:
        into_constant = any(key_of(tensor) in self._constants for tensor in call.changed)
        return self.phase == "backward" and into_constant

    def _alive(self) -> tuple[Size, ...]:
        mine = (x for x in self.storages.values() if x.owner == self.layer)
        return tuple(x.size_bytes for x in mine if not x.reference.expired())

    def _keep(self, tensor: Tensor) -> Tensor:
        storage = self._note(tensor)
        if storage is not None and storage.kept_by is None:
            storage.kept_by = self._paths.running
        return tensor

    def _note(self, tensor: Tensor) -> Storage | None:
        key = key_of(tensor)
        if key in self._constants:
            return None
        if key not in self.storages:
            storage = tensor.untyped_storage()
            self.storages[key] = Storage(
                reference=StorageWeakRef(storage),
                owner=self.layer,
                size_bytes=storage.nbytes(),
                shape=tuple(tensor.shape),
                dtype=tensor.dtype,
            )
        return self.storages[key]
