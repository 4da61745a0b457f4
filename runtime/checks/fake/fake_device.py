"""A stand-in for a GPU without memory, on which the runtime's own code runs; it needs no
compiler.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import backend_registration

from mistlab.core.values import InputError, reject
from mistlab.plan.plan import Plan
from mistlab.plan.workload import Workload
from runtime.checks.fake.fake_driver import FakeDriver
from runtime.checks.fake.hidden_waits import CudaWays, HiddenWaits
from runtime.checks.fake.watch import WaitFinding, Watch
from runtime.checks.recorded_library import Messages, RecordedGroup, RecordedLibrary, RowsOfEach
from runtime.comm.library import Work
from runtime.comm.replicas import ReplicaRanks, connected_replicas
from runtime.devices.cuda import DRIVERS
from runtime.engine.captured_steps import CapturedSteps
from runtime.engine.executor import Batches, Executor
from runtime.engine.storage.saved import storage_of
from runtime.engine.streams.device_streams import CudaStreams, streams_of
from runtime.engine.training import Training

# Registers a kind of device named "sham" with torch.
#
# A process cannot unregister a kind of device. So the device says that it is not available, and
# code that looks for an accelerator, such as torch's checkpoints, does not use it. Yet from then on
# torch pins host memory through it, so a process that trains on GPUs should not register it.


SHAM = "sham"


@cache
def register() -> None:
    """Register the stand-in's kind of device with torch, once in a process."""
    setup = getattr(backend_registration, "_setup_privateuseone_for_python_backend", None)
    if setup is None:
        reject(
            f"torch {torch.__version__} cannot register a stand-in device without a compiler: "
            "install torch 2.11 to 2.13 for this check"
        )

    class Module(backend_registration._DummyBackendModule):
        def is_available(self) -> bool:
            return False

    class Hook(torch._C._acc.PrivateUse1Hooks):
        def is_available(self) -> bool:
            return False

        def has_primary_context(self, device_index: int) -> bool:
            return False

        def is_built(self) -> bool:
            return True

    try:
        setup(SHAM, backend_module=Module(), hook=Hook())
    except RuntimeError as error:
        message = (
            f"torch knows another maker's device already ({error}): run this check in a "
            "process that does not import its package"
        )
        raise InputError(message) from error


@cache
def has_own_thread() -> bool:
    """Whether autograd runs backward passes on the stand-in device in a thread of the device.

    Autograd starts its threads at the first backward pass of a process, for the devices known then.
    """
    with FakeTensorMode():
        x = torch.zeros((), device=SHAM, requires_grad=True)
        try:
            x.neg().backward()
        except RuntimeError:
            return False
    return True


# Stand-ins for the other ranks of a rank's groups, which check tensors as NCCL would.
#
# They change no tensors, since tensors without memory have no values.


