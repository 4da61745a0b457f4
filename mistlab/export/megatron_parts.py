"""Parts of models of today as Megatron-LM's options, and back: experts, latent attention, windows.

Latent vectors are normalised if ``--qk-layernorm`` is given, as DeepSeek's are; their rotary
embedding is YaRN's, which costs what the plain one costs. ``--window-size N,0`` stands for the last
N tokens, as Megatron-LM's own launch lines of gpt-oss give its window.
"""

import ast
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from mistlab.export.found import Found, checked_whole
from mistlab.export.megatron_flags import Options
from mistlab.values.errors import InputError, refuse, within
from mistlab.values.model import ModelSpec
from mistlab.values.model_parts import Experts, LatentAttention, Window

# Megatron-LM's defaults.
ACTIVE, KEY_RANK, HEAD_DIM, ROTATED, VALUE_DIM = 2, 32, 128, 64, 128
# Shares of rotated channels are told with so many digits, as in configurations that are read.
_DIGITS = 12
_MOST_BLOCKS = 10_000


def sayable_parts(model: ModelSpec) -> ModelSpec:
    """The model with the nearest parts that Megatron-LM builds."""
    if model.latent is None:
        return model
    if not model.rotated_channels:
        problem = f"{model.position_embedding!r} with latent attention, which rotates channels here"
        refuse("workload.model.position_embedding", f"{problem}: give rotary")
    fraction = round(model.rotated_channels / model.head_dim, _DIGITS)
    return replace(model, qk_norm=False, rotary_fraction=fraction)


def part_options(model: ModelSpec) -> Iterator[str]:
    """The options of a model's parts, but for experts' ranks and exchange."""
    if model.latent is not None:
        yield from _latent_options(model, model.latent)
    elif model.qk_norm:
        yield "--qk-layernorm"
    if model.window is not None:
        yield f"--window-size {model.window.size},0"
        if model.window.full_every:
            yield f"--window-attn-skip-freq {model.window.full_every}"
    if model.sinks:
        yield "--softmax-type learnable"
    if model.experts is not None:
        yield from _expert_options(model.experts, model.layers)
    if model.further_tokens:
        yield f"--mtp-num-layers {model.further_tokens}"


def _latent_options(model: ModelSpec, latent: LatentAttention) -> Iterator[str]:
    yield "--multi-latent-attention --qk-layernorm"
    of_queries = "" if latent.query_rank is None else f"--q-lora-rank {latent.query_rank} "
    yield f"{of_queries}--kv-lora-rank {latent.key_rank}"
    rotated = model.rotated_channels
    yield f"--qk-head-dim {model.head_dim - rotated} --qk-pos-emb-head-dim {rotated}"
    yield f"--v-head-dim {latent.value_dim}"


def _expert_options(experts: Experts, layers: int) -> Iterator[str]:
    yield f"--num-experts {experts.count} --moe-router-topk {experts.active}"
    if experts.active == 1:
        # Megatron-LM refuses the softmax over a single chosen expert.
        yield "--moe-router-pre-softmax"
    yield f"--moe-ffn-hidden-size {experts.ffn}"
    if experts.shared_ffn:
        yield f"--moe-shared-expert-intermediate-size {experts.shared_ffn}"
    if experts.hidden:
        yield f"--moe-latent-size {experts.hidden}"
    if dense := experts.dense_blocks:
        yield f'--moe-layer-freq "([0]*{dense}+[1]*{layers - dense})"'


def parts_of(options: Options, found: Found, layers: int, ffn: int) -> dict[str, Any]:
    """The parts that options describe, as fields of a model."""
    return {
        "experts": _experts_of(options, found, layers, ffn),
        "window": _window_of(options, found),
        "sinks": _has_sinks(options, found),
        "further_tokens": options.whole("--mtp-num-layers", minimum=0) or 0,
        **_attention_of(options, found),
    }


