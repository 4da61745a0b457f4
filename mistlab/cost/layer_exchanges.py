"""How long the collectives inside layers take, and how much of that time products hide.

Axes: S strategies.
"""

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from mistlab.cost.layers import LayerFigures, Pass
from mistlab.symbolic.exchanges import EXCHANGES, Beside, Collective
from mistlab.symbolic.graph import Phase

Values = NDArray[np.float64]
# Seconds (S) of a collective over a group by its name, for its bytes and its messages (S each).
Over = Callable[[str, Collective, Values, Values], Values]
# Seconds (S) of exchanges between ranks with different experts, for their bytes and messages.
ToExperts = Callable[[Values, Values], Values]


class LayerExchanges:
    """The collectives of passes of layers, for some strategies (S)."""

    def __init__(
        self, over: Over, to_experts: ToExperts, of_several: Callable[[str], Sequence[object]]
    ) -> None:
        self._over = over
        self._to_experts = to_experts
        self._of_several = of_several
        self._found: dict[int, Mapping[Beside | None, Values]] = {}

    def any_in(self, passes: Sequence[Pass]) -> bool:
        """Whether ranks exchange anything in some passes."""
        names = {name for one in passes for name in one.exchanged}
        return any(self._of_several(EXCHANGES[name].group) for name in names)

    def within(self, groups: Collection[str]) -> "LayerExchanges":
        """The collectives of some groups of the mesh alone."""

        def of_several(group: str) -> Sequence[object]:
            return self._of_several(group) if group in groups else ()

        return LayerExchanges(self._over, self._to_experts, of_several)

    def unhidden_s(self, layer: LayerFigures, phase: Phase, *, overlaps_products: bool) -> Values:
        """Seconds (S) of the collectives in one pass of a layer that nothing hides, with those of
        what runs again before a backward pass."""
        one = layer.passes[phase]
        seconds = self.waited_s(one)
        if phase == "backward":
            if overlaps_products:
                seconds = seconds - self.hidden_s(one, "weights") - self.hidden_s(one, "input")
            if layer.again is not None:
                seconds = seconds + self.waited_s(layer.again)
        return seconds

    def waited_s(self, one: Pass) -> Values:
        """Seconds (S) of all collectives of a pass, but for those that attention hides."""
        exchanges = self._by_product(one)
        if not exchanges:
            return np.zeros_like(one.compute_s)
        seconds = np.sum([*exchanges.values()], axis=0)
        if "attention" in exchanges:
            seconds = seconds - self.hidden_s(one, "attention")
        return np.asarray(seconds)

    def hidden_s(self, one: Pass, beside: Beside) -> Values:
        """Seconds (S) of the collectives of a pass that run beside some of its products."""
        exchanged_s = self._by_product(one).get(beside)
        if exchanged_s is None:
            return np.zeros_like(one.compute_s)
        return np.asarray(np.minimum(exchanged_s, one.beside_s[beside]))

    def _by_product(self, one: Pass) -> Mapping[Beside | None, Values]:
        """Seconds (S) of the collectives of a pass, by the products beside which they can run."""
        if id(one) not in self._found:
            found: dict[Beside | None, Values] = {}
            for name, (messages, size_bytes) in one.exchanged.items():
                row = EXCHANGES[name]
                if not self._of_several(row.group):
                    # Nobody to exchange with.
                    continue
                if row.group == "experts":
                    seconds = self._to_experts(size_bytes, messages)
                else:
                    seconds = self._over(row.group, row.collective, size_bytes, messages)
                found[row.beside] = found.get(row.beside, 0.0) + seconds
            self._found[id(one)] = found
        return self._found[id(one)]
