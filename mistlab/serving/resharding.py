"""Changes between two serving layouts (parallel degrees) of the same GPUs: the weights, keys and
values that ranks send to one another, and the seconds of a change.

Rank ``r`` of a replica of ``tp x pp`` ranks has the layers of stage ``r // tp``, and the part ``r %
tp`` of each of their tensors. Layer 0 is the embedding, and the head comes last. Data that a rank
has under both layouts stays. The rest comes from the ranks that have it, or from a copy of all
weights in host memory, whichever is faster. All ranks change at once, one layer of each stage at a
time, so a buffer for one layer is enough.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

from mistlab.core.units import GBYTES
from mistlab.serving.gpu_facts import ServingGpu

# The number of GPUs that share a link to the host, as behind one PCIe switch; assumed for all
# nodes.
GPUS_A_HOST_LINK = 2
# The seconds in which the pipeline drains and memory is reallocated in a change of layout (parallel
# degrees), beside the transfers. CUDA graphs are assumed to exist already.
CHANGE_S = 0.2

# A part of a tensor: its start and its end, as fractions of the whole tensor.
Part = tuple[Fraction, Fraction]


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Layout:
    """A serving layout, which says how GPUs share a model: the number of replicas, and each
    replica's tensor- and pipeline-parallel degrees.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1

    @property
    def gpus(self) -> int:
        """The number of GPUs of the layout."""
        return self.dp * self.tp * self.pp

    @property
    def text(self) -> str:
        """A serving layout's parallel degrees as text, such as ``dp2 tp4``."""
        parts = [(self.dp, "dp"), (self.tp, "tp"), (self.pp, "pp")]
        return " ".join(f"{name}{degree}" for degree, name in parts if degree > 1) or "tp1"

    def replica_of(self, rank: int) -> int:
        """The number of the replica to which a rank belongs."""
        return rank // (self.tp * self.pp)

    def stage_of(self, rank: int) -> int:
        """The number of the pipeline stage of a rank, within its replica."""
        return rank % (self.tp * self.pp) // self.tp

    def ranks_of(self, replica: int, stage: int) -> range:
        """The ranks of one replica's pipeline stage, which split the stage's tensors."""
        first = replica * self.tp * self.pp + stage * self.tp
        return range(first, first + self.tp)

    def blocks_of(self, rank: int, blocks: int) -> range:
        """The transformer blocks, counted from 0, of a rank's pipeline stage."""
        stage = self.stage_of(rank)
        return range(blocks * stage // self.pp, blocks * (stage + 1) // self.pp)

    def layers_of(self, rank: int, blocks: int) -> range:
        """The layers of a rank's pipeline stage, where 0 is the embedding, blocks are 1 and up, and
        the head is the last.
        """
        blocks_of_stage, stage = self.blocks_of(rank, blocks), self.stage_of(rank)
        first = 0 if stage == 0 else blocks_of_stage.start + 1
        return range(first, blocks_of_stage.stop + 1 + (stage == self.pp - 1))

    def part_of(self, rank: int) -> Part:
        """The part of each split tensor that a rank holds, in the layers of its stage."""
        return _part(rank % self.tp, self.tp)

    def heads_of(self, rank: int, kv_heads: int) -> Part:
        """The part of all key-value heads that a rank holds; if there are more tensor-parallel
        ranks than heads, several ranks hold the same head.
        """
        tensor_rank = rank % self.tp
        if self.tp <= kv_heads:
            return _part(tensor_rank, self.tp)
        return _part(tensor_rank * kv_heads // self.tp, kv_heads)


def _part(number: int, parts: int) -> Part:
    return Fraction(number, parts), Fraction(number + 1, parts)


def layouts_of(gpus: int, heads: int, layers: int) -> Iterator[Layout]:
    """All layouts of ``gpus`` GPUs whose tensor-parallel degrees divide the model's heads."""
    for dp in _divisors(gpus):
        for tp in _divisors(gpus // dp):
            pp = gpus // dp // tp
            if heads % tp == 0 and pp <= layers:
                yield Layout(dp=dp, tp=tp, pp=pp)


def _divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]


def common(first: Part, second: Part) -> Part:
    """The intersection of two parts of a tensor; an empty intersection ends where it begins."""
    begin = max(first[0], second[0])
    return begin, max(begin, min(first[1], second[1]))


def width(part: Part) -> Fraction:
    """The size of a part of a tensor, as a fraction of the whole tensor."""
    return part[1] - part[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSizes:
    """The bytes of tensors in each of the given ``layers``: of tensors that tensor-parallel ranks
    split, and of tensors that every rank holds whole.
    """

    layers: tuple[int, ...]
    split: int
    whole: int

    def lie_in(self, layers: range) -> bool:
        """Whether any layer with these tensors is in a rank's pipeline stage."""
        return any(layer in layers for layer in self.layers)


def moved_bytes(before: Layout, after: Layout, sizes: Sequence[TensorSizes]) -> list[int]:
    """The bytes of weights that each rank receives in a change of layout; ``sizes`` are those of
    all tensors of the model.
    """
    blocks = max(max(one.layers) for one in sizes) - 1
    return [_moved_to(rank, before, after, sizes, blocks) for rank in range(after.gpus)]


def _moved_to(
    rank: int, before: Layout, after: Layout, sizes: Sequence[TensorSizes], blocks: int
) -> int:
    layers, had = after.layers_of(rank, blocks), before.layers_of(rank, blocks)
    part = after.part_of(rank)
    new = width(part) - width(common(part, before.part_of(rank)))
    kept: list[TensorSizes] = []
    taken: list[TensorSizes] = []
    for tensor in sizes:
        if tensor.lie_in(layers):
            (kept if tensor.lie_in(had) else taken).append(tensor)
    split = new * sum(one.split for one in kept) + width(part) * sum(one.split for one in taken)
    return ceil(split) + sum(one.whole for one in taken)


def moved_of_cache(
    before: tuple[Layout, int], after: tuple[Layout, int], kv_heads: int, blocks: int
) -> list[Fraction]:
    """The share of a request's keys and values that each rank receives when the request moves to a
    replica of another layout (parallel degrees).
    """
    (old, source), (new, target) = before, after
    moved = []
    for rank in range(new.gpus):
        layers, part = new.blocks_of(rank, blocks), new.heads_of(rank, kv_heads)
        taken = len(layers) * width(part) if new.replica_of(rank) == target else Fraction(0)
        if taken and old.replica_of(rank) == source:
            had = old.blocks_of(rank, blocks)
            both = len(range(max(layers.start, had.start), min(layers.stop, had.stop)))
            taken -= both * width(common(part, old.heads_of(rank, kv_heads)))
        moved.append(taken / blocks)
    return moved


@dataclass(frozen=True, slots=True, kw_only=True)
class SentPart:
    """A part of some tensors that one rank sends to another when the layout (parallel degrees)
    changes.
    """

    source: int
    target: int
    part: Part


def pieces_to(
    rank: int, wanted: Part, kept: Part | None, peers: Iterable[tuple[int, Part]]
) -> list[SentPart]:
    """For each part of a tensor that a rank needs, the rank that sends it: the first of ``peers``
    that holds the part.
    """
    left = [wanted]
    if kept is not None and width(common(wanted, kept)):
        left = [(wanted[0], kept[0]), (kept[1], wanted[1])]
    pieces, asked = [], set()
    for peer, part in peers:
        if part in asked:
            continue
        asked.add(part)
        parts = [common(one, part) for one in left if one[0] < one[1]]
        pieces += [SentPart(source=peer, target=rank, part=one) for one in parts if width(one)]
    return pieces


def change_s(before: Layout, after: Layout, sizes: Sequence[TensorSizes], gpu: ServingGpu) -> float:
    """The seconds of a change of layout without moving keys and values; zero if both layouts are
    equal.
    """
    if before == after:
        return 0.0
    most = max(moved_bytes(before, after, sizes))
    by_host_s = most / host_bytes_per_s(gpu, after.gpus)
    by_peers_s = most / peer_bytes_per_s(gpu)
    return CHANGE_S + min(by_host_s, by_peers_s)


def peer_bytes_per_s(gpu: ServingGpu) -> float:
    """The bytes per second at which a GPU receives from other GPUs of its node."""
    return gpu.intra_node_gbytes_per_s * GBYTES


def host_bytes_per_s(gpu: ServingGpu, gpus: int) -> float:
    """The bytes per second between one GPU and host memory while ``gpus`` GPUs of a node copy."""
    return gpu.host_link_gbytes_per_s * GBYTES / min(gpus, GPUS_A_HOST_LINK)
