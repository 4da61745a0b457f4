"""Bounds of measured runs by kind of run."""

import math
import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from experiments.cli.commandline import OPTIONS
from experiments.runs.run_jobs import job_of
from experiments.runs.run_sureness import Held, Miss, Range, left_out, sureness_of
from mistlab import catalog
from mistlab.calibration.fitted_sureness import (
    UNKNOWN_BETWEEN,
    UNKNOWN_WITHIN,
    spreads_of_kinds,
)
from mistlab.core.units import GIB_BYTES
from mistlab.cost.confidence import (
    ANY,
    LEAST_LOG,
    MOST_TIMES,
    REACH,
    SOURCES_OF_WIDER,
    STRETCH_A_DOUBLING,
    KnownKind,
    PeakBounds,
    RunKind,
    Spread,
    Sureness,
    bounds_of,
    known_sureness,
    margin_share,
    peak_bounds,
    peak_range,
)
from mistlab.machine.cluster import Cluster
from mistlab.machine.hardware import OwnRuns
from simulators.symbolic import SymbolicPredictor
from tests.mistlab.test_runs import run

KIND = RunKind(software="nemo", engine="megatron", hardware="h100-80gb", blocks="dense", bits=16)
OF_ENGINE, ALIKE = "engine megatron: dense, 16 bits", "any: dense, 16 bits"


def misses(*roots: float, kind: RunKind = KIND, source: str = "docs") -> list[Miss]:
    return [Miss(kind=kind, source=source, model="m", gpus=8, roots=one) for one in roots]


def drawn(
    sources: int,
    between: float,
    within: float,
    *,
    runs: int = 40,
    offset: float = 0.0,
    seed: int = 0,
) -> list[Miss]:
    """Runs of sources that are off as a whole, and scatter."""
    random = np.random.default_rng(seed)
    return [
        one
        for number, off in enumerate(random.normal(offset, between, sources))
        for one in misses(*random.normal(off, within, runs).tolist(), source=f"source {number}")
    ]


def of_kind(some: list[Miss], name: str = OF_ENGINE) -> KnownKind:
    return next(one for one in sureness_of(some).kinds if one.name == name)


def known(**kinds: KnownKind) -> Sureness:
    return Sureness(source="", kinds=tuple(kinds.values()))


def told(name: str, **others: float) -> KnownKind:
    figures = {"offset": 0.0, "between": 0.1, "within": 0.1, **others}
    return KnownKind(name=name, runs=20, sources=3, most_gpus=8, **figures)


def test_sources_are_off_as_a_whole_beside_how_far_their_rows_scatter() -> None:
    found = of_kind(drawn(400, 0.3, 0.1, offset=0.2))
    # Tails count less than a normal distribution's, so figures are a little smaller than drawn.
    assert found.offset == pytest.approx(0.2, abs=0.05)
    assert 0.22 < found.between < 0.33
    assert 0.08 < found.within < 0.11
    assert (found.runs, found.sources) == (16_000, 400)
    other_way = of_kind(drawn(400, 0.05, 0.3))
    assert 0.03 < other_way.between < 0.08
    assert 0.25 < other_way.within < 0.33


def test_a_source_counts_once_however_many_runs_it_has() -> None:
    few, many = (
        of_kind([*drawn(20, 0.05, 0.02), *misses(*[0.3, 0.31] * repeats, source="one")])
        for repeats in (1, 500)
    )
    assert many.offset == pytest.approx(few.offset, abs=0.002)
    assert many.between == pytest.approx(few.between, rel=0.02)


def test_one_source_unlike_all_others_hardly_widens_a_kind() -> None:
    plain = drawn(30, 0.05, 0.02)
    near, far = (of_kind([*plain, *misses(off, source="odd")]) for off in (0.0, 3.0))
    assert far.between < 1.3 * near.between


def test_a_kind_of_few_sources_falls_back_on_the_wider_kind() -> None:
    """One source of an engine beside forty of others: the kind is told mostly by those."""
    other = replace(KIND, engine="fsdp")
    of_others = [replace(one, kind=other) for one in drawn(40, 0.02, 0.02)]
    alone = of_kind([*of_others, *misses(0.2, 0.22, source="one")])
    assert 0 < alone.offset < 0.2 / 2
    # Of several times as many sources as the wider kind counts for, most is their own.
    own = [
        one
        for number in range(3 * SOURCES_OF_WIDER)
        for one in misses(0.2, 0.22, source=f"own {number}")
    ]
    wide = of_kind([*of_others, *own], ALIKE)
    assert of_kind([*of_others, *own]).offset > (0.21 + wide.offset) / 2


