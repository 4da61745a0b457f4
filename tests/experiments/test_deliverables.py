"""What parts of the predictor bring, and what single kernels say of GPUs that were left out."""

from pathlib import Path

import numpy as np
import pytest

from experiments.measured.by_source import Known, errors_by_source, source_of
from experiments.measured.deliverables import PARTS, deliverable_lines
from experiments.measured.from_datasheets import TOLD, as_of_datasheet, figure_lines
from experiments.measured.lent_kernels import (
    from_datasheets,
    inside_bounds,
    kernel_lines,
    kernels_of,
)
from experiments.measured.predict_runs import RowPredictor
from experiments.measured.refitted import shares_of_sources, without_own_rows
from experiments.runs.judged import Judged, judged
from experiments.runs.run_sureness import Miss
from experiments.runs.runs_table import TableRow
from mistlab import catalog
from mistlab.core.values import InputError
from mistlab.engines.engine import ENGINES

CELLS = {
    "engine": "torchtune",
    "hardware": "RTX 4090",
    "gpus": "1",
    "model": "llama3-8b",
    "sequence_length": "2048",
    "micro_batch": "2",
    "global_batch": "2",
    "recompute": "full",
    "precision": "bf16",
    "step_s": "1.5",
    "memory_gib": "20",
    "memory_kind": "nvidia-smi",
    "notes": "torch.compile; flash_attention_2",
}
CLUSTER = {
    "engine": "Megatron-LM",
    "hardware": "A100",
    "gpus": "32",
    "tp": "8",
    "dp": "4",
    "network": "25 Gb/s",
    "global_batch": "8",
}


def known(*changes: dict[str, str]) -> list[Known]:
    """Rows of a source each, with what they measured and how far it is off."""
    rows = [
        TableRow(file="runs.csv", number=place, line=place + 1, cells={**CELLS, **change})
        for place, change in enumerate(changes)
    ]
    found: list[Known] = []
    for place, one in enumerate(RowPredictor().answers_of(rows)):
        row = judged(one.row, one.answer)
        doubt = row.answer.doubt
        assert doubt is not None, one.answer.refused
        assert row.measured_s is not None
        source = source_of(f"table {place}", row.row.cells)
        miss = Miss(
            kind=doubt.kind,
            source=source,
            model="",
            gpus=1,
            roots=doubt.range.miss(row.measured_s),
        )
        found.append((source, row, miss))
    return found


def figures(row: Judged) -> tuple[float | None, float | None]:
    return row.predicted_s, row.predicted_gib


@pytest.mark.parametrize(
    ("part", "cells", "moves"),
    [
        ("any GPU", {}, (True, False)),
        ("any GPU", CLUSTER, (False, False)),
        ("what is written", CLUSTER, (True, False)),
        ("what is written", {}, (False, False)),
        ("what rows say", {"notes": "chunked loss"}, (True, True)),
        ("engines", {"notes": "eager"}, (True, False)),
        ("engines", CLUSTER, (False, False)),
        ("what grows", {}, (True, False)),
        ("memory", {}, (False, True)),
        ("bounds", {}, (False, False)),
    ],
)
def test_a_part_that_is_off_moves_what_it_is_of(
    part: str, cells: dict[str, str], moves: tuple[bool, bool]
) -> None:
    ((_, row, _),) = known(cells)
    hosts = {name: ENGINES[name].host for name in ENGINES}
    (again,) = PARTS[part].again([row])
    changed = tuple(a != b for a, b in zip(figures(row), figures(again), strict=True))
    assert changed == moves
    assert again.measured_s == row.measured_s
    assert {name: ENGINES[name].host for name in ENGINES} == hosts


def test_bounds_by_rows_take_a_source_for_as_many_as_it_has_rows() -> None:
    # One source is off as a whole: by rows its many runs say that all are.
    many = [{"group": "many", "step_s": str(4 + place / 100)} for place in range(12)]
    others = [{"group": f"other {place}", "step_s": str(1.0 + place / 100)} for place in range(4)]
    every = known(*many, *others)
    plain = {one.name: one for one in errors_by_source(every)}
    by_rows = {one.name: one for one in errors_by_source(every, by_rows=True)}
    assert plain["other 0"].bounded[0] != by_rows["other 0"].bounded[0]


def test_pages_tell_parts_and_groups_of_figures() -> None:
    # A B200 is left out, and told of itself what it is.
    every = known({}, {**CLUSTER, "hardware": "B200"}, CLUSTER)
    page = "\n".join(deliverable_lines(every))
    for part in PARTS:
        assert f"| {part} |" in page
    page = "\n".join(figure_lines(every))
    assert "| b200-180gb | 1 |" in page


