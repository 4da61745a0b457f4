"""The workload and the cluster that the options of a command describe."""

import argparse
from pathlib import Path

from experiments.cli.commandline import as_options
from mistlab.machine.cluster import Cluster
from mistlab.values.references import hardware_from, model_from
from mistlab.values.workload import Workload


def problem_of(options: argparse.Namespace) -> tuple[Workload, Cluster]:
    """The workload and the cluster that the common options describe."""
    with as_options():
        workload = Workload(
            model=model_from(options.model, Path()),
            sequence_length=options.sequence_length,
            global_batch=options.global_batch,
            attention=options.attention,
            precision=options.precision,
        )
        cluster = Cluster(
            hardware=hardware_from(options.hardware, Path()),
            nodes=options.nodes,
            gpus_per_node=options.gpus_per_node,
        )
        cluster.peak_flop_per_s(workload.precision)
    return workload, cluster
