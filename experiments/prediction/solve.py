"""Finds what a plan would need to reach a goal: a bandwidth, a latency, a GPU memory or a number of
GPUs; and the longest sequences with which it fits.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from experiments.bench.problem import peak_bounds_of, predicted, probable_words
from mistlab.core.units import GIB_BYTES
from mistlab.core.values import MOST_TOKENS, InputError, near_matches, refuse, reject
from mistlab.cost.memory import allocator_of
from mistlab.economy.inverse import least_that
from mistlab.job.job import Job
from mistlab.job.prediction import Prediction
from mistlab.machine.hardware import GroupTransfers, Line, Transfers
from mistlab.plan.dimensions import AXES

# The parallel degree that increases if a plan gets more GPUs.
REPLICAS = AXES["data"].dimension
# The degrees by which ranks cut a sequence, and the tokens by which longer sequences are tried.
CUTS = (AXES["context"].dimension, AXES["tensor"].dimension)
LENGTHS = 128
# The range in which link rates are tried, as multiples of the present rate; the largest one counts
# as unlimited.
SLOWEST, FASTEST = 1e-4, 1e4
# The range in which latencies are tried, in microseconds.
LATENCIES = 1e-1, 1e7
SHARE, SECONDS = "%", "s"
# For each link rate, the reason why it does not matter to a plan, for a message.
CROSSED_BY = {
    "inter_node_gbytes_per_s": "nothing crosses nodes",
    "intra_node_gbytes_per_s": "nothing passes between GPUs of a node",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """What a plan needs to reach a goal: the value that a figure (such as a bandwidth) needs, its
    present value, and the step times that are compared.
    """

    name: str
    number: float | None
    now: float | None
    unit: str
    words: str

    def mapping(self) -> Mapping[str, Any]:
        """The value that a figure needs and the step times, as plain data for JSON."""
        return {
            "solve": self.name,
            "number": self.number,
            "now": self.now,
            "unit": self.unit,
            "answer": self.words,
        }


def solved(job: Job, name: str, goal: str | None) -> Solved:
    """The value of the figure ``name`` that a plan needs for a goal. The goal is a share by which a
    step may be longer than if the figure were unlimited (``5%``), or the seconds of a step
    (``12.5s``).
    """
    if name not in QUESTIONS:
        refuse("--solve", f"{name!r} is unknown{near_matches(name, QUESTIONS)}")
    return QUESTIONS[name](job, name, goal)


def _rate(job: Job, name: str, goal: str | None) -> Solved:
    """The lowest rate of links with which a step is short enough for the goal."""
    node = job.cluster.hardware.node
    now = getattr(job.cluster, name) or getattr(node, name)
    if now is None:
        refuse(
            "--solve",
            f"{name}: hardware {job.cluster.hardware.name} has no node.{name}: give cluster.{name} "
            "in the plan file, or hardware with such links",
        )

    def with_rate(rate: float) -> Job:
        changed: dict[str, Any] = {name: rate}
        return replace(job, cluster=replace(job.cluster, **changed))

    unlimited_s = _seconds(with_rate(now * FASTEST))
    most_s, goal_words = _goal(goal, unlimited_s)
    least = least_that(lambda r: _seconds(with_rate(r)) <= most_s, now * SLOWEST, now * FASTEST)
    if math.isinf(least):
        text = (
            f"no rate gives {most_s:.3f} s: with unlimited links a step takes {unlimited_s:.3f} s"
        )
        return Solved(name=name, number=None, now=now, unit="GB/s", words=text)
    if _seconds(with_rate(now * SLOWEST)) == unlimited_s:
        text = f"{CROSSED_BY[name]}: any rate is enough for a step {goal_words}"
        text = f"{text} (now {now:g} GB/s and {_seconds(job):.3f} s)"
        return Solved(name=name, number=0.0, now=now, unit="GB/s", words=text)
    begin = "less than " if least <= now * SLOWEST else ""
    text = (
        f"{begin}{least:.4g} GB/s are enough for a step {goal_words} (now {now:g} GB/s and "
        f"{_seconds(job):.3f} s, without a limit {unlimited_s:.3f} s)"
    )
    return Solved(name=name, number=least, now=now, unit="GB/s", words=text)


def _latency(job: Job, name: str, goal: str | None) -> Solved:
    """The largest latency that can be added to every message while a step is still short enough for
    the goal.
    """
    unlimited_s = _seconds(job)
    most_s, goal_words = _goal(goal, unlimited_s)
    transfers = job.cluster.hardware.transfers
    if transfers is None:
        reject(
            f"--solve {name}: hardware {job.cluster.hardware.name} lacks the transfer times of "
            "messages: add them by calibrate --bandwidth TABLE.csv"
        )

    def is_short(inverse: float) -> bool:
        slower = replace(job.cluster.hardware, transfers=_later(transfers, 1 / inverse))
        return _seconds(replace(job, cluster=replace(job.cluster, hardware=slower))) <= most_s

    low, high = LATENCIES
    inverse = least_that(is_short, 1 / high, 1 / low)
    number = 0.0 if math.isinf(inverse) else 1 / inverse
    more = "any latency" if number >= high else f"{number:.4g} us more a message"
    text = f"{more} are bearable for a step {goal_words} (now {unlimited_s:.3f} s)"
    return Solved(name=name, number=number, now=0.0, unit="us", words=text)


def _memory(job: Job, name: str, goal: str | None) -> Solved:
    """The smallest GPU memory with which the plan fits."""
    _check_no_goal(goal, name, "the least memory")
    prediction = _predicted(job)
    free = (job.cluster.keep_free_gib or 0.0) * GIB_BYTES
    outside = allocator_of(job.cluster).outside_bytes
    least = (prediction.peak_reserved_bytes + outside + free) / GIB_BYTES
    now = job.cluster.whole_memory_bytes / GIB_BYTES
    text = (
        f"{least:.2f} GiB a GPU are enough (now {now:.2f}) where the peak is as predicted: "
        f"{probable_words(peak_bounds_of(job, prediction), job.cluster)}"
    )
    return Solved(name=name, number=least, now=now, unit="GiB", words=text)


def _length(job: Job, name: str, goal: str | None) -> Solved:
    """The longest sequences with which the plan fits, a multiple of ``LENGTHS`` tokens and of the
    parts into which its ranks cut a sequence.
    """
    _check_no_goal(goal, name, "the longest sequences")
    _predicted(job)
    now, learned = job.workload.sequence_length, job.workload.model.learned_positions
    parts = (2 * math.prod(stage.degree(part) for part in CUTS) for stage in job.plan.stages)
    step = math.lcm(LENGTHS, *parts)
    most = (learned or MOST_TOKENS) // step

    def longer(count: int) -> Job:
        return replace(job, workload=replace(job.workload, sequence_length=count * step))

    def fits(count: int) -> bool:
        prediction = predicted(longer(count))
        return isinstance(prediction, Prediction) and prediction.fits

    count = most_that(fits, most)
    if count == 0:
        text = f"not even sequences of {step:,} tokens fit (now {now:,})"
        return Solved(name=name, number=None, now=now, unit="tokens", words=text)
    longest = longer(count)
    whole = " all positions of the model," if count == most and learned else ""
    probable = probable_words(peak_bounds_of(longest, _predicted(longest)), job.cluster)
    text = (
        f"sequences of {count * step:,} tokens fit,{whole} in steps of {step:,} (now {now:,}), "
        f"where the peak is as predicted: {probable}"
    )
    further = [note for note in longest.workload.remarks if note not in job.workload.remarks]
    text = "; ".join([text, *further])
    return Solved(name=name, number=count * step, now=now, unit="tokens", words=text)


def most_that(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to ``most`` that fits, where all smaller ones do; 0 if none does."""
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _check_no_goal(goal: str | None, name: str, what: str) -> None:
    if goal is not None:
        refuse(
            "--for",
            f"{goal}: --solve {name} finds {what} with which the plan fits, which has no goal: "
            "leave --for out",
        )


