"""The layers of a user's own model: the part before its blocks, each block, and the part after
them.

The user's code is one function, which is run for one layer at a time. The part before the blocks
ends at the call of the first block; the part after them begins where the last block returns. Blocks
that are not to run are replaced by functions that return given values. So code between blocks, and
arguments of blocks besides the hidden states, must not depend on tokens or parameters; two runs at
the start check this.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_leaves, tree_map

from mistlab.core.values import InputError, reject
from mistlab.plan.workload import Workload
from runtime.engine.work.stage_modules import HOST, LayerModule
from runtime.models.config import TYPE_OF_PRECISION

# Where the hidden states are among the arguments of a call: an index, or a name.
Place = int | str
_FACTORIES = Lock()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OwnLayer(LayerModule):
    """A layer of a user's own model. Its ``first`` weights are those that the user's code drew;
    once the runtime has copied them, they are dropped.
    """

    first: dict[str, Tensor]

    def initial(self, seed: int, *, tied: bool, device: torch.device = HOST) -> dict[str, Tensor]:
        """The initial weights of the layer, which the user's factory drew by the seed."""
        del seed, tied
        return {name: self.first.pop(name).to(device) for name in self.whole_shapes}


@dataclass(slots=True, kw_only=True, eq=False)
class BlockCall:
    """How the user's code calls a block: the arguments, and what the block returns besides hidden
    states.
    """

    arguments: tuple[Any, ...]
    named: dict[str, Any]
    place: Place
    returned: tuple[Any, ...] | None = None

    def hidden(self) -> Tensor:
        """The hidden states among the arguments of the call."""
        at = self.place
        states = self.arguments[at] if isinstance(at, int) else self.named[at]
        assert isinstance(states, Tensor)
        return states

    def of(self, block: nn.Module, x: Tensor) -> Tensor:
        """The block's output for the hidden states ``x``, with the other arguments of the call."""
        arguments, named = list(self.arguments), dict(self.named)
        if isinstance(self.place, int):
            arguments[self.place] = x
        else:
            named[self.place] = x
        made = block(*arguments, **named)
        return made if isinstance(made, Tensor) else made[0]

    def without_hidden(self) -> "BlockCall":
        """The call without its hidden states, so that it keeps less memory."""
        arguments = tuple(None if n == self.place else one for n, one in enumerate(self.arguments))
        named = {name: None if name == self.place else one for name, one in self.named.items()}
        return replace(self, arguments=arguments, named=named)

    def returning(self, x: Tensor) -> Any:
        """The hidden states ``x`` in the form in which the block returns them, with its further
        results.
        """
        return x if self.returned is None else (x, *self.returned)

    def others(self) -> list[Any]:
        """The arguments of the call except the hidden states."""
        of = [one for n, one in enumerate(self.arguments) if n != self.place]
        return [*of, *(one for name, one in self.named.items() if name != self.place)]


