"""The number of tokens that the model of a configuration was released for."""

from mistlab.huggingface.type_keys import TypeKeys, scaling_kind

# The keys of the context length; a type has one of them.
LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
ORIGINAL = "original_max_position_embeddings"


def context_of(keys: TypeKeys) -> int | None:
    """The context length, extended by rotary scaling where its key has the length before; None if
    the file does not say it.

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
