"""Layouts that change, in closed form: what a batch of requests takes by phases (Seesaw).

A round reads as many prompts as the host's tier holds, changes to decoding, decodes them, and
changes back. Copies to the host run beside the reading of prompts, copies back beside decoding.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from mistlab.core.units import GIB_BYTES
from mistlab.serving.gpu_facts import gpu_named
from mistlab.serving.load import ServingLoad
from mistlab.serving.resharding import Layout, change_s, host_bytes_per_s
from mistlab.serving.steady import HELD_OUTPUT, capacity_tokens, decode_step_s, prompt_pass_s
from mistlab.serving.step_cost import LayoutColumns, RankLayout

# The share of host memory for keys and values.
HOST_SHARE = 0.5
# Shares of a round's last requests at which its end is timed.
LEFT = (0.75, 0.5, 0.35, 0.25, 0.15, 0.1, 0.05, 0.02, 0.01)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutPair:
    """The layout that reads prompts, and the one that decodes, on the same GPUs."""

    reading: Layout
    decoding: Layout

    @property
    def text(self) -> str:
        """The pair in words."""
        return f"{self.reading.text} -> {self.decoding.text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Changing:
    """Everything about a pair but the load: tokens that fit on the GPUs while they decode and in
    the host's tier, seconds of both changes, and seconds to copy a token's keys and values."""

    pair: LayoutPair
    gpu_tokens: int
    host_tokens: int
    to_decode_s: float
    to_prompts_s: float
    copy_s: float


def rank_layout(plain: RankLayout, layout: Layout) -> RankLayout:
    """A replica of a layout, with everything else as in a plain one."""
    return replace(plain, tp=layout.tp, pp=layout.pp, dp=1, ep=1)


def changing_of(plain: RankLayout, pair: LayoutPair, constants: Mapping[str, float]) -> Changing:
    """What a pair of layouts means for a model on its GPUs."""
    gpu, gpus = gpu_named(plain.gpu), pair.decoding.gpus
    whole = LayoutColumns.of([rank_layout(plain, Layout())])
    decode = LayoutColumns.of([rank_layout(plain, pair.decoding)])
    by = {name: np.array([value]) for name, value in constants.items()}
    weight_bytes, cache_bytes = float(whole.weight_bytes[0]), float(whole.cache_bytes[0])
    on_node = min(1.0, gpus / gpu.gpus_per_node)
    host_bytes = gpu.host_memory_gib * GIB_BYTES * HOST_SHARE * on_node
    return Changing(
        pair=pair,
        gpu_tokens=int(capacity_tokens(decode, by)[0]) * pair.decoding.dp,
        host_tokens=int(host_bytes / cache_bytes),
        to_decode_s=change_s(pair.reading, pair.decoding, weight_bytes, gpu),
        to_prompts_s=change_s(pair.decoding, pair.reading, weight_bytes, gpu),
        copy_s=cache_bytes / gpus / host_bytes_per_s(gpu, gpus),
    )


def batch_s(
    of: Changing,
    plain: RankLayout,
    constants: Mapping[str, float],
    load: ServingLoad,
    *,
    limits: tuple[float, float] = (2048.0, 256.0),
) -> float:
    """Seconds of a batch of requests that come at once; ``limits`` are the tokens of a pass, and
    requests that run on a replica."""
    requests, prompt, output = len(load), load.mean_prompt, load.mean_output
    budget, sequences = limits
    by = {name: np.array([value]) for name, value in constants.items()}
    reading = LayoutColumns.of([rank_layout(plain, of.pair.reading)])
    together = max(1.0, budget // prompt)
    # Long prompts look at more tokens than the mean prompt's half.
    squares = float(np.mean(np.square(load.prompts)))
    tokens, looked = np.array([together * prompt]), np.array([squares / prompt / 2])
    read_s = float(prompt_pass_s(reading, by, tokens, looked)[0]) / together
    read_s /= of.pair.reading.dp
    a_round = min(float(requests), max(1.0, of.host_tokens / prompt))
    rounds = float(np.ceil(requests / a_round))
    replicas = of.pair.decoding.dp
    room = of.gpu_tokens / (prompt + HELD_OUTPUT * output)
    running = max(1.0, min(room, sequences * replicas, a_round))
    # A round ends with fewer and fewer requests, the longest answers last.
    alive = np.append(running * np.array(LEFT), 1.0)
    alive = np.maximum(alive[alive >= 1.0], 1.0)
    ends = np.quantile(load.outputs, 1 - alive / running)
    steps = np.diff(np.append(ends, max(load.outputs)), prepend=0.0)
    counts = np.append(running, alive)
    decoding = LayoutColumns.of([rank_layout(plain, of.pair.decoding)]).rows(
        np.zeros(len(counts), dtype=np.intp)
    )
    context = np.full(len(counts), prompt + output / 2)
    step_s = decode_step_s(decoding, by, counts / replicas, context)
    tail_s = float(np.sum(steps * step_s))
    full = max(0.0, requests / rounds - running) / running * (output - 1)
    decoding_s = rounds * (full * float(step_s[0]) + tail_s)
    reading_s = requests * max(read_s, prompt * of.copy_s)
    changes_s = rounds * of.to_decode_s + (rounds - 1) * of.to_prompts_s
    return reading_s + max(decoding_s, requests * prompt * of.copy_s) + changes_s
