"""Fit a hardware file to measurements: transfers, interference, operators, whole runs.

Tables are CSVs (docs/reference/measurement-tables.md). For each fit the command prints the error on
rows that it did not see: every second size, a whole shape of group, a whole width, a run left out.
The written fits are of all rows. A group without a table stays as it is in --hardware; if that has
none, the group of --borrow is taken.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.calibrating.folds import FOLDS
from experiments.cli.commandline import parser_of, run


def main(arguments: Sequence[str]) -> int:
    """Fit, print the residuals, write the hardware file."""
    options = _parser().parse_args(arguments)
    from experiments.calibrating.steps import calibrate  # noqa: PLC0415 (not for --help)

    return calibrate(options)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("calibrate", __doc__, hardware="l4-24gb", seed=0, json=False)
    table: dict[str, Any] = {"type": Path, "metavar": "TABLE.csv"}
    parser.add_argument("--bandwidth", **table, help="transfers, one stream alone")
    parser.add_argument("--collectives", **table, help="collectives inside a node")
    parser.add_argument("--point-to-point", **table, help="sends between two GPUs")
    parser.add_argument("--interference", **table, help="streams that ran together")
    parser.add_argument("--operators", **table, help="operators of GPT blocks")
    parser.add_argument("--attention", **table, help="kernels of attention, beside --operators")
    parser.add_argument("--kernels", **table, help="single kernels by shape: products, attention")
    parser.add_argument("--collective-tests", **table, help="bus bandwidth of collectives by size")
    parser.add_argument("--best-products", **table, help="best products in 16 and in 8 bits")
    parser.add_argument(
        "--launch-us",
        type=float,
        default=10.0,
        help="the host's time for a launch, beside --kernels (default: %(default)s)",
    )
    parser.add_argument(
        "--sustained",
        type=float,
        default=1.0,
        help="the share of rates that whole steps keep up, beside --kernels (default: %(default)s)",
    )
    parser.add_argument("--launches", **table, help="the host's time to launch kernels")
    parser.add_argument("--runs", **table, help="whole runs, with their peaks of memory")
    parser.add_argument(
        "--megatron-runs", **table, nargs="+", help="whole Megatron runs, everything recomputed"
    )
    parser.add_argument(
        "--folds", default=FOLDS, help=f"GPUs x layers of the runs to fit on (default: {FOLDS})"
    )
    parser.add_argument("--campaign", help="one campaign (`generation`) of tables with several")
    parser.add_argument("--attention-campaign", help="one campaign (`db`) of --attention")
    parser.add_argument("--table-hardware", help="one machine (`hardware`) of tables with several")
    parser.add_argument(
        "--without-weight-gradients",
        action="store_true",
        help="the operators' backward lacks the weights' gradients: count a forward for them",
    )
    parser.add_argument(
        "--attention-tflops",
        type=float,
        nargs=2,
        metavar=("FORWARD", "BACKWARD"),
        help="rates of fused causal attention where no table has them",
    )
    parser.add_argument(
        "--template", type=Path, metavar="FILE.json", help="published lines across nodes"
    )
    parser.add_argument(
        "--template-name", default="template-l4", help="the name of the template in it"
    )
    parser.add_argument("--borrow", metavar="HARDWARE", help="where missing groups come from")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="HARDWARE.yaml", help="the file to write"
    )
    return parser


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
