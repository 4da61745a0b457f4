"""Plans whose ranks communicate less are sanitized, and faults in their averages are found."""

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from mistlab.plan.model_parts import Experts
from mistlab.plan.plan import Plan
from mistlab.plan.workload import Workload
from mistlab.reduction.reduction_text import reduction_named
from runtime.checks.collectives import noted_calls
from runtime.checks.collectives.calls import calls_of
from runtime.checks.collectives.findings import CollectiveFinding, collective_findings
from runtime.checks.fake.fake_device import device_findings, register
from runtime.checks.races.judge import Judge
from runtime.checks.races.recorded_rank import HostCopies, trace_of
from runtime.checks.sanitizer import small, unlike_ranks
from runtime.comm import replicas
from runtime.comm.processes import ProcessGroup
from runtime.engine.executor import Batches, Executor
from runtime.engine.work.gradient_averages import GradientAverages
from runtime.engine.work.weight_averages import WeightAverages
from tests.runtime.drawn_runs import REDUCTIONS, reducing_run
from tests.runtime.planted import plant
from tests.runtime.worlds import TRAINING, stage, workload
from tests.sweep import sweep

GOSSIP, LOCAL = "gossip", "local:every=3"
OUTER = "outer:every=4,fragments=2,replicas=2"
DOUBLE = "server:compressor=top_k,share=0.1,feedback=double"
MEMORY = "all_reduce:compressor=top_k,share=0.1,feedback=memory"
TURNS = "server:asynchronous=true"
# Of a checkpoint: steps, steps done, loss scale and steps since it grew.
COUNTS = torch.tensor([2.0, 2.0, 1.0, 0.0], dtype=torch.float64)


@pytest.fixture(autouse=True, scope="module")
def _device() -> None:
    """Autograd has a thread for the device if it is there at the first backward pass."""
    register()


def run_of(how: str, **fields: Any) -> tuple[Workload, Plan]:
    """A stage of four data-parallel ranks, which average in a way."""
    work = replace(workload("llama", layers=1, batch=8), reduction=reduction_named(how))
    own = stage(1, data_parallel=4, micro_batch=1, **fields)
    return work, Plan(micro_batches=2, stages=(own,))


def found(how: str, **fields: Any) -> tuple[CollectiveFinding, ...]:
    work, plan = run_of(how, **fields)
    return collective_findings(plan, work)


def races(how: str) -> list[str]:
    work, plan = run_of(how)
    return [str(one) for one in Judge(trace_of(work, plan, 0, TRAINING)).findings()]


# Each kind of reduction, one with any order of passes, experts and parts of sequences.
@pytest.mark.parametrize("seed", sweep((12, *range(12), *range(13, len(REDUCTIONS))), first=1))
def test_nothing_is_found_in_a_plan_of_any_kind(seed: int) -> None:
    """The first, and every fourth, with moments of 8 bits."""
    run = reducing_run(seed)
    if seed % 4 == 0:
        run = replace(run, work=replace(run.work, optimizer="adamw-8bit"))
    assert run.collectives() == {}
    rank = run.ranks[seed % len(run.ranks)]
    assert run.races(rank) == []
    assert run.waits(rank) == []


@pytest.mark.parametrize("how", REDUCTIONS)
def test_no_rank_of_two_stages_hangs(how: str) -> None:
    work, _ = run_of(how)
    unlike = stage(2, data_parallel=4, micro_batch=1, tensor_parallel=2)
    plan = Plan(micro_batches=2, stages=(unlike, stage(2, data_parallel=4, micro_batch=1)))
    work = replace(work, model=replace(work.model, layers=4))
    assert collective_findings(plan, work) == ()


