"""Bounds of divisions of unlike blocks against the divisions themselves."""

from collections.abc import Iterator

import numpy as np
import pytest

from mistlab import catalog
from mistlab.core.arrays import Ints
from mistlab.job.search import Budget, Problem
from mistlab.machine.cluster import Cluster
from mistlab.plan.named_spaces import space_of
from searchers.exact.division_join import Fronts, least_joined
from searchers.exact.divisions import Divisions, RangeTimes, like_blocks
from searchers.exact.ranges import RangeSearch
from searchers.meshes import equal_pipelines
from searchers.strategy import Ledger
from simulators.symbolic import SymbolicPredictor
from tests.sweep import sweep
from tests.workloads import workload_of

NEAR = 1 - 1e-9


def test_ranges_with_the_same_kinds_are_asked_about_once() -> None:
    like = like_blocks(("a", "a", "b", "b", "b", "b"), 6)
    assert [like[first, 2] for first in range(5)] == [0, 1, 2, 2, 2]
    turns = like_blocks(("a", "b"), 5)
    assert [turns[first, 2] for first in range(4)] == [0, 1, 0, 1]


def test_divisions_are_those_of_the_space() -> None:
    every = Divisions.of(("a", "b"), 7, 3, space_of("moe")).every()
    assert every is not None
    assert len(np.unique(every, axis=0)) == len(every) == 15
    assert (every.sum(axis=1) == 7).all()
    even = Divisions.of(("a", "b"), 7, 3, space_of("3d")).every()
    assert even is not None
    assert even.tolist() == [[3, 2, 2]]


def times_of(seed: int) -> Iterator[RangeTimes]:
    """The times of a few random pipelines that save memory in a random way."""
    draw = np.random.default_rng(seed)
    model = str(draw.choice(["gpt-oss-20b", "deepseek-v3", "qwen3-next-80b-a3b"]))
    work = workload_of(model, 1024, int(draw.choice([16, 64])), "bf16", layers=14)
    cluster = Cluster(hardware=catalog.hardware("h100-80gb"), nodes=2, gpus_per_node=8)
    problem, space = Problem(workload=work, cluster=cluster), space_of("moe")
    predictor = SymbolicPredictor(workload=work, cluster=cluster)
    ledger = Ledger(predictor=predictor, budget=Budget(seconds=1e6), clock=lambda: 0.0)
    search = RangeSearch(problem=problem, space=space, ledger=ledger)
    every = [one for one in equal_pipelines(problem, space) if one.num_stages > 1]
    for number in draw.choice(len(every), 3, replace=False):
        pipeline = every[number]
        ways = [*search.ways(pipeline)]
        yield search.times(pipeline, ways[draw.integers(len(ways))])


def drawn_shares(times: RangeTimes, draw: np.random.Generator) -> Ints:
    every = times.divisions.every()
    if every is not None:
        return np.asarray(every[draw.permutation(len(every))[:200]])
    low, high = times.divisions.counts[0], times.divisions.counts[-1]
    found = []
    while len(found) < 50:
        shares = draw.integers(low, high + 1, times.divisions.num_stages)
        if shares.sum() == times.divisions.layers:
            found.append(shares)
    return np.array(found)


@pytest.mark.parametrize("seed", sweep(range(100), first=3))
def test_no_division_undercuts_its_bounds(seed: int) -> None:
    draw = np.random.default_rng(seed)
    for times in times_of(seed):
        ranges = times.divisions.ranges_of(shares := drawn_shares(times, draw))
        seconds = times.seconds_of(ranges)
        fits = np.isfinite(seconds)
        ranges, seconds, shares = ranges[fits], seconds[fits], shares[fits]
        if not len(seconds):
            continue
        passed_s, waits_s = times.passed_s[0][ranges], times.waits_s[0][ranges]
        assert (passed_s.sum(axis=1) + waits_s.max(axis=1) <= seconds / NEAR).all()
        limit_s = 1.1 * seconds.min()
        assert times.least_s(limit_s)[0] <= seconds.min() / NEAR
        fronts = Fronts.of(times, limit_s)
        first = np.cumsum(shares, axis=1) - shares
        for stage in range(1, times.divisions.num_stages):
            before_s = passed_s[:, :stage].sum(axis=1)
            waited_s = before_s + waits_s[:, :stage].max(axis=1)
            near = seconds < limit_s
            assert (fronts.passed_s[stage, first[near, stage]] <= before_s[near] / NEAR).all()
            assert (fronts.waited_s[stage, first[near, stage]] <= waited_s[near] / NEAR).all()


@pytest.mark.parametrize("seed", sweep(range(60), first=2))
def test_joined_divisions_are_the_best_of_all(seed: int) -> None:
    """Without a grain the time is the least of all divisions; with one it is a bound."""
    draw = np.random.default_rng(seed)
    for times in times_of(seed):
        every = times.divisions.every()
        if every is None:
            continue
        best_s = times.seconds_of(times.divisions.ranges_of(every)).min()
        if not np.isfinite(best_s):
            continue
        found_s, shares = least_joined(times, 1.2 * best_s, 0.0, lambda: None)
        assert found_s == pytest.approx(best_s, rel=1e-9)
        assert shares is not None
        assert times.seconds_of(times.divisions.ranges_of(shares))[0] == pytest.approx(best_s)
        grain_s = float(draw.uniform(0, 0.02)) * best_s
        assert least_joined(times, 1.2 * best_s, grain_s, lambda: None)[0] <= best_s / NEAR
