"""Traces the layers of a torch model into layer graphs, with expressions for sizes."""

import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from mistlab.graph.graph import (
    PHASES,
    Condition,
    Kind,
    LayerGraph,
    ModelGraph,
    Operator,
    Parameter,
    Peak,
    Phase,
    SavedTensor,
    Shape,
)
from mistlab.graph.sums import undominated
from runtime.models.ranks import Size
from runtime.tracing.symbolic_sizes import (
    SizeSpace,
    TraceError,
    assumptions_of,
    conditions_of,
    expression_of,
    refusal,
    running_place,
)
from runtime.tracing.traced_operators import (
    TracedCall,
    flop_of,
    key_of,
    kind_of,
    read_bytes,
    written_bytes,
)

# Finds the module to which an operator belongs, in the forward and in the backward pass.


class ModulePaths:
    """Tracks which modules of a model are running.

    An operator of the backward pass belongs to the module whose forward pass created its autograd
    node. Autograd numbers nodes in the order of creation, so the number at each forward operator is
    recorded.
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
        """Within the ``with`` block, track the innermost module whose forward pass runs."""
        entering = register_module_forward_pre_hook(self._enter)
        leaving = register_module_forward_hook(self._leave)
        try:
            yield
        finally:
            entering.remove()
            leaving.remove()

    @property
    def running(self) -> str:
        """The path of the innermost module whose forward is running."""
        return self._stack[-1]

    def forward_path(self) -> str:
        """The path of the innermost running module; it is also recorded for the operator's backward
        pass.
        """
        self._numbers.append(torch._C._autograd._get_sequence_nr())
        self._paths.append(self.running)
        return self.running

    def backward_path(self) -> str:
        """The path of the module whose forward pass created the autograd node that is running."""
        node = torch._C._current_autograd_node()
        if node is None:
            return ""
        if node.name() == "torch::autograd::AccumulateGrad":
            return self._owner.get(id(node.variable), "")  # type: ignore[attr-defined]
        # An autograd node is created just before its operator runs, so the operator's number is
        # higher by 1.
        index = bisect.bisect_right(self._numbers, node._sequence_nr())
        return self._paths[index] if index < len(self._paths) else ""

    def _enter(self, module: nn.Module, _inputs: Any) -> None:
        self._stack.append(self._names.get(module, self.running))

    def _leave(self, _module: nn.Module, _inputs: Any, _output: Any) -> None:
        self._stack.pop()


# Records each operator of a running model, and the memory that is allocated while it runs.
#
# Bytes are counted by storage, not by tensor, since views share a storage. A storage is freed with
# its last tensor, as in eager execution.


@dataclass(slots=True)
class Storage:
    """A storage (the memory of one or more tensors) in the trace, and the layer for which it
    counts.

    ``kept_by`` is the first module that saved it for the backward pass, if any did.
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
    """An operator in the trace; ``alive`` has the sizes of all storages of its layer that are
    allocated while it runs.
    """

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
    """A dispatch mode that records the operators of a model.

    The code that runs the model sets ``layer`` and ``phase`` as it goes. ``constants`` are tensors
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
        # The storages of constants. Weak references to them also keep their addresses from being
        # reused.
        self._constants = {
            key_of(tensor): StorageWeakRef(tensor.untyped_storage()) for tensor in constants
        }

    def adopt(self, tensor: Tensor) -> None:
        """Count a tensor that another layer made for this layer.

        In the forward pass it is this layer's input, in the backward pass its output's gradient.
        """
        storage = self._note(tensor)
        if storage is not None:
            storage.owner = self.layer
            storage.is_input = self.phase == "forward"

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within the ``with`` block, record operators and the tensors that autograd keeps."""
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


# Turns the recorded operators of a layer into a layer graph with expressions for sizes.


def layer_graph(
    layer: str,
    recorder: OperatorRecorder,
    parameters: Iterable[tuple[str, nn.Parameter]],
    output: Size,
) -> LayerGraph:
    """The layer graph of a traced layer; ``output`` is the size of the layer's output in bytes."""
    steps = [step for step in recorder.steps if step.layer == layer]
    storages = [x for x in recorder.storages.values() if x.owner == layer]
    inputs = [expression_of(x.size_bytes) for x in storages if x.is_input]
    return LayerGraph(
        name=layer,
        operators=tuple(map(_operator, steps)),
        saved=tuple(_saved(x) for x in storages if x.kept_by is not None),
        parameters=tuple(Parameter(name=n, shape=_shape(p.shape)) for n, p in parameters),
        peaks=tuple(peak for phase in PHASES for peak in _peaks(phase, steps)),
        input_bytes=sympy.Add(*inputs),
        output_bytes=expression_of(output),
    )


def _operator(step: RecordedOperator) -> Operator:
    return Operator(
        name=step.name,
        kind=step.kind,
        phase=step.phase,
        module=step.module,
        dtype=_name(step.dtype),
        inputs=tuple(map(_shape, step.inputs)),
        outputs=tuple(map(_shape, step.outputs)),
        flop=expression_of(step.flop),
        read_bytes=expression_of(step.read_bytes),
        written_bytes=expression_of(step.written_bytes),
    )


