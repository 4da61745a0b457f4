"""Rules of the house, and the offenders that they still have: ``house.yaml`` may only shrink.

    python -m tests.house [--write] [--grow]

Each rule maps texts of files to offenders, each with a count. ``--write`` writes today's offenders,
and refuses any that is new or larger; with ``--grow`` it takes them, as after files have moved.
"""

import ast
import importlib.util
import re
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from pathlib import Path

import yaml

from benchmarks.house import (
    ROOT,
    WALKS,
    Tree,
    large_folders,
    long_files,
    parsed,
    repeated_classes,
    repeated_files,
    tree_of,
    walk_counts,
)
from benchmarks.walk import PACKAGES
from mistlab.engines.engine import ENGINES
from mistlab.plan.dimensions import DIMENSIONS
from mistlab.plan.named_spaces import SPACES

LISTS = Path(__file__).with_suffix(".yaml")
Offenders = Mapping[str, int]
Rule = Callable[[Tree], Offenders]
# Where files are rows of a table, named after the row.
ROWS = (
    "mistlab/engines/",
    "mistlab/formats/",
    "mistlab/huggingface/types/",
    "searchers/methods/",
)
# Rooms with numbers about machines, engines and measured runs.
OF_NUMBERS = (
    "mistlab/cost/",
    "mistlab/engines/",
    "mistlab/machine/",
    "simulators/",
    "experiments/runs/",
)
# The room that declares dimensions. Models have ``layers``, too, so that name tells nothing.
DECLARES = "mistlab/plan/"
DIMENSION_NAMES = frozenset(DIMENSIONS) - {"layers"}
_NAMED = re.compile(r"(?:^|[._])(?:engine|hardware|machine)(?:\.name)?$")
_PART_TESTS = {"startswith", "endswith", "removeprefix", "removesuffix"}
# The room of tables of measured runs; there what reads their text, as cells or by dialects.
OF_TABLES = "experiments/runs/"
READERS = ("experiments/runs/dialects/", "experiments/runs/runs_table.py")
_TEXT_METHODS = {*_PART_TESTS, "casefold", "lower", "find", "partition", "rpartition", "split"}
_TEXT_OF_TABLE = re.compile(r"\btext(?:_of)?\(|\.cells\b")
_SOURCE = re.compile(r"fitted|measured|https?:|docs/|datasheet|median|paper|table", re.IGNORECASE)
_DOTTED = re.compile(rf"(?<![\w./-])(?:{'|'.join(PACKAGES)})(?:\.[A-Za-z_]\w*)+")
_PATH = re.compile(rf"(?<![\w./-])(?:{'|'.join(PACKAGES)}|tests|benchmarks)/[\w/.*-]*[\w*]")
# In commands and plan files; and words in code that begin like an engine's name of several words.
_FAMILIES = "|".join(sorted({name.partition("-")[0] for name in ENGINES if "-" in name}))
_ENGINE = re.compile(
    rf"(?:--engine[ =]|^ *engine: |`engine: |`(?=(?:{_FAMILIES})-[a-z-]+`))([a-z][a-z0-9-]*)",
    re.MULTILINE,
)
# Names of variables that tell neither type nor unit; rooms that read command lines have words.
VAGUE = frozenset({"found", "one", "own", "place", "said", "some", "told", "words"})
OF_WORDS = ("mistlab/export/megatron/", "mistlab/formats/", "mistlab/shell/")
_COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
_SCOPES = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda | _COMPREHENSIONS
# Formats of files, and a source of measurements.
_NO_ENGINES = ("megatron-test", "megatron-yaml", "megatron-lm")
# What stands for names, and pages of the folder of a page.
_PLACEHOLDER = re.compile(r"NAME|FILE|REVISION|\*|\.md$")


def modules(tree: Tree) -> Iterator[tuple[str, str]]:
    """Paths and texts of the packages' modules."""
    return (
        (path, text)
        for path, text in tree.items()
        if path.endswith(".py") and path.startswith(tuple(f"{name}/" for name in PACKAGES))
    )


def only_modules(tree: Tree) -> dict[str, str]:
    """The packages' modules of a tree that has pages, too."""
    return dict(modules(tree))


def contracts(tree: Tree) -> Offenders:
    """Modules that contracts of imports name, rather than folders."""
    contracts = tomllib.loads(tree["pyproject.toml"])["tool"]["importlinter"]["contracts"]
    named = {
        name.strip()
        for contract in contracts
        for key in ("layers", "source_modules", "forbidden_modules", "ancestors", "modules")
        for names in contract.get(key, ())
        for name in names.split("|")
    }
    return {name: 1 for name in named if f"{name.replace('.', '/')}.py" in tree}


def basenames(tree: Tree) -> Offenders:
    """Basenames that several files of a top folder have, rows' own modules aside."""
    return repeated_files({path: text for path, text in modules(tree) if not path.startswith(ROWS)})


def classes(tree: Tree) -> Offenders:
    """Class names that several classes of a top folder have."""
    return repeated_classes(only_modules(tree))


def folders(tree: Tree) -> Offenders:
    """Folders with more than 20 modules."""
    return large_folders(only_modules(tree))


