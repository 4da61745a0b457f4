"""Plants faults in the runtime, one at a time, and records which test fails (mutation testing).

    python -m benchmarks.mutations [--list LIST] [--only NUMBERS] [--page PAGE]
    python -m benchmarks.mutations --draw SEED

There are fixed lists (``tests/mutations``): faults that were planted by hand, faults drawn from the
code, and faults in code that only a GPU runs or that was new. Each fault is planted in a copy of
the checkout, where the tests that belong to its file run until one fails; the test that caught it
before runs first. ``--draw`` prints the faults that a seed draws from today's code. There are four
kinds: a missing wait, another group of ranks, another sign, another slice.
"""

import argparse
import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter, sleep
from typing import Any, NoReturn, Self

import numpy as np
import pytest
import yaml

from experiments.cli.rundir import revision
from experiments.pages.page_tables import IN_A_FILE, write_page

ROOT = Path(__file__).parents[1]
LISTS = {name: ROOT / f"tests/mutations/{name}.yaml" for name in ("audited", "drawn", "recent")}
CHECKS = ROOT / "tests/mutations/checks.yaml"
KEPT = ROOT / "runs/mutations.json"
COPIED = (
    *("runtime", "mistlab", "searchers", "simulators", "experiments", "tests", "benchmarks"),
    "pyproject.toml",
)
# Modules that tests import and that take seconds to import.
IMPORTED = ("torch", "torch.distributed.checkpoint", "sympy", "simpy", "triton")
GONE = "the code is not there any more"
# Exit statuses of pytest if a test's name is unknown, or no test was selected.
_WITHOUT_TESTS = (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED)
# The time limit for the tests of a fault: a fault that makes a rank wait forever is caught by it.
MOST_S = 150.0

# Faults, each as pieces of a file and their replacements.


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """A fault: pieces of a file, each of which occurs once, and their replacements.

    ``equivalent`` says why the fault changes no behaviour, if it does not; ``replanted`` says what
    has become of the code for which the fault was listed.
    """

    fault: str
    file: str
    edits: tuple[tuple[str, str], ...]
    equivalent: str = ""
    replanted: str = ""

    @classmethod
    def of(cls, said: dict[str, Any]) -> Self:
        """The fault that an item of a list describes."""
        edits = said.get("edits") or [(said["right"], said["wrong"])]
        return cls(
            fault=said["fault"],
            file=said["file"],
            edits=tuple((right, wrong) for right, wrong in edits),
            equivalent=said.get("equivalent", ""),
            replanted=said.get("replanted", ""),
        )

    @property
    def key(self) -> str:
        """The key under which the outcome of the fault is stored."""
        return f"{self.file}: {self.fault}"

    def planted(self, text: str) -> str | None:
        """The file's text with the fault; None if a piece does not occur exactly once."""
        for right, wrong in self.edits:
            if text.count(right) != 1:
                return None
            text = text.replace(right, wrong)
        return text


def mutations(path: Path) -> list[Mutation]:
    """Read the list of faults in a file."""
    return [Mutation.of(one) for one in yaml.safe_load(path.read_text(encoding="utf-8"))]


# Draws faults from the code.

