"""GPUs, software and further facts in the words of tables of measured runs."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NoReturn

from experiments.runs.run_shapes import keys_in
from mistlab import catalog
from mistlab.core.values import FieldError, near_matches, refuse, shown
from mistlab.engines.engine import ENGINES, Precision
from mistlab.plan.workload import Attention
from mistlab.schedule.orders import DEFAULT_ORDER

# GPUs as tables of runs name them, each the hardware of the catalogue or refused.
#
# The name of the chip must be a whole word: ``L40S`` is no L4, and ``H1000`` no H100. Further
# words of a name tell its memory and its make; those that make no other chip of it are known, and
# what is not known is told in a note.


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """GPUs as a table names them: the hardware of the catalogue, with another memory if given.

    Products in 16 bits keep up ``products_share`` of the hardware's rate.
    """

    hardware: str
    memory_gib: float | None = None
    products_share: float = 1.0
    note: str = ""


_ANY = 0
_V100 = Gpus(hardware="v100-16gb", note="V100 of 16 GB assumed")
_A100 = Gpus(hardware="a100-80gb", note="A100 of 80 GB assumed")
_H100_96 = Gpus(hardware="h100-80gb", memory_gib=94.0, note="rates of the H100 with 80 GB taken")
_CLASS_184 = Gpus(hardware="gb200-186gb", note="184 GiB are those of a GB200")

# Chips, and the hardware of each memory in GB that makers and tools give them; 0 stands for a name
# without its memory.
CHIPS: Mapping[str, Mapping[int, Gpus]] = {
    "l4": dict.fromkeys((_ANY, 24), Gpus(hardware="l4-24gb")),
    "a10g": dict.fromkeys((_ANY, 24), Gpus(hardware="a10g-24gb")),
    "v100": {_ANY: _V100, 16: replace(_V100, note=""), 32: Gpus(hardware="v100-32gb")},
    "a100": {_ANY: _A100, 40: Gpus(hardware="a100-40gb"), 80: replace(_A100, note="")},
    "h100": {**dict.fromkeys((_ANY, 80), Gpus(hardware="h100-80gb")), 96: _H100_96},
    "h200": dict.fromkeys((_ANY, 140, 141, 144), Gpus(hardware="h200-141gb")),
    "b200": {
        **dict.fromkeys((_ANY, 180, 183, 186, 192), Gpus(hardware="b200-180gb")),
        184: _CLASS_184,
    },
    "gb200": dict.fromkeys((_ANY, 184, 185, 186, 189, 192), Gpus(hardware="gb200-186gb")),
    "b300": dict.fromkeys((_ANY, 262, 268, 270, 288), Gpus(hardware="b300-288gb")),
    "gb300": dict.fromkeys((_ANY, 278, 279, 284, 288), Gpus(hardware="gb300-288gb")),
    "gh200": dict.fromkeys((_ANY, 96), Gpus(hardware="gh200-96gb")),
    "mi300x": dict.fromkeys((_ANY, 192), Gpus(hardware="mi300x-192gb")),
    "mi325x": dict.fromkeys((_ANY, 256), Gpus(hardware="mi325x-256gb")),
}
DEFAULT_CHIP = "h100"
# Words before and after a chip's name that make no other of it.
_MAKERS = frozenset(("nvidia", "amd", "tesla", "instinct"))
_SAME = re.compile(
    r"sxm[2-6]?|hbm[23]e?|oam|gpus?|tensor|core|class|superchip|nvl72|nvlink|dgx|hgx|a3|[0-9]+w"
)
# Words that make another chip of it, with other rates.
_OTHERS: Mapping[str, frozenset[str]] = {
    "h100": frozenset(("pcie", "nvl")),
    "h200": frozenset(("nvl",)),
}
_MEMORY = re.compile(r"(?<![a-z0-9])([0-9]+) ?g(?:i?b)?(?![a-z0-9])")

# The software that ran on one slow machine alone, the machine's GPUs, and the share of the
# hardware's rate that products in 16 bits keep up there. SimuMax's products of single kernels reach
# 1,451 TFLOP/s at most (kernel_efficiency_simumax.csv) and 1,076 in the sum; the best product that
# others measured on B200 reaches 1,745 (gemm_peaks.csv). Its runs take as long as its products say.
SLOW_MACHINES: Mapping[tuple[str, str], float] = {("simumax", "b200-180gb"): 1076.2 / 1321.7}


def gpus_of(text: str, software: str = "", own: str = "") -> Gpus:
    """The GPUs that a text names; refuses unlike ones, and GPUs without a hardware file.

    With ``own``, the name of a hardware file of the caller's, rows that name nothing have its GPUs;
    if the catalogue has no such name, all rows have.
    """
    if own and (not text or own not in catalog.hardware_names()):
        return Gpus(hardware=own)
    if "+" in text:
        problem = (
            f"{shown(text)} are unlike GPUs, and a row does not say which stage has which: predict "
            "a plan file that lists them in cluster.hardware"
        )
        refuse("hardware", problem)
    gpus = _named_gpu(text) if text else CHIPS[DEFAULT_CHIP][_ANY]
    if not text:
        gpus = replace(gpus, note=f"hardware is empty: {gpus.hardware} assumed")
    share = SLOW_MACHINES.get((software, gpus.hardware), 1.0)
    return replace(gpus, products_share=share)


def _named_gpu(text: str) -> Gpus:
    """The GPUs of a name: a chip's whole word, and what its further words say."""
    given = text.casefold()
    sizes = [int(size) for size in _MEMORY.findall(given)]
    words = re.findall(r"[a-z0-9]+", _MEMORY.sub(" ", given))
    words = [word for word in words if word not in _MAKERS]
    chip = _chip(words[0]) if words else ""
    if chip not in CHIPS:
        _refuse_name(text)
    further = [words[0].removeprefix(chip), *words[1:]]
    memory = sizes[0] if sizes else _ANY
    if memory not in CHIPS[chip] or _OTHERS.get(chip, frozenset()) & {*further}:
        _refuse_name(text)
    gpus = CHIPS[chip][memory]
    strange = [word for word in further if word and not _SAME.fullmatch(word)]
    if not strange:
        return gpus
    taken = f"hardware {text} is taken as {gpus.hardware}"
    return replace(gpus, note=f"{taken}; {gpus.note}" if gpus.note else taken)


