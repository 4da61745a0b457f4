"""Partitions of chains of products: costs by hand, and the same paths walked with real numbers."""

import itertools

import numpy as np
import pytest

from experiments.studies.partitions import (
    BY_COLUMNS,
    BY_ROWS,
    COLLECTIVES,
    Partition,
    all_partitions,
    block,
    chain,
    forced_to,
    mirrored,
    shortest,
    weight,
    weight_ways,
)
from mistlab.core.values import InputError

THREE = chain(3)
ROWS_COLUMNS_COLUMNS = {"W1": "rows", "W2": "columns", "W3": "columns"}
ROWS_ROWS_COLUMNS = {"W1": "rows", "W2": "rows", "W3": "columns"}
# Megatron-LM's.
PUBLISHED = ("rows", "columns", "rows", "columns")
RANKS = 4


def test_three_products_cost_four_messages_or_three() -> None:
    # Partial sums are all-reduced before W3 and at the end: 2 + 2; or gathered before W2: 1 + 2.
    without = ("all_reduce", "all_gather")
    first = shortest(forced_to(THREE, ROWS_COLUMNS_COLUMNS), collectives=without)
    second = shortest(forced_to(THREE, ROWS_ROWS_COLUMNS), collectives=without)

    assert [(one.before, one.collective) for one in first.messages] == [
        ("W3", "all_reduce"),
        ("the end", "all_reduce"),
    ]
    assert first.cost == 4
    assert [(one.before, one.collective) for one in second.messages] == [
        ("W2", "all_gather"),
        ("the end", "all_reduce"),
    ]
    assert second.cost == 3
    assert shortest(THREE, collectives=without).cost == 3


def test_a_reduce_scatter_makes_both_cost_three() -> None:
    first = shortest(forced_to(THREE, ROWS_COLUMNS_COLUMNS))
    assert [one.collective for one in first.messages] == ["reduce_scatter", "all_reduce"]
    assert first.cost == shortest(THREE).cost == 3


def test_widths_weigh_messages() -> None:
    # A narrow output of W1 makes gathering it cheap, a wide one makes scattering W2's cheap.
    narrow = (weight("W1", 0.5), weight("W2"), weight("W3"))
    wide = (weight("W1", 2.0), weight("W2"), weight("W3"))
    assert weight_ways(narrow, shortest(narrow)) == ("rows", "rows", "columns")
    assert shortest(narrow).cost == 2.5
    assert weight_ways(wide, shortest(wide))[:2] == ("rows", "columns")
    assert shortest(wide).cost == 3


def test_all_partitions_of_a_chain_are_listed_cheapest_first() -> None:
    found = list(all_partitions(THREE))
    assert len({weight_ways(THREE, one) for one in found}) == len(found) == 8
    assert [one.cost for one in found] == sorted(one.cost for one in found)
    assert found[0].cost == shortest(THREE).cost


def test_the_published_partition_of_a_block_is_among_the_best() -> None:
    # A projection by rows gathers the heads' outputs and its own: as many bytes in more messages.
    found = list(all_partitions(block(["whole"])))
    assert weight_ways(block(), found[0]) == PUBLISHED
    assert [one.collective for one in found[0].messages] == ["all_reduce", "all_reduce"]
    assert [one.cost for one in found[:3]] == [4, 4, 7]
    assert weight_ways(block(), found[1]) == ("rows", "rows", "rows", "columns")
    assert len(found[1].messages) == 3


def test_sequence_parallelism_is_the_same_path_with_reduce_scatters() -> None:
    found, second, *_ = all_partitions(block(["tokens"]), start="tokens", end="tokens")
    assert weight_ways(block(), found) == PUBLISHED
    assert (found.cost, second.cost) == (4, 5)
    assert [(one.before, one.collective) for one in found.messages] == [
        ("QKV", "all_gather"),
        ("residual 1", "reduce_scatter"),
        ("up", "all_gather"),
        ("residual 2", "reduce_scatter"),
    ]


def test_a_stream_that_may_change_its_layout_gains_nothing() -> None:
    assert shortest(block()).cost == 4
    assert shortest(block(), start="tokens", end="tokens").cost == 4


