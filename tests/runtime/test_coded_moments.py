"""Moments of 8 bits: trained as a run written apart, as large as predicted, resumed by others."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from mistlab.core.values import InputError  # noqa: E402
from mistlab.graph.stage_model import StageModel  # noqa: E402
from mistlab.job.job import Job  # noqa: E402
from mistlab.plan.plan import Offload, Plan  # noqa: E402
from mistlab.plan.workload import Experts, Workload  # noqa: E402
from mistlab.stages.stage_batch import StageBatch  # noqa: E402
from mistlab.stages.stage_program import Op  # noqa: E402
from runtime.checkpoints import boxes, checkpoint  # noqa: E402
from runtime.comm.topology import connected, isolated  # noqa: E402
from runtime.engine.executor import Executor  # noqa: E402
from runtime.engine.storage.moment_codes import moment_codes, shares_of_codes  # noqa: E402
from runtime.engine.storage.stepped import Split  # noqa: E402
from runtime.engine.streams.device_streams import SimulatedStreams  # noqa: E402
from runtime.engine.training import Training  # noqa: E402
from runtime.engine.work import optimizer  # noqa: E402
from runtime.engine.work.adamw import step_adamw  # noqa: E402
from runtime.engine.work.optimizer import Swaps  # noqa: E402
from runtime.runnable import check_runnable  # noqa: E402
from tests.added_rows import CLUSTER  # noqa: E402
from tests.runtime import worlds  # noqa: E402
from tests.runtime.allocations import Allocations  # noqa: E402
from tests.runtime.plain_moments import BLOCK, PlainCoded, blocks_of, coded, shares  # noqa: E402
from tests.runtime.plain_reductions import PlainWorkers  # noqa: E402
from tests.runtime.taken_memory import SIZES, assert_predicted, taken_bytes  # noqa: E402
from tests.runtime.test_adapters_train import adapted, begun_with_adapters  # noqa: E402
from tests.runtime.test_memory import size, splits, states_of  # noqa: E402
from tests.runtime.test_reductions_train import (  # noqa: E402
    Ran,
    assert_weights,
    plan_of,
    work_of,
)
from tests.runtime.thread_ranks import Meeting, run_threads  # noqa: E402
from tests.runtime.worlds import (  # noqa: E402
    CPU,
    OVERFLOWING,
    alone,
    begun,
    by_plan,
    ratios,
    sequences,
    stage,
    starting_tensor,
    thread_groups,
    whole_weights,
    workload,
)
from tests.sweep import sweep  # noqa: E402

STEPS = 4
TRAINING = Training(learning_rate=1e-3, epsilon=1e-4, clip_norm=1.0)
ON_HOST = replace(TRAINING, steps_on_host=True)
SCALED = replace(OVERFLOWING, learning_rate=1e-3)
HALF_AWAY = ratios(0.5, 0.25, 0.5, 0)
PLANS = {
    "alone": Plan(micro_batches=2, stages=(stage(micro_batch=4),)),
    **{
        f"ZeRO-{zero}": Plan(micro_batches=2, stages=(stage(data_parallel=2, zero=zero),))
        for zero in range(1, 4)
    },
    "split": Plan(micro_batches=2, stages=(stage(micro_batch=4, tensor_parallel=2),)),
    "stages": Plan(micro_batches=2, stages=(stage(2, micro_batch=4, offload=HALF_AWAY),) * 2),
    "all at once": Plan(
        micro_batches=2,
        stages=(
            stage(
                *(2,),
                data_parallel=2,
                tensor_parallel=2,
                sequence_parallel=1,
                zero=2,
                offload=ratios(0, 0.37, 0.37, 0),
            ),
        )
        * 2,
    ),
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def short(work: Workload) -> Workload:
    return replace(work, optimizer="adamw-8bit")


def ranks_of(plan: Plan) -> int:
    return plan.stages[0].tensor_parallel


def blocks_of_plan(work: Workload, plan: Plan) -> dict[str, Sequence[np.ndarray]]:
    """Each tensor's blocks, as the ranks of its stage cut it."""
    ends = np.cumsum([one.layers for one in plan.stages])
    every = [blocks_of(work, one.tensor_parallel) for one in plan.stages]

    def stage_of(name: str) -> int:
        kind, number, *_ = name.split(".")
        if kind != "blocks":
            return -1 if kind == "head" else 0
        return int(np.searchsorted(ends, int(number), side="right"))

    return {name: every[stage_of(name)][name] for name in every[0]}


