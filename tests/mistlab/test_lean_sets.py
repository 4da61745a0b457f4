"""Lean operators in predictions: what each set of kinds takes from the bytes of a stage."""

from itertools import pairwise

import pytest

from mistlab import catalog
from mistlab.graph.stage_model import StageModel
from mistlab.machine.cluster import Cluster
from mistlab.plan.lean_sets import CHOICE, KINDS, SETS
from mistlab.plan.plan import Plan
from mistlab.plan.workload import Workload
from mistlab.stages.stage_batch import StageBatch
from simulators.events import EventSimulator
from simulators.symbolic import SymbolicPredictor

SEQUENCES, TOKENS = 4, 512
MODEL = catalog.model("bert-large")
# A block's own bytes by hand, in 16 bits: rows of tokens, values of blocks, scores.
ROWS = SEQUENCES * TOKENS
VALUES, SCORES = ROWS * MODEL.hidden, SEQUENCES * MODEL.heads * TOKENS**2
LESS = {
    # In place of GELU's input a byte a value.
    "gelu": ROWS * MODEL.ffn * (2 - 1),
    # Two inputs and two means, but for the values of eight channels.
    "norms": 2 * (2 * VALUES + 2 * ROWS - 2 * 8 * ROWS),
    # Shares after dropout.
    "core": 2 * SCORES,
    # A byte of each of two masks.
    "dropout": 2 * VALUES,
}


def work(sequences: int = SEQUENCES) -> Workload:
    return Workload(
        model=MODEL,
        sequence_length=TOKENS,
        global_batch=sequences,
        attention="math",
        precision="bf16",
    )


def plan(**values: float) -> Plan:
    return Plan.of_one_gpu(MODEL.layers, SEQUENCES, "fsdp-eager", values)


def kept(one: Plan) -> float:
    figures = StageModel.of(work(), "fsdp-eager").figures(StageBatch.of_plan(one))
    return float(figures.activations_bytes[0])


@pytest.mark.parametrize("number", range(len(SETS)))
def test_a_set_keeps_less_by_what_its_kinds_keep_less(number: int) -> None:
    less = kept(plan()) - kept(plan(lean_layers=24, **{CHOICE: number}))
    assert less == 24 * sum(LESS[kind] for kind in SETS[number])


def test_every_set_has_a_number_and_all_come_first() -> None:
    assert SETS[0] == KINDS
    assert len(set(SETS)) == len(SETS) == 2 ** len(KINDS) - 1


@pytest.mark.parametrize("predictor", [SymbolicPredictor, EventSimulator])
def test_more_lean_blocks_take_longer_and_less(
    predictor: type[SymbolicPredictor] | type[EventSimulator],
) -> None:
    """Shares after dropout are made again, and bytes of GELU's sides are written: a little time."""
    cluster = Cluster(hardware=catalog.hardware("a100-40gb"), nodes=1, gpus_per_node=1)
    plans = [plan(lean_layers=count) for count in (0, 8, 24)]
    found = predictor(workload=work(), cluster=cluster).predict_many(plans)
    for fewer, more in pairwise(found):
        assert fewer.iteration_s < more.iteration_s < 1.2 * fewer.iteration_s
        assert fewer.peak_reserved_bytes > more.peak_reserved_bytes
