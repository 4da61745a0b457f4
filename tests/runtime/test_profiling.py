"""What a profile measures: the right work, on the right streams, by processes that do not hang."""

import os
import re
import threading
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from mistlab.calibration.operators import CLASS_OF_OPERATOR, OPERATORS_OF_CLASS, OPTIONAL  # noqa: E402
from mistlab.core.values import InputError  # noqa: E402
from mistlab.cost.layers import work_of  # noqa: E402
from mistlab.engines.engine import ENGINES  # noqa: E402
from mistlab.graph.library import graph_of  # noqa: E402
from mistlab.graph.symbols import size_columns  # noqa: E402
from mistlab.machine.hardware import OperatorClass  # noqa: E402
from mistlab.machine.slowdowns import STREAMS  # noqa: E402
from mistlab.plan.workload import (  # noqa: E402
    ModelSpec,
    Workload,
)
from runtime.profiling.environment import Devices, devices_of  # noqa: E402
from runtime.profiling.launches import launches  # noqa: E402
from runtime.profiling.links import CollectiveCase, CopyCase, SendCase  # noqa: E402
from runtime.profiling.operator_times import BlockSizes, block_operator, optimizer_step, places_of  # noqa: E402
from runtime.profiling.side_by_side import (  # noqa: E402
    Lengths,
    OverlapCase,
    OverlapTiming,
    ThreadLanes,
    overlap_cases,
)
from runtime.profiling.timing import (  # noqa: E402
    WARM_UPS,
    HostClock,
    Timing,
    group_sizes,
)
from runtime.profiling.world import ProfiledWorld  # noqa: E402
from tests.runtime.ran import Ran  # noqa: E402

BLOCK = BlockSizes(hidden=32, ffn=96, heads=4, sequence_length=16, vocab=64, micro_batch=3)


CPU = Devices(kind="cpu", count=2, threads=1)
LENGTHS = Lengths(levels=(0, 1), unit_s=1e-4, product_size=16, chunk_bytes=4096)


def test_the_places_that_are_measured_are_those_that_are_fitted() -> None:
    assert set(places_of(BLOCK, "cuda")) == set(CLASS_OF_OPERATOR)


@pytest.mark.parametrize("operators", ["matmul", "batched_matmul"])
def test_products_do_what_the_layer_graph_counts(operators: OperatorClass) -> None:
    counted = [
        block_operator(places_of(BLOCK, "cuda")[place], "fp32", HostClock(), 1)
        for place in OPERATORS_OF_CLASS[operators]
    ]
    sizes = asdict(BLOCK)
    sequence, batch = sizes.pop("sequence_length"), sizes.pop("micro_batch")
    workload = Workload(
        model=ModelSpec.of(family="gpt", layers=1, **sizes),
        sequence_length=sequence,
        global_batch=1,
        attention="math",
        precision="fp32",
    )
    compiled = work_of(graph_of(workload), ENGINES["mistlab"].kernels).compiled
    columns = size_columns(workload, {"b": np.array([batch]), "tp": np.array([1])})
    work = dict(zip(compiled.names, compiled(columns)[:, 0], strict=True))
    flop, moved_bytes = (
        sum(work[f"block {phase} {operators} {unit}"] for phase in ("forward", "backward"))
        for unit in ("flop", "bytes")
    )
    assert sum(one.flop for one in counted) == flop
    # The graph's first product also reads a number that stands for the sum it adds to.
    extra = 4 if operators == "batched_matmul" else 0
    assert sum(one.moved_bytes for one in counted) + extra == moved_bytes


def test_every_place_of_the_tables_is_measured() -> None:
    places = places_of(BLOCK, "cuda")
    assert set(places) == {name for names in OPERATORS_OF_CLASS.values() for name in names}
    for operator in places.values():
        found = block_operator(operator, "bf16", HostClock(), 1)
        assert found.forward.median_s > 0
        assert found.backward.median_s > 0
        assert found.moved_bytes > 0


def test_a_cpu_drops_nothing() -> None:
    on_gpu, on_cpu = (places_of(BLOCK, kind) for kind in ("cuda", "cpu"))
    assert set(on_gpu) - set(on_cpu) == {OPTIONAL}
    function, shapes = on_cpu["enc-post-MLP-dropout"]
    x = torch.ones(shapes[0])
    assert torch.equal(function(x, x), x + x)


def test_a_step_rounds_masters_to_weights() -> None:
    with Ran() as ran:
        assert optimizer_step(4096, "bf16", HostClock(), 1).median_s > 0
    assert ran.names[-2:] == ["aten::_fused_adamw_", "aten::copy_"]


