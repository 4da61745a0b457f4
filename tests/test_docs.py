"""The pages: their links lead somewhere, the files that they name are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))
    relative = [link for link in links if not link.startswith(("http:", "https:"))]
    assert [link for link in relative if not (page.parent / link).exists()] == []


def test_every_page_of_results_is_listed() -> None:
    folder = ROOT / "docs" / "results"
    listed = re.findall(r"\]\(([^)]+)\)", (folder / "README.md").read_text(encoding="utf-8"))
    assert set(listed) == {page.name for page in folder.glob("*.md")} - {"README.md"}


def test_contributing_names_files_that_are_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([a-z]+/[\w/.-]+)`", text))
    paths = {path for path in named if "NAME" not in path}
    assert len(paths) >= 10
    assert {path for path in paths if not (ROOT / path).exists()} == set()


def test_the_glossary_is_in_order() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    terms = [term.lower() for term in re.findall(r"^- \*\*([^*]+)\*\*", text, re.MULTILINE)]
    assert len(terms) > 40
    assert terms == sorted(terms)
