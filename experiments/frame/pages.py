"""What stands on a page beside what came out: what was published, and why the two differ."""

from collections.abc import Sequence
from importlib.resources import files


def beside(package: str, name: str) -> Sequence[str]:
    """The paragraphs that a package has for the page of a command."""
    text = files(package).joinpath("beside", f"{name}.md").read_text(encoding="utf-8")
    return text.strip().split("\n\n")
