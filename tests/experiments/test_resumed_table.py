"""Tables that grow: nothing is lost, nothing half-written is believed."""

from pathlib import Path

import pytest

from experiments.calibration.profile_tables import ResumedTable
from mistlab.core.values import InputError

KEYS, VALUES = ("device", "size"), ("time_ms",)


def table(path: Path) -> ResumedTable:
    return ResumedTable(path=path, keys=KEYS, values=VALUES)


def test_what_was_written_is_found_again(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    first = table(path)
    first.add({"device": "one, two", "size": 1.5}, {"time_ms": 0.25})
    again = table(path)
    assert again.has({"device": "one, two", "size": 1.5})
    assert not again.has({"device": "one, two", "size": 2.5})
    assert [*again.rows] == [*first.rows]
    assert path.read_text(encoding="utf-8") == 'device,size,time_ms\n"one, two",1.5,0.25\n'


@pytest.mark.parametrize("cut", ["b,2", "b,2,0.2", "b"])
def test_a_line_that_was_cut_off_is_measured_again(cut: str, tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text(f"device,size,time_ms\na,1,0.1\n{cut}", encoding="utf-8")
    found = table(path)
    assert len(found) == 1
    found.add({"device": "b", "size": 2}, {"time_ms": 0.25})
    assert path.read_text(encoding="utf-8") == "device,size,time_ms\na,1,0.1\nb,2,0.25\n"


def test_other_columns_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("device,time_ms\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"columns device,time_ms, but .* device,size,time_ms"):
        table(path)
