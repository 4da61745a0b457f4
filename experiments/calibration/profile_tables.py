"""The tables of measurements of one machine, which are filled row by row."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from mistlab.core.files import naming
from mistlab.core.values import reject

# Tables of measurements on disk, which are filled row by row; a measurement that is finished is not
# repeated after an interruption.


Key = Mapping[str, object]


@dataclass(slots=True, kw_only=True)
class ResumedTable:
    """A CSV file with at most one row for each key; ``keys`` and ``values`` are the names of its
    columns.
    """

    path: Path
    keys: tuple[str, ...]
    values: tuple[str, ...]
    _rows: dict[tuple[str, ...], Mapping[str, str]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        header = ",".join((*self.keys, *self.values))
        text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
        # A last line that was cut off is dropped, so that it is measured again.
        text = text[: text.rfind("\n") + 1] or f"{header}\n"
        if text.partition("\n")[0] != header:
            reject(
                f"{self.path}: has the columns {text.partition(chr(10))[0]}, but this version "
                f"writes {header}: give another folder as --tables"
            )
        with naming(self.path):
            self.path.write_text(text, encoding="utf-8")
        for row in csv.DictReader(text.splitlines()):
            self._rows[self._texts(row)] = row

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def rows(self) -> Sequence[Mapping[str, str]]:
        """The rows of the table that have been measured so far."""
        return [*self._rows.values()]

    def has(self, key: Key) -> bool:
        """Whether the row with this key has been measured."""
        return self._texts(key) in self._rows

    def add(self, key: Key, values: Mapping[str, object]) -> None:
        """Append a measured row to the file."""
        row = {name: str(value) for name, value in {**key, **values}.items()}
        with naming(self.path), self.path.open("a", encoding="utf-8", newline="") as file:
            cells = [row[name] for name in (*self.keys, *self.values)]
            csv.writer(file, lineterminator="\n").writerow(cells)
        self._rows[self._texts(row)] = row

    def _texts(self, key: Key) -> tuple[str, ...]:
        return tuple(str(key[name]) for name in self.keys)


# The tables of one machine: the columns of each, and the measurements made so far.


KINDS = {"host_to_device": "pinned_h2d", "device_to_host": "pinned_d2h"}
SIZES = ("hidden", "ffn", "heads", "seq", "vocab", "mbs", "tp")
GROUP = ("generation", "intra_group", "inter_group")
ALONE = ("iso_compute_ms", "iso_g2g_ms", "iso_c2g_ms", "iso_g2c_ms")
SPREAD = "spread"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """The tables of measurements of one machine; each has a column with the machine's name."""

    name: str
    operators: ResumedTable
    attention: ResumedTable
    launches: ResumedTable
    copies: ResumedTable
    collectives: ResumedTable
    network: ResumedTable
    sends: ResumedTable
    streams: ResumedTable

    @classmethod
    def of(cls, folder: Path, name: str) -> Self:
        """The tables in a folder, with the measurements made so far."""

        def table(file: str, keys: tuple[str, ...], *values: str) -> ResumedTable:
            return ResumedTable(path=folder / file, keys=keys, values=(*values, SPREAD))

        operators = ("hardware", *SIZES, "op", "precision")
        kernels = ("db", "op", "batch", "seq", "heads", "head_dim", "shapes", "precision")
        return cls(
            name=name,
            operators=table("operators.csv", operators, "fwd_us", "bwd_us", "flop", "bytes"),
            attention=table("attention.csv", kernels, "fwd_median_ms", "bwd_median_ms"),
            launches=table(
                "launches.csv", ("hardware", "family", "attention"), "kernels", "time_us"
            ),
            copies=table("copies.csv", (*GROUP, "kind", "bytes"), "latency_ms"),
            collectives=table(
                "collectives.csv", ("hardware", "gpus", "collective", "full_mib"), "time_ms"
            ),
            network=table(
                "network.csv", ("hardware", "gpus", "nodes", "collective", "full_mib"), "time_ms"
            ),
            sends=table("sends.csv", ("hardware", "link", "mib"), "time_ms"),
            streams=table("streams.csv", (*GROUP, "levels"), "latency_ms", *ALONE),
        )
