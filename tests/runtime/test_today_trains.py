"""Random plans of everything that the runtime trains give the losses and weights of a plain run."""

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from mistlab.plan.workload import Workload  # noqa: E402
from runtime.engine.executor import Report  # noqa: E402
from runtime.engine.training import Training  # noqa: E402
from tests.runtime.drawn_today import case  # noqa: E402
from tests.runtime.drawn_world import cases_of  # noqa: E402
from tests.runtime.test_real_ranks import run_world, together  # noqa: E402
from tests.runtime.worlds import Trained, assert_alike, by_plan, plainly  # noqa: E402
from tests.sweep import sweep  # noqa: E402


@pytest.mark.parametrize("seed", sweep(range(300), first=12))
def test_a_random_plan_trains_as_the_plain_model(seed: int) -> None:
    work, plan, training = case(seed, most_ranks=4 if seed < 12 else 8)
    assert_alike(by_plan(work, plan, training, seed=seed), plainly(work, training))


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "count"), [(2, 40), (4, 20), (8, 6)])
def test_processes_train_as_the_plain_model(
    ranks: int, count: int, tmp_path: Path, warm_python: str
) -> None:
    assert run_world(warm_python, "drawn_world", ranks, tmp_path, str(count)) == {}
    for number, (work, _, training) in enumerate(cases_of(ranks, count)):
        trained_in(tmp_path, number, ranks, work, training)


def trained_in(folder: Path, number: int, ranks: int, work: Workload, training: Training) -> None:
    said = [json.loads((folder / f"{number} {rank}.json").read_text()) for rank in range(ranks)]
    assert all(one == said[0] for one in said)
    reports = [
        Report(loss=loss, gradient_norm=None, loss_scale=1.0, skipped=skipped)
        for loss, skipped in said[0]
    ]
    parts = [torch.load(folder / f"{number} {rank}.pt") for rank in range(ranks)]
    weights = {name: together([part[name] for part in parts]) for name in parts[0]}
    assert_alike(Trained(reports=reports, weights=weights), plainly(work, training))
