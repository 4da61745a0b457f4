"""What each stage of a plan holds and does: memory by class, peaks, host memory, work.

Bytes are those that tensors take, exact by the layer graphs; what the allocator reserves beyond
them, what the GPU's runtime takes and times are left to experiments.predict.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.cli.commandline import PLANS, parser_of, run

EXAMPLE = PLANS / "gpt3-2.7b-4xl4.yaml"


def main(arguments: Sequence[str]) -> int:
    """Analyse plan files, in order; a bad one does not stop the others."""
    parser = parser_of("analyse", __doc__, json=False)
    parser.add_argument("plans", metavar="PLAN.yaml", nargs="*", type=Path, default=[EXAMPLE])
    options = parser.parse_args(arguments)
    from experiments.reports.analysis import analyse  # noqa: PLC0415 (not for --help)

    return analyse(options)


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