def _chip(word: str) -> str:
    """The chip that a word names, whose make may follow at once (``h100sxm5``)."""
    return re.sub(r"(?<=[0-9a-z])(sxm[2-6]?|pcie|nvl)$", "", word)


def _refuse_name(text: str) -> NoReturn:
    names = [_shown(chip, memory) for chip, sizes in CHIPS.items() for memory in sizes]
    near = near_matches(text.upper(), names).removeprefix(": ")
    meant = f" ({near})" if near.startswith("did you mean") else ""
    known = ", ".join(CHIPS).upper()
    refuse("hardware", f"{shown(text)} has no hardware file{meant}: give {known}, or write a file")


def _shown(chip: str, memory: int) -> str:
    return f"{chip.upper()}-{memory}GB" if memory else chip.upper()


# The words of tables of runs: engines, precisions and ways to save memory, as people write them,
# in the terms of this package.


# Words that an engine's text has, and the engine that it stands for; the first match counts.
ENGINES_BY_WORD: Mapping[str, str] = {
    "nanotron": "nanotron",
    "zero bubble": "zero-bubble",
    "torchtitan": "fsdp",
    "llm-foundry": "fsdp",
    "composer": "fsdp",
    "automodel": "fsdp",
    "fsdp": "fsdp",
    "deepspeed": "deepspeed",
    "aceso": "aceso",
    "mistlab": "mistlab",
    "megatron-bridge": "megatron-bridge",
    "nemo": "megatron-core",
    "megatron-core": "megatron-core",
    "simumax": "megatron-core",
    "megatron": "megatron",
}


# Unknown engines that shard weights, and whose kernels are not torch's: MaxText has XLA's, and
# cuDNN's attention by Transformer Engine (``cudnn_flash_te``).
AS_FSDP: Mapping[str, str] = {"maxtext": "fsdp-te"}


# Software that an engine's text names, where it is no engine; the first match counts.
OTHER_SOFTWARE = ("simumax", "paxml", "maxtext", "sailor")


def software_of(text: str) -> str:
    """The software that an engine's text names; "other" if it names none that is known."""
    return next(iter(_named(text, (*OTHER_SOFTWARE, *ENGINES_BY_WORD))), "other")


def _named(text: str, names: Iterable[str]) -> list[str]:
    """The names whose words a text has as whole words; a number may follow at once (FSDP2)."""
    words = re.findall("[a-z0-9]+", text.casefold().replace("megatronlm", "megatron-lm"))
    plain = f" {' '.join(words)} "
    spelled = {name: " ".join(re.findall("[a-z0-9]+", name)) for name in names}
    return [name for name, own in spelled.items() if re.search(rf" {own}[0-9]* ", plain)]


# Words that an engine's text has of the order of passes, and the order; the first match counts.
ORDERS_BY_WORD: Mapping[str, str] = {
    "schedule zbv": "zb-v",
    "schedule zb-v": "zb-v",
    "schedule zb-2p": "zb-2p",
    "schedule zb-h2": "zb-h2",
    "schedule zb": "zb-h1",
}


