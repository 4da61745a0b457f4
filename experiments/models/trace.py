"""Traces a model into a file that a plan may name, and prints a summary of the file."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from experiments.cli.commandline import DONE, NoAnswerError, print_json, progress, writable
from mistlab.core.files import naming, read_json, read_yaml
from mistlab.core.values import InputError, near_matches, reject, to_mapping
from mistlab.engines.engine import SINGLE
from mistlab.graph import graph_text as graphfile
from mistlab.graph.graph import ModelGraph
from mistlab.graph.layer_types import expressions_of
from mistlab.plan.workload import ModelSpec

# A summary of a traced model's file, as JSON and as text.


def summary_of(spec: ModelSpec, graphs: Sequence[ModelGraph], out: Path) -> dict[str, Any]:
    """The contents of a model and of its layer graphs, as plain data for JSON."""
    first = graphs[0]
    embedding, block, head = (layer.parameter_count for layer in first.layers)
    return {
        "model": str(out),
        "name": spec.name,
        "layers": spec.layers,
        "parameters": {"embedding": str(embedding), "block": str(block), "head": str(head)},
        "tensor_parallel_degrees": spec.tensor_parallel_degrees,
        "graphs": [_graph_summary(graph) for graph in graphs],
    }


def _graph_summary(graph: ModelGraph) -> dict[str, Any]:
    block = expressions_of(graph.block)
    return {
        "attention": graph.attention,
        "precision": graph.precision,
        "block": {
            "forward_flop": str(block.flop("forward")),
            "backward_flop": str(block.flop("backward")),
            "saved_bytes": str(block.saved_bytes),
            "checkpointed_bytes": str(block.input_bytes),
        },
        "conditions": [f"{c.size} divides by {c.divisor}" for c in graph.conditions],
        "assumptions": list(graph.assumptions),
        "counted_by_element": sorted(
            {o.name for layer in graph.layers for o in layer.operators if o.kind == "other"}
        ),
    }


def tell(summary: dict[str, Any]) -> None:
    """Print a summary of the traced model as text."""
    print(f"{summary['name']}: {summary['layers']} blocks")
    for layer, count in summary["parameters"].items():
        print(f"  parameters of the {layer}: {count}")
    if summary["tensor_parallel_degrees"] is not None:
        degrees = ", ".join(map(str, summary["tensor_parallel_degrees"]))
        print(f"  tensor-parallel degrees: {degrees}")
    for graph in summary["graphs"]:
        print(f"  attention {graph['attention']}, {graph['precision']} precision, a block:")
        for name, expression in graph["block"].items():
            print(f"    {name.replace('_', ' ')}: {expression}")
        for text in graph["assumptions"]:
            print(f"    holds only where {text}")
        if graph["counted_by_element"]:
            names = ", ".join(graph["counted_by_element"])
            print(f"    counted as one operation an element: {names}")
    print(f"written: {summary['model']} (name it as `model:` in a plan file)")


# Traces a model with each kind of attention and each precision; the model comes from a function, a
# configuration, or a mapping.


ATTENTIONS = ("flash", "math")


def trace(options: argparse.Namespace) -> int:
    """Trace a model of your own into a file that a plan's `model:` may name.

    SOURCE is one of
      package.module:factory   a function that returns a torch.nn.Module; one that takes
                               tensor_parallel gets the degree as a symbol
      PATH/config.json         a Hugging Face configuration, or its folder; nothing is downloaded
      MODEL.yaml               the mapping of a plan file's `model:`, for structures that the
                               catalogue's families do not have

    The model runs one training step with symbolic batch and sequence, without memory for its
    tensors. Reading the file, and all that is computed from it, needs no torch.
    """
    out = writable(options.out, "file")
    traced = _traced(options)
    spec, graphs = traced[0][0], [graph for _, graph in traced]
    content = {
        "spec": to_mapping(spec, omit_defaults=True),
        "graphs": [graphfile.to_mapping(graph) for graph in graphs],
    }
    with naming(out):
        out.write_text(graphfile.dumps(content), encoding="utf-8")
    summary = summary_of(spec, graphs, out)
    if options.json:
        print_json(summary)
    else:
        tell(summary)
    return DONE


def _traced(options: argparse.Namespace) -> list[tuple[ModelSpec, ModelGraph]]:
    """The model traced with each kind of attention and each precision: for each a description and a
    layer graph.
    """
    sizes = import_module("runtime.tracing.symbolic_sizes")
    if options.sequence_length < 2:
        reject(
            f"--sequence-length {options.sequence_length}: is too short to be traced: give at "
            "least 2"
        )
    try:
        if ":" in options.source:
            return _of_factory(options)
        path = Path(options.source)
        if path.suffix in (".yaml", ".yml"):
            return _of_mapping(options, path)
        if path.suffix == ".json" or path.is_dir():
            return _of_config(options, path)
    except sizes.TraceError as error:
        message = f"{options.source}: {error}"
        raise NoAnswerError(message) from error
    message = (
        f"{options.source!r} is nothing to trace: give package.module:factory, the path of a "
        "config.json, or a .yaml with a model's mapping"
    )
    raise InputError(message)


def _of_factory(options: argparse.Namespace) -> list[tuple[ModelSpec, ModelGraph]]:
    own_model = import_module("runtime.tracing.own_model")
    factory = _factory(options.source)
    name = options.name or options.source.partition(":")[2]
    traced = [
        _trace_own(own_model, factory, options, name, "own", precision)
        for precision in _precisions(options)
    ]
    # A model whose blocks were found only with the hint --blocks cannot be trained later, since
    # training has no such hint: its function is not recorded.
    source = "" if options.blocks else options.source
    return [(replace(spec, factory=source), graph) for spec, graph in traced]


def _of_config(options: argparse.Namespace, path: Path) -> list[tuple[ModelSpec, ModelGraph]]:
    file = path / "config.json" if path.is_dir() else path
    content = read_json(file)
    own_model = import_module("runtime.tracing.own_model")
    huggingface = import_module("runtime.tracing.huggingface")
    name = options.name or file.resolve().parent.name
    with huggingface.unpacked_sequences():
        return [
            _trace_own(own_model, huggingface.factory_from(content, file, a), options, name, a, p)
            for a in _attentions(options)
            for p in _precisions(options)
        ]


def _of_mapping(options: argparse.Namespace, path: Path) -> list[tuple[ModelSpec, ModelGraph]]:
    families = import_module("runtime.tracing.traced_families")
    mapping = {"name": path.stem, **read_yaml(path)}
    spec = ModelSpec.from_mapping(
        mapping if options.name is None else {**mapping, "name": options.name}
    )
    traced = []
    for attention in _attentions(options):
        for precision in _precisions(options):
            progress(f"tracing {spec.name}: attention {attention}, {precision} precision")
            traced.append(families.trace_spec(spec, attention, precision))
    return traced


def _attentions(options: argparse.Namespace) -> Sequence[str]:
    return ATTENTIONS if options.attention is None else (options.attention,)


def _precisions(options: argparse.Namespace) -> Sequence[str]:
    if options.precision is None:
        return ("half", "single")
    return ("single",) if options.precision in SINGLE else ("half",)


def _trace_own(
    own_model: Any,
    factory: Any,
    options: argparse.Namespace,
    name: str,
    attention: str,
    precision: str,
) -> tuple[ModelSpec, ModelGraph]:
    progress(f"tracing {name}: attention {attention}, {precision} precision")
    traced = own_model.trace_factory(
        factory,
        name=name,
        precision=precision,
        attention=attention,
        blocks=options.blocks,
        stand_ins=own_model.StandIns(sequence_length=options.sequence_length),
    )
    if traced.differing:
        progress(
            f"the blocks of {name} differ in {', '.join(traced.differing)}: "
            "all are counted as the first"
        )
    return traced.spec, traced.graph


def _factory(source: str) -> Any:
    module_name, _, name = source.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        reject(
            f"{source}: there is no module {module_name!r}: run from the folder that holds it, or "
            "set PYTHONPATH"
        )
    except Exception as error:
        message = (
            f"{source}: importing {module_name} raised {type(error).__name__}: {error}: correct "
            "the module's code"
        )
        raise InputError(message) from error
    factory = getattr(module, name, None)
    if factory is None:
        names = [n for n, value in vars(module).items() if callable(value) and n[0] != "_"]
        known = near_matches(name, names) if names else ": define a function that returns the model"
        reject(f"{source}: module {module_name} has no function {name!r}{known}")
    if not callable(factory):
        reject(
            f"{source}: {factory!r} is not a function: give the name of a function that returns "
            "the model"
        )
    return factory