def test_more_kernels_are_counted_where_attention_is_written_out() -> None:
    fused, written = (launches("gpt", a, "fp32", HostClock(), 1) for a in ("flash", "math"))
    assert 0 < fused.kernels < written.kernels
    assert fused.timing.median_s > 0


def test_a_timing_is_the_median_and_how_far_the_quartiles_are_apart() -> None:
    assert Timing.of([3.0]) == Timing(median_s=3.0, spread=0.0)
    assert Timing.of([1.0, 2.0, 3.0, 4.0, 90.0]) == Timing(median_s=3.0, spread=2 / 3)


def test_the_clock_warms_up() -> None:
    calls: list[int] = []
    assert len(HostClock().samples_s(lambda: calls.append(1), 4)) == 4
    assert len(calls) == 4 + WARM_UPS


def test_lanes_run_side_by_side() -> None:
    meeting = threading.Barrier(4)
    ThreadLanes().side_by_side(dict.fromkeys(STREAMS, lambda: meeting.wait(timeout=30)))


def test_mixtures_have_at_least_two_busy_streams() -> None:
    alone, several = (overlap_cases(gpus, (0, 1, 2)) for gpus in (1, 4))
    assert len(alone) == 3**3 - 1 - 3 * 2
    assert all(case.levels[1] == 0 for case in alone)
    assert len(several) == 3**4 - 1 - 4 * 2
    assert len(set(several)) == len(several)


def test_groups_leave_no_device_idle() -> None:
    assert [group_sizes(count) for count in (1, 2, 6, 8)] == [[], [2], [2, 3, 6], [2, 4, 8]]


CASES = [
    CopyCase(kind="host_to_device", size_bytes=65536),
    *(
        CollectiveCase(kind=kind, gpus=2, size_bytes=65536)
        for kind in ("all_gather", "reduce_scatter", "all_reduce")
    ),
    SendCase(size_bytes=65536),
    OverlapCase(gpus=2, levels=(1, 1, 0, 1)),
]
FAILING = CollectiveCase(kind="all_gather", gpus=3, size_bytes=65536)


@pytest.fixture(scope="module")
def world() -> tuple[list[tuple[Any, Any]], str]:
    """What two processes measured until one of them failed, and the words for that."""
    measured = ProfiledWorld(devices=CPU, repetitions=2, lengths=LENGTHS).measured(
        [*CASES, FAILING]
    )
    found = [next(measured) for _ in CASES]
    with pytest.raises(InputError) as failed:
        next(measured)
    return found, str(failed.value)


def test_processes_measure_links_and_streams_together(
    world: tuple[list[tuple[Any, Any]], str],
) -> None:
    measured, _ = world
    assert [case for case, _ in measured] == CASES
    *transfers, (_, streams) = measured
    assert all(isinstance(timing, Timing) and timing.median_s > 0 for _, timing in transfers)
    assert isinstance(streams, OverlapTiming)
    assert [timing is not None for timing in streams.alone] == [True, True, False, True]


def test_a_process_that_fails_ends_the_others(world: tuple[list[tuple[Any, Any]], str]) -> None:
    _, failed = world
    assert re.search(r"gpus 3.*failed in process .* start the command again", failed)


def test_what_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert devices_of(None, None).kind == "cpu"
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert devices_of("cpu", 3) == Devices(kind="cpu", count=3, threads=2)
    with pytest.raises(InputError, match="--gpus-per-node: 9 processes are more than the 8 CPU"):
        devices_of("cpu", 9)
    with pytest.raises(
        InputError,
        match=r"finds no GPU \(torch 2\S+ is a build for CPUs",
    ):
        devices_of("cuda", None)
    with pytest.raises(InputError, match="--gpus-per-node: 0 is below 1"):
        devices_of(None, 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(
        InputError, match="--gpus-per-node: 3 is more than the 2 GPUs that torch sees"
    ):
        devices_of("cuda", 3)


def test_a_cpu_times_work_with_cold_caches_and_when_all_processes_are_there() -> None:
    # Work finds the memory that clears the caches written, and leaves its mark there.
    said: list[str] = []
    clock = HostClock(meet=lambda: said.append("meet"))

    def work() -> None:
        said.append("cold" if not clock.flushed[::4096].any() else "warm")
        clock.flushed[::4096] = 1

    assert len(clock.samples_s(work, 3)) == 3
    assert said[WARM_UPS:] == ["meet", "cold"] * 3