def test_without_any_source_bounds_are_those_of_the_unknown() -> None:
    found = of_kind(misses(0.0))
    assert found.between < UNKNOWN_BETWEEN
    assert found.within == pytest.approx(UNKNOWN_WITHIN, rel=0.01)


def test_nine_in_ten_runs_of_new_sources_lie_within_bounds() -> None:
    every = drawn(60, 0.15, 0.1, seed=3)
    sources = [one.source for one in every]
    inside: dict[str, list[bool]] = defaultdict(list)
    for one, spread in zip(every, left_out(every, sources), strict=True):
        assert spread is not None
        reach = REACH * math.hypot(spread.between, spread.within)
        inside[one.source].append(abs(one.roots - spread.offset) <= reach)
    assert 0.86 < np.mean([np.mean(some) for some in inside.values()]) < 0.97


def test_folds_say_what_fits_without_their_runs_say() -> None:
    """Sums without a fold are those of the other runs: the same figures as from them alone."""
    every = [*drawn(6, 0.2, 0.1, runs=5), *misses(0.4, 0.5, source="last")]
    sources = np.unique([one.source for one in every], return_inverse=True)[1]
    roots, names = np.array([one.roots for one in every]), [one.kind.names for one in every]
    folds = spreads_of_kinds(roots, names, sources, sources, SOURCES_OF_WIDER)[OF_ENGINE]
    for fold in range(7):
        alone = of_kind([m for m, own in zip(every, sources, strict=True) if own != fold])
        assert folds.offset[fold] == pytest.approx(alone.offset, abs=1e-4)
        assert folds.between[fold] ** 0.5 == pytest.approx(alone.between, abs=1e-4)
        assert folds.within[fold] ** 0.5 == pytest.approx(alone.within, abs=1e-4)


def test_between_experts_and_hybrid_blocks_no_kind_differs_but_functional_tests_are_their_own() -> (
    None
):
    experts, hybrid = (replace(KIND, blocks=blocks).names for blocks in ("experts", "hybrid"))
    assert (
        experts == hybrid == ("engine megatron: not dense, 16 bits", "any: not dense, 16 bits", ANY)
    )
    tests = replace(KIND, purpose="functional test").names
    assert tests[0] == "engine megatron, functional test: dense, 16 bits"
    assert {*tests} & {*KIND.names} == {ANY}
    assert (
        run(notes="transformer-impl=local", engine="Megatron-LM").kind.purpose == "functional test"
    )


def test_a_system_that_is_only_predicted_as_an_engine_is_like_any_engine() -> None:
    some = known(
        own=told(OF_ENGINE, offset=0.1), alike=told(ALIKE, offset=0.2), any=told(ANY, offset=0.3)
    )
    offsets = [
        some.spread(one, 8).offset
        for one in (KIND, replace(KIND, engine=""), replace(KIND, engine="", blocks="adapters"))
    ]
    assert offsets == [0.1, 0.2, 0.3]


def test_runs_that_are_slower_than_predicted_make_the_upper_bound_alone() -> None:
    below, above = Spread(offset=0.3, between=0.02, within=0.02).around(1.0)
    assert below == pytest.approx(math.exp(-LEAST_LOG))
    assert above > math.exp(0.3)
    mirrored = Spread(offset=-0.3, between=0.02, within=0.02).around(1.0)
    assert mirrored == pytest.approx((1 / above, 1 / below))


def test_bounds_grow_with_the_root_of_the_way() -> None:
    spread = Spread(offset=0.0, between=0.1, within=0.1)
    near, far = (math.log(spread.around(way)[1]) for way in (1.0, 4.0))
    assert far == pytest.approx(2 * near)


def test_bounds_say_which_runs_they_count_and_how_much() -> None:
    some = sureness_of([*misses(0.1, 0.2), *misses(0.1, kind=replace(KIND, bits=8))])
    assert some.words(replace(KIND, bits=8)) == (
        "bounds count 1 measured run of kind 'engine megatron: dense, fewer bits' (1 source) for "
        "20%, and runs of wider kinds"
    )
    strange = replace(KIND, software="other", engine="", blocks="adapters")
    assert some.words(strange) == "bounds are those of 3 measured runs of kind 'any' (1 source)"


