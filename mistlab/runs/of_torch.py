"""What rows say of runs on torch's FSDP: whose kernels, what runs again, how often pipelines fill.

Torchtitan's models are torch's own operators. AutoModel's bring Transformer Engine's kernels, or
are Hugging Face's, with adapters.
"""

import re
from collections.abc import Mapping

from mistlab.core.values import refuse
from mistlab.plan.workload import ModelSpec
from mistlab.runs.cells import text_of

# The first month in which torchtitan compiled its loss with its blocks.
LOSS_COMPILED = "2025-04"
# What torchtitan's own recipes recompute (``train_configs/llama3_8b.toml``).
OF_TORCHTITAN = "selective op"
# AutoModel's recipes recompute all blocks of models with 30 billion parameters and more, and none
# of models with 20 billion and fewer (``examples/llm_benchmark``).
LARGE_IN_AUTOMODEL = 24e9


def fsdp_of(cells: Mapping[str, str], remarks: str) -> str:
    """The engine of FSDP of a row."""
    text, date = text_of(cells, "engine").casefold(), text_of(cells, "date")
    if "torchtitan" in text:
        if "torch.compile" not in remarks:
            return "fsdp-eager"
        return "fsdp-compiled-blocks" if date and date < LOSS_COMPILED else "fsdp-compiled"
    if "automodel" in text and "kernels " in remarks:
        if "kernels te" not in remarks:
            return "fsdp-eager"
        # Adapters are those of Hugging Face's models, whose attention is torch's.
        return "fsdp" if "lora" in remarks else "fsdp-te"
    return "fsdp"


def recompute_said(cells: Mapping[str, str]) -> str:
    """A row's words about recomputation; empty if it has none."""
    words = text_of(cells, "recompute").casefold()
    return "" if words.startswith(("not stated", "none (not stated")) else words


def recompute_of(cells: Mapping[str, str], model: ModelSpec, notes: list[str]) -> str:
    """A row's words about recomputation, or those of its software's recipes; empty if neither has
    any."""
    if words := recompute_said(cells):
        return words
    software, assumed = text_of(cells, "engine").casefold(), ""
    if "torchtitan" in software:
        assumed = OF_TORCHTITAN
    elif "automodel" in software and _weights(model) > LARGE_IN_AUTOMODEL:
        assumed = "full"
    as_recipes = f"{assumed} assumed, as recipes have it" if assumed else "none assumed"
    notes.append(f"recompute is not said: {as_recipes}")
    return assumed


def _weights(model: ModelSpec) -> float:
    """About how many parameters a model's blocks have."""
    experts, pattern = model.experts, model.pattern
    networks, width = (experts.count, experts.ffn) if experts else (1, model.ffn)
    share = sum(letter in "EGA" for letter in pattern) / len(pattern) if pattern else 1.0
    return model.layers * model.hidden * (4 * model.hidden + 3 * share * networks * width)


def batches_at_once(
    cells: Mapping[str, str], remarks: str, micro_batch: int, of_step: int, stages: int
) -> int:
    """The micro-batches for which a pipeline fills and drains, of all ``of_step``: in AutoModel
    those of a rank's local batch ("LBS 4")."""
    found = re.search(r"\blbs ([0-9]+)\b", remarks)
    if found is None or stages == 1 or "automodel" not in text_of(cells, "engine").casefold():
        return of_step
    at_once = max(1, int(found[1]) // micro_batch)
    if of_step % at_once:
        refuse("notes", f"LBS {found[1]} does not divide the batch of a rank: correct one of them")
    return at_once
