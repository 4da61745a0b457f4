"""Pinned memory: given back by each run, or kept by a process that runs plan after plan."""

import io
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from experiments import run_plan  # noqa: E402
from experiments.cli.commandline import DONE, run  # noqa: E402
from experiments.training import plan_worker  # noqa: E402
from runtime.checks.races.recorded_rank import standing_in  # noqa: E402
from runtime.devices.driver import PAGE_BYTES, kept, lend  # noqa: E402
from tests.experiments.tiny_plans import plan_file  # noqa: E402
from tests.runtime.inline_driver import InlineDriver  # noqa: E402

KIB = 1024
OFFLOADED = {"offload": {"optimizer": 1.0, "activations": 0.5}}


@pytest.fixture
def driver() -> Iterator[InlineDriver]:
    driver = InlineDriver()
    with standing_in(driver):
        yield driver


def said_by_worker(
    plans: Sequence[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> list[Any]:
    lines = [json.dumps([str(plan), "--json", "--steps", "2"]) for plan in plans]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines) + "\n"))
    plan_worker.main([])
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_runs_of_one_process_pin_once(
    tmp_path: Path,
    driver: InlineDriver,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = plan_file(tmp_path, OFFLOADED)
    assert run(run_plan.main, [str(plan), "--json", "--steps", "2"]) == DONE
    alone = json.loads(capsys.readouterr().out)
    pinned = list(driver.pinned)
    # One block of states, and one of each tensor that leaves.
    assert len(pinned) > 3
    assert sorted(driver.unpinned) == sorted(pinned)

    answers = said_by_worker([plan] * 3, monkeypatch, capsys)
    # What a run before has left in memory that is lent again changes nothing.
    assert [answer["said"]["losses"] for answer in answers] == [alone["losses"]] * 3
    assert driver.pinned == [*pinned, *pinned]
    assert sorted(driver.unpinned) == sorted(driver.pinned)
    assert not driver.held


def test_a_larger_run_pins_anew_and_a_smaller_one_does_not(
    tmp_path: Path,
    driver: InlineDriver,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    states = {"offload": {"optimizer": 1.0}}
    plans = [
        plan_file(tmp_path, states, model={"family": "gpt", "layers": 3, "heads": 4, **sizes})
        for sizes in ({"hidden": 32, "vocab": 97}, {"hidden": 64, "vocab": 97})
    ]
    small, large = plans
    said_by_worker([large, small, large], monkeypatch, capsys)
    assert len(states_in(driver.pinned)) == 1
    said_by_worker([small, large, small], monkeypatch, capsys)
    (_, first, second) = states_in(driver.pinned)
    assert first < second
    # The smaller block went before the larger one came: both were never there at once.
    assert states_in(driver.unpinned) == states_in(driver.pinned)
    assert sorted(driver.unpinned) == sorted(driver.pinned)
    assert not driver.held


def states_in(sizes: Sequence[int]) -> list[int]:
    """The blocks of states; the others are of a step's tokens and targets."""
    return [size for size in sizes if size > KIB]


def test_a_run_that_fails_leaves_nothing_pinned(
    tmp_path: Path,
    driver: InlineDriver,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text("plan: 3\n", encoding="utf-8")
    plans = [plan_file(tmp_path, OFFLOADED), broken]
    first, second = said_by_worker(plans, monkeypatch, capsys)
    assert (first["status"], second["status"]) == (0, 2)
    assert driver.pinned
    assert not driver.held


def test_memory_is_lent_as_zeros_and_in_parts(driver: InlineDriver) -> None:
    with kept():
        whole = lend(64 * KIB, driver)
        whole.memory.fill_(7)
        whole.give_back()
        first, second = lend(10 * KIB + 1, driver), lend(20 * KIB, driver)
        assert driver.pinned == [64 * KIB]
        assert first.memory.numel() == 10 * KIB + 1
        for one in (first, second):
            assert not one.memory.any()
        first.memory.fill_(1)
        assert not second.memory.any()
        assert (second.memory.data_ptr() - first.memory.data_ptr()) % PAGE_BYTES == 0
        # What is in use is not lent twice, and is there until all of it is back.
        third = lend(40 * KIB, driver)
        assert driver.pinned == [64 * KIB, 40 * KIB]
        first.give_back()
        assert lend(60 * KIB, driver).memory.numel() == 60 * KIB
        assert driver.pinned == [64 * KIB, 40 * KIB, 60 * KIB]
        assert not driver.unpinned
        third.give_back()
    assert not driver.held


def test_what_nobody_uses_makes_room_for_more() -> None:
    driver = InlineDriver(most_bytes=100 * KIB)
    with kept():
        lend(60 * KIB, driver).give_back()
        lend(80 * KIB, driver)
        with pytest.raises(
            MemoryError, match=r"cannot be pinned \(driver error 2\): raise the limit"
        ):
            lend(40 * KIB, driver)
    assert driver.pinned == [60 * KIB, 80 * KIB]
    assert not driver.held
