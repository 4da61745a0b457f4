"""Plans of models with experts train as a plain model does, whose experts see token by token."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from mistlab import catalog  # noqa: E402
from mistlab.core.values import InputError  # noqa: E402
from mistlab.job.job import Job  # noqa: E402
from mistlab.machine.cluster import Cluster  # noqa: E402
from mistlab.plan.plan import Plan, StagePlan  # noqa: E402
from mistlab.plan.workload import Workload  # noqa: E402
from mistlab.stages.stage_shape import replicas_of  # noqa: E402
from runtime.checkpoints import checkpoint  # noqa: E402
from runtime.checkpoints.boxes import Box, boxes_of  # noqa: E402
from runtime.comm import topology  # noqa: E402
from runtime.comm.group import Alone, Group  # noqa: E402
from runtime.comm.topology import Sharers, connected  # noqa: E402
from runtime.engine.executor import Report  # noqa: E402
from runtime.engine.storage.arena import HostPool  # noqa: E402
from runtime.engine.storage.state import Section  # noqa: E402
from runtime.engine.streams.device_streams import SimulatedStreams  # noqa: E402
from runtime.engine.streams.expert_lanes import StreamedTrip  # noqa: E402
from runtime.engine.training import Training  # noqa: E402
from runtime.engine.work import shared_vectors  # noqa: E402
from runtime.runnable import check_runnable  # noqa: E402
from tests.runtime.thread_ranks import Meeting, run_threads  # noqa: E402
from tests.runtime.worlds import (  # noqa: E402
    EPSILON,
    LEARNING_RATE,
    MIXED,
    STEPS,
    TOLERANCE,
    TRAINING,
    assert_alike,
    begun,
    by_plan,
    plainly,
    random_plan,
    ratios,
    run_step,
    stage,
    starting_tensor,
    thread_groups,
    workload,
)
from tests.sweep import sweep  # noqa: E402

CLIPPING = Training(learning_rate=LEARNING_RATE, epsilon=EPSILON, clip_norm=0.3)
# Routers and experts of weights so large that tokens go to experts in unlike numbers.
SPREAD = 8.0


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def spread(name: str, shape: tuple[int, ...], *, tied: bool) -> Tensor:
    tensor = starting_tensor(name, shape, tied=tied)
    return tensor * SPREAD if ".experts." in name else tensor


def of_experts(*, count: int = 4, active: int = 2, **fields: Any) -> Workload:
    own = {name: fields.pop(name) for name in ("shared_ffn", "dense_blocks") if name in fields}
    experts = {"count": count, "active": active, "ffn": 24, **own}
    return workload("llama", experts=experts, **{"layers": 3, "kv_heads": 2, **fields})


WHOLE = of_experts(shared_ffn=20, dense_blocks=1)


def check(
    work: Workload,
    *stages: StagePlan,
    training: Training = TRAINING,
    micro_batches: int = 2,
    order: str = "1f1b",
    **how: Any,
) -> None:
    plan = Plan(micro_batches=micro_batches, stages=stages, order=order)
    found, expected = (
        by_plan(work, plan, training, start=spread, **how),
        plainly(work, training, start=spread),
    )
    assert_alike(found, expected)
    if training.clip_norm is not None:
        norms = [report.gradient_norm for report in found.reports]
        np.testing.assert_allclose(
            norms, [report.gradient_norm for report in expected.reports], rtol=1e-5
        )
        assert min(norms) > training.clip_norm


def test_one_rank_trains_as_a_plain_model() -> None:
    check(WHOLE, stage(3, micro_batch=4), training=CLIPPING)


@pytest.mark.parametrize("zero", sweep([2, 0, 1, 3], first=2))
def test_ranks_with_different_experts_train_as_a_plain_model(zero: int) -> None:
    one = stage(3, data_parallel=2, expert_parallel=2, zero=zero)
    check(WHOLE, one, training=CLIPPING)


TOGETHER = {
    "experts over tensor ranks": {"expert_parallel": 2, "micro_batch": 4},
    "widths over tensor ranks": {"expert_tensor_parallel": 2, "micro_batch": 4},
    "both, over four": {"data_parallel": 2, "expert_tensor_parallel": 2, "expert_parallel": 2},
    "copies over data ranks": {"data_parallel": 2, "expert_parallel": 2, "zero": 3},
    "copies over all ranks": {"data_parallel": 2, "zero": 1},
}


@pytest.mark.parametrize(
    ("name", "splits_tokens"),
    sweep([(name, turn % 2) for turn, name in enumerate((*TOGETHER, *TOGETHER))], first=5),
)
def test_tensor_ranks_with_experts_train_as_a_plain_model(name: str, splits_tokens: int) -> None:
    one = stage(3, tensor_parallel=2, sequence_parallel=splits_tokens, **TOGETHER[name])
    check(WHOLE, replace(one, checkpointed_layers=1, offload=MIXED), training=CLIPPING)


@pytest.mark.parametrize("kind", sweep(range(4), first=1))
def test_offloaded_experts_train_as_in_a_plain_model(kind: int) -> None:
    offload = ratios(*(0.5 if one == kind else 0.0 for one in range(4)))
    one = stage(3, data_parallel=2, expert_parallel=2, zero=kind, offload=offload)
    check(WHOLE, one, progress="lazy")


@pytest.mark.parametrize("pattern", sweep(["DA", "ADD"], first=1))
def test_blocks_with_experts_that_take_turns_with_plain_ones_train(pattern: str) -> None:
    """Of Llama 4's larger model every other block has experts."""
    work = of_experts(layers=4, shared_ffn=20, pattern=pattern, qk_norm=True)
    stages = (
        stage(2, data_parallel=2, micro_batch=1, expert_parallel=2, zero=2, offload=MIXED),
        stage(2, tensor_parallel=2, expert_tensor_parallel=2, zero=1, checkpointed_layers=1),
    )
    check(work, *stages, micro_batches=4, training=CLIPPING)


