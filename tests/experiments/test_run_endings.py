"""How a process of a run ends: its status, and whether it waits for anything."""

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import pytest

from experiments.cli.command import CRASHED, run_as_process
from experiments.cli.commandline import DONE, INTERRUPTED, NO_ANSWER, WRONG_USAGE, NoAnswerError
from mistlab.core.values import InputError


def at_once(status: int) -> NoReturn:
    message = f"at once: {status}"
    raise SystemExit(message)


@pytest.mark.parametrize("ranks", ["1", "2"])
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RuntimeError("CUDA error: device-side assert triggered"), CRASHED),
        (AssertionError("a fault of this program"), NO_ANSWER),
        (NoAnswerError("rank 1 is gone"), NO_ANSWER),
        (InputError("--steps 0"), WRONG_USAGE),
        (KeyboardInterrupt(), INTERRUPTED),
    ],
    ids=lambda one: type(one).__name__,
)
def test_a_process_that_fails_ends_at_once(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    ranks: str,
    error: BaseException,
    status: int,
) -> None:
    def fail(_: Sequence[str]) -> NoReturn:
        raise error

    monkeypatch.setenv("WORLD_SIZE", ranks)
    monkeypatch.setattr(os, "_exit", at_once)
    with pytest.raises(SystemExit, match=f"^at once: {status}$"):
        run_as_process(fail, [])
    assert str(error) in capsys.readouterr().err


def test_a_process_that_is_done_ends_as_others_do_if_it_was_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "_exit", at_once)
    monkeypatch.setattr(sys, "exit", lambda status: at_once(status + 100))
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(SystemExit, match=f"^at once: {DONE + 100}$"):
        run_as_process(lambda _: DONE, [])
    with pytest.raises(SystemExit, match=f"^at once: {DONE}$"):
        run_as_process(lambda _: DONE, [], at_once=True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match=f"^at once: {DONE}$"):
        run_as_process(lambda _: DONE, [])
