"""Writes type stubs (.pyi) for classes that are made from tables, so that type checkers know them:
``make stubs``.
"""

from collections.abc import Iterable
from dataclasses import MISSING, fields
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import mistlab
from mistlab.plan import dimension_fields

STUB = Path(dimension_fields.__file__).with_suffix(".pyi")
PACKAGE_STUB = Path(mistlab.__file__).with_suffix(".pyi")


def stub() -> str:
    """The text of the stub file."""
    kinds = (
        dimension_fields.Offload,
        dimension_fields.StageFields,
        dimension_fields.OffloadRatios,
        dimension_fields.SpaceFields,
    )
    return stub_of("Written by ``make stubs`` from the table of dimensions.", kinds)


def package_stub() -> str:
    """The text of the stub for the package itself, whose names are imported on first use."""
    imports = (
        f"from {module} import {name} as {name}"
        for module, names in sorted(mistlab.NAMES.items())
        for name in names
    )
    doc = '"""Written by ``make stubs`` from the names of the package."""'
    types = ("", "__version__: str", "NAMES: dict[str, tuple[str, ...]]", "")
    return "\n".join([doc, "", *imports, *types])


def stub_of(doc: str, kinds: Iterable[type]) -> str:
    """The text of a stub file for classes that are made from tables."""
    lines = [f'"""{doc}"""', "", "from dataclasses import dataclass", "from typing import Literal"]
    for kind in kinds:
        lines += ["", "@dataclass(frozen=True, slots=True, kw_only=True)"]
        lines += [f"class {kind.__name__}:"]
        for entry in fields(kind):
            is_required = entry.default is MISSING and entry.default_factory is MISSING
            default = "" if is_required else " = ..."
            lines.append(f"    {entry.name}: {_type_words(entry.type)}{default}")
    return "\n".join(lines) + "\n"


def _type_words(kind: Any) -> str:
    """A type as it is written in source code."""
    if get_origin(kind) is Literal:
        return f"Literal[{', '.join(map(repr, get_args(kind)))}]".replace("'", '"')
    if get_origin(kind) is tuple:
        return f"tuple[{_type_words(get_args(kind)[0])}, ...]"
    parts = get_args(kind)
    if NoneType in parts:
        return f"{_type_words(parts[0])} | None"
    return str(kind.__name__)


if __name__ == "__main__":
    STUB.write_text(stub(), encoding="utf-8")
    PACKAGE_STUB.write_text(package_stub(), encoding="utf-8")
