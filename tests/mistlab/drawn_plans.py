"""Random jobs: models, machines and plans of every space, with and without overlapping."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from mistlab import catalog
from mistlab.core.values import InputError
from mistlab.job.job import Job
from mistlab.job.search import Problem
from mistlab.machine.cluster import Cluster
from mistlab.plan.named_spaces import space_of
from mistlab.plan.workload import Workload
from searchers.savings import Chooser, chosen_plan

MODELS = ("gpt3-2.7b", "llama-7b", "llama3-8b", "falcon-7b")
SPACES = ("mist", "wide", "megatron", "deepspeed", "aceso", "+offload", "megatron-today")


def drawn_jobs(count: int, seed: int) -> Iterator[Job]:
    """So many valid jobs, the same for the same seed."""
    draw = np.random.default_rng(seed)
    chooser = Chooser(lambda _, options: int(draw.integers(options)))
    found = 0
    while found < count:
        job = _drawn(draw, chooser)
        if job is not None:
            found += 1
            yield job


def _drawn(draw: np.random.Generator, chooser: Chooser) -> Job | None:
    workload = Workload(
        model=catalog.model(MODELS[draw.integers(len(MODELS))]),
        sequence_length=2048,
        global_batch=int(draw.choice([8, 24, 64])),
        attention="flash" if draw.random() < 0.7 else "math",
        precision="fp16" if draw.random() < 0.5 else "bf16" if draw.random() < 0.7 else "fp32",
    )
    cluster = Cluster(
        hardware=catalog.hardware("a100-80gb"),
        nodes=int(draw.choice([1, 2, 3])),
        gpus_per_node=int(draw.choice([4, 8])),
    )
    space = space_of(SPACES[draw.integers(len(SPACES))])
    plan = chosen_plan(Problem(workload=workload, cluster=cluster), space, chooser)
    if plan is None:
        return None
    if plan.engine == "megatron" and draw.random() < 0.5:
        plan = replace(plan, overlap_communication=False)
    if plan.engine == "mistlab" and draw.random() < 0.2:
        plan = replace(plan, order="gpipe")
    try:
        return Job(workload=workload, cluster=cluster, plan=plan)
    except InputError:
        return None
