"""The library: ``mistlab``'s functions give the answers of the commands, as values and frames."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import mistlab
from experiments.cli.command import main_of
from experiments.cli.commandline import run
from experiments.commands import COMMANDS
from experiments.prediction.measured_step import MeasuredStep, StepCorrection
from mistlab.core.units import GIB_BYTES
from mistlab.job.job import Job
from tests.simulators.test_played_pipelines import CASES

ROOT = Path(mistlab.__file__).parents[1]
PLAN = ROOT / "experiments" / "plans" / "gpt3-2.7b-4xl4.yaml"
SCRIPT = ROOT / "experiments" / "plans" / "pretrain-gpt3-2.7b.sh"


def printed(capsys: pytest.CaptureFixture[str], name: str, *line: str) -> dict[str, object]:
    assert run(main_of(name, COMMANDS[name]), line) == 0
    answer: dict[str, object] = json.loads(capsys.readouterr().out)
    return answer


def test_a_prediction_has_the_figures_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    found = mistlab.predict(PLAN)
    assert found.to_dict() == printed(capsys, "predict", str(PLAN), "--json")
    assert found.fits
    assert f"{found.iteration_s:.3f} s an iteration" in str(found)
    assert found._repr_html_().startswith("<pre>")


def test_frames_have_a_row_a_stage_and_a_row_a_plan() -> None:
    found = mistlab.predict(PLAN)
    stages = found.to_frame()
    assert list(stages["stage"]) == [0, 1]
    assert list(stages["layers"]) == [16, 16]
    largest = max(stages["peak_reserved_bytes"])
    assert largest == found.prediction.peak_reserved_bytes
    plans = mistlab.predict_many([PLAN, found.job]).to_frame()
    assert list(plans["peak_reserved_gib"]) == [largest / GIB_BYTES] * 2


def test_a_plan_may_be_a_mapping_and_has_other_numbers() -> None:
    job = mistlab.load_job(PLAN)
    content = mistlab.job_to_mapping(job, Path())
    assert mistlab.predict(content).iteration_s == mistlab.predict(job).iteration_s
    slow = mistlab.predict(job, intra_node_gbytes_per_s=1.0)
    assert slow.iteration_s > mistlab.predict(job).iteration_s


def test_parts_of_an_explanation_add_up() -> None:
    plan, work, cluster, *_ = CASES["sends of both directions queue"]
    played = mistlab.job_to_mapping(Job(workload=work, cluster=cluster, plan=plan), Path())
    for given in (PLAN, played):
        found = mistlab.explain(given)
        whole = mistlab.predict(given).iteration_s
        assert found.breakdown.parts.total_s == pytest.approx(whole)
        assert found.to_frame()["arithmetic_s"].gt(0).all()


def test_a_search_gives_a_plan_that_is_predicted_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"model": "gpt3-2.7b", "hardware": "l4-24gb", "global_batch": 8, "gpus_per_node": 4}
    found = mistlab.tune(**sizes, precision="fp16", space="+checkpointing")
    line = ["--precision", "fp16", "--space", "+checkpointing"]
    line += ["--json", "--out", str(tmp_path / "tuned.yaml")]
    row = printed(capsys, "tune", *line)
    assert found.to_dict()["plan"] == row["plan"]
    assert found.is_proven
    assert found.verdict.startswith("Proven: ")
    saved = found.save(tmp_path / "plan.yaml")
    assert mistlab.predict(saved).iteration_s == found.iteration_s


def test_what_does_not_fit_is_changed_until_it_does() -> None:
    assert mistlab.will_it_fit(PLAN).changed is None
    found = mistlab.will_it_fit(PLAN, keep_free_gib=8.0)
    assert not found.fits
    assert found.changed is not None
    assert found.changed.fits
    assert found.change in str(found)


def test_a_plan_goes_to_a_framework_and_comes_back(tmp_path: Path) -> None:
    made = mistlab.to_framework(PLAN, "megatron")
    assert "--pipeline-model-parallel-size 2" in made.text
    assert not made.is_exact
    script = tmp_path / "launch.sh"
    script.write_text(made.text, encoding="utf-8")
    back = mistlab.from_framework(script, hardware="l4-24gb", precision="fp16")
    assert back.framework == "megatron"
    assert len(back.job.plan.stages) == 2


def test_runs_come_from_a_file_or_a_frame(tmp_path: Path) -> None:
    pd = pytest.importorskip("pandas")
    sizes = {"gpus": 8, "tp": 2, "global_batch": 64, "sequence_length": 4096}
    frame = pd.DataFrame([{"model": "llama3-8b", "hardware": "h100-80gb", **sizes}])
    path = tmp_path / "runs.csv"
    frame.to_csv(path, index=False)
    by_frame, by_path = mistlab.predict_runs(frame), mistlab.predict_runs(path)
    assert by_frame.to_frame()["iteration_s"][0] > 0
    assert by_frame.rows[0]["iteration_s"] == by_path.rows[0]["iteration_s"]
    refused = mistlab.predict_runs(frame.drop(columns="sequence_length")).rows[0]["refused"]
    assert refused.startswith("frame, line 2: ")


def test_serving_gives_the_command_s_answer(capsys: pytest.CaptureFixture[str]) -> None:
    found = mistlab.serve(model="llama3-8b", gpu="H100", gpus=2, quick=True)
    line = ["--model", "llama3-8b", "--gpus", "2", "--quick", "--json"]
    assert json.loads(json.dumps(found)) == printed(capsys, "serve_plan", *line)


def test_names_are_those_of_the_catalogue() -> None:
    names = mistlab.names()
    assert "llama3-8b" in names["models"]
    assert "h100-80gb" in names["hardware"]


@pytest.mark.parametrize(
    ("question", "told"),
    [
        (lambda: mistlab.predict("nowhere.yaml"), "no such file"),
        (lambda: mistlab.predict(PLAN, simulator="event"), "events"),
        (lambda: mistlab.predict(PLAN, keep_free=1.0), "keep_free_gib"),
        (lambda: mistlab.predict(PLAN, measured_step=-1.0), "measured_step: -1"),
        (lambda: mistlab.to_framework(PLAN, "megatrn"), "megatron"),
        (lambda: mistlab.predict_many([]), "give at least one"),
        (
            lambda: mistlab.serve(model="llama3-8b", gpu="H100", gpus=2, fewest=True),
            "serve_plan --fewest",
        ),
        (lambda: mistlab.predict_runs(3), "table: 3 is of type int: give the path of a CSV file"),
        (lambda: mistlab.serve(model="llama3-8b", gpu="H100", gpus=2, tpt=1), "tpot"),
        (
            lambda: mistlab.tune(
                model="gpt3-175b",
                hardware="l4-24gb",
                gpus_per_node=1,
                global_batch=8,
                space="3d",
            ),
            "No plan of space 3d, which .*, fits",
        ),
    ],
)
def test_wrong_input_is_told(question: object, told: str) -> None:
    with pytest.raises(mistlab.InputError, match=told):
        question()  # type: ignore[operator]


def test_a_measured_step_corrects_its_own_plan_to_what_was_measured() -> None:
    found = mistlab.predict(PLAN)
    peak = found.prediction.peak_reserved_bytes / GIB_BYTES
    both = mistlab.predict_many([PLAN, PLAN], measured_step=7.5, measured_gib=peak + 1)
    for one in both.plans:
        assert one.iteration_s == pytest.approx(7.5)
        assert one.prediction.peak_reserved_bytes / GIB_BYTES == pytest.approx(peak + 1)
        assert one.fits
    far = mistlab.predict_many([PLAN, PLAN], measured_gib=peak + 7)
    assert not far[1].fits


def test_a_plan_nearer_to_the_peak_rate_is_corrected_less() -> None:
    slow = mistlab.predict(PLAN, intra_node_gbytes_per_s=1.0)
    fast = mistlab.predict(PLAN)
    measured = MeasuredStep(measured_step=1.2 * slow.iteration_s)
    correction = StepCorrection.of(measured, slow.prediction)
    times = correction.corrected(fast.job, fast.prediction).iteration_s / fast.iteration_s
    assert 1 < times < 1.2


def test_predict_tells_a_measured_step_and_what_it_implies(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = [str(PLAN), str(PLAN), "--measured-step", "9", "--measured-gib", "18"]
    assert run(main_of("predict", COMMANDS["predict"]), line) == 0
    out = capsys.readouterr().out
    assert "measured 9.000 s a step, +36.7% against the prediction, OUTSIDE its bounds" in out
    assert "measured 18.00 GiB on the fullest GPU, +2.30" in out
    assert "9.000 s an iteration" in out


FIRST = "import mistlab; print(mistlab.names()['frameworks'][0])"


@pytest.mark.parametrize(
    ("code", "status", "told"),
    [
        (FIRST, 0, "megatron"),
        (f"import experiments; {FIRST}", 1, "not mistlab's package of that name"),
    ],
)
def test_a_folder_with_packages_of_the_same_names_is_no_trouble(
    tmp_path: Path, code: str, status: int, told: str
) -> None:
    for name in ("experiments", "runtime"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("OWN = True\n", encoding="utf-8")
    line = f"import sys; sys.path.insert(1, {str(ROOT)!r}); {code}"
    done = subprocess.run(
        [sys.executable, "-c", line], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == status
    assert told in done.stdout + done.stderr
