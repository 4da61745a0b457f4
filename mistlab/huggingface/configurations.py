"""Reads the model that a Hugging Face ``config.json`` describes; needs neither torch nor a
download.

A table (``mistlab.huggingface.type_keys``) has a row for each model type whose blocks a
``ModelSpec`` can describe, exactly or nearly. Where the description differs from the model, a
remark says so. Other types are refused by name; such a model can be traced instead.
"""

import math
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from mistlab.core.values import near_matches, refuse, shown, within
from mistlab.huggingface.context_lengths import context_of
from mistlab.huggingface.rotary_keys import rotated_share, scaling_of
from mistlab.huggingface.type_keys import TypeKeys, TypeRow, model_types, refused_types
from mistlab.plan.workload import ModelSpec

Fields = dict[str, Any]

# The names in ``config.json`` for blocks that attend to all tokens, and for blocks with a sliding
# window.
FULL, SLIDING = "full_attention", "sliding_attention"
_PLAIN = "dense"


def experts_of(keys: TypeKeys) -> Fields:
    """Read the experts of a configuration as fields of a model description, none if no block has
    experts.
    """
    row = keys.row.experts
    experts = {
        "count": keys.needed(row["count"]),
        "active": keys.needed(row["active"]),
        "ffn": keys.needed(row["ffn"]),
        "shared_ffn": _shared_width(keys),
        "hidden": (keys.whole(row["hidden"], minimum=0) or 0) if "hidden" in row else 0,
        "router": _router(keys),
        "gate_limit": keys.get(row["limit"]) or 0.0 if "limit" in row else 0.0,
    }
    every = keys.needed(row["every"]) if "every" in row else 1
    _check_listed(keys, every)
    if every > 1:
        return {"experts": experts, "pattern": "D" * (every - 1) + "A"}
    return {"experts": {**experts, "dense_blocks": _dense_blocks(keys)}}


def _router(keys: TypeKeys) -> Fields:
    """Read the rule by which tokens choose experts; coefficients of auxiliary losses are left
    out.
    """
    row = keys.row.experts
    fields: Fields = dict(row.get("router", {}))
    for name, key in row.get("router_keys", {}).items():
        value = keys.flag(key) if name == "normalized" else keys.get(key)
        if value is not None:
            fields[name] = value
    if "greedy" in row and keys.get(row["greedy"]) == "greedy":
        return {name: value for name, value in fields.items() if "group" not in name}
    return fields


def _shared_width(keys: TypeKeys) -> int:
    """Return the width of all shared experts together, which process every token."""
    row = keys.row.experts
    count = row.get("shared_count", int("shared_ffn" in row))
    count = count if isinstance(count, int) else keys.whole(count, minimum=0) or 0
    width = keys.whole(row.get("shared_ffn", row["ffn"]), minimum=0) or 0
    return count * width


def _dense_blocks(keys: TypeKeys) -> int:
    """Return how many of the first blocks have a plain feed-forward network instead of experts."""
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
        refuse(
            keys.name(key),
            f"{shown(keys.get(key))}: blocks with and without experts alternate, which is "
            "not supported: write the model as a mapping (docs/reference/plan-file.md)",
        )
    return count


def _check_listed(keys: TypeKeys, every: int) -> None:
    """Refuse a list of the blocks that have experts, unless it names exactly every ``every``-th
    block.
    """
    row = keys.row.experts
    given = keys.items(row["listed"]) if "listed" in row else None
    if given is not None and given != [*range(every - 1, keys.needed("num_hidden_layers"), every)]:
        blocks = "every block" if every == 1 else f"one block of {every}"
        refuse(
            keys.name(row["listed"]),
            f"{shown(given)} contradicts {row['every']} {every}, by which {blocks} has experts: "
            f"leave {row['listed']} out, or list these blocks",
        )
    if every > 1 and "plain" in row and keys.items(row["plain"]):
        refuse(
            keys.name(row["plain"]),
            f"{shown(keys.get(row['plain']))}, but {row['every']} {every} chooses the blocks with "
            f"experts too: give {row['every']}: 1, or an empty list here",
        )


