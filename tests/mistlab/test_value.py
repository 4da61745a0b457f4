from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mistlab.core.values import (
    FieldError,
    bounded,
    check_field,
    check_fields,
    from_mapping,
    ratio,
    to_mapping,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    share: float = field(default=0.0, metadata=ratio())

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    count: int = field(metadata=bounded(minimum=1))
    speed: float = field(default=1.0, metadata=bounded(above=0))
    flag: bool = False
    name: str = ""
    choice: Literal["left", "right"] = "left"
    limit: int | None = field(default=None, metadata=bounded(maximum=9))
    sizes: tuple[int, ...] = field(default=(), metadata=bounded(minimum=0))
    leaves: tuple[Leaf, ...] = ()
    leaf: Leaf = field(default_factory=Leaf)
    tags: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        check_fields(self)


BAD = {
    "bool for int": ({"count": True}, "count: true is not a whole number: give"),
    "fraction for int": ({"count": 2.5}, "count: 2.5 is not a whole number: give a whole number"),
    "whole float for int": ({"count": 2.0}, "count: 2.0 is not a whole number: write 2"),
    "null for int": ({"count": None}, "count: null is not a whole number: give"),
    "NumPy bool for int": ({"count": np.bool_(True)}, "count: np.True_ is not a whole number"),
    "int too small": ({"count": 0}, "count: 0 is too small: give a whole number of at least 1"),
    "int too large": ({"limit": 10}, "limit: 10 is too large: give a whole number at most 9"),
    "quoted int": ({"count": "4"}, "count: '4' is text in YAML, not a whole number: write 4 "),
    "word for int": ({"count": "four"}, "count: 'four' is not a whole number: give"),
    "exponent": ({"speed": "1e-3"}, "speed: '1e-3' is text in YAML, not a number: write 0.001 "),
    "exponent without point": ({"speed": "1e-30"}, "write 1.0e-30 without quotes"),
    "bool for float": ({"speed": True}, "speed: true is not a number: give a number above 0"),
    "float too small": ({"speed": 0}, "speed: 0.0 is too small: give a number above 0"),
    "NaN": ({"speed": float("nan")}, "speed: nan is not a finite number: give a number above 0"),
    "infinity": ({"speed": float("inf")}, "speed: inf is not a finite number: give"),
    "NaN as text": ({"speed": "nan"}, "speed: 'nan' is not a number: give"),
    "huge int for float": ({"speed": 10**400}, "is not a finite number: give"),
    "int for bool": ({"flag": 1}, "flag: 1 is not true or false: give true or false"),
    "int for text": ({"name": 7}, "name: 7 is not text: give text"),
    "unknown choice": ({"choice": "lefft"}, "choice: 'lefft' is unknown: did you mean 'left'?"),
    "bool for choice": ({"choice": False}, "choice: false is unknown: give one of left, right"),
    "list for choice": ({"choice": ["left"]}, "choice: ['left'] is unknown"),
    "text for list": ({"sizes": "12"}, "sizes: '12' is not a list: give a list"),
    "bad item": ({"sizes": [1, -2]}, "sizes[1]: -2 is too small: give a whole number of at least"),
    "bad optional item": ({"tags": ["a", 1]}, "tags[1]: 1 is not text: give text"),
    "number for value": ({"leaf": 5}, "leaf: 5 is not a mapping: give the keys share"),
    "null for value": ({"leaf": None}, "leaf: null is not a mapping: give the keys share"),
    "negative ratio": ({"leaf": {"share": -0.1}}, "leaf.share: -0.1 is not a ratio: give a number"),
    "ratio above 1": ({"leaf": {"share": 1.5}}, "leaf.share: 1.5 is not a ratio: give a number "),
    "deep item": ({"leaves": [{}, {"share": 2}]}, "leaves[1].share: 2.0 is not a ratio: give"),
    "unknown key": ({"cuont": 3}, "cuont: unknown key: did you mean 'count'?"),
    "unknown deep key": ({"leaf": {"sahre": 1}}, "leaf.sahre: unknown key: did you mean 'share'?"),
    "key that is not a text": ({3: 3}, "3: unknown key: give one of count, speed, flag"),
    "long value": ({"sizes": "1" * 500}, f"sizes: '{'1' * 27}...{'1' * 28}' is not a list"),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD.keys())
def test_a_bad_field_is_refused_with_path_value_and_remedy(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(FieldError) as caught:
        from_mapping(Tree, {"count": 1, **change}, "top")
    joint = "" if message.startswith(("is", "write")) else "top."
    assert f"{joint}{message}" in str(caught.value)


def test_a_missing_key_says_what_to_give() -> None:
    with pytest.raises(FieldError) as caught:
        from_mapping(Tree, {}, "top")
    assert str(caught.value) == "top.count: missing: give a whole number of at least 1"


@pytest.mark.parametrize("plain", [None, [], "text"], ids=repr)
def test_what_is_no_mapping_is_refused(plain: object) -> None:
    with pytest.raises(FieldError, match=r"^top: .* is not a mapping: give the keys share$"):
        from_mapping(Leaf, plain, "top")


def test_constructing_checks_as_decoding_does() -> None:
    with pytest.raises(FieldError, match=r"^count: 0 is too small"):
        Tree(count=0)
    with pytest.raises(FieldError, match=r"^sizes: \[1\] is not a list"):
        Tree(count=1, sizes=[1])  # type: ignore[arg-type]


def test_numbers_are_stored_as_python_numbers() -> None:
    tree = Tree(count=np.int64(3), speed=np.float32(0.5), sizes=(np.int32(2),))  # type: ignore[arg-type]
    assert (type(tree.count), type(tree.speed), type(tree.sizes[0])) == (int, float, int)
    assert type(Tree(count=1, speed=2).speed) is float
    assert type(Tree(count=1, speed=np.float64(2)).speed) is float


def test_one_field_can_be_checked_alone() -> None:
    assert check_field(Tree, "speed", 2) == 2.0
    with pytest.raises(FieldError, match=r"^count: 'x' is not a whole number"):
        check_field(Tree, "count", "x")


def test_values_already_decoded_are_taken_as_they_are() -> None:
    leaf = Leaf(share=0.5)
    assert from_mapping(Tree, {"count": 1, "leaf": leaf}).leaf is leaf


def test_defaults_can_be_left_out_at_every_depth() -> None:
    tree = Tree(count=1, leaves=(Leaf(), Leaf(share=0.5)))
    assert to_mapping(tree, omit_defaults=True) == {"count": 1, "leaves": [{}, {"share": 0.5}]}


LEAVES = st.builds(Leaf, share=st.floats(0, 1))
TREES = st.builds(
    Tree,
    count=st.integers(min_value=1),
    speed=st.floats(0, exclude_min=True, allow_infinity=False),
    flag=st.booleans(),
    name=st.text(),
    choice=st.sampled_from(["left", "right"]),
    limit=st.none() | st.integers(max_value=9),
    sizes=st.lists(st.integers(min_value=0)).map(tuple),
    leaves=st.lists(LEAVES).map(tuple),
    leaf=LEAVES,
    tags=st.none() | st.lists(st.text()).map(tuple),
)


@given(tree=TREES, omit_defaults=st.booleans())
def test_a_value_comes_back_from_its_mapping(tree: Tree, omit_defaults: bool) -> None:
    assert from_mapping(Tree, to_mapping(tree, omit_defaults=omit_defaults)) == tree
