"""Published configurations beside what we would run: Llama 3 8B and 70B, DeepSeek V3.

Megatron-Bridge publishes a configuration and a step's seconds for each release. Each is predicted
and played; then other configurations of the same engine, GPUs, batch and arithmetic are predicted,
and the best few are played. The fastest as played is what we would run.
"""

import argparse
import sys
from collections.abc import Sequence

from experiments.cli.commandline import experiment_parser, run


def main(arguments: Sequence[str]) -> int:
    """Predict, play and compare; print and write the tables."""
    options = _parser().parse_args(arguments)
    from experiments.questions.published_configurations import (  # noqa: PLC0415 (not for --help)
        published_configurations,
    )

    return published_configurations(options)


def _parser() -> argparse.ArgumentParser:
    return experiment_parser("published_configurations", __doc__)


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
