"""Boxes of ratios on the menus of stages: which are halved in a round, and into how many parts."""

from dataclasses import replace
from time import perf_counter

import numpy as np
import pytest

from mistlab.job.search import Budget
from mistlab.plan.named_spaces import space_of
from searchers.exact.box_costs import HALVED
from searchers.exact.box_menus import FEW_PARTS, BoxMenus, halvings
from searchers.exact.candidates import Options, StagePosition
from searchers.exact.hierarchy import Hierarchy
from searchers.exact.partials import Partials
from searchers.exact.programme import places_by_stage
from searchers.strategy import Ledger
from tests.searchers.problems import SMALL, predictor_of


def menus_of(num_stages: int) -> BoxMenus:
    """The menus of the first group of small pipelines with so many stages, with whole boxes."""
    space = space_of("mist")
    ledger = Ledger(predictor=predictor_of(SMALL), budget=Budget(seconds=1000), clock=perf_counter)
    hierarchy = Hierarchy.of(SMALL, space, ledger)
    group = next(group for group in hierarchy.least_s if group.num_stages == num_stages)
    menus = BoxMenus(problem=SMALL, space=space, ledger=ledger, group=group, work=hierarchy.work)
    places_by_stage(menus, np.inf)
    return menus


def codes(menus: BoxMenus, place: StagePosition) -> set[int]:
    """The numbers of a place's boxes; boxes with equal ratios have equal numbers."""
    pool = menus._pools[place]
    return set(pool.boxes.codes[pool.is_open].tolist())


def first_open(menus: BoxMenus, place: StagePosition) -> int:
    return next(row for row in range(len(menus[place])) if menus.is_open(place, row))


def test_all_boxes_of_a_stage_that_is_a_whole_pipeline_are_halved_at_once() -> None:
    menus = menus_of(1)
    (place,) = menus._pools
    before = codes(menus, place)
    assert len(before) > 1
    menus.split([(place, first_open(menus, place))], np.inf)
    assert not before & codes(menus, place)


def test_of_a_stage_of_several_the_boxes_like_the_chosen_one_are_halved() -> None:
    menus = menus_of(2)
    place = max(menus._pools, key=lambda place: len(codes(menus, place)))
    before = codes(menus, place)
    menus.split([(place, first_open(menus, place))], np.inf)
    assert len(before - codes(menus, place)) == 1


@pytest.mark.parametrize(
    ("boxes", "least", "most"), [(1, FEW_PARTS // 2, FEW_PARTS), (10_000, 20_000, 1 << 20)]
)
def test_few_boxes_are_halved_more_often(boxes: int, least: int, most: int) -> None:
    assert least <= boxes << halvings(boxes) <= most
    assert halvings(boxes) >= HALVED


def test_of_pipelines_with_equal_places_the_first_is_named() -> None:
    none = np.zeros(4, dtype=np.intp)
    nothing = Partials.nothing()
    last = replace(nothing, place=np.array([0, 0, 1]), row_behind=none[:3], behind=nothing)
    both = replace(
        nothing, place=np.array([0, 0, 0, 1]), row_behind=np.array([0, 1, 2, 0]), behind=last
    )
    # The first two differ in their options alone.
    assert both.first_with_each_places(np.array([2, 1, 0, 3])).tolist() == [2, 1, 3]


def test_least_times_are_those_of_the_menus() -> None:
    menus = menus_of(2)
    places = [*menus._pools]
    found: dict[int, list[np.ndarray]] = {}
    for options, of_place in menus.least(places, np.inf):
        for number in np.unique(of_place).tolist():
            found.setdefault(number, []).append(times_of(options)[:, of_place == number])
    for number, place in enumerate(places):
        true = times_of(menus._pools[place].options)
        assert number in found or not true.size
        if true.size:
            least = np.concatenate(found[number], axis=1).min(axis=1)
            assert (least == true.min(axis=1)).all()
    assert len(found) > 3


def times_of(options: Options) -> np.ndarray:
    """The times of which bounds of fractions are made."""
    times = options.times
    passed_s = times.through_forward_s + times.within_forward_s + times.through_backward_s
    return np.stack([passed_s, times.forward_s, times.backward_s])
