"""Seesaw's evaluation: by how much the throughput of serving grows if parallel degrees change
between prefill and decoding.
"""

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from statistics import geometric_mean, mean
from typing import Any

import numpy as np

from experiments.pages.charts import Bars, Lines
from experiments.pages.study import Report, Study
from experiments.pages.tables import Row, table
from experiments.serve.served_rows import model_named
from mistlab import catalog
from mistlab.core.files import parse_yaml
from mistlab.serving.changing import Changing, LayoutPair, batch_s, changing_of, rank_layout
from mistlab.serving.engine_constants import ServedRun, fitted_constants
from mistlab.serving.load import Lengths, ServingLoad, drawn_load
from mistlab.serving.phase_schedule import PhaseLimits
from mistlab.serving.resharding import Layout, layouts_of
from mistlab.serving.steady import capacity_tokens
from mistlab.serving.step_cost import LayoutColumns, RankLayout
from simulators.serving.changing_layouts import PlayedPhases, play_phases
from simulators.serving.continuous import Batching, play_continuous
from simulators.serving.step_clock import StepClock

LONGEST = 8
# The number of tokens in a block of the KV cache.
BLOCK = 16
# Lower bounds are multiplied by this factor to allow for errors of interpolation.
CHEAPEST = 0.98


@dataclass(frozen=True, slots=True, kw_only=True)
class SeesawPopulation:
    """The cases of an evaluation as lists: models, GPUs, numbers of GPUs, loads, and limits of
    batches.
    """

    models: tuple[str, ...]
    gpus: tuple[str, ...]
    counts: tuple[int, ...]
    requests: int
    loads: Mapping[str, Mapping[str, int]]
    budget: int
    sequences: int
    threshold: float
    # Whether requests end at the context length of their model.
    within_context: bool = False

    def cases(self) -> Iterator["SeesawCase"]:
        """All cases of the published evaluation of serving, in the order of the lists above."""
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
    """The cases of an evaluation in a file of the package."""
    text = files(__package__).joinpath("seesaw_population.yaml").read_text(encoding="utf-8")
    given: dict[str, Any] = parse_yaml(text, "seesaw_population.yaml")
    for name in ("models", "gpus", "counts"):
        given[name] = tuple(given[name])
    return SeesawPopulation(**given)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeesawCase:
    """A case of the evaluation: a model on a number of GPUs under a load."""

    model: str
    gpu: str
    count: int
    load: str
    prompt: int
    output: int
    population: SeesawPopulation

    @property
    def name(self) -> str:
        """The label of the case in tables."""
        return f"{self.model} on {self.count} {self.gpu}, {self.load}"


