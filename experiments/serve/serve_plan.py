"""The command ``serve_plan``: finds the layout (parallel degrees) that serves a load: with the
highest rate, on the fewest GPUs, and on the Pareto frontier of throughput and latency.
"""

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from experiments.cli.commandline import DONE, NO_ANSWER, as_options, print_json
from experiments.pages.tables import table
from experiments.serve.played_plans import PlanPlayer, PlayedPlan
from experiments.serve.served_rows import model_named
from mistlab.core.files import read_csv
from mistlab.core.values import (
    MOST_TOKENS,
    Checked,
    FieldError,
    bounded,
    quantity,
    refuse,
    reject,
)
from mistlab.plan.workload import ModelSpec
from mistlab.serving.engine_constants import ServedRun, fitted_constants
from mistlab.serving.gpu_facts import ServingGpu, gpu_named
from mistlab.serving.load import Goals, Lengths, LoadFile, ServingLoad, drawn_load
from mistlab.serving.serving_plan import MOST_DEGREE, check_layout, exported_lines
from mistlab.serving.step_cost import RankLayout
from searchers.serving.layout_search import (
    LayoutSpace,
    ServedPlan,
    best_of,
    nearest_to,
    pareto_of,
    timed_plans,
)

HOUR_S = 3600.0
MILLION = 1e6
# The numbers of GPUs that are tried in order to reach a request rate.
SIZES = (1, 2, 4, 8, 16, 32, 64)
# How many requests are simulated to find latency percentiles.
PLAYED = 1000
QUICK_PLAYED = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingQuestion:
    """A question about serving: the search space except the number of GPUs, mean lengths, latency
    goals and prices.
    """

    space: LayoutSpace
    load: ServingLoad
    goals: Goals
    constants: Mapping[str, float]
    dollars: float | None

    @property
    def player(self) -> PlanPlayer:
        """The simulator that runs serving plans under the load of the question."""
        return PlanPlayer(load=self.load, goals=self.goals, constants=self.constants)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionNumbers(Checked):
    """The numbers that the options of a question give, by name; None for options that are not
    given.
    """

    gpus: int = field(metadata=bounded(minimum=1, most=MOST_DEGREE))
    prompt: float = field(metadata=bounded(above=0, most=MOST_TOKENS))
    output: float = field(metadata=bounded(above=0, most=MOST_TOKENS))
    budget: int = field(metadata=bounded(minimum=1, most=MOST_TOKENS))
    sequences: int = field(metadata=bounded(minimum=1, most=MOST_TOKENS))
    context: int | None = field(metadata=bounded(minimum=1, most=MOST_TOKENS))
    rate: float | None = field(metadata=quantity())
    ttft: float | None = field(metadata=quantity())
    tpot: float | None = field(metadata=quantity())
    dollars: float | None = field(metadata=quantity())


def serve_plan(options: argparse.Namespace) -> int:
    """Find how to serve a load: the parallel degrees with the most requests per second under
    latency goals, the fewest GPUs for a request rate, the Pareto frontier of throughput and time
    per token, and the cost.

    All layouts (parallel degrees) of the GPUs are timed in closed form under loads from one request
    to thousands, so the answer is the best of the space as far as means go. The best layout is then
    simulated request by request. If its latency percentiles miss the goals, the next layouts are
    simulated, until one meets them. If no layout does, the one that misses them least is shown.
    """
    with as_options():
        question = _question(options)
    if options.fewest:
        return _fewest(question, options)
    timed = _timed(question, options.gpus)
    best = best_of(timed, question.goals)
    if not best:
        return _none(timed, question, options)
    answer = _answer(question, best, timed, options)
    if options.json:
        print_json(answer)
    else:
        _print(question, best, timed, answer, options)
    misses = answer["best_played"] is not None and answer["best_played"]["meets_goals"] is False
    return NO_ANSWER if misses else DONE


