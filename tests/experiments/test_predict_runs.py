"""The command that predicts tables of measured runs."""

import csv
import json
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments import calibrate_runs, predict_runs, report_runs
from experiments.cli.commandline import run
from experiments.measured.group_errors import summary
from experiments.measured.predict_runs import RowPredictor
from experiments.measured.report_runs import draw, look
from experiments.runs.judged import judged
from mistlab import catalog
from mistlab.core.files import write_yaml
from mistlab.core.values import to_mapping

ROW = {
    "engine": "nanotron",
    "hardware": "H100",
    "gpus": "8",
    "model": "llama-like",
    "layers": "16",
    "hidden": "2048",
    "heads": "32",
    "ffn": "8192",
    "vocab": "131072",
    "sequence_length": "4096",
    "global_batch": "64",
    "micro_batch": "1",
    "tp": "2",
    "pp": "1",
    "dp": "4",
    "zero": "1",
    "sequence_parallel": "1",
    "recompute": "none",
    "step_s": "2.0",
    "memory_gib": "30",
    "memory_kind": "torch peak, rank 0 (first stage)",
}
SIZES = ("layers", "hidden", "heads", "ffn", "vocab")
KEYS = {
    *("file", "row", "iteration_s", "iteration_s_low", "iteration_s_high"),
    *("peak_allocated_gib", "peak_reserved_gib", "fits", "global_batch", "notes"),
    *("fit_probability", "peak_reserved_gib_low", "peak_reserved_gib_high", "impossible"),
}


