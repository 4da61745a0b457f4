"""The bytes that an iteration takes at its most are those that the closed form predicts."""

import pytest

torch = pytest.importorskip("torch")

from mistlab.plan import Offload, Plan  # noqa: E402
from mistlab.stages import StageBatch  # noqa: E402
from mistlab.symbolic import states  # noqa: E402
from mistlab.symbolic.stage_model import StageModel  # noqa: E402
from mistlab.symbolic.states import StateSizes  # noqa: E402
from runtime.engine import optimizer  # noqa: E402
from tests.runtime.allocations import Allocations  # noqa: E402
from tests.runtime.worlds import alone, ratios, run_step, stage, workload  # noqa: E402

NONE = ratios(0, 0, 0, 0)
STATES = ratios(0.5, 0.5, 1, 0)
SIZES = {"hidden": 256, "ffn": 1024, "vocab": 2048, "sequence_length": 128}


@pytest.mark.parametrize(
    ("checkpointed", "offload"),
    [
        (0, NONE),
        (2, NONE),
        (4, ratios(0, 0, 1, 0)),
        (3, ratios(0, 0, 0.37, 0)),
        (0, ratios(0, 0.37, 0, 0)),
        (4, STATES),
        (0, ratios(0, 0, 0, 0.5)),
        (2, ratios(0.5, 0.5, 1, 0.5)),
    ],
)
@pytest.mark.parametrize("family", ["gpt", "llama", "falcon"])
def test_an_iteration_takes_what_is_predicted(
    family: str, checkpointed: int, offload: Offload, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    # As small beside these models as it is beside those that are trained.
    monkeypatch.setattr(optimizer, "CHUNK", 2**17)
    # Full precision is fast on a CPU; predictions count no masters there.
    monkeypatch.setattr(states, "SINGLE", StateSizes(weight=4, gradient=4, optimizer=12))
    work = workload(family, batch=4, **SIZES)
    one = stage(micro_batch=2, checkpointed_layers=checkpointed, offload=offload)
    plan = Plan(micro_batches=2, stages=(one,))
    (predicted,) = StageModel.of(work).figures(StageBatch.of_plan(plan)).peak_bytes

    with Allocations() as allocations:
        executor = alone(work, plan, "eager")
        run_step(executor, work, executor.connections, 0)
        executor.streams.spans()
        allocations.most_bytes = 0
        run_step(executor, work, executor.connections, 1)

    taken = allocations.most_bytes - executor.host_bytes
    # Activations leave as whole storages: in sum one may be too many for a ratio, and of the block
    # that is whole for its neighbour's sake another.
    storages = 2 * (2 * 128 * 1024 * 4) if offload.activations else 0
    assert taken == pytest.approx(predicted, rel=0.01, abs=storages)