class PlayedCase:
    """A case with the step times of each layout (parallel degrees), and with the capacity of its KV
    cache.
    """

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
        self._changing: dict[LayoutPair, Changing] = {}
        self._estimated: dict[LayoutPair, float] = {}
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
        load = drawn_load(self.case.population.requests, (lengths[0], lengths[1]), draw)
        context = model_named(self.case.model).context
        if context is None or not self.case.population.within_context:
            return load
        return load.within(context)

    def static(self, *, mixes: bool) -> dict[Layout, float]:
        """The requests per second of each layout that does not change between prefill and decoding.
        With ``mixes``, prefill and decoding share a step; otherwise prefill comes first, as was
        vLLM's default when Seesaw was published.
        """
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
        """All pairs of a layout for prefill and a layout for decoding that fit in memory."""
        return [
            LayoutPair(reading=reading, decoding=decoding)
            for reading in self.clocks
            for decoding in self.clocks
        ]

    def changing(self, pair: LayoutPair) -> Changing:
        """A pair of layouts, for prefill and for decoding, in the form that the simulator takes."""
        if pair not in self._changing:
            self._changing[pair] = changing_of(self.plain, pair, self.constants)
        return self._changing[pair]

    def estimated(self, pair: LayoutPair) -> float:
        """The requests per second of a pair of layouts by the closed form."""
        if pair in self._estimated:
            return self._estimated[pair]
        of, load = self.case.population, self.load
        seconds = batch_s(
            self.changing(pair),
            self.plain,
            self.constants,
            load,
            limits=(float(of.budget), float(of.sequences)),
        )
        self._estimated[pair] = len(load) / seconds
        return self._estimated[pair]

    def played(
        self, pair: LayoutPair, *, threshold: float | None = None, has_host: bool = True
    ) -> PlayedPhases:
        """Simulate a pair of layouts request by request."""
        changing, of = self.changing(pair), self.case.population
        limits = PhaseLimits(
            reading_blocks=changing.reading_tokens // BLOCK,
            decoding_blocks=changing.decoding_tokens // BLOCK,
            host_blocks=changing.host_tokens // BLOCK * has_host,
            block=BLOCK,
            threshold=of.threshold if threshold is None else threshold,
            budget=of.budget,
            sequences=of.sequences,
            readers=pair.reading.dp,
            decoders=pair.decoding.dp,
        )
        clocks = self.clocks[pair.reading], self.clocks[pair.decoding]
        return play_phases(self.load, clocks, limits, changing.times)

    def least_s(self, pair: LayoutPair) -> float:
        """A lower bound of the seconds of a pair of layouts: prefill at the least cost per token,
        and decoding at the cost per token of the largest batch that fits in the KV cache.
        """
        of, load = self.case.population, self.load
        reading, decoding = self.clocks[pair.reading], self.clocks[pair.decoding]
        prompts, outputs = np.array(load.prompts), np.array(load.outputs)
        longest = int(max(of.budget, *load.prompts, 2))
        sizes = np.unique(np.geomspace(1, longest, 60).astype(int))
        each_s = min(reading.pass_s(int(size), 0.0) / size for size in sizes) * CHEAPEST
        read_s = float(np.sum(prompts)) * each_s / pair.reading.dp
        # For each request, the tokens decoded after the first one, and all tokens that these attend
        # to.
        tokens = float(np.sum(outputs - 1))
        looked = float(np.sum((outputs - 1) * (prompts + outputs / 2)))
        counts = range(1, of.sequences + 1)
        alone = [decoding.decode_s(count, 0.0) for count in counts]
        # Sliding windows make the attention of later tokens cheaper, so the bound takes the cost of
        # the last tokens for all.
        look_s = (decoding.decode_s(1, 65536.0) - decoding.decode_s(1, 16384.0)) / 49152
        cheapest_s = min(one / count for count, one in zip(counts, alone, strict=True))
        room = self.room[pair.decoding] * pair.decoding.dp
        by_steps_s = (tokens * cheapest_s + looked * look_s * CHEAPEST) / pair.decoding.dp
        by_room_s = looked * alone[0] / room
        return float(read_s + max(by_steps_s, by_room_s))

    def best_of(self, pairs: Sequence[LayoutPair]) -> tuple[LayoutPair, dict[LayoutPair, float]]:
        """The pair of layouts with the most requests per second when simulated, and the rates of
        all pairs that were simulated. Pairs whose lower bound is slower than the best pair so far
        are not simulated.
        """
        rates: dict[LayoutPair, float] = {}
        most = 0.0
        for pair in sorted(pairs, key=self.estimated, reverse=True):
            if len(self.load) / self.least_s(pair) > most:
                rates[pair] = self.played(pair).requests_per_s
                most = max(most, rates[pair])
        return max(rates, key=lambda pair: rates[pair]), rates


# How many requests a quick run simulates, and every how many cases it takes one.
QUICK_REQUESTS, QUICK_EVERY = 150, 12
# The thresholds that are tried for the best pair of layouts: serving may return to prefill when at
# most this share of the memory for waiting keys and values is in use.
THRESHOLDS = (0.0, 0.05, 0.2, 0.5)
# The case whose output lengths are varied (model, GPU, number of GPUs), and its mean output length.
VARIED = ("codellama-34b", "L4", 4, 1000)
OUTPUTS = (25, 50, 100, 200, 400, 800)
VARIED_REQUESTS = 400