def table(path: Path, *changes: dict[str, str]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(
            file, [*dict.fromkeys(name for one in ({**ROW}, *changes) for name in one)]
        )
        writer.writeheader()
        writer.writerows({**ROW, **change} for change in changes)
    return path


def answers(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    predict_runs.main([*arguments, "--json"])
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_rows_are_answered_in_order_and_bad_ones_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = table(tmp_path / "a.csv", {}, {"dp": "3"}, {"tp": "4", "dp": "2"})
    second = table(tmp_path / "b.csv", {"micro_batch": "2 sequences"}, {"dp": "", "gpus": ""})
    found = answers(capsys, str(first), str(second))
    assert [(Path(one["file"]).name, one["row"]) for one in found] == [
        ("a.csv", 1),
        ("a.csv", 2),
        ("a.csv", 3),
        ("b.csv", 1),
        ("b.csv", 2),
    ]
    assert [set(one) == KEYS for one in found] == [True, False, True, False, True]
    assert found[1]["refused"].startswith(f"{first}, line 3: dp: tp 2 x pp 1 x cp 1 x dp 3")
    assert found[3]["refused"].startswith(f"{second}, line 2: micro_batch: '2 sequences'")
    assert any("gpus is empty: 2 assumed" in note for note in found[4]["notes"])
    good = found[0]
    assert good["iteration_s_low"] < good["iteration_s"] < good["iteration_s_high"]
    assert 0 < good["peak_allocated_gib"] <= good["peak_reserved_gib"]


def test_a_model_of_the_catalogue_needs_the_sequence_length_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "short.csv"
    path.write_text("model,sequence_length\nllama3-8b,4096\n,4096\nllama-3-8b,4096\nqwen3-4b,\n")
    first, nameless, unknown, empty = answers(capsys, str(path))
    assert "no shape is given: the catalogue's llama3-8b taken" in first["notes"]
    assert "micro_batch is empty: 1 assumed" in first["notes"]
    assert nameless["refused"].startswith(f"{path}, line 3: layers: is empty, and no model is")
    assert "no model 'llama-3-8b' (did you mean 'llama3-8b' or" in unknown["refused"]
    assert empty["refused"].startswith(f"{path}, line 5: sequence_length: is empty")


def test_rows_can_be_predicted_with_a_hardware_file_of_ones_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = table(tmp_path / "a.csv", {}, {"hardware": "A100"}, {"hardware": ""}, {"hardware": "X"})
    plain = answers(capsys, str(path))
    h100 = catalog.hardware("h100-80gb")
    assert h100.compute is not None
    slow = replace(h100, compute=replace(h100.compute, sustained=0.5 * h100.compute.sustained))

    def ratios(name: str) -> list[float]:
        file = tmp_path / f"{name}.yaml"
        write_yaml(to_mapping(replace(slow, name=name), omit_defaults=True), file)
        found = answers(capsys, str(path), "--hardware", str(file))
        return [
            round(one["iteration_s"] / other.get("iteration_s", 1.0), 1)
            for one, other in zip(found, plain, strict=True)
            if "iteration_s" in one
        ]

    # The rows that name these GPUs, or none.
    mine, other, unsaid = ratios("h100-80gb")
    assert (other, mine) == (1.0, unsaid)
    assert mine > 1.3
    # A name that no table can say is of all rows.
    everywhere = ratios("mine")
    assert len(everywhere) == 4
    assert everywhere[0] == everywhere[2] == mine


def test_measurements_change_no_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bare = {"step_s": "", "memory_gib": "", "engine": "nanotron"}
    path = table(tmp_path / "a.csv", {}, bare, {"step_s": "9"})
    found = answers(capsys, str(path))
    assert len({json.dumps({**one, "row": 0}) for one in found}) == 1


def test_nanotron_keeps_whole_inputs_where_memory_allows_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    divided = {"pp": "2", "dp": "2"}
    path = table(tmp_path / "a.csv", {}, {"micro_batch": "16"}, {**divided, "micro_batch": "16"})
    notes = [one["notes"] for one in answers(capsys, str(path))]
    said = ["memory is short: engine nanotron" in some for some in notes]
    assert said == [False, True, False]


@pytest.mark.parametrize(
    ("written", "changes", "said"),
    [
        ("nanotron", {"zero": "3", "tp": "2"}, "3, but engine nanotron shards"),
        ("Nanotron 0.4", {"zero": "3", "tp": "2"}, "3, but engine Nanotron 0.4 shards"),
        ("nanotron", {"zero": "3", "tp": "1", "dp": "8"}, "3, but engine nanotron shards"),
    ],
)
def test_a_refusal_names_the_engine_as_the_row_does(
    written: str,
    changes: dict[str, str],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two rows that are predicted alike may name their engine in two ways."""
    other = {"engine": "NANOTRON", **changes}
    path = table(tmp_path / "a.csv", {"engine": written, **changes}, other)
    first, second = answers(capsys, str(path))
    assert said in first["refused"]
    assert "engine NANOTRON " in second["refused"]


def test_what_a_benchmark_does_not_say_is_the_fastest_that_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    big = {"engine": "Megatron-Core", "layers": "32", "hidden": "3072"}
    sizes = ("1", "2", "4", "8", "16")
    rows = [{**big, "micro_batch": size, "recompute": "none"} for size in ("", *sizes)]
    unsaid, *said = answers(capsys, str(table(tmp_path / "a.csv", *rows)))
    room = [one for one in said if one["fits"] and not any("full" in n for n in one["notes"])]
    assert 0 < len(room) < len(sizes)
    best = min(room, key=lambda one: one["iteration_s"])
    assert unsaid["iteration_s"] == best["iteration_s"]
    size = sizes[said.index(best)]
    assert f"micro_batch is empty: {size} is the fastest that fits" in unsaid["notes"]
    assert best["iteration_s"] < said[0]["iteration_s"]


def test_equal_rows_are_predicted_once(tmp_path: Path) -> None:
    path = table(tmp_path / "a.csv", *([{}] * 1_000))
    found = [*RowPredictor().answers(path)]
    assert len(found) == 1_000
    assert len({id(one.answer) for one in found}) == 1


@pytest.mark.parametrize(
    ("engine", "recompute", "micro_batch", "is_full"),
    [
        ("Paxml (FSDP)", "", "64", True),
        ("Paxml (FSDP)", "", "8", False),
        ("Paxml (FSDP)", "none", "64", False),
        ("Megatron-Core", "", "64", False),
    ],
)
def test_a_sharded_run_that_needs_twice_its_memory_recomputes_blocks(
    tmp_path: Path, engine: str, recompute: str, micro_batch: str, is_full: bool
) -> None:
    """If nothing tells what it recomputes; others have more ways to save memory."""
    sizes = {"tp": "1", "dp": "8", "zero": "fsdp", "micro_batch": micro_batch, "global_batch": ""}
    if engine == "Megatron-Core":
        sizes["zero"] = "1"
    rows = [{**sizes, "engine": engine, "recompute": words} for words in (recompute, "full")]
    path = table(tmp_path / "a.csv", *rows)
    found, full = (one.answer for one in RowPredictor().answers(path))
    assert found.prediction is not None
    assert full.prediction is not None
    assert (found.prediction.iteration_s == full.prediction.iteration_s) == is_full
    assert any("full recomputation" in note for note in found.notes) == is_full


def test_a_table_that_is_none_stops_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = table(tmp_path / "a.csv", {})
    status = predict_runs.main([str(tmp_path / "none.csv"), str(path), "--json"])
    captured = capsys.readouterr()
    assert status == 1
    assert len(captured.out.splitlines()) == 1
    assert "none.csv: No such file" in captured.err


def test_without_a_single_row_no_table_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert predict_runs.main([str(tmp_path / "none.csv")]) == 2
    assert capsys.readouterr().out == ""


def test_without_json_the_errors_stand_in_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = table(tmp_path / "a.csv", {}, {"step_s": ""}, {"tp": "two"}, {"dp": "7"})
    predict_runs.main([str(path)])
    out = capsys.readouterr().out.splitlines()
    cells = out[1].split()
    assert cells[:3] == ["a.csv", "4", "2"]
    assert out[-1].startswith(f"refused: {path}, line 5: dp: ")


def test_a_few_runs_stand_beside_their_predictions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = table(tmp_path / "few.csv", {}, {"step_s": ""}, {"tp": "two"})
    (_, answer, _) = answers(capsys, str(few))
    predict_runs.main([str(few)])
    out = capsys.readouterr().out.splitlines()
    start = next(place for place, line in enumerate(out) if line.startswith("row "))
    first, second = (line.split() for line in out[start + 1 : start + 3])
    assert first[:6] == ["1", "llama-like", "8", "2", "1", "2.000"]
    seconds = answer["iteration_s"]
    assert first[6:10] == [
        f"{seconds:.3f}",
        f"{answer['iteration_s_low']:.3f}",
        "to",
        f"{answer['iteration_s_high']:.3f}",
    ]
    assert first[10] == f"{seconds / 2 - 1:+.1%}"
    assert second[5] == f"{seconds:.3f}"

    predict_runs.main([str(table(tmp_path / "many.csv", *[{}] * 41))])
    assert not any(line.startswith("row ") for line in capsys.readouterr().out.splitlines())


def test_the_page_of_one_table_has_parts_of_nanotron_s_runs(tmp_path: Path) -> None:
    path = table(tmp_path / "own.csv", {}, {"tp": "8", "dp": "1"}, {"gpus": "256", "dp": "128"})
    assert report_runs.main([str(path), "--out", str(tmp_path)]) == 0
    page = (tmp_path / "runs.md").read_text()
    parts = page.partition("## Parts of the runs of nanotron, without a profile")[2]
    assert "| no pipeline, tp to 8, to 128 GPUs | 2 | 2 |" in parts
    assert "| tp to 8, to 256 GPUs | 3 | 3 |" in parts


def test_groups_of_a_table_count_once_and_are_left_out(tmp_path: Path) -> None:
    """Three runs of a group that take twice as long as predicted, and one that takes as long."""
    plan: dict[str, str] = {"length_kind": "exact"}
    (one,) = RowPredictor().answers(table(tmp_path / "one.csv", plan))
    assert one.answer.prediction is not None
    seconds = one.answer.prediction.iteration_s
    slow = {**plan, "group": "slow", "step_s": str(2 * seconds)}
    # A length that is only a cap is not judged by time.
    cap = {**slow, "length_kind": "cap"}
    quick = {**plan, "model": "another", "group": "quick", "step_s": str(seconds)}
    path = table(tmp_path / "own.csv", slow, slow, slow, cap, quick)
    assert report_runs.main([str(path), "--out", str(tmp_path), "--name", "own"]) == 0
    page = (tmp_path / "own.md").read_text()
    assert "own. Groups counted once: times 25.0% of 2 groups" in page
    bounds, orders, groups, parts = (
        (tmp_path / name).read_text().splitlines()
        for name in re.findall(r"Rows in a file: \[all \d+\]\(([\w.-]+)\)", page)
    )
    assert orders[1:] == ["own,,,,,,,,1,0.0%,0.0%,"]
    assert any(line.startswith("slow,4,4,3,50.0%,-50.0%,") for line in groups)
    assert any(line.startswith("quick,1,1,1,0.0%,+0.0%,") for line in groups)
    assert parts[0] == "table,part,runs,answered,mean,median,bias,in bounds,memory"
    assert "without its group" in bounds[0].split(",")


def test_the_page_counts_bad_runs_among_those_predicted_best(tmp_path: Path) -> None:
    plans = [{"gpus": str(gpus), "tp": str(tp)} for gpus in (8, 16) for tp in (1, 2, 4, 8)]
    plans += [{"gpus": gpus, "tp": "1", "micro_batch": "2"} for gpus in ("8", "16")]
    rows = [{**plan, "dp": str(int(plan["gpus"]) // int(plan["tp"]))} for plan in plans]
    predicted = RowPredictor().answers(table(tmp_path / "plans.csv", *rows))
    took = [one.answer.prediction.iteration_s for one in predicted if one.answer.prediction]
    best = took.index(min(took))
    took[best] *= 3
    measured = [{**row, "step_s": str(one)} for row, one in zip(rows, took, strict=True)]
    path = table(tmp_path / "own.csv", *measured)
    assert report_runs.main([str(path), "--out", str(tmp_path)]) == 0
    page = (tmp_path / "runs.md").read_text()
    where = f"llama-like on {rows[best]['gpus']} GPUs"
    found = "Of the 2 runs that are predicted within the median error (0.0%) of the best run"
    assert found in page
    assert f"1 took more than 1.3 times the measured best ({where})." in page
    assert "meets at least one such run in 75% of all cases" in page


def test_each_of_many_tables_has_a_look_of_its_own_and_none_is_no_reason_to_warn(
    tmp_path: Path,
) -> None:
    assert len({look(number) for number in range(40)}) == 40
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw([("none", [])], tmp_path / "none.svg")


def test_who_fits_to_runs_that_no_table_has_is_told_which_it_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(table(tmp_path / "own.csv", {}))
    options = ["--engine", "megatron-core", "--fit", "sustained"]
    assert run(calibrate_runs.main, [path, *options]) == 2
    said = capsys.readouterr().err
    assert "no runs of --engine megatron-core on --hardware h100-80gb" in said
    assert "give what they have: --engine nanotron --hardware h100-80gb" in said


def test_errors_of_a_fit_are_one_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(table(tmp_path / "own.csv", {}, {"model": "other", "step_s": "4.0"}))
    options = ["--fit", "sustained", "--leave-out", "model", "--evaluations", "2"]
    assert run(calibrate_runs.main, [path, *options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    groups = [(one["group"], one["runs"]) for one in found["errors"]]
    assert groups == [("without model llama-like", 1), ("without model other", 1), ("all runs", 2)]
    assert 0 < found["constants"]["sustained"] <= 1
    assert run(calibrate_runs.main, [path, *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert f"bias {found['errors'][2]['bias']:+6.1%}" in lines[2]


def test_a_file_fitted_to_own_runs_narrows_the_bounds_of_further_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three runs that take 1.3 times as long as predicted, and a constant fitted to none."""
    seconds = answers(capsys, str(table(tmp_path / "own.csv", {})))[0]["iteration_s"]
    path = str(table(tmp_path / "own.csv", *[{"step_s": f"{1.3 * seconds:.4f}"}] * 3))
    out = tmp_path / "mine.yaml"
    assert run(calibrate_runs.main, [path, "--out", str(out), "--json"]) == 0
    own = json.loads(capsys.readouterr().out)["own_runs"]
    assert (own["engine"], own["runs"]) == ("nanotron", 3)
    assert own["offset"] > 0
    plain = answers(capsys, path)[0]
    told = answers(capsys, path, "--hardware", str(out))[0]
    assert told["iteration_s"] == plain["iteration_s"]
    widths = [one["iteration_s_high"] / one["iteration_s_low"] for one in (plain, told)]
    assert widths[1] < 0.9 * widths[0]
    assert told["iteration_s_low"] > plain["iteration_s_low"]
    # A constant that is fitted uses up a run.
    fitted = ["--fit", "sustained", "--evaluations", "1", "--json"]
    assert run(calibrate_runs.main, [path, *fitted]) == 0
    assert json.loads(capsys.readouterr().out)["own_runs"]["runs"] == 2


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"engine": "aceso"},
            "precision: bf16, but engine aceso does not train in it: give fp16, or engine: ",
        ),
        ({"hardware": "V100"}, "precision: bf16 is not supported by GPU v100-"),
        ({"tp": "2", "ffn": "8191"}, "tp: 2 does not divide ffn 8191: give a divisor of 8191"),
        (
            {"sequence_length": "1000000000", "notes": "unfused attention"},
            "sequence_length: 1,000,000,000 in 16 layers of hidden 2,048 needs more than 8 EiB ",
        ),
        (
            {"offload": "nvme"},
            "offload: 'nvme' is unknown: give none, optimizer, weights or activations",
        ),
    ],
)
def test_a_refusal_names_the_column_its_value_and_the_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, str], problem: str
) -> None:
    path = table(tmp_path / "t.csv", changes)
    (answer,) = answers(capsys, str(path))
    assert answer["refused"].startswith(f"{path}, line 2: {problem}")