def _saved(storage: Storage) -> SavedTensor:
    return SavedTensor(
        module=storage.kept_by or "",
        shape=_shape(storage.shape),
        dtype=_name(storage.dtype),
        size_bytes=expression_of(storage.size_bytes),
        is_input=storage.is_input,
    )


def _peaks(phase: Phase, steps: Sequence[RecordedOperator]) -> list[Peak]:
    candidates = (
        Peak(
            phase=phase,
            operator=step.name,
            size_bytes=sympy.Add(*map(expression_of, step.alive)),
        )
        for step in steps
        if step.phase == phase
    )
    return undominated(candidates, lambda peak: peak.size_bytes)


def _shape(sizes: Iterable[Size]) -> Shape:
    return tuple(map(expression_of, sizes))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# Divides a model into embedding, block and head, and runs each part's forward and backward pass
# separately.
#
# The model is divided while it runs: the block's input and output are detached. Each part then has
# its own autograd graph, as when a plan is executed.


EMBEDDING, BLOCK, HEAD = "embedding", "block", "head"


def find_blocks(model: nn.Module, path: str | None = None) -> str:
    """The path of a model's list of blocks: ``path`` if it is given, otherwise the longest list of
    modules.
    """
    lists = {name: m for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and m}
    if path is not None and path not in lists:
        known = f"give one of {', '.join(lists)}" if lists else "leave --blocks out"
        message = f"--blocks {path}: the model has no torch.nn.ModuleList of this name: {known}"
        raise TraceError(message)
    if not lists:
        message = (
            "the model has no torch.nn.ModuleList of blocks: keep its repeated layers in one, so "
            "that embedding, block and head can be told apart"
        )
        raise TraceError(message)
    chosen = path or max(lists, key=lambda name: sum(1 for _ in lists[name].parameters()))
    _refuse_unlike(chosen, lists[chosen])
    return chosen


def keep_one(model: nn.Module, path: str) -> nn.Module:
    """Keep only the first block of the list of blocks, in place, and return this block."""
    parent, _, name = path.rpartition(".")
    block = model.get_submodule(path)[0]  # type: ignore[index]
    setattr(model.get_submodule(parent), name, nn.ModuleList([block]))
    return block  # type: ignore[no-any-return]


class TracedLayer:
    """Runs a model with one block under a recorder: the forward pass, then backward layer by
    layer.
    """

    def __init__(self, block: nn.Module, recorder: OperatorRecorder) -> None:
        self._block = block
        self._recorder = recorder
        self._edges: dict[str, GradientEdge] = {}
        self._inputs: dict[str, Tensor] = {}
        self.handed_on: dict[str, Size] = {}

    def forward_and_backward(self, loss_of: Callable[[], Tensor]) -> None:
        """Run the whole model once; ``loss_of`` calls the model and returns a scalar loss."""
        recorder = self._recorder
        entering = self._block.register_forward_pre_hook(self._enter_block, with_kwargs=True)
        leaving = self._block.register_forward_hook(self._leave_block)
        try:
            with recorder.watching():
                recorder.layer = EMBEDDING
                loss = loss_of()
                self.handed_on[HEAD] = loss.untyped_storage().nbytes()
                if HEAD not in self._inputs:
                    message = (
                        "the model's forward does not call its blocks, so that there is nothing to "
                        "trace: call them in forward, or name another list of blocks by --blocks"
                    )
                    raise TraceError(message)
                recorder.phase = "backward"
                torch.autograd.backward(loss)
                del loss
                self._backward(BLOCK, self._inputs.pop(HEAD))
                self._backward(EMBEDDING, self._inputs.pop(BLOCK))
        finally:
            entering.remove()
            leaving.remove()

    def _backward(self, layer: str, output: Tensor) -> None:
        gradient, output.grad = output.grad, None
        del output
        assert gradient is not None
        self._recorder.layer = layer
        self._recorder.adopt(gradient)
        torch.autograd.backward((self._edges.pop(layer),), (gradient,))

    def _enter_block(self, _module: nn.Module, args: Any, kwargs: Any) -> Any:
        return self._cut((args, kwargs), EMBEDDING, BLOCK)

    def _leave_block(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        return self._cut(output, BLOCK, HEAD)

    def _cut(self, values: Any, before: str, after: str) -> Any:
        leaves, structure = tree_flatten(values)
        index = next((i for i, x in enumerate(leaves) if _carries_gradient(x)), None)
        if index is None:
            message = (
                f"no tensor with a gradient passes from the model's {before} to its {after}: pass "
                "hidden states on without detach() or torch.no_grad()"
            )
            raise TraceError(message)
        self.handed_on[before] = leaves[index].untyped_storage().nbytes()
        self._edges[before] = get_gradient_edge(leaves[index])
        leaves[index] = leaves[index].detach().requires_grad_()
        self._inputs[after] = leaves[index]
        self._recorder.layer = after
        self._recorder.adopt(leaves[index])
        return tree_unflatten(leaves, structure)


def _carries_gradient(value: object) -> bool:
    return isinstance(value, Tensor) and value.requires_grad and value.grad_fn is not None


def _refuse_unlike(path: str, blocks: nn.ModuleList) -> None:
    def shapes(block: nn.Module) -> list[tuple[str, str]]:
        return [(name, str(tuple(p.shape))) for name, p in block.named_parameters()]

    first = shapes(blocks[0])
    for number, block in enumerate(blocks):
        if shapes(block) != first:
            message = (
                f"block {number} of {path} has parameters of other names or shapes than block 0, "
                "but plans only count equal blocks: trace a model whose blocks are alike"
            )
            raise TraceError(message)


def differing_settings(blocks: nn.ModuleList) -> list[str]:
    """The names of plain attributes, such as ``attention.window``, in which the blocks differ.

    A layer's own number is left out.
    """
    first = _settings(blocks[0])
    others = [_settings(block) for block in blocks]
    names = {name for other in others for name in first if other.get(name) != first[name]}
    return sorted(name for name in names if not name.endswith(("layer_idx", "layer_number")))


def _settings(block: nn.Module) -> dict[str, object]:
    return {
        f"{path}.{name}".lstrip("."): value
        for path, module in block.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, int | float | str | None) and not name.startswith("_")
    }


