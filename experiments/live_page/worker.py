"""A process that answers questions: it reads lines of JSON and writes lines of JSON.

A question is ``{"question": ..., "body": ...}``. While it is worked on, each event is a line with
``event``; the last line has ``answer``, or ``error`` with the field at fault. SIGINT ends a search,
which then answers with what it has found. The process ends when its input does.
"""

import gc
import json
import os
import signal
import sys
from collections.abc import Mapping
from types import FrameType
from typing import IO, Any

from mistlab.core.units import GIB_BYTES
from mistlab.core.values import FieldError, InputError

try:
    import resource
except ImportError:  # Windows has no limits of this kind.
    resource = None  # type: ignore[assignment]

# The limit of a worker's address space in bytes, and the resident memory at which it is replaced by
# a new process.
MOST_BYTES = 8 * GIB_BYTES
TIRED_BYTES = 1.5 * GIB_BYTES
# The engines for which a plan is predicted before the first question, since the expressions of an
# engine are compiled at its first use.
WARM = ("mistlab", "megatron-core", "fsdp")
# The models whose default search spaces are searched before the first question about a search, so
# that everything is compiled.
SEARCHED = ("llama3-8b", "gpt-oss-20b")
# The kinds of questions of the live page that SIGINT may interrupt: those that are searches.
INTERRUPTED = frozenset(("search", "pareto"))


def main() -> None:
    """Answer the live page's questions, which arrive as lines of standard input, until the input
    ends.
    """
    if resource is not None:
        resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What libraries print goes to standard error, since it must not mix with answers.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    from experiments.live_page.questions import QUESTIONS  # noqa: PLC0415 (after the limit)

    warm_up(*sys.argv[1:])
    _write(out, {"ready": True})
    for line in sys.stdin:
        asked = json.loads(line)
        _write(out, _answer(QUESTIONS[asked["question"]], asked, out))


def _answer(question: Any, asked: Mapping[str, Any], out: IO[str]) -> dict[str, Any]:
    """The answer to a question, or the reason why there is no answer."""
    if asked["question"] in INTERRUPTED:
        signal.signal(signal.SIGINT, _interrupt)
    try:
        reply = {"answer": question(asked["body"], lambda event: _write(out, event))}
    except FieldError as error:
        reply = {"error": str(error), "field": error.path}
    except InputError as error:
        reply = {"error": str(error), "field": ""}
    except KeyboardInterrupt:
        reply = {"error": "stopped before anything was found", "field": ""}
    except RecursionError:
        reply = {"error": "is nested too deeply: write fewer levels", "field": ""}
    except MemoryError:
        reply = {"error": f"needs more than {MOST_BYTES // GIB_BYTES} GiB of memory: ask for less"}
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    return {**reply, "tired": _resident_bytes() > TIRED_BYTES}


def _resident_bytes() -> float:
    """The most resident memory that this process has used; 0 if the system does not report it."""
    return 0.0 if resource is None else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _write(out: IO[str], event: Mapping[str, Any]) -> None:
    try:
        out.write(json.dumps(event, separators=(",", ":")) + "\n")
        out.flush()
    except BrokenPipeError:
        os._exit(0)


def warm_up(lane: str = "") -> None:
    """Compile the expressions of the usual engines; in a process for searches, also what searches
    of the default spaces need.
    """
    from experiments.live_page.questions import (  # noqa: PLC0415 (after the limit)
        predict,
        search,
        serving,
    )

    problem = {
        "model": "llama3-8b",
        "hardware": "h100-80gb",
        "nodes": 1,
        "gpus_per_node": 8,
        "sequence_length": 4096,
        "global_batch": 64,
        "attention": "flash",
        "precision": "bf16",
    }
    for engine in WARM:
        predict({"problem": problem, "knobs": {"engine": engine}}, lambda event: None)
    if lane != "search":
        load = {"model": "llama3-8b", "gpu": "H100", "gpus": 8}
        serving({"load": load}, lambda event: None)
    for model in SEARCHED if lane == "search" else ():
        search({"problem": {**problem, "model": model}, "seconds": 0.2}, lambda event: None)
    # Objects that exist now are permanent; excluded from garbage collection, they no longer slow
    # down the first answer about a new model.
    gc.collect()
    gc.freeze()
