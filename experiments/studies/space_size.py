"""How many plans search spaces have, counted without listing the plans."""

import argparse
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf, log10, prod

import numpy as np
from numpy.typing import NDArray

from experiments.bench.problem import problem_of
from experiments.cli.commandline import DONE
from experiments.pages.charts import Lines
from experiments.pages.study import Report, Study
from experiments.pages.tables import Row, table
from mistlab.job.search import Problem
from mistlab.plan.named_spaces import space_of
from mistlab.plan.space import SearchSpace
from searchers.meshes import lies_well, meshes, micro_batch_counts
from searchers.methods.exhaustive import count_plans
from searchers.savings import counts_choices, savings_choices

# Counts the plans of a search space without listing them.
#
# If stages may have different meshes, a pipeline is a walk over ranks and blocks: each stage takes
# some of both. Walks that arrive at the same rank with equally many blocks have the same
# continuations, so they are counted together.


# An array of integers of any size, with an element for each number of blocks.
Counts = NDArray[np.object_]


def number_of_plans(problem: Problem, space: SearchSpace) -> int:
    """The number of plans in a search space."""
    return sum(_of_one_engine(problem, own) for own in space.of_engines)


def _of_one_engine(problem: Problem, space: SearchSpace) -> int:
    if not space.unequal_meshes:
        return count_plans(problem, space)
    assert space.layers_off_balance is None, "an even share depends on the number of stages"
    assert space.pipeline in (None, (1,)), "walks do not know how many stages they have"
    alone = count_plans(problem, replace(space, pipeline=(1,), unequal_meshes=False))
    if space.pipeline == (1,):
        return alone
    counts = micro_batch_counts(problem, space)
    return alone + sum(_of_several_stages(problem, space, count) for count in counts)


def _of_several_stages(problem: Problem, space: SearchSpace, micro_batches: int) -> int:
    """The number of plans that have at least two stages."""
    gpus, layers = problem.cluster.num_gpus, problem.workload.model.layers
    by_size = _ways_by_size(problem, space, micro_batches)
    # For each rank r, the number of ways to divide ranks 0 to r - 1 into stages, by the number of
    # blocks that these stages have.
    arrived: dict[int, Counts] = {0: _no_counts(layers)}
    arrived[0][0] = 1
    for rank in range(gpus):
        for size, ways in by_size.items():
            is_alone = size == gpus
            fits = rank + size <= gpus and lies_well(rank, size, problem.cluster)
            if is_alone or not fits or rank not in arrived:
                continue
            there = arrived.setdefault(rank + size, _no_counts(layers))
            there += np.convolve(arrived[rank], ways)[: layers + 1]
    return int(arrived[gpus][layers]) if gpus in arrived else 0


def _ways_by_size(problem: Problem, space: SearchSpace, micro_batches: int) -> dict[int, Counts]:
    """For each number of GPUs of a stage: how many different stages there are, by the number of
    their blocks.
    """
    layers = problem.workload.model.layers
    of_blocks = _no_counts(layers)
    of_blocks[1:] = [len({*counts_choices(space, own)}) for own in range(1, layers + 1)]
    by_size: dict[int, Counts] = defaultdict(lambda: _no_counts(layers))
    for mesh in meshes(problem, space, micro_batches):
        choices = savings_choices(space, mesh, in_pipeline=True)
        by_size[mesh.num_gpus] += of_blocks * prod(len(some) for some in choices)
    return by_size


def _no_counts(layers: int) -> Counts:
    return np.zeros(layers + 1, dtype=object)


# How many plans search spaces have as their features are added one after another, for several
# numbers of blocks.


DEPTHS = (16, 32, 48, 64, 80)
QUICK_DEPTHS = (16, 32, 48)
# The features of a search space, in the order and with the names of Mist's paper.
FEATURES = ("DP+TP", "+PP", "+ZeRO", "+CKPT", "+OO", "+GO", "+PO", "+AO")
OFFLOADED = {"+OO": "optimizer", "+GO": "gradients", "+PO": "weights", "+AO": "activations"}
NAMED = ("3d", "+zero", "+checkpointing", "+offload", "mist", "wide")
ATOMS_POWER = 80


