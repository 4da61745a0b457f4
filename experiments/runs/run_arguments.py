"""Options of Megatron-LM, torchtitan and others in the text columns of a measured run."""

import re
from collections.abc import Mapping

from experiments.runs.runs_table import count_of, text_of
from mistlab.core.values import refuse
from mistlab.engines.engine import ENGINES
from mistlab.plan.workload import ModelSpec
from mistlab.schedule.orders import INTERLEAVED

# Megatron's arguments among the remarks of a measured run, and its defaults for those not said.
#
# Remarks hold arguments as "name=value". They hold all that differ from the defaults if they say
# "transformer-impl", as tables made of Megatron's own tests do. Other rows have no such defaults:
# a table tells of its runs what their authors found worth telling.


# Defaults of Megatron-LM: dropout, and its tests' tokens (GPT-2's), to which padding is added.
DROPOUT = 0.1
TOKENS = 50_257
MULTIPLE = 128
# In the names of files of its tests' measurements: container, GPUs and cluster.
OLDEST_CONTAINER = "_lts_dgxa100_"


def are_arguments(remarks: str) -> bool:
    """Whether remarks hold all of Megatron's arguments that differ from its defaults."""
    return "transformer-impl=" in remarks


def dropout_of(remarks: str) -> float:
    """The dropout that arguments say, or leave at its default."""
    found = re.search(r"hidden-dropout=([0-9.]+)", remarks)
    return float(found[1]) if found else DROPOUT


