"""The tables of one machine: which columns they have, and what was measured into them before."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from experiments.calibrating.resumed_table import ResumedTable

KINDS = {"host_to_device": "pinned_h2d", "device_to_host": "pinned_d2h"}
SIZES = ("hidden", "ffn", "heads", "seq", "vocab", "mbs", "tp")
GROUP = ("generation", "intra_group", "inter_group")
ALONE = ("iso_compute_ms", "iso_g2g_ms", "iso_c2g_ms", "iso_g2c_ms")
SPREAD = "spread"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """The tables of one machine, which ``name`` stands for in their columns."""

    name: str
    operators: ResumedTable
    attention: ResumedTable
    launches: ResumedTable
    copies: ResumedTable
    collectives: ResumedTable
    sends: ResumedTable
    streams: ResumedTable

    @classmethod
    def of(cls, folder: Path, name: str) -> Self:
        """The tables of a folder, with what was measured before."""

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
            sends=table("sends.csv", ("hardware", "link", "mib"), "time_ms"),
            streams=table("streams.csv", (*GROUP, "levels"), "latency_ms", *ALONE),
        )