def lengths(tree: Tree) -> Offenders:
    """Modules above 600 lines."""
    return dict.fromkeys(long_files(only_modules(tree)), 1)


def name_tests(tree: Tree) -> Offenders:
    """Tests of a part of the name of an engine or a machine, by module.

    A test is ``startswith`` and the like, or a constant ``in``, of an expression that ends with
    ``engine``, ``hardware`` or ``machine``, perhaps with ``.name`` behind it.
    """
    counts: Counter[str] = Counter()
    for path, text in modules(tree):
        counts[path] += sum(map(_tests_a_name, ast.walk(parsed(text))))
    return +counts


def _tests_a_name(node: ast.AST) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        is_test = node.func.attr in _PART_TESTS
        return is_test and bool(_NAMED.search(ast.unparse(node.func.value)))
    return (
        isinstance(node, ast.Compare)
        and isinstance(node.ops[0], ast.In | ast.NotIn)
        and isinstance(node.left, ast.Constant)
        and isinstance(node.left.value, str)
        and bool(_NAMED.search(ast.unparse(node.comparators[0])))
    )


def text_tests(tree: Tree) -> Offenders:
    """Tests of free text where tables of measured runs have typed columns, by module.

    A test is an import of ``re``, a method as ``startswith``, a text constant ``in`` something, or
    a comparison of a cell's text.
    """
    counts: Counter[str] = Counter()
    for path, text in modules(tree):
        if path.startswith(OF_TABLES) and not path.startswith(READERS):
            counts[path] += sum(map(_tests_text, ast.walk(parsed(text))))
    return +counts


def _tests_text(node: ast.AST) -> bool:
    match node:
        case ast.Import(names=names):
            return any(name.name == "re" for name in names)
        case ast.ImportFrom(module="re"):
            return True
        case ast.Call(func=ast.Attribute(attr=method)):
            return method in _TEXT_METHODS
        case ast.Compare(left=left, ops=[ast.In() | ast.NotIn()]):
            is_text = isinstance(left, ast.Constant) and isinstance(left.value, str)
            return is_text or bool(_TEXT_OF_TABLE.search(ast.unparse(node)))
        case ast.Compare():
            return bool(_TEXT_OF_TABLE.search(ast.unparse(node)))
    return False


def fitted(tree: Tree) -> Offenders:
    """Fractions of no sixteenths without a source beside them, by module.

    The source is a comment on the line or right above its statement, that has a word of those.
    """
    counts: Counter[str] = Counter()
    for path, text in modules(tree):
        if path.startswith(OF_NUMBERS):
            counts[path] += sum(
                not _has_source(text.splitlines(), line) for line in set(_fractions(text))
            )
    return +counts


def _fractions(text: str) -> Iterator[int]:
    for statement in parsed(text).body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Constant) and isinstance(node.value, float):
                value = abs(node.value)
                if 0.01 < value < 1e3 and value * 16 % 1:
                    yield node.lineno


def _has_source(lines: Sequence[str], line: int) -> bool:
    comments = [lines[line - 1].partition("#")[2]]
    above = line - 2
    while above >= 0 and lines[above].strip() and not lines[above].lstrip().startswith("#"):
        above -= 1
    while above >= 0 and lines[above].lstrip().startswith("#"):
        comments.append(lines[above])
        above -= 1
    return bool(_SOURCE.search(" ".join(comments)))


def dimension_files(tree: Tree) -> Offenders:
    """How many dimensions a module names, outside of the one that declares them."""
    counts = {
        path: len(DIMENSION_NAMES.intersection(_names(text)))
        for path, text in modules(tree)
        if not path.startswith(DECLARES)
    }
    return {path: count for path, count in counts.items() if count}


def _names(text: str) -> Iterator[str]:
    """All identifiers, attributes, arguments and whole strings."""
    for node in ast.walk(parsed(text)):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name):
                yield name
            case ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.keyword(arg=str(name)) | ast.Constant(value=str(name)):
                yield name


def vague_variables(tree: Tree) -> Offenders:
    """Variables of vague names whose uses are on several lines, by module; fields are none."""
    counts: Counter[str] = Counter()
    for path, text in modules(tree):
        names = VAGUE - {"words"} if path.startswith(OF_WORDS) else VAGUE
        variables: list[tuple[str, set[int]]] = []
        _lines_of_names(parsed(text), names, variables)
        counts[path] = sum(len(lines) > 1 for _, lines in variables)
    return +counts


def _lines_of_names(
    scope: ast.AST, names: Set[str], variables: list[tuple[str, set[int]]]
) -> Mapping[str, set[int]]:
    """The lines on which a scope uses names of the scopes around it; its own variables, each with
    its lines, are added to ``variables``."""
    bound, lines = set[str](), defaultdict[str, set[int]](set)
    nodes = [*ast.iter_child_nodes(scope)]
    while nodes:
        node = nodes.pop()
        match node:
            case (
                ast.arg(arg=name) | ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name))
            ):
                lines[name].add(node.lineno)
                bound.add(name)
            case ast.Name(id=name, ctx=context):
                lines[name].add(node.lineno)
                bound |= {name} if isinstance(context, ast.Store) else set()
        if isinstance(node, _SCOPES):
            for name, inside in _lines_of_names(node, names, variables).items():
                lines[name] |= inside
        else:
            nodes += ast.iter_child_nodes(node)
    if not isinstance(scope, ast.ClassDef):
        variables += [(name, lines[name]) for name in sorted(bound & names)]
    return {name: of_name for name, of_name in lines.items() if name not in bound}


