"""Plans whose ranks communicate less: read and written, refused where they do not go together,
priced as plain arithmetic has it, played, counted in memory, and searched."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.cli.command import main_of
from experiments.cli.commandline import run
from experiments.commands import COMMANDS
from mistlab.core.values import FieldError
from mistlab.cost.breakdown import breakdown_of
from mistlab.cost.links import LinkTimes
from mistlab.cost.order_times import engine_of, task_models
from mistlab.cost.tasks import TaskSeconds, task_columns
from mistlab.engines.engine import ENGINES
from mistlab.job.job import Job, job_from_mapping, job_to_mapping
from mistlab.job.prediction import Prediction
from mistlab.job.search import Budget, Problem
from mistlab.plan.named_spaces import space_of
from mistlab.reduction.reduction_costs import Reduction
from mistlab.reduction.reduction_text import reduction_named
from mistlab.stages.stage_batch import StageBatch
from searchers.registry import SEARCHERS
from searchers.strategy import StrategySearcher
from simulators.averaging_cycle import played_cycle_s
from simulators.events import EventSimulator
from simulators.registry import PREDICTORS
from simulators.symbolic import SymbolicPredictor

# Reductions, and the ZeRO level and the degrees of plans for them.
GIVEN = [
    "server:shards=4",
    "gossip:topology=ring",
    "gossip:topology=complete",
    "gossip:topology=one_peer",
    "gossip:offsets=1+3",
    "local:every=4",
    "outer:every=6,fragments=2,outer_bits=4",
    "outer:every=6,fragments=3,delay=1,replicas=2",
    "all_reduce:compressor=top_k,share=0.05,feedback=memory",
    "all_reduce:compressor=power,rank=2,feedback=ef21",
    "server:compressor=sign,feedback=double",
]
GIB = 2**30


def job_of(reduction: Any = None, *, stages: int = 1, zero: int = 0, **others: Any) -> Job:
    """A small model on two nodes of four L4, by one or two stages of data-parallel ranks."""
    stage = {
        "layers": 4 // stages, "data_parallel": 8 // stages, "tensor_parallel": 1,
        "micro_batch": 1, "zero": zero, **others,
    }  # fmt: skip
    plain: dict[str, Any] = {
        "workload": {
            "model": {"family": "llama", "hidden": 512, "layers": 4, "heads": 8},
            "sequence_length": 512, "global_batch": 32, "attention": "flash", "precision": "bf16",
        },
        "cluster": {"hardware": "l4-24gb", "nodes": 2, "gpus_per_node": 4},
        "plan": {"micro_batches": 4 * stages, "stages": [stage] * stages},
    }  # fmt: skip
    if reduction is not None:
        plain["workload"]["reduction"] = reduction
    return job_from_mapping(plain)


def named(text: str) -> dict[str, Any]:
    """The mapping of a reduction as it stands in plan files."""
    plain = job_to_mapping(job_of(reduction_named(text)))["workload"]["reduction"]
    assert isinstance(plain, dict)
    return plain


def predicted(job: Job, predictor: str = "symbolic") -> Prediction:
    return PREDICTORS[predictor](workload=job.workload, cluster=job.cluster).predict(job.plan)


def seconds_of(job: Job) -> TaskSeconds:
    """The times of the tasks of a job's stages."""
    (model,) = task_models(job.workload, job.cluster, engine_of(job.plan))
    batch = StageBatch.of_plan(job.plan)
    return model.seconds({name: batch.value(name) for name in task_columns()})


@pytest.mark.parametrize("text", GIVEN)
def test_plan_files_say_a_reduction_and_leave_defaults_out(text: str) -> None:
    job = job_of(named(text))
    assert job.workload.reduction == reduction_named(text)
    assert job_from_mapping(job_to_mapping(job)) == job
    assert "delay" not in job_to_mapping(job_of(named("local:every=4")))["workload"]["reduction"]
    assert "reduction" not in job_to_mapping(job_of())["workload"]


