"""Context parallelism: ranks split sequences, and keys and values go round a ring."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mistlab import catalog
from mistlab.core.values import InputError
from mistlab.cost.kernels import of_ranks
from mistlab.cost.layers import LayerModel, work_of
from mistlab.engines.engine import ENGINES, HostTime
from mistlab.export.given import Given
from mistlab.export.nearest import nearest
from mistlab.export.targets import TARGETS
from mistlab.graph.layer_types import RING_KEYS
from mistlab.graph.library import graph_of
from mistlab.graph.stage_model import StageModel
from mistlab.graph.symbols import size_columns
from mistlab.job.job import Job, dump_job, load_job
from mistlab.job.prediction import Prediction
from mistlab.job.search import Budget, Problem
from mistlab.machine.cluster import Cluster
from mistlab.machine.hardware import OPERATOR_CLASSES, Compute, Rate
from mistlab.plan.dimensions import change_words, dimension_words
from mistlab.plan.named_spaces import space_of
from mistlab.plan.plan import Plan, StagePlan
from mistlab.plan.workload import Attention, Workload
from mistlab.schedule.context_ways import GATHER, HEADS, RING
from mistlab.stages.stage_batch import StageBatch
from searchers.meshes import meshes
from searchers.registry import SEARCHERS
from searchers.strategy import StrategySearcher
from simulators.events import EventSimulator
from simulators.symbolic import SymbolicPredictor
from tests.workloads import workload_of

WORK = workload_of("llama3-8b", 16384, 8, "bf16")
CLUSTER = Cluster(hardware=catalog.hardware("a100-80gb"), nodes=2, gpus_per_node=8)


def plan(data: int, context: int, *, zero: int = 1, split: int = 0, exchange: int = 0) -> Plan:
    stage = StagePlan(
        layers=16,
        data_parallel=data,
        context_parallel=context,
        context_exchange=exchange,
        tensor_parallel=2,
        micro_batch=1,
        sequence_parallel=split,
        zero=zero,
    )
    return Plan(engine="megatron", micro_batches=8 // data, stages=(stage, stage))


def predicted(*plans: Plan, kind: type = SymbolicPredictor) -> list[Prediction]:
    return list(kind(workload=WORK, cluster=CLUSTER).predict_many(plans))


@pytest.mark.parametrize("attention", ["flash", "math"])
def test_ranks_together_do_what_one_does(attention: Attention) -> None:
    """All operations and all activations of a block are divided, the squares of attention too."""
    model = StageModel.of(replace(WORK, attention=attention), "megatron")
    figures = model.figures(
        StageBatch(
            layers=8,
            data_parallel=1,
            tensor_parallel=1,
            micro_batch=2,
            context_parallel=np.array([1, 2, 4]),
        )
    )
    # Gradients of weights are added up on every rank.
    within = {"forward_flop": 1e-12, "backward_flop": 1e-4, "activations_bytes": 1e-12}
    for name, rel in within.items():
        one, two, four = getattr(figures, name)
        assert two * 2 == pytest.approx(one, rel=rel)
        assert four * 4 == pytest.approx(one, rel=rel)
    assert len(set(figures.parameters)) == 1
    # Keys and values of all ranks, there and (with their gradients) twice back.
    keys = 2 * 2 * 2 * WORK.sequence_length * WORK.model.kv_heads * WORK.model.head_dim
    for phase, rounds in (("forward", 1), ("backward", 2)):
        of_phase = getattr(figures, f"{phase}_collective_bytes")
        of_tensor = of_phase[0] / np.array([1, 2, 4])
        assert (of_phase - of_tensor).tolist() == [0, 8 * rounds * keys, 8 * rounds * keys]


def test_states_are_shared_over_data_and_context() -> None:
    """Which of the two divides states makes no difference to them."""
    for zero in (0, 1):
        wide, deep = predicted(plan(4, 1, zero=zero), plan(1, 4, zero=zero))
        assert wide.stages[0].memory.optimizer == deep.stages[0].memory.optimizer
        assert wide.stages[0].memory.gradients == deep.stages[0].memory.gradients
        assert deep.stages[0].memory.activations < wide.stages[0].memory.activations


def test_attention_hides_the_ring() -> None:
    """A fast ring takes no time, and a slow one takes what it takes beyond attention."""
    rates = tuple(
        Rate(operators=one, tflops=None if one == "memory" else 100.0, gbytes_per_s=1000.0)
        for one in OPERATOR_CLASSES
    )
    work = work_of(graph_of(WORK), ENGINES["megatron"].kernels)
    model = LayerModel(work=work, compute=Compute(rates=rates, launch_us=0.0), slowdown=1.0)
    two = {name: np.array([size]) for name, size in {"b": 1, "tp": 2, "cp": 2}.items()}
    block = model(size_columns(WORK, two))["block"]
    for phase, rounds in (("forward", 1), ("backward", 2)):
        one = block.passes[phase]
        messages, _ = one.exchanged[RING_KEYS]
        assert messages.tolist() == [rounds]
        assert 0 < one.beside_s["attention"][0] < one.compute_s[0]
    # Beside attention of long sequences everything hides, and of short ones not.
    sequences = {}
    for tokens in (1024, 65536):
        work_of_length = replace(WORK, sequence_length=tokens)
        predictor = SymbolicPredictor(workload=work_of_length, cluster=CLUSTER)
        (found,) = predictor.predict_many([plan(1, 4)])
        sequences[tokens] = found.stages[0]
    shares = {
        tokens: stage.exposed_communication_s / stage.stable_s
        for tokens, stage in sequences.items()
    }
    assert shares[65536] < shares[1024] / 2


def test_a_played_plan_is_a_predicted_one() -> None:
    plans = [plan(4, 1), plan(2, 2), plan(1, 4), plan(1, 4, split=1)]
    for one, other in zip(predicted(*plans), predicted(*plans, kind=EventSimulator), strict=True):
        assert one.iteration_s == pytest.approx(other.iteration_s, rel=5e-3)
        for stage, twin in zip(one.stages, other.stages, strict=True):
            assert stage.memory == twin.memory


@pytest.mark.parametrize("exchange", [GATHER, HEADS])
def test_another_way_to_exchange_keys_is_played_as_it_is_predicted(exchange: int) -> None:
    plans = [plan(1, 4, exchange=exchange), plan(1, 4, split=1, exchange=exchange)]
    for one, other in zip(predicted(*plans), predicted(*plans, kind=EventSimulator), strict=True):
        assert one.iteration_s == pytest.approx(other.iteration_s, rel=5e-3)


def test_ways_exchange_what_is_published() -> None:
    """Bytes of a block on a rank: keys and values of all ranks, or a rank's own heads."""
    model = StageModel.of(WORK, "megatron")
    ways, degrees = np.array([RING, GATHER, HEADS]), {"tensor_parallel": 1, "context_parallel": 4}
    figures = model.figures(
        StageBatch(layers=1, data_parallel=1, micro_batch=1, context_exchange=ways, **degrees)
    )
    spec, tokens = WORK.model, WORK.sequence_length // 4
    keys, queries = (2 * tokens * spec.head_dim * count for count in (spec.kv_heads, spec.heads))
    # Beside them there are two all-reduces of tensor-parallel ranks, here of one.
    tensor = 2 * 2 * tokens * spec.hidden
    forward, backward = (
        getattr(figures, f"{phase}_collective_bytes") - tensor for phase in ("forward", "backward")
    )
    assert forward.tolist() == [8 * keys, 8 * keys, 2 * queries + 2 * keys]
    assert backward.tolist() == [16 * keys, 16 * keys, 2 * queries + 2 * keys]
    # What attention computes and what a block keeps does not depend on the way; its room does.
    for name in ("forward_flop", "backward_flop", "activations_bytes"):
        assert len({*getattr(figures, name)}) == 1
    ring, gathered, heads = figures.forward_peak_bytes
    assert gathered - ring == (8 - 4) * keys
    assert heads - ring == queries + 2 * keys - 4 * keys


