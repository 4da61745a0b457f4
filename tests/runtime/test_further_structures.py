"""Blocks with windows and with norms after their halves, against traces and plain arithmetic."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from mistlab.graph.graph import PHASES, LayerGraph  # noqa: E402
from mistlab.graph.layer_types import expressions_of  # noqa: E402
from mistlab.graph.library import Variant, graph_of  # noqa: E402
from mistlab.plan.model_parts import Window  # noqa: E402
from mistlab.plan.workload import ModelSpec, Workload  # noqa: E402
from runtime.tracing.traced_families import trace_variant  # noqa: E402
from tests.runtime.test_blocks_of_today import SIZES, block_of, variant  # noqa: E402

SIZED = {"hidden": 256, "layers": 4, "heads": 4}
WINDOWED = [
    (ModelSpec.of(family="llama", **SIZED), ()),
    pytest.param(
        ModelSpec.of(family="falcon", mlp_type="gated_mlp", activation="silu", **SIZED),
        ("gated",),
        marks=pytest.mark.slow,
    ),
    pytest.param(
        ModelSpec.of(family="gpt", position_embedding="rotary", biases=True, **SIZED),
        ("rotary",),
        marks=pytest.mark.slow,
    ),
    pytest.param(
        ModelSpec.of(family="llama", qk_norm=True, post_norms=True, **SIZED),
        ("qk_norm", "post_norms"),
        marks=pytest.mark.slow,
    ),
]


def work(model: ModelSpec, sequence_length: int = 512) -> Workload:
    return Workload(
        model=model,
        sequence_length=sequence_length,
        global_batch=1,
        attention="flash",
        precision="bf16",
    )


def sums(layer: LayerGraph) -> dict[str, str]:
    """Everything that predictions take of a layer, as texts."""
    made = expressions_of(layer)
    found = {
        f"{phase} {kind}": f"{one.operators} {one.flop} {one.moved_bytes}"
        for (phase, kind), one in made.work.items()
    }
    for name in ("parameters", "saved_bytes", "forward_peak_bytes", "backward_peak_bytes"):
        found[name] = str(getattr(made, name))
    return {**found, **{phase: str(made.flop(phase)) for phase in PHASES}}


@pytest.mark.parametrize(("model", "parts"), WINDOWED)
def test_a_graph_with_windows_counts_what_a_trace_with_windows_counts(
    model: ModelSpec, parts: tuple[str, ...]
) -> None:
    place = parts.index("post_norms") if "post_norms" in parts else len(parts)
    traced = trace_variant(
        Variant(
            family=model.family,
            attention="flash",
            precision="half",
            biases=model.biases,
            parts=(*parts[:place], "window", *parts[place:]),
        )
    )
    made = graph_of(work(replace(model, window=Window(size=128, full_every=0)))).graph
    assert sums(made.block) == sums(traced.block)
    assert sums(made.block) != sums(graph_of(work(model)).graph.block)


def test_a_window_that_no_sequence_is_longer_than_is_none() -> None:
    plain = ModelSpec.of(family="llama", **SIZED)
    windowed = replace(plain, window=Window(size=512, full_every=0))
    assert graph_of(work(windowed, 512)) == graph_of(work(plain, 512))
    assert graph_of(work(windowed, 514)) != graph_of(work(plain, 514))
    turns = graph_of(work(replace(plain, window=Window(size=128, full_every=4))))
    assert turns.pattern == (*("windowed",) * 3, "block")


def test_norms_after_both_halves_normalise_what_is_added() -> None:
    block = block_of(variant("post_norms"), torch.float32)
    x = torch.randn(SIZES["b"], SIZES["s"], SIZES["h"])
    attended = block.attention(block.attention_norm(x))
    between = x + block.attention_post_norm(attended)
    expected = between + block.mlp_post_norm(block.mlp(block.mlp_norm(between)))
    torch.testing.assert_close(block(x), expected)
    without = replace(variant("post_norms"), parts=())
    assert not torch.allclose(block_of(without, torch.float32)(x), expected)
