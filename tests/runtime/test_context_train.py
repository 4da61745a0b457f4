"""Plans whose ranks split sequences train as one process does, and faults in them show."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from mistlab import catalog  # noqa: E402
from mistlab.core.values import InputError  # noqa: E402
from mistlab.graph.stage_model import StageModel  # noqa: E402
from mistlab.job.job import Job  # noqa: E402
from mistlab.machine.cluster import Cluster  # noqa: E402
from mistlab.plan.dimensions import groups_of  # noqa: E402
from mistlab.plan.plan import Plan  # noqa: E402
from mistlab.schedule.context_ways import GATHER, HEADS, RING, WORDS  # noqa: E402
from mistlab.stages.stage_batch import StageBatch  # noqa: E402
from runtime.checks.collectives.findings import collective_findings  # noqa: E402
from runtime.checks.fake.fake_device import device_findings  # noqa: E402
from runtime.checks.races.judge import Judge  # noqa: E402
from runtime.checks.races.recorded_rank import trace_of  # noqa: E402
from runtime.comm.topology import connected  # noqa: E402
from runtime.engine.streams.context_lanes import StreamedContext  # noqa: E402
from runtime.engine.work import optimizer  # noqa: E402
from runtime.models import attention, context  # noqa: E402
from runtime.runnable import check_runnable  # noqa: E402
from tests.runtime.lone_rank import lone  # noqa: E402
from tests.runtime.taken_memory import SIZES, assert_predicted, taken_bytes  # noqa: E402
from tests.runtime.worlds import (  # noqa: E402
    MIXED,
    TRAINING,
    assert_alike,
    by_plan,
    plainly,
    ratios,
    stage,
    workload,
)
from tests.sweep import sweep  # noqa: E402

WAYS = pytest.mark.parametrize("way", [RING, GATHER, HEADS], ids=WORDS)
SPLITS: tuple[dict[str, Any], ...] = (
    {"tensor_parallel": 2, "sequence_parallel": 1},
    {"data_parallel": 2, "micro_batch": 1, "zero": 3},
    {"checkpointed_layers": 1, "offload": MIXED, "zero": 2},
    {"data_parallel": 2, "micro_batch": 1, "tensor_parallel": 2, "zero": 2, "axis_order": 1},
)


def split(way: int, *, layers: int = 2, ranks: int = 2, **fields: Any) -> Plan:
    """One stage of ``ranks`` context-parallel ranks."""
    one = stage(layers, context_parallel=ranks, context_exchange=way, **fields)
    return Plan(micro_batches=2, stages=(one,))


@WAYS
@pytest.mark.parametrize("family", ["gpt", "llama", "falcon"])
@pytest.mark.parametrize("fields", sweep(SPLITS, first=1))
def test_a_stage_trains_as_one_process(family: str, way: int, fields: dict[str, Any]) -> None:
    work = workload(family, layers=2, batch=4)
    assert_alike(by_plan(work, split(way, **fields)), plainly(work))


def test_tensor_ranks_furthest_apart_train_as_one_process() -> None:
    fields = {"data_parallel": 2, "tensor_parallel": 2, "micro_batch": 1, "zero": 3}
    work = workload("llama", layers=2, batch=4)
    plan = split(RING, axis_order=1, **fields)
    groups = {name: [*groups_of(name, plan.stages[0].degree)] for name in ("tensor", "gather")}
    assert groups == {
        "tensor": [[0, 4], [1, 5], [2, 6], [3, 7]],
        "gather": [[0, 1, 2, 3], [4, 5, 6, 7]],
    }
    assert_alike(by_plan(work, plan), plainly(work))


@WAYS
def test_four_ranks_with_shared_keys_train_as_one_process(way: int) -> None:
    heads = {"heads": 8, "head_dim": 4, "kv_heads": 4}
    work = workload("llama", layers=2, batch=4, **heads)
    assert_alike(by_plan(work, split(way, ranks=4, zero=1)), plainly(work))


@pytest.mark.parametrize("order", ["1f1b", "zb-h1", "interleaved-2"])
def test_pipelines_train_as_one_process(order: str) -> None:
    work = workload("gpt", layers=4, batch=4, tied_embeddings=True)
    stages = tuple(
        stage(2, context_parallel=2, context_exchange=way, zero=zero)
        for way, zero in ((RING, 2), (GATHER, 0))
    )
    plan = Plan(micro_batches=2, stages=stages, order=order)
    assert_alike(by_plan(work, plan), plainly(work))


def reversed_ring(ring: StreamedContext, *args: Any) -> None:
    """Keys go to the rank before."""
    given, taken, work = args
    after, before = (ring.rank - 1) % ring.size, (ring.rank + 1) % ring.size
    sends, receives = [(one, after) for one in given], [(one, before) for one in taken]
    ring._streams.beside(lambda: ring._group.exchange(sends, receives), work)


def neighbouring(rank: int, ranks: int) -> tuple[int, int]:
    """A rank has two chunks that follow one another."""
    return 2 * rank, 2 * rank + 1


def in_order_of_ranks(parts: Tensor) -> Tensor:
    """Second halves are not put in reverse."""
    half = parts.shape[2] // 2
    chunks = torch.cat([parts[:, :, :half], parts[:, :, half:]])
    return chunks.transpose(0, 1).flatten(1, 2)


def unweighed(mixed: Tensor, sums: Tensor, further: Tensor, of: Tensor) -> tuple[Tensor, Tensor]:
    """Parts are joined without their shares."""
    return (mixed + further) / 2, torch.logaddexp(sums, of)


def own_heads_alone(ranks: StreamedContext, whole: Tensor) -> Tensor:
    """A rank takes its own heads in place of the others'."""
    return context.by_rank(whole, ranks.size)[ranks.rank].repeat(1, 1, ranks.size, 1)


