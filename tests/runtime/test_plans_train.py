"""Plans on simulated streams train as a plain run does, whatever the streams' progress."""

import math
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from mistlab import catalog  # noqa: E402
from mistlab.core.values import InputError  # noqa: E402
from mistlab.job.job import Job  # noqa: E402
from mistlab.machine.cluster import Cluster  # noqa: E402
from mistlab.plan.plan import Plan  # noqa: E402
from mistlab.plan.workload import Workload  # noqa: E402
from mistlab.stages.stage_program import iterations  # noqa: E402
from mistlab.stages.stage_shape import StageShape  # noqa: E402
from runtime.engine.streams.device_streams import Progress  # noqa: E402
from runtime.engine.streams.lanes import StreamedRanks  # noqa: E402
from runtime.engine.training import Training  # noqa: E402
from runtime.engine.work import optimizer  # noqa: E402
from runtime.engine.work.stage_modules import initial_tensor  # noqa: E402
from runtime.runnable import check_runnable  # noqa: E402
from tests.runtime import worlds  # noqa: E402
from tests.runtime.program_races import without_wait  # noqa: E402
from tests.runtime.worlds import (  # noqa: E402
    EPSILON,
    LEARNING_RATE,
    MIXED,
    ON_HOST,
    OVERFLOWING,
    SEED,
    TOLERANCE,
    TRAINING,
    Trained,
    alone,
    assert_alike,
    by_plan,
    plainly,
    random_plan,
    ratios,
    run_step,
    stage,
    whole_weights,
    workload,
)
from tests.sweep import sweep  # noqa: E402


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("progress", ["eager", "lazy", "random"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_zero_with_offloading_trains_as_a_plain_run(zero: int, progress: Progress) -> None:
    work = workload(tied_embeddings=zero == 2)
    one = stage(data_parallel=2, zero=zero, checkpointed_layers=2, offload=MIXED)
    found = by_plan(work, Plan(micro_batches=2, stages=(one,)), progress=progress)
    assert_alike(found, plainly(work))


@pytest.mark.parametrize("family", sweep(["gpt", "llama", "falcon"], first=2))
def test_ranks_that_split_tokens_train_as_a_plain_run(family: str) -> None:
    fields = {"gpt": {"biases": True}, "llama": {"kv_heads": 2}, "falcon": {}}[family]
    work = workload(family, **fields)
    one = stage(2, tensor_parallel=2, sequence_parallel=1, checkpointed_layers=1)
    assert_alike(by_plan(work, Plan(micro_batches=4, stages=(one, one))), plainly(work))
    alone = replace(one, layers=4, data_parallel=2, zero=3, micro_batch=1)
    assert_alike(by_plan(work, Plan(micro_batches=4, stages=(alone,))), plainly(work))


def test_neighbours_that_split_tokens_otherwise_are_refused() -> None:
    one = stage(2, tensor_parallel=2, sequence_parallel=1)
    plan = Plan(micro_batches=4, stages=(one, replace(one, sequence_parallel=0)))
    cluster = Cluster(hardware=catalog.hardware("l4-24gb"), nodes=1, gpus_per_node=4)
    with pytest.raises(InputError, match="cuts sequences into 1 parts and the stage before into 2"):
        check_runnable(Job(workload=workload(precision="fp16"), cluster=cluster, plan=plan))


@pytest.mark.parametrize("ratio", sweep([0.37, 1.0, 0.0, 0.5], first=2))
@pytest.mark.parametrize("kind", range(4))
def test_each_kind_of_offloading_trains_as_a_plain_run(kind: int, ratio: float) -> None:
    work = workload("llama", kv_heads=2)
    offload = ratios(*(ratio if kind == one else 0.0 for one in range(4)))
    one = stage(micro_batch=4, checkpointed_layers=kind, offload=offload)
    found = by_plan(work, Plan(micro_batches=2, stages=(one,)), progress="lazy")
    assert_alike(found, plainly(work))


def test_stages_of_unlike_degrees_train_as_a_plain_run() -> None:
    work = workload("falcon", vocab=97, tied_embeddings=True, biases=True)
    stages = (
        stage(1, data_parallel=2, micro_batch=1, zero=3, offload=MIXED),
        stage(2, tensor_parallel=2, zero=2, checkpointed_layers=1),
        stage(1, data_parallel=2, tensor_parallel=2, micro_batch=1, zero=1, offload=MIXED),
    )
    assert_alike(by_plan(work, Plan(micro_batches=4, stages=stages)), plainly(work))


@pytest.mark.parametrize("progress", sweep(["random", "eager", "lazy"], first=1))
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("ratio", [0.37, 1.0])
def test_what_the_host_steps_trains_as_a_plain_run(
    ratio: float, zero: int, progress: Progress
) -> None:
    work = workload(tied_embeddings=zero == 2)
    offload = ratios(0.5 if zero % 2 else 0.0, 0.37 if zero < 2 else 0.0, ratio, 0.0)
    one = stage(data_parallel=2, zero=zero, offload=offload)
    found = by_plan(work, Plan(micro_batches=2, stages=(one,)), ON_HOST, progress=progress)
    assert_alike(found, plainly(work))


@pytest.mark.parametrize("on_host", [False, True])
def test_clipping_and_a_learning_rate_over_time_are_those_of_a_plain_run(on_host: bool) -> None:
    work = workload("gpt", biases=True, tied_embeddings=True)
    training = Training(
        learning_rate=LEARNING_RATE,
        epsilon=EPSILON,
        decay="cosine",
        warmup_steps=2,
        total_steps=4,
        clip_norm=0.3,
        steps_on_host=on_host,
    )
    stages = (
        stage(3, data_parallel=2, micro_batch=1, zero=2, offload=MIXED),
        stage(1, tensor_parallel=2, zero=1),
    )
    found = by_plan(work, Plan(micro_batches=4, stages=stages), training, steps=4)
    expected = plainly(work, training, steps=4)
    assert_alike(found, expected)
    norms = [report.gradient_norm for report in found.reports]
    assert norms == pytest.approx([report.gradient_norm for report in expected.reports], rel=1e-5)
    assert min(norms) > training.clip_norm


def test_a_layer_that_is_stepped_in_many_pieces_trains_as_a_plain_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every layer of a real model has more elements than are stepped at once."""
    monkeypatch.setattr(optimizer, "CHUNK", 64)
    work = workload("llama", layers=2)
    one = stage(2, data_parallel=2, zero=1, offload=ratios(0.0, 0.0, 0.37, 0.0))
    for training in (TRAINING, ON_HOST):
        found = by_plan(work, Plan(micro_batches=2, stages=(one,)), training)
        assert_alike(found, plainly(work))


def test_a_norm_of_scaled_gradients_is_clipped_as_that_of_plain_ones() -> None:
    work = workload("gpt", layers=2)
    training = replace(OVERFLOWING, clip_norm=0.3)
    one = stage(2, data_parallel=2, zero=2, offload=MIXED)
    found = by_plan(work, Plan(micro_batches=2, stages=(one,)), training)
    expected = plainly(work, training)
    assert_alike(found, expected)
    norms = [report.gradient_norm for report in found.reports[1:]]
    assert norms == pytest.approx([one.gradient_norm for one in expected.reports[1:]], rel=1e-5)
    assert min(norms) > training.clip_norm


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("zero", [0, 3])
def test_a_run_with_an_overflow_is_a_plain_run_that_leaves_the_step_out(
    zero: int, on_host: bool
) -> None:
    work = workload("gpt", biases=True)
    one = stage(data_parallel=2, zero=zero, offload=MIXED)
    training = replace(OVERFLOWING, steps_on_host=on_host)
    found = by_plan(work, Plan(micro_batches=2, stages=(one,)), training)
    assert found.reports[0].skipped
    assert_alike(found, plainly(work, OVERFLOWING))


# A tensor that begins at zero becomes the sum of three updates. With an epsilon below its gradients
# each update is the learning rate, which magnifies rounding of gradients that cancel out; with an
# epsilon above them updates are proportional to gradients.
ABOVE_GRADIENTS = replace(TRAINING, learning_rate=1e-3, epsilon=1e-2)


@pytest.mark.parametrize("family", ["gpt", "llama", "falcon"])
def test_biases_that_begin_at_zero_train_as_in_a_plain_run(family: str) -> None:
    work = workload(family, biases=True)

    def start(name: str, shape: tuple[int, ...], *, tied: bool) -> torch.Tensor:
        return initial_tensor(name, shape, SEED, tied=tied)

    one = stage(data_parallel=2, zero=2, checkpointed_layers=2, offload=MIXED)
    plan = Plan(micro_batches=2, stages=(one,))
    found = by_plan(work, plan, ABOVE_GRADIENTS, start=start).weights
    for name, whole in plainly(work, ABOVE_GRADIENTS, start=start).weights.items():
        tensor, other = whole, found[name]
        if name.endswith("qkv.bias"):
            # A bias of all keys shifts a query's scores alike, which softmax ignores: its gradient
            # is zero, or, where positions turn keys, next to it, and its update is rounding.
            queries, keys = work.model.hidden, work.model.kv_heads * work.model.head_dim
            tensor, other = (
                torch.cat([one[:queries], one[queries + keys :]]) for one in (whole, other)
            )
        assert (other - tensor).norm() <= TOLERANCE * tensor.norm(), name


def test_an_overflow_leaves_a_step_out_and_halves_the_scale_on_every_rank() -> None:
    work = workload(batch=4, precision="fp16")
    training = Training(learning_rate=1e-3, loss_scale=2.0**20, growth_interval=2)
    plan = Plan(
        micro_batches=2,
        stages=(stage(2, data_parallel=2, micro_batch=1, zero=3), stage(2, offload=MIXED)),
    )
    reports = by_plan(work, plan, training, steps=12).reports
    scales = [report.loss_scale for report in reports]
    skipped = [report.skipped for report in reports]
    assert skipped[0]
    assert not all(skipped)
    assert scales[0] == 2.0**19
    for before, after, was_skipped in zip(scales, scales[1:], skipped[1:], strict=False):
        assert after == before / 2 if was_skipped else after in (before, 2 * before)
    assert all(math.isfinite(report.loss) for report in reports)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_half_precision_learns_as_full_precision_does(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One batch again and again, which is learnt by heart unless nothing is learnt."""
    batch = worlds.sequences(workload(), 0)
    monkeypatch.setattr(worlds, "sequences", lambda *_: batch)
    plan = Plan(micro_batches=2, stages=(stage(data_parallel=2, zero=2, offload=MIXED),))

    def losses(precision: str, learning_rate: float) -> list[float]:
        training = Training(learning_rate=learning_rate)
        return by_plan(workload(precision=precision), plan, training, steps=6).losses

    half = losses(precision, 1e-2)
    assert half == pytest.approx(losses("fp32", 1e-2), rel=1e-2)
    assert half[-1] < half[0] - 0.5
    unmoved = losses(precision, 0.0)
    assert unmoved == [unmoved[0]] * 6


def test_a_tensor_sum_that_is_left_out_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StreamedRanks, "all_reduce_", lambda *_: None)
    work = workload()
    plan = Plan(micro_batches=2, stages=(stage(tensor_parallel=2, micro_batch=4),))
    with pytest.raises(AssertionError):
        assert_alike(by_plan(work, plan), plainly(work))


@pytest.mark.parametrize("seed", sweep(range(16), first=5))
def test_random_plans_train_as_a_plain_run(seed: int) -> None:
    work, plan = random_plan(seed)
    training = TRAINING
    assert_alike(by_plan(work, plan, training, seed=seed), plainly(work, training))


@pytest.mark.parametrize("seed", sweep(range(16, 24), first=3))
def test_random_plans_of_which_the_host_steps_a_part_train_as_a_plain_run(seed: int) -> None:
    work, plan = random_plan(seed)
    assert_alike(by_plan(work, plan, ON_HOST, seed=seed), plainly(work))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(220, 260))
