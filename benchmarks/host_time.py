"""Measures how much the executor adds to the host's time for a block, and writes a page.

python -m benchmarks.host_time [--rounds N] [--page PAGE] times, round by round, a forward and a
backward pass of a tiny block by the executor and of a plain one, with CUDA's streams on a driver
that does nothing. A plain block has torch's own norms and activations, and rotary embedding by
slices. Seconds are CPU seconds of this process. Exit status 1: a ratio is above its limit.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any, cast

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from experiments.pages.page_tables import write_page
from mistlab.plan.plan import NO_OFFLOAD, Offload
from mistlab.plan.workload import Family
from runtime.devices.driver import Driver
from runtime.engine.streams.device_streams import CudaStreams, SimulatedStreams
from runtime.engine.streams.lanes import Streams
from runtime.models.families import model_of
from runtime.models.operators import RMSNorm
from runtime.profiling.launches import (
    FEW,
    MANY,
    MICRO_BATCHES,
    SEQUENCE,
    TinyBlocks,
    tiny,
    undisturbed,
)

FAMILIES: tuple[Family, ...] = ("gpt", "llama", "falcon")
# The largest allowed time of a block by the executor, as a multiple of a plain block's time, by
# what is offloaded.
LIMITS = {"nothing": 1.3, "optimizer": 2.0, "weights and gradients": 2.0, "activations": 2.0}
CPU = torch.device("cpu")


class NoDevice:
    """A stand-in for a driver, its streams and its events, whose methods do nothing."""

    def record(self, stream: object) -> None:
        """Does nothing. It is defined because it is looked up faster then: a block records a dozen
        events.
        """

    def wait_event(self, event: object) -> None:
        """Does nothing, like ``record``."""

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
    """Blocks between an embedding and a head; autograd differentiates each block separately."""

    def __init__(self, family: Family, layers: int, again: bool) -> None:
        self.again = again
        self.model = model_of(tiny(family, "flash", "fp32", layers=layers))
        for parameter in self.model.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
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
    """Give a block torch's own norms, and a gate and a rotary embedding written in plain torch."""

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

    for norm in block.modules():
        if isinstance(norm, RMSNorm):
            norm.forward = partial(  # type: ignore[method-assign]
                functional.rms_norm,
                normalized_shape=norm.weight.shape,
                weight=norm.weight,
                eps=norm.epsilon,
            )
    if block.mlp.structure.gated_mlp:
        block.mlp._activated = gated
    if block.attention.rotary is not None:
        block.attention._rotated = rotated


def leaf(x: torch.Tensor) -> torch.Tensor:
    return x.detach().requires_grad_()


def plain_blocks(family: Family, again: bool) -> Callable[[], float]:
    """A function that returns the CPU seconds of a forward and a backward pass of a plain block."""
    few, many = (PlainModel(family, layers, again) for layers in (FEW, MANY))
    return lambda: (many.iteration_s() - few.iteration_s()) / (MANY - FEW) / MICRO_BATCHES


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTimes:
    """The CPU seconds of a block by the executor and of a plain block, from the median of all
    rounds.
    """

    family: Family
    offloaded: str
    executor_s: float
    plain_s: float

    @property
    def times_plain(self) -> float:
        """The executor's time as a multiple of the plain block's."""
        return self.executor_s / self.plain_s


def measured(family: Family, offloaded: str, rounds: int) -> HostTimes:
    """Time models of few and of many blocks in turn, several rounds. What disturbs the machine
    slows all models, so their medians over the rounds can be compared.
    """
    with undisturbed():
        plain = [PlainModel(family, layers, again=False) for layers in (FEW, MANY)]
        blocks = TinyBlocks(
            *(family, "flash", "fp32", CPU), offload=OFFLOADS[offloaded], streams=STREAMS["cuda"]
        )
        seconds = [
            (*blocks.samples_s(process_time), *(one.iteration_s() for one in plain))
            for _ in range(rounds)
        ]
    executor_few, executor_many, few, many = map(median, zip(*seconds, strict=True))
    passes = (MANY - FEW) * MICRO_BATCHES
    return HostTimes(
        family=family,
        offloaded=offloaded,
        executor_s=(executor_many - executor_few) / passes,
        plain_s=(many - few) / passes,
    )


def page(rows: Sequence[HostTimes], rounds: int) -> Iterator[str]:
    """The lines of the page of results."""
    made = f"taskset -c 0 python -m benchmarks.host_time --rounds {rounds} --page PAGE"
    heads = ("family", "offloaded", "plain, us", "executor, us", "ratio", "limit")
    yield from (
        *("# The host's time for a block", ""),
        f"Made by `{made}`:",
        "CPU seconds of a forward and a backward pass of a tiny block by the executor, over those",
        "of a block of torch's norms, `F.gelu` or `F.silu`, and rotary embedding by slices.",
        "A block's time is that of a model of 8 less that of one of 4, each the median of",
        f"{rounds} rounds in turn. CUDA's own calls are not in them; no GPU has run it.",
        "",
        f"| {' | '.join(heads)} |",
        f"|{'---|' * len(heads)}",
    )
    for row in rows:
        plain_us, executor_us = row.plain_s * 1e6, row.executor_s * 1e6
        yield (
            f"| {row.family} | {row.offloaded} | {plain_us:.0f} | {executor_us:.0f} | "
            f"{row.times_plain:.2f} | {LIMITS[row.offloaded]} |"
        )
    yield ""


def main() -> int:
    """Time all cases, print the results, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    rows = []
    for family, offloaded in product(FAMILIES, OFFLOADS):
        rows.append(measured(family, offloaded, options.rounds))
        sys.stdout.write(f"{family}, {offloaded} offloaded: {rows[-1].times_plain:.2f}\n")
        sys.stdout.flush()
    if options.page is not None:
        write_page(options.page, "\n".join(page(rows, options.rounds)))
    return int(any(row.times_plain > LIMITS[row.offloaded] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
