"""Ways to train a workload with less memory, as changes of its fields and as command-line options
that make them.
"""

from collections.abc import Sequence
from typing import Any

from mistlab.plan.workload import Workload

# A way to train with less memory: the fields of the workload that it sets, and its name with the
# options that set them.
Way = tuple[dict[str, Any], str]

IN_CHUNKS: Way = ({"loss": "chunked"}, "a loss in chunks (--loss chunked)")
LEANEST: Way = (
    {"train": "adapters", "base": "4bit", "loss": "chunked"},
    "adapters on 4 bits with a loss in chunks (--train lora --base 4bit --loss chunked)",
)
_IN_8_BITS: Way = ({"optimizer": "adamw-8bit"}, "moments of 8 bits (--optimizer adamw-8bit)")
_ON_ATTENTION: Way = (
    {"adapter_targets": "attention"},
    "adapters on attention alone (--adapter-targets attention)",
)
# The factors by which a rank of adapters is divided.
_FEWER = (2, 4)


def leaner(workload: Workload) -> tuple[Way, ...]:
    """The ways to train with less memory than a workload does, smallest change first, but for those
    of ``leaner_adapters``. Each changes at least one field of the workload.
    """
    ways = [
        IN_CHUNKS,
        ({"states": "16bit"}, "weights and states of 16 bits (--states 16bit)"),
        *([_IN_8_BITS] if workload.train == "all" else []),
        ({"train": "adapters"}, "adapters alone (--train lora)"),
        ({"train": "adapters", "base": "4bit"}, "adapters on 4 bits (--train lora --base 4bit)"),
    ]
    return _changing(workload, ways)


def leaner_adapters(workload: Workload) -> tuple[Way, ...]:
    """The ways to have smaller adapters, or smaller states of adapters, than a workload has, each
    alone before two together; empty if it trains all weights.
    """
    if workload.train != "adapters":
        return ()
    ranks: list[Way] = [
        ({"adapter_rank": rank}, f"adapters of rank {rank} (--rank {rank})")
        for factor in _FEWER
        if (rank := workload.rank // factor)
    ]
    smaller = [*ranks, _ON_ATTENTION]
    if workload.optimizer == "adamw-8bit":
        return _changing(workload, smaller)
    values, in_8_bits = _IN_8_BITS
    together = [(changes | values, f"{remedy} and {in_8_bits}") for changes, remedy in smaller]
    return _changing(workload, [_IN_8_BITS, *smaller, *together])


def _changing(workload: Workload, ways: Sequence[Way]) -> tuple[Way, ...]:
    """The ways that set a field of a workload to another value than it has."""
    return tuple(
        (values, remedy)
        for values, remedy in ways
        if any(getattr(workload, name) != value for name, value in values.items())
    )
