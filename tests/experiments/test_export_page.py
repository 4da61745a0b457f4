"""What the page of exports shows is what its commands say."""

import re
from pathlib import Path

import pytest

from experiments import export, import_plan, tune
from experiments.cli.commandline import run

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "export.md"
NUMBER = re.compile(r"\d+\.\d+")
# Numbers of the page may be of a calibration before the last.
NEAR = 0.01


def shown(first: str) -> list[str]:
    """The lines of the page's block that begins so, without what it leaves out."""
    page = PAGE.read_text(encoding="utf-8")
    (block,) = re.findall(rf"```text\n({re.escape(first)}.*?)```", page, flags=re.DOTALL)
    return [line for line in block.splitlines() if line != "..."]


def is_said(line: str, said: str) -> bool:
    """Whether a line is among those that were said: in its words, with numbers near to them."""
    words = [re.escape(part).replace(re.escape("..."), ".*") for part in NUMBER.split(line)]
    pattern = re.compile(f"({NUMBER.pattern})".join(words))
    shown_numbers = [float(number) for number in NUMBER.findall(line)]
    return any(
        shown_numbers == pytest.approx([float(number) for number in found.groups()], rel=NEAR)
        for one in said.splitlines()
        if (found := pattern.fullmatch(one))
    )


def test_the_cost_of_an_export_is_as_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(export.main, ["--to", "megatron"]) == 0
    said = capsys.readouterr().err
    assert [line for line in shown("approximated: checkpointed") if not is_said(line, said)] == []


def test_the_changes_of_an_imported_plan_are_as_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(import_plan.main, []) == 0
    plan = tmp_path / "mine.yaml"
    plan.write_text(capsys.readouterr().out, encoding="utf-8")
    assert run(tune.main, ["--from", str(plan), "--out", str(tmp_path / "better.yaml")]) == 0
    said = capsys.readouterr().out
    assert [line for line in shown("as it is: ") if not is_said(line, said)] == []
