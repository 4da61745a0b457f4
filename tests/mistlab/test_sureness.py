"""Bounds of measured runs by kind of run."""

import math
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest

from mistlab.cost.bounds import bounds_of
from mistlab.cost.sureness import (
    ANY,
    MODELS_OF_WIDER,
    STRETCH,
    KnownKind,
    RunKind,
    Sureness,
    known_sureness,
)
from mistlab.runs.jobs import job_of
from mistlab.runs.sureness import Miss, Range, left_out, sureness_of
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
        Miss(kind=kind, table=table, model=model or f"model {place % 2}", gpus=8, share=share)
        for place, share in enumerate(shares)
    ]


def known(**shares: float) -> Sureness:
    names = {"own": OWN, "of_engine": OF_ENGINE, "alike": ALIKE, "anything": ANY}
    kinds = (
        KnownKind(name=names[name], share=share, runs=20, models=2, most_gpus=8)
        for name, share in shares.items()
    )
    return Sureness(source="", kinds=tuple(kinds))


def shares_of(some: list[Miss]) -> dict[str, float]:
    return {one.name: one.share for one in sureness_of(some).kinds}


def test_a_kind_s_share_holds_nine_tenths_of_its_runs() -> None:
    kinds = sureness_of(misses(*[0.1] * 18, 0.3, 0.5)).kinds
    assert {one.share for one in kinds if one.name != ANY} == {0.3}
    assert kinds[0].runs == 20


def test_few_runs_of_one_model_make_no_kind() -> None:
    assert [*shares_of(misses(*[0.1] * 7))] == [ANY]
    assert [*shares_of(misses(*[0.1] * 20, model="one"))] == [ANY]


def test_between_engines_a_table_counts_as_much_as_a_longer_one() -> None:
    long = misses(*[0.1] * 190, table="long")
    other = replace(KIND, software="torchtitan", engine="fsdp")
    short = misses(*[0.4] * 10, kind=other, table="short")
    found = shares_of([*long, *short])
    # One row in twenty, but half of the tables, lies at 0.4.
    assert found["any: dense, 16 bits"] == 0.4
    assert found["nemo: any"] == 0.1
    # With fewer than eight runs a table tells nothing of a kind, and one table is not enough.
    assert "any: dense, 16 bits" not in shares_of([*long, *short[:7]])


def test_new_tables_lie_within_bounds_if_long_ones_are_the_surest() -> None:
    random = np.random.default_rng(0)
    spreads = np.exp(random.normal(-2.5, 0.5, 40))
    every = []
    for number, spread in enumerate(spreads):
        runs = 400 if spread < np.quantile(spreads, 0.25) else 16
        kind = replace(KIND, software=f"software {number}", engine="")
        shares = np.abs(random.normal(0, spread, runs)).tolist()
        every += misses(*shares, kind=kind, table=f"table {number}")
    tables = [one.table for one in every]
    inside: dict[str, list[bool]] = defaultdict(list)
    for table, one in zip(tables, left_out(every, tables), strict=True):
        assert one is not None
        inside[table].append(one.is_inside)
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


def test_runs_of_no_measured_kind_take_the_share_of_the_least_sure_table() -> None:
    sure, unsure = misses(*[0.1] * 90, table="sure"), misses(*[0.6] * 10, table="unsure")
    assert shares_of([*sure, *unsure])[ANY] == 0.6
    # A table of a few runs does not decide.
    assert shares_of([*sure, *unsure[:9]])[ANY] == 0.1
    strange = replace(KIND, software="other", engine="", blocks="adapters")
    assert sureness_of([*sure, *unsure]).share(strange, 8) == pytest.approx(0.6 * STRETCH)


def test_a_kind_takes_part_of_the_share_of_the_next_wider_kind() -> None:
    alone = known(anything=0.9, alike=0.3)
    assert alone.share(KIND, 8) == pytest.approx(0.3 * STRETCH)
    mixed = (2 * 0.1 + MODELS_OF_WIDER * 0.3) / (2 + MODELS_OF_WIDER)
    of_engine = known(anything=0.9, alike=0.3, of_engine=0.1)
    assert of_engine.share(KIND, 8) == pytest.approx(mixed * STRETCH)
    twice = (2 * 0.2 + MODELS_OF_WIDER * mixed) / (2 + MODELS_OF_WIDER)
    own = known(anything=0.9, alike=0.3, of_engine=0.1, own=0.2)
    assert own.share(KIND, 8) == pytest.approx(twice * STRETCH)
    # Another engine's run, and one of a system that is only predicted as this engine.
    for other in ("fsdp", ""):
        assert own.share(replace(KIND, software="jax", engine=other), 8) == alone.share(KIND, 8)


def test_no_kind_is_surer_for_the_least_sure_table() -> None:
    """That table stands for what nobody knows; a kind that is known to be surer profits from what
    it knows, and one that is known to be less sure keeps its own share."""
    mixed = (2 * 0.1 + MODELS_OF_WIDER * 0.5) / (2 + MODELS_OF_WIDER)
    assert known(anything=0.5, of_engine=0.1).share(KIND, 8) == pytest.approx(mixed * STRETCH)
    assert known(anything=0.5, of_engine=0.9).share(KIND, 8) == pytest.approx(0.9 * STRETCH)


def test_more_gpus_than_were_measured_widen_bounds() -> None:
    some = known(anything=0.4)
    assert some.share(KIND, 4) == some.share(KIND, 8)
    assert some.share(KIND, 32) == pytest.approx(0.4 * (STRETCH + 0.2))


def test_a_group_that_is_left_out_says_nothing_about_itself() -> None:
    alike, far = misses(*[0.1] * 10), misses(0.9, 0.9)
    every = left_out([*alike, *far], ["near"] * 10 + ["far"] * 2)
    found = [one for one in every if one is not None]
    assert [one.is_inside for one in found] == [True] * 10 + [False] * 2
    assert found[-1].share == pytest.approx(0.1 * STRETCH)


def test_nothing_is_known_where_all_runs_are_left_out() -> None:
    assert [*left_out(misses(0.1, 0.2), ["all", "all"])] == [None, None]


def test_a_way_leads_to_the_model_s_arithmetic_at_peak_rate() -> None:
    assert KIND.way(0.5) == pytest.approx(math.log(2))
    # Two of three products are left where the weights are frozen.
    assert replace(KIND, blocks="adapters").way(0.6) == pytest.approx(-math.log(0.4))
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
    bounded = around.bounded(prediction, 0.25)
    assert bounded.iteration_s_low == pytest.approx(prediction.iteration_s / 2)
    assert bounded.iteration_s_high == pytest.approx(2 * around.longest_s)
    assert around.width(0.25) == pytest.approx(bounded.iteration_s_high / bounded.iteration_s_low)
    assert around.miss(prediction.iteration_s / 4) == pytest.approx(0.5)
    assert around.miss(around.longest_s * 4) == pytest.approx(0.5)
    assert around.miss(prediction.iteration_s) == 0


def test_an_engine_that_is_only_assumed_is_no_part_of_a_run_s_kind() -> None:
    assert run(engine="nanotron").kind.engine == "nanotron"
    assert run(engine="Megatron-Core 0.9").kind.engine == "megatron"
    assert run(engine="MaxText (JAX)").kind.engine == ""


def test_the_catalogue_has_a_share_for_any_run() -> None:
    strange = replace(KIND, software="other", engine="", hardware="none", blocks="hybrid")
    assert 0 < known_sureness().share(strange, 8) < 2
