"""Adapters beside frozen weights: trained by plans, they lose as a plain run written apart, with
weights of 16, 8 and 4 bits; states, and what blocks keep, take what is predicted."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from mistlab.core.values import InputError  # noqa: E402
from mistlab.graph.stage_model import StageModel  # noqa: E402
from mistlab.job.job import Job  # noqa: E402
from mistlab.plan.plan import Plan  # noqa: E402
from mistlab.plan.workload import Workload  # noqa: E402
from mistlab.stages.stage_batch import StageBatch  # noqa: E402
from runtime.checks.races.judge import Judge  # noqa: E402
from runtime.checks.races.recorded_rank import trace_of  # noqa: E402
from runtime.engine.storage.packing import NF4, Packing  # noqa: E402
from runtime.engine.work.stage_modules import initial_tensor  # noqa: E402
from runtime.runnable import check_runnable  # noqa: E402
from tests.added_rows import CLUSTER  # noqa: E402
from tests.runtime.plain_bits import kept_coarsely, nf4  # noqa: E402
from tests.runtime.test_lean_blocks import kept_bytes, predicted  # noqa: E402
from tests.runtime.test_memory import states_of  # noqa: E402
from tests.runtime.worlds import (  # noqa: E402
    SEED,
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

HALVES = ratios(0.5, 0.5, 0.5, 0.5)
ALONE = Plan(micro_batches=2, stages=(stage(4, micro_batch=4),))
PLANS = {
    "alone": ALONE,
    "gathered layer by layer": Plan(
        micro_batches=2, stages=(stage(data_parallel=2, zero=3, checkpointed_layers=2),)
    ),
    "split tokens": Plan(
        micro_batches=2,
        stages=(stage(tensor_parallel=2, micro_batch=4, sequence_parallel=1, lean_layers=1),),
    ),
    "stages": Plan(
        micro_batches=4,
        stages=(stage(2), stage(2, checkpointed_layers=1, data_parallel=1, offload=HALVES)),
    ),
    "split backward passes": Plan(
        micro_batches=4, order="zb-h1", stages=(stage(2), stage(2, tensor_parallel=2))
    ),
    "all at once": Plan(
        micro_batches=2,
        stages=(stage(tensor_parallel=2, data_parallel=2, zero=3, offload=HALVES),),
    ),
}
WIDE = {"hidden": 256, "ffn": 512, "kv_heads": 2, "layers": 2}
# Adam's step turns on the rounding of gradients that are no larger than epsilon.
SLOWLY = replace(TRAINING, epsilon=1e-4)


def adapted(family: str = "llama", **fields: Any) -> Workload:
    own = {name: fields.pop(name) for name in ("base", "adapter_targets") if name in fields}
    return replace(workload(family, **fields), train="adapters", adapter_rank=4, **own)


def begun_with_adapters(name: str, shape: tuple[int, ...], *, tied: bool) -> Tensor:
    """First weights; those of adapters are so large that what they add shows in losses."""
    return (5 if ".adapter." in name else 1) * starting_tensor_of(name, shape, tied=tied)


def starting_tensor_of(name: str, shape: tuple[int, ...], *, tied: bool) -> Tensor:
    # What begins as zeros has no name of an adapter.
    return starting_tensor(name.replace(".adapter.up", ".adapted.up"), shape, tied=tied)


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_loses_as_a_plain_run(name: str) -> None:
    work = adapted(kv_heads=2)
    expected = plainly(work, SLOWLY, start=begun_with_adapters)
    assert_alike(by_plan(work, PLANS[name], SLOWLY, start=begun_with_adapters), expected)
    assert len(expected.weights) == 4 * 2 * (3 + 1 + 2 + 1)


OTHERS: dict[str, dict[str, Any]] = {
    "gpt": {"biases": True, "tied_embeddings": True, "adapter_targets": "attention"},
    "falcon": {"kv_heads": 2, "tied_embeddings": True},
    "bert": {},
}
# Encoders do not split tokens.
CASES = [
    (family, name)
    for name in ("stages", "all at once", "split tokens")
    for family in OTHERS
    if (family, name) != ("bert", "split tokens")
]


@pytest.mark.parametrize(("family", "name"), sweep(CASES, first=3))
def test_other_families_lose_as_a_plain_run(family: str, name: str) -> None:
    fields = OTHERS[family]
    work = adapted(family, **fields)
    expected = plainly(work, SLOWLY, start=begun_with_adapters)
    assert_alike(by_plan(work, PLANS[name], SLOWLY, start=begun_with_adapters), expected)


@pytest.mark.parametrize("base", ["4bit", "8bit"])
@pytest.mark.parametrize("tensor_parallel", sweep([2, 1], first=1))
def test_weights_of_few_bits_lose_as_dequantised_ones(base: Any, tensor_parallel: int) -> None:
    work = adapted(base=base, **WIDE)
    one = stage(2, tensor_parallel=tensor_parallel, data_parallel=2, zero=3, offload=HALVES)
    expected = plainly(work, SLOWLY, start=begun_with_adapters)
    found = by_plan(work, Plan(micro_batches=2, stages=(one,)), SLOWLY, start=begun_with_adapters)
    assert_alike(found, expected)
    whole = plainly(replace(work, base="16bit"), SLOWLY, start=begun_with_adapters)
    assert abs(whole.losses[0] - expected.losses[0]) > 1e-5


def test_four_bits_are_quantiles_of_a_normal_distribution() -> None:
    np.testing.assert_allclose(NF4, nf4(), atol=3e-7)


@pytest.mark.parametrize("base", ["4bit", "8bit"])
@pytest.mark.parametrize("kind", ["qkv", "down"])
def test_packed_weights_are_their_nearest_values(base: Any, kind: str) -> None:
    # Of random weights drawn anew one may lie halfway between two values, where rounding decides.
    drawn = torch.Generator().manual_seed(1)
    weight = torch.randn(96, 192, generator=drawn) * torch.logspace(-3, 0, 96)[:, None]
    packing = Packing(base=base, shape=(96, 192), by_columns=kind == "down")
    made = packing.unpack(packing.pack(weight), torch.float32)
    expected = kept_coarsely(adapted(base=base), f"mlp.{kind}.weight", weight)
    torch.testing.assert_close(made, expected, rtol=1e-6, atol=1e-9)
    nothing = packing.unpack(packing.pack(torch.zeros(96, 192)), torch.float32)
    assert not nothing.any()


def test_training_begins_at_the_frozen_model() -> None:
    work = adapted()
    plain = plainly(workload("llama"), steps=1, start=initial)
    assert plainly(work, steps=1, start=initial).losses == plain.losses


def initial(name: str, shape: tuple[int, ...], *, tied: bool) -> Tensor:
    return initial_tensor(name, shape, SEED, tied=tied)


STATES = [(3, 2), (0, 1), (0, 2), (2, 1), (2, 2), (3, 1)]


@pytest.mark.parametrize("base", ["16bit", "4bit", "8bit"])
@pytest.mark.parametrize(("zero", "tensor_parallel"), sweep(STATES, first=1))
def test_states_take_what_is_predicted(base: Any, zero: int, tensor_parallel: int) -> None:
    work = adapted(hidden=256, ffn=512, kv_heads=2, precision="bf16", base=base, vocab=512)
    one = stage(
        4,
        data_parallel=2,
        tensor_parallel=tensor_parallel,
        zero=zero,
        offload=ratios(0.5, 0, 0.5, 0),
    )
    plan = Plan(micro_batches=2, stages=(one,))
    figures = StageModel.of(work).figures(StageBatch.of_plan(plan))
    held = states_of(work, plan)[0].held_bytes()
    # Norms are not packed.
    norms = 9 * 256 * 2
    for name, size in held.items():
        expected = getattr(figures, f"{name}_bytes")[0]
        slack = norms if base != "16bit" and name in ("weights", "buffers") else 0
        assert abs(size - expected) <= slack, name


FAMILIES = ("llama", "gpt", "falcon", "bert")
KEPT = [
    (family, targets, attention, again)
    for again in (0, 2)
    for attention in ("flash", "math")
    for targets in ("all", "attention")
    for family in FAMILIES
]


@pytest.mark.parametrize(("family", "targets", "attention", "again"), sweep(KEPT, first=6))
def test_blocks_keep_what_is_predicted_to_the_byte(
    family: str, targets: str, attention: str, again: int
) -> None:
    work = replace(adapted(family, adapter_targets=targets), attention=attention)
    plan = Plan(micro_batches=2, stages=(stage(4, micro_batch=4, checkpointed_layers=again),))
    figures = StageModel.of(work).figures(StageBatch.of_plan(plan))
    # What the head keeps is its input, that of an encoder's product alone, and what it makes.
    of_head = float(figures.logits_bytes[0]) + 4 * 16 * 32 * 4
    assert kept_bytes(work, plan) == predicted(work, plan) + of_head


@pytest.mark.parametrize("name", sweep(["all at once", "stages", "split tokens"], first=1))
def test_frozen_weights_come_and_go_without_races(name: str) -> None:
    work = adapted(base="4bit", hidden=256, ffn=512, kv_heads=2)
    assert Judge(trace_of(work, PLANS[name], 0, TRAINING, serialises=False)).findings() == []


@pytest.mark.parametrize(
    ("fields", "degrees", "message"),
    [
        ({"base": "4bit", "hidden": 96}, {}, "share a scale among 64 .* and hidden 96 of"),
        ({"base": "4bit"}, {}, "workload.base: 4bit weights share a scale among 64"),
        (
            {"base": "4bit", "hidden": 64, "ffn": 128},
            {"tensor_parallel": 2},
            r"plan.stages\[0\].tensor_parallel: 2 ranks would cut groups of 16384",
        ),
        (
            {"experts": {"count": 4, "active": 2, "ffn": 24}},
            {},
            "workload.train: adapters of a model with experts",
        ),
        (
            {"adapter_targets": "attention"},
            {"lean_layers": 1},
            r"plan.stages\[0\].lean_layers: lean blocks save nothing where some linear layers",
        ),
    ],
)
def test_what_is_not_trained_is_refused(fields: Any, degrees: Any, message: str) -> None:
    plan = Plan(micro_batches=4, stages=(stage(4, **degrees),))
    cluster = replace(CLUSTER, gpus_per_node=2)
    with pytest.raises(InputError, match=message):
        check_runnable(Job(workload=adapted(**fields), cluster=cluster, plan=plan))
