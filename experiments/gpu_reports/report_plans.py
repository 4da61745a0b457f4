"""The plans of a report on one GPU as rows, in the order in which they run; and how a row becomes a
job.

A row lists a model, the tokens of a sequence, the memory of the card that is imitated (GB), the
sequences of a micro-batch, the number of micro-batches, the number of recomputed blocks, and the
ratios of weights, gradients, optimizer states and activations in host memory. Rows that differ only
in ratios must have equal losses. A pipeline has a row for each stage, and each stage runs by
itself.

What is most likely to fail runs first: activations that are offloaded and fetched again while the
GPU computes. Short strict runs compare losses bit by bit with those of plans that offload nothing,
and of plans whose tasks run one after another. Then the plans that offload activations are timed,
the machine is profiled, and the other plans follow.
"""

from dataclasses import dataclass
from typing import Protocol

from mistlab import catalog
from mistlab.job.job import Job
from mistlab.machine.cluster import Cluster
from mistlab.machine.hardware import Hardware
from mistlab.plan.plan import Offload, Plan, StagePlan
from mistlab.plan.workload import Workload

Ratios = tuple[float, float, float, float]
Row = tuple[str, int, int, int, int, int, Ratios]

# For GPUs sold with a memory of this many GB, the GiB that torch can use.
CAPS_GIB = {24: 22.0, 40: 39.4, 80: 79.1}

NONE: Ratios = (0, 0, 0, 0)
STATES: Ratios = (0, 0, 1, 0)
ACTIVATIONS: Ratios = (0, 0, 0, 0.5)
HALVES: Ratios = (0.5, 0.5, 0.5, 0.5)

# Plans that run for a few steps in strict mode, so that their losses can be compared; they differ
# in offloading, and run both with and without overlap.
CHECKED: tuple[Row, ...] = (
    ("gpt3-1.3b", 2048, 80, 2, 4, 12, NONE),
    ("gpt3-1.3b", 2048, 80, 2, 4, 12, ACTIVATIONS),
    ("gpt3-1.3b", 2048, 80, 2, 4, 12, HALVES),
)
CHECKED_SERIALISED: tuple[Row, ...] = CHECKED[1:]
# First stages of pipelines, which have the most micro-batches in flight. Their gradients are
# compared, since only a last stage has losses.
CHECKED_PIPELINES: tuple[tuple[int, Row], ...] = (
    (4, ("llama-2.7b", 2048, 80, 1, 8, 4, NONE)),
    (4, ("llama-2.7b", 2048, 80, 1, 8, 4, ACTIVATIONS)),
)

