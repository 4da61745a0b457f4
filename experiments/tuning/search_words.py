"""Search results as sentences and tables."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from experiments.bench.bench import Entry
from experiments.pages.tables import aligned, gib, number, played_words, rate_words
from experiments.prediction.predict import sentence
from experiments.tuning.explain import Loser, Rejected, StageLimit, Why
from experiments.tuning.smallest import Smallest
from mistlab.core.units import GIB_BYTES
from mistlab.core.values import to_mapping
from mistlab.job.prediction import Comparison, Prediction
from mistlab.job.search import TOLD_APART
from mistlab.plan.plan import Plan
from mistlab.plan.plan_words import count_words, runs_of

# The stages of a plan as text, in which consecutive equal stages share a line.


def limits_in_words(limits: Sequence[StageLimit]) -> Iterator[str]:
    """What limits each stage, as lines; stages that differ only in memory share a line."""
    names = [_limit(limit) for limit in limits]
    for run in runs_of(names):
        held = [limits[stage].memory_bytes / GIB_BYTES for stage in run]
        memory = f"{min(held):.2f}" + (f" to {max(held):.2f}" if len(run) > 1 else "")
        room = limits[run[0]].room_bytes / GIB_BYTES
        yield f"{stages_called(run)} limited by {names[run[0]]}; {memory} of {room:.2f} GiB."


def stages_called(run: range) -> str:
    """The names of consecutive stages, as the beginning of a sentence."""
    first, last = run[0], run[-1]
    return f"Stage {first} is" if first == last else f"Stages {first} to {last} are each"


def _limit(limit: StageLimit) -> str:
    steady_s = limit.compute_s + limit.exposed_communication_s
    return (
        f"{limit.limit}: {steady_s:.3f} s a micro-batch "
        f"({limit.share_of_slowest:.0%} of the slowest stage), "
        f"{limit.exposed_communication_s:.3f} of it exposed communication"
    )


# Search results as sentences and tables.


# A difference of fewer seconds than this is not mentioned.
NEGLIGIBLE_S = 5e-4

# If a search got less than this share of a core, and took at least so many seconds, a note says so.
BUSY, LEAST_BUSY_S = 0.75, 1.0

HEAD = (
    *("searcher", "engine", "space", "predicted s", "simulated s", "over Megatron"),
    *("plans", "stages", "wall s", "headroom GiB", "status", "gap"),
)
# The numbers of those columns of the table that contain text; all others contain numbers.
WORDS = (0, 1, 2, 10, 11)

TERMS: Mapping[str, str] = {
    "computation_s": "computation of the slowest stage",
    "exposed_communication_s": "exposed communication of the slowest stage",
    "other_stages_s": "passing through the other stages",
    "rest_s": "first and last micro-batches, step and sends",
}


def cells_of(row: Mapping[str, Any]) -> list[str]:
    """The cells of one row of the table of results, in the order of the headings ``HEAD``."""
    return [
        row["searcher"],
        row["engine"],
        row["space"],
        number(row["predicted_s"], ".3f"),
        number(row["simulated_s"], ".3f"),
        number(row["speedup"], ".2f", "x"),
        f"{row['plan_evaluations']:,}",
        f"{row['stage_evaluations']:,}",
        f"{row['wall_s']:.2f}",
        gib(row["headroom_bytes"]),
        row["status"],
        number(row["gap"], ".2%"),
    ]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table of all results, fastest first, and the reasons why some have no plan."""
    lines = aligned([list(HEAD), *map(cells_of, by_time(rows))], left=WORDS)
    return "\n".join([*lines, *reasons(rows)])