def test_a_left_out_gpu_keeps_the_group_that_it_is_told() -> None:
    own, bare = catalog.hardware("v100-32gb"), TOLD["peaks and bandwidths"]("v100-32gb")
    assert TOLD["and own kernels"]("v100-32gb").compute == own.compute != bare.compute
    assert TOLD["and own links"]("v100-32gb").transfers == own.transfers != bare.transfers
    taken = TOLD["not scaled"]("v100-32gb")
    assert taken.compute == catalog.hardware("a100-40gb").compute
    assert taken.gpu.memory_gib == own.gpu.memory_gib


PRODUCTS = "hardware,dtype,m,n,k,latency_ms\n"


def products(path: Path, rates: dict[str, float], sizes: tuple[int, ...] = (8192, 16384)) -> Path:
    """A table of products that reach these TFLOP/s."""
    lines = [
        f"{gpu},bfloat16,{side},{side},{side},{2 * side**3 / rate / 1e9}"
        for gpu, rate in rates.items()
        for side in sizes
    ]
    path.write_text(PRODUCTS + "\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_kernels_of_a_left_out_gpu_are_held_against_its_datasheet(tmp_path: Path) -> None:
    compute = as_of_datasheet("h100-80gb").compute
    assert compute is not None
    rate = compute.rate("matmul").tflops
    assert rate is not None
    table = products(tmp_path / "gemm.csv", {"H100": rate, "A100": 250.0, "B200": 1500.0})
    exact, *_ = found = from_datasheets([*kernels_of(table)])
    assert exact.lender == "b200-180gb"
    assert exact.lent == pytest.approx(np.zeros(2), abs=1e-9)
    assert all(one.all() for one in inside_bounds(found))
    page = "\n".join(kernel_lines([table]))
    assert "| h100-80gb: matmul | b200-180gb | 2 |" in page


def test_kernels_far_from_all_others_lie_outside_of_their_bounds(tmp_path: Path) -> None:
    rates = {"A100": 250.0, "B200": 1500.0, "V100": 80.0, "L4": 50.0, "H100": 20.0}
    found = from_datasheets([*kernels_of(products(tmp_path / "gemm.csv", rates))])
    inside = {
        one.kernels.gpu: held.all() for one, held in zip(found, inside_bounds(found), strict=True)
    }
    assert not inside["h100-80gb"]
    assert inside["a100-80gb"]


def test_short_products_and_unmeasured_gpus_are_left_out(tmp_path: Path) -> None:
    table = products(tmp_path / "gemm.csv", {"H100": 500.0, "L40S": 200.0}, (64, 8192))
    (only,) = kernels_of(table)
    assert (only.gpu, len(only.seconds)) == ("h100-80gb", 1)


def test_other_tables_are_no_tables_of_kernels(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text("model,gpus\nllama,8\n", encoding="utf-8")
    with pytest.raises(InputError, match="none of the columns k, isl, fwd_us"):
        [*kernels_of(path)]
    table = products(tmp_path / "gemm.csv", {"L40S": 200.0})
    with pytest.raises(InputError, match="--kernels: the tables have no kernels of a GPU"):
        [*kernel_lines([table])]


TORCHTITAN = {
    "engine": "torchtitan",
    "hardware": "H100",
    "gpus": "8",
    "dp": "8",
    "zero": "fsdp",
    "global_batch": "8",
    "micro_batch": "1",
    "memory_kind": "reserved",
}


def test_the_share_of_cached_memory_is_fitted_without_a_row_s_own_source() -> None:
    def peaks(*gib: str) -> list[float | None]:
        rows = known(*({**TORCHTITAN, "group": f"run of {one}", "memory_gib": one} for one in gib))
        shares = shares_of_sources(rows)
        assert len(shares) == len(gib)
        assert sorted(shares.values()) == [*shares.values()]
        return [row.predicted_gib for _, row, _ in without_own_rows(rows)]

    first, second = peaks("40", "50"), peaks("40", "60")
    # The other source's peak decides, and a source's own does not.
    assert first[0] is not None
    assert second[0] is not None
    assert first[0] < second[0]
    assert first[1] == second[1] != first[0]
    (kept,) = peaks("40")
    assert kept == known({**TORCHTITAN, "memory_gib": "40"})[0][1].predicted_gib


def test_other_engines_rows_keep_their_peaks() -> None:
    rows = known({**TORCHTITAN, "memory_gib": "40"}, {}, {**TORCHTITAN, "group": "b"})
    again = without_own_rows(rows)
    assert again[1] == rows[1]
    assert again[0] != rows[0]
