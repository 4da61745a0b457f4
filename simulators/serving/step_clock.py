"""How long the steps of a serving replica take, interpolated in a table of the closed form's costs.

A simulated run needs the times of hundreds of thousands of steps, one by one. Costs are smooth in
the number of tokens attended to, so they are tabulated and interpolated linearly.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mistlab.serving.engine_constants import DEFAULTS
from mistlab.serving.steady import decode_step_s, prompt_pass_s
from mistlab.serving.step_cost import LayoutColumns, RankLayout

# The context lengths at which costs are tabulated.
CONTEXTS = (0, 256, 1024, 4096, 16384, 65536, 262144)
# The numbers of tokens of a prefill pass at which costs are tabulated.
PASSES = (
    1,
    32,
    64,
    128,
    256,
    384,
    512,
    768,
    1024,
    1536,
    2048,
    3072,
    4096,
    6144,
    8192,
    16384,
    65536,
)
SEQUENCES = 1024


@dataclass(slots=True, kw_only=True)
class StepClock:
    """The seconds of one replica's steps: for decoding some sequences of a mean context length, and
    for prefilling some tokens.
    """

    decode: list[list[float]]
    passes: list[list[float]]
    stall: float
    host_s: float
    stages: int
    ranks: int
    # The number of batches that prefill at the same time: the number of pipeline stages, times the
    # number of ranks that run in lockstep.
    batches: int

    @classmethod
    def of(
        cls, layout: RankLayout, constants: Mapping[str, float] | None = None, most: int = SEQUENCES
    ) -> "StepClock":
        """The step times of a serving layout (parallel degrees) with an engine's fitted constants,
        for at most ``sequences`` sequences.
        """
        values = {**DEFAULTS, **(constants or {})}
        by = {name: np.array([value]) for name, value in values.items()}
        columns = LayoutColumns.of([layout])
        counts = np.repeat(np.arange(1, most + 1, dtype=float), len(CONTEXTS))
        contexts = np.tile(np.array(CONTEXTS, dtype=float), most)
        decode = decode_step_s(_repeated(columns, len(counts)), by, counts, contexts)
        tokens = np.repeat(np.array(PASSES, dtype=float), len(CONTEXTS))
        looked = np.tile(np.array(CONTEXTS, dtype=float), len(PASSES))
        passes = prompt_pass_s(_repeated(columns, len(tokens)), by, tokens, looked)
        return cls(
            decode=decode.reshape(most, len(CONTEXTS)).tolist(),
            passes=passes.reshape(len(PASSES), len(CONTEXTS)).tolist(),
            stall=values["stall"],
            host_s=values["host"],
            stages=layout.pp,
            ranks=layout.dp,
            batches=int(columns.batches[0]),
        )

    def decode_s(self, sequences: int, context: float) -> float:
        """The seconds of a step that decodes one token for each of these sequences."""
        row = self.decode[min(sequences, len(self.decode)) - 1]
        return _between(CONTEXTS, row, context)

    def pass_s(self, tokens: int, looked: float) -> float:
        """The seconds that each pipeline stage takes for a prefill pass over these tokens with this
        mean context length.
        """
        interval = max(0, min(bisect_right(PASSES, tokens) - 1, len(PASSES) - 2))
        low, high = PASSES[interval], PASSES[interval + 1]
        share = max(0.0, (tokens - low) / (high - low))
        first = _between(CONTEXTS, self.passes[interval], looked)
        return first + share * (_between(CONTEXTS, self.passes[interval + 1], looked) - first)

    def step_s(self, sequences: int, context: float, passes: Sequence[tuple[int, float]]) -> float:
        """The seconds of a step that decodes sequences and prefills prompts; each batch in flight
        has a number of prompt tokens with a mean context length.
        """
        seconds = self.decode_s(sequences, context) if sequences else self.host_s
        # Ranks of attention data parallelism that prefill together divide the prompts of each batch
        # among themselves.
        divided = self.ranks * self.stages / self.batches
        factor = (self.stall if sequences else 1.0) / divided
        each = [factor * self.pass_s(tokens, looked) for tokens, looked in passes if tokens]
        # A batch is done when it has passed all stages, and no batch can overtake the longest one.
        of_all_s = sum(each) * divided / self.ranks
        return seconds + max(of_all_s, self.stages * max(each, default=0.0))


def _between(places: tuple[int, ...], values: list[float], at: float) -> float:
    interval = min(bisect_right(places, at) - 1, len(places) - 2)
    share = (at - places[interval]) / (places[interval + 1] - places[interval])
    return values[interval] + share * (values[interval + 1] - values[interval])


def _repeated(columns: LayoutColumns, times: int) -> LayoutColumns:
    return columns.rows(np.zeros(times, dtype=np.intp))
