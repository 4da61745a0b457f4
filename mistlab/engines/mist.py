"""The engine ``mist``: the published Mist (EuroSys 2025), with whose runs we compare predictions.

Plans cannot name it. They name engine ``mistlab``, which has the same schedule and kernels of its
own.
"""

from mistlab.engines.baselines import SEQUENCE_FIRST
from mistlab.engines.engine import Engine
from mistlab.engines.engine_memory import EngineMemory
from mistlab.schedule.slot_table import (
    BACKWARD,
    FORWARD,
    GATHER_SHARDED,
    GATHER_STEPPED,
    REDUCE,
    REDUCE_SHARDED,
    Task,
    Template,
    evict,
    fetch,
)

# A layer's optimizer step waits for the next iteration, just before the layer's first forward.
_STEP_AHEAD = Task(stream="compute", kind="S", place="ahead")

STREAMED = Template(
    phases={
        "first_forward": (
            *(_STEP_AHEAD, FORWARD, GATHER_STEPPED, fetch("G"), fetch("O")),
            *(evict("O", "here"), evict("P", "here"), evict("A")),
        ),
        "forward": (FORWARD, GATHER_SHARDED, fetch("P"), evict("A")),
        "backward": (
            *(BACKWARD, GATHER_SHARDED, REDUCE_SHARDED, fetch("P"), fetch("G"), fetch("A")),
            evict("G"),
        ),
        "last_backward": (
            *(BACKWARD, GATHER_SHARDED, REDUCE, fetch("P"), fetch("G"), fetch("A")),
            evict("G"),
        ),
        "step": (),
    },
)


def ring_memory(width: int) -> EngineMemory:
    """Memory in a precision of ``width`` bytes, with rings of two buffers."""
    return EngineMemory(weight=width, gradient=width, optimizer=12, rings=True)


MIST = Engine(
    name="mist",
    overlapped=STREAMED,
    # The published runtime's stages wait for every transfer.
    sends="blocking",
    kernels=SEQUENCE_FIRST,
    memory={"fp16": ring_memory(2), "bf16": ring_memory(2), "fp32": ring_memory(4)},
    # Rates were fitted with a step of one kernel, which reads gradient, master and moments and
    # writes master and moments.
    step_moved={"fp16": 28, "bf16": 28, "fp32": 28},
    offloads=True,
    measured_as="mistlab",
    is_for_plans=False,
)
