"""The engine ``mistlab``: this package's own runtime (docs/decisions/0014-engine.md)."""

from dataclasses import replace

from mistlab.engines.engine import Engine
from mistlab.engines.kernel_rules import BATCHED_PRODUCTS, KernelRule
from mistlab.engines.mist import STREAMED, ring_memory
from mistlab.values.context_ways import GATHER, HEADS, RING

# Operators without a rule here are torch's own, or one kernel of runtime.models.kernels, as in the
# graphs.
_KERNELS = (
    # Products add gradients of weights (runtime.engine.work.products); one kernel adds the
    # gradients of all vectors (ParameterPlaces.add_vectors).
    KernelRule(adds="weight", bytes_factor=0.0),
    KernelRule(adds="vector", together=True),
    # runtime.engine.work.stage_modules copies neither operands nor results, joins no gradients, and
    # scales inside its products, one for each sequence.
    *(
        KernelRule(name=name, module="attention", attention="math", bytes_own_keys=0.0)
        for name in ("aten.clone", "aten.cat", "aten.mul")
    ),
    *(
        KernelRule(name=name, module="attention", bytes_own_keys=1.0, kernels_a_sequence=1)
        for name in BATCHED_PRODUCTS
    ),
)

MISTLAB = Engine(
    name="mistlab",
    # StreamedRanks.all_reduce_ reduces beside the products that runtime.engine.work.products puts
    # off.
    overlapped=replace(STREAMED, overlaps_tensor_backward=True),
    kernels=_KERNELS,
    memory={"fp16": ring_memory(2), "bf16": ring_memory(2), "fp32": ring_memory(4)},
    # In bytes a parameter: gradients are copied to 32 bits (6), one kernel reads gradient, master
    # and moments and writes master and moments (28), and weights are copied from masters (6). Under
    # fp16 the kernel also writes unscaled gradients (4). In full precision gradients need no copy,
    # and weights move 8.
    step_moved={"fp16": 44, "bf16": 40, "fp32": 36},
    optimizers=("adamw", "adamw-bf16", "adamw-8bit"),
    drops_tokens=True,
    offloads=True,
    context_exchanges=(RING, GATHER, HEADS),
    takes_orders=True,
    runs_here=True,
)