def latent_of(keys: TypeKeys) -> Fields:
    """Read the sizes of latent attention as fields of a model description, none without latent
    attention.
    """
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
    """Read the sliding window as fields of a model description, with remarks if the description has
    windows in other blocks than the configuration.
    """
    row = keys.row.window
    size = keys.whole(row["size"], minimum=0)
    if not size or ("when" in row and not keys.flag(row["when"])):
        return None, ""
    windowed = _windowed(keys)
    if not any(windowed):
        return None, ""
    every, at_end = _turns(windowed)
    if every is None:
        refuse(
            "layer_types",
            f"has sliding windows of {size} at uneven distances, which is not supported: {_REMEDY}",
        )
    remark = "" if at_end else f"the last of every {every} blocks has full attention, no other one"
    return {"size": size, "full_every": every}, remark


_REMEDY = "give sliding_window: null for full attention, or trace the model"


def _windowed(keys: TypeKeys) -> list[bool]:
    """Tell for each block whether it has a sliding window, by the configuration or by its model
    type.
    """
    row, layers = keys.row.window, keys.needed("num_hidden_layers")
    kinds = keys.items("layer_types") if row.get("types") else None
    if kinds is not None:
        if len(kinds) != layers or not set(map(str, kinds)) <= {FULL, SLIDING}:
            refuse(
                "layer_types",
                f"{shown(kinds)} is not a list of {layers} entries {FULL} or {SLIDING}: give "
                "one entry for each block",
            )
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
    """Return n if the configuration states that every n-th block has no window, as a number or as a
    text such as LLLG; 0 if all blocks have one.
    """
    value = keys.get(key)
    if isinstance(value, str) and value and set(value[:-1]) <= {"L"} and value[-1] in "LG":
        return len(value) if value.endswith("G") else 0
    return keys.needed(key)


def _turns(windowed: Sequence[bool]) -> tuple[int | None, bool]:
    """Return n if exactly one of every n blocks has no window, and whether it is the last of the n;
    n is 0 if all blocks have one, and None if the blocks repeat no such pattern.
    """
    if all(windowed):
        return 0, True
    full = [block for block, has_window in enumerate(windowed) if not has_window]
    every = full[1] - full[0] if len(full) > 1 else max(full[0] + 1, len(windowed) - full[0])
    first = full[0] % every if every > 1 else 0
    if every < 2 or full != [*range(first, len(windowed), every)]:
        return None, False
    return every, first == every - 1


# Reads hybrid models, in which blocks are of several kinds.


# The width of the convolution in state-space mixers that layer graphs assume.
_TAPS = 4


def delta_net(keys: TypeKeys) -> Fields:
    """Read Qwen3-Next's blocks, delta networks with attention in every fourth block, as fields of a
    model description.
    """
    experts = experts_of(keys) if keys.row.experts else {}
    if experts.get("experts", {}).pop("dense_blocks", 0) or "pattern" in experts:
        refuse(
            "mlp_only_layers",
            "blocks with and without experts alternate, which is not supported: give an empty list",
        )
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
    """Read Nemotron-H's blocks, whose kinds are letters or a list in the file, as fields of a model
    description.
    """
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
        refuse(
            "hybrid_override_pattern",
            f"{shown(text)} is not a pattern of blocks: write only M (Mamba-2), * (attention), - "
            "(feed-forward network) and E (experts)",
        )
    return text


def _letters(keys: TypeKeys, key: str, kinds: list[Any], letters: Mapping[str, str]) -> str:
    for kind in kinds:
        if not isinstance(kind, str) or kind not in letters:
            known = ", ".join(letters)
            refuse(keys.name(key), f"{shown(kind)} is not a kind of block: give one of {known}")
    layers = keys.whole("num_hidden_layers")
    if not kinds or (layers is not None and layers != len(kinds) and key in keys.config):
        of_all = "" if layers is None else f" of {layers}"
        refuse(keys.name(key), f"lists {len(kinds)} blocks{of_all}: give an entry for each block")
    return "".join(letters[kind] for kind in kinds)


