"""Translates optional parts of models (hybrid patterns, experts, latent attention, windows) to
Megatron-LM's options, and back.

The grammar is that of ``--hybrid-layer-pattern`` (core 0.17): a letter a block, ``|`` between
stages, ``/`` before the blocks of further tokens. Older lines give shares of attention and of
networks (``--hybrid-attention-ratio``, ``--hybrid-mlp-ratio``).
"""

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mistlab.core.values import refuse, reject, within
from mistlab.export.found import Found, checked_whole
from mistlab.export.megatron.megatron_flags import Options, is_of_deepspeed
from mistlab.export.megatron.megatron_routers import router_of, router_options
from mistlab.job.job import Job
from mistlab.plan.model_parts import Experts, LatentAttention, StateSpace, Window
from mistlab.plan.plan import Plan
from mistlab.plan.workload import ModelSpec
from mistlab.schedule.orders import INTERLEAVED
from mistlab.schedule.placement import even_shares

PATTERN = "--hybrid-layer-pattern"
# The default sizes of Megatron-LM's Mamba-2 mixer: state size, channels of a head, groups, and
# expansion.
STATES, CHANNELS, GROUPS, EXPAND = 128, 64, 8, 2
# Megatron-LM's letters for blocks: M is Mamba-2, * attention, - a feed-forward network, E experts.
# Its other letters (G, D, +) are not supported.
_LETTERS = "M*-E"
_MEANINGS = {
    "G": "a gated delta network, which hybrid models here cannot have",
    "D": "sparse attention, which is not supported",
    "+": "latent attention, which hybrid models here cannot have",
}
_SWITCHES = ("--is-hybrid-model", "--hybrid-attention-ratio", "--hybrid-mlp-ratio")


def is_hybrid(options: Options, program: str = "") -> bool:
    """Whether the launch line builds the blocks of the model from a pattern of letters, as hybrid
    models are built.
    """
    name = program.lower()
    builds = "pretrain_mamba" in name or "pretrain_hybrid" in name
    return builds or PATTERN in options or any(options.has(name) for name in _SWITCHES)


def hybrid_parts(options: Options, layers: int | None, hidden: int) -> dict[str, Any]:
    """Return the block pattern of a hybrid model and the sizes of its state-space mixer, as fields
    of a model description.
    """
    pattern = "".join(segments_of(options, layers))
    fields: dict[str, Any] = {"pattern": shortest(pattern), "layers": len(pattern)}
    if "M" in pattern:
        fields["state_space"] = _state_space(options, hidden)
    return fields


def segments_of(options: Options, layers: int | None) -> list[str]:
    """Return the number of blocks in each pipeline segment of a pattern; bars separate the
    segments.
    """
    text = options.text(PATTERN)
    if text is None:
        return [_by_shares(options, layers)]
    main, *further = text.split("/")
    if any(further):
        reject(
            f"{options.where(PATTERN)}: {text} has blocks for multi-token prediction (after "
            "the /), which no supported hybrid model has: remove them"
        )
    for letter in main.replace("|", ""):
        if letter not in _LETTERS:
            meaning = _MEANINGS.get(letter, "not a kind of block")
            reject(
                f"{options.where(PATTERN)}: {letter!r} is {meaning}: write only M (Mamba-2), * "
                "(attention), - (feed-forward network) and E (experts)"
            )
    if not main.replace("|", ""):
        reject(f"{options.where(PATTERN)}: {text!r} has no blocks: give a letter for each block")
    return main.split("|")


