"""A block that recomputes attention's core: made of the plain block's graph, and traced."""

from collections import Counter
from functools import cache, partial

import numpy as np
import pytest
from numpy.typing import NDArray

torch = pytest.importorskip("torch")

from torch.utils.checkpoint import checkpoint  # noqa: E402

from mistlab.graph.compiled import compile_expressions  # noqa: E402
from mistlab.graph.graph import LayerGraph, Operator  # noqa: E402
from mistlab.graph.layer_types import expressions_of  # noqa: E402
from mistlab.graph.library import Variant, shipped  # noqa: E402
from mistlab.graph.treatments import core_recomputed  # noqa: E402
from runtime.models import attention  # noqa: E402
from runtime.tracing.trace import OperatorRecorder  # noqa: E402
from runtime.tracing.traced_families import trace_variant  # noqa: E402

VARIANTS = [
    Variant(family="gpt", attention="math", precision="half", dropout=True),
    Variant(family="llama", attention="flash", precision="half", sequence_parallel=True),
]
SIZES = (
    {"b": 1, "s": 2048, "h": 2048, "n": 16, "k": 16, "d": 128, "r": 128, "f": 8192, "tp": 1},
    {"b": 4, "s": 4096, "h": 4096, "n": 32, "k": 8, "d": 128, "r": 128, "f": 14336, "tp": 8},
    {"b": 2, "s": 512, "h": 1024, "n": 16, "k": 16, "d": 64, "r": 64, "f": 4096, "tp": 2},
)


@cache
def traced(variant: Variant) -> LayerGraph:
    """The block of a model whose attention is recomputed by torch."""
    again = partial(
        checkpoint, attention._attend_to_parts, use_reentrant=True, preserve_rng_state=False
    )
    keep = OperatorRecorder._keep

    def keep_forward(recorder: OperatorRecorder, tensor: torch.Tensor) -> torch.Tensor:
        # What runs again keeps tensors as well, within the backward pass.
        return tensor if recorder.phase == "backward" else keep(recorder, tensor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_attend_to_parts", again)
        patch.setattr(OperatorRecorder, "_keep", keep_forward)
        return trace_variant(variant).block


def counted(operators: tuple[Operator, ...]) -> Counter[tuple[str, object]]:
    return Counter((o.name, o.flop) for o in operators)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_it_keeps_and_runs_what_a_trace_does(variant: Variant) -> None:
    made, found = core_recomputed(shipped(variant).block), traced(variant)
    assert made.saved_bytes == found.saved_bytes
    assert counted(made.of_phase("forward")) == counted(found.of_phase("forward"))
    backward = counted(made.of_phase("backward")) + counted(made.again)
    assert backward == counted(found.of_phase("backward"))


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_its_peaks_are_those_of_a_trace(variant: Variant) -> None:
    """Never below, and at the fullest moment of both passes at most an eighth above: torch frees
    what the core makes in its first forward pass sooner than a plain block does."""
    made, found = peaks(core_recomputed(shipped(variant).block)), peaks(traced(variant))
    assert (made >= found).all()
    assert (made.max(axis=0) <= 1.125 * found.max(axis=0)).all()


def peaks(block: LayerGraph) -> NDArray[np.float64]:
    """Both peaks of a block (2, sizes)."""
    sums = expressions_of(block)
    of_passes = {"forward": sums.forward_peak_bytes, "backward": sums.backward_peak_bytes}
    columns = {name: np.array([sizes[name] for sizes in SIZES]) for name in SIZES[0]}
    return compile_expressions(of_passes, columns=tuple(columns), constants={})(columns)
