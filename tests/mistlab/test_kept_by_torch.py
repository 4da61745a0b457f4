"""What torch keeps of blocks without kernels of their own: counted by hand from its operators."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mistlab.engines.adapters import COPYING_KEYS
from mistlab.engines.engine import ENGINES
from mistlab.graph.attention_core import FLASH_BACKWARD
from mistlab.graph.layer_types import split_over_context
from mistlab.graph.library import graph_of, sequence_graph_of
from mistlab.graph.stage_model import StageModel
from mistlab.graph.treatments import TREATMENTS
from mistlab.plan.workload import Workload
from mistlab.schedule.context_ways import GATHER, HEADS, RING
from mistlab.stages.stage_batch import StageBatch
from tests.workloads import workload_of

LLAMA = workload_of("llama3-8b", 4096, 8, "bf16")
# Of a Llama block in units of its width: network, and heads of keys over those of queries.
F, K = 14336 / 4096, 8 / 32
SIZES = {"b": 1, "s": 1, "h": 4096, "n": 32, "k": 8, "d": 128, "r": 128, "f": 14336, "tp": 1}
# Bytes for each token and channel. The graph keeps inputs of the norms and of three products, of
# attention queries, keys, values and result, and gate, network and their product.
OF_GRAPH = 2 * (4 + 1 + 2 * K + 1 + 3 * F)
COPIES = 2 * 2 * (1 - K)
# Two norms, each on a 32-bit input (4) in place of its 16-bit one, and with a result before its
# weights; and the activation.
OF_EAGER = 2 * (4 - 2 + 2) + 2 * F


def bytes_of(expression: object, sizes: Mapping[str, Any] = SIZES) -> float:
    """An expression's bytes for each token and channel, without sums of attention and norms."""
    return float(eval(str(expression), {"__builtins__": {}}, dict(sizes))) / SIZES["h"]


@pytest.mark.parametrize(
    ("kept_by", "kept"),
    [
        ("", OF_GRAPH),
        ("compiled", OF_GRAPH + COPIES),
        ("eager", OF_GRAPH + COPIES + OF_EAGER),
    ],
)
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_a_block_keeps_what_its_operators_keep(kept_by: str, kept: float, precision: str) -> None:
    work = replace(LLAMA, precision=precision)
    found = bytes_of(graph_of(work, kept_by).counts.block.saved_bytes)
    if precision == "fp8" and not kept_by:
        # Inputs of products are kept in 8 bits, if nothing else keeps them in 16.
        assert found < kept - 4
    else:
        # Sums of attention, and deviations of norms: 34 numbers of 4 bytes a token.
        assert found == pytest.approx(kept, abs=34.1 * 4 / SIZES["h"])


@pytest.mark.parametrize("kept_by", ["", "tiled", "compiled", "eager", "autocast"])
def test_copies_of_keys_make_up_for_heads_that_queries_share(kept_by: str) -> None:
    """With copies a block keeps as much as one that has a head of keys for each of the queries."""
    saved = graph_of(LLAMA, kept_by).counts.block.saved_bytes
    few, many = (bytes_of(saved, {**SIZES, "A": 1, "j": 1, "k": heads}) for heads in (8, 32))
    assert (few == pytest.approx(many)) == (kept_by in COPYING_KEYS)


def test_its_fullest_moments_have_these_bytes_too() -> None:
    plain, eager = (graph_of(LLAMA, kept_by).counts.block for kept_by in ("", "eager"))
    for one, other in zip(plain.peaks, eager.peaks, strict=True):
        more = bytes_of(other.size_bytes) - bytes_of(one.size_bytes)
        # FlashAttention sums gradients of queries in 32 bits.
        sums = 4 if other.operator == FLASH_BACKWARD else 0
        assert more == pytest.approx(COPIES + OF_EAGER + sums)
    assert [one.operator for one in eager.peaks].count(FLASH_BACKWARD) == 1
    assert FLASH_BACKWARD not in [one.operator for one in plain.peaks]


@pytest.mark.parametrize(
    ("way", "ranks", "kept", "room"),
    [
        (RING, 1, 8, 0.0),
        # Two buffers for keys and values; and gathered ones, in the backward pass with gradients.
        (RING, 4, 8, 2 * 4 * K),
        (GATHER, 4, 8, 2 * 4 * 4 * K),
        # Queries, keys and values that are sent. Each of 16 ranks has a head of the keys.
        (HEADS, 16, 16, 2 + 4 * K),
    ],
)
def test_attention_s_buffers_are_gone_while_the_network_runs(
    way: int, ranks: int, kept: int, room: float
) -> None:
    whole = graph_of(LLAMA, "tiled").counts
    before, after = whole.block.peaks, split_over_context(whole, way).block.peaks
    sizes = {**SIZES, "cp": ranks, "numpy": np}
    more = [
        bytes_of(y.size_bytes, sizes) - bytes_of(x.size_bytes, sizes)
        for x, y in zip(before, after, strict=True)
    ]
    attention = [one.operator for one in before].index(FLASH_BACKWARD)
    forward = sum(one.phase == "forward" for one in before)
    # The last forward peak counts buffers, whose gradients do not exist yet.
    assert more[forward - 1] == pytest.approx(room / 2 if way == GATHER else room, abs=1e-6)
    assert more[forward:attention] == pytest.approx([0.0] * (attention - forward), abs=1e-6)
    # Gradients of keys and values for every head of the queries.
    assert more[attention] == pytest.approx(room + 2 * 2 * (32 - kept) / 32, abs=1e-6)
    assert more[attention + 1 :] == pytest.approx([room] * (len(more) - attention - 1), abs=1e-6)
    assert attention > forward


