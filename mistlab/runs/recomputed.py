"""The blocks of a stage that a measured run recomputes, whole or in part, by what its row says."""

import re

from mistlab.core.values import FieldError, shown
from mistlab.engines.engine import ENGINES
from mistlab.runs.configuration import Configuration

# What torchtitan calls recomputing each second product of all blocks (with everything but attention
# between products), and each second block.
ALTERNATE = "selective op"
HALF_OF_BLOCKS = ("selective layer", "selective every 2nd layer")
# Words that alone say that nothing is recomputed, or all blocks.
_NOTHING = ("no", "0", "false", "off")
_EVERYTHING = (
    *("whole", "1", "true", "yes", "on", "uniform", "block"),
    *("checkpointing", "activation checkpointing", "gradient checkpointing"),
)
# Megatron's own selective recomputation, which is attention's core.
_CORE = ("selective", "attn", "attention", "core attention")
# Beginnings of ways to recompute what takes hardly any time.
_CHEAP = ("selective:", "selective (recipe", "minimal")


def recomputed(run: Configuration, layers: int) -> dict[str, int]:
    """How many of a stage's blocks are recomputed, by the treatment's dimension."""
    words = run.recompute
    if words in _NOTHING or words.startswith(("none", "no activation")):
        return {}
    if words.startswith(ALTERNATE) or _is_torch_s_selective(run):
        return {"products_recomputed_layers": layers}
    if (whole := _whole_blocks(run, layers)) is not None:
        return {"checkpointed_layers": whole}
    recipe_s_core = words.startswith("selective (recipe") and run.attention == "math"
    if "core_attn" in words or words in _CORE or recipe_s_core:
        return {"core_recomputed_layers": layers}
    if words.startswith(_CHEAP):
        # With fused attention the core keeps nothing that could be recomputed; MaxText's policies
        # that keep all products with weights recompute what is cheap.
        return {}
    column = "recompute"
    raise FieldError(column, f"{shown(words)} cannot be said: give none, full or core_attn")


def _is_torch_s_selective(run: Configuration) -> bool:
    """Torchtitan's selective recomputation is of products, unless it says otherwise."""
    return run.recompute == "selective" and ENGINES[run.engine].system == "fsdp"


def _whole_blocks(run: Configuration, layers: int) -> int | None:
    """How many blocks are recomputed whole; None if the row says another way."""
    words = run.recompute
    if found := re.match(r"(?:full )?block (\d+)\b", words):
        return min(layers, int(found[1]) * run.chunks)
    if words in _EVERYTHING or words.startswith("full"):
        return layers
    if words.startswith(HALF_OF_BLOCKS):
        return layers // 2
    if words.startswith("selective:") and "moe" in re.split(r"[:+]", words):
        return _blocks_of_experts(run, layers)
    return None


def _blocks_of_experts(run: Configuration, layers: int) -> int:
    """Of a stage's blocks those with experts, on average; blocks of hybrid models are short."""
    pattern = run.shape.model.pattern
    if not pattern:
        return layers
    return round(layers * sum(letter in "EGA" for letter in pattern) / len(pattern))
