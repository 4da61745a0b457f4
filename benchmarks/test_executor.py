"""Measures how much the executor adds to the host's time for a block, if nothing else takes time.

Blocks have hidden size 64, on 8 tokens. Each round times a forward and a backward pass of a block
by the executor, then of a plain block: ``block(x).backward(g)``, or with torch's checkpointing
where blocks are recomputed. Both times are differences between models of eight and of four blocks,
as in ``runtime.profiling.launches``: so the time of embedding and head drops out, and blocks find a
CPU's caches as cold as in any model. Seconds are CPU seconds of this process. ``extra_info`` has
the ratio of the medians, and the quartiles of the rounds' ratios. Streams are simulated, or are the
real ``CudaStreams`` on a driver that does nothing: the time that CUDA takes to record and wait for
events comes in addition. A plain Llama block has ``F.rms_norm``, ``F.silu`` and rotary embedding by
slices. Run on one core: ``taskset -c 0 make benchmark``.
"""

from itertools import product
from statistics import median, quantiles
from time import process_time
from typing import Any

import pytest

pytest.importorskip("torch")

from benchmarks.host_time import CPU, OFFLOADS, STREAMS, plain_blocks
from mistlab.plan.workload import Family
from runtime.profiling.launches import TinyBlocks, undisturbed

ROUNDS = 8


# The fast cases among 32 cases of nine seconds each: their differences show what each choice costs.
# All other cases are marked slow.
SHOWN = {
    *(("gpt", "cuda", "kept", offloaded) for offloaded in OFFLOADS),
    *(("gpt", "cuda", "again", offloaded) for offloaded in ("nothing", "activations")),
    *(("gpt", "simulated", again, "nothing") for again in ("kept", "again")),
    *(("llama", "cuda", "kept", offloaded) for offloaded in OFFLOADS),
}
CASES = [
    pytest.param(
        *(family, streams, again == "again", offloaded),
        id="-".join((family, streams, again, offloaded)),
        marks=[pytest.mark.slow] * ((family, streams, again, offloaded) not in SHOWN),
    )
    for family, streams, again, offloaded in product(
        ("gpt", "llama"), STREAMS, ("kept", "again"), OFFLOADS
    )
]


@pytest.mark.parametrize(("family", "streams", "again", "offloaded"), CASES)
def test_a_block_through_the_executor(
    benchmark: Any, family: Family, streams: str, again: bool, offloaded: str
) -> None:
    with undisturbed():
        plain = plain_blocks(family, again)
        blocks = TinyBlocks(
            family,
            "flash",
            "fp32",
            CPU,
            again=again,
            offload=OFFLOADS[offloaded],
            streams=STREAMS[streams],
        )
        pairs: list[tuple[float, float]] = []
        benchmark.pedantic(
            lambda: pairs.append((blocks.sample_s(process_time), plain())), rounds=ROUNDS
        )

    assert len(pairs) == ROUNDS
    executor_s, plain_s = (median(seconds) for seconds in zip(*pairs, strict=True))
    benchmark.extra_info["executor_us"] = executor_s * 1e6
    benchmark.extra_info["plain_us"] = plain_s * 1e6
    benchmark.extra_info["times_plain"] = executor_s / plain_s
    quartiles = quantiles([one / other for one, other in pairs], n=4)
    benchmark.extra_info["quartiles"] = (quartiles[0], quartiles[2])