def test_ranks_that_split_tokens_have_their_part_of_norms() -> None:
    whole, split = (
        find(LLAMA, "eager").counts.block.saved  # type: ignore[union-attr]
        for find in (graph_of, sequence_graph_of)
    )
    of_norms = [
        [str(one.size_bytes) for one in saved if one.module == "mlp_norm"][-1]
        for saved in (whole, split)
    ]
    assert of_norms == ["4*b*h*s", "4*b*h*s/tp"]


def test_every_second_product_is_kept() -> None:
    """Queries and values, attention's result, and the gate; nobody needs what the last product
    gives. Keys, the output's product and the network run again."""
    block = graph_of(LLAMA, "eager").counts.block
    made = TREATMENTS["products_recomputed"].graph(block)
    kept = 2 * (1 + 1 + K + 1 + F)
    assert bytes_of(made.saved_bytes) == pytest.approx(kept, abs=33 * 4 / SIZES["h"])
    again = [one for one in made.again if one.kind == "matmul"]
    assert [one.module for one in again] == ["attention.qkv", "attention.output", "mlp.up"]
    flop = sum(bytes_of(one.flop) for one in again) / SIZES["h"]
    assert flop == pytest.approx(2 * (K + 1 + F))
    read = bytes_of(again[0].read_bytes)
    assert read == pytest.approx(2 + 2 * K * SIZES["h"])
    assert not any(one.kind == "attention" for one in made.again)


def test_products_of_4_bits_are_all_recomputed() -> None:
    """The list of what is kept does not name the operator that runs them."""
    block = graph_of(replace(LLAMA, precision="fp4"), "compiled").counts.block
    made = TREATMENTS["products_recomputed"].graph(block)
    forward = [one for one in block.of_phase("forward") if one.kind == "matmul"]
    assert [one for one in made.again if one.kind == "matmul"] == forward
    # A block keeps its input and attention's result.
    assert bytes_of(made.saved_bytes) == pytest.approx(2 * 2, abs=33 * 4 / SIZES["h"])


def test_what_ranks_scatter_is_kept_and_what_they_gather_runs_again() -> None:
    split = sequence_graph_of(LLAMA)
    assert split is not None
    made = TREATMENTS["products_recomputed"].graph(split.counts.block)
    collectives = {one.name for one in made.again if one.kind == "collective"}
    assert collectives == {"mistlab.gather_tokens"}


@pytest.mark.parametrize(
    ("engine", "kept", "logits"),
    [
        ("fsdp", OF_GRAPH, 14),
        ("fsdp-eager", OF_GRAPH + COPIES + OF_EAGER, 14),
        ("fsdp-compiled-blocks", OF_GRAPH + COPIES, 14),
        ("fsdp-compiled", OF_GRAPH + COPIES, 4),
    ],
)
def test_engines_have_these_bytes_of_blocks_and_logits(
    engine: str, kept: float, logits: float
) -> None:
    """The peak is that of the loss, when all blocks are kept; from one number of blocks and tokens
    to another."""
    tokens, width = LLAMA.sequence_length, LLAMA.model.hidden
    few, many, longer = peaks(engine, layers=[16, 32, 32], micro_batch=[1, 1, 2])
    assert (many - few) / (16 * tokens * width) == pytest.approx(kept, rel=0.005)
    of_logits = longer - many - 32 * tokens * width * kept
    assert of_logits / (tokens * LLAMA.model.vocab) == pytest.approx(logits, rel=0.05)


def peaks(
    engine: str, *, layers: list[int], micro_batch: list[int], zero: int = 3, work: Workload = LLAMA
) -> list[float]:
    """The peaks of stages with both ends, without states."""
    batch = StageBatch(
        layers=np.array(layers),
        micro_batch=np.array(micro_batch),
        data_parallel=8,
        tensor_parallel=1,
        has_embedding=1,
        has_head=1,
        zero=zero,
    )
    found = StageModel.of(work, engine).figures(batch)
    return list(found.peak_bytes - found.held_bytes)


def test_a_pipeline_engine_keeps_outputs_of_two_micro_batches() -> None:
    """Of a logit 14 bytes, where 16-bit states have 6; without ZeRO, full precision has no copy."""
    work = replace(LLAMA, precision="fp16")

    def of_logits(engine: str) -> float:
        one, two = peaks(engine, layers=[2, 2], micro_batch=[1, 2], zero=1, work=work)
        return (two - one) / (LLAMA.sequence_length * LLAMA.model.vocab)

    assert of_logits("deepspeed-pipe") - of_logits("deepspeed") == pytest.approx(8, rel=0.05)
    wide = ENGINES["deepspeed-pipe"].memory["fp32"]
    assert (wide.weight, wide.gradient, wide.optimizer) == (4, 4, 8)
