"""Bounds of measured runs by kind of run."""

import math
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest

from experiments.runs.run_jobs import job_of
from experiments.runs.run_sureness import MOST_SHARES, Held, Miss, Range, left_out, sureness_of
from mistlab.cost.confidence import (
    ANY,
    GROUPS_OF_WIDER,
    LEAST_SHARE,
    MOST_TIMES,
    STRETCH,
    KnownKind,
    RunKind,
    Shares,
    Sureness,
    bounds_of,
    known_sureness,
)
from simulators.symbolic import SymbolicPredictor
from tests.mistlab.test_runs import run

KIND = RunKind(
    software="nemo",
    engine="megatron",
    hardware="h100-80gb",
    blocks="dense",
    bits=16,
    is_benchmark=True,
)
OWN, OF_ENGINE, ALIKE = "nemo: any", "engine megatron: dense, 16 bits", "any: dense, 16 bits"


def misses(
    *shares: float, kind: RunKind = KIND, model: str = "", table: str = "docs"
) -> list[Miss]:
    return [
        Miss(kind=kind, source=table, model=model or f"model {place % 2}", gpus=8, share=share)
        for place, share in enumerate(shares)
    ]


def known(groups: int = 2, **shares: tuple[float, ...]) -> Sureness:
    names = {"own": OWN, "of_engine": OF_ENGINE, "alike": ALIKE, "anything": ANY}
    kinds = (
        KnownKind(name=names[name], shares=some, runs=20, models=2, groups=groups, most_gpus=8)
        for name, some in shares.items()
    )
    return Sureness(source="", kinds=tuple(kinds))


def shares_of(some: list[Miss], name: str = OWN) -> tuple[float, ...]:
    return next(one.shares for one in sureness_of(some).kinds if one.name == name)


def test_a_kind_keeps_the_shares_of_its_runs_below_and_above() -> None:
    assert shares_of(misses(0.3, -0.1, 0.2, 0.0)) == (-0.1, 0.0, 0.2, 0.3)


def test_a_long_kind_is_told_by_shares_that_are_as_likely() -> None:
    found = shares_of(misses(*np.linspace(0, 1, 4001), table="t"))
    assert len(found) == MOST_SHARES
    assert found == pytest.approx([(i + 0.5) / MOST_SHARES for i in range(MOST_SHARES)], abs=1e-3)


def test_the_runs_of_a_group_count_as_the_root_of_their_number() -> None:
    """Hundred runs of one model beside 25 of another: two of three shares are of the first."""
    of_models = [*misses(*[0.1] * 100, model="long"), *misses(*[0.4] * 25, model="short")]
    assert np.mean(np.array(shares_of(of_models)) == 0.1) == pytest.approx(2 / 3, abs=0.02)
    # Between engines tables are the groups.
    of_tables = [
        *misses(*[0.1] * 100, table="long"),
        *misses(*[0.4] * 25, kind=replace(KIND, software="other"), table="short"),
    ]
    found = shares_of(of_tables, ALIKE)
    assert np.mean(np.array(found) == 0.1) == pytest.approx(2 / 3, abs=0.02)
    assert sureness_of(of_tables).kinds[0].groups == 2


def test_new_tables_lie_within_bounds_if_long_ones_are_the_surest() -> None:
    random = np.random.default_rng(0)
    spreads = np.exp(random.normal(-2.5, 0.5, 40))
    every = []
    for number, spread in enumerate(spreads):
        runs = 400 if spread < np.quantile(spreads, 0.25) else 16
        kind = replace(KIND, software=f"software {number}", engine="")
        shares = random.normal(0, spread, runs).tolist()
        every += misses(*shares, kind=kind, table=f"table {number}")
    tables = [one.source for one in every]
    inside: dict[str, list[bool]] = defaultdict(list)
    for table, one, shares in zip(tables, every, left_out(every, tables), strict=True):
        assert shares is not None
        inside[table].append(-shares.below <= one.share <= shares.above)
    assert 0.88 < np.mean([np.mean(some) for some in inside.values()]) < 0.97


def test_between_engines_experts_and_hybrid_blocks_are_one_kind() -> None:
    experts, hybrid = (replace(KIND, blocks=blocks).names for blocks in ("experts", "hybrid"))
    assert (
        experts[3:]
        == hybrid[3:]
        == (
            "engine megatron: not dense, 16 bits",
            "any: not dense, 16 bits",
            ANY,
        )
    )
    assert not {*experts[:2]} & {*hybrid[:2]}


def test_a_run_is_expected_to_be_like_its_kind_or_like_wider_ones() -> None:
    """Below 19 times as many groups as wider kinds count for, one run in twenty is like theirs."""
    sure = known(19 * GROUPS_OF_WIDER + 1, own=(0.1,), alike=(0.5,), anything=(0.9,))
    assert sure.shares(KIND, 8).above == pytest.approx(0.1 * STRETCH)
    unsure = known(19 * GROUPS_OF_WIDER - 1, own=(0.1,), alike=(0.5,), anything=(0.9,))
    assert unsure.shares(KIND, 8).above == pytest.approx(0.5 * STRETCH)


def test_a_system_that_is_only_predicted_as_an_engine_is_like_any_engine() -> None:
    some = known(999, own=(0.1,), of_engine=(0.2,), alike=(0.4,), anything=(0.9,))
    shares = [
        some.shares(one, 8).above
        for one in (
            KIND,
            replace(KIND, software="other"),
            replace(KIND, software="jax", engine=""),
            replace(KIND, software="other", engine="", blocks="adapters"),
        )
    ]
    assert shares == pytest.approx([0.1 * STRETCH, 0.2 * STRETCH, 0.4 * STRETCH, 0.9 * STRETCH])