def _attention_of(options: Options, found: Found) -> dict[str, Any]:
    normalises = options.has("--qk-layernorm")
    if not options.has("--multi-latent-attention"):
        return {"qk_norm": normalises}
    if not normalises:
        text = "latent vectors are taken as normalised: --qk-layernorm is not given"
        found.remark("assumed", "model.latent", text)
    plain = options.whole("--qk-head-dim") or HEAD_DIM
    rotated = options.whole("--qk-pos-emb-head-dim") or ROTATED
    latent = LatentAttention(
        query_rank=options.whole("--q-lora-rank"),
        key_rank=options.whole("--kv-lora-rank") or KEY_RANK,
        value_dim=options.whole("--v-head-dim") or VALUE_DIM,
    )
    return {
        "latent": latent,
        "head_dim": plain + rotated,
        "rotary_fraction": round(rotated / (plain + rotated), _DIGITS),
    }


def _window_of(options: Options, found: Found) -> Window | None:
    text, every = options.text("--window-size"), options.text("--window-attn-skip-freq")
    if text is None:
        return None
    words = [word for word in " ".join(options.words["--window-size"]).split(",") if word]
    left = words[0].strip(" ()") if words else ""
    if every is not None and (not every.isdigit() or int(every) < 2):
        told = f"--window-attn-skip-freq {every}: attention is taken over the whole sequence"
        found.remark("ignored", f"--window-size {text}", told)
        return None
    return Window(size=checked_whole("--window-size", left), full_every=int(every or 0))


def _has_sinks(options: Options, found: Found) -> bool:
    said = options.choice("--softmax-type", ("vanilla", "off-by-one", "learnable"))
    if said == "off-by-one":
        text = "off-by-one: taken as the plain softmax, which costs as much"
        found.remark("ignored", "--softmax-type", text)
    return said == "learnable"


def _experts_of(options: Options, found: Found, layers: int, ffn: int) -> Experts | None:
    count = options.whole("--num-experts", minimum=0)
    if not count:
        return None
    dense = _dense_blocks(options.text("--moe-layer-freq") or "1", found, layers)
    with within("model.experts"):
        return Experts(
            count=count,
            active=options.whole("--moe-router-topk") or ACTIVE,
            ffn=options.whole("--moe-ffn-hidden-size") or ffn,
            shared_ffn=options.whole("--moe-shared-expert-intermediate-size") or 0,
            hidden=options.whole("--moe-latent-size") or 0,
            dense_blocks=dense,
        )


def _dense_blocks(text: str, found: Found, layers: int) -> int:
    """How many blocks without experts come first, in a frequency of those that have them."""
    blocks = pattern_of(text) if "[" in text else []
    if not blocks:
        every = checked_whole("--moe-layer-freq", text)
        blocks = [int(block % every == 0) for block in range(layers)]
    if len(blocks) != layers:
        message = (
            f"--moe-layer-freq: {text} is of {len(blocks)} blocks, the model has {layers}: give as "
            "many"
        )
        raise InputError(message)
    dense = blocks.index(1) if 1 in blocks else layers
    if 0 in blocks[dense:]:
        told = f"all blocks after the first {dense} are taken with experts: plans have no turns"
        found.remark("ignored", f"--moe-layer-freq {text}", told)
    return dense


def pattern_of(text: str) -> list[int]:
    """The list that an expression of lists makes, as Megatron-LM's frequencies are given.

    >>> pattern_of("([0]*2+[1]*3)")
    [0, 0, 1, 1, 1]
    """
    try:
        blocks = _list_of(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError):
        message = f"{text!r} is no list of blocks: give one such as ([0]*3+[1]*58)"
        raise InputError(message) from None
    return blocks


def _list_of(node: ast.AST) -> list[int]:
    match node:
        case ast.List(elts=elements):
            return [_number_of(element) for element in elements]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return [*_list_of(left), *_list_of(right)]
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            one, times = _list_of(left), _number_of(right)
            if len(one) * times <= _MOST_BLOCKS:
                return one * times
        case _:
            pass
    raise ValueError(ast.dump(node))


def _number_of(node: ast.AST) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    raise ValueError(ast.dump(node))