FAULTS: dict[str, tuple[int, object, str, Callable[..., Any]]] = {
    "a ring in the other direction": (RING, StreamedContext, "pass_on", reversed_ring),
    "a swapped half": (RING, context, "chunks_of", neighbouring),
    "halves not in order": (GATHER, context, "in_order", in_order_of_ranks),
    "heads not in order": (HEADS, context, "in_order", in_order_of_ranks),
    "parts joined without shares": (RING, context, "joined", unweighed),
    "tokens in plain order": (
        RING,
        StreamedContext,
        "own_tokens",
        lambda ring, whole: whole.chunk(ring.size, 1)[ring.rank],
    ),
    "heads that stay": (HEADS, attention, "tokens_of_own", own_heads_alone),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_shows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    way, holder, attribute, fault = FAULTS[name]
    work = workload("llama", layers=2, batch=4)
    # In a ring of two, both directions are one.
    ranks = 4 if "direction" in name else 2
    monkeypatch.setattr(holder, attribute, fault)
    with pytest.raises(AssertionError):
        assert_alike(by_plan(work, split(way, ranks=ranks)), plainly(work))


def operands(channels: int = 8, of_values: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 6, 4, channels), (2, 6, 2, channels), (2, 6, 2, of_values)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("of_values", [8, 5], ids=["by the kernel", "written out"])
def test_parts_of_attention_join_to_the_whole(of_values: int) -> None:
    """Values, and gradients of each part from the whole's sums, against torch's autograd."""
    query, key, value = operands(of_values=of_values)
    scores = torch.einsum("bshd,bthd->bhst", query, key.repeat_interleave(2, 2)) / 8**0.5
    expected = torch.einsum("bhst,bthc->bshc", scores.softmax(-1), value.repeat_interleave(2, 2))
    gradient = torch.randn_like(expected)
    of_query, *of_keys = torch.autograd.grad(expected, [query, key, value], gradient)

    with torch.no_grad():
        parts = [slice(0, 2), slice(2, 6)]
        made = [context.attended(query, key[:, p], value[:, p], causal=False) for p in parts]
        mixed, sums = context.joined(*made[0], *made[1])
        back = [
            context.attended_backward(
                gradient, (query, key[:, p], value[:, p]), mixed, sums, causal=False
            )
            for p in parts
        ]
    torch.testing.assert_close(mixed, expected)
    torch.testing.assert_close(back[0][0] + back[1][0], of_query)
    for number, whole in enumerate(of_keys, start=1):
        torch.testing.assert_close(torch.cat([one[number] for one in back], 1), whole)


def test_the_kernel_equals_arithmetic() -> None:
    query, key, value = (one.detach() for one in operands())
    for causal in (False, True):
        by_kernel = context.attended(query, key, value, causal=causal)
        written_out = context._written_out(query, key, value, causal=causal)
        torch.testing.assert_close(by_kernel, written_out)
        gradient = torch.randn_like(by_kernel[0])
        rest = gradient, (query, key, value), *by_kernel
        torch.testing.assert_close(
            context.attended_backward(*rest, causal=causal),
            context._written_out_backward(*rest, causal=causal),
        )


@WAYS
def test_no_race_no_hidden_wait_and_no_call_that_hangs(way: int) -> None:
    work = workload("llama", layers=2, batch=4)
    plan = split(way, tensor_parallel=2, zero=2, checkpointed_layers=1)
    assert collective_findings(plan, work, clips=True) == ()
    for rank in (0, 2):
        assert Judge(trace_of(work, plan, rank, TRAINING)).findings() == []
        assert device_findings(work, plan, rank, TRAINING) == ()


def test_keys_that_nobody_waits_for_are_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    def unawaited(ring: StreamedContext, *args: Any) -> None:
        given, taken, work = args
        streams = ring._streams
        lane = streams.stream("tensor_parallel")  # type: ignore[attr-defined]
        with streams._driver.using(lane):  # type: ignore[attr-defined]
            ring._group.exchange([(one, 1) for one in given], [(one, 1) for one in taken])
        work()

    work = workload("llama", layers=2, batch=4)
    monkeypatch.setattr(StreamedContext, "pass_on", unawaited)
    assert Judge(trace_of(work, split(RING), 0, TRAINING)).findings()


@WAYS
@pytest.mark.parametrize("ranks", sweep([4, 2], first=1))
@pytest.mark.parametrize("family", sweep(["gpt", "llama"], first=1))
def test_an_iteration_takes_what_is_predicted(
    family: str, ranks: int, way: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(optimizer, "CHUNK", 2**17)
    sizes = {**SIZES, "sequence_length": 128 * ranks}
    work = workload(family, batch=4, **sizes)
    for fields in ({}, {"checkpointed_layers": 2, "offload": ratios(0.5, 0.5, 1.0, 0.5)}):
        plan = split(way, layers=4, ranks=ranks, **fields)
        (predicted,) = StageModel.of(work).figures(StageBatch.of_plan(plan)).peak_bytes
        taken = taken_bytes(work, plan, connected(plan, 0, lone(0)))
        assert_predicted(taken, predicted, plan.stages[0].offload, rel=0.02)


@pytest.mark.parametrize(
    ("changes", "stages", "words"),
    [
        ({}, (2, 1), "give all stages the same"),
        ({"attention": "math"}, (2, 2), "give workload.attention: flash"),
    ],
)
def test_plans_that_do_not_run_are_refused_with_a_remedy(
    changes: dict[str, Any], stages: tuple[int, int], words: str
) -> None:
    work = replace(workload("llama", layers=4, batch=4), **changes)
    both = tuple(
        stage(2, context_parallel=ranks, data_parallel=2 // ranks, micro_batch=ranks)
        for ranks in stages
    )
    plan = Plan(micro_batches=2, stages=both)
    cluster = Cluster(hardware=catalog.hardware("a100-80gb"), nodes=1, gpus_per_node=4)
    job = Job(workload=work, cluster=cluster, plan=plan)
    with pytest.raises(InputError, match=r"context_parallel.*" + words):
        check_runnable(job)
