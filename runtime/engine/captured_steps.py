"""Training iterations as one CUDA graph: captured once, then replayed by a single launch.

The first iteration has no optimizer step, and the second allocates all memory that lasts: both are
issued as usual. The third iteration is captured, with all streams, and replayed from then on: the
same kernels on the same addresses. Before each replay batches and the learning rate are copied to
their addresses. A checkpoint runs the last optimizer step separately, so the iteration after it is
issued as usual.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from mistlab.core.values import reject
from mistlab.job.job import Job
from runtime.devices.cuda import driver_of
from runtime.devices.driver import Graph
from runtime.engine.executor import Batches, Executor
from runtime.engine.training import Training

FLAG = "--cuda-graphs"


class CapturableLanes(Protocol):
    """Streams of a device whose work can be captured in a CUDA graph."""

    def captured(self) -> AbstractContextManager[Graph]:
        """Capture the work of all streams within the ``with`` block, instead of running it."""


def check_captures(job: Job, training: Training, device: str) -> None:
    """Raise an error for a run whose iterations cannot be captured in a CUDA graph, because the
    host computes or reads values in iterations, or chooses values anew in each iteration.
    """
    model, workload = job.workload.model, job.workload
    if driver_of(torch.device(device)) is None:
        reject(
            f"--cuda-graphs: --device {device} cannot capture CUDA graphs: give --device cuda, or "
            "leave --cuda-graphs out"
        )
    if training.steps_on_host:
        reject(
            "--cuda-graphs: with --step-on-cpu the host waits for gradients in each step, which a "
            "CUDA graph cannot capture: leave out --step-on-cpu or --cuda-graphs"
        )
    obstacles = {
        "workload.model.experts": (model.experts, "the host reads how many rows each expert gets"),
        "workload.model.dropout": (
            model.dropout or model.attention_dropout,
            "masks depend on the step's number, and a replayed step would repeat them",
        ),
        "workload.model.family": (
            model.family == "custom",
            "code of the model itself may read values on the host",
        ),
        "workload.reduction": (
            not workload.reduces_plainly,
            "the data that ranks exchange change from step to step",
        ),
    }
    for field, (is_there, why) in obstacles.items():
        if is_there:
            reject(
                f"{field}: {why}, so an iteration cannot be captured in a CUDA graph: leave "
                "--cuda-graphs out"
            )


def own_compute(device: torch.device, *, captures: bool) -> AbstractContextManager[object]:
    """A context in which computation runs on a stream other than the default, which CUDA cannot
    capture; does nothing if the run is not captured.
    """
    driver = driver_of(device)
    if driver is None or not captures:
        return nullcontext()
    return driver.using(driver.stream(device))


class CapturedSteps:
    """The training iterations of an executor as a CUDA graph; the host reads each iteration's
    report before it launches the next.
    """

    def __init__(self, executor: Executor, lanes: CapturableLanes) -> None:
        self.executor, self._lanes = executor, lanes
        self._graph: Graph | None = None
        self._is_warm = False
        self._batches: Batches = ()
        self._rate = torch.zeros((), device=executor.device)

    def iterate(self, batches: Batches) -> None:
        """Run the next training iteration, by launching its tasks or by replaying the captured
        graph.
        """
        executor = self.executor
        if not (executor.follows and self._is_warm):
            self._is_warm = self._is_warm or executor.follows
            executor.iterate(batches)
            return
        if self._graph is None:
            self._batches = [(tokens.clone(), targets.clone()) for tokens, targets in batches]
        else:
            for buffers, given in zip(self._batches, batches, strict=True):
                for buffer, values in zip(buffers, given, strict=True):
                    buffer.copy_(values)
        rate = executor.learning_rate
        assert rate is not None
        self._rate.fill_(rate)
        if self._graph is None:
            executor.learn_at(self._rate)
            with self._lanes.captured() as graph:
                executor.iterate(self._batches)
            self._graph = graph
        else:
            executor.count_step()
        self._graph.replay()
