"""The rules of the house (``tests/house.py``) hold, but for a list that may only shrink."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.house import WALKS, code_lines, commits, equal_bodies, parsed, walk_counts
from benchmarks.walk import Walk
from tests.house import DECLARES, RULES, WALK_BUDGET, grown, listed, over_budget, stale, whole_tree

TREE = whole_tree()
LISTED = listed()


@pytest.fixture(autouse=True, scope="module")
def _trees() -> Iterator[None]:
    """Syntax trees of all modules take 160 MB."""
    yield
    parsed.cache_clear()


@pytest.mark.parametrize("name", RULES)
def test_a_rule_has_no_further_offender(name: str) -> None:
    """Who has mended one: ``python -m tests.house --write``."""
    today = RULES[name](TREE)
    assert grown(LISTED[name], today) == []
    assert stale(LISTED[name], today) == []


def test_lists_are_of_rules() -> None:
    assert set(LISTED) == {*RULES}
    assert any(path.startswith(DECLARES) for path in TREE)


@pytest.mark.parametrize("name", WALKS)
def test_a_command_enters_no_more_files(name: str) -> None:
    assert over_budget({name: walk_counts(name, WALK_BUDGET[name])[0]}) == []


CONTRACT = '[[tool.importlinter.contracts]]\nlayers = ["mistlab.a | mistlab.b"]\n'
# A tree in which a rule has one offender.
PLANTED = {
    "contracts name modules": {
        "pyproject.toml": CONTRACT,
        "mistlab/a.py": "",
        "mistlab/b/__init__.py": "",
    },
    "basenames repeat": {"runtime/a/x.py": "", "runtime/b/x.py": "", "searchers/x.py": ""},
    "class names repeat": {
        "runtime/a.py": "class X: ...",
        "runtime/b.py": "class X: ...",
        "searchers/x.py": "class X: ...",
    },
    "folders of more than 20 files": {f"mistlab/cost/{number}.py": "" for number in range(21)},
    "files above 600 lines": {"mistlab/a.py": "\n" * 601, "mistlab/b.py": "\n" * 600},
    "tests of parts of names": {
        "mistlab/a.py": 'run.engine.startswith("fsdp")',
        "mistlab/b.py": 'engine == "fsdp" or name.startswith("fsdp")',
    },
    "tests of tables' text": {
        "experiments/runs/a.py": '"lora" in notes',
        "experiments/runs/b.py": 'row.text("notes") or row.way == "none" or name in parts',
        "experiments/runs/runs_table.py": 'text_of(row, "zero") == "none"',
        "experiments/runs/dialects/a.py": "import re",
        "experiments/measured/a.py": "import re",
    },
    "fractions without a source": {
        "mistlab/cost/a.py": "# A share.\nSHARE = 0.13\n",
        "mistlab/cost/b.py": "# Fitted to runs.\nSHARE = 0.13\nHALF = 0.5\n",
    },
    "files that name dimensions": {
        "mistlab/a.py": "stage.context_exchange",
        "mistlab/b.py": "stage.layers",
        f"{DECLARES}dimensions.py": "context_exchange = 1",
    },
    "vague variables beyond a line": {
        "mistlab/a.py": "def f(found):\n    return found\n",
        "mistlab/b.py": "def f(one): return one\ndef g(own): return own\n",
        "mistlab/c.py": "class Row:\n    place: int\n    own: int\ndef f(row): return row.place\n",
        "mistlab/shell/a.py": "def f(words):\n    return words\n",
    },
    "dotted names of pages": {
        "README.md": "`mistlab.a.there` and `mistlab.a.gone`",
        "mistlab/__init__.py": "",
        "mistlab/a.py": "there = 1",
    },
    "paths of pages": {"README.md": "`mistlab/a.py`, `mistlab/b.py`", "mistlab/a.py": ""},
    "engines of pages": {"README.md": "`--engine megatron`, `fsdp-eager`, `fsdp-gone`"},
}


@pytest.mark.parametrize("name", RULES)
def test_a_planted_fault_is_an_offender(name: str) -> None:
    today = RULES[name](PLANTED[name])
    assert len(today) == 1
    assert grown({}, today)
    assert stale(today, {})
    assert not grown(today, today)


def test_constants_in_names_are_tests_of_parts() -> None:
    tree = {"mistlab/a.py": '"megatron" in run.engine\n"x" in remarks\nkey in hardware.name'}
    assert RULES["tests of parts of names"](tree) == {"mistlab/a.py": 1}


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("own = 1\nprint(own)", 1),
        ("def f(some):\n    return lambda: some", 1),
        ("def f(values):\n    return [\n        one\n        for one in values\n    ]", 1),
        ("def f(some):\n    return [one for one in some]\none = 1", 1),
        ("try: ...\nexcept OSError as told:\n    print(told)", 1),
        ("def f(): return some\ndef g(): return some", 0),
        ("def f(one): return one\ndef g(one): return one", 0),
    ],
)
def test_a_variable_s_lines_are_those_of_its_scope(text: str, count: int) -> None:
    tree = {"mistlab/a.py": text}
    assert RULES["vague variables beyond a line"](tree).get("mistlab/a.py", 0) == count


@pytest.mark.parametrize(
    "test",
    [
        "import re",
        "from re import search",
        'engine.casefold().startswith("fsdp")',
        '"lora" not in notes',
        'row.text("zero") == "none"',
        'text_of(cells, "zero") in LEVELS',
        'row.cells["zero"] == "none"',
    ],
)
def test_a_test_of_a_table_s_text_is_an_offender(test: str) -> None:
    assert RULES["tests of tables' text"]({"experiments/runs/a.py": test})


def test_code_lines_are_without_blanks_comments_and_docstrings() -> None:
    text = '"""Module."""\n\n# A comment.\ndef f():\n    """Doc."""\n    return (1,\n 2)\n'
    assert code_lines(text) == 3


def test_code_lines_of_a_commit_are_those_that_it_added(tmp_path: Path) -> None:
    module = tmp_path / "mistlab" / "a.py"
    module.parent.mkdir()
    git = "git", "-c", "user.name=a", "-c", "user.email=a@b"
    subprocess.run([*git, "init", "-q"], cwd=tmp_path, check=True)
    for text in ("a = 1\n", "# A comment.\n\na = 1\nb = 2\nc = 3\n", "c = 3\n"):
        module.write_text(text)
        subprocess.run([*git, "add", "-A"], cwd=tmp_path, check=True)
        subprocess.run([*git, "commit", "-qm", f"{len(text)}"], cwd=tmp_path, check=True)
    added = [line.split() for line in commits("HEAD~2..HEAD", tmp_path)]
    assert [(line[0], line[-1]) for line in added] == [("+2", "32"), ("-2", "6")]


def test_equal_bodies_are_found() -> None:
    body = "    a = 1\n    b = 2\n    return a + b\n"
    tree = {"mistlab/a.py": f"def f():\n{body}", "mistlab/b.py": f'def g():\n    """G."""\n{body}'}
    assert equal_bodies(tree) == [["mistlab/a.py:f", "mistlab/b.py:g"]]


def test_a_walk_counts_functions_that_main_enters(tmp_path: Path) -> None:
    """Not those before it, of class bodies or of code compiled from text."""
    text = """