def test_tables_whose_rows_are_all_refused_have_no_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad, good = {"sequence_length": ""}, dict[str, str]()
    for changes, status in (([bad, bad], 1), ([bad, good], 0)):
        path = table(tmp_path / "runs.csv", *changes)
        assert run(predict_runs.main, [str(path)]) == status
        assert f"refused: {path}, line 2" in capsys.readouterr().out


@pytest.mark.parametrize("measured", ["1.5 s", "inf", "0", "-1.5"])
@pytest.mark.parametrize("column", ["step_s", "memory_gib"])
def test_a_measurement_that_is_no_number_refuses_its_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], column: str, measured: str
) -> None:
    path = table(tmp_path / "t.csv", {column: measured}, {})
    first, second = answers(capsys, str(path))
    number = f"{column}: '{measured}' is not a number above 0: give a number without a unit"
    assert first["refused"].startswith(f"{path}, line 2: {number}")
    assert "refused" not in second
    if column == "step_s":
        options = [str(path), "--fit", "block_ms", "--profile", "ultrascale"]
        assert run(calibrate_runs.main, options) == 2
        assert f"{path}, line 2: {number}" in capsys.readouterr().err


def test_a_batch_that_does_not_divide_is_told_with_what_is_predicted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = table(tmp_path / "t.csv", {"global_batch": "61"}, {"global_batch": "64"})
    first, second = answers(capsys, str(path))
    assert (first["global_batch"], second["global_batch"]) == (64, 64)
    told = "global_batch 61 is not a multiple of micro_batch x dp = 4: predicted as 64"
    assert told in first["notes"]
    predict_runs.main([str(path)])
    assert f"rounded up: {path}, line 2 (61 as 64)\n" in capsys.readouterr().out