@pytest.mark.parametrize("order", ["interleaved-2", "zb-v"])
def test_pipelines_of_chunks_with_experts_train_as_a_plain_model(order: str) -> None:
    work = of_experts(layers=4, dense_blocks=1)
    stages = (
        stage(2, data_parallel=2, micro_batch=1, expert_parallel=2, zero=2, offload=MIXED),
        stage(2, data_parallel=2, micro_batch=1, zero=1, checkpointed_layers=int(order != "zb-v")),
    )
    check(work, *stages, micro_batches=4, order=order, training=CLIPPING)


def random_mixture(seed: int) -> tuple[Workload, Plan]:
    """A random plan whose model has experts, which its stages divide in some way."""
    work, plan = random_plan(seed)
    draw = np.random.default_rng((seed, 2))
    own = {"active": int(draw.integers(1, 4)), "dense_blocks": int(draw.integers(0, 2))}
    mixture = workload(
        "llama" if draw.random() < 0.7 else "gpt",
        layers=work.model.layers,
        batch=work.global_batch,
        kv_heads=work.model.kv_heads,
        vocab=work.model.vocab,
        tied_embeddings=work.model.head_has_table,
        experts={"count": 4, "ffn": 24, "shared_ffn": int(draw.choice([0, 20])), **own},
    )
    return mixture, replace(plan, stages=tuple(_dividing(one, draw) for one in plan.stages))


def _dividing(one: StagePlan, draw: np.random.Generator) -> StagePlan:
    gpus, alone = one.num_gpus, replicas_of(one) == 1
    ways = [
        (ranks, parts)
        for ranks in (1, 2, 4)
        for parts in (1, 2)
        if gpus % (ranks * parts) == 0 and (not alone or ranks * parts == gpus)
    ]
    ranks, parts = ways[int(draw.integers(len(ways)))]
    return replace(one, expert_parallel=ranks, expert_tensor_parallel=parts)


@pytest.mark.parametrize("seed", sweep(range(12), first=4))
def test_random_plans_of_mixtures_train_as_a_plain_model(seed: int) -> None:
    work, plan = random_mixture(seed)
    assert_alike(by_plan(work, plan, seed=seed), plainly(work))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 200))
