"""Models that rows name only by their size, such as ``dense 7B``, built from the blocks of a model
in the catalogue.
"""

import math
from dataclasses import replace
from functools import cache

from mistlab import catalog
from mistlab.plan.workload import ModelSpec

# Models with shapes that are common today; a model of which only the size is known gets the blocks
# of one of them.
DENSE = (
    *("llama3.2-1b", "llama3.2-3b", "llama3-8b", "qwen2.5-14b", "qwen2.5-32b"),
    *("llama3-70b", "llama3-405b"),
)
OF_EXPERTS = ("moonlight-16b-a3b", "qwen3-30b-a3b", "glm-4.5-air", "qwen3-235b-a22b", "kimi-k2")


def model_of_size(billions: float, *, has_experts: bool) -> tuple[ModelSpec, str]:
    """A model with about this number of parameters, and a note on the blocks that it is made of.

    Its blocks are those of the catalogue's model of the nearest size; their number follows from the
    number of parameters.
    """
    wanted = billions * 1e9
    known = min(
        map(catalog.model, OF_EXPERTS if has_experts else DENSE),
        key=lambda model: abs(math.log(parameters_of(model) / wanted)),
    )
    table = _table(known)
    of_block = (parameters_of(known) - table) / known.layers
    layers = max(1, round((wanted - table) / of_block))
    note = f"no shape is known: {layers} blocks of {known.name} taken for {billions:g}B parameters"
    return replace(known, layers=layers), note


def parameters_of(model: ModelSpec) -> int:
    """The number of weights in a model's GEMMs and embedding tables; normalisations and biases are
    not counted.

    >>> round(parameters_of(catalog.model("llama3-8b")) / 1e9, 2)
    8.03
    """
    return _table(model) + sum(_of_block(model, block) for block in range(model.layers))


def _table(model: ModelSpec) -> int:
    return (1 if model.tied_embeddings else 2) * model.vocab * model.hidden


@cache
def _of_block(model: ModelSpec, block: int) -> int:
    attention = 2 * model.hidden * model.head_dim * (model.heads + model.kv_heads)
    matrices = 3 if model.mlp_type == "gated_mlp" else 2
    experts = model.experts
    if experts is None or not model.has_experts_in(block):
        return attention + matrices * model.hidden * model.ffn
    width = experts.count * experts.ffn + experts.shared_ffn
    return attention + matrices * model.hidden * width
