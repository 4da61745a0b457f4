"""Sequence parallelism: tensor-parallel ranks split tokens wherever they do not split weights."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import sympy

from mistlab import catalog
from mistlab.core.values import InputError
from mistlab.graph.graph import EXCHANGES, LayerGraph, Phase
from mistlab.graph.library import Variant, shipped, variants
from mistlab.graph.stage_model import StageModel
from mistlab.graph.symbols import size_symbol
from mistlab.job.job import Job, dump_job, load_job
from mistlab.job.prediction import Prediction
from mistlab.job.search import Budget, Problem
from mistlab.machine.cluster import Cluster
from mistlab.plan.named_spaces import space_of
from mistlab.plan.plan import Plan, StagePlan
from mistlab.plan.space import SearchSpace
from mistlab.stages.stage_batch import StageBatch
from searchers.registry import SEARCHERS
from searchers.savings import contains
from searchers.strategy import StrategySearcher
from simulators.events import EventSimulator
from simulators.symbolic import SymbolicPredictor
from tests.workloads import workload_of

WORK = workload_of("gpt3-7b", 2048, 16, "bf16")
CLUSTER = Cluster(hardware=catalog.hardware("a100-40gb"), nodes=1, gpus_per_node=8)
STAGE = StagePlan(layers=16, data_parallel=1, tensor_parallel=4, micro_batch=2, zero=1)
PLAN = Plan(engine="megatron", micro_batches=8, stages=(STAGE, STAGE))
# Experts have other exchanges, and latent vectors products that every rank makes.
SPLIT = [
    variant
    for variant in variants()
    if variant.sequence_parallel and not {"experts", "latent"} & {*variant.parts}
]


def with_tokens_split(plan: Plan, ways: tuple[int, ...] = (1, 1)) -> Plan:
    stages = tuple(
        replace(stage, sequence_parallel=way) for stage, way in zip(plan.stages, ways, strict=True)
    )
    return replace(plan, stages=stages)


def predicted(*plans: Plan, kind: type = SymbolicPredictor) -> list[Prediction]:
    return list(kind(workload=WORK, cluster=CLUSTER).predict_many(plans))


@pytest.mark.parametrize("variant", SPLIT, ids=lambda variant: variant.name)
def test_what_a_block_keeps_is_divided_by_the_ranks(variant: Variant) -> None:
    """The whole of it, not only the part between a block's products."""
    block, plain = (shipped(one).block for one in (variant, whole(variant)))
    tp = size_symbol("tp")
    assert sympy.expand(block.saved_bytes * tp - plain.saved_bytes.subs(tp, 1)) == 0
    assert block.output_bytes * tp == plain.output_bytes
    assert block.parameter_count == plain.parameter_count


@pytest.mark.parametrize("variant", SPLIT, ids=lambda variant: variant.name)
def test_a_block_computes_the_same_products(variant: Variant) -> None:
    block, plain = (shipped(one).block for one in (variant, whole(variant)))
    assert products(block) == products(plain)


def whole(variant: Variant) -> Variant:
    return replace(variant, sequence_parallel=False)


def products(block: LayerGraph) -> Counter[tuple[str, sympy.Expr]]:
    kinds = ("matmul", "attention")
    return Counter((o.phase, o.flop) for o in block.operators if o.kind in kinds)


@pytest.mark.parametrize("family", ["gpt", "llama", "falcon"])
def test_an_all_reduce_becomes_a_gather_and_a_scatter(family: str) -> None:
    """Of as many bytes; the backward pass gathers the inputs of split rows again. Falcon's two
    products by rows read one input, which each of them gathers."""
    variant = Variant(family=family, attention="flash", precision="half")
    plain, split = (shipped(replace(variant, sequence_parallel=way)).block for way in (False, True))
    message = 2 * size_symbol("b") * size_symbol("s") * size_symbol("h")
    for block in (plain, split):
        assert {o.read_bytes for o in block.collectives} == {message}
    sums, inputs = (1, 2) if family == "falcon" else (2, 2)
    assert exchanged(plain, "forward") == {"all_reduce": sums}
    assert exchanged(plain, "backward") == {"all_reduce": sums}
    scattered = {"reduce_scatter": sums} if family != "falcon" else {"reduce_scatter": 1}
    assert exchanged(split, "forward") == {"all_gather": inputs, **scattered}
    assert exchanged(split, "backward") == {"all_gather": sums + inputs, "reduce_scatter": inputs}


def exchanged(block: LayerGraph, phase: Phase) -> dict[str, int]:
    names = [o.name for o in block.of_phase(phase) if o.kind == "collective"]
    return dict(Counter(EXCHANGES[name].collective for name in names))


