"""Heads that predict further tokens: counted, predicted, played, refused where they cannot be."""

from dataclasses import replace

import numpy as np
import pytest

from mistlab import catalog
from mistlab.core.values import InputError
from mistlab.export.nearest import nearest
from mistlab.export.targets import TARGETS
from mistlab.graph.library import graph_of, sequence_graph_of
from mistlab.graph.stage_model import StageModel
from mistlab.graph.sums import Sum
from mistlab.graph.symbols import size_columns
from mistlab.job.job import Job
from mistlab.job.prediction import Prediction
from mistlab.machine.cluster import Cluster
from mistlab.plan.plan import Plan, StagePlan
from mistlab.plan.workload import ModelSpec, Workload
from mistlab.stages.stage_batch import StageBatch, StageFigures
from simulators.events import EventSimulator
from simulators.symbolic import SymbolicPredictor
from tests.workloads import workload_of

WORK = workload_of("llama3-8b", 4096, 16, "bf16")
CLUSTER = Cluster(hardware=catalog.hardware("h100-80gb"), nodes=1, gpus_per_node=8)
TABLE = 128256 * 4096


def with_tokens(tokens: int) -> Workload:
    return replace(WORK, model=replace(WORK.model, further_tokens=tokens))


def figures(work: Workload, *, embedding: int, tensor: int = 1, layers: int = 8) -> StageFigures:
    batch = StageBatch(
        layers=np.array([layers]),
        data_parallel=1,
        tensor_parallel=tensor,
        micro_batch=2,
        has_embedding=embedding,
        has_head=1,
    )
    return StageModel.of(work, "megatron").figures(batch)


def test_each_further_token_has_a_block_two_norms_and_a_product() -> None:
    """On a stage with the embedding the tables are shared; the last stage alone has a copy."""
    none, one, two = (figures(with_tokens(n), embedding=1).parameters[0] for n in (0, 1, 2))
    h, f, kv = 4096, 14336, 1024
    block = 2 * h * h + 2 * h * kv + 3 * h * f + 2 * h
    assert one - none == two - one == block + 3 * h + 2 * h * h
    last = [figures(with_tokens(n), embedding=0).parameters[0] for n in (0, 1)]
    assert last[1] - last[0] == one - none + TABLE


def test_a_further_token_takes_the_operations_of_its_block_product_and_head() -> None:
    none, one = (figures(with_tokens(n), embedding=1).forward_flop[0] for n in (0, 1))
    b, s, h = 2, 4096, 4096
    block = figures(WORK, embedding=1, layers=9).forward_flop[0] - none
    products = 4 * b * s * h * h + 2 * b * s * h * 128256
    assert one - none == pytest.approx(block + products, rel=1e-3)


def test_tensor_parallel_ranks_divide_a_further_token_s_products() -> None:
    whole, half = (
        figures(with_tokens(1), embedding=1, tensor=ranks).forward_flop[0]
        - figures(WORK, embedding=1, tensor=ranks).forward_flop[0]
        for ranks in (1, 2)
    )
    assert half == pytest.approx(whole / 2, rel=2e-3)


def predicted(work: Workload, kind: type, order: str = "1f1b") -> Prediction:
    stage = StagePlan(
        layers=16, data_parallel=2, tensor_parallel=2, micro_batch=1, zero=1, sequence_parallel=1
    )
    plan = Plan(engine="megatron", micro_batches=8, stages=(stage, stage), order=order)
    found: Prediction = kind(workload=work, cluster=CLUSTER).predict(plan)
    return found


def test_the_last_stage_takes_longer_and_holds_more_predicted_and_played() -> None:
    plain = predicted(WORK, SymbolicPredictor)
    ours, played = (predicted(with_tokens(1), kind) for kind in (SymbolicPredictor, EventSimulator))
    assert ours.iteration_s > 1.05 * plain.iteration_s
    assert played.iteration_s == pytest.approx(ours.iteration_s, rel=0.01)
    first, last = (ours.stages[n].peak_allocated_bytes for n in (0, 1))
    assert first == plain.stages[0].peak_allocated_bytes
    # States of the block, the copied table and the product; the block's activations; more logits.
    assert last - plain.stages[1].peak_allocated_bytes > 4 * 2**30
    assert played.stages[1].peak_allocated_bytes == pytest.approx(last, rel=1e-9)


def test_the_further_block_is_of_the_last_block_s_kind_in_its_precision() -> None:
    work = replace(WORK, model=catalog.model("deepseek-v3-mtp"), precision="fp8")
    for graph in (graph_of(work), sequence_graph_of(work)):
        assert graph is not None
        operators = graph.mapping["head"]["operators"]
        assert any(one["dtype"] == "float8_e4m3fn" for one in operators)
        assert any(one["name"] == "mistlab.all_to_all" for one in operators)
        assert len(graph.pattern) == 61


def test_models_with_other_patterns_keep_their_own_in_8_bits() -> None:
    v3 = catalog.model("deepseek-v3")
    short = replace(v3, name="", layers=8)
    works = [replace(WORK, model=model, precision="fp8") for model in (v3, short)]
    assert [len(graph_of(work).pattern) for work in works] == [61, 8]


def test_a_pattern_and_a_traced_model_refuse_further_tokens() -> None:
    hybrid = catalog.model("nemotron-3-nano")
    with pytest.raises(InputError, match="further_tokens: 1, but a model with a pattern"):
        replace(hybrid, further_tokens=1)
    with pytest.raises(InputError, match="further_tokens: 1, but a traced model"):
        ModelSpec.of(
            family="custom",
            hidden=128,
            layers=2,
            heads=2,
            graph_file="model.json",
            further_tokens=1,
        )


def test_an_export_without_a_row_refuses_further_tokens() -> None:
    stage = StagePlan(layers=32, data_parallel=8, tensor_parallel=1, micro_batch=1)
    plan = Plan(engine="megatron", micro_batches=2, stages=(stage,))
    job = Job(workload=with_tokens(1), cluster=CLUSTER, plan=plan)
    with pytest.raises(InputError, match="torchtitan includes no such model"):
        nearest(job, TARGETS["torchtitan"])


def test_the_fullest_moment_is_that_of_the_last_head_with_all_before_kept() -> None:
    """Beside its own a last head has the first head's logits, the product's inputs and a block."""
    plain, further = graph_of(WORK).counts, graph_of(with_tokens(1)).counts
    columns = size_columns(WORK, {"b": np.array([2]), "tp": np.array([1])})
    sizes = {name: float(column[0]) for name, column in columns.items()}

    def number(one: Sum) -> float:
        return float(eval(str(one), {}, sizes))

    kept = number(plain.head.saved_bytes) + number(plain.block.saved_bytes)
    joint = 3 * 2 * sizes["b"] * sizes["s"] * sizes["h"]
    peaks = [max(number(peak.size_bytes) for peak in one.head.peaks) for one in (plain, further)]
    assert peaks[1] == peaks[0] + kept + joint
