"""Real processes, one world for each number of them: split models compute what whole ones do, and
plans train as a plain run does."""

import json
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from runtime.engine.executor import Report  # noqa: E402
from tests.runtime import split_models  # noqa: E402
from tests.runtime.process_world import Case, cases_of  # noqa: E402
from tests.runtime.worlds import Trained, assert_alike, plainly  # noqa: E402

ROOT = Path(__file__).parents[2]

# Sums of 32-bit floats in another order differ by some 1e-7 of their largest terms, a few times
# more after the layers (1.7e-6 is the largest here). A reduction that is missing shows at 1e-1.
TOLERANCE = 1e-5


@pytest.mark.parametrize(
    "ranks", [2, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (4, 8))]
)
def test_processes_compute_what_one_does(ranks: int, tmp_path: Path, warm_python: str) -> None:
    complaints = run_world(warm_python, "process_world", ranks, tmp_path)
    assert complaints == {}
    if ranks in split_models.SPLITS:
        _check_split_models(ranks, tmp_path)
    check_plans(ranks, tmp_path)


def test_processes_that_train_do_not_wait_for_what_traces(warm_python: str) -> None:
    code = "import runtime.session, sys; sys.exit('torch._dynamo' in sys.modules)"
    subprocess.run([warm_python, "-c", code], cwd=ROOT, check=True)


def run_world(program: str, module: str, ranks: int, folder: Path, *options: str) -> dict[int, str]:
    """What processes of a Python that failed said, by rank."""
    code = f"from tests.runtime.{module} import main; main()"
    python = [program, "-W", "error", "-c", code]
    processes = [
        subprocess.Popen(
            [*python, str(rank), str(ranks), str(folder), *options],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        said = [process.communicate(timeout=300)[1] for process in processes]
        failed = [bool(process.returncode) for process in processes]
        return {rank: said[rank] for rank in range(ranks) if failed[rank]}
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def check_plans(ranks: int, folder: Path) -> None:
    """Every case of a world trained as a plain run does."""
    check_cases(cases_of(ranks).values(), ranks, folder)


def check_cases(cases: Iterable[Case], ranks: int, folder: Path) -> None:
    """Cases that so many processes trained in turn came to what a plain run does."""
    for number, (work, _, training) in enumerate(cases):
        assert_alike(_trained(ranks, number, folder), plainly(work, training))


def _check_split_models(ranks: int, folder: Path) -> None:
    for rank in range(ranks):
        found = json.loads((folder / f"split {rank}.json").read_text(encoding="utf-8"))
        assert len(found) == 20
        assert {case: error for case, error in found.items() if not error <= TOLERANCE} == {}


def _trained(ranks: int, number: int, folder: Path) -> Trained:
    said = [json.loads((folder / f"{number} {rank}.json").read_text()) for rank in range(ranks)]
    assert all(one == said[0] for one in said)
    reports = [
        Report(loss=loss, gradient_norm=None, loss_scale=1.0, skipped=skipped)
        for loss, skipped in said[0]
    ]
    parts = [torch.load(folder / f"{number} {rank}.pt") for rank in range(ranks)]
    weights = {name: together([part[name] for part in parts]) for name in parts[0]}
    return Trained(reports=reports, weights=weights)


def together(parts: list[torch.Tensor]) -> torch.Tensor:
    """A tensor from ranks' parts of it, NaN where they have none."""
    whole = parts[0].clone()
    for part in parts[1:]:
        whole = torch.where(whole.isnan(), part, whole)
    return whole
