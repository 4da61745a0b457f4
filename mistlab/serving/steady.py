"""Serving under a steady load, a constant number of requests in flight, in closed form.

In the steady state, each step decodes a token of every running request. Within ``O`` steps (the
mean number of output tokens) every request ends, and is replaced by one whose prompt is prefilled.
So the time per token is that of a decode step and, for each running request, 1 / ``O`` of a
prefill. Requests that find no memory wait: the time to the first token follows from their number
and the rate (Little's law).

Axes: C rows, each a layout under a load.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mistlab.core.arrays import Bools, Floats
from mistlab.serving.step_cost import LayoutColumns, decode_parts, prefill_parts

# The mean number of tokens whose keys and values a running request holds: its prompt, and this
# share of its output.
HELD_OUTPUT = 0.6
# The bytes of a GPU that engines reserve for activations, CUDA graphs and buffers of collectives.
KEPT_BYTES = 2.5e9
_ROUNDS = 6
# The parts of a step whose times are multiplied by an engine's fitted constants.
PARTS = ("products", "experts", "attention", "links", "floors", "kernels")
Constants = Mapping[str, Floats]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SteadyLoad:
    """A constant load of each replica: requests in flight, mean prompt and output tokens, and the
    limits of the engine's scheduler. Fields are arrays with an entry for each candidate.
    """

    in_flight: Floats
    prompt: Floats
    output: Floats
    sequences: Floats
    budget: Floats
    waves: Bools | None = None
    reads_first: Bools | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SteadyState:
    """What each candidate replica achieves under a constant load: time to first token, time per
    output token, requests per second, running requests, and how many tokens' keys and values fit in
    memory.
    """

    first_s: Floats
    token_s: Floats
    requests_per_s: Floats
    running: Floats
    capacity: Floats
    fits: Bools


def decode_step_s(of: LayoutColumns, by: Constants, running: Floats, context: Floats) -> Floats:
    """The seconds of a decode step, in which every running request gets one token, for each
    candidate replica.
    """
    parts = decode_parts(of, running, context)
    factors = {name: by[name] for name in PARTS}
    device_s = parts.summed(factors) * by["decode"]
    host_s = by["host"] + by["sequence"] * running / of.dp / of.pp
    return np.asarray(of.pp * (device_s + host_s) + _message_s(of, by, running * context))


def _message_s(of: LayoutColumns, by: Constants, tokens: Floats) -> Floats:
    """The seconds in which an engine's driver process sends token ids to its worker processes, for
    each candidate replica; zero on a single GPU.
    """
    workers = of.tp * of.pp * of.dp
    each_s = workers * by.get("written", 0.0) + by.get("read", 0.0)
    return np.asarray(np.where(workers > 1, tokens * each_s, 0.0))


def prompt_pass_s(of: LayoutColumns, by: Constants, tokens: Floats, looked: Floats) -> Floats:
    """The seconds of a prefill pass over ``tokens`` tokens on each pipeline stage, for each
    candidate replica; a token attends to ``looked`` tokens on average.
    """
    parts = prefill_parts(of, tokens, looked)
    factors = {name: by[name] for name in PARTS}
    return parts.summed(factors) * by["prefill"]


def capacity_tokens(of: LayoutColumns, by: Constants) -> Floats:
    """The number of tokens whose keys and values fit in memory beside the weights, for each
    candidate replica; negative if the weights alone do not fit.
    """
    free = of.memory_bytes * by["memory"] - of.weight_bytes - KEPT_BYTES
    return np.asarray(free * of.dp / np.maximum(of.cache_bytes, 1.0))


def steady_state(of: LayoutColumns, by: Constants, load: SteadyLoad) -> SteadyState:
    """The times and throughput under a constant load of candidate replicas that prefill and decode
    on the same GPUs.
    """
    capacity = capacity_tokens(of, by)
    each = load.prompt + HELD_OUTPUT * load.output
    fits = capacity >= load.prompt + load.output
    room = np.maximum(capacity / each, 1.0)
    admitted = np.minimum(np.minimum(load.in_flight, room), load.sequences * of.dp)
    outputs = np.maximum(load.output - 1, 1.0)
    # Each of the batches that a pipeline has in flight may prefill ``budget`` tokens per step.
    most_read = of.batches * load.budget * load.output / (load.prompt + load.output)
    decoding = np.minimum(admitted, most_read)
    waves = _mask(load.waves, admitted)
    together = waves & _mask(load.reads_first, admitted)
    # Of requests that arrive together, half of the other prompts are prefilled before a request's
    # own prompt on average; the rest delay its output.
    at_once = np.minimum(admitted, np.maximum(load.budget / load.prompt, 1.0)) / admitted
    stall = np.where(together, (1 - at_once) / 2, by["stall"])
    burst = np.where(together, (1 + at_once) / 2 - 1 / admitted, by["burst"])
    first_s = token_s = np.zeros_like(admitted)
    for _ in range(_ROUNDS):
        step_s = decode_step_s(of, by, decoding, load.prompt + load.output / 2)
        arriving = decoding / load.output
        read_s = _prompt_s(of, by, load, np.where(together, admitted * at_once, arriving))
        # A request's own prefill comes before its output, so only other requests' prefill delays
        # output tokens.
        others = arriving * np.where(
            together, 1.0, np.maximum(admitted - 1, 0.0) / np.maximum(admitted, 1.0)
        )
        waits = np.where(waves, 1.0, _waits(of, arriving))
        token_s = step_s + stall * others * read_s / of.dp * waits
        others_s = burst * admitted * read_s / of.dp
        aside_s = by["first"] + by["steps"] * step_s + others_s
        first_s = by["wait"] * (aside_s + by["prompt"] * read_s * of.pp)
        # A request misses one decode step of its replica while its prompt is prefilled, however
        # long that takes.
        share = outputs * token_s / (aside_s + outputs * token_s)
        # The requests of a wave (sent all together) decode all at the same time.
        share = np.where(together, 1.0, share)
        decoding = np.minimum(admitted * share, most_read)
        # Prompts queue where the token budget of steps prefills them more slowly than requests end.
        first_s = np.maximum(first_s, (admitted / decoding - 1) * outputs * token_s)
    rate = admitted / (first_s + outputs * token_s)
    waiting_s = np.maximum(load.in_flight - admitted, 0.0) / rate
    return SteadyState(
        first_s=first_s + waiting_s,
        token_s=token_s,
        requests_per_s=rate,
        running=admitted,
        capacity=capacity,
        fits=fits,
    )


def split_state(
    prefill: LayoutColumns,
    decode: LayoutColumns,
    by: Constants,
    load: SteadyLoad,
    workers: tuple[Floats, Floats],
) -> SteadyState:
    """The times and throughput under a constant load where some GPUs only prefill and others only
    decode; ``workers`` has the numbers of prefill and of decode replicas.
    """
    readers, decoders = workers
    capacity = capacity_tokens(decode, by)
    each = load.prompt + HELD_OUTPUT * load.output
    fits = capacity >= load.prompt + load.output
    room = np.maximum(capacity / each, 1.0)
    most = np.minimum(room, load.sequences * decode.dp) * decoders
    outputs = np.maximum(load.output - 1, 1.0)
    ones = np.ones_like(load.prompt)
    read_s = _prompt_s(prefill, by, load, ones) / prefill.dp
    first_s = token_s = np.zeros_like(ones)
    decoding = np.minimum(load.in_flight, most)
    for _ in range(_ROUNDS):
        token_s = decode_step_s(decode, by, decoding / decoders, load.prompt + load.output / 2)
        own_s = by["prompt"] * read_s * prefill.pp * prefill.dp + by["steps"] * token_s
        first_s = by["wait"] * (
            by["first"] + own_s + by["burst"] * load.in_flight / readers * read_s
        )
        # Prefill replicas cannot complete prompts faster than they prefill them.
        slowest_s = load.in_flight * read_s / readers - outputs * token_s
        first_s = np.maximum(first_s, slowest_s)
        share = outputs * token_s / (first_s + outputs * token_s)
        decoding = np.minimum(load.in_flight * share, most)
    # Requests queue for their first token if the decode replicas have no memory for them.
    first_s = np.maximum(first_s, (load.in_flight / most - 1) * outputs * token_s)
    return SteadyState(
        first_s=first_s,
        token_s=token_s,
        requests_per_s=load.in_flight / (first_s + outputs * token_s),
        running=decoding,
        capacity=capacity,
        fits=fits,
    )


def _mask(given: Bools | None, like: Floats) -> Bools:
    return np.zeros(like.shape, dtype=bool) if given is None else given


def _waits(of: LayoutColumns, arriving: Floats) -> Floats:
    """The factor by which prompts lengthen a step, because all batches in flight wait for the one
    with the most prompts.

    A pipeline has one batch for each stage in flight, and all wait for the longest one: if a step
    prefills ``N`` prompts, spread over ``B`` batches, it is longer by ``B`` times the prompts of
    the fullest batch, instead of by ``N``. The same holds for ranks of attention data parallelism
    that run in lockstep, with a batch each. ``N`` has a Poisson distribution.
    """
    # The expected distance from a Poisson-distributed number N to the next multiple of B
    # (``stages``), by roots of unity.
    mean = np.maximum(arriving, 1e-9)
    lacking = np.zeros_like(mean)
    for stages in np.unique(of.batches[of.batches > 1]):
        rows, roots = of.batches == stages, np.exp(2j * np.pi * np.arange(stages) / stages)
        chances = np.exp(mean[rows, None] * (roots - 1))
        turned = np.exp(-2j * np.pi * np.arange(stages)[:, None] * np.arange(stages) / stages)
        of_rest = (chances @ turned.T).real / stages
        lacking[rows] = of_rest @ (-np.arange(stages) % stages)
    return np.asarray((mean + lacking) / mean)


def _prompt_s(of: LayoutColumns, by: Constants, load: SteadyLoad, arriving: Floats) -> Floats:
    """The seconds of one prompt on each pipeline stage, for each candidate replica: short prompts
    share a prefill pass, and long prompts take several.
    """
    # Arrivals are random, so steps that prefill have more prompts than an average step, and all
    # batches wait for the one with the most prompts.
    lumps = arriving * _waits(of, arriving) / of.batches
    lumps = lumps / -np.expm1(-np.maximum(arriving, 1e-9))
    several = np.clip(lumps, 1.0, np.maximum(load.budget / load.prompt, 1.0))
    passes = np.ceil(load.prompt / load.budget)
    pass_s = prompt_pass_s(of, by, load.prompt * several / passes, load.prompt / 2)
    return np.asarray(pass_s * passes / several)
