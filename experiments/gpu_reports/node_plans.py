"""The plans of a report on a node with several GPUs, which are read from a file with a row for each
plan.

All checks train one workload, so their losses must agree whatever the parallel layout. Plans on one
GPU are included, because the share of the GPU's rates that whole steps sustain is fitted to them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.gpu_reports.report_plans import NAMES, PLANS, PlanOfReport
from mistlab.core.files import read_yaml
from mistlab.core.values import reject
from mistlab.job.job import Job, model_from
from mistlab.machine.cluster import Cluster
from mistlab.machine.hardware import Hardware
from mistlab.plan.dimensions import DIMENSIONS, dimensions_of_axes
from mistlab.plan.plan import Plan, StagePlan
from mistlab.plan.workload import Workload

NODE_PLANS = Path(__file__).with_suffix(".yaml")
# The settings of the workload for rows that do not state their own.
USUAL: Mapping[str, Any] = {"precision": "bf16", "attention": "flash"}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NodePlan:
    """A row of the file of plans, and its workload on ``gpus`` GPUs of a node. With ``is_check``
    the losses of its run are compared with those of other plans; otherwise the run is timed.
    """

    workload: Mapping[str, Any]
    row: Mapping[str, Any]
    gpus: int
    is_check: bool
    is_fitted: bool = False
    is_serialised: bool = False
    stage: int | None = None

    @property
    def name(self) -> str:
        """The name of the plan's file, and the key of its row: the dimensions of the plan as short
        symbols.
        """
        work, stages = self.workload, self.row.get("stages", 1)
        parts = [self.model, f"s{work['sequence_length']}", f"x{work['global_batch']}"]
        parts += [f"pp{stages}"] if stages > 1 else []
        parts += [f"{DIMENSIONS[name].symbol}{value:g}" for name, value in self._values.items()]
        parts += [self.row["order"]] if "order" in self.row else []
        return "-".join([*parts, *(["check"] if self.is_check else [])])

    @property
    def model(self) -> str:
        """The name of the model, or of its family."""
        model = self.workload["model"]
        return model if isinstance(model, str) else str(model["family"])

    @property
    def is_compared(self) -> bool:
        """Whether the report compares the plan's measured time and memory with a prediction."""
        return not self.is_check

    @property
    def comes_first(self) -> bool:
        """Whether the plan runs before the machine is profiled."""
        return self.is_check

    @property
    def twins(self) -> tuple[object, ...]:
        """A key that is equal for plans with the same work on the same ranks, which differ only in
        offloading or overlap.
        """
        stays = {name: of for name, of in self.row.items() if not DIMENSIONS.get(name, _AS_IS).path}
        return ("node", self.gpus, self.is_check, str(sorted(stays.items())))

    @property
    def trains(self) -> tuple[object, ...]:
        """A key that is equal for plans that train the same model on the same batches, so that
        their losses agree up to rounding.
        """
        return ("node", self.is_check, str(sorted(self.workload.items(), key=str)))

    def job(self, hardware: Hardware) -> Job:
        """The plan as a job on a node of the given hardware."""
        model = model_from(self.workload["model"], Path())
        stages = self.row.get("stages", 1)
        of_stage = dict.fromkeys(dimensions_of_axes(), 1) | self._values
        stage = StagePlan.of_values({**of_stage, "layers": model.layers // stages})
        order = {"order": self.row["order"]} if "order" in self.row else {}
        return Job(
            workload=Workload(**{**USUAL, **self.workload, "model": model}),
            cluster=Cluster(hardware=hardware, nodes=1, gpus_per_node=self.gpus),
            plan=Plan(micro_batches=self.row["micro_batches"], stages=(stage,) * stages, **order),
        )

    @property
    def _values(self) -> dict[str, float]:
        return {name: value for name, value in self.row.items() if name in DIMENSIONS}


_AS_IS = DIMENSIONS["layers"]


def plans_of(gpus: int, path: Path = NODE_PLANS) -> Sequence[PlanOfReport]:
    """The plans of a report on this many GPUs of a node, in the order in which they run."""
    if gpus == 1:
        return PLANS
    listed = read_yaml(path)
    rows = listed["gpus"].get(gpus)
    if rows is None:
        known = [1, *listed["gpus"]]
        reject(
            f"--gpus-per-node: the report has no plans for {gpus} GPUs of a node: give "
            f"{', '.join(map(str, known[:-1]))} or {known[-1]}"
        )
    made = [
        NodePlan(
            workload=listed["workloads"][row.get("of", "checked")],
            row=row,
            gpus=gpus,
            is_check=is_check,
        )
        for is_check in (True, False)
        for row in rows["checks" if is_check else "timed"]
    ]
    checks, timed = ([one for one in made if one.is_check is of] for of in (True, False))
    return [*checks, *(plan for plan in PLANS if plan.is_fitted), *timed]


def names_of(plans: Sequence[PlanOfReport]) -> list[str]:
    """An explanation of the plans' names, as lines of text: each symbol and what it stands for."""
    rows = [plan.row for plan in plans if isinstance(plan, NodePlan)]
    used = {name for row in rows for name in row}
    symbols = [
        f"{dimension.symbol} {name}" for name, dimension in DIMENSIONS.items() if name in used
    ]
    fixed = ("model", "s tokens of a sequence", "x sequences of a batch", "pp stages")
    names = f"names of plans on a node: {', '.join((*fixed, *symbols))}, order of passes"
    return [*([names] if rows else []), *([NAMES] if len(rows) < len(plans) else [])]
