"""The site: it builds without a warning, and every command of its pages runs as it is shown."""

import contextlib
import io
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from experiments.__main__ import main
from experiments.cli.command import parser_for
from experiments.cli.commandline import run
from experiments.commands import COMMANDS
from tests.test_readme import squeezed

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [
    DOCS / "index.md",
    *(path for folder in ("tutorials", "how-to") for path in sorted((DOCS / folder).glob("*.md"))),
]
# Pages whose commands need GPUs: their lines are parsed.
OF_GPUS = ("bare-node", "profile-my-machine")
_BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> Iterator[tuple[str, str, str]]:
    """The blocks of a page: language, what stands beside it, text."""
    for match in _BLOCK.finditer(page.read_text(encoding="utf-8")):
        yield match[1], match[2], match[3]


def commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """The commands of a block, each with the lines that are shown of its answer."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, *shown = part.strip().splitlines()
        yield command, shown


def answer(command: str, *, fails: bool) -> str:
    """What a command prints, on both of its streams."""
    program, *line = shlex.split(command)
    if program == "python":
        path = [sys.executable, *line]
        done = subprocess.run(
            path, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)}, check=True
        )
        return done.stdout
    assert program == "mistlab"
    told = io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
        try:
            status = run(lambda own: main(own, "mistlab"), line)
        except SystemExit as ended:
            status = int(ended.code or 0)
    assert (status != 0) == fails, f"{command}: {status}: {told.getvalue()[-800:]}"
    return told.getvalue()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_of_a_page_runs_as_shown(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    count = 0
    for language, beside, text in blocks(page):
        if title := re.search(r'title="([^"]+)"', beside):
            Path(title[1]).write_text(text, encoding="utf-8")
        elif language == "console":
            for command, shown in commands(text):
                told = squeezed(answer(command, fails="fails" in beside))
                for line in shown:
                    assert squeezed(line) in told, f"{command}: {line}"
                count += 1
        elif language == "sh":
            for line in text.splitlines():
                if match := re.match(r"(?:mistlab |python -m experiments\.)(\w+)(.*)", line):
                    name, words = match[1], shlex.split(match[2], comments=True)
                    parser_for(COMMANDS[name], name).parse_args(words)
    assert count or page.stem in OF_GPUS


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    line = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(line, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    start = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert "Thirty seconds" in start
    reference = (tmp_path / "reference" / "commands.html").read_text(encoding="utf-8")
    assert all(f'id="{name}"' in reference for name in COMMANDS)
    assert (tmp_path / "search" / "search_index.js").exists()
    for path in tmp_path.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        fetched = re.findall(r'(?:src|href)="(https?://[^"]+\.(?:js|css|woff2?))"', text)
        assert fetched == [], path
        assert "iframe-worker/shim" not in text
