"""The torch models against their graphs, and against published closed forms."""

import math
from dataclasses import replace

import pytest

from tests.workloads import workload_of

torch = pytest.importorskip("torch")

from mistlab import catalog  # noqa: E402
from mistlab.graph.layer_types import expressions_of  # noqa: E402
from mistlab.graph.library import Variant, graph_of, shipped  # noqa: E402
from mistlab.graph.symbols import size_symbol  # noqa: E402
from mistlab.plan.workload import (  # noqa: E402
    ModelSpec,
    Workload,
)
from runtime.models.attention import RotaryTables  # noqa: E402
from runtime.models.config import ModelConfig, config_of  # noqa: E402
from runtime.models.families import GPT, Falcon, Llama, model_of  # noqa: E402


def workload(name: str, attention: str = "flash") -> Workload:
    # As a shape, trained anew at this length.
    return workload_of(name, 2048, 8, "bf16", attention=attention, context=None)


def numbers(work: Workload) -> dict[object, int]:
    spec = work.model
    sizes = {"h": spec.hidden, "n": spec.heads, "k": spec.kv_heads, "d": spec.head_dim}
    sizes |= {"r": spec.rotated_channels, "f": spec.ffn, "V": spec.vocab}
    sizes |= {"s": work.sequence_length, "b": 1, "tp": 1}
    return {size_symbol(name): value for name, value in sizes.items()}


def is_classic(name: str) -> bool:
    """Whether the runtime trains the model: other blocks are in test_blocks_of_today."""
    return catalog.model(name).has_plain_blocks


@pytest.mark.parametrize("name", [*filter(is_classic, catalog.model_names())])
def test_parameter_count_equals_the_torch_model(name: str) -> None:
    work = workload(name)
    with torch.device("meta"):
        model = model_of(work)

    graph = graph_of(work)
    counted = graph.embedding.parameter_count + graph.head.parameter_count
    counted += work.model.layers * graph.block.parameter_count

    # A table that embedding and head share is one parameter of the torch model.
    shared = work.model.tied_embeddings * work.model.vocab * work.model.hidden
    assert counted.subs(numbers(work)) - shared == sum(p.numel() for p in model.parameters())


def test_flop_of_a_gpt_block_is_the_published_closed_form() -> None:
    # Narayanan et al. 2021: 24 b s h^2 + 4 b s^2 h forward, twice that backward; fused causal
    # attention computes half of the square, and its backward forms the scores again.
    b, s, h, n, d, tp = map(size_symbol, ["b", "s", "h", "n", "d", "tp"])
    usual = {size_symbol("f"): 4 * h, size_symbol("k"): n, d: h / n}
    work = {
        attention: expressions_of(
            shipped(Variant(family="gpt", attention=attention, precision="half")).block
        ).work
        for attention in ("math", "flash")
    }

    forward = work["math"]["forward", "matmul"].flop.subs(usual).simplify()
    backward = work["math"]["backward", "matmul"].flop.subs(usual).simplify()
    assert (forward * tp - (24 * b * s * h**2 + 4 * b * s**2 * h)).expand() == 0
    assert (backward - 2 * forward).expand() == 0
    fused = work["flash"]
    assert (fused["forward", "attention"].flop.subs(usual) * tp - 2 * b * s**2 * h).expand() == 0
    assert (fused["backward", "attention"].flop.subs(usual) * tp - 5 * b * s**2 * h).expand() == 0


@pytest.mark.parametrize("name", ["llama-7b", "llama3-8b"])
def test_channels_turn_by_the_model_s_own_base(name: str) -> None:
    work = workload(name)
    config = replace(config_of(work), layers=1, positions=8, dtype=torch.float32)
    tables = RotaryTables(config)
    half = work.model.rotated_channels // 2
    for pair in (0, 1, half // 2, half - 1):
        angle = 7 * work.model.rotary_base ** (-pair / half)
        assert tables.cosine[7, pair].item() == pytest.approx(math.cos(angle), abs=1e-5)
        assert tables.sine[7, pair].item() == pytest.approx(math.sin(angle), abs=1e-5)


@pytest.mark.parametrize("base", [10_000.0, 500_000.0])
def test_a_model_has_the_tables_of_its_base(base: float) -> None:
    spec = ModelSpec.of(family="llama", hidden=32, layers=1, heads=4, vocab=96, rotary_base=base)
    work = replace(workload("llama-7b"), model=spec, sequence_length=17)
    expected = RotaryTables(replace(config_of(work), rotary_base=base))
    torch.testing.assert_close(model_of(work).blocks[0].attention.rotary.sine, expected.sine)


def small(family: type, attention: str) -> tuple[object, dict[object, int]]:
    sizes = {"b": 3, "s": 17, "h": 32, "n": 4, "k": 2, "d": 8, "r": 4, "f": 48, "V": 96, "tp": 1}
    sizes["k"] = 2 if family is Llama else 4
    config = ModelConfig(
        hidden=32,
        heads=4,
        kv_heads=sizes["k"],
        head_dim=8,
        ffn=48,
        vocab=96,
        positions=17,
        rotated=4,
        attention=attention,
    )
    return family(config), {size_symbol(name): value for name, value in sizes.items()}


@pytest.mark.parametrize("attention", ["flash", "math"])
@pytest.mark.parametrize("family", [GPT, Llama, Falcon])
def test_saved_bytes_equal_those_of_a_real_run(family: type, attention: str) -> None:
    model, sizes = small(family, attention)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    constants = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
    kept: dict[int, int] = {}

    def keep(tensor: object) -> object:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in constants:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    x = torch.randn(3, 17, 32, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model.blocks[0](x)
    graph = shipped(Variant(family=family.__name__.lower(), attention=attention, precision="half"))

    assert sum(kept.values()) == graph.block.saved_bytes.subs(sizes)
    assert output.shape == x.shape


@pytest.mark.parametrize("family", [GPT, Llama, Falcon])
def test_both_attentions_give_one_loss_and_one_gradient(family: type) -> None:
    results = []
    for attention in ("flash", "math"):
        torch.manual_seed(0)
        model, _ = small(family, attention)
        model = model.float()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        tokens = torch.randint(0, 96, (3, 17))
        loss = model(tokens, tokens.roll(-1, 1))
        loss.backward()
        logits = model(tokens)
        expected = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), tokens.roll(-1, 1).flatten()
        )
        torch.testing.assert_close(loss, expected)
        results.append([p.grad.clone() for p in model.parameters()])
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)
