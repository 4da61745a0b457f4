"""Runs a plan: a ``Session`` is one process's part of a run, from connecting to disconnecting."""

import platform
import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Self

import torch
from torch import Tensor

from mistlab.job.job import Job
from mistlab.job.prediction import Clocks, Environment
from mistlab.schedule.slots import Action
from mistlab.stages.plan_orders import ends_of_plan
from runtime.batches_ahead import BatchesAhead
from runtime.checkpoints.checkpoint import latest
from runtime.checkpoints.exported_weights import export
from runtime.checkpoints.huggingface_weights import (
    TensorFolder,
    check_checkpoint,
    load_weights,
    rewrite,
)
from runtime.comm.group import Shortage, ShortageError, refusals
from runtime.comm.processes import World, device_of, gathered, join, leave, maker, world_of_launcher
from runtime.comm.replicas import ReplicaRanks, connected_replicas
from runtime.comm.topology import Connections, Topology, isolated
from runtime.data import Sequences, Synthetic, batches_of, open_tokens
from runtime.devices.cuda import driver_of
from runtime.devices.driver import DevicePeaks
from runtime.devices.outside import Cap, outside_bytes
from runtime.document_batches import check_filling, documents_of, packed_batches
from runtime.documents import Documented, PackedSequences
from runtime.engine.captured_steps import CapturedSteps, check_captures, own_compute
from runtime.engine.executor import Batches, Executor, Report
from runtime.engine.streams.device_streams import CudaStreams, streams_of
from runtime.engine.task_names import full_name
from runtime.engine.training import Training
from runtime.failure import let_go
from runtime.models.attention_kernel import AttentionKernel, check_kernel, settle_kernel
from runtime.profiling.environment import clocks_of
from runtime.profiling.node_checks import check_gpus
from runtime.runnable import check_documents, check_norms, check_started
from runtime.tensor_cores import products_in
from runtime.threads import with_share

KIBIBYTE = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How to run a plan; ``data`` is a file of tokens, or None for random tokens.

    ``serialises``: no two tasks of a CUDA device overlap, for comparison. ``stage``: only this
    stage of the plan runs. ``kernel``: the implementation of fused attention. ``draws_on_device``:
    the initial weights are drawn on the device, which is faster, but a GPU draws other values than
    a CPU. ``weights``: the initial weights come from this Hugging Face folder. ``captures``:
    iterations are replayed as one CUDA graph, without times of tasks. ``documents``: how sequences
    are made of documents.
    """

    device: str
    data: Path | None
    seed: int
    timeout_s: float
    training: Training
    serialises: bool = False
    stage: int | None = None
    kernel: AttentionKernel = "flash"
    draws_on_device: bool = False
    weights: Path | None = None
    captures: bool = False
    documents: Documented | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """The peaks of a rank's memory; ``host_bytes`` is the host memory of offloaded tensors.

    ``outside_bytes`` are bytes of the device outside torch's allocator: of the CUDA context,
    libraries and communicators. ``allocator_retries`` counts how often CUDA's allocator had to free
    its cache.
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    outside_bytes: int
    host_bytes: int
    allocator_retries: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTask:
    """A task of the last iteration, timed from the start of the rank's first task."""

    stage: int
    task: Action | str
    lane: str
    start_s: float
    end_s: float


