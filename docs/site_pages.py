"""Makes the pages of the site that are written from the code, and replaces links to files outside
of the site.

MkDocs calls these functions by name while it builds the site.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
# A site is built from a checkout, which need not be installed.
sys.path.insert(0, str(ROOT))

from experiments.cli.command import parser_for  # noqa: E402
from experiments.commands import GROUPS  # noqa: E402
from mistlab.engines.engine import ENGINES, names_for_plans  # noqa: E402
from mistlab.plan.dimensions import DIMENSIONS  # noqa: E402

_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
_PICTURE = re.compile(r"^!\[([^\]]+)\]\(([^)\s]+)\)$", re.MULTILINE)
_TITLE = re.compile(r"^# (\d+)\. (.*)$", re.MULTILINE)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are written from the code."""
    for name, lines in (
        ("reference/commands.md", commands()),
        ("reference/dimensions.md", dimensions()),
        ("reference/engines.md", engines()),
        ("decisions/index.md", decisions()),
    ):
        files.append(File.generated(config, name, content="\n".join(lines) + "\n"))
    return files


def on_page_markdown(markdown: str, page: Any, files: Files, **_: Any) -> str:
    """Replace links to files outside of the site by the files' names, and write below each picture
    what it shows.
    """
    here = Path(page.file.src_uri).parent

    def link(match: re.Match[str]) -> str:
        mark, text, target, _ = match.groups()
        if ":" in target:
            return match[0]
        path = _joined(here, target)
        if path is not None and files.get_file_from_path(path):
            return match[0]
        outside = (ROOT / "docs" / here / target).resolve()
        if not outside.exists():
            return match[0]
        return text if mark or "`" in text else f"{text} (`{outside.relative_to(ROOT)}`)"

    return _LINK.sub(link, _PICTURE.sub(r"![\1](\2)\n\n*\1*", markdown))


def _joined(here: Path, target: str) -> str | None:
    """The path in the site to which a link leads; None if it leads outside of the site."""
    parts: list[str] = []
    for part in (here / target).parts:
        if part == "..":
            if not parts:
                return None
            parts.pop()
        elif part != ".":
            parts.append(part)
    return "/".join(parts)


def commands() -> Iterator[str]:
    """The lines of the page about commands: every command, with its options and examples."""
    yield "# Commands\n"
    yield "`mistlab NAME` and `python -m experiments.NAME` are the same.\n"
    for title, group in GROUPS.items():
        yield f"## {title}\n"
        for name, command in group.items():
            yield f"### {name}\n"
            yield f"{command.description}\n"
            yield from _options(parser_for(command, f"mistlab {name}"))
            yield "\n```sh"
            for why, words in command.examples.items():
                yield f"mistlab {name} {words}  # {why}"
            yield "```\n"


def _options(parser: Any) -> Iterator[str]:
    yield "| option | meaning |"
    yield "|---|---|"
    for action in parser._actions:
        if action.dest == "help":
            continue
        names = ", ".join(f"`{flag}`" for flag in action.option_strings) or f"`{action.dest}`"
        choices = f" (one of {', '.join(map(str, action.choices))})" if action.choices else ""
        told = (action.help or "").replace("%(default)s", str(action.default)) + choices
        yield f"| {names} | {told.replace('|', chr(92) + '|')} |"


def dimensions() -> Iterator[str]:
    """The lines of the page about dimensions: what a plan chooses for each stage."""
    yield "# Dimensions\n"
    yield "What a plan chooses for each stage; keys are those of a [plan file](plan-file.md).\n"
    yield "| key | symbol | part | numbers | default | in words |"
    yield "|---|---|---|---|---|---|"
    for name, row in DIMENSIONS.items():
        most = "1" if row.is_ratio else "" if row.maximum is None else f"{row.maximum:g}"
        numbers = f"{'ratio ' if row.is_ratio else ''}{row.minimum:g} to {most or 'any'}"
        default = "must be given" if row.default is None else f"{row.default:g}"
        told = row.noun or row.brief.format("N") or ", ".join(row.words) or row.amount
        cells = (f"`{row.path or name}`", row.symbol, row.part, numbers, default, told)
        yield f"| {' | '.join(cells)} |"


def engines() -> Iterator[str]:
    """The lines of the page about engines: those that plans may name, with the limits that searches
    respect.
    """
    yield "# Engines\n"
    yield "What runs a plan: its slots, kernels, memory and limits ([how a row is made]"
    yield "(../decisions/0019-engines-and-algebra.md)).\n"
    yield "| engine | highest ZeRO level | in a pipeline | offloads | precisions |"
    yield "|---|---|---|---|---|"
    for name in names_for_plans():
        row = ENGINES[name]
        inside = row.highest_zero_of(in_pipeline=True)
        offloads = "yes" if row.offloads else "no"
        precisions = ", ".join(row.memory)
        yield f"| `{name}` | {row.highest_zero} | {inside} | {offloads} | {precisions} |"


def decisions() -> Iterator[str]:
    """The lines of the page that lists all decisions, by number."""
    yield "# Decisions\n"
    yield "Why it is as it is: a question, the choice, and what was not chosen.\n"
    for path in sorted((ROOT / "docs" / "decisions").glob("*.md")):
        title = _TITLE.search(path.read_text(encoding="utf-8"))
        if title:
            yield f"- [{int(title[1])}. {title[2]}]({path.name})"
