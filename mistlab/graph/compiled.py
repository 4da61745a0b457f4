"""Compiles expressions in sizes to NumPy functions, and caches the functions' source text on
disk.
"""

import ast
import hashlib
import json
import os
import shutil
import stat
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache, wraps
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, ParamSpec, Self

import numpy as np
from numpy.typing import NDArray

from mistlab.core.arrays import Floats, Ints
from mistlab.graph.sums import Value, source_of_sums, sympy

# Turns source text into a function, if the text contains nothing but arithmetic on NumPy columns.


# Source text of compiled expressions may call these NumPy functions only.
FUNCTIONS = frozenset(
    (
        *("maximum", "minimum", "amax", "amin", "where", "select", "mod", "floor", "ceil"),
        *("equal", "not_equal", "less", "less_equal", "greater", "greater_equal"),
        *("logical_and", "logical_or", "logical_not", "sqrt", "abs", "asarray"),
    )
)
NODES = (
    *(ast.Module, ast.FunctionDef, ast.arguments, ast.arg, ast.Return, ast.Assign, ast.Name),
    *(ast.Load, ast.Store, ast.Constant, ast.List, ast.Tuple, ast.keyword, ast.Expr),
    *(ast.BinOp, ast.UnaryOp, ast.Compare, ast.operator, ast.unaryop, ast.cmpop),
)
# The attributes that hold the children of the most frequent kinds of syntax tree nodes; looking
# them up here is faster than a general search.
_CHILDREN: Mapping[type[ast.AST], tuple[str, ...]] = {
    ast.BinOp: ("left", "right"),
    ast.UnaryOp: ("operand",),
    ast.Name: (),
}
_NUMBERS = frozenset((bool, int, float))
NAME = "compiled"


class RefusedError(Exception):
    """The error for source text that contains more than arithmetic on columns."""


