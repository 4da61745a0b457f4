"""The plain model in numbers of 64 bits, and AdamW by its formula: a run that shares no code with
the runtime, nor with torch's optimizer.

Axes: B batch, S sequence.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mistlab.plan.workload import ModelSpec
from runtime.engine.training import Training
from tests.runtime.plain_masks import Masks
from tests.runtime.plain_model import loss_of


class PlainRun:
    """A model in numbers of 64 bits, and its optimizer; ``rounds`` is the type of numbers to which
    weights are rounded before each step's passes, ``moments`` that to which moments are rounded
    after it."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, Tensor],
        training: Training,
        rounds: torch.dtype,
        moments: torch.dtype | None = None,
    ) -> None:
        self.spec, self.training, self.rounds = spec, training, rounds
        self.moments = moments
        self.weights = {name: one.double().clone() for name, one in weights.items()}
        zeros = {name: torch.zeros_like(one) for name, one in self.weights.items()}
        self.first, self.second = dict(zeros), {name: one.clone() for name, one in zeros.items()}
        self.steps = 0

    def step(self, micro_batches: Sequence[Tensor]) -> tuple[float, float]:
        """Train on sequences (B, S + 1) of micro-batches; the mean loss and the gradients' norm."""
        now = {
            name: one.to(self.rounds).double().requires_grad_()
            for name, one in self.weights.items()
        }
        total, first = 0.0, 0
        for sequences in micro_batches:
            seed, length = self.training.dropout_seed, sequences.shape[1] - 1
            masks = Masks(seed=seed, step=self.steps, length=length, first=first)
            first += len(sequences)
            loss = loss_of(self.spec, now, sequences[:, :-1], sequences[:, 1:], masks)
            loss = loss / len(micro_batches)
            loss.backward()
            total += loss.item()
        gradients = {name: one.grad for name, one in now.items() if one.grad is not None}
        norm = math.sqrt(sum(float(one.square().sum()) for one in gradients.values()))
        self._update(gradients, norm)
        return total, norm

    def _update(self, gradients: Mapping[str, Tensor], norm: float) -> None:
        of, clip = self.training, 1.0
        if of.clip_norm is not None:
            clip = min(1.0, of.clip_norm / (norm + 1e-6))
        rate = of.learning_rate_at(self.steps)
        self.steps += 1
        for name, gradient in gradients.items():
            slope = gradient * clip
            self.first[name] = of.beta1 * self.first[name] + (1 - of.beta1) * slope
            self.second[name] = of.beta2 * self.second[name] + (1 - of.beta2) * slope**2
            mean = self.first[name] / (1 - of.beta1**self.steps)
            spread = self.second[name] / (1 - of.beta2**self.steps)
            kept = self.weights[name] * (1 - rate * of.weight_decay)
            self.weights[name] = kept - rate * mean / (spread.sqrt() + of.epsilon)
            if self.moments is not None:
                self.first[name] = self.first[name].to(self.moments).double()
                self.second[name] = self.second[name].to(self.moments).double()
