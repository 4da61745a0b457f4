"""Translates plans to Megatron-LM's options, and back: blocks per stage, sharding, experts and
precisions.
"""

import re
from collections.abc import Iterator, Mapping, Sequence

from mistlab.core.values import reject
from mistlab.engines.engine import Optimizer
from mistlab.export.found import Found, checked_whole
from mistlab.export.megatron.megatron_flags import Options, is_of_deepspeed
from mistlab.export.megatron.megatron_parts import PATTERN, segments_of
from mistlab.export.megatron.megatron_routers import balance_options
from mistlab.job.job import Job
from mistlab.machine.hardware import Hardware
from mistlab.plan.workload import Workload
from mistlab.schedule.orders import INTERLEAVED, order_of_chunks
from mistlab.schedule.placement import even_shares

_MOST_BLOCKS = 1_000
_ENDS = ("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers")


def read_stages(options: Options, draft: Found, layers: int) -> None:
    """Read how many blocks each stage has, and which pipeline schedule runs if stages have several
    chunks.
    """
    layout = options.text("--pipeline-model-parallel-layout")
    first, last = (options.whole(name) for name in _ENDS)
    chunks = _chunks(options, draft, layers)
    segments = segments_of(options, layers) if PATTERN in options else []
    listed = _listed(options, draft, layers)
    if layout is not None:
        parts = parts_of_layout(layout)
        chunks = _of_parts(parts, "--pipeline-model-parallel-layout", draft)
    elif len(segments) > 1:
        chunks = _of_parts([len(part) for part in segments], PATTERN, draft)
    elif listed is not None:
        draft.layers = listed
    elif first is not None or last is not None:
        draft.layers = _with_ends(draft.num_stages, layers, first, last)
    elif by_ends := _beside_ends(options, draft.num_stages, layers):
        draft.layers = by_ends
    elif layers % draft.num_stages and not is_of_deepspeed(options):
        reject(
            f"--num-layers {layers}: {draft.num_stages} stages do not divide the blocks, which "
            "Megatron-LM refuses: give --pipeline-model-parallel-layout, or a "
            "--pipeline-model-parallel-size that divides them"
        )
    _order(options, chunks, draft)


def _order(options: Options, chunks: int, draft: Found) -> None:
    if chunks > 1:
        order = order_of_chunks(chunks)
        if order in INTERLEAVED:
            draft.order = order
            if options.text("--recompute-method") == "block":
                text = (
                    "--recompute-num-layers is taken as blocks of a stage, though Megatron-LM "
                    f"counts it in each of the stage's {chunks} model chunks"
                )
                draft.remark("assumed", "checkpointed_layers", text)
        else:
            text = f"{chunks} model chunks a stage are not supported: predicted as 1f1b"
            draft.remark("ignored", "order", text)


def _of_parts(parts: Sequence[int], option: str, draft: Found) -> int:
    """Set the number of blocks of each stage from the blocks of each model chunk; returns the
    chunks per stage.
    """
    if len(parts) % draft.num_stages:
        reject(
            f"{option}: {len(parts)} parts are not a multiple of {draft.num_stages} stages "
            "(--pipeline-model-parallel-size): give each stage equally many parts"
        )
    draft.layers = [sum(parts[stage :: draft.num_stages]) for stage in range(draft.num_stages)]
    return len(parts) // draft.num_stages


def _listed(options: Options, draft: Found, layers: int) -> Sequence[int] | None:
    """Return the blocks of each stage from an option of a fork that lists them."""
    numbers = ",".join(options.all_words("--num-layer-list")).split(",")
    if numbers == [""]:
        return None
    where = options.where("--num-layer-list")
    listed = [checked_whole(where, word) for word in numbers if word]
    if len(listed) != draft.num_stages or sum(listed) != layers:
        reject(
            f"{where}: lists {sum(listed)} blocks in {len(listed)} stages, but the model has "
            f"{layers} blocks (--num-layers) in {draft.num_stages} stages: give a number for each "
            f"stage, {layers} in all"
        )
    return listed


