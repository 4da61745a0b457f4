"""How baselines are run: other systems' own code, which drivers here train step by step."""

from dataclasses import dataclass

from mistlab.values.job import Job
from runtime.data import Sequences, Synthetic


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


def sequences_of(job: Job, seed: int) -> Sequences:
    """The sequences that all systems train on."""
    workload = job.workload
    return Synthetic(length=workload.sequence_length, vocab=workload.model.vocab, seed=seed)