def served(options: argparse.Namespace, *, plays: bool = True) -> dict[str, Any]:
    """The answer to the question in the options, as plain values; refused if no layout meets the
    goals.

    Without ``plays``, the best layout is not simulated and has no percentiles; simulation takes
    most of the time.
    """
    if options.fewest:
        refuse(
            "fewest",
            "only the command line can search for the fewest GPUs: run mistlab serve_plan --fewest",
        )
    with as_options():
        question = _question(options)
    timed = _timed(question, options.gpus)
    best = best_of(timed, question.goals)
    if not best:
        near = _nearest(timed, question, options, "gpus")
        reject(
            f"no layout (parallel degrees) of {options.gpus} {question.space.gpu} meets the "
            f"latency goals, and the nearest is {near.plan.text}: give more GPUs or looser goals"
        )
    return _answer(question, best, timed, options, plays=plays)


def _question(options: argparse.Namespace) -> ServingQuestion:
    QuestionNumbers(**{one.name: getattr(options, one.name) for one in fields(QuestionNumbers)})
    model = model_named(options.model)
    gpu = _gpu(options.gpu)
    cache_kind = options.cache or (
        "fp8" if options.weights in ("fp8", "fp8_block", "nvfp4") else "bf16"
    )
    space = LayoutSpace(
        model=model,
        gpu=gpu.name,
        engine=options.engine,
        weights=options.weights,
        cache=cache_kind,
        gpus=options.gpus,
        splits=options.splits,
        budget=options.budget,
        sequences=options.sequences,
    )
    check_layout(
        RankLayout(
            model=model,
            gpu=gpu.name,
            engine=options.engine,
            weights=options.weights,
            cache=cache_kind,
        )
    )
    load = _load(options, model)
    run = ServedRun(
        engine=options.engine,
        version="unsaid",
        gpu=gpu.name,
        model=model.name,
        weights=options.weights,
    )
    constants = {name: float(value[0]) for name, value in fitted_constants().of([run]).items()}
    return ServingQuestion(
        space=space,
        load=load,
        goals=Goals(
            first_s=options.ttft,
            token_s=options.tpot,
            share=options.share,
            requests_per_s=options.rate,
        ),
        constants=constants,
        dollars=options.dollars or gpu.dollars_an_hour,
    )


def _gpu(name: str) -> ServingGpu:
    try:
        return gpu_named(name)
    except FieldError as error:
        refuse("gpu", error.problem)


def _load(options: argparse.Namespace, model: ModelSpec) -> ServingLoad:
    """The requests of a trace file, or random ones; outputs end where the context length of the
    model is reached.
    """
    context = _context(options, model)
    remedy = "--context with the tokens that your weights were trained for"
    count = QUICK_PLAYED if options.quick else PLAYED
    draw = np.random.default_rng(options.seed)
    if options.trace is not None and options.histogram is not None:
        refuse(
            "histogram",
            f"{options.histogram}, but --trace {options.trace} gives requests already: leave one "
            "of these two options out",
        )
    if (path := options.trace or options.histogram) is not None:
        file = LoadFile(rows=read_csv(Path(path)), name=str(path), context=context, remedy=remedy)
        return file.histogram(count, draw, options.rate) if options.histogram else file.trace()
    if options.prompt + options.output > context:
        refuse(
            "prompt",
            f"{options.prompt:g}, with an output of {options.output:g}, is more than the context "
            f"of {context}{f' of {model.name}' if options.context is None else ''}: give fewer "
            "tokens, or --context with the tokens that your weights were trained for",
        )
    lengths = (
        Lengths(shape=options.lengths, tokens=options.prompt),
        Lengths(shape=options.lengths, tokens=options.output),
    )
    return drawn_load(count, lengths, draw, rate=options.rate).within(context)


def _context(options: argparse.Namespace, model: ModelSpec) -> int:
    """The most tokens of a request: the given number, or the context length of the released
    model.
    """
    given: int | None = options.context
    learned = model.learned_positions
    if learned is not None and given is not None and given > learned:
        refuse(
            "context",
            f"{given} is more than the {learned} learned positions of {model.name}: give at most "
            f"{learned}",
        )
    return given or model.context or MOST_TOKENS


def _timed(question: ServingQuestion, gpus: int) -> list[ServedPlan]:
    plans = list(replace(question.space, gpus=gpus).plans())
    lengths = question.load.mean_prompt, question.load.mean_output
    return timed_plans(plans, question.constants, lengths)


