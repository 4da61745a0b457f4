"""Drivers of baselines: each trains a job in another system's own code, step by step."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from mistlab.values.job import Job
from runtime.data import Sequences, Synthetic, batch_of


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineSettings:
    """How a baseline is run, whatever its plan: device, seed, and the optimizer's settings.

    No weight decays: systems differ in the weights that they let decay.
    """

    device: str = "cpu"
    seed: int = 0
    learning_rate: float = 3e-4
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8


class BaselineRun(Protocol):
    """One rank's part of a run of a baseline."""

    def step(self, number: int) -> float:
        """Train a step; return its loss, the mean over the whole batch."""
        ...

    def close(self) -> None:
        """Leave the other ranks."""
        ...


def sequences_of(job: Job, seed: int) -> Sequences:
    """The sequences that all systems train on."""
    workload = job.workload
    return Synthetic(length=workload.sequence_length, vocab=workload.model.vocab, seed=seed)


def batches_of(
    job: Job, sequences: Sequences, step: int, replica: int
) -> list[tuple[Tensor, Tensor]]:
    """Tokens and targets of each micro-batch of a replica in a step."""
    stage = job.plan.stages[0]
    first = step * job.workload.global_batch + replica * stage.micro_batch
    apart = stage.data_parallel * stage.micro_batch
    return [
        batch_of(sequences, first + number * apart, stage.micro_batch)
        for number in range(job.plan.micro_batches)
    ]