def test_many_random_plans_of_which_the_host_steps_a_part_train_as_a_plain_run(seed: int) -> None:
    test_random_plans_of_which_the_host_steps_a_part_train_as_a_plain_run(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 220))
def test_many_random_plans_train_as_a_plain_run(seed: int) -> None:
    test_random_plans_train_as_a_plain_run(seed)


@pytest.mark.slow
def test_most_waits_that_are_left_out_show_on_lazy_streams() -> None:
    """Compute never lags here, so waits for it are for the check of races to judge."""
    work = workload(layers=3, batch=4)
    plan = Plan(micro_batches=2, stages=(stage(3, offload=MIXED),))
    (program,) = iterations(StageShape.of(plan, 0), 2)[1:]
    expected = plainly(work, steps=2)
    waits = [
        (number, wait)
        for number, op in enumerate(program)
        for wait in op.waits
        if program[number - wait].lane != "compute"
    ]
    shown = [_shows(work, plan, expected, number, wait) for number, wait in waits]
    assert sum(shown) >= len(shown) / 2


def _shows(work: Workload, plan: Plan, expected: Trained, number: int, wait: int) -> bool:
    executor = alone(work, plan, "lazy")
    executor.programs = [without_wait(program, number, wait) for program in executor.programs]
    reports = [run_step(executor, work, executor.connections, step) for step in range(2)]
    executor.flush()
    found = Trained(reports=reports, weights=whole_weights(work, [executor]))
    try:
        assert_alike(found, expected)
    except AssertionError:
        return True
    return False