def _shortest(letters: str) -> str:
    """Return the shortest text that, repeated, gives the whole text."""
    for length in range(1, len(letters)):
        if letters == (letters[:length] * len(letters))[: len(letters)]:
            return letters[:length]
    return letters


def _check_taps(keys: TypeKeys, key: str) -> None:
    if (taps := keys.needed(key)) != _TAPS:
        refuse(keys.name(key), f"{taps} is not supported: give {_TAPS}, or {TRACE}")


UNLIKE: Mapping[str, Callable[[TypeKeys], Fields]] = {"delta_net": delta_net, "mamba": mamba}


# The key that every Hugging Face ``config.json`` has and that files of traced models lack.
KIND = "model_type"
TEXT = "text_config"
TRACE = (
    "trace the model (python -m experiments.trace), or write it as a mapping "
    "(docs/reference/plan-file.md)"
)

# Hugging Face's names of activation functions, each with the name in model descriptions.
ACTIVATIONS: Mapping[str, str] = {
    **dict.fromkeys(("silu", "swish"), "silu"),
    **dict.fromkeys(
        ("gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_python_tanh"), "gelu_tanh"
    ),
    **dict.fromkeys(("gelu", "gelu_python"), "gelu"),
    **{name: name for name in ("relu2", "relu", "quick_gelu", "xielu")},
}
# The default activation of feed-forward networks without a gate, by model family; below, the
# default position embedding.
_OF_FAMILY = {"gpt": "gelu_tanh", "bert": "gelu", "falcon": "gelu_tanh", "nemotron": "relu2"}
_POSITIONS = {
    "gpt": "absolute",
    "bert": "absolute",
    "llama": "rotary",
    "falcon": "rotary",
    "nemotron": "none",
}


def model_of_config(config: Mapping[str, Any], name: str, part: str = "") -> ModelSpec:
    """Return the model that a configuration describes. A ``part`` selects its text model, or, with
    a key in ``LATER``, adds the blocks for multi-token prediction.
    """
    if part in LATER:
        return _with_later(config, name, part)
    if part:
        return model_of_config(_text_part(config, part), name)
    keys = TypeKeys(row=_row_of(config), config=config)
    _check_required(keys)
    fields, remarks = _fields(keys)
    given = {key: value for key, value in fields.items() if value is not None}
    return ModelSpec.from_mapping({"name": name, **given, "remarks": [*dict.fromkeys(remarks)]})


# The keys for the number of blocks that predict tokens after the next (multi-token prediction).
LATER = ("num_nextn_predict_layers", "num_mtp_layers")


def _with_later(config: Mapping[str, Any], name: str, key: str) -> ModelSpec:
    """Return the model with its blocks for multi-token prediction, which are otherwise left out."""
    keys = TypeKeys(row=_row_of(config), config=config)
    if keys.row.later != key or not (count := keys.whole(key, minimum=0)):
        reason = "the file has no blocks for multi-token prediction"
        refuse(key, f"{reason}: give its path without #{key}")
    model = model_of_config(config, name)
    remarks = tuple(one for one in model.remarks if one != LEFT_OUT)
    with within("further_tokens"):
        return replace(model, further_tokens=count, remarks=remarks)


def _text_part(config: Mapping[str, Any], part: str) -> Mapping[str, Any]:
    inner = config.get(part)
    if part != TEXT or not isinstance(inner, Mapping):
        refuse(part, f"the file has no such section: give its path without #{part}")
    if KIND not in inner:
        refuse(f"{part}.{KIND}", "missing: give the type of the text's model")
    return inner


def _row_of(config: Mapping[str, Any]) -> TypeRow:
    """Return what the table says of a configuration's model type; refuses a type that is not in the
    table.
    """
    kind = config[KIND]
    if isinstance(config.get(TEXT), Mapping):
        inner = config[TEXT].get(KIND)
        refuse(
            KIND,
            f"{shown(kind)} takes more than text, which is not supported: write #{TEXT} after the "
            f"file's path for its text model{f' ({inner})' if inner else ''}, or {TRACE}",
        )
    if not isinstance(kind, str) or kind not in model_types():
        _refuse_type(kind)
    return model_types()[kind]


