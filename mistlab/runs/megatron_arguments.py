"""Megatron's arguments among the remarks of a measured run, and its defaults for those not said.

Remarks hold arguments as "name=value". They hold all that differ from the defaults if they say
"transformer-impl", as tables made of Megatron's own tests do. Other rows have no such defaults: a
table tells of its runs what their authors found worth telling.
"""

import re

from mistlab.plan.workload import ModelSpec

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
