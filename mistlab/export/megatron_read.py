"""Reads Megatron-LM's options: a launch line, or a shell script with one, becomes a job."""

import re
from collections.abc import Mapping, Sequence

from mistlab.export.found import Found, checked_whole
from mistlab.export.given import Given, Imported
from mistlab.export.megatron_experts import read_experts
from mistlab.export.megatron_flags import HARMLESS, TELLING, UNSAID, Options
from mistlab.export.megatron_model import model_of
from mistlab.export.megatron_precision import read_precision
from mistlab.export.shell import Launch, launch_of
from mistlab.export.target import is_of_today
from mistlab.schedule.orders import INTERLEAVED, order_of_chunks
from mistlab.values.context_ways import GATHER, HEADS, RING
from mistlab.values.errors import InputError, near_matches
from mistlab.values.model import ModelSpec
from mistlab.values.workload import Precision

# What predictions are made with: Megatron-LM's own engine, or one that takes every plan.
ENGINES = ("megatron", "mistlab")
# Those that have what models and machines of today have come before them.
ENGINES_OF_TODAY = ("megatron-core", "megatron-fsdp")
# A plan's engine, where a launch line alone would be taken for another's.
_ENGINE = re.compile(r"^# predicted under engine ([\w-]+)$", re.MULTILINE)
# Megatron-FSDP's strategies by ZeRO level.
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
# How context-parallel ranks exchange keys, by the word for ``--cp-comm-type``.
EXCHANGES: Mapping[str, int] = {"p2p": RING, "all_gather": GATHER, "a2a": HEADS}


def read(text: str, given: Given) -> Imported:
    """The job of a launch line, and what was assumed."""
    launch = launch_of(text)
    options, found = Options.of(launch.arguments), Found(shares_experts=True)
    _ranks(launch, options, found)
    if given.model is None or "--num-layers" in options.words:
        found.model = model_of(options, found)
    model = given.model or found.model
    assert model is not None
    if said := _ENGINE.search(text):
        found.engine = said[1]
    _degrees(options, found)
    read_experts(options, found, has_experts=model.experts is not None)
    _workload(options, found)
    read_precision(options, found, given.hardware)
    _stages(options, found, model.layers)
    _states(options, found)
    _activations(options, found, model.layers)
    _rest(options, found)
    return found.job(given, engines_for(model, found.precision))


def engines_for(model: ModelSpec, precision: Precision | None) -> tuple[str, ...]:
    """The engines that may stand for a launch line of a model, the best first."""
    return (*ENGINES_OF_TODAY, *ENGINES) if is_of_today(model, precision) else ENGINES


def engine_line(engine: str) -> str:
    """A comment that keeps the engine of a plan."""
    return f"# predicted under engine {engine}\n"


def _ranks(launch: Launch, options: Options, found: Found) -> None:
    started = Options.of(launch.started)
    names = (("nodes", "--nnodes"), ("gpus_per_node", "--nproc-per-node"))
    for name, option in names:
        if option in started.words and (text := started.text(option)):
            if text.isdigit():
                setattr(found, name, checked_whole(option, text))
            else:
                said = f"{option} {text} is no number: give --{name.replace('_', '-')}"
                found.remark("assumed", name, f"{said}, unless it is given")
    world = options.whole("--world-size")
    if world and found.nodes and found.gpus_per_node and world != found.nodes * found.gpus_per_node:
        text = (
            f"--world-size {world}, but {found.nodes} x {found.gpus_per_node} processes: took these"
        )
        found.remark("contradicting", "gpus_per_node", text)


def _degrees(options: Options, found: Found) -> None:
    found.values["tensor_parallel"] = options.whole("--tensor-model-parallel-size") or 1
    found.num_stages = options.whole("--pipeline-model-parallel-size") or 1
    found.values["context_parallel"] = options.whole("--context-parallel-size") or 1
    found.values["sequence_parallel"] = int(options.has("--sequence-parallel"))
    _exchange(options, found)


