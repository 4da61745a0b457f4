"""Lets a framework's own code check exported files, in a separate process that uses the framework's
Python.

Standard input is a JSON list of objects with ``target``, ``text`` and ``job`` (a plan file's
content); if an object names a ``checkout`` of Megatron-LM, the parser of that checkout is asked
too. Standard output is a JSON list of problems, which are empty for texts that the framework
accepts.
"""

import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

from mistlab.core.values import InputError
from mistlab.export.targets import TARGETS
from mistlab.job.job import job_from_mapping
from runtime.baselines.accepted import check_accepted
from runtime.baselines.builds import check_installed


def problem_of(entry: dict[str, Any]) -> str:
    """The reason why a framework refuses an exported file; empty if it accepts the file."""
    try:
        job = job_from_mapping(entry["job"])
        check_accepted(entry["target"], entry["text"], job, checkout=_checkout(entry))
    except InputError as error:
        return str(error)
    return ""


def _checkout(entry: dict[str, Any]) -> Path | None:
    """The path of a checkout of the framework's source that knows all options of an exported file.
    None if there is none: some pipeline patterns need a later version of the framework.
    """
    is_later = "--hybrid-layer-pattern" in entry["text"]
    return Path(entry["checkout"]) if entry.get("checkout") and not is_later else None


def main() -> int:
    """Check all exported files read from standard input. Frameworks themselves print to standard
    output, so the answers are written to a separate stream.
    """
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    answers, sys.stdout = sys.stdout, sys.stderr
    entries = json.load(sys.stdin)
    try:
        for target in {entry["target"] for entry in entries}:
            check_installed(TARGETS[target].package)
    except InputError as error:
        json.dump({"missing": str(error)}, answers)
        return 0
    json.dump({"problems": [problem_of(entry) for entry in entries]}, answers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