class _ReachedError(BaseException):
    """Raised to stop a model's forward pass at its first block."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.x = x


class PartedModel:
    """A user's model, run in three parts: before its blocks, the blocks, and after the blocks."""

    def __init__(self, model: nn.Module, path: str) -> None:
        self.model, self.path = model, path
        blocks = model.get_submodule(path)
        assert isinstance(blocks, nn.ModuleList)
        self.blocks = list(blocks)
        self.takes_targets = "targets" in inspect.signature(model.forward).parameters
        self.calls: list[BlockCall] = []
        # The modules with parameters that run before the blocks, and the shapes of their outputs.
        self.early: dict[str, torch.Size] = {}

    def before_blocks(self, tokens: Tensor) -> Tensor:
        """Run the model up to its first block; returns the hidden states that the block takes."""

        def stop(number: int, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
            raise _ReachedError(_called(number, arguments, named).hidden())

        with self._instead(stop):
            try:
                self._run(tokens, tokens)
            except _ReachedError as reached:
                return reached.x
        raise AssertionError

    def after_blocks(self, x: Tensor, targets: Tensor) -> Tensor:
        """Run the model after its last block; returns the loss."""
        learns, last = torch.is_grad_enabled(), len(self.blocks) - 1

        def hand_on(number: int, _: tuple[Any, ...], __: dict[str, Any]) -> Any:
            if number == last:
                # The part before the blocks ran without gradients, only for its shapes; from here
                # on gradients are recorded.
                torch.set_grad_enabled(learns)
            return self.calls[number].returning(x)

        with torch.set_grad_enabled(False), self._instead(hand_on), self._shapes_alone(x):
            try:
                return self._run(targets, targets)
            finally:
                torch.set_grad_enabled(False)

    def _run(self, tokens: Tensor, targets: Tensor) -> Tensor:
        output = self.model(tokens, **({"targets": targets} if self.takes_targets else {}))
        if not isinstance(output, Tensor):
            values = output.values() if isinstance(output, dict) else output
            floats = [v for v in values if isinstance(v, Tensor) and v.is_floating_point()]
            scalars = [one for one in floats if one.dim() == 0]
            output = scalars[0] if scalars else floats[0]
        if output.dim() == 0:
            return output
        return cross_entropy(output.flatten(0, 1).float(), targets.flatten())

    @contextmanager
    def _instead(self, run: Callable[..., Any]) -> Iterator[None]:
        """Within the ``with`` block, calls of each block run a function instead, which also gets
        the block's index.
        """
        for number, block in enumerate(self.blocks):
            block.__dict__["forward"] = _numbered(run, number)
        try:
            yield
        finally:
            for block in self.blocks:
                del block.__dict__["forward"]

    @contextmanager
    def _shapes_alone(self, x: Tensor) -> Iterator[None]:
        """Within the ``with`` block, modules before the blocks return tensors with shapes but no
        values, since their parameters may be on other stages.
        """
        nothing, modules = x.new_zeros(()), dict(self.model.named_modules())
        for name, shape in self.early.items():
            modules[name].__dict__["forward"] = _giving(nothing, shape)
        try:
            yield
        finally:
            for name in self.early:
                del modules[name].__dict__["forward"]

    def note_calls(self, tokens: Tensor) -> list[BlockCall]:
        """Run the model and record how its blocks are called; raises an error if there is code
        between blocks.
        """
        calls: list[BlockCall] = []
        made: list[Tensor] = []

        def note(number: int, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
            call = _called(number, arguments, named)
            if number != len(calls):
                reject(
                    f"workload.model: block {number} of {self.path} is not called exactly once and "
                    "in order: change the model's forward so that each block runs once"
                )
            if made and call.hidden() is not made[-1]:
                reject(
                    f"workload.model: block {number} of {self.path} does not take the output of "
                    f"block {number - 1}: move the code between the two into one of them"
                )
            block = self.blocks[number]
            output = type(block).forward(block, *arguments, **named)
            if not isinstance(output, Tensor):
                call.returned = tuple(output[1:])
            made.append(call.hidden().detach().clone())
            calls.append(call)
            return call.returning(made[-1])

        with torch.no_grad(), self._instead(note):
            self._run(tokens, tokens)
        return calls


def _giving(nothing: Tensor, shape: torch.Size) -> Callable[..., Tensor]:
    return lambda *_, **__: nothing.expand(shape)


def _numbered(run: Callable[..., Any], number: int) -> Callable[..., Any]:
    return lambda *arguments, **named: run(number, arguments, named)


def _called(number: int, arguments: tuple[Any, ...], named: dict[str, Any]) -> BlockCall:
    """A call of a block. The hidden states are its first argument that is a floating-point
    tensor.
    """
    given: list[tuple[Place, Any]] = [*enumerate(arguments), *named.items()]
    places = [place for place, one in given if isinstance(one, Tensor) and one.is_floating_point()]
    if not places:
        reject(
            f"workload.model: block {number} is called without a floating-point tensor: change the "
            "model's forward so that it passes the block its hidden states"
        )
    return BlockCall(arguments=arguments, named=named, place=places[0])


# Assigns each parameter of a user's model to a layer.


def own_shapes_of(workload: Workload) -> dict[str, tuple[int, ...]]:
    """The shapes of the parameters of a user's own model, by name."""
    parameters = built(workload, 0).model.named_parameters()
    return {name: tuple(one.shape) for name, one in parameters}


def own_layers(
    workload: Workload, seed: int, sequences: int, wanted: Sequence[int], device: torch.device
) -> dict[int, LayerModule]:
    """The ``wanted`` layers of a user's own model, by index in the whole model."""
    parted = built(workload, seed)
    blocks = workload.model.layers
    if len(parted.blocks) != blocks:
        reject(
            f"workload.model: {workload.model.factory} makes {len(parted.blocks)} blocks, but the "
            f"traced file says {blocks}: trace the model again (python -m experiments.trace)"
        )
    names = _parted(parted, workload, sequences)
    parameters = dict(parted.model.named_parameters())
    first = {name: one.detach().float().clone() for name, one in parameters.items()}
    scalar = torch.zeros((), dtype=TYPE_OF_PRECISION[workload.precision], device=device)
    for tensor in parameters.values():
        # Parameters keep their shapes, but take no memory until a stage's state gives it to them.
        tensor.data = scalar.expand(tensor.shape)
    for buffer in parted.model.buffers():
        buffer.data = buffer.data.to(device)
    for call in parted.calls:
        call.arguments, call.named = tree_map(
            lambda one: one.to(device) if isinstance(one, Tensor) else one,
            (call.arguments, call.named),
        )
    layers: dict[int, LayerModule] = {}
    for layer in wanted:
        prefix = f"{parted.path}.{layer - 1}." if 1 <= layer <= blocks else ""
        module = (
            _OwnEnds(parted, after=layer > blocks) if not prefix else _OwnBlock(parted, layer - 1)
        )
        of_layer = {name.removeprefix(prefix): first[name] for name in names[layer]}
        layers[layer] = OwnLayer(
            prefix=prefix,
            module=module,
            whole_shapes={name: tuple(one.shape) for name, one in of_layer.items()},
            first=of_layer,
        )
    return layers


def built(workload: Workload, seed: int) -> PartedModel:
    """The user's model with weights drawn by the seed, in the workload's precision."""
    from runtime.tracing.trace import find_blocks  # noqa: PLC0415 (needs SymPy)

    factory = _factory_of(workload)
    # As in tracing, a factory may take the sequence length and the tensor-parallel degree as
    # arguments.
    taken = inspect.signature(factory).parameters
    needed = [name for name, one in taken.items() if one.default is one.empty]
    given = dict.fromkeys(needed, 1)
    if "sequence_length" in taken:
        given["sequence_length"] = workload.sequence_length
    with _FACTORIES, torch.random.fork_rng(devices=[]):
        before = torch.get_default_dtype()
        torch.set_default_dtype(TYPE_OF_PRECISION[workload.precision])
        try:
            torch.manual_seed(seed)
            model = factory(**given)
        except InputError:
            raise
        except Exception as error:
            message = (
                f"workload.model.factory: {workload.model.factory}: the code of this function "
                f"raised {type(error).__name__}: {error}: correct the code"
            )
            raise InputError(message) from error
        finally:
            torch.set_default_dtype(before)
    model.train()
    return PartedModel(model, find_blocks(model))


def _factory_of(workload: Workload) -> Callable[..., nn.Module]:
    source = workload.model.factory
    module, _, name = source.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        factory: Callable[..., nn.Module] = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        message = (
            f"workload.model.factory: {source}: {error}: run from the folder that holds it, "
            "or set PYTHONPATH"
        )
        raise InputError(message) from error
    finally:
        sys.path.remove(str(Path.cwd()))
    return factory


def _parted(parted: PartedModel, workload: Workload, sequences: int) -> dict[int, list[str]]:
    """The names of the parameters of each layer; also records how the blocks are called."""
    shape, vocab = (sequences, workload.sequence_length), min(workload.model.vocab, 2)
    ones, others = (torch.full(shape, token) for token in (0, vocab - 1))
    parted.calls = parted.note_calls(ones)
    _check_calls(parted, parted.note_calls(others))
    parted.calls = [call.without_hidden() for call in parted.calls]
    model, blocks = parted.model, len(parted.blocks)
    parameters = dict(model.named_parameters())
    _check_model(model, parameters)
    x = parted.before_blocks(ones)
    early = _learning(parameters, lambda: x.float().sum())
    parted.early = _results_of(parted, early, ones)
    after = x.detach().requires_grad_()
    late = _learning(parameters, lambda: parted.after_blocks(after, ones))
    if shared := early & late:
        reject(
            f"workload.model: {min(shared)} is a parameter shared by modules before and after the "
            "blocks: give each of these modules a parameter of its own"
        )
    names = {0: early, blocks + 1: late}
    for number in range(blocks):
        prefix = f"{parted.path}.{number}."
        names[number + 1] = {name for name in parameters if name.startswith(prefix)}
    if rest := set(parameters).difference(*names.values()):
        reject(
            f"workload.model: {min(rest)} is a parameter without gradient: remove it from the model"
        )
    order = list(parameters)
    return {layer: sorted(of, key=order.index) for layer, of in names.items()}


def _learning(parameters: Mapping[str, nn.Parameter], run: Callable[[], Tensor]) -> set[str]:
    """The names of the parameters on which a scalar depends, known from its gradients."""
    run().backward()
    learning = {name for name, one in parameters.items() if one.grad is not None}
    for parameter in parameters.values():
        parameter.grad = None
    return learning


def _results_of(parted: PartedModel, names: set[str], tokens: Tensor) -> dict[str, torch.Size]:
    """The shapes of the outputs of the modules that hold the parameters ``names``."""
    modules, shapes = dict(parted.model.named_modules()), {}
    hooks = []
    for name in {one.rpartition(".")[0] for one in names} - {""}:

        def note(_module: nn.Module, _given: Any, result: Any, name: str = name) -> None:
            if isinstance(result, Tensor):
                shapes[name] = result.shape

        hooks.append(modules[name].register_forward_hook(note))
    with torch.no_grad():
        parted.before_blocks(tokens)
    for hook in hooks:
        hook.remove()
    return shapes


def _check_calls(parted: PartedModel, again: Sequence[BlockCall]) -> None:
    """Raise an error for blocks whose arguments besides the hidden states depend on tokens or
    parameters.
    """
    for number, (call, other) in enumerate(zip(parted.calls, again, strict=True)):
        pairs = zip(tree_leaves(call.others()), tree_leaves(other.others()), strict=True)
        for given, then in pairs:
            is_tensor = isinstance(given, Tensor)
            if is_tensor and not (given.shape == then.shape and torch.equal(given, then)):
                reject(
                    f"workload.model: block {number} of {parted.path} takes a further tensor that "
                    "depends on the tokens: pass blocks their hidden states, and other tensors (a "
                    "mask, positions) only if all micro-batches have the same"
                )
        if any(isinstance(beside, Tensor) for beside in call.returned or ()):
            reject(
                f"workload.model: block {number} of {parted.path} returns more tensors than its "
                "hidden states: change its forward to return these alone"
            )


def _check_model(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    if single := [name for name, one in parameters.items() if one.dim() == 0]:
        reject(
            f"workload.model: {single[0]} is a parameter without dimensions: give it the shape (1,)"
        )
    if frozen := [name for name, one in parameters.items() if not one.requires_grad]:
        reject(
            f"workload.model: {frozen[0]} is a frozen parameter: set its requires_grad, or remove "
            "it from the model"
        )
    for name, item in model.named_modules():
        if isinstance(item, nn.Dropout) and item.p > 0:
            reject(
                f"workload.model: {name} is dropout whose random draws depend on the order of "
                "passes, which plans change: give p=0"
            )


class _Delegating(nn.Module):
    """A part of the user's model as a module; its submodules and buffers are those of the whole
    model.
    """

    def __init__(self, parted: PartedModel, whole: nn.Module) -> None:
        super().__init__()
        self.__dict__["own"], self.__dict__["whole"] = parted, whole

    def buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        """The buffers of the whole model, and the tensors among the blocks' further arguments."""
        del recurse
        parted: PartedModel = self.__dict__["own"]
        yield from parted.model.buffers()
        given = (one for call in parted.calls for one in tree_leaves(call.others()))
        yield from (one for one in given if isinstance(one, Tensor))

    def named_modules(self, *arguments: Any, **named: Any) -> Iterator[tuple[str, nn.Module]]:
        """The submodules of the whole user's model, by name."""
        yield from self.__dict__["whole"].named_modules(*arguments, **named)

    def get_submodule(self, target: str) -> nn.Module:
        """A submodule of the whole user's model, by its path."""
        submodule: nn.Module = self.__dict__["whole"].get_submodule(target)
        return submodule


class _OwnEnds(_Delegating):
    """The part of a user's model before its blocks, or the part after them."""

    def __init__(self, parted: PartedModel, *, after: bool) -> None:
        super().__init__(parted, parted.model)
        self.after = after

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """The hidden states for tokens ``x`` (the part before the blocks), or the loss for hidden
        states ``x`` (the part after them).
        """
        parted: PartedModel = self.__dict__["own"]
        return parted.before_blocks(x) if targets is None else parted.after_blocks(x, targets)


class _OwnBlock(_Delegating):
    def __init__(self, parted: PartedModel, number: int) -> None:
        super().__init__(parted, parted.blocks[number])
        self.__dict__["call"] = parted.calls[number]

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.__dict__["call"].of(self.__dict__["whole"], x)
        return made