def test_what_a_forward_pass_saves_the_backward_pass_pays() -> None:
    # W1 by rows is W1 transposed by columns; the backward pass begins with W3.
    without = ("all_reduce", "all_gather")
    costs = [
        [shortest(one, collectives=without).cost for one in (forward, mirrored(forward))]
        for forward in (
            forced_to(THREE, ways) for ways in (ROWS_COLUMNS_COLUMNS, ROWS_ROWS_COLUMNS)
        )
    ]
    assert costs == [[4, 3], [3, 4]]


def test_a_block_costs_as_much_backward() -> None:
    published = forced_to(
        block(["whole"]), dict(zip(("QKV", "projection", "up", "down"), PUBLISHED, strict=True))
    )
    backward = mirrored(published)
    assert [one.name for one in backward if one.ways == (BY_ROWS,)] == ["down", "projection"]
    assert [one.output for one in backward] == [1, 4, 4, 1, 1, 1, 1, 3, 1, 1]
    assert mirrored(backward) == published
    assert shortest(published).cost == shortest(backward).cost == 4


@pytest.mark.parametrize("ways", [*itertools.product(("rows", "columns"), repeat=3)], ids=str)
def test_ranks_that_walk_a_path_get_the_product(ways: tuple[str, ...]) -> None:
    draw = np.random.default_rng(0)
    weights = draw.standard_normal((3, 8, 8))
    x = draw.standard_normal((8, 2))
    chosen = {f"W{number + 1}": way for number, way in enumerate(ways)}
    for collectives in (COLLECTIVES, ("all_reduce", "all_gather")):
        found = shortest(forced_to(THREE, chosen), collectives=collectives)
        y, passed = walked(found, weights, x)
        np.testing.assert_allclose(y, weights[2] @ weights[1] @ weights[0] @ x)
        # Each pass of M bytes takes a share of (n - 1) / n of it past a link.
        assert passed == pytest.approx(found.cost * x.size * (RANKS - 1) / RANKS)


def walked(partition: Partition, weights: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, float]:
    """What each rank ends with when all walk a path, and the numbers that passed its link."""
    layout, parts, passed = "whole", [x] * RANKS, 0.0
    names = [f"W{number + 1}" for number in range(len(weights))]
    for name, way, matrix in zip(names, partition.ways, weights, strict=True):
        needs = {one.name: one.needs for one in (BY_ROWS, BY_COLUMNS)}[way]
        layout, parts, sent = changed(partition, name, layout, parts, needs)
        passed += sent
        axis = 0 if way == "rows" else 1
        shares = np.split(matrix, RANKS, axis=axis)
        parts = [share @ part for share, part in zip(shares, parts, strict=True)]
        layout = "split" if way == "rows" else "partial"
    layout, parts, sent = changed(partition, "the end", layout, parts, "whole")
    for part in parts:
        np.testing.assert_allclose(part, parts[0])
    return parts[0], passed + sent


def changed(
    partition: Partition, before: str, layout: str, parts: list[np.ndarray], needs: str
) -> tuple[str, list[np.ndarray], float]:
    """The parts after the messages before an operator, and what passed a link."""
    passed = 0.0
    for message in partition.messages:
        if message.before != before:
            continue
        share = (RANKS - 1) / RANKS
        if message.collective == "all_gather":
            assert layout == "split"
            layout, parts = "whole", [np.concatenate(parts)] * RANKS
            passed += share * parts[0].size
        else:
            assert layout == "partial"
            total = np.sum(parts, axis=0)
            if message.collective == "all_reduce":
                layout, parts = "whole", [total] * RANKS
                passed += 2 * share * total.size
            else:
                layout, parts = "split", np.split(total, RANKS)
                passed += share * total.size
    if layout == "whole" and needs == "split":
        layout, parts = "split", np.split(parts[0], RANKS)
    assert layout == needs
    return layout, parts, passed


def test_what_no_collective_can_do_is_refused() -> None:
    with pytest.raises(InputError, match="collectives: reduce_scatter cannot turn the layouts"):
        shortest(chain(2), collectives=("reduce_scatter",))
