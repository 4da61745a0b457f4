"""A stand-in for a GPU without memory, which shows where the host would wait for a GPU.

Its tensors are fake: they have a size and a device, but no values, and whole iterations take
no time. Operators on tensors of two devices fail as on a GPU, and backward passes run in the
device's own thread. The runtime uses a device only through a ``Driver``, so one more driver is
enough.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mistlab.values.plan import Plan
from mistlab.values.workload import Workload
from runtime.checks.fake.cuda_ways import CudaWays
from runtime.checks.fake.driver import FakeDriver
from runtime.checks.fake.group import fake_maker
from runtime.checks.fake.hidden_waits import HiddenWaits
from runtime.checks.fake.sham import SHAM, has_own_thread, register
from runtime.checks.fake.watch import WaitFinding, Watch
from runtime.comm.topology import connected
from runtime.devices.table import DRIVERS
from runtime.engine.executor import Batches, Executor
from runtime.engine.streams.device_streams import streams_of
from runtime.engine.training import Training

# The first iteration makes memory that lasts. The second takes the optimizer step of the first.
ITERATIONS = 2


@contextmanager
def fake_device() -> Iterator[Watch]:
    """Within the ``with`` block there is a device called "sham"; the ``Watch`` gathers findings.

    All tensors made in the block are fake, those on the CPU too. Afterwards the process should end
    by ``os._exit``, as ``experiments.sanitize`` does: at the end of the interpreter autograd's
    thread for the device aborts some processes.
    """
    register()
    watch = Watch()
    driver = FakeDriver(watch)
    threads = torch.get_num_threads()
    with ExitStack() as stack:
        stack.callback(DRIVERS.pop, SHAM)
        DRIVERS[SHAM] = driver
        # Fake tensors work in one thread only, so torch must report one thread.
        stack.callback(torch.set_num_threads, threads)
        torch.set_num_threads(1)
        stack.enter_context(torch.autograd.set_multithreading_enabled(has_own_thread()))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        ways = CudaWays(watch)
        stack.enter_context(HiddenWaits(driver, watch, ways))
        stack.enter_context(ways)
        yield watch


def device_findings(
    workload: Workload, plan: Plan, rank: int, training: Training, *, serialises: bool = False
) -> tuple[WaitFinding, ...]:
    """Places where one rank's host would wait for its GPU, or would fail; the rank runs alone.

    Nothing is computed and nothing takes memory, so a plan of any size can be checked.
    """
    with fake_device() as watch:
        device = torch.device(SHAM, 0)
        try:
            connections = connected(
                plan,
                rank,
                fake_maker(rank, watch),
                tied=workload.model.tied_embeddings,
                device=device,
            )
            streams = streams_of(device, serialises=serialises)
            executor = Executor(
                workload, plan, connections, streams, training, device=device, seed=None
            )
            _train(executor, workload, plan)
        except Exception as error:
            if watch.stopped_by is not error:
                raise
    return watch.findings


def _train(executor: Executor, workload: Workload, plan: Plan) -> None:
    own = plan.stages[executor.connections.place.stage]
    shape = (own.micro_batch, workload.sequence_length)
    tokens, targets = (torch.zeros(shape, dtype=torch.int64, device=executor.device),) * 2
    batches: Batches = [(tokens, targets)] * plan.micro_batches
    for _ in range(ITERATIONS):
        executor.iterate(batches)
        executor.report()
        executor.streams.spans()
    executor.flush()
    executor.release()
