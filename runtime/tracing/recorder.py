"""Records every operator of a running model, and the memory that is alive while it runs.

Bytes are counted by storage, not by tensor: views share a storage. A storage is gone when its last
tensor is gone, exactly as in eager execution.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from mistlab.symbolic.graph import Kind, Phase
from runtime.models.sizes import Size
from runtime.sizes import SizeSpace
from runtime.tracing.errors import refusal, running_place
from runtime.tracing.modules import ModulePaths
from runtime.tracing.operators import Call, flop_of, key_of, kind_of, read_bytes, written_bytes


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
class Step:
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


class Recorder(TorchDispatchMode):
    """A dispatch mode that records the operators of a model that runs under it.

    The code that runs the model sets ``layer`` and ``phase`` on the way. ``constants`` are tensors
    that are no activations: parameters, their gradients and buffers.
    """

    def __init__(self, space: SizeSpace, paths: ModulePaths, constants: Iterable[Tensor]) -> None:
        super().__init__()
        self.layer = ""
        self.phase: Phase = "forward"
        self.steps: list[Step] = []
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
        call = Call(operator, args, kwargs or {}, None)
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

    def _record(self, call: Call, module: str) -> None:
        for tensor in call.outputs:
            self._note(tensor)
        if not call.works:
            return
        dtypes = [tensor.dtype for tensor in (*call.outputs, *call.inputs)]
        self.steps.append(
            Step(
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

    def _accumulates(self, call: Call) -> bool:
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
