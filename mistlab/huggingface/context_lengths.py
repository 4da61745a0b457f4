"""Reads a model's context length from its configuration: the number of tokens that it was released
for.
"""

from mistlab.huggingface.type_keys import TypeKeys, scaling_kind

# The keys for the context length in different model types.
LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
ORIGINAL = "original_max_position_embeddings"


def context_of(keys: TypeKeys) -> int | None:
    """Return a model's context length, or None if the file lacks it; a length from before rotary
    scaling is multiplied by the scaling factor.

    Llama 3's and LongRoPE's scaling are part of the given length already.
    """
    name = next((name for name in LENGTHS if keys.config.get(name) is not None), None)
    if name is None:
        return None
    given = keys.needed(name) - keys.row.unused_positions
    kind, factor = scaling_kind(keys.scaling), keys.rotary("factor")
    before = keys.rotary(ORIGINAL) if kind == "yarn" else given
    if kind not in ("linear", "dynamic", "yarn") or factor is None or before is None:
        return given
    return max(given, round(before * factor))
