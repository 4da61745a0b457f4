"""Checks without a GPU, and predictions of memory, cover experts."""

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from mistlab.graph.stage_model import StageModel  # noqa: E402
from mistlab.plan.plan import Plan  # noqa: E402
from mistlab.plan.workload import Workload  # noqa: E402
from mistlab.stages.stage_batch import StageBatch  # noqa: E402
from runtime.checks.collectives.findings import collective_findings  # noqa: E402
from runtime.checks.fake.fake_device import device_findings  # noqa: E402
from runtime.checks.races.judge import Judge  # noqa: E402
from runtime.checks.races.recorded_rank import trace_of  # noqa: E402
from runtime.checks.sanitizer import small  # noqa: E402
from runtime.comm.group import Group  # noqa: E402
from runtime.comm.topology import connected  # noqa: E402
from runtime.engine.streams.expert_lanes import StreamedExperts  # noqa: E402
from runtime.engine.work import optimizer  # noqa: E402
from runtime.models import experts, routers  # noqa: E402
from tests.runtime.lone_rank import lone  # noqa: E402
from tests.runtime.taken_memory import SIZES, assert_predicted, taken_bytes  # noqa: E402
from tests.runtime.worlds import MIXED, TRAINING, ratios, stage, workload  # noqa: E402
from tests.sweep import sweep  # noqa: E402
from tests.workloads import workload_of  # noqa: E402

EXPERTS = {"count": 4, "active": 2, "ffn": 24, "shared_ffn": 20, "dense_blocks": 1}
PAIR = {"data_parallel": 2, "micro_batch": 1, "expert_parallel": 2}
DEGREES: dict[str, dict[str, Any]] = {
    "data ranks": {**PAIR, "zero": 2, "checkpointed_layers": 1},
    "tensor ranks": {**PAIR, "tensor_parallel": 2, "zero": 3, "offload": MIXED},
    "parts of experts": {
        **PAIR,
        "tensor_parallel": 2,
        "sequence_parallel": 1,
        "zero": 1,
        "expert_tensor_parallel": 2,
    },
}


def of_one_stage(**fields: Any) -> Plan:
    return Plan(micro_batches=2, stages=(stage(2, **fields),))


def mixture() -> Workload:
    return workload("llama", layers=2, batch=4, experts=EXPERTS)


@pytest.mark.parametrize("name", sweep(["tensor ranks", "parts of experts", "data ranks"], first=2))
def test_no_race_no_hidden_wait_and_no_call_that_hangs(name: str) -> None:
    plan = of_one_stage(**DEGREES[name])
    assert collective_findings(plan, mixture(), clips=True) == ()
    for rank in (0, 1):
        assert Judge(trace_of(mixture(), plan, rank, TRAINING)).findings() == []
        assert device_findings(mixture(), plan, rank, TRAINING) == ()


def test_rows_that_nobody_waits_for_are_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    def unawaited(
        ranks: StreamedExperts, group: Group, rows: Tensor, from_each: Any, to_each: Any
    ) -> Tensor:
        streams: Any = ranks._streams
        received = rows.new_empty((sum(from_each), *rows.shape[1:]))
        with streams._driver.using(streams.stream("tensor_parallel")):
            group.all_to_all(received, rows.contiguous(), from_each, to_each)
        return received

    monkeypatch.setattr(StreamedExperts, "exchanged", unawaited)
    assert Judge(trace_of(mixture(), of_one_stage(**PAIR), 0, TRAINING)).findings()


def test_numbers_that_are_counted_by_values_are_a_hidden_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trip = StreamedExperts.trip

    def counted(ranks: StreamedExperts, chosen: Tensor, own: int) -> Any:
        chosen.flatten().bincount(minlength=4)
        return trip(ranks, chosen, own)

    monkeypatch.setattr(StreamedExperts, "trip", counted)
    findings = device_findings(mixture(), of_one_stage(**PAIR), 0, TRAINING)
    assert {one.kind for one in findings} == {"size from values"}