def apart(weights: dict[str, Tensor], run: PlainCoded) -> float:
    """How far a run's weights lie from a plain run's."""
    pairs = ((weights[name].double(), run.weights[name]) for name in run.trained)
    return sum(float((mine - one).square().sum()) for mine, one in pairs) ** 0.5


def assert_trains_as_plainly(
    work: Workload, plan: Plan, training: Training, start: worlds.Start = starting_tensor
) -> None:
    """Losses within 1e-6, and weights far nearer to its own than to those of 32-bit moments."""
    found = by_plan(work, plan, training, steps=STEPS, start=start)
    plain = replace(training, loss_scale=None)
    own = PlainCoded(work, plain, start, blocks_of_plan(work, plan))
    wide = PlainCoded(work, plain, start, None)
    overflows = training.loss_scale is not None
    for run in (own, wide):
        losses = [
            run.step(sequences(work, step), skips=overflows and step == 0) for step in range(STEPS)
        ]
        if run is own:
            np.testing.assert_allclose(found.losses, losses, rtol=1e-6)
    assert found.reports[0].skipped == overflows
    assert 15 * apart(found.weights, own) < apart(found.weights, wide)


@pytest.mark.parametrize(
    "name",
    sweep(["all at once", "ZeRO-3", "ZeRO-1", "stages", "ZeRO-2", "alone", "split"], first=4),
)
def test_a_plan_trains_as_a_run_written_apart(name: str) -> None:
    assert_trains_as_plainly(short(workload(vocab=128)), PLANS[name], TRAINING)


@pytest.mark.parametrize(
    ("name", "training"), [("stages", ON_HOST), ("alone", SCALED), ("split", SCALED)]
)
def test_steps_on_the_host_and_steps_that_are_skipped(name: str, training: Training) -> None:
    assert_trains_as_plainly(short(workload(vocab=128)), PLANS[name], training)


def test_short_blocks_of_biases_and_of_a_padded_vocabulary() -> None:
    fields = {"vocab": 97, "kv_heads": 2, "biases": True, "tied_embeddings": True}
    work = short(workload("llama", **fields))
    assert_trains_as_plainly(work, PLANS["split"], TRAINING)


ADAPTED: dict[str, dict[str, Any]] = {
    "16bit": {"kv_heads": 2, "layers": 2},
    "4bit": {"base": "4bit", "hidden": 256, "ffn": 512, "layers": 2, "kv_heads": 2},
}


@pytest.mark.parametrize("base", sweep(ADAPTED, first=1))
def test_adapters_train_as_a_run_written_apart(base: str) -> None:
    work = short(adapted(**ADAPTED[base]))
    one = stage(work.model.layers, data_parallel=2, tensor_parallel=2, zero=3, offload=HALF_AWAY)
    plan = Plan(micro_batches=2, stages=(one,))
    assert_trains_as_plainly(work, plan, TRAINING, begun_with_adapters)


def test_a_server_that_waits_for_none_keeps_moments_of_8_bits() -> None:
    """As torch's AdamW, with moments as coded after each of its steps."""
    work, plan = short(work_of("server:asynchronous=true")), plan_of(2)
    ran = Ran(work, plan, steps=4)
    workers, blocks = PlainWorkers(work, 2, plan.micro_batches, worlds.TRAINING), blocks_of(work)

    def code(server: torch.optim.Optimizer, *_: object) -> None:
        for name, weights in workers.weights[0].items():
            state = server.state[weights]
            for key, signed in (("exp_avg", True), ("exp_avg_sq", False)):
                state[key].copy_(coded(state[key].double(), blocks[name], signed=signed))

    workers.optimizers[0].register_step_post_hook(code)
    for step in range(4):
        workers.gradients(step)
        workers.serve(step, ran.layers)
    losses = [report.loss for report in ran.reports[0]]
    np.testing.assert_allclose(losses, workers.losses, rtol=1e-6)
    for number, executor in enumerate(ran.executors):
        assert_weights(whole_weights(work, [executor]), workers.weights[number])


