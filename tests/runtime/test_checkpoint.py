"""Checkpoints: another plan goes on with the same losses; what is broken is refused."""

import errno
import io
import json
import pickle
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import pytest

torch = pytest.importorskip("torch")
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader  # noqa: E402

from mistlab.core.files import read_yaml, write_yaml  # noqa: E402
from mistlab.core.values import InputError  # noqa: E402
from mistlab.plan.plan import Plan  # noqa: E402
from mistlab.plan.workload import Workload  # noqa: E402
from runtime.checkpoints import boxes, checkpoint  # noqa: E402
from runtime.checkpoints.checkpoint import latest  # noqa: E402
from runtime.checkpoints.exported_weights import export  # noqa: E402
from runtime.comm.group import (  # noqa: E402
    RankLostError,
    refusals,
)
from runtime.comm.topology import connected  # noqa: E402
from runtime.engine.executor import Executor  # noqa: E402
from runtime.engine.streams.device_streams import SimulatedStreams  # noqa: E402
from tests.runtime.thread_ranks import Meeting, run_threads  # noqa: E402
from tests.runtime.worlds import (  # noqa: E402
    MIXED,
    ON_HOST,
    TRAINING,
    alone,
    begun,
    plainly,
    run_step,
    stage,
    thread_groups,
    whole_weights,
    workload,
)

ROOT = Path(__file__).parents[2]
STEPS = 4


def losses(executor: Executor, work: Workload, steps: range) -> list[float]:
    return [run_step(executor, work, executor.connections, step).loss for step in steps]


def work(**fields: int) -> Workload:
    return workload("gpt", vocab=97, biases=True, tied_embeddings=True, **fields)


OFFLOADED = Plan(micro_batches=2, stages=(stage(micro_batch=4, offload=MIXED),))
PLAIN = Plan(micro_batches=4, stages=(stage(micro_batch=2, checkpointed_layers=3),))


def test_another_plan_goes_on_with_the_same_losses(tmp_path: Path) -> None:
    first = alone(work(), OFFLOADED, "lazy")
    begun = losses(first, work(), range(2))
    path = checkpoint.save(first, tmp_path)
    second = alone(work(), PLAIN, "lazy")
    checkpoint.load(second, path)

    ended = losses(second, work(), range(2, STEPS))

    expected = plainly(work(), steps=STEPS)
    assert begun + ended == pytest.approx(expected.losses, rel=1e-6)
    assert second.steps == STEPS


@pytest.mark.parametrize("first_on_host", [True, False])
def test_a_step_on_the_host_goes_on_from_one_on_the_device(
    tmp_path: Path, first_on_host: bool
) -> None:
    trainings = (ON_HOST, TRAINING) if first_on_host else (TRAINING, ON_HOST)
    first, second = (alone(work(), OFFLOADED, "lazy", training) for training in trainings)
    found = losses(first, work(), range(2))
    checkpoint.load(second, checkpoint.save(first, tmp_path))
    found += losses(second, work(), range(2, STEPS))
    assert found == pytest.approx(plainly(work(), steps=STEPS).losses, rel=1e-6)


@pytest.mark.parametrize("shares", [True, False])
def test_tied_tables_go_on_as_one_or_as_two(tmp_path: Path, shares: bool) -> None:
    """From ZeRO-2 on each end has its own; a single rank shares one."""
    apart = Plan(micro_batches=2, stages=(stage(data_parallel=2, micro_batch=2, zero=3),))

    def rank_of(rank: int, meeting: Meeting) -> list[float]:
        connections = connected(apart, rank, thread_groups(meeting, rank))
        executor = begun(work(), apart, connections, SimulatedStreams(), TRAINING)
        checkpoint.load(executor, path)
        return losses(executor, work(), range(2, STEPS))

    first = alone(work(), OFFLOADED, "lazy")
    assert first.shape.shares_table
    found = losses(first, work(), range(2))
    path = checkpoint.save(first, tmp_path)
    if shares:
        second = alone(work(), PLAIN, "lazy")
        checkpoint.load(second, path)
        found += losses(second, work(), range(2, STEPS))
    else:
        found += run_threads(2, rank_of)[0]
    assert found == pytest.approx(plainly(work(), steps=STEPS).losses, rel=1e-6)


def test_saving_changes_nothing(tmp_path: Path) -> None:
    executor = alone(work(), OFFLOADED, "lazy")
    found = losses(executor, work(), range(2))
    checkpoint.save(executor, tmp_path)
    found += losses(executor, work(), range(2, STEPS))
    assert found == losses(alone(work(), OFFLOADED, "lazy"), work(), range(STEPS))


def test_the_last_complete_checkpoint_is_found(tmp_path: Path) -> None:
    for name in ("step-2", "step-10", "step-11.part", "other"):
        (tmp_path / name).mkdir()
    assert latest(tmp_path) == tmp_path / "step-10"
    assert latest(tmp_path / "nowhere") is None


