"""Prints figures about the source: code lines by folder, numbers of files, repeated names,
functions with equal bodies, and how much code a command runs.

    python -m benchmarks.house [--no-walks]
    python -m benchmarks.house --commits REVISION..REVISION    # code lines that each commit added

Code lines are those without blanks, comments and docstrings.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from benchmarks.walk import PACKAGES, ROOT

MOST_LINES, MOST_FILES, LEAST_STATEMENTS = 600, 20, 3
WALKS = {
    "predict": ("predict", "examples/plans/gpt3-2.7b-4xl4.yaml"),
    "tune": ("tune", "--json", "--out", "/dev/null"),
}
_NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}
Tree = Mapping[str, str]


def tree_of(root: Path = ROOT) -> dict[str, str]:
    """The texts of the packages' modules, by path."""
    files = (file for name in PACKAGES for file in (root / name).rglob("*.py"))
    return {
        file.relative_to(root).as_posix(): file.read_text(encoding="utf-8")
        for file in sorted(files)
    }


@cache
def parsed(text: str) -> ast.Module:
    """The syntax tree of a module, which several rules walk through."""
    return ast.parse(text)


def code_lines(text: str) -> int:
    """The lines with code: not blank lines, comments or docstrings."""
    documented: set[int] = set()
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, kinds) and ast.get_docstring(node) is not None:
            documented |= _lines_of(node.body[0])
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            lines |= {*range(token.start[0], token.end[0] + 1)}
    return len(lines - documented)


def _lines_of(node: ast.stmt) -> set[int]:
    return {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}


def large_folders(tree: Tree) -> dict[str, int]:
    """The folders with too many files, each with their number."""
    counts = Counter(path.rpartition("/")[0] for path in tree)
    return {folder: count for folder, count in counts.items() if count > MOST_FILES}


def long_files(tree: Tree) -> dict[str, int]:
    """The files with too many lines, each with their number."""
    counts = {path: text.count("\n") for path, text in tree.items()}
    return {path: count for path, count in counts.items() if count > MOST_LINES}


def repeated_files(tree: Tree) -> dict[str, int]:
    """The file names that occur several times within a top folder, each with their number."""
    names = (_within_top(path, path.rpartition("/")[2]) for path in tree)
    plain = (name for name in names if "__" not in name)
    return _several(Counter(plain))


def repeated_classes(tree: Tree) -> dict[str, int]:
    """The class names that occur several times within a top folder, each with their number."""
    return _several(
        Counter(
            _within_top(path, node.name)
            for path, text in tree.items()
            for node in ast.walk(parsed(text))
            if isinstance(node, ast.ClassDef)
        )
    )


def _within_top(path: str, name: str) -> str:
    return f"{path.partition('/')[0]}: {name}"


def _several(counts: Mapping[str, int]) -> dict[str, int]:
    return {name: count for name, count in counts.items() if count > 1}


def equal_bodies(tree: Tree) -> list[list[str]]:
    """Functions of at least three statements whose bodies are equal, docstrings aside."""
    bodies: dict[str, list[str]] = defaultdict(list)
    for path, text in tree.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                body = node.body[ast.get_docstring(node) is not None :]
                if sum(isinstance(part, ast.stmt) for one in body for part in ast.walk(one)) >= (
                    LEAST_STATEMENTS
                ):
                    key = ast.dump(ast.Module(body, []))
                    bodies[key].append(f"{path}:{node.name}")
    return [names for names in bodies.values() if len(names) > 1]


def walk_counts(name: str, enough: int = 0) -> tuple[int, int]:
    """The numbers of files and functions that a command enters, measured in a separate process in
    which expressions are cached, as they are from the second time on.

    A first time that enters at most ``enough`` files has no second one.
    """
    first = _walked(name)
    return first if first[0] <= enough else min(first, _walked(name))


def _walked(name: str) -> tuple[int, int]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.walk", *WALKS[name]],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    found = re.search(r"(\d+) files, (\d+) functions\n$", done.stdout)
    assert found is not None
    return int(found[1]), int(found[2])


def figures(tree: Tree) -> Iterator[str]:
    """A line for each folder of code, and one for each other figure."""
    lines, files = Counter[str](), Counter[str]()
    for path, text in tree.items():
        top, *rest = path.split("/")
        rooms = [top, f"{top}/{rest[0]}"] if len(rest) > 1 else [top]
        for room in ("all", *rooms):
            lines[room] += code_lines(text)
            files[room] += 1
    for room in sorted(lines):
        yield f"{room:32} {lines[room]:6} code lines {files[room]:4} files"
    yield f"folders with more than {MOST_FILES} files: {large_folders(tree)}"
    yield f"files above {MOST_LINES} lines: {long_files(tree)}"
    repeated = repeated_files(tree)
    yield f"basenames that repeat: {len(repeated)}, of {sum(repeated.values())} files"
    repeated = repeated_classes(tree)
    yield f"class names that repeat: {len(repeated)}, of {sum(repeated.values())} classes"
    equal = equal_bodies(tree)
    yield f"equal bodies: {len(equal)}"
    yield from (f"  {' = '.join(names)}" for names in equal)


def commits(revisions: str, root: Path = ROOT) -> Iterator[str]:
    """A line for each commit of a range: the code lines of the packages that it added or, if
    negative, removed.
    """
    for line in _git(root, "log", "--reverse", "--format=%h %s", revisions).splitlines():
        commit = line.partition(" ")[0]
        before, after = (_lines_at(root, revision, commit) for revision in (f"{commit}~", commit))
        yield f"{after - before:+6} {line}"


def _lines_at(root: Path, revision: str, commit: str) -> int:
    """The number of code lines, at a revision, of the modules that a commit changes."""
    changed = _git(
        root, "diff", "--no-renames", "--name-only", f"{commit}~", commit, "--", *PACKAGES
    )
    there = _git(root, "ls-tree", "-r", "--name-only", revision, "--", *PACKAGES).splitlines()
    names = {*changed.splitlines()} & {name for name in there if name.endswith(".py")}
    return sum(code_lines(_git(root, "show", f"{revision}:{name}")) for name in names)


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
    return done.stdout


def main(arguments: Sequence[str]) -> int:
    """Print the figures about the source or, with ``--commits``, the code lines of each commit."""
    if "--commits" in arguments:
        for line in commits(arguments[-1]):
            sys.stdout.write(f"{line}\n")
        return 0
    for line in figures(tree_of()):
        sys.stdout.write(f"{line}\n")
    for name in () if "--no-walks" in arguments else WALKS:
        files, functions = walk_counts(name)
        sys.stdout.write(f"{name} enters {files} files, {functions} functions\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