def function_of(source: str) -> Callable[..., tuple[Any, ...]]:
    """Make the function that a source text defines; refuses a text that does more than arithmetic.

    The text may come from a folder, so it is parsed first. Every node must be one that printed
    expressions contain. Anything else (an import, an attribute of anything except NumPy, a call of
    another name, a loop) is refused, so that running the text never does more than arithmetic.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise RefusedError(str(error)) from None
    if len(tree.body) != 1 or not isinstance(tree.body[0], ast.FunctionDef):
        message = "it is not one function"
        raise RefusedError(message)
    _check_all(tree)
    return _run(tree, tree.body[0].name)


def function_printed_here(source: str) -> Callable[..., tuple[Any, ...]]:
    """Make the function that a source text defines, without a check, since this process has printed
    the text itself.
    """
    return _run(source, NAME)


def _run(source: str | ast.Module, name: str) -> Callable[..., tuple[Any, ...]]:
    names: dict[str, Any] = {"__builtins__": {}, "numpy": np}
    exec(compile(source, "<expressions>", "exec"), names)
    function: Callable[..., tuple[Any, ...]] = names[name]
    return function


def _check_all(tree: ast.AST) -> None:
    """Refuse a source text if any node of its syntax tree is not arithmetic.

    Operators and contexts of names have no parts, and any of them is arithmetic. So only the fields
    of ``_CHILDREN`` are followed, which takes a third of the time of ``ast.walk``.
    """
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        kind = type(node)
        if kind is ast.Constant and type(node.value) in _NUMBERS:  # type: ignore[attr-defined]
            continue
        names = _CHILDREN.get(kind)
        if names is None:
            _check(node)
            waiting += ast.iter_child_nodes(node)
        else:
            waiting += [getattr(node, name) for name in names]


def _check(node: ast.AST) -> None:
    if not _is_arithmetic(node):
        message = f"{ast.unparse(node)[:60]!r} is not arithmetic on columns"
        raise RefusedError(message)


def _is_arithmetic(node: ast.AST) -> bool:
    match node:
        case ast.FunctionDef():
            return not node.decorator_list and node.returns is None
        case ast.Call():
            return isinstance(node.func, ast.Attribute)
        case ast.Attribute(value=ast.Name(id="numpy"), attr=name):
            return name in FUNCTIONS
        case ast.Attribute(value=ast.Attribute(attr="logical_and" | "logical_or"), attr="reduce"):
            return True
        case ast.Constant(value=value):
            return isinstance(value, bool | int | float)
        case _:
            return isinstance(node, NODES)


# Compiles expressions to NumPy functions, and evaluates them for many candidates at once.


ROWS_AT_ONCE = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """Several expressions compiled to one function of NumPy columns, with its source text.

    Candidates are evaluated in groups that fit in the processor's cache, so the time for a
    candidate does not depend on their number.

    ``numbers`` are whole numbers that belong to the expressions and depend on no column. Text that
    was not ``printed_here``, by this process, is checked before it is run.
    """

    names: tuple[str, ...]
    columns: tuple[str, ...]
    source: str
    numbers: Mapping[str, int] = field(default_factory=dict, compare=False)
    printed_here: bool = field(default=False, repr=False, compare=False)
    function: Callable[..., tuple[Any, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        made = function_printed_here if self.printed_here else function_of
        object.__setattr__(self, "function", made(self.source))

    def __reduce__(self) -> tuple[Callable[[Mapping[str, Any]], Self], tuple[Mapping[str, Any]]]:
        """Pickle the source text only; the process that unpickles it compiles the function
        again.
        """
        return type(self).from_mapping, (self.to_mapping(),)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """Read compiled expressions from a mapping that ``to_mapping`` made; raises
        ``RefusedError`` if their text does more than arithmetic.
        """
        return cls(
            names=tuple(mapping["names"]),
            columns=tuple(mapping["columns"]),
            source=mapping["source"],
            numbers=mapping["numbers"],
        )

    def to_mapping(self) -> dict[str, Any]:
        """Convert compiled expressions to JSON values, for the cache."""
        return {
            "names": self.names,
            "columns": self.columns,
            "source": self.source,
            "numbers": dict(self.numbers),
        }

    def __call__(
        self, columns: Mapping[str, NDArray[Any]], shared: "Shared | None" = None
    ) -> Floats:
        """Compute the values of all expressions for each candidate, in the order of ``names``.

        ``columns`` have an entry for each candidate; the result is (E, C).

        Columns whose values many candidates have in common may be given as ``shared``.
        """
        rows = len(next(iter(columns.values())))
        values = np.empty((len(self.names), rows))
        for start in range(0, rows, ROWS_AT_ONCE):
            block = slice(start, start + ROWS_AT_ONCE)
            inputs = [
                columns[name][block].astype(np.float64, copy=False)
                if name in columns
                else shared.column(name, block)  # type: ignore[union-attr]
                for name in self.columns
            ]
            for row, value in enumerate(self.function(*inputs)):
                values[row, block] = value
        return values


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shared:
    """Columns of sizes in which the same rows repeat: a short table of the distinct rows, and for
    each candidate the index of its row.
    """

    table: Mapping[str, Floats]
    index: Ints

    def column(self, name: str, block: slice) -> Floats:
        """The values of one size for the candidates in a slice."""
        return self.table[name][self.index[block]]


def compile_expressions(
    expressions: Mapping[str, "sympy.Expr"],
    *,
    columns: tuple[str, ...],
    constants: Mapping[str, int],
    numbers: Mapping[str, int] | None = None,
) -> Compiled:
    """Compile ``expressions`` to one NumPy function of ``columns``; constants replace other
    symbols.
    """
    from mistlab.graph.printing import source_of  # noqa: PLC0415 (needs SymPy)

    return Compiled(
        names=tuple(expressions),
        columns=columns,
        source=source_of([*expressions.values()], columns, constants),
        numbers=dict(numbers or {}),
        printed_here=True,
    )


def compile_sums(
    sums: Mapping[str, Value], *, columns: tuple[str, ...], numbers: Mapping[str, int] | None = None
) -> Compiled:
    """Compile sums of products of sizes to one NumPy function of columns."""
    return Compiled(
        names=tuple(sums),
        columns=columns,
        source=source_of_sums([*sums.values()], columns),
        numbers=dict(numbers or {}),
        printed_here=True,
    )


# Makes recipes: texts that identify a call that compiles expressions, by its function and
# arguments, across processes.


PACKAGE = Path(__file__).parents[1]


class NoRecipeError(Exception):
    """The error for an argument without a unique text; the call that compiles expressions is then
    not cached between processes.
    """


def recipe_of(make: Callable[..., Any], arguments: tuple[Any, ...]) -> str:
    """The recipe of a call that compiles expressions: its function and arguments as text.

    Two calls with equal recipes give equal expressions, in any process with the same version of the
    package. Some values have no unique text: an object of another package, or a function defined in
    a script or a test. They have no recipe, and their expressions are compiled in every process.
    """
    return json.dumps([_plain(make), [_plain(one) for one in arguments]], sort_keys=True)


@cache
def version() -> str:
    """A digest of all code that turns a call into source text; cached files are valid only for the
    same digest.

    This is the package's own sources, and the versions of SymPy, NumPy and Python. SymPy is not
    imported.
    """
    digest = hashlib.sha256(f"{sys.version_info[:2]} {np.__version__}".encode())
    digest.update(_release_of_sympy())
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(f"{path.relative_to(PACKAGE)}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def _release_of_sympy() -> bytes:
    spec = find_spec("sympy")
    assert spec is not None
    assert spec.origin is not None
    return (Path(spec.origin).parent / "release.py").read_bytes()


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    if isinstance(value, frozenset):
        return sorted(json.dumps(_plain(one)) for one in value)
    if isinstance(value, Mapping):
        return {"mapping": [[_plain(key), _plain(one)] for key, one in value.items()]}
    if isinstance(value, FunctionType):
        return _function(value)
    if is_dataclass(value) and not isinstance(value, type):
        return _values(value)
    message = f"{value!r} has no recipe"
    raise NoRecipeError(message)


def _values(value: Any) -> Any:
    digest = getattr(value, "digest", None)
    name = _name_of(type(value))
    if digest is not None:
        return {name: digest}
    return {name: {one.name: _plain(getattr(value, one.name)) for one in fields(value)}}


def _function(function: FunctionType) -> Any:
    """The name of a function of this package as part of a recipe.

    A change of the function's code changes the cache's version instead.

    A function without a name of its own (``<lambda>``) is named by its place and its code.
    """
    name, code = _name_of(function), function.__code__
    if "<" not in name:
        return name
    if function.__closure__ or any(isinstance(one, CodeType) for one in code.co_consts):
        message = f"{name} has no recipe: other values are part of it"
        raise NoRecipeError(message)
    code_facts = [
        code.co_firstlineno,
        code.co_code.hex(),
        repr(code.co_consts),
        repr(code.co_names),
    ]
    return {name: [*code_facts, _plain(function.__defaults__)]}


def _name_of(what: Any) -> str:
    if what.__module__.partition(".")[0] != PACKAGE.name:
        message = f"{what.__qualname__} of {what.__module__} has no recipe"
        raise NoRecipeError(message)
    return f"{what.__module__}.{what.__qualname__}"


# Stores the source text of compiled expressions in a folder, so that other processes need not
# compile them again.


VARIABLE = "MISTLAB_CACHE"
# The ends of warnings that the cache folder is not used.
_OTHER = f"set {VARIABLE} to a folder that you may write to"
_WRITABLE = f"other users may write to this cache, so it is not used: run chmod go-w, or {_OTHER}"
# The cache keeps the folders of at most this many versions of the package, and deletes older ones.
MOST_VERSIONS = 8
MOST_BYTES = 4 * 2**20


class CacheWarning(UserWarning):
    """The warning that the cache folder, or a file in it, cannot be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptFolder:
    """The cache folder of one version of the package, with a JSON file for each compiled call.

    ``MISTLAB_CACHE`` names the folder. The default is ``mistlab`` in the user's cache folder; an
    empty ``MISTLAB_CACHE=`` disables the cache. Files are renamed into place, so processes may
    share the folder, may be killed, and may delete the folder at any time. If the folder is
    unusable, one warning says so, and expressions are compiled without it. Only speed depends on
    the cache.

    A folder that other users may write to is not used, since they could plant wrong numbers.
    """

    path: Path

    def read(self, recipe: str) -> Mapping[str, Any] | None:
        """The cached value of a recipe, or None if there is none or its file cannot be trusted."""
        path = self._file(recipe)
        try:
            text = _trusted_text(path)
            if text is None:
                return None
            digest, _, content = text.partition("\n")
            if digest != _digest(content):
                self.say_damaged()
                return None
            kept: Mapping[str, Any] = json.loads(content)
        except FileNotFoundError:
            return None
        except OSError as error:
            _say(f"{self.path}: this cache cannot be read ({error.strerror}): {_OTHER}")
            return None
        except ValueError:
            self.say_damaged()
            return None
        return kept if kept.get("recipe") == recipe else None

    def write(self, recipe: str, value: Mapping[str, Any]) -> None:
        """Write a compiled expression to the cache, by the text of its recipe; a folder that is not
        writable stays as it is.
        """
        content = json.dumps({"recipe": recipe, **value})
        try:
            if not self.path.is_dir():
                self._make()
            if not _is_ours(self.path.stat()):
                _say(f"{self.path}: {_WRITABLE}")
                return
            self._put(self._file(recipe), f"{_digest(content)}\n{content}")
        except OSError as error:
            _say(f"{self.path}: this cache cannot be written ({error.strerror}): {_OTHER}")

    def say_damaged(self) -> None:
        """Warn that a file of the cache is damaged, once per process."""
        _say(f"{self.path}: a file in this cache is damaged: its expressions are compiled again")

    def _put(self, path: Path, text: str) -> None:
        """Write a file of the cache completely or not at all; a partial file is removed."""
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=self.path, suffix=".part", delete=False
        ) as file:
            part = Path(file.name)
        try:
            part.write_text(text, encoding="utf-8")
            part.replace(path)
        except OSError:
            part.unlink()
            raise

    def _file(self, recipe: str) -> Path:
        return self.path / f"{_digest(recipe)}.json"

    def _make(self) -> None:
        """Make the cache folder of this version of the package, and remove those of old
        versions.
        """
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        others = [one for one in self.path.parent.iterdir() if one.is_dir()]
        others.sort(key=lambda one: one.stat().st_mtime, reverse=True)
        for old in others[MOST_VERSIONS:]:
            if old != self.path:
                shutil.rmtree(old, ignore_errors=True)