# Traces one training step of a torch model, and derives graphs of its layers.


def trace(
    model: nn.Module,
    space: SizeSpace,
    loss_of: Callable[[nn.Module], Tensor],
    *,
    name: str,
    attention: str,
    precision: str,
    blocks: str | None = None,
) -> ModelGraph:
    """The layer graphs of a model whose sizes are symbols of ``space``; only the first of its
    blocks is kept and traced.

    ``loss_of`` runs the model and returns its scalar loss. ``blocks`` is the path of the list of
    blocks; without it the longest list is taken.
    """
    path = find_blocks(model, blocks)
    block = keep_one(model, path)
    model.train()
    constants = [*model.parameters(), *model.buffers()]
    with space.fake_mode, torch.no_grad():
        for parameter in model.parameters():
            # Parameters get gradients first, so that the traced micro-batch adds to them, like
            # every micro-batch except the first.
            parameter.grad = torch.zeros_like(parameter)
            constants.append(parameter.grad)
    names = {module: _name_in_block(path, name) for name, module in model.named_modules()}
    recorder = OperatorRecorder(space, ModulePaths(names), constants)
    run = TracedLayer(block, recorder)
    with space.fake_mode, enable_python_dispatcher(), AsOnGPU():
        run.forward_and_backward(lambda: loss_of(model))
    space.refuse_fixed("the model's own code")

    parameters = _parameters_of(model, path, recorder)

    def graph_of(layer: str) -> LayerGraph:
        return layer_graph(layer, recorder, parameters[layer], run.handed_on[layer])

    return ModelGraph(
        name=name,
        attention=attention,
        precision=precision,
        embedding=graph_of(EMBEDDING),
        block=graph_of(BLOCK),
        head=graph_of(HEAD),
        conditions=tuple(Condition(size=s, divisor=d) for s, d in conditions_of(space)),
        assumptions=tuple(assumptions_of(space)),
    )


class AsOnGPU(TorchFunctionMode):
    """A mode in which causal attention runs as the fused operator even with dropout, as on a GPU.

    On a CPU torch runs unfused attention if there is dropout. The fused operator saves the same
    tensors with and without dropout, because it draws the mask again from a seed.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a torch function; attention is called without dropout."""
        options = dict(kwargs or {})
        if func is scaled_dot_product_attention:
            args = args[:4]
            options.pop("dropout_p", None)
        return func(*args, **options)


def _name_in_block(path: str, name: str) -> str:
    block = f"{path}.0"
    return name.removeprefix(block).lstrip(".") if name.startswith(block) else name


def _parameters_of(
    model: nn.Module, path: str, recorder: OperatorRecorder
) -> dict[str, list[tuple[str, nn.Parameter]]]:
    """The parameters of each layer. A parameter outside the block counts for the first layer that
    uses it.
    """
    by_layer: dict[str, list[tuple[str, nn.Parameter]]] = {EMBEDDING: [], BLOCK: [], HEAD: []}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name.startswith(f"{path}.0."):
            by_layer[BLOCK].append((name.removeprefix(f"{path}.0."), parameter))
            continue
        layer = _layer_using(name.rpartition(".")[0], recorder)
        by_layer[layer].append((name, parameter))
    return by_layer


def _layer_using(module: str, recorder: OperatorRecorder) -> str:
    for step in recorder.steps:
        if step.phase == "forward" and f"{step.module}.".startswith(f"{module}."):
            return step.layer
    return HEAD
