"""How fast a GPU computes inside a training step: a rate for each class of operators.

An operator takes ``flop / rate + bytes / bandwidth``. Computing and moving bytes overlap little in
practice. The sum also tells a small product, which moves many bytes for each operation, from a
large one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from mistlab.values.errors import refuse
from mistlab.values.limits import MOST_RATE
from mistlab.values.units import GBYTES, TFLOP
from mistlab.values.value import bounded, check_fields, quantity

OperatorClass = Literal[
    "matmul",
    "batched_matmul",
    "attention_forward",
    "attention_backward",
    "memory",
    "grouped_matmul",
    "matmul_8bit",
    "grouped_matmul_8bit",
    "matmul_4bit",
    "scan",
    "step",
]
# Classes that every hardware file has, and those that may take their rates from another class.
OPERATOR_CLASSES: tuple[OperatorClass, ...] = (
    *("matmul", "batched_matmul"),
    *("attention_forward", "attention_backward", "memory"),
)
AS_ANOTHER: Mapping[OperatorClass, OperatorClass] = {
    "grouped_matmul": "matmul",
    "matmul_8bit": "matmul",
    "grouped_matmul_8bit": "grouped_matmul",
    "matmul_4bit": "matmul_8bit",
    "scan": "memory",
    "step": "memory",
}
EIGHT_BIT = ("matmul_8bit", "grouped_matmul_8bit", "matmul_4bit")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """The rate of one class in 16-bit operations and in bytes a second; None takes no time.

    Products with weights are ``matmul``, products of written-out attention ``batched_matmul``.
    Fused attention has two classes of its own. Operators that only move bytes are ``memory``.
    Products of experts are ``grouped_matmul``; products of 8-bit operands have classes of their
    own, with rates in 8-bit operations; so have products of 4-bit operands. Scans of state-space
    blocks are ``scan``; the optimizer's step, one kernel, is ``step``.
    """

    operators: OperatorClass
    tflops: float | None = field(default=None, metadata=quantity(most=MOST_RATE))
    gbytes_per_s: float | None = field(default=None, metadata=quantity(most=MOST_RATE))

    def __post_init__(self) -> None:
        check_fields(self)
        if self.tflops is None and self.gbytes_per_s is None:
            problem = f"{self.operators} would take no time: give tflops, gbytes_per_s or both"
            refuse("tflops", problem)

    @property
    def s_per_flop(self) -> float:
        """Seconds for an operation."""
        return 0.0 if self.tflops is None else 1 / (self.tflops * TFLOP)

    @property
    def s_per_byte(self) -> float:
        """Seconds for a byte that is read or written."""
        return 0.0 if self.gbytes_per_s is None else 1 / (self.gbytes_per_s * GBYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """The rates of all classes, and the host's time to launch one kernel of a training loop.

    ``host_computes`` says that the host's own cores are the device, as where a CPU stands in for
    GPUs: then launches take their time from the arithmetic and do not run beside it.
    ``sustained`` is the share of these rates that whole training steps keep up, under the GPU's
    power limit and among other kernels.
    """

    rates: tuple[Rate, ...]
    sustained: float = field(default=1.0, metadata=bounded(above=0, maximum=1))
    launch_us: float = field(metadata=quantity(zero=True))
    host_computes: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        given = sorted(rate.operators for rate in self.rates)
        needed = sorted({*given, *OPERATOR_CLASSES})
        if given != needed:
            classes = ", ".join(OPERATOR_CLASSES)
            problem = f"of {', '.join(given) or 'nothing'}: give each of {classes} once"
            refuse("rates", problem)

    def rate(self, operators: OperatorClass) -> Rate:
        """The rate of one class."""
        return next(rate for rate in self.rates if rate.operators == self.given(operators))

    def given(self, operators: OperatorClass) -> OperatorClass:
        """The class itself if it has a rate, else the class whose rate it takes."""
        has = {rate.operators for rate in self.rates}
        while operators not in has:
            operators = AS_ANOTHER[operators]
        return operators

    @property
    def launch_s(self) -> float:
        """Seconds that the host takes to launch one kernel."""
        return self.launch_us * 1e-6
