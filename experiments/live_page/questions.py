"""The questions that the page asks: each takes plain data and returns plain data."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from time import perf_counter
from typing import Any, get_args

import numpy as np

from experiments.bench.problem import lacking_bytes, order_of, predicted, predicted_each
from experiments.interchange.fidelity import exported
from experiments.interchange.single_changes import single_changes
from experiments.library.functions import serve
from experiments.live_page.knobs import adapted, choices_of, labels
from experiments.live_page.plan_figures import comparison_of, figures_of, part_words, predicted_job
from experiments.live_page.searching import SECONDS, Tell, frontier, searched_plan
from experiments.live_page.texts import AskedProblem, job_in, mapping_of, pasted, problem_asked
from mistlab import catalog
from mistlab.core.files import format_yaml
from mistlab.core.values import InputError, near_matches, refuse, reject
from mistlab.cost.memory import room_of_plan
from mistlab.engines.engine import Precision, names_for_plans
from mistlab.formats.recipes.exports import EXPORTS, target_of
from mistlab.job.job import Job, job_to_mapping
from mistlab.job.prediction import Prediction, compared
from mistlab.machine.slowdowns import STREAMS
from mistlab.plan.named_spaces import SPACES
from mistlab.plan.plan import Plan
from mistlab.serving.gpu_facts import gpu_names
from searchers.methods.rule import plan_by_rule
from searchers.savings import Chooser, chosen_plan
from simulators.symbolic import SymbolicPredictor

Answer = dict[str, Any]
Asked = Mapping[str, Any]
# The largest number of tasks of a simulated iteration that are sent to the live page; of more
# tasks, the first and the last ones are sent.
MOST_DRAWN = 24_000
# If Megatron's rule gives no plan that fits, random plans are tried: at most this many, for at most
# this many seconds.
DRAWN, DRAWN_S = 400, 0.05
# The factors by which links and GPUs are made faster, to show what a plan would gain.
FASTER = (2.0, 4.0)
# The options of the command ``serve_plan`` that the live page offers.
SERVED = (
    *("model", "gpu", "gpus", "weights", "cache", "engine", "prompt", "output", "lengths"),
    *("rate", "ttft", "tpot", "dollars", "splits", "export"),
)


def names(body: Asked, tell: Tell) -> Answer:
    """The names that the live page offers in lists, such as models, hardware and search spaces."""
    del body, tell
    return {
        "models": [
            {"name": name, "layers": model.layers, "hidden": model.hidden}
            for name in catalog.model_names()
            for model in (catalog.model(name),)
        ],
        "hardware": [
            {"name": name, "gpus": hardware.node.gpus, "memory_gib": hardware.gpu.memory_gib}
            for name in catalog.hardware_names()
            for hardware in (catalog.stated_hardware(name),)
        ],
        "spaces": [*SPACES],
        "engines": [*names_for_plans()],
        "precisions": [*get_args(Precision)],
        "frameworks": [*EXPORTS],
        "serving_gpus": [*gpu_names()],
        "parts": dict(part_words()),
        "labels": labels(),
        "streams": [*STREAMS],
    }


def predict(body: Asked, tell: Tell) -> Answer:
    """The prediction of a plan that is adapted to the problem and the sliders of the live page. If
    no plan is given, a first plan is found without a search.
    """
    del tell
    job = _job(body)
    return figures_of(job, predicted_job(job))


def choices(body: Asked, tell: Tell) -> Answer:
    """The values that each slider of a plan may have."""
    del tell
    asked = problem_asked(body.get("problem"))
    return {"choices": choices_of(asked, _job(body))}


def search(body: Asked, tell: Tell) -> Answer:
    """The best plan for a problem; the search reports its progress."""
    return searched_plan(problem_asked(body.get("problem")), _seconds(body), _seed(body), tell)


def pareto(body: Asked, tell: Tell) -> Answer:
    """The best plans on fewer nodes and on more nodes, with their times and prices."""
    return frontier(problem_asked(body.get("problem")), _seconds(body), _seed(body), tell)


def timeline(body: Asked, tell: Tell) -> Answer:
    """The tasks of one iteration of a plan, from the event simulator."""
    del tell
    from simulators.events import EventSimulator  # noqa: PLC0415 (needs SimPy)
    from simulators.graph import LANES  # noqa: PLC0415 (needs SimPy)
    from simulators.timeline import WORDS  # noqa: PLC0415 (needs SimPy)

    job = job_in(body.get("plan"))
    simulator = EventSimulator(workload=job.workload, cluster=job.cluster)
    simulation = simulator.simulate(job.plan)
    tasks = sorted(simulation.tasks(), key=lambda task: task.start_s)
    whole = len(tasks)
    if whole > MOST_DRAWN:
        tasks = [*tasks[: MOST_DRAWN // 2], *tasks[-MOST_DRAWN // 2 :]]
    kinds = sorted({task.action.kind for task in tasks})
    return {
        "iteration_s": simulation.iteration_s,
        "stages": job.plan.num_stages,
        "lanes": [name.replace("_", " ") for name in LANES],
        "kinds": [{"key": kind, "words": WORDS[kind]} for kind in kinds],
        "tasks": [
            [
                task.action.stage,
                LANES.index(task.lane),
                kinds.index(task.action.kind),
                task.start_s,
                task.end_s,
            ]
            for task in tasks
        ],
        "whole": whole,
        "busy_s": [dict(busy) for busy in simulation.busy_s()],
    }


def trace(body: Asked, tell: Tell) -> Answer:
    """One iteration of a plan as a trace file for Perfetto."""
    del tell
    from simulators.events import EventSimulator  # noqa: PLC0415 (needs SimPy)
    from simulators.timeline import trace_text  # noqa: PLC0415 (needs SimPy)

    job = job_in(body.get("plan"))
    simulator = EventSimulator(workload=job.workload, cluster=job.cluster)
    return {"text": trace_text(simulator.simulate(job.plan))}


def gains(body: Asked, tell: Tell) -> Answer:
    """What a plan would gain with faster links, with more memory, or on other GPUs."""
    del tell
    job = job_in(body.get("plan"))
    before = predicted_job(job)
    rows = [*_by_links(job, before), *_by_memory(job, before), *_by_gpus(job, before)]
    return {"iteration_s": before.iteration_s, "fits": before.fits, "rows": rows}


def compare(body: Asked, tell: Tell) -> Answer:
    """A comparison of two plans, with the parts of the iteration that make one of them faster."""
    del tell
    return comparison_of(job_in(body.get("first")), job_in(body.get("second")))


def paste(body: Asked, tell: Tell) -> Answer:
    """The kind of a text that a user has pasted (plan, hardware, model or launch file), and the
    plan in it.
    """
    del tell
    return pasted(body)


def plan_file(body: Asked, tell: Tell) -> Answer:
    """A plan as the text of a plan file, which every command takes."""
    del tell
    return {"text": format_yaml(job_to_mapping(job_in(body.get("plan"))))}


def export(body: Asked, tell: Tell) -> Answer:
    """A plan as a framework's file."""
    del tell
    job, framework = job_in(body.get("plan")), body.get("framework")
    if framework and framework not in EXPORTS:
        refuse("framework", f"{framework!r} is unknown{near_matches(str(framework), EXPORTS)}")
    made = exported(job, EXPORTS[framework] if framework else target_of(job))
    return {
        "framework": made.target.name,
        "text": made.text,
        "remarks": [*map(str, made.found.remarks)],
        "exact": made.is_exact,
        "plan": job_to_mapping(made.found.job),
    }


