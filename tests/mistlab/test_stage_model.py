"""Stage figures against plain arithmetic over the layer graph, and what must always hold."""

from dataclasses import fields, replace

import numpy as np
import pytest

from mistlab import catalog
from mistlab.graph.layer_types import LayerExpressions, expressions_of
from mistlab.graph.library import graph_of
from mistlab.graph.stage_model import StageModel
from mistlab.graph.symbols import size_symbol
from mistlab.plan.plan import Offload, Plan, StagePlan
from mistlab.plan.workload import ModelSpec, Workload
from mistlab.stages.stage_batch import StageBatch, StageFigures

MODEL = catalog.model("llama-1.3b")
WORK = Workload(
    model=MODEL, sequence_length=1024, global_batch=16, attention="flash", precision="bf16"
)
STAGE = StagePlan(layers=8, data_parallel=2, tensor_parallel=2, micro_batch=2)


@pytest.fixture(scope="module")
def stage_model() -> StageModel:
    return StageModel.of(WORK)


def figures_of(model: StageModel, *stages: StagePlan, micro_batches: int = 4) -> StageFigures:
    return model.figures(
        StageBatch.of_plan(Plan(micro_batches=micro_batches, stages=stages)),
    )


def middle(model: StageModel, stage: StagePlan) -> dict[str, float]:
    """The figures of a stage between two others, with two micro-batches in flight."""
    figures = figures_of(model, STAGE, stage, STAGE)
    return {entry.name: float(getattr(figures, entry.name)[1]) for entry in fields(figures)}


def numbers_of(layer: LayerExpressions, stage: StagePlan) -> dict[str, float]:
    sizes = {
        "b": stage.micro_batch,
        "s": WORK.sequence_length,
        "h": MODEL.hidden,
        "n": MODEL.heads,
        "k": MODEL.kv_heads,
        "d": MODEL.head_dim,
        "r": MODEL.rotated_channels,
        "f": MODEL.ffn,
        "V": MODEL.vocab,
        "tp": stage.tensor_parallel,
    }
    values = {size_symbol(name): value for name, value in sizes.items()}
    names = [entry.name for entry in fields(layer) if entry.name != "work"]
    sums = {name: getattr(layer, name) for name in names}
    sums |= {f"{phase}_flop": layer.flop(phase) for phase in ("forward", "backward")}
    return {name: float(expression.subs(values)) for name, expression in sums.items()}


def test_a_middle_stage_is_its_blocks_added_up(stage_model: StageModel) -> None:
    ratios = Offload(weights=0.25, gradients=0.5, optimizer=0.75, activations=0.125)
    stage = replace(STAGE, zero=2, checkpointed_layers=3, offload=ratios)
    block = numbers_of(expressions_of(graph_of(WORK).block), stage)
    parameters = 8 * block["parameters"]
    kept = 2 * (5 * block["saved_bytes"] + 3 * block["input_bytes"])
    states = {
        "weights_bytes": 0.75 * 2 * parameters,
        "gradients_bytes": 0.5 * 4 * parameters / 2,
        "optimizer_bytes": 0.25 * 12 * parameters / 2,
        # Weights and gradients whole, and the rank's part of gradients.
        "buffers_bytes": 2 * (2 + 4 + 4 / 2) * block["parameters"],
    }
    # One block steps while the one before it leaves.
    step_buffer = 2 * 0.75 * 12 / 2 * block["parameters"]
    # The older of the two micro-batches in flight was sent on.
    sent = block["output_bytes"]
    # The last block is checkpointed: it runs with its input on the device, and its neighbour's.
    others = 0.875 * (kept - block["input_bytes"]) + 0.125 * block["input_bytes"]
    # Blocks step when only one micro-batch is in flight.
    first = others - 0.875 * kept / 2
    again = block["forward_peak_bytes"] + block["output_bytes"]
    expected = {
        **states,
        "parameters": parameters,
        "activations_bytes": 0.875 * kept,
        "host_bytes": 0.25 * 2 * parameters
        + 0.5 * 4 * parameters / 2
        + 0.75 * 6 * parameters
        + 0.125 * kept,
        "forward_flop": 8 * block["forward_flop"],
        "backward_flop": 8 * block["backward_flop"] + 3 * block["forward_flop"],
        "step_buffer_bytes": step_buffer,
        "forward_peak_bytes": sum(states.values())
        + block["forward_peak_bytes"]
        + max(others + sent, first + step_buffer),
        "backward_peak_bytes": sum(states.values())
        + others
        + sent
        + max(again, block["backward_peak_bytes"]),
    }

    found = middle(stage_model, stage)

    assert found["feasible"] == 1
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-12)


