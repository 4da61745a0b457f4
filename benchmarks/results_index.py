"""Writes the dates of docs/results/README.md: when the figures of each page last changed.

python -m benchmarks.results_index; it asks git, so the pages must be committed.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = Path("docs/results")
# An entry of the list of pages: its link, what it answers, the command, and the date.
ROW = re.compile(r"^- \[([\w-]+)\]\(\1\.md\): (.*); (`.*`), ([\d-]*)$", re.MULTILINE)
_NUMBER = re.compile(r"\d+\.\d+|\d{2,}")
# A commit with fewer new numbers on a page only changed counts in its text; it measured nothing.
FEWEST = 4


def main() -> None:
    """Write the list of result pages again, each with the date when its figures last changed."""
    page = ROOT / RESULTS / "README.md"
    text = page.read_text(encoding="utf-8")
    page.write_text(ROW.sub(_dated, text), encoding="utf-8")
    sys.stdout.write(f"written: {page}\n")


def _dated(match: re.Match[str]) -> str:
    name, answers, command, date = match.groups()
    return f"- [{name}]({name}.md): {answers}; {command}, {made_on(name) or date}"


def made_on(stem: str) -> str:
    """The day of the last commit that brought a page or its files new figures."""
    paths = [f"{RESULTS}/{stem}.md", f"{RESULTS}/{stem}-*.csv"]
    for line in _git("log", "--format=%h %as", "--", *paths).splitlines():
        commit, day = line.split()
        if len(_figures(commit, stem) - _figures(f"{commit}^", stem)) >= FEWEST:
            return day
    return ""


def _figures(commit: str, stem: str) -> set[str]:
    """The numbers of a page and of its files, as of a commit."""
    names = _git("ls-tree", "--name-only", commit, f"{RESULTS}/").split()
    own = [name for name in names if re.fullmatch(rf"{stem}(-\d+\.csv|\.md)", Path(name).name)]
    return {number for name in own for number in figures_of(_git("show", f"{commit}:{name}"))}


def figures_of(text: str) -> set[str]:
    """The numbers in the table rows of a page or of a file."""
    lines = (line for line in text.splitlines() if line.startswith("|") or "," in line)
    return {number for line in lines for number in _NUMBER.findall(line)}


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout


if __name__ == "__main__":
    main()
