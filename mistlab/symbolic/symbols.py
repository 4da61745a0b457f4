"""The symbols of layer graphs and of stages, one or two letters each, under one legend.

Sizes are positive integers of the whole model: a rank's share is a quotient by ``tp``. What a plan
chooses for a stage comes in columns named as in ``StageBatch``.
"""

from collections.abc import Mapping

from mistlab.symbolic.lazily import sympy

SIZES: Mapping[str, str] = {
    "b": "micro_batch",  # sequences in a micro-batch on one rank
    "s": "sequence_length",
    "h": "hidden",
    "n": "heads",
    "k": "kv_heads",
    "d": "head_dim",
    "r": "rotated_channels",  # of a head, by rotary embedding
    "f": "ffn",
    "V": "vocab",  # padded
    "tp": "tensor_parallel",
}

CHOICES: Mapping[str, str] = {
    "dp": "data_parallel",
    "z": "zero",
    "L": "layers",
    "c": "checkpointed_layers",
    "q": "in_flight",  # micro-batches whose activations are held at once
    "ww": "offload_weights",
    "wg": "offload_gradients",
    "wo": "offload_optimizer",
    "wa": "offload_activations",
    "e": "has_embedding",  # 1 on the first stage, else 0
    "t": "has_head",  # 1 on the last stage, else 0
}


def size_symbol(name: str) -> "sympy.Symbol":
    """The symbol of a size: a positive integer."""
    return sympy.Symbol(name, integer=True, positive=True)


def choice_symbol(name: str) -> "sympy.Symbol":
    """The symbol of a choice: a number that is not negative."""
    return sympy.Symbol(name, nonnegative=True)
