"""How an engine's kernels differ from the operators of a layer graph, as rules.

The graphs are those of this package's own models. An engine fuses some of their operators into
others and splits some up; a rule says how many bytes its kernels move for each byte that the graph
counts, zero where another kernel does the work on its way. ``mistlab.cost.kernels`` finds the rule
of an operator.
"""

from dataclasses import dataclass

BATCHED_PRODUCTS = ("aten.bmm", "aten.baddbmm")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRule:
    """Bytes that an engine moves for each that the graph counts; "" and None stand for any.

    ``broadcasts`` is whether an operand has fewer dimensions than another, as a bias does;
    ``adds`` is what an operator adds gradients of: ``weight`` of a linear layer, which a product
    makes, ``vector``, or ``table``, of more dimensions and made otherwise.
    ``copies_of_batches`` are bytes at memory's rate that come on top where a micro-batch has more
    than one sequence. Where ``fused_for`` is given, it holds only where a rank's heads times
    sequences are a multiple of it; elsewhere ``bytes_unfused`` does, with as many kernels on top as
    ``kernels_unfused`` says. Of operators ``together`` one kernel does all of a layer's pass.
    Otherwise an operator is ``kernels``. Where ``bytes_own_keys`` is given, it holds where no heads
    share their keys and values, with ``kernels_a_sequence`` for each sequence of a micro-batch;
    elsewhere ``bytes_factor`` and ``kernels`` do.
    """

    kind: str = ""
    name: str = ""
    module: str = ""
    phase: str = ""
    attention: str = ""
    adds: str = ""
    broadcasts: bool | None = None
    bytes_factor: float = 1.0
    copies_of_batches: float = 0.0
    fused_for: int = 1
    bytes_unfused: float = 1.0
    kernels_unfused: int = 0
    together: bool = False
    kernels: int = 1
    kernels_a_sequence: int = 0
    bytes_own_keys: float | None = None


# One kernel for each operator, as torch's own operators have it.
PLAIN = KernelRule()
