"""Conversions between rows of plain data and pandas frames; pandas is an optional extra."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from mistlab.core.values import InputError, reject, shown

if TYPE_CHECKING:
    import pandas as pd

LACKING = "pandas is not installed: pip install '.[pandas]'"


def frame_of(rows: Sequence[Mapping[str, Any]]) -> "pd.DataFrame":
    """A pandas frame of rows; nested keys become column names joined with dots."""
    try:
        import pandas as pd  # noqa: PLC0415 (an extra)
    except ModuleNotFoundError:
        raise InputError(LACKING) from None

    return pd.json_normalize([dict(row) for row in rows])


@contextmanager
def table_path(table: "str | Path | pd.DataFrame") -> Iterator[Path]:
    """In the ``with`` block, the path of a table: a file's own path or, for a pandas frame, that of
    a temporary file with its contents.
    """
    if isinstance(table, str | Path):
        yield Path(table)
        return
    if not hasattr(table, "to_csv"):
        reject(
            f"table: {shown(table)} is of type {type(table).__name__}: give the path of a CSV "
            "file, or a pandas DataFrame"
        )
    with TemporaryDirectory() as folder:
        path = Path(folder) / "frame.csv"
        table.to_csv(path, index=False)
        yield path
