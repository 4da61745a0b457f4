"""The patterns of hybrid models, whose blocks are of several kinds."""

from collections.abc import Callable, Mapping
from typing import Any

from mistlab.core.values import refuse, shown
from mistlab.huggingface.block_parts import Fields, experts_of
from mistlab.huggingface.type_keys import TypeKeys

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