def test_many_random_plans_of_mixtures_train_as_a_plain_model(seed: int) -> None:
    test_random_plans_of_mixtures_train_as_a_plain_model(seed)


def test_storages_of_sizes_that_vary_share_few_buffers() -> None:
    pool = HostPool(pins_for=None)
    for size in range(1000, 2000):
        (buffer,) = pool.take([torch.empty(size, dtype=torch.uint8)], varies=True)
        assert size == buffer.copy.numel() <= buffer.memory.numel() <= size * 9 / 8
        pool.give_back([buffer])
    assert pool.size_bytes <= 9 * 2048


def test_sections_of_a_layer_share_no_place_in_a_ring() -> None:
    """A fetched layer's experts lie behind its other weights in an entry, and so do gradients."""
    plan = Plan(micro_batches=2, stages=(stage(3, offload=ratios(1, 1, 1, 0)),))
    connections = connected(plan, 0, lambda _name, _ranks: Alone(), experts=True)
    state = begun(WHOLE, plan, connections, SimulatedStreams(), TRAINING, spread).state
    with_experts = [*state.sections[1].layers]
    assert len(with_experts) == 2
    for layer, entry in product(with_experts, range(2)):
        for whole in (Section.whole_weights, Section.whole_gradients):
            one, other = (whole(section, layer, entry) for section in state.sections)
            assert one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
            assert one.data_ptr() + one.nbytes <= other.data_ptr()


SAVED = {
    "experts over data and tensor ranks": {
        "data_parallel": 2,
        "tensor_parallel": 2,
        "expert_parallel": 2,
        "zero": 3,
        "offload": MIXED,
    },
    "parts of experts": {"tensor_parallel": 2, "expert_tensor_parallel": 2, "micro_batch": 4},
    "copies on all ranks": {"data_parallel": 4, "micro_batch": 1},
}


@pytest.mark.parametrize("name", SAVED)
def test_ranks_write_each_number_of_a_checkpoint_once(name: str) -> None:
    """And numbers that are written are those of a plain model."""
    plan = Plan(micro_batches=2, stages=(stage(3, **SAVED[name]),))

    def rank_of(rank: int, meeting: Meeting) -> list[Box]:
        connections = connected(plan, rank, thread_groups(meeting, rank), experts=True)
        executor = begun(WHOLE, plan, connections, SimulatedStreams(), TRAINING, spread)
        for step in range(STEPS):
            run_step(executor, WHOLE, connections, step)
        executor.flush()
        return list(boxes_of(executor, written=True))

    weights = plainly(WHOLE, start=spread).weights
    found = {name: torch.zeros_like(one) for name, one in weights.items()}
    times = {name: torch.zeros_like(one) for name, one in weights.items()}
    for box in (one for boxes in run_threads(plan.num_gpus, rank_of) for one in boxes):
        kind, _, tensor = box.name.partition(".")
        if kind == "master":
            sizes = zip(box.offsets, box.values.shape, strict=True)
            at = tuple(slice(begin, begin + size) for begin, size in sizes)
            assert box.whole == weights[tensor].shape
            found[tensor][at] += box.values
            times[tensor][at] += 1
    for tensor, one in weights.items():
        assert (times[tensor] == 1).all(), tensor
        assert (found[tensor] - one).norm() <= TOLERANCE * one.norm(), tensor