class Session:
    """One process's part of a run: connects, trains steps, writes checkpoints, and disconnects."""

    def __init__(self, job: Job, settings: Settings, world: World, device: torch.device) -> None:
        self.job, self.settings = job, settings
        self.world, self.device = world, device
        self._sequences = _sequences(job, settings)
        self._packed = _packed(job, settings, self._sequences)
        self._replicas = ReplicaRanks.of(job.plan, job.workload)
        connections = _connections(job, settings, world, device)
        self._cap = Cap(job.cluster, device)
        self._streams = streams_of(device, serialises=settings.serialises)
        self._executor = Executor(
            job.workload,
            self._replicas.plan,
            connections,
            self._streams,
            replace(settings.training, dropout_seed=settings.seed),
            device=device,
            seed=None if settings.draws_on_device or settings.weights else settings.seed,
        )
        if settings.weights is not None:
            load_weights(self._executor, TensorFolder(settings.weights), settings.seed)
        elif settings.draws_on_device:
            self._executor.draw_on_device(settings.seed)
            if (driver := driver_of(device)) is not None:
                # Peaks of memory are counted from here on, since drawing the weights took memory
                # that iterations do not take.
                driver.count_anew(device)
        self._batches = BatchesAhead(self._own_sequences, device)
        self._captured: CapturedSteps | None = None
        if settings.captures:
            assert isinstance(self._streams, CudaStreams)
            self._captured = CapturedSteps(self._executor, self._streams)
        self._spans: list[tuple[float, float]] = []
        self._is_new = True

    @classmethod
    @contextmanager
    def started(cls, job: Job, settings: Settings) -> Iterator[Self]:
        """Connect this process to the others; disconnects it at the end, also after an error."""
        world = world_of_launcher()
        check_started(job, settings.stage, world.size)
        check_norms(job.plan, job.workload, settings.training.norm_option)
        if settings.weights is not None:
            check_checkpoint(job.workload, TensorFolder(settings.weights))
        check_kernel(
            settings.kernel,
            device=settings.device,
            precision=job.workload.precision,
            attention=job.workload.attention,
        )
        if settings.captures:
            check_captures(job, settings.training, settings.device)
        if settings.documents is not None:
            check_documents(
                job, settings.device, kernel=settings.kernel, captures=settings.captures
            )
            check_filling(job, settings.documents.filling)
        device = device_of(settings.device, world)
        check_gpus(
            [device],
            ranks=world.size,
            precision=job.workload.precision,
            option="workload.precision",
        )
        Cap.share(job.cluster, device, outside_bytes(device))
        settle_kernel(settings.kernel, device)
        session = None
        with (
            with_share(job.cluster.hardware.gpu.cores if device.type == "cpu" else None),
            own_compute(device, captures=settings.captures),
            products_in(job.workload.precision),
        ):
            try:
                session = cls._joined(job, settings, world, device)
                yield session
                session._executor.release()
                session._batches.release()
            except BaseException:
                let_go(device, None if session is None else session._streams)
                raise
            session._streams.close()
            leave(world)

    @classmethod
    def _joined(cls, job: Job, settings: Settings, world: World, device: torch.device) -> Self:
        try:
            with refusals():
                join(world, device, settings.timeout_s)
                return cls(job, settings, world, device)
        except MemoryError as error:
            stage = settings.stage
            if stage is None:
                stage = Topology(plan=job.plan).place(world.rank).stage
            raise _shortage(stage, "its start", {}, device, error) from error

    @property
    def is_first(self) -> bool:
        """Whether this rank prints and writes for all ranks."""
        return self.world.rank == 0

    @property
    def steps(self) -> int:
        """The number of optimizer steps done, including those before a resumed checkpoint."""
        return self._executor.steps

    def step(self) -> tuple[Report, float]:
        """Train one step; returns its report, and the seconds that it took."""
        self._streams.spans()
        start = perf_counter()
        executor = self._executor
        with self._watched():
            self._iterate(self._batches.of(self.steps))
            # Make the next batches now, while the device works and the host is free.
            self._batches.prepare(self.steps)
            report = executor.report()
        seconds = perf_counter() - start
        if self._is_new:
            # Memory outside the allocator is measured after the first step, in which libraries load
            # kernels and NCCL allocates memory for each algorithm.
            self._cap.measure()
            self._is_new = False
        self._spans = self._streams.spans()
        if self.settings.stage not in (None, ends_of_plan(self.job.plan)[1]):
            report = replace(report, loss=None)
        return report, seconds

    def _iterate(self, batches: Batches) -> None:
        if self._packed is None:
            (self._captured or self._executor).iterate(batches)
            return
        at = self._own_place()
        documents = documents_of(self._packed, self.job.plan, batches, step=self.steps, **at)
        self._executor.iterate(batches, documents)

    @property
    def tokens(self) -> int:
        """The number of tokens in a step, without padding."""
        packed = self._packed
        if packed is None:
            return self.job.workload.tokens
        return sum(int(row[:, 1].sum()) for row in packed.rows(max(0, self.steps - 1)))

    def save(self, folder: Path) -> Path:
        """Write a checkpoint of the run into a folder; returns the checkpoint's path."""
        from runtime.checkpoints import checkpoint  # noqa: PLC0415 (slow to import)

        with self._watched("a checkpoint"):
            return checkpoint.save(self._executor, folder)

    def resume(self, folder: Path) -> None:
        """Load the newest checkpoint of a folder, or the checkpoint that the folder itself is."""
        from runtime.checkpoints import checkpoint  # noqa: PLC0415 (slow to import)

        with self._watched("a checkpoint"):
            checkpoint.load(self._executor, latest(folder) or folder)

    def resume_latest(self, folder: Path, tell: Callable[[str], None]) -> Path | None:
        """Load the newest readable checkpoint of a folder, if it has one.

        On the first rank, ``tell`` is called about each checkpoint that cannot be read.
        """
        from runtime.checkpoints import checkpoint  # noqa: PLC0415 (slow to import)

        with self._watched("a checkpoint"):
            return checkpoint.load_latest(
                self._executor, folder, tell if self.is_first else lambda _: None
            )

    def export(self, path: Path) -> None:
        """Write the trained weights as one safetensors file."""
        with self._watched("the export"):
            export(self._executor, self.job.workload, path)

    def export_checkpoint(self, folder: Path) -> None:
        """Write the trained weights as a checkpoint in the format of the checkpoint from which they
        were loaded.
        """
        assert self.settings.weights is not None
        assert self.job.workload.train == "all"
        folder.mkdir(parents=True, exist_ok=True)
        whole = folder / "exported.safetensors"
        self.export(whole)
        if self.is_first:
            rewrite(whole, self.job.workload.model, TensorFolder(self.settings.weights), folder)
            whole.unlink()

    def memory(self) -> list[RankMemory]:
        """The peaks of all ranks' memory in this run."""
        return gathered(self._own_memory())

    def tasks(self) -> list[MeasuredTask]:
        """The last iteration's tasks, as timed on the first rank of each stage."""
        position = self._executor.connections.place
        measured: list[MeasuredTask] = []
        is_first = position.data == position.context == position.tensor == 0
        if is_first and self._executor.connections.peers.rank == 0 and self._spans:
            began = min(start for start, _ in self._spans)
            measured = [
                MeasuredTask(
                    stage=position.stage,
                    task=op.task,
                    lane=op.lane,
                    start_s=start - began,
                    end_s=end - began,
                )
                for op, (start, end) in zip(self._executor.issued, self._spans, strict=True)
            ]
        return [task for tasks in gathered(measured) for task in tasks]

    def environment(self, revision: str) -> Environment:
        """The device and the versions of software that the run uses."""
        driver = driver_of(self.device)
        return Environment(
            device=driver.name(self.device) if driver else platform.machine(),
            num_devices=self.world.size,
            python=platform.python_version(),
            torch=str(torch.__version__),
            cuda=driver.version if driver else "",
            revision=revision,
        )

    def clocks(self) -> Clocks | None:
        """The device's current clock rates; call it directly after a step."""
        return clocks_of(self.device)

    @contextmanager
    def _watched(self, doing: str | None = None) -> Iterator[None]:
        """Within the ``with`` block, raise a ``ShortageError`` if memory runs out.

        The error names ``doing``, or else the task that the executor was issuing.
        """
        executor = self._executor
        try:
            with refusals():
                yield
        except MemoryError as error:
            stage = executor.connections.place.stage
            at = doing or full_name(executor.issuing)
            raise _shortage(stage, at, executor.held_bytes(), self.device, error) from error

    def _own_sequences(self, step: int) -> Sequence[tuple[Tensor, ...]]:
        """The sequences on which this rank trains in a step: tokens and targets of each
        micro-batch. Every stage also learns which documents are packed into them.
        """
        at = self._own_place()
        if self._packed is not None:
            return packed_batches(self._packed, self.job.plan, step=step, **at)
        if at["stage"] not in ends_of_plan(self.job.plan):
            return []
        return batches_of(self._sequences, self.job, step=step, **at)

    def _own_place(self) -> dict[str, int]:
        """This rank's stage, and its data-parallel index among all ranks of the stage."""
        position = self._executor.connections.place
        replica = self._executor.connections.peers.rank
        data = self._replicas.sequences_of(replica, position.stage, position.data)
        return {"stage": position.stage, "replica": data}

    def _own_memory(self) -> RankMemory:
        """The peaks of this rank's memory in this run."""
        executor = self._executor
        driver = driver_of(self.device)
        if driver is not None:
            peaks = driver.peaks(self.device)
        else:
            # On a CPU the peaks are the executor's own count, and the process's peak memory.
            peaks = DevicePeaks(
                allocated_bytes=executor.peak_bytes,
                reserved_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIBIBYTE,
                retries=0,
            )
        return RankMemory(
            peak_allocated_bytes=peaks.allocated_bytes,
            peak_reserved_bytes=peaks.reserved_bytes,
            outside_bytes=self._cap.outside_bytes,
            host_bytes=executor.host_bytes,
            allocator_retries=peaks.retries,
        )


