"""Plans on processes train as a plain run does: losses of all steps, weights after the last."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from runtime.engine.executor import Report  # noqa: E402
from tests.runtime.process_world import cases_of  # noqa: E402
from tests.runtime.worlds import Trained, assert_alike, plainly  # noqa: E402

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_plans_on_processes_train_as_a_plain_run(ranks: int, tmp_path: Path) -> None:
    code = "from tests.runtime.process_world import main; main()"
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", code, str(rank), str(ranks), str(tmp_path)],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        for process in processes:
            _, complaint = process.communicate(timeout=300)
            assert process.returncode == 0, complaint
    finally:
        for process in processes:
            process.kill()
            process.communicate()

    for number, (work, _, training) in enumerate(cases_of(ranks).values()):
        expected = plainly(work, training)
        losses = [
            json.loads((tmp_path / f"{number} {rank}.json").read_text()) for rank in range(ranks)
        ]
        assert all(one == losses[0] for one in losses)
        parts = [torch.load(tmp_path / f"{number} {rank}.pt") for rank in range(ranks)]
        weights = {name: together([part[name] for part in parts]) for name in parts[0]}
        reports = [
            Report(loss=loss, gradient_norm=None, loss_scale=1.0, skipped=False)
            for loss in losses[0]
        ]
        assert_alike(Trained(reports=reports, weights=weights), expected)


def together(parts: list[torch.Tensor]) -> torch.Tensor:
    """A tensor from ranks' parts of it, NaN where they have none."""
    whole = parts[0].clone()
    for part in parts[1:]:
        whole = torch.where(whole.isnan(), part, whole)
    return whole