def before(): ...
def called(): exec(compile("def f(): ...\\nf()", "text", "exec"), {})
def main():
    class Body: ...
    called()
before()
main()
"""
    walk = Walk(tmp_path)
    code = compile(text, str(tmp_path / "mistlab" / "a.py"), "exec")
    sys.setprofile(walk)
    try:
        exec(code, {})
    finally:
        sys.setprofile(None)
    assert walk.functions == {"mistlab/a.py": {"main", "called"}}


@pytest.mark.parametrize("name", WALKS)
def test_a_walk_that_enters_a_file_too_many_is_over_its_budget(name: str, tmp_path: Path) -> None:
    budget = WALK_BUDGET[name]
    assert over_budget({name: len(_walk_through(budget, tmp_path))}) == []
    assert over_budget({name: len(_walk_through(budget + 1, tmp_path))}) == [
        f"{name} enters {budget + 1} files: at most {budget}"
    ]


def _walk_through(count: int, root: Path) -> dict[str, set[str]]:
    """The walk of a command that enters so many files, its own among them."""
    others: dict[str, Any] = {}
    for number in range(count - 1):
        path = root / "mistlab" / f"room_{number}.py"
        exec(compile(f"def enter_{number}(): ...", str(path), "exec"), others)
    calls = "".join(f"    enter_{number}()\n" for number in range(count - 1))
    path = root / "experiments" / "command.py"
    code = compile(f"def main():\n{calls}main()", str(path), "exec")
    walk = Walk(root)
    sys.setprofile(walk)
    try:
        exec(code, others)
    finally:
        sys.setprofile(None)
    return walk.functions
