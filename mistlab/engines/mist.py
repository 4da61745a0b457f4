"""The row of the published Mist (EuroSys 2025), whose runs predictions are compared with.

No plan can name it: engine mistlab has its schedule, and kernels of its own.
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

# The optimizer's step of a layer waits for the next iteration, just before its first forward.
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
    """What it keeps in a precision of so many bytes; layers come and go through rings of two."""
    return EngineMemory(weight=width, gradient=width, optimizer=12, rings=True)


MIST = Engine(
    name="mist",
    overlapped=STREAMED,
    # Its stages waited for every transfer.
    sends="blocking",
    kernels=SEQUENCE_FIRST,
    memory={"fp16": ring_memory(2), "bf16": ring_memory(2), "fp32": ring_memory(4)},
    # Its rates were fitted with a step of one kernel, which reads gradient, master and moments and
    # writes the latter three.
    step_moved={"fp16": 28, "bf16": 28, "fp32": 28},
    offloads=True,
    measured_as="mistlab",
    is_for_plans=False,
)