def dotted_names(tree: Tree) -> Offenders:
    """Dotted names of pages that no module has."""
    return _not_there(tree, _DOTTED, lambda name: _is_defined(tree, name.split(".")))


def _is_defined(tree: Tree, parts: Sequence[str]) -> bool:
    for count in range(len(parts), 0, -1):
        path = "/".join(parts[:count])
        text = tree.get(f"{path}.py", tree.get(f"{path}/__init__.py"))
        if text is not None:
            rest = parts[count:]
            if count == 1 and len(parts) == 2 and parts[0] == "experiments":
                return importlib.util.find_spec(".".join(parts)) is not None
            return all(re.search(rf"\b{name}\b", text) for name in rest)
    return False


def paths(tree: Tree) -> Offenders:
    """Paths of pages that are no files or folders."""
    folders = {path[: found.start()] for path in tree for found in re.finditer("/", path)}
    return _not_there(tree, _PATH, lambda path: path in tree or path in folders)


def engines(tree: Tree) -> Offenders:
    """Engines of pages that the table lacks; spaces have such names, too."""
    known = {*ENGINES, *SPACES, *_NO_ENGINES}
    return _not_there(tree, _ENGINE, lambda name: name in known)


def _not_there(tree: Tree, pattern: re.Pattern[str], is_there: Callable[[str], bool]) -> Offenders:
    return {
        f"{path}: {name}": 1
        for path, text in tree.items()
        if path.endswith(".md") and path != "CHANGELOG.md"
        for name in {*pattern.findall(text)}
        if not _PLACEHOLDER.search(name) and not is_there(name)
    }


RULES: Mapping[str, Rule] = {
    "contracts name modules": contracts,
    "basenames repeat": basenames,
    "class names repeat": classes,
    "folders of more than 20 files": folders,
    "files above 600 lines": lengths,
    "tests of parts of names": name_tests,
    "tests of tables' text": text_tests,
    "fractions without a source": fitted,
    "files that name dimensions": dimension_files,
    "vague variables beyond a line": vague_variables,
    "dotted names of pages": dotted_names,
    "paths of pages": paths,
    "engines of pages": engines,
}
# At most so many files may a command enter; what it enters today is no budget.
WALK_BUDGET = {"predict": 45, "tune": 90}


def whole_tree(root: Path = ROOT) -> dict[str, str]:
    """The packages' modules, the pages and the contracts, and the paths of all other files."""
    pages = [root / "README.md", root / "CONTRIBUTING.md", *(root / "docs").rglob("*.md")]
    named = [
        file for room in (*PACKAGES, "tests", "benchmarks") for file in (root / room).rglob("*")
    ]
    texts = {file.relative_to(root).as_posix(): "" for file in named if file.is_file()}
    texts |= {page.relative_to(root).as_posix(): page.read_text("utf-8") for page in pages}
    texts["pyproject.toml"] = (root / "pyproject.toml").read_text("utf-8")
    return {**texts, **tree_of(root)}


def listed() -> dict[str, dict[str, int]]:
    """The offenders of each rule that are known."""
    lists: dict[str, dict[str, int]] = yaml.safe_load(LISTS.read_text(encoding="utf-8"))
    return lists


def grown(known: Offenders, today: Offenders) -> list[str]:
    """Offenders that are new, or larger than they were."""
    return [f"{name}: {count}" for name, count in today.items() if count > known.get(name, 0)]


def stale(known: Offenders, today: Offenders) -> list[str]:
    """Known offenders that are none any more, or smaller."""
    return [f"{name}: {count}" for name, count in known.items() if count > today.get(name, 0)]


def over_budget(entered: Mapping[str, int]) -> list[str]:
    """Commands that enter more files than their budget."""
    return [
        f"{name} enters {count} files: at most {WALK_BUDGET[name]}"
        for name, count in entered.items()
        if count > WALK_BUDGET[name]
    ]


def main(arguments: Sequence[str]) -> int:
    """Print what has grown, and write the lists if they are to be written."""
    tree = whole_tree()
    today = {name: dict(sorted(rule(tree).items())) for name, rule in RULES.items()}
    known = listed() if LISTS.exists() else {}
    larger = [
        f"{rule}: {line}" for rule, now in today.items() for line in grown(known.get(rule, {}), now)
    ]
    over = over_budget({name: walk_counts(name, WALK_BUDGET[name])[0] for name in WALKS})
    sys.stdout.write("".join(f"{line}\n" for line in [*larger, *over]))
    if "--write" not in arguments or (larger and "--grow" not in arguments):
        return bool(larger or over)
    LISTS.write_text(yaml.safe_dump(today, sort_keys=False, width=100), encoding="utf-8")
    return bool(over)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
