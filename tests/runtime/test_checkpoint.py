"""Checkpoints: another plan goes on with the same losses; what is broken is refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from mistlab.datafile import read_yaml, write_yaml  # noqa: E402
from mistlab.errors import InputError  # noqa: E402
from mistlab.plan import Plan  # noqa: E402
from mistlab.workload import Workload  # noqa: E402
from runtime import checkpoint  # noqa: E402
from runtime.comm.threads import Meeting, run_threads  # noqa: E402
from runtime.comm.topology import connected  # noqa: E402
from runtime.engine.executor import Executor  # noqa: E402
from runtime.engine.simulated import SimulatedStreams  # noqa: E402
from runtime.export import export  # noqa: E402
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
    assert checkpoint.latest(tmp_path) == tmp_path / "step-10"
    assert checkpoint.latest(tmp_path / "nowhere") is None


def _cut_data(path: Path) -> None:
    file = path / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:1000])


def _cut_metadata(path: Path) -> None:
    (path / ".metadata").write_bytes((path / ".metadata").read_bytes()[:50])


@pytest.mark.parametrize("spoil", [_cut_data, _cut_metadata])
def test_a_truncated_checkpoint_is_refused(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    path = checkpoint.save(alone(work(), PLAIN, "lazy"), tmp_path)
    spoil(path)
    with pytest.raises(InputError, match="cannot be read"):
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


def test_a_checkpoint_of_longer_sequences_is_refused(tmp_path: Path) -> None:
    path = checkpoint.save(alone(work(), PLAIN, "lazy"), tmp_path)
    longer = replace(work(), sequence_length=2 * work().sequence_length)
    with pytest.raises(InputError, match=r"it has no master.embedding.positions of \("):
        checkpoint.load(alone(longer, PLAIN, "lazy"), path)


def test_exported_weights_are_the_model_s(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    executor = alone(work(), OFFLOADED, "lazy")
    losses(executor, work(), range(2))

    export(executor, work(), tmp_path / "weights.safetensors")

    stored = safetensors.load_file(tmp_path / "weights.safetensors")
    expected = whole_weights(work(), [executor])
    del expected["head.projection.weight"]
    assert stored.keys() == expected.keys()
    for name, tensor in stored.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0)
