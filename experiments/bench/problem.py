"""The workload and cluster that a command's options describe, and predictions of plans for them or
the reasons why they are refused.
"""

import argparse
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from math import ceil
from pathlib import Path
from typing import Any, Literal

from experiments.cli.commandline import OF_CLUSTER, PROBLEM, as_options, progress
from mistlab import catalog
from mistlab.core.units import GIB_BYTES
from mistlab.core.values import FieldError, InputError, one_of, refuse, reject
from mistlab.cost.confidence import PeakBounds, margin_share, peak_bounds
from mistlab.cost.memory import allocator_of, host_bytes_over, room_bytes, room_of_plan
from mistlab.economy.bill import model_parameters
from mistlab.engines.adapters import Base
from mistlab.engines.engine import ENGINES, SINGLE, Engine, Precision
from mistlab.job.job import (
    Job,
    fields_of,
    groups_named,
    hardware_from,
    load_job,
    model_from,
    network_from,
)
from mistlab.job.prediction import (
    MemoryByClass,
    MemoryByPhase,
    Prediction,
    Predictor,
    StagePrediction,
)
from mistlab.machine.cluster import Cluster
from mistlab.plan.plan import Plan
from mistlab.plan.workload import ModelSpec, Workload, unsupported
from mistlab.reduction.reduction_text import reduction_named
from simulators.symbolic import SymbolicPredictor

# Whether a plan fits in memory; "near" means that the probability that it does is below ``SURE``.
Fit = Literal["yes", "near", "no"]

# The workload and the cluster that the options of a command describe.


def load_equal(path: Path) -> Job:
    """The job of a plan file, for a command that supports only clusters of equal nodes."""
    job = load_job(path)
    check_equal(job, path)
    return job


def check_equal(job: Job, path: Path) -> None:
    """Refuse a plan on different kinds of nodes, for a command that supports only equal nodes."""
    if job.cluster.others:
        reject(
            f"{path}: cluster.hardware: {job.cluster.name}: this command supports only nodes "
            "that are all alike: give one hardware name, or use tune, compare_searchers or predict"
        )


def numbers_of(options: argparse.Namespace) -> Mapping[str, Any]:
    """The hardware figures that options set in place of a cluster's own, and the network file that
    they name.
    """
    given = {name: getattr(options, name, None) for name in OF_CLUSTER}
    if isinstance(given["network"], str):
        with as_options():
            given["network"] = network_from(given["network"], Path())
    return {name: number for name, number in given.items() if number is not None}


def asked_words(workload: Workload, cluster: Cluster) -> str:
    """A one-line description of a problem, with the default values of options that were not
    given.
    """
    model = workload.model
    size = f"{model_parameters(workload) / 1e9:.2f} billion parameters in {model.layers} blocks"
    nodes = "1 node" if cluster.nodes == 1 else f"{cluster.nodes:,} nodes"
    gpus = f"{nodes} of {cluster.gpus_per_node} {cluster.name}"
    batch = f"{workload.global_batch:,} sequences of {workload.sequence_length:,} tokens a step"
    return f"{model.name}: {size}; {gpus}; {batch}, {workload.precision}"


def check_beside_plan(line: Sequence[str], beside: Iterable[str], where: str) -> None:
    """Refuse options that contradict a plan file, which determines all options except those in
    ``beside``. An option that the user wrote counts even if it has its default value.
    """
    allowed = {f"--{name.replace('_', '-')}" for name in beside}
    flags = dict.fromkeys(word.partition("=")[0] for word in line if word.startswith("--"))
    given = [flag for flag in flags if flag not in allowed]
    if given:
        reject(
            f"{where}: the plan file already determines {', '.join(given)}: leave these options out"
        )


def check_supported(workload: Workload, engines: Iterable[str]) -> None:
    """Refuse an option of a workload that one of these engines does not support."""
    with as_options():
        for name in engines:
            if error := unsupported(workload, ENGINES[name]):
                raise error


def on_cluster_with(job: Job, numbers: Mapping[str, Any]) -> Job:
    """The job on its cluster, with the hardware figures and the network that options give."""
    if not numbers:
        return job
    changes: dict[str, Any] = {**numbers}
    with as_options():
        return replace(job, cluster=replace(job.cluster, **changes))