def serving(options: argparse.Namespace) -> int:
    """Predict Seesaw's evaluation: parallel degrees that change between prefill and decoding
    against the best ones that do not, by model, GPU and load; and without each of Seesaw's
    ingredients.

    Every static layout that fits is simulated request by request. So is every pair of layouts,
    except pairs whose lower bound is slower than a simulated pair; so the best ones are the best of
    their spaces. The cases of the evaluation are listed in a file of the package.
    """
    study = Study.begin("serving", options)
    of = population()
    if options.quick:
        of = replace(of, requests=QUICK_REQUESTS)
    of = replace(of, within_context=options.within_context)
    cases = list(of.cases())[:: QUICK_EVERY if options.quick else 1]
    for case in study.counted(cases, "cases"):
        study.add(case_row(case, options.seed))
    rows = [row for row in study.rows if row["fits"]]
    curve = varied_outputs(of, options.seed, quick=options.quick)
    summary = summary_of(rows)
    summary["gain by output tokens"] = {str(tokens): gain for tokens, gain in curve}
    return study.end(
        Report(
            title="Serving: layouts that change (Seesaw)",
            words=paragraphs_of(study.rows, rows, summary, curve),
            summary=summary,
            pictures=[
                Bars(
                    name="serving-gains",
                    caption="Requests a second over the best static layout, by case.",
                    groups=[_label(row) for row in rows],
                    series={
                        "best static layout, same batching": [row["gain"] for row in rows],
                        "best static layout, prompts first": [
                            row["gain_over_prompts_first"] for row in rows
                        ],
                    },
                    y="gain over",
                    marks={"equal": 1.0},
                ),
                Lines(
                    name="serving-outputs",
                    caption=f"Gain by mean output tokens ({VARIED[0]} on {VARIED[2]} {VARIED[1]}).",
                    curves={"": curve},
                    x="output tokens",
                    y="gain",
                ),
            ],
        )
    )


def _label(row: Row) -> str:
    """The label of a case on a single short line, for a chart with many cases."""
    size, load = row["model"].rpartition("-")[2], row["load"].removesuffix(" prompts")
    return f"{size}, {row['gpus']} {row['gpu']}, {load}"


def case_row(case: SeesawCase, seed: int) -> dict[str, Any]:
    """All figures of a case; ``fits`` is false if no layout has memory for its longest request."""
    row: dict[str, Any] = {
        "case": case.name,
        "model": case.model,
        "gpu": case.gpu,
        "gpus": case.count,
        "load": case.load,
    }
    played = PlayedCase(case, seed)
    if not played.clocks:
        return {**row, "fits": False}
    static, first = played.static(mixes=True), played.static(mixes=False)
    stays = max(static, key=lambda layout: static[layout])
    prompts_first = max(first.values())
    best, rates = played.best_of(played.pairs())
    picked = max(rates, key=played.estimated)
    tuned = {share: played.played(best, threshold=share) for share in THRESHOLDS}
    share = max(tuned, key=lambda one: tuned[one].requests_per_s)
    run = tuned[share]
    rate = max(run.requests_per_s, rates[best])
    same, of_same = played.best_of([one for one in played.pairs() if one.reading == one.decoding])
    return {
        **row,
        "fits": True,
        "static": stays.text,
        "static_per_s": static[stays],
        "prompts_first_per_s": prompts_first,
        "pair": best.text,
        "threshold": share,
        "pair_per_s": rate,
        "gain": rate / static[stays],
        "gain_over_prompts_first": rate / prompts_first,
        "changes": run.changes,
        "reading_s": run.reading_s,
        "decoding_s": run.decoding_s,
        "changing_s": run.changing_s,
        "copying_s": run.copying_s,
        "without_resharding": of_same[same] / static[stays],
        "without_tiers": _without_tiers(played, best) / static[stays],
        "without_thresholds": played.played(best, threshold=1.0).requests_per_s / static[stays],
        "closed_form_pick_over_best": rates[best] / rates[picked],
        "closed_form_ratio": played.estimated(best) / rates[best],
    }


def _without_tiers(played: PlayedCase, pair: LayoutPair) -> float:
    """The requests per second if the KV cache may not use host memory."""
    runs = (played.played(pair, threshold=share, has_host=False) for share in THRESHOLDS)
    return max(run.requests_per_s for run in runs)


def varied_outputs(of: SeesawPopulation, seed: int, *, quick: bool) -> list[tuple[int, float]]:
    """By how much the best pair of layouts beats the best layout that does not change, for several
    mean output lengths.
    """
    model, gpu, count, prompt = VARIED
    limits = replace(of, requests=QUICK_REQUESTS if quick else VARIED_REQUESTS)
    curve = []
    for output in OUTPUTS[:: 3 if quick else 1]:
        case = SeesawCase(
            model=model,
            gpu=gpu,
            count=count,
            load="varied",
            prompt=prompt,
            output=output,
            population=limits,
        )
        played = PlayedCase(case, seed)
        stays = max(played.static(mixes=True).values())
        best, rates = played.best_of(played.pairs())
        curve.append((output, rates[best] / stays))
    return curve


