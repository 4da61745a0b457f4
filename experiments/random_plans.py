"""Random plans that are valid and fit: over models, clusters and everything a plan can choose.

They come by workload, so that plans of one workload can be ranked. Half are close to the memory
limit: of those the fewest blocks are computed again that still fit.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from mistlab import catalog
from mistlab.cluster import Cluster
from mistlab.job import Job
from mistlab.plan import Offload, Plan, StagePlan
from mistlab.predict import Prediction
from mistlab.workload import Workload
from simulators.symbolic import SymbolicPredictor

MODELS = ("gpt3-1.3b", "gpt3-2.7b", "gpt3-7b", "llama-1.3b", "llama-7b", "falcon-2.7b", "falcon-7b")
CLUSTERS = (("l4-24gb", 1, 4), ("l4-24gb", 1, 8), ("l4-24gb", 2, 8), ("a100-40gb", 1, 8))
WORKLOADS = 10
EIGHTHS = np.arange(9) / 8
MOST_TRIES = 20000
# What a plan's fullest GPU must hold of its memory to be close to the limit.
CLOSE = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomPlan:
    """A job that fits, and what the closed form says of it."""

    job: Job
    prediction: Prediction

    @property
    def is_close(self) -> bool:
        """Whether its fullest GPU is within a fifth of the limit."""
        allocator = self.job.cluster.hardware.allocator
        assert allocator is not None
        room = self.job.cluster.memory_bytes - allocator.outside_bytes
        return max(stage.peak_reserved_bytes for stage in self.prediction.stages) >= CLOSE * room

    @property
    def strata(self) -> frozenset[str]:
        """What the plan has, in the words of reports."""
        stages = self.job.plan.stages
        offloads = any(stage.offload != Offload() for stage in stages)
        has = {
            "several stages": len(stages) > 1,
            "uneven layers": len({stage.layers for stage in stages}) > 1,
            "offloading": offloads,
            "ZeRO-2 or 3": any(stage.zero >= 2 for stage in stages),
            "close to the memory limit": self.is_close,
        }
        return frozenset(name for name, true in has.items() if true)


def random_plans(count: int, seed: int) -> Iterator[RandomPlan]:
    """``count`` plans, equally many of each workload, the same for the same seed."""
    draw = np.random.default_rng(seed)
    for number in range(WORKLOADS):
        workload, cluster = _problem(draw)
        predictor = SymbolicPredictor(workload=workload, cluster=cluster)
        wanted = count * (number + 1) // WORKLOADS - count * number // WORKLOADS
        found = 0
        for _ in range(MOST_TRIES):
            if found == wanted:
                break
            # Every second plan is to be close to the limit.
            close = found % 2 == 0
            plan = _plan(draw, workload, cluster)
            made = plan and _fitting(predictor, plan, close=close)
            if not made:
                continue
            plan, prediction = made
            job = Job(workload=workload, cluster=cluster, plan=plan)
            random_plan = RandomPlan(job=job, prediction=prediction)
            if random_plan.is_close or not close:
                found += 1
                yield random_plan


def _problem(draw: np.random.Generator) -> tuple[Workload, Cluster]:
    name, nodes, gpus = CLUSTERS[draw.integers(len(CLUSTERS))]
    workload = Workload(
        model=catalog.model(str(draw.choice(MODELS))),
        sequence_length=int(draw.choice([1024, 2048, 4096])),
        global_batch=int(draw.choice([64, 128])),
        attention="flash" if draw.random() < 0.75 else "math",
        precision="fp16",
    )
    cluster = Cluster(hardware=catalog.hardware(name), nodes=nodes, gpus_per_node=gpus)
    return workload, cluster


def _plan(draw: np.random.Generator, workload: Workload, cluster: Cluster) -> Plan | None:
    """A plan that is well formed, or none if the draw does not divide."""
    gpus = cluster.num_gpus
    num_stages = int(draw.choice([1, 2, 2, 4, 4, 8]))
    tensor = int(draw.choice([1, 1, 1, 1, 2, 4]))
    data, left = divmod(gpus, num_stages * tensor)
    micro_batch = int(draw.choice([1, 1, 2, 4, 8]))
    if left or data == 0 or workload.global_batch % (data * micro_batch):
        return None
    layers = _layers(draw, workload.model.layers, num_stages)
    ratios = draw.random() < 0.6
    zero = int(draw.choice([0, 1, 1, 2, 2, 3, 3])) if data > 1 else 1
    stages = tuple(
        StagePlan(
            layers=own,
            data_parallel=data,
            tensor_parallel=tensor,
            micro_batch=micro_batch,
            zero=zero,
            checkpointed_layers=int(draw.integers(0, own + 1)),
            offload=_offload(draw) if ratios else Offload(),
        )
        for own in layers
    )
    micro_batches = workload.global_batch // (data * micro_batch)
    return Plan(micro_batches=micro_batches, stages=stages)


def _layers(draw: np.random.Generator, layers: int, num_stages: int) -> list[int]:
    """Layers of each stage: about equal, in more than half of the draws shifted a little."""
    per_stage, left = divmod(layers, num_stages)
    found = [per_stage + (stage < left) for stage in range(num_stages)]
    if draw.random() < 0.7:
        for _ in range(num_stages):
            giver, taker = draw.integers(num_stages, size=2)
            if found[giver] > 1:
                found[giver] -= 1
                found[taker] += 1
    return found


def _offload(draw: np.random.Generator) -> Offload:
    """Ratios in eighths, each of them zero in two draws of three."""
    optimizer, activations, gradients, weights = (
        float(draw.choice(EIGHTHS)) if draw.random() < chance else 0.0
        for chance in (0.6, 0.4, 0.2, 0.2)
    )
    return Offload(
        weights=weights, gradients=gradients, optimizer=optimizer, activations=activations
    )


def _fitting(
    predictor: SymbolicPredictor, plan: Plan, *, close: bool
) -> tuple[Plan, Prediction] | None:
    """The plan if it fits; to be close to the limit, with as few blocks computed again as fit."""
    if not close:
        prediction = predictor.predict(plan)
        return (plan, prediction) if prediction.fits else None
    shares = np.linspace(0.0, 1.0, 9)
    plans = [
        replace(
            plan,
            stages=tuple(
                replace(stage, checkpointed_layers=round(share * stage.layers))
                for stage in plan.stages
            ),
        )
        for share in shares
    ]
    predictions = predictor.predict_many(plans)
    fitting = [pair for pair in zip(plans, predictions, strict=True) if pair[1].fits]
    return fitting[0] if fitting else None
