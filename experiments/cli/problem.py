"""The workload and the cluster that the options of a command describe."""

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.cli.commandline import OF_CLUSTER, PROBLEM, as_options
from mistlab.core.files import GIB_BYTES
from mistlab.core.values import InputError, refuse
from mistlab.cost.memory import allocator_of, room_bytes
from mistlab.job.job import Job, load_job
from mistlab.job.references import fields_of, groups_named, hardware_from, model_from
from mistlab.machine.cluster import Cluster
from mistlab.plan.workload import Workload

# What a command says that does not know groups of unlike nodes.
EQUAL_NODES = (
    "this command takes equal nodes alone: give one hardware, or ask tune, compare_searchers or "
    "predict"
)


def load_equal(path: Path) -> Job:
    """The job of a plan file, for a command that takes equal nodes alone."""
    job = load_job(path)
    check_equal(job, path)
    return job


def check_equal(job: Job, path: Path) -> None:
    """Refuse a plan on unlike nodes, for a command that takes equal nodes alone."""
    if job.cluster.others:
        message = f"{path}: cluster.hardware: {job.cluster.name}: {EQUAL_NODES}"
        raise InputError(message)


def numbers_of(options: argparse.Namespace) -> Mapping[str, float]:
    """The numbers of the cluster that options give."""
    given = {name: getattr(options, name, None) for name in OF_CLUSTER}
    return {name: number for name, number in given.items() if number is not None}


def on_cluster_with(job: Job, numbers: Mapping[str, float]) -> Job:
    """A job on a cluster with other numbers, where options give them."""
    if not numbers:
        return job
    changes: dict[str, Any] = {**numbers}
    with as_options():
        return replace(job, cluster=replace(job.cluster, **changes))


def room_words(cluster: Cluster) -> str:
    """How much of a GPU plans may take, and why it is not the whole: GiB, of groups in order."""
    room = " and ".join(f"{room_bytes(one) / GIB_BYTES:.1f}" for one in cluster.of_groups)
    parts = []
    for one in cluster.of_groups:
        whole, outside = one.whole_memory_bytes, allocator_of(one).outside_bytes
        parts.append(f"{whole / GIB_BYTES:.1f} less {outside / GIB_BYTES:.1f}")
    free = f" and {cluster.keep_free_gib:g} kept free" if cluster.keep_free_gib else ""
    return f"{room} GiB: a GPU's {' and '.join(parts)} outside of torch's allocator{free}"


def free_words(cluster: Cluster) -> list[str]:
    """What plans keep free, where they must."""
    if not cluster.keep_free_gib:
        return []
    return [f"{cluster.keep_free_gib:g} GiB of every GPU are kept free."]


def workload_of(options: argparse.Namespace, **instead: Any) -> Workload:
    """The workload that options describe, with other values of some fields where they are given."""
    fields = ("sequence_length", "global_batch", "attention", "precision")
    values = {name: getattr(options, name) for name in fields if name not in instead} | instead
    if "model" not in instead:
        values["model"] = model_from(options.model, Path())
    return Workload(**values)


def problem_of(
    options: argparse.Namespace, *, takes_groups: bool = False
) -> tuple[Workload, Cluster]:
    """The workload and the cluster that the common options describe. A cluster with several groups
    of nodes is refused unless the command ``takes_groups``."""
    numbers: dict[str, Any] = {**numbers_of(options)}
    with as_options():
        workload = workload_of(options)
        cluster = Cluster(
            **_nodes_of(options, takes_groups=takes_groups),
            gpus_per_node=options.gpus_per_node,
            **numbers,
        )
        for group in cluster.of_groups:
            group.peak_flop_per_s(workload.precision)
    return workload, cluster


def _nodes_of(options: argparse.Namespace, *, takes_groups: bool) -> dict[str, Any]:
    """The hardware and the nodes of the options, as fields of a ``Cluster``."""
    groups = groups_named(options.hardware, Path())
    if not groups:
        return {"hardware": hardware_from(options.hardware, Path()), "nodes": options.nodes}
    if len(groups) > 1 and not takes_groups:
        refuse("hardware", f"{options.hardware}: {EQUAL_NODES}")
    fields = fields_of(groups)
    # One node is what commands assume where nobody says how many.
    if options.nodes not in (PROBLEM["nodes"], fields["nodes"]):
        problem = (
            f"{options.nodes}, but --hardware {options.hardware} has {fields['nodes']} nodes: "
            "leave it out"
        )
        refuse("nodes", problem)
    return fields