@pytest.mark.parametrize(
    ("reduction", "degree", "gpus"),
    [
        ({"kind": "gossip"}, 2, "1 GPU of"),
        ({"kind": "local", "every": 2}, 4, "1 GPU of"),
        ({"kind": "outer", "every": 2, "replicas": 4}, 4, "2 GPUs of"),
        ({"kind": "outer", "every": 2, "replicas": 4}, 2, ""),
        ({"kind": "server"}, 4, ""),
    ],
)
def test_replicas_that_average_weights_divide_no_experts_among_them(
    reduction: dict[str, Any], degree: int, gpus: str
) -> None:
    plain = job_to_mapping(job_of(reduction))
    plain["workload"]["model"]["experts"] = {"count": 4, "active": 1, "ffn": 64}
    plain["plan"]["stages"][0]["expert_parallel"] = degree
    if not gpus:
        job_from_mapping(plain)
        return
    with pytest.raises(FieldError, match=f"{degree} x .*{gpus} a replica.*give degrees") as refused:
        job_from_mapping(plain)
    assert refused.value.path == "plan.stages[0].expert_parallel"


REFUSED: list[tuple[Any, dict[str, Any], str, str]] = [
    ({"kind": "gossip"}, {"zero": 3}, "plan.stages[0].zero", "ZeRO-3.*give ZeRO-0 at most"),
    ({"kind": "local", "every": 2}, {"zero": 1}, "plan.stages[0].zero", "give ZeRO-0 at most"),
    (
        {"compressor": {"kind": "top_k"}, "feedback": "memory"},
        {"zero": 2},
        "plan.stages[0].zero",
        "ZeRO-2.*give ZeRO-1 at most",
    ),
    (
        {"kind": "gossip", "offsets": [2, 4]},
        {},
        "plan.stages[0].data_parallel",
        "8.*offsets 2, 4 divide 8 ranks into 2 groups.*such as 1",
    ),
    (
        {"kind": "outer", "every": 4, "replicas": 3},
        {},
        "plan.stages[0].data_parallel",
        "do not divide into 3 replicas",
    ),
    (
        {"compressor": {"kind": "top_k", "share": 0}},
        {},
        "workload.reduction.compressor.share",
        "0 is too small.*above 0",
    ),
    ({"kind": "gosip"}, {}, "workload.reduction.kind", "gossip"),
    (
        {"compressor": {"kind": "top_k"}, "feedback": "memory", "rounds": 3},
        {},
        "workload.reduction.rounds",
        "3, but feedback memory .*give feedback: neolithic",
    ),
    (
        {"kind": "gossip", "liars": [1, 2]},
        {},
        "workload.reduction.liars",
        "1, 2, but kind gossip does not use",
    ),
    ({"kind": "gossip", "every": 4}, {}, "workload.reduction.every", "4.*local or outer"),
    ({"feedback": "memory"}, {}, "workload.reduction.feedback", "give a compressor"),
    (
        {"kind": "outer", "every": 4, "delay": 4},
        {},
        "workload.reduction.delay",
        "4 is not below every.*give at most",
    ),
    ({"kind": "outer", "every": 5, "fragments": 2}, {}, "workload.reduction.every", "5.*multiple"),
    (
        {"kind": "gossip", "compressor": {"kind": "sign"}},
        {},
        "workload.reduction.compressor",
        "sign, but kind gossip does not use.*all_reduce or server",
    ),
    (
        {"compressor": {"kind": "qsgd"}, "feedback": "ef21"},
        {},
        "workload.reduction.feedback",
        "unbiased.*top_k",
    ),
    ({"kind": "server", "shards": 9}, {}, "plan.stages[0].data_parallel", "shards 9 .*at most 8"),
    ({"kind": "local"}, {"state_replicas": 2}, "plan.stages[0].state_replicas", "leave it out"),
    (
        {"kind": "local"},
        {"offload": {"optimizer": 0.5}},
        "plan.stages[0].offload.optimizer",
        "give 0",
    ),
]


