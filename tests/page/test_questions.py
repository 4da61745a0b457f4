"""Questions of the page: answers equal those of the commands, and pasted content names no file."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments.bench.problem import SURE
from experiments.cli.command import main_of
from experiments.commands import COMMANDS
from experiments.live_page.knobs import knobs_of, labels
from experiments.live_page.plan_figures import figures_of, predicted_job
from experiments.live_page.questions import QUESTIONS
from experiments.live_page.texts import job_in, problem_asked
from mistlab.core.values import InputError
from mistlab.job.job import Job, job_from_mapping, job_to_mapping, load_job
from tests.simulators.test_played_pipelines import CASES

ROOT = Path(__file__).parents[2]
PROBLEM = {
    "model": "llama3-8b",
    "hardware": "a100-80gb",
    "nodes": 2,
    "gpus_per_node": 8,
    "sequence_length": 4096,
    "global_batch": 128,
    "attention": "flash",
    "precision": "bf16",
}
CONFIG = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    # As Python writes it, which YAML takes for a text.
    "rms_norm_eps": 1e-05,
}


LOAD = {"model": "llama3-8b", "gpu": "H100", "gpus": 8}


def ask(question: str, **body: Any) -> dict[str, Any]:
    return QUESTIONS[question](body, lambda event: None)


def command(name: str, *line: str) -> int:
    """The exit status of a command."""
    return main_of(name, COMMANDS[name])(line)


def test_a_prediction_is_that_of_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = ask("predict", problem=PROBLEM, knobs={"tensor_parallel": 4, "stages": 2, "zero": 1})
    file = tmp_path / "plan.yaml"
    file.write_text(ask("plan_file", plan=found["job"])["text"], encoding="utf-8")
    assert command("predict", str(file), "--json", "--breakdown") == 0
    told = json.loads(capsys.readouterr().out)
    assert {key: told[key] for key in found["prediction"]} == found["prediction"]
    assert told["breakdown"] == found["breakdown"]


@pytest.mark.parametrize(
    ("room", "kept", "fit", "words"),
    [
        (1.5, 0.0, "yes", r"fits in memory: .* below the limit by .* \(3\d% of its room\)\."),
        (1.05, 0.0, "near", r"but not surely: .* \(5% of its room\); .* probability of 4\d%\."),
        # More is left than peaks are usually wrong by, and it is still not sure.
        (1.15, 0.0, "near", r"but not surely: .* \(13% of its room\); .* probability of 6\d%\."),
        # The same room, where memory is kept free beside it.
        (1.05, 0.45, "yes", r"fits in memory: .* \(5% of its room\), beside .* GiB kept free\."),
        (0.95, 0.0, "no", r"does not fit in memory: .* above .*, though .* probability of \d\d%\."),
        (0.5, 0.0, "no", r"does not fit in memory: .* above the limit by .* room\)\."),
    ],
)
def test_a_peak_near_the_limit_is_told_as_such(
    room: float, kept: float, fit: str, words: str
) -> None:
    found = ask("predict", problem=PROBLEM)
    job = job_from_mapping(found["job"])
    peak = predicted_job(job).peak_reserved_bytes + found["outside_bytes"]
    memory_gib = (room + kept) * peak / 2**30
    slower = min(1500.0, 60 * memory_gib)
    gpu = replace(job.cluster.hardware.gpu, memory_gib=memory_gib, memory_gbytes_per_s=slower)
    hardware = replace(job.cluster.hardware, gpu=gpu)
    cluster = replace(job.cluster, hardware=hardware, keep_free_gib=kept * peak / 2**30 or None)
    other = replace(job, cluster=cluster)
    told = figures_of(other, predicted_job(other))["fit"]
    assert told["is"] == fit
    assert (told["probability"] >= SURE) == (fit == "yes")
    assert re.search(words, told["words"]), told["words"]


def test_a_search_ends_with_the_plan_of_tune(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events: list[Any] = []
    small = {**PROBLEM, "nodes": 1, "global_batch": 16, "model": "gpt3-1.3b", "hardware": "l4-24gb"}
    small |= {"gpus_per_node": 4, "precision": "fp16"}
    found = QUESTIONS["search"]({"problem": small, "seconds": 20}, events.append)
    out = tmp_path / "plan.yaml"
    line = ["--json", *("--out", str(out)), *("--model", "gpt3-1.3b"), *("--global-batch", "16")]
    assert command("tune", *line, *("--hardware", "l4-24gb"), *("--gpus-per-node", "4")) == 0
    told = json.loads(capsys.readouterr().out)
    assert found["status"] == told["status"] == "OPTIMAL"
    assert found["figures"]["prediction"]["iteration_s"] == told["predicted_s"]
    assert job_from_mapping(found["figures"]["job"]) == load_job(out)
    assert any("figures" in event for event in events)
    assert all(event["bound_s"] is None or event["bound_s"] > 0 for event in events)


def test_every_offered_choice_makes_a_plan() -> None:
    found = ask("predict", problem=PROBLEM)
    offered = ask("choices", problem=PROBLEM, plan=found["job"])["choices"]
    assert {"stages", "engine", "tensor_parallel", "zero"} < offered.keys() <= labels().keys()
    for name, values in offered.items():
        assert values, name
        turned = ask("predict", problem=PROBLEM, plan=found["job"], knobs={name: values[-1]})
        got = knobs_of(job_from_mapping(turned["job"]).plan)[name]
        assert got == values[-1], name


def test_a_plan_that_suits_its_problem_stays_as_it_is() -> None:
    job = load_job(ROOT / "experiments" / "plans" / "gpt3-2.7b-4xl4.yaml")
    plain = job_to_mapping(job)
    work, cluster = plain["workload"], plain["cluster"]
    own = {
        **PROBLEM,
        **work,
        **{key: cluster[key] for key in ("hardware", "nodes", "gpus_per_node")},
    }
    found = ask("predict", problem=own, plan=plain)
    assert job_from_mapping(found["job"]) == job
    twice = ask("predict", problem={**own, "nodes": 2}, plan=plain)
    assert job_from_mapping(twice["job"]).plan.num_gpus == 2 * job.plan.num_gpus


def test_what_would_buy_time_is_predicted_as_plans_are() -> None:
    found = ask("predict", problem=PROBLEM, knobs={"checkpointed_layers": 1.0})
    gains = ask("gains", plan=found["job"])
    by_change = {row["change"]: row for row in gains["rows"]}
    assert gains["iteration_s"] == found["prediction"]["iteration_s"]
    other = {**found["job"], "cluster": {**found["job"]["cluster"], "hardware": "h100-80gb"}}
    expected = ask("predict", plan=other)["prediction"]["iteration_s"]
    assert by_change["h100-80gb"]["iteration_s"] == expected
    assert any(row["ratio"] < 1 for row in gains["rows"])


def test_two_plans_differ_by_parts_that_add_up() -> None:
    first = ask("predict", problem=PROBLEM)
    second = ask("predict", problem=PROBLEM, plan=first["job"], knobs={"checkpointed_layers": 0.0})
    plan, work, cluster, *_ = CASES["sends of both directions queue"]
    slow = Job(workload=work, cluster=cluster, plan=plan)
    fast = replace(slow, cluster=replace(cluster, inter_node_gbytes_per_s=100.0))
    played = [ask("predict", plan=job_to_mapping(job)) for job in (slow, fast)]
    for pair in ((first, second), played):
        told = ask("compare", first=pair[0]["job"], second=pair[1]["job"])
        apart = sum(part["second_s"] - part["first_s"] for part in told["parts"])
        seconds = [one["prediction"]["iteration_s"] for one in pair]
        assert apart == pytest.approx(seconds[1] - seconds[0], abs=1e-6 * seconds[0])
        assert "faster" in told["verdict"]


def test_pasted_texts_are_what_they_say() -> None:
    config = json.dumps(CONFIG)
    model = ask("paste", text=config)
    assert (model["kind"], model["name"]) == ("model", "model: 0.16 billion parameters in 8 blocks")
    small = {**PROBLEM, "model": config, "hardware": "h100-80gb"}
    assert ask("predict", problem=small)["job"]["workload"]["model"]["hidden"] == 1024
    plan = (ROOT / "experiments" / "plans" / "gpt3-2.7b-4xl4.yaml").read_text(encoding="utf-8")
    assert ask("paste", text=plan)["kind"] == "plan"
    script = (ROOT / "experiments" / "plans" / "pretrain-gpt3-2.7b.sh").read_text(encoding="utf-8")
    read = ask("paste", text=script, hardware="l4-24gb")
    assert read["kind"] == "launch"
    assert ask("predict", plan=read["plan"])["prediction"]["fits"] in (True, False)


@pytest.mark.parametrize(
    ("question", "body", "words"),
    [
        ("predict", {"problem": {**PROBLEM, "model": "/etc/passwd"}}, "model: '/etc/passwd'"),
        ("predict", {"problem": {**PROBLEM, "hardware": "../a.yaml"}}, "hardware: '../a.yaml'"),
        ("predict", {"problem": {**PROBLEM, "space": "/tmp/s.yaml"}}, "names a file"),
        ("predict", {"problem": {**PROBLEM, "node": 4}}, "did you mean 'nodes'"),
        ("predict", {"problem": {**PROBLEM, "nodes": 0}}, "nodes"),
        ("predict", {"problem": PROBLEM, "knobs": {"zer": 1}}, "knobs.zer: is unknown"),
        ("predict", {"problem": PROBLEM, "knobs": {"tensor_parallel": 3}}, "does not divide"),
        ("predict", {"problem": PROBLEM, "knobs": {"stages": "two"}}, "is not a number"),
        ("predict", {"problem": {**PROBLEM, "global_batch": 0}}, "global_batch"),
        ("predict", {"plan": "workload: [*a, &a b]"}, "plan"),
        ("paste", {"text": json.dumps({**CONFIG, "model_type": "resnet"})}, "resnet"),
        ("paste", {"text": "echo hello"}, ""),
        ("paste", {"text": "x" * 300_000}, "at most"),
        ("search", {"problem": PROBLEM, "seconds": -1}, "seconds"),
        ("export", {"plan": None, "framework": "megatron"}, "plan"),
        ("serving", {"load": {"model": "llama3-8b", "trace": "/etc/passwd"}}, "load.trace"),
        ("serving", {"load": {"model": "llama3-8b", "gpu": "H100"}}, "load.gpus: missing"),
        (
            "serving",
            {"load": {**LOAD, "model": "glm-5"}},
            "have too little memory for a replica of glm-5",
        ),
        ("serving", {"load": {"model": "../x", "gpu": "H100", "gpus": 8}}, "names a file"),
    ],
)
def test_wrong_input_is_refused_with_field_and_remedy(
    question: str, body: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError) as refused:
        ask(question, **body)
    assert words in str(refused.value)


def test_a_served_load_is_answered_as_by_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["--model", LOAD["model"], "--gpu", LOAD["gpu"], "--gpus", str(LOAD["gpus"])]
    assert command("serve_plan", *map(str, line), "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["played"]["requests_per_s"] > 0
    assert json.loads(json.dumps(ask("serving_played", load=LOAD))) == told
    # While sliders move nothing is played: the rest is the same.
    unplayed = {**told, "played": None, "best_played": None}
    assert json.loads(json.dumps(ask("serving", load=LOAD))) == unplayed


@pytest.mark.parametrize("key", ["order", "profile", "hardware", "model"])
def test_a_plan_may_not_name_a_file(key: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret.yaml"
    secret.write_text("secret: value\n", encoding="utf-8")
    plain = ask("predict", problem=PROBLEM)["job"]
    part = {"order": "plan", "profile": "cluster", "hardware": "cluster", "model": "workload"}[key]
    plain[part] = {**plain[part], key: str(secret)}
    with pytest.raises(InputError, match="names a file") as refused:
        job_in(plain)
    assert "value" not in str(refused.value)


def test_a_model_may_not_name_a_graph_file() -> None:
    with pytest.raises(InputError, match="graph_file"):
        problem_asked({**PROBLEM, "model": "family: custom\nlayers: 2\ngraph_file: x.json\n"})
