"""Errors of measured runs by source: each left out whole, and GPUs predicted from datasheets."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from experiments.measured.ablation import ablation_lines
from experiments.measured.by_source import (
    Known,
    apart_of,
    by_source_lines,
    errors_by_source,
    is_peak_of_run,
    is_published,
    source_of,
)
from experiments.measured.from_datasheets import as_of_datasheet
from experiments.measured.predict_runs import RowPredictor
from experiments.runs.judged import Judged
from experiments.runs.run_sureness import Doubt, Miss, Range, RunAnswer
from experiments.runs.runs_table import TableRow
from mistlab import catalog
from mistlab.cost.confidence import RunKind
from mistlab.machine.hardware import LENT
from tests.mistlab.test_run_judging import judged_row

KIND = RunKind(
    software="nemo",
    engine="megatron",
    hardware="h100-80gb",
    blocks="dense",
    bits=16,
)


def known(source: str, *errors: float, **cells: str) -> list[Known]:
    """Runs of a source that took 10 s and are predicted so much too long."""
    found: list[Known] = []
    for place, error in enumerate(errors):
        one = judged_row(10.0 * (1 + error), 10.0, micro_batch="1", **cells)
        assert one.predicted_s is not None
        around = Range(least_s=one.predicted_s, longest_s=one.predicted_s, way=1.0)
        answer = replace(one.answer, doubt=Doubt(kind=KIND, gpus=8, range=around))
        roots = around.miss(10.0)
        miss = Miss(kind=KIND, source=source, model=f"m{place}", gpus=8, roots=roots)
        found.append((source, replace(one, answer=answer), miss))
    return found


def test_a_source_is_a_group_a_page_or_a_table() -> None:
    cells = {"group": "V100 runs", "source": "README"}
    assert source_of("further", cells) == "V100 runs"
    assert source_of("further", {"source": "README"}) == "further"
    assert source_of("torchtitan", {"source": "README"}) == "README"


@pytest.mark.parametrize(
    ("cells", "apart"),
    [
        ({"engine": "Megatron-LM", "notes": "transformer-impl=local"}, "functional tests"),
        ({"engine": "Megatron-Bridge", "notes": "phase pretrain"}, "verification cards"),
        ({"engine": "nanotron", "pp": "2"}, "pipelines of one cluster"),
        ({"engine": "nanotron", "pp": "1"}, ""),
        ({"engine": "torchtune", "method": "full"}, ""),
        ({"engine": "Megatron-LM", "pp": "2"}, ""),
    ],
)
def test_what_is_asked_of_no_source_is_counted_apart(cells: dict[str, str], apart: str) -> None:
    assert apart_of(cells) == apart


def test_doubted_figures_are_not_published_ones() -> None:
    def published(**cells: str) -> bool:
        return is_published(judged_row(1.0, 1.0, **{"micro_batch": "1", **cells}))

    assert published()
    assert published(quality="published")
    assert not published(quality="underdetermined: offload")
    assert not published(micro_batch="")
    assert not published(notes="SUSPECT: another run's time")
    assert is_peak_of_run(judged_row(1.0, 1.0, micro_batch="1", quality="assumed: offload"))
    assert not is_peak_of_run(judged_row(1.0, 1.0, micro_batch="1", notes="SUSPECT: the layers"))


def test_a_source_counts_once_and_its_own_runs_widen_none_of_its_bounds() -> None:
    every = [*known("wide", *[0.5, -0.5] * 20), *known("exact", 0.0), *known("near", 0.01, -0.01)]
    errors = {one.name: one for one in errors_by_source(every)}
    assert errors["wide"].mean_time == pytest.approx(0.5)
    # Others are exact, so the widest bounds they give are a few hundredths.
    assert errors["wide"].inside == 0.0
    assert errors["exact"].inside == 1.0
    page = "\n".join(by_source_lines(every))
    assert f"a source is {(0.5 + 0.0 + 0.01) / 3:.1%} in the mean of 3, 1.0% in the median" in page
    assert f"hold for {3 / 43:.0%} of rows, and for {2 / 3:.0%} of a source's rows" in page


def test_functional_tests_are_in_no_sum() -> None:
    tests = known("tests", 2.0, engine="Megatron-LM", notes="transformer-impl=local")
    page = "\n".join(by_source_lines([*known("exact", 0.0), *tests]))
    assert "a source is 0.0% in the mean of 1" in page
    assert "Apart, tiny models of Megatron's functional tests, which time launches: 1 times" in page


def _refused(reason: str) -> Known:
    row = TableRow(file="runs.csv", number=1, line=2, cells={})
    answer = RunAnswer(refused=f"runs.csv, line 2: {reason}")
    return "s", Judged(row=row, answer=answer, measured_s=1.0, measured_gib=None), None


def test_rows_that_are_refused_for_their_gpu_are_told() -> None:
    rows: Sequence[Known] = [
        *known("exact", 0.0),
        _refused("hardware: 'Z9' is unknown"),
        _refused("pp: too many"),
    ]
    assert "Refused: 2 rows, of which 1 for their GPUs." in "\n".join(by_source_lines(rows))


@pytest.mark.parametrize("name", catalog.calibrated_names())
def test_a_gpu_from_its_datasheet_has_no_rate_of_its_own_architecture(name: str) -> None:
    hardware, stated = as_of_datasheet(name), catalog.stated_hardware(name)
    assert (hardware.gpu, hardware.node) == (stated.gpu, stated.node)
    assert all(getattr(hardware, group) is not None for group in LENT)
    assert hardware.provenance.compute is not None
    lender = catalog.stated_hardware(hardware.provenance.compute.source)
    assert lender.gpu.architecture != stated.gpu.architecture


def test_what_a_column_brings_is_the_error_of_its_sources_without_it() -> None:
    """A run that took as long as its network lets it, and one that tells no network."""
    plain = {"engine": "Megatron-LM", "hardware": "H100", "gpus": "16", "model": "llama3-8b"}
    cells = {**plain, "sequence_length": "4096", "global_batch": "64", "micro_batch": "1"}
    cells |= {"tp": "1", "pp": "1", "precision": "bf16", "recompute": "full"}
    slow = {**cells, "network": "10 Gb/s"}
    found = []
    for source, own in (("slow", slow), ("plain", cells)):
        row = TableRow(file="runs.csv", number=1, line=2, cells=own)
        (one,) = RowPredictor().answers_of([row])
        assert one.answer.prediction is not None, one.answer.refused
        seconds = one.answer.prediction.iteration_s
        found.append(
            (
                source,
                Judged(row=row, answer=one.answer, measured_s=seconds, measured_gib=None),
                None,
            )
        )
    (line,) = [line for line in ablation_lines(found) if line.startswith("| network")]
    _, name, runs, sources, own_error, without, every, every_without, *_ = line.split("|")
    assert (name.strip(), runs.strip(), sources.strip()) == ("network and nodes", "1", "1")
    assert own_error.strip() == every.strip() == "0.0%"
    assert float(without.strip(" %")) > 20
    assert float(every_without.strip(" %")) == pytest.approx(
        float(without.strip(" %")) / 2, abs=0.1
    )