def _gpus(job: Job, name: str, goal: str | None) -> Solved:
    """The fewest GPUs with which a step is short enough for the goal, among multiples of the plan's
    replicas.
    """
    least = {stage: stage.degree(REPLICAS) for stage in job.plan.stages}
    replicas = min(least.values())
    widest = replicas * job.plan.micro_batches
    steps = [
        (scaled, prediction.iteration_s)
        for count in range(1, widest + 1)
        if widest % count == 0 and (scaled := _with_replicas(job, count, replicas)) is not None
        for prediction in (predicted(scaled),)
        if isinstance(prediction, Prediction) and prediction.fits
    ]
    if not steps:
        reject(
            f"--solve {name}: the plan does not fit in GPU memory with any number of data-parallel "
            "replicas: find another plan with tune"
        )
    most_s, goal_words = _goal(goal, min(seconds for _, seconds in steps))
    enough = [(one.plan.num_gpus, seconds) for one, seconds in steps if seconds <= most_s]
    now = job.plan.num_gpus
    if not enough:
        fastest, seconds = min(
            ((one.plan.num_gpus, own) for one, own in steps), key=lambda pair: pair[1]
        )
        text = f"no number of replicas gives {most_s:.3f} s: {fastest} GPUs take {seconds:.3f} s"
        return Solved(name=name, number=None, now=now, unit="GPUs", words=text)
    count, seconds = min(enough)
    text = (
        f"{count:,} GPUs are enough for a step {goal_words}: it takes {seconds:.3f} s (now {now:,})"
    )
    return Solved(name=name, number=count, now=now, unit="GPUs", words=text)


