"""Blocks with the parts of today's models train under plans as in one process, and faults show."""

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from mistlab.graph.stage_model import StageModel  # noqa: E402
from mistlab.plan.plan import NO_OFFLOAD as NONE  # noqa: E402
from mistlab.plan.plan import Offload, Plan  # noqa: E402
from mistlab.stages.stage_batch import StageBatch  # noqa: E402
from runtime.checks.collectives.findings import collective_findings  # noqa: E402
from runtime.checks.fake.fake_device import device_findings  # noqa: E402
from runtime.checks.races.judge import Judge  # noqa: E402
from runtime.checks.races.recorded_rank import trace_of  # noqa: E402
from runtime.comm.topology import connected, isolated  # noqa: E402
from runtime.engine.work import optimizer, products, shared_vectors  # noqa: E402
from runtime.models import parallel  # noqa: E402
from runtime.models.latent_attention import LatentAttention  # noqa: E402
from tests.runtime.lone_rank import lone  # noqa: E402
from tests.runtime.planted import plant  # noqa: E402
from tests.runtime.taken_memory import SIZES, assert_predicted, taken_bytes  # noqa: E402
from tests.runtime.worlds import (  # noqa: E402
    CPU,
    MIXED,
    TRAINING,
    assert_alike,
    by_plan,
    plainly,
    ratios,
    stage,
    starting_tensor,
    workload,
)
from tests.sweep import sweep  # noqa: E402

PARTS: dict[str, dict[str, Any]] = {
    "normalised queries and keys": {"qk_norm": True, "kv_heads": 2},
    "sinks": {"sinks": True, "kv_heads": 2},
    "gates": {"attention_gate": True, "qk_norm": True},
    "norms behind both halves": {"post_norms": True},
    "windows in turn": {"window": {"size": 5, "full_every": 2}, "kv_heads": 2},
    "windows and sinks": {"window": {"size": 5, "full_every": 0}, "sinks": True, "heads": 8},
    "latent attention": {
        "head_dim": 12,
        "rotary_fraction": 1 / 3,
        "latent": {"query_rank": 16, "key_rank": 8, "value_dim": 8},
    },
    "latent attention, experts and a dense block": {
        "head_dim": 12,
        "rotary_fraction": 1 / 3,
        "latent": {"key_rank": 8, "value_dim": 8},
        "experts": {"count": 4, "active": 2, "ffn": 24, "shared_ffn": 16, "dense_blocks": 1},
    },
}
STAGES: tuple[dict[str, Any], ...] = (
    {"tensor_parallel": 2},
    {"tensor_parallel": 2, "sequence_parallel": 1, "data_parallel": 2, "micro_batch": 1},
    {"data_parallel": 2, "micro_batch": 1, "zero": 3, "checkpointed_layers": 1},
    {"context_parallel": 2, "context_exchange": 2, "zero": 2, "offload": MIXED},
    {"zero": 0, "offload": MIXED, "checkpointed_layers": 2},
)


def larger(name: str, shape: tuple[int, ...], *, tied: bool) -> Tensor:
    """First weights so large that norms behind products do not divide by rounding errors."""
    tensor = starting_tensor(name, shape, tied=tied)
    return 5 * tensor if len(shape) > 1 else tensor


def cases() -> list[tuple[str, dict[str, Any], str]]:
    """Parts, stages and orders that go together: experts of tensor-parallel ranks alone are divided
    among them."""
    made = []
    for fields in STAGES:
        for part, model in PARTS.items():
            divides = "experts" in model and [*fields] == ["tensor_parallel"]
            made.append((part, {**fields, **({"expert_parallel": 2} if divides else {})}, "zb-h1"))
    return [*made, *((part, fields, "1f1b") for part, fields, _ in made)]


@pytest.mark.parametrize(("part", "fields", "order"), sweep(cases(), first=14))
def test_a_part_trains_as_in_one_process(part: str, fields: dict[str, Any], order: str) -> None:
    work = workload("llama", layers=2, batch=4, **PARTS[part])
    plan = Plan(micro_batches=2, stages=(stage(2, **fields),), order=order)
    assert_alike(by_plan(work, plan, start=larger), plainly(work, start=larger))


def test_norms_add_what_the_model_says() -> None:
    work = workload("llama", layers=2, batch=4, qk_norm=True, norm_epsilon=0.01)
    plan = Plan(micro_batches=2, stages=(stage(2, tensor_parallel=2),))
    assert_alike(by_plan(work, plan), plainly(work))
    usual = replace(work, model=replace(work.model, norm_epsilon=1e-5))
    with pytest.raises(AssertionError):
        assert_alike(by_plan(usual, plan), plainly(work))


@pytest.mark.parametrize("fields", [STAGES[0], STAGES[1]])
def test_no_race_no_hidden_wait_and_no_call_that_hangs(fields: dict[str, Any]) -> None:
    work = workload("llama", layers=2, batch=4, **PARTS["normalised queries and keys"])
    plan = Plan(micro_batches=2, stages=(stage(2, **fields),))
    assert collective_findings(plan, work, clips=True) == ()
    assert Judge(trace_of(work, plan, 0, TRAINING)).findings() == []
    assert device_findings(work, plan, 0, TRAINING) == ()


