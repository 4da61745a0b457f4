"""Heads that predict further tokens train under plans as in one process, and faults show."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from mistlab import catalog  # noqa: E402
from mistlab.core.values import InputError  # noqa: E402
from mistlab.graph.stage_model import StageModel  # noqa: E402
from mistlab.job.job import Job  # noqa: E402
from mistlab.machine.cluster import Cluster  # noqa: E402
from mistlab.plan.plan import NO_OFFLOAD, Offload, Plan  # noqa: E402
from mistlab.stages.stage_batch import StageBatch  # noqa: E402
from runtime.checkpoints import checkpoint  # noqa: E402
from runtime.checks.collectives.findings import collective_findings  # noqa: E402
from runtime.checks.fake.fake_device import device_findings  # noqa: E402
from runtime.checks.races.judge import Judge  # noqa: E402
from runtime.checks.races.recorded_rank import trace_of  # noqa: E402
from runtime.comm.topology import connected, isolated  # noqa: E402
from runtime.engine.executor import Executor, Report  # noqa: E402
from runtime.engine.streams.device_streams import SimulatedStreams  # noqa: E402
from runtime.engine.work import optimizer  # noqa: E402
from runtime.engine.work.parameters import Parameters  # noqa: E402
from runtime.models.parallel import whole_columns  # noqa: E402
from runtime.models.transformer import Head  # noqa: E402
from runtime.runnable import check_model, check_runnable  # noqa: E402
from tests.runtime.planted import plant  # noqa: E402
from tests.runtime.taken_memory import SIZES, assert_predicted, taken_bytes  # noqa: E402
from tests.runtime.thread_ranks import Meeting, run_threads  # noqa: E402
from tests.runtime.worlds import (  # noqa: E402
    CPU,
    MIXED,
    TOLERANCE,
    TRAINING,
    alone,
    assert_alike,
    begun,
    by_plan,
    plainly,
    ratios,
    run_step,
    stage,
    thread_groups,
    workload,
)
from tests.sweep import sweep  # noqa: E402

EXPERTS = {"count": 4, "active": 2, "ffn": 24, "dense_blocks": 1}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "one token": ("llama", {"kv_heads": 2}),
    "three tokens, one table": ("llama", {"further_tokens": 3, "tied_embeddings": True}),
    "two tokens, padded": ("gpt", {"further_tokens": 2, "vocab": 97, "biases": True}),
    "experts": ("llama", {"experts": EXPERTS}),
    "latent attention": (
        "llama",
        {"head_dim": 12, "rotary_fraction": 1 / 3, "latent": {"key_rank": 8, "value_dim": 8}},
    ),
    "dropout": ("gpt", {"further_tokens": 2, "dropout": 0.2, "attention": "math"}),
}
SPLIT = {"tensor_parallel": 2, "sequence_parallel": 1}
SHARDED = {"data_parallel": 2, "micro_batch": 1, "expert_parallel": 2}
PLANS: dict[str, tuple[tuple[dict[str, Any], ...], str]] = {
    "a stage, sharded": (({**SHARDED, "zero": 3, "offload": MIXED},), "1f1b"),
    "the last stage split": (({}, {"tensor_parallel": 2, "expert_parallel": 2}), "1f1b"),
    "tokens split": (({**SPLIT, "checkpointed_layers": 2}, SPLIT), "zb-h1"),
    "sharded stages": (
        ({**SHARDED, "zero": 1}, {**SHARDED, "zero": 2, "tensor_parallel": 2}),
        "interleaved-2",
    ),
    "both ends on a stage": (({"offload": MIXED}, {}), "zb-v"),
    "parts of sequences": (({"context_parallel": 2, "context_exchange": 1, "zero": 2},), "1f1b"),
}


def case(model: str, plan: str) -> tuple[Any, Plan]:
    family, fields = MODELS[model]
    own, order = PLANS[plan]
    has_experts = "experts" in fields
    stages = [
        {name: one[name] for name in one if has_experts or name != "expert_parallel"} for one in own
    ]
    given = {"further_tokens": 1, **fields}
    work = workload(family, layers=2 * len(own), batch=8, **given)
    return work, Plan(micro_batches=4, stages=tuple(stage(2, **one) for one in stages), order=order)


def cases() -> list[tuple[str, str]]:
    """Models and plans that go together."""
    made = [(model, plan) for plan in PLANS for model in MODELS]
    unlike = {("experts", "tokens split"), ("dropout", "parts of sequences")}
    return [one for one in made if one not in unlike]


def mixed() -> list[tuple[str, str]]:
    """The cases, those of neighbouring plans behind one another."""
    made = cases()
    return [*made[::5], *(one for number, one in enumerate(made) if number % 5)]


@pytest.mark.parametrize(("model", "plan"), sweep(mixed(), first=5))
def test_a_plan_trains_further_heads_as_in_one_process(model: str, plan: str) -> None:
    work, own = case(model, plan)
    assert_alike(by_plan(work, own), plainly(work))


def test_another_plan_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    work, plan = case("one token", "the last stage split")
    first = alone(work, Plan(micro_batches=2, stages=(stage(4, micro_batch=4),)), "random")
    reports = [run_step(first, work, first.connections, step) for step in range(2)]
    path = checkpoint.save(first, tmp_path)

    def rank_of(rank: int, meeting: Meeting) -> list[Report]:
        connections = connected(plan, rank, thread_groups(meeting, rank))
        executor = begun(work, plan, connections, SimulatedStreams(), TRAINING)
        checkpoint.load(executor, path)
        return [run_step(executor, work, connections, step) for step in range(2, 4)]

    reports += run_threads(plan.num_gpus, rank_of)[0]
    losses = [report.loss for report in reports]
    np.testing.assert_allclose(losses, plainly(work, steps=4).losses, rtol=TOLERANCE)


@pytest.mark.parametrize("plan", sweep(["tokens split", "the last stage split"], first=0))
def test_no_race_no_hidden_wait_and_no_call_that_hangs(plan: str) -> None:
    work, own = case("one token", plan)
    last = own.num_gpus - 1
    assert collective_findings(own, work, clips=True) == ()
    assert Judge(trace_of(work, own, last, TRAINING)).findings() == []
    assert device_findings(work, own, last, TRAINING) == ()


@pytest.mark.parametrize(("tokens", "at"), sweep([(2, 1), (1, 0), (1, 1)], first=1))
@pytest.mark.parametrize("offload", sweep([ratios(0.5, 0.5, 1.0, 0.5), NO_OFFLOAD], first=1))
def test_an_iteration_takes_what_is_predicted(
    tokens: int, at: int, offload: Offload, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(optimizer, "CHUNK", 2**17)
    work = workload("llama", batch=4, precision="bf16", **{**SIZES, "further_tokens": tokens})
    stages = (stage(2, offload=offload),) * (at + 1)
    plan = Plan(micro_batches=2, stages=stages)
    work = replace(work, model=replace(work.model, layers=2 * (at + 1)))
    predicted = StageModel.of(work).figures(StageBatch.of_plan(plan)).peak_bytes[at]
    taken = taken_bytes(work, plan, isolated(plan, at, CPU, 0))
    assert_predicted(taken, predicted, offload, rel=0.02)


LAST = "the last stage split"
OWN = "self.own_tokens(one) for one in with_further(whole, further)"
FAULTS: dict[str, tuple[Callable[..., Any], str, str, str]] = {
    "another token's vector": (
        *(Head.forward, "_vectors(targets[number - 1])", "_vectors(targets[number])", LAST),
    ),
    "targets of places without one": (*(Head.forward, " * (ahead.flatten() >= 0)", "", LAST),),
    "columns in another order": (
        *(whole_columns, "ranks.all_gather(part))", "ranks.all_gather(part).flip(-1))", LAST),
    ),
    "a table that is not tied": (
        *(Parameters._table_gradients, "in (TABLE, self.twin):", "== TABLE:", LAST),
    ),
    "targets of this rank's part alone": (
        *(Executor._targets, OWN, "one for one in with_further(self.own_tokens(whole), further)"),
        "parts of sequences",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_shows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, right, wrong, plan = FAULTS[name]
    work, own = case("one token", plan)
    assert_alike(by_plan(work, own), plainly(work))
    plant(monkeypatch, function, right, wrong)
    with pytest.raises(AssertionError):
        assert_alike(by_plan(work, own), plainly(work))


def test_what_cannot_be_trained_is_refused(tmp_path: Path) -> None:
    work = workload("llama", layers=2, further_tokens=4, sequence_length=4)
    with pytest.raises(InputError, match=r"further_tokens: 4 tokens predicted .* give at most 3"):
        check_model(work)
    path = tmp_path / "order.txt"
    path.write_text("F0m0 F1m0 B1m0 B0m0 W0m0 W1m0\n")
    plan = Plan(micro_batches=1, stages=(stage(2),), order=str(path))
    work = workload("llama", layers=2, batch=2, further_tokens=1)
    cluster = Cluster(hardware=catalog.hardware("a100-80gb"), nodes=1, gpus_per_node=1)
    with pytest.raises(InputError, match="with further_tokens on a stage with embedding"):
        check_runnable(Job(workload=work, cluster=cluster, plan=plan))