def test_a_model_of_too_many_layers_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = table(tmp_path / "t.csv", {"layers": "999999999"})
    (answer,) = answers(capsys, str(path))
    limit = "layers: 999999999 is too large: give at most 10,000"
    assert answer["refused"].endswith(limit)


def test_peaks_that_their_table_doubts_count_apart(tmp_path: Path) -> None:
    plan = {"group": "one"}
    (one,) = RowPredictor().answers(table(tmp_path / "one.csv", plan))
    assert one.answer.prediction is not None
    gib = judged(one.row, one.answer).predicted_gib
    assert gib is not None
    right = {**plan, "memory_gib": str(gib)}
    doubted = {"group": "other", "memory_gib": str(gib / 2), "quality": "published: SUSPECT"}
    rows = [*RowPredictor().answers(table(tmp_path / "own.csv", right, doubted))]
    words = summary([judged(each.row, each.answer) for each in rows])
    without = "(0.0% of 1 groups without 1 marked SUSPECT)."
    assert f"peaks 50.0% of 2 groups {without}" in words


def test_times_that_no_gpu_reaches_are_named_and_count_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # A forward pass computes 2 operations a weight and token, a backward pass 4; blocks alone are
    # recomputed. A block has four projections of keys, queries, values and results, and an MLP with
    # gates.
    tokens, peak = 64 * 4096, 989.4e12
    blocks, head = 16 * (4 * 2048**2 + 3 * 2048 * 8192), 2048 * 131072
    least_s = tokens * (8 * blocks + 6 * head) / (8 * peak)
    limit_s = least_s / 1.1
    own = {"group": "own", "model": "llama-like", "recompute": "full", "precision": "bf16"}
    slow = {**own, "step_s": str(limit_s * 1.001)}
    fast = {**own, "group": "other", "step_s": str(limit_s * 0.999)}
    path = table(tmp_path / "own.csv", slow, fast, {**fast, "recompute": "none"})
    answered = answers(capsys, str(path))
    assert [len(one["impossible"]) for one in answered] == [0, 1, 0]
    reason = f"its GEMMs alone take {least_s:.3g} s at the peak of h100-80gb, 989 TFLOP/s"
    assert answered[1]["impossible"][0].endswith(reason)
    predict_runs.main([str(path)])
    printed = capsys.readouterr().out
    assert f"impossible: {path}, line 3: step of {limit_s * 0.999:.3g} s: {reason}" in printed
    assert printed.count("without impossible rows") == 1
    assert report_runs.main([str(path), "--out", str(tmp_path)]) == 0
    page = (tmp_path / "runs.md").read_text(encoding="utf-8")
    assert f"- own, line 3: step of {limit_s * 0.999:.3g} s: {reason}\n" in page
    rows = [*RowPredictor().answers(table(tmp_path / "two.csv", slow, fast))]
    judgements = [judged(each.row, each.answer) for each in rows]
    kept = judgements[0].time_error
    assert kept is not None
    assert f"({kept:.1%} of 1 groups without 1 impossible)" in summary(judgements)


