"""AdamW with moments of 8 bits, written apart from the runtime: in numbers of 64 bits, tensor by
tensor, each value given the nearest of all codes."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from mistlab.plan.workload import Workload
from runtime.engine.training import Training
from runtime.models.families import model_of
from runtime.models.parallel import shard_of
from tests.runtime.plain_bits import kept_coarsely
from tests.runtime.plain_masks import Masks
from tests.runtime.plain_model import loss_of
from tests.runtime.worlds import given, sequences

BLOCK = 256
# For each tensor, the elements of each block of its moments.
Blocks = Mapping[str, Sequence[np.ndarray]]


def shares(*, signed: bool) -> np.ndarray:
    """What codes stand for (Dettmers et al. 2021): the middles of equal parts of decades, twice as
    many in each as in the decade below, with 0 and 1."""
    values = [0.0, 1.0]
    for exponent in range(-6, 1):
        parts = 2 ** (exponent + (6 if signed else 7))
        ends = np.linspace(0.1, 1, parts + 1)
        middles = [(low + high) / 2 * 10.0**exponent for low, high in pairwise(ends)]
        values += [*middles, *(-one for one in middles)] if signed else middles
    assert len(values) == 256
    return np.array(values)


def blocks_of(work: Workload, ranks: int = 1) -> Blocks:
    """The elements of each block where ``ranks`` split tensors: 256 in the order of a rank's part,
    fewer at its end."""
    model = model_of(work)
    shapes = {name: tuple(one.shape) for name, one in model.named_parameters()}
    places = {name: _places(work, shape, ranks) for name, shape in shapes.items()}
    blocks: dict[str, list[np.ndarray]] = {name: [] for name in shapes}
    for rank in range(ranks):
        for name, part in shard_of(model, places, rank=rank, ranks=ranks).items():
            flat = part.flatten().numpy()
            cut = (flat[at : at + BLOCK] for at in range(0, len(flat), BLOCK))
            blocks[name] += [one[one >= 0] for one in cut if one[0] >= 0]
    return blocks


def _places(work: Workload, shape: tuple[int, ...], ranks: int) -> Tensor:
    """The place of each element, and -1 in rows that pad a vocabulary which ranks split."""
    places = torch.arange(torch.Size(shape).numel()).view(shape)
    if shape[0] != work.model.vocab:
        return places
    more = work.model.padded_vocab(ranks) - len(places)
    return torch.cat([places, places.new_full((more, *shape[1:]), -1)])


def coded(moment: Tensor, blocks: Sequence[np.ndarray], *, signed: bool) -> Tensor:
    """A moment as its codes and scales have it."""
    flat, values = moment.numpy().flatten(), shares(signed=signed)
    kept = flat.copy()
    for places in blocks:
        block = flat[places]
        scale = np.float32(block[np.abs(block).argmax()])
        if scale:
            nearest = np.abs(block[:, None] / float(scale) - values).argmin(1)
            kept[places] = values[nearest] * float(scale)
    return torch.from_numpy(kept.reshape(moment.shape))


class PlainCoded:
    """The plain model, its weights and moments in 64 bits, moments as coded after each step."""

    def __init__(
        self,
        work: Workload,
        training: Training,
        start: Callable[..., Tensor],
        blocks: Blocks | None,
    ) -> None:
        self.work, self.training, self.blocks = work, training, blocks
        tied = work.model.tied_embeddings
        self.weights = {
            name: kept_coarsely(work, name, start(name, tuple(one.shape), tied=tied)).double()
            for name, one in model_of(work).named_parameters()
        }
        self.trained = [name for name in self.weights if work.train == "all" or ".adapter." in name]
        zeros = {name: torch.zeros_like(self.weights[name]) for name in self.trained}
        self.moments = [zeros, {name: one.clone() for name, one in zeros.items()}]
        self.steps = 0

    def step(self, rows: Tensor, *, skips: bool = False) -> float:
        """Train on sequences; the loss. A step that is skipped changes nothing."""
        training = self.training
        now = {name: one.clone() for name, one in self.weights.items()}
        for name in self.trained:
            now[name].requires_grad_()
        masks = Masks(seed=training.dropout_seed, step=self.steps, length=rows.shape[1] - 1)
        loss = loss_of(self.work.model, now, *given(self.work, rows), masks)
        loss.backward()
        gradients = {name: now[name].grad for name in self.trained}
        norm = sum(float(one.square().sum()) for one in gradients.values()) ** 0.5
        clip = 1.0 if training.clip_norm is None else min(1, training.clip_norm / (norm + 1e-6))
        rate = training.learning_rate_at(self.steps)
        if not skips:
            self.steps += 1
            for name in self.trained:
                self._update(name, gradients[name] * clip, rate)
        return loss.item()

    def _update(self, name: str, slope: Tensor, rate: float) -> None:
        of, (firsts, seconds) = self.training, self.moments
        first = of.beta1 * firsts[name] + (1 - of.beta1) * slope
        second = of.beta2 * seconds[name] + (1 - of.beta2) * slope**2
        mean, spread = first / (1 - of.beta1**self.steps), second / (1 - of.beta2**self.steps)
        kept = self.weights[name] * (1 - rate * of.weight_decay)
        self.weights[name] = kept - rate * mean / (spread.sqrt() + of.epsilon)
        for signed, kind, moment in ((True, firsts, first), (False, seconds, second)):
            kind[name] = moment
            if self.blocks is not None:
                kind[name] = coded(moment, self.blocks[name], signed=signed)


def trained(run: PlainCoded, steps: int) -> list[float]:
    """The losses of a run's first steps."""
    return [run.step(sequences(run.work, step)) for step in range(steps)]
