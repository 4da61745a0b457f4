"""Inverse questions: the number that is told is the one at which the answer turns."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments.bench.problem import predicted
from experiments.cli.command import main_of
from experiments.cli.commandline import run
from experiments.commands import COMMANDS
from experiments.prediction.solve import QUESTIONS, most_that, solved
from mistlab import catalog
from mistlab.core.values import InputError
from mistlab.economy.inverse import TurnsTwiceError, least_that
from mistlab.job.job import Job, dump_job, job_from_mapping
from mistlab.job.prediction import Prediction

pytestmark = pytest.mark.usefixtures("predicted_once")

STAGE = {"layers": 16, "data_parallel": 8, "tensor_parallel": 1, "micro_batch": 1, "zero": 1}
JOB = job_from_mapping(
    {
        "workload": {
            "model": "llama3-8b",
            "sequence_length": 4096,
            "global_batch": 64,
            "attention": "flash",
            "precision": "bf16",
        },
        "cluster": {"hardware": "h100-80gb", "nodes": 2, "gpus_per_node": 8},
        "plan": {"engine": "megatron-core", "micro_batches": 8, "stages": [STAGE, STAGE]},
    }
)


def seconds(job: Job) -> float:
    found = predicted(job)
    assert isinstance(found, Prediction)
    return found.iteration_s


def on(**numbers: Any) -> Job:
    return replace(JOB, cluster=replace(JOB.cluster, **numbers))


@pytest.mark.parametrize("name", ["inter_node_gbytes_per_s", "intra_node_gbytes_per_s"])
def test_the_least_rate_is_the_one_at_which_the_step_is_near_enough(name: str) -> None:
    unlimited_s = seconds(on(**{name: 1e6}))
    for share in (2, 20):
        rate = solved(JOB, name, f"{share}%").number
        assert rate is not None
        assert seconds(on(**{name: rate})) == pytest.approx(
            unlimited_s * (1 + share / 100), rel=1e-3
        )
        assert seconds(on(**{name: 0.9 * rate})) > unlimited_s * (1 + share / 100)
    assert solved(JOB, name, "0.001s").number is None


def test_links_that_a_plan_does_not_use_need_no_rate() -> None:
    alone = replace(
        JOB,
        cluster=replace(JOB.cluster, nodes=1, gpus_per_node=4),
        plan=replace(
            JOB.plan,
            micro_batches=32,
            stages=tuple(replace(one, data_parallel=2) for one in JOB.plan.stages),
        ),
    )
    answer = solved(alone, "inter_node_gbytes_per_s", "5%")
    assert answer.number == 0
    assert answer.words.startswith("nothing crosses nodes: any rate is enough")
    within = solved(alone, "intra_node_gbytes_per_s", "5%")
    assert within.number is not None
    assert within.number > 0
    assert solved(alone, "inter_node_gbytes_per_s", "0.001s").number is None


def test_the_most_latency_lengthens_the_step_by_as_much() -> None:
    small, large = (solved(JOB, "latency_us", goal).number for goal in ("1%", "10%"))
    assert small is not None
    assert large is not None
    assert 5 < large / small < 20
    assert small > 0


def test_the_least_memory_is_the_one_with_which_the_plan_fits() -> None:
    least = solved(JOB, "memory_gib", None).number
    assert least is not None
    for more, fits in ((1.001, True), (0.999, False)):
        found = predicted(on(memory_gib=least * more))
        assert isinstance(found, Prediction)
        assert found.fits is fits


def test_the_fewest_gpus_take_no_longer_than_was_asked() -> None:
    whole_s = seconds(JOB)
    assert solved(JOB, "gpus", f"{whole_s * 1.01}s").number == 16
    few = solved(JOB, "gpus", f"{whole_s * 2.2}s").number
    assert few is not None
    assert few < 16
    many = solved(JOB, "gpus", f"{whole_s / 1.8}s").number
    assert many is not None
    assert many > 16
    assert solved(JOB, "gpus", "0.001s").number is None


def test_an_answer_that_turns_twice_is_refused() -> None:
    with pytest.raises(TurnsTwiceError, match="no single smallest value"):
        least_that(lambda number: not 3 < number < 30, 1.0, 100.0)


@pytest.mark.parametrize(
    ("name", "goal", "words"),
    [
        ("inter_node", None, "did you mean"),
        ("gpus", "five", "is not a goal"),
        ("gpus", "-3%", "is not a goal"),
        ("gpus", "nans", "is not a goal"),
        ("memory_gib", "5%", "leave --for out"),
    ],
)
def test_wrong_questions_are_refused(name: str, goal: str | None, words: str) -> None:
    with pytest.raises(InputError, match=words):
        solved(JOB, name, goal)


@pytest.mark.parametrize("name", QUESTIONS)
def test_the_command_tells_it(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "plan.yaml"
    dump_job(JOB, plan)
    predict = main_of("predict", COMMANDS["predict"])
    assert run(predict, [str(plan), "--solve", name, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["solved"]
    assert told == solved(JOB, name, None).mapping()
    assert run(predict, [str(plan), "--solve", name]) == 0
    assert told["answer"] in capsys.readouterr().out
    assert run(predict, [str(plan), "--for", "5%"]) == 2
    assert "give --solve too" in capsys.readouterr().err


def with_length(job: Job, tokens: int) -> Job:
    return replace(job, workload=replace(job.workload, sequence_length=tokens))


@pytest.mark.parametrize("context", [1, 4])
def test_the_longest_sequences_fit_and_no_longer_ones(context: int) -> None:
    stages = tuple(
        replace(one, data_parallel=8 // context, context_parallel=context, checkpointed_layers=16)
        for one in JOB.plan.stages
    )
    job = replace(JOB, plan=replace(JOB.plan, stages=stages, micro_batches=8 * context))
    answer = solved(job, "sequence_length", None)
    assert answer.number is not None
    tokens = int(answer.number)
    for length, fits in ((tokens, True), (tokens + 128, False), (tokens // 256 * 128, True)):
        prediction = predicted(with_length(job, length))
        assert isinstance(prediction, Prediction)
        assert prediction.fits == fits
    assert (answer.now, answer.unit) == (4096, "tokens")
    assert f"sequences of {tokens:,} tokens fit, in steps of 128 (now 4,096)" in answer.words
    # Beyond the context that the model was released with.
    assert "exceed the context of 8,192" in answer.words
    # The question is of the plan, whatever its sequences have now.
    assert solved(with_length(job, 256), "sequence_length", None).number == tokens


def test_sequences_end_where_positions_or_memory_do() -> None:
    model = replace(catalog.model("gpt3-2.7b"), context=5000)
    positions = replace(JOB, workload=replace(JOB.workload, model=model))
    stages = tuple(replace(one, checkpointed_layers=16) for one in JOB.plan.stages)
    positions = replace(positions, plan=replace(JOB.plan, stages=stages))
    answer = solved(positions, "sequence_length", None)
    assert answer.number == 4992
    assert "all positions of the model" in answer.words
    full = replace(JOB, cluster=replace(JOB.cluster, keep_free_gib=60.0))
    answer = solved(full, "sequence_length", None)
    assert (answer.number, answer.words) == (
        None,
        "not even sequences of 128 tokens fit (now 4,096)",
    )
    with pytest.raises(InputError, match="finds the longest sequences with which the plan fits"):
        solved(JOB, "sequence_length", "5%")


@pytest.mark.parametrize("most", [0, 1, 7, 8, 33])
def test_the_largest_number_that_fits_is_searched_to_the_last(most: int) -> None:
    for limit in range(most + 2):
        assert most_that(limit.__ge__, most) == min(limit, most)