def serving(body: Asked, tell: Tell) -> Answer:
    """The layout (parallel degrees) in which GPUs serve a load best, by the closed form."""
    del tell
    return serve(**_load(body), plays=False)


def serving_played(body: Asked, tell: Tell) -> Answer:
    """The layout (parallel degrees) in which GPUs serve a load best, with that layout simulated
    request by request.
    """
    del tell
    return serve(**_load(body))


def _load(body: Asked) -> dict[str, Any]:
    """The load of requests that the live page asks about; a load that names a file is refused."""
    question = dict(mapping_of(body.get("load"), "load"))
    for name, value in question.items():
        if name not in SERVED:
            refuse(f"load.{name}", f"is unknown{near_matches(str(name), SERVED)}")
        if isinstance(value, str) and "/" in value:
            refuse(
                f"load.{name}",
                f"{value!r} names a file, which this page does not read: choose a name from the "
                "list",
            )
    for name in ("model", "gpu", "gpus"):
        if not question.get(name):
            refuse(f"load.{name}", "missing: choose a value")
    return question


QUESTIONS: Mapping[str, Callable[[Asked, Tell], Answer]] = {
    "names": names,
    "predict": predict,
    "choices": choices,
    "search": search,
    "pareto": pareto,
    "timeline": timeline,
    "trace": trace,
    "gains": gains,
    "compare": compare,
    "paste": paste,
    "plan_file": plan_file,
    "export": export,
    "serving": serving,
    "serving_played": serving_played,
}


def _job(body: Asked) -> Job:
    """The plan that the live page sends (or a first plan for its problem), adapted to the problem
    and the sliders.
    """
    if body.get("problem") is None:
        return job_in(body.get("plan"))
    asked = problem_asked(body["problem"])
    knobs = mapping_of(body.get("knobs") or {}, "knobs")
    if body.get("plan") is not None:
        return adapted(asked, job_in(body["plan"]), knobs)
    return adapted(asked, _first_plan(asked), knobs)