def padded(tokens: int, remarks: str, tensor: int) -> int:
    """The rows of a table of tokens: padded to a multiple for each of its tensor-parallel parts."""
    multiple = (multiple_in(remarks) or MULTIPLE) * tensor
    return -(-tokens // multiple) * multiple


def has_tokens_of(alike: ModelSpec, hidden: int | None, remarks: str) -> bool:
    """Whether a test has the vocabulary of the model that it is built like: tiny ones have not,
    unless they pad to a multiple of that model's own."""
    multiple = multiple_in(remarks) or MULTIPLE
    return alike.hidden == hidden or (multiple > MULTIPLE and alike.vocab % multiple == 0)


def multiple_in(remarks: str) -> int | None:
    """The multiple to which remarks say that vocabularies are padded."""
    found = re.search(r"make-vocab-size-divisible-by=(\d+)", remarks)
    return int(found[1]) if found else None


def writes_attention_out(remarks: str, source: str = "") -> bool:
    """Whether attention is written out: Megatron's own layers have no fused attention, and the
    memory of Sailor's runs has the scores.

    Nor has the oldest container of Megatron's tests, which a source names, if kernels must be
    deterministic and no argument says which attention to take: on A100 Transformer Engine then
    takes neither cuDNN's fused attention nor a flash-attention before 2.4.1.
    """
    is_free = "deterministic-mode=1" in remarks and "attention-backend" not in remarks
    if OLDEST_CONTAINER in source and is_free:
        return True
    return any(words in remarks for words in _WRITTEN_OUT)


_WRITTEN_OUT = (
    *("unfused attention", "attention-backend=unfused", "transformer-impl=local"),
    "sailor fork",
)


def fuses_loss(remarks: str) -> bool:
    """Whether the loss is made by Megatron's fused operators."""
    return "cross-entropy-loss-fusion=1" in remarks


def data_parallel_of(remarks: str) -> int | None:
    """The degree of data parallelism that remarks tell of."""
    found = re.search(r"data parallel about (\d+)", remarks)
    return int(found[1]) if found else None


def ends_of(remarks: str) -> tuple[int, int] | None:
    """The blocks of a pipeline's first and last stage, if they are said."""
    ends = ("first", "last")
    found = [re.search(rf"decoder-{end}-pipeline-num-layers=(\d+)", remarks) for end in ends]
    first, last = (None if one is None else int(one[1]) for one in found)
    return None if first is None or last is None else (first, last)


def pattern_in(remarks: str) -> str:
    """The letters of a hybrid model's blocks, if arguments say them; those for later tokens, after
    a slash, are left out."""
    found = re.search(r"hybrid-layer-pattern=([^\s;]+)", remarks)
    return found[1].partition("/")[0].replace("|", "").upper() if found else ""


def channels_of(remarks: str) -> int | None:
    """The channels of an attention head, if arguments say them."""
    found = re.search(r"kv-channels=(\d+)", remarks)
    return int(found[1]) if found else None


def gated_width(ffn: int | None, hidden: int | None, remarks: str) -> int | None:
    """The width of a gated feed-forward network.

    Where it is four times the hidden size, as in other networks, it was not given: then Megatron
    takes two thirds of it.
    """
    if ffn is None or hidden is None or not are_arguments(remarks) or ffn != 4 * hidden:
        return ffn
    return two_thirds(ffn)


def two_thirds(ffn: int) -> int:
    """Two thirds of a width, in whole 64s: a gated network of it has as many parameters."""
    return 2 * ffn // 3 // 64 * 64


# What a row does not say of a run that its users chose for speed.


def unsaid_of(cells: Mapping[str, str], remarks: str, engine: str, stages: int) -> tuple[str, ...]:
    """The columns of a benchmark's row that are empty though its batch is said: the micro-batch,
    and the chunks of stages that may have several. Megatron's arguments have defaults instead, and
    training as users do it is not tuned."""
    if are_arguments(remarks) or "phase " in remarks or count_of(cells, "global_batch") is None:
        return ()
    has_chunks = stages > 1 and set(INTERLEAVED) <= set(ENGINES[engine].orders)
    asked = {"micro_batch": count_of(cells, "grad_accumulation") is None, "vpp": has_chunks}
    return tuple(name for name, is_open in asked.items() if is_open and not count_of(cells, name))


# What rows say of runs on torch's FSDP: whose kernels, what runs again, how often pipelines fill.
#
# Torchtitan's models are torch's own operators. AutoModel's bring Transformer Engine's kernels, or
# are Hugging Face's, with adapters.


# The first month in which torchtitan compiled its loss with its blocks.
LOSS_COMPILED = "2025-04"
# What torchtitan's own recipes recompute (``train_configs/llama3_8b.toml``).
OF_TORCHTITAN = "selective op"
# AutoModel's recipes recompute all blocks of models with 30 billion parameters and more, and none
# of models with 20 billion and fewer (``examples/llm_benchmark``).
LARGE_IN_AUTOMODEL = 24e9


def fsdp_of(cells: Mapping[str, str], remarks: str) -> str:
    """The engine of FSDP of a row."""
    text, date = text_of(cells, "engine").casefold(), text_of(cells, "date")
    if "torchtitan" in text:
        if "torch.compile" not in remarks:
            return "fsdp-eager"
        return "fsdp-compiled-blocks" if date and date < LOSS_COMPILED else "fsdp-compiled"
    if "automodel" in text and "kernels " in remarks:
        if "kernels te" not in remarks:
            return "fsdp-eager"
        # Adapters are those of Hugging Face's models, whose attention is torch's.
        return "fsdp" if "lora" in remarks else "fsdp-te"
    return "fsdp"


def recompute_said(cells: Mapping[str, str]) -> str:
    """A row's words about recomputation; empty if it has none."""
    words = text_of(cells, "recompute").casefold()
    return "" if words.startswith(("not stated", "none (not stated")) else words


def recompute_of(cells: Mapping[str, str], model: ModelSpec, notes: list[str]) -> str:
    """A row's words about recomputation, or those of its software's recipes; empty if neither has
    any."""
    if words := recompute_said(cells):
        return words
    software, assumed = text_of(cells, "engine").casefold(), ""
    if "torchtitan" in software:
        assumed = OF_TORCHTITAN
    elif "automodel" in software and _weights(model) > LARGE_IN_AUTOMODEL:
        assumed = "full"
    as_recipes = f"{assumed} assumed, as recipes have it" if assumed else "none assumed"
    notes.append(f"recompute is not said: {as_recipes}")
    return assumed


def _weights(model: ModelSpec) -> float:
    """About how many parameters a model's blocks have."""
    experts, pattern = model.experts, model.pattern
    networks, width = (experts.count, experts.ffn) if experts else (1, model.ffn)
    share = sum(letter in "EGA" for letter in pattern) / len(pattern) if pattern else 1.0
    return model.layers * model.hidden * (4 * model.hidden + 3 * share * networks * width)


def batches_at_once(
    cells: Mapping[str, str], remarks: str, micro_batch: int, of_step: int, stages: int
) -> int:
    """The micro-batches for which a pipeline fills and drains, of all ``of_step``: in AutoModel
    those of a rank's local batch ("LBS 4")."""
    found = re.search(r"\blbs ([0-9]+)\b", remarks)
    if found is None or stages == 1 or "automodel" not in text_of(cells, "engine").casefold():
        return of_step
    at_once = max(1, int(found[1]) // micro_batch)
    if of_step % at_once:
        refuse("notes", f"LBS {found[1]} does not divide the batch of a rank: correct one of them")
    return at_once
