"""The pages: their links lead somewhere, the files that they name are there."""

import csv
import re
from pathlib import Path

import pytest

from benchmarks.results_index import ROW
from experiments.pages.page_tables import with_rows_apart

ROOT = Path(__file__).parents[1]
MOST_LINES = 600
PACKAGES = ("experiments", "mistlab", "runtime", "searchers", "simulators")
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
RESULTS = sorted((ROOT / "docs" / "results").glob("*.md"))
MOST_WORDS_OF_A_DECISION, MOST_WORDS = 600, 90_000
# What commands write on pages beside their figures, and those of their pages that are here.
TEXTS = sorted(ROOT.glob("experiments/*/beside/*.md"))
PAGES_OF_TEXTS = {
    "predictor_error-in-part": 0,
    **{text.stem: 2 for text in TEXTS if text.stem.startswith("report_runs")},
    "report_runs-ablation": 1,
    **dict.fromkeys(("report_runs-kernels", "report_runs-deliverables", "report_runs-figures"), 1),
}
# Of a line of prose, and of a row of a table without the addresses of its links.
COLUMNS, COLUMNS_OF_A_ROW = 100, 200
# Pages that tell of the code as it is, and the folders of which they name files.
PAGES_OF_NOW = [page for page in PAGES if page.name != "CHANGELOG.md"]
ROOMS = "|".join((*PACKAGES, "tests", "docs", "benchmarks"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))
    relative = [link for link in links if not link.startswith(("http:", "https:"))]
    assert [link for link in relative if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_names_a_path_of_a_machine(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert re.findall(r"(?<![\w.:/])/(?:tmp|home|root|work|mnt|Users)/\S*", text) == []


def test_every_page_of_results_is_listed() -> None:
    folder = ROOT / "docs" / "results"
    listed = re.findall(r"\]\(([^)]+)\)", (folder / "README.md").read_text(encoding="utf-8"))
    assert set(listed) == {page.name for page in folder.glob("*.md")} - {"README.md"}


@pytest.mark.parametrize(
    "page", sorted((ROOT / "docs" / "results").glob("*.md")), ids=lambda p: p.name
)
def test_a_page_of_results_has_the_rows_of_long_tables_in_files(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    if page.name != "README.md":
        assert with_rows_apart(text, page.stem) == (text, {})
    named = set(re.findall(r"\]\(([\w-]+\.csv)\)", text))
    assert named == {path.name for path in page.parent.glob(f"{page.stem}-[0-9]*.csv")}


def test_the_list_of_results_says_of_each_page_its_command_and_day() -> None:
    """The command of a row is the one that its page names."""
    folder = ROOT / "docs" / "results"
    text = (folder / "README.md").read_text(encoding="utf-8")
    rows = ROW.findall(text)
    assert len(rows) == len(re.findall(r"\]\(", text)) > 40
    for name, answers, command, day in rows:
        assert answers, name
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", day), name
        page = (folder / f"{name}.md").read_text(encoding="utf-8")
        program = command.strip("`").removeprefix("python -m ").split()[0]
        assert re.search(rf"\b{re.escape(program)}\b", page), name


@pytest.mark.parametrize("text", TEXTS, ids=lambda path: path.stem)
def test_a_page_ends_with_the_text_that_its_command_would_write(text: Path) -> None:
    """Else a text was changed without its page, or a page by hand."""
    pages = [*RESULTS, ROOT / "docs" / "reference" / "model-types.md"]
    written, *whole = (
        re.sub(r"\((runs|fine-tuning)\.svg\)", "", path.read_text(encoding="utf-8")).strip()
        for path in (text, *pages)
    )
    assert sum(written in page for page in whole) == PAGES_OF_TEXTS.get(text.stem, 1)


@pytest.mark.parametrize("page", RESULTS, ids=lambda page: page.stem)
def test_the_rows_that_a_page_shows_are_those_of_its_file(page: Path) -> None:
    shown = re.findall(
        r"((?:^\|.*\|\n)+)\n[\d,]+ further rows: \[all ([\d,]+)\]\(([\w.-]+)\)\.",
        page.read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    for table, count, name in shown:
        with page.with_name(name).open(encoding="utf-8", newline="") as file:
            rows = [*csv.reader(file)]
        head, _, *lines = (
            [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line[1:-1])]
            for line in table.splitlines()
        )
        assert [head, *lines] == rows[: len(lines) + 1], name
        assert len(rows) == int(count.replace(",", "")) + 1, name


def test_pages_name_files_that_are_there() -> None:
    paths = {
        path
        for page in PAGES_OF_NOW
        for path in re.findall(rf"`((?:{ROOMS})/[\w/.-]+)`", page.read_text(encoding="utf-8"))
        if "NAME" not in path
    }
    assert len(paths) >= 100
    assert {path for path in paths if not (ROOT / path).exists()} == set()


def test_pages_name_code_that_the_file_has() -> None:
    """``name`` in ``room/file.py``: the word is in the file."""
    named = {
        pair
        for page in PAGES_OF_NOW
        for pair in re.findall(
            rf"`([A-Za-z_]\w*)`\s+(?:\(|in )`((?:{ROOMS})/[\w/]+\.py)`",
            page.read_text(encoding="utf-8"),
        )
    }
    assert len(named) >= 30
    texts = {file: (ROOT / file).read_text(encoding="utf-8") for _, file in named}
    assert [pair for pair in named if not re.search(rf"\b{pair[0]}\b", texts[pair[1]])] == []


def test_a_decision_is_short() -> None:
    """Proofs stand in appendices, measurements on pages of results."""
    decisions = [
        page
        for page in (ROOT / "docs" / "decisions").glob("*.md")
        if not page.stem.endswith("-appendix")
    ]
    assert len(decisions) > 80
    words = {page.name: len(page.read_text(encoding="utf-8").split()) for page in decisions}
    longer = {name: count for name, count in words.items() if count > MOST_WORDS_OF_A_DECISION}
    assert longer == {}


def test_the_pages_are_few_words() -> None:
    """``find docs -name '*.md' | xargs cat | wc -w``: bars between the cells of a table count."""
    pages = [page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md")]
    assert len(pages) > 150
    assert sum(len(page.split()) for page in pages) <= MOST_WORDS


@pytest.mark.parametrize(
    "page", sorted((ROOT / "docs" / "reference").glob("*.md")), ids=lambda page: page.name
)
def test_a_reference_page_is_readable(page: Path) -> None:
    """Blocks of code keep their lines, and what has no blank is not broken."""
    prose = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    rows = [line for line in prose.splitlines() if line.startswith("|")]
    lines = [line for line in prose.splitlines() if not line.startswith("|")]
    shown = [re.sub(r"\]\([^)]*\)", "]", row) for row in rows]
    assert [row for row in shown if len(row) > COLUMNS_OF_A_ROW] == []
    assert [line for line in lines if len(line) > COLUMNS and re.search(r"\S .*\S ", line)] == []


def test_the_glossary_is_in_order() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    terms = [term.lower() for term in re.findall(r"^- \*\*([^*]+)\*\*", text, re.MULTILINE)]
    assert len(terms) > 40
    assert terms == sorted(terms)


def test_the_walks_name_functions_where_they_are() -> None:
    """``Name`` (``file.py``) in the page about the architecture: the file defines the name."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    pairs = re.findall(r"`([A-Za-z_][\w.]*)`\s+\(`([\w/]+\.py)`", text)
    assert len(pairs) >= 30
    sources = [one for room in PACKAGES for one in (ROOT / room).rglob("*.py")]
    missing = []
    for name, file in pairs:
        found = [one for one in sources if one.as_posix().endswith(f"/{file}")]
        if not any(_defines(one.read_text(encoding="utf-8"), name.split(".")) for one in found):
            missing.append((name, file))
    assert missing == []


def _defines(source: str, names: list[str]) -> bool:
    """Whether a source text has definitions of all these names."""
    kinds = r"^\s*(?:def|class) {0}\b|^{0}(?:: .*)? = |^\s+{0}: "
    return all(re.search(kinds.format(name), source, re.MULTILINE) for name in names)


def test_files_are_short_and_begin_by_saying_what_they_are() -> None:
    """Modules of the packages begin with a sentence; tests need not."""
    for room in (*PACKAGES, "tests", "benchmarks"):
        for path in (ROOT / room).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            assert text.count("\n") <= MOST_LINES, path
            if room in PACKAGES:
                docstring = text.removeprefix('"""').partition('"""')[0]
                first = docstring.partition("\n\n")[0].rstrip()
                assert text.startswith('"""'), path
                assert first.endswith((".", ":", "?")), path
