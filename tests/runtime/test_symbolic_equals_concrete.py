"""The theorem of the tracer: a symbolic graph at given sizes is the graph traced with numbers."""

import random
from functools import cache
from types import CodeType

import pytest

torch = pytest.importorskip("torch")

from mistlab.symbolic.graph import ModelGraph  # noqa: E402
from mistlab.symbolic.graphfile import to_mapping  # noqa: E402
from mistlab.symbolic.layer import expressions_of  # noqa: E402
from mistlab.symbolic.library import Variant, shipped, variants  # noqa: E402
from runtime.tracing.symbolic_sizes import SizeSpace  # noqa: E402
from runtime.tracing.traced_families import Sizes, trace_sizes, trace_variant  # noqa: E402
from tests.sweep import sweep  # noqa: E402

PLAIN = [variant for variant in variants() if not variant.parts]
OF_TODAY = [variant for variant in variants() if variant.parts]
# Variants of today are large, and most of them are left to make test-all.
CASES = [
    *sweep(range(200), first=16),
    *(
        pytest.param(200 + place, marks=[pytest.mark.slow] * (place % 10 > 0))
        for place in range(2 * len(OF_TODAY))
    ),
]


def random_case(seed: int) -> tuple[Variant, Sizes]:
    """A variant and small sizes, ones included: ranks with one head, batches of one."""
    draw = random.Random(seed)
    variant = draw.choice(PLAIN) if seed < 200 else OF_TODAY[(seed - 200) % len(OF_TODAY)]
    tp = draw.choice([1, 2, 3, 4, 8])
    splits_tokens = variant.sequence_parallel or "experts" in variant.parts
    # Bytes of a scan's states are whole, as where sequences are whole chunks.
    lengths = [32, 96] if "state_space" in variant.parts else [2, 5, 16, 33]
    k = tp * draw.choice([1, 2, 3])
    grouped = variant.family == "llama"
    return variant, Sizes(
        b=draw.randint(1, 5),
        s=draw.choice(lengths) * (tp if splits_tokens else 1),
        h=draw.choice([16, 40, 64]),
        n=k * (draw.choice([1, 2, 4]) if grouped else 1),
        k=k,
        d=draw.choice([4, 8, 12]),
        r=draw.choice([2, 4]),
        f=tp * draw.choice([1, 8, 20]),
        V=tp * draw.choice([32, 50]),
        tp=tp,
        **sizes_of_parts(variant, draw, tp),
    )


def sizes_of_parts(variant: Variant, draw: random.Random, tp: int) -> dict[str, int]:
    """Sizes of the parts that the variant has; experts on two ranks at least."""
    if not variant.parts:
        return {}
    ep, et = draw.choice([2, 3, 4]), draw.choice([1, 2])
    a = draw.choice([1, 2, 3])
    sizes = {"w": draw.choice([1, 2]), "u": draw.choice([3, 8]), "m": draw.choice([4, 6])}
    sizes |= {"v": draw.choice([2, 8]), "ep": ep, "et": et, "E": ep * draw.choice([2, 4])}
    # Of experts with one channel a rank torch sums no gradient up: there is nothing to sum.
    sizes |= {"a": a, "A": a * draw.choice([1, 2]), "j": et * draw.choice([2, 6])}
    g = tp * draw.choice([1, 2])
    sizes |= {
        "g": g,
        "q": g * draw.choice([1, 3]),
        "p": draw.choice([4, 6]),
        "e": draw.choice([2, 8]),
    }
    return {**sizes, "y": tp * draw.choice([1, 5]), "l": draw.choice([8, 12])}


def evaluate(value: object, sizes: Sizes) -> object:
    """A graph's mapping with each expression as the number that it has for ``sizes``."""
    if isinstance(value, dict):
        return {
            key: item if key in TEXTS else evaluate(item, sizes)
            for key, item in value.items()
            if key not in {"peaks", "conditions", "assumptions"}
        }
    if isinstance(value, list):
        return [evaluate(item, sizes) for item in value]
    if isinstance(value, str):
        # Python's own arithmetic on the graph file's text; quotients are whole, so exact.
        return eval(code_of(value), {"Max": max}, vars_of(sizes))
    return value


@cache
def code_of(text: str) -> CodeType:
    return compile(text, "<graph>", "eval")


def vars_of(sizes: Sizes) -> dict[str, int]:
    return {name: getattr(sizes, name) for name in Sizes.__dataclass_fields__}


TEXTS = {"name", "kind", "phase", "module", "dtype", "attention", "precision"}


def peaks(graph: ModelGraph) -> list[str]:
    """Both peaks of each layer as texts."""
    sums = [expressions_of(layer) for layer in graph.layers]
    return [str(text) for one in sums for text in (one.forward_peak_bytes, one.backward_peak_bytes)]


@cache
def texts_of(variant: Variant) -> tuple[object, list[str]]:
    """A shipped graph's mapping and its peaks: printing them takes longer than a concrete trace."""
    graph = shipped(variant)
    return to_mapping(graph), peaks(graph)


@pytest.mark.parametrize("seed", CASES)
def test_shipped_expressions_count_what_a_concrete_trace_counts(seed: int) -> None:
    variant, sizes = random_case(seed)
    mapping, of_peaks = texts_of(variant)

    concrete = trace_sizes(variant, sizes, SizeSpace())

    assert evaluate(mapping, sizes) == evaluate(to_mapping(concrete), sizes)
    assert evaluate(of_peaks, sizes) == evaluate(peaks(concrete), sizes)


# Those that differ from another in precision, biases or dropout are left to make test-all. So are
# those with attention written out, but one family's, and with sequence parallelism, but another's.
ALL_VARIANTS = [
    pytest.param(one, id=one.name, marks=[pytest.mark.slow] * is_further)
    for one in variants()
    for is_further in (
        one.precision == "single"
        or one.biases
        or one.dropout
        or len(one.parts) > 1
        or (one.parts and one.family == "gpt")
        or (one.parts and one.sequence_parallel and "experts" not in one.parts)
        or (one.attention == "math" and (one.family != "gpt" or one.sequence_parallel))
        or (one.sequence_parallel and one.family != "llama"),
    )
]


@pytest.mark.parametrize("variant", ALL_VARIANTS)
def test_shipped_graph_is_what_tracing_makes_today(variant: Variant) -> None:
    assert trace_variant(variant) == shipped(variant)


@pytest.mark.parametrize("variant", variants(), ids=lambda variant: variant.name)
def test_shipped_graph_branches_on_no_size(variant: Variant) -> None:
    assert shipped(variant).assumptions == ()
