"""Makes the pages of docs/results again, each by the command that the page names.

python -m benchmarks.result_pages [NAME...] [--longest SECONDS]; a page stays as it is if its
command reads files that are not here, such as tables of measurements, or fails.
"""

import argparse
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.results_index import RESULTS, ROOT, figures_of

# The command of a page is the first block of code above its tables and pictures.
_COMMAND = re.compile(r"\A[^|!]*?```\n(python -m experiments\.[^`]*)```")
_ABSENT = re.compile(r"(.*\.csv|(?:.*=)?\.venv[-/].*)")


def main() -> int:
    """Make the pages and print what changed; the status is 1 if a command failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="pages, such as ladder (all)")
    parser.add_argument(
        "--longest", type=float, default=3600.0, help="seconds after which a command is ended"
    )
    options = parser.parse_args()
    pages = {path.stem: path for path in sorted((ROOT / RESULTS).glob("*.md"))}
    unknown = sorted(set(options.names) - set(pages))
    if unknown:
        known = ", ".join(pages)
        parser.error(f"NAME: no page of {RESULTS} is named {unknown[0]!r}: give some of {known}")
    results = [_made_again(pages[name], options.longest) for name in options.names or pages]
    return int("failed" in results)


def command_of(page: str) -> list[str] | None:
    """The words of the command that writes a page; None if the page does not begin with one."""
    match = _COMMAND.match(page)
    return shlex.split(match[1].replace("\\\n", " ")) if match else None


def missing_files(command: list[str]) -> list[str]:
    """The files and folders that a command reads and that are not below the project's root."""
    named = [word.rpartition("=")[2] for word in command if _ABSENT.fullmatch(word)]
    if "--tables" in command:
        named.append(command[command.index("--tables") + 1])
    return sorted({name for name in named if not (ROOT / name).exists()})


def _made_again(page: Path, longest_s: float) -> str:
    """Run a page's command; returns ``made``, ``left`` (as it was) or ``failed``."""
    before = page.read_text(encoding="utf-8")
    command = command_of(before)
    if command is None:
        return _say(page.stem, "left", "the page does not begin with a command of experiments")
    missing = missing_files(command)
    if missing:
        return _say(page.stem, "left", f"its command reads {', '.join(missing)}: not here")
    program = [sys.executable, *command[1:], "--page", str(page.relative_to(ROOT))]
    start = time.perf_counter()
    try:
        done = subprocess.run(
            program, cwd=ROOT, capture_output=True, text=True, check=False, timeout=longest_s
        )
    except subprocess.TimeoutExpired:
        return _say(page.stem, "failed", f"no end after {longest_s:.0f} s: raise --longest")
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        return _say(page.stem, "failed", f"status {done.returncode}: {last[0]}")
    fresh = figures_of(page.read_text(encoding="utf-8")) - figures_of(before)
    seconds = time.perf_counter() - start
    return _say(page.stem, "made", f"{seconds:.0f} s, {len(fresh)} new figures in its tables")


def _say(name: str, result: str, detail: str) -> str:
    sys.stdout.write(f"{name}: {result}: {detail}\n")
    sys.stdout.flush()
    return result


if __name__ == "__main__":
    sys.exit(main())