def test_a_single_rank_exchanges_nothing_in_any_way() -> None:
    model = StageModel.of(WORK, "megatron")
    ways = np.array([RING, GATHER, HEADS])
    figures = model.figures(
        StageBatch(
            layers=8, data_parallel=1, tensor_parallel=2, micro_batch=1, context_exchange=ways
        )
    )
    for name in ("forward_collective_bytes", "backward_peak_bytes", "forward_peak_bytes"):
        assert len({*getattr(figures, name)}) == 1


def of_many_keys(tokens: int) -> Workload:
    return replace(WORK, model=replace(WORK.model, kv_heads=32), sequence_length=tokens)


def test_what_each_way_is_good_for() -> None:
    """A gather is not hidden, so it takes longer than a ring beside long attention. Nothing hides
    an exchange of heads, but the more ranks a ring has, the more parts of outcomes it joins."""
    ring, gathered = predicted(plan(1, 4), plan(1, 4, exchange=GATHER))
    assert gathered.iteration_s > ring.iteration_s
    assert gathered.stages[0].exposed_communication_s > ring.stages[0].exposed_communication_s
    best = []
    predictor = SymbolicPredictor(workload=of_many_keys(16384), cluster=CLUSTER)
    for ranks in (4, 8):
        alone = {"tensor_parallel": 1, "context_parallel": ranks}
        plans = [
            replace(one, stages=tuple(stage.with_values(alone) for stage in one.stages))
            for one in (plan(8 // ranks, ranks, exchange=way) for way in (RING, GATHER, HEADS))
        ]
        times_s = [one.iteration_s for one in predictor.predict_many(plans)]
        best.append(times_s.index(min(times_s)))
    assert best == [RING, HEADS]


def test_a_ring_joins_a_part_for_each_rank() -> None:
    """Kernels and bytes at the memory's rate that a rank has beyond one that is alone with as many
    tokens, against a count by hand of what Transformer Engine runs on the last rank."""
    work = work_of(graph_of(WORK), ENGINES["megatron"].kernels)

    def values(tokens: int, ranks: int) -> dict[str, float]:
        sizes = {name: np.array([size]) for name, size in {"b": 1, "tp": 1, "cp": ranks}.items()}
        found = work(size_columns(replace(WORK, sequence_length=tokens), sizes))
        return {name: float(value[0]) for name, value in found.items()}

    spec, tokens = WORK.model, 4096
    queries, keys = (2 * tokens * spec.head_dim * n for n in (spec.heads, 2 * spec.kv_heads))
    sums = 4 * tokens * spec.heads
    # Kernels and bytes once, and for each further rank.
    by_hand = {
        "forward": ((3, 2 * (keys + queries + sums)), (5, 5 * queries + 3 * sums)),
        "backward": ((4, 2 * (keys + queries) + 5 / 2 * keys), (6, 7 * queries + 3 / 2 * keys)),
    }
    alone = values(tokens, 1)
    for ranks in (2, 4):
        several = values(ranks * tokens, ranks)
        for phase, (once, further) in by_hand.items():
            for unit, first, each in zip(("kernels", "memory bytes"), once, further, strict=True):
                name = f"block {phase} {unit}"
                more = several[name] - alone[name]
                assert more == pytest.approx(first + (ranks - 1) * each, rel=1e-6)


def test_a_host_launches_the_ring() -> None:
    """Where passes are short they wait for the host, which has more to launch for each rank; in
    played plans as in predicted ones."""

    def seconds(kind: type, ranks: int) -> float:
        data = 8 // ranks
        work = replace(WORK, sequence_length=256, global_batch=8 * data)
        own = replace(plan(data, ranks), engine="megatron-core", micro_batches=8)
        return float(kind(workload=work, cluster=CLUSTER).predict(own).iteration_s)

    host = HostTime(forward_s=2.0, backward_s=3.0, launch_s=0.1)
    forward_s, backward_s = of_ranks(host, np.array([1, 2, 4, 4]), np.array([0, 0, 0, GATHER]))
    assert forward_s == pytest.approx([2.0, 2.8, 3.8, 2.7])
    assert backward_s == pytest.approx([3.0, 4.0, 5.2, 4.7])
    compute = CLUSTER.hardware.compute
    assert compute is not None
    # Two ranks more have eleven kernels each, in 16 blocks of at least six of the eight passes.
    for kind in (SymbolicPredictor, EventSimulator):
        more_s = seconds(kind, 4) - seconds(kind, 2)
        assert more_s > 6 * 16 * 2 * 11 * compute.launch_s


def test_short_sequences_are_not_cut_into_many_parts() -> None:
    """A ring of eight moves less than four tensor-parallel ranks; at 8,192 tokens its parts and
    launches take more than that."""
    workload = replace(
        WORK, model=catalog.model("qwen3-32b"), sequence_length=8192, global_batch=512
    )
    cluster = Cluster(hardware=catalog.hardware("h100-80gb"), nodes=8, gpus_per_node=8)

    def of(stages: int, **degrees: int) -> Plan:
        stage = StagePlan(layers=64 // stages, micro_batch=1, zero=1, **degrees)
        count = 512 // degrees["data_parallel"]
        return Plan(engine="megatron-core", micro_batches=count, stages=(stage,) * stages)

    split = of(2, data_parallel=8, tensor_parallel=4, sequence_parallel=1)
    ring = of(4, data_parallel=2, tensor_parallel=1, context_parallel=8)
    predictor = SymbolicPredictor(workload=workload, cluster=cluster)
    tensor, context = predictor.predict_many([split, ring])
    assert tensor.iteration_s < context.iteration_s


@pytest.mark.parametrize(
    ("ours", "problem"),
    [
        (plan(1, 8, exchange=HEADS), "x context_parallel 16 does not divide kv_heads 8: give 0"),
        (
            replace(plan(1, 4, exchange=HEADS), engine="fsdp"),
            r"2 \(heads exchanged\), but engine fsdp does not run it: give 0 .* or 1 \(keys",
        ),
        (replace(plan(1, 4, exchange=GATHER), engine="zero-bubble"), "engine zero-bubble does not"),
    ],
)
def test_a_way_that_heads_or_engines_do_not_allow_is_refused(ours: Plan, problem: str) -> None:
    cluster = replace(CLUSTER, nodes=4)
    with pytest.raises(InputError, match=problem):
        Job(workload=WORK, cluster=cluster, plan=ours)


@pytest.mark.parametrize("exchange", [RING, GATHER, HEADS])
def test_megatron_is_told_the_way(exchange: int) -> None:
    target = TARGETS["megatron"]
    job = Job(workload=WORK, cluster=CLUSTER, plan=plan(1, 4, exchange=exchange))
    found = nearest(job, target)
    assert found.is_exact
    text = target.write(found.job)
    assert ("--cp-comm-type" in text) == (exchange != RING)
    given = Given(hardware=CLUSTER.hardware, model=WORK.model)
    read = target.read(text, given)
    assert {one.context_exchange for one in read.job.plan.stages} == {exchange}


def test_a_way_is_said_in_words() -> None:
    assert dimension_words("context_exchange", HEADS, 16) == "heads exchanged"
    assert change_words("context_exchange", RING, GATHER) == "keys gathered instead of ring of keys"


def test_searches_choose_the_way() -> None:
    space = replace(
        space_of("megatron-today"),
        context_parallel=(8,),
        context_exchange=(RING, GATHER, HEADS),
        tensor_parallel=(1,),
        pipeline=(2,),
        orders=("1f1b",),
    )
    work = of_many_keys(4096)
    problem = Problem(workload=work, cluster=CLUSTER)
    found = {mesh.value("context_exchange") for mesh in meshes(problem, space, 8)}
    assert found == {RING, GATHER, HEADS}
    predictor = SymbolicPredictor(workload=work, cluster=CLUSTER)
    searcher = StrategySearcher(strategy=SEARCHERS["random"], predictor=predictor)
    best = searcher.search(problem, space, Budget(evaluations=60), 0).plan
    assert best is not None
    assert best.stages[0].context_exchange == HEADS


def test_a_plan_file_says_it(tmp_path: Path) -> None:
    job = Job(workload=WORK, cluster=CLUSTER, plan=plan(1, 4, exchange=GATHER))
    dump_job(job, tmp_path / "plan.yaml")
    assert (tmp_path / "plan.yaml").read_text("utf-8").count("context_exchange: 1") == 2
    assert (tmp_path / "plan.yaml").read_text("utf-8").count("context_parallel: 4") == 2
    assert load_job(tmp_path / "plan.yaml") == job


@pytest.mark.parametrize(
    ("tokens", "ours", "problem"),
    [
        (16388, plan(1, 4), "8 does not divide sequence_length 16388"),
        (24, plan(1, 4, split=1), None),
        (40, plan(1, 4, split=1), None),
        (16384, plan(2, 4), "take 32 GPUs, but the cluster has 16"),
    ],
)
def test_what_does_not_divide_is_refused(tokens: int, ours: Plan, problem: str | None) -> None:
    work = replace(WORK, sequence_length=tokens)
    if problem is None:
        Job(workload=work, cluster=CLUSTER, plan=ours)
    else:
        with pytest.raises(InputError, match=problem):
            Job(workload=work, cluster=CLUSTER, plan=ours)