@pytest.mark.slow
def test_experts_on_two_ranks_train_as_on_one() -> None:
    """Blocks of an expert's weights are the same wherever the expert lies."""
    experts = Experts(count=4, active=2, ffn=32, shared_ffn=0, dense_blocks=0)
    usual = workload("llama", layers=2, vocab=128, experts=experts)
    together = Plan(micro_batches=2, stages=(stage(2, micro_batch=4),))
    apart = stage(2, data_parallel=2, expert_parallel=2, zero=2, offload=HALF_AWAY)
    plans = together, Plan(micro_batches=2, stages=(apart,))
    one, two = (by_plan(short(usual), plan, TRAINING, steps=STEPS).losses for plan in plans)
    np.testing.assert_allclose(one, two, rtol=1e-6)
    wide = by_plan(usual, together, TRAINING, steps=STEPS).losses
    assert max(abs(mine - other) / other for mine, other in zip(one, wide, strict=True)) > 2e-6


# Codes alone.


@pytest.mark.parametrize("signed", [True, False])
def test_each_value_has_the_nearest_code_and_is_kept_when_it_is_coded_again(signed: bool) -> None:
    np.testing.assert_allclose(shares_of_codes(signed=signed), np.sort(shares(signed=signed)))
    draw = np.random.default_rng(0)
    values = draw.normal(size=8 * BLOCK) * 10.0 ** draw.uniform(-9, 0, 8 * BLOCK)
    values = values if signed else values**2
    values[:BLOCK] = 0
    given = torch.tensor(values, dtype=torch.float32)
    code = moment_codes(CPU)[0 if signed else 1]
    codes, scales = torch.zeros(8 * BLOCK, dtype=torch.uint8), torch.zeros(8)
    assert not code.read(codes, scales).any()
    code.write(codes, scales, given.clone())
    kept = code.read(codes, scales)
    blocks = np.arange(8 * BLOCK).reshape(8, BLOCK)
    torch.testing.assert_close(kept, coded(given.double(), blocks, signed=signed).float())
    largest = given.view(8, BLOCK).abs().amax(1)
    assert torch.equal(kept.view(8, BLOCK).abs().amax(1), largest)
    again = torch.zeros_like(codes), torch.zeros_like(scales)
    code.write(*again, kept.clone())
    assert torch.equal(again[0], codes)
    assert torch.equal(again[1], scales)


