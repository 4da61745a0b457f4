"""Training whose workers communicate less, in plain loops: a model and an optimizer for each, and
NumPy's averages of ``mistlab.reduction``."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mistlab.plan.workload import Workload
from mistlab.reduction.compressors import compressed
from mistlab.reduction.feedbacks import Averaging, averaging
from mistlab.reduction.graphs import matrix_of
from mistlab.reduction.neighbours import offsets_of
from runtime.engine.training import Training
from runtime.engine.work.gradient_averages import SERVER, drawing
from runtime.models.families import model_of
from tests.runtime.plain_model import loss_of
from tests.runtime.worlds import CPU, sequences, starting_tensor

# Of a layer: its number, and by name where its parameters begin in its vector, with that vector's
# length.
LayerNames = Mapping[int, tuple[Mapping[str, int], int]]


class Draws:
    """Random numbers of NumPy's generator, which are those of the runtime's messages in turn."""

    def __init__(self, keys: Sequence[tuple[int, int, int]]) -> None:
        self._keys = iter(keys)

    def _next(self) -> torch.Generator:
        return drawing(CPU, *next(self._keys))

    def random(self, shape: Any) -> np.ndarray:
        return torch.rand(shape, generator=self._next()).double().numpy()

    def standard_normal(self, shape: Any) -> np.ndarray:
        return torch.randn(shape, generator=self._next()).double().numpy()


def _middle(rows: np.ndarray, trimmed: int, liars: Sequence[int]) -> list[float]:
    """The trimmed mean of each column, value by value; liars send ten times theirs, turned."""
    said = [[-10 * one for one in row] if rank in liars else row for rank, row in enumerate(rows)]
    middle = []
    for column in zip(*said, strict=True):
        kept = sorted(column)[trimmed : len(column) - trimmed]
        middle.append(sum(kept) / len(kept))
    return middle


@dataclass
class PlainWorkers:
    """Workers with weights of their own, each of which takes its rows of every batch."""

    work: Workload
    count: int
    micro_batches: int
    training: Training
    weights: list[dict[str, Tensor]] = field(init=False)
    optimizers: list[torch.optim.AdamW] = field(init=False)
    averages: dict[tuple[int, int], Averaging] = field(default_factory=dict)
    shared: dict[str, Tensor] = field(init=False)
    momenta: dict[str, Tensor] = field(init=False)
    changes: dict[str, Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        tied = self.work.model.tied_embeddings
        parameters = [*model_of(self.work).named_parameters()]
        self.weights = [
            {
                name: starting_tensor(name, tuple(one.shape), tied=tied).requires_grad_()
                for name, one in parameters
            }
            for _ in range(self.count)
        ]
        self.shared = {name: one.detach().clone() for name, one in self.weights[0].items()}
        self.momenta = {name: torch.zeros_like(one) for name, one in self.shared.items()}
        self.optimizers = [
            torch.optim.AdamW(
                own.values(),
                lr=self.training.learning_rate,
                betas=(self.training.beta1, self.training.beta2),
                eps=self.training.epsilon,
                weight_decay=self.training.weight_decay,
            )
            for own in self.weights
        ]

    def gradients(self, step: int) -> None:
        """Backward passes of all workers."""
        whole = sequences(self.work, step)
        rows = whole.view(self.micro_batches, self.count, -1, whole.shape[1])
        losses = []
        for worker, own in enumerate(self.weights):
            self.optimizers[worker].zero_grad()
            tokens = rows[:, worker].flatten(0, 1)
            loss = loss_of(self.work.model, own, tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            losses.append(loss.item())
        self.losses.append(float(np.mean(losses)))

    def step(self) -> None:
        """Steps of all workers' optimizers."""
        for optimizer in self.optimizers:
            optimizer.step()

    def reduce(self, step: int, layers: LayerNames) -> None:
        """Average gradients as the workload's reduction says, layer by layer."""
        how = self.work.reduction
        for layer, (names, size) in layers.items():
            rows = np.zeros((self.count, size))
            for worker, own in enumerate(self.weights):
                for name, begin in names.items():
                    flat = own[name].grad.flatten()
                    rows[worker, begin : begin + len(flat)] = flat.double().numpy()
            each = -(-size // how.shards)
            for shard in range(how.shards if how.kind == "server" else 1):
                part = slice(shard * each, (shard + 1) * each) if how.kind == "server" else ...
                if how.trimmed or how.liars:
                    rows[:, part] = _middle(rows[:, part], how.trimmed, how.liars)
                    continue
                known = self.averages.setdefault(
                    (layer, shard), averaging(how.feedback, how.compressor, how.rounds)
                )
                mean = known.average(rows[:, part], self._draws(step, layer))
                rows[:, part] = mean
            for own in self.weights:
                for name, begin in names.items():
                    mean = torch.from_numpy(rows[0, begin : begin + own[name].numel()]).float()
                    own[name].grad.copy_(mean.view_as(own[name]))

    def clip(self, most: float) -> list[float]:
        """Clip the gradients of each worker to a norm; returns their norms before."""
        clip = torch.nn.utils.clip_grad_norm_
        return [clip(own.values(), most).item() for own in self.weights]

    def serve(self, step: int, layers: LayerNames, *, left_out: Collection[int] = ()) -> None:
        """Steps of the first worker's weights with the gradients of every worker in turn, its own
        last; each goes on from the weights of then. Those of workers ``left_out`` are not used."""
        how, count = self.work.reduction, self.count
        server, optimizer = self.weights[0], self.optimizers[0]
        sent = [self._compressed(step, worker, layers) for worker in range(count)]
        for worker in (*range(1, count), 0):
            for name, weights in server.items():
                weights.grad = sent[worker][name] * (-10 if worker in how.liars else 1)
            if worker not in left_out:
                optimizer.step()
            with torch.no_grad():
                for name, weights in self.weights[worker].items():
                    weights.copy_(server[name])

    def _compressed(self, step: int, worker: int, layers: LayerNames) -> dict[str, Tensor]:
        """A worker's gradients as the server reads them."""
        own, found = self.weights[worker], {}
        for layer, (names, size) in layers.items():
            row = np.zeros(size)
            for name, begin in names.items():
                row[begin : begin + own[name].numel()] = own[name].grad.flatten().numpy()
            read = compressed(self.work.reduction.compressor, row, Draws([(step, layer, worker)]))
            for name, begin in names.items():
                part = torch.from_numpy(read[begin : begin + own[name].numel()]).float()
                found[name] = part.view_as(own[name])
        return found

    def _draws(self, step: int, layer: int) -> Draws:
        how = self.work.reduction
        rounds = how.rounds if how.feedback == "neolithic" else 1
        ranks = [SERVER] if how.compressor.kind == "power" else [*range(self.count)]
        turns = [step * rounds + turn for turn in range(rounds)]
        keys = [(turn, layer, rank) for turn in turns for rank in ranks]
        return Draws([*keys, *((turn, layer, SERVER) for turn in turns)])

    def mix(self, step: int) -> None:
        """Average weights with neighbours."""
        how = self.work.reduction
        offsets = how.offsets or offsets_of(how.topology, self.count, step)
        matrix = torch.from_numpy(matrix_of(offsets, self.count)).float()
        with torch.no_grad():
            for name in self.shared:
                stacked = torch.stack([own[name] for own in self.weights])
                mixed = torch.einsum("ij,j...->i...", matrix, stacked)
                for own, one in zip(self.weights, mixed, strict=True):
                    own[name].copy_(one)

    def outer(self, step: int, layers: LayerNames) -> None:
        """The outer steps that are due after a step, counted from 1."""
        how = self.work.reduction
        distance = how.every // how.fragments
        with torch.no_grad():
            for turn, (names, _) in enumerate(layers.values()):
                place = turn % how.fragments + 1
                begins = (step + how.delay) % how.every == place * distance % how.every
                for name in names if begins else ():
                    changes = [self.shared[name] - own[name] for own in self.weights]
                    self.changes[name] = sum(changes) / self.count
                if step >= distance and step % how.every == place * distance % how.every:
                    for name in names:
                        self._outer_step(name)

    def _outer_step(self, name: str) -> None:
        how, change = self.work.reduction, self.changes[name]
        self.momenta[name] = how.momentum * self.momenta[name] + change
        ahead = change + how.momentum * self.momenta[name] if how.momentum else change
        self.shared[name] = self.shared[name] - how.rate * ahead
        for own in self.weights:
            own[name].copy_(how.mixed * own[name] + (1 - how.mixed) * self.shared[name])