WIDE: dict[str, dict[str, Any]] = {
    "normalised queries and keys": PARTS["normalised queries and keys"],
    "gates": PARTS["gates"],
    "norms behind both halves": PARTS["norms behind both halves"],
    "windows in turn": {"window": {"size": 40, "full_every": 2}, "kv_heads": 2},
    "latent attention": {
        "head_dim": 96,
        "rotary_fraction": 1 / 3,
        "latent": {"query_rank": 128, "key_rank": 64, "value_dim": 64},
    },
    "latent attention, experts and a dense block": {
        "head_dim": 96,
        "rotary_fraction": 1 / 3,
        "latent": {"key_rank": 64, "value_dim": 64},
        "experts": {"count": 4, "active": 2, "ffn": 192, "shared_ffn": 128, "dense_blocks": 1},
    },
}


# Operands of the head's weight gradient in 32 bits, as are the sums that it is added to. Only a CPU
# copies them: kernels of GPUs add products of 16-bit operands to 32-bit sums.
COPIED_BYTES = 4 * SIZES["sequence_length"] * (SIZES["vocab"] + SIZES["hidden"])


@pytest.mark.parametrize("part", WIDE)
@pytest.mark.parametrize(
    ("checkpointed", "offload"),
    sweep([(2, ratios(0.5, 0.5, 1.0, 0.5)), (4, NONE), (0, NONE)], first=1),
)
def test_an_iteration_takes_what_is_predicted(
    part: str, checkpointed: int, offload: Offload, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(optimizer, "CHUNK", 2**17)
    work = workload("llama", batch=4, precision="bf16", **{**SIZES, **WIDE[part]})
    plan = Plan(micro_batches=2, stages=(stage(checkpointed_layers=checkpointed, offload=offload),))
    (predicted,) = StageModel.of(work).figures(StageBatch.of_plan(plan)).peak_bytes
    taken = taken_bytes(work, plan, isolated(plan, 0, CPU, 0)) - COPIED_BYTES
    assert_predicted(taken, predicted, offload)


@pytest.mark.parametrize(
    "fields",
    sweep(
        [
            {"tensor_parallel": 2, "sequence_parallel": 1},
            {"context_parallel": 2},
            {"context_parallel": 2, "context_exchange": 2},
        ],
        first=1,
    ),
)
def test_latent_attention_of_parts_of_sequences_takes_what_is_predicted(
    fields: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(optimizer, "CHUNK", 2**17)
    work = workload("llama", batch=4, precision="bf16", **{**SIZES, **WIDE["latent attention"]})
    plan = Plan(micro_batches=2, stages=(stage(**fields),))
    (predicted,) = StageModel.of(work).figures(StageBatch.of_plan(plan)).peak_bytes
    assert_predicted(
        taken_bytes(work, plan, connected(plan, 0, lone(0))), predicted, NONE, rel=0.02
    )


def test_norms_of_heads_that_nobody_sums_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_vectors, "parameters_of_own_tokens", lambda *_, **__: ())
    work = workload("llama", layers=2, batch=4, qk_norm=True)
    plan = Plan(micro_batches=2, stages=(stage(2, tensor_parallel=2),))
    with pytest.raises(AssertionError):
        assert_alike(by_plan(work, plan), plainly(work))


def test_sinks_of_other_heads_show(monkeypatch: pytest.MonkeyPatch) -> None:
    own_part = parallel._part

    def swapped(module: Any, leaf: str, tensor: Tensor, rank: int, ranks: int) -> Tensor:
        place = ranks - 1 - rank if leaf == "sinks" else rank
        return own_part(module, leaf, tensor, place, ranks)

    monkeypatch.setattr(parallel, "_part", swapped)
    work = workload("llama", layers=2, batch=4, sinks=True)
    plan = Plan(micro_batches=2, stages=(stage(2, tensor_parallel=2),))
    with pytest.raises(AssertionError):
        assert_alike(by_plan(work, plan), plainly(work))


@pytest.mark.parametrize(
    ("function", "right", "wrong"),
    [
        (
            products._AddingOwnTokens.backward,
            "ranks.all_reduce_(whole)\n            parameter",
            "whole.clone()\n            parameter",
        ),
        (
            LatentAttention.forward,
            "gathered(shared, self.ranks)",
            "gathered(shared, self.ranks).flip(1)",
        ),
    ],
)
def test_latent_vectors_that_ranks_do_not_share_show(
    function: Any, right: str, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, function, right, wrong)
    work = workload("llama", layers=2, batch=4, **PARTS["latent attention"])
    plan = Plan(micro_batches=2, stages=(stage(2, tensor_parallel=2, sequence_parallel=1),))
    with pytest.raises(AssertionError):
        assert_alike(by_plan(work, plan, start=larger), plainly(work, start=larger))
