"""Documents that are not equally long: their distributions, how they are arranged, and steps of
them."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest

from experiments.studies import document_lengths as command
from mistlab import catalog
from mistlab.core.values import InputError
from mistlab.machine.cluster import Cluster
from mistlab.plan.lengths import DocumentLengths, lengths_from
from mistlab.plan.plan import Plan, StagePlan
from simulators.events import EventSimulator
from simulators.lengths import ARRANGEMENTS, Arrangement, Arranger, LengthCosts, played_steps
from simulators.symbolic import SymbolicPredictor
from tests.workloads import workload_of

CONTEXT = 2048
WORK = workload_of("gpt3-1.3b", CONTEXT, 32)
CLUSTER = Cluster(hardware=catalog.hardware("a100-40gb"), nodes=1, gpus_per_node=8)
SIMULATOR = EventSimulator(workload=WORK, cluster=CLUSTER)
PLAN = Plan(
    stages=(StagePlan(layers=12, data_parallel=2, tensor_parallel=1, micro_batch=4),) * 2,
    micro_batches=4,
)
COSTS = LengthCosts(token=0.7 / (4 * CONTEXT), square=0.3 / (4 * CONTEXT**2))
HEAVY = lengths_from("lognormal:200:1.5").within(CONTEXT, cuts=True)


def arranger(lengths: DocumentLengths = HEAVY, **fields: Any) -> Arranger:
    sizes = {"ranks": 2, "micro_batches": 4, "sequences": 4, "context": CONTEXT, "costs": COSTS}
    return Arranger(lengths=lengths, draw=np.random.default_rng(5), **{**sizes, **fields})


def test_quantiles_are_those_of_the_distribution() -> None:
    shares = np.array([0.1, 0.5, 0.9])
    normal = [NormalDist().inv_cdf(share) for share in shares.tolist()]
    found = lengths_from("lognormal:5000:0.5").at(shares)
    np.testing.assert_allclose(found, 5000 * np.exp(0.5 * np.array(normal)), rtol=2e-3)
    found = lengths_from("pareto:1000:2").at(shares)
    np.testing.assert_allclose(found, 1000 * (1 - shares) ** -0.5, rtol=2e-3)
    np.testing.assert_allclose(
        lengths_from("uniform:100:900").at(shares), [180, 500, 820], rtol=0.01
    )


def test_a_file_has_lengths_or_a_histogram(tmp_path: Path) -> None:
    one, other = tmp_path / "lengths.txt", tmp_path / "lengths.csv"
    one.write_text("30\n10\n10\n\n20\n", encoding="utf-8")
    other.write_text("tokens,documents\n10,2\n20,1\n30,1\n", encoding="utf-8")
    assert lengths_from(str(one)) == lengths_from(str(other))
    assert lengths_from(str(one)).at(np.array([0.0, 0.49, 0.5, 0.99])).tolist() == [10, 10, 20, 30]
    assert lengths_from(str(one)).mean == 17.5


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lognormal:600", "is not lognormal:MEDIAN:SIGMA, with numbers above 0"),
        ("uniform:10:-5", "is not uniform:LEAST:MOST, with numbers above 0"),
        ("nowhere.csv", r"nowhere.csv: cannot be read .*: give a file, or one of lognormal:MEDIAN"),
    ],
)
def test_what_is_no_distribution_is_refused(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        lengths_from(text)


def test_a_bad_line_of_a_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("10\n20\n-3\n", encoding="utf-8")
    with pytest.raises(InputError, match="line 3 is '-3': give a document's tokens"):
        lengths_from(str(path))


def test_documents_longer_than_the_context_are_refused_or_cut() -> None:
    long = DocumentLengths.of(np.array([100, 5000]))
    message = (
        f"a document has 5000 tokens, more than workload.sequence_length {CONTEXT}: give --cut"
    )
    with pytest.raises(InputError, match=message):
        long.within(CONTEXT)
    assert long.within(CONTEXT, cuts=True).tokens == (100, CONTEXT)


@pytest.mark.parametrize("way", ARRANGEMENTS)
def test_documents_of_a_whole_context_make_full_micro_batches(way: Arrangement) -> None:
    found = arranger(DocumentLengths.of(np.array([CONTEXT]))).step(way)
    np.testing.assert_allclose(COSTS.work(found), 1.0)
    assert found.padding == 0


def test_no_document_is_lost_and_none_is_too_much() -> None:
    """What waits for a later step is trained then: lengths trained are as those drawn."""
    made = arranger()
    trained = []
    for _ in range(60):
        batches = made.documents("balanced")
        assert len(batches) == 8
        assert max(map(sum, batches)) <= 4 * CONTEXT
        trained += [length for one in batches for length in one]
    assert np.mean(trained) == pytest.approx(HEAVY.mean, rel=0.05)
    assert sum(trained) > 0.995 * 60 * 8 * 4 * CONTEXT


def test_arrangements_waste_less_in_their_order() -> None:
    padding, spread = {}, {}
    for way in ARRANGEMENTS:
        made = arranger()
        steps = [made.step(way) for _ in range(20)]
        padding[way] = np.mean([one.padding for one in steps])
        work = np.array([COSTS.work(one) for one in steps])
        spread[way] = np.mean(work.std(axis=(1, 2)) / work.mean(axis=(1, 2)))
    assert padding["padded"] > 1.5 * padding["sorted"] > 10 * padding["packed"]
    assert padding["packed"] >= padding["balanced"]
    assert spread["padded"] > spread["packed"] > 2 * spread["balanced"]


def test_costs_are_those_of_shorter_sequences() -> None:
    """Fitted to whole and half sequences, they tell what quarters take."""
    costs = LengthCosts.of(SIMULATOR, PLAN)
    whole = SymbolicPredictor(workload=WORK, cluster=CLUSTER).predict(PLAN)
    quarter = replace(WORK, sequence_length=CONTEXT // 4, global_batch=128)
    stages = tuple(replace(one, micro_batch=16) for one in PLAN.stages)
    other = SymbolicPredictor(workload=quarter, cluster=CLUSTER).predict(
        replace(PLAN, stages=stages)
    )
    expected = sum(one.stable_s for one in other.stages) / sum(one.stable_s for one in whole.stages)
    tokens, squares = 4 * CONTEXT, 16 * (CONTEXT // 4) ** 2
    assert costs.token * tokens + costs.square * squares == pytest.approx(expected, rel=0.01)
    assert 0.02 < costs.square * 4 * CONTEXT**2 < 0.5


def test_steps_of_full_micro_batches_are_the_plans() -> None:
    play = SIMULATOR.of_work(PLAN)
    found = played_steps(arranger(DocumentLengths.of(np.array([CONTEXT]))), "padded", play, 2, 0)
    assert found.steps.mean_s == pytest.approx(SIMULATOR.predict(PLAN).iteration_s, rel=1e-3)
    assert found.waits == 0
    unequal = played_steps(arranger(), "padded", play, 10, 0)
    assert 0.01 < unequal.waits < 0.5
    assert unequal.steps.q95_s > unequal.steps.mean_s > unequal.steps.q05_s


def test_played_steps_are_as_long_as_replayed_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here passes take what they cost, give or take a tenth; ``--replay`` measures them."""
    draw = np.random.default_rng(3)

    def measured(sequences: Sequence[Sequence[int]]) -> list[float]:
        exact = command._work(sequences) @ np.array([2e-5, 2e-8, 1e-4])
        return list(exact * draw.normal(1.0, 0.1, len(exact)).clip(0.5, 1.5))

    monkeypatch.setattr(command, "_measured", measured)
    rows = command._replayed(argparse.Namespace(quick=False, seed=0))
    assert [row["arrangement"] for row in rows] == ["packed", "balanced"]
    assert max(abs(row["timing"]["apart"]) for row in rows) < 0.03


def test_a_file_without_lengths_is_refused_under_the_option_s_name(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("tokens,documents\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"^--lengths .*lengths\.csv: has no lengths: give"):
        lengths_from(str(path))
