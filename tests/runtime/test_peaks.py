"""The bytes that an iteration takes at its most are those that the closed form predicts."""

from collections.abc import Sequence

import pytest

torch = pytest.importorskip("torch")

from mistlab.graph.stage_model import StageModel  # noqa: E402
from mistlab.plan.plan import Offload, Plan  # noqa: E402
from mistlab.stages.stage_batch import StageBatch  # noqa: E402
from runtime.comm.topology import isolated  # noqa: E402
from runtime.engine.work import optimizer  # noqa: E402
from runtime.models import operators  # noqa: E402
from tests.runtime.taken_memory import SIZES, assert_predicted, taken_bytes  # noqa: E402
from tests.runtime.worlds import (  # noqa: E402
    CPU,
    ratios,
    stage,
    workload,
)
from tests.sweep import sweep  # noqa: E402

NONE = ratios(0, 0, 0, 0)
# Ratios, and blocks that are computed again of the four or three of a stage.
CASES: Sequence[tuple[int, Offload]] = (
    (0, NONE),
    (2, NONE),
    (4, ratios(0, 0, 1, 0)),
    (3, ratios(0, 0, 0.37, 0)),
    (0, ratios(0, 0.37, 0, 0)),
    (4, ratios(0.5, 0.5, 1, 0)),
    (0, ratios(0, 0, 0, 0.5)),
    (2, ratios(0.5, 0.5, 1, 0.5)),
)
# The last three have one kind of saving alone, which another case has beside others.
IN_TURN = [CASES[number] for number in (0, 3, 5, 6, 7, 1, 2, 4)]


@pytest.fixture(autouse=True)
def as_large_models_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    # As small beside these models as it is beside those that are trained.
    monkeypatch.setattr(optimizer, "CHUNK", 2**17)


@pytest.mark.parametrize(("checkpointed", "offload"), sweep(IN_TURN, first=5))
@pytest.mark.parametrize("family", sweep(["llama", "gpt", "falcon"], first=1))
def test_an_iteration_takes_what_is_predicted(
    family: str, checkpointed: int, offload: Offload
) -> None:
    work = workload(family, batch=4, **SIZES)
    one = stage(micro_batch=2, checkpointed_layers=checkpointed, offload=offload)
    plan = Plan(micro_batches=2, stages=(one,))
    (predicted,) = StageModel.of(work).figures(StageBatch.of_plan(plan)).peak_bytes
    assert_predicted(taken_bytes(work, plan, isolated(plan, 0, CPU, 0)), predicted, offload)


def test_a_loss_over_a_large_vocabulary_takes_what_is_predicted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The head has the fullest moment, with one tensor of the logits' size."""
    monkeypatch.setattr(operators, "LOGITS_TOGETHER", 2**17)
    work = workload("llama", batch=4, layers=1, **{**SIZES, "hidden": 64, "vocab": 16384})
    plan = Plan(micro_batches=2, stages=(stage(1, micro_batch=2),))
    figures = StageModel.of(work).figures(StageBatch.of_plan(plan))
    taken = taken_bytes(work, plan, isolated(plan, 0, CPU, 0))
    # The gradient of the table, which the product adds to its sum.
    table = 16384 * 64 * 4
    assert taken == pytest.approx(figures.peak_bytes[0] - table, rel=0.01)


@pytest.mark.parametrize("case", sweep([7, 2, 0, 1, 3, 4, 5, 6], first=1))
def test_a_stage_takes_what_is_predicted_for_its_micro_batches_in_flight(case: int) -> None:
    """Not counted are two tensors between stages, and that blocks that will be computed again run
    forward in less."""
    work = workload("gpt", layers=8, batch=8, **SIZES)
    (again, offload), last = CASES[case], CASES[(case + 3) % len(CASES)][1]
    plan = Plan(
        micro_batches=4,
        stages=(
            stage(3, micro_batch=2, checkpointed_layers=min(again, 3), offload=offload),
            stage(3, micro_batch=2, checkpointed_layers=min(again, 3), offload=offload),
            stage(2, micro_batch=2, checkpointed_layers=again % 3, offload=last),
        ),
    )
    predicted = StageModel.of(work).figures(StageBatch.of_plan(plan)).peak_bytes
    for number, own in enumerate(plan.stages):
        taken = taken_bytes(work, plan, isolated(plan, number, CPU, 0))
        assert_predicted(taken, predicted[number], own.offload, rel=0.02)