def _cut_data(path: Path) -> None:
    file = path / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:1000])


def _cut_metadata(path: Path) -> None:
    (path / ".metadata").write_bytes((path / ".metadata").read_bytes()[:50])


def _no_data(path: Path) -> None:
    (path / "__0_0.distcp").unlink()


def _other_data(path: Path) -> None:
    file = path / "__0_0.distcp"
    file.write_bytes(bytes(file.stat().st_size))


def _no_metadata(path: Path) -> None:
    (path / ".metadata").unlink()


def _other_metadata(path: Path) -> None:
    (path / ".metadata").write_bytes(pickle.dumps({"step": 3}))


def _metadata_without_a_place(path: Path) -> None:
    metadata = FileSystemReader(path).read_metadata()
    del metadata.storage_data[next(iter(metadata.storage_data))]
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def _metadata_without_a_box(path: Path) -> None:
    metadata = FileSystemReader(path).read_metadata()
    name = next(name for name in metadata.state_dict_metadata if name.startswith("moment1.blocks"))
    del metadata.state_dict_metadata[name].chunks[0]
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def _no_model(path: Path) -> None:
    (path / checkpoint.MODEL).unlink()


@pytest.mark.parametrize(
    "spoil",
    [
        *(_cut_data, _no_data, _other_data, _cut_metadata, _no_metadata, _other_metadata),
        *(_metadata_without_a_place, _metadata_without_a_box, _no_model),
    ],
)
def test_a_damaged_checkpoint_is_refused(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    path = checkpoint.save(alone(work(), PLAIN, "lazy"), tmp_path)
    spoil(path)
    with pytest.raises(checkpoint.DamagedError, match=r"cannot be read \(.*\): it is damaged"):
        checkpoint.load(alone(work(), PLAIN, "lazy"), path)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"heads": 2}, "its model has heads 4, the plan's 2"),
        ({"layers": 3}, "its model has layers 4, the plan's 3"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(
    tmp_path: Path, fields: dict[str, int], words: str
) -> None:
    """Fewer heads have tensors of the same shapes, fewer layers some of the same tensors."""
    path = checkpoint.save(alone(work(), PLAIN, "lazy"), tmp_path)
    other = work(**fields)
    plan = Plan(micro_batches=4, stages=(stage(other.model.layers),))
    with pytest.raises(InputError, match=words):
        checkpoint.load(alone(other, plan, "lazy"), path)


def rotary(base: float) -> Workload:
    return workload("llama", rotary_base=base)


def test_a_checkpoint_that_names_no_rotary_base_has_the_one_that_all_had(tmp_path: Path) -> None:
    path = checkpoint.save(alone(rotary(10_000.0), PLAIN, "lazy"), tmp_path)
    stored = read_yaml(path / checkpoint.MODEL)
    del stored["rotary_base"]
    write_yaml(stored, path / checkpoint.MODEL)
    checkpoint.load(alone(rotary(10_000.0), PLAIN, "lazy"), path)
    words = "its model has rotary_base 10000.0, the plan's 500000.0"
    with pytest.raises(InputError, match=words):
        checkpoint.load(alone(rotary(500_000.0), PLAIN, "lazy"), path)


def test_a_checkpoint_that_names_no_context_is_resumed(tmp_path: Path) -> None:
    path = checkpoint.save(alone(rotary(10_000.0), PLAIN, "lazy"), tmp_path)
    said = workload("llama", rotary_base=10_000.0, context=8192)
    assert checkpoint.load(alone(said, PLAIN, "lazy"), path) is None


def test_a_checkpoint_of_longer_sequences_is_refused(tmp_path: Path) -> None:
    path = checkpoint.save(alone(work(), PLAIN, "lazy"), tmp_path)
    longer = replace(work(), sequence_length=2 * work().sequence_length)
    with pytest.raises(InputError, match=r"it has no tensor master.embedding.positions of "):
        checkpoint.load(alone(longer, PLAIN, "lazy"), path)


def test_exported_weights_are_the_model_s(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch", reason="not installed: make extras")
    executor = alone(work(), OFFLOADED, "lazy")
    losses(executor, work(), range(2))

    export(executor, work(), tmp_path / "weights.safetensors")

    stored = safetensors.load_file(tmp_path / "weights.safetensors")
    expected = whole_weights(work(), [executor])
    del expected["head.projection.weight"]
    assert stored.keys() == expected.keys()
    for name, tensor in stored.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("ranks", "offloaded", "place"),
    [
        pytest.param(1, 1.0, "here", id="all offloaded", marks=pytest.mark.slow),
        pytest.param(1, 0.0, "away", id="all on a device"),
        pytest.param(2, 0.5, "here", id="two ranks, half offloaded"),
    ],
)
def test_saving_and_loading_take_no_second_copy_of_the_state(
    tmp_path: Path, warm_python: str, ranks: int, offloaded: float, place: str
) -> None:
    """Beyond what training holds: less than half the state, some tensors on their way."""
    code = "from tests.runtime.checkpoint_memory import main; main()"
    processes = [
        subprocess.Popen(
            [warm_python, "-c", code, str(rank), str(ranks), tmp_path, str(offloaded), place],
            cwd=ROOT,
        )
        for rank in range(ranks)
    ]
    try:
        assert [process.wait(timeout=200) for process in processes] == [0] * ranks
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for rank in range(ranks):
        said = json.loads((tmp_path / f"{rank}.json").read_text())
        assert said["held"] > said["state"]
        # A copy would add the whole state.
        assert max(said["saving"], said["loading"]) < said["held"] + 0.5 * said["state"]


def test_boxes_are_cut_and_copied_without_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from a device, by a buffer smaller than most tensors."""
    monkeypatch.setattr(boxes, "MOST_BYTES", 1000)
    monkeypatch.setattr(boxes, "is_away", lambda _: True)
    first, second = alone(work(), OFFLOADED, "lazy"), alone(work(), PLAIN, "lazy")
    losses(first, work(), range(2))
    path = checkpoint.save(first, tmp_path)
    stored = FileSystemReader(path).read_metadata().state_dict_metadata
    chunks = [chunk for tensor in stored.values() for chunk in tensor.chunks]
    assert max(4 * prod(chunk.sizes) for chunk in chunks) <= 1000

    checkpoint.load(second, path)

    expected, found = (whole_weights(work(), [one]) for one in (first, second))
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)
    assert second.steps == 2


class Failing(torch.Tensor):
    """Memory of a device that takes nothing."""

    error: BaseException

    def copy_(self, *_: object) -> NoReturn:  # type: ignore[override]
        raise Failing.error


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        MemoryError("no more"),
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        KeyboardInterrupt(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_fails_on_a_device_is_not_said_of_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    path = checkpoint.save(alone(work(), PLAIN, "lazy"), tmp_path)
    resolve = boxes.Loader.resolve_tensor
    monkeypatch.setattr(
        boxes.Loader,
        "resolve_tensor",
        lambda self, item: resolve(self, item).as_subclass(Failing),
    )
    monkeypatch.setattr(Failing, "error", error, raising=False)
    with pytest.raises(type(error)) as raised:
        checkpoint.load(alone(work(), PLAIN, "lazy"), path)
    assert raised.value is error


def test_memory_that_runs_out_while_a_box_is_read_is_not_said_of_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_out(*_: object, **__: object) -> NoReturn:
        message = "DefaultCPUAllocator: can't allocate memory: you tried to allocate much."
        raise RuntimeError(message)

    path = checkpoint.save(alone(work(), PLAIN, "lazy"), tmp_path)
    monkeypatch.setattr(torch, "load", run_out)
    with pytest.raises(MemoryError, match="can't allocate"), refusals():
        checkpoint.load(alone(work(), PLAIN, "lazy"), path)


DAMAGED, EMPTY = boxes.UnreadableError("it is short"), torch.OutOfMemoryError("CUDA out of memory.")


def test_every_rank_says_what_is_wrong_with_files() -> None:
    for rank in range(3):
        assert checkpoint.failure_of(rank, {1: DAMAGED}, boxes.UnreadableError) is DAMAGED


def test_a_rank_that_fails_otherwise_says_so_and_is_lost_to_the_others() -> None:
    failures = {0: DAMAGED, 2: EMPTY}
    assert checkpoint.failure_of(2, failures, boxes.UnreadableError) is EMPTY
    for rank in range(2):
        lost = checkpoint.failure_of(rank, failures, boxes.UnreadableError)
        assert isinstance(lost, RankLostError)
        reason = "rank 2 failed at a checkpoint (CUDA out of memory.): correct the error"
        assert str(lost).startswith(f"rank {rank} ends, since {reason} that rank 2 printed")


def test_a_full_disk_is_told_in_the_words_of_the_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(io.BytesIO):
        """Room for the beginning of a write, after which torch misses what it wrote."""

        def write(self, content: Any) -> int:
            room = 300 - self.tell()
            super().write(content[: max(0, room)])
            if len(content) > room:
                raise OSError(errno.ENOSPC, "No space left on device")
            return len(content)

    @contextmanager
    def stream(*_: object) -> Iterator[Full]:
        yield Full()

    monkeypatch.setattr(FileSystem, "create_stream", stream)
    with pytest.raises(checkpoint.UnsavedError, match="No space left on device"):
        checkpoint.save(alone(work(), PLAIN, "lazy"), tmp_path)
