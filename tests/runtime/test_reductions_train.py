"""Ranks that communicate less train as plain loops do, keep what they remember in checkpoints, and
send the bytes that costs count."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from mistlab.core.values import InputError  # noqa: E402
from mistlab.plan.plan import Plan  # noqa: E402
from mistlab.plan.workload import Workload  # noqa: E402
from mistlab.reduction.compression import Compressor  # noqa: E402
from mistlab.reduction.compressors import compressed  # noqa: E402
from mistlab.reduction.reduction_text import reduction_named  # noqa: E402
from runtime.checkpoints import checkpoint  # noqa: E402
from runtime.comm.replicas import ReplicaRanks, connected_replicas  # noqa: E402
from runtime.engine.executor import Executor, Report  # noqa: E402
from runtime.engine.streams.device_streams import SimulatedStreams  # noqa: E402
from runtime.engine.training import Training  # noqa: E402
from runtime.engine.work.compressed import message_of, packed, unpacked, vector_of  # noqa: E402
from runtime.engine.work.gradient_averages import GradientAverages, drawing  # noqa: E402
from tests.runtime.plain_reductions import Draws, LayerNames, PlainWorkers  # noqa: E402
from tests.runtime.thread_ranks import Meeting, run_threads  # noqa: E402
from tests.runtime.worlds import (  # noqa: E402
    CPU,
    STEPS,
    TOLERANCE,
    TRAINING,
    begun,
    plainly,
    sequences,
    stage,
    thread_groups,
    whole_weights,
    workload,
)
from tests.sweep import sweep  # noqa: E402

# Adam divides by a number that hardly depends on gradients: its steps add up as gradients do.
LINEAR = Training(learning_rate=1.0, epsilon=1e4, weight_decay=0.0)
BATCH = 24


def work_of(text: str, **fields: Any) -> Workload:
    fields = {"layers": 2, "batch": BATCH, **fields}
    return replace(workload("llama", **fields), reduction=reduction_named(text))


def plan_of(ranks: int, **fields: Any) -> Plan:
    own = stage(2, data_parallel=ranks, micro_batch=BATCH // (2 * ranks), **fields)
    return Plan(micro_batches=2, stages=(own,))


class Ran:
    """A run of all ranks as threads; each keeps its executor, for what comes next."""

    def __init__(
        self,
        work: Workload,
        plan: Plan,
        training: Training = TRAINING,
        *,
        steps: int = STEPS,
        begin: Callable[[Executor], None] = lambda _: None,
        end: Callable[[Executor], None] = Executor.flush,
    ) -> None:
        self.work, self.replicas = work, ReplicaRanks.of(plan, work)

        def rank_of(rank: int, meeting: Meeting) -> tuple[list[Report], Executor]:
            connections = connected_replicas(plan, work, rank, thread_groups(meeting, rank))
            streams = SimulatedStreams(progress="random", seed=rank)
            own = begun(work, self.replicas.plan, connections, streams, training)
            begin(own)
            reports = [self._step(own, plan) for _ in range(steps)]
            end(own)
            return reports, own

        results = run_threads(plan.num_gpus, rank_of)
        self.reports = [reports for reports, _ in results]
        self.executors = [own for _, own in results]

    def _step(self, own: Executor, plan: Plan) -> Report:
        place, replica = own.connections.place, own.connections.peers.rank
        data = self.replicas.sequences_of(replica, place.stage, place.data)
        one, whole, batches = plan.stages[place.stage], sequences(self.work, own.steps), []
        for number in range(plan.micro_batches):
            first = (number * one.data_parallel + data) * one.micro_batch
            rows = whole[first : first + one.micro_batch]
            batches.append((rows[:, :-1], rows[:, 1:]))
        own.iterate(batches)
        return own.report()

    def weights(self, replica: int = 0) -> dict[str, Tensor]:
        """The weights of a replica."""
        of_it = [one for one in self.executors if one.connections.peers.rank == replica]
        return whole_weights(self.work, of_it)

    @property
    def losses(self) -> list[float | None]:
        for reports in self.reports:
            assert reports == self.reports[0]
        return [report.loss for report in self.reports[0]]

    @property
    def layers(self) -> LayerNames:
        """Where each layer's parameters begin in its vector."""
        own = self.executors[0]
        return {
            layer: (
                {own.layers[layer].prefix + one.name: one.offset for one in state.layout.entries},
                state.layout.numel,
            )
            for layer, state in own.state.layers.items()
        }


