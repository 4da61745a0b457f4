"""The sizes at which a machine is measured: all of them, or few for a first look."""

from dataclasses import dataclass

from mistlab.values.units import GIB_BYTES, MIB_BYTES
from runtime.profiling.operator_times import AttentionSizes, BlockSizes
from runtime.profiling.side_by_side import Lengths

# Columns of the table that do not shape any operator of a block.
VOCAB = 50304


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSizes:
    """``products`` are widths of square matrices, ``copied_bytes`` of a copy within a device."""

    repetitions: int
    products: tuple[int, ...]
    copied_bytes: int
    blocks: tuple[BlockSizes, ...]
    attention: tuple[AttentionSizes, ...]
    transfer_bytes: tuple[int, ...]
    lengths: Lengths


def blocks(
    widths: tuple[tuple[int, int], ...], sequence_length: int, micro_batches: tuple[int, ...]
) -> tuple[BlockSizes, ...]:
    """Blocks of some widths and heads, four times as wide inside."""
    return tuple(
        BlockSizes(
            hidden=hidden,
            ffn=4 * hidden,
            heads=heads,
            sequence_length=sequence_length,
            vocab=VOCAB,
            micro_batch=micro_batch,
        )
        for hidden, heads in widths
        for micro_batch in micro_batches
    )


def attention_of(of: tuple[BlockSizes, ...]) -> tuple[AttentionSizes, ...]:
    """The attention of blocks."""
    return tuple(
        AttentionSizes(
            micro_batch=block.micro_batch,
            sequence_length=block.sequence_length,
            heads=block.heads,
            head_dim=block.hidden // block.heads,
        )
        for block in of
    )


def doubling(smallest: int, largest: int) -> tuple[int, ...]:
    """Sizes from the smallest to the largest, each twice the one before."""
    return tuple(smallest << power for power in range((largest // smallest).bit_length()))


# Widths and heads of the catalogue's GPT of 350 million to 13 billion parameters.
GPU_BLOCKS = blocks(((1024, 16), (2048, 16), (2560, 32), (4096, 32), (5120, 40)), 2048, (1, 2, 4))
GPU = ProfileSizes(
    repetitions=10,
    products=(4096, 8192, 16384),
    copied_bytes=GIB_BYTES,
    blocks=GPU_BLOCKS,
    attention=(*attention_of(GPU_BLOCKS), *attention_of(blocks(((2560, 32),), 4096, (1, 2)))),
    transfer_bytes=doubling(MIB_BYTES, GIB_BYTES),
    lengths=Lengths(
        levels=(0, 1, 2, 4), unit_s=4e-3, product_size=4096, chunk_bytes=32 * MIB_BYTES
    ),
)
QUICK_GPU_BLOCKS = blocks(((1024, 16), (2560, 32)), 2048, (1, 2))
QUICK_GPU = ProfileSizes(
    repetitions=5,
    products=(8192,),
    copied_bytes=GIB_BYTES,
    blocks=QUICK_GPU_BLOCKS,
    attention=attention_of(QUICK_GPU_BLOCKS),
    transfer_bytes=tuple(size * MIB_BYTES for size in (1, 4, 16, 64, 256)),
    lengths=Lengths(levels=(0, 1, 2), unit_s=4e-3, product_size=4096, chunk_bytes=32 * MIB_BYTES),
)
CPU_BLOCKS = blocks(((128, 4), (256, 8), (512, 8), (768, 12)), 128, (1, 2, 4))
CPU = ProfileSizes(
    repetitions=7,
    products=(256, 512),
    copied_bytes=256 * MIB_BYTES,
    blocks=CPU_BLOCKS,
    attention=attention_of(CPU_BLOCKS),
    transfer_bytes=doubling(MIB_BYTES // 16, 64 * MIB_BYTES),
    lengths=Lengths(levels=(0, 1, 2, 4), unit_s=4e-3, product_size=256, chunk_bytes=4 * MIB_BYTES),
)
QUICK_CPU_BLOCKS = blocks(((128, 4), (256, 8)), 128, (1, 2))
QUICK_CPU = ProfileSizes(
    repetitions=3,
    products=(256,),
    copied_bytes=64 * MIB_BYTES,
    blocks=QUICK_CPU_BLOCKS,
    attention=attention_of(QUICK_CPU_BLOCKS),
    transfer_bytes=tuple(size * MIB_BYTES for size in (2, 4, 16, 64)),
    lengths=Lengths(levels=(0, 1, 2), unit_s=2e-3, product_size=128, chunk_bytes=4 * MIB_BYTES),
)

# By kind of device, and whether it is for a first look.
SIZES = {
    ("cuda", False): GPU,
    ("cuda", True): QUICK_GPU,
    ("cpu", False): CPU,
    ("cpu", True): QUICK_CPU,
}
