"""Engines ``fsdp-eager`` and ``fsdp-compiled``: FSDP2 of models in torch's own operators.

``fsdp-eager`` runs the operators of a block one by one, so RMSNorm, rotary embedding and the gate
are chains of kernels that read and write their numbers again and again, partly in 32 bits.
``fsdp-compiled`` has each block and the loss compiled (``torch.compile``), which makes one kernel
of each chain. ``fsdp-compiled-blocks`` has blocks compiled, and the loss operator by operator, as
torchtitan had it until the spring of 2025. ``-rowwise`` scales 8-bit products row by row.

FSDP2 copies gathered weights apart, in each pass, and gradients together before they are reduced
(``_fsdp_collectives.py``).
"""

from dataclasses import replace

from mistlab.engines.baselines import LOSS_IN_32_BITS
from mistlab.engines.engine_memory import EngineMemory
from mistlab.engines.fsdp import FSDP, ROWWISE
from mistlab.engines.kernel_rules import KernelRule
from mistlab.schedule.orders import INTERLEAVED
from mistlab.values.precision import Precision

# Bytes a parameter: weights are read and written in 16 bits (8 in both passes); gradients are read
# in 16 bits and written in 32, in place of sums (6, as in the graph).
_COPIES = KernelRule(kind="accumulate", adds="weight", bytes_factor=14 / 6)

# Bytes of each chain over those of the graph's one kernel. Forward RMSNorm: to 32
# bits (6), square (8), mean (4), product (8), to 16 bits (6), weights (4), in place of 4.
_EAGER = (
    KernelRule(name="mistlab.rms_norm", bytes_factor=9.0),
    KernelRule(name="mistlab.rms_norm_backward", bytes_factor=92 / 6),
    # To 32 bits (6), complex product (8), to 16 bits (6), in place of 4; queries and keys.
    KernelRule(name="mistlab.rotate_", bytes_factor=5.0),
    # The activation and the product; in the backward pass two products and the activation.
    KernelRule(name="mistlab.swiglu", bytes_factor=5 / 3),
    KernelRule(name="mistlab.swiglu_backward", bytes_factor=9 / 5),
    # Gradients of a block's input are summed over queries, keys and values, of the network's input
    # over gate and network: three sums beside the graph's two.
    KernelRule(name="aten.add", phase="backward", bytes_factor=2.5),
    # The largest number of a tensor, and its conversion in either layout, are kernels of their own.
    KernelRule(name="mistlab.cast", bytes_factor=2.0),
    _COPIES,
    *LOSS_IN_32_BITS,
)
_BLOCKS = (
    # One kernel adds and norms; in the backward pass it norms and adds.
    KernelRule(name="mistlab.rms_norm", module="mlp_norm", bytes_factor=0.5),
    KernelRule(name="aten.add", phase="backward", bytes_factor=1 / 3),
    # Queries, keys and values have weights of their own: their gradients are not joined.
    KernelRule(name="aten.cat", module="attention", bytes_factor=0.0),
    _COPIES,
)
# A loss that is compiled reads its logits twice, and once more to write their gradient: 8 bytes a
# logit in place of 20.
_LOSS = tuple(
    KernelRule(kind=kind, module="head", bytes_factor=0.4) for kind in ("elementwise", "reduction")
)


def _memory(kept_by: str, wide_logits: int) -> dict[Precision, EngineMemory]:
    return {
        name: replace(row, kept_by=kept_by, wide_logits=wide_logits)
        for name, row in FSDP.memory.items()
    }


_WIDE = FSDP.memory["bf16"].wide_logits
# Hardware files made from A100's rates have 66 % of the datasheet's for memory; with this share it
# is 86 %, as H100's is by its own.
MEMORY_SHARE = 1.31
FSDP_EAGER = replace(
    FSDP,
    name="fsdp-eager",
    kernels=_EAGER,
    memory=_memory("eager", _WIDE),
    orders=(*FSDP.orders, *INTERLEAVED),
    memory_share=MEMORY_SHARE,
    shares_on={
        "a100-80gb": (FSDP.products_share, 1.0, MEMORY_SHARE),
        "a100-40gb": (FSDP.products_share, 1.0, MEMORY_SHARE),
        # The files of MI300X and MI325X are H100's by datasheet.
        **dict.fromkeys(("h100-80gb", "mi300x-192gb", "mi325x-256gb"), FSDP.shares_on["h100-80gb"]),
    },
    # Torchao's products on GB200 are those on B200.
    eight_bit_on={**FSDP.eight_bit_on, "gb200-186gb": FSDP.eight_bit_on["b200-180gb"]},
    measured_as="fsdp",
)
FSDP_COMPILED = replace(
    FSDP_EAGER,
    name="fsdp-compiled",
    kernels=(*_BLOCKS, *_LOSS),
    # 16-bit logits and their gradient.
    memory=_memory("compiled", 0),
)
FSDP_COMPILED_BLOCKS = replace(
    FSDP_COMPILED,
    name="fsdp-compiled-blocks",
    kernels=(*_BLOCKS, *LOSS_IN_32_BITS),
    memory=_memory("compiled", _WIDE),
)
OF_TORCH = (
    *(FSDP_EAGER, FSDP_COMPILED, FSDP_COMPILED_BLOCKS),
    *(
        replace(row, name=f"{row.name}-rowwise", eight_bit_on=ROWWISE)
        for row in (FSDP_EAGER, FSDP_COMPILED, FSDP_COMPILED_BLOCKS)
    ),
)
