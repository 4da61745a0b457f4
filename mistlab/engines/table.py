"""The table of all engines by name; a new engine is a row in its family's file, and one name here.

A row is imported when it is first asked for, so that names alone cost nothing.
"""

from collections.abc import MutableMapping
from typing import TYPE_CHECKING

from mistlab.core.on_use import OnUse, imported

if TYPE_CHECKING:
    from mistlab.engines.engine import Engine

# The rows of files by name, in the order in which users read them; ``fsdp-te`` is ``FSDP_TE``.
_ROWS = (
    ("mistlab", ("mistlab",)),
    ("baselines", ("megatron",)),
    ("megatron_core", ("megatron-core", "megatron-core-fused-loss", "megatron-fsdp")),
    ("megatron_core", ("megatron-bridge", "megatron-bridge-alltoall", "megatron-bridge-eager")),
    ("megatron_core", ("megatron-bridge-graph",)),
    ("baselines", ("zero-bubble", "zero-bubble-waiting", "deepspeed", "aceso")),
    ("nanotron", ("nanotron", "nanotron-whole-inputs")),
    ("fsdp", ("fsdp", "fsdp-rowwise", "fsdp-te")),
    ("fsdp", ("fsdp-eager", "fsdp-compiled", "fsdp-compiled-blocks")),
    ("fsdp", ("fsdp-eager-rowwise", "fsdp-compiled-rowwise", "fsdp-compiled-blocks-rowwise")),
    ("mistlab", ("mist",)),
    ("megatron_core", ("megatron-core-adapters", "megatron-bridge-adapters")),
    ("fsdp", ("fsdp-adapters", "fsdp-eager-adapters")),
)

ENGINES: "MutableMapping[str, Engine]" = OnUse(
    {
        name: imported(f"mistlab.engines.{file}:{name.upper().replace('-', '_')}")
        for file, names in _ROWS
        for name in names
    }
)


def names_for_plans() -> tuple[str, ...]:
    """The names of all engines, each of which a plan may name."""
    return tuple(ENGINES)


def names_that_wait() -> tuple[str, ...]:
    """The names of the engines that can turn overlapping off."""
    return tuple(name for name, row in ENGINES.items() if row.afterwards is not None)
