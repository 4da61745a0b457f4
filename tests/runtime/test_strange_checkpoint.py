"""Checkpoints of strangers: nothing that their files name is run."""

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")

from mistlab.values.plan import Plan
from runtime.checkpoints import checkpoint
from runtime.checkpoints.boxes import METADATA, Reader, UnreadableError
from runtime.checkpoints.checkpoint import DamagedError
from tests.runtime.worlds import alone, stage, workload

PLAN = Plan(micro_batches=4, stages=(stage(micro_batch=2),))


class _Calling:
    """Pickled as a call of a function, as a stranger may pickle it."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self._called = function, arguments

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self._called


def test_a_strangers_list_of_tensors_runs_nothing(tmp_path: Path) -> None:
    mark = tmp_path / "run"
    path = checkpoint.save(alone(workload("gpt"), PLAN, "lazy"), tmp_path)
    (path / METADATA).write_bytes(pickle.dumps(_Calling(Path.touch, mark)))
    other = alone(workload("gpt"), PLAN, "lazy")
    with pytest.raises(DamagedError, match=r"names builtins\.getattr|names pathlib") as caught:
        checkpoint.load(other, path)
    assert "not loaded" in str(caught.value)
    assert not mark.exists()


@pytest.mark.parametrize("function", [eval, exec, __import__])
def test_no_function_is_found_by_its_name(tmp_path: Path, function: Callable[..., object]) -> None:
    (tmp_path / METADATA).write_bytes(pickle.dumps(_Calling(function, "1")))
    with pytest.raises(UnreadableError, match=f"names builtins.{function.__name__}"):
        Reader(tmp_path).metadata()
