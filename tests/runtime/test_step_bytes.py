"""What the optimizer's step reads and writes is what predictions charge for it."""

import pytest

torch = pytest.importorskip("torch")

from mistlab.engines.engine import (  # noqa: E402
    ENGINES,
    Precision,
)
from mistlab.plan.plan import Plan  # noqa: E402
from mistlab.stages.stage_program import Op  # noqa: E402
from runtime.engine.training import Training  # noqa: E402
from runtime.engine.work import optimizer  # noqa: E402
from runtime.engine.work.optimizer import Stepper  # noqa: E402
from runtime.profiling.operator_times import WorkCounter  # noqa: E402
from tests.runtime.worlds import alone, run_step, stage, workload  # noqa: E402

# As runs are set by default: losses are scaled under fp16 alone.
TRAINING: dict[Precision, Training] = {
    "fp16": Training(loss_scale=2.0**10),
    "bf16": Training(),
    "fp32": Training(),
}
# A gradient, four bytes, that the operator's schema says is written where the kernel does so only
# to undo a scale.
UNTOUCHED: dict[Precision, int] = {"fp16": 0, "bf16": 4, "fp32": 4}


@pytest.mark.parametrize("chunk", [optimizer.CHUNK, 2**13])
@pytest.mark.parametrize("precision", TRAINING)
def test_a_step_moves_the_bytes_that_are_charged(
    precision: Precision, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In however many chunks, each with its own gradients alone."""
    monkeypatch.setattr(optimizer, "CHUNK", chunk)
    counted: list[float] = []
    step = Stepper._step

    def counting(self: Stepper, op: Op, learning_rate: float | None) -> None:
        with WorkCounter() as counter:
            step(self, op, learning_rate)
        if learning_rate is not None:
            stepped = self.state.layers[op.layer].optimizer[0].kept
            counted.append(counter.moved_bytes / stepped)

    monkeypatch.setattr(Stepper, "_step", counting)
    work = workload(hidden=128, ffn=512, vocab=512, precision=precision)
    plan = Plan(micro_batches=2, stages=(stage(micro_batch=4),))
    executor = alone(work, plan, "eager", TRAINING[precision])
    for number in range(2):
        run_step(executor, work, executor.connections, number)
    executor.streams.spans()
    assert len(counted) == len(executor.layers)
    charged = ENGINES["mistlab"].step_moved[precision] + UNTOUCHED[precision]
    assert counted == pytest.approx([charged] * len(counted), rel=1e-3)