def _beside_ends(options: Options, num_stages: int, layers: int) -> Sequence[int] | None:
    """Return the blocks of each stage if the options count embedding and head as blocks, otherwise
    None.
    """
    method = options.text("--pp-partition-method") or ""
    both = "embed" in method
    at_start = both or options.has("--account-for-embedding-in-pipeline-split")
    at_end = both or options.has("--account-for-loss-in-pipeline-split")
    if num_stages == 1 or not (at_start or at_end):
        return None
    shares = list(even_shares(layers + at_start + at_end, num_stages))
    if len(set(shares)) > 1 and not both:
        reject(
            f"--num-layers {layers}: with embedding and loss {sum(shares)} parts do not divide "
            f"over {num_stages} stages, which Megatron-LM refuses: give a "
            f"--pipeline-model-parallel-size that divides {sum(shares)}"
        )
    shares[0] -= at_start
    shares[-1] -= at_end
    if 0 in shares:
        reject(
            f"--num-layers {layers}: one of {num_stages} stages would have embedding or loss but "
            "no blocks, which is not supported: give a smaller --pipeline-model-parallel-size"
        )
    return shares


def _chunks(options: Options, draft: Found, layers: int) -> int:
    chunks = options.whole("--num-virtual-stages-per-pipeline-rank")
    each = options.whole("--num-layers-per-virtual-pipeline-stage")
    if each is not None and chunks is None:
        ends = ("embedding", "loss")
        counted = layers + sum(
            options.has(f"--account-for-{end}-in-pipeline-split") for end in ends
        )
        chunks, rest = divmod(counted, draft.num_stages * each)
        if rest:
            reject(
                f"--num-layers-per-virtual-pipeline-stage {each}: {layers} blocks on "
                f"{draft.num_stages} stages do not divide into chunks of {each}, which "
                "Megatron-LM refuses: give a divisor of the blocks of a stage"
            )
    return chunks or 1


