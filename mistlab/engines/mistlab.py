"""The row of this package's own runtime, ``runtime`` (docs/decisions/0014-engine.md)."""

from dataclasses import replace

from mistlab.engines.engine import Engine
from mistlab.engines.kernel_rules import BATCHED_PRODUCTS, KernelRule
from mistlab.engines.mist import STREAMED, ring_memory

# Rules that are not given are those of torch's own operators, of which graphs are.
_KERNELS = (
    # The product adds (runtime.engine.work.products); one kernel adds vectors
    # (ParameterPlaces.add_vectors).
    KernelRule(adds="weight", bytes_factor=0.0),
    KernelRule(adds="vector", together=True),
    # runtime.engine.work.written_out copies neither operands nor results, puts no gradients
    # together and scales inside products, one for each sequence.
    *(
        KernelRule(name=name, module="attention", attention="math", bytes_own_keys=0.0)
        for name in ("aten.clone", "aten.cat", "aten.mul")
    ),
    *(
        KernelRule(name=name, module="attention", bytes_own_keys=1.0, kernels_a_sequence=1)
        for name in BATCHED_PRODUCTS
    ),
    # runtime.models.operators: the graph counts scores read up to each query's own and shares
    # written, 1.5 passes. They are read and written whole; 15 parts in 32 are written before, and 1
    # in 16 is read and written: 2.59 passes, in 8 kernels.
    KernelRule(name="mistlab.causal_softmax", bytes_factor=83 / 48, kernels=8),
    # What graphs have as one kernel is several here. Of a tensor's halves: rotate_ moves 12 where
    # the graph counts 4, swiglu 5 of 3, its backward pass 11 of 5.
    KernelRule(name="mistlab.rotate_", bytes_factor=3.0),
    KernelRule(name="mistlab.swiglu", bytes_factor=5 / 3),
    KernelRule(name="mistlab.swiglu_backward", bytes_factor=2.2),
)

MISTLAB = Engine(
    name="mistlab",
    # StreamedRanks.all_reduce_ reduces beside the products that runtime.engine.work.products puts
    # off.
    overlapped=replace(STREAMED, overlaps_tensor_backward=True),
    kernels=_KERNELS,
    memory={"fp16": ring_memory(2), "bf16": ring_memory(2), "fp32": ring_memory(4)},
    # Gradients are copied to 32 bits (6), one kernel reads gradient, master and moments and writes
    # the latter three (28), and weights are copied from masters (6); under fp16 the kernel writes
    # unscaled gradients too (4). In full precision gradients need no copy, and weights move 8.
    step_moved={"fp16": 44, "bf16": 40, "fp32": 36},
    offloads=True,
    takes_orders=True,
    runs_here=True,
)
