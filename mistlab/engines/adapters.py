"""Engines that train adapters alone: the model's own weights are frozen (LoRA, Hu et al. 2021).

No product makes gradients of frozen weights, so a backward pass has one product for each of the
forward pass, in place of two. Weights are kept in 16 bits; they have no gradients and no optimizer
state. The adapters themselves are a hundredth of a model, and are not counted.
"""

from dataclasses import replace

from mistlab.engines.engine import Engine
from mistlab.engines.engine_memory import EngineMemory
from mistlab.engines.kernel_rules import KernelRule

_FROZEN = (
    KernelRule(kind="matmul", phase="backward", makes="weight", runs=False),
    KernelRule(kind="accumulate", runs=False),
)


def with_adapters(engine: Engine) -> Engine:
    """The engine, training adapters alone."""
    return replace(
        engine,
        name=f"{engine.name}-adapters",
        kernels=(*_FROZEN, *engine.kernels),
        memory={name: _frozen(row) for name, row in engine.memory.items()},
        step_moved=dict.fromkeys(engine.step_moved, 0),
        measured_as=engine.measured_as or engine.name,
    )


def _frozen(memory: EngineMemory) -> EngineMemory:
    return replace(memory, gradient=0, reduced=0, optimizer=0, step_scratch=0)
