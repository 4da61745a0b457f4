"""The runtime's models compute what plain functions compute, written apart from them."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from runtime.models.families import model_of  # noqa: E402
from tests.runtime.plain_model import loss_of  # noqa: E402
from tests.runtime.worlds import sequences, starting_tensor, workload  # noqa: E402

LATENT = {"key_rank": 8, "value_dim": 8}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT": ("gpt", {}),
    "GPT with biases and one table": ("gpt", {"biases": True, "tied_embeddings": True}),
    "Llama with shared keys": ("llama", {"kv_heads": 2}),
    "Falcon": ("falcon", {"kv_heads": 2}),
    "Nemotron": ("nemotron", {}),
    "normalised queries and keys": ("llama", {"qk_norm": True, "kv_heads": 2}),
    "gates": ("llama", {"attention_gate": True, "qk_norm": True}),
    "norms behind both halves": ("llama", {"post_norms": True}),
    "latent attention": (
        "llama",
        {"head_dim": 12, "rotary_fraction": 1 / 3, "latent": {"query_rank": 16, **LATENT}},
    ),
    "windows in turn and sinks": (
        "llama",
        {"window": {"size": 5, "full_every": 2}, "sinks": True, "kv_heads": 2},
    ),
    "experts, one for all tokens, a dense block": (
        "llama",
        {"experts": {"count": 4, "active": 2, "ffn": 24, "shared_ffn": 16, "dense_blocks": 1}},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_model_equals_plain_functions(name: str) -> None:
    family, fields = CASES[name]
    work = workload(family, **fields)
    model, tied = model_of(work), work.model.tied_embeddings
    for path, parameter in model.named_parameters():
        parameter.data.copy_(starting_tensor(path, tuple(parameter.shape), tied=tied))
    weights = {
        path: parameter.detach().clone().requires_grad_()
        for path, parameter in model.named_parameters()
    }
    tokens = sequences(work, 0)
    losses = [
        model(tokens[:, :-1], tokens[:, 1:]),
        loss_of(work.model, weights, tokens[:, :-1], tokens[:, 1:]),
    ]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-6, atol=0)
    for path, parameter in model.named_parameters():
        error = (parameter.grad - weights[path].grad).norm() / weights[path].grad.norm()
        assert error < 3e-6, f"{path}: {error:.1e}"
