"""Describes the target of an export: the choices of a plan that a framework can express, and how
its file is written and read.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mistlab.engines.engine import Optimizer, Precision
from mistlab.export.given import Given, Imported
from mistlab.job.job import Job
from mistlab.plan.workload import ModelSpec

# Low precisions of GEMMs; all other computation stays in 16 or 32 bits.
NARROW: tuple[Precision, ...] = ("fp8", "fp4")
# A note to users on plans that offload the optimizer.
OFFLOADED_STEP = (
    "the framework steps offloaded optimizer states on the host; the prediction moves them to the "
    "GPU for the step"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Some choices of a plan, with the rule that changes them to what a target framework can
    express.

    ``choices`` are names of dimensions, of fields of a plan, or of fields of a workload.
    ``nearest`` returns the nearest job whose ``choices`` the target can express. ``because`` says
    in words why a job may have to change.
    """

    choices: tuple[str, ...]
    nearest: Callable[[Job], Job]
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A framework to which plans can be exported and from which they can be imported.

    ``rows`` are the rules that make a job expressible, in the order in which they are applied; a
    dimension without a row cannot be expressed. ``write`` makes the text of a job after these
    rules. ``read`` makes a job of a text. ``notes`` yields what a user must know about the text.
    ``package`` is the framework's distribution, with its version.

    ``engines`` are the engines that can predict plans as the framework runs them, the best first.
    ``engines_of_today`` come before them for models and precisions that only recent engines
    support. ``own_engines`` maps engines whose plans the framework runs unchanged to the engine
    that predicts them then.

    With ``always_overlaps`` the framework cannot leave communication to the end of an iteration.
    ``precisions`` and ``optimizers`` are those that the text can express. Only with
    ``drops_tokens`` it can express a capacity of experts, and only with ``says_sums`` the precision
    in which gradients are summed. ``beside`` names the fields of ``Given`` that the text cannot
    hold.
    """

    name: str
    title: str
    package: str
    engines: tuple[str, ...]
    rows: tuple[Row, ...]
    write: Callable[[Job], str]
    read: Callable[[str, Given], Imported]
    notes: Callable[[Job], Iterator[str]]
    always_overlaps: bool = False
    own_engines: Mapping[str, str] = field(default_factory=dict)
    engines_of_today: tuple[str, ...] = ()
    precisions: tuple[Precision, ...] = ("fp16", "bf16", "fp32")
    optimizers: tuple[Optimizer, ...] = ("adamw",)
    drops_tokens: bool = False
    says_sums: bool = False
    beside: tuple[str, ...] = ()

    def engines_for(self, job: Job) -> tuple[str, ...]:
        """Return the engines that can predict an exported job as the framework runs it, the best
        first.
        """
        own_engine = self.own_engines.get(job.plan.engine)
        engines = (own_engine, *self.engines) if own_engine is not None else self.engines
        if own_engine is None and is_of_today(job.workload.model, job.workload.precision):
            engines = (*self.engines_of_today, *self.engines)
        return engines

    @property
    def said(self) -> frozenset[str]:
        """The choices of a plan that the framework can express."""
        return frozenset(choice for row in self.rows for choice in row.choices)


def is_of_today(model: ModelSpec, precision: Precision | None) -> bool:
    """Whether only recent engines support a model, because it has a recent part (such as experts or
    latent attention) or GEMMs of 8 or 4 bits.
    """
    parts = (model.experts, model.latent, model.window, model.sinks, model.further_tokens)
    return any(parts) or precision in NARROW


# Imports an exported file again; the original job supplies the choices that the file does not hold.


def read_back(target: Target, text: str, job: Job) -> Job:
    """Import an exported file as a job; ``job``, which was exported, supplies the choices that the
    file cannot hold.
    """
    values: dict[str, Any] = {
        "model": job.workload.model,
        "nodes": job.cluster.nodes,
        "gpus_per_node": job.cluster.gpus_per_node,
        "sequence_length": job.workload.sequence_length,
        "global_batch": job.workload.global_batch,
        "micro_batch": job.plan.stages[0].micro_batch,
        "attention": job.workload.attention,
    }
    beside = {name: values[name] for name in target.beside}
    return target.read(text, Given(hardware=job.cluster.hardware, **beside)).job
