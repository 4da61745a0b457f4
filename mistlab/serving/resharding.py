"""Layouts that change on the same GPUs: which weights move where, and what a change takes.

Rank ``r`` of a replica of ``tp x pp`` has the layers of stage ``r // tp`` and the part ``r % tp``
of each of their tensors. What a rank has under both layouts stays; the rest comes from the peers
that have it, or from a copy of all weights in host memory, whichever is faster. All ranks move at
once.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from mistlab.core.units import GBYTES
from mistlab.serving.gpu_facts import ServingGpu

# Two GPUs share a host's link: a node's switches each join two of them (assumed for all nodes).
GPUS_A_HOST_LINK = 2
# A change drains the pipeline, frees and takes memory and captures no graph again: seconds.
CHANGE_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Layout:
    """How GPUs share a model: replicas, and tensor and pipeline parallelism of each."""

    dp: int = 1
    tp: int = 1
    pp: int = 1

    @property
    def gpus(self) -> int:
        """Number of GPUs."""
        return self.dp * self.tp * self.pp

    @property
    def text(self) -> str:
        """The layout in words."""
        parts = [(self.dp, "dp"), (self.tp, "tp"), (self.pp, "pp")]
        return " ".join(f"{name}{degree}" for degree, name in parts if degree > 1) or "tp1"

    def share_of(self, rank: int) -> tuple[tuple[Fraction, Fraction], tuple[Fraction, Fraction]]:
        """The layers and the part of tensors that a rank has, each from and to a share of the
        whole."""
        own = rank % (self.tp * self.pp)
        stage, part = divmod(own, self.tp)
        layers = Fraction(stage, self.pp), Fraction(stage + 1, self.pp)
        return layers, (Fraction(part, self.tp), Fraction(part + 1, self.tp))


def layouts_of(gpus: int, heads: int, layers: int) -> Iterator[Layout]:
    """All layouts of so many GPUs whose degrees divide the model's heads."""
    for dp in _divisors(gpus):
        for tp in _divisors(gpus // dp):
            pp = gpus // dp // tp
            if heads % tp == 0 and pp <= layers:
                yield Layout(dp=dp, tp=tp, pp=pp)


def _divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]


def overlap(before: Layout, after: Layout, rank: int) -> Fraction:
    """The share of all weights that a rank has both before and after a change."""
    (layers, part), (new_layers, new_part) = before.share_of(rank), after.share_of(rank)
    return _common(layers, new_layers) * _common(part, new_part)


def _common(first: tuple[Fraction, Fraction], second: tuple[Fraction, Fraction]) -> Fraction:
    return max(Fraction(0), min(first[1], second[1]) - max(first[0], second[0]))


def moved_shares(before: Layout, after: Layout) -> list[Fraction]:
    """The share of all weights that each rank takes anew in a change."""
    each = Fraction(1, after.tp * after.pp)
    return [each - overlap(before, after, rank) for rank in range(after.gpus)]


def moved_bytes(before: Layout, after: Layout, weight_bytes: float) -> float:
    """Bytes of weights that all ranks together take anew in a change."""
    return float(sum(moved_shares(before, after))) * weight_bytes


def change_s(before: Layout, after: Layout, weight_bytes: float, gpu: ServingGpu) -> float:
    """Seconds of a change of layouts; none if they are equal."""
    if before == after:
        return 0.0
    most = float(max(moved_shares(before, after))) * weight_bytes
    by_host_s = most / host_bytes_per_s(gpu, after.gpus)
    by_peers_s = most / (gpu.intra_node_gbytes_per_s * GBYTES)
    return CHANGE_S + min(by_host_s, by_peers_s)


def host_bytes_per_s(gpu: ServingGpu, gpus: int) -> float:
    """Bytes a second of one GPU to host memory while so many GPUs of a node do the same."""
    return gpu.host_link_gbytes_per_s * GBYTES / min(gpus, GPUS_A_HOST_LINK)
