"""Records of answers: a changed digit, a lost answer and a new one are noticed."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.same_answers import Commands, differing, main, without_clock

ROOT = Path(__file__).parents[1]
ANSWERS: dict[str, Any] = {
    "plain predicted 0000": {"iteration_s": 4.9946722695584596, "stages": [{"step_s": 0.25}]},
    "search of a plan": [0, [{"status": "optimal", "evaluations": 12}], []],
}


def test_equal_answers_do_not_differ() -> None:
    assert [*differing(ANSWERS, copy.deepcopy(ANSWERS))] == []


def test_a_changed_last_digit_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed = copy.deepcopy(ANSWERS)
    changed["plain predicted 0000"]["iteration_s"] = 4.9946722695584605
    for name, answers in (("first", ANSWERS), ("second", changed)):
        lines = (json.dumps([key, answer]) for key, answer in answers.items())
        (tmp_path / name).write_text("\n".join(lines), encoding="utf-8")
    assert main(["compare", str(tmp_path / "first"), str(tmp_path / "second")]) == 1
    assert "plain predicted 0000.iteration_s: 4.99" in capsys.readouterr().out
    assert main(["compare", str(tmp_path / "first"), str(tmp_path / "first")]) == 0


@pytest.mark.parametrize("key", ["status", "evaluations"])
def test_a_field_that_is_gone_differs(key: str) -> None:
    changed = copy.deepcopy(ANSWERS)
    del changed["search of a plan"][1][0][key]
    (line,) = differing(ANSWERS, changed)
    assert line.startswith(f"search of a plan[1][0].{key}")


def test_lost_and_new_answers_differ() -> None:
    fewer = {"search of a plan": ANSWERS["search of a plan"]}
    assert [*differing(ANSWERS, fewer)] == ["plain predicted 0000: only in the first"]
    assert [*differing(fewer, ANSWERS)] == ["plain predicted 0000: only in the second"]


def test_what_the_clock_says_is_left_out() -> None:
    assert without_clock([{"timing": {"a": 1}, "plan": 1}]) == [{"plan": 1}]


def test_commands_of_one_process_answer_apart(tmp_path: Path) -> None:
    with Commands(ROOT) as commands:
        missing = [commands.run("predict", str(tmp_path / name), "--json") for name in "ab"]
    assert [code for code, _, _ in missing] == [2, 2]
    for (_, output, errors), name in zip(missing, "ab", strict=True):
        assert str(tmp_path / name) in json.loads(output)["error"]
        assert errors == ""
