"""Engine mist, the published runtime: plans name it, and both predictors know it."""

from dataclasses import replace

import pytest

from mistlab import catalog
from mistlab.machine.cluster import Cluster
from mistlab.plan.plan import Offload, Plan, StagePlan
from simulators.events import EventSimulator
from simulators.symbolic import SymbolicPredictor
from tests.workloads import workload_of

WORK = workload_of("gpt3-2.7b", 2048, 8)
CLUSTER = Cluster(hardware=catalog.hardware("l4-24gb"), nodes=1, gpus_per_node=4)
STAGE = StagePlan(
    layers=16,
    data_parallel=2,
    tensor_parallel=1,
    micro_batch=1,
    zero=2,
    checkpointed_layers=8,
    offload=Offload(optimizer=0.5),
)
PLAN = Plan(engine="mist", micro_batches=4, stages=(STAGE, STAGE))


def test_it_keeps_what_mistlab_keeps_and_waits_for_its_sends() -> None:
    predictor = SymbolicPredictor(workload=WORK, cluster=CLUSTER)
    published, own = predictor.predict_many([PLAN, replace(PLAN, engine="mistlab")])
    kept = [[s.peak_allocated_bytes for s in one.stages] for one in (published, own)]
    # But a second tensor of the logits' size, where the loss runs forward.
    assert kept[0][:-1] == kept[1][:-1]
    more = kept[0][-1] - kept[1][-1]
    vocab = WORK.model.padded_vocab(1)
    assert 0 <= more <= 2 * STAGE.micro_batch * WORK.sequence_length * vocab
    assert published.iteration_s > own.iteration_s


@pytest.mark.parametrize("stages", [1, 2])
def test_both_predictors_agree_on_it(stages: int) -> None:
    stage = replace(STAGE, layers=32 // stages, data_parallel=4 // stages, checkpointed_layers=8)
    plan = replace(PLAN, micro_batches=2 * stages, stages=(stage,) * stages)
    predicted = SymbolicPredictor(workload=WORK, cluster=CLUSTER).predict(plan)
    played = EventSimulator(workload=WORK, cluster=CLUSTER).predict(plan)
    assert predicted.iteration_s == pytest.approx(played.iteration_s, rel=0.03)
