"""Checkpoints of a single process, which torch would warn."""

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("torch")

from mistlab.values.plan import Plan
from runtime.checkpoints import checkpoint
from runtime.checkpoints.boxes import Reader, Writer
from tests.runtime.worlds import alone, stage, workload

PLAN = Plan(micro_batches=4, stages=(stage(micro_batch=2),))


def test_warnings_of_others_are_heard_while_boxes_are_written_and_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads of a process share what it hides. torch's own warning of a single process is not
    heard: here it would be an error."""

    def saying(call: Callable[..., object]) -> Callable[..., object]:
        def said(*arguments: object) -> object:
            with ThreadPoolExecutor() as threads:
                threads.submit(warnings.warn, f"beside {call.__name__}", UserWarning).result()
            return call(*arguments)

        return said

    monkeypatch.setattr(Writer, "write_data", saying(Writer.write_data))
    monkeypatch.setattr(Reader, "read_data", saying(Reader.read_data))
    first, second = (alone(workload("gpt"), PLAN, "lazy") for _ in range(2))
    with pytest.warns(UserWarning, match="beside write_data") as heard:
        path = checkpoint.save(first, tmp_path)
    assert len(heard) == 1
    with pytest.warns(UserWarning, match="beside read_data") as heard:
        checkpoint.load(second, path)
    assert len(heard) == 1
