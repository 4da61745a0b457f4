"""Command lines and options that pages mention: each is one that a command takes."""

import contextlib
import io
import re
import shlex
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from experiments.cli.command import parser_for
from experiments.commands import COMMANDS

ROOT = Path(__file__).parents[1]
# A changelog tells of options that are gone, too.
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Options of programs that no file of this project calls: Docker, torchrun, pip.
OTHERS = {"--gpus", "--ipc", "--network", "--numa-binding", "--rm", "--ulimit"}
_FENCED = re.compile(r"^```[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`([^`\n]+)`")
_COMMAND = re.compile(r"(?:python -m experiments[. ]|\bmistlab )([a-z_]+)\b(?![.-])([^|><;&#]*)")
# What stands for something else in a command line: options left out, several values, a choice.
_OPEN = re.compile(r"\.\.\.|…|\[|\||\{|\b[A-Z]{2,}\b|<")


def blocks(text: str) -> Iterator[str]:
    """The lines of the code blocks of a page."""
    for block in _FENCED.finditer(text):
        yield from block[1].replace("\\\n", " ").splitlines()


def quotes(text: str) -> Iterator[str]:
    """What stands in quotes on a page, outside of its blocks."""
    yield from _CODE.findall(_FENCED.sub("", text).replace("\n", " "))


def command_lines(lines: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    """The names and arguments of this package's commands."""
    for line in lines:
        for name, arguments in _COMMAND.findall(line):
            if name in COMMANDS:
                with contextlib.suppress(ValueError):
                    yield name, shlex.split(arguments, comments=True)


def refusal(name: str, arguments: list[str]) -> str | None:
    """What the parser of a command says against arguments; None if it takes them."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            parser_for(COMMANDS[name], name).parse_args(arguments)
    except SystemExit as ended:
        return said.getvalue().strip() if ended.code else None
    return None


def options_of(name: str) -> set[str]:
    """The options that a command has."""
    actions = parser_for(COMMANDS[name], name)._actions
    return {option for action in actions for option in action.option_strings}


def unknown_options(name: str, arguments: list[str]) -> list[str]:
    """Options of a command line that its command does not have, where it has any."""
    known = {
        o for action in parser_for(COMMANDS[name], name)._actions for o in action.option_strings
    }
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    options = [word.partition("=")[0] for word in own if re.match(r"--[a-z]", word)]
    return [option for option in options if option not in known]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_command_lines_of_a_page_are_taken(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    wrong = [
        f"{name} {option}"
        for name, arguments in command_lines([*blocks(text), *quotes(text)])
        for option in unknown_options(name, arguments)
    ]
    for name, arguments in command_lines(blocks(text)):
        whole = " ".join(arguments)
        if not _OPEN.search(whole) and (said := refusal(name, arguments)):
            wrong.append(f"{name} {whole}: {said.splitlines()[-1]}")
    assert wrong == []


def test_pages_have_command_lines() -> None:
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    assert sum(len([*command_lines(blocks(text))]) for text in texts) > 70
    assert sum(len([*command_lines(quotes(text))]) for text in texts) > 70


def test_options_of_pages_stand_in_code() -> None:
    """An option in quotes is read by code, tests or CI of this project, or is another program's."""
    git = ["git", "ls-files"]
    listed = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=True)
    files = [ROOT / name for name in listed.stdout.split()]
    texts = "\n".join(
        path.read_text("utf-8", errors="ignore")
        for path in files
        if path.suffix not in (".md", ".svg", ".json") and path.is_file()
    )
    known = set(re.findall(r"--[a-zA-Z][\w-]*", texts))
    known |= OTHERS.union(*map(options_of, COMMANDS))
    missing = {
        (page.name, option)
        for page in PAGES
        for quote in quotes(page.read_text(encoding="utf-8"))
        if quote.startswith("--")
        for option in re.findall(r"(?<![\w-])--[a-z][\w-]*", quote)
        if option not in known and not option.endswith("-")
    }
    assert missing == set()
