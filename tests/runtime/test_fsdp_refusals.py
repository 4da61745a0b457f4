"""What FSDP2 is not driven with is refused before anything is allocated or joined."""

import os
from typing import Any

import pytest

pytest.importorskip("torch")

from mistlab.core.values import InputError
from runtime.baselines.baseline import BaselineSettings
from runtime.baselines.fsdp_run import FsdpRun
from tests.runtime.test_baselines_train import job_of


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"offload": {"activations": 1.0}}, r"offload\.activations: 1, but this command"),
        ({"lean_layers": 2}, "lean_layers: this command trains with FSDP2 only"),
        ({"core_recomputed_layers": 1}, "core_recomputed_layers: this command trains"),
    ],
)
def test_what_would_be_left_out_is_refused(
    values: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(InputError, match=message):
        FsdpRun(job_of("gpt", values), BaselineSettings(device="cpu", seed=0))
    assert "MASTER_ADDR" not in os.environ