def test_more_gpus_than_were_measured_widen_bounds() -> None:
    some = known(any=told(ANY))
    assert some.spread(KIND, 4) == some.spread(KIND, 8)
    (_, near), (_, far) = (some.spread(KIND, gpus).around(1.0) for gpus in (8, 32))
    assert math.log(far) == pytest.approx(math.log(near) * (1 + 2 * STRETCH_A_DOUBLING))


def test_own_runs_narrow_bounds_to_their_scatter_around_their_offset() -> None:
    """Precisions add up: by one run as sure as the kind, offset and variance halve."""
    some = known(any=told(ANY, between=0.1, within=0.1))

    def with_own(runs: int) -> Spread:
        return some.spread(KIND, 8, source_runs=OwnRuns(engine="megatron", offset=0.2, runs=runs))

    assert with_own(0) == some.spread(KIND, 8)
    assert with_own(1).offset == pytest.approx(0.1)
    assert with_own(1).between == pytest.approx(0.1 / math.sqrt(2))
    assert with_own(10_000).offset == pytest.approx(0.2, abs=1e-3)
    assert with_own(10_000).between < 0.002
    assert with_own(10_000).within == 0.1


def test_rates_of_another_gpu_add_what_lending_costs_until_own_runs_are_known() -> None:
    some = replace(known(any=told(ANY)), datasheet=told("datasheet", offset=0.05, between=0.2))
    lent = some.spread(KIND, 8, scaled=True)
    assert lent.offset == pytest.approx(0.05)
    assert lent.between == pytest.approx(math.hypot(0.1, 0.2))
    assert lent.within == pytest.approx(math.hypot(0.1, 0.1))
    own = OwnRuns(engine="megatron", offset=0.0, runs=3)
    assert some.spread(KIND, 8, source_runs=own, scaled=True).between < 0.1


def test_nothing_is_known_where_all_runs_are_left_out() -> None:
    assert [*left_out(misses(0.1, 0.2), ["all", "all"])] == [None, None]


@pytest.mark.parametrize("offset", [-3.0, 0.0, 3.0])
@pytest.mark.parametrize("mfu", [0.9, 0.4, 0.01, 1e-4])
def test_no_bound_is_absurd(offset: float, mfu: float) -> None:
    """However far known runs lie from their predictions, none is expected to be faster than its
    arithmetic at peak rate, nor to take hundreds of times as long as predicted."""
    spread = known(any=told(ANY, offset=offset)).spread(KIND, 1 << 20)
    below, above = spread.around(KIND.way(mfu))
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


def test_bounds_of_a_row_lie_around_the_range_that_is_predicted() -> None:
    found = job_of(run())
    job = found.job
    predictor = SymbolicPredictor(workload=job.workload, cluster=job.cluster)
    prediction = predictor.predict(job.plan)
    bounds = bounds_of(job.workload, job.cluster, job.plan.engine)
    _, above = bounds.around(job.plan.num_gpus, prediction.mfu)
    around = Range.of(prediction, above, way=math.log(16))
    spread = Spread(offset=0.0, between=0.1, within=0.0)
    bounded = around.bounded(prediction, spread)
    reach = math.exp(REACH * 0.1 * math.sqrt(math.log(16)))
    assert bounded.iteration_s_low == pytest.approx(prediction.iteration_s / reach)
    assert bounded.iteration_s_high == pytest.approx(reach * around.longest_s)
    assert around.miss(prediction.iteration_s / 4) == pytest.approx(-math.sqrt(math.log(16)) / 2)
    assert around.miss(around.longest_s * 4) == pytest.approx(math.sqrt(math.log(16)) / 2)
    assert around.miss(prediction.iteration_s) == 0


def test_an_engine_that_is_only_assumed_is_no_part_of_a_run_s_kind() -> None:
    assert run(engine="nanotron").kind.engine == "nanotron"
    assert run(engine="Megatron-Core 0.9").kind.engine == "megatron"
    assert run(engine="MaxText (JAX)").kind.engine == ""


def test_the_catalogue_knows_any_run() -> None:
    strange = replace(KIND, software="other", engine="", hardware="none", blocks="hybrid")
    below, above = known_sureness().spread(strange, 8).around(1.0)
    assert 1 < 1 / below < above < 3
    lent = known_sureness().spread(strange, 8, scaled=True).around(1.0)
    assert lent[0] < below < above < lent[1]


