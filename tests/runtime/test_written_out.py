"""Written-out attention of the executor computes what that of models does, and copies nothing."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from mistlab.plan.plan import Plan  # noqa: E402
from runtime.engine.work.stage_modules import _InPlace  # noqa: E402
from runtime.models.attention import written_out  # noqa: E402
from tests.runtime.ran import Ran  # noqa: E402
from tests.runtime.worlds import (  # noqa: E402
    alone,
    assert_alike,
    by_plan,
    plainly,
    sequences,
    stage,
    workload,
)

COPIES = {"aten::clone", "aten::copy_", "aten::cat", "aten::contiguous"}


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("sizes", [(1, 16, 2, 4), (3, 24, 4, 8), (2, 13, 3, 5)])
def test_it_computes_what_models_do(sizes: tuple[int, int, int, int], is_causal: bool) -> None:
    batch, sequence, heads, channels = sizes
    generator = torch.Generator().manual_seed(0)
    shape = (batch, sequence, 3 * heads, channels)
    qkv = torch.randn(*shape, dtype=torch.float64, generator=generator)
    gradient = torch.randn(*shape[:2], heads, channels, dtype=torch.float64, generator=generator)
    ours, theirs = (qkv.clone().requires_grad_() for _ in range(2))
    operators = Ran()
    with operators:
        mixed = _InPlace.apply(ours, None, 0.0, is_causal)
        mixed.backward(gradient)
    expected = written_out(*theirs.split(heads, dim=2), 0.0, is_causal=is_causal)
    expected.backward(gradient)
    torch.testing.assert_close(mixed, expected, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-12)
    assert not COPIES & set(operators.names)
    assert operators.names.count("aten::baddbmm_") == 6 * batch


@pytest.mark.parametrize(("family", "kv_heads"), [("gpt", 4), ("llama", 4), ("llama", 2)])
def test_a_plan_trains_as_a_plain_run_does(family: str, kv_heads: int) -> None:
    work = replace(workload(family, kv_heads=kv_heads), attention="math")
    plan = Plan(
        micro_batches=2, stages=(stage(tensor_parallel=2, micro_batch=4, checkpointed_layers=1),)
    )
    assert_alike(by_plan(work, plan, progress="lazy"), plainly(work))


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_heads_that_share_keys_are_copied(kv_heads: int) -> None:
    work = replace(workload("gpt", layers=1, batch=2, kv_heads=kv_heads), attention="math")
    executor = alone(work, Plan(micro_batches=1, stages=(stage(1),)), "eager")
    operators = Ran()
    with operators:
        whole = sequences(work, 0)
        executor.iterate([(whole[:, :-1], whole[:, 1:])])
    assert ("aten::cat" in operators.names) == (kv_heads == 2)