# The plans to whose runs three constants are fitted: the share of the GPU's rates that whole runs
# sustain, and two constants of the memory allocator.
FITTED: tuple[Row, ...] = (
    ("gpt3-1.3b", 2048, 80, 2, 4, 0, NONE),
    ("gpt3-1.3b", 2048, 40, 4, 2, 24, STATES),
    ("gpt3-2.7b", 2048, 80, 1, 4, 16, NONE),
    ("gpt3-2.7b", 2048, 80, 2, 2, 32, STATES),
)
UNSEEN: tuple[Row, ...] = (
    ("gpt3-1.3b", 2048, 24, 1, 4, 24, STATES),
    ("gpt3-1.3b", 2048, 24, 1, 4, 12, STATES),
    ("gpt3-1.3b", 2048, 24, 2, 4, 24, STATES),
    ("gpt3-1.3b", 2048, 24, 2, 4, 24, (0, 0, 0.75, 0)),
    ("gpt3-1.3b", 2048, 24, 1, 4, 18, (0, 0.5, 1, 0)),
    ("gpt3-1.3b", 2048, 24, 1, 4, 24, (0.5, 0, 1, 0)),
    ("gpt3-1.3b", 2048, 40, 1, 4, 0, NONE),
    ("gpt3-1.3b", 2048, 40, 1, 4, 0, (0, 0, 0.5, 0)),
    ("gpt3-1.3b", 2048, 40, 2, 4, 24, NONE),
    ("gpt3-1.3b", 2048, 40, 2, 4, 24, (0, 0, 0.37, 0)),
    ("gpt3-1.3b", 2048, 40, 2, 2, 12, STATES),
    ("gpt3-1.3b", 2048, 80, 4, 2, 0, NONE),
    ("gpt3-1.3b", 2048, 80, 4, 2, 12, NONE),
    ("gpt3-1.3b", 4096, 80, 2, 2, 12, NONE),
    ("gpt3-1.3b", 4096, 80, 2, 2, 12, (0, 0, 0, 0.25)),
    ("gpt3-2.7b", 2048, 24, 1, 4, 32, STATES),
    ("gpt3-2.7b", 2048, 24, 1, 4, 32, (0, 0.5, 1, 0)),
    ("gpt3-2.7b", 2048, 24, 1, 4, 32, (0.5, 0.5, 1, 0)),
    ("gpt3-2.7b", 2048, 40, 1, 4, 16, STATES),
    ("gpt3-2.7b", 2048, 40, 1, 4, 16, (0, 0, 0.75, 0)),
    ("gpt3-2.7b", 2048, 40, 2, 4, 32, STATES),
    ("gpt3-2.7b", 2048, 40, 2, 4, 32, (0.5, 0.5, 1, 0)),
    ("gpt3-2.7b", 2048, 80, 2, 4, 16, NONE),
    ("gpt3-2.7b", 2048, 80, 2, 4, 16, STATES),
    ("gpt3-2.7b", 2048, 80, 2, 4, 16, (0, 0, 0.5, 0.25)),
    ("gpt3-2.7b", 4096, 80, 1, 4, 16, NONE),
    ("gpt3-2.7b", 4096, 80, 1, 4, 32, NONE),
    ("llama-2.7b", 2048, 40, 1, 4, 32, STATES),
    ("llama-2.7b", 2048, 40, 1, 4, 16, STATES),
    ("llama-2.7b", 2048, 80, 2, 4, 16, NONE),
    ("llama-2.7b", 2048, 80, 2, 4, 32, NONE),
    ("gpt3-7b", 2048, 40, 1, 2, 32, (0, 0.5, 1, 0)),
    ("gpt3-7b", 2048, 80, 1, 4, 32, (0, 0, 0.75, 0)),
    ("gpt3-7b", 2048, 80, 2, 4, 32, (0, 0, 0.75, 0)),
    ("gpt3-7b", 2048, 80, 2, 4, 24, STATES),
    ("llama-7b", 2048, 80, 1, 4, 32, STATES),
)
# The plans that also run without overlap, so that its gain can be measured.
SERIALISED: tuple[Row, ...] = (
    ("gpt3-1.3b", 2048, 24, 1, 4, 24, (0.5, 0, 1, 0)),
    ("gpt3-2.7b", 2048, 80, 2, 4, 16, STATES),
    ("gpt3-2.7b", 2048, 80, 2, 4, 16, (0, 0, 0.5, 0.25)),
)
# Pipelines of equal stages: the number of stages, the numbers of the stages that run (each alone),
# and the plan of one stage.
PIPELINES: tuple[tuple[int, tuple[int, ...], Row], ...] = (
    (4, (0, 2, 3), ("gpt3-7b", 2048, 24, 1, 8, 4, STATES)),
    (4, (0, 2, 3), ("gpt3-7b", 2048, 40, 2, 8, 4, (0, 0, 0.5, 0.25))),
    (4, (0, 2, 3), ("gpt3-7b", 2048, 80, 2, 8, 0, NONE)),
    (4, (0, 3), ("gpt3-22b", 2048, 80, 1, 8, 6, STATES)),
)

# The ending of the name of a plan that runs without overlap.
SERIALISED_NAME = "serialised"
# An explanation of the names of plans on one GPU.
NAMES = (
    "names of plans on one GPU: model, s tokens of a sequence, GB of the card that is imitated, b "
    "sequences of a micro-batch x micro-batches, c recomputed blocks, o ratios in host memory "
    "(weights-gradients-optimizer states-activations), stage A of B alone"
)