@pytest.mark.parametrize(("reduction", "stage", "field", "told"), REFUSED)
def test_what_does_not_go_together_is_told(
    reduction: Any, stage: dict[str, Any], field: str, told: str
) -> None:
    with pytest.raises(FieldError, match=f"(?s){told}") as caught:
        job_of(reduction, **stage)
    assert caught.value.path == field


def test_stages_of_unlike_ranks_have_no_replicas_of_one_rank() -> None:
    plain = job_to_mapping(job_of({"kind": "gossip"}, stages=2))
    plain["plan"]["stages"][1] |= {"data_parallel": 2, "micro_batch": 2}
    with pytest.raises(
        FieldError, match=r"2, but the first stage has 4.*the same data_parallel"
    ) as caught:
        job_from_mapping(plain)
    assert caught.value.path == "plan.stages[1].data_parallel"


def test_adapters_have_no_reduction_of_their_own() -> None:
    plain = job_to_mapping(job_of({"kind": "gossip"}))
    plain["workload"]["train"] = "adapters"
    with pytest.raises(FieldError, match="gossip is not supported with train: adapters") as caught:
        job_from_mapping(plain)
    assert caught.value.path == "workload.reduction.kind"


def layers_of(job: Job) -> list[tuple[int, float]]:
    """How many layers of each type a stage of all blocks has, and the parameters of each."""
    seconds = seconds_of(job)
    values = dict(zip(seconds.model.types.names, seconds.parameters[:, 0].tolist(), strict=True))
    return [(4 if name == "block" else 1, values[name]) for name in ("embedding", "block", "head")]


def exchange_by_hand_s(job: Job) -> float:
    """Seconds of an exchange of all layers of a stage of eight ranks on two nodes, one after
    another."""
    how, links = job.workload.reduction, LinkTimes.of(job.cluster)
    seconds = 0.0
    for count, values in layers_of(job):
        size = np.array([4.0 * values])
        if how.kind == "gossip":
            # Of four ranks in a row as many reach the next node as the offset is long; one peer is
            # at three distances in turn.
            turns = 3 if how.topology == "one_peer" and not how.offsets else 1
            offsets = [one for step in range(turns) for one in how.neighbours(8, step)]
            away = [min(one, 8 - one) for one in offsets]
            near = links.send(across_nodes=False, at_once=1)(size)[0]
            far = [links.send(across_nodes=True, at_once=min(one, 4))(size)[0] for one in away]
            each = sum(max(near if one < 4 else 0.0, to) for one, to in zip(away, far, strict=True))
            each /= turns
        else:
            bits = how.outer_bits / 32
            shape = (2, 1) if how.replicas == 2 else (4, 2)
            ranks = {"gpus_in_node": shape[0], "nodes": shape[1]}
            if how.replicas == 2:
                # Two replicas of four ranks each: a rank's peer is in the other node.
                ranks = {"gpus_in_node": 1, "nodes": 2}
            each = links.collective("all_reduce", **ranks)(size * bits)[0]
        seconds += count * float(each)
    return seconds


@pytest.mark.parametrize("predictor", ["symbolic", "events"])
@pytest.mark.parametrize("text", [one for one in GIVEN if one.startswith(("g", "l", "o"))])
def test_an_average_of_weights_takes_its_share_of_a_cycle(text: str, predictor: str) -> None:
    job, how = job_of(named(text)), reduction_named(text)
    plain = {"kind": "local", "every": 10**12}
    if how.replicas is not None:
        plain = {"kind": "outer", "every": 10**12, "replicas": how.replicas}
    alone_s = predicted(job_of(plain), "symbolic").iteration_s
    if predictor == "events":
        events = EventSimulator(workload=job_of(plain).workload, cluster=job.cluster)
        alone_s = events.simulate(job.plan).iteration_s
    exchange_s = exchange_by_hand_s(job)
    late_s = exchange_s / how.fragments - how.delay * alone_s
    expected_s = alone_s + how.fragments / how.every * max(0.0, late_s)
    assert predicted(job, predictor).iteration_s == pytest.approx(expected_s, rel=1e-9)