def _exchange(options: Options, found: Found) -> None:
    """How context-parallel ranks exchange keys, where layers do it alike."""
    said = options.text("--cp-comm-type") or "p2p"
    if said in EXCHANGES:
        found.values["context_exchange"] = EXCHANGES[said]
    else:
        text = f"--cp-comm-type {said}: taken as p2p"
        found.remark("ignored", "context_exchange", text)


def _workload(options: Options, found: Found) -> None:
    found.sequence_length = options.whole("--seq-length")
    found.micro_batch = options.whole("--micro-batch-size")
    found.global_batch = options.whole("--global-batch-size")
    positions = options.whole("--max-position-embeddings")
    if positions and found.sequence_length and positions < found.sequence_length:
        text = (
            f"--max-position-embeddings {positions} is shorter than --seq-length: took --seq-length"
        )
        found.remark("contradicting", "sequence_length", text)
    backend = options.choice("--attention-backend", ("flash", "fused", "unfused", "local", "auto"))
    is_flash = options.has("--use-flash-attn")
    if backend in ("unfused", "local"):
        found.attention = "math"
        if is_flash:
            text = f"--use-flash-attn and --attention-backend {backend}: took {backend}"
            found.remark("contradicting", "attention", text)
    elif is_flash or backend is not None:
        found.attention = "flash"


def _stages(options: Options, found: Found, layers: int) -> None:
    layout = options.text("--pipeline-model-parallel-layout")
    ends = ("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers")
    first, last = (options.whole(name) for name in ends)
    chunks = _chunks(options, found, layers)
    if layout is not None:
        parts = parts_of_layout(layout)
        if len(parts) % found.num_stages:
            message = (
                f"--pipeline-model-parallel-layout: {len(parts)} parts are no multiple of "
                f"{found.num_stages} stages: give a part for each chunk of each stage"
            )
            raise InputError(message)
        chunks = len(parts) // found.num_stages
        found.layers = [sum(parts[stage :: found.num_stages]) for stage in range(found.num_stages)]
    elif first is not None or last is not None:
        found.layers = _with_ends(found.num_stages, layers, first, last)
    elif layers % found.num_stages:
        message = (
            f"--num-layers {layers}: {found.num_stages} stages do not divide them: Megatron-LM "
            "refuses this; give --pipeline-model-parallel-layout, or another number of stages"
        )
        raise InputError(message)
    if chunks > 1:
        order = order_of_chunks(chunks)
        if order in INTERLEAVED:
            found.order = order
        else:
            text = f"{chunks} chunks a stage: no order is named {order}; taken as 1f1b"
            found.remark("ignored", "order", text)


def _chunks(options: Options, found: Found, layers: int) -> int:
    chunks = options.whole("--num-virtual-stages-per-pipeline-rank")
    each = options.whole("--num-layers-per-virtual-pipeline-stage")
    if each is not None and chunks is None:
        chunks, rest = divmod(layers, found.num_stages * each)
        if rest:
            message = (
                f"--num-layers-per-virtual-pipeline-stage {each}: {layers} blocks on "
                f"{found.num_stages} stages are no chunks of {each}: Megatron-LM refuses this; "
                "give a divisor of the blocks of a stage"
            )
            raise InputError(message)
    return chunks or 1