def _refuse_type(kind: object) -> NoReturn:
    """Refuse a model type that is not in the table, with the reason or with similar names."""
    if isinstance(kind, str) and (reason := refused_types().get(kind)):
        refuse(KIND, f"{shown(kind)} is not supported, because it {reason}: {TRACE}")
    near = near_matches(kind, model_types())
    meant = f" ({near.removeprefix(': ')})" if "did you mean" in near else ""
    refuse(
        KIND,
        f"{shown(kind)} is not supported{meant}: give one of the {len(model_types())} types in "
        f"docs/reference/model-types.md, or {TRACE}",
    )


def _check_required(keys: TypeKeys) -> None:
    """Refuse a configuration that has a value which model descriptions cannot express."""
    for key, value in keys.row.requires.items():
        given = keys.get(key)
        if given is not None and (given != value or isinstance(given, bool) != (value is False)):
            refuse(
                keys.name(key),
                f"{shown(given)} is not supported, only {shown(value)} is: {TRACE}",
            )
    for key, other in keys.row.equal.items():
        given = keys.whole(key)
        if given is not None and given != keys.needed(other):
            refuse(
                keys.name(key),
                f"{given} is unlike {other} {keys.needed(other)}, which is not supported: {TRACE}",
            )


def _fields(keys: TypeKeys) -> tuple[Fields, list[str]]:
    """Read all fields of a model description from a configuration, with remarks on what is left
    out.
    """
    row, remarks = keys.row, [*keys.row.remarks]
    fields: Fields = {**_family(keys), **_sizes(keys)}
    fields["activation"], remark = _activation(keys, fields)
    remarks += [remark, *_left_out(keys)]
    pairs = (("qk_norm", row.qk_norm), ("post_norms", row.post_norms))
    fields |= {name: keys.flag(key) for name, key in pairs if key}
    if row.biases:
        fields["biases"] = all(map(keys.flag, row.biases))
    fields |= _parts(keys) | _dropout(keys)
    if row.window:
        fields["window"], remark = window_of(keys)
        remarks.append(remark)
    fields |= _epsilon(keys) | _rotation(keys, fields) | {"context": context_of(keys)}
    return fields, [remark for remark in remarks if remark]


# The keys for the epsilon of norms in different model types.
_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon")


def _epsilon(keys: TypeKeys) -> Fields:
    """Return the epsilon of the model's norms, or None if the configuration lacks it."""
    given = (keys.given(name) for name in _EPSILONS)
    epsilon = next((value for value in given if value is not None), None)
    return {} if epsilon is None else {"norm_epsilon": epsilon}


def _dropout(keys: TypeKeys) -> Fields:
    """Read the dropout rates of training, if the model type has them; that of attention only if it
    differs.
    """
    if not keys.row.dropout:
        return {}
    shares = {name: _share(keys, key) for name, key in keys.row.dropout.items()}
    every, attention = shares["all"], shares["attention"]
    return {"dropout": every, **({"attention_dropout": attention} if attention != every else {})}


def _share(keys: TypeKeys, key: str) -> float:
    value = keys.get(key) or 0.0
    if isinstance(value, bool) or not isinstance(value, int | float):
        refuse(
            keys.name(key), f"{shown(value)} is not a number: give the dropout rate, such as 0.1"
        )
    return value


def _family(keys: TypeKeys) -> Fields:
    """Return the fields that all models of a type have, and those that its switches in the
    configuration add.
    """
    switched = [own for key, own in keys.row.when.items() if keys.flag(key)]
    return dict(ChainMap(*map(dict, reversed(switched)), dict(keys.row.model)))


