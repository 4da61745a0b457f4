"""The reasons that the cross-check gives for differences."""

from dataclasses import replace

import pytest

from experiments.agreement import cross_check
from experiments.agreement.cross_check import difference_of, reason_of
from mistlab import catalog
from mistlab.cost.tasks import TaskModel
from mistlab.job.job import Job
from mistlab.machine.cluster import Cluster
from mistlab.plan.plan import Offload, Plan, StagePlan
from tests.workloads import workload_of

WORK = workload_of("gpt3-1.3b", 1024, 16, layers=8)
STAGE = StagePlan(layers=4, data_parallel=2, tensor_parallel=1, micro_batch=2)
JOB = Job(
    workload=WORK,
    cluster=Cluster(hardware=catalog.hardware("a100-40gb"), nodes=1, gpus_per_node=4),
    plan=Plan(micro_batches=4, stages=(STAGE, STAGE)),
)


def test_the_reason_is_the_thing_without_which_the_two_agree(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A closed form that has twice the time of sends, played as usual."""
    predict = cross_check.SymbolicPredictor

    def twice(*, altered: cross_check.Altered, **on: object) -> cross_check.SymbolicPredictor:
        def longer(tasks: TaskModel) -> TaskModel:
            found = altered(tasks)
            return replace(found, send_factor=200 * found.send_factor)

        return predict(altered=longer, **on)  # type: ignore[arg-type]

    monkeypatch.setattr(cross_check, "SymbolicPredictor", twice)
    difference = difference_of(JOB)
    assert difference > 0.1
    reason = reason_of(JOB, difference)
    assert reason.removed == "sends"
    assert abs(reason.difference) < difference / 2


def test_offloading_is_removed_one_kind_at_a_time() -> None:
    offload = Offload(optimizer=1.0, activations=0.5)
    stages = (replace(STAGE, offload=offload),) * 2
    names = [name for name, _, _ in cross_check._altered(replace(JOB.plan, stages=stages))]
    assert names[:2] == ["offloaded optimizer state", "offloaded activations"]
    assert not [name for name in names if name in ("offloaded weights", "the host's time")]


def test_no_reason_is_named_where_nothing_alone_takes_half_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cross_check, "difference_of", lambda *_: 0.06)
    assert str(reason_of(JOB, 0.1)) == "several things together"
    assert reason_of(JOB, 0.2).removed