@pytest.mark.parametrize("overflows", [False, True])
def test_a_skipped_step_keeps_all_codes_and_scales(overflows: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    vectors = [torch.randn(8 * BLOCK, generator=draw)]
    vectors += [torch.zeros(8 * BLOCK, dtype=torch.uint8) for _ in range(2)]
    vectors += [torch.zeros(8) for _ in range(2)]
    gradients = torch.randn(2, 8 * BLOCK, generator=draw)
    steps = torch.zeros(1)
    step_adamw(TRAINING, vectors, gradients[0], steps + 1, 1e-3)
    before = [one.clone() for one in vectors]
    scaling = torch.ones(()), torch.tensor(float(overflows))
    step_adamw(TRAINING, vectors, gradients[1], steps + 2, 1e-3, scaling)
    alike = [torch.equal(one, other) for one, other in zip(vectors, before, strict=True)]
    assert alike == [overflows] * 5


def test_a_step_needs_a_bounded_part_of_what_wide_moments_would_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Less than 18 bytes for each element of a quarter of a chunk: both moments, the shares of one
    and its codes on their way."""
    monkeypatch.setattr(optimizer, "CHUNK", 2**12)
    work = short(workload(hidden=128, ffn=256, vocab=128, layers=1))
    plan = Plan(micro_batches=2, stages=(stage(1, micro_batch=4),))
    executor = alone(work, plan, "eager", replace(TRAINING, clip_norm=None))
    worlds.run_step(executor, work, executor.connections, 0)
    layer = executor.state.layers[1]
    gradient, piece = layer.gradients.resident, [one.resident for one in layer.optimizer]
    with Allocations() as allocations:
        for _ in range(2):
            # The first time makes known what was there before.
            allocations.most_bytes = before = allocations.now_bytes
            executor.steppers[0]._update([piece], gradient, layer.step, 1e-3)
    most = 2**12 // 4
    assert len(gradient) > 100 * most
    assert 12 * most < allocations.most_bytes - before < 18 * most


# Bytes.


def predicted(work: Workload, plan: Plan) -> Any:
    return StageModel.of(work).figures(StageBatch.of_plan(plan))


@pytest.mark.parametrize("offload", [ratios(0, 0, 0, 0), ratios(0.5, 0.25, 0.75, 0)])
@pytest.mark.parametrize("zero", sweep([3, 0, 1, 2], first=2))
def test_states_take_what_is_predicted(zero: int, offload: Offload) -> None:
    """Codes, scales and masters: 6 bytes and a 32nd a parameter, on the device, on the host, and in
    the step of offloaded states on their way."""
    # Sizes of which neither padding nor rounded cuts add anything.
    work = short(workload(hidden=512, ffn=1024, vocab=1024, layers=2, precision="bf16"))
    data = 2 if zero else 1
    plan = Plan(
        micro_batches=2,
        stages=(stage(2, data_parallel=data, zero=zero, offload=offload),),
    )
    figures = predicted(work, plan)
    for state in states_of(work, plan):
        layers = state.layers.values()
        taken = {
            **state.held_bytes(),
            "host": size(split.tail for layer in layers for split in splits(layer)),
        }
        assert taken == {name: getattr(figures, f"{name}_bytes")[0] for name in taken}
        state.staging.open()
        assert state.staging.size_bytes == figures.step_buffer_bytes[0]
    wide = predicted(replace(work, optimizer="adamw"), plan)
    assert figures.optimizer_bytes[0] / wide.optimizer_bytes[0] == (6 + 8 / 256) / 12


def test_states_of_adapters_take_what_is_predicted() -> None:
    work = short(adapted(hidden=256, ffn=512, layers=2, kv_heads=4, precision="bf16"))
    plan = Plan(micro_batches=2, stages=(stage(2, data_parallel=2, zero=1),))
    for state in states_of(work, plan):
        held = state.held_bytes()["optimizer"]
        assert held == predicted(work, plan).optimizer_bytes[0]


def test_a_step_moves_codes_and_scales_beside_masters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the host's lanes, once there and once back, all that is predicted to be away."""
    work, moved = short(workload(hidden=256, ffn=512, vocab=256, layers=2, precision="bf16")), [0]
    plan = Plan(micro_batches=2, stages=(stage(2, micro_batch=4, offload=ratios(0, 0, 0.5, 0)),))
    staged = Swaps._staged

    def counted(swaps: Swaps, op: Op) -> list[tuple[Split, Tensor]]:
        pairs = staged(swaps, op)
        moved[0] += size(buffer for _, buffer in pairs)
        return pairs

    monkeypatch.setattr(Swaps, "_staged", counted)
    executor = alone(work, plan, "eager", TRAINING)
    worlds.run_step(executor, work, executor.connections, 0)
    moved[0] = 0
    worlds.run_step(executor, work, executor.connections, 1)
    assert moved[0] == 2 * predicted(work, plan).host_bytes[0]


@pytest.mark.slow
def test_an_iteration_takes_what_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer, "CHUNK", 2**17)
    work, offload = short(workload("llama", batch=4, **SIZES)), ratios(0, 0, 0.37, 0)
    plan = Plan(micro_batches=2, stages=(stage(micro_batch=2, offload=offload),))
    taken = taken_bytes(work, plan, isolated(plan, 0, CPU, 0))
    assert_predicted(taken, predicted(work, plan).peak_bytes[0], offload)