# The engine whose runs in this order others' are predicted as.
ENGINE_OF_ZB_V = "zero-bubble"


@dataclass(frozen=True, slots=True, kw_only=True)
class Usual:
    """How an engine's own examples train a model, where a row does not say."""

    vocab: int
    attention: Attention
    dropout: float
    tied_embeddings: bool


# Examples of the zero-bubble fork (examples/pretrain_zero_bubble.sh, 2024) have a table of tokens
# by SentencePiece, which the head does not share. The names of the models (14.6B, 28.3B) count some
# 32,000 tokens. Attention is Megatron-LM's of that time: written out, with dropout as by default.
# The memory of these runs has room for scores and masks, and is a third to a half more than fused
# attention keeps.
USUAL_OF_ENGINE: Mapping[str, Usual] = {
    "zero-bubble": Usual(vocab=32000, attention="math", dropout=0.1, tied_embeddings=False),
}


# What a text about sharding contains, and its ZeRO level.
_LEVELS: Mapping[str, int] = {
    "shard_grad_op": 2,
    "hybrid_shard_zero2": 2,
    "full_shard": 3,
    "full shard": 3,
    "fully sharded": 3,
    "no_shard": 0,
    "no shard": 0,
    "distributed optimizer": 1,
    "fsdp": 3,
    "hsdp": 3,
    "hybrid": 3,
    "params": 3,
    "optim_grads": 2,
    "optim": 1,
    "none": 0,
    "ddp": 0,
    # Adapters alone are trained: their states are small, and predicted as those of all weights.
    "lora": 1,
}


def engine_of(text: str, zero: str) -> tuple[str, str]:
    """The engine that a text stands for, and a note where the engine is assumed."""
    found = next((ENGINES_BY_WORD[name] for name in _named(text, ENGINES_BY_WORD)), "")
    if found in ("megatron", "megatron-core") and "megatron-fsdp" in zero.casefold():
        return "megatron-fsdp", ""
    if found and not (found in ("megatron", "megatron-core") and "fsdp" in zero.casefold()):
        return found, ""
    # Sharded weights, and gradients, are FSDP's, whatever runs it.
    shards = "fsdp" in zero.casefold() or (not found and (_level_of(zero.casefold()) or 0) > 1)
    as_fsdp = next((AS_FSDP[name] for name in _named(text, AS_FSDP)), "fsdp")
    assumed = as_fsdp if shards else "megatron"
    if found:
        return assumed, f"zero {zero} is sharded as by engine {assumed}"
    what = f"engine {shown(text)} is unknown" if text else "engine is empty"
    return assumed, f"{what}: predicted as engine {assumed}"


def order_of(text: str, engine: str, remarks: str) -> tuple[str, str, str]:
    """The order of passes that an engine's text names, or else the notes; the engine that runs it;
    and a note if this is not the row's own engine. The order is empty if nothing names it.

    Of the notes only the words for ZB-V are read.
    """
    if order := _named_order(text):
        return order, engine, ""
    if engine == "zero-bubble":
        return "", "zero-bubble-waiting", ""
    order = _named_order(remarks)
    if order != "zb-v":
        return "", engine, ""
    if not ENGINES[engine].order_problem(order, default=DEFAULT_ORDER):
        return order, engine, ""
    return order, ENGINE_OF_ZB_V, f"{order} is predicted as engine {ENGINE_OF_ZB_V} runs it"


def _named_order(text: str) -> str:
    return next((ORDERS_BY_WORD[name] for name in _named(text, ORDERS_BY_WORD)), "")


def dispatcher_of(model: str) -> str:
    """The dispatcher of a model whose row names none: DeepEP was made for DeepSeek V3."""
    return "deepep" if keys_in(model, ("deepseek",)) else ""


# The first release of Megatron-Bridge whose recipes of transformers with experts for racks capture
# whole iterations as a CUDA graph.
WHOLE_GRAPHS = (26, 6)


_GRAPHS = ("cuda_graph", "cuda graph")
_WHOLE_GRAPH = ("cuda_graph=full_iteration", "full-iteration cuda graph")


