"""How fast a GPU computes inside a training step: rates of classes of operators.

An operator takes ``flop / rate + bytes / bandwidth``: the two overlap little in practice, and the
sum tells a small product, which moves many bytes an operation, from a large one.
"""

from dataclasses import dataclass, field
from typing import Literal

from mistlab.values.errors import refuse
from mistlab.values.units import GBYTES, TFLOP
from mistlab.values.value import bounded, check_fields

OperatorClass = Literal[
    "matmul", "batched_matmul", "attention_forward", "attention_backward", "memory"
]
OPERATOR_CLASSES: tuple[OperatorClass, ...] = OperatorClass.__args__  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """One class: 16-bit operations and bytes a second; None where they take no time of their own.

    Weights' products are ``matmul``, those of written-out attention ``batched_matmul``, fused
    attention has its own two, and all that only moves bytes is ``memory``.
    """

    operators: OperatorClass
    tflops: float | None = field(default=None, metadata=bounded(above=0))
    gbytes_per_s: float | None = field(default=None, metadata=bounded(above=0))

    def __post_init__(self) -> None:
        check_fields(self)
        if self.tflops is None and self.gbytes_per_s is None:
            problem = f"{self.operators} would take no time: give tflops, gbytes_per_s or both"
            refuse("tflops", problem)

    @property
    def s_per_flop(self) -> float:
        """Seconds an operation."""
        return 0.0 if self.tflops is None else 1 / (self.tflops * TFLOP)

    @property
    def s_per_byte(self) -> float:
        """Seconds a byte that is read or written."""
        return 0.0 if self.gbytes_per_s is None else 1 / (self.gbytes_per_s * GBYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """The rates of all classes, and the host's time to launch one kernel of a training loop.

    ``sustained`` is the share of the operations a second that whole training steps keep up, under
    the GPU's power limit and among other kernels.
    """

    rates: tuple[Rate, ...]
    sustained: float = field(default=1.0, metadata=bounded(above=0, maximum=1))
    launch_us: float = field(metadata=bounded(minimum=0))

    def __post_init__(self) -> None:
        check_fields(self)
        given = sorted(rate.operators for rate in self.rates)
        if given != sorted(OPERATOR_CLASSES):
            classes = ", ".join(OPERATOR_CLASSES)
            problem = f"of {', '.join(given) or 'nothing'}: give each of {classes} once"
            refuse("rates", problem)

    def rate(self, operators: OperatorClass) -> Rate:
        """The rate of one class."""
        return next(rate for rate in self.rates if rate.operators == operators)

    @property
    def launch_s(self) -> float:
        """What the host takes to launch one kernel."""
        return self.launch_us * 1e-6