def test_candidates_with_and_without_stand_in_one_batch() -> None:
    model = StageModel.of(WORK, "megatron")
    given = {"layers": 8, "data_parallel": 1, "micro_batch": 2}
    tensor, split = np.array([1, 1, 4, 4, 8, 8]), np.array([0, 1, 0, 1, 0, 1])
    together = model.figures(StageBatch(tensor_parallel=tensor, sequence_parallel=split, **given))
    for row, (degree, way) in enumerate(zip(tensor, split, strict=True)):
        alone = model.figures(
            StageBatch(tensor_parallel=np.array([degree]), sequence_parallel=way, **given)
        )
        for name in ("activations_bytes", "peak_bytes", "forward_flop", "parameters"):
            assert getattr(alone, name)[0] == getattr(together, name)[row]
    kept = together.activations_bytes
    # A single rank splits nothing; four and eight divide all of it.
    assert kept[1] == kept[0] == 4 * kept[3] == 8 * kept[5]
    assert kept[2] > kept[3]


def test_tokens_that_do_not_divide_are_infeasible() -> None:
    model = StageModel.of(replace(WORK, sequence_length=2050), "megatron")
    figures = model.figures(
        StageBatch(
            layers=8,
            data_parallel=1,
            tensor_parallel=np.array([2, 4, 4]),
            micro_batch=1,
            sequence_parallel=np.array([1, 0, 1]),
        )
    )
    assert figures.feasible.tolist() == [True, True, False]


def test_a_played_plan_is_a_predicted_one() -> None:
    """The two differ by what they differ without sequence parallelism."""
    plans = [PLAN, with_tokens_split(PLAN), with_tokens_split(PLAN, (1, 0))]
    closed, played = predicted(*plans), predicted(*plans, kind=EventSimulator)
    for one, other in zip(closed, played, strict=True):
        assert one.iteration_s == pytest.approx(other.iteration_s, rel=5e-3)
        for stage, twin in zip(one.stages, other.stages, strict=True):
            assert stage.memory == twin.memory
    plain, split, half = closed
    assert split.iteration_s < plain.iteration_s
    assert split.stages[0].peak_allocated_bytes < plain.stages[0].peak_allocated_bytes
    assert half.stages[0].memory == split.stages[0].memory
    assert half.stages[1].memory == plain.stages[1].memory


def test_one_rank_splits_nothing() -> None:
    alone = StagePlan(layers=16, data_parallel=4, tensor_parallel=1, micro_batch=1, zero=1)
    plan = Plan(engine="megatron", micro_batches=4, stages=(alone, alone))
    plain, split = predicted(plan, with_tokens_split(plan))
    assert split.iteration_s == plain.iteration_s
    assert [one.memory for one in split.stages] == [one.memory for one in plain.stages]


def test_a_plan_file_says_it(tmp_path) -> None:
    job = Job(workload=WORK, cluster=CLUSTER, plan=with_tokens_split(PLAN, (1, 0)))
    dump_job(job, tmp_path / "plan.yaml")
    assert (tmp_path / "plan.yaml").read_text("utf-8").count("sequence_parallel: 1") == 1
    assert load_job(tmp_path / "plan.yaml") == job


def test_a_sequence_that_does_not_divide_is_refused() -> None:
    odd = replace(WORK, sequence_length=2050)
    with pytest.raises(
        InputError, match="tensor_parallel 4 does not divide the 2050 tokens of a rank"
    ):
        Job(workload=odd, cluster=CLUSTER, plan=with_tokens_split(PLAN))


@pytest.mark.parametrize("name", ["mist", "exhaustive", "aceso", "random"])
def test_searches_choose_it(name: str) -> None:
    """Where memory is short, the best plan splits tokens."""
    space = replace(
        space_of("megatron"), tensor_parallel=(1, 4), micro_batch=(1,), sequence_parallel=(0, 1)
    )
    found = searched(name, space)
    assert contains(Problem(workload=WORK, cluster=CLUSTER), space, found)
    assert not contains(Problem(workload=WORK, cluster=CLUSTER), space_of("megatron"), found)
    assert {stage.sequence_parallel for stage in found.stages} == {1}


def searched(name: str, space: SearchSpace) -> Plan:
    predictor = SymbolicPredictor(workload=WORK, cluster=CLUSTER)
    searcher = StrategySearcher(strategy=SEARCHERS[name], predictor=predictor)
    problem = Problem(workload=WORK, cluster=CLUSTER)
    found = searcher.search(problem, space, Budget(evaluations=200), 0)
    assert found.plan is not None
    return found.plan