def _fewest(question: ServingQuestion, options: argparse.Namespace) -> int:
    """The fewest GPUs whose best layout reaches the request rate and meets the latency goals."""
    if question.goals.requests_per_s is None:
        refuse("--rate", "is needed with --fewest: give requests a second")
    reached: ServedPlan | None = None
    timed: list[ServedPlan] = []
    for gpus in SIZES:
        timed = _timed(question, gpus) or timed
        best = best_of(timed, question.goals)
        if not best:
            continue
        reached = best[0]
        if reached.requests_per_s < question.goals.requests_per_s:
            continue
        played, nearest = question.player.best_of(timed)
        if played is not None or nearest is None:
            return _tell_fewest(question, reached if played is None else played.served, options)
        reached = None
    if not timed:
        refuse(
            "--fewest",
            f"{SIZES[-1]} {question.space.gpu} have too little memory for a replica of "
            f"{question.space.model.name} with one request: give another GPU, or --weights of "
            "fewer bits",
        )
    near = reached or nearest_to(timed, question.goals)
    assert near is not None
    return _tell_too_few(question, near, options, is_slow=reached is None)


def _tell_too_few(
    question: ServingQuestion, near: ServedPlan, options: argparse.Namespace, *, is_slow: bool
) -> int:
    """Say why no number of GPUs can serve the request rate: either the latency goals cannot be met,
    or there are too many requests.
    """
    reason = "no layout meets the latency goals" if is_slow else "the rate is too high"
    error = f"not reached with {SIZES[-1]} GPUs: {reason}"
    if options.json:
        print_json({"error": error, "nearest": _mapping(question, near)})
    else:
        print(f"{error[0].upper()}{error[1:]}. The nearest is {_told(near)}.")
    return NO_ANSWER


def _told(served_plan: ServedPlan) -> str:
    return (
        f"{served_plan.plan.text} on {served_plan.plan.gpus} GPUs with "
        f"{served_plan.in_flight:.0f} in flight: first token {served_plan.first_s:.3f} s, then "
        f"{1e3 * served_plan.token_s:.1f} ms a token, {served_plan.requests_per_s:.2f} requests/s"
    )


def _tell_fewest(
    question: ServingQuestion, reached: ServedPlan, options: argparse.Namespace
) -> int:
    answer = {"gpus": reached.plan.gpus, **_mapping(question, reached)}
    if options.json:
        print_json(answer)
    else:
        rate = question.goals.requests_per_s
        print(f"{reached.plan.gpus} GPUs serve {rate:g} requests/s: {reached.plan.text},")
        print(f"which reach {reached.requests_per_s:.2f} requests/s under the goals.")
    return DONE


def _none(
    timed: Sequence[ServedPlan], question: ServingQuestion, options: argparse.Namespace
) -> int:
    """Say why there is no answer: either the model does not fit in memory, or no layout meets the
    latency goals.
    """
    near = _nearest(timed, question, options, "--gpus")
    if options.json:
        print_json({"error": "no layout meets the goals", "nearest": _mapping(question, near)})
    else:
        print(f"No layout meets the goals. The nearest is {_told(near)}.")
    return NO_ANSWER


def _nearest(
    timed: Sequence[ServedPlan], question: ServingQuestion, options: argparse.Namespace, field: str
) -> ServedPlan:
    """The serving plan that misses the latency goals by the least; refused if the model does not
    fit in memory.
    """
    near = nearest_to(timed, question.goals)
    if near is None:
        refuse(
            field,
            f"{options.gpus} {question.space.gpu} have too little memory for a replica of "
            f"{question.space.model.name} with one request: give more GPUs, or --weights of "
            "fewer bits",
        )
    return near


def _mapping(question: ServingQuestion, served_plan: ServedPlan) -> dict[str, Any]:
    output = served_plan.requests_per_s * question.load.mean_output
    dollars = None
    if question.dollars is not None:
        dollars = question.dollars * served_plan.plan.gpus / HOUR_S / output * MILLION
    return {
        "plan": served_plan.plan.text,
        "scheduler": served_plan.plan.scheduler,
        "in_flight": round(served_plan.in_flight, 1),
        "ttft_s": served_plan.first_s,
        "tpot_s": served_plan.token_s,
        "requests_per_s": served_plan.requests_per_s,
        "output_tokens_per_s_per_gpu": output / served_plan.plan.gpus,
        "dollars_per_million_tokens": dollars,
    }


