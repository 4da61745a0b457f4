"""Where the GPUs' time of an iteration goes, as a table and in a sentence."""

from collections.abc import Mapping

from experiments.frame.tables import aligned
from mistlab.values.breakdown import PARTS, Breakdown

WORDS: Mapping[str, str] = {
    "arithmetic_s": "the model's arithmetic at the peak rate",
    "products_s": "products below the peak rate",
    "attention_s": "attention below the peak rate",
    "memory_bound_s": "operators that memory limits",
    "recomputation_s": "recomputation",
    "tensor_exchange_s": "exposed exchanges of tensor parallelism",
    "context_exchange_s": "exposed exchanges of context parallelism",
    "expert_exchange_s": "exposed exchanges of experts",
    "data_parallel_s": "exposed reductions and gathers of data parallelism",
    "sends_s": "sends between stages",
    "copies_s": "exposed copies of offloading",
    "hosts_s": "hosts that launch late",
    "step_s": "the optimizer's step",
    "imbalance_s": "waiting for the busiest stage",
    "bubble_s": "the bubble of the pipeline",
}
# Parts below this share of an iteration are not worth a line; a sentence leaves out more.
NEGLIGIBLE, SMALL = 5e-4, 0.015


def lines(breakdown: Breakdown) -> list[str]:
    """A table: a line for each part that is not negligible, its mean over all GPUs, and on a GPU of
    the busiest stage where there are several."""
    mean, whole_s = breakdown.parts, breakdown.parts.total_s
    busiest = breakdown.stages[breakdown.busiest_stage]
    rows = [["where a GPU's time goes", "s", "share"]]
    of_stage = [f"stage {breakdown.busiest_stage}, the busiest: s"]
    for name in PARTS:
        seconds = getattr(mean, name), getattr(busiest, name)
        if max(seconds) >= NEGLIGIBLE * whole_s:
            rows.append([WORDS[name], f"{seconds[0]:.3f}", f"{seconds[0] / whole_s:.1%}"])
            of_stage.append(f"{seconds[1]:.3f}")
    rows.append(["the iteration", f"{whole_s:.3f}", "100.0%"])
    of_stage.append(f"{busiest.total_s:.3f}")
    if len(breakdown.stages) > 1:
        rows = [[*row, cell] for row, cell in zip(rows, of_stage, strict=True)]
    return aligned(rows)


def sentence(breakdown: Breakdown) -> str:
    """The arithmetic, then all other parts that are not small, the largest first."""
    whole_s = breakdown.parts.total_s
    first, *others = ((name, getattr(breakdown.parts, name) / whole_s) for name in PARTS)
    told = sorted((one for one in others if one[1] >= SMALL), key=lambda one: -one[1])
    rest = sum(share for _, share in others) - sum(share for _, share in told)
    words = [f"{share:.0%} {WORDS[name]}" for name, share in (first, *told)]
    words += [f"{rest:.0%} the rest"] if rest >= NEGLIGIBLE else []
    return f"Where a GPU's time goes: {', '.join(words)}."
