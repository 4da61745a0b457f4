"""Traces the models of the catalogue, and writes the layer graphs that the package ships."""

import argparse
from pathlib import Path

import mistlab.catalog
from experiments.cli.commandline import DONE, progress
from mistlab.graph import graph_text as graphfile
from mistlab.graph.library import variants
from runtime.tracing.traced_families import trace_variant

SHIPPED = Path(mistlab.catalog.__file__).parent / "graphs"


def build_graphs(options: argparse.Namespace) -> int:
    """Trace the models of the catalogue, and write the layer graphs that the package ships."""
    out: Path = options.out or SHIPPED
    out.mkdir(parents=True, exist_ok=True)
    for variant in variants():
        progress(f"tracing {variant.name}")
        mapping = graphfile.to_mapping(trace_variant(variant))
        (out / f"{variant.name}.json").write_text(graphfile.dumps(mapping), encoding="utf-8")
    print(f"{len(variants())} graphs in {out}")
    return DONE
