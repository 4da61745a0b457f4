"""Blocks of lean operators: their graphs are those of a trace, and a stage trains with them."""

import weakref
from collections import Counter
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from mistlab.core.values import InputError  # noqa: E402
from mistlab.graph.compiled import compile_expressions  # noqa: E402
from mistlab.graph.graph import LayerGraph, Operator  # noqa: E402
from mistlab.graph.layer_types import expressions_of  # noqa: E402
from mistlab.graph.lean import lean  # noqa: E402
from mistlab.graph.library import Variant, shipped  # noqa: E402
from mistlab.graph.stage_model import StageModel  # noqa: E402
from mistlab.job.job import Job  # noqa: E402
from mistlab.plan.lean_sets import SETS  # noqa: E402
from mistlab.plan.plan import Plan  # noqa: E402
from mistlab.plan.workload import Workload  # noqa: E402
from mistlab.stages.stage_batch import StageBatch  # noqa: E402
from mistlab.stages.stage_program import Op  # noqa: E402
from runtime.models.lean_operators import make_lean  # noqa: E402
from runtime.models.transformer import Transformer  # noqa: E402
from runtime.tracing import traced_families  # noqa: E402
from runtime.tracing.traced_families import trace_variant  # noqa: E402
from tests.added_rows import CLUSTER  # noqa: E402
from tests.runtime.worlds import (  # noqa: E402
    alone,
    by_plan,
    plainly,
    ratios,
    run_step,
    stage,
    starting_tensor,
    workload,
)

GPT = Variant(family="gpt", attention="math", precision="half", biases=True)
SPLIT = Variant(family="gpt", attention="flash", precision="single", sequence_parallel=True)
SIZES = (
    {"b": 1, "s": 2048, "h": 2048, "n": 16, "k": 16, "d": 128, "r": 128, "f": 8192, "tp": 1},
    {"b": 4, "s": 4096, "h": 4096, "n": 32, "k": 32, "d": 128, "r": 128, "f": 16384, "tp": 8},
    {"b": 16, "s": 512, "h": 1024, "n": 16, "k": 16, "d": 64, "r": 64, "f": 4096, "tp": 1},
)
ENCODER = Variant(family="bert", attention="math", precision="half", biases=True)
TRACED = [
    (ENCODER, SETS[0]),
    (SPLIT, SETS[0]),
    *(
        pytest.param(GPT, kinds, marks=pytest.mark.slow)
        for kinds in (SETS[0], ("gelu",), ("norms",))
    ),
]


@cache
def traced(variant: Variant, kinds: tuple[str, ...]) -> LayerGraph:
    """A block that torch runs by lean operators."""
    made = traced_families._model

    def lean_model(*args: object, **options: object) -> Transformer:
        model = made(*args, **options)  # type: ignore[arg-type]
        make_lean(model.blocks[0], kinds)
        return model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(traced_families, "_model", lean_model)
        return trace_variant(variant).block


def counted(operators: tuple[Operator, ...]) -> Counter[tuple[object, ...]]:
    return Counter((o.phase, o.name, o.flop, o.read_bytes, o.written_bytes) for o in operators)


@pytest.mark.parametrize(("variant", "kinds"), TRACED)
def test_its_graph_is_what_a_trace_makes(variant: Variant, kinds: tuple[str, ...]) -> None:
    made, found = lean(shipped(variant).block, kinds), traced(variant, kinds)
    assert made.saved_bytes == found.saved_bytes
    assert counted(made.operators) == counted(found.operators)


@pytest.mark.parametrize(("variant", "kinds"), TRACED)
def test_its_peaks_are_those_of_a_trace(variant: Variant, kinds: tuple[str, ...]) -> None:
    """Never below, and at most a thousandth above. A trace holds the block's input through the
    backward pass; the runtime does not, where norms come first and do not keep it."""
    own, other = lean(shipped(variant).block, kinds), traced(variant, kinds)
    held = other.input_bytes if "norms" in kinds and variant.family != "bert" else 0
    made, found = peaks(own, 0), peaks(other, held)
    assert (made >= found).all()
    assert (made <= 1.001 * found).all()


def peaks(block: LayerGraph, less: object) -> NDArray[np.float64]:
    """Both peaks of a block (2, sizes), the backward one by so much less."""
    sums = expressions_of(block)
    of_passes = {
        "forward": sums.forward_peak_bytes,
        "backward": sums.backward_peak_bytes - less,
    }
    columns = {name: np.array([sizes[name] for sizes in SIZES]) for name in SIZES[0]}
    return compile_expressions(of_passes, columns=tuple(columns), constants={})(columns)


