"""How long a run of a plan takes on one H100 besides its iterations, by estimate.

None of the constants was measured on a GPU. They are high, since what is estimated must fit the
time for which a machine is rented.
"""

# Of iterations over predicted ones, and of those in strict mode over others.
SLOWER, STRICT = 1.2, 2.0
# One task after another, over tasks side by side.
SERIALISED = 1.5
# A process: interpreter, torch, the GPU's context, libraries.
PROCESS_S = 20.0
# A run: its model, rings, streams and groups, weights drawn on the device and copied, two readings
# of the clocks, what is said of it.
RUN_S = 4.0
# Pages are touched and registered; those that are pinned already are set to zero.
PIN_S_A_GIB, ZERO_S_A_GIB = 0.4, 0.1


def run_seconds(
    iterations_s: float, pinning_s: float, *, is_strict: bool, is_serialised: bool
) -> float:
    """Seconds of a run, from those of its iterations as predicted and those to pin memory."""
    slower = SLOWER * (STRICT if is_strict else 1) * (SERIALISED if is_serialised else 1)
    return RUN_S + pinning_s + slower * iterations_s


class PinnedMemory:
    """The memory that the running process has pinned; strict runs have a process of their own."""

    def __init__(self) -> None:
        self._gib = 0.0
        self._is_strict: bool | None = None

    def seconds(self, gib: float, *, is_strict: bool) -> float:
        """The time to start a process, if this run is the first of its kind, and to pin memory."""
        seconds = 0.0
        if is_strict != self._is_strict:
            self._is_strict, self._gib, seconds = is_strict, 0.0, PROCESS_S
        if gib > self._gib:
            self._gib = gib
            return seconds + PIN_S_A_GIB * gib
        return seconds + ZERO_S_A_GIB * gib