def kept_folder() -> KeptFolder | None:
    """This user's cache folder for this version of the package; None if the cache is disabled."""
    return _kept_folder(os.environ.get(VARIABLE), os.environ.get("XDG_CACHE_HOME"))


@cache
def _kept_folder(given: str | None, caches: str | None) -> KeptFolder | None:
    if given == "":
        return None
    try:
        folder = Path(given) if given else (Path(caches) if caches else Path.home() / ".cache")
    except RuntimeError:
        # A user without a home folder has no cache.
        return None
    return KeptFolder(path=(folder if given else folder / "mistlab") / version())


def _trusted_text(path: Path) -> str | None:
    """The text of a cache file, or None if other users may have written it."""
    with path.open("rb") as file:
        for status in (os.fstat(file.fileno()), path.parent.stat()):
            if not _is_ours(status):
                _say(f"{path.parent}: {_WRITABLE}")
                return None
        return file.read(MOST_BYTES).decode("utf-8")


def _is_ours(status: os.stat_result) -> bool:
    """Whether only this user and root can write a cache file or folder."""
    if os.name != "posix":
        return True
    writable = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return status.st_uid in (0, os.geteuid()) and not writable


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@cache
def _say(text: str) -> None:
    """Warn about the cache, at most once per process."""
    warnings.warn(text, CacheWarning, stacklevel=2)