def _with_ends(
    num_stages: int, layers: int, first: int | None, last: int | None
) -> Sequence[int] | None:
    """Blocks of stages, of which the first and the last may have numbers of their own."""
    inner = num_stages - (first is not None) - (last is not None)
    left = layers - (first or 0) - (last or 0)
    if inner < 0 or left < 0 or (inner and left % inner) or (not inner and left):
        message = (
            f"--num-layers {layers}: {left} blocks are left for {max(inner, 0)} stages between the "
            "first and the last: give other --decoder-first- and --decoder-last-pipeline-num-layers"
        )
        raise InputError(message)
    middle = [left // inner] * inner if inner else []
    return [*([first] if first else []), *middle, *([last] if last else [])]


def parts_of_layout(layout: str) -> list[int]:
    """The blocks of each part of a layout such as ``Ett|(tt|)*2tL``.

    >>> parts_of_layout("Ett|(tt|)*2,t*3L")
    [2, 2, 2, 3]
    """
    text = layout.replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        text = re.sub(pattern, lambda found: found[1] * int(found[2]), text)
    if unknown := sorted(set(text) - set("EtmL|")):
        message = (
            f"--pipeline-model-parallel-layout: {''.join(unknown)!r} is not known here: give E, t, "
            "m, L and |, with (...)*N"
        )
        raise InputError(message)
    return [part.count("t") for part in text.split("|")]


def _states(options: Options, found: Found) -> None:
    shards = options.has("--use-distributed-optimizer")
    level = 1 if shards else 0
    strategy = options.choice("--data-parallel-sharding-strategy", STRATEGIES)
    if options.has("--use-megatron-fsdp"):
        level = STRATEGIES.index(strategy or "no_shard")
    elif strategy is not None:
        text = f"--data-parallel-sharding-strategy {strategy} without --use-megatron-fsdp: ignored"
        found.remark("contradicting", "zero", text)
    found.values["zero"] = level
    fraction = options.number("--optimizer-offload-fraction", 1.0, maximum=1)
    if options.has("--optimizer-cpu-offload"):
        if not level:
            text = "--optimizer-cpu-offload without --use-distributed-optimizer, which it needs"
            found.remark("contradicting", "offload.optimizer", f"{text}: taken as it stands")
        found.values["offload_optimizer"] = fraction
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


def _activations(options: Options, found: Found, layers: int) -> None:
    granularity = options.choice("--recompute-granularity", ("full", "selective"))
    method = options.choice("--recompute-method", ("uniform", "block"))
    count = options.whole("--recompute-num-layers")
    if options.has("--recompute-activations-of-all-blocks"):
        granularity, method = "full", "uniform"
    elif options.has("--recompute-activations") and granularity is None:
        granularity = "selective"
    options.taken.add("--recompute-modules")
    if granularity == "full":
        if method is None:
            text = "full without --recompute-method, which Megatron-LM refuses: taken as uniform"
            found.remark("contradicting", "checkpointed_layers", text)
        if method == "block":
            found.values["checkpointed_layers"] = count or layers
        else:
            found.values["checkpointed_layers"] = layers
            if count and count > 1:
                text = f"--recompute-num-layers {count}: taken as blocks recomputed one by one"
                found.remark("assumed", "checkpointed_layers", text)
    elif granularity == "selective":
        modules = " ".join(options.words.get("--recompute-modules", ())) or "core_attn"
        _selective(modules, found, layers)
    elif method or count:
        text = "--recompute-method or -num-layers without --recompute-granularity: ignored"
        found.remark("contradicting", "checkpointed_layers", text)
    offloaded = options.whole("--cpu-offloading-num-layers", minimum=0)
    if offloaded:
        found.values["offload_activations"] = min(offloaded / layers, 1.0)


def _selective(modules: str, found: Found, layers: int) -> None:
    others = [name for name in modules.split() if name != "core_attn"]
    if "core_attn" in modules.split():
        found.values["core_recomputed_layers"] = layers
    if others:
        text = f"--recompute-modules {' '.join(others)}: taken as nothing of them recomputed"
        found.remark("ignored", "checkpointed_layers", text)


def _rest(options: Options, found: Found) -> None:
    for name, instead in UNSAID.items():
        if name in options.words:
            words = " ".join((name, *options.words[name]))
            found.remark("ignored", words, instead)
    for name, before in options.repeated.items():
        last = " ".join(options.words[name]) or "on"
        if any(value != last for value in before):
            text = f"is given as {', '.join((*before, last))}: took the last"
            found.remark("contradicting", name, text)
    if options.harmless:
        text = f"{' '.join(options.harmless)}: no effect on a step's cost that plans could tell"
        found.remark("ignored", "options", text)
    for name in options.unknown:
        words = " ".join((name, *options.words[name]))
        near = near_matches(name, HARMLESS | TELLING | UNSAID.keys())
        near = near if "did you mean" in near else ": no option that is known here"
        found.remark("ignored", words, f"is unknown{near}")
