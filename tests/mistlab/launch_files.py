"""Imports of small files of launches: the text of a file, files beside it, and what is given."""

from collections.abc import Mapping
from textwrap import dedent
from typing import Any

from mistlab import catalog
from mistlab.export.given import Given, Imported
from mistlab.formats.file_formats import format_of
from mistlab.shell.session import LaunchFile

H100 = catalog.hardware("h100-80gb")


def source_of(text: str, name: str = "", **beside: str) -> LaunchFile:
    """A source with files beside it, whose names have ``__`` for a dot."""
    files = {key.replace("__", "."): dedent(body) for key, body in beside.items()}
    return LaunchFile(text=dedent(text), name=name, beside=files.get)


def imported_from(source: LaunchFile, **given: Any) -> Imported:
    """The job of a source on H100s, by the format that recognises it."""
    return format_of(source).read(source, Given(hardware=H100, **given))


def imported(
    text: str, name: str = "run.yaml", files: Mapping[str, str] | None = None, **given: Any
) -> Imported:
    """The job of a text on H100s, by the format that recognises it."""
    return imported_from(source_of(text, name, **(files or {})), **given)


def texts(found: Imported, kind: str) -> dict[str, str]:
    """The texts of an import's remarks of a kind, by choice."""
    return {remark.choice: remark.text for remark in found.remarks if remark.kind == kind}
