"""What each engine keeps, against plain arithmetic over the parameters of a stage."""

from dataclasses import replace

import pytest

from mistlab import catalog
from mistlab.core.units import GIB_BYTES
from mistlab.engines.adapters import Base
from mistlab.engines.engine import ENGINES, Precision
from mistlab.graph.stage_model import StageModel
from mistlab.plan.plan import Plan, StagePlan
from mistlab.plan.workload import Workload
from mistlab.stages.stage_batch import StageBatch, StageFigures
from tests.workloads import workload_of

WORK = workload_of("llama-1.3b", 1024, 32, "bf16")
STAGE = StagePlan(layers=24, data_parallel=4, tensor_parallel=1, micro_batch=1, zero=1)
ALONE = (STAGE,)
PIPELINE = (replace(STAGE, layers=12), replace(STAGE, layers=12))
BUCKET_BYTES = 2 * 500_000_000


def figures_of(
    engine: str, stages: tuple[StagePlan, ...] = ALONE, precision: Precision = "bf16"
) -> StageFigures:
    work = replace(WORK, precision=precision)
    batch = StageBatch.of_plan(Plan(engine=engine, micro_batches=4, stages=stages))
    return StageModel.of(work, engine).figures(batch)


@pytest.mark.parametrize(
    ("precision", "unsharded", "sharded"), [("fp16", 4, 16), ("bf16", 6, 12), ("fp32", 8, 8)]
)
def test_megatron_keeps_what_its_own_table_says(
    precision: Precision, unsharded: int, sharded: int
) -> None:
    """Its table of bytes a parameter: with the distributed optimizer over d ranks, a + b / d."""
    found = figures_of("megatron", precision=precision)
    expected = found.parameters * (unsharded + sharded / STAGE.data_parallel)
    assert found.step_peak_bytes == pytest.approx(expected, rel=1e-12)


def test_megatron_has_logits_of_32_bits_on_top_of_ours() -> None:
    """Both sum gradients in 32 bits. ZeRO-1 needs no rings here either. The fullest stage is one
    with the head. Ours has no second tensor of the logits' size while it runs forward."""
    ours, theirs = figures_of("mistlab", PIPELINE), figures_of("megatron", PIPELINE)
    logits = WORK.sequence_length * WORK.model.vocab
    for phase, bytes_of_logit in (("forward", 4), ("backward", 2)):
        beyond = getattr(theirs, f"{phase}_peak_bytes") - getattr(ours, f"{phase}_peak_bytes")
        assert abs(beyond[0]) < 1e-9 * ours.peak_bytes[0]
        other_layers = 3e-3 * 2 * (ours.parameters[1] + logits)
        assert beyond[1] == pytest.approx(bytes_of_logit * logits, abs=other_layers)


def test_fp16_gradients_are_copied_for_the_step_alone() -> None:
    found = figures_of("megatron", precision="fp16")
    states = found.weights_bytes + found.gradients_bytes + found.optimizer_bytes
    assert states == pytest.approx(found.parameters * (4 + 12 / 4), rel=1e-12)
    ours = figures_of("mistlab", precision="fp16")
    kept = ours.held_bytes
    assert found.forward_peak_bytes - found.held_bytes < 1.2 * (ours.forward_peak_bytes - kept)
    # Where little is kept between passes, the step is the fullest moment.
    again = replace(STAGE, checkpointed_layers=24, data_parallel=2)
    (peak,) = figures_of("megatron", (again,), "fp16").peak_bytes
    assert peak == figures_of("megatron", (again,), "fp16").step_peak_bytes[0]


def moving(stages: tuple[StagePlan, ...], phase: str) -> list[float]:
    """What comes and goes in a phase of DeepSpeed's stages."""
    found = figures_of("deepspeed", stages)
    return (getattr(found, f"{phase}_peak_bytes") - found.held_bytes).tolist()


def test_deepspeed_reduces_from_a_bucket_in_each_backward_pass() -> None:
    (bare,) = moving((replace(STAGE, zero=0),), "backward")
    assert moving(ALONE, "backward") == [bare + BUCKET_BYTES]
    assert moving(ALONE, "forward") == moving((replace(STAGE, zero=0),), "forward")


@pytest.mark.parametrize("base", ["16bit", "4bit"])
def test_a_bucket_has_its_size_however_few_weights_are_trained(base: Base) -> None:
    work = replace(WORK, train="adapters", adapter_rank=8, base=base)
    peaks = [
        StageModel.of(work, "deepspeed-trainer").figures(
            StageBatch.of_plan(Plan(engine="deepspeed-trainer", micro_batches=4, stages=(stage,)))
        )
        for stage in (ALONE[0], replace(ALONE[0], zero=0))
    ]
    moved = [(each.backward_peak_bytes - each.held_bytes).item() for each in peaks]
    assert moved[0] - moved[1] == pytest.approx(BUCKET_BYTES)


