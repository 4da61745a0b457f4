"""Rules for the differences between an engine's kernels and the operators of a layer graph.

Graphs are made from this package's own models. An engine fuses some of their operators and splits
others. A rule says how many bytes the engine's kernels move for each byte in the graph; zero means
that another kernel does the work as well. ``mistlab.cost.kernels`` finds the rule of an operator.
"""

from dataclasses import dataclass

BATCHED_PRODUCTS = ("aten.bmm", "aten.baddbmm")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRule:
    """The bytes that an engine moves for each byte in the graph, for matching operators.

    The first eight fields choose operators; "" and None match any. ``broadcasts`` says whether an
    operand has fewer dimensions than another, as a bias does. ``adds`` says whose gradients the
    operator adds: those of a linear layer's ``weight``, of a ``vector``, or of a ``table``.
    ``makes`` is ``weight`` for products that make gradients of weights.

    The operator moves ``bytes_factor`` times the graph's bytes, in ``kernels`` kernels; operators
    ``together`` are one kernel in a layer's pass. ``copies_of_batches`` adds bytes at the memory's
    rate if a micro-batch has more than one sequence. If a rank's heads times sequences are no
    multiple of ``fused_for``, ``bytes_unfused`` takes the place of ``bytes_factor``, with
    ``kernels_unfused`` kernels more. If no heads share their keys and values, ``bytes_own_keys``
    takes its place (unless it is None), with ``kernels_a_sequence`` kernels for each sequence.
    An operator that is not ``runs`` is left out.
    """

    kind: str = ""
    name: str = ""
    module: str = ""
    phase: str = ""
    attention: str = ""
    adds: str = ""
    broadcasts: bool | None = None
    makes: str = ""
    bytes_factor: float = 1.0
    copies_of_batches: float = 0.0
    fused_for: int = 1
    bytes_unfused: float = 1.0
    kernels_unfused: int = 0
    together: bool = False
    kernels: int = 1
    kernels_a_sequence: int = 0
    bytes_own_keys: float | None = None
    runs: bool = True


# The rule of torch's own operators: one kernel, and the graph's bytes.
PLAIN = KernelRule()
