"""The closed form of steady loads against played runs, on random layouts and loads."""

from dataclasses import dataclass

import numpy as np

from mistlab import catalog
from mistlab.serving.engine_constants import DEFAULTS
from mistlab.serving.load import Lengths, drawn_load
from mistlab.serving.steady import SteadyLoad, capacity_tokens, steady_state
from mistlab.serving.step_cost import LayoutColumns, RankLayout
from simulators.serving.continuous import Batching, play_continuous
from simulators.serving.step_clock import StepClock

# What clients and queues of engines add has no part in a played run: a prompt waits for one step.
CONSTANTS = {**DEFAULTS, "first": 0.0, "burst": 0.0, "steps": 1.0}
MODELS = ("llama3-8b", "qwen3-32b", "llama3-70b", "gpt-oss-120b", "qwen3-30b-a3b", "deepseek-v3")
GPUS = ("A100", "H100", "H200", "B200", "L40S")
# Requests of a run over those in flight, and how many of these at both ends are not counted.
WAVES, EDGE = 12, 2
# Fewer requests say too little of the mean length.
FEWEST = 200
# A load is steady where memory holds more than what is in flight.
ROOM = 1.25


@dataclass(frozen=True, slots=True, kw_only=True)
class SteadyCase:
    """A random layout under a steady load, by the closed form and played: the ratios of requests a
    second and of seconds for each further token."""

    layout: RankLayout
    in_flight: int
    prompt: int
    output: int
    rate_ratio: float
    token_ratio: float


def random_case(draw: np.random.Generator) -> SteadyCase:
    """A random layout and load for which there is room, timed both ways."""
    while True:
        layout = RankLayout(
            model=catalog.model(str(draw.choice(MODELS))),
            gpu=str(draw.choice(GPUS)),
            engine="vllm",
            weights="fp8",
            cache="fp8",
            tp=int(draw.choice((1, 2, 4, 8))),
            pp=int(draw.choice((1, 1, 2))),
        )
        prompt, output = int(draw.integers(64, 4000)), int(draw.integers(32, 1000))
        in_flight = int(2 ** draw.uniform(0, 9))
        columns = LayoutColumns.of([layout])
        by = {name: np.array([value]) for name, value in CONSTANTS.items()}
        capacity = int(capacity_tokens(columns, by)[0])
        if capacity > ROOM * in_flight * (prompt + output):
            return _timed(layout, (prompt, output, in_flight, capacity), draw)


def _timed(
    layout: RankLayout, sizes: tuple[int, int, int, int], draw: np.random.Generator
) -> SteadyCase:
    prompt, output, in_flight, capacity = sizes
    lengths = (
        Lengths(shape="uniform", tokens=prompt, low=0.5),
        Lengths(shape="uniform", tokens=output, low=0.5),
    )
    count = max(in_flight * WAVES, FEWEST)
    load = drawn_load(count, lengths, draw, in_flight=in_flight)
    clock = StepClock.of(layout, CONSTANTS, most=in_flight)
    played = play_continuous(load, clock, Batching(capacity=capacity))
    done = sorted(played.requests, key=lambda one: one.end_s or 0.0)
    middle = done[EDGE * in_flight : -EDGE * in_flight]
    seconds = (middle[-1].end_s or 0.0) - (done[EDGE * in_flight - 1].end_s or 0.0)
    each = [
        ((one.end_s or 0.0) - (one.first_s or 0.0)) / (one.output - 1)
        for one in middle
        if one.output > 1
    ]
    columns = LayoutColumns.of([layout])
    by = {name: np.array([value]) for name, value in CONSTANTS.items()}
    steady = steady_state(
        columns,
        by,
        SteadyLoad(
            in_flight=np.array([float(in_flight)]),
            prompt=np.array([load.mean_prompt]),
            output=np.array([load.mean_output]),
            sequences=np.array([1024.0]),
            budget=np.array([8192.0]),
        ),
    )
    return SteadyCase(
        layout=layout,
        in_flight=in_flight,
        prompt=prompt,
        output=output,
        rate_ratio=float(steady.requests_per_s[0]) * seconds / len(middle),
        token_ratio=float(steady.token_s[0]) / float(np.mean(each)),
    )