def summary_of(rows: Sequence[Row]) -> dict[str, Any]:
    """The mean gains over all cases, by GPU and by load, and without each of Seesaw's
    ingredients.
    """
    gains = [row["gain"] for row in rows]
    first = [row["gain_over_prompts_first"] for row in rows]
    summary: dict[str, Any] = {
        "cases": len(rows),
        "gain": {"mean": mean(gains), "least": min(gains), "most": max(gains)},
        "gain over prompts first": {"mean": mean(first), "least": min(first), "most": max(first)},
    }
    for key in ("gpu", "load", "model"):
        for value in dict.fromkeys(row[key] for row in rows):
            chosen = [row["gain"] for row in rows if row[key] == value]
            summary[f"gain, {value}"] = geometric_mean(chosen)
    for name in ("without_resharding", "without_tiers", "without_thresholds"):
        summary[name.replace("_", " ")] = mean(row[name] for row in rows)
    ratios = [abs(math.log(row["closed_form_ratio"])) for row in rows]
    summary["closed form over played, median"] = math.exp(sorted(ratios)[len(ratios) // 2])
    summary["closed form's pick over the best"] = mean(
        row["closed_form_pick_over_best"] for row in rows
    )
    return summary


# The text of Seesaw's evaluation: the gains of the best pairs of layouts, and what their time is
# spent on.


PARTS = ("without_resharding", "without_tiers", "without_thresholds")
WHY = (
    "Static layouts mix prompts into steps that decode anyway, so phases save all-reduces of "
    "prompts, and steps that wait for a pipeline: little over NVLink, much over PCIe. Where "
    "prompts are long and the host's tier holds few, phases are short, and each begins and ends "
    "with few running requests."
)


def paragraphs_of(
    every: Sequence[Row],
    rows: Sequence[Row],
    summary: dict[str, Any],
    curve: Sequence[tuple[int, float]],
) -> list[str]:
    """The paragraphs and tables of the evaluation's page."""
    lost = [row["case"] for row in rows if row["gain"] < 1]
    unfit = [row["case"] for row in every if not row["fits"]]
    means = [[name, f"{value:.3f}"] for name, value in summary.items() if isinstance(value, float)]
    by_output = ", ".join(f"{tokens}: {value:.2f}" for tokens, value in curve)
    without = f"{': ' if unfit else ''}{'; '.join(unfit)}"
    return [
        f"{len(rows)} cases; of {len(unfit)} more no layout holds the longest request{without}.",
        _gains(summary),
        _rates(rows),
        _ABOUT_PARTS,
        _parts(rows),
        table(["figure", "mean"], means),
        f"Pairs lose in {len(lost)} cases{': ' if lost else ''}{'; '.join(lost)}. {WHY}",
        f"Gain by mean output tokens: {by_output}.",
    ]


_ABOUT_PARTS = (
    "Where the time of the best pair goes, and its gain with one ingredient left out: one layout "
    "for both phases, no tier in host memory, and a change back as soon as "
    "a prompt has room."
)


def _gains(summary: dict[str, Any]) -> str:
    gain, first = summary["gain"], summary["gain over prompts first"]
    return (
        f"The best pair of layouts serves {gain['mean']:.2f} times as many requests a second as "
        "the best static layout under the same batching in the mean "
        f"({gain['least']:.2f} to {gain['most']:.2f}), and {first['mean']:.2f} times as many as "
        f"the best one that reads prompts first ({first['least']:.2f} to {first['most']:.2f}), as "
        "vLLM did by default then. Published over vLLM: 1.36 in the mean, 1.78 at most."
    )


def _rates(rows: Sequence[Row]) -> str:
    head = ["case", "static", "requests/s", "pair", "requests/s", "gain", "over prompts first"]
    lines = [
        [
            row["case"],
            row["static"],
            f"{row['static_per_s']:.2f}",
            row["pair"],
            f"{row['pair_per_s']:.2f}",
            f"{row['gain']:.2f}",
            f"{row['gain_over_prompts_first']:.2f}",
        ]
        for row in rows
    ]
    return table(head, lines)


def _parts(rows: Sequence[Row]) -> str:
    head = ["case", "reading s", "decoding s", "changes", "changing s", "copying s"]
    head += [name.replace("_", " ") for name in PARTS]
    lines = [
        [
            row["case"],
            f"{row['reading_s']:.0f}",
            f"{row['decoding_s']:.0f}",
            row["changes"],
            f"{row['changing_s']:.1f}",
            f"{row['copying_s']:.1f}",
            *(f"{row[name]:.2f}" for name in PARTS),
        ]
        for row in rows
    ]
    return table(head, lines)
