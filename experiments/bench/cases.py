"""The models and clusters of Mist's published evaluation as a list of cases, with the speedups
published for each.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from mistlab import catalog
from mistlab.core.files import parse_yaml
from mistlab.core.values import one_of, reject
from mistlab.engines.engine import Precision
from mistlab.job.search import Problem
from mistlab.machine.cluster import Cluster
from mistlab.plan.workload import Attention, Workload

FAMILIES = ("gpt3", "llama", "falcon")
ATTENTIONS: tuple[Attention, ...] = ("flash", "math")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A case of Mist's published evaluation: a model on a cluster with a batch size."""

    hardware: str
    model: str
    attention: Attention
    nodes: int
    gpus_per_node: int
    sequence_length: int
    global_batch: int

    @property
    def name(self) -> str:
        """A short description of the case: GPU, model, and whether attention is unfused."""
        written = "" if self.attention == "flash" else ", written out"
        return f"{self.hardware.partition('-')[0].upper()} {self.model}{written}"

    @property
    def num_gpus(self) -> int:
        """The number of GPUs in the case's cluster."""
        return self.nodes * self.gpus_per_node

    def problem(self, precision: Precision = "fp16") -> Problem:
        """The case as a problem (workload and cluster) for a search."""
        return Problem(
            workload=Workload(
                model=catalog.model(self.model),
                sequence_length=self.sequence_length,
                global_batch=self.global_batch,
                attention=self.attention,
                precision=precision,
            ),
            cluster=Cluster(
                hardware=catalog.hardware(self.hardware),
                nodes=self.nodes,
                gpus_per_node=self.gpus_per_node,
            ),
        )


@cache
def evaluation() -> Mapping[str, Any]:
    """The cases of Mist's published evaluation, and the figures published for them."""
    name = "evaluation.yaml"
    text = files("experiments.bench").joinpath(name).read_text(encoding="utf-8")
    content = parse_yaml(text, name)
    assert isinstance(content, Mapping)
    return content


def clusters(hardware: str | None = None) -> list[Mapping[str, Any]]:
    """The clusters of the evaluation, or only the one with the given hardware; hardware that the
    evaluation did not use is refused.
    """
    every = evaluation()["clusters"]
    names = [cluster["hardware"] for cluster in every]
    if hardware is not None and hardware not in names:
        reject(
            f"--hardware {hardware}: Mist's published evaluation did not use this hardware"
            f": give {one_of(names)}"
        )
    return [cluster for cluster in every if hardware in (None, cluster["hardware"])]


def case_of(cluster: Mapping[str, Any], family: str, size: str, attention: Attention) -> Case:
    """The case for a model of a family and a size on a cluster of the evaluation."""
    (cell,) = (place for place in evaluation()["grid"] if place["size"] == size)
    return Case(
        hardware=cluster["hardware"],
        model=f"{family}-{size}",
        attention=attention,
        nodes=cell["nodes"],
        gpus_per_node=cell["gpus_per_node"],
        sequence_length=cluster["sequence_length"],
        global_batch=cell["global_batch"],
    )


def sizes() -> Sequence[str]:
    """The model sizes of the evaluation, smallest first."""
    return [place["size"] for place in evaluation()["grid"]]


def measured(case: Case) -> Mapping[str, float]:
    """The published measured speedups of a case by baseline; empty for most cases."""
    for row in evaluation()["measured"]:
        if (row["hardware"], row["model"], row["attention"]) == (
            case.hardware,
            case.model,
            case.attention,
        ):
            return {name: row[f"over_{name}"] for name in ("megatron", "deepspeed")}
    return {}
