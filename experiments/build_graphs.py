"""Trace the catalogue's models and write the layer graphs that are shipped.

python -m experiments.build_graphs [--out DIR]
"""

import argparse
import sys
from pathlib import Path

import mistlab.catalog
from mistlab.symbolic import graphfile
from mistlab.symbolic.library import variants
from runtime.tracing.families import trace_variant

SHIPPED = Path(mistlab.catalog.__file__).parent / "graphs"


def main(arguments: list[str] | None = None) -> int:
    """Write every variant's graph; progress goes to standard error."""
    parser = argparse.ArgumentParser(prog="python -m experiments.build_graphs", description=__doc__)
    parser.add_argument("--out", type=Path, default=SHIPPED, help="folder (default: the package's)")
    out: Path = parser.parse_args(arguments).out
    out.mkdir(parents=True, exist_ok=True)
    for variant in variants():
        print(f"tracing {variant.name}", file=sys.stderr)
        mapping = graphfile.to_mapping(trace_variant(variant))
        (out / f"{variant.name}.json").write_text(graphfile.dumps(mapping), encoding="utf-8")
    print(f"{len(variants())} graphs in {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