ROOMS = ("runtime/engine", "runtime/comm", "runtime/devices")
# The kinds of faults, in the order of the list, and the number that is drawn of each.
KINDS = ("wait", "group", "sign", "slice")
DRAWN = 15
_WAITS = {"wait_event", "synchronize", "wait", "result", "record", "settle", "finish"} | {
    "finished",
    "enter",
    "greet",
    "join",
}
_GROUPS = {
    "gather": "reduce",
    "reduce": "tensor",
    "tensor": "gather",
    "world": "tensor",
    "tied": "world",
    "gatherers": "reducers",
    "reducers": "gatherers",
    "data": "tensor",
    "data_parallel": "tensor_parallel",
    "tensor_parallel": "data_parallel",
    "local_rank": "rank",
}
# The names of objects that have a group of ranks as an attribute (``data``, ``tensor``, ...).
_OWNERS = ("connections", "place", "own", "other", "shape", "world", "before", "stage")
_SIGNS: dict[type[ast.AST], str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "/",
    ast.Div: "*",
    ast.FloorDiv: "*",
    ast.Mod: "//",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Lt: ">=",
    ast.LtE: ">",
    ast.Gt: "<=",
    ast.GtE: "<",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.And: "or",
    ast.Or: "and",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A piece of a line, and its possible replacements; with ``keeps``, blanks and brackets around
    it stay.
    """

    kind: str
    line: int
    begin: int
    end: int
    instead: str
    keeps: bool = False


def places(text: str) -> Iterator[Place]:
    """All pieces of a file's functions in which a fault of some kind can be planted."""
    tree = ast.parse(text)
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and function.name not in ("__repr__", "__str__"):
            for statement in function.body:
                for node in _working(statement):
                    yield from _places_of(node, text)


def _working(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a statement, without inner functions, error messages and annotations."""
    if isinstance(node, ast.FunctionDef | ast.Raise | ast.JoinedStr | ast.Assert):
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns"):
            for one in value if isinstance(value, list) else [value]:
                if isinstance(one, ast.AST):
                    yield from _working(one)


def _places_of(node: ast.AST, text: str) -> Iterator[Place]:
    match node:
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name))):
            if name in _WAITS:
                yield from _place("wait", node, "pass")
        case ast.Attribute(ctx=ast.Load()):
            yield from _groups(node, text)
        case ast.BinOp() | ast.Compare(ops=[_]) | ast.BoolOp(values=[_, _]) | ast.UnaryOp():
            yield from _signs(node, text)
        case ast.Subscript():
            yield from _slices(node, text)
        case _:
            pass


def _groups(node: ast.Attribute, text: str) -> Iterator[Place]:
    owner, name = node.value, node.attr
    if name in _GROUPS and (_last(owner) in _OWNERS or name in ("gatherers", "reducers")):
        other = "data" if _last(owner) == "place" and name == "tensor" else _GROUPS[name]
        yield from _place("group", node, f"{_said(owner, text)}.{other}")


def _signs(node: ast.AST, text: str) -> Iterator[Place]:
    match node:
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _SIGNS:
            yield from _between("sign", left, right, _SIGNS[type(op)])
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _SIGNS:
            yield from _between("sign", left, right, _SIGNS[type(op)])
        case ast.BoolOp(op=op, values=[left, right]):
            yield from _between("sign", left, right, _SIGNS[type(op)])
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield from _place("sign", node, _said(operand, text))
        case _:
            pass


def _slices(node: ast.Subscript, text: str) -> Iterator[Place]:
    whole, index = _said(node.value, text), node.slice
    if isinstance(index, ast.Slice):
        bounds = [_said(one, text) if one else "" for one in (index.lower, index.upper)]
        if _last(node.value) != "shape":
            yield from _place("slice", node, whole)
        if all(bounds):
            yield from _place("slice", node, f"{whole}[{bounds[0]}:]")
            yield from _place("slice", node, f"{whole}[:{bounds[1]}]")
    elif _last(index) in ("entry", "room", "turn", "micro_batch", "rank"):
        yield from _place("slice", node, f"{whole}[0]")


def _said(node: ast.AST, text: str) -> str:
    return ast.get_source_segment(text, node) or ""


def _last(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _place(kind: str, node: Any, instead: str) -> Iterator[Place]:
    if node.lineno == node.end_lineno:
        yield Place(
            kind=kind,
            line=node.lineno,
            begin=node.col_offset,
            end=node.end_col_offset,
            instead=instead,
        )


def _between(kind: str, left: Any, right: Any, instead: str) -> Iterator[Place]:
    """The operator between two operands on one line, which brackets may surround."""
    if left.end_lineno == right.lineno:
        yield Place(
            kind=kind,
            line=right.lineno,
            begin=left.end_col_offset,
            end=right.col_offset,
            instead=instead,
            keeps=True,
        )


def _as_mutation(path: str, text: str, place: Place) -> Mutation:
    """A fault in a piece of a line as whole lines, with enough preceding lines to be unique in the
    file.
    """
    lines = text.splitlines(keepends=True)
    line = lines[place.line - 1]
    was = line[place.begin : place.end]
    instead = place.instead
    if place.keeps:
        instead = was.replace(was.strip(" ()"), instead)
    changed = line[: place.begin] + instead + line[place.end :]
    first = place.line - 1
    while text.count("".join(lines[first : place.line])) != 1:
        first -= 1
    before = "".join(lines[first : place.line - 1])
    fault = f"{place.kind}: {was.strip()} is {instead.strip()}, line {place.line}"
    return Mutation(fault=fault, file=path, edits=((before + line, before + changed),))


def drawn(seed: int) -> dict[str, list[Mutation]]:
    """Faults of each kind in the order that a seed draws, at most one a line."""
    found: dict[str, list[Mutation]] = {kind: [] for kind in KINDS}
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            name = path.relative_to(ROOT).as_posix()
            for place in places(text):
                found[place.kind].append(_as_mutation(name, text, place))
    draw = np.random.default_rng(seed)
    out: dict[str, list[Mutation]] = {}
    for kind, made in found.items():
        lines: dict[tuple[str, str], Mutation] = {}
        for number in draw.permutation(len(made)):
            one = made[number]
            lines.setdefault((one.file, one.edits[0][0]), one)
        out[kind] = [*lines.values()]
    return out


def list_of(seed: int) -> str:
    """The faults that a seed draws, in the form of a list."""
    items = [
        {"fault": one.fault, "file": one.file, "right": right, "wrong": wrong}
        for made in drawn(seed).values()
        for one in made[:DRAWN]
        for right, wrong in one.edits
    ]
    text: str = yaml.safe_dump(items, sort_keys=False, width=200, allow_unicode=True)
    return text


# Plants faults, and runs the tests that belong to their files.


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of planting a fault: the first test that failed, or why none did."""

    mutation: Mutation
    caught_by: str
    seconds: float


class Nursery:
    """A copy of the checkout in which faults are planted, with processes that run its tests.

    This process imports torch once. It forks a process for each fault, which need not import torch
    again, and imports the project with the fault.
    """

    def __init__(self, folder: Path, most_s: float) -> None:
        self.folder, self._most_s = folder, most_s
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        for name in listed.stdout.splitlines():
            if name.startswith(COPIED) and (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, folder / name)
        for heavy in IMPORTED:
            __import__(heavy)

    def tested(self, tests: Sequence[str], *, may_lack: bool = False) -> str:
        """The first of some tests that fails, or another reason for which their process ended;
        empty if none fails.

        With ``may_lack``, tests that do not exist are ignored.
        """
        said = self.folder / "said.txt"
        child = os.fork()
        if child == 0:
            self._test(tests, said)
        begun = perf_counter()
        while True:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                break
            if perf_counter() - begun > self._most_s:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return f"no end within {self._most_s:.0f} s: {self._last(said)}"
            sleep(0.05)
        if not status or (may_lack and os.waitstatus_to_exitcode(status) in _WITHOUT_TESTS):
            return ""
        text = said.read_text(encoding="utf-8", errors="replace")
        failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", text, re.MULTILINE)
        return failed[1] if failed else f"the process ended: {self._last(said)}"

    def _test(self, tests: Sequence[str], said: Path) -> NoReturn:
        code = 1
        try:
            os.setsid()
            os.chdir(self.folder)
            sys.path.insert(0, str(self.folder))
            os.environ["PYTHONPATH"] = str(self.folder)
            # Modules that this process has already imported lack the fault: import them again.
            for name in [name for name in sys.modules if name.split(".")[0] in COPIED]:
                del sys.modules[name]
            with said.open("w", encoding="utf-8") as file:
                for stream in (1, 2):
                    os.dup2(file.fileno(), stream)
            options = ("-x", "-v", "--tb=line", "-p", "no:benchmark", "-p", "no:cacheprovider")
            code = int(pytest.main([*options, "-m", "not slow", *tests]))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    @staticmethod
    def _last(said: Path) -> str:
        """The last test that the output mentions."""
        text = said.read_text(encoding="utf-8", errors="replace") if said.exists() else ""
        return next(iter(re.findall(r"tests/\S+", text)[-1:]), "nothing was said")

    def planted(self, mutation: Mutation, tests: Sequence[str], known: str = "") -> Outcome:
        """Plant a fault, run tests until one fails, and take the fault out again.

        The ``known`` test, which caught the fault before, runs first if it still exists.
        """
        begun = perf_counter()
        path = self.folder / mutation.file
        text = path.read_text(encoding="utf-8")
        wrong = mutation.planted(text)
        if wrong is None:
            return Outcome(mutation=mutation, caught_by=GONE, seconds=0.0)
        path.write_text(wrong, encoding="utf-8")
        try:
            caught_by = self.tested([known], may_lack=True) if known else ""
            caught_by = caught_by or self.tested(tests)
        finally:
            path.write_text(text, encoding="utf-8")
        return Outcome(mutation=mutation, caught_by=caught_by, seconds=perf_counter() - begun)


def run(name: str, numbers: Sequence[int], kept: Path, most_s: float) -> None:
    """Plant the faults of a list, or those with certain numbers, and store the outcomes."""
    checks = yaml.safe_load(CHECKS.read_text(encoding="utf-8"))["tests of files"]
    listed, code = mutations(LISTS[name]), revision()
    known = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    with TemporaryDirectory() as folder:
        nursery = Nursery(Path(folder), most_s)
        for number, one in enumerate(listed, 1):
            if (numbers and number not in numbers) or one.equivalent:
                continue
            before = known.get(one.key, {}).get("caught_by", "")
            found = nursery.planted(
                one, checks[one.file], before if before.startswith("tests/") else ""
            )
            known[one.key] = {"caught_by": found.caught_by, "s": found.seconds, "of": code}
            caught = found.caught_by or "NOTHING"
            sys.stderr.write(f"{name} {number}: {one.fault}: {caught} ({found.seconds:.0f} s)\n")
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps(known, indent=1), encoding="utf-8")


# Writes the page.


def page(kept: Path) -> Iterator[str]:
    """The lines of the page of results, from the stored outcomes."""
    known = json.loads(kept.read_text(encoding="utf-8"))
    explained = yaml.safe_load(CHECKS.read_text(encoding="utf-8"))["explained"] or {}
    counted = {
        name: [one for one in mutations(path) if not one.equivalent] for name, path in LISTS.items()
    }
    codes = {outcome["of"] for outcome in known.values() if "of" in outcome}
    yield from (
        *("# Faults that are planted in the runtime", ""),
        "Lists of faults were fixed before the checks were changed that are to find them:",
        "`tests/mutations` has those planted by hand (audited), those that a tool drew from the",
        "code (drawn), and those in code that only a GPU runs or that was new (recent). Each is",
        "planted alone, in a copy of the checkout; the quick tests of its file",
        "(`tests/mutations/checks.yaml`) run until one fails. No GPU takes part.",
        *("", "    python -m benchmarks.mutations --page docs/results/mutations.md", ""),
        *(f"Planted in the code of revision {', '.join(sorted(codes))}.", ""),
        *("| list | faults | found | not found |", "|---|---|---|---|"),
    )
    for name, listed in counted.items():
        found = sum(is_caught(known.get(one.key)) for one in listed)
        share = found / len(listed)
        yield f"| {name} | {len(listed)} | {found} ({share:.0%}) | {len(listed) - found} |"
    for name, listed in counted.items():
        yield from ("", f"## {name.capitalize()}", "")
        for one in listed:
            if not is_caught(known.get(one.key)):
                outcome = _outcome(one, known.get(one.key), explained)
                yield from (f"- `{one.file}`, {one.fault}: {outcome}.", "")
        yield from (IN_A_FILE, "")
        yield from ("| fault | file | found by |", "|---|---|---|")
        yield from (_row(one, known.get(one.key), explained) for one in listed)
    same = [one for path in LISTS.values() for one in mutations(path) if one.equivalent]
    yield from ("", "Drawn, and not counted, because they change nothing:", "")
    yield from (f"- `{one.file}`, {one.fault}: {one.equivalent}." for one in same)


def _row(one: Mutation, said: dict[str, Any] | None, explained: dict[str, str]) -> str:
    fault = f"{one.fault} (planted again: {one.replanted})" if one.replanted else one.fault
    cells = (fault, f"`{one.file}`", _outcome(one, said, explained))
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _outcome(one: Mutation, said: dict[str, Any] | None, explained: dict[str, str]) -> str:
    caught = said["caught_by"] if said else "not run"
    return (
        f"`{caught}`"
        if is_caught(said)
        else f"**not found**: {explained.get(one.fault) or caught or 'it has no check yet'}"
    )


def is_caught(said: dict[str, Any] | None) -> bool:
    """Whether a test failed, or did not end, because of a fault."""
    return said is not None and said["caught_by"] not in ("", GONE)


def main(arguments: Sequence[str]) -> int:
    """Draw faults from a seed, or plant the listed faults and write the page of outcomes."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutations", description=__doc__)
    parser.add_argument("--draw", type=int, help="print what this seed draws from the code")
    parser.add_argument("--list", choices=tuple(LISTS), action="append", help="this list alone")
    parser.add_argument("--only", type=int, nargs="*", default=[], help="numbers in the list")
    parser.add_argument("--kept", type=Path, default=KEPT, help="where outcomes are kept")
    parser.add_argument(
        "--seconds", type=float, default=MOST_S, help="for a fault's tests: more on a busy machine"
    )
    parser.add_argument("--page", type=Path, help="the page to write")
    parser.add_argument("--no-run", action="store_true", help="write the page alone")
    options = parser.parse_args(arguments)
    if options.draw is not None:
        sys.stdout.write(list_of(options.draw))
        return 0
    for name in () if options.no_run else options.list or LISTS:
        run(name, options.only, options.kept, options.seconds)
    if options.page:
        write_page(options.page, "\n".join(page(options.kept)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
