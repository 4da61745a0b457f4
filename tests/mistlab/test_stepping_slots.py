"""The first pass where states leave when their block has stepped, and least times of work."""

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
import pytest
from scipy.optimize import linprog

from mistlab import catalog
from mistlab.cost.side_by_side import NAMES, TASKS, SlowedBy, Way, lanes_of, least_together, played
from mistlab.cost.slot_work import stepping_s
from mistlab.machine.cluster import Cluster
from mistlab.machine.slowdowns import STREAMS
from mistlab.plan.plan import Offload, Plan, StagePlan
from mistlab.stages.stage_batch import StageBatch, StageTimes
from simulators.events import EventSimulator, PlayedTask
from simulators.symbolic import SymbolicPredictor
from tests.workloads import workload_of

DRAW = np.random.default_rng(5)


def drawn_factors() -> np.ndarray:
    """Factors (16, 4) of sets of streams, at least 1 for busy ones."""
    busy = (np.arange(16)[:, None] & (1 << np.arange(4))) > 0
    shared = busy & (busy.sum(axis=1) > 1)[:, None]
    return np.where(shared, DRAW.uniform(1, 3, (16, 4)), 1.0)


@pytest.mark.parametrize("case", range(5))
def test_the_least_time_of_work_is_that_of_a_linear_programme(case: int) -> None:
    """The shares of time of all sets of streams, which are to do the work."""
    factors, work = drawn_factors(), DRAW.choice([0.0, 0.2, 1.0, 3.0], (4, 20))
    found = least_together(work, SlowedBy.of_all(factors, 20))
    busy = (np.arange(16)[:, None] & (1 << np.arange(4))) > 0
    rates = np.where(busy, 1 / factors, 0.0)
    for own, least_s in zip(work.T, found, strict=True):
        programme = linprog(np.ones(16), A_ub=-rates.T, b_ub=-own)
        assert least_s == pytest.approx(programme.fun, rel=1e-7, abs=1e-9), case


def test_blocks_in_turn_take_no_less_than_the_least_time_of_their_work() -> None:
    """Over a whole cycle, where streams slow one another down as they like."""
    slowed = SlowedBy.of_all(drawn_factors(), 200)
    work = DRAW.choice([0.0, 0.1, 0.5, 1.0], (len(NAMES), 2, 200))
    work[:, 1] = work[:, 0]
    together = np.zeros((len(STREAMS), 200))
    for task, own in zip(TASKS, work, strict=True):
        together[STREAMS.index(task.stream)] += own[0]
    in_turn_s, least_s = stepping_s(work, slowed), least_together(together, slowed)
    # Of a run of ten blocks four are measured, which may not be a whole cycle.
    assert (in_turn_s >= least_s * 0.9 - 1e-12).all()
    assert np.median(in_turn_s / least_s) >= 1


@pytest.mark.parametrize("seed", range(3))
def test_passes_of_stages_that_are_unlike_take_as_long_together_as_alone(seed: int) -> None:
    """Stages of 1 to 9 blocks that offload activations or weights or not, and gather weights or
    not.
    """
    draw, cases, most = np.random.default_rng(seed), 60, 9
    lacking = [frozenset(names) for names in ((), ("A>",), ("P>",), ("P>", "G<", "O<", "O>"))]
    ways = [Way(without, gathers) for without, gathers in product(lacking, (False, True))]
    way, blocks = draw.integers(0, len(ways), cases), draw.integers(1, most + 1, cases)
    work = draw.choice([0.0, 0.2, 1.0, 3.0], (len(NAMES), most, cases)) * draw.uniform(1, 2, cases)
    work *= np.arange(most)[:, None] < blocks
    for case, number in enumerate(way.tolist()):
        work[[NAMES.index(name) for name in ways[number].without], :, case] = 0.0
    factors = drawn_factors()

    def passed_s(rows: list[int], chosen: np.ndarray, ways: Sequence[Way]) -> np.ndarray:
        layers = blocks[rows]
        lanes = lanes_of(int(layers.max()), int(layers.max()), ways)
        slowed = SlowedBy.of_all(factors, len(rows))
        work_of_rows, at = work[:, : layers.max(), rows], lanes.first[:, chosen]
        swaps = work_of_rows[NAMES.index("P>")] > 0
        ends_s, over_s = played(work_of_rows, slowed, lanes, chosen, at, layers, swaps)
        ends_s = np.where(np.arange(len(ends_s))[:, None] < layers, ends_s, 0.0)
        return np.concatenate([over_s[None], ends_s])

    together = passed_s([*range(cases)], way, ways)
    assert len(np.unique(together)) > cases
    for case, layers in enumerate(blocks.tolist()):
        alone = passed_s([case], np.zeros(1, dtype=int), (ways[way[case]],))
        assert together[: layers + 1, case].tolist() == alone[:, 0].tolist()


def offloaded(weights: float, gradients: float, optimizer: float, activations: float) -> Offload:
    return Offload(
        weights=weights, gradients=gradients, optimizer=optimizer, activations=activations
    )


