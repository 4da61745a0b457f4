"""Tables of runs as they come: what is read of them, and how the rest is named."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from experiments.runs.runs_table import TableRow, count_of, rows_of_table
from mistlab.core.values import FieldError, InputError

HEADER = "layers,hidden,heads,sequence_length,micro_batch,notes"
ROW = "2,64,2,128,1,"


def rows(path: Path, content: str | bytes) -> list[TableRow]:
    path = path / "runs.csv"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return [*rows_of_table(path)]


@pytest.mark.parametrize("mark", [",", ";", "\t"])
@pytest.mark.parametrize("before", [b"", b"\xef\xbb\xbf"])
def test_commas_semicolons_and_tabs_part_cells(tmp_path: Path, mark: str, before: bytes) -> None:
    (only,) = rows(tmp_path, before + f"{HEADER}\r\n{ROW}\r\n".replace(",", mark).encode())
    assert only.problem == ""
    assert (only.cells["layers"], only.cells["micro_batch"]) == ("2", "1")


def test_a_quoted_cell_may_have_lines_and_commas(tmp_path: Path) -> None:
    first, second = rows(tmp_path, f'{HEADER}\n{ROW}"a ""b"",\nc"\n{ROW}\n')
    assert first.cells["notes"] == 'a "b",\nc'
    assert (second.line, second.problem) == (4, "")


def test_a_quote_without_end_is_named(tmp_path: Path) -> None:
    good, bad = rows(tmp_path, f'{HEADER}\n{ROW}\n2,64,"2,128,1\n{ROW}\n{ROW}\n')
    assert good.problem == ""
    assert bad.problem == "3 of 6 cells in 4 lines: close the quote of the last cell"


def test_a_row_that_is_not_utf_8_does_not_stop_the_others(tmp_path: Path) -> None:
    found = rows(tmp_path, f"{HEADER}\n{ROW}Größe\n{ROW}\n".encode("latin-1"))
    assert [one.problem for one in found] == ["a cell is not UTF-8: save the table in UTF-8", ""]


HEADERS: Mapping[str, tuple[bytes, str]] = {
    "nothing": (b"", "is empty"),
    "another code": (HEADER.encode("utf-16"), "is not UTF-8"),
    "other columns": (b"a,b\n1,2\n", "none of the columns sequence_length, model"),
    "a column twice": (f"{HEADER},Heads\n{ROW},4\n".encode(), "column heads twice"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_that_cannot_be_read_is_refused(tmp_path: Path, name: str) -> None:
    content, words = HEADERS[name]
    with pytest.raises(InputError, match=words):
        rows(tmp_path, content)


def test_a_count_beyond_all_runs_is_refused() -> None:
    with pytest.raises(
        InputError,
        match="too large: give at most 1,000,000,000",
    ):
        count_of({"layers": "1" + "0" * 21}, "layers")


def test_rows_count_from_one_and_name_their_line(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(
        "layers,hidden,heads,sequence_length,micro_batch\n2,64,2,128,1\n\n4,64,2,128,1\n1,2,3,4,5,6\n"
    )
    rows = [*rows_of_table(path)]
    assert [(one.number, one.line) for one in rows] == [(1, 2), (2, 4), (3, 5)]
    assert rows[1].cells["layers"] == "4"
    assert rows[2].problem.startswith("6 cells, but the table has 5 columns")


def test_a_table_without_needed_columns_says_so_in_each_row(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text("layers,hidden\n2,64\n")
    (only,) = rows_of_table(path)
    assert only.problem == "the table has no column sequence_length: add it"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match="none of the columns sequence_length"):
        [*rows_of_table(path)]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "1e11",
            "gpus: 100,000,000,000 is too large: give at most 1,000,000,000, or leave it empty",
        ),
        ("0.4", "gpus: 0.4 is not a whole number: give one such as 1, or leave it empty"),
        (
            "64GB",
            "gpus: '64GB' is not a number above 0: give a number without a unit, or leave it empty",
        ),
    ],
)
def test_a_number_that_cannot_be_is_named_with_a_remedy(text: str, problem: str) -> None:
    with pytest.raises(FieldError) as refused:
        count_of({"gpus": text}, "gpus")
    assert str(refused.value) == problem