@pytest.mark.parametrize("text", GIVEN)
@pytest.mark.parametrize("stages", [1, 2])
def test_closed_form_and_played_cycle_agree(text: str, stages: int) -> None:
    plain = job_to_mapping(job_of(named(text), stages=stages))
    engines = ("mistlab", "megatron", "fsdp")
    plain["plan"]["engine"] = engines[(GIVEN.index(text) + stages) % len(engines)]
    job = job_from_mapping(plain)
    closed, played = predicted(job).iteration_s, predicted(job, "events").iteration_s
    assert closed == pytest.approx(played, rel=0.06)


def test_a_played_cycle_is_steps_and_what_sticks_out() -> None:
    for late, told in ((0, 6 + 3 * 0.5), (1, 6 + 3 * 0.0)):
        how = Reduction(kind="outer", every=6, fragments=3, delay=late)
        assert played_cycle_s(how, 1.0, 0.5) == pytest.approx(told)
    slow = Reduction(kind="outer", every=6, fragments=3, delay=1)
    assert played_cycle_s(slow, 1.0, 2.5) == pytest.approx(6 + 3 * 1.5)
    assert 6 * slow.mean_step_s(1.0, 2.5) == pytest.approx(6 + 3 * 1.5)


def test_sent_less_takes_as_long_as_its_messages_and_kernels() -> None:
    text = "all_reduce:compressor=top_k,share=0.05,feedback=memory"
    job = job_of(named(text))
    seconds, links = seconds_of(job), LinkTimes.of(job.cluster)
    gather = links.collective("all_gather", gpus_in_node=4, nodes=2)
    compute = job.cluster.hardware.compute
    assert compute is not None
    (values,) = seconds.parameters[1].tolist()
    sent = round(0.05 * values) * 8
    # Gradients of 4 bytes and memories are read, messages, memories and the mean written.
    moved = values * (4 + 4 + 2 * 4) + sent + 8 * sent
    expected_s = gather(np.array([8.0 * sent]))[0] + moved * compute.rate("step").s_per_byte
    assert seconds.alone("R", "")[1, 0] == pytest.approx(expected_s)
    assert predicted(job).iteration_s < predicted(job_of()).iteration_s


def test_servers_answer_one_rank_after_another() -> None:
    job = job_of({"kind": "server", "shards": 8})
    seconds, links = seconds_of(job), LinkTimes.of(job.cluster)
    (values,) = seconds.parameters[1].tolist()
    one = links.send(across_nodes=True, at_once=4)(np.array([4 * values / 8]))[0]
    assert seconds.alone("R", "")[1, 0] == pytest.approx(8 * 2 * one)


@pytest.mark.parametrize(
    ("text", "zero", "buffers", "optimizer"),
    [
        ("all_reduce:compressor=top_k,feedback=memory", 0, 4, 0),
        ("all_reduce:compressor=top_k,feedback=double", 1, 8, 0),
        ("all_reduce:compressor=sign,feedback=ef21", 1, 8, 0),
        ("server:compressor=top_k,feedback=neolithic", 0, 4, 0),
        ("outer:every=4", 0, 0, 8),
        ("local:every=4", 0, 0, 0),
    ],
)
def test_what_is_kept_is_counted_by_class(
    text: str, zero: int, buffers: int, optimizer: int
) -> None:
    plain, own = job_of(zero=zero), job_of(named(text), zero=zero)
    before, after = (predicted(job).stages[0].memory for job in (plain, own))
    parameters = sum(count * values for count, values in layers_of(plain))
    assert after.buffers - before.buffers == pytest.approx(buffers * parameters, abs=2)
    assert after.optimizer - before.optimizer == pytest.approx(optimizer * parameters, abs=2)
    grown = (buffers + optimizer) * parameters
    assert after.total_bytes - before.total_bytes == pytest.approx(grown, abs=4)