def sizes(options: argparse.Namespace) -> int:
    """Count the plans of search spaces to which one dimension after another is added, for several
    numbers of blocks.

    The first space has only data and tensor parallelism. Then come pipelines whose stages have any
    numbers of blocks and GPUs, then ZeRO levels, recomputed blocks and the four offload ratios,
    chosen for each stage.
    """
    workload, cluster = problem_of(options)
    study = Study.begin("space_size", options)
    depths = QUICK_DEPTHS if options.quick else DEPTHS
    asked = [(depth, name) for depth in depths for name in FEATURES]
    spaces = dict(features())
    for depth, name in study.counted(asked, "spaces"):
        model = replace(workload.model, name="", layers=depth)
        problem = Problem(workload=replace(workload, model=model), cluster=cluster)
        study.add(_row("features", name, depth, number_of_plans(problem, spaces[name])))
    problem = Problem(workload=workload, cluster=cluster)
    for name in study.counted(NAMED[: -1 if options.quick else None], "named spaces"):
        plans = number_of_plans(problem, space_of(name))
        study.add(_row("named", name, workload.model.layers, plans))
    where = f"{options.model} on {cluster.nodes} x {cluster.gpus_per_node} GPUs, batch "
    return study.end(_report(study.rows, f"{where}{workload.global_batch}"), DONE)


def features() -> Iterator[tuple[str, SearchSpace]]:
    """The search spaces, each with one feature more than the one before."""
    wide = space_of("wide")
    space = replace(
        space_of("3d"),
        name="DP+TP",
        pipeline=(1,),
        micro_batch=None,
        zero=(0,),
        recomputation="all",
        unequal_stages=True,
        layers_off_balance=None,
        unequal_meshes=True,
    )
    yield space.name, space
    space = replace(space, name="+PP", pipeline=None)
    yield space.name, space
    space = replace(space, name="+ZeRO", zero=(0, 1, 2, 3))
    yield space.name, space
    space = replace(space, name="+CKPT", recomputation="any")
    yield space.name, space
    for name, kind in OFFLOADED.items():
        ratios = getattr(wide.offload, kind)
        space = replace(space, name=name, offload=replace(space.offload, **{kind: ratios}))
        yield space.name, space


def _row(chapter: str, space: str, layers: int, plans: int) -> Row:
    power = log10(plans) if plans else None
    return {"chapter": chapter, "space": space, "layers": layers, "power_of_ten": power}


def _report(rows: Sequence[Row], where: str) -> Report:
    counted = [row for row in rows if row["chapter"] == "features"]
    depths = list(dict.fromkeys(row["layers"] for row in counted))
    power = {(row["space"], row["layers"]): row["power_of_ten"] for row in counted}
    grows = _grows(power, depths)
    last = power[FEATURES[-1], depths[-1]]
    sentence = (
        f"Every feature and every block adds plans: {'yes' if grows else 'NO'}. With all features "
        f"and {depths[-1]} blocks there are {_size_text(last, 0)}; about 1e{ATOMS_POWER} atoms are "
        "in the observable universe."
    )
    by_depth = table(
        ("features", *(f"{depth} blocks" for depth in depths)),
        [(name, *(_size_text(power[name, depth]) for depth in depths)) for name in FEATURES],
    )
    named = [row for row in rows if row["chapter"] == "named"]
    by_name = table(
        ("space", "plans"), [(row["space"], _size_text(row["power_of_ten"])) for row in named]
    )
    return Report(
        title="How many plans there are",
        words=[
            f"{where}; degrees are powers of two.",
            by_depth,
            sentence,
            "The spaces of this project by name, with the model's own number of blocks:",
            by_name,
        ],
        summary={"monotone": grows, "last_power_of_ten": last},
        pictures=[
            Lines(
                name="space_size",
                caption="Plans of each space against the number of blocks, as powers of ten.",
                curves={
                    name: [
                        (depth, at) for depth in depths if (at := power[name, depth]) is not None
                    ]
                    for name in FEATURES
                },
                x="blocks",
                y="plans (power of ten)",
            )
        ],
    )


def _size_text(power: float | None, digits: int = 1) -> str:
    """The number of plans in a search space as text; a dash if the blocks and GPUs cannot be
    divided into any plan.
    """
    return "none" if power is None else f"1e{power:.{digits}f}"


def _grows(power: Mapping[tuple[str, int], float | None], depths: Sequence[int]) -> bool:
    """Whether further features and blocks never make the number of plans smaller; a space without
    any plans counts as the smallest.
    """
    known = {key: -inf if value is None else value for key, value in power.items()}
    features_grow = all(
        known[first, depth] <= known[other, depth]
        for first, other in pairwise(FEATURES)
        for depth in depths
    )
    return features_grow and all(
        known[name, less] <= known[name, more]
        for name in FEATURES
        for less, more in pairwise(depths)
    )
