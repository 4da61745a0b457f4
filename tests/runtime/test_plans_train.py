"""Plans on simulated streams train as a plain run does, whatever the streams' progress."""

import pytest

torch = pytest.importorskip("torch")

from mistlab.plan import Plan  # noqa: E402
from runtime.engine.simulated import Progress  # noqa: E402
from tests.runtime.worlds import (  # noqa: E402
    MIXED,
    TRAINING,
    assert_alike,
    by_plan,
    plainly,
    random_plan,
    ratios,
    stage,
    workload,
)


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


@pytest.mark.parametrize("ratio", [0.0, 0.37, 0.5, 1.0])
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


@pytest.mark.parametrize("seed", range(16))
def test_random_plans_train_as_a_plain_run(seed: int) -> None:
    work, plan = random_plan(seed)
    training = TRAINING
    assert_alike(by_plan(work, plan, training, seed=seed), plainly(work, training))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 220))
def test_many_random_plans_train_as_a_plain_run(seed: int) -> None:
    test_random_plans_train_as_a_plain_run(seed)