@pytest.mark.parametrize(
    "change",
    [
        {"hardware": ""},
        {"gpus": ""},
        {"precision": ""},
        {"global_batch": "", "grad_accumulation": ""},
        {"model": "dense 7B", "method": "full", **dict.fromkeys(SIZES, "")},
        {"status": "failed: out of memory"},
    ],
    ids=["GPU", "number of GPUs", "precision", "batch", "model", "status"],
)
def test_rows_that_leave_open_what_ran_are_not_impossible(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, str]
) -> None:
    fast = {"precision": "bf16", "step_s": "0.01"}
    path = table(tmp_path / "t.csv", fast, {**fast, **change})
    stated, open_ = answers(capsys, str(path))
    assert stated["impossible"]
    assert open_["impossible"] == []


def test_peaks_above_the_memory_of_a_gpu_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Programs can use 79.1 of 80 GiB; a fiftieth more may be rounding and the driver's.
    cases = {"80": [], "80.6": [], "80.7": ["peak of 80.7 GiB: h100-80gb has 79.1 GiB"]}
    path = table(tmp_path / "t.csv", *({"memory_gib": gib} for gib in cases))
    assert [one["impossible"] for one in answers(capsys, str(path))] == [*cases.values()]


@pytest.mark.parametrize(
    ("cells", "bytes_each", "names"),
    [
        ({}, 2 + 2, "weights, gradients"),
        ({"optimizer": "AdamW"}, 2 + 2 + 4, "weights, gradients, moments"),
        ({"engine": "litgpt (Fabric)"}, 2 + 2 + 4, "weights, gradients, moments"),
        ({"optimizer": "AdamW", "offload": "optimizer"}, 2 + 2, "weights, gradients"),
        ({"optimizer": "AdamW 8-bit"}, 2 + 2, "weights, gradients"),
        ({"optimizer": "optimizer in backward"}, 2, "weights"),
        ({"optimizer": "AdamW", "offload": "weights"}, 0, ""),
        ({"precision": "fp8"}, 0, ""),
        ({"method": "qlora", "adapter_rank": "8"}, 0.5, "frozen weights"),
        ({"method": "lora", "adapter_rank": "8", "base_bits": "16"}, 2, "frozen weights"),
        ({"method": "lora", "adapter_rank": "8"}, 0, ""),
        ({"gpus": ""}, 0, ""),
        ({"memory_kind": "peak of rank 0"}, 2 + 2, "weights, gradients"),
        # One stage of a pipeline may hold less than the mean, the fullest does not.
        ({"zero": "1", "pp": "2"}, 2 + 2, "weights, gradients"),
        ({"zero": "1", "pp": "2", "memory_kind": "peak of rank 0"}, 0, ""),
        ({"model": "dense 7B", **dict.fromkeys(SIZES, "")}, 0, ""),
    ],
)
def test_peaks_below_what_a_run_holds_are_named(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    cells: dict[str, str],
    bytes_each: float,
    names: str,
) -> None:
    # All GPUs share the model, in the fewest bits; a tenth less may be rounding and GB for GiB.
    weights = 16 * (4 * 2048**2 + 3 * 2048 * 8192) + 2 * 2048 * 131072
    held_gib = bytes_each * weights / 8 / 2**30
    trl = {"engine": "TRL SFT", "method": "full", "precision": "bf16", "tp": "", "zero": "3"}
    row = {**trl, "dp": "", "memory_kind": "peak", "sequence_parallel": "", "step_s": ""}
    row |= {"notes": "untie-embeddings", **cells}
    peaks = [held_gib / 1.1 + 0.001, held_gib / 1.1 - 0.001] if bytes_each else [0.01]
    path = table(tmp_path / "t.csv", *({**row, "memory_gib": f"{gib:.6f}"} for gib in peaks))
    enough, *less = [one["impossible"] for one in answers(capsys, str(path))]
    assert enough == []
    told = f"GiB: {names} alone take {held_gib:.3g} GiB of each GPU"
    assert [len(one) for one in less] == [1] * len(less) == [1] * bool(bytes_each)
    assert all(one[0].endswith(told) for one in less)
