"""Dropout draws by position: any plan trains as a plain run does, and faults show."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from mistlab import catalog  # noqa: E402
from mistlab.core.values import InputError  # noqa: E402
from mistlab.graph.stage_model import StageModel  # noqa: E402
from mistlab.plan.plan import NO_OFFLOAD as NONE  # noqa: E402
from mistlab.plan.plan import Offload, Plan  # noqa: E402
from mistlab.plan.workload import ModelSpec  # noqa: E402
from mistlab.stages.stage_batch import StageBatch  # noqa: E402
from runtime.checkpoints import checkpoint  # noqa: E402
from runtime.checks.collectives.findings import collective_findings  # noqa: E402
from runtime.checks.fake.fake_device import device_findings  # noqa: E402
from runtime.checks.races.judge import Judge  # noqa: E402
from runtime.checks.races.recorded_rank import trace_of  # noqa: E402
from runtime.comm.topology import Topology, connected, isolated  # noqa: E402
from runtime.engine.executor import Executor, Report  # noqa: E402
from runtime.engine.streams.device_streams import SimulatedStreams  # noqa: E402
from runtime.engine.work import optimizer  # noqa: E402
from runtime.models import dropout  # noqa: E402
from runtime.models.dropout import Draws, MaskRows, drop, kept_by_position, key_of  # noqa: E402
from runtime.runnable import check_model  # noqa: E402
from tests.runtime.plain_masks import FIRST, Masks  # noqa: E402
from tests.runtime.planted import plant  # noqa: E402
from tests.runtime.taken_memory import SIZES, assert_predicted, taken_bytes  # noqa: E402
from tests.runtime.thread_ranks import Meeting, run_threads  # noqa: E402
from tests.runtime.worlds import (  # noqa: E402
    CPU,
    MIXED,
    TOLERANCE,
    TRAINING,
    alone,
    assert_alike,
    begun,
    by_plan,
    plainly,
    ratios,
    run_step,
    stage,
    thread_groups,
    workload,
)
from tests.sweep import sweep  # noqa: E402

TOKENS = {"dropout": 0.1, "attention_dropout": 0.0}
SHARES = {"dropout": 0.2, "attention": "math"}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "tokens": ("llama", TOKENS),
    "tokens, both halves at once": ("falcon", {**TOKENS, "tied_embeddings": True}),
    "shares": ("gpt", {**SHARES, "biases": True}),
    "shares of heads that have keys in common": ("llama", {**SHARES, "kv_heads": 2}),
    "shares less often": ("gpt", {**SHARES, "attention_dropout": 0.05}),
    "experts": ("llama", {**TOKENS, "experts": {"count": 4, "active": 2, "ffn": 24}}),
    "latent attention": (
        "llama",
        {
            **TOKENS,
            "head_dim": 12,
            "rotary_fraction": 1 / 3,
            "latent": {"key_rank": 8, "value_dim": 8},
        },
    ),
}
SPLIT = {"tensor_parallel": 2, "sequence_parallel": 1}
CONTEXT = {"context_parallel": 2, "context_exchange": 1}
PLANS: dict[str, tuple[tuple[dict[str, Any], ...], str]] = {
    "split tokens, run again": (({**SPLIT, "checkpointed_layers": 1},), "1f1b"),
    "unlike stages": (
        (
            {"data_parallel": 2, "micro_batch": 1, "zero": 3, "checkpointed_layers": 2},
            {"tensor_parallel": 2, "offload": MIXED},
        ),
        "zb-h1",
    ),
    "parts of sequences": (({**CONTEXT, **SPLIT, "zero": 2, "offload": MIXED},), "1f1b"),
    "chunks": (({"checkpointed_layers": 1}, {}), "interleaved-2"),
}


def plan_of(name: str) -> Plan:
    fields, order = PLANS[name]
    stages = tuple(stage(2, **one) for one in fields)
    return Plan(micro_batches=4, stages=stages, order=order)


def cases() -> list[tuple[str, str]]:
    """Models and plans that go together."""
    made = [(model, plan) for plan in PLANS for model in MODELS]
    unlike = {(m, "parts of sequences") for m in MODELS if m.startswith("shares")}
    # Tensor-parallel ranks alone would have copies of experts.
    unlike |= {("experts", plan) for plan in ("split tokens, run again", "unlike stages")}
    return [one for one in made if one not in unlike]


@pytest.mark.parametrize(("model", "plan"), sweep(cases(), first=6))
def test_a_plan_drops_what_a_plain_run_drops(model: str, plan: str) -> None:
    family, fields = MODELS[model]
    own = plan_of(plan)
    work = workload(family, layers=2 * own.num_stages, batch=8, **fields)
    assert_alike(by_plan(work, own), plainly(work))


def test_masks_follow_from_position_alone() -> None:
    rows, key = torch.arange(4096), key_of(3, 5)
    whole = kept_by_position(rows, 64, 0.1, key)
    assert whole.float().mean() == pytest.approx(0.9, abs=2e-3)
    assert whole.float().mean(dim=0) == pytest.approx(torch.full((64,), 0.9), abs=0.03)
    assert whole.float().mean(dim=1).std() == pytest.approx((0.9 * 0.1 / 64) ** 0.5, rel=0.1)
    shuffled = torch.randperm(4096)
    assert torch.equal(kept_by_position(shuffled, 64, 0.1, key), whole[shuffled])
    for other in (key_of(4, 5), key_of(3, 6), key_of(5, 3), (key[0], 1), (1, key[1])):
        agreeing = (kept_by_position(rows, 64, 0.1, other) == whole).float().mean()
        assert agreeing == pytest.approx(0.9**2 + 0.1**2, abs=5e-3)
    # Rows of numbers that differ by 2^32 are other rows.
    later = kept_by_position(rows + 2**32, 64, 0.1, key)
    assert (later == whole).float().mean() == pytest.approx(0.82, abs=5e-3)
    assert kept_by_position(rows, 64, 0.0, key).all()


def test_neighbours_are_dropped_independently() -> None:
    """Of pairs in a row, in a column and across, as many are dropped as by chance."""
    kept = kept_by_position(torch.arange(4096), 256, 0.5, key_of(1)).float() - 0.5
    for down, right in ((0, 1), (1, 0), (1, 1), (7, 3), (64, 64)):
        both = kept[down:, right:] * kept[: 4096 - down, : 256 - right]
        # A mean of independent numbers of a quarter's size.
        assert abs(both.mean()) < 5 * 0.25 / both.numel() ** 0.5


def test_a_mask_is_the_formula_s() -> None:
    x, masks = torch.ones(3, 5, 70), Masks(seed=2**40 + 7, step=9, length=5, first=6)
    rows = MaskRows(
        key=key_of(2**40 + 7, 9, 4, FIRST), sequence=6, length=5, positions=torch.arange(5)
    )
    found = drop(x, rows, 0.3)
    assert torch.allclose(found, masks.of_tokens(x, 4, FIRST, 0.3))
    assert np.count_nonzero(found) < x.numel()


def kept_bytes(run: Callable[[], Tensor]) -> int:
    saved = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal saved
        saved += tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return saved


def test_dropout_keeps_nothing() -> None:
    x = torch.randn(4, 16, 32, requires_grad=True)
    rows = MaskRows(key=key_of(1), sequence=0, length=16, positions=torch.arange(16))
    mask = kept_by_position(rows.numbers(4), 32, 0.25, rows.key)
    y = drop(x, rows, 0.25)
    assert torch.allclose(y, x * mask / 0.75)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.allclose(gradient, mask / 0.75)
    assert kept_bytes(lambda: drop(x, rows, 0.25)) == 0


@pytest.mark.parametrize("at_once", [1, 100])
def test_a_cpu_draws_alike_however_much_at_once(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, rows = torch.randn(9, 50), torch.arange(9)
    whole = dropout.dropped(x, rows, 0.3, (1, 2))
    monkeypatch.setattr(dropout, "AT_ONCE", at_once)
    assert torch.equal(dropout.dropped(x, rows, 0.3, (1, 2)), whole)


def test_another_plan_goes_on_with_the_masks_of_later_steps(tmp_path: Path) -> None:
    work = workload("gpt", layers=4, batch=8, **SHARES)
    first = alone(work, Plan(micro_batches=2, stages=(stage(4, micro_batch=4),)), "random")
    reports = [run_step(first, work, first.connections, step) for step in range(2)]
    path = checkpoint.save(first, tmp_path)
    plan = plan_of("unlike stages")

    def rank_of(rank: int, meeting: Meeting) -> list[Report]:
        connections = connected(plan, rank, thread_groups(meeting, rank))
        executor = begun(work, plan, connections, SimulatedStreams(), TRAINING)
        checkpoint.load(executor, path)
        return [run_step(executor, work, connections, step) for step in range(2, 4)]

    reports += run_threads(plan.num_gpus, rank_of)[0]
    losses = [report.loss for report in reports]
    np.testing.assert_allclose(losses, plainly(work, steps=4).losses, rtol=TOLERANCE)


# Memory and waits.


@pytest.mark.parametrize("name", ["tokens", "shares", "shares of heads that have keys in common"])
@pytest.mark.parametrize(
    ("checkpointed", "offload"),
    sweep([(2, ratios(0.5, 0.5, 1.0, 0.5)), (4, NONE), (0, NONE)], first=1),
)
def test_an_iteration_takes_what_is_predicted(
    name: str, checkpointed: int, offload: Offload, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(optimizer, "CHUNK", 2**17)
    family, fields = MODELS[name]
    work = workload(family, batch=4, precision="bf16", **{**SIZES, **fields})
    plan = Plan(micro_batches=2, stages=(stage(checkpointed_layers=checkpointed, offload=offload),))
    (predicted,) = StageModel.of(work).figures(StageBatch.of_plan(plan)).peak_bytes
    taken = taken_bytes(work, plan, isolated(plan, 0, CPU, 0))
    assert_predicted(taken, predicted, offload, rel=0.02)


@pytest.mark.parametrize("model", sweep(["shares", "tokens"], first=0))
def test_no_race_no_hidden_wait_and_no_call_that_hangs(model: str) -> None:
    family, fields = MODELS[model]
    work = workload(family, layers=2, batch=8, **fields)
    plan = plan_of("split tokens, run again")
    assert collective_findings(plan, work, clips=True) == ()
    assert Judge(trace_of(work, plan, 0, TRAINING)).findings() == []
    assert device_findings(work, plan, 0, TRAINING) == ()


# Faults: each lets a plan draw otherwise than a plain run does.

FAULTS: dict[str, tuple[Callable[..., Any], str, str, str, dict[str, Any]]] = {
    "a mask by rank": (
        *(Draws.of.__func__, "of_rank = positions.chunk(parts)[ranks.rank if parts > 1 else 0]"),
        *("of_rank = positions + 100 * ranks.rank", "tokens", {"tensor_parallel": 2}),
    ),
    "a mask by data-parallel rank": (
        *(
            Topology.sequences,
            "stage_plan.data_parallel + position.data) *",
            "stage_plan.data_parallel) *",
        ),
        *("tokens", {"data_parallel": 2, "micro_batch": 1}),
    ),
    "positions of another part": (
        *(Draws.of.__func__, "own_positions(length, context.rank,", "own_positions(length, 0,"),
        *("tokens", CONTEXT),
    ),
    "masks of steps alike": (
        *(Executor._draw_for, "self.draws.step = self.steps", "self.draws.step = 0"),
        *("tokens", {}),
    ),
    "heads of another rank": (
        *(
            dropout.LayerDraws.of_shares,
            "self.layer, heads, all_heads",
            "self.layer, range(len(heads)), all_heads",
        ),
        *("shares", {"tensor_parallel": 2}),
    ),
    "another mask when run again": (
        *(
            Executor._backward,
            "self._draw_for(op)\n        if layer == layers[-1]:",
            "\n        if layer == layers[-1]:",
        ),
        *("tokens", {"checkpointed_layers": 2}),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_shows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, right, wrong, model, fields = FAULTS[name]
    family, parts = MODELS[model]
    work = workload(family, layers=2, batch=8, **parts)
    plan = Plan(micro_batches=4, stages=(stage(2, **fields),), order="gpipe")
    assert_alike(by_plan(work, plan), plainly(work))
    plant(monkeypatch, function, right, wrong)
    with pytest.raises(AssertionError):
        assert_alike(by_plan(work, plan), plainly(work))


# What is refused, and what dropout changes in predictions.


def test_what_kernels_of_attention_draw_is_refused() -> None:
    with pytest.raises(
        InputError,
        match=r"attention_dropout: 0.1 with workload.attention: flash .* give 0, or .* math",
    ):
        check_model(workload("gpt", dropout=0.1))
    with pytest.raises(InputError, match=r"with sinks .* give 0$"):
        check_model(workload("llama", dropout=0.1, sinks=True, attention="math"))
    with pytest.raises(InputError, match="dropout 1 would drop all values"):
        check_model(workload("gpt", dropout=1, attention_dropout=0))
    check_model(workload("gpt", **TOKENS))


def test_shares_are_dropped_where_tokens_are() -> None:
    with pytest.raises(InputError, match=r"attention_dropout: 0.1, but it is supported"):
        ModelSpec.of(family="gpt", hidden=64, layers=1, heads=1, attention_dropout=0.1)


@pytest.mark.parametrize("attention", ["flash", "math"])
def test_an_engine_that_keeps_masks_takes_more(attention: Any) -> None:
    """A byte a value of two sums a block, and with ``math`` the dropped shares and their mask."""
    model = replace(catalog.model("gpt3-1.3b"), dropout=0.0)
    work = workload("gpt")
    work = replace(work, model=model, attention=attention, precision="bf16", sequence_length=1024)

    def activations(engine: str, **fields: Any) -> float:
        batch = StageBatch(layers=np.array([24]), data_parallel=1, tensor_parallel=1, micro_batch=1)
        own = replace(work, model=replace(model, **fields))
        return float(StageModel.of(own, engine).figures(batch).activations_bytes[0])

    without = activations("megatron")
    tokens = activations("megatron", dropout=0.1, attention_dropout=0.0) - without
    both = activations("megatron", dropout=0.1) - without
    assert tokens == 24 * 2 * 1024 * 2048
    assert both - tokens == (24 * 3 * 16 * 1024**2 if attention == "math" else 0)
    assert activations("mistlab", dropout=0.1) == activations("mistlab")
