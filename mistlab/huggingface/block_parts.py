"""The parts of blocks that a configuration describes: experts, latent attention, patterns."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mistlab.core.values import refuse, shown
from mistlab.huggingface.type_keys import TypeKeys

Fields = dict[str, Any]

# What lists of blocks call a block without a window, and one with a window.
FULL, SLIDING = "full_attention", "sliding_attention"
_PLAIN = "dense"


def experts_of(keys: TypeKeys) -> Fields:
    """The fields of a model whose blocks have experts."""
    row = keys.row.experts
    experts = {
        "count": keys.needed(row["count"]),
        "active": keys.needed(row["active"]),
        "ffn": keys.needed(row["ffn"]),
        "shared_ffn": _shared_width(keys),
        "hidden": (keys.whole(row["hidden"], minimum=0) or 0) if "hidden" in row else 0,
    }
    every = keys.needed(row["every"]) if "every" in row else 1
    _check_listed(keys, every)
    if every > 1:
        return {"experts": experts, "pattern": "D" * (every - 1) + "A"}
    return {"experts": {**experts, "dense_blocks": _dense_blocks(keys)}}


def _shared_width(keys: TypeKeys) -> int:
    """The width of the experts that every token takes, together."""
    row = keys.row.experts
    count = row.get("shared_count", int("shared_ffn" in row))
    count = count if isinstance(count, int) else keys.whole(count, minimum=0) or 0
    width = keys.whole(row.get("shared_ffn", row["ffn"]), minimum=0) or 0
    return count * width


def _dense_blocks(keys: TypeKeys) -> int:
    """The number of blocks at the start that have a plain network in place of experts."""
    row = keys.row.experts
    if "types" in row and (kinds := keys.items(row["types"])) is not None:
        return _leading(keys, row["types"], [kind == _PLAIN for kind in kinds])
    if "plain" in row and (blocks := keys.items(row["plain"])):
        layers = range(keys.needed("num_hidden_layers"))
        return _leading(keys, row["plain"], [block in blocks for block in layers])
    dense = row.get("dense", 0)
    return dense if isinstance(dense, int) else keys.whole(dense, minimum=0) or 0


def _leading(keys: TypeKeys, key: str, is_dense: Sequence[bool]) -> int:
    count = sum(is_dense)
    if not all(is_dense[:count]):
        problem = "blocks with and without experts take turns, which is not read here"
        refuse(keys.name(key), f"{shown(keys.get(key))}: {problem}: write the model's mapping")
    return count


def _check_listed(keys: TypeKeys, every: int) -> None:
    """Refuse a list of blocks with experts that is not every ``every``-th block."""
    row = keys.row.experts
    given = keys.items(row["listed"]) if "listed" in row else None
    if given is not None and given != [*range(every - 1, keys.needed("num_hidden_layers"), every)]:
        problem = f"{shown(given)} is not every {every}th block, which {row['every']} says"
        refuse(keys.name(row["listed"]), f"{problem}: correct one of them")
    if every > 1 and "plain" in row and keys.items(row["plain"]):
        problem = "blocks with and without experts take turns in two ways"
        refuse(keys.name(row["plain"]), f"{problem}: give {row['every']}: 1, or an empty list")


def latent_of(keys: TypeKeys) -> Fields:
    """The fields of a model with latent attention."""
    rotated = keys.needed("qk_rope_head_dim")
    channels = rotated + keys.needed("qk_nope_head_dim")
    heads = keys.needed("num_attention_heads")
    return {
        "kv_heads": heads,
        "head_dim": channels,
        "rotary_fraction": round(rotated / channels, 12),
        "latent": {
            "query_rank": keys.whole("q_lora_rank"),
            "key_rank": keys.needed("kv_lora_rank"),
            "value_dim": keys.whole("v_head_dim") or keys.needed("hidden_size") // heads,
        },
    }


def window_of(keys: TypeKeys) -> tuple[Mapping[str, int] | None, str]:
    """The sliding window of a model's blocks, if it has one, and a remark where blocks with a
    window lie otherwise than the description says."""
    row = keys.row.window
    size = keys.whole(row["size"], minimum=0)
    if not size or ("when" in row and not keys.flag(row["when"])):
        return None, ""
    windowed = _windowed(keys)
    if not any(windowed):
        return None, ""
    every, at_end = _turns(windowed)
    if every is None:
        problem = f"blocks with windows of {size} take turns unevenly, which is not read here"
        refuse("layer_types", f"{problem}: {_REMEDY}")
    remark = "" if at_end else f"of {every} blocks the last attends to all tokens, not another"
    return {"size": size, "full_every": every}, remark


_REMEDY = "give sliding_window: null for full attention, or trace the model"


def _windowed(keys: TypeKeys) -> list[bool]:
    """Whether each block has a window: as the file lists it, or as its type has it."""
    row, layers = keys.row.window, keys.needed("num_hidden_layers")
    kinds = keys.items("layer_types") if row.get("types") else None
    if kinds is not None:
        if len(kinds) != layers or not set(map(str, kinds)) <= {FULL, SLIDING}:
            problem = f"{shown(kinds)} is no list of {layers} entries {FULL} or {SLIDING}"
            refuse("layer_types", f"{problem}: give one entry for each block")
        return [kind == SLIDING for kind in kinds]
    if "full_blocks" in row:
        full = keys.whole(row["full_blocks"], minimum=0) or 0
        return [block >= full for block in range(layers)]
    every = row["full_every"]
    every = every if isinstance(every, int) else _stated_turn(keys, every)
    if row.get("first"):
        return [block % every > 0 for block in range(layers)]
    return [not every or (block + 1) % every > 0 for block in range(layers)]


def _stated_turn(keys: TypeKeys, key: str) -> int:
    """The number of blocks of which one has no window; or a text with L for each that has one."""
    value = keys.get(key)
    if isinstance(value, str) and value and set(value[:-1]) <= {"L"} and value[-1] in "LG":
        return len(value) if value.endswith("G") else 0
    return keys.needed(key)


def _turns(windowed: Sequence[bool]) -> tuple[int | None, bool]:
    """Of how many blocks one has no window (0 if all have one), and whether it is the last of them;
    None if blocks do not take turns evenly."""
    if all(windowed):
        return 0, True
    full = [block for block, has_window in enumerate(windowed) if not has_window]
    every = full[1] - full[0] if len(full) > 1 else max(full[0] + 1, len(windowed) - full[0])
    first = full[0] % every if every > 1 else 0
    if every < 2 or full != [*range(first, len(windowed), every)]:
        return None, False
    return every, first == every - 1


# The patterns of hybrid models, whose blocks are of several kinds.


# Channels of a mixer's convolution that the layer graphs have.
_TAPS = 4


def delta_net(keys: TypeKeys) -> Fields:
    """The blocks of Qwen3-Next: gated delta nets, and attention in every fourth block."""
    experts = experts_of(keys) if keys.row.experts else {}
    if experts.get("experts", {}).pop("dense_blocks", 0) or "pattern" in experts:
        problem = "blocks with and without experts take turns, which is not read here"
        refuse("mlp_only_layers", f"{problem}: give an empty list")
    return {
        **experts,
        "pattern": _of_delta_net(keys),
        "state_space": {
            "heads": keys.needed("linear_num_value_heads"),
            "channels": keys.needed("linear_value_head_dim"),
            "groups": keys.needed("linear_num_key_heads"),
            "states": keys.needed("linear_key_head_dim"),
            "delta_rule": True,
        },
    }


def _of_delta_net(keys: TypeKeys) -> str:
    _check_taps(keys, "linear_conv_kernel_dim")
    letters = {"linear_attention": "G", "full_attention": "A"}
    kinds = keys.items("layer_types")
    if kinds is None:
        every = keys.whole("full_attention_interval") or 4
        return "G" * (every - 1) + "A"
    return _shortest(_letters(keys, "layer_types", kinds, letters))


def mamba(keys: TypeKeys) -> Fields:
    """The blocks of Nemotron-H: one part each, by letters or by a list."""
    _check_taps(keys, "conv_kernel")
    pattern = _of_mamba(keys)
    fields: Fields = {"pattern": pattern, "layers": len(pattern)}
    if "M" in pattern:
        fields["state_space"] = {
            "heads": keys.needed("mamba_num_heads"),
            "channels": keys.needed("mamba_head_dim"),
            "groups": keys.needed("n_groups"),
            "states": keys.needed("ssm_state_size"),
        }
    if "E" in pattern:
        fields |= experts_of(keys)
        fields["experts"].pop("dense_blocks")
    return fields


_OF_MAMBA = {
    "mamba": "M",
    "linear_attention": "M",
    "attention": "*",
    "full_attention": "*",
    "mlp": "-",
    "moe": "E",
}


def _of_mamba(keys: TypeKeys) -> str:
    for key in ("layers_block_type", "layer_types"):
        if (kinds := keys.items(key)) is not None:
            return _letters(keys, key, kinds, _OF_MAMBA)
    text = keys.get("hybrid_override_pattern")
    if text is None:
        return "ME*-"
    if not isinstance(text, str) or not text or set(text) - set("M*-E"):
        problem = f"{shown(text)} is no pattern of blocks: give a text of M, *, - and E"
        refuse("hybrid_override_pattern", problem)
    return text


def _letters(keys: TypeKeys, key: str, kinds: list[Any], letters: Mapping[str, str]) -> str:
    for kind in kinds:
        if not isinstance(kind, str) or kind not in letters:
            problem = f"{shown(kind)} is no kind of block: give {', '.join(letters)}"
            refuse(keys.name(key), problem)
    layers = keys.whole("num_hidden_layers")
    if not kinds or (layers is not None and layers != len(kinds) and key in keys.config):
        problem = f"{len(kinds)} entries for {layers} blocks: give one for each block"
        refuse(keys.name(key), problem)
    return "".join(letters[kind] for kind in kinds)


def _shortest(letters: str) -> str:
    """The shortest beginning of a text that the whole text repeats."""
    for length in range(1, len(letters)):
        if letters == (letters[:length] * len(letters))[: len(letters)]:
            return letters[:length]
    return letters


def _check_taps(keys: TypeKeys, key: str) -> None:
    if (taps := keys.needed(key)) != _TAPS:
        refuse(keys.name(key), f"{taps} is not read here: give {_TAPS}, or trace the model")


UNLIKE: Mapping[str, Callable[[TypeKeys], Fields]] = {"delta_net": delta_net, "mamba": mamba}