def test_the_stages_of_a_plan_hold_the_whole_model(stage_model: StageModel) -> None:
    stage = StagePlan(layers=8, data_parallel=1, tensor_parallel=1, micro_batch=4)
    figures = figures_of(stage_model, stage, stage, stage)
    layers = [expressions_of(layer) for layer in graph_of(WORK).layers]
    counts = [numbers_of(layer, stage)["parameters"] for layer in layers]
    assert figures.parameters.sum() == counts[0] + 24 * counts[1] + counts[2]


def test_tied_embeddings_are_held_once_by_a_single_stage() -> None:
    def parameters(model: ModelSpec, *stages: StagePlan) -> float:
        return float(
            figures_of(StageModel.of(replace(WORK, model=model)), *stages).parameters.sum()
        )

    tied = replace(MODEL, name="", tied_embeddings=True)
    whole = StagePlan(layers=24, data_parallel=1, tensor_parallel=2, micro_batch=4)
    half = replace(whole, layers=12)
    table = MODEL.vocab * MODEL.hidden / 2
    assert parameters(MODEL, whole) - parameters(tied, whole) == table
    assert parameters(MODEL, half, half) == parameters(tied, half, half)


@pytest.mark.parametrize("name", ["weights", "gradients", "optimizer"])
def test_offloading_moves_states_to_the_host(stage_model: StageModel, name: str) -> None:
    none = middle(stage_model, STAGE)
    half = middle(stage_model, replace(STAGE, offload=Offload(**{name: 0.5})))
    column = f"{name}_bytes"
    assert half[column] == none[column] / 2
    assert half["host_bytes"] == none[column] / 2
    assert none["host_bytes"] == none["buffers_bytes"] == 0


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_zero_level_shards_one_kind_of_state_more(stage_model: StageModel, zero: int) -> None:
    below = middle(stage_model, replace(STAGE, zero=zero - 1))
    here = middle(stage_model, replace(STAGE, zero=zero))
    names = ("optimizer_bytes", "gradients_bytes", "weights_bytes")
    ratios = [here[name] / below[name] for name in names]
    assert ratios == [0.5 if level == zero else 1 for level in (1, 2, 3)]


def test_checkpointing_trades_activations_for_a_second_forward(stage_model: StageModel) -> None:
    rows = [middle(stage_model, replace(STAGE, checkpointed_layers=c)) for c in range(9)]
    flop = np.diff([row["backward_flop"] for row in rows])
    kept = np.diff([row["activations_bytes"] for row in rows])
    assert flop == pytest.approx(np.full(8, rows[0]["forward_flop"] / 8))
    assert (kept < 0).all()
    assert kept == pytest.approx(np.full(8, kept[0]))
    assert rows[8]["backward_peak_bytes"] < rows[0]["backward_peak_bytes"]


def test_offloaded_activations_leave_room_for_the_running_block_and_its_neighbour(
    stage_model: StageModel,
) -> None:
    row = middle(stage_model, replace(STAGE, offload=Offload(activations=1.0)))
    block = numbers_of(expressions_of(graph_of(WORK).block), STAGE)
    states = row["weights_bytes"] + row["gradients_bytes"] + row["optimizer_bytes"]
    assert row["activations_bytes"] == 0
    assert row["backward_peak_bytes"] - states == pytest.approx(
        block["saved_bytes"] + block["backward_peak_bytes"] + block["output_bytes"]
    )


def test_a_block_that_is_computed_again_may_have_a_whole_plain_neighbour(
    stage_model: StageModel,
) -> None:
    stage = replace(STAGE, checkpointed_layers=3, offload=Offload(activations=1.0))
    row = middle(stage_model, stage)
    block = numbers_of(expressions_of(graph_of(WORK).block), stage)
    states = row["weights_bytes"] + row["gradients_bytes"] + row["optimizer_bytes"]
    again = block["forward_peak_bytes"] + block["output_bytes"]
    assert row["backward_peak_bytes"] - states == pytest.approx(
        block["saved_bytes"] + max(again, block["backward_peak_bytes"]) + block["output_bytes"]
    )


def test_earlier_stages_hold_more_micro_batches(stage_model: StageModel) -> None:
    stage = replace(STAGE, layers=6)
    activations = figures_of(stage_model, *[stage] * 4).activations_bytes
    kept = activations[3]
    assert activations[1:].tolist() == pytest.approx([3 * kept, 2 * kept, kept])
    assert activations[0] > 4 * kept  # the first stage keeps the tokens too


def test_degrees_that_do_not_divide_are_a_mask(stage_model: StageModel) -> None:
    degrees = [1, 2, 3, 4, 5, 7, 8, 16, 64]
    stages = [replace(STAGE, tensor_parallel=degree) for degree in degrees]
    feasible = figures_of(stage_model, *stages).feasible
    # llama-1.3b: 16 heads, a feed-forward width of 5,504.
    assert feasible.tolist() == [16 % d == 0 and 5504 % d == 0 for d in degrees]
    assert feasible.tolist() == [True, True, False, True, False, False, True, True, False]
