"""Traces a user's model: from a function (the factory) that builds an ``nn.Module`` to a model
description with a layer graph.

Batch and sequence length are symbols; the factory chooses all other sizes. If it has an argument
``tensor_parallel``, it gets the degree as a symbol; otherwise the model is not split. If it has an
argument ``sequence_length``, it gets the sequence length as a symbol.
"""

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import sympy
import torch
from torch import Tensor, nn
from torch.nn import functional

from mistlab.core.values import InputError
from mistlab.graph.graph import Condition, ModelGraph
from mistlab.graph.graph_text import relation_from
from mistlab.graph.symbols import size_symbol
from mistlab.plan.workload import ModelSpec
from runtime.models.ranks import Size, value_of
from runtime.tracing.symbolic_sizes import SizeSpace, TraceError, always, failure
from runtime.tracing.trace import differing_settings, find_blocks, trace

Factory = Callable[..., nn.Module]
Precision = Literal["half", "single"]

DTYPE_OF: dict[Precision, torch.dtype] = {"half": torch.bfloat16, "single": torch.float32}
LARGEST_DEGREE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class StandIns:
    """The numbers that symbolic sizes have where the model's code branches on a size."""

    batch: int = 4
    sequence_length: int = 128
    tensor_parallel: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnModel:
    """A user's model after tracing: its description and its layer graph.

    ``differing`` names settings in which its blocks differ; the graph is that of the first block.
    """

    spec: ModelSpec
    graph: ModelGraph
    differing: tuple[str, ...]


def trace_factory(
    factory: Factory,
    *,
    name: str,
    precision: Precision,
    attention: str = "own",
    blocks: str | None = None,
    stand_ins: StandIns = StandIns(),
) -> OwnModel:
    """Build a model with symbols as sizes, and trace a training step; returns the model's
    description and layer graph.

    The model is called with tokens, and with the same tokens as ``labels`` or ``targets`` if its
    forward has such an argument. It may return a loss, or logits, to which cross-entropy is
    applied.
    """
    space = SizeSpace()
    b = space.size("b", stand_ins.batch)
    s = space.size("s", stand_ins.sequence_length)
    arguments = _arguments(factory, space, s, stand_ins)
    try:
        with _quiet(), space.fake_mode, _default_type(DTYPE_OF[precision]):
            model = factory(**arguments)
            tokens = torch.empty(b, s, dtype=torch.int64)
        _check_module(model, factory)
        step = _Step(tokens)
        path = find_blocks(model, blocks)
        repeated = model.get_submodule(path)
        assert isinstance(repeated, nn.ModuleList)
        layers, differing = len(repeated), tuple(differing_settings(repeated))
        model.get_submodule(f"{path}.0").register_forward_hook(step.see_block)
        with _quiet():
            graph = trace(
                model,
                space,
                step.loss_of,
                name=name,
                attention=attention,
                precision=precision,
                blocks=path,
            )
    except InputError:
        raise
    except Exception as error:
        raise failure(error) from error
    spec = _spec(name, layers, step, model)
    traced = OwnModel(spec=spec, graph=graph, differing=differing)
    return _with_degrees(traced, splits="tensor_parallel" in arguments)


