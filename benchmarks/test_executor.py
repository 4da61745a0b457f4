"""What the executor adds to the host's time for a block, with nothing else that takes time.

Blocks of hidden size 64 on 8 tokens. A round times, one after the other, a forward and a backward
pass of a block by the executor and of a plain one: ``block(x).backward(g)``, or torch's own
checkpointing of it where blocks are computed again. Both times are differences between models of
eight blocks and of four, as in ``runtime.profiling.launches``: embedding and head are in both
models and drop out, and a block finds a CPU's caches as cold as in any model. Seconds are CPU
seconds of this process. ``extra_info`` has the ratio of the medians, and the quartiles of the
rounds' ratios. Streams are simulated, or are the real ``CudaStreams`` on a driver that does
nothing: the time in which CUDA itself records events and waits for them comes on top. A Llama
block's plain twin has ``F.rms_norm``, ``F.silu`` and rotary embedding by slices. Run on one core:
``taskset -c 0 make benchmark``.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from itertools import product
from statistics import median, quantiles
from time import process_time
from typing import Any, cast

import pytest

pytest.importorskip("torch")

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from mistlab.plan.plan import NO_OFFLOAD, Offload
from mistlab.plan.workload import Family
from runtime.devices.driver import Driver
from runtime.engine.streams.device_streams import CudaStreams, SimulatedStreams
from runtime.engine.streams.lanes import Streams
from runtime.models.families import model_of
from runtime.profiling.launches import (
    FEW,
    MANY,
    MICRO_BATCHES,
    SEQUENCE,
    TinyBlocks,
    tiny,
    undisturbed,
)

ROUNDS = 8
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


STREAMS: dict[str, Callable[[torch.device], Streams]] = {
    "simulated": lambda _device: SimulatedStreams(spoils=False),
    "cuda": lambda device: CudaStreams(device, cast("Driver", NoDevice())),
}
OFFLOADS = {
    "nothing": NO_OFFLOAD,
    "optimizer": Offload(optimizer=1.0),
    "weights and gradients": Offload(weights=1.0, gradients=1.0),
    "activations": Offload(activations=1.0),
}


class PlainModel:
    """Blocks between an embedding and a head, each differentiated by itself."""

    def __init__(self, family: Family, layers: int, again: bool) -> None:
        self.again = again
        self.model = model_of(tiny(family, "flash", "fp32", layers=layers))
        for parameter in self.model.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        if family == "llama":
            for block in self.model.blocks:
                take_torch_s_own(block)
        self.tokens = torch.zeros(1, SEQUENCE, dtype=torch.int64)
        self.iteration_s()

    def iteration_s(self) -> float:
        begin = process_time()
        for _ in range(MICRO_BATCHES):
            self.passes()
        return process_time() - begin

    def passes(self) -> None:
        embedded = self.model.embedding(self.tokens)
        inputs, outputs = [leaf(embedded)], []
        for block in self.model.blocks:
            outputs.append(self.forward(block, inputs[-1]))
            inputs.append(leaf(outputs[-1]))
        self.model.head(inputs[-1], self.tokens).backward()
        while outputs:
            outputs.pop().backward(inputs.pop().grad)
        embedded.backward(inputs.pop().grad)

    def forward(self, block: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, x, use_reentrant=False) if self.again else block(x)


def take_torch_s_own(block: Any) -> None:
    """Let a Llama block have norms, gate and rotary embedding as one writes them with torch."""

    def gated(inner: torch.Tensor) -> torch.Tensor:
        gate, up = inner.chunk(2, -1)
        return functional.silu(gate) * up

    def rotated(x: torch.Tensor, shape: Any, heads: int) -> torch.Tensor:
        tables = block.attention.rotary
        cosine, sine = (one[: shape[1], None] for one in (tables.cosine, tables.sine))
        whole = x.view(shape)
        first, second = whole[:, :, :heads].chunk(2, -1)
        turned = (first * cosine - second * sine, second * cosine + first * sine)
        return torch.cat([torch.cat(turned, -1), whole[:, :, heads:]], 2).view(x.shape)

    for norm in (block.attention_norm, block.mlp_norm):
        norm.forward = partial(
            functional.rms_norm,
            normalized_shape=norm.weight.shape,
            weight=norm.weight,
            eps=norm.epsilon,
        )
    block.mlp._activated, block.attention._rotated = gated, rotated


def leaf(x: torch.Tensor) -> torch.Tensor:
    return x.detach().requires_grad_()


def plain_blocks(family: Family, again: bool) -> Callable[[], float]:
    """Times a forward and a backward pass of a plain block."""
    few, many = (PlainModel(family, layers, again) for layers in (FEW, MANY))
    return lambda: (many.iteration_s() - few.iteration_s()) / (MANY - FEW) / MICRO_BATCHES


# Of 32 cases of nine seconds each, those whose differences say what each choice takes; all others
# are slow.
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