LEAN = {"lean_layers": 4}
# Every set of operators, in one micro-batch and in stages that mix them with recomputation.
PLANS = [
    Plan(micro_batches=2, stages=(stage(4, micro_batch=4, **LEAN),)),
    Plan(micro_batches=4, stages=(stage(4, lean_layers=2, checkpointed_layers=1),)),
    *(
        Plan(micro_batches=2, stages=(stage(4, micro_batch=4, lean_operators=one, **LEAN),))
        for one in (1, 2, SETS.index(("gelu", "norms")))
    ),
]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("attention", ["flash", "math"])
def test_a_stage_keeps_what_is_predicted_to_the_byte(attention: str, plan: Plan) -> None:
    work = replace(workload(), attention=attention)
    plain = Plan(
        micro_batches=plan.micro_batches,
        stages=(stage(4, micro_batch=plan.stages[0].micro_batch),),
    )
    assert kept_bytes(work, plain) - kept_bytes(work, plan) == (
        predicted(work, plain) - predicted(work, plan)
    )
    assert predicted(work, plan) < predicted(work, plain)


def kept_bytes(work: Workload, plan: Plan) -> int:
    """The most bytes that the only rank of a plan keeps between passes, in its second step."""
    executor = alone(work, plan, "eager")
    for step in range(2):
        executor.passes.peak_bytes = 0
        run_step(executor, work, executor.connections, step)
        assert executor.passes.held_bytes == 0
    return executor.passes.peak_bytes


def predicted(work: Workload, plan: Plan) -> float:
    figures = StageModel.of(work).figures(StageBatch.of_plan(plan))
    return float(figures.activations_bytes[0])


def test_nothing_holds_the_input_of_a_block_that_keeps_none() -> None:
    """Autograd has no leaf of it, neither in the first pass nor in later ones."""
    executor = alone(workload(), PLANS[0], "eager")
    inputs = []
    forward = executor.passes.forward

    def watched(
        layer: int, micro_batch: int, entry: int, x: Tensor, targets: Tensor | None
    ) -> Tensor:
        if executor.passes.treatments.get(layer) == "lean":
            inputs.append(weakref.ref(x))
        return forward(layer, micro_batch, entry, x, targets)

    executor.passes.forward = watched  # type: ignore[method-assign]
    backward = executor.passes.backward
    alive = []

    def looked(op: Op, gradient: Tensor) -> Tensor | None:
        alive.append(sum(one() is not None for one in inputs))
        return backward(op, gradient)

    executor.passes.backward = looked  # type: ignore[method-assign]
    for step in range(2):
        run_step(executor, workload(), executor.connections, step)
    assert len(inputs) == 2 * 2 * 4
    assert not any(alive)


SPLIT_PLANS = [
    Plan(
        micro_batches=4,
        stages=(stage(2, lean_layers=2), stage(2, lean_layers=1, checkpointed_layers=1)),
    ),
    Plan(
        micro_batches=2,
        stages=(stage(data_parallel=2, zero=3, offload=ratios(0.5, 0.5, 1, 0.5), **LEAN),),
    ),
    Plan(
        micro_batches=2,
        stages=(stage(micro_batch=4, tensor_parallel=2, sequence_parallel=1, **LEAN),),
    ),
]


@pytest.mark.parametrize("plan", [PLANS[1], *SPLIT_PLANS])
def test_plans_with_lean_blocks_lose_as_a_plain_run(plan: Plan) -> None:
    """Slopes are read off outputs, so weights differ by more than in plans of plain operators."""
    found, expected = by_plan(workload(), plan), plainly(workload())
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-6)
    for name, tensor in expected.weights.items():
        error = (found.weights[name] - tensor).norm() / tensor.norm()
        assert error <= 3e-6, f"{name}: {error:.2e}"


@pytest.mark.slow
def test_fifty_steps_of_a_plan_lose_as_plain_operators() -> None:
    work = workload(activation="gelu")
    found = by_plan(work, PLANS[0], steps=50)
    np.testing.assert_allclose(found.losses, plainly(work, steps=50).losses, rtol=0, atol=1e-5)


def test_gains_of_zero_are_trained_like_others() -> None:
    def start(name: str, shape: tuple[int, ...], *, tied: bool) -> Tensor:
        tensor = starting_tensor(name, shape, tied=tied)
        if name.endswith("norm.weight"):
            tensor[: 12 if "blocks.1" in name else 5] = 0.0
        return tensor

    found, expected = by_plan(workload(), PLANS[0], start=start), plainly(workload(), start=start)
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-6)


def test_other_engines_have_no_lean_operators() -> None:
    plan = replace(PLANS[0], engine="megatron", stages=(stage(4, micro_batch=4, **LEAN),))
    with pytest.raises(
        InputError, match=r"lean_layers: .*engine megatron runs plain operators only"
    ):
        Job(workload=workload(), cluster=CLUSTER, plan=plan)
