"""The context length of a configuration's model: the number of tokens that it was released for."""

from mistlab.huggingface.type_keys import TypeKeys, scaling_kind

# The keys under which configurations give the context length; each model type has one of them.
LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
ORIGINAL = "original_max_position_embeddings"


def context_of(keys: TypeKeys) -> int | None:
    """The context length of a model, extended by rotary scaling where the configuration's key has
    the length before the extension; None if the file does not give it.

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
