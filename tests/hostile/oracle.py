"""What no answer may be, whatever the input: the oracle of hostile inputs."""

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

from tests.hostile.case import Case
from tests.hostile.run import MOST_BYTES, MOST_CPU_S, MOST_WALL_S, Outcome

# Done, no answer, wrong usage; an export that no longer fits.
STATUSES = {"export": (0, 1, 2, 3)}
USUAL = (0, 1, 2)
# A message is some lines, not a page.
MOST_LETTERS = 2000
# Numbers of an answer that are above 0 wherever they are given.
POSITIVE = (
    *("iteration_s", "iteration_s_low", "iteration_s_high", "tokens_per_s", "predicted_s"),
    *("simulated_s", "global_batch", "sequence_length", "micro_batch", "micro_batches", "step_s"),
    *("peak_allocated_bytes", "peak_reserved_bytes", "peak_allocated_gib", "peak_reserved_gib"),
    *("gpu_hours", "days", "reserved_bytes", "gpus"),
)
MAY_BE_ZERO = ("step_s",)


def problems(case: Case, outcome: Outcome) -> list[str]:
    """What is wrong with an outcome, in words; nothing where it is as it should be."""
    return [*_ends(case, outcome), *_says(case, outcome), *_answers(case, outcome)]


def _ends(case: Case, outcome: Outcome) -> Iterator[str]:
    if outcome.cpu_s > MOST_CPU_S or outcome.wall_s > MOST_WALL_S:
        yield f"hangs: {outcome.cpu_s:.0f} s of the processor, {outcome.wall_s:.0f} s"
    elif outcome.status not in STATUSES.get(case.command, USUAL):
        yield f"exit status {outcome.status}"
    if outcome.grown_bytes > MOST_BYTES:
        yield f"grows by {outcome.grown_bytes / 2**30:.1f} GiB"
    if case.must_refuse and outcome.status == 0:
        yield "is taken, and should be refused"


def _says(case: Case, outcome: Outcome) -> Iterator[str]:
    if "Traceback" in outcome.err or "Traceback" in outcome.out:
        yield f"traceback: {outcome.err.strip().splitlines()[-1][:200]}"
    if "Exception ignored" in outcome.err:
        yield "an exception at the end"
    if outcome.status == 2 and len(outcome.err) > MOST_LETTERS:
        yield f"a message of {len(outcome.err)} letters"
    if outcome.status in (1, 2) and not (outcome.err.strip() or outcome.out.strip()):
        yield "refused without a word"


def _answers(case: Case, outcome: Outcome) -> Iterator[str]:
    """What is wrong with an answer in JSON that is said to be one."""
    if outcome.status != 0 or "--json" not in case.arguments:
        return
    for line in outcome.out.splitlines():
        try:
            answer = json.loads(line, parse_constant=_refuse_constant)
        except ValueError as error:
            yield f"no JSON: {error}"
            continue
        yield from _numbers(answer)
        yield from _echoes(case, answer)


def _refuse_constant(text: str) -> None:
    message = f"{text} is not a number"
    raise ValueError(message)


def _numbers(answer: Any) -> Iterator[str]:
    every = ((key, one) for key, value in _entries(answer) for one in _listed(value))
    for key, value in every:
        if key not in POSITIVE or value is None:
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value):
            yield f"{key} is {value!r}"
        elif value < 0 or (value == 0 and key not in MAY_BE_ZERO):
            yield f"{key} is {value!r}, not above 0"


def _echoes(case: Case, answer: Any) -> Iterator[str]:
    """Where an answer has read another size than the input has."""
    for key, value in _entries(answer):
        if key in case.echo and value != case.echo[key] and not isinstance(value, list | dict):
            yield f"{key} was {case.echo[key]!r}, and is read as {value!r}"
    sizes = [case.echo.get(name) for name in ("sequence_length", "global_batch")]
    if isinstance(answer, dict) and None not in sizes and "tokens_per_s" in answer:
        try:
            tokens = float(answer["tokens_per_s"]) * float(answer["iteration_s"])
        except (KeyError, TypeError, ValueError) as error:
            yield f"no seconds and tokens: {error!r}"
            return
        if not math.isclose(tokens, math.prod(sizes), rel_tol=1e-6):  # type: ignore[type-var]
            yield f"{tokens:g} tokens a step, of {sizes[1]} sequences of {sizes[0]}"


def _listed(value: Any) -> Sequence[Any]:
    """The numbers of a value: a run of a plan gives those of each rank."""
    return value if isinstance(value, list) else [value]


def _entries(answer: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(answer, dict):
        for key, value in answer.items():
            yield key, value
            yield from _entries(value)
    elif isinstance(answer, list):
        for value in answer:
            yield from _entries(value)
