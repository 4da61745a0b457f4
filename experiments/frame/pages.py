"""Paragraphs that a page of results has beside its own results: published ones, and comments."""

from collections.abc import Sequence
from importlib.resources import files


def beside(package: str, name: str) -> Sequence[str]:
    """The paragraphs that a package has for the page of a command."""
    text = files(package).joinpath("beside", f"{name}.md").read_text(encoding="utf-8")
    return text.strip().split("\n\n")
