"""Lists the ways in which a stage may run a block (plain, recomputed, lean, ...), called
treatments, and makes their layer graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from mistlab.graph.attention_core import core_recomputed
from mistlab.graph.graph import LayerGraph, Operator, Peak, SavedTensor
from mistlab.graph.lean import lean
from mistlab.graph.stored_graph import DTYPE_OF_4
from mistlab.graph.sums import Sum, expanded, factors_of, names_in, sympy, total
from mistlab.plan.dimensions import RECOMPUTED
from mistlab.plan.lean_sets import ALL, SETS

# Makes blocks that recompute every second GEMM, as in torchtitan's selective activation
# checkpointing ``op``.


# These operators all-gather tokens, and are recomputed too.
_GATHERS = frozenset(("mistlab.gather_tokens", "mistlab.gather_again"))
_JOINT, _GATE = "qkv", "mistlab.swiglu"
# The share of each term of a GEMM's size that is recomputed, by the symbol in the term; terms
# without any of the symbols are recomputed whole.
_Shares = Mapping[str, Fraction]
_KEYS: _Shares = {"k": Fraction(1, 2), "n": Fraction(0)}
_NETWORK: _Shares = {"f": Fraction(1, 2), "j": Fraction(1, 2)}


def products_recomputed(block: LayerGraph) -> LayerGraph:
    """The graph of a block that keeps the results of every second GEMM, and recomputes the others.

    A block keeps its input, the output of attention, and the results of its first GEMM, its third,
    and so on. Before its backward pass it recomputes everything else: the other GEMMs, norms,
    rotary embeddings, gates, and gathers of tokens; results of all-reduces and reduce-scatters are
    kept (``torchtitan/distributed/activation_checkpoint.py``). Nothing needs the result of the last
    GEMM. GEMMs of 4-bit operands are all recomputed: torchtitan's list of results to keep names
    ``aten.mm``, but these call ``scaled_mm`` (torchao's ``nvfp4_linear.py``).

    One GEMM of the graph may stand for several GEMMs of torch, which are counted one by one:
    queries, keys and values are three, of which the second (keys) is recomputed; gate and values of
    the feed-forward network are two, of which one is recomputed.
    """
    kept, again = [block.input_bytes], []
    for operator, part in _parts(block):
        if part is None:
            kept.append(operator.written_bytes)
        elif operator.kind == "collective" and operator.name not in _GATHERS:
            continue
        else:
            again.append(part)
            kept.append(operator.written_bytes - part.written_bytes)
    size = expanded(total(kept, like=block.input_bytes))
    saved = SavedTensor(module="", shape=(), dtype="", size_bytes=size, is_input=True)
    peaks = (
        Peak(phase="backward", operator=p.operator, size_bytes=p.size_bytes + block.output_bytes)
        for p in block.peaks
        if p.phase == "forward"
    )
    return replace(block, saved=(saved,), again=tuple(again), peaks=(*block.peaks, *peaks))


def _parts(block: LayerGraph) -> Iterator[tuple[Operator, Operator | None]]:
    """The forward operators of a block, each with the part of it that is recomputed, or None if its
    result is kept.
    """
    forward = block.of_phase("forward")
    last = [one for one in forward if one.kind == "matmul"][-1:]
    gates = {one.module for one in forward if one.name == _GATE}
    count = 0
    for operator in forward:
        if operator.kind == "attention":
            yield operator, None
        elif operator.kind != "matmul" or operator.dtype == DTYPE_OF_4:
            yield operator, operator
        elif operator.module.endswith(_JOINT):
            count += 3
            yield operator, _part(operator, _KEYS)
        elif operator.module.rpartition(".")[0] in gates and operator not in last:
            count += 2
            yield operator, _part(operator, _NETWORK)
        else:
            count += 1
            if count % 2 == 0:
                yield operator, operator
            elif operator not in last:
                yield operator, None


def _part(operator: Operator, shares: _Shares) -> Operator:
    """The part of a GEMM that is recomputed, where it stands for several of torch's GEMMs."""
    return replace(
        operator,
        flop=_scaled(operator.flop, shares),
        read_bytes=_scaled(operator.read_bytes, shares),
        written_bytes=_scaled(operator.written_bytes, shares),
    )


def _scaled(size: Any, shares: _Shares) -> Any:
    """Multiply each term of a size by the share of the first listed symbol that occurs in the
    term.
    """
    terms = []
    for term, factor in factors_of(expanded(size)).items():
        term_sum = Sum({term: factor}) if isinstance(size, Sum) else term * sympy.sympify(factor)
        names = names_in(term_sum)
        share = next((share for name, share in shares.items() if name in names), Fraction(1))
        terms.append(term_sum * (share if isinstance(size, Sum) else sympy.sympify(share)))
    return total(terms, like=size)


# Lists the ways in which a stage may run a block.


PLAIN = "plain"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Treatment:
    """One way to run blocks other than plain, such as recomputed; ``TREATMENTS`` lists all of them
    by name.

    Each treatment has a dimension of a stage, ``dimension``, that counts the blocks to treat so;
    the other blocks are plain. Plain blocks come first, then treated ones in the table's order.

    ``graph`` makes the layer graph of a treated block from that of a plain block; if the treatment
    ``is_chosen``, ``graph`` also takes the kinds of operators to treat. With ``runs_again`` treated
    blocks run all or part of their forward pass again before their backward pass. With
    ``peaks_as_plain`` a treated block needs, at its own peak, at least as much memory as a plain
    block; the stage's peak is then never in the last plain block.
    """

    dimension: str = ""
    graph: Callable[..., LayerGraph]
    peaks_as_plain: bool = False
    runs_again: bool = True
    is_chosen: bool = False

    def of(self, block: LayerGraph, chosen: int = ALL) -> LayerGraph:
        """The layer graph of a block that is run in this way.

        ``chosen`` are the stage's lean operators.
        """
        return self.graph(block, SETS[chosen]) if self.is_chosen else self.graph(block)


def treatments_of(stage: Callable[[str], float]) -> list[str]:
    """The way in which each block of a stage is run, in the stage's order; ``stage`` returns a
    choice of the stage by its name.
    """
    treatments = [PLAIN] * int(stage("layers"))
    end = len(treatments)
    for name, row in reversed(TREATMENTS.items()):
        count = int(stage(row.dimension))
        treatments[end - count : end] = [name] * count
        end -= count
    return treatments


def recomputed(block: LayerGraph) -> LayerGraph:
    """The graph of a block with full recomputation: it keeps only its input, and runs its forward
    pass again before its backward pass.
    """
    kept = SavedTensor(module="", shape=(), dtype="", size_bytes=block.input_bytes, is_input=True)
    again = (
        Peak(phase="backward", operator=p.operator, size_bytes=p.size_bytes + block.output_bytes)
        for p in block.peaks
        if p.phase == "forward"
    )
    return replace(
        block,
        saved=(kept,),
        again=block.of_phase("forward"),
        peaks=(*block.peaks, *again),
    )


# The number of blocks that are run in each way is a choice of the plan with the name of that way
# and ``_layers``; full recomputation has its own name.
TREATMENTS: dict[str, Treatment] = {
    "recomputed": Treatment(dimension=RECOMPUTED, graph=recomputed, peaks_as_plain=True),
    **{
        name: replace(row, dimension=f"{name}_layers")
        for name, row in {
            "core_recomputed": Treatment(graph=core_recomputed),
            "products_recomputed": Treatment(graph=products_recomputed, peaks_as_plain=True),
            "lean": Treatment(graph=lean, runs_again=False, is_chosen=True),
        }.items()
    },
}
