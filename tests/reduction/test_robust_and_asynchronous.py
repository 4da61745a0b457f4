"""A mean that liars do not move far, and a server that waits for no rank."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from experiments.reductions.image_training import trained
from mistlab.core.values import InputError
from mistlab.job.job import Job, job_from_mapping
from mistlab.reduction.compression import Compressor
from mistlab.reduction.reduction_costs import RankLink, Reduction
from mistlab.reduction.reduction_text import reduction_named
from mistlab.reduction.robust import LIE, trimmed_mean, with_liars
from simulators.events import EventSimulator
from simulators.messages import played_exchange_s, played_step_s
from simulators.symbolic import SymbolicPredictor

LINK = RankLink(latency_s=1e-4, bytes_per_s=1e9)
NUMBERS = st.floats(-1e3, 1e3, allow_nan=False, width=32)


@given(rows=arrays(np.float64, (7, 5), elements=NUMBERS), lies=arrays(np.float64, (2, 5)))
def test_two_liars_keep_the_trimmed_mean_among_what_others_say(
    rows: np.ndarray, lies: np.ndarray
) -> None:
    said = rows.copy()
    said[[1, 4]] = np.nan_to_num(lies)
    honest = np.delete(rows, [1, 4], axis=0)
    middle = trimmed_mean(said, 2)
    assert (middle >= honest.min(axis=0) - 1e-9).all()
    assert (middle <= honest.max(axis=0) + 1e-9).all()


def test_nothing_trimmed_is_the_mean_and_liars_turn_it() -> None:
    rows = np.arange(12.0).reshape(4, 3)
    assert trimmed_mean(rows, 0) == pytest.approx(rows.mean(axis=0))
    said = with_liars(rows, (2,))
    assert said[2] == pytest.approx(LIE * rows[2])
    assert trimmed_mean(rows[[3, 0, 2, 1]], 1) == pytest.approx(rows[1:3].mean(axis=0))


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("compute_s", [0.0, 0.01, 1.0])
def test_a_server_that_waits_for_none_is_as_fast_as_the_slower_side(
    shards: int, compute_s: float
) -> None:
    how = Reduction(kind="server", shards=shards, asynchronous=True)
    for ranks in (2, 8):
        closed = how.step_s(compute_s, 1_000_000, ranks, LINK)
        played = played_step_s(how, compute_s, 1_000_000, ranks, LINK)
        # Ranks go from one server to the next, and may find one busy whose turn would be over.
        assert played == pytest.approx(closed, rel=0.02 if shards == 1 else 0.15)
    assert how.step_s(1.0, 10, 8, LINK) < replace(how, asynchronous=False).step_s(1.0, 10, 8, LINK)


def test_a_trimmed_mean_costs_what_a_ring_does() -> None:
    for ranks in (3, 8, 64):
        how = Reduction(trimmed=1)
        assert played_exchange_s(how, 10**6, ranks, LINK) == pytest.approx(
            Reduction().exchange_s(10**6, ranks, LINK)
        )


def job(text: str) -> Job:
    stage = {"layers": 12, "data_parallel": 8, "tensor_parallel": 1, "micro_batch": 1}
    return job_from_mapping(
        {
            "workload": {
                "model": "gpt3-1.3b",
                "sequence_length": 2048,
                "global_batch": 32,
                "attention": "flash",
                "precision": "fp16",
                "reduction": reduction_named(text),
            },
            "cluster": {"hardware": "h100-80gb", "nodes": 2, "gpus_per_node": 8},
            "plan": {"micro_batches": 4, "stages": [stage, stage]},
        }
    )


@pytest.mark.parametrize("text", ["server:asynchronous=true", "all_reduce:trimmed=2,liars=1+5"])
def test_plans_are_priced_and_played_alike(text: str) -> None:
    asked = job(text)
    closed, played = (
        one(workload=asked.workload, cluster=asked.cluster).predict(asked.plan)
        for one in (SymbolicPredictor, EventSimulator)
    )
    assert played.iteration_s == pytest.approx(closed.iteration_s, rel=0.03)


def test_asynchronous_steps_are_faster_than_those_that_wait() -> None:
    seconds = {}
    for text in ("server", "server:asynchronous=true"):
        asked = job(text)
        predictor = SymbolicPredictor(workload=asked.workload, cluster=asked.cluster)
        seconds[text] = predictor.predict(asked.plan).iteration_s
    assert seconds["server:asynchronous=true"] < seconds["server"]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"trimmed": 1, "compressor": Compressor(kind="sign")}, "gradients cannot be compared"),
        ({"kind": "server", "asynchronous": True, "trimmed": 1}, "gets one gradient at a time"),
        ({"kind": "gossip", "trimmed": 1}, "trimmed: 1, but kind gossip does not use"),
        ({"asynchronous": True}, "give kind: server"),
        ({"liars": (1, 1)}, "names a rank twice"),
    ],
)
def test_what_does_not_go_together_is_told(fields: dict, told: str) -> None:
    with pytest.raises(InputError, match=told):
        Reduction(**fields)


def test_more_liars_than_ranks_and_trimming_all_are_told() -> None:
    with pytest.raises(InputError, match="liars has rank 8, but there are 8 ranks"):
        job("all_reduce:liars=8")
    with pytest.raises(InputError, match=r"trimmed 4 leaves out all of 8 values.* at most 3"):
        job("all_reduce:trimmed=4")


def test_one_liar_ruins_a_mean_and_not_a_trimmed_one() -> None:
    pytest.importorskip("sklearn")
    lied, trimmed, plain = (
        trained(way, 0.2, 0, 60)[1] for way in ("one lies", "one lies, trimmed", "plain")
    )
    assert lied < 0.5
    assert trimmed > plain - 0.1
