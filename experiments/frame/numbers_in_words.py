"""Numbers with their units, rounded alike by all commands: times, memory, rates and bounds."""

from mistlab.values.plan import Plan
from mistlab.values.prediction import Prediction
from mistlab.values.units import GIB_BYTES

# A number that is not there.
NONE = "-"


def number(value: float | None, form: str, unit: str = "", *, none: str = NONE) -> str:
    """A number in a form such as ``.2f``, with its unit.

    >>> number(1234.5, ",.1f", " s"), number(None, ".2f")
    ('1,234.5 s', '-')
    """
    return none if value is None else f"{value:{form}}{unit}"


def gib(size_bytes: float | None, form: str = ".2f") -> str:
    """A size in GiB, without the unit."""
    return number(None if size_bytes is None else size_bytes / GIB_BYTES, form)


def yes_no(fact: object) -> str:
    """Whether a fact holds, for a table."""
    return "yes" if fact else "no"


def rate_words(plan: Plan, prediction: Prediction) -> str:
    """The time of an iteration with its bounds, tokens a second of all GPUs and of one, and MFU."""
    tokens = prediction.tokens_per_s
    return (
        f"{prediction.iteration_s:.3f} s an iteration (90 % of measurements: "
        f"{prediction.iteration_s_low:.3f} to {prediction.iteration_s_high:.3f}), "
        f"{tokens:,.0f} tokens/s, {tokens / plan.num_gpus:,.0f} a GPU, MFU {prediction.mfu:.0%}"
    )


def brief_words(prediction: Prediction) -> str:
    """The time of an iteration, the memory of the fullest GPU, and whether the plan fits."""
    fits = "fits" if prediction.fits else "does not fit"
    held = gib(prediction.peak_reserved_bytes, ".1f")
    return f"{prediction.iteration_s:.3f} s an iteration, {held} GiB on a GPU, {fits}"


def played_words(simulated_s: float | None) -> str:
    """The time of an iteration as the event simulator plays it."""
    return "too many tasks to play" if simulated_s is None else f"{simulated_s:.3f} s"
