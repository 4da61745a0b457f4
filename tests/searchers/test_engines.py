"""Spaces of several engines: the best plan of all engines is found, and no proof is wrong."""

from dataclasses import replace
from functools import cache
from itertools import chain

import numpy as np
import pytest

from mistlab.core.values import FieldError
from mistlab.engines.engine import ENGINES
from mistlab.job.prediction import Prediction
from mistlab.job.search import Budget
from mistlab.plan.named_spaces import space_of
from mistlab.plan.plan import Plan
from mistlab.plan.space import SearchSpace
from searchers.methods.exhaustive import all_plans
from searchers.registry import SEARCHERS
from searchers.savings import contains
from searchers.strategy import StrategySearcher
from tests.searchers.drawn import drawn_problem
from tests.searchers.test_every_plan import OTHERS, PROVING, Tried, predictor_of, wrong_proofs
from tests.sweep import sweep

SEEDS = range(24)
# Small spaces of each kind, and the engines of which some are drawn.
ENGINES_DRAWN = ("mistlab", "megatron", "megatron-core", "deepspeed", "fsdp", "aceso")


def _accepts(space: SearchSpace, engine: str) -> bool:
    try:
        space.on(engine)
    except FieldError:
        return False
    return True


@cache
def tried(seed: int) -> Tried:
    """A problem, a space of two or three engines, and the time of the best of all their plans."""
    problem, space = drawn_problem(seed)
    draw = np.random.default_rng(seed)
    precision = problem.workload.precision
    able = [
        name
        for name in ENGINES_DRAWN
        if not ENGINES[name].precision_problem(precision) and _accepts(space, name)
    ]
    names = dict.fromkeys([*draw.permutation(able)[:2].tolist(), space.engine])
    space = space.on(*names)
    plans = list(chain.from_iterable(all_plans(problem, own) for own in space.of_engines))
    predictions = predictor_of(problem).predict_many(plans)
    fitting = [one.iteration_s for one in predictions if one.fits]
    return problem, space, min(fitting, default=float("inf"))


@pytest.mark.parametrize("seed", sweep(SEEDS, first=4))
def test_no_proof_over_engines_is_wrong(seed: int) -> None:
    problem, space, best_s = tried(seed)
    assert len(space.of_engines) > 1
    assert not [*wrong_proofs(problem, space, best_s, (*PROVING, *OTHERS))]


@pytest.mark.parametrize("seed", sweep(range(6), first=3))
def test_no_proof_on_the_published_mist_is_wrong(seed: int) -> None:
    problem, space = drawn_problem(seed)
    if problem.workload.precision not in ENGINES["mist"].memory:
        pytest.skip("mist does not train in this precision")
    space = space.on("mist")
    plans = list(all_plans(problem, space))
    assert {plan.engine for plan in plans} == {"mist"}
    fitting = [one.iteration_s for one in predictor_of(problem).predict_many(plans) if one.fits]
    best_s = min(fitting, default=float("inf"))
    assert not [*wrong_proofs(problem, space, best_s, (*PROVING, *OTHERS))]


def test_an_engine_that_is_left_out_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    first = property(lambda space: (space.on(space.engine),))

    def is_seen(seed: int) -> bool:
        of_all = tried(seed)
        with monkeypatch.context() as patched:
            patched.setattr(SearchSpace, "of_engines", first)
            return bool([*wrong_proofs(*of_all, ("mist", "exhaustive"))])

    assert any(map(is_seen, SEEDS))


def test_every_engine_gets_its_share_of_the_evaluations() -> None:
    problem, space, _ = tried(0)
    asked: list[str] = []

    def watch(plan: Plan, _: Prediction) -> None:
        asked.append(plan.engine)

    searcher = StrategySearcher(
        strategy=SEARCHERS["random"], predictor=predictor_of(problem), watcher=watch
    )
    result = searcher.search(problem, space, Budget(evaluations=10 * len(space.engines)), 0)
    assert result.plan_evaluations == len(asked) == 10 * len(space.engines)
    assert {name: asked.count(name) for name in space.engines} == dict.fromkeys(space.engines, 10)


def test_a_plan_belongs_to_the_space_of_its_own_engine() -> None:
    problem, space, _ = tried(1)
    for own in space.of_engines:
        plan = next(all_plans(problem, own))
        assert contains(problem, space, plan)
        stranger = next(name for name in ENGINES_DRAWN if name not in space.engines)
        assert not contains(problem, space, replace(plan, engine=stranger))


def test_an_engine_has_the_choices_that_it_can_run() -> None:
    space = replace(space_of("mist"), orders=("1f1b", "interleaved-2"))
    ours, zero, deep = space.on("mistlab", "zero-bubble", "deepspeed").of_engines
    assert ours == space
    assert zero.orders == deep.orders == ("1f1b",)
    assert max(ours.offload.optimizer) == 1
    assert zero.offload.optimizer == deep.offload.optimizer == (0.0,)


@pytest.mark.parametrize(
    ("others", "words"),
    [
        (("megatorn",), "'megatorn' is unknown: did you mean 'megatron'"),
        (("mistlab",), "'mistlab', but field engine names it too"),
        (("megatron", "megatron"), "'megatron', but it is listed twice"),
    ],
)
def test_unknown_and_double_engines_are_refused(others: tuple[str, ...], words: str) -> None:
    with pytest.raises(FieldError, match="other_engines") as refused:
        replace(space_of("mist"), other_engines=others)
    assert words in str(refused.value)


def test_a_choice_is_refused_if_no_engine_can_run_it() -> None:
    with pytest.raises(FieldError, match="orders"):
        SearchSpace(name="", engine="fsdp", other_engines=("deepspeed",), orders=("zb-h1",))
    SearchSpace(name="", engine="fsdp", other_engines=("mistlab",), orders=("zb-h1",))
