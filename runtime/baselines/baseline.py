"""How baselines are run: other systems' own code, which drivers here train step by step."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mistlab.core.values import reject
from mistlab.job.job import Job
from mistlab.plan.workload import ModelSpec, Workload
from runtime.data import Sequences, Synthetic
from runtime.engine.work.stage_modules import initial_tensor
from runtime.models.families import shapes_of_model
from runtime.runnable import check_model


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


# This package's first weights, by name and whole, and as Megatron-core names and splits them.
#
# Every tensor depends on the seed and its name alone, so that all systems train from the same
# weights whatever their plan is.


class FirstWeights:
    """The first weights of a model by their names in this package, which must have the model."""

    def __init__(self, workload: Workload, seed: int) -> None:
        check_model(workload)
        if not workload.model.has_plain_blocks:
            reject(
                f"workload.model: blocks of {workload.model.name or 'this model'} can be predicted "
                "and not yet trained by other systems here: give a model of plain blocks"
            )
        self.shapes = shapes_of_model(workload)
        self._seed, self._tied = seed, workload.model.tied_embeddings

    def __getitem__(self, name: str) -> Tensor:
        """A whole tensor."""
        return initial_tensor(name, self.shapes[name], self._seed, tied=self._tied)

    def all(self) -> dict[str, Tensor]:
        """All tensors."""
        return {name: self[name] for name in self.shapes}


def megatron_weights(
    weights: FirstWeights, model: ModelSpec, *, blocks: range, rank: int, ranks: int
) -> Iterator[tuple[str, Tensor]]:
    """Names in Megatron-core and this rank's parts of the tensors of a pipeline stage.

    The stage has the blocks ``blocks``; tensors of embedding and head come in any case.
    """

    def rows(tensor: Tensor) -> Tensor:
        return tensor.chunk(ranks, 0)[rank]

    def columns(tensor: Tensor) -> Tensor:
        return tensor.chunk(ranks, 1)[rank]

    yield "embedding.word_embeddings.weight", rows(weights["embedding.tokens.weight"])
    if "embedding.positions" in weights.shapes:
        yield "embedding.position_embeddings.weight", weights["embedding.positions"]
    for place, block in enumerate(blocks):
        ours, theirs = f"blocks.{block}.", f"decoder.layers.{place}."
        for norm, name in (
            ("attention_norm", "input_layernorm"),
            ("mlp_norm", "pre_mlp_layernorm"),
        ):
            for part in ("weight", "bias"):
                if f"{ours}{norm}.{part}" in weights.shapes:
                    yield f"{theirs}{name}.{part}", weights[f"{ours}{norm}.{part}"]
        qkv = weights[f"{ours}attention.qkv.weight"]
        yield f"{theirs}self_attention.linear_qkv.weight", rows(_by_groups(qkv, model))
        output = weights[f"{ours}attention.output.weight"]
        yield f"{theirs}self_attention.linear_proj.weight", columns(output)
        up = weights[f"{ours}mlp.up.weight"]
        parts = up.chunk(2) if model.mlp_type == "gated_mlp" else (up,)
        yield f"{theirs}mlp.linear_fc1.weight", torch.cat([rows(part) for part in parts])
        yield f"{theirs}mlp.linear_fc2.weight", columns(weights[f"{ours}mlp.down.weight"])
    for part in ("weight", "bias"):
        if f"head.norm.{part}" in weights.shapes:
            yield f"decoder.final_layernorm.{part}", weights[f"head.norm.{part}"]
    yield "output_layer.weight", rows(weights["head.projection.weight"])


def _by_groups(qkv: Tensor, model: ModelSpec) -> Tensor:
    """Rows of queries, keys and values, group by group of heads that share keys and values."""
    channels, groups = model.head_dim, model.kv_heads
    sizes = [model.heads * channels, groups * channels, groups * channels]
    parts = [part.unflatten(0, (groups, -1)) for part in qkv.split(sizes)]
    return torch.cat(parts, dim=1).flatten(0, 1)