def room_words(cluster: Cluster) -> str:
    """A text that says how many GiB of a GPU's memory plans may use and what takes the rest, with
    one figure for each group of equal nodes.
    """
    room = " and ".join(f"{room_bytes(one) / GIB_BYTES:.1f}" for one in cluster.of_groups)
    parts = []
    for group in cluster.of_groups:
        whole, outside = group.whole_memory_bytes, allocator_of(group).outside_bytes
        parts.append(f"{whole / GIB_BYTES:.1f} less {outside / GIB_BYTES:.1f}")
    free = f" and {cluster.keep_free_gib:g} kept free" if cluster.keep_free_gib else ""
    return f"{room} GiB: a GPU's {' and '.join(parts)} outside of torch's allocator{free}"


def free_words(cluster: Cluster) -> list[str]:
    """The memory of a GPU that plans must leave free, as text."""
    if not cluster.keep_free_gib:
        return []
    return [f"{cluster.keep_free_gib:g} GiB of every GPU are kept free."]


def workload_of(options: argparse.Namespace, **instead: Any) -> Workload:
    """The workload that a command's options describe; ``instead`` replaces some values."""
    fields = ("sequence_length", "global_batch", "attention", "precision")
    values = {name: getattr(options, name) for name in fields if name not in instead} | instead
    if "model" not in instead:
        values["model"] = model_named(options.model, getattr(options, "base", "16bit"))
    return Workload(**values, **_trained(options))


# Texts that are meant as the path of a file.
_PATH = re.compile(r"[./~]|.*\.(ya?ml|json)(#|$)")


def model_named(text: str, base: Base = "16bit") -> ModelSpec:
    """The model that ``--model`` gives: a name of the catalogue, a file, or the name of a released
    checkpoint whose sizes are known; a line of progress says which model that name stands for. A
    checkpoint of bitsandbytes is taken where frozen weights have as many bits, by ``base``.
    """
    try:
        return model_from(text, Path())
    except FieldError as error:
        from mistlab.formats.checkpoints import (  # noqa: PLC0415 (seldom needed)
            quantised,
            released,
            stored_bits,
        )

        if Path(text).exists() or _PATH.match(text):
            raise
        bits, known = stored_bits(text), released(text)
        is_trained = bits == base and "bnb" in text
        if bits != "8bit" and not is_trained and (name := quantised(text)) is not None:
            refuse(
                error.path,
                f"{text!r} has quantised weights: give --model {name}, and --base 4bit or 8bit "
                "where adapters are trained on them",
            )
        if known is not None:
            model, what = known
            wide = "; its 8-bit weights as widened: --base 8bit keeps them beside adapters"
            _tell(f"--model {text}: is taken as {what}{wide * (bits == '8bit')}")
            return model
        if "did you mean" in error.problem:
            raise
        refuse(
            error.path,
            f"{text!r} is not in the catalogue ({catalog.models_path()}), and nothing is fetched: "
            "give a catalogue name of these sizes, or the path of the model's config.json, which "
            "Hugging Face has",
        )


def hardware_named(text: str) -> str:
    """What ``--hardware`` gives, with a catalogue name in place of each name that means exactly one
    GPU of the catalogue; a line of progress says which.
    """
    names = []
    for part in text.split(","):
        name, colon, nodes = part.partition(":")
        meant = () if name in catalog.hardware_names() else catalog.hardware_called(name)
        if len(meant) == 1 and not _PATH.match(name):
            _tell(f"--hardware {name}: is taken as {meant[0]}")
            name = meant[0]
        elif not meant and not Path(name).exists() and name not in catalog.hardware_names():
            from experiments.bench.machine_names import hardware_here  # noqa: PLC0415 (seldom needed)

            if ours := hardware_here(name):
                reject(f"--hardware {name}: {ours}")
        names.append(f"{name}{colon}{nodes}")
    return ",".join(names)


@cache
def _tell(line: str) -> None:
    """Print a line of progress, once for a command that asks several times."""
    progress(line)


def _trained(options: argparse.Namespace) -> dict[str, Any]:
    """The options that say which weights are trained; empty for commands without such options."""
    train = {"lora": "adapters"}.get(getattr(options, "train", "all"), "")
    given: dict[str, Any] = {
        "train": train or getattr(options, "train", None),
        "adapter_rank": getattr(options, "rank", None),
        "adapter_targets": getattr(options, "adapter_targets", None),
        "optimizer": getattr(options, "optimizer", None),
        "base": getattr(options, "base", None),
        "loss": getattr(options, "loss", None),
        "states": getattr(options, "states", None),
        "gradients": getattr(options, "gradients", None),
    }
    if (reduction := getattr(options, "reduction", None)) is not None:
        given["reduction"] = reduction_named(reduction)
    return {name: value for name, value in given.items() if value is not None}


