"""Fit a hardware file to measurements: transfers, interference, operators, whole runs.

Tables are CSVs (docs/reference/measurement-tables.md). For each fit the command prints the error on
rows that it did not see: every second size, a whole shape of group, a whole width, a run left out.
What is written is fitted on all rows; what no table was given for stays as it is in --hardware, or
comes from --borrow where that has nothing.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from experiments.calibrating import fit_links, fit_runs, fits
from experiments.calibrating.fit_operators import launch_time, operator_rates
from experiments.cli.commandline import DONE, parser_of, print_json, run, writable
from mistlab.values.datafile import write_yaml
from mistlab.values.errors import InputError
from mistlab.values.references import hardware_from
from mistlab.values.value import to_mapping

FOLDS = "2x16,4x24,8x12,512x48"


def main(arguments: Sequence[str]) -> int:
    """Fit, print the residuals, write the hardware file."""
    options = _parser().parse_args(arguments)
    steps = _steps(options)
    if not steps and options.borrow is None:
        message = (
            "nothing to fit: give --interference TABLE.csv, --bandwidth TABLE.csv or another table "
            "(--help lists them)"
        )
        raise InputError(message)
    hardware = hardware_from(options.hardware, Path())
    if options.borrow is not None:
        hardware = fits.borrowed(hardware_from(options.borrow, Path()))(hardware)
    hardware, fitted = fits.applied(steps, hardware)
    out = writable(options.out, "file")
    write_yaml(to_mapping(hardware, omit_defaults=True), out)
    if options.json:
        print_json({"hardware": options.hardware, **fits.by_group(fitted), "out": str(out)})
    else:
        print("\n".join(map(fits.text_of, fitted)))
        print(f"written: {out} (name it as `hardware:` in a plan file)")
    return DONE


def _steps(options: argparse.Namespace) -> list[fits.Step]:
    """The tables that were given, in the order in which groups build on one another."""
    of, campaign = options.table_hardware, options.campaign
    made: dict[str, Callable[[Any], fits.Step]] = {
        "bandwidth": lambda path: fit_links.bandwidth(path, campaign),
        "collectives": lambda path: fit_links.collectives(path, of),
        "point_to_point": lambda path: fit_links.point_to_point(path, of),
        "template": lambda path: fit_links.published_lines(path, options.template_name),
        "interference": lambda path: fit_links.streams(path, campaign, options.seed),
        "operators": lambda path: operator_rates(
            path,
            of,
            without_weight_gradients=options.without_weight_gradients,
            attention=options.attention and (options.attention, options.attention_campaign),
            attention_tflops=options.attention_tflops,
        ),
        "launches": lambda path: launch_time(path, of),
        "runs": fit_runs.whole_runs,
        "megatron_runs": lambda paths: fit_runs.megatron_runs(paths, options.folds.split(",")),
    }
    given = {name: getattr(options, name) for name in made}
    return [make(given[name]) for name, make in made.items() if given[name] is not None]


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("calibrate", __doc__, hardware="l4-24gb", seed=0, json=False)
    table: dict[str, Any] = {"type": Path, "metavar": "TABLE.csv"}
    parser.add_argument("--bandwidth", **table, help="transfers, one stream alone")
    parser.add_argument("--collectives", **table, help="collectives inside a node")
    parser.add_argument("--point-to-point", **table, help="sends between two GPUs")
    parser.add_argument("--interference", **table, help="streams that ran together")
    parser.add_argument("--operators", **table, help="operators of GPT blocks")
    parser.add_argument("--attention", **table, help="kernels of attention, beside --operators")
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
    parser.add_argument("--template-name", default="template-l4", help="which of them")
    parser.add_argument("--borrow", metavar="HARDWARE", help="where missing groups come from")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="HARDWARE.yaml", help="the file to write"
    )
    return parser


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