@pytest.mark.parametrize(
    "stages",
    [
        (stage(3, data_parallel=2, expert_parallel=2, zero=3, offload=MIXED),),
        (stage(2, tensor_parallel=2, expert_tensor_parallel=2), stage(1)),
    ],
)
def test_another_plan_goes_on_with_the_same_losses(
    stages: tuple[StagePlan, ...], tmp_path: Path
) -> None:
    one = Plan(micro_batches=2, stages=(stage(3, micro_batch=4, offload=MIXED),))
    first = begun(
        *(WHOLE, one, connected(one, 0, lambda *_: Alone(), experts=True)),
        *(SimulatedStreams(), TRAINING, spread),
    )
    reports = [run_step(first, WHOLE, first.connections, step) for step in range(2)]
    path = checkpoint.save(first, tmp_path)
    plan = Plan(micro_batches=2 if len(stages) == 1 else 4, stages=stages)

    def rank_of(rank: int, meeting: Meeting) -> list[Report]:
        connections = connected(plan, rank, thread_groups(meeting, rank), experts=True)
        executor = begun(WHOLE, plan, connections, SimulatedStreams(), TRAINING)
        checkpoint.load(executor, path)
        return [run_step(executor, WHOLE, connections, step) for step in range(2, 4)]

    reports += run_threads(plan.num_gpus, rank_of)[0]
    losses = [report.loss for report in reports]
    np.testing.assert_allclose(losses, plainly(WHOLE, steps=4, start=spread).losses, rtol=TOLERANCE)


THERE = StreamedTrip.there


def _dropping(trip: StreamedTrip, rows: Tensor) -> Tensor:
    made = THERE(trip, rows).clone()
    made[:1] = 0
    return made


def _to_wrong_experts(trip: StreamedTrip, rows: Tensor) -> Tensor:
    return THERE(trip, rows).flip(0)


def _by_swapped_splits(trip: StreamedTrip, rows: Tensor) -> Tensor:
    return THERE(replace(trip, sent=trip.received, received=trip.sent), rows)


def _of_all_ranks(own: Mapping[str, Group], *names: str) -> Sharers:
    return SHARERS(own, *(name.removesuffix(" experts") for name in names))


SHARERS = topology._sharers
# What is planted: a part of the runtime, and what stands there in its place.
FAULTS: dict[str, tuple[object, str, object]] = {
    "a dropped token": (StreamedTrip, "there", _dropping),
    "other experts' rows": (StreamedTrip, "there", _to_wrong_experts),
    "swapped splits": (StreamedTrip, "there", _by_swapped_splits),
    "gradients over the group of other weights": (topology, "_sharers", _of_all_ranks),
    "a router whose ranks are not summed": (
        *(shared_vectors, "parameters_of_own_tokens"),
        lambda *_, **__: (),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_shows(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*FAULTS[fault])
    # Ranks with the same experts are tensor-parallel ones, too, or not all data-parallel ones.
    degrees = {"data_parallel": 4, "micro_batch": 1}
    if "router" in fault:
        degrees = {"data_parallel": 2, "tensor_parallel": 2}
    with pytest.raises((AssertionError, RuntimeError)):
        check(WHOLE, stage(3, expert_parallel=2, **degrees))


def test_a_router_that_sends_every_token_to_one_expert_trains_as_a_plain_model() -> None:
    """Other ranks' experts have no rows at all."""
    work = of_experts(count=4, active=1)

    def start(name: str, shape: tuple[int, ...], *, tied: bool) -> Tensor:
        tensor = spread(name, shape, tied=tied)
        if name.endswith(("tokens.weight", "router.weight")):
            # All tokens have much in common, by which the first expert is taken.
            tensor[:, 0] = torch.arange(10.0, 10 - shape[0], -1)[: shape[0]].clamp(min=7)
        return tensor

    one = stage(3, data_parallel=2, expert_parallel=2, zero=2, offload=MIXED)
    plan = Plan(micro_batches=2, stages=(one,))
    assert_alike(by_plan(work, plan, start=start), plainly(work, start=start))


def test_experts_on_tensor_ranks_alone_are_refused_where_their_copies_would_be_reduced() -> None:
    cluster = Cluster(hardware=catalog.hardware("l4-24gb"), nodes=1, gpus_per_node=2)
    plan = Plan(micro_batches=2, stages=(stage(3, tensor_parallel=2, micro_batch=4),))
    work = replace(WHOLE, precision="fp16")
    with pytest.raises(InputError, match=r"expert_parallel: 1 leaves .* give expert_parallel: 2"):
        check_runnable(Job(workload=work, cluster=cluster, plan=plan))
