"""A server that waits for no rank clips, scales and leaves out the gradients of each rank alone."""

from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from mistlab.core.values import InputError  # noqa: E402
from mistlab.job.job import Job  # noqa: E402
from mistlab.plan.plan import Plan  # noqa: E402
from runtime.checks.collectives.calls import calls_of  # noqa: E402
from runtime.checks.collectives.findings import findings_of  # noqa: E402
from runtime.engine.executor import Executor  # noqa: E402
from runtime.engine.work.stage_modules import TABLE, TIED  # noqa: E402
from runtime.runnable import check_runnable  # noqa: E402
from tests.runtime.drawn_runs import CLUSTER  # noqa: E402
from tests.runtime.plain_reductions import PlainWorkers  # noqa: E402
from tests.runtime.test_reductions_train import (  # noqa: E402
    Ran,
    assert_weights,
    plan_of,
    read,
    work_of,
    written,
)
from tests.runtime.worlds import TOLERANCE, TRAINING, stage, whole_weights  # noqa: E402
from tests.sweep import sweep  # noqa: E402

TURNS, FEW = "server:asynchronous=true", "server:asynchronous=true,compressor=top_k,share=0.3"
# Between the norms of ranks' gradients, so that some are clipped.
CLIP_NORM = 0.77
SCALED = replace(TRAINING, clip_norm=CLIP_NORM, loss_scale=2.0**8)


def overflowing(patch: pytest.MonkeyPatch, *, rank: int, step: int) -> None:
    """Let the gradients of a data-parallel rank overflow in a step."""
    share = Executor._share

    def poisoned(own: Executor, weight: float = 1.0) -> Tensor:
        overflows = (own.connections.place.data, own.steps) == (rank, step)
        return share(own, weight) * (float("inf") if overflows else 1.0)

    patch.setattr(Executor, "_share", poisoned)


@pytest.mark.parametrize(("text", "rank"), sweep([(TURNS, 1), (FEW, 2), (TURNS, 0)], first=1))
def test_each_rank_is_clipped_and_left_out_by_itself(
    text: str, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, plan = work_of(text), plan_of(3)
    overflowing(monkeypatch, rank=rank, step=1)
    ran = Ran(work, plan, SCALED, steps=4)
    workers = PlainWorkers(work, 3, plan.micro_batches, TRAINING)
    norms, all_norms = [], list[float]()
    for step in range(4):
        workers.gradients(step)
        left_out = [rank] if step == 1 else []
        every = workers.clip(CLIP_NORM)
        all_norms += every
        norms.append(np.mean([one for worker, one in enumerate(every) if worker not in left_out]))
        workers.serve(step, ran.layers, left_out=left_out)
    losses = [report.loss for report in ran.reports[0]]
    np.testing.assert_allclose(losses, workers.losses, rtol=TOLERANCE)
    told = [report.gradient_norm for report in ran.reports[0]]
    np.testing.assert_allclose(told, norms, rtol=1e-4)
    assert min(all_norms) < CLIP_NORM < max(all_norms)
    assert not any(report.skipped for report in ran.reports[0])
    scales = [own.scaling.scale.item() for own in ran.executors]
    assert scales == [2.0**7 if number == rank else 2.0**8 for number in range(3)]
    for number, own in enumerate(ran.executors):
        assert_weights(whole_weights(work, [own]), workers.weights[number])


def test_a_rank_is_clipped_by_the_norm_of_all_of_its_stages() -> None:
    """A rank's gradients lie on tensor-parallel ranks of two stages."""
    work = work_of(TURNS, batch=16)
    parts = stage(1, data_parallel=2, micro_batch=4, tensor_parallel=2)
    plan = Plan(micro_batches=2, stages=(parts, replace(parts, tensor_parallel=1)))
    training = replace(TRAINING, clip_norm=CLIP_NORM)
    ran = Ran(work, plan, training, steps=3)
    workers = PlainWorkers(work, 2, plan.micro_batches, TRAINING)
    # Without a compressor all names may be those of one layer.
    ends = [0, *accumulate(one.numel() for one in workers.shared.values())]
    names = {0: (dict(zip(workers.shared, ends, strict=False)), ends[-1])}
    for step in range(3):
        workers.gradients(step)
        workers.clip(CLIP_NORM)
        workers.serve(step, names)
    of_server = [own for own in ran.executors if own.connections.place.data == 0]
    assert_weights(whole_weights(work, of_server), workers.weights[0])
    assert findings_of(calls_of(plan, work, clips=True)) == ()


@pytest.mark.parametrize("text", [TURNS, "server"])
def test_copies_of_a_tied_table_on_two_stages_drift_apart_at_a_server_that_waits_for_none(
    text: str,
) -> None:
    """The reason why such plans are refused; gradients of all ranks keep the copies equal."""
    work, own = work_of(text, batch=8, tied_embeddings=True), stage(1, data_parallel=2)
    plan = Plan(micro_batches=2, stages=(replace(own, micro_batch=2),) * 2)
    ran = Ran(work, plan, steps=3)
    first, last = ran.executors[0], ran.executors[2]
    tables = [whole_weights(work, [first])[TABLE], whole_weights(work, [last])[TIED]]
    apart = (tables[0] - tables[1]).norm() / tables[0].norm()
    if work.reduction.asynchronous:
        assert apart > 1e-3
        with pytest.raises(InputError, match=r"tied_embeddings: .* give tied_embeddings: false"):
            check_runnable(Job(workload=work, cluster=CLUSTER, plan=plan))
    else:
        assert apart == 0
        check_runnable(Job(workload=work, cluster=CLUSTER, plan=plan))


def test_scales_and_counts_of_ranks_go_on_from_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, plan = work_of(TURNS), plan_of(2)
    overflowing(monkeypatch, rank=1, step=1)
    whole = Ran(work, plan, SCALED, steps=4)
    ran = Ran(work, plan, SCALED, steps=2)
    path = written(ran, tmp_path, monkeypatch)
    again = Ran(work, plan, SCALED, steps=2, begin=lambda own: read(own, path))
    for own, expected in zip(again.executors, whole.executors, strict=True):
        assert torch.equal(own.counts(), expected.counts())
        for name, tensor in whole_weights(work, [own]).items():
            assert torch.equal(tensor, whole_weights(work, [expected])[name]), name
