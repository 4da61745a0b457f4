"""Random plans of everything that the runtime trains give the losses and weights of a plain run."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.runtime.drawn_today import case
from tests.runtime.drawn_world import cases_of
from tests.runtime.test_real_ranks import check_cases, run_world
from tests.runtime.worlds import assert_alike, by_plan, plainly
from tests.sweep import sweep

# With the random plans of other sweeps 60 are trained wherever tests run: those here on few ranks.
QUICK = 43


@pytest.mark.parametrize("seed", sweep(range(300), first=QUICK))
def test_a_random_plan_trains_as_the_plain_model(seed: int) -> None:
    work, plan, training = case(seed, most_ranks=4 if seed < QUICK else 8)
    assert_alike(by_plan(work, plan, training, seed=seed), plainly(work, training))


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "count"), [(2, 40), (4, 20), (8, 6)])
def test_processes_train_as_the_plain_model(
    ranks: int, count: int, tmp_path: Path, warm_python: str
) -> None:
    assert run_world(warm_python, "drawn_world", ranks, tmp_path, str(count)) == {}
    check_cases(cases_of(ranks, count), ranks, tmp_path)
