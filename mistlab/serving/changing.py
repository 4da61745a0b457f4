"""Serving that switches all GPUs between parallel degrees for prefill and for decoding (Seesaw):
the time of a batch of requests, in closed form.

A round prefills as many prompts as GPU and host memory hold, changes to the decoding layout,
decodes the requests whose keys and values wait in host memory, and changes back; the last round
decodes all requests. Copies to the host overlap with prefill, copies back with decoding.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import lcm

import numpy as np

from mistlab.core.units import GIB_BYTES
from mistlab.serving.gpu_facts import ServingGpu, gpu_named
from mistlab.serving.load import ServingLoad
from mistlab.serving.model_tensors import tensor_sizes
from mistlab.serving.resharding import (
    Layout,
    change_s,
    host_bytes_per_s,
    moved_of_cache,
    peer_bytes_per_s,
)
from mistlab.serving.steady import HELD_OUTPUT, capacity_tokens, decode_step_s, prompt_pass_s
from mistlab.serving.step_cost import LayoutColumns, RankLayout

# The share of a node's host memory that may hold keys and values of waiting requests.
HOST_SHARE = 0.5
# While the last requests of a batch decode, ever fewer of them run. Decode steps are timed at the
# moments when these shares of the requests still run.
LEFT = (0.75, 0.5, 0.35, 0.25, 0.15, 0.1, 0.05, 0.02, 0.01)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutPair:
    """Two serving layouts (parallel degrees) of the same GPUs: one for prefill, one for
    decoding.
    """

    reading: Layout
    decoding: Layout

    @property
    def text(self) -> str:
        """Both layouts as text, such as ``pp4 -> tp4``."""
        return f"{self.reading.text} -> {self.decoding.text}"


# For each pair of a request's old and new replica, the seconds that each rank takes to receive the
# keys and values of one token when layouts change.
Moves = Mapping[tuple[int, int], Sequence[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTimes:
    """The seconds of changing layouts (parallel degrees) to decode and back, of copying one token's
    keys and values to the host and back, and of sending them between ranks in either change.
    """

    to_decode_s: float = 0.0
    to_prompts_s: float = 0.0
    store_s: float = 0.0
    fetch_s: float = 0.0
    decoding_moves: Moves = field(default_factory=dict)
    prompts_moves: Moves = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Changing:
    """The costs of a pair of layouts, which do not depend on the load: how many tokens' keys and
    values fit on a replica of each layout and in host memory, and the times of switching.
    """

    pair: LayoutPair
    reading_tokens: int
    decoding_tokens: int
    host_tokens: int
    times: PhaseTimes


def rank_layout(plain: RankLayout, layout: Layout) -> RankLayout:
    """A copy of the serving replica ``plain`` with the parallel degrees of ``layout``."""
    return replace(plain, tp=layout.tp, pp=layout.pp, dp=1, ep=1)


def changing_of(plain: RankLayout, pair: LayoutPair, constants: Mapping[str, float]) -> Changing:
    """The memory capacities and switching times of a pair of layouts, for a model on its GPUs."""
    gpu, gpus = gpu_named(plain.gpu), pair.decoding.gpus
    each = [rank_layout(plain, one) for one in (Layout(), pair.reading, pair.decoding)]
    columns = LayoutColumns.of(each)
    by = {name: np.array([value]) for name, value in constants.items()}
    room = capacity_tokens(columns, by)
    whole, reading, decoding = (float(one) for one in columns.cache_bytes)
    on_node = min(1.0, gpus / gpu.gpus_per_node)
    host_bytes = gpu.host_memory_gib * GIB_BYTES * HOST_SHARE * on_node
    over = lcm(pair.reading.tp, pair.decoding.tp)
    # Tensor sizes are for 16-bit weights; ``scale`` converts them to the bytes of the layout's
    # precision.
    sizes = tensor_sizes(plain.model, 2, over)
    scale = float(columns.weight_bytes[0]) / sum(one.split + one.whole for one in sizes)
    ways = (pair.reading, pair.decoding), (pair.decoding, pair.reading)
    changes = [scale * change_s(*way, sizes, gpu) for way in ways]
    moves = [_moves(*way, plain, whole, gpu) for way in ways]
    rate = host_bytes_per_s(gpu, gpus)
    return Changing(
        pair=pair,
        reading_tokens=int(room[1]),
        decoding_tokens=int(room[2]),
        host_tokens=int(host_bytes / whole),
        times=PhaseTimes(
            to_decode_s=changes[0],
            to_prompts_s=changes[1],
            # The seconds to copy one token's keys and values to the host while all replicas copy
            # theirs.
            store_s=reading / rate / pair.reading.dp,
            fetch_s=decoding / rate / pair.decoding.dp,
            decoding_moves=moves[0],
            prompts_moves=moves[1],
        ),
    )


def _moves(
    before: Layout, after: Layout, plain: RankLayout, cache_bytes: float, gpu: ServingGpu
) -> dict[tuple[int, int], tuple[float, ...]]:
    """For each pair of a request's old and new replica, the seconds that each rank takes to receive
    the keys and values of one token.
    """
    each_s = cache_bytes / peer_bytes_per_s(gpu)
    heads, blocks = plain.model.kv_heads, plain.model.layers
    return {
        (source, target): tuple(
            each_s * float(share)
            for share in moved_of_cache((before, source), (after, target), heads, blocks)
        )
        for source in range(before.dp)
        for target in range(after.dp)
    }


def batch_s(
    of: Changing,
    plain: RankLayout,
    constants: Mapping[str, float],
    load: ServingLoad,
    *,
    limits: tuple[float, float] = (2048.0, 256.0),
) -> float:
    """The seconds to serve a batch of requests that arrive together; ``limits`` says how many
    tokens a prefill pass and how many requests a replica may have at most.
    """
    requests, prompt, output = len(load), load.mean_prompt, load.mean_output
    (budget, sequences), times = limits, of.times
    by = {name: np.array([value]) for name, value in constants.items()}
    reading = LayoutColumns.of([rank_layout(plain, of.pair.reading)])
    together = max(1.0, budget // prompt)
    # In causal attention, a token attends to half of its prompt on average. The mean is over
    # tokens, so a prompt counts by the square of its length.
    squares = float(np.mean(np.square(load.prompts)))
    tokens, looked = np.array([together * prompt]), np.array([squares / prompt / 2])
    pass_s = float(prompt_pass_s(reading, by, tokens, looked)[0])
    read_s = pass_s / together / of.pair.reading.dp
    replicas = of.pair.decoding.dp
    room = of.decoding_tokens * replicas / (prompt + HELD_OUTPUT * output)
    running = max(1.0, min(room, sequences * replicas, float(requests)))
    a_round = max(1.0, of.host_tokens / prompt)
    rounds = max(1.0, float(np.ceil((requests - running) / a_round)))
    # In the last round ever fewer requests decode, since the requests with the longest outputs end
    # last.
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
    full = max(0.0, requests - running) / running * (output - 1)
    decoding_s = full * float(step_s[0]) + tail_s
    copied = max(0.0, requests - running) * prompt
    fill_s = rounds * (of.pair.reading.pp - 1) * pass_s
    reading_s = max(requests * read_s + fill_s, copied * times.store_s)
    changes_s = rounds * times.to_decode_s + (rounds - 1) * times.to_prompts_s
    return reading_s + max(decoding_s, copied * times.fetch_s) + changes_s