def fitting(peak_gib: float, room_gib: float, *, lacks_host: bool = False) -> PeakBounds:
    job = job_of(run()).job
    prediction = SymbolicPredictor(workload=job.workload, cluster=job.cluster).predict(job.plan)
    stages = tuple(
        replace(stage, peak_reserved_bytes=int(peak_gib * GIB_BYTES)) for stage in prediction.stages
    )
    prediction = replace(prediction, stages=stages)
    rooms = [room_gib * GIB_BYTES] * len(stages)
    return peak_bounds(prediction, rooms, "nanotron", lacks_host=lacks_host)


def test_a_plan_fits_the_more_probably_the_more_room_it_leaves() -> None:
    rooms = (40.0, 75.0, 80.0, 85.0, 160.0)
    found = [fitting(80.0, room).fit_probability for room in rooms]
    assert found == sorted(found)
    assert found[0] < 0.1
    assert 0.3 < found[2] < 0.6
    assert found[-1] > 0.9
    spread = known_sureness().peak_spread("nanotron")
    assert found[2] == pytest.approx(spread.below(0.0), abs=1e-4)


def test_nine_in_ten_peaks_lie_within_their_bounds_by_the_distribution_of_spreads() -> None:
    spread = Spread(offset=0.1, between=0.1, within=0.2)
    assert spread.below(0.1) == pytest.approx(0.5)
    # Of Student's t of 3 degrees, 5 % lie beyond 2.353 (tables of its quantiles).
    assert spread.below(0.1 + 2.353 * math.hypot(0.1, 0.2)) == pytest.approx(0.95, abs=1e-4)
    bounds = fitting(80.0, 100.0)
    assert bounds.peak_reserved_bytes_low < 80 * GIB_BYTES < bounds.peak_reserved_bytes_high


def test_a_plan_whose_host_is_short_does_not_fit_however_much_room_gpus_have() -> None:
    for room in (39.0, 80.0):
        assert fitting(40.0, room, lacks_host=True).fit_probability == 0.0


def test_an_engine_without_measured_peaks_has_those_of_all() -> None:
    known = known_sureness()
    assert known.peak_spread("") == known.peak_spread("mistlab")
    assert known.peak_spread("fsdp") != known.peak_spread("")


@pytest.mark.parametrize("family", ["", "fsdp", "trainer", "megatron"])
def test_a_plan_that_leaves_the_margin_free_fits_with_its_probability(family: str) -> None:
    spread = known_sureness().peak_spread(family)
    for probability in (0.5, 0.9, 0.99):
        share = margin_share(family, probability)
        assert spread.below(-math.log(1 - share)) == pytest.approx(probability, abs=1e-6)
    assert margin_share(family, 0.01) == 0


def test_texts_give_the_range_of_peaks_that_bounds_have() -> None:
    low, high = peak_range("")
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    for text in (readme, OPTIONS["--keep-free-gib"]["help"].replace("%%", "%")):
        told = re.search(r"90 % of measured peaks.* are ([\d.]+) to ([\d.]+) times", text)
        assert told
        assert told.groups() == (f"{low:.1f}", f"{high:.1f}")


@pytest.mark.parametrize(
    ("name", "nodes", "gpus", "lender"),
    [
        ("rtx-a6000-48gb", 1, 4, "l4-24gb"),
        ("rtx-a6000-48gb", 2, 2, "l4-24gb"),
        ("rtx-a6000-48gb", 1, 1, ""),
        ("rtx-a6000-48gb", 4, 1, ""),
        ("l4-24gb", 1, 4, ""),
        ("h200-141gb", 1, 8, ""),
    ],
)
def test_a_note_says_whose_slow_collectives_are_counted(
    name: str, nodes: int, gpus: int, lender: str
) -> None:
    job = job_of(run()).job
    cluster = Cluster(hardware=catalog.hardware(name), nodes=nodes, gpus_per_node=gpus)
    bounds = bounds_of(job.workload, cluster, "fsdp")
    notes = " ".join(bounds.notes(nodes * gpus))
    measured = re.findall(r"as measured on (\S+), at 6 of 31.5 GB/s", notes)
    assert measured == [lender] * bool(lender)
    assert ("collectives inside a node" in notes) == bool(lender)
    assert "collectives inside a node" not in " ".join(bounds.notes(1))
