"""Where an iteration's time goes: parts that add up to it, and those of cases that are known."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from mistlab import catalog
from mistlab.core.values import InputError
from mistlab.cost.breakdown import EXCHANGED, breakdown_of, kernel_parts
from mistlab.cost.tasks import TaskModel, task_columns
from mistlab.engines.engine import ENGINES
from mistlab.graph.graph import EXCHANGES
from mistlab.job.job import Job
from mistlab.job.prediction import PARTS, Breakdown
from mistlab.job.search import Problem
from mistlab.machine.cluster import Cluster, NodeGroup
from mistlab.plan.named_spaces import space_of
from mistlab.plan.plan import Offload, Plan, StagePlan
from mistlab.plan.workload import Workload
from mistlab.stages.stage_batch import StageBatch
from searchers.savings import Chooser, chosen_plan
from simulators.symbolic import SymbolicPredictor
from tests.mistlab.drawn_plans import drawn_jobs
from tests.workloads import workload_of

WORK = workload_of("gpt3-1.3b", 1024, 32, layers=16)
ONE = StagePlan(layers=16, data_parallel=1, tensor_parallel=1, micro_batch=4)
A100 = catalog.hardware("a100-40gb")
COMMUNICATION = (*EXCHANGED, "data_parallel_s", "sends_s")


def job_of(
    *stages: StagePlan, engine: str = "mistlab", work: Workload = WORK, overlaps: bool = True
) -> Job:
    ranks = stages[0].data_parallel * stages[0].micro_batch
    plan = Plan(
        engine=engine,
        micro_batches=work.global_batch // ranks,
        stages=stages,
        overlap_communication=overlaps,
    )
    gpus = sum(one.num_gpus for one in stages)
    return Job(
        workload=work, cluster=Cluster(hardware=A100, nodes=1, gpus_per_node=gpus), plan=plan
    )


def of_spaces(models: Sequence[str], spaces: Sequence[str], count: int, seed: int) -> Iterator[Job]:
    """So many jobs of models and spaces on 8 GPUs and on 16, the same for the same seed."""
    draw = np.random.default_rng(seed)
    chooser = Chooser(lambda _, options: int(draw.integers(options)))
    while count:
        work = replace(WORK, model=catalog.model(str(draw.choice(models))), precision="bf16")
        cluster = Cluster(
            hardware=catalog.hardware("h100-80gb"), nodes=int(draw.choice([1, 2])), gpus_per_node=8
        )
        space = space_of(str(draw.choice(spaces)))
        plan = chosen_plan(Problem(workload=work, cluster=cluster), space, chooser)
        if plan is None:
            continue
        try:
            yield Job(workload=work, cluster=cluster, plan=plan)
        except InputError:
            continue
        count -= 1


def assert_adds_up(job: Job) -> Breakdown:
    """The parts of every stage are the whole iteration, and its arithmetic is what MFU counts."""
    prediction = SymbolicPredictor(workload=job.workload, cluster=job.cluster).predict(job.plan)
    found = breakdown_of(job, prediction.iteration_s)
    for one in (found.parts, *found.stages):
        assert one.total_s == pytest.approx(prediction.iteration_s, rel=1e-9)
    share = found.parts.arithmetic_s / prediction.iteration_s
    assert share == pytest.approx(prediction.mfu, rel=1e-9)
    return found


def test_parts_of_drawn_plans_add_up() -> None:
    for job in drawn_jobs(40, seed=3):
        assert_adds_up(job)


@pytest.mark.parametrize(
    ("models", "spaces"),
    [
        (("mixtral-8x7b", "qwen3-30b-a3b"), ("moe", "fsdp")),
        (("nemotron-3-nano", "llama-7b"), ("everything:orders", "zero-bubble")),
        (("llama3-8b",), ("megatron-core", "fsdp", "megatron-today")),
    ],
)
def test_parts_of_plans_of_other_spaces_add_up(
    models: Sequence[str], spaces: Sequence[str]
) -> None:
    for job in of_spaces(models, spaces, 12, seed=5):
        assert_adds_up(job)


def test_parts_add_up_on_unlike_gpus() -> None:
    slower = NodeGroup(hardware=catalog.hardware("v100-32gb"), nodes=1)
    cluster = Cluster(hardware=A100, nodes=2, gpus_per_node=2, others=(slower,))
    stage = replace(ONE, layers=8, data_parallel=2, micro_batch=2)
    job = replace(job_of(stage, stage), cluster=cluster)
    prediction = SymbolicPredictor(workload=WORK, cluster=cluster).predict(job.plan)
    found = breakdown_of(job)
    for one in found.stages:
        assert one.total_s == pytest.approx(prediction.iteration_s, rel=1e-9)
    assert found.busiest_stage == 1
    assert found.stages[1].arithmetic_s > 2 * found.stages[0].arithmetic_s


@pytest.mark.parametrize("engine", ["mistlab", "megatron", "deepspeed", "fsdp"])
def test_one_gpu_computes_and_steps(engine: str) -> None:
    work = replace(WORK, precision="bf16")
    found = assert_adds_up(job_of(ONE, engine=engine, work=work)).parts
    idle = (*COMMUNICATION, "copies_s", "recomputation_s", "imbalance_s", "bubble_s")
    assert {name: getattr(found, name) for name in idle} == dict.fromkeys(idle, 0.0)
    computes = ("arithmetic_s", "products_s", "attention_s", "memory_bound_s", "step_s")
    assert all(getattr(found, name) > 0 for name in computes)


@pytest.mark.parametrize("engine", ["mistlab", "megatron-core"])
def test_tensor_parallel_ranks_of_one_replica_exchange_inside_layers_alone(engine: str) -> None:
    found = assert_adds_up(job_of(replace(ONE, tensor_parallel=4), engine=engine)).parts
    assert found.tensor_exchange_s > 0
    others = ("context_exchange_s", "expert_exchange_s", "data_parallel_s", "sends_s", "copies_s")
    assert all(getattr(found, name) == 0 for name in others)


def test_recomputed_blocks_exchange_once_more() -> None:
    plain = replace(ONE, tensor_parallel=4)
    once, again = (
        assert_adds_up(job_of(one, engine="deepspeed")).parts
        for one in (plain, replace(plain, checkpointed_layers=16))
    )
    assert again.tensor_exchange_s == pytest.approx(1.5 * once.tensor_exchange_s, rel=0.05)


def test_exchanges_of_every_group_have_a_part() -> None:
    groups = [group for part in EXCHANGED.values() for group in part]
    assert sorted(groups) == sorted({row.group for row in EXCHANGES.values()})


@pytest.mark.parametrize("zero", [0, 1])
def test_what_nothing_overlaps_is_exposed_whole(zero: int) -> None:
    """Deepspeed without overlapping reduces and gathers when nothing else goes on."""
    job = job_of(
        replace(ONE, data_parallel=4, micro_batch=1, zero=zero), engine="deepspeed", overlaps=False
    )
    found = assert_adds_up(job).parts
    tasks = TaskModel.of(
        job.workload, job.cluster, ENGINES["deepspeed"], overlap_communication=False
    )
    batch = StageBatch.of_plan(job.plan)
    seconds = tasks.seconds({name: batch.value(name) for name in task_columns()})
    (layers,) = tasks.types.of_stages(batch.value)
    reduced_s, gathered_s = (seconds.alone(kind, "")[layers, 0].sum() for kind in "RU")
    expected_s = reduced_s + (gathered_s if zero else 0.0)
    assert found.data_parallel_s == pytest.approx(expected_s, rel=1e-9)


def test_equal_stages_wait_for_the_bubble_of_their_pipeline() -> None:
    # A vocabulary of 128 and many blocks make the ends of the model next to nothing.
    model = replace(WORK.model, vocab=128, layers=128)
    stage = replace(ONE, layers=32)
    job = job_of(*(stage,) * 4, engine="megatron", work=replace(WORK, model=model))
    found = assert_adds_up(job).parts
    rounds = job.plan.micro_batches + 3
    passes_s = found.total_s - found.sends_s - found.step_s
    assert found.sends_s > 0
    assert found.bubble_s / passes_s == pytest.approx(3 / rounds, rel=5e-3)
    assert found.imbalance_s < 5e-3 * found.total_s


def test_stages_with_less_to_do_wait_for_the_busiest() -> None:
    found = assert_adds_up(job_of(replace(ONE, layers=11), replace(ONE, layers=5)))
    assert found.busiest_stage == 0
    assert found.stages[0].imbalance_s == 0
    assert found.stages[1].imbalance_s > 0.3 * found.stages[1].total_s
    assert found.stages[0].bubble_s == found.stages[1].bubble_s


def test_twice_as_many_recomputed_blocks_recompute_twice_as_long() -> None:
    none, four, eight = (
        assert_adds_up(job_of(replace(ONE, checkpointed_layers=count))).parts for count in (0, 4, 8)
    )
    assert none.recomputation_s == 0
    assert eight.recomputation_s == pytest.approx(2 * four.recomputation_s, rel=1e-9)
    for name in PARTS:
        if name != "recomputation_s":
            assert getattr(eight, name) == pytest.approx(getattr(none, name), rel=1e-9), name


def test_copies_of_offloading_are_exposed_as_far_as_they_last_longer() -> None:
    plan = replace(ONE, offload=Offload(activations=1.0, optimizer=1.0))
    job = job_of(plan)
    slow = assert_adds_up(job).parts
    assert slow.copies_s > 0
    assert slow.data_parallel_s == 0
    none = assert_adds_up(job_of(ONE)).parts
    assert none.copies_s == 0
    for name in ("arithmetic_s", "products_s", "attention_s", "memory_bound_s", "step_s"):
        assert getattr(slow, name) == pytest.approx(getattr(none, name), rel=1e-9), name


def test_copies_and_reductions_share_what_sticks_out() -> None:
    sharded = replace(ONE, data_parallel=4, micro_batch=1, zero=2)
    both = replace(sharded, offload=Offload(gradients=1.0, optimizer=1.0))
    reduced, shared = (assert_adds_up(job_of(one)).parts for one in (sharded, both))
    assert reduced.data_parallel_s > 0
    assert reduced.copies_s == 0
    assert shared.data_parallel_s > 0
    assert shared.copies_s > shared.data_parallel_s


def test_hosts_that_launch_late_have_their_part() -> None:
    """Blocks that are too small for the host to keep ahead of them."""
    model = replace(WORK.model, hidden=256, head_dim=16, ffn=1024)
    work = replace(WORK, model=model, sequence_length=128, precision="bf16")
    small = assert_adds_up(job_of(ONE, engine="fsdp", work=work)).parts
    assert small.hosts_s > 0.5 * small.total_s
    large = assert_adds_up(job_of(ONE, engine="fsdp", work=replace(WORK, precision="bf16"))).parts
    # Large blocks wait until the host has launched the first of them.
    assert 0 < large.hosts_s < 0.005 * large.total_s


def test_ranks_that_wait_for_the_hosts_of_experts_wait_for_hosts() -> None:
    """Engine megatron-bridge-graph launches operators of experts without a host."""
    work = replace(WORK, model=replace(catalog.model("qwen3-30b-a3b"), layers=4), precision="bf16")
    stage = replace(ONE, layers=4, data_parallel=4, micro_batch=1, expert_parallel=4)
    waits, launches = (
        assert_adds_up(job_of(stage, engine=f"megatron-bridge{way}", work=work)).parts
        for way in ("", "-graph")
    )
    assert waits.hosts_s > 2 * launches.hosts_s


def test_attention_loses_what_it_takes_beyond_its_own_arithmetic() -> None:
    job = job_of(ONE)
    found = assert_adds_up(job).parts
    batch, tasks = StageBatch.of_plan(job.plan), TaskModel.of(WORK, job.cluster, ENGINES["mistlab"])
    kernels = kernel_parts(tasks.seconds({name: batch.value(name) for name in task_columns()}))
    (layers,) = tasks.types.of_stages(batch.value)
    at_peak_s = kernels.attention_flop / job.cluster.peak_flop_per_s(WORK.precision)
    of_pass = (kernels.attention_s - at_peak_s)[layers, 0].sum()
    assert found.attention_s == pytest.approx(job.plan.micro_batches * of_pass, rel=1e-9)


def test_a_reduction_once_an_iteration_takes_as_long_with_more_micro_batches() -> None:
    offload = Offload(activations=1.0)
    stage = replace(ONE, data_parallel=4, micro_batch=1, zero=1, offload=offload)
    few, many = (
        assert_adds_up(job_of(stage, work=replace(WORK, global_batch=count))).parts
        for count in (32, 128)
    )
    assert few.data_parallel_s > 0
    assert many.data_parallel_s == pytest.approx(few.data_parallel_s, rel=1e-6)
    assert many.copies_s > 3 * few.copies_s


def test_a_table_of_two_stages_is_reduced_between_them() -> None:
    stage = replace(ONE, layers=8, offload=Offload(weights=1.0, optimizer=1.0, activations=1.0))
    work = replace(WORK, model=replace(WORK.model, tied_embeddings=True))
    job = job_of(stage, stage, work=work)
    tasks = TaskModel.of(work, job.cluster, ENGINES["mistlab"])
    batch = StageBatch.of_plan(job.plan)
    tied_s = tasks.seconds({name: batch.value(name) for name in task_columns()}).tied_s
    first, last = assert_adds_up(job).stages
    assert first.copies_s > 0
    assert tied_s[0] > 0
    assert first.data_parallel_s == pytest.approx(tied_s[0], rel=1e-9)
    assert last.data_parallel_s == 0


def test_passes_for_weights_alone_hide_no_exchanges() -> None:
    stage = replace(ONE, layers=8, tensor_parallel=4, micro_batch=1)
    job = job_of(stage, stage)
    whole, split = (
        assert_adds_up(replace(job, plan=replace(job.plan, order=order))).parts
        for order in ("1f1b", "zb-h1")
    )
    assert split.tensor_exchange_s > 1.01 * whole.tensor_exchange_s


def test_what_parts_of_a_stage_hide_from_one_another_does_not_count() -> None:
    work = replace(WORK, global_batch=8, sequence_length=128)
    stage = replace(ONE, layers=8, data_parallel=2, micro_batch=2)
    job = job_of(stage, stage, engine="megatron", work=work)
    job = replace(
        job,
        plan=replace(job.plan, order="interleaved-8"),
        cluster=replace(job.cluster, nodes=2, gpus_per_node=2, inter_node_gbytes_per_s=1),
    )
    assert_adds_up(job)