def problem_of(
    options: argparse.Namespace, *, takes_groups: bool = False, engines: Sequence[str] = ()
) -> tuple[Workload, Cluster]:
    """The workload and the cluster that the common options describe. A cluster with several kinds
    of nodes is refused unless the command ``takes_groups``. Without ``--precision`` the precision
    is fp16, or the first in which all ``engines`` train if one of them does not train in fp16.
    """
    numbers: dict[str, Any] = {**numbers_of(options)}
    with as_options():
        cluster = Cluster(
            **_nodes_of(options, takes_groups=takes_groups),
            gpus_per_node=options.gpus_per_node,
            **numbers,
        )
        instead = {} if options.precision else {"precision": _usual_precision(cluster, engines)}
        workload = workload_of(options, **instead)
        for group in cluster.of_groups:
            group.peak_flop_per_s(workload.precision)
    return workload, cluster


def _usual_precision(cluster: Cluster, engines: Sequence[str]) -> Precision:
    """The default precision of a training on a cluster: what its engines usually train in, or the
    first of fewer than 32 bits that all engines and GPUs have. GPUs that have none are refused.
    """
    default: Precision = PROBLEM["precision"]
    others = {ENGINES[engine].usual_precision for engine in engines} - {default}
    trained = [ENGINES[engine].memory for engine in engines]
    names = dict.fromkeys((*others, default, *(name for row in trained for name in row)))
    common = [name for name in names if all(name in row for row in trained) and name not in SINGLE]
    common = common or [default]
    gpus = [group.hardware.gpu for group in cluster.of_groups]
    usable = [name for name in common if all(gpu.has(name) for gpu in gpus)]
    if not usable:
        reject(
            f"--hardware {cluster.name}: its GPUs compute in {gpus[0].precisions} only, but engine "
            f"{' and '.join(engines)} trains in {one_of(common)}: give another --hardware, or an "
            "--engine that trains in a precision of these GPUs"
        )
    return usable[0]


def _nodes_of(options: argparse.Namespace, *, takes_groups: bool) -> dict[str, Any]:
    """The hardware and the nodes that options name, as the fields of a ``Cluster``."""
    named = hardware_named(options.hardware)
    groups = groups_named(named, Path())
    if not groups:
        return {"hardware": hardware_from(named, Path()), "nodes": options.nodes}
    if len(groups) > 1 and not takes_groups:
        refuse(
            "hardware",
            f"{options.hardware} has nodes of different kinds, but this command supports only "
            "nodes that are all alike: give one hardware name, or use tune, compare_searchers or "
            "predict",
        )
    fields = fields_of(groups)
    # A cluster file may set another number of nodes if the option has its default value.
    if options.nodes not in (PROBLEM["nodes"], fields["nodes"]):
        refuse(
            "nodes",
            f"{options.nodes}, but --hardware {options.hardware} has {fields['nodes']} nodes: "
            "leave --nodes out",
        )
    return fields


# Predictions of plans: for each plan its prediction, or the reason why it was refused.


Answer = Prediction | InputError


def predicted(job: Job) -> Answer:
    """The closed form's prediction of a job, or the reason why the job was refused."""
    predictor = SymbolicPredictor(workload=job.workload, cluster=job.cluster)
    return predicted_each(predictor, [job.plan])[0]


def predicted_each(predictor: Predictor, plans: Sequence[Plan]) -> Sequence[Answer]:
    """The prediction of each plan, or the reason why the plan was refused. All plans are predicted
    at once; if any plan is refused, each half of the list is predicted by itself.
    """
    try:
        return predictor.predict_many(plans)
    except InputError as error:
        if len(plans) == 1:
            return [error]
        half = len(plans) // 2
        return [
            *predicted_each(predictor, plans[:half]),
            *predicted_each(predictor, plans[half:]),
        ]


def order_of(prediction: Prediction) -> tuple[bool, float]:
    """A sort key for predictions, best first: plans that fit come first, by time; the others
    follow, by memory.
    """
    by = prediction.iteration_s if prediction.fits else prediction.peak_reserved_bytes
    return not prediction.fits, by


# Describes how well a predicted plan fits: the stage with the least free memory, how much is free
# there, which kind of tensor takes most, and how probable it is that a run stays within it.


# The probability of fitting from which a plan counts as sure to fit.
SURE = 0.9


def is_sure(probability: float) -> bool:
    """Whether a plan with this probability of fitting counts as sure to fit, by the whole per cent
    that texts print: who reads 90 % is not asked to free memory for 90 %.
    """
    return round(probability, 2) >= SURE