def shortest(pattern: str) -> str:
    """Return the shortest pattern that, repeated, gives the same blocks.

    >>> shortest("DADA")
    'DA'
    """
    sizes = (size for size in range(1, len(pattern) + 1) if len(pattern) % size == 0)
    return next(
        pattern[:size] for size in sizes if pattern[:size] * (len(pattern) // size) == pattern
    )


def _by_shares(options: Options, layers: int | None) -> str:
    """Return the block pattern of a hybrid model whose options state only the shares of attention
    and of feed-forward blocks, spread evenly among state-space blocks.
    """
    if layers is None:
        reject("--num-layers: is missing: add it to the line, or --hybrid-layer-pattern")
    attention = round(layers * options.number("--hybrid-attention-ratio", 0.0, maximum=1))
    networks = round(layers * options.number("--hybrid-mlp-ratio", 0.0, maximum=1))
    blocks = ["M"] * layers
    # As in Megatron-LM, attention blocks are spread evenly among the state-space blocks;
    # feed-forward blocks are then spread among the state-space blocks that remain.
    _spread(blocks, "*", (layers - attention) / (attention + 1))
    if networks:
        _spread(blocks, "-", (layers - attention - networks) / networks)
    return "".join(blocks)


def _spread(blocks: list[str], letter: str, distance: float) -> None:
    """Replace state-space blocks by another kind of block, one after every ``distance`` of them."""
    left = distance
    for index, block in enumerate(blocks):
        if block != "M":
            continue
        if left < 1 / 2:
            blocks[index] = letter
            left += distance
        else:
            left -= 1


def _state_space(options: Options, hidden: int) -> StateSpace:
    channels = options.whole("--mamba-head-dim") or CHANNELS
    heads = options.whole("--mamba-num-heads")
    expand = options.whole("--mamba-expand") or EXPAND
    with within("model.state_space"):
        return StateSpace(
            heads=heads or hidden * expand // channels,
            channels=channels,
            groups=options.whole("--mamba-num-groups") or GROUPS,
            states=options.whole("--mamba-state-dim") or STATES,
        )


# Translates hybrid models, whose blocks differ in kind, to Megatron-LM's options and back.
#
# Each block is a letter, as in this package's own patterns: ``M`` is Mamba-2, ``*`` attention,
# ``-`` a feed-forward network, ``E`` experts. Megatron-core 0.16 and later accept a plain pattern,
# and options for the blocks of the first and last stage. Megatron-core 0.17 and later also accept a
# pattern divided by bars, for other uneven stages or several chunks per stage. Versions before 0.18
# accept the option that recomputes whole blocks, but ignore it.


_KINDS_OF_BLOCKS = frozenset("M*-E")
_SPEC = "megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec"
# The programs of Megatron-LM that train models whose blocks are alike, and hybrid models.
PLAIN_PROGRAM, HYBRID_PROGRAM = "pretrain_gpt.py", "pretrain_mamba.py"


def check_hybrid(model: ModelSpec) -> None:
    """Refuse a model with kinds of blocks or gates that no option of Megatron-LM can build."""
    others = sorted(set(model.pattern) - _KINDS_OF_BLOCKS)
    inexpressible = {
        "pattern": others and f"{model.pattern!r} has blocks of kind {' '.join(others)}",
        "state_space.delta_rule": model.state_space and model.state_space.delta_rule and "true",
        "attention_gate": model.attention_gate and "true",
    }
    for name, value in inexpressible.items():
        if value:
            refuse(
                f"workload.model.{name}",
                f"{value}, which no option of Megatron-LM can express: give --to deepspeed or "
                "accelerate, where the training script defines the model",
            )


def program_of(model: ModelSpec) -> str:
    """Return the program of Megatron-LM that trains this model."""
    return HYBRID_PROGRAM if model.pattern else PLAIN_PROGRAM


def hybrid_options(job: Job) -> Iterator[str]:
    """List the options for the block pattern of a hybrid model; none for other models."""
    model, mixer = job.workload.model, job.workload.model.state_space
    if not model.pattern:
        return
    letters = (model.pattern * model.layers)[: model.layers]
    yield f"--spec {_SPEC} --is-hybrid-model"
    if is_cut(job.plan):
        segments = _cut(letters, segment_sizes(job.plan))
        yield f'--hybrid-layer-pattern "{"|".join(segments)}"'
    else:
        yield f'--hybrid-override-pattern "{letters}"'
        yield from _ends(job.plan)
    if mixer is not None:
        yield f"--mamba-num-heads {mixer.heads} --mamba-head-dim {mixer.channels}"
        yield f"--mamba-num-groups {mixer.groups} --mamba-state-dim {mixer.states}"


def is_cut(plan: Plan) -> bool:
    """Whether the block pattern on the launch line has to mark where stages begin, because middle
    stages differ or stages have several chunks.
    """
    inner = {stage.layers for stage in plan.stages[1:-1]}
    return len(inner) > 1 or plan.order in INTERLEAVED


def _ends(plan: Plan) -> Iterator[str]:
    """Return the options for the numbers of blocks on the first and last stage, if these stages
    differ from the others.
    """
    layers = [stage.layers for stage in plan.stages]
    if len(set(layers)) > 1:
        yield f"--decoder-first-pipeline-num-layers {layers[0]}"
        yield f"--decoder-last-pipeline-num-layers {layers[-1]}"


def segment_sizes(plan: Plan) -> list[int]:
    """List the number of blocks in each model chunk: the first chunk of every stage, then the
    second chunk of every stage, and so on.
    """
    chunks = INTERLEAVED.get(plan.order, 1)
    parts = [even_shares(stage.layers, chunks) for stage in plan.stages]
    return [parts[stage][chunk] for chunk in range(chunks) for stage in range(plan.num_stages)]


def _cut(letters: str, sizes: Sequence[int]) -> Iterator[str]:
    begin = 0
    for size in sizes:
        yield letters[begin : begin + size]
        begin += size


def hybrid_notes(job: Job) -> Iterator[str]:
    """Yield notes on the version of Megatron-core that the launch line of a hybrid model
    requires.
    """
    if not job.workload.model.pattern:
        return
    if is_cut(job.plan):
        yield "a block pattern with segments (|) needs Megatron-core 0.17 or later"
    if any(stage.checkpointed_layers for stage in job.plan.stages):
        yield "recomputing blocks of hybrid models needs Megatron-core 0.18 or later"


# Exports and imports experts, latent attention and windows as Megatron-LM's options.
#
# Latent vectors are normalised if ``--qk-layernorm`` is given, as in DeepSeek; their rotary
# embedding is YaRN's, which costs the same as the plain one. ``--window-size N,0`` is a window of
# the last N tokens, as in Megatron-LM's own launch lines of gpt-oss.


# Megatron-LM's defaults: the number of experts that a token uses, and the sizes of latent
# attention.
ACTIVE, KEY_RANK, HEAD_DIM, ROTATED, VALUE_DIM = 2, 32, 128, 64, 128
DELTA_KEY_HEADS, DELTA_VALUE_HEADS, DELTA_CHANNELS = 16, 32, 128
# The number of digits to which the share of rotary channels in a head is rounded.
_DIGITS = 12
_MOST_BLOCKS = 10_000


def sayable_parts(model: ModelSpec) -> ModelSpec:
    """Change a model to the nearest one whose optional parts Megatron-LM can build."""
    if model.latent is None:
        return model
    if not model.rotated_channels:
        refuse(
            "workload.model.position_embedding",
            f"{model.position_embedding!r}, but Megatron-LM's latent attention needs rotary "
            "position embedding: give rotary",
        )
    fraction = round(model.rotated_channels / model.head_dim, _DIGITS)
    return replace(model, qk_norm=False, rotary_fraction=fraction)


def part_options(model: ModelSpec) -> Iterator[str]:
    """List the options for a model's optional parts; those for expert parallelism are elsewhere."""
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
    yield from router_options(experts)
    yield f"--moe-ffn-hidden-size {experts.ffn}"
    if experts.shared_ffn:
        yield f"--moe-shared-expert-intermediate-size {experts.shared_ffn}"
    if experts.hidden:
        yield f"--moe-latent-size {experts.hidden}"
    if dense := experts.dense_blocks:
        yield f'--moe-layer-freq "([0]*{dense}+[1]*{layers - dense})"'


def parts_of(options: Options, draft: Found, layers: int, ffn: int) -> dict[str, Any]:
    """Read a model's optional parts from the options, as fields of a model description."""
    experts, blocks = experts_of(options, draft, layers, ffn)
    parts = {
        "experts": experts,
        "window": _window_of(options, draft),
        "sinks": _has_sinks(options, draft),
        "further_tokens": _further_tokens(options),
        **_attention_of(options, draft),
    }
    parts |= _turns_of(options, blocks, layers)
    if parts.get("pattern") and (beside := _beside_pattern(parts)):
        reject(
            f"{beside}: is not supported together with blocks of several kinds: give a model of "
            "the catalogue by --model"
        )
    return parts


def _further_tokens(options: Options) -> int:
    number = options.whole("--mtp-num-layers", minimum=0) or 0
    if number > _MOST_BLOCKS:
        where = options.where("--mtp-num-layers")
        reject(f"{where}: {number} is too large: give at most {_MOST_BLOCKS}")
    return number


# The options of Megatron-LM for parts of a model that blocks of several kinds cannot have.
OPTIONS_OF_PARTS: Mapping[str, str] = {
    "latent": "--multi-latent-attention",
    "window": "--window-size",
    "sinks": "--softmax-type",
    "further_tokens": "--mtp-num-layers",
}


def _beside_pattern(parts: dict[str, Any]) -> str | None:
    """Return an option on the launch line for a part that hybrid models cannot have, or None if
    there is none.
    """
    return next((option for name, option in OPTIONS_OF_PARTS.items() if parts.get(name)), None)


def _turns_of(options: Options, blocks: list[int], layers: int) -> dict[str, Any]:
    """Return the block pattern of a model that alternates blocks with and without experts, or
    blocks with attention and with delta networks.
    """
    if (deltas := _delta_nets(options, layers)) is not None:
        if 0 in blocks:
            reject(
                "--moe-layer-freq: blocks without experts are not supported together with gated "
                "delta networks: give every block experts"
            )
        return deltas
    dense = blocks.index(1) if 1 in blocks else layers
    if 0 not in blocks[dense:]:
        return {}
    return {"pattern": shortest("".join("DA"[has_experts] for has_experts in blocks))}


def _delta_nets(options: Options, layers: int) -> dict[str, Any] | None:
    """Return pattern and sizes of gated delta networks, which replace attention in most blocks, as
    in Qwen3-Next.
    """
    variant = options.text("--experimental-attention-variant")
    if variant is None:
        return None
    if variant not in ("gated_delta_net", "gdn"):
        reject(
            f"{options.where('--experimental-attention-variant')}: {variant} is not supported: "
            "give gated_delta_net, or a model of the catalogue by --model"
        )
    every = options.text("--linear-attention-freq") or options.text("--full-attention-interval")
    if every is None:
        reject(
            f"--linear-attention-freq: is missing, but {variant} needs it: add it to the line with "
            "its number"
        )
    where = options.where("--linear-attention-freq")
    blocks = [] if "[" in every else _linear_blocks(checked_whole(where, every), layers)
    linear = blocks or pattern_of(every, f"{where}: ")
    space = StateSpace(
        heads=options.whole("--linear-num-value-heads") or DELTA_VALUE_HEADS,
        channels=options.whole("--linear-value-head-dim") or DELTA_CHANNELS,
        groups=options.whole("--linear-num-key-heads") or DELTA_KEY_HEADS,
        states=options.whole("--linear-key-head-dim") or DELTA_CHANNELS,
        delta_rule=True,
    )
    return {
        "pattern": shortest("".join("AG"[is_linear] for is_linear in linear)),
        "state_space": space,
    }


def _linear_blocks(every: int, layers: int) -> list[int]:
    """Tell for each block whether it has linear attention; every n-th block has full attention
    instead.
    """
    return [int((block + 1) % every != 0) for block in range(layers)]


def _attention_of(options: Options, draft: Found) -> dict[str, Any]:
    normalises = options.has("--qk-layernorm")
    if not options.has("--multi-latent-attention"):
        return {"qk_norm": normalises, "attention_gate": options.has("--attention-output-gate")}
    if not normalises:
        text = "latent vectors are predicted as normalised, though --qk-layernorm is not given"
        draft.remark("assumed", "model.latent", text)
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


def _window_of(options: Options, draft: Found) -> Window | None:
    if (size := options.whole("--sliding-window")) is not None:
        return Window(size=size, full_every=0)
    text, every = options.text("--window-size"), options.text("--window-attn-skip-freq")
    if text is None:
        return None
    sizes = [word for word in " ".join(options.all_words("--window-size")).split(",") if word]
    left = checked_whole(options.where("--window-size"), sizes[0].strip(" ()") if sizes else "")
    if every is not None and (not every.isdecimal() or int(every) < 2):
        _tell_of_window(options, draft, f"--window-size {text}", left, every)
        return None
    return Window(size=left, full_every=int(every or 0))


def _tell_of_window(options: Options, draft: Found, choice: str, size: int, every: str) -> None:
    """Add a remark if plans cannot express the attention window, unless the window covers the whole
    sequence.
    """
    length = options.whole("--seq-length")
    if length is None or size < length:
        text_of_remark = (
            f"--window-attn-skip-freq {every} is not supported: attention is predicted over the "
            "whole sequence"
        )
        draft.remark("ignored", choice, text_of_remark)


def _has_sinks(options: Options, draft: Found) -> bool:
    stated = options.choice("--softmax-type", ("vanilla", "off-by-one", "learnable"))
    if stated == "off-by-one":
        text = "off-by-one is predicted as the plain softmax, which costs as much"
        draft.remark("ignored", "--softmax-type", text)
    return stated == "learnable"


def experts_of(
    options: Options, draft: Found, layers: int, ffn: int
) -> tuple[Experts | None, list[int]]:
    """Read the experts of a model from the options, and which blocks have them."""
    count = _count_of(options, draft)
    if count is None:
        return None, []
    blocks = _expert_blocks(options, layers)
    dense = blocks.index(1) if 1 in blocks else layers
    width = options.whole("--moe-ffn-hidden-size")
    if width is None:
        text = f"{ffn}, as in dense blocks, because --moe-ffn-hidden-size is not given"
        draft.remark("assumed", "model.experts.ffn", text)
        width = ffn
    active = options.whole("--moe-router-topk")
    if active is None:
        active = 1 if is_of_deepspeed(options) else ACTIVE
        since = "" if is_of_deepspeed(options) else " since Megatron-core 0.5"
        text = f"{active}, the default{since}, because --moe-router-topk is not given"
        draft.remark("assumed", "model.experts.active", text)
    with within("model.experts"):
        experts = Experts(
            count=count,
            active=active,
            ffn=width,
            shared_ffn=_shared_of(options, draft, width, ffn),
            hidden=options.whole("--moe-latent-size") or 0,
            dense_blocks=0 if 0 in blocks[dense:] else dense,
            router=router_of(options, active),
        )
    return experts, blocks


def _count_of(options: Options, draft: Found) -> int | None:
    """Return the number of experts in a block, or None for a model without experts."""
    counts = {
        checked_whole(options.where("--num-experts"), word, minimum=0)
        for word in options.all_words("--num-experts")
        if word not in ("None", "null")
    }
    if "--num-experts" in options and not options.all_words("--num-experts"):
        options.text("--num-experts")
    if len(counts) > 1:
        every = " ".join(options.words["--num-experts"])
        reject(
            f"{options.where('--num-experts')}: {every}: blocks with different numbers of experts "
            "are not supported: give one number"
        )
    if 1 in counts and not is_of_deepspeed(options):
        text = "a single expert is predicted as a feed-forward network without a router"
        draft.remark("assumed", "--num-experts 1", text)
    return next((count for count in counts if count > 1), None)


def _shared_of(options: Options, draft: Found, width: int, ffn: int) -> int:
    """Return the width of the shared experts, which process every token."""
    shared = options.whole("--moe-shared-expert-intermediate-size")
    number = options.whole("--num-shared-experts")
    if options.choice("--mlp-type", ("standard", "residual")) == "residual":
        text = "residual is predicted as a shared expert, which every token passes"
        draft.remark("assumed", "--mlp-type", text)
        return ffn
    if shared is None and number is not None:
        return number * width
    if shared is None and options.has("--enable-shared-expert"):
        return width
    return shared or 0


def _expert_blocks(options: Options, layers: int) -> list[int]:
    """Tell for each block of the model whether it has experts: 1 or 0."""
    first = options.whole("--first-k-dense-replace", minimum=0) or 0
    interval = options.whole("--expert-interval")
    if interval is None and is_of_deepspeed(options):
        # Without the option, Megatron-DeepSpeed gives every second block experts.
        interval = 2
    if interval is not None and "--moe-layer-freq" not in options:
        return [int((block + 1) % interval == 0) for block in range(layers)]
    text = options.text("--moe-layer-freq") or "1"
    where = options.where("--moe-layer-freq")
    blocks = pattern_of(text, f"{where}: ") if "[" in text else []
    if not blocks:
        every = checked_whole(where, text)
        blocks = [int(block % every == 0 and block >= first) for block in range(layers)]
    if len(blocks) != layers:
        reject(
            f"{where}: {text} has entries for {len(blocks)} blocks, but the model has {layers}: "
            "give one for each block"
        )
    return blocks


def pattern_of(text: str, where: str = "") -> list[int]:
    """Return the list of numbers that an option's value such as ``([0]*3+[1]*58)`` stands for; an
    error begins with ``where``, the option.

    >>> pattern_of("([0]*2+[1]*3)")
    [0, 0, 1, 1, 1]
    """
    try:
        blocks = _list_of(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError):
        reject(
            f"{where}{text!r} is not a list of blocks: give 0 or 1 for each of at most "
            f"{_MOST_BLOCKS:,} blocks, such as ([0]*3+[1]*58)"
        )
    return blocks


def _list_of(node: ast.AST) -> list[int]:
    match node:
        case ast.List(elts=elements):
            return [_number_of(element) for element in elements]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return [*_list_of(left), *_list_of(right)]
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            repeated, times = _list_of(left), _number_of(right)
            if len(repeated) * times <= _MOST_BLOCKS:
                return repeated * times
        case _:
            pass
    raise ValueError(ast.dump(node))


def _number_of(node: ast.AST) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    raise ValueError(ast.dump(node))
