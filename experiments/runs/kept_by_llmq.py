"""The bytes that the software llmq keeps of a model's blocks for the backward pass, for each kind
of recomputation.
"""

from experiments.runs.run_row import RunRow
from mistlab.plan.workload import ModelSpec

WIDE_BYTES, NARROW_BYTES = 2, 1
# The kinds of recomputation for which llmq's settings say what it keeps.
WAYS = frozenset(("none", "cheap", "half"))
# The low precisions in which llmq may run GEMMs.
NARROW = frozenset(("fp8", "fp4"))


def kept_by_llmq(row: RunRow, model: ModelSpec, tokens: int) -> int | None:
    """The bytes that llmq keeps of all blocks, for a micro-batch of ``tokens`` tokens; None for
    other software.

    In 16 bits, a block keeps the outputs of its norms; queries, keys and values; attention's output
    and the residual after it; the gates and values of the feed-forward network and their product;
    and its residual. Inputs of 8-bit GEMMs are kept in 8 bits only, except attention's output,
    which the backward pass of attention needs.
    """
    if not row.keeps_by_settings or row.recompute not in WAYS:
        return None
    inner, hidden, ffn = model.heads * model.head_dim, model.hidden, model.ffn
    is_narrow = row.precision in NARROW
    of_input = NARROW_BYTES if is_narrow else WIDE_BYTES
    first = row.redoes_norms or (row.redoes_attention and not is_narrow)
    second = row.redoes_norms or (row.redoes_network and not is_narrow)
    kept = WIDE_BYTES * hidden
    kept += of_input * hidden * ((not first) + (not second))
    if not row.redoes_queries:
        kept += WIDE_BYTES * (inner + 2 * model.kv_heads * model.head_dim)
    if not row.redoes_attention:
        kept += WIDE_BYTES * inner
    if not row.redoes_network:
        kept += WIDE_BYTES * 2 * ffn
    if not (row.redoes_network or row.redoes_gates):
        kept += of_input * ffn
    if not row.offloads_residuals:
        kept += WIDE_BYTES * hidden
    return tokens * model.layers * kept
