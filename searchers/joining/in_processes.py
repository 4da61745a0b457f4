"""Makes calls one after another, or in processes where joblib's context asks for several jobs.

    with joblib.parallel_config(n_jobs=2):
        ...

joblib takes long to import. If nobody has imported it, nobody has asked for jobs.
"""

import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

Argument = TypeVar("Argument")
Answer = TypeVar("Answer")


def jobs() -> int:
    """The number of processes."""
    if "joblib" not in sys.modules:
        return 1
    from joblib import effective_n_jobs  # noqa: PLC0415 (takes long to import)

    return int(effective_n_jobs(None))


def in_processes(
    call: Callable[[Argument], Answer], arguments: Sequence[Argument]
) -> Sequence[Answer]:
    """The results for all arguments, in order."""
    from joblib import Parallel, delayed  # noqa: PLC0415 (takes long to import)

    answers: Sequence[Answer] = Parallel()(delayed(call)(one) for one in arguments)
    return answers