def _answer(
    question: ServingQuestion,
    best: Sequence[ServedPlan],
    timed: Sequence[ServedPlan],
    options: argparse.Namespace,
    *,
    plays: bool = True,
) -> dict[str, Any]:
    goals, player = question.goals, question.player
    played = player.played(best[0]) if plays else None
    meeting = played
    if played is not None and played.distance(goals) > 1:
        meeting, nearest = player.best_of(timed)
        meeting = meeting or nearest
    chosen = best[0] if meeting is None else meeting.served
    lines: list[str] = []
    if options.export is not None:
        lines = exported_lines(chosen.plan, options.export, options.model, options.context)
    return {
        "best": _mapping(question, best[0]),
        "layouts": len({one.plan for one in timed}),
        "proven": True,
        "others": [_mapping(question, one) for one in best[1 : options.top]],
        "pareto": [_mapping(question, one) for one in pareto_of(timed)],
        "played": _played_mapping(played, goals),
        "best_played": _played_mapping(meeting, goals),
        "command_lines": lines,
        "goals": asdict(goals),
    }


def _played_mapping(played: PlayedPlan | None, goals: Goals) -> dict[str, Any] | None:
    if played is None:
        return None
    has_goals = goals.first_s is not None or goals.token_s is not None
    return {
        "plan": played.served.plan.text,
        "in_flight": round(played.served.in_flight, 1),
        "share": played.share,
        "ttft_s": played.first_s,
        "tpot_s": played.token_s,
        "requests_per_s": played.requests_per_s,
        "meets_goals": played.distance(goals) <= 1 if has_goals else None,
    }


def _print(
    question: ServingQuestion,
    best: Sequence[ServedPlan],
    timed: Sequence[ServedPlan],
    answer: Mapping[str, Any],
    options: argparse.Namespace,
) -> None:
    head = [
        "layout",
        "in flight",
        "first token s",
        "ms a token",
        "requests/s",
        "tokens/s/GPU",
        "$/M",
    ]

    def line(served_plan: ServedPlan) -> list[object]:
        row = _mapping(question, served_plan)
        dollars = row["dollars_per_million_tokens"]
        return [
            served_plan.plan.text,
            f"{served_plan.in_flight:.0f}",
            f"{served_plan.first_s:.3f}",
            f"{1e3 * served_plan.token_s:.2f}",
            f"{served_plan.requests_per_s:.2f}",
            f"{row['output_tokens_per_s_per_gpu']:.0f}",
            "-" if dollars is None or not math.isfinite(dollars) else f"{dollars:.2f}",
        ]

    print(f"All {answer['layouts']} layouts timed; each at its best load under the goals:")
    print(table(head, [line(one) for one in best[: options.top]]))
    print("Pareto frontier of requests a second against time per token:")
    print(table(head, [line(one) for one in pareto_of(timed)]))
    print("\n".join(_played_lines(best[0], answer)))
    for command in answer["command_lines"]:
        print(command)


def _played_lines(best: ServedPlan, answer: Mapping[str, Any]) -> Iterator[str]:
    """Lines on the simulated plans: the one that is predicted to be best, and one that meets the
    latency goals.
    """
    played, meeting = answer["played"], answer["best_played"]
    if played is None:
        yield f"Not played: {best.plan.text} has separate GPUs for prompts."
        return
    misses = ", which misses the goals" if played["meets_goals"] is False else ""
    yield f"Played: {_played_words(played)}{misses}."
    if not misses:
        return
    where = f"{meeting['plan']} with {meeting['in_flight']:.0f} in flight, {_played_words(meeting)}"
    if meeting["meets_goals"]:
        yield f"The best that meets them when played: {where}."
    else:
        yield f"No layout that was played meets them. The nearest: {where}."


def _played_words(played: Mapping[str, Any]) -> str:
    return (
        f"at {100 * played['share']:.0f} % of requests the first token within "
        f"{played['ttft_s']:.3f} s, then {1e3 * played['tpot_s']:.1f} ms a token; "
        f"{played['requests_per_s']:.2f} requests/s"
    )
