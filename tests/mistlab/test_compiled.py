"""Compiled columns against SymPy's own evaluation of the same expressions."""

import numpy as np
import pytest
import sympy

from mistlab.engines.engine import ENGINES
from mistlab.graph.compiled import ROWS_AT_ONCE, compile_expressions
from mistlab.graph.layer_types import expressions_of
from mistlab.graph.library import Variant, shipped
from mistlab.graph.stage_expressions import Parameters, gradients, optimizer, weights
from mistlab.graph.sums import expanded, undominated
from mistlab.graph.symbols import size_symbol

CONSTANTS = {"s": 2048, "h": 1024, "n": 16, "k": 16, "d": 64, "f": 4096, "V": 50304}


def test_block_memory_equals_sympy_row_by_row() -> None:
    block = expressions_of(shipped(Variant(family="gpt", attention="math", precision="half")).block)
    expressions = {
        "saved": block.saved_bytes,
        "forward": block.forward_peak_bytes,
        "backward": block.backward_peak_bytes,
        "flop": block.flop("backward"),
    }
    rows = ROWS_AT_ONCE + 3
    columns = {"b": np.arange(rows) % 7 + 1, "tp": 2 ** (np.arange(rows) % 4)}

    values = compile_expressions(expressions, columns=("b", "tp"), constants=CONSTANTS)(columns)

    for row in (0, 3, ROWS_AT_ONCE, rows - 1):
        sizes = CONSTANTS | {name: int(column[row]) for name, column in columns.items()}
        numbers = {size_symbol(name): value for name, value in sizes.items()}
        expected = [float(e.xreplace(numbers)) for e in expressions.values()]
        assert values[:, row].tolist() == expected


def dense(count: int) -> Parameters:
    return Parameters(every=sympy.Integer(count), experts=sympy.Integer(0))


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_states_shard_by_zero_level_and_split_by_ratio(zero: int) -> None:
    states, memory = [weights, gradients, optimizer], ENGINES["mistlab"].memory["fp16"]
    sizes = (memory.weight, memory.gradient, memory.optimizer)
    blocks, ends = ([count * size for size in sizes] for count in (1200.0, 400.0))
    shards = [4 if zero >= level else 1 for level in (3, 2, 1)]
    expressions = {}
    for state in states:
        made = state(dense(1200), dense(400), memory)
        expressions |= {
            f"{state.__name__} device": made.device,
            f"{state.__name__} host": made.host,
        }
    names = ("dp", "cp", "rp", "z", "ww", "wg", "wo")
    chosen = (2, 2, 1, zero, 0.25, 0.5, 1.0)
    columns = {n: np.array([v]) for n, v in zip(names, chosen, strict=True)}

    values = compile_expressions(expressions, columns=names, constants={})(columns)[:, 0]

    # What is offloaded is a share of the blocks; the ends of the model stay.
    expected = [
        part
        for block, end, count, ratio in zip(blocks, ends, shards, (0.25, 0.5, 1.0), strict=True)
        for part in ((block * (1 - ratio) + end) / count, block * ratio / count)
    ]
    assert values.tolist() == pytest.approx(expected, rel=1e-15)


def test_a_symbol_without_a_value_is_named() -> None:
    with pytest.raises(ValueError, match="symbols h are neither"):
        compile_expressions({"x": size_symbol("h")}, columns=("b",), constants={})


def test_only_terms_that_can_be_the_largest_are_kept() -> None:
    b, s = size_symbol("b"), size_symbol("s")
    terms = [b, b + s, 2 * b, b * s]
    assert undominated(terms, lambda term: term) == [b + s, 2 * b, b * s]


def test_expanding_is_left_out_only_where_nothing_is_to_expand() -> None:
    b, s, h = (size_symbol(name) for name in "bsh")
    ring = sympy.Piecewise((2 * b * s, s > 1), (0, True))
    for expression in (
        *(b, 2 * b * s**2 / h + 3 + ring, b * (s + h) + 1, (b + s) ** 2, sympy.Max(b * (s + h), h)),
        sympy.Piecewise((b * (s + h), s > 1), (0, True)) + b,
    ):
        assert expanded(expression) == sympy.expand(expression)


def test_terms_of_other_signs_and_fractions_decide_which_is_the_largest() -> None:
    b, s = size_symbol("b"), size_symbol("s")
    terms = [b / 2 - s, b - s, b - s / 3, b]
    assert undominated(terms, lambda term: term) == [b]
    assert undominated([b - s, s - b], lambda term: term) == [b - s, s - b]


def test_extremes_of_three_columns_are_compiled() -> None:
    a, b, c = sympy.symbols("a b c")
    compiled = compile_expressions(
        {"least": sympy.Min(a, b, c), "most": sympy.Max(a, b, c)},
        columns=("a", "b", "c"),
        constants={},
    )
    columns = {"a": np.array([1.0]), "b": np.array([2.0]), "c": np.array([3.0])}
    assert compiled(columns).tolist() == [[1.0], [3.0]]