def exchange_of(
    dispatcher: str, remarks: str, gpus: Gpus, release: str, *, joined: bool
) -> tuple[str, str]:
    """The engine of Megatron-Bridge that exchanges experts' tokens by a dispatcher, and a note
    where the dispatcher or the graph is assumed. ``joined`` says whether a row has its recipe's
    settings, so that a graph would be said."""
    words, note = dispatcher.casefold(), ""
    if "tokendrop" in remarks:
        return "megatron-bridge", "tokens are dropped: no exchange waits for its host"
    if any(phrase in remarks for phrase in _WHOLE_GRAPH):
        return "megatron-bridge-graph", ""
    is_rack = catalog.hardware(gpus.hardware).node.is_rack
    if is_rack and _release(release) >= WHOLE_GRAPHS and not joined and "recipe" in remarks:
        return "megatron-bridge-graph", "one CUDA graph assumed, as recipes of this release have it"
    if not words and is_rack:
        words, note = "hybridep", "dispatcher is empty: hybridep assumed, as recipes have it here"
    if not any(word in words for word in ("deepep", "hybridep", "flex")):
        return "megatron-bridge-alltoall", "" if words else "dispatcher is empty: alltoall assumed"
    is_eager = not any(phrase in remarks for phrase in _GRAPHS) and gpus.hardware.startswith("h")
    return "megatron-bridge-eager" if is_eager else "megatron-bridge", note


def _release(engine: str) -> tuple[int, ...]:
    """The year and month of a release that an engine's text names; nothing if it names none."""
    found = re.search(r"([0-9]+)\.([0-9]+)", engine)
    return () if found is None else (int(found[1]), int(found[2]))


def zero_of(text: str, engine: str) -> tuple[int, str]:
    """The ZeRO level that a text says, and a note where it is assumed."""
    words = text.casefold()
    if not words:
        level = 3 if ENGINES[engine].system == "fsdp" else 1
        return level, f"zero is empty: level {level} assumed"
    if (found := _level_of(words)) is not None:
        return found, ""
    column = "zero"
    raise FieldError(column, f"{shown(text)} is no ZeRO level: give 0, 1, 2 or 3, or nothing")


def _level_of(words: str) -> int | None:
    """The ZeRO level that words say; None if they say none."""
    if match := re.fullmatch(r"(?:stage ?)?([0-3])(?:\.0)?", words):
        return int(match[1])
    by_name = "shard_grad_op" in words or "_shard" in words
    if not by_name and (match := re.search(r"zero[-_ ]?(?:stage[-_ ]?)?([0-3])", words)):
        return int(match[1])
    return next((level for word, level in _LEVELS.items() if word in words), None)


def replicas_of(text: str, data: int, context: int, gpus_per_node: int) -> tuple[int, str]:
    """The replicas of the shards that a text says ("fsdp 8 in the node x data 16", "hsdp over 8",
    "hybrid shard, 4 replicas"), and a note where they are assumed; 1 if it says none."""
    words, note = text.casefold(), ""
    ranks = data * context
    if match := re.search(r"([0-9]+) replicas|replicate[ =]?([0-9]+)", words):
        found = int(match[1] or match[2])
    elif match := re.search(r"(?:over|fsdp[23]?|hsdp|shard) ([0-9]+)\b", words):
        shards = int(match[1])
        found = ranks // shards if shards > 1 and ranks % shards == 0 else 1
    elif "hsdp" in words or "hybrid" in words:
        found = max(1, ranks // gpus_per_node)
        note = f"shards lie inside a node: {found} replicas assumed"
    else:
        return 1, ""
    if data % found:
        refuse("zero", f"{shown(text)}: {found} replicas do not divide dp {data}: correct one")
    return found, note


def precision_of(text: str, engine: str) -> tuple[Precision, str]:
    """The precision that a text says, and a note where it is assumed."""
    words = text.casefold()
    if not words and engine == "deepspeed":
        return "fp32", "precision is empty: fp32 assumed, which is Megatron-DeepSpeed's default"
    if not words:
        return "bf16", "precision is empty: bf16 assumed"
    if "fp4" in words and engine == "fsdp":
        return "fp8", f"{text} is predicted as fp8"
    if "fp4" in words:
        return "fp4", ""
    if any(word in words for word in ("fp8", "float8")):
        return "fp8", ""
    known: tuple[Precision, ...] = ("bf16", "fp16", "fp32")
    for name in known:
        if name in words or name.replace("fp", "float") in words:
            return name, ""
    column = "precision"
    raise FieldError(
        column, f"{shown(text)} is unknown: give bf16, fp16, fp8, fp4 or fp32, or nothing"
    )


def network_of(remarks: str, gpus_per_node: int) -> float | None:
    """The rate of a node's network in GB/s that remarks name; None if they name none."""
    if match := re.search(r"([0-9.]+) ?gbps node-node", remarks):
        return float(match[1]) / 8
    if match := re.search(r"([0-9.]+) ?gb/s [a-z0-9-]+ a gpu", remarks):
        return float(match[1]) / 8 * gpus_per_node
    return None