def _parts(keys: TypeKeys) -> Fields:
    """Read a model's optional parts: latent attention, experts and kinds of blocks."""
    row = keys.row
    latent = latent_of(keys) if row.latent else {}
    if row.turns:
        return {**latent, **UNLIKE[row.turns](keys)}
    return {**latent, **experts_of(keys)} if row.experts else latent


def _sizes(keys: TypeKeys) -> Fields:
    """Read the sizes that nearly all models have; None for a size that follows from others."""
    row, hidden = keys.row, keys.needed("hidden_size")
    ffn = keys.whole(row.ffn)
    if row.ffn_is_sum and ffn:
        ffn //= 2
    return {
        "hidden": hidden,
        "layers": keys.whole("num_hidden_layers"),
        "heads": keys.needed("num_attention_heads"),
        "kv_heads": _kv_heads(keys),
        "head_dim": keys.whole("head_dim"),
        "ffn": keys.needed(row.ffn_times) * hidden if row.ffn_times else ffn,
        "vocab": keys.needed("vocab_size"),
        "tied_embeddings": keys.flag("tie_word_embeddings"),
    }


def _kv_heads(keys: TypeKeys) -> int | None:
    """Return the number of key and value heads, or None if every attention head has its own."""
    row = keys.row
    if not row.shared_heads or (row.unless and keys.flag(row.unless)):
        return keys.whole("num_key_value_heads")
    return 1 if keys.flag(row.shared_heads) else None


def _activation(keys: TypeKeys, fields: Fields) -> tuple[str | None, str]:
    """Return the activation function, or None for the family's default; a remark says if an equally
    costly one replaces it.
    """
    if not keys.has("hidden_act"):
        return None, ""
    name = keys.get("hidden_act")
    if not isinstance(name, str) or name not in ACTIVATIONS:
        refuse(
            keys.name("hidden_act"),
            f"{shown(name)} is unknown: give one of {', '.join(ACTIVATIONS)}, or {TRACE}",
        )
    known = ACTIVATIONS[name]
    is_gated = fields.get("mlp_type", "") == "gated_mlp" or fields["family"] == "llama"
    taken = "silu" if is_gated else _OF_FAMILY[fields["family"]]
    if known == taken or (known == "gelu" and taken == "gelu_tanh"):
        return known, ""
    return taken, f"activation {name} is taken as {taken}"


def _left_out(keys: TypeKeys) -> Iterator[str]:
    """Make remarks on features of a configuration that model descriptions cannot express."""
    row = keys.row
    yield from (text for key, text in row.lacking.items() if keys.flag(key))
    switched = {key: keys.flag(key) for key in (*row.biases, *row.part_biases)}
    if not row.biases or not all(map(keys.flag, row.biases)):
        on = [key for key, is_on in switched.items() if is_on]
        yield from (f"biases that {keys.name(key)} turns on are left out" for key in on)
    if row.later and keys.whole(row.later, minimum=0):
        yield LEFT_OUT


LEFT_OUT = "blocks for tokens after the next are left out"


def _rotation(keys: TypeKeys, fields: Fields) -> Fields:
    """Read the rotary embedding as fields of a model description, none if positions are not
    rotary.
    """
    position = fields.get("position_embedding", _POSITIONS[fields["family"]])
    if position != "rotary":
        return {}
    base: Fields = {"rotary_base": keys.rotary("rope_theta")}
    base["rotary_scaling"] = scaling_of(keys, is_latent="latent" in fields)
    if "latent" in fields:
        return base
    channels = fields["head_dim"] or fields["hidden"] // fields["heads"]
    if (rotated := keys.whole("rotary_dim")) is not None:
        return {**base, "rotary_fraction": rotated_share(keys, "rotary_dim", rotated, channels)}
    share = keys.rotary("partial_rotary_factor")
    if share is None:
        return base
    if math.isclose(share * channels, round(share * channels)) and share <= 1:
        rotated_share(keys, "partial_rotary_factor", round(share * channels), channels)
        return {**base, "rotary_fraction": share}
    rotated = int(share * channels)
    return {
        **base,
        "rotary_fraction": rotated_share(keys, "partial_rotary_factor", rotated, channels),
    }
