"""Experts in values, layer graphs, memory, links, predictions and searches; 8-bit products."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mistlab import catalog
from mistlab.core.values import FieldError, InputError
from mistlab.cost.kernels import model_flop
from mistlab.graph.layer_types import RING_KEYS, expressions_of, split_over_context
from mistlab.graph.library import graph_of, kinds_of
from mistlab.graph.stage_model import StageModel
from mistlab.graph.stored_graph import CAST, DTYPE, DTYPE_OF_4, eight_bit, four_bit
from mistlab.job.job import Job, job_from_mapping, job_to_mapping
from mistlab.job.search import Budget, Problem
from mistlab.machine.cluster import Cluster
from mistlab.plan.dimensions import groups_of, ranks_of
from mistlab.plan.model_parts import Experts, Window
from mistlab.plan.named_spaces import space_of
from mistlab.plan.plan import Plan, StagePlan
from mistlab.plan.workload import ModelSpec, Workload
from mistlab.stages.stage_batch import StageBatch
from searchers.registry import SEARCHERS
from searchers.savings import contains
from searchers.strategy import StrategySearcher
from simulators.events import EventSimulator
from simulators.symbolic import SymbolicPredictor

MODEL = ModelSpec.of(
    family="llama",
    hidden=1024,
    layers=8,
    heads=16,
    ffn=4096,
    vocab=32000,
    experts=Experts(count=16, active=2, ffn=2048),
)
WORK = Workload(
    model=MODEL, sequence_length=2048, global_batch=64, attention="flash", precision="bf16"
)
B200 = catalog.hardware("b200-180gb")
CLUSTER = Cluster(hardware=B200, nodes=2, gpus_per_node=8)
STAGE = StagePlan(
    layers=4, data_parallel=8, tensor_parallel=1, micro_batch=1, zero=1, expert_parallel=4
)
PLAN = Plan(engine="megatron-core", micro_batches=8, stages=(STAGE, STAGE))


def with_stages(**values: int) -> Plan:
    return replace(PLAN, stages=(STAGE.with_values(values),) * 2)


def job(plan: Plan = PLAN, work: Workload = WORK) -> Job:
    return Job(workload=work, cluster=CLUSTER, plan=plan)


def test_experts_and_the_ranks_that_share_them() -> None:
    stage = STAGE.with_values({"tensor_parallel": 2, "expert_parallel": 4})
    stage = stage.with_values({"expert_tensor_parallel": 2})
    groups = {name: [*groups_of(name, stage.degree)] for name in ("experts", "expert tensor")}
    assert stage.num_gpus == 16
    # Parts of an expert are neighbours, different experts come next, equal ones are far apart.
    assert groups["expert tensor"][0] == [0, 1]
    assert groups["experts"][0] == [0, 2, 4, 6]
    assert next(groups_of("reduce experts", stage.degree)) == [0, 8]
    for name, of_name in groups.items():
        assert sorted(rank for group in of_name for rank in group) == [*range(16)]
        assert {len(group) for group in of_name} == {ranks_of(name, stage.degree)}


def test_a_rank_holds_its_experts_and_shards_their_state_over_their_own_group() -> None:
    model = StageModel.of(WORK, "megatron-core")
    ways = np.array([1, 2, 4, 8])
    figures = model.figures(
        StageBatch(
            layers=4,
            data_parallel=8,
            tensor_parallel=1,
            micro_batch=1,
            zero=1,
            expert_parallel=ways,
        )
    )
    experts = 4 * 16 * 3 * 1024 * 2048
    others = figures.parameters[0] - experts
    assert figures.parameters.tolist() == (others + experts / ways).tolist()
    # Of 12 bytes of optimizer state each of 8 ranks has an eighth, of experts one of 8 / ways.
    expected = 12 * (others / 8 + experts / ways / (8 / ways))
    assert figures.optimizer_bytes == pytest.approx(expected)
    assert figures.weights_bytes == pytest.approx(2 * figures.parameters)
    # Wherever tokens go, a rank's experts have as many rows, and as many operations.
    assert figures.forward_flop == pytest.approx([figures.forward_flop[0]] * 4)


def test_the_busiest_rank_takes_more() -> None:
    plain, busy = (
        StageModel.of(replace(WORK, expert_imbalance=factor)).figures(
            StageBatch(layers=1, data_parallel=np.array([8]), tensor_parallel=1, micro_batch=1)
        )
        for factor in (1.0, 1.5)
    )
    rows = 2048 * 2 * 0.5
    # Three products of 2 operations forward, and gates of one operation.
    more = rows * (6 * 1024 * 2048 + 2 * 2048)
    assert busy.forward_flop - plain.forward_flop == pytest.approx(more)
    assert (busy.activations_bytes > plain.activations_bytes).all()


@pytest.mark.parametrize(
    ("given", "load"),
    [
        ({"expert_imbalance": 1.5}, (1.0, 1.5)),
        ({"expert_imbalance": 1.5, "expert_capacity": 1.2}, (1.0, 1.2)),
        ({"expert_imbalance": 1.1, "expert_capacity": 1.2}, (1.0, 1.1)),
        ({"expert_capacity": 0.5}, (0.5, 0.5)),
        ({"expert_imbalance": 1.1, "expert_capacity": 1.2, "expert_padding": True}, (1.2, 1.2)),
    ],
)
def test_a_capacity_drops_or_pads_tokens(given: dict[str, Any], load: tuple[float, float]) -> None:
    work = replace(WORK, **given)
    assert work.expert_load == load
    batch = StageBatch(
        layers=1, data_parallel=np.array([8]), tensor_parallel=1, micro_batch=1, expert_parallel=8
    )
    plain, own = (StageModel.of(one, "megatron-core").figures(batch) for one in (WORK, work))
    # Three products of 2 operations forward, and gates of one operation.
    more = 2048 * 2 * (load[1] - 1) * (6 * 1024 * 2048 + 2 * 2048)
    assert own.forward_flop - plain.forward_flop == pytest.approx(more)
    assert model_flop(work) == model_flop(WORK)


def test_padded_tokens_are_sent_and_dropped_ones_are_not() -> None:
    plan = with_stages(expert_parallel=8, micro_batch=4)
    # So many operations that no host holds them up.
    model = replace(MODEL, experts=Experts(count=16, active=8, ffn=16384))
    busy = replace(WORK, model=model, global_batch=256)
    seconds = []
    for given in (
        {"expert_capacity": 0.5},
        {},
        {"expert_capacity": 2.0},
        {"expert_capacity": 2.0, "expert_padding": True},
    ):
        work = replace(busy, **given)
        closed = SymbolicPredictor(workload=work, cluster=CLUSTER).predict(plan)
        played = EventSimulator(workload=work, cluster=CLUSTER).predict(plan)
        assert closed.iteration_s == pytest.approx(played.iteration_s, rel=0.01)
        seconds.append(closed.iteration_s)
    assert seconds[0] < seconds[1] == seconds[2] < seconds[3]


def test_a_capacity_that_means_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="the model has no experts: leave it out"):
        replace(WORK, model=replace(MODEL, experts=None), expert_capacity=1.0)
    with pytest.raises(InputError, match=r"true, but expert_capacity, .* is missing"):
        replace(WORK, expert_padding=True)
    with pytest.raises(InputError, match="engine fsdp drops no tokens: leave it out, or give"):
        job(
            Plan(engine="fsdp", micro_batches=8, stages=(replace(STAGE, layers=8),)),
            replace(WORK, expert_capacity=1.0),
        )


def test_kinds_of_blocks() -> None:
    v3, oss = catalog.model("deepseek-v3"), catalog.model("gpt-oss-20b")
    kinds = kinds_of(v3)
    assert kinds.pattern == ("dense",) * 3 + ("block",) * 58
    assert set(kinds.parts["block"]) - set(kinds.parts["dense"]) == {"experts", "shared_experts"}
    assert kinds_of(oss).pattern == ("windowed", "block")
    assert kinds_of(replace(oss, window=Window(size=8, full_every=3))).pattern == (
        *("windowed",) * 2,
        "block",
    )
    assert kinds_of(replace(oss, window=None)).pattern == ("block",)


def test_dense_blocks_come_first() -> None:
    """A stage with the dense blocks has their parameters, the next one those of experts."""
    dense = replace(MODEL, experts=replace(MODEL.experts, dense_blocks=3))  # type: ignore[type-var]
    model = StageModel.of(replace(WORK, model=dense), "megatron-core")
    stages = model.figures(
        StageBatch(
            layers=4,
            data_parallel=1,
            tensor_parallel=1,
            micro_batch=1,
            first_block=np.array([0, 4]),
        )
    )
    mlp, experts = 3 * 1024 * 4096, 16 * 3 * 1024 * 2048 + 16 * 1024
    assert stages.parameters[1] - stages.parameters[0] == 3 * (experts - mlp)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"expert_parallel": 8},
        {"expert_parallel": 2, "expert_tensor_parallel": 2},
        {"data_parallel": 4, "tensor_parallel": 2, "micro_batch": 2},
        {"data_parallel": 4, "tensor_parallel": 2, "micro_batch": 2, "sequence_parallel": 1},
        {"expert_parallel": 8, "checkpointed_layers": 2},
    ],
)
def test_a_played_plan_is_a_predicted_one(values: dict[str, int]) -> None:
    plan = job(with_stages(**values)).plan
    closed, played = (
        kind(workload=WORK, cluster=CLUSTER).predict_many([plan])[0]
        for kind in (SymbolicPredictor, EventSimulator)
    )
    assert closed.iteration_s == pytest.approx(played.iteration_s, rel=1e-2)
    for stage, twin in zip(closed.stages, played.stages, strict=True):
        assert stage.peak_allocated_bytes == pytest.approx(twin.peak_allocated_bytes, rel=1e-2)


def test_the_plain_exchange_waits_for_its_host() -> None:
    """Six exchanges of each block and micro-batch wait, and one stage after another."""
    engines = ("megatron-bridge", "megatron-bridge-alltoall")
    padded = replace(WORK, expert_capacity=1.0, expert_padding=True)
    predictor = SymbolicPredictor(workload=padded, cluster=CLUSTER)
    fused, plain = predictor.predict_many([replace(PLAN, engine=name) for name in engines])
    waits = 6 * 0.7e-3 * 4 * (8 + 1)
    assert plain.iteration_s - fused.iteration_s > 0.9 * waits


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"expert_parallel": 3}, r"expert_parallel: 3 does not divide experts 16"),
        ({"expert_parallel": 16}, r"expert_parallel: 16 x expert_tensor_parallel 1 does not"),
        ({"expert_tensor_parallel": 3}, r"expert_tensor_parallel: 3 does not divide experts' ffn"),
    ],
)
def test_experts_that_do_not_divide_are_refused(values: dict[str, int], problem: str) -> None:
    with pytest.raises(FieldError, match=problem):
        job(with_stages(**values))


def test_a_model_without_experts_has_none_to_divide() -> None:
    work = replace(WORK, model=replace(MODEL, experts=None))
    with pytest.raises(FieldError, match="expert_parallel: 4, but the model has no experts"):
        job(work=work)


def test_a_plan_file_says_all_of_it() -> None:
    mapping = job_to_mapping(job(with_stages(expert_parallel=8)))
    assert mapping["workload"]["model"]["experts"] == {"count": 16, "active": 2, "ffn": 2048}
    assert mapping["plan"]["stages"][0]["expert_parallel"] == 8
    assert job_from_mapping(mapping) == job(with_stages(expert_parallel=8))


def test_8_bit_products_are_those_of_16_bits() -> None:
    stored = graph_of(WORK)
    halved = eight_bit(stored)
    block, own = stored.block, halved.block
    products = [o for o in own.operators if o.dtype == DTYPE and o.kind == "matmul"]
    routers = [o for o in own.operators if o.module == "experts.router"]
    assert {o.module for o in products} == {
        *("attention.qkv", "attention.output"),
        *("experts.up", "experts.down"),
    }
    assert all(o.dtype == "bfloat16" for o in routers)
    # A forward product, and two backward ones whose gradient is converted once.
    casts = [o for o in own.operators if o.name == CAST]
    assert (len(products), len(casts)) == (12, 8)
    assert sum(o.flop for o in products) == sum(
        o.flop for o in block.operators if o.kind == "matmul" and o.module != "experts.router"
    )
    plain, less = expressions_of(block), expressions_of(own)
    saved = plain.saved_bytes - less.saved_bytes
    # Half of 2 bytes of the inputs of three products; the fourth's is kept in 16 bits by attention,
    # and in 8 bits besides.
    b, s, h, n, d = (2048, 1, 1024, 16, 64)
    rows = b * s * 2
    sizes = {"b": s, "s": b, "h": h, "n": n, "d": d, "k": n, "tp": 1, "ep": 1, "et": 1, "A": 2}
    found = saved.subs({symbol: sizes.get(symbol.name, 0) for symbol in saved.free_symbols})
    assert found == b * h + rows * h - b * n * d


def test_8_bit_products_run_at_their_own_rate() -> None:
    dense = replace(WORK, model=catalog.model("llama3-8b"))
    stage = STAGE.with_values({"layers": 16, "expert_parallel": 1})
    plan = replace(PLAN, engine="megatron-bridge", stages=(stage, stage))
    halves, eighths = (
        SymbolicPredictor(workload=replace(dense, precision=one), cluster=CLUSTER)
        .predict_many([plan])[0]
        .iteration_s
        for one in ("bf16", "fp8")
    )
    assert 0.5 * halves < eighths < halves
    slow = Cluster(hardware=catalog.hardware("a100-80gb"), nodes=2, gpus_per_node=8)
    with pytest.raises(FieldError, match=r"fp8 is not supported by GPU a100-80gb: give fp16, bf16"):
        Job(workload=replace(WORK, precision="fp8"), cluster=slow, plan=PLAN)


def test_products_of_experts_stay_in_8_bits_where_others_have_4() -> None:
    block = four_bit(eight_bit(graph_of(WORK))).block
    products = {o.module: o.dtype for o in block.operators if o.kind == "matmul"}
    assert products["attention.qkv"] == DTYPE_OF_4
    assert products["experts.up"] == DTYPE
    dense = replace(WORK, model=catalog.model("llama3-8b"))
    stage = STAGE.with_values({"layers": 16, "expert_parallel": 1})
    plan = replace(PLAN, engine="megatron-bridge", stages=(stage, stage))
    eight, four = (
        SymbolicPredictor(workload=replace(dense, precision=one), cluster=CLUSTER)
        .predict_many([plan])[0]
        .iteration_s
        for one in ("fp8", "fp4")
    )
    assert 0.5 * eight < four < eight


def test_kinds_of_hybrid_models_follow_their_pattern() -> None:
    kinds = kinds_of(catalog.model("nemotron-3-nano"))
    assert len(kinds.pattern) == 52
    assert set(kinds.parts.values()) == {
        ("state_space", "network_missing"),
        ("experts", "shared_experts", "mixer_missing"),
        ("network_missing",),
    }
    work = replace(WORK, model=catalog.model("nemotron-3-nano"))
    kind_of_block = {one["name"]: one for one in graph_of(work).mapping["further_blocks"]}
    names = {o["name"] for o in kind_of_block["scan"]["operators"]}
    assert "mistlab.chunk_scan" in names
    assert "mistlab.attention" not in names


def test_blocks_with_and_without_experts_take_turns() -> None:
    kinds = kinds_of(catalog.model("llama4-maverick"))
    assert kinds.pattern == ("attention and plain network", "block")
    assert [*kinds.parts.values()] == [(), ("experts", "shared_experts")]


def test_attention_s_gates_are_made_with_its_queries() -> None:
    gated = catalog.model("qwen3-next-80b-a3b")
    plain = replace(gated, attention_gate=False)
    batch = StageBatch(layers=np.array([4]), data_parallel=1, tensor_parallel=1, micro_batch=1)

    def parameters(model: ModelSpec) -> float:
        stage = StageModel.of(replace(WORK, model=model), "megatron-core")
        return float(stage.figures(batch).parameters[0])

    assert parameters(gated) - parameters(plain) == gated.hidden * gated.heads * gated.head_dim


def test_a_ring_of_context_has_no_keys_where_a_block_does_not_attend() -> None:
    work = replace(WORK, model=catalog.model("nemotron-3-nano"))
    graph = split_over_context(graph_of(work).counts)
    rings = [
        kind for kind in graph.kinds if RING_KEYS in {o.name for o in graph.kinds[kind].operators}
    ]
    assert rings == ["attention"]


@pytest.mark.parametrize("name", ["random", "aceso", "mist"])
def test_searches_divide_experts(name: str) -> None:
    """Where experts do not fit on one GPU, the best plan divides them."""
    work = replace(WORK, model=replace(MODEL, experts=Experts(count=64, active=2, ffn=4096)))
    small = Cluster(hardware=B200, nodes=1, gpus_per_node=8, memory_gib=40.0)
    problem = Problem(workload=replace(work, global_batch=16), cluster=small)
    space = replace(space_of("moe"), tensor_parallel=(1,), pipeline=(1, 2), micro_batch=(1,))
    predictor = SymbolicPredictor(workload=problem.workload, cluster=small)
    searcher = StrategySearcher(strategy=SEARCHERS[name], predictor=predictor)
    found = searcher.search(problem, space, Budget(evaluations=200), 0).plan
    assert found is not None
    assert contains(problem, space, found)
    assert min(stage.expert_parallel for stage in found.stages) > 1
