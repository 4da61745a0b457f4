"""A session's runs and a profile go through on a device without memory, as on one that is there.

What is measured means nothing; that everything runs, in its place, is what is told.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from mistlab import catalog  # noqa: E402
from mistlab.machine.cluster import Cluster  # noqa: E402
from mistlab.schedule.lanes import LANES  # noqa: E402
from mistlab.values.job import Job  # noqa: E402
from mistlab.values.plan import Plan  # noqa: E402
from runtime.checks.fake.fake_device import (  # noqa: E402
    SHAM,
    fake_device,
)
from runtime.checks.fake.fake_driver import MEMORY_BYTES  # noqa: E402
from runtime.engine.training import Training  # noqa: E402
from runtime.profiling import launches as tiny_blocks  # noqa: E402
from runtime.profiling.environment import (  # noqa: E402
    Devices,
    device_memory_bytes,
    environment_of,
)
from runtime.profiling.launches import launches  # noqa: E402
from runtime.profiling.links import CopyCase  # noqa: E402
from runtime.profiling.operator_times import (  # noqa: E402
    AttentionSizes,
    BlockSizes,
    block_operator,
    fused_attention,
    memory_bytes_per_s,
    places_of,
    product_flop_per_s,
)
from runtime.profiling.side_by_side import Lengths, OverlapCase, StreamLoads  # noqa: E402
from runtime.profiling.timing import Rank  # noqa: E402
from runtime.session import Session, Settings  # noqa: E402
from tests.runtime.worlds import MIXED, stage, workload  # noqa: E402

BLOCK = BlockSizes(hidden=32, ffn=96, heads=4, sequence_length=16, vocab=64, micro_batch=3)
ATTENTION = AttentionSizes(micro_batch=1, sequence_length=8, heads=2, head_dim=8)
LENGTHS = Lengths(levels=(0, 1), unit_s=1e-3, product_size=16, chunk_bytes=4096)
DEVICES = Devices(kind=SHAM, count=1, threads=1)


def job(stages: int) -> Job:
    """A plan of which one stage runs: everything offloaded in part, clipped, on a capped device."""
    one = stage(2 // stages, checkpointed_layers=1, offload=MIXED)
    return Job(
        workload=workload("llama", layers=2, batch=4, precision="bf16"),
        cluster=Cluster(
            hardware=catalog.hardware("h200-141gb"), nodes=stages, gpus_per_node=1, memory_gib=22.0
        ),
        plan=Plan(micro_batches=2, stages=(one,) * stages),
    )


@pytest.mark.parametrize(
    ("stages", "by_itself"), [(1, None), (2, 0)], ids=["alone", "a stage by itself"]
)
def test_a_session_runs(stages: int, by_itself: int | None) -> None:
    settings = Settings(
        device=SHAM,
        data=None,
        seed=0,
        timeout_s=1.0,
        training=Training(clip_norm=1.0),
        stage=by_itself,
        # Elsewhere weights are drawn in threads of their own, as tensors that are not fake.
        draws_on_device=by_itself is not None,
    )
    with fake_device() as watch, Session.started(job(stages), settings) as session:
        reports = [session.step()[0] for _ in range(2)]
        memory, tasks = session.memory(), session.tasks()
        environment = session.environment("revision")
    assert watch.findings == ()
    assert [report.skipped for report in reports] == [False, False]
    assert [report.loss for report in reports] == [0.0 if by_itself is None else None] * 2
    assert memory[0].host_bytes > 0
    assert {task.lane for task in tasks} <= set(LANES)
    assert all(task.start_s < task.end_s for task in tasks)
    assert environment.num_devices == 1


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    with fake_device(), Rank.joined(0, DEVICES, tmp_path / "meeting", 2) as rank:
        yield rank


def test_operators_are_profiled(rank: Rank) -> None:
    places = places_of(BLOCK, "cuda")
    measured = [block_operator(one, "bf16", rank.clock, 2) for one in places.values()]
    measured.append(fused_attention(ATTENTION, "bf16", rank.clock, 2))
    for one in measured:
        assert one.forward.median_s > 0
        assert one.backward.median_s > 0
        assert one.flop > 0


def test_launches_are_profiled(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_blocks, "MICRO_BATCHES", 1)
    monkeypatch.setattr(tiny_blocks, "MANY", 2)
    assert launches("llama", "flash", "bf16", rank.clock, 1).kernels > 0


def test_links_streams_and_peaks_are_profiled(rank: Rank) -> None:
    for kind in ("host_to_device", "device_to_host"):
        assert CopyCase(kind=kind, size_bytes=4096).measured(rank).median_s > 0
    mixture = OverlapCase(gpus=1, levels=(1, 0, 1, 1))
    found = StreamLoads(LENGTHS, rank, 1).measured(mixture)
    assert [timing is not None for timing in found.alone] == [True, False, True, True]
    assert found.together.median_s > 0
    assert product_flop_per_s("bf16", 64, rank.clock, 2) > 0
    assert memory_bytes_per_s(4096, rank.clock, 2) > 0


def test_the_environment_is_told(rank: Rank) -> None:
    assert environment_of(DEVICES, "revision").device == "a device that is not there"
    assert device_memory_bytes(DEVICES) == MEMORY_BYTES
    assert DEVICES.precision == "bf16"
