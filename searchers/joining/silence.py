"""Keeps what a library in C writes to standard output away from it.

HiGHS 1.16 greets with its version wherever it is made, before anything can tell it to be silent; a
command with ``--json`` writes one object to standard output and nothing else.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

STANDARD_OUTPUT = 1


@contextmanager
def silent() -> Iterator[None]:
    """Let nothing that is written inside reach standard output, whoever writes it."""
    sys.stdout.flush()
    try:
        kept = os.dup(STANDARD_OUTPUT)
    except OSError:
        # It was closed, and whoever writes to it writes nowhere.
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, STANDARD_OUTPUT)
        yield
    finally:
        os.dup2(kept, STANDARD_OUTPUT)
        os.close(kept)
        os.close(nowhere)
