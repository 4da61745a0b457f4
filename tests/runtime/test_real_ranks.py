"""Models split over real processes against the same models whole: losses, logits and gradients."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]

# Sums of 32-bit floats in another order differ by some 1e-7 of their largest terms, a few times
# more after the layers (1.7e-6 is the largest here). A reduction that is missing shows at 1e-1.
TOLERANCE = 1e-5


@pytest.mark.parametrize("ranks", [2, 4])
def test_split_models_compute_what_whole_ones_do(ranks: int, tmp_path: Path) -> None:
    code = "from tests.runtime.split_models import main; main()"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(rank), str(ranks), str(tmp_path)],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    for process in processes:
        _, complaint = process.communicate(timeout=300)
        assert process.returncode == 0, complaint

    for rank in range(ranks):
        found = json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8"))
        assert len(found) == 10
        assert {case: error for case, error in found.items() if not error <= TOLERANCE} == {}