def assert_weights(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, tensor in expected.items():
        error = (found[name] - tensor).norm() / tensor.norm()
        assert error <= TOLERANCE, f"{name}: {error:.2e}"


def assert_like_plain_loops(ran: Ran, workers: PlainWorkers) -> None:
    np.testing.assert_allclose(ran.losses, workers.losses, rtol=TOLERANCE)
    for replica in range(ran.replicas.count):
        assert_weights(ran.weights(replica), workers.weights[replica])


SENT_LESS = [
    ("all_reduce:compressor=top_k,share=0.1,feedback=neolithic,rounds=3", 2, 0),
    ("all_reduce:compressor=top_k,share=0.2,feedback=ef21", 3, 1),
    ("all_reduce:compressor=power,rank=2,feedback=memory", 3, 0),
    ("server:shards=2,compressor=sign,feedback=double", 3, 0),
    ("all_reduce:trimmed=1,liars=2", 4, 0),
    ("server:shards=2,trimmed=1,liars=0", 3, 0),
    ("all_reduce:compressor=qsgd,levels=9", 3, 0),
    ("all_reduce:compressor=top_k,share=0.1,feedback=memory", 3, 0),
    ("all_reduce:compressor=top_k,share=0.1", 2, 1),
    ("all_reduce:compressor=sign,feedback=double", 2, 0),
    ("all_reduce:compressor=qsgd,feedback=memory", 2, 1),
    ("all_reduce:compressor=power,rank=1,feedback=double", 2, 1),
    ("server:compressor=top_k,share=0.1,feedback=memory", 3, 0),
    ("server:shards=3,compressor=top_k,share=0.2,feedback=ef21", 3, 0),
    ("server:shards=2,compressor=top_k,share=0.1,feedback=neolithic", 2, 0),
    ("server:shards=2", 3, 0),
]


@pytest.mark.parametrize(("text", "ranks", "zero"), sweep(SENT_LESS, first=6))
def test_gradients_that_are_sent_less_train_as_plain_loops(
    text: str, ranks: int, zero: int
) -> None:
    work, plan = work_of(text), plan_of(ranks, zero=zero)
    ran = Ran(work, plan)
    workers = PlainWorkers(work, ranks, plan.micro_batches, TRAINING)
    for step in range(STEPS):
        workers.gradients(step)
        workers.reduce(step, ran.layers)
        workers.step()
    np.testing.assert_allclose(ran.losses, workers.losses, rtol=TOLERANCE)
    assert_weights(ran.weights(), workers.weights[0])


SCALED = [
    "all_reduce:compressor=qsgd,feedback=memory",
    "all_reduce:compressor=top_k,share=0.1,feedback=double",
    "all_reduce:compressor=sign,feedback=memory",
    "all_reduce:compressor=power,rank=2,feedback=double",
    "all_reduce:compressor=top_k,share=0.2,feedback=ef21",
    "server:shards=2,compressor=sign,feedback=neolithic",
    "server:shards=3",
]


@pytest.mark.parametrize("text", sweep(SCALED, first=3))
def test_a_step_whose_gradients_overflow_leaves_what_ranks_remember(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank's gradients of one layer overflow in the second step, which all ranks skip; training
    is that of plain loops without a loss scale that leave the step out."""
    ranks = 3
    work, plan = work_of(text), plan_of(ranks)
    average = GradientAverages.average

    def poisoned(own: GradientAverages, layer: int, whole: Tensor) -> Any:
        if (own.group.rank, layer, own.step) == (1, max(own.sizes), 1):
            whole[3] = float("inf")
        return average(own, layer, whole)

    monkeypatch.setattr(GradientAverages, "average", poisoned)
    ran = Ran(work, plan, replace(TRAINING, loss_scale=2.0**8), steps=4)
    assert [report.skipped for report in ran.reports[0]] == [False, True, False, False]
    assert ran.reports[0][-1].loss_scale == 2.0**7
    workers = PlainWorkers(work, ranks, plan.micro_batches, TRAINING)
    for step in (0, 1, 2, 3):
        workers.gradients(step)
        if step != 1:
            workers.reduce(step, ran.layers)
            workers.step()
    np.testing.assert_allclose(ran.losses, workers.losses, rtol=TOLERANCE)
    assert_weights(ran.weights(), workers.weights[0])


def test_a_replica_skips_steps_of_its_own_also_after_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, plan, share = work_of("local:every=2"), plan_of(3), Executor._share
    training = replace(TRAINING, loss_scale=2.0**8)

    def poisoned(own: Executor, weight: float = 1.0) -> Tensor:
        overflows = (own.connections.peers.rank, own.steps) == (1, 1)
        return share(own, weight) * (float("inf") if overflows else 1.0)

    with monkeypatch.context() as changed:
        changed.setattr(Executor, "_share", poisoned)
        ran = Ran(work, plan, training, steps=3)
    skipped = [[report.skipped for report in reports] for reports in ran.reports]
    assert skipped == [[False] * 3, [False, True, False], [False] * 3]
    workers = PlainWorkers(work, 3, plan.micro_batches, TRAINING)
    for step in range(3):
        workers.gradients(step)
        for worker, optimizer in enumerate(workers.optimizers):
            if (worker, step) != (1, 1):
                optimizer.step()
        if step == 1:
            complete = reduction_named("gossip:topology=complete")
            workers.work = replace(work, reduction=complete)
            workers.mix(step)
    np.testing.assert_allclose([one.loss for one in ran.reports[0]], workers.losses, rtol=TOLERANCE)
    for replica in range(3):
        assert_weights(ran.weights(replica), workers.weights[replica])
    path = written(ran, tmp_path, monkeypatch)
    again = Ran(work, plan, training, steps=0, begin=lambda own: read(own, path))
    for own, before in zip(again.executors, ran.executors, strict=True):
        assert torch.equal(own.counts(), before.counts())
    scales = [own.scaling.scale.item() for own in again.executors]
    assert scales == [2.0**8, 2.0**7, 2.0**8]


TURNS = ["server:asynchronous=true", "server:asynchronous=true,compressor=qsgd,levels=9,liars=2"]


@pytest.mark.parametrize("text", sweep(TURNS, first=1))
def test_a_server_that_waits_for_no_rank_steps_with_each_in_turn(text: str) -> None:
    work, plan = work_of(text), plan_of(3)
    ran = Ran(work, plan, steps=4)
    workers = PlainWorkers(work, 3, plan.micro_batches, TRAINING)
    for step in range(4):
        workers.gradients(step)
        workers.serve(step, ran.layers)
    np.testing.assert_allclose(ran.losses, workers.losses, rtol=TOLERANCE)
    for rank, own in enumerate(ran.executors):
        of_rank = whole_weights(work, [own])
        assert_weights(of_rank, workers.weights[rank])


AVERAGED = [
    ("gossip:topology=one_peer", 3),
    ("outer:every=4,fragments=2,delay=1,mixed=0.25", 2),
    ("local:every=2", 3),
    ("gossip:topology=ring", 4),
    ("gossip:offsets=1", 3),
    ("outer:every=2,rate=0.5,momentum=0.9", 2),
    ("outer:every=3,fragments=3,momentum=0.0", 3),
]


@pytest.mark.parametrize(("text", "ranks"), sweep(AVERAGED, first=3))
def test_weights_are_averaged_as_in_plain_loops(text: str, ranks: int) -> None:
    work, plan = work_of(text), plan_of(ranks)
    # Each fragment takes two outer steps.
    ran = Ran(work, plan, steps=7)
    assert_like_plain_loops(ran, plain_averages(ran, ranks, plan.micro_batches, 7))


def plain_averages(ran: Ran, count: int, micro_batches: int, steps: int) -> PlainWorkers:
    workers = PlainWorkers(ran.work, count, micro_batches, TRAINING)
    how = ran.work.reduction
    for step in range(steps):
        workers.gradients(step)
        workers.step()
        if how.kind == "gossip":
            workers.mix(step)
        elif how.kind == "outer":
            workers.outer(step + 1, ran.layers)
        elif (step + 1) % how.every == 0:
            complete = replace(how, kind="gossip", topology="complete", every=1)
            workers.work = replace(ran.work, reduction=complete)
            workers.mix(step)
    return workers


@pytest.mark.parametrize("zero", sweep([3, 0], first=1))
def test_replicas_of_several_ranks_take_outer_steps(zero: int) -> None:
    text = "outer:every=2,replicas=2,momentum=0.5"
    plan = Plan(
        micro_batches=2,
        stages=(
            stage(1, data_parallel=4, micro_batch=2, zero=zero),
            stage(1, data_parallel=2, micro_batch=4),
        ),
    )
    work = work_of(text, batch=16)
    ran = Ran(work, plan, steps=4)
    names = plain_names(work)
    workers = PlainWorkers(work, 2, plan.micro_batches, TRAINING)
    for step in range(4):
        workers.gradients(step)
        workers.step()
        workers.outer(step + 1, names)
    for replica in range(2):
        assert_weights(ran.weights(replica), workers.weights[replica])


def plain_names(work: Workload) -> LayerNames:
    """All names as those of one layer, for outer steps of whole models."""
    return {0: (dict.fromkeys(PlainWorkers(work, 1, 1, TRAINING).shared, 0), 0)}


SAME = [
    ("all_reduce:compressor=top_k,share=1.0,feedback=neolithic", TRAINING),
    ("gossip:topology=complete", LINEAR),
    ("server:shards=2", TRAINING),
    ("all_reduce:compressor=top_k,share=1.0,feedback=memory", TRAINING),
    ("local:every=1", LINEAR),
    ("outer:every=1,rate=1.0,momentum=0.0", LINEAR),
]


@pytest.mark.parametrize(("text", "training"), sweep(SAME, first=2))
def test_with_all_ranks_in_every_step_and_nothing_cut_off_it_is_the_plain_run(
    text: str, training: Training
) -> None:
    work = work_of(text)
    ran = Ran(work, plan_of(3), training)
    expected = plainly(replace(work, reduction=reduction_named("all_reduce")), training)
    np.testing.assert_allclose(ran.losses, expected.losses, rtol=TOLERANCE)
    assert_weights(ran.weights(), expected.weights)


def test_every_axis_goes_with_compressed_gradients() -> None:
    text = "all_reduce:compressor=top_k,share=1.0,feedback=double"
    work = work_of(text, batch=16, tied_embeddings=True)
    plan = Plan(
        micro_batches=2,
        stages=(
            stage(1, data_parallel=2, micro_batch=4, tensor_parallel=2, zero=1),
            stage(1, data_parallel=2, micro_batch=4, checkpointed_layers=1),
        ),
    )
    ran = Ran(work, plan, replace(TRAINING, clip_norm=0.3))
    plain = replace(work, reduction=reduction_named("all_reduce"))
    expected = plainly(plain, replace(TRAINING, clip_norm=0.3))
    np.testing.assert_allclose(ran.losses, expected.losses, rtol=TOLERANCE)
    assert_weights(ran.weights(), expected.weights)


def test_outer_changes_of_few_bits_are_rounded_to_them() -> None:
    found = {}
    for bits in (32, 8, 4):
        work = work_of(f"outer:every=2,momentum=0.0,outer_bits={bits}")
        found[bits] = Ran(work, plan_of(2), steps=2).weights()
    begun_with = PlainWorkers(work, 1, 1, TRAINING).shared
    for name, exact in found[32].items():
        change = (exact - begun_with[name]).abs().max()
        for bits in (8, 4):
            # Half a step of each rank's largest change in its layer.
            off = (found[bits][name] - exact).abs().max()
            assert off <= 10 * change / (2 ** (bits - 1) - 1)
    assert any((found[4][name] - found[32][name]).abs().max() > 0 for name in begun_with)


KEPT = [
    "all_reduce:compressor=top_k,share=0.1,feedback=double",
    "outer:every=4,fragments=2,delay=1",
    "server:compressor=sign,feedback=memory",
    "server:asynchronous=true,compressor=top_k,share=0.3",
    "local:every=3",
]


@pytest.mark.parametrize("text", sweep(KEPT, first=2))
def test_a_run_goes_on_from_a_checkpoint_as_if_it_had_never_stopped(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, plan = work_of(text), plan_of(2)
    whole = Ran(work, plan, steps=5)
    ran = Ran(work, plan, steps=2)
    path = written(ran, tmp_path, monkeypatch)
    begin = lambda own: read(own, path)  # noqa: E731
    again = Ran(work, plan, steps=3, begin=begin)
    assert again.losses == whole.losses[2:]
    for replica in range(ran.replicas.count):
        expected = whole.weights(replica)
        for name, tensor in again.weights(replica).items():
            assert torch.equal(tensor, expected[name]), name


def test_a_checkpoint_without_what_ranks_remember_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Ran(work_of("all_reduce"), plan_of(2), steps=1)
    path = written(plain, tmp_path, monkeypatch)
    for text in KEPT[:4]:
        own = Ran(work_of(text), plan_of(2), steps=0).executors[1]
        problem = checkpoint._problem_of(own, path)
        assert isinstance(problem, InputError)
        assert "give a checkpoint of a run with equal workload.reduction" in str(problem)


def written(ran: Ran, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint with the boxes of all ranks, as one process writes it."""
    boxes = [box for own in ran.executors for box in kept_boxes(own)]
    first = ran.executors[0]
    monkeypatch.setattr(checkpoint, "boxes_of", lambda *_, **__: boxes)
    monkeypatch.setattr(checkpoint, "boxes_of_averages", lambda _: [])
    path = checkpoint.save(first, folder)
    monkeypatch.undo()
    return path


def kept_boxes(own: Executor) -> Iterator[checkpoint.Box]:
    yield from checkpoint.boxes_of(own, written=True)
    yield from checkpoint.boxes_of_averages(own)


def read(own: Executor, path: Path) -> None:
    checkpoint.load(own, path)


@pytest.mark.parametrize(
    "how",
    [
        Compressor(),
        Compressor(kind="top_k", share=0.1),
        Compressor(kind="sign"),
        Compressor(kind="qsgd", levels=5),
        Compressor(kind="qsgd", levels=2),
        Compressor(kind="power", rank=3),
    ],
    ids=lambda how: f"{how.kind}-{how.levels}",
)
@pytest.mark.parametrize("size", [1, 7, 1003])
def test_a_message_has_the_bytes_that_costs_count_and_says_the_vector(
    how: Compressor, size: int
) -> None:
    vector = torch.randn(size, generator=torch.Generator().manual_seed(size))
    message = message_of(how, vector, drawing(CPU, 1, 2, 3))
    assert message.dtype == torch.uint8
    assert len(message) == how.sent_bytes(size)
    read_back = vector_of(how, message, size)
    expected = compressed(how, vector.double().numpy(), Draws([(1, 2, 3)]))  # type: ignore[arg-type]
    np.testing.assert_allclose(read_back.numpy(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("bits", [1, 3, 4, 11, 31])
def test_codes_come_out_of_bytes_as_they_went_in(bits: int) -> None:
    codes = torch.randint(0, 2**bits, (1003,), generator=torch.Generator().manual_seed(bits))
    message = packed(codes, bits)
    assert len(message) == -(-1003 * bits // 8)
    assert torch.equal(unpacked(message, bits, 1003), codes)


def test_held_bytes_are_those_of_the_prediction() -> None:
    for text, name, each in (
        ("all_reduce:compressor=top_k,feedback=double", "buffers", 8),
        ("outer:every=4,delay=1", "optimizer", 12),
    ):
        own = Ran(work_of(text), plan_of(2), steps=1).executors[0]
        plain = Ran(work_of("all_reduce"), plan_of(2), steps=1).executors[0]
        parameters = sum(one.layout.numel for one in own.state.layers.values())
        assert own.held_bytes()[name] - plain.held_bytes()[name] == each * parameters


PLAN = """
workload:
  model: {family: llama, hidden: 64, layers: 2, heads: 4, vocab: 256}
  sequence_length: 32
  global_batch: 8
  attention: flash
  precision: fp32
  reduction: REDUCTION
cluster: {hardware: l4-24gb, nodes: 1, gpus_per_node: 4}
plan:
  micro_batches: 1
  stages: [{layers: 2, data_parallel: 4, tensor_parallel: 1, micro_batch: 2, zero: ZERO}]
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reduction", "zero"),
    [
        ("{kind: outer, every: 2, replicas: 2}", 3),
        ("{compressor: {kind: top_k}, feedback: neolithic}", 1),
        ("{kind: gossip}", 0),
    ],
)
def test_processes_go_on_from_their_checkpoint(reduction: str, zero: int, tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(PLAN.replace("REDUCTION", reduction).replace("ZERO", str(zero)))
    whole = losses_of(plan, "--steps", "4")
    assert len(whole) == 4
    out = tmp_path / "out"
    first = losses_of(plan, "--steps", "2", "--out", str(out), "--save-every", "2")
    rest = losses_of(plan, "--steps", "2", "--resume", str(out / "checkpoints"))
    assert [*first, *rest] == whole


def losses_of(plan: Path, *line: str) -> list[float]:
    """The losses of a run of four processes over gloo."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "4", "-m", "experiments.run_plan", str(plan)]
    done = subprocess.run(
        [*command, "--device", "cpu", "--json", *line],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    said = re.findall(r"step \d+  loss (\S+)", done.stderr)
    return [float(one) for one in said]