def test_outer_states_are_divided_inside_a_replica() -> None:
    text = {"kind": "outer", "every": 4, "replicas": 2}
    whole, divided = (predicted(job_of(text, zero=zero)).stages[0].memory for zero in (0, 3))
    # 12 bytes of masters and moments and 8 of outer steps, over the four ranks of a replica.
    assert divided.optimizer == pytest.approx(whole.optimizer / 4, rel=1e-3)
    neighbour = predicted(job_of({"kind": "gossip"})).stages[0].memory
    largest = seconds_of(job_of()).parameters[:, 0].max()
    plain = predicted(job_of()).stages[0].memory
    assert neighbour.buffers - plain.buffers == pytest.approx(4 * largest, abs=2)


def test_a_breakdown_has_averages_of_weights() -> None:
    for text in ("gossip:topology=ring", "outer:every=6,fragments=2,delay=1,outer_bits=32"):
        job = job_of(named(text))
        found = breakdown_of(job)
        assert found.parts.total_s == pytest.approx(predicted(job).iteration_s, rel=1e-9)
    assert found.parts.averaging_s > 0
    assert breakdown_of(job_of()).parts.averaging_s == 0


SEARCHED = [
    "gossip:topology=ring",
    "local:every=4",
    "outer:every=8,replicas=2",
    "all_reduce:compressor=top_k,feedback=memory",
]


@pytest.mark.parametrize("text", SEARCHED)
def test_a_search_finds_the_best_plan_that_goes_with_a_reduction(text: str) -> None:
    workload = job_of(named(text)).workload
    problem = Problem(workload=workload, cluster=job_of().cluster)
    budget, space = Budget(evaluations=50_000), space_of("3d")
    predictor = SymbolicPredictor(workload=workload, cluster=problem.cluster)
    found = {
        name: StrategySearcher(strategy=SEARCHERS[name], predictor=predictor).search(
            problem, space, budget, 0
        )
        for name in ("exhaustive", "exact")
    }
    times = [one.prediction.iteration_s for one in found.values() if one.prediction is not None]
    assert len(times) == 2
    assert times[0] == pytest.approx(times[1], rel=1e-6)
    for one in found.values():
        assert one.status == "OPTIMAL"
        assert one.plan is not None
        Job(workload=workload, cluster=problem.cluster, plan=one.plan)


def test_nothing_that_is_asked_for_changes_what_is_trained_by_default() -> None:
    assert job_of().workload.reduction.is_plain
    assert all("reduction" not in space_of(name).lists for name in ("3d", "mist", "wide"))
    plain = ENGINES["mistlab"]
    assert job_of().workload.trained_by(plain) is plain


def printed(capsys: pytest.CaptureFixture[str], command: str, *line: str) -> str:
    assert run(main_of(command, COMMANDS[command]), line) == 0
    return capsys.readouterr().out


def test_commands_take_and_tell_a_reduction(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("--model", "gpt3-1.3b", "--gpus-per-node", "4", "--quick", "--space", "3d")
    out = tmp_path / "plan.yaml"
    told = printed(
        capsys, "tune", *asked, "--reduction", "local:every=16", "--out", str(out), "--json"
    )
    assert json.loads(told)["out"] == str(out)
    assert "every: 16" in out.read_text()
    words = printed(capsys, "predict", str(out), "--breakdown")
    assert "weights averaged over all ranks every 16 steps: another training" in words


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("gosip", "gossip"),
        ("local:every", "every=8"),
        ("local:every=0", "at least 1"),
        ("outer:every=8,delay=1", "search with delay 0, then predict the plan"),
        ("all_reduce:compressor=top_k,share=0", "above 0"),
    ],
)
def test_options_that_are_wrong_are_told(
    text: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(main_of("tune", COMMANDS["tune"]), ("--reduction", text, "--quick")) == 2
    assert told in capsys.readouterr().err
