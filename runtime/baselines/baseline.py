"""The common interface of baselines, that is, of other systems whose code trains step by step."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mistlab import __version__
from mistlab.core.values import reject
from mistlab.job.job import Job
from mistlab.plan.workload import ModelSpec, Workload
from runtime.data import Sequences, Synthetic
from runtime.engine.training import Training
from runtime.engine.work.stage_modules import initial_tensor
from runtime.models.config import sums_of
from runtime.models.families import shapes_of_model
from runtime.runnable import check_model, check_usual


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineSettings:
    """The settings of a baseline's run besides the plan: device, seed, and optimizer.

    They equal the settings of this package's own runs. All weights decay, in every system.
    """

    device: str = "cpu"
    seed: int = 0
    training: Training = field(default_factory=Training)

    @property
    def of_adam(self) -> dict[str, Any]:
        """The optimizer's settings, by the argument names of torch's AdamW."""
        return {
            "lr": self.training.learning_rate,
            "betas": (self.training.beta1, self.training.beta2),
            "eps": self.training.epsilon,
            "weight_decay": self.training.weight_decay,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """The configuration with which a system trains a plan, as text to be printed beside the
    configurations of other systems. It is read from the system's objects; ``system`` is its name
    with version.
    """

    system: str
    layers: str
    attention: str
    fusions: str
    sums: str
    optimizer: str
    decay: str

    @classmethod
    def of_ours(cls, job: Job) -> "Configuration":
        """The configuration with which this package's runtime trains a job."""
        return cls(
            system=f"mistlab {__version__}",
            layers="this package's runtime",
            attention=f"{job.workload.attention}, torch's scaled_dot_product_attention",
            fusions="this package's kernels",
            sums=f"{8 * sums_of(job.workload).itemsize} bits",
            optimizer="torch _fused_adamw_",
            decay=f"{Training().weight_decay:g}",
        )

    @classmethod
    def of_torch(cls, job: Job, system: str, sums: str, optimizer: Any) -> "Configuration":
        """The configuration with which another system trains this package's torch model."""
        return cls(
            system=system,
            layers="this package's torch model",
            attention=f"{job.workload.attention}, torch's scaled_dot_product_attention",
            fusions="this package's kernels",
            sums=sums,
            optimizer=class_name(optimizer),
            decay=decay_of(optimizer),
        )


def class_name(made: object) -> str:
    """The name of an object's class with its package, such as ``torch AdamW``."""
    return f"{type(made).__module__.partition('.')[0]} {type(made).__name__}"


def decay_of(optimizer: Any) -> str:
    """The weight decay of an optimizer's groups of parameters, each distinct value once."""
    decays = sorted({float(group["weight_decay"]) for group in optimizer.param_groups})
    return ", ".join(f"{decay:g}" for decay in decays)


def sequences_of(job: Job, seed: int) -> Sequences:
    """The sequences of tokens on which all systems train."""
    workload = job.workload
    return Synthetic(length=workload.sequence_length, vocab=workload.model.vocab, seed=seed)


# This package's initial weights: whole, by name, and as Megatron-core names and splits them.
#
# A tensor depends only on the seed and on its name, so all systems start from the same weights
# under any plan.


class FirstWeights:
    """A model's initial weights, by their names in this package; raises an error for models that
    the other systems cannot train here.
    """

    def __init__(self, workload: Workload, seed: int) -> None:
        check_model(workload)
        check_usual(workload)
        if not workload.model.has_plain_blocks:
            reject(
                f"workload.model: blocks of {workload.model.name or 'this model'} can be predicted "
                "but not trained yet by this command's other training systems: give a model of "
                "plain blocks, such as gpt3-1.3b"
            )
        self.shapes = shapes_of_model(workload)
        self._seed, self._tied = seed, workload.model.tied_embeddings

    def __getitem__(self, name: str) -> Tensor:
        """The whole initial tensor with this name."""
        return initial_tensor(name, self.shapes[name], self._seed, tied=self._tied)

    def all(self) -> dict[str, Tensor]:
        """All initial weight tensors, by name."""
        return {name: self[name] for name in self.shapes}


# Prefixes of the names of a block's norms in Megatron-core: for norms that are modules
# (LOCAL_NORMS), and for norms inside Transformer Engine's GEMMs (ENGINE_NORMS).
LOCAL_NORMS = {"attention_norm": "input_layernorm.", "mlp_norm": "pre_mlp_layernorm."}
ENGINE_NORMS = {
    "attention_norm": "self_attention.linear_qkv.layer_norm_",
    "mlp_norm": "mlp.linear_fc1.layer_norm_",
}


def megatron_weights(
    weights: FirstWeights,
    model: ModelSpec,
    *,
    blocks: range,
    rank: int,
    ranks: int,
    norms: Mapping[str, str] = LOCAL_NORMS,
) -> Iterator[tuple[str, Tensor]]:
    """This rank's parts of a pipeline stage's tensors, under Megatron-core's names.

    The stage has the blocks ``blocks``; embedding and head are included for every stage. ``norms``
    has the prefixes of the names of norms.
    """

    def rows(tensor: Tensor) -> Tensor:
        return tensor.chunk(ranks, 0)[rank]

    def columns(tensor: Tensor) -> Tensor:
        return tensor.chunk(ranks, 1)[rank]

    yield "embedding.word_embeddings.weight", rows(weights["embedding.tokens.weight"])
    if "embedding.positions" in weights.shapes:
        yield "embedding.position_embeddings.weight", weights["embedding.positions"]
    for number, block in enumerate(blocks):
        ours, theirs = f"blocks.{block}.", f"decoder.layers.{number}."
        for norm, name in norms.items():
            for part in ("weight", "bias"):
                if f"{ours}{norm}.{part}" in weights.shapes:
                    yield f"{theirs}{name}{part}", weights[f"{ours}{norm}.{part}"]
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
    """The rows of a projection to queries, keys and values in Megatron-core's order: each group of
    query heads is followed by the key and the value that it shares.
    """
    channels, groups = model.head_dim, model.kv_heads
    sizes = [model.heads * channels, groups * channels, groups * channels]
    parts = [part.unflatten(0, (groups, -1)) for part in qkv.split(sizes)]
    return torch.cat(parts, dim=1).flatten(0, 1)