def fit_words(job: Job, prediction: Prediction) -> tuple[Fit, str]:
    """A sentence that says whether a plan fits, and how much memory is free on its fullest GPU. If
    it is not certain whether the plan fits, also the probability that a run stays within memory.
    """
    lacks = lacking_bytes(job.cluster, job.plan, prediction)
    number = lacks.index(max(lacks))
    room = (prediction.stages[number].peak_reserved_bytes - lacks[number]) / GIB_BYTES
    free = job.cluster.keep_free_gib or 0.0
    over = lacks[number] / GIB_BYTES
    probability = peak_bounds_of(job, prediction).fit_probability
    beside = f", beside {free:g} GiB kept free" if free else ""
    of_room = f"{abs(over):.1f} GiB ({abs(over) / room:.0%} of its room){beside}"
    runs = f"a run stays within its memory with a probability of {probability:.0%}"
    if over > 0:
        how = f"the peak of its fullest GPU is above the limit by {of_room}"
        sentence = f"It does not fit in memory: {how}"
        return "no", f"{sentence}, though {runs}." if probability > 1 - SURE else f"{sentence}."
    if not prediction.fits:
        host = host_bytes_over(job.plan, prediction, job.cluster) / GIB_BYTES
        return "no", f"It does not fit: its fullest node lacks {host:,.1f} GiB of host memory."
    how = f"the peak of its fullest GPU is below the limit by {of_room}"
    if not is_sure(probability):
        return "near", f"It fits, but not surely: {how}; {runs}. Try it before you rely on it."
    return "yes", f"It fits in memory: {how}."


def peak_bounds_of(job: Job, prediction: Prediction) -> PeakBounds:
    """The probability that a run of a job's plan stays within its GPUs' memory, and the bounds of
    its peak. What ``keep_free_gib`` keeps free is a margin that the run may still take.
    """
    whole = replace(job.cluster, keep_free_gib=None)
    rooms: list[float] = room_of_plan(whole, job.plan).tolist()
    lacks_host = host_bytes_over(job.plan, prediction, job.cluster) > 0
    family = ENGINES[job.plan.engine].family
    return peak_bounds(prediction, rooms, family, lacks_host=lacks_host)


def probable_words(bounds: PeakBounds, cluster: Cluster) -> str:
    """The probability that a plan fits its GPUs' whole memory, and the 90 % bounds of its memory
    peak, as a sentence.
    """
    low, high = (
        size / GIB_BYTES
        for size in (bounds.peak_reserved_bytes_low, bounds.peak_reserved_bytes_high)
    )
    kept = cluster.keep_free_gib
    free = f", counting the {kept:g} GiB kept free as room" if kept else ""
    return (
        f"it fits with a probability of {bounds.fit_probability:.0%} "
        f"(90 % of peaks: {low:.1f} to {high:.1f} GiB){free}"
    )


def margins_gib(job: Job) -> Mapping[str, int]:
    """For each kind of GPU of a job's cluster, the whole GiB to keep free on it so that any plan of
    the job's engine fits there with the probability ``SURE``.
    """
    share = margin_share(ENGINES[job.plan.engine].family, SURE)
    whole = replace(job.cluster, keep_free_gib=None)
    return {
        group.hardware.name: ceil(share * room_bytes(group) / GIB_BYTES)
        for group in whole.of_groups
    }


def margin_gib(job: Job) -> int | None:
    """The most of a job's ``margins_gib`` that all GPUs of its cluster can keep free, which asks
    for the probability ``SURE`` on as many kinds of GPUs as one option can; None if no GPU needs
    more than is kept free already, or one of them has too little memory.
    """
    whole = replace(job.cluster, keep_free_gib=None)
    least = min(room_bytes(group) for group in whole.of_groups) / GIB_BYTES
    kept = job.cluster.keep_free_gib or 0.0
    return max((gib for gib in margins_gib(job).values() if kept < gib < least), default=None)


def sure_words(job: Job, prediction: Prediction, margin_gives: str = "") -> str:
    """A sentence with the probability that a plan fits its GPUs; if the probability is low, the
    sentence names the option that raises it, with its value. ``margin_gives`` says what plan a
    search gives with this option.
    """
    bounds = peak_bounds_of(job, prediction)
    sentence = probable_words(bounds, job.cluster)
    sentence = f"{sentence[0].upper()}{sentence[1:]}"
    over = host_bytes_over(job.plan, prediction, job.cluster) / GIB_BYTES
    if over > 0:
        return f"{sentence}: its fullest node lacks {over:,.1f} GiB of host memory."
    remedy = "" if is_sure(bounds.fit_probability) else _margin_words(job, margin_gives)
    return f"{sentence}: {remedy}." if remedy else f"{sentence}."