# Checkpoints.


class World:
    """All ranks of a plan as threads, which save and resume."""

    def __init__(self, work: Workload, plan: Plan) -> None:
        self.work, self.plan = work, plan

    def run(self, path: Path, *, resumes: bool, steps: range) -> tuple[list[float], dict[str, Any]]:
        """The losses of steps, and all weights and moments after them."""

        def rank_of(rank: int, meeting: Meeting) -> tuple[list[float], Executor]:
            connections = connected(
                *(self.plan, rank, thread_groups(meeting, rank)),
                tied=self.work.model.head_has_table,
            )
            streams = SimulatedStreams()
            executor = begun(self.work, self.plan, connections, streams, TRAINING)
            if resumes:
                read(executor, path)
            losses = [
                worlds.run_step(executor, self.work, connections, step).loss for step in steps
            ]
            executor.flush()
            return [one for one in losses if one is not None], executor

        results = run_threads(self.plan.num_gpus, rank_of)
        executors = [executor for _, executor in results]
        return results[0][0], dict(stored(executors))


def read(executor: Executor, path: Path) -> None:
    """Read a checkpoint on a rank that is a thread."""
    counts = checkpoint._counts_of(executor)
    every = [*boxes.boxes_of(executor, written=False), counts]
    checkpoint._read(executor, path, boxes.scales_of(every), scales_only=True)
    checkpoint._read(executor, path, every)
    executor.set_counts(counts.values)


def stored(executors: list[Executor]) -> Iterator[tuple[str, Tensor]]:
    """What checkpoints would have of all ranks, put together."""
    whole: dict[str, Tensor] = {}
    for executor in executors:
        for box in boxes.boxes_of(executor, written=True):
            values = box.values if box.coded is None else box.coded.values()
            target = whole.setdefault(box.name, torch.full(box.whole, float("nan")))
            place = zip(box.offsets, values.shape, strict=True)
            target[tuple(slice(at, at + length) for at, length in place)] = values
    return iter(whole.items())


# Rows are cut unlike blocks are: 96 of 24 values, of which blocks begin within rows.
UNEVEN = {"hidden": 24, "heads": 2, "ffn": 40, "vocab": 96}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float], dict[str, Tensor]]:
    """A checkpoint after two steps, losses of the two that follow, and the state after these."""
    torch.set_num_threads(1)
    work = short(workload(**UNEVEN))
    executor = alone(work, PLANS["alone"], "eager", TRAINING)
    for step in range(2):
        worlds.run_step(executor, work, executor.connections, step)
    with pytest.MonkeyPatch.context() as patch:
        # Boxes of few rows, between which blocks are cut.
        patch.setattr(boxes, "MOST_BYTES", 1000)
        path = checkpoint.save(executor, tmp_path_factory.mktemp("coded"))
    losses = [
        worlds.run_step(executor, work, executor.connections, step).loss for step in range(2, 4)
    ]
    executor.flush()
    return path, [one for one in losses if one is not None], dict(stored([executor]))


