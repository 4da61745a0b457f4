"""The wall-clock time of training with outer steps (DiLoCo), by published calculators and their
constants.

The formulas are those of the simulator that accompanies the training report of
robirahman/miri-decentralized-training-report; its constants are its own, not measured here.
"""

import math
from dataclasses import dataclass, field

from mistlab.core.values import Checked, bounded

# Stragglers lengthen an exchange between nodes by 5 % for each doubling of the number of nodes.
STRAGGLING = 0.05
# How much a token trains with outer steps, relative to training that exchanges in every step: never
# less than ``LEAST_WORTH``, and ``LOSS_A_TENFOLD`` less for each tenfold of inner steps per outer
# step at 1e9 parameters; larger models lose less (``OF_SIZE``).
LEAST_WORTH, LOSS_A_TENFOLD, OF_SIZE = 0.4, 0.08, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterClock(Checked):
    """A training run with outer steps (DiLoCo): the model's parameters and the bits of each in an
    exchange, compression, nodes and their link, and the number and seconds of inner steps per outer
    step.
    """

    parameters: float = field(metadata=bounded(above=0))
    bits: int = field(default=16, metadata=bounded(minimum=1))
    compression: float = field(default=1.0, metadata=bounded(minimum=1))
    nodes: int = field(metadata=bounded(minimum=1))
    bits_per_s: float = field(metadata=bounded(above=0))
    latency_s: float = field(default=0.0, metadata=bounded(minimum=0))
    every: int = field(metadata=bounded(minimum=1))
    step_s: float = field(metadata=bounded(above=0))

    @property
    def exchanged_bits(self) -> float:
        """The bits that a node contributes to one exchange of all parameters."""
        return self.parameters * self.bits / self.compression

    @property
    def exchange_s(self) -> float:
        """The seconds of an all-reduce of the outer gradients (the change of all weights since the
        last one), with stragglers.
        """
        straggling = 1 + STRAGGLING * math.log2(self.nodes)
        return (2 * self.exchanged_bits / self.bits_per_s + self.latency_s) * straggling

    def cycle_s(self, *, overlapped: bool) -> float:
        """The seconds of one outer step, including its inner steps."""
        compute_s = self.every * self.step_s
        if overlapped:
            return max(compute_s, self.exchange_s)
        return compute_s + self.exchange_s

    def utilisation(self, *, overlapped: bool) -> float:
        """The share of the time in which nodes compute rather than exchange weights."""
        return self.every * self.step_s / self.cycle_s(overlapped=overlapped)

    @property
    def worth(self) -> float:
        """The training progress per token with outer steps (DiLoCo), relative to that with an
        all-reduce in every step.
        """
        loss = LOSS_A_TENFOLD / (1 + math.log10(self.parameters / 1e9) / OF_SIZE)
        return max(LEAST_WORTH, 1 - loss * math.log10(self.every))
