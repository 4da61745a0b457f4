"""States and activations of Megatron-LM's options: sharding, offloading, recomputation."""

from mistlab.export.found import Found
from mistlab.export.megatron_flags import Options, is_of_deepspeed

# Megatron-FSDP's strategies by ZeRO level.
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
_ADAMS = ("adam", "adamw", "Adam", "AdamW", "FusedAdam", "fused_adam", "cpu_adam")
_OFFLOADING = "hybridadam"


def read_states(options: Options, found: Found) -> None:
    """How Megatron-LM's own optimizer shards and offloads states."""
    level = _level(options, found)
    found.values["zero"] = level
    replicas = options.whole("--num-distributed-optimizer-instances")
    if replicas is not None and level:
        found.values["state_replicas"] = replicas
    _offload(options, found, level)
    _overlap(options, found, level)


def read_optimizer(options: Options, found: Found) -> None:
    """Tell of an optimizer whose moments are not Adam's."""
    said = options.text("--optimizer")
    if said is not None and said not in (*_ADAMS, _OFFLOADING):
        found.remark("ignored", f"--optimizer {said}", "moments are taken as AdamW's, two of them")


def _level(options: Options, found: Found) -> int:
    level = 1 if options.has("--use-distributed-optimizer") else 0
    strategy = options.choice("--data-parallel-sharding-strategy", STRATEGIES)
    if options.has("--use-torch-fsdp2"):
        return 2 if options.has("--torch-fsdp2-no-reshard-after-forward") else 3
    if options.has("--use-megatron-fsdp"):
        return STRATEGIES.index(strategy or "no_shard")
    if strategy is not None:
        text = f"--data-parallel-sharding-strategy {strategy} without --use-megatron-fsdp: ignored"
        found.remark("contradicting", "zero", text)
    return level


def _offload(options: Options, found: Found, level: int) -> None:
    # Pai-Megatron-Patch's optimizer offloads a half unless it is told another share.
    patched = options.text("--optimizer") == _OFFLOADING
    policy = options.text("--optimizer-offload-policy")
    fraction = options.number("--optimizer-offload-fraction", 0.5 if patched else 1.0, maximum=1)
    if patched and policy == "auto":
        text = f"auto: taken as the share {fraction:g} of the optimizer"
        found.remark("assumed", "--optimizer-offload-policy", text)
    if options.has("--optimizer-cpu-offload") or patched:
        if not level:
            text = "--optimizer-cpu-offload without --use-distributed-optimizer, which it needs"
            found.remark("contradicting", "offload.optimizer", f"{text}: taken as it stands")
        found.values["offload_optimizer"] = fraction


def _overlap(options: Options, found: Found, level: int) -> None:
    reduces, gathers = (
        options.has(f"--overlap-{name}") for name in ("grad-reduce", "param-gather")
    )
    found.overlaps = reduces
    if gathers and not reduces:
        text = "--overlap-param-gather needs --overlap-grad-reduce: taken as no overlap at all"
        found.remark("contradicting", "overlap_communication", text)
    elif reduces and level and not gathers:
        text = "--overlap-grad-reduce alone: weights are taken as gathered beside passes too"
        found.remark("assumed", "overlap_communication", text)


def read_activations(options: Options, found: Found, layers: int) -> None:
    """Which blocks are recomputed or offloaded, and what of them."""
    granularity = options.choice("--recompute-granularity", ("full", "selective"))
    method = options.choice("--recompute-method", ("uniform", "block"))
    count = options.whole("--recompute-num-layers", minimum=0)
    options.has("--deepspeed-activation-checkpointing")
    if options.has("--recompute-activations-of-all-blocks"):
        granularity, method = "full", "uniform"
    elif options.has("--recompute-activations") and granularity is None:
        granularity = "selective"
    elif granularity is None and method is not None and "--recompute-method" in options.spelt:
        # Versions up to 2.6 have no granularity.
        granularity = "full"
    if granularity == "full":
        _full(method, count, found, layers)
    elif granularity == "selective":
        modules = " ".join(options.all_words("--recompute-modules")) or "core_attn"
        _selective(modules, found, layers)
    elif (method or count) and not is_of_deepspeed(options):
        text = "--recompute-method or -num-layers without --recompute-granularity: ignored"
        found.remark("contradicting", "checkpointed_layers", text)
    _activations_offloaded(options, found, layers)


def _full(method: str | None, count: int | None, found: Found, layers: int) -> None:
    if method is None:
        text = "full without --recompute-method, which Megatron-LM refuses: taken as uniform"
        found.remark("contradicting", "checkpointed_layers", text)
    if method == "block":
        if count is None:
            text = "block without --recompute-num-layers: taken as 1, the older default"
            found.remark("contradicting", "checkpointed_layers", text)
        found.values["checkpointed_layers"] = 1 if count is None else count
        return
    found.values["checkpointed_layers"] = layers
    if count and count > 1:
        text = f"--recompute-num-layers {count}: taken as blocks recomputed one by one"
        found.remark("assumed", "checkpointed_layers", text)


def _selective(modules: str, found: Found, layers: int) -> None:
    others = [name for name in modules.split() if name != "core_attn"]
    if "core_attn" in modules.split():
        found.values["core_recomputed_layers"] = layers
    if others:
        text = f"--recompute-modules {' '.join(others)}: taken as nothing of them recomputed"
        found.remark("ignored", "checkpointed_layers", text)


def _activations_offloaded(options: Options, found: Found, layers: int) -> None:
    offloaded = options.whole("--cpu-offloading-num-layers", minimum=0)
    options.has("--cpu-offloading")
    if offloaded:
        found.values["offload_activations"] = min(offloaded / layers, 1.0)
    if options.has("--checkpoint-in-cpu") and is_of_deepspeed(options):
        found.values["offload_activations"] = 1.0
