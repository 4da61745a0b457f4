"""What the executor adds to the host's time for a block, with nothing else that takes time.

Blocks of hidden size 64 on 8 tokens. A round times, one after the other, the executor's forward and
backward pass of a block (the difference between models of five blocks and of one, as
``runtime.profiling.launches`` has it) and those of as many plain blocks: ``block(x).backward(g)``,
or torch's own checkpointing of it where blocks are computed again. Seconds are the process's own,
without those that other processes took. ``extra_info`` has the ratio of the medians, and the
quartiles of the rounds' ratios. Streams are simulated ones, or the real ``CudaStreams`` on a driver
that does nothing: what CUDA itself takes to record and wait for events comes on top of both.
Run on one core: ``taskset -c 0 make benchmark``.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from statistics import median, quantiles
from time import process_time
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils.checkpoint import checkpoint  # noqa: E402

from mistlab.plan import NO_OFFLOAD, Offload  # noqa: E402
from runtime.engine.cuda import CudaStreams  # noqa: E402
from runtime.engine.simulated import SimulatedStreams  # noqa: E402
from runtime.models.families import model_of  # noqa: E402
from runtime.profiling.launches import one_thread  # noqa: E402
from runtime.profiling.tiny_blocks import FEW, HIDDEN, MANY, SEQUENCE, TinyBlocks, tiny  # noqa: E402

ROUNDS = 20
PASSES = 32
CPU = torch.device("cpu")


class NoDevice:
    """A driver, its streams and its events, of which nothing does anything."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *_args, **_named: self

    def using(self, stream: object) -> nullcontext[None]:
        return nullcontext()

    def threads(self, name: str) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1)

    def elapsed_time(self, end_event: object) -> float:
        return 0.0


STREAMS = {
    "simulated": lambda _device: SimulatedStreams(spoils=False),
    "cuda": lambda device: CudaStreams(device, NoDevice()),
}
OFFLOADS = {
    "nothing": NO_OFFLOAD,
    "optimizer": Offload(optimizer=1.0),
    "weights and gradients": Offload(weights=1.0, gradients=1.0),
    "activations": Offload(activations=1.0),
}


def plain_blocks(family: str, again: bool) -> Callable[[], float]:
    """Times a forward and a backward of plain blocks, forward through all before going back."""
    blocks = model_of(tiny(family, "flash", "fp32", layers=MANY - FEW)).blocks
    for parameter in blocks.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    inputs = [torch.randn(1, SEQUENCE, HIDDEN, requires_grad=True) for _ in blocks]
    gradient = torch.randn(1, SEQUENCE, HIDDEN)

    def forward(block: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, x, use_reentrant=False) if again else block(x)

    def sample_s() -> float:
        begin = process_time()
        for _ in range(PASSES // len(blocks)):
            outputs = [forward(block, x) for block, x in zip(blocks, inputs, strict=True)]
            while outputs:
                outputs.pop().backward(gradient)
        return (process_time() - begin) / PASSES

    sample_s()
    return sample_s


@pytest.mark.parametrize("offloaded", OFFLOADS)
@pytest.mark.parametrize("again", [False, True], ids=["kept", "again"])
@pytest.mark.parametrize("streams", STREAMS)
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_a_block_through_the_executor(
    benchmark, family: str, streams: str, again: bool, offloaded: str
) -> None:
    with one_thread():
        plain = plain_blocks(family, again)
        blocks = TinyBlocks(
            *(family, "flash", "fp32", CPU),
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