WRONG_NEIGHBOUR = (
    WeightAverages._mix,
    "sends = [(weights, (rank - offset) % size) for offset in offsets]",
    "sends = [(weights, (rank + offset) % size) for offset in offsets]",
)
NOT_COMPRESSED = (
    GradientAverages._answered,
    "sent = torch.cat(messages) if compresses else mean[parts[group.rank]]",
    "sent = mean[parts[group.rank]]",
)
OWN_ROUNDS = (
    GradientAverages._sent,
    "for turn in range(self._rounds):\n            sent_here, of_all",
    "for turn in range(self._rounds + self.group.rank % 2):\n            sent_here, of_all",
)
TOO_MANY = (
    WeightAverages._averaged,
    "finished(self.peers.all_reduce(change))",
    "finished(self.peers.all_reduce(change[: 9 + self.peers.rank]))",
)
NOT_DUE = (
    WeightAverages.is_due,
    "return step % self.how.every == 0",
    "return step % self.how.every == 0 and self.peers.rank != 2",
)


@pytest.mark.parametrize(
    ("how", "fault", "trouble", "words"),
    [
        (GOSSIP, WRONG_NEIGHBOUR, "messages", "which expects nothing"),
        (DOUBLE, NOT_COMPRESSED, "messages", "at a time to rank 1"),
        (MEMORY, OWN_ROUNDS, "order", "all_gather of gradients of layer"),
        (OUTER, TOO_MANY, "order", "all_reduce of"),
        (LOCAL, NOT_DUE, "order", "losses of replicas"),
    ],
)
def test_a_fault_in_an_average_is_found(
    how: str, fault: Any, trouble: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert found(how) == ()
    plant(monkeypatch, *fault)
    told = [one for one in found(how) if one.trouble == trouble]
    assert words in str(told[0])


def test_a_group_of_shards_in_place_of_replicas_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    connect = replicas.connected_replicas

    def by_shards(*given: Any, **options: Any) -> Any:
        made = connect(*given, **options)
        return replace(made, peers=made.sharers[0].reduce)

    monkeypatch.setattr(noted_calls, "connected_replicas", by_shards)
    one = next(one for one in found(OUTER, zero=2) if one.trouble == "groups")
    assert "reduce of ranks 0, 1 average weights of rank 0 in each replica" in str(one)
    assert "which ranks 0, 2 hold" in str(one)


def test_another_order_of_groups_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(
        monkeypatch,
        replicas.connected_replicas,
        "for inner_rank in range(replicas.plan.num_gpus):",
        "for inner_rank in range(replicas.plan.num_gpus)[:: 1 - 2 * (rank % 2)]:",
    )
    one = next(one for one in found(OUTER) if one.trouble == "groups")
    assert "let all ranks make all groups in one order" in str(one)


NO_WAIT = ("        for work in works:\n            work.wait()", "        works = []\n")


@pytest.mark.parametrize("how", [GOSSIP, DOUBLE, TURNS])
def test_a_missing_wait_for_messages_is_a_race(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert races(how) == []
    plant(monkeypatch, ProcessGroup.exchange, *NO_WAIT)
    told = races(how)
    assert any("NCCL's" in one and "missing: a wait of" in one for one in told)


def test_a_server_that_waits_for_norms_is_checked_behind_the_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work, plan = run_of(TURNS)
    clipped = replace(TRAINING, clip_norm=1.0, loss_scale=2.0**8)
    assert collective_findings(plan, work, clips=True) == ()
    assert device_findings(work, plan, 1, clipped) == ()
    assert not Judge(trace_of(work, plan, 1, clipped)).findings()
    plant(
        monkeypatch,
        Executor.report,
        "        self.streams.synchronize()\n        self._average_weights()\n",
        "        self._average_weights()\n",
    )
    assert Judge(trace_of(work, plan, 1, clipped)).findings()
    steps = calls_of(plan, work, clips=True).training[1].steps
    served = {step.task for step in steps for call in step.calls if call.kind == "exchange"}
    assert served == {"server behind iteration 1", "server behind iteration 2"}


def test_an_average_before_the_iteration_has_ended_is_a_race(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(
        monkeypatch,
        Executor.report,
        "        self.streams.synchronize()\n        self._average_weights()\n",
        "        self._average_weights()\n",
    )
    assert any("all_reduce" in one or "report (step)" in one for one in races(LOCAL))


def on_two_stages(how: str, **fields: Any) -> tuple[Workload, Plan]:
    """Two stages, of which the second receives before it computes."""
    own = stage(1, data_parallel=2, micro_batch=1)
    work = workload("llama", layers=2, batch=4, **fields)
    return replace(work, reduction=reduction_named(how)), Plan(micro_batches=2, stages=(own, own))


def test_states_of_outer_steps_are_there_before_another_lane_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work, plan = on_two_stages("outer:every=2")
    assert Judge(trace_of(work, plan, 2, TRAINING)).findings() == []
    plant(
        monkeypatch,
        Executor.iterate,
        "so the host does.\n            self.streams.synchronize()\n",
        "so the host does.\n            pass\n",
    )
    told = Judge(trace_of(work, plan, 2, TRAINING)).findings()
    assert {one.kind for one in told} == {"used before allocated"}
    assert {one.second.actor for one in told} == {"NCCL's forward 0"}


def test_states_of_a_checkpoint_are_there_before_another_lane_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def resumed(executor: Executor, batches: Batches) -> None:
        executor.set_counts(COUNTS)
        executor.iterate(batches)
        executor.report()

    work, plan = on_two_stages("all_reduce")
    assert Judge(trace_of(work, plan, 2, TRAINING, run=resumed)).findings() == []
    plant(
        monkeypatch,
        Executor.set_counts,
        "fill_(int(good_steps))\n        self.streams.synchronize()\n",
        "fill_(int(good_steps))\n\n",
    )
    assert Judge(trace_of(work, plan, 2, TRAINING, run=resumed)).findings()


def test_a_report_of_lopsided_routers_is_worked_out_on_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On the CPU its copy of counts is none, and the maximum of each block would be compute's."""
    experts = Experts(count=4, active=1, ffn=16)
    work, plan = on_two_stages(GOSSIP, experts=experts)
    assert Judge(trace_of(work, plan, 2, TRAINING)).findings() == []
    plant(
        monkeypatch,
        HostCopies.__torch_function__,
        "if func in _BROUGHT_TO_HOST and",
        "if func is None and",
    )
    told = Judge(trace_of(work, plan, 2, TRAINING)).findings()
    assert {one.kind for one in told} == {"used before allocated"}


def test_a_value_that_a_compressor_reads_makes_the_host_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(
        monkeypatch,
        GradientAverages._gathered,
        "        every = message.new_empty(group.size * message.numel())\n        yield",
        "        every = message.new_empty(group.size * int(message.sum()))\n        yield",
    )
    work, plan = run_of(MEMORY)
    assert "value read" in {one.kind for one in device_findings(work, plan, 0, TRAINING)}


def test_a_small_plan_keeps_fragments_and_shortens_their_cycle() -> None:
    work, plan = run_of("outer:every=500,fragments=5,delay=30,replicas=2")
    made = small(work, plan)
    how = made.workload.reduction
    assert (how.every, how.fragments, how.delay, how.replicas) == (10, 5, 1, 2)
    assert any("cycles of 10 steps stand for 500" in words for words in made.left_out)


@pytest.mark.parametrize(
    ("how", "ranks"),
    [
        ("server:shards=2", {0: 1, 1: 1, 2: 2}),
        (GOSSIP, {0: 4}),
        (OUTER, {0: 2, 1: 2}),
        ("all_reduce:trimmed=1,liars=2", {0: 1, 1: 2, 2: 1}),
    ],
)
def test_servers_liars_and_one_replica_are_kinds_of_ranks(how: str, ranks: dict[int, int]) -> None:
    work, plan = run_of(how)
    told = {one.rank: one.stands_for for one in unlike_ranks(plan, work.reduction)}
    assert told == ranks