@final
class CheckingRanks:
    """Stand-ins for other ranks, which record in a ``Watch`` the calls that NCCL would refuse, and
    results that would land in the wrong memory.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def all_reduce(self, group: RecordedGroup, tensor: Tensor, operation: str) -> None:
        """Check the tensor of an all-reduce; nothing is reduced."""
        self._check("all_reduce", tensor)

    def all_gather(self, group: RecordedGroup, whole: Tensor, part: Tensor) -> None:
        """Check the tensors of an all-gather and their sizes; nothing is gathered."""
        self._check("all_gather", whole, part)
        self._check_parts("all_gather", group, whole, part)

    def reduce_scatter(self, group: RecordedGroup, result: Tensor, whole: Tensor) -> None:
        """Check the tensors of a reduce-scatter and their sizes; nothing is reduced."""
        self._check("reduce_scatter", whole, result)
        self._check_parts("reduce_scatter", group, whole, result)

    def all_to_all(
        self, group: RecordedGroup, received: Tensor, sent: Tensor, rows: RowsOfEach
    ) -> None:
        """Check the tensors of an all-to-all and their numbers of rows; nothing is exchanged."""
        self._check("all_to_all", received, sent)
        for tensor, of_each in zip((received, sent), rows, strict=True):
            if len(of_each) != group.size() or sum(of_each) != tensor.shape[0]:
                detail = f"rows {of_each} are not {tensor.shape[0]} of {group.size()} ranks"
                self._watch.note("collective", "all_to_all", detail)

    def exchange(self, group: RecordedGroup, sends: Messages, receives: Messages) -> None:
        """Check the tensors and the ranks of an exchange of messages; nothing is exchanged."""
        for tensor, peer in (*sends, *receives):
            self._check("exchange", tensor)
            if peer not in group.ranks or peer == group.seen_by:
                self._watch.note("collective", "exchange", f"there is no other rank {peer}")

    def aside(self, group: RecordedGroup, call: Callable[[], None]) -> Work:
        """Make a call at once; there is no asynchronous work."""
        call()
        return _Ended()

    def _check(self, name: str, *tensors: Tensor) -> None:
        for tensor in tensors:
            if tensor.device.type == "cpu":
                self._watch.note("collective", name, "a tensor is on the CPU")
            if not tensor.is_contiguous():
                self._watch.note("collective", name, "a tensor is not in one piece")

    def _check_parts(self, name: str, group: RecordedGroup, whole: Tensor, part: Tensor) -> None:
        size = part.numel()
        if whole.numel() != group.size() * size:
            detail = f"{whole.numel()} elements are not {group.size()} ranks' {size}"
            self._watch.note("collective", name, detail)
        offset = int(part.storage_offset() - whole.storage_offset())
        lies_in_whole = storage_of(part) == storage_of(whole) and -size < offset < whole.numel()
        if lies_in_whole and offset != group.rank() * size:
            detail = "a rank's part lies in the whole, and not at the rank's place"
            self._watch.note("collective", name, detail)


class _Ended:
    def wait(self) -> None:
        """Return at once, since no work is running."""


# A stand-in for a GPU without memory, which shows where the host would wait for a GPU.
#
# Its tensors are fake: they have a shape and a device but no values, so whole iterations take
# almost no time. Operators on tensors of two devices fail as on a GPU, and backward passes run in a
# thread of the device. The runtime uses every device through a ``Driver``, so the stand-in is one
# more driver.


# The first iteration allocates lasting memory; the second also runs the optimizer step that the
# first deferred.
ITERATIONS = 2
# This many iterations contain the capture of a CUDA graph and a replay.
CAPTURED_ITERATIONS = 4


@contextmanager
def fake_device(*, captures: bool = False) -> Iterator[Watch]:
    """Within the ``with`` block a device called "sham" exists; the ``Watch`` collects findings.

    All tensors made in the block are fake, including those on the CPU. Afterwards the process
    should end by ``os._exit``, as ``experiments.sanitize`` does: at the interpreter's end,
    autograd's thread for the device aborts some processes.
    """
    register()
    watch = Watch(captures=captures)
    driver = FakeDriver(watch)
    threads = torch.get_num_threads()
    with ExitStack() as stack:
        stack.callback(DRIVERS.pop, SHAM)
        DRIVERS[SHAM] = driver
        # Fake tensors work in one thread only, so torch is limited to one.
        stack.callback(torch.set_num_threads, threads)
        torch.set_num_threads(1)
        stack.enter_context(torch.autograd.set_multithreading_enabled(has_own_thread()))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        ways = CudaWays(watch)
        stack.enter_context(HiddenWaits(driver, watch, ways))
        stack.enter_context(ways)
        yield watch


def device_findings(
    workload: Workload,
    plan: Plan,
    rank: int,
    training: Training,
    *,
    serialises: bool = False,
    captures: bool = False,
) -> tuple[WaitFinding, ...]:
    """Points at which a rank's host would wait for its GPU, or would fail; only this rank runs.
    With ``captures``, iterations are captured as a CUDA graph, and operations that would invalidate
    the capture are reported too.

    Nothing is computed, and tensors take no memory, so a plan of any size can be checked.
    """
    with fake_device(captures=captures) as watch:
        device = torch.device(SHAM, 0)
        try:
            library = RecordedLibrary(rank, plan.num_gpus, CheckingRanks(watch))
            connections = connected_replicas(plan, workload, rank, library.maker(), device=device)
            of_replica = ReplicaRanks.of(plan, workload).plan
            streams = streams_of(device, serialises=serialises)
            executor = Executor(
                workload, of_replica, connections, streams, training, device=device, seed=None
            )
            assert isinstance(streams, CudaStreams)
            steps = CapturedSteps(executor, streams)
            _train(executor, workload, of_replica, steps if captures else executor)
        except Exception as error:
            if watch.stopped_by is not error:
                raise
    return watch.findings


def _train(
    executor: Executor, workload: Workload, plan: Plan, steps: Executor | CapturedSteps
) -> None:
    stage = plan.stages[executor.connections.place.stage]
    shape = (stage.micro_batch, workload.sequence_length)
    tokens, targets = (torch.zeros(shape, dtype=torch.int64, device=executor.device),) * 2
    batches: Batches = [(tokens, targets)] * plan.micro_batches
    count = ITERATIONS if steps is executor else CAPTURED_ITERATIONS
    count = max(count, executor.cycle + 1)
    for _ in range(count):
        steps.iterate(batches)
        executor.report()
        executor.streams.spans()
    executor.flush()
    executor.release()
