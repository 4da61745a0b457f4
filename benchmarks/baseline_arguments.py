"""Compares test doubles of baselines' packages with the packages' sources, without installing them.

    pip download --no-deps -d FOLDER transformer_engine==2.11.0 deepspeed==0.19.8
    python -m benchmarks.baseline_arguments FOLDER

The arguments of each test double, their order and their defaults must be the same as in the
package. Exit status 1 means that some differ.
"""

import ast
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

STAND_INS = Path(__file__).parents[1] / "tests/runtime/stand_ins"
# For each file of test doubles: the beginning of the name of the package's archive, the folders of
# the package's sources, and the package's name for each test double that has another name here.
SOURCES: Mapping[str, tuple[str, tuple[str, ...], Mapping[str, str]]] = {
    "transformer_engine.py": (
        "transformer_engine-",
        (
            *("transformer_engine/pytorch/module/", "transformer_engine/pytorch/attention/"),
            *("transformer_engine/pytorch/optimizers/", "transformer_engine/pytorch/cross_entropy"),
            "transformer_engine/pytorch/distributed",
        ),
        {},
    ),
    "deepspeed_adam.py": (
        "deepspeed-",
        ("deepspeed/ops/adam/",),
        {"fused_adam": "FusedAdam", "adam_of_host": "DeepSpeedCPUAdam"},
    ),
}
Arguments = Sequence[tuple[str, str]]


def arguments_of(tree: ast.Module) -> Iterator[tuple[str, Arguments]]:
    """The names of a module's classes and functions, with their arguments and defaults."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, _said(node)
        elif isinstance(node, ast.ClassDef):
            for one in node.body:
                if isinstance(one, ast.FunctionDef) and one.name == "__init__":
                    yield node.name, _said(one)[1:]


def _said(function: ast.FunctionDef) -> Arguments:
    own = function.args
    names = [one.arg for one in (*own.posonlyargs, *own.args)]
    defaults = [None] * (len(names) - len(own.defaults)) + [*own.defaults]
    named = [*zip(names, defaults, strict=True)]
    named += [*zip([one.arg for one in own.kwonlyargs], own.kw_defaults, strict=True)]
    return [(name, _default(default)) for name, default in named]


def _default(node: ast.expr | None) -> str:
    """A default value as text; numbers are written by value, so that 0 equals 0.0."""
    if node is None:
        return "required"
    text = ast.unparse(node)
    try:
        return f"{float(text):g}"
    except ValueError:
        return text


def sources_in(archive: Path, folders: Sequence[str]) -> Iterator[str]:
    """The Python sources in some folders of a wheel or of a source distribution."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for name in wheel.namelist():
                if name.endswith(".py") and name.startswith(tuple(folders)):
                    yield wheel.read(name).decode()
        return
    with tarfile.open(archive) as file:
        for member in file.getmembers():
            inside = member.name.partition("/")[2]
            content = file.extractfile(member) if inside.endswith(".py") else None
            if content is not None and inside.startswith(tuple(folders)):
                yield content.read().decode()


def compared(folder: Path) -> Iterator[tuple[str, str]]:
    """Each stand-in with the differences between its arguments and those of the package; empty if
    there are none. Stand-ins that the package lacks are left out.
    """
    for file, (start, folders, names) in SOURCES.items():
        (archive,) = folder.glob(f"{start}*")
        texts = sources_in(archive, folders)
        theirs = dict(found for text in texts for found in arguments_of(ast.parse(text)))
        own = arguments_of(ast.parse((STAND_INS / file).read_text(encoding="utf-8")))
        for name, arguments in own:
            if (real := theirs.get(names.get(name, name))) is not None:
                apart = sorted(map(str, {*arguments} ^ {*real}))
                if not apart and [*arguments] != [*real]:
                    apart = ["in another order"]
                yield f"{archive.name}: {names.get(name, name)}", ", ".join(apart)


def main(arguments: Sequence[str]) -> int:
    """Print how each stand-in's arguments differ from the package's; returns 1 if any differ."""
    rows = [*compared(Path(*arguments))]
    for name, apart in rows:
        sys.stdout.write(f"{name}: {apart or 'the same arguments'}\n")
    return int(not rows or any(apart for _, apart in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
