"""Models and precisions that only predictions know are refused, and not trained as others."""

from dataclasses import replace
from typing import Any, get_args

import pytest

pytest.importorskip("torch")

from benchmarks.trained_models import PAGE, page
from mistlab import catalog
from mistlab.core.values import InputError
from mistlab.engines.engine import Optimizer
from mistlab.plan.plan import Plan, StagePlan
from mistlab.plan.workload import ModelSpec, Workload
from mistlab.reduction.reduction_text import reduction_named
from runtime.baselines.baseline import FirstWeights
from runtime.engine.training import Training
from runtime.engine.work.layer_passes import layer_treatments
from runtime.runnable import _check_reduction, check_model, check_norms, trains_here


def workload(model: ModelSpec) -> Workload:
    return Workload(
        model=model, sequence_length=128, global_batch=8, attention="flash", precision="bf16"
    )


@pytest.mark.parametrize("name", catalog.model_names())
def test_models_are_trained_or_refused_by_what_they_have(name: str) -> None:
    work = workload(catalog.model(name))
    model = work.model
    if model.dropped_shares:
        work = replace(work, attention="math")
    if set(model.pattern) <= {"A", "D"}:
        check_model(work)
        assert trains_here(model) == ""
        return
    with pytest.raises(InputError, match="can be predicted but not trained yet: "):
        check_model(work)
    assert trains_here(model)


def test_the_page_of_trained_models_is_made_of_the_catalogue() -> None:
    """Who has mended one: ``python -m benchmarks.trained_models``."""
    assert PAGE.read_text(encoding="utf-8") == page()


def test_a_way_to_train_that_is_not_there_is_refused() -> None:
    """It would be trained in the usual way, without a word."""
    work = workload(catalog.model("llama-7b"))
    with pytest.raises(InputError, match=r"workload.states: 16bit can be predicted but not train"):
        check_model(replace(work, states="16bit"))
    for optimizer in get_args(Optimizer):
        check_model(replace(work, optimizer=optimizer))


@pytest.mark.parametrize(
    "change", [{"train": "adapters"}, {"loss": "chunked"}, {"optimizer": "adamw-8bit"}]
)
def test_other_systems_train_in_the_usual_way_alone(change: dict[str, Any]) -> None:
    ((name, value),) = change.items()
    work = replace(workload(catalog.model("llama-7b")), **change)
    with pytest.raises(InputError, match=f"workload.{name}: {value} can be predicted, but .*"):
        FirstWeights(work, seed=0)


def test_a_precision_that_cannot_be_trained_is_named() -> None:
    work = workload(catalog.model("llama-7b"))
    for precision in ("fp8", "fp4"):
        with pytest.raises(InputError, match=f"precision: {precision} can be predicted"):
            check_model(replace(work, precision=precision))


def test_other_systems_train_no_plain_blocks_in_the_place_of_others() -> None:
    with pytest.raises(InputError, match="blocks of mixtral-8x7b can be predicted"):
        FirstWeights(workload(catalog.model("mixtral-8x7b")), seed=0)


@pytest.mark.parametrize("name", ["core_recomputed_layers", "products_recomputed_layers"])
def test_blocks_that_cannot_be_trained_are_refused_with_what_to_give(name: str) -> None:
    stage = StagePlan(layers=2, data_parallel=1, tensor_parallel=1, micro_batch=1, **{name: 1})
    words = "give 0, and as many more checkpointed_layers, which keep less"
    with pytest.raises(InputError, match=f"{name}: .*{words}"):
        layer_treatments(stage, range(2))


@pytest.mark.parametrize(
    ("reduction", "precision", "context", "words"),
    [
        ("server:asynchronous=true,shards=2", "bf16", 1, "reduction.shards: 2 asynchronous"),
        ("server:asynchronous=true", "bf16", 2, r"stages\[0\].context_parallel: 2 ranks"),
    ],
)
def test_what_a_server_that_waits_for_no_rank_cannot_know_is_refused(
    reduction: str, precision: Any, context: int, words: str
) -> None:
    how = reduction_named(reduction)
    plain = workload(catalog.model("llama-7b"))
    work = replace(plain, precision=precision, reduction=how)
    fields = {"layers": 32, "data_parallel": 2, "tensor_parallel": 1, "micro_batch": 1}
    plan = Plan(micro_batches=4, stages=(StagePlan(**fields, context_parallel=context),))
    with pytest.raises(InputError, match=f"{words}.*give"):
        _check_reduction(plan, work)
    _check_reduction(plan, plain)


def test_norms_of_ranks_without_gradients_of_their_own_are_refused() -> None:
    how = reduction_named("server:asynchronous=true")
    work = replace(workload(catalog.model("llama-7b")), reduction=how)
    fields = {"layers": 16, "tensor_parallel": 1, "micro_batch": 1}
    stages = [StagePlan(**fields, data_parallel=ranks) for ranks in (2, 4)]
    unlike = Plan(micro_batches=4, stages=tuple(stages))
    asked_by = Training(clip_norm=1.0).norm_option
    with pytest.raises(InputError, match=r"--clip-norm: .*stages\[1\].data_parallel is 4.*leave"):
        check_norms(unlike, work, asked_by)
    check_norms(unlike, work, "")
    check_norms(unlike, replace(work, reduction=reduction_named("server")), asked_by)


@pytest.mark.parametrize(
    ("degrees", "is_trained"),
    [
        ({"expert_parallel": 2}, False),
        ({"tensor_parallel": 2}, False),
        ({"tensor_parallel": 2, "expert_parallel": 2, "expert_tensor_parallel": 2}, False),
        ({"tensor_parallel": 2, "expert_parallel": 2}, True),
        ({"tensor_parallel": 2, "expert_tensor_parallel": 2}, True),
        ({}, True),
    ],
)
def test_norms_of_ranks_that_share_experts_are_refused(
    degrees: dict[str, int], *, is_trained: bool
) -> None:
    how = reduction_named("server:asynchronous=true")
    work = replace(workload(catalog.model("mixtral-8x7b")), reduction=how)
    fields = {"layers": 32, "tensor_parallel": 1, "micro_batch": 1, "data_parallel": 4}
    plan = Plan(micro_batches=4, stages=(StagePlan(**fields | degrees),))
    if is_trained:
        check_norms(plan, work, "--clip-norm")
    else:
        with pytest.raises(InputError, match=r"--clip-norm: .*all experts.*plan.stages\[0\]"):
            check_norms(plan, work, "--clip-norm")
    check_norms(plan, replace(work, model=catalog.model("llama-7b")), "--clip-norm")
    check_norms(plan, work, "")


def test_two_tables_are_not_stepped_by_unlike_gradients() -> None:
    model, how = catalog.model("llama-7b"), reduction_named("server:asynchronous=true")
    tied = replace(workload(replace(model, tied_embeddings=True)), reduction=how)
    own = StagePlan(layers=16, data_parallel=2, tensor_parallel=1, micro_batch=1)
    with pytest.raises(InputError, match=r"tied_embeddings.*give tied_embeddings: false"):
        _check_reduction(Plan(micro_batches=4, stages=(own, own)), tied)
    _check_reduction(Plan(micro_batches=4, stages=(replace(own, layers=32),)), tied)
