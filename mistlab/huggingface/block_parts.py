"""The parts of blocks that a configuration describes: experts, latent attention, windows."""

from collections.abc import Mapping, Sequence
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