CASES = {
    # States leave more slowly beside gathers than beside fetches.
    "equal blocks": ("llama3-70b", "h100-80gb", 8, 16, 4, 4, offloaded(0.125, 0.375, 0.75, 0.125)),
    # While the states of a large block leave, the gradients of the next one come.
    "blocks of two types": (
        *("nemotron-3-nano", "b200-180gb", 2, 8, 2, 1),
        offloaded(0.625, 1.0, 0.5, 0.75),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_states_leave_while_those_of_the_next_block_come(case: str) -> None:
    model, hardware, nodes, data, tensor, micro_batch, offload = CASES[case]
    cluster = Cluster(hardware=catalog.hardware(hardware), nodes=nodes, gpus_per_node=8)
    workload = workload_of(model, 2048, data * micro_batch, "bf16")
    stage = StagePlan(
        layers=workload.model.layers,
        data_parallel=data,
        tensor_parallel=tensor,
        micro_batch=micro_batch,
        zero=3 if case == "equal blocks" else 2,
        offload=offload,
    )
    plan = Plan(micro_batches=1, stages=(stage,))
    closed = SymbolicPredictor(workload=workload, cluster=cluster).predict(plan)
    played = EventSimulator(workload=workload, cluster=cluster).simulate(plan)
    assert abs(closed.iteration_s / played.iteration_s - 1) < 0.01


COMMON = {"data_parallel": 2, "tensor_parallel": 1, "micro_batch": 1}
# Layers, recomputed ones, ZeRO level, and ratios.
Offloading = tuple[int, int, int, Offload]


class Stages(NamedTuple):
    """What the closed form says of a plan's stages, and the tasks of the plan as it is played."""

    seconds: StageTimes
    tasks: list[PlayedTask]

    def ended_s(self, kind: str) -> float:
        """When the last task ends whose name begins so."""
        return max(task.end_s for task in self.tasks if str(task.action).startswith(kind))


def stages_on_l4(case: Offloading, *, others: Offload, is_last: bool) -> Stages:
    """Of Llama 7B: a stage of ``case``, and if layers are left another one, with ``others``."""
    layers, recomputed, zero, offload = case
    workload = workload_of("llama-7b", 2048, 2, "bf16")
    stages = [
        StagePlan(
            layers=layers, checkpointed_layers=recomputed, zero=zero, offload=offload, **COMMON
        )
    ]
    left = workload.model.layers - layers
    if left:
        other = StagePlan(layers=left, zero=1, offload=others, **COMMON)
        stages.insert(0 if is_last else 1, other)
    cluster = Cluster(hardware=catalog.hardware("l4-24gb"), nodes=1, gpus_per_node=2 * len(stages))
    plan = Plan(micro_batches=1, stages=tuple(stages))
    predictor = SymbolicPredictor(workload=workload, cluster=cluster)
    simulation = EventSimulator(workload=workload, cluster=cluster).simulate(plan)
    return Stages(
        seconds=predictor.stage_costs(StageBatch.of_plan(plan)).seconds, tasks=[*simulation.tasks()]
    )


# Stages whose first micro-batch comes late: layers, recomputed ones, ZeRO level, and ratios.
LATE = {
    "few layers": (4, 4, 1, offloaded(0.75, 0.375, 0.875, 0.75)),
    "more layers than are simulated": (24, 0, 2, offloaded(0.5, 0.25, 0.75, 0.25)),
    "some recomputed": (14, 6, 1, offloaded(0.875, 0.5, 1.0, 0.5)),
    "sharded weights": (6, 6, 3, offloaded(1.0, 0.5, 0.75, 0.5)),
}


@pytest.mark.parametrize("case", LATE)
def test_a_micro_batch_that_comes_late_finds_two_blocks_stepped(case: str) -> None:
    # The stage before takes longer than two steps of this one.
    stages = stages_on_l4(LATE[case], others=offloaded(1, 1, 1, 1), is_last=True)
    passed_s = stages.seconds.through_forward_s[1] + stages.seconds.within_forward_s[1]
    taken_s = stages.ended_s("1F") - stages.ended_s("0X")
    assert passed_s == pytest.approx(taken_s, rel=0.02)


# First stages that offload weights: layers, recomputed ones, ZeRO level, and ratios.
BEGUN = {
    "few layers": (4, 4, 1, offloaded(0.75, 0.375, 0.875, 0.75)),
    "more layers than are simulated": (28, 0, 2, offloaded(1.0, 0.25, 0.75, 0.5)),
    "all layers": (32, 8, 2, offloaded(0.5, 0.25, 0.75, 0.25)),
    "sharded weights": (12, 6, 3, offloaded(1.0, 0.5, 0.75, 0.5)),
    "activations stay": (16, 16, 1, offloaded(1.0, 0.5, 1.0, 0.0)),
}


@pytest.mark.parametrize("case", BEGUN)
def test_the_first_stage_begins_as_its_tasks_are_played(case: str) -> None:
    stages = stages_on_l4(BEGUN[case], others=Offload(), is_last=False)
    seconds = stages.seconds
    passed_s = seconds.begin_s + seconds.through_forward_s + seconds.within_forward_s
    assert passed_s[0] == pytest.approx(stages.ended_s("0F"), rel=1e-3), case


def test_a_first_stage_waits_until_its_host_has_launched_two_layers() -> None:
    workload = workload_of("gpt3-1.3b", 2048, 16, "bf16")
    cluster = Cluster(hardware=catalog.hardware("a100-40gb"), nodes=1, gpus_per_node=2)
    stage = StagePlan(layers=24, data_parallel=1, tensor_parallel=2, micro_batch=8, zero=1)
    plan = Plan(micro_batches=2, stages=(stage,), engine="megatron-core")
    closed = SymbolicPredictor(workload=workload, cluster=cluster).predict(plan)
    played = EventSimulator(workload=workload, cluster=cluster).simulate(plan)
    launched_s = min(one.start_s for one in played.tasks() if one.action.layer == 0)
    assert launched_s > 1e-4
    assert closed.iteration_s == pytest.approx(played.iteration_s, abs=launched_s / 10)