# Caches compiled expressions: in memory within a process, as source text between processes.


P = ParamSpec("P")


def kept(make: Callable[P, Compiled]) -> Callable[P, Compiled]:
    """Decorator that caches the results of a function that compiles expressions.

    A small question spends most of its time in SymPy, which turns expressions into source text. If
    the text is cached, SymPy is not even imported.

    The function may depend only on its arguments and on the package's sources.
    """

    @cache
    def in_process(*arguments: P.args, **_: P.kwargs) -> Compiled:
        try:
            recipe = recipe_of(make, arguments)
        except NoRecipeError:
            return make(*arguments)  # type: ignore[call-arg]
        folder = kept_folder()
        if folder is None:
            return make(*arguments)  # type: ignore[call-arg]
        kept_mapping = folder.read(recipe)
        if kept_mapping is not None:
            try:
                return Compiled.from_mapping(kept_mapping)
            except (RefusedError, KeyError, TypeError, ValueError):
                folder.say_damaged()
        compiled = make(*arguments)  # type: ignore[call-arg]
        folder.write(recipe, compiled.to_mapping())
        return compiled

    @wraps(make)
    def call(*arguments: P.args, **keywords: P.kwargs) -> Compiled:
        assert not keywords, "a kept function takes its arguments by position"
        return in_process(*arguments)

    return call