class PlanOfReport(Protocol):
    """A plan in a report, on ``gpus`` GPUs of a node; or one ``stage`` of the plan, which runs
    alone.
    """

    @property
    def name(self) -> str:
        """The name of the plan's file, and the key of its row."""

    @property
    def model(self) -> str:
        """The model's name."""

    @property
    def gpus(self) -> int:
        """The number of GPUs that the plan uses."""

    @property
    def stage(self) -> int | None:
        """The number of the stage that runs alone; None if all stages run."""

    @property
    def is_fitted(self) -> bool:
        """Whether constants are fitted to the measurements of this plan."""

    @property
    def is_serialised(self) -> bool:
        """Whether the plan's tasks run one after another, without overlap."""

    @property
    def is_check(self) -> bool:
        """Whether the plan runs in strict mode, so that its losses can be compared."""

    @property
    def is_compared(self) -> bool:
        """Whether the report compares the plan's measured time and memory with a prediction."""

    @property
    def comes_first(self) -> bool:
        """Whether the plan runs before the machine is profiled."""

    @property
    def twins(self) -> tuple[object, ...]:
        """A key that is equal for plans whose losses must be equal: in every bit if they run in
        strict mode.
        """

    @property
    def trains(self) -> tuple[object, ...]:
        """A key that is equal for plans that train the same model on the same batches, so that
        their losses agree up to rounding.
        """

    def job(self, hardware: Hardware) -> Job:
        """The plan as a job on the given hardware."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportPlan:
    """A plan on one GPU and the purpose of its run: a fit, or a comparison with its prediction or
    with a run without overlap. It may be a single ``stage`` of ``num_stages`` equal stages. With
    ``is_check`` the run is not timed; its losses (gradients, if a stage has no losses) must equal
    those of plans with the same ``twins`` in every bit.
    """

    row: Row
    is_fitted: bool = False
    is_serialised: bool = False
    is_check: bool = False
    num_stages: int = 1
    stage: int | None = None

    @property
    def name(self) -> str:
        """The name of the plan's file, and the key of its row."""
        model, sequence, cap, batch, batches, again, ratios = self.row
        offload = "-".join(f"{ratio:g}" for ratio in ratios)
        parts = [f"{model}-s{sequence}-{cap}gb-b{batch}x{batches}-c{again}-o{offload}"]
        parts += [] if self.stage is None else [f"stage{self.stage}of{self.num_stages}"]
        parts += ["check"] if self.is_check else []
        parts += [SERIALISED_NAME] if self.is_serialised else []
        return "-".join(parts)

    @property
    def model(self) -> str:
        """The model's name."""
        return self.row[0]

    @property
    def gpus(self) -> int:
        """The number of GPUs: always one, also for a single stage of a pipeline."""
        return 1

    @property
    def trains(self) -> tuple[object, ...]:
        """A key that is equal for plans whose losses must be equal; on one GPU these are plans that
        differ only in offloading, memory limit and overlap.
        """
        return self.twins

    @property
    def is_compared(self) -> bool:
        """Whether the report compares the plan's measured time and memory with a prediction."""
        return not (self.is_fitted or self.is_serialised or self.is_check)

    @property
    def comes_first(self) -> bool:
        """Whether the plan runs before the machine is profiled."""
        return self.is_check or self.row[-1][-1] > 0

    @property
    def twins(self) -> tuple[object, ...]:
        """A key that is equal for plans that differ only in offloading, memory limit and
        overlap.
        """
        model, sequence, _, *others, _ = self.row
        return (model, sequence, *others, self.num_stages, self.stage, self.is_check)

    def job(self, hardware: Hardware) -> Job:
        """The plan as a job on a cluster with a GPU for each stage, whose memory is limited."""
        model, sequence, cap, batch, batches, again, ratios = self.row
        spec = catalog.model(model)
        weights, gradients, optimizer, activations = ratios
        stage = StagePlan(
            layers=spec.layers // self.num_stages,
            data_parallel=1,
            tensor_parallel=1,
            micro_batch=batch,
            checkpointed_layers=again,
            offload=Offload(
                weights=weights,
                gradients=gradients,
                optimizer=optimizer,
                activations=activations,
            ),
        )
        return Job(
            workload=Workload(
                model=spec,
                sequence_length=sequence,
                global_batch=batch * batches,
                attention="flash",
                precision="bf16",
                # Gradients are in 16 bits, as in the published runs that these plans imitate.
                gradients="16bit",
            ),
            cluster=Cluster(
                hardware=hardware,
                nodes=self.num_stages,
                gpus_per_node=1,
                memory_gib=CAPS_GIB[cap],
            ),
            plan=Plan(micro_batches=batches, stages=(stage,) * self.num_stages),
        )


_CHECKS = (
    *(ReportPlan(row=row, is_check=True) for row in CHECKED),
    *(ReportPlan(row=row, is_check=True, is_serialised=True) for row in CHECKED_SERIALISED),
    *(
        ReportPlan(row=row, is_check=True, num_stages=stages, stage=0)
        for stages, row in CHECKED_PIPELINES
    ),
)
_TIMED = (
    *(ReportPlan(row=row, is_fitted=True) for row in FITTED),
    *(ReportPlan(row=row) for row in UNSEEN),
    *(ReportPlan(row=row, is_serialised=True) for row in SERIALISED),
    *(
        ReportPlan(row=row, num_stages=stages, stage=stage)
        for stages, alone, row in PIPELINES
        for stage in alone
    ),
)
PLANS = (*_CHECKS, *sorted(_TIMED, key=lambda plan: not plan.comes_first))
