"""Sums of products: read, added up and printed as SymPy has them."""

from collections.abc import Mapping

import numpy as np
import pytest

from mistlab.core.values import InputError
from mistlab.graph.compiled import compile_expressions, compile_sums
from mistlab.graph.graph_text import expression_from
from mistlab.graph.library import Variant, graph_of, shipped
from mistlab.graph.sums import Sum, largest, source_of_sums, sum_from, where
from mistlab.graph.symbols import size_names
from mistlab.graph.treatments import TREATMENTS
from tests.workloads import workload_of

TEXTS = (
    "2*b*h*s/tp - b*h*s/tp + 3",
    "(b*(s + 1) - b)/2",
    "-(h**2 - 4*h)*s**2/(ep*tp)",
    "b/(s + h)",
    "Max(b, s/tp, 3) + Mod(h, tp)",
    "(b + s)**3/tp",
    "b - b",
)


def columns_of(names: tuple[str, ...]) -> Mapping[str, np.ndarray]:
    generator = np.random.default_rng(5)
    return {name: generator.integers(1, 50, 8).astype(float) for name in names}


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_has_the_value_that_sympy_gives_it(text: str) -> None:
    names = ("b", "s", "h", "tp", "ep")
    ours = compile_sums({"x": sum_from(text)}, columns=names)
    theirs = compile_expressions({"x": expression_from(text)}, columns=names, constants={})
    columns = columns_of(names)
    assert ours(columns) == pytest.approx(theirs(columns), rel=1e-12)


@pytest.mark.parametrize(
    "text", ["__import__('os')", "b.real", "b if s else h", "b**s", "1/0", "f("]
)
def test_a_text_that_is_no_sum_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="is not an expression in sizes"):
        sum_from(text)


def test_sums_of_a_block_are_those_that_sympy_adds_up() -> None:
    """Memory, peaks, parameters and operations of a block with experts, at random sizes."""
    variant = Variant(family="llama", attention="flash", precision="half", parts=("experts",))
    work = workload_of("mixtral-8x7b", 2048, 8, "bf16")
    block, names = shipped(variant).block, size_names()
    ours = graph_of(work).counts.block
    pairs = {
        "saved": (ours.saved_bytes, block.saved_bytes),
        "parameters": (ours.parameter_count, block.parameter_count),
        "experts": (ours.expert_parameter_count, block.expert_parameter_count),
        "peak": tuple(largest(p.size_bytes for p in one.peaks) for one in (ours, block)),
    }
    for number, (own, other) in enumerate(zip(ours.operators, block.operators, strict=True)):
        pairs[f"flop of {number}"] = own.flop, other.flop
        pairs[f"bytes of {number}"] = own.read_bytes, other.read_bytes
    columns = columns_of(names)
    summed = compile_sums({name: pair[0] for name, pair in pairs.items()}, columns=names)
    expressed = compile_expressions(
        {name: pair[1] for name, pair in pairs.items()}, columns=names, constants={}
    )
    assert summed(columns) == pytest.approx(expressed(columns), rel=1e-12)


def test_a_sum_begins_with_a_sum_before_it_and_never_subtracts() -> None:
    short, longer, other = (
        sum_from(text) for text in ("b + s", "b + 2*s + h", "2*h*s/tp + 2*b*s/tp - b")
    )
    source = source_of_sums([longer, short, other], ("b", "s", "h", "tp"))
    assert "x0 + s + h" in source
    assert "-" not in source.replace("(-1)", "")


def test_truths_add_up_as_numbers() -> None:
    both = where("numpy.greater(b, 1)") + where("numpy.greater(s, 1)")
    compiled = compile_sums({"both": both}, columns=("b", "s"))
    assert compiled({"b": np.array([1, 2, 2]), "s": np.array([1, 1, 2])}).tolist() == [[0, 1, 2]]


def test_an_unknown_size_is_named() -> None:
    with pytest.raises(ValueError, match="symbols h are neither columns nor constants"):
        source_of_sums([Sum.named("h")], ("b",))


def test_treated_blocks_are_made_of_sums_as_of_expressions() -> None:
    """Recomputed blocks of a traced family run the operators again that SymPy's graph does."""
    variant = Variant(family="gpt", attention="math", precision="half")
    work = workload_of("gpt3-1.3b", 2048, 8, attention="math")
    block, traced = graph_of(work).counts.block, shipped(variant).block
    for row in TREATMENTS.values():
        own, other = row.graph(block), row.graph(traced)
        assert [o.name for o in own.again] == [o.name for o in other.again]
        assert len(own.saved) == len(other.saved)
