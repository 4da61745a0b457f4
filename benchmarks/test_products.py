"""Compares a block's backward pass whose GEMMs add to the weight gradients with one in which
autograd makes each weight gradient and then adds it.

Both blocks already have gradients, as after a step's first micro-batch. The two passes take turns
within a round. ``extra_info`` has the ratio of the medians, and the quartiles of the rounds'
ratios: by what factor the passes whose GEMMs add are slower. There is a size that arithmetic limits
(``large``), one that reading weights limits (few tokens, ``wide``), and one that the host limits
(``tiny``).
"""

from collections.abc import Callable
from statistics import median, quantiles
from time import process_time
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from runtime.comm.group import Alone  # noqa: E402
from runtime.engine.streams.device_streams import SimulatedStreams  # noqa: E402
from runtime.engine.streams.lanes import StreamedRanks  # noqa: E402
from runtime.engine.work.products import add_up_inside  # noqa: E402
from runtime.models.families import model_of  # noqa: E402
from runtime.profiling.launches import undisturbed  # noqa: E402
from tests.runtime.worlds import workload  # noqa: E402

ROUNDS = 20
# For each size of block: channels, tokens, and backward passes in a round.
SIZES = {"large": (512, 512, 1), "wide": (1024, 8, 2), "tiny": (64, 8, 30)}


def backward(channels: int, tokens: int, *, inside: bool) -> Callable[[], float]:
    """A function that times a backward pass of a GPT block in 32 bits."""
    sizes = {"hidden": channels, "heads": 4, "ffn": 4 * channels, "sequence_length": tokens}
    block = model_of(workload("gpt", layers=1, **sizes)).blocks[0]
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
        parameter.grad = torch.zeros_like(parameter)
    if inside:
        add_up_inside(block, StreamedRanks(Alone(), SimulatedStreams(spoils=False)))
    x = torch.randn(1, tokens, channels, requires_grad=True)

    def seconds() -> float:
        y = block(x)
        gradient = torch.ones_like(y)
        begin = process_time()
        y.backward(gradient)
        return process_time() - begin

    return seconds


@pytest.mark.parametrize("size", SIZES)
def test_a_backward_pass_that_adds_inside_its_products(benchmark: Any, size: str) -> None:
    channels, tokens, passes = SIZES[size]
    adding, plain = (backward(channels, tokens, inside=inside) for inside in (True, False))
    pairs: list[tuple[float, float]] = []

    def turn() -> None:
        both = [(adding(), plain()) for _ in range(passes)]
        pairs.append((sum(one for one, _ in both), sum(other for _, other in both)))

    with undisturbed():
        turn()
        pairs.clear()
        benchmark.pedantic(turn, rounds=ROUNDS)
    inside_s, plain_s = (median(seconds) for seconds in zip(*pairs, strict=True))
    benchmark.extra_info["times_plain"] = inside_s / plain_s
    found = quantiles([one / other for one, other in pairs], n=4)
    benchmark.extra_info["quartiles"] = (found[0], found[2])