def _sequences(job: Job, settings: Settings) -> Sequences:
    length, vocab = job.workload.sequence_length, job.workload.model.vocab
    if settings.data is None:
        return Synthetic(length=length, vocab=vocab, seed=settings.seed)
    return open_tokens(settings.data, length=length, vocab=vocab, seed=settings.seed)


def _packed(job: Job, settings: Settings, sequences: Sequences) -> PackedSequences | None:
    """A run's documents arranged into sequences; None if it does not train on documents."""
    if settings.documents is None:
        return None
    length = job.workload.sequence_length
    return PackedSequences(
        source=settings.documents.source(sequences, length),
        filling=settings.documents.filling,
        length=length,
        count=job.workload.global_batch,
        seed=settings.seed,
        even_tokens=settings.documents.even_tokens,
    )


def _connections(job: Job, settings: Settings, world: World, device: torch.device) -> Connections:
    """This rank's groups, connected; a stage that runs alone has no other ranks."""
    if settings.stage is not None:
        return isolated(job.plan, settings.stage, device, settings.seed)
    groups = maker(world, settings.timeout_s)
    return connected_replicas(job.plan, job.workload, world.rank, groups, device=device)


def _shortage(
    stage: int,
    doing: str,
    held_bytes: Mapping[str, int],
    device: torch.device,
    error: MemoryError,
) -> ShortageError:
    shortage = Shortage(
        stage=stage,
        doing=doing,
        held_bytes=held_bytes,
        outside_bytes=outside_bytes(device),
        reason=str(error),
    )
    return ShortageError(shortage)