def _first_plan(asked: AskedProblem) -> Job:
    """A plan for a problem, found without a search: that of Megatron's rule if it fits in memory
    (not for models with experts), otherwise the best of a few random plans.
    """
    predictor = SymbolicPredictor(workload=asked.workload, cluster=asked.cluster)
    has_experts = asked.workload.model.experts is not None
    ruled = None if has_experts else plan_by_rule(asked.problem, predictor)
    if ruled is not None:
        return Job(workload=asked.workload, cluster=asked.cluster, plan=ruled[0])
    best = min(_drawn(asked, predictor), key=lambda one: order_of(one[1]), default=None)
    if best is None:
        reject(
            f"global_batch: {asked.workload.global_batch} sequences cannot be divided equally "
            f"among {asked.cluster.num_gpus} GPUs by any plan: give a multiple of "
            f"{asked.cluster.num_gpus}, or another number of GPUs"
        )
    return Job(workload=asked.workload, cluster=asked.cluster, plan=best[0])


def _drawn(asked: AskedProblem, predictor: SymbolicPredictor) -> Iterator[tuple[Plan, Prediction]]:
    """Plans of a search space with their predictions: first a given one, then random ones, until
    one fits or the time is over.
    """
    draw, began_s = np.random.default_rng(0), perf_counter()
    for number in range(DRAWN):
        choose = Chooser(lambda _, some: int(draw.integers(some)) if number else 0)  # noqa: B023
        plan = chosen_plan(asked.problem, asked.space, choose)
        answer = None if plan is None else predicted_each(predictor, [plan])[0]
        if plan is not None and isinstance(answer, Prediction):
            yield plan, answer
            if answer.fits or perf_counter() - began_s > DRAWN_S:
                return


def _by_links(job: Job, before: Prediction) -> Iterator[Answer]:
    """What the plan would gain if the links inside nodes, or those between nodes, were faster."""
    node = job.cluster.hardware.node
    for name, what in (
        ("intra_node_gbytes_per_s", "links in a node"),
        ("inter_node_gbytes_per_s", "network between nodes"),
    ):
        if name.startswith("inter") and job.cluster.nodes == 1:
            continue
        now = getattr(job.cluster, name) or getattr(node, name)
        for times in FASTER if now else ():
            faster = replace(job.cluster, **{name: times * now})
            text = f"{what} {times:g} times as fast ({times * now:,.0f} GB/s)"
            yield from _gain(text, replace(job, cluster=faster), before)


def _by_memory(job: Job, before: Prediction) -> Iterator[Answer]:
    """The change that would make a plan fastest, among single changes after which it no longer
    fits; and the memory that the plan then lacks.
    """
    changes = single_changes(job)
    answers = predicted_each(
        SymbolicPredictor(workload=job.workload, cluster=job.cluster),
        [change.job.plan for change in changes],
    )
    lacking = [
        (answer.iteration_s, change, answer)
        for change, answer in zip(changes, answers, strict=True)
        if isinstance(answer, Prediction)
        and not answer.fits
        and answer.iteration_s < before.iteration_s
    ]
    if not lacking:
        return
    _, change, answer = min(lacking, key=lambda one: one[0])
    over = max(lacking_bytes(job.cluster, change.job.plan, answer))
    room = float(room_of_plan(job.cluster, job.plan).min())
    text = (
        f"{over / 2**30:.1f} GiB more memory on each GPU (now {room / 2**30:.1f}): {change.words}"
    )
    if over > 0:
        yield _row(text, answer, before, fits=True)


def _by_gpus(job: Job, before: Prediction) -> Iterator[Answer]:
    """What the plan would gain on equally many GPUs of each other kind in the catalogue."""
    if job.cluster.others:
        return
    for name in catalog.hardware_names():
        hardware = catalog.hardware(name)
        if name != job.cluster.hardware.name and hardware.node.gpus >= job.cluster.gpus_per_node:
            cluster = replace(job.cluster, hardware=hardware, profile=None)
            try:
                yield from _gain(name, replace(job, cluster=cluster), before)
            except InputError:
                continue


def _gain(change: str, job: Job, before: Prediction) -> Iterator[Answer]:
    answer = predicted(job)
    if isinstance(answer, Prediction):
        yield _row(change, answer, before, fits=answer.fits)


def _row(change: str, answer: Prediction, before: Prediction, *, fits: bool) -> Answer:
    comparison = compared(before, answer)
    return {
        "change": change,
        "iteration_s": answer.iteration_s,
        "ratio": comparison.ratio,
        "sure": comparison.exceeds_bounds,
        "fits": fits,
    }


def _seconds(body: Asked) -> float:
    seconds = body.get("seconds", SECONDS)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        refuse("seconds", f"{seconds!r} is not a time: give seconds above 0")
    return float(seconds)


def _seed(body: Asked) -> int:
    seed = body.get("seed", 0)
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        refuse("seed", f"{seed!r} is not a seed: give a whole number from 0 on")
    return seed
