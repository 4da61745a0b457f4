"""Routers of all rules train as in a plain model, whose tokens choose one by one, with losses that
balance them, corrections, biases and a capacity, under any plan."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from mistlab.plan.plan import Plan, StagePlan  # noqa: E402
from mistlab.plan.workload import Workload  # noqa: E402
from runtime.checkpoints import checkpoint  # noqa: E402
from runtime.checks.collectives.findings import collective_findings  # noqa: E402
from runtime.checks.fake.fake_device import device_findings  # noqa: E402
from runtime.checks.races.judge import Judge  # noqa: E402
from runtime.checks.races.recorded_rank import trace_of  # noqa: E402
from runtime.comm.group import Alone  # noqa: E402
from runtime.comm.topology import connected  # noqa: E402
from runtime.engine.executor import Executor  # noqa: E402
from runtime.engine.streams.device_streams import SimulatedStreams  # noqa: E402
from runtime.engine.work import router_notes  # noqa: E402
from runtime.models import routers  # noqa: E402
from runtime.models.experts import CORRECTION  # noqa: E402
from runtime.models.grouped import ExpertMatrices  # noqa: E402
from runtime.models.routers import RouteBy, Watched, Whose  # noqa: E402
from tests.runtime.planted import plant  # noqa: E402
from tests.runtime.test_experts_train import spread  # noqa: E402
from tests.runtime.thread_ranks import Meeting, run_threads  # noqa: E402
from tests.runtime.worlds import (  # noqa: E402
    MIXED,
    TRAINING,
    Trained,
    assert_alike,
    begun,
    by_plan,
    plainly,
    run_step,
    stage,
    thread_groups,
    whole_weights,
    workload,
)
from tests.sweep import sweep  # noqa: E402


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


DEEPSEEK = {
    "scores": "sigmoid",
    "correction": True,
    "correction_rate": 0.05,
    "scale": 2.5,
    "groups": 4,
    "active_groups": 2,
}
ROUTERS: dict[str, dict[str, Any]] = {
    "DeepSeek V3's": DEEPSEEK,
    "DeepSeek V2's": {
        "normalized": False,
        "scale": 16.0,
        "groups": 4,
        "active_groups": 3,
        "best_of_group": 1,
    },
    "sigmoids as they are": {"scores": "sigmoid", "normalized": False},
    "Llama 4's": {"scores": "sigmoid", "normalized": False, "weighs_inputs": True},
    "balanced softmax": {"balance_loss": 0.5, "z_loss": 0.1},
    "balanced sigmoids": {**DEEPSEEK, "balance_loss": 0.5, "z_loss": 0.1},
}


def of_router(name: str, *, capacity: float | None = None, **fields: Any) -> Workload:
    own = {"count": 8, "active": 2, "ffn": 24, "shared_ffn": 16, "dense_blocks": 1}
    own |= {"router": ROUTERS[name], **fields.pop("experts", {})}
    work = workload("llama", experts=own, **{"layers": 3, "kv_heads": 2, **fields})
    return replace(work, expert_capacity=capacity)


def check(work: Workload, *stages: StagePlan, micro_batches: int = 2, order: str = "1f1b") -> None:
    plan = Plan(micro_batches=micro_batches, stages=stages, order=order)
    found = by_plan(work, plan, TRAINING, start=spread)
    assert_alike(found, plainly(work, TRAINING, start=spread))


@pytest.mark.parametrize("name", ROUTERS)
def test_a_router_on_one_rank_trains_as_a_plain_model(name: str) -> None:
    check(of_router(name), stage(3, micro_batch=4, checkpointed_layers=1))


PLANS: dict[str, StagePlan] = {
    "experts over data ranks": stage(3, data_parallel=2, expert_parallel=2, zero=2, offload=MIXED),
    "parts of sequences": stage(
        3, tensor_parallel=2, sequence_parallel=1, expert_parallel=2, micro_batch=4
    ),
    "tensor ranks that send a part each": stage(
        3, tensor_parallel=2, expert_tensor_parallel=2, micro_batch=4, checkpointed_layers=2
    ),
    "parts of sequences of context ranks": stage(
        3, context_parallel=2, tensor_parallel=2, sequence_parallel=1, micro_batch=4, zero=1
    ),
}


@pytest.mark.parametrize(
    ("plan", "name"),
    sweep([(plan, name) for name in ("balanced sigmoids", *ROUTERS) for plan in PLANS], first=4),
)
def test_routers_train_as_in_a_plain_model(plan: str, name: str) -> None:
    check(of_router(name), PLANS[plan])


@pytest.mark.parametrize("plan", PLANS)
def test_a_capacity_drops_the_same_tokens_under_any_plan(plan: str) -> None:
    check(of_router("balanced sigmoids", capacity=0.75), PLANS[plan])


BIASED = of_router(
    "balanced softmax",
    experts={"shared_ffn": 0, "gate_limit": 0.05, "dense_blocks": 0},
    biases=True,
    sinks=True,
)


@pytest.mark.parametrize("plan", sweep(["parts of sequences", *PLANS], first=1))
def test_biases_beside_experts_for_all_tokens_train_as_in_a_plain_model(plan: str) -> None:
    check(of_router("balanced softmax", biases=True, experts={"shared_ffn": 16}), PLANS[plan])


@pytest.mark.parametrize("plan", list(PLANS)[::2])
def test_biases_and_cut_off_gates_train_as_in_a_plain_model(plan: str) -> None:
    check(BIASED, PLANS[plan])


def test_stages_of_a_pipeline_report_the_losses_of_all_routers() -> None:
    work = of_router("balanced sigmoids", layers=4)
    two = stage(2, data_parallel=2, micro_batch=1, expert_parallel=2)
    check(work, two, two, micro_batches=4, order="interleaved-2")


def test_no_race_no_hidden_wait_and_no_call_that_hangs() -> None:
    work = of_router("balanced sigmoids", capacity=0.75)
    plan = Plan(micro_batches=2, stages=(PLANS["parts of sequences of context ranks"],))
    assert collective_findings(plan, work, clips=True) == ()
    assert Judge(trace_of(work, plan, 0, TRAINING)).findings() == []
    assert device_findings(work, plan, 0, TRAINING) == ()


def test_corrections_are_saved_and_another_plan_goes_on_with_them(tmp_path: Path) -> None:
    work = of_router("balanced sigmoids")
    one = Plan(micro_batches=2, stages=(stage(3, micro_batch=4),))
    first = begun(
        *(work, one, connected(one, 0, lambda *_: Alone(), experts=True)),
        *(SimulatedStreams(), TRAINING, spread),
    )
    reports = [run_step(first, work, first.connections, step) for step in range(2)]
    path = checkpoint.save(first, tmp_path)
    plan = Plan(micro_batches=2, stages=(PLANS["experts over data ranks"],))

    def rank_of(rank: int, meeting: Meeting) -> Executor:
        connections = connected(plan, rank, thread_groups(meeting, rank), experts=True)
        executor = begun(work, plan, connections, SimulatedStreams(), TRAINING)
        checkpoint.load(executor, path)
        own = [run_step(executor, work, connections, step) for step in (2, 3)]
        reports.extend(own if rank == 0 else ())
        executor.flush()
        return executor

    executors = run_threads(plan.num_gpus, rank_of)
    found = Trained(reports=reports, weights=whole_weights(work, executors))
    assert_alike(found, plainly(work, steps=4, start=spread))
    corrections = [one for name, one in found.weights.items() if name.endswith(CORRECTION)]
    assert len(corrections) == 2
    assert all(one.unique().numel() > 1 for one in corrections)


def test_a_router_that_sends_all_tokens_to_one_expert_is_named() -> None:
    """By block, expert and share, on all ranks alike; others are not."""
    work = of_router("balanced softmax", experts={"active": 1})

    def start(name: str, shape: tuple[int, ...], *, tied: bool) -> Tensor:
        tensor = spread(name, shape, tied=tied)
        # All tokens have much in common, by which the third block's sixth expert is taken.
        if name.endswith("tokens.weight"):
            tensor[:, 0] = 10.0
        if name.endswith("router.weight"):
            tensor[:, 0] = 10.0 * (torch.arange(shape[0]) == 5) if name[7] == "2" else 0.0
        return tensor

    plan = Plan(micro_batches=2, stages=(PLANS["experts over data ranks"],))
    found = by_plan(work, plan, start=start)
    assert_alike(found, plainly(work, start=start))
    for report in found.reports:
        (one,) = report.lopsided
        assert str(one) == (
            "block 2: 100% of the tokens go to expert 5, whose ranks do all the work: give "
            "workload.model.experts.router a balance_loss, a z_loss or a correction_rate, or a "
            "lower learning rate"
        )
    assert not plainly_reported(of_router("balanced softmax"), plan)


def plainly_reported(work: Workload, plan: Plan) -> list[object]:
    return [one for report in by_plan(work, plan, steps=1).reports for one in report.lopsided]


# What is planted: in which function, which piece is what instead; and the plan that shows it.
FAULTS: dict[str, tuple[Any, str, str, str, float | None]] = {
    "a token dropped that has room": (
        *(routers.within_capacity, "rank < most", "rank < most - 1"),
        *("experts over data ranks", 0.75),
    ),
    "tokens kept without room": (
        *(routers.within_capacity, "rank < most", "rank < most + 1"),
        *("experts over data ranks", 0.75),
    ),
    "a capacity of a rank's own tokens": (
        *(Whose.whole, "self.context is None or self.parts == 1", "True"),
        *("parts of sequences of context ranks", 0.75),
    ),
    "other groups of experts": (
        *(routers.choice_of, "router.active_groups, -1)", "router.active_groups, -1, False)"),
        *("experts over data ranks", None),
    ),
    "weights that are not normalised": (
        *(RouteBy.forward, "weights / (weights.sum(-1, keepdim=True) + TINY)", "weights"),
        *("experts over data ranks", None),
    ),
    "a choice without corrections": (
        *(routers.choice_of, "scores if correction is None else scores + correction", "scores"),
        *("experts over data ranks", None),
    ),
    "corrections by the last micro-batch alone": (
        *(router_notes._WatchedBlock.note, "self.counts.add_(counts)", "self.counts.copy_(counts)"),
        *("experts over data ranks", None),
    ),
    "losses scaled by ranks": (
        *(Watched.backward, "made * watch.share()", "made * watch.share() * 2"),
        *("experts over data ranks", None),
    ),
    "losses of one micro-batch": (
        *(routers._losses, "len(wide) * int(whose.ranks.size)", "len(wide)"),
        *("parts of sequences", None),
    ),
    "sequences taken for one another": (
        *(Whose.sequences, "int(self.ranks.rank) * tokens, int", "0, int"),
        *("tensor ranks that send a part each", None),
    ),
}


def test_weights_of_what_experts_take_train_under_a_plan() -> None:
    """With those of what they make beside them the same model would train otherwise."""
    work = of_router("Llama 4's", capacity=0.75)
    check(work, PLANS["tensor ranks that send a part each"])
    others = of_router("Llama 4's", experts={"router": {**ROUTERS["Llama 4's"], **BEHIND}})
    with pytest.raises(AssertionError):
        assert_alike(plainly(work, start=spread), plainly(others, start=spread))


BEHIND = {"weighs_inputs": False}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_shows(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, right, wrong, plan, capacity = FAULTS[fault]
    plant(monkeypatch, function, right, wrong)
    with pytest.raises((AssertionError, RuntimeError)):
        check(of_router("balanced sigmoids", capacity=capacity), PLANS[plan])


def test_a_bias_that_all_ranks_with_parts_of_an_expert_add_shows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch, ExpertMatrices.forward, "self.ranks.tensor_rank == 0", "True")
    with pytest.raises(AssertionError):
        check(BIASED, PLANS["tensor ranks that send a part each"])