@dataclass(slots=True)
class _Step:
    """One training step of a user's model, and the sizes that become known by it."""

    tokens: Tensor
    sizes: dict[str, int] = field(default_factory=dict)

    def see_block(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        """A forward hook of the first block, which records the hidden size."""
        hidden = output if isinstance(output, Tensor) else output[0]
        self.sizes["hidden"] = value_of(hidden.shape[-1])

    def loss_of(self, model: nn.Module) -> Tensor:
        """Run the model; returns its loss, or the cross entropy of its logits if it returns
        none.
        """
        taken = inspect.signature(model.forward).parameters
        labels = {name: self.tokens for name in ("labels", "targets") if name in taken}
        output = model(self.tokens, **labels)
        loss, logits = _loss_and_logits(output)
        if logits is not None:
            self.sizes["vocab"] = value_of(logits.shape[-1])
        if loss is not None:
            return loss
        if logits is None or logits.dim() != 3:
            message = (
                f"the model returned {_described(output)}: return a scalar loss, or logits of "
                "(batch, sequence, vocabulary)"
            )
            raise TraceError(message)
        return functional.cross_entropy(logits.flatten(0, 1).float(), self.tokens.flatten())


def _loss_and_logits(output: Any) -> tuple[Tensor | None, Tensor | None]:
    """The loss and the logits in a model's output: its first scalar, and its first tensor with more
    values.
    """
    if isinstance(output, dict):
        output = tuple(output.values())
    values = output if isinstance(output, tuple | list) else (output,)
    tensors = [v for v in values if isinstance(v, Tensor) and v.is_floating_point()]
    loss = next((tensor for tensor in tensors if tensor.dim() == 0), None)
    return loss, next((tensor for tensor in tensors if tensor.dim() > 0), None)


def _described(output: Any) -> str:
    if isinstance(output, Tensor):
        return f"a tensor of {output.dim()} dimensions"
    return f"a {type(output).__name__}"


def _arguments(factory: Factory, space: SizeSpace, s: Size, stand_ins: StandIns) -> dict[str, Size]:
    taken = inspect.signature(factory).parameters
    missing = [
        name
        for name, parameter in taken.items()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        and name not in ("tensor_parallel", "sequence_length")
    ]
    if missing:
        message = (
            f"the factory's arguments {', '.join(missing)} have no defaults: give them defaults, "
            "since a trace passes only tensor_parallel and sequence_length"
        )
        raise TraceError(message)
    arguments = {}
    if "sequence_length" in taken:
        arguments["sequence_length"] = s
    if "tensor_parallel" in taken:
        arguments["tensor_parallel"] = space.size("tp", stand_ins.tensor_parallel)
    return arguments


def _check_module(model: object, factory: Factory) -> None:
    if not isinstance(model, nn.Module):
        message = (
            f"{getattr(factory, '__name__', 'the factory')} returned {model!r}: "
            "return a torch.nn.Module"
        )
        raise TraceError(message)


@contextmanager
def _default_type(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep PyTorch from logging the traceback of an error, which this module explains itself."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before = log.disabled
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = before


def _spec(name: str, layers: int, step: _Step, model: nn.Module) -> ModelSpec:
    """The model's description; heads and widths come from its configuration object, if it has
    one.
    """
    config = getattr(model, "config", None)
    named = list(model.named_parameters(remove_duplicate=False))
    known: dict[str, Any] = {
        ours: value
        for ours, theirs in (
            ("heads", "num_attention_heads"),
            ("kv_heads", "num_key_value_heads"),
            ("head_dim", "head_dim"),
            ("ffn", "intermediate_size"),
            ("vocab", "vocab_size"),
        )
        if isinstance(value := getattr(config, theirs, None), int)
    }
    sizes = {"heads": 1, **known, **_rotary(config), **step.sizes}
    return ModelSpec.of(
        name=name,
        family="custom",
        layers=layers,
        **sizes,
        tied_embeddings=len(named) > len({id(parameter) for _, parameter in named}),
    )


def _rotary(config: Any) -> dict[str, Any]:
    """The rotary settings in a Hugging Face configuration; empty if it has none."""
    given = getattr(config, "rope_parameters", None)
    given = given if isinstance(given, Mapping) else {}
    base = given.get("rope_theta", getattr(config, "rope_theta", None))
    if not isinstance(base, int | float):
        return {}
    share = given.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None))
    return {
        "position_embedding": "rotary",
        "rotary_base": float(base),
        "rotary_fraction": float(share or 1.0),
    }


def _with_degrees(traced: OwnModel, *, splits: bool) -> OwnModel:
    """The model with the tensor-parallel degrees that it supports.

    Assumptions of the trace that hold for all of these degrees are dropped.
    """
    tp = size_symbol("tp")
    conditions = traced.graph.conditions
    if not splits:
        conditions += (Condition(size=sympy.Integer(1), divisor=tp),)
    relations = [relation_from(text) for text in traced.graph.assumptions]
    degrees = tuple(
        degree
        for degree in range(1, LARGEST_DEGREE + 1)
        if all(c.size.subs(tp, degree) % c.divisor.subs(tp, degree) == 0 for c in conditions)
        and not any(relation.subs(tp, degree) == sympy.false for relation in relations)
    )
    assumptions = tuple(
        text
        for text, relation in zip(traced.graph.assumptions, relations, strict=True)
        if not all(always(relation.subs(tp, degree), at_least=1) for degree in degrees)
    )
    return replace(
        traced,
        spec=replace(traced.spec, tensor_parallel_degrees=degrees),
        graph=replace(traced.graph, conditions=conditions, assumptions=assumptions),
    )
