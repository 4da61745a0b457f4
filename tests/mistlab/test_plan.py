from typing import Any

import pytest

from mistlab.core.values import FieldError, from_mapping
from mistlab.plan.plan import Offload, Plan, StagePlan

STAGE: dict[str, Any] = {
    "layers": 4,
    "data_parallel": 2,
    "tensor_parallel": 4,
    "micro_batch": 1,
}


def test_a_stage_saves_no_memory_unless_told() -> None:
    stage = StagePlan(**STAGE)
    assert (stage.zero, stage.checkpointed_layers) == (0, 0)
    assert stage.offload == Offload(weights=0, gradients=0, optimizer=0, activations=0)


def test_a_plan_counts_its_stages() -> None:
    plan = Plan(micro_batches=2, stages=(StagePlan(**STAGE), StagePlan(**{**STAGE, "layers": 3})))
    assert (plan.num_stages, plan.num_gpus, plan.layers) == (2, 16, 7)


def test_the_recomputed_share_counts_half_of_blocks_that_recompute_every_second_gemm() -> None:
    whole = StagePlan(**STAGE, checkpointed_layers=1)
    mixed = StagePlan(**STAGE, checkpointed_layers=1, products_recomputed_layers=2)
    # Attention's core has no parameters, which the formula 8TP counts.
    core = StagePlan(**STAGE, core_recomputed_layers=4)
    for stages, share in (((whole,), 1 / 4), ((mixed,), 2 / 4), ((whole, mixed, core), 3 / 12)):
        assert Plan(micro_batches=1, stages=stages).recomputed_share == share


@pytest.mark.parametrize("engine", ["megatron", "deepspeed"])
def test_baselines_may_leave_communication_exposed(engine: Any) -> None:
    stages = (StagePlan(**STAGE),)
    plan = Plan(engine=engine, micro_batches=1, stages=stages, overlap_communication=False)
    assert not plan.overlap_communication
    assert Plan(engine=engine, micro_batches=1, stages=stages).overlap_communication


BAD = {
    "no stages": ({"stages": []}, "stages: is empty: give at least one stage"),
    "no micro-batches": ({"micro_batches": 0}, "micro_batches: 0 is too small: give"),
    "unknown engine": ({"engine": "mislab"}, "engine: 'mislab' is unknown: did you mean 'mistlab'"),
    "exposed mistlab": (
        {"overlap_communication": False},
        (
            "overlap_communication: false, but engine mistlab always overlaps communication: "
            "leave it out"
        ),
    ),
    "too many checkpoints": (
        {"stages": [{**STAGE, "checkpointed_layers": 5}]},
        "stages[0].checkpointed_layers: 5 is more than the stage's 4 layers: give at most 4",
    ),
    "ZeRO 4": (
        {"stages": [{**STAGE, "zero": 4}]},
        "stages[0].zero: 4 is too large: give a whole number between 0 and 3",
    ),
    "bool for ZeRO": (
        {"stages": [{**STAGE, "zero": True}]},
        "stages[0].zero: true is not a whole number: give",
    ),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD.keys())
def test_a_bad_plan_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(FieldError) as caught:
        from_mapping(Plan, {"micro_batches": 1, "stages": [STAGE], **change})
    assert str(caught.value).startswith(message)