def _with_ends(
    num_stages: int, layers: int, first: int | None, last: int | None
) -> Sequence[int] | None:
    """Return the blocks of each stage if options state those of the first and of the last stage."""
    inner = num_stages - (first is not None) - (last is not None)
    left = layers - (first or 0) - (last or 0)
    if inner < 0 or left < 0 or (inner and left % inner) or (not inner and left):
        reject(
            f"--num-layers {layers}: beside the first or last stage, {left} blocks do not divide "
            f"over {max(inner, 0)} stages: give another --decoder-first-pipeline-num-layers or "
            "--decoder-last-pipeline-num-layers"
        )
    middle = [left // inner] * inner if inner else []
    return [*([first] if first else []), *middle, *([last] if last else [])]


def _repeated(match: re.Match[str]) -> str:
    if len(match[2]) > len(str(_MOST_BLOCKS)) or int(match[2]) > _MOST_BLOCKS:
        reject(
            f"--pipeline-model-parallel-layout: {match[2]} repetitions are too many: give at most "
            f"{_MOST_BLOCKS}"
        )
    return match[1] * int(match[2])


def parts_of_layout(layout: str) -> list[int]:
    """Return the number of blocks in each part of a pipeline layout, a text such as
    ``Ett|(tt|)*2tL``.

    >>> parts_of_layout("Ett|(tt|)*2,t*3L")
    [2, 2, 2, 3]
    """
    text = layout.replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        text = re.sub(pattern, _repeated, text)
    if unknown := sorted(set(text) - set("EtmL|")):
        reject(
            f"--pipeline-model-parallel-layout: {''.join(unknown)!r} is not supported: write "
            "only E, t, m, L and |, and (...)*N for repetitions"
        )
    return [part.count("t") for part in text.split("|")]


# Translates sharding, offloading and recomputation to Megatron-LM's options, and back.


# Megatron-FSDP's sharding strategies, each at the index of its ZeRO level.
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
_ADAMS = ("adam", "adamw", "Adam", "AdamW", "FusedAdam", "fused_adam", "cpu_adam")
_OFFLOADING = "hybridadam"


def read_states(options: Options, draft: Found) -> None:
    """Read which states Megatron-LM's optimizer shards and offloads."""
    level = _level(options, draft)
    draft.values["zero"] = level
    replicas = options.whole("--num-distributed-optimizer-instances")
    if replicas is not None and level:
        draft.values["state_replicas"] = replicas
    _offload(options, draft, level)
    _overlap(options, draft, level)


def read_optimizer(options: Options, draft: Found) -> None:
    """Add a remark if the optimizer keeps other states than Adam does."""
    stated = options.text("--optimizer")
    if stated is not None and stated not in (*_ADAMS, _OFFLOADING):
        draft.remark("ignored", f"--optimizer {stated}", "is predicted as AdamW, with two moments")


def _level(options: Options, draft: Found) -> int:
    level = 1 if options.has("--use-distributed-optimizer") else 0
    strategy = options.choice("--data-parallel-sharding-strategy", STRATEGIES)
    if options.has("--use-torch-fsdp2"):
        return 2 if options.has("--torch-fsdp2-no-reshard-after-forward") else 3
    if options.has("--use-megatron-fsdp"):
        return STRATEGIES.index(strategy or "no_shard")
    if strategy is not None:
        text = (
            f"--data-parallel-sharding-strategy {strategy} has no effect without "
            "--use-megatron-fsdp: ignored"
        )
        draft.remark("contradicting", "zero", text)
    return level


def _offload(options: Options, draft: Found, level: int) -> None:
    # Pai-Megatron-Patch's optimizer offloads half of its states unless an option says otherwise.
    patched = options.text("--optimizer") == _OFFLOADING
    policy = options.text("--optimizer-offload-policy")
    fraction = options.number("--optimizer-offload-fraction", 0.5 if patched else 1.0, maximum=1)
    if patched and policy == "auto":
        text = f"auto is predicted as offloading a fraction {fraction:g} of the optimizer"
        draft.remark("assumed", "--optimizer-offload-policy", text)
    if options.has("--optimizer-cpu-offload") or patched:
        if not level:
            text = (
                "--optimizer-cpu-offload needs --use-distributed-optimizer, which is not given: "
                "predicted all the same"
            )
            draft.remark("contradicting", "offload.optimizer", text)
        draft.values["offload_optimizer"] = fraction


def _overlap(options: Options, draft: Found, level: int) -> None:
    reduces, gathers = (
        options.has(f"--overlap-{name}") for name in ("grad-reduce", "param-gather")
    )
    draft.overlaps = reduces
    if gathers and not reduces:
        text = (
            "--overlap-param-gather needs --overlap-grad-reduce, which is not given: predicted "
            "without overlap"
        )
        draft.remark("contradicting", "overlap_communication", text)
    elif reduces and level and not gathers:
        text = "--overlap-grad-reduce is given without --overlap-param-gather: predicted with both"
        draft.remark("assumed", "overlap_communication", text)


def read_activations(options: Options, draft: Found, layers: int) -> None:
    """Read which blocks are recomputed or offloaded, and which of their activations."""
    granularity = options.choice("--recompute-granularity", ("full", "selective"))
    method = options.choice("--recompute-method", ("uniform", "block"))
    count = options.whole("--recompute-num-layers", minimum=0)
    options.has("--deepspeed-activation-checkpointing")
    if options.has("--recompute-activations-of-all-blocks"):
        granularity, method = "full", "uniform"
    elif options.has("--recompute-activations") and granularity is None:
        granularity = "selective"
    elif granularity is None and method is not None and "--recompute-method" in options.spelt:
        # Versions up to 2.6 have no option for the granularity of recomputation: they recompute
        # whole blocks.
        granularity = "full"
    if granularity == "full":
        _full(method, count, draft, layers)
    elif granularity == "selective":
        modules = " ".join(options.all_words("--recompute-modules")) or "core_attn"
        _selective(modules, draft, layers)
    elif (method or count) and not is_of_deepspeed(options):
        text = (
            "--recompute-method and --recompute-num-layers have no effect without "
            "--recompute-granularity: ignored"
        )
        draft.remark("contradicting", "checkpointed_layers", text)
    _activations_offloaded(options, draft, layers)


def _full(method: str | None, count: int | None, draft: Found, layers: int) -> None:
    if method is None:
        text = (
            "Megatron-LM refuses --recompute-granularity full without --recompute-method: "
            "predicted as uniform"
        )
        draft.remark("contradicting", "checkpointed_layers", text)
    if method == "block":
        if count is None:
            text = (
                "--recompute-method block is given without --recompute-num-layers: predicted "
                "with 1, the default of older versions"
            )
            draft.remark("contradicting", "checkpointed_layers", text)
        draft.values["checkpointed_layers"] = 1 if count is None else count
        return
    draft.values["checkpointed_layers"] = layers
    if count and count > 1:
        text = f"--recompute-num-layers {count} is predicted as blocks recomputed one by one"
        draft.remark("assumed", "checkpointed_layers", text)


def _selective(modules: str, draft: Found, layers: int) -> None:
    others = [name for name in modules.split() if name != "core_attn"]
    if "core_attn" in modules.split():
        draft.values["core_recomputed_layers"] = layers
    if others:
        text = f"--recompute-modules {' '.join(others)}: their outputs are predicted as kept"
        draft.remark("ignored", "checkpointed_layers", text)


def _activations_offloaded(options: Options, draft: Found, layers: int) -> None:
    offloaded = options.whole("--cpu-offloading-num-layers", minimum=0)
    options.has("--cpu-offloading")
    if offloaded:
        draft.values["offload_activations"] = min(offloaded / layers, 1.0)
    if options.has("--checkpoint-in-cpu") and is_of_deepspeed(options):
        draft.values["offload_activations"] = 1.0


# Translates expert parallelism to Megatron-LM's options, and back.
#
# Predictions assume that every expert gets equally many tokens, which the auxiliary loss in the
# options makes nearly true. Tokens are sent by a plain all-to-all.


# The options for the number of ranks that split each expert (by default as many as tensor
# parallelism has), and for the number of ranks that divide the experts among them.
_PARTS, _RANKS = "--expert-tensor-parallel-size", "--expert-model-parallel-size"
_CAPACITY = "--moe-expert-capacity-factor"
# MindSpeed's switch: tensor-parallel ranks divide the experts among them instead of splitting each
# expert.
_EXPERTS_DIVIDED = "--moe-tp-extend-ep"
# Switch of Megatron-core 0.8 and 0.9: tensor- and expert-parallel ranks together split each expert
# (megatron/core/transformer/moe/moe_layer.py and experts.py).
_EXPERT_DIVIDED = "--moe-extended-tp"
_EXCHANGES = ("allgather", "alltoall", "alltoall_seq", "flex")


def expert_options(job: Job) -> Iterator[str]:
    """List the options for a job's expert parallelism."""
    stage, workload = job.plan.stages[0], job.workload
    if workload.model.experts is None:
        return
    yield f"{_RANKS} {stage.expert_parallel} {_PARTS} {stage.expert_tensor_parallel}"
    balance = balance_options(workload.model.experts.router)
    yield f"--moe-grouped-gemm --moe-token-dispatcher-type alltoall {balance}"
    if workload.expert_capacity is not None:
        yield f"--moe-expert-capacity-factor {workload.expert_capacity!r}"
    if workload.expert_padding:
        yield "--moe-pad-expert-input-to-capacity"


def read_experts(options: Options, draft: Found, *, has_experts: bool) -> None:
    """Read the parallel degrees and the capacity factor of experts, if the model has experts."""
    ranks, parts = _divisions(options, draft)
    capacity, pads = _capacity(options)
    if not has_experts:
        if ranks > 1:
            where = options.where(_RANKS)
            reject(f"{where}: {ranks}, but the model has no experts: give --num-experts N, or 1")
        return
    draft.values |= {"expert_parallel": ranks, "expert_tensor_parallel": parts}
    draft.expert_capacity = capacity or None
    draft.expert_padding = pads and capacity > 0
    if pads and not capacity:
        text = (
            "--moe-pad-expert-input-to-capacity has no effect without "
            "--moe-expert-capacity-factor: ignored"
        )
        draft.remark("contradicting", "expert_padding", text)
    of_deepspeed = is_of_deepspeed(options)
    is_whole = draft.values["tensor_parallel"] > 1 and not options.has("--sequence-parallel")
    if is_whole and not of_deepspeed:
        text = (
            "--sequence-parallel is not given, but Megatron-LM needs it to train experts with "
            "tensor parallelism: predicted with it"
        )
        draft.remark("contradicting", "sequence_parallel", text)
        draft.values["sequence_parallel"] = 1
    if not of_deepspeed:
        # DeepSpeed's engine has only one way to exchange tokens, and an auxiliary loss of its own.
        _remark_exchange(options, draft)
        _remark_balance(options, draft)


def _divisions(options: Options, draft: Found) -> tuple[int, int]:
    """Return over how many ranks the experts are divided, and over how many ranks each expert is
    split.
    """
    tensor = draft.values["tensor_parallel"]
    ranks = options.whole(_RANKS) or 1
    if options.has(_EXPERTS_DIVIDED):
        text = (
            f"{ranks * tensor}, because {_EXPERTS_DIVIDED} divides experts over tensor-parallel "
            "ranks too"
        )
        draft.remark("noted", "expert_parallel", text)
        return ranks * tensor, 1
    if options.has(_EXPERT_DIVIDED):
        return 1, ranks * tensor
    if is_of_deepspeed(options):
        return ranks, tensor if options.has("--enable-expert-tensor-parallelism") else 1
    return ranks, options.whole(_PARTS) or tensor


def _capacity(options: Options) -> tuple[float, bool]:
    """Return the capacity factor of experts (0 means unlimited), and whether each expert's tokens
    are padded to the capacity.
    """
    if is_of_deepspeed(options):
        if options.has("--disable-moe-token-dropping"):
            return 0.0, False
        return options.number(_CAPACITY, 1.0), True
    return options.number(_CAPACITY, 0.0), options.has("--moe-pad-expert-input-to-capacity")


def _remark_exchange(options: Options, draft: Found) -> None:
    exchange = options.choice("--moe-token-dispatcher-type", _EXCHANGES) or "allgather"
    if exchange == "flex":
        text = "flex is predicted as alltoall; give --engine megatron-bridge for fused kernels"
        draft.remark("ignored", "--moe-token-dispatcher-type", text)
    elif exchange == "allgather":
        text = "allgather is predicted as alltoall"
        draft.remark("ignored", "--moe-token-dispatcher-type", text)
    if not options.has("--moe-grouped-gemm"):
        text = "is not given: the experts of a rank are predicted as one grouped GEMM all the same"
        draft.remark("assumed", "--moe-grouped-gemm", text)


def _remark_balance(options: Options, draft: Found) -> None:
    """Add a remark on options under which experts may get unequal numbers of tokens, since
    predictions assume equal ones.
    """
    kind = options.text("--moe-router-load-balancing-type")
    weight = options.number("--moe-aux-loss-coeff", 0.0)
    # These options balance experts without an auxiliary loss: the expert bias, and forced balance.
    switches = [
        options.has(f"--moe-router-{name}")
        for name in ("enable-expert-bias", "force-load-balancing")
    ]
    has_loss = kind == "sinkhorn" or (kind != "none" and weight > 0)
    if not (has_loss or any(switches)):
        text = (
            "1 (experts get equally many tokens), though no option balances them and "
            "--moe-aux-loss-coeff is 0"
        )
        draft.remark("assumed", "expert_imbalance", text)


# Translates the precisions of GEMMs and of Adam's moments to Megatron-LM's options, and back.
#
# On GPUs with 4-bit GEMMs, 8-bit GEMMs are scaled per block of values; on other GPUs per tensor.
# Weights stay in 16 bits.


# Megatron-LM's names for two ways to scale 8-bit GEMMs: per block of 32 values in the tensor cores,
# and per tensor.
BY_BLOCKS, BY_TENSORS = "mxfp8", "tensorwise"
_RECIPES = ("tensorwise", "delayed", "mxfp8", "blockwise", "custom")
_NOT_SAID = "delayed"
_MOMENTS: Mapping[Optimizer, str] = {"adamw": "fp32", "adamw-bf16": "bf16", "adamw-8bit": "fp8"}
_SUMS_IN_FP32, _SUMS_IN_BF16 = "--accumulate-allreduce-grads-in-fp32", "--grad-reduce-in-bf16"
# The option that enables Megatron-LM's optimizer with moments of fewer than 32 bits.
PRECISION_AWARE = "--use-precision-aware-optimizer"


def recipe_for(hardware: Hardware) -> str:
    """Return Megatron-LM's name for the way to scale 8-bit GEMMs that the GPU's tensor cores
    support.
    """
    return BY_BLOCKS if hardware.gpu.peak_tflops.fp4 is not None else BY_TENSORS


def precision_options(workload: Workload, hardware: Hardware) -> Iterator[str]:
    """List the options for the precision of GEMMs."""
    match workload.precision:
        case "fp8":
            yield f"--bf16 --fp8-format hybrid --fp8-recipe {recipe_for(hardware)}"
        case "fp4":
            yield "--bf16 --fp4-format e2m1 --fp4-recipe nvfp4"
        case "fp32":
            pass
        case precision:
            yield f"--{precision}"


def moment_options(optimizer: Optimizer) -> Iterator[str]:
    """List the options for Adam's moments if they have fewer than 32 bits."""
    if optimizer != "adamw":
        word = _MOMENTS[optimizer]
        yield f"{PRECISION_AWARE} --exp-avg-dtype {word} --exp-avg-sq-dtype {word}"


def sum_options(workload: Workload) -> Iterator[str]:
    """List the option for the precision of gradient accumulation, if it is not Megatron-LM's
    default.
    """
    if workload.gradients == "32bit" and workload.precision == "fp16":
        yield _SUMS_IN_FP32
    elif workload.gradients == "16bit":
        yield _SUMS_IN_BF16


def read_precision(options: Options, draft: Found, hardware: Hardware) -> None:
    """Read the precision of GEMMs and of Adam's moments."""
    halves = [name for name in ("bf16", "fp16") if options.has(f"--{name}")]
    if len(halves) > 1:
        draft.remark("contradicting", "precision", "--bf16 and --fp16 are both given: bf16 is used")
    draft.precision = "bf16" if "bf16" in halves else "fp16" if halves else "fp32"
    if draft.precision == "bf16" and options.has(_SUMS_IN_BF16):
        draft.gradients = "16bit"
    elif draft.precision == "fp16" and options.has(_SUMS_IN_FP32):
        draft.gradients = "32bit"
    _narrow_products(options, draft, hardware)
    _moments(options, draft)


def _narrow_products(options: Options, draft: Found, hardware: Hardware) -> None:
    eight = options.choice("--fp8-format", ("e4m3", "hybrid"))
    for name in ("e4m3", "hybrid"):
        # Older versions of Megatron-LM have one switch per 8-bit format.
        eight = name if options.has(f"--fp8-{name}") else eight
    four = options.choice("--fp4-format", ("e2m1",))
    recipe = options.choice("--fp8-recipe", _RECIPES) or _NOT_SAID
    options.choice("--fp4-recipe", ("nvfp4", "custom"))
    peaks = hardware.gpu.peak_tflops
    if four is not None and eight is not None:
        text = "--fp4-format and --fp8-format are both given: --fp4-format is used"
        draft.remark("contradicting", "precision", text)
    option_text = f"--fp4-format {four}" if four else f"--fp8-format {eight}"
    if (four or eight) and (peaks.fp4 if four else peaks.fp8) is None:
        rate = "fp4" if four else "fp8"
        text = f"GEMMs are predicted in 16 bits: hardware {hardware.name} has no rate of {rate}"
        draft.remark("ignored", option_text, text)
    elif (four or eight) and draft.precision != "bf16":
        text = f"{option_text} with {draft.precision}: predicted with bf16"
        draft.remark("contradicting", "precision", text)
        draft.precision = "fp4" if four else "fp8"
    elif four:
        draft.precision = "fp4"
    elif eight:
        draft.precision = "fp8"
        if recipe != recipe_for(hardware):
            text = f"{recipe}: GEMMs are predicted as those of {recipe_for(hardware)}"
            draft.remark("ignored", "--fp8-recipe", text)


def _moments(options: Options, draft: Found) -> None:
    stated = [
        options.choice(f"--{name}-dtype", ("fp32", "fp16", "bf16", "fp8")) or "fp32"
        for name in ("exp-avg", "exp-avg-sq")
    ]
    known = {word: optimizer for optimizer, word in _MOMENTS.items()}
    if stated[0] == stated[1] and stated[0] in known:
        draft.optimizer = known[stated[0]]
        if draft.optimizer != "adamw" and not options.has(PRECISION_AWARE):
            text = (
                f"--exp-avg-dtype {stated[0]} needs {PRECISION_AWARE}, which is not given: "
                "predicted all the same"
            )
            draft.remark("contradicting", "optimizer", text)
    else:
        text = (
            f"--exp-avg-dtype {stated[0]}, --exp-avg-sq-dtype {stated[1]}: Adam's moments are "
            "predicted in 32 bits"
        )
        draft.remark("ignored", "optimizer", text)