def test_runs_that_are_slower_than_predicted_make_the_upper_bound_alone() -> None:
    shares = sureness_of(misses(*np.linspace(0.2, 0.4, 500))).shares(KIND, 8)
    assert shares.below == LEAST_SHARE
    assert shares.above > 0.4
    mirrored = sureness_of(misses(*-np.linspace(0.2, 0.4, 500))).shares(KIND, 8)
    assert (mirrored.below, mirrored.above) == pytest.approx((shares.above, shares.below))


def test_bounds_say_which_runs_they_count_and_how_much() -> None:
    some = sureness_of([*misses(0.1, 0.2), *misses(0.1, model="one", kind=replace(KIND, bits=8))])
    narrow = "'nemo: dense, 8 bits, h100-80gb' (1 model)"
    assert some.words(replace(KIND, bits=8)) == (
        f"bounds count 1 measured run of kind {narrow} for 11%, and runs of wider kinds"
    )
    strange = replace(KIND, software="other", engine="", blocks="adapters")
    assert some.words(strange) == "bounds are those of 3 measured runs of kind 'any' (3 models)"


def test_one_run_in_a_hundred_that_waits_for_its_cluster_widens_no_bound() -> None:
    tables = [one for table in "abcdefghij" for one in misses(*[0.1] * 99, 5.0, table=table)]
    assert sureness_of(tables).shares(KIND, 8).above == pytest.approx(0.1 * STRETCH)


def test_of_one_table_nobody_knows_how_the_next_one_is() -> None:
    """One table more than those that are known might lie anywhere."""
    one = misses(*[0.0] * 38, 0.6)
    assert sureness_of(one).shares(KIND, 8).above == pytest.approx(0.6 * STRETCH)


def test_more_gpus_than_were_measured_widen_bounds() -> None:
    some = known(anything=(0.4,))
    assert some.shares(KIND, 4) == some.shares(KIND, 8)
    assert some.shares(KIND, 32).above == pytest.approx(0.4 * (STRETCH + 0.2))


def test_a_group_that_is_left_out_says_nothing_about_itself() -> None:
    alike, far = misses(*[0.1] * 10), misses(0.9, 0.9)
    found = [*left_out([*alike, *far], ["near"] * 10 + ["far"] * 2)]
    assert [one and one.above for one in found] == pytest.approx([0.9 * STRETCH] * 10 + [0.13] * 2)


def test_nothing_is_known_where_all_runs_are_left_out() -> None:
    assert [*left_out(misses(0.1, 0.2), ["all", "all"])] == [None, None]


@pytest.mark.parametrize("share", [-3.0, 0.0, 3.0])
@pytest.mark.parametrize("mfu", [0.9, 0.4, 0.01, 1e-4])
def test_no_bound_is_absurd(share: float, mfu: float) -> None:
    """However far known runs lie from their predictions, none is expected to be faster than its
    arithmetic at peak rate, nor to take hundreds of times as long as predicted."""
    below, above = known(anything=(share,)).shares(KIND, 1 << 20).around(KIND.way(mfu))
    assert min(mfu, 0.8) - 1e-9 <= below < 1 < above <= MOST_TIMES


def test_an_interval_score_counts_what_lies_outside_twenty_times() -> None:
    inside = Held.of(1.0, (0.5, 2.0))
    assert (inside.width, inside.is_inside) == (4, True)
    assert inside.score == pytest.approx(math.log(4))
    for measured_s in (4.0, 0.25):
        outside = Held.of(measured_s, (0.5, 2.0))
        assert not outside.is_inside
        assert outside.score == pytest.approx(math.log(4) + 20 * math.log(2))


def test_a_way_leads_to_the_model_s_arithmetic_at_peak_rate() -> None:
    assert KIND.way(0.5) == pytest.approx(math.log(2))
    # However well a plan is predicted to run, its bounds stay apart.
    assert KIND.way(1.0) == KIND.way(0.9) > 0


def test_bounds_of_a_row_lie_a_share_of_the_way_around_the_range_that_is_predicted() -> None:
    found = job_of(run())
    job = found.job
    predictor = SymbolicPredictor(workload=job.workload, cluster=job.cluster)
    prediction = predictor.predict(job.plan)
    bounds = bounds_of(job.workload, job.cluster, job.plan.engine)
    _, above = bounds.around(job.plan.num_gpus, prediction.mfu)
    around = Range.of(prediction, above, way=math.log(16))
    bounded = around.bounded(prediction, Shares(below=0.25, above=0.5))
    assert bounded.iteration_s_low == pytest.approx(prediction.iteration_s / 2)
    assert bounded.iteration_s_high == pytest.approx(4 * around.longest_s)
    assert around.miss(prediction.iteration_s / 4) == pytest.approx(-0.5)
    assert around.miss(around.longest_s * 4) == pytest.approx(0.5)
    assert around.miss(prediction.iteration_s) == 0


def test_an_engine_that_is_only_assumed_is_no_part_of_a_run_s_kind() -> None:
    assert run(engine="nanotron").kind.engine == "nanotron"
    assert run(engine="Megatron-Core 0.9").kind.engine == "megatron"
    assert run(engine="MaxText (JAX)").kind.engine == ""


def test_the_catalogue_has_shares_for_any_run() -> None:
    strange = replace(KIND, software="other", engine="", hardware="none", blocks="hybrid")
    shares = known_sureness().shares(strange, 8)
    assert 0 < shares.below <= 1
    # Runs are slower than predicted more often than they are faster.
    assert shares.below < shares.above < 2
