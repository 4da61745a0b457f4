"""Predictions in the words that all commands share."""

from mistlab.values.plan import Plan
from mistlab.values.prediction import Prediction
from mistlab.values.units import GIB_BYTES


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
    held_gib = prediction.peak_reserved_bytes / GIB_BYTES
    fits = "fits" if prediction.fits else "does not fit"
    return f"{prediction.iteration_s:.3f} s an iteration, {held_gib:.1f} GiB on a GPU, {fits}"
