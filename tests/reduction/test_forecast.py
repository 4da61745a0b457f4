"""Convergence beside plans: bounds' terms, published laws of outer steps, and what predict says."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from experiments import predict
from mistlab.reduction.calculators import OuterClock
from mistlab.reduction.convergence import Noise
from mistlab.reduction.forecast import GOAL, Forecast
from mistlab.reduction.reduction_costs import PLAIN_REDUCTION, Reduction

OUTER = Reduction(kind="outer", every=30, replicas=4)
BILLIONS_8 = 8_030_261_248


def forecast(how: Reduction = OUTER, ranks: int = 4, step_s: float = 2.0) -> Forecast:
    return Forecast(
        how=how, ranks=ranks, parameters=BILLIONS_8, tokens=2**20, step_s=step_s, plain_step_s=3.0
    )


def test_terms_of_a_bound_are_the_goal_together() -> None:
    for how in (OUTER, Reduction(kind="gossip", topology="ring"), Reduction(kind="server")):
        found = forecast(how).mapping()
        assert found["linear_term"] == pytest.approx(1 / math.sqrt(4 * found["steps"]))
        assert found["linear_term"] + found["transient_term"] == pytest.approx(GOAL)
        assert found["hours"] == pytest.approx(found["steps"] * 2.0 / 3600)
    plain = forecast(PLAIN_REDUCTION).mapping()
    assert plain["steps"] == plain["plain_steps"]
    late = forecast(Reduction(kind="server", asynchronous=True)).mapping()
    assert plain["steps"] < late["steps"] < 4 * plain["steps"]
    trimmed = forecast(Reduction(trimmed=1)).mapping()
    assert trimmed["linear_term"] == pytest.approx(1 / math.sqrt(2 * trimmed["steps"]))
    # Without noise a single step of 1 / goal remains.
    assert Noise(noise=0.0).steps_to(0.01, PLAIN_REDUCTION, 4, 1000) == pytest.approx(100)


def test_losses_of_outer_steps_are_those_of_the_published_laws() -> None:
    found = forecast().mapping()
    assert found["loss"] == pytest.approx(19.762 * BILLIONS_8**-0.0992)
    assert found["plain_loss"] == pytest.approx(18.129 * BILLIONS_8**-0.0953)
    steps = 20 * BILLIONS_8 / 2**20
    assert found["loss_hours"] == pytest.approx(steps * 2.0 / 3600)
    assert found["plain_loss_hours"] == pytest.approx(steps * 3.0 / 3600)
    clock = OuterClock(parameters=BILLIONS_8, nodes=4, bits_per_s=1.0, every=30, step_s=2.0)
    assert found["token_worth"] == clock.worth
    joint = forecast(ranks=5).mapping()
    assert joint["loss"] == pytest.approx(19.226 * BILLIONS_8**-0.0985 * 5**0.0116)
    assert joint["replicas"] == 5
    # The law of all numbers of replicas is within 1 % of those of one number each.
    laws = [forecast(ranks=ranks).mapping()["loss"] for ranks in (4, 5, 6, 8, 9, 64)]
    assert laws[:4] == pytest.approx([joint["loss"]] * 4, rel=0.01)
    assert laws[-2] < laws[-1] < 1.05 * laws[0]


@pytest.mark.parametrize("reduction", [None, {"kind": "local", "every": 4}])
def test_predict_says_convergence_of_reductions_alone(
    reduction: dict[str, Any] | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = {} if reduction is None else {"reduction": reduction}
    plan = tmp_path / "plan.yaml"
    stage = {"layers": 32, "data_parallel": 4, "tensor_parallel": 1, "micro_batch": 1}
    content = {
        "workload": {
            "model": "gpt3-1.3b",
            "sequence_length": 2048,
            "global_batch": 8,
            "attention": "flash",
            "precision": "fp16",
            **own,
        },
        "cluster": {"hardware": "h100-80gb", "nodes": 1, "gpus_per_node": 4},
        "plan": {"micro_batches": 2, "stages": [{**stage, "layers": 24}]},
    }
    plan.write_text(yaml.safe_dump(content))
    assert predict.main([str(plan), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert ("convergence" in answer) == (reduction is not None)
    if reduction is not None:
        assert answer["convergence"]["steps"] > answer["convergence"]["plain_steps"]
        assert answer["convergence"]["assumptions"]
        assert predict.main([str(plan)]) == 0
        assert "sigma / sqrt(n T)" in capsys.readouterr().out
