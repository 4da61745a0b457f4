"""What a training takes: days, GPU hours, money, energy and carbon, by formula and by prediction.

The formula is 8TP/(NFU): tokens, parameters, GPUs, their peak, and the share of it that they
sustain. Beside it stand predictions: of the plan that Megatron-LM's authors' rule gives (every
block recomputed), of the plan that mist finds, or of the plan of --plan. Tokens are those that the
model was published with (--tokens published), 20 a parameter (--tokens chinchilla), or a number.
Prices and intensities are yours to give. Below stand runs that were published.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.cli.commandline import experiment_parser, run

NUMBERS = {
    "utilisation": (0.44, "share of the peak, for the formula"),
    "goodput": (1.0, "share of the time that is work, for predictions; see reliability"),
    "usd-per-gpu-hour": (2.0, "price of a GPU hour"),
    "overhead": (1.0, "watts of the building for each watt of a GPU"),
    "kg-per-kwh": (0.414, "carbon dioxide of a kilowatt hour"),
}


def main(arguments: Sequence[str]) -> int:
    """Estimate, print the table, draw the days."""
    options = _parser().parse_args(arguments)
    from experiments.costing.estimating import estimate  # noqa: PLC0415 (not for --help)

    return estimate(options)


def _parser() -> argparse.ArgumentParser:
    parser = experiment_parser(
        "estimate",
        __doc__,
        model="gpt3-175b",
        hardware="a100-80gb",
        nodes=128,
        gpus_per_node=8,
        sequence_length=2048,
        global_batch=None,
        attention="math",
        precision="fp16",
    )
    parser.add_argument(
        "--tokens", default="published", help="a number, published or chinchilla (%(default)s)"
    )
    parser.add_argument("--plan", type=Path, metavar="PLAN.yaml", help="predict this plan")
    parser.add_argument(
        "--gpu-hours", type=float, metavar="HOURS", help="only tell the bill of so many GPU hours"
    )
    for name, (value, what) in NUMBERS.items():
        parser.add_argument(
            f"--{name}", type=float, default=value, metavar="X", help=f"{what} (default: {value})"
        )
    parser.add_argument(
        "--watts", type=float, metavar="X", help="power of a GPU's board (default: the hardware's)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
