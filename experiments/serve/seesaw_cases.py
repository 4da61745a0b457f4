"""Cases of the evaluation of changing layouts: each load played under every static layout, and
under every pair of layouts."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any

import numpy as np

from mistlab import catalog
from mistlab.core.files import parse_yaml
from mistlab.serving.changing import Changing, LayoutPair, batch_s, changing_of, rank_layout
from mistlab.serving.engine_constants import ServedRun, fitted_constants
from mistlab.serving.load import Lengths, ServingLoad, drawn_load
from mistlab.serving.resharding import Layout, layouts_of
from mistlab.serving.steady import capacity_tokens
from mistlab.serving.step_cost import LayoutColumns, RankLayout
from simulators.serving.changing_layouts import Phases, PlayedPhases, play_phases
from simulators.serving.continuous import Batching, play_continuous
from simulators.serving.step_clock import StepClock

LONGEST = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SeesawPopulation:
    """The models, GPUs, counts and loads of an evaluation, and the limits of batches."""

    models: tuple[str, ...]
    gpus: tuple[str, ...]
    counts: tuple[int, ...]
    requests: int
    loads: Mapping[str, Mapping[str, int]]
    budget: int
    sequences: int
    threshold: float

    def cases(self) -> Iterator["SeesawCase"]:
        """All cases, in order."""
        for gpu in self.gpus:
            for count in self.counts:
                for model in self.models:
                    for load, tokens in self.loads.items():
                        yield SeesawCase(
                            model=model,
                            gpu=gpu,
                            count=count,
                            load=load,
                            prompt=tokens["prompt"],
                            output=tokens["output"],
                            population=self,
                        )


def population() -> SeesawPopulation:
    """The population of the package's file."""
    text = files(__package__).joinpath("seesaw_population.yaml").read_text(encoding="utf-8")
    given: dict[str, Any] = parse_yaml(text, "seesaw_population.yaml")
    for name in ("models", "gpus", "counts"):
        given[name] = tuple(given[name])
    return SeesawPopulation(**given)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeesawCase:
    """A model on so many GPUs under a load."""

    model: str
    gpu: str
    count: int
    load: str
    prompt: int
    output: int
    population: SeesawPopulation

    @property
    def name(self) -> str:
        """The case in words."""
        return f"{self.model} on {self.count} {self.gpu}, {self.load}"


class PlayedCase:
    """A case whose layouts are laid out: each with its clock and the tokens that it holds."""

    def __init__(self, case: SeesawCase, seed: int) -> None:
        self.case = case
        model = catalog.model(case.model)
        self.plain = RankLayout(
            model=model, gpu=case.gpu, engine="vllm", weights="bf16", cache="bf16"
        )
        run = ServedRun(
            engine="vllm",
            version="unsaid",
            gpu=case.gpu,
            model=model.name,
            weights="bf16",
            kind="offline",
        )
        fitted = fitted_constants().of([run])
        self.constants = {name: float(values[0]) for name, values in fitted.items()}
        self.load = self._drawn(seed)
        self.clocks: dict[Layout, StepClock] = {}
        self.room: dict[Layout, int] = {}
        longest = max(map(sum, zip(self.load.prompts, self.load.outputs, strict=True)))
        by = {name: np.array([value]) for name, value in self.constants.items()}
        for layout in layouts_of(case.count, model.heads, model.layers):
            replica = rank_layout(self.plain, layout)
            tokens = int(capacity_tokens(LayoutColumns.of([replica]), by)[0])
            if tokens >= longest:
                most = case.population.sequences
                self.clocks[layout] = StepClock.of(replica, self.constants, most=most)
                self.room[layout] = tokens

    def _drawn(self, seed: int) -> ServingLoad:
        lengths = [
            Lengths(shape="lognormal", tokens=tokens, most=LONGEST * tokens)
            for tokens in (self.case.prompt, self.case.output)
        ]
        draw = np.random.default_rng(seed)
        return drawn_load(self.case.population.requests, (lengths[0], lengths[1]), draw)

    def static(self, *, mixes: bool) -> dict[Layout, float]:
        """Requests a second of each layout that stays; with prompts and decoding mixed in a step,
        or prompts first, as vLLM batched by default when Seesaw was published."""
        of = self.case.population
        return {
            layout: play_continuous(
                self.load,
                clock,
                Batching(
                    capacity=self.room[layout],
                    budget=of.budget,
                    sequences=of.sequences,
                    mixes=mixes,
                ),
                replicas=layout.dp,
            ).requests_per_s
            for layout, clock in self.clocks.items()
        }

    def pairs(self) -> list[LayoutPair]:
        """All pairs of layouts that fit."""
        return [
            LayoutPair(reading=reading, decoding=decoding)
            for reading in self.clocks
            for decoding in self.clocks
        ]

    def changing(self, pair: LayoutPair) -> Changing:
        """What a pair means here."""
        return changing_of(self.plain, pair, self.constants)

    def estimated(self, pair: LayoutPair) -> float:
        """Requests a second of a pair in closed form."""
        of, load = self.case.population, self.load
        seconds = batch_s(
            self.changing(pair),
            self.plain,
            self.constants,
            load,
            limits=(float(of.budget), float(of.sequences)),
        )
        return len(load) / seconds

    def played(
        self, pair: LayoutPair, *, threshold: float | None = None, host_tokens: int | None = None
    ) -> PlayedPhases:
        """A pair, its requests played one by one."""
        changing = self.changing(pair)
        if host_tokens is not None:
            changing = replace(changing, host_tokens=host_tokens)
        of = self.case.population
        phases = Phases(
            gpu_tokens=changing.gpu_tokens,
            host_tokens=changing.host_tokens,
            threshold=of.threshold if threshold is None else threshold,
            to_decode_s=changing.to_decode_s,
            to_prompts_s=changing.to_prompts_s,
            copy_s=changing.copy_s,
            budget=of.budget,
            sequences=of.sequences,
            readers=pair.reading.dp,
            decoders=pair.decoding.dp,
        )
        clocks = self.clocks[pair.reading], self.clocks[pair.decoding]
        return play_phases(self.load, clocks, phases)