Asked = Callable[[Job, str, str | None], Solved]
QUESTIONS: Mapping[str, Asked] = {
    "inter_node_gbytes_per_s": _rate,
    "intra_node_gbytes_per_s": _rate,
    "latency_us": _latency,
    "memory_gib": _memory,
    "sequence_length": _length,
    "gpus": _gpus,
}


def _goal(goal: str | None, unlimited_s: float) -> tuple[float, str]:
    """The longest step time that a goal allows, and the goal as text."""
    text = (goal or f"5{SHARE}").strip()
    unit = text[-1:]
    number = text[:-1] if unit in (SHARE, SECONDS) else text
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not (value > 0 and math.isfinite(value)):
        refuse(
            "--for",
            f"{text!r} is not a goal: give how much longer than the best a step may take (5%), or "
            "the seconds of a step (12.5s)",
        )
    if unit == SHARE:
        return unlimited_s * (1 + value / 100), f"within {value:g} % of the best"
    return value, f"of {value:g} s"


def _with_replicas(job: Job, count: int, now: int) -> Job | None:
    """A job with another number of replicas, on as many nodes as it then needs; None if the GPUs
    cannot be divided evenly among stages or nodes.
    """
    stages = []
    for stage in job.plan.stages:
        degree, rest = divmod(stage.degree(REPLICAS) * count, now)
        if rest:
            return None
        stages.append(stage.with_values({REPLICAS: degree}))
    micro_batches, rest = divmod(job.plan.micro_batches * now, count)
    gpus = sum(stage.num_gpus for stage in stages)
    in_node = min(gpus, job.cluster.gpus_per_node)
    if rest or gpus % in_node:
        return None
    try:
        return replace(
            job,
            cluster=replace(job.cluster, nodes=gpus // in_node, gpus_per_node=in_node),
            plan=replace(job.plan, micro_batches=micro_batches, stages=tuple(stages)),
        )
    except InputError:
        return None


def _later(transfers: Transfers, more_us: float) -> Transfers:
    """The hardware with a latency added to the time of every message between GPUs."""

    def later(line: Line | None) -> Line | None:
        return line and replace(line, latency_us=line.latency_us + more_us)

    def of_group(group: GroupTransfers) -> GroupTransfers:
        return replace(
            group,
            all_gather=later(group.all_gather),
            reduce_scatter=later(group.reduce_scatter),
            all_reduce=later(group.all_reduce),
            all_to_all=later(group.all_to_all),
        )

    return replace(
        transfers,
        groups=tuple(map(of_group, transfers.groups)),
        in_node=later(transfers.in_node),
        across_nodes=later(transfers.across_nodes),
    )


def _predicted(job: Job) -> Prediction:
    prediction = predicted(job)
    if isinstance(prediction, InputError):
        raise prediction
    return prediction


def _seconds(job: Job) -> float:
    return _predicted(job).iteration_s
