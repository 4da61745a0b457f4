"""A million tokens on eight GPUs: block inputs on the host make room in space fsdp."""

from dataclasses import astuple, replace

import pytest

from mistlab import catalog
from mistlab.core.units import GIB_BYTES
from mistlab.core.values import InputError
from mistlab.job.job import Job
from mistlab.job.search import Budget, Problem, SearchResult
from mistlab.machine.cluster import Cluster
from mistlab.plan.named_spaces import space_of
from mistlab.plan.plan import Offload, Plan, StagePlan
from mistlab.plan.space import OffloadRatios, SearchSpace
from mistlab.plan.workload import Workload
from searchers.registry import SEARCHERS
from searchers.strategy import StrategySearcher
from simulators.events import EventSimulator
from simulators.symbolic import SymbolicPredictor

TOKENS = 1 << 20
CLUSTER = Cluster(hardware=catalog.hardware("h100-80gb"), nodes=1, gpus_per_node=8)
FSDP = space_of("fsdp")


def work(tokens: int = TOKENS) -> Workload:
    return Workload(
        model=catalog.model("llama3-8b"),
        sequence_length=tokens,
        global_batch=1,
        attention="flash",
        precision="bf16",
        loss="chunked",
    )


def searched(space: SearchSpace) -> SearchResult:
    predictor = SymbolicPredictor(workload=work(), cluster=CLUSTER)
    searcher = StrategySearcher(strategy=SEARCHERS["mist"], predictor=predictor)
    problem = Problem(workload=work(), cluster=CLUSTER)
    return searcher.search(problem, space, Budget(evaluations=10_000), 0)


def offloading(ratio: float) -> Plan:
    """Eight replicas of a short sequence each, with a share of what blocks keep on the host."""
    stage = StagePlan(
        layers=32,
        data_parallel=8,
        tensor_parallel=1,
        micro_batch=1,
        zero=3,
        offload=Offload(activations=ratio),
    )
    return Plan(engine="fsdp", micro_batches=1, stages=(stage,))


def test_it_takes_at_most_70_gib_a_gpu() -> None:
    found = searched(FSDP)
    assert found.status == "OPTIMAL"
    assert found.plan is not None
    assert found.prediction is not None
    (stage,) = found.plan.stages
    assert stage.offload.activations == 1
    assert stage.value("checkpointed_layers") == stage.layers
    assert found.prediction.peak_reserved_bytes <= 70 * GIB_BYTES
    # Block inputs by hand: of a rank's tokens, in 16 bits.
    inputs = 2 * TOKENS * 4096 * stage.layers / 8
    plain = replace(stage, offload=Offload())
    without = replace(found.plan, stages=(plain,))
    predictor = SymbolicPredictor(workload=work(), cluster=CLUSTER)
    kept = predictor.predict(without)
    assert not kept.fits
    # Those of the block that runs, and of the one beside it, are on the GPU all the same.
    more, own = (sum(astuple(one.stages[0].memory)) for one in (kept, found.prediction))
    less = more - own
    assert inputs * (stage.layers - 3) / stage.layers <= less <= inputs


def test_without_the_host_nothing_fits() -> None:
    assert searched(replace(FSDP, offload=OffloadRatios())).status == "INFEASIBLE"


@pytest.mark.parametrize("predictor", [SymbolicPredictor, EventSimulator])
def test_copies_take_time_where_nothing_hides_them(
    predictor: type[SymbolicPredictor] | type[EventSimulator],
) -> None:
    """Of short sequences, whose attention takes little, on a slow link to the host."""
    node = replace(CLUSTER.hardware.node, host_link_gbytes_per_s=1.0, inter_node_gbytes_per_s=10.0)
    slow = replace(CLUSTER.hardware, node=node)
    short = replace(work(4096), global_batch=8)
    model = predictor(workload=short, cluster=replace(CLUSTER, hardware=slow))
    plans = [offloading(ratio) for ratio in (0.0, 1.0)]
    plain, away = model.predict_many(plans)
    assert away.iteration_s > 1.2 * plain.iteration_s
    assert away.peak_reserved_bytes < plain.peak_reserved_bytes


def test_a_part_of_activations_is_refused() -> None:
    short = replace(work(4096), global_batch=8)
    with pytest.raises(InputError, match="engine fsdp offloads all activations or none"):
        Job(workload=short, cluster=CLUSTER, plan=offloading(0.5))
