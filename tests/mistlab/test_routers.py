"""Routers that no model has are refused, by field, value and remedy."""

from typing import Any

import pytest

from mistlab import catalog
from mistlab.core.values import InputError
from mistlab.plan.workload import ModelSpec

PLAIN: dict[str, Any] = {"count": 8, "active": 2, "ffn": 24}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "groups that do not divide": (
        {"groups": 3},
        r"model.experts.router.groups: 3 does not divide count 8: give a divisor of 8",
    ),
    "more groups than there are": (
        {"groups": 2, "active_groups": 4},
        r"router.active_groups: 4 is more than groups 2: give at most 2",
    ),
    "groups of too few experts": (
        {"groups": 8, "best_of_group": 1},
        r"router.active_groups: 1 with 1 experts in each group is too few for 2 active",
    ),
    "more scores than a group has": (
        {"groups": 8, "active_groups": 2},
        r"router.best_of_group: 2 is more than a group's 1 experts: give at most 1",
    ),
    "a rate of nothing": (
        {"correction_rate": 0.1},
        r"correction_rate: 0.1 has no effect, because correction is false: give",
    ),
    "a negative loss": ({"z_loss": -1.0}, r"router.z_loss: .*-1"),
    "a strange score": ({"scores": "relu"}, r"router.scores: .*relu.*softmax"),
}


def model(router: dict[str, Any], **fields: Any) -> ModelSpec:
    experts = {**PLAIN, "router": router, **fields.pop("experts", {})}
    mapping = {"family": "llama", "hidden": 32, "layers": 2, "heads": 4, "experts": experts}
    return ModelSpec.from_mapping({**mapping, **fields}, "model")


@pytest.mark.parametrize("name", WRONG)
def test_a_router_that_cannot_be_is_refused(name: str) -> None:
    router, message = WRONG[name]
    with pytest.raises(InputError, match=message):
        model(router)


def test_a_limit_without_gates_is_refused() -> None:
    with pytest.raises(
        InputError, match=r"experts.gate_limit: 7, but mlp_type mlp has no gates: give mlp_type"
    ):
        model({}, experts={"gate_limit": 7.0}, mlp_type="mlp", activation="gelu_tanh")


def test_scaling_that_cannot_be_is_refused() -> None:
    yarn = {"kind": "yarn", "factor": 4.0}
    with pytest.raises(
        InputError, match=r"rotary_scaling.high: 1 is not above low 2: give a number"
    ):
        model({}, rotary_scaling={**yarn, "high": 1.0, "low": 2.0})
    with pytest.raises(
        InputError, match=r"score_factor: 2, but only latent attention has it: leave it out"
    ):
        model({}, rotary_scaling={**yarn, "score_factor": 2.0})
    longrope = {"kind": "longrope", "factor": 4.0, "short": [1.0, 2.0]}
    with pytest.raises(
        InputError, match=r"rotary_scaling.long: has 0 numbers with kind longrope: give"
    ):
        model({}, rotary_scaling=longrope)
    with pytest.raises(InputError, match=r"rotary_scaling.short: has 2 numbers for \d+ pairs of"):
        model({}, rotary_scaling={**longrope, "long": [1.0, 2.0]})
    with pytest.raises(
        InputError, match=r"rotary_scaling.short: has 2 numbers with kind yarn: leave"
    ):
        model({}, rotary_scaling={**yarn, "short": [1.0, 2.0]})


def test_no_prediction_depends_on_a_router() -> None:
    """Models that differ in it alone are one model to whoever asks for costs."""
    assert model({"scores": "sigmoid", "scale": 2.5}) == model({})
    experts = catalog.model("deepseek-v3").experts
    assert experts is not None
    assert (experts.router.scores, experts.router.groups) == ("sigmoid", 8)
