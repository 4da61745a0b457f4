"""Split models: a process compares its part with the whole model, which it also runs."""

from typing import Any

import torch
from torch import Tensor, distributed, nn

from runtime.models.config import ModelConfig
from runtime.models.families import GPT, Falcon, Llama
from runtime.models.parallel import shard_of, shared_parameters

SIZES: dict[str, Any] = {
    "hidden": 32,
    "heads": 8,
    "kv_heads": 4,
    "head_dim": 8,
    "ffn": 48,
    "vocab": 64,
    "positions": 12,
    "rotated": 8,
    "layers": 2,
    "dtype": torch.float32,
}
# Ranks that heads of keys and values can be split over.
SPLITS = (2, 4)
CASES: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    f"{family.__name__} {attention}{note}": (family, {"attention": attention, **others})
    for family, note, others in (
        (GPT, "", {}),
        (GPT, " with biases", {"biases": True}),
        (GPT, " with tied embeddings", {"tied_embeddings": True}),
        (Llama, "", {}),
        (Falcon, "", {}),
    )
    for attention in ("flash", "math")
}


class GroupRanks:
    """Ranks that are the processes of a torch.distributed group."""

    def __init__(self, group: distributed.ProcessGroup, *, splits_tokens: bool = False) -> None:
        self._group = group
        self.splits_tokens = splits_tokens
        self.size = group.size()
        self.rank = group.rank()

    def all_reduce_(self, tensor: Tensor, operation: str = "sum") -> None:
        """Reduce over the group, in place."""
        reductions = {"sum": distributed.ReduceOp.SUM, "max": distributed.ReduceOp.MAX}
        distributed.all_reduce(tensor, reductions[operation], self._group)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Concatenate the group's tensors along the last dimension."""
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        distributed.all_gather(parts, tensor, self._group)
        return torch.cat(parts, -1)

    def gather_tokens(self, tensor: Tensor, *, again: bool = False) -> Tensor:
        """Concatenate the group's parts of sequences."""
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        distributed.all_gather(parts, tensor, self._group)
        return torch.cat(parts, 1)

    def scatter_tokens(self, tensor: Tensor, *, of_input: bool = False) -> Tensor:
        """Sum over the group, and cut this rank's part out."""
        whole = tensor.contiguous()
        distributed.all_reduce(whole, group=self._group)
        return whole.chunk(self.size, 1)[self.rank].clone()


def difference(split: Tensor, whole: Tensor) -> float:
    """The largest difference, as a share of the largest value."""
    return float((split - whole).detach().abs().max() / whole.detach().abs().max())


def compared(family: type[nn.Module], options: dict[str, Any], ranks: GroupRanks) -> float:
    torch.manual_seed(0)
    whole = family(ModelConfig(**SIZES, **options))
    for name, parameter in whole.named_parameters():
        # Large logits: without their true maximum over all ranks, exponentials over- or underflow.
        nn.init.normal_(parameter, std=20 if name.startswith("head.projection") else 0.3)
    tokens, targets = torch.randint(SIZES["vocab"], (2, 3, 12)).unbind()
    sizes = {**SIZES, "tensor_parallel": ranks.size}
    split = family(ModelConfig(**sizes, **options), ranks)
    place = {"rank": ranks.rank, "ranks": ranks.size}
    split.load_state_dict(shard_of(whole, whole.state_dict(), **place))

    losses = [model(tokens, targets) for model in (split, whole)]
    for loss in losses:
        loss.backward()

    of_whole = {name: p.grad for name, p in whole.named_parameters()}
    gradients = shard_of(whole, of_whole, **place)
    for parameter in shared_parameters(split) if ranks.splits_tokens else ():
        distributed.all_reduce(parameter.grad)
    errors = [difference(p.grad, gradients[name]) for name, p in split.named_parameters()]
    with torch.no_grad():
        errors.append(difference(split(tokens), whole(tokens)))
    # A tensor's maximum, unlike Python's, is NaN where any of its values is.
    return float(torch.tensor([*errors, difference(*losses)]).max())


def errors_of_world() -> dict[str, float]:
    """The error of each case, split over all processes, which split tokens as well or do not."""
    world = distributed.group.WORLD
    assert world is not None
    return {
        f"{case}{', tokens split' * splits_tokens}": compared(
            *made, GroupRanks(world, splits_tokens=splits_tokens)
        )
        for case, made in CASES.items()
        for splits_tokens in (False, True)
    }
