"""The four streams side by side, in all mixtures of some lengths, and each alone.

How much work makes a length is found out first: products, transfers and copies of one size each, as
many as take that long. Copies in both directions at once are among the mixtures.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch

from mistlab.machine.slowdowns import STREAMS
from runtime.models.config import TYPE_OF_PRECISION
from runtime.profiling.lanes import lanes_of
from runtime.profiling.links import collective, copy
from runtime.profiling.rank import Rank
from runtime.profiling.timing import TimedWork, Timing

TRIAL_RUNS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """What streams are loaded with: ``levels`` are lengths in ``unit_s``, 0 an idle stream.

    ``product_size`` is of the square products that compute, ``chunk_bytes`` of one transfer.
    """

    levels: tuple[int, ...]
    unit_s: float
    product_size: int
    chunk_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapCase:
    """A length for each stream, while groups of ``gpus`` communicate."""

    gpus: int
    levels: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapTiming:
    """Each stream's work alone (None where it has none), and all of it together."""

    alone: tuple[Timing | None, ...]
    together: Timing


def overlap_cases(gpus: int, levels: tuple[int, ...]) -> list[OverlapCase]:
    """All mixtures in which at least two streams are busy; a lone device does not communicate."""
    transfers = levels if gpus > 1 else (0,)
    mixtures = product(levels, transfers, levels, levels)
    busy = (mixture for mixture in mixtures if sum(level > 0 for level in mixture) > 1)
    return [OverlapCase(gpus=gpus, levels=mixture) for mixture in busy]


class StreamLoads:
    """The work of each stream of one process, and how often it makes a unit of length."""

    def __init__(self, lengths: Lengths, rank: Rank, gpus: int) -> None:
        self._rank = rank
        self._lanes = lanes_of(rank.clock.device)
        works = {
            "compute": lambda: _products(lengths.product_size, rank),
            "gpu_to_gpu": lambda: collective("all_gather", lengths.chunk_bytes, rank, gpus),
            "host_to_device": lambda: copy("host_to_device", lengths.chunk_bytes, rank),
            "device_to_host": lambda: copy("device_to_host", lengths.chunk_bytes, rank),
        }
        self._loads = [
            None if stream == "gpu_to_gpu" and gpus == 1 else self._load(works[stream], lengths)
            for stream in STREAMS
        ]

    def measured(self, case: OverlapCase) -> OverlapTiming:
        """Each stream alone, then all of them together."""
        works = [self._work(stream, level) for stream, level in enumerate(case.levels)]
        return OverlapTiming(
            alone=tuple(None if work is None else self._timed([work]) for work in works),
            together=self._timed([work for work in works if work is not None]),
        )

    def _load(self, make: Callable[[], TimedWork], lengths: Lengths) -> tuple[TimedWork, int]:
        """A piece of work, and how many of it all processes take for a unit."""
        work = make()
        seconds = self._rank.slowest(self._rank.clock.samples_s(work, TRIAL_RUNS))
        return work, max(1, round(lengths.unit_s / Timing.of(seconds).median_s))

    def _work(self, stream: int, level: int) -> TimedWork | None:
        load = self._loads[stream]
        if not level or load is None:
            return None
        work, unit = load

        def repeated() -> None:
            for _ in range(level * unit):
                work()

        return repeated

    def _timed(self, works: list[TimedWork]) -> Timing:
        return self._rank.timed(lambda: self._lanes.side_by_side(works))


def _products(size: int, rank: Rank) -> TimedWork:
    dtype = TYPE_OF_PRECISION[rank.precision]
    left, right = (torch.randn(size, size, device=rank.clock.device).to(dtype) for _ in range(2))
    result = torch.empty_like(left)
    return lambda: torch.mm(left, right, out=result)
