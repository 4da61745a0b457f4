"""GPT, Llama and Falcon by their formulas, AdamW by its own: a plain run that shares no code with
the runtime.

Axes: B batch, S sequence, H heads, D channels a head.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mistlab.plan.workload import ModelSpec
from runtime.engine.training import Training

EPSILON = 1e-5


class PlainRun:
    """A model in numbers of 64 bits, and its optimizer; ``rounds`` is the type of numbers to which
    weights are rounded before each step's passes."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, Tensor],
        training: Training,
        rounds: torch.dtype,
    ) -> None:
        self.spec, self.training, self.rounds = spec, training, rounds
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
        used = {**now}
        if self.spec.tied_embeddings:
            used["head.projection.weight"] = used["embedding.tokens.weight"]
        total = 0.0
        for sequences in micro_batches:
            loss = self._loss(used, sequences) / len(micro_batches)
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

    def _loss(self, weights: Mapping[str, Tensor], sequences: Tensor) -> Tensor:
        tokens, targets = sequences[:, :-1], sequences[:, 1:]
        x = weights["embedding.tokens.weight"][tokens]
        if "embedding.positions" in weights:
            x = x + weights["embedding.positions"][: tokens.shape[1]]
        for block in range(self.spec.layers):
            own = f"blocks.{block}."
            x = self._block({n.removeprefix(own): w for n, w in weights.items() if own in n}, x)
        head = {n.removeprefix("head."): w for n, w in weights.items() if n.startswith("head.")}
        logits = _normal(head, "norm", x) @ head["projection.weight"].T
        chosen = logits.gather(-1, targets[..., None])[..., 0]
        return (logits.exp().sum(-1).log() - chosen).mean()

    def _block(self, of: Mapping[str, Tensor], x: Tensor) -> Tensor:
        inner = _normal(of, "attention_norm", x)
        if self.spec.parallel_block:
            return x + self._attended(of, inner) + self._network(of, inner)
        x = x + self._attended(of, inner)
        return x + self._network(of, _normal(of, "mlp_norm", x))

    def _attended(self, of: Mapping[str, Tensor], x: Tensor) -> Tensor:
        heads, keys = self.spec.heads, self.spec.kv_heads
        batch, sequence, _ = x.shape
        made = _linear(of, "attention.qkv", x).view(batch, sequence, heads + 2 * keys, -1)
        query, key, value = made.split([heads, keys, keys], dim=2)
        if self.spec.position_embedding == "rotary":
            query, key = self._turned(query), self._turned(key)
        key, value = (one.repeat_interleave(heads // keys, dim=2) for one in (key, value))
        scores = torch.einsum("bshd,bthd->bhst", query, key) / math.sqrt(query.shape[-1])
        later = torch.ones(sequence, sequence, dtype=torch.bool).triu(1)
        shares = scores.masked_fill(later, -math.inf).softmax(-1)
        mixed = torch.einsum("bhst,bthd->bshd", shares, value)
        return _linear(of, "attention.output", mixed.flatten(2))

    def _turned(self, x: Tensor) -> Tensor:
        """Channels i and i + D/2 as complex numbers, turned by their position."""
        half = x.shape[-1] // 2
        frequency = self.spec.rotary_base ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * frequency
        turn = torch.polar(torch.ones_like(angle), angle)[:, None]
        turned = torch.complex(x[..., :half], x[..., half:]) * turn
        return torch.cat([turned.real, turned.imag], dim=-1)

    def _network(self, of: Mapping[str, Tensor], x: Tensor) -> Tensor:
        inner = _linear(of, "mlp.up", x)
        if self.spec.mlp_type == "gated_mlp":
            gate, up = inner.chunk(2, dim=-1)
            return _linear(of, "mlp.down", gate * torch.sigmoid(gate) * up)
        cubic = math.sqrt(2 / math.pi) * (inner + 0.044715 * inner**3)
        return _linear(of, "mlp.down", inner / 2 * (1 + torch.tanh(cubic)))


def _normal(of: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    weight, bias = of[f"{name}.weight"], of.get(f"{name}.bias")
    if bias is None:
        return x / (x.square().mean(-1, keepdim=True) + EPSILON).sqrt() * weight
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + EPSILON).sqrt() * weight + bias


def _linear(of: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    made, bias = x @ of[f"{name}.weight"].T, of.get(f"{name}.bias")
    return made if bias is None else made + bias