def test_deepspeed_s_pipeline_reduces_when_all_passes_are_over() -> None:
    bare = tuple(replace(stage, zero=0) for stage in PIPELINE)
    assert moving(PIPELINE, "backward") == moving(bare, "backward")
    # A gradient flattened in 16 bits and again in 32, or the bucket before.
    for ranks, reduces in ((8, True), (1, False)):
        stages = tuple(replace(stage, data_parallel=ranks) for stage in PIPELINE)
        found = figures_of("deepspeed", stages)
        beyond = found.step_peak_bytes - found.held_bytes
        scratch = 6 * found.parameters / ranks
        assert (scratch < BUCKET_BYTES).tolist() == [reduces] * 2
        assert beyond.tolist() == pytest.approx([BUCKET_BYTES] * 2 if reduces else list(scratch))


def test_deepspeed_keeps_gathered_weights_up_to_its_limit() -> None:
    sharded = (replace(STAGE, zero=3),)
    found = figures_of("deepspeed", sharded)
    assert found.parameters[0] > 1e9
    assert found.buffers_bytes == 2 * 1e9
    few = replace(WORK, model=catalog.model("llama-350m"))
    batch = StageBatch.of_plan(Plan(engine="deepspeed", micro_batches=4, stages=sharded))
    small = StageModel.of(few, "deepspeed").figures(batch)
    assert small.parameters[0] < 1e9
    assert small.buffers_bytes == 2 * small.parameters


def activations_of(engine: str, stage: StagePlan) -> float:
    (found,) = figures_of(engine, (stage,)).activations_bytes
    return float(found)


def test_whole_tensors_are_what_a_rank_has_of_the_other_ranks_tokens() -> None:
    tokens, hidden = WORK.sequence_length, WORK.model.hidden
    for tensor, splits, share in ((2, 1, 1 / 2), (4, 1, 3 / 4), (2, 0, 0)):
        stage = replace(STAGE, tensor_parallel=tensor, sequence_parallel=splits)
        beyond = activations_of("nanotron-whole-inputs", stage) - activations_of("nanotron", stage)
        # Four tensors a block, of 2 bytes a number, of the 12 blocks that the host is ahead by.
        assert beyond == pytest.approx(12 * 4 * 2 * tokens * hidden * share)


def test_a_stage_with_fewer_blocks_than_the_host_is_ahead_by_has_whole_tensors_of_all() -> None:
    stage = replace(STAGE, layers=6, tensor_parallel=2, sequence_parallel=1)
    kept = [activations_of(name, stage) for name in ("nanotron-whole-inputs", "nanotron")]
    tokens, hidden = WORK.sequence_length, WORK.model.hidden
    assert kept[0] - kept[1] == pytest.approx(6 * 4 * 2 * tokens * hidden / 2)


@pytest.mark.parametrize("engine", ["megatron", "deepspeed"])
def test_baselines_have_no_rings(engine: str) -> None:
    assert not ENGINES[engine].memory["bf16"].rings
    sharded = (replace(STAGE, zero=2),)
    assert figures_of("mistlab", sharded).buffers_bytes > 0
    assert figures_of(engine, sharded).buffers_bytes == 0


@pytest.mark.parametrize(
    ("pipeline", "tensor", "measured_gib"), [(2, 1, (66.55, 62.97)), (1, 2, (60.68,))]
)
def test_megatron_s_published_peaks_under_bf16_are_predicted(
    pipeline: int, tensor: int, measured_gib: tuple[float, ...]
) -> None:
    """Allocated bytes of Megatron-LM's first and last ranks on eight B200: Llama 3 70B cut to 12
    layers, ZeRO-1 over four ranks (SimuMax, docs/b200/b200_release_v1.2_summary.json)."""
    model = replace(catalog.model("llama3-70b"), layers=12)
    work = Workload(
        model=model, sequence_length=4096, global_batch=16, attention="flash", precision="bf16"
    )
    stage = replace(STAGE, layers=12 // pipeline, tensor_parallel=tensor)
    plan = Plan(engine="megatron", micro_batches=4, stages=(stage,) * pipeline)
    found = StageModel.of(work, "megatron").figures(StageBatch.of_plan(plan)).peak_bytes
    assert (found / GIB_BYTES).tolist() == pytest.approx(measured_gib, rel=0.03)