def _margin_words(job: Job, margin_gives: str) -> str:
    """The memory to keep free so that plans surely fit, and the kinds of GPUs that need more than
    all GPUs can keep free, as text.
    """
    margin, margins = margin_gib(job), margins_gib(job)
    kept = margin or job.cluster.keep_free_gib or 0.0
    more = [f"{gib} GiB on {name}" for name, gib in margins.items() if gib > kept]
    needs = f"{SURE:.0%} takes {' and '.join(more)}, which not all GPUs can keep free"
    if margin is None:
        return needs if more else ""
    gives = margin_gives and f", and gives {margin_gives}"
    enough = [name for name, gib in margins.items() if gib <= margin]
    on = f" on {' and '.join(enough)} ({needs})" if more else ""
    return f"--keep-free-gib {margin} asks for {SURE:.0%}{on}{gives}"


def untimed_words(engine: Engine, work: Workload) -> str:
    """A sentence that says that no GPU has run an engine, if it is this package's runtime, and
    where engines are that were timed; empty if it is not.
    """
    if not engine.runs_here:
        return ""
    timed = "spaces such as fsdp have engines that were timed"
    if work.train == "adapters":
        timed = "engine trainer predicts TRL, axolotl and LLaMA-Factory"
    return f"Engine {engine.name} is this package's runtime, which no GPU has run; {timed}."


# A note tells of an engine's attention where sequences have at least this many tokens.
LONG_TOKENS = 8192


def attention_words(job: Job) -> str:
    """A sentence that says that a plan's attention is predicted as slow as another kernel than
    FlashAttention, and which engine has FlashAttention; empty if sequences are short, or the
    engine has it.
    """
    engine = ENGINES[job.plan.engine]
    share = min(engine.shares(group.name)[1] for group in job.cluster.of_groups)
    is_flash = job.workload.attention == "flash"
    if not engine.attention_kernel or not is_flash or share >= 1:
        return ""
    if job.workload.sequence_length < LONG_TOKENS:
        return ""
    return (
        f"Engine {engine.name} was fitted to runs whose attention is {engine.attention_kernel}, at "
        f"{share:.0%} of the GPU's measured rate: where FlashAttention runs (TRL, axolotl, "
        f"LLaMA-Factory), --engine trainer --precision {job.workload.precision} predicts long "
        "sequences."
    )


def fullest_words(job: Job, prediction: Prediction) -> Iterator[str]:
    """A sentence that names the stage whose GPU has the least free memory, and any node without
    enough host memory.
    """
    lacks = lacking_bytes(job.cluster, job.plan, prediction)
    number = lacks.index(max(lacks))
    fullest = prediction.stages[number]
    size = fullest.peak_reserved_bytes / GIB_BYTES
    room = (fullest.peak_reserved_bytes - lacks[number]) / GIB_BYTES
    rest = abs(lacks[number]) / GIB_BYTES
    lacking = sum(one > 0 for one in lacks)
    what = f"takes {size:.2f} of {room:.2f} GiB"
    if not lacking:
        begin = f"stage {number} binds memory: it {what}, {rest:.2f} are left"
    else:
        others = "" if lacking == 1 else f", and {lacking} stages in all lack memory"
        begin = f"stage {number} lacks {rest:.2f} GiB: it {what}{others}"
    yield f"{begin}; {_peak_words(fullest)}"
    yield probable_words(peak_bounds_of(job, prediction), job.cluster)
    over = host_bytes_over(job.plan, prediction, job.cluster)
    if over > 0:
        yield f"the fullest node lacks {over / GIB_BYTES:.2f} GiB of host memory"


def _peak_words(stage: StagePrediction) -> str:
    """When a stage's memory is fullest, and which kind of tensor takes the most bytes then, as
    text.
    """
    phase, _ = largest(stage.memory_by_phase)
    held, size = largest(stage.memory)
    return f"most in the {phase} phase, by {held} ({size / GIB_BYTES:.2f} GiB)"


def lacking_bytes(cluster: Cluster, plan: Plan, prediction: Prediction) -> list[float]:
    """For each stage, the bytes by which it exceeds its GPUs' memory; negative if memory is
    left.
    """
    rooms = room_of_plan(cluster, plan).tolist()
    pairs = zip(prediction.stages, rooms, strict=True)
    return [stage.peak_reserved_bytes - room for stage, room in pairs]


def largest(sizes: MemoryByClass | MemoryByPhase) -> tuple[str, int]:
    """The kind of tensor or the phase that has the most bytes of memory, and its bytes."""
    named = {entry.name: getattr(sizes, entry.name) for entry in fields(sizes)}
    name = max(named, key=lambda field: named[field])
    return name, named[name]
