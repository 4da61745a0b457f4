"""How far a long piece of work is, on standard error, with the time that is left."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from experiments.cli.commandline import progress

QUIET_S = 2.0


@dataclass(slots=True, kw_only=True)
class Countdown:
    """Counts the parts of a piece of work; says so now and then, and at the end.

    The first part may have to make ready what the others use: what is left goes by the others.
    """

    what: str
    total: int
    clock: Callable[[], float] = time.perf_counter
    _done: int = field(default=0, init=False)
    _first_s: float = field(default=0.0, init=False)
    _said_s: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self._said_s = self.clock()

    def step(self) -> None:
        """One part is done."""
        self._done += 1
        now_s = self.clock()
        if self._done == 1:
            self._first_s = now_s
        left = self.total - self._done
        if left and (self._done == 1 or now_s - self._said_s < QUIET_S):
            return
        self._said_s = now_s
        text = f"{self.what}: {self._done} of {self.total}"
        if left:
            left_s = (now_s - self._first_s) / (self._done - 1) * left
            text = f"{text}, about {left_s:.0f} s left"
        progress(text)
