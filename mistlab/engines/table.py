"""The table of all engines by name; a new engine is a file with its row, and one name here."""

from mistlab.engines.aceso import ACESO
from mistlab.engines.adapters import with_adapters
from mistlab.engines.deepspeed import DEEPSPEED
from mistlab.engines.engine import Engine
from mistlab.engines.fsdp import FSDP, FSDP_ROWWISE
from mistlab.engines.fsdp_of_torch import FSDP_EAGER, OF_TORCH
from mistlab.engines.fsdp_te import FSDP_TE
from mistlab.engines.megatron import MEGATRON
from mistlab.engines.megatron_core import (
    MEGATRON_BRIDGE,
    MEGATRON_BRIDGE_ALLTOALL,
    MEGATRON_BRIDGE_EAGER,
    MEGATRON_BRIDGE_GRAPH,
    MEGATRON_CORE,
    MEGATRON_CORE_FUSED_LOSS,
    MEGATRON_FSDP,
)
from mistlab.engines.mist import MIST
from mistlab.engines.mistlab import MISTLAB
from mistlab.engines.nanotron import NANOTRON, NANOTRON_WHOLE_INPUTS
from mistlab.engines.zero_bubble import ZERO_BUBBLE, ZERO_BUBBLE_WAITING

ENGINES: dict[str, Engine] = {
    row.name: row
    for row in (
        *(MISTLAB, MEGATRON, MEGATRON_CORE, MEGATRON_CORE_FUSED_LOSS, MEGATRON_FSDP),
        *(MEGATRON_BRIDGE, MEGATRON_BRIDGE_ALLTOALL, MEGATRON_BRIDGE_EAGER),
        *(MEGATRON_BRIDGE_GRAPH, ZERO_BUBBLE, ZERO_BUBBLE_WAITING),
        *(
            DEEPSPEED,
            ACESO,
            NANOTRON,
            NANOTRON_WHOLE_INPUTS,
            FSDP,
            FSDP_ROWWISE,
            FSDP_TE,
            *OF_TORCH,
            MIST,
        ),
        *(with_adapters(row) for row in (MEGATRON_CORE, MEGATRON_BRIDGE, FSDP, FSDP_EAGER)),
    )
}


def names_for_plans() -> tuple[str, ...]:
    """Names of the engines that a plan may name."""
    return tuple([name for name, row in ENGINES.items() if row.is_for_plans])


def names_that_wait() -> tuple[str, ...]:
    """Names of the engines for plans that can turn overlapping off."""
    return tuple(name for name in names_for_plans() if ENGINES[name].afterwards is not None)