@pytest.mark.parametrize("name", sweep(["all at once", "alone", "ZeRO-3", "stages"], first=3))
def test_another_plan_goes_on_from_a_checkpoint(
    name: str, saved: tuple[Path, list[float], dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where ranks do not split tensors, blocks are the same, and so are moments, to the bit."""
    path, losses, after = saved
    monkeypatch.setattr(boxes, "MOST_BYTES", 700)
    world = World(short(workload(**UNEVEN)), PLANS[name])
    resumed = world.run(path, resumes=True, steps=range(0))[1]
    with_codes = dict(stored_in(path))
    for tensor, values in with_codes.items():
        near = torch.equal(resumed[tensor], values)
        assert near or (ranks_of(world.plan) > 1 and tensor.startswith("moment")), tensor
    again, now = world.run(path, resumes=True, steps=range(2, 4))
    np.testing.assert_allclose(again, losses, rtol=1e-6 if ranks_of(world.plan) == 1 else 1e-5)
    if name == "alone":
        assert again == losses
        assert all(torch.equal(now[tensor], values) for tensor, values in after.items())


def stored_in(path: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a checkpoint, which have 32 bits."""
    executor = alone(replace(workload(**UNEVEN), optimizer="adamw"), PLANS["alone"], "eager")
    checkpoint.load(executor, path)
    return stored([executor])


def test_moments_of_other_bits_go_on_from_codes_and_codes_from_them(
    saved: tuple[Path, list[float], dict[str, Tensor]], tmp_path: Path
) -> None:
    path, losses, _ = saved
    work = workload(**UNEVEN)
    executors = {
        kind: alone(replace(work, optimizer=kind), PLANS["alone"], "eager", TRAINING)  # type: ignore[arg-type]
        for kind in ("adamw", "adamw-8bit")
    }
    checkpoint.load(executors["adamw"], path)
    back = checkpoint.save(executors["adamw"], tmp_path)
    checkpoint.load(executors["adamw-8bit"], back)
    for executor in executors.values():
        reports = [worlds.run_step(executor, work, executor.connections, step) for step in (2, 3)]
        assert [report.loss for report in reports] == losses


# Many steps.


def noisy(work: Workload, step: int) -> Tensor:
    """Sequences of which four in five tokens follow from the one before."""
    draw = torch.Generator().manual_seed(step)
    rows = torch.randint(64, (work.global_batch, work.sequence_length + 1), generator=draw)
    follows = torch.rand(rows.shape, generator=draw) < 0.8
    for at in range(1, rows.shape[1]):
        rows[:, at] = torch.where(follows[:, at], (5 * rows[:, at - 1] + 3) % 64, rows[:, at])
    return rows


def test_two_hundred_steps_end_as_those_of_moments_of_32_bits() -> None:
    """The mean loss of the last 20 within two thousandths, after it has fallen to a third."""
    training = Training(learning_rate=3e-3, clip_norm=1.0, warmup_steps=20)
    plan = Plan(micro_batches=1, stages=(stage(1, micro_batch=8),))
    usual, means = workload("llama", vocab=64, layers=1), []
    for work in (usual, short(usual)):
        executor, losses = alone(work, plan, "eager", training), []
        for step in range(200):
            rows = noisy(work, step)
            executor.iterate([(rows[:, :-1], rows[:, 1:])])
            losses.append(executor.report().loss)
        assert np.mean(losses[-20:]) < losses[0] / 2.5
        means.append(np.mean(losses[-20:]))
    assert means[0] != means[1] == pytest.approx(means[0], rel=2e-3)


# What is refused.


TIED = {"tied_embeddings": True, "hidden": 40, "vocab": 100}


def test_copies_of_a_tied_table_in_different_blocks_are_refused() -> None:
    """Where ranks cut the table at multiples of a block, or alike, the copies stay equal."""
    stages = stage(2, micro_batch=4, tensor_parallel=2), stage(2, micro_batch=4)
    plan = Plan(micro_batches=2, stages=stages)
    work = short(workload("llama", **TIED))
    with pytest.raises(
        InputError, match=r"adamw-8bit .* 2 tensor-parallel .* same tensor_parallel"
    ):
        check_runnable(Job(workload=work, cluster=CLUSTER, plan=plan))
    even = short(workload("llama", tied_embeddings=True, vocab=128))
    alike = replace(plan, stages=stages[:1] * 2)
    for one, other in ((even, plan), (work, alike), (replace(work, optimizer="adamw"), plan)):
        check_runnable(Job(workload=one, cluster=CLUSTER, plan=other))
    assert_trains_as_plainly(even, plan, TRAINING)