def test_a_small_plan_has_experts_for_all_its_ranks() -> None:
    one = stage(16, data_parallel=8, tensor_parallel=2, expert_parallel=8, micro_batch=1, zero=1)
    plan = Plan(micro_batches=4, stages=(one, replace(one, expert_tensor_parallel=2)))
    found = small(workload_of("mixtral-8x7b", 4096, 32, "bf16"), plan)
    small_experts = found.workload.model.experts
    assert small_experts is not None
    assert small_experts.count == 8
    assert small_experts.ffn % 2 == 0
    assert small_experts.ffn < 64
    assert collective_findings(found.plan, found.workload) == ()


class Even(experts.Route):
    """Routers that give each expert as many tokens, as predictions take it."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, active: int) -> tuple[Tensor, Tensor]:
        """Experts in turn."""
        tokens, count = logits.shape
        chosen = torch.arange(tokens * active).view(tokens, active) % count
        weights = torch.softmax(logits.float().gather(-1, chosen), -1)
        ctx.mark_non_differentiable(chosen)
        ctx.save_for_backward(weights, chosen, logits)
        return weights, chosen


PEAKS: dict[str, dict[str, Any]] = {
    "alone": {"micro_batch": 2, "checkpointed_layers": 2},
    "data ranks, ZeRO-3": {**PAIR, "zero": 3, "checkpointed_layers": 2},
    "tensor ranks": {"tensor_parallel": 2, "expert_parallel": 2, "micro_batch": 2},
    "data ranks": PAIR,
    "copies of experts, offloaded": {
        "data_parallel": 2,
        "micro_batch": 1,
        "zero": 2,
        "offload": ratios(0.5, 0.5, 1.0, 0.5),
    },
    "widths over tensor ranks": {
        "tensor_parallel": 2,
        "expert_tensor_parallel": 2,
        "micro_batch": 2,
        "sequence_parallel": 1,
    },
}


@pytest.mark.parametrize("name", sweep(list(PEAKS), first=4))
@pytest.mark.parametrize("others", sweep([{"shared_ffn": 256, "dense_blocks": 1}, {}], first=1))
def test_an_iteration_takes_what_is_predicted(
    name: str, others: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(optimizer, "CHUNK", 2**17)
    monkeypatch.setattr(experts, "Route", Even)
    own = {"count": 8, "active": 2, "ffn": 512, **others}
    work = workload("llama", batch=4, experts=own, precision="bf16", **SIZES)
    plan = Plan(micro_batches=2, stages=(stage(4, **PEAKS[name]),))
    (predicted,) = StageModel.of(work).figures(StageBatch.of_plan(plan)).peak_bytes
    taken = taken_bytes(work, plan, connected(plan, 0, lone(0), experts=True))
    assert_predicted(taken, predicted, plan.stages[0].offload, rel=0.02)


def _in_turn(scores: Tensor, correction: Any, router: Any, active: int) -> Tensor:
    tokens, count = scores.shape
    return torch.arange(tokens * active).view(tokens, active) % count


RULES: dict[str, tuple[dict[str, Any], dict[str, Any], float | None]] = {
    "corrections, losses and a capacity": (
        {"router": {"scores": "sigmoid", "correction": True, "balance_loss": 0.1, "z_loss": 0.1}},
        {},
        1.0,
    ),
    "biases, and gates that are cut off": (
        {"gate_limit": 7.0},
        {"biases": True, "sinks": True},
        None,
    ),
}


@pytest.mark.parametrize("name", sweep(["tensor ranks", "data ranks", "alone"], first=1))
@pytest.mark.parametrize("rule", RULES)
def test_routers_of_other_rules_take_what_is_predicted(
    rule: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(optimizer, "CHUNK", 2**17)
    monkeypatch.setattr(experts, "Route", Even)
    monkeypatch.setattr(routers, "choice_of", _in_turn)
    own, others, capacity = RULES[rule]
    own = {"count": 8, "active": 2, "ffn": 512, **own}
    work = workload("llama", batch=4, experts=own, precision="bf16", **SIZES, **others)
    work = replace(work, expert_capacity=capacity)
    plan = Plan(micro_batches=2, stages=(stage(4, **PEAKS[name]),))
    (predicted,) = StageModel.of(work).figures(StageBatch.of_plan(plan)).peak_bytes
    taken = taken_bytes(work, plan, connected(plan, 0, lone(0), experts=True))
    assert_predicted(taken, predicted, plan.stages[0].offload, rel=0.02)
