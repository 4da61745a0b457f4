"""How many tokens a training has: those that an option gives, or those of samples and epochs."""

import argparse
import math
import re

from mistlab.core.values import did_you_mean, reject, shown
from mistlab.economy.bill import chinchilla_tokens, steps_of
from mistlab.plan.workload import Workload

# Numbers as spoken: 50M, 1.5B, 2T.
_WITH_UNIT = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([kmbtKMBT])")
_ZEROS = {"k": 3, "m": 6, "b": 9, "t": 12}
PUBLISHED = "published"
# The most samples of all epochs together: more than any data set has, and few enough that their
# tokens are a number.
MOST_SAMPLES = 10**15


def tokens_of(options: argparse.Namespace, work: Workload, parameters: int) -> float:
    """The tokens of a training from ``--tokens``, or from ``--samples`` and ``--epochs``, of which
    each sample fills a sequence.
    """
    if options.samples is not None:
        return _of_samples(options) * work.sequence_length
    if options.epochs is not None:
        reject(
            f"--epochs {options.epochs:g}: has an effect only with a number of samples: give "
            "--samples too, or --tokens with those of all epochs together"
        )
    if options.tokens == PUBLISHED and work.train == "adapters":
        reject(
            "--tokens published: those of the model's pretraining, but adapters are trained: give "
            "--samples (and --epochs), or --tokens with a number such as 50e6"
        )
    trained = work.model.trained
    published = None if trained is None else trained.tokens
    if options.tokens == "chinchilla" or (options.tokens == PUBLISHED and published is None):
        return chinchilla_tokens(parameters)
    if options.tokens == PUBLISHED and published is not None:
        return published
    try:
        tokens = float(options.tokens)
    except ValueError:
        if match := _WITH_UNIT.fullmatch(options.tokens):
            number = f"{match[1]}e{_ZEROS[match[2].lower()]}"
            reject(f"--tokens: {options.tokens} has a letter as its unit: give {number}")
        near = did_you_mean(options.tokens, (PUBLISHED, "chinchilla"))
        remedy = near or "give a number such as 300e9, or published or chinchilla"
        reject(f"--tokens: {options.tokens!r} is not a number of tokens: {remedy}")
    if not 0 < tokens < math.inf:
        reject(f"--tokens: {tokens:g} is not a number of tokens: give one above 0, such as 300e9")
    return tokens


def _of_samples(options: argparse.Namespace) -> float:
    """The samples of all epochs together."""
    if options.tokens != PUBLISHED:
        reject(
            f"--samples {options.samples}: the training has --tokens {options.tokens} already: "
            "leave out --samples or --tokens"
        )
    epochs = 1.0 if options.epochs is None else options.epochs
    if options.samples < 1:
        reject(f"--samples: {options.samples} is too small: give at least 1")
    if not 0 < epochs < math.inf:
        reject(f"--epochs: {epochs:g} is not a number of epochs: give one above 0, such as 3")
    if options.samples > MOST_SAMPLES:
        reject(f"--samples: {shown(options.samples)} is too large: give at most {MOST_SAMPLES:g}")
    if options.samples * epochs > MOST_SAMPLES:
        reject(
            f"--epochs: {epochs:g} times {options.samples:,} samples are too many: give at most "
            f"{MOST_SAMPLES / options.samples:g} epochs"
        )
    return float(options.samples * epochs)


def check_no_tokens(options: argparse.Namespace) -> None:
    """Refuse a number of tokens beside a number of GPU hours, whose bill does not depend on it."""
    given = {"tokens": None if options.tokens == PUBLISHED else options.tokens}
    given |= {name: getattr(options, name) for name in ("samples", "epochs")}
    for name, value in given.items():
        if value is not None:
            reject(
                f"--{name} {value}: has no effect on the bill of --gpu-hours "
                f"{options.gpu_hours:g}: leave out --{name} or --gpu-hours"
            )


def length_words(options: argparse.Namespace, work: Workload, tokens: float) -> str:
    """A sentence with the tokens and steps of a training, and that its sequences are full."""
    steps = math.ceil(steps_of(tokens, work.tokens))
    samples = ""
    if options.samples is not None:
        epochs = 1.0 if options.epochs is None else options.epochs
        samples = f" ({_counted(options.samples, 'sample')}, {_counted(epochs, 'time')})"
    advice = ""
    if options.samples is not None or work.train == "adapters":
        advice = ": shorter samples that are packed have fewer (give their tokens by --tokens)"
    return (
        f"{work.model.name or 'The model'} trains on {_counted(round(tokens), 'token')}{samples} "
        f"in {_counted(steps, 'step')} of {_counted(work.global_batch, 'full sequence')} of "
        f"{_counted(work.sequence_length, 'token')}{advice}."
    )


def _counted(number: float, noun: str) -> str:
    """A number with commas and its noun: ``1 step``, ``1,000 samples``, ``2.5 times``."""
    return f"{number:,.15g} {noun}{'' if number == 1 else 's'}"
