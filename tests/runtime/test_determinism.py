"""The strict mode: what it switches, and that no operator of any family is refused in it."""

import os
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from torch.utils import deterministic  # noqa: E402

from mistlab.core.values import InputError  # noqa: E402
from mistlab.plan.plan import Plan  # noqa: E402
from mistlab.plan.workload import Workload  # noqa: E402
from runtime.determinism import FIXED_WORKSPACE, WORKSPACE, strictly_deterministic  # noqa: E402
from runtime.engine.training import Training  # noqa: E402
from runtime.engine.work.stage_modules import initial_tensor  # noqa: E402
from tests.runtime.ran import Ran  # noqa: E402
from tests.runtime.worlds import MIXED, alone, by_plan, run_step, stage, workload  # noqa: E402

# torch.use_deterministic_algorithms lists these as raising, on some device: their names in ATen,
# without what tells variants apart. NLLLoss, put_, EmbeddingBag, cumsum and the like.
RAISING = (
    *("avg_pool3d", "adaptive_avg_pool", "adaptive_max_pool2d", "fractional_max_pool"),
    *("max_unpool", "upsample", "reflection_pad", "nll_loss", "_ctc_loss", "embedding_bag"),
    *("put_", "put.", "histc", "bincount", "median", "kthvalue", "grid_sampler", "cumsum"),
    *("cumprod", "scatter_reduce", "resize_"),
)
PLAN = Plan(micro_batches=2, stages=(stage(offload=MIXED, checkpointed_layers=2, zero=0),))
CLIPPING = Training(learning_rate=1e-4, epsilon=1e-6, clip_norm=0.3)


def cases() -> list[Workload]:
    plain = [workload(family, batch=4, kv_heads=2) for family in ("gpt", "llama", "falcon")]
    return [
        *plain,
        *(replace(work, attention="math") for work in plain),
        workload("gpt", batch=4, tied_embeddings=True, biases=True, vocab=97),
    ]


@pytest.mark.parametrize("work", cases(), ids=lambda work: f"{work.model.family} {work.attention}")
def test_no_operator_is_one_that_is_refused(work: Workload) -> None:
    executor = alone(work, PLAN, "random", CLIPPING)
    with Ran() as seen:
        for step in range(2):
            run_step(executor, work, executor.connections, step)
    names = {str(one).removeprefix("aten.") for one in seen.operators}
    # Something of the forward, of the backward and of the step was seen.
    assert {"embedding_dense_backward.default", "_fused_adamw_.default"} <= names
    assert not [name for name in names if name.startswith(RAISING)]


def test_strict_runs_have_the_losses_of_others() -> None:
    for work in cases():
        plain = by_plan(work, PLAN, CLIPPING)
        with strictly_deterministic():
            strict = by_plan(work, PLAN, CLIPPING)
        assert strict.losses == plain.losses


def test_the_mode_ends_and_fills_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WORKSPACE, raising=False)
    before = deterministic.fill_uninitialized_memory
    with strictly_deterministic():
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert os.environ[WORKSPACE] == FIXED_WORKSPACE
        assert not deterministic.fill_uninitialized_memory
    assert not torch.are_deterministic_algorithms_enabled()
    assert deterministic.fill_uninitialized_memory == before


def test_a_process_whose_gpu_is_in_use_already_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.delenv(WORKSPACE, raising=False)
    words = f"this process used its GPU before {WORKSPACE} was set"
    with pytest.raises(InputError, match=words), strictly_deterministic():
        pass
    monkeypatch.setenv(WORKSPACE, FIXED_WORKSPACE)
    with strictly_deterministic():
        pass


def test_every_seed_draws_other_weights() -> None:
    """Of a host too, whose generator takes only the lowest 32 bits of its seed."""
    names = ("embedding.weight", "blocks.0.attention.weight")
    drawn = [
        initial_tensor(name, (4, 4), seed, tied=False)
        for name in names
        for seed in (0, 1, 2, 2**31 - 1)
    ]
    again = initial_tensor(names[0], (4, 4), 1, tied=False)
    assert torch.equal(drawn[1], again)
    assert len({tuple(tensor.flatten().tolist()) for tensor in drawn}) == len(drawn)