def reasons(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """For each searcher, the reason that it gives for how its search ended."""
    return [f"{row['searcher']}: {row['reason']}" for row in rows if row["reason"]]


def by_time(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The result rows in the order of their times, those without a plan last."""
    return sorted(rows, key=lambda row: row["predicted_s"] or float("inf"))


def prediction_words(plan: Plan, prediction: Prediction, simulated_s: float | None) -> str:
    """An iteration's time as predicted and as simulated, as text."""
    return f"{rate_words(plan, prediction)}; event simulator: {played_words(simulated_s)}"


def verdict(entry: Entry) -> str:
    """The first line of an answer: whether the plan is proven best, by how much another plan may be
    faster, or that nothing is proven; and which plans were searched.
    """
    result = entry.result
    assert result.prediction is not None, "an answer has a prediction"
    best, space = f"{result.prediction.iteration_s:.3f} s", f"space {entry.space.name}"
    if entry.space.other_engines:
        space += f" on any of the engines {', '.join(entry.space.engines)}"
    covered = f"{space} {_on_gpus(result.gpus)}".rstrip()
    if result.status == "OPTIMAL":
        sentence = f"Proven: no plan of {covered} is predicted faster than {best}."
    elif result.lower_bound_s is not None and result.gap is not None:
        sentence = (
            f"Not proven: a plan of {covered} may be predicted up to {result.gap:.1%} "
            f"faster than {best}, and none faster than {result.lower_bound_s:.3f} s."
        )
    else:
        tried = count_words(result.plan_evaluations, "plan")
        covered = f"{space} {_on_gpus(result.gpus, 'use')}".rstrip()
        sentence = f"Best of {tried} tried, no bound: plans of {covered} may be faster than {best}."
    if entry.is_played and entry.faster is not None:
        near = count_words(1 + entry.rivals_played, "plan")
        sentence += (
            f" Of the {near} within {TOLD_APART:.2%} of it that were played, the answer is fastest."
        )
    return sentence


def _on_gpus(gpus: Sequence[int], uses: str = "uses") -> str:
    """The numbers of GPUs for which plans were searched, as text."""
    if not gpus:
        return ""
    if [*gpus] == [1]:
        return "on 1 GPU"
    if len(gpus) == 1:
        return f"that {uses} all {gpus[0]:,} GPUs"
    *others, last = (f"{count:,}" for count in gpus)
    return f"on {', '.join(others)} or {last} GPUs"


def busy_words(entry: Entry) -> list[str]:
    """A note that other work on the machine slowed the proof down; empty if not."""
    wall_s, cpu_s = entry.result.wall_s, entry.cpu_s
    if entry.result.status in {"OPTIMAL", "INFEASIBLE"} or wall_s < LEAST_BUSY_S:
        return []
    if cpu_s > BUSY * wall_s:
        return []
    sentence = f"The machine was busy: the search had a core in {cpu_s:.1f} of its {wall_s:.1f} s."
    return [f"{sentence} --budget-cpu-seconds counts these alone."]


def rival_words(entry: Entry) -> list[str]:
    """A sentence on plans that are predicted to be nearly as fast as the best one, and were
    simulated too.
    """
    if not entry.rivals or entry.simulated_s is None:
        return []
    count = count_words(len(entry.rivals), "plan")
    within = f"{count} predicted within {TOLD_APART:.2%} of {entry.searcher}'s best"
    if not entry.rivals_played:
        return [f"{within}: too many tasks to play them."]
    few = entry.rivals_played < len(entry.rivals)
    nearest = f"the nearest {entry.rivals_played} " if few else ""
    tried = f"{within}, {nearest}played in {entry.playing_s:.1f} s with it"
    rival = entry.faster
    if rival is None or rival.simulated_s is None:
        return [f"{tried}: none is faster when played."]
    order = (
        f"one takes {rival.simulated_s:.3f} s (predicted {rival.prediction.iteration_s:.3f}), "
        f"{entry.faster_by:.2%} less than the best ({entry.simulated_s:.3f} s)"
    )
    beyond = entry.faster_by > TOLD_APART
    apart = f"{'more than' if beyond else 'within'} what the predictors differ by"
    return [f"{tried}: {order}, {apart}{': it is the answer' if entry.is_played else ''}."]


def why_words(why: Why) -> list[str]:
    """All reasons why the plan is best, one per line."""
    lines = [] if why.breakdown is None else [sentence(why.breakdown)]
    lines += limits_in_words(why.stages)
    if why.same:
        lines.append(f"The same plan was found by {', '.join(why.same)}.")
    if why.runner_up is not None:
        lines += _loser_words(why.runner_up)
    if why.baseline is not None:
        lines.append(_baseline_words(why.baseline))
    if why.rejected is None:
        lines.append("No neighbour that saves less memory is faster and lacks room.")
    else:
        lines.append(_rejected_words(why.rejected))
    if why.missed is not None:
        lines.append(f"Not the best of its space: {why.missed} is faster, and fits.")
    return lines


def _loser_words(loser: Loser) -> Iterator[str]:
    over = loser.comparison.ratio - 1
    longer = f"takes {over:.2%} longer" if over >= 0 else f"is predicted {-over:.2%} faster"
    yield f"The runner-up, by {loser.searcher}, {longer}, {_verdict(loser.comparison)}."
    terms = sorted(to_mapping(loser.longer_by).items(), key=lambda term: -abs(term[1]))
    differences = [
        f"{TERMS[name]} {seconds:+.3f} s" for name, seconds in terms if abs(seconds) > NEGLIGIBLE_S
    ]
    if differences:
        yield f"Its slowest stage is {loser.slowest_stage}; it differs by {', '.join(differences)}."


def _baseline_words(comparison: Comparison) -> str:
    return (
        f"The Megatron grid's plan takes {comparison.ratio:.2f} times as long, "
        f"{_verdict(comparison)}."
    )


def _verdict(comparison: Comparison) -> str:
    return ("beyond" if comparison.exceeds_bounds else "within") + " what the bounds leave open"


def _rejected_words(rejected: Rejected) -> str:
    begin = (
        f"Nearest plan that does not fit: {rejected.change}, {rejected.faster_by_s:.3f} s faster"
    )
    over = f"{rejected.over_bytes / GIB_BYTES:.2f} GiB"
    if rejected.stage is None:
        return f"{begin}; the fullest node lacks {over} of host memory."
    return (
        f"{begin}; stage {rejected.stage} lacks {over} in its {rejected.phase} phase, "
        f"for {rejected.memory_class}."
    )


def smallest_words(smallest: Smallest, space: str, *, is_proven: bool) -> list[str]:
    """The reason why there is no answer, and the changes that would give one; ``is_proven`` says
    whether a search has proven that no plan fits.
    """
    needs = _needs(smallest)
    if smallest.prediction.fits:
        problem = "No searcher found a plan that fits within its budget, but there is one"
        return [f"{problem}, of {needs}: give a larger --budget-evaluations or --budget-seconds."]
    nothing = (
        "nothing that was tried: more GPUs, more host memory, a smaller batch or shorter "
        "sequences, up to 32 times; a loss in chunks; states of 16 bits; adapters on 4 bits"
    )
    remedies = smallest.remedies or (nothing,)
    none = "fits: the one" if is_proven else "was found that fits: of those tried the one"
    which = f", which {' and '.join(smallest.limits)}," if smallest.limits else ""
    return [
        f"No plan of space {space}{which} {none} that comes nearest needs {needs}.",
        f"{_class_words(smallest)}.",
        f"What would make a plan fit: {'; or '.join(remedies)}.",
    ]


def need_words(smallest: Smallest) -> str:
    """A line that says why nothing fits: how much memory is needed by the plan that comes nearest
    to fitting.
    """
    if smallest.prediction.fits:
        return f"the searcher found no plan that fits, but there is one, of {_needs(smallest)}"
    return f"memory: the plan that comes nearest needs {_needs(smallest)}; {_class_words(smallest)}"


def _class_words(smallest: Smallest) -> str:
    """What takes the most memory of the plan that comes nearest to fitting, as text."""
    states = " states" if smallest.memory_class == "optimizer" else ""
    size = smallest.class_bytes / GIB_BYTES
    largest = f"{size:.1f} GiB on the GPU are {smallest.memory_class}{states}"
    return "; ".join(filter(None, (largest, smallest.adapters, smallest.logits)))


def _needs(smallest: Smallest) -> str:
    gpu, room = smallest.memory_bytes / GIB_BYTES, smallest.limit_bytes / GIB_BYTES
    host, host_room = smallest.host_bytes / GIB_BYTES, smallest.host_limit_bytes / GIB_BYTES
    return (
        f"{gpu:.1f} GiB of a GPU's {room:.1f} and {host:,.1f} GiB of a node's {host_room:,.1f} of "
        "host memory"
    )
