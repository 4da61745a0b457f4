"""1F1B pipelines whose passes and sends are played one by one: waits that the closed form by itself
has no chain for.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from typing import Any, NamedTuple

import pytest

from mistlab import catalog
from mistlab.engines.engine import ENGINES
from mistlab.machine.cluster import Cluster
from mistlab.plan.plan import Offload, Plan, StagePlan
from mistlab.plan.workload import Workload
from mistlab.stages import played_pipeline
from mistlab.stages.played_pipeline import (
    PLAYED_TIMES,
    TIMES_OF_KINDS,
    Walk,
    free_at_first,
    sends_beside_passes,
    sends_of,
    times_of_passes,
    walked,
)
from mistlab.stages.stage_batch import MOVED
from simulators import symbolic
from simulators.events import EventSimulator
from simulators.symbolic import SymbolicPredictor
from tests.simulators.test_strained import difference
from tests.workloads import workload_of


class Case(NamedTuple):
    """A plan, its workload and cluster, the least share by which the closed form by itself is too
    short, and the largest share by which the prediction is off.
    """

    plan: Plan
    work: Workload
    cluster: Cluster
    short: float
    near: float = 0.005


def alike(stages: int, **choices: float) -> tuple[StagePlan, ...]:
    """Equal stages of 24 blocks."""
    stage = {"layers": 24 // stages, "data_parallel": 2, "tensor_parallel": 1, **choices}
    return (StagePlan(**stage),) * stages  # type: ignore[arg-type]


def with_layers(*layers: int, **choices: float) -> tuple[StagePlan, ...]:
    """Stages with these numbers of blocks, alike otherwise."""
    return tuple(
        replace(one, layers=count)
        for one, count in zip(alike(len(layers), **choices), layers, strict=True)
    )


def offloading(layers: int, checkpointed: int, *ratios: float) -> StagePlan:
    """A stage of one GPU that offloads these shares of weights, gradients, states, activations."""
    return StagePlan(
        layers=layers,
        data_parallel=1,
        tensor_parallel=1,
        micro_batch=2,
        zero=1,
        checkpointed_layers=checkpointed,
        offload=Offload(
            **dict(zip(("weights", "gradients", "optimizer", "activations"), ratios, strict=True))
        ),
    )


CASES = {
    # Behind a gradient's send, an activation waits in its stage's queue, and the other way round.
    "sends of both directions queue": Case(
        Plan(
            engine="megatron-core",
            micro_batches=8,
            stages=alike(4, micro_batch=4, zero=1, checkpointed_layers=4),
        ),
        workload_of("gpt3-1.3b", 2048, 64, "bf16"),
        Cluster(
            hardware=catalog.hardware("h100-80gb"),
            nodes=4,
            gpus_per_node=2,
            inter_node_gbytes_per_s=2.0,
        ),
        0.025,
    ),
    # Gradients of the first stage's larger blocks are reduced before its next backward pass.
    "backward passes in a row reduce": Case(
        Plan(
            engine="megatron-bridge",
            micro_batches=8,
            stages=with_layers(5, 4, 4, 3, micro_batch=4, zero=3),
        ),
        workload_of("llama3.2-1b", 512, 64, "bf16"),
        Cluster(
            hardware=catalog.hardware("h200-141gb"),
            nodes=1,
            gpus_per_node=8,
            intra_node_gbytes_per_s=32.0,
        ),
        0.04,
    ),
    # Fewer micro-batches than stages, and a long last backward pass in the first stage.
    "a micro-batch waits behind another in each direction": Case(
        Plan(
            engine="megatron-fsdp",
            micro_batches=4,
            stages=with_layers(3, 2, 2, 2, 2, 2, 2, 1, tensor_parallel=2, micro_batch=4, zero=1),
        ),
        workload_of("llama3.2-1b", 512, 32, "bf16"),
        Cluster(hardware=catalog.hardware("h200-141gb"), nodes=4, gpus_per_node=8),
        0.015,
    ),
    # The first stage's backward passes in a row reduce, under a host that gets ahead of them.
    "backward passes in a row reduce, and a host issues them": Case(
        Plan(
            engine="fsdp-eager",
            micro_batches=8,
            stages=with_layers(5, 4, 4, 3, micro_batch=2, zero=3),
        ),
        workload_of("llama3.2-1b", 512, 32, "bf16"),
        Cluster(
            hardware=catalog.hardware("h200-141gb"),
            nodes=2,
            gpus_per_node=4,
            intra_node_gbytes_per_s=32.0,
        ),
        0.06,
        near=0.002,
    ),
    # The last gradients but one are sent beside a stage's last reductions, and delay the last one.
    "a queued gradient waits for sends beside the last reductions": Case(
        Plan(
            engine="megatron-bridge",
            micro_batches=8,
            stages=alike(4, data_parallel=4, micro_batch=1, zero=1, checkpointed_layers=4),
        ),
        workload_of("gpt3-1.3b", 1024, 32, "bf16"),
        Cluster(
            hardware=catalog.hardware("h100-80gb"),
            nodes=2,
            gpus_per_node=8,
            inter_node_gbytes_per_s=1.0,
            intra_node_gbytes_per_s=16.0,
        ),
        0.04,
        near=0.015,
    ),
    # A send outlasts a forward and a backward pass, both of which gather weights.
    "sends share the link with collectives of several passes": Case(
        Plan(
            micro_batches=8,
            stages=alike(4, micro_batch=4, zero=3, checkpointed_layers=1),
        ),
        workload_of("gpt3-1.3b", 1024, 64, "bf16"),
        Cluster(
            hardware=catalog.hardware("h100-80gb"),
            nodes=2,
            gpus_per_node=4,
            inter_node_gbytes_per_s=0.5,
            intra_node_gbytes_per_s=16.0,
        ),
        0.04,
        near=0.025,
    ),
    # A forward pass's activations hold the backward pass after it, not the next forward pass.
    "activations leave before the next pass's return": Case(
        Plan(
            micro_batches=4,
            stages=(
                offloading(4, 0, 0.0, 0.0, 0.0, 0.0),
                offloading(2, 0, 0.0, 0.0, 0.0, 1.0),
                offloading(8, 0, 0.0, 0.0, 0.0, 0.0),
            ),
        ),
        workload_of("gpt3-1.3b", 2048, 8, "bf16"),
        Cluster(hardware=catalog.hardware("a100-40gb"), nodes=1, gpus_per_node=3),
        0.1,
        near=0.02,
    ),
    # Unlike stages hold up unlike micro-batches.
    "unlike stages offload": Case(
        Plan(
            micro_batches=4,
            stages=(
                offloading(10, 3, 0.375, 0.5, 0.75, 1.0),
                offloading(8, 0, 1.0, 0.5, 0.375, 0.75),
                offloading(7, 4, 0.25, 0.25, 0.75, 0.625),
                offloading(7, 4, 0.375, 0.75, 0.375, 0.25),
            ),
        ),
        workload_of("gpt3-2.7b", 4096, 8),
        Cluster(hardware=catalog.hardware("l4-24gb"), nodes=1, gpus_per_node=4),
        0.02,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_pipelines_take_what_the_event_simulator_plays(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The closed form by itself is too short."""
    plan, work, cluster, short, near = CASES[name]
    played_s = EventSimulator(workload=work, cluster=cluster).predict(plan).iteration_s
    predictor = SymbolicPredictor(workload=work, cluster=cluster)
    seconds = predictor.predict(plan).iteration_s
    assert seconds == pytest.approx(played_s, rel=near)
    assert predictor.iterations_of([plan], ENGINES[plan.engine]) == [seconds]
    monkeypatch.setattr(symbolic, "played_iterations_s", lambda *_: [0.0])
    alone_s = SymbolicPredictor(workload=work, cluster=cluster).predict(plan).iteration_s
    assert alone_s < played_s * (1 - short)


def test_passes_in_a_row_wait_for_what_leaves_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first stage, forward passes after forward passes wait for activations, and backward
    passes after backward passes for gradients. Two stages are played for this test alone.
    """
    monkeypatch.setattr(symbolic, "FEWEST_STAGES_PLAYED", 2)
    plan = Plan(
        micro_batches=4,
        stages=tuple(
            replace(
                offloading(layers, checkpointed, *ratios),
                data_parallel=8,
                tensor_parallel=2,
                micro_batch=1,
                zero=zero,
            )
            for layers, checkpointed, zero, ratios in (
                (9, 0, 2, (0.25, 0.75, 0.125, 0.875)),
                (7, 2, 1, (0.875, 0.0, 0.375, 0.25)),
            )
        ),
    )
    work = workload_of("llama3.2-1b", 512, 32, "bf16")
    a100 = catalog.hardware("a100-40gb")
    cluster = Cluster(hardware=a100, nodes=4, gpus_per_node=8, inter_node_gbytes_per_s=2.0)
    assert abs(difference(work, cluster, plan)) <= 0.002


def test_sends_that_outlast_passes_of_the_next_stage_alone_are_late() -> None:
    """The last stage has so few blocks that gradients are sent to the stage before for longer."""
    plan = Plan(
        micro_batches=8,
        stages=tuple(
            StagePlan(layers=layers, data_parallel=2, tensor_parallel=1, micro_batch=4, zero=3)
            for layers in (13, 9, 2)
        ),
    )
    cluster = Cluster(
        hardware=catalog.hardware("h100-80gb"),
        nodes=3,
        gpus_per_node=2,
        inter_node_gbytes_per_s=8.0,
        intra_node_gbytes_per_s=16.0,
    )
    assert abs(difference(workload_of("gpt3-1.3b", 1024, 64, "bf16"), cluster, plan)) <= 0.01


def test_sends_between_unlike_meshes_take_as_long_as_from_their_sender() -> None:
    """The second stage is predicted to send to the next node, the third one to receive inside of
    its node.
    """
    plan = Plan(
        micro_batches=2,
        stages=tuple(
            StagePlan(
                layers=6, data_parallel=data, tensor_parallel=1, micro_batch=8 // data, zero=3
            )
            for data in (1, 2, 1, 4)
        ),
    )
    cluster = Cluster(
        hardware=catalog.hardware("a100-40gb"),
        nodes=2,
        gpus_per_node=4,
        inter_node_gbytes_per_s=1.0,
    )
    assert abs(difference(workload_of("gpt3-1.3b", 1024, 16), cluster, plan)) <= 0.01


def test_long_pipelines_are_played_only_if_sends_share_links() -> None:
    work, h100 = workload_of("gpt3-1.3b", 1024, 32, "bf16"), catalog.hardware("h100-80gb")
    for stages, is_short in ((24, True), (40, False)):
        layers = with_layers(*[1] * stages, data_parallel=1, micro_batch=1)
        plan = Plan(micro_batches=32, stages=layers)
        work = replace(work, model=replace(work.model, layers=stages))
        cluster = Cluster(hardware=h100, nodes=stages // 8, gpus_per_node=8)
        assert is_played(plan, work, cluster) == is_short
    wide = replace(plan, stages=with_layers(*[1] * 40, data_parallel=8, micro_batch=1))
    a_node_each = Cluster(hardware=h100, nodes=40, gpus_per_node=8, inter_node_gbytes_per_s=1.0)
    assert is_played(wide, replace(work, global_batch=256), a_node_each)


def test_a_single_stage_is_not_played(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no sends, also where a cluster has so many nodes that others' sends share links."""
    monkeypatch.setattr(symbolic, "played_iterations_s", None)
    plan = Plan(micro_batches=4, stages=alike(1, data_parallel=8, micro_batch=1))
    cluster = Cluster(hardware=catalog.hardware("h100-80gb"), nodes=4, gpus_per_node=2)
    work = workload_of("gpt3-1.3b", 1024, 32, "bf16")
    assert SymbolicPredictor(workload=work, cluster=cluster).predict(plan).iteration_s > 0


def is_played(plan: Plan, work: Workload, cluster: Cluster) -> bool:
    """Whether the passes of a plan are played for its prediction."""
    with pytest.MonkeyPatch.context() as patch:
        seen: list[float] = []

        def played(*given: Any) -> list[float]:
            seen.extend(played_pipeline.played_iterations_s(*given))
            return seen

        patch.setattr(symbolic, "played_iterations_s", played)
        SymbolicPredictor(workload=work, cluster=cluster).predict(plan)
    return seen[-1] > 0


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 3), (4, 2), (4, 4), (5, 12)])
@pytest.mark.parametrize("sent_s", [0.0, 0.125])
def test_equal_stages_take_what_arithmetic_says(
    stages: int, micro_batches: int, sent_s: float
) -> None:
    """The closed form of equal stages (``mistlab.cost.chains``) is exact if no send outlasts a
    pass.
    """
    times = times_of(stages, forward_s=1.0, backward_s=2.0)
    times["point_to_point_s"] = [2 * sent_s] * stages
    walk = walk_of(times, micro_batches)
    crossed = stages + micro_batches - 2 - ceil((micro_batches - 1) / stages)
    expected_s = 3 * (micro_batches + stages - 1) + (2 * sent_s * crossed if stages > 1 else 0)
    assert max(walk.free_s) == pytest.approx(expected_s)


def test_a_stage_that_reduces_longer_between_backward_passes_has_shorter_forward_passes() -> None:
    """Its own work is equally long in all; its first backward pass ends earlier."""
    times = times_of(2, forward_s=2.0, backward_s=2.0)
    for column in times.values():
        column[1] /= 100
    first_s, ends_s = zip(
        *(
            (walk.ends_s[2], max(walk.free_s))
            for turned_s in (0.0, 1.5)
            for walk in [
                walked(
                    free_at_first(times),
                    times_of_passes(
                        times,
                        like_others(2, again_forward_s=-turned_s, again_backward_s=turned_s),
                    ),
                    3,
                )
            ]
        ),
        strict=True,
    )
    assert ends_s == pytest.approx((12.0, 12.0))
    assert first_s == pytest.approx((6.0, 4.5))


def test_a_second_micro_batch_waits_for_the_steps_after_the_first_one() -> None:
    """It brings the work after a middle stage's first pass to all stages behind."""
    stages, micro_batches, after_s = 4, 2, 5.0
    times = times_of(stages, forward_s=1.0, backward_s=2.0)
    of_kinds_s = like_others(stages)
    of_kinds_s[1][TIMES_OF_KINDS.index("stepped_late_s")] = after_s
    walk = walk_of(times, micro_batches, of_kinds_s)
    # Two stages, then the work, then the second micro-batch in both directions.
    assert max(walk.free_s) == pytest.approx(2 + after_s + 3 + 4 * 2)


def test_steps_that_are_over_before_a_micro_batch_comes_delay_no_other() -> None:
    """The states of a stage that waits for its first micro-batch are copied meanwhile."""
    times = times_of(3, forward_s=1.0, backward_s=2.0)
    times["begin_s"][0], of_kinds_s = 10.0, like_others(3)
    ends_s = []
    for after_s in (0.0, 8.0, 20.0):
        of_kinds_s[1][TIMES_OF_KINDS.index("stepped_s")] = after_s
        walk = walk_of(times, 2, of_kinds_s)
        ends_s.append(max(walk.free_s))
    # The second stage's second pass ends after 13 s, or after 1 + 20 s of copies and itself.
    assert ends_s == pytest.approx((22.0, 22.0, 29.0))


def test_a_pass_of_another_kind_takes_its_part_of_both() -> None:
    """What a forward pass leaves is a part of the backward pass after it, and not of the forward
    pass after that: the slowest stage's first backward pass has it, too.
    """
    times = times_of(3, forward_s=3.0, backward_s=3.0)
    for column in times.values():
        column[:2] = [column[0] / 100] * 2
    of_kinds_s = like_others(3)
    for name, moved_s in zip(MOVED, (-2.0, 2.0, 0.0, 0.0), strict=True):
        of_kinds_s[2][TIMES_OF_KINDS.index(name)] = moved_s
    steady, moved = (
        walked(free_at_first(times), times_of_passes(times, rows), 4)
        for rows in (like_others(3), of_kinds_s)
    )
    assert max(moved.free_s) == pytest.approx(max(steady.free_s) + 2.0)


def test_the_last_reductions_delay_a_queued_gradient() -> None:
    """Gradients are sent in 10 s each, the last two beside 4 s of reductions."""
    ends_s = []
    for reducing_s in (0.0, 4.0):
        times = times_of(3, forward_s=1.0, backward_s=2.0)
        times["point_to_point_s"][1], times["within_backward_s"][2] = 20.0, reducing_s
        walk = walk_of(times, 6)
        ends_s.append(max(walk.free_s))
    assert ends_s[1] == pytest.approx(ends_s[0] + 4.0)


def test_sends_are_as_late_as_the_passes_beside_them_make_them() -> None:
    """Of two stages, the first runs a forward pass beside its first send, the second one a forward
    and a backward pass; beside the other sends both wait.
    """
    times = times_of(2, forward_s=1.0, backward_s=2.0)
    times["point_to_point_s"] = [12.0, 0.0]
    first_s, of_passes = free_at_first(times), times_of_passes(times, like_others(2))
    walk = walked(first_s, of_passes, 2)
    assert {end_s - begin_s for begin_s, end_s, _ in sends_of(walk, 2)} == {6.0}
    sends_s = sends_beside_passes(
        walk, first_s, of_passes, [(0.5, 2.0, 0.0), (0.125, 1.0, 0.125)], [4.0, 0.0]
    )
    walk = walked(first_s, of_passes, 2, sends_s)
    lasted_s = {
        (stage, is_back): [
            end_s - begin_s
            for begin_s, end_s, route in sends_of(walk, 2)
            if route == (stage, is_back)
        ]
        for stage, is_back in ((0, False), (1, True))
    }
    assert lasted_s == {(0, False): [4.5, 4.0], (1, True): [5.25, 4.0]}
    # The link is shared by halves.
    late_s = [(50.0, 50.0, 0.0)] * 2
    assert max(sends_beside_passes(walk, first_s, of_passes, late_s, [4.0, 0.0])) == 8.0


def test_a_send_is_beside_no_pass_that_waits_for_copies() -> None:
    """The second pass begins when the states are copied that the first one's steps have left."""
    times = times_of(2, forward_s=1.0, backward_s=2.0)
    times["point_to_point_s"] = [12.0, 0.0]
    for stepped_s, first_lasts_s in ((0.0, 4.5), (7.0, 4.0)):
        first_s = free_at_first(times)
        of_passes = times_of_passes(times, like_others(2, stepped_s=stepped_s))
        walk = walked(first_s, of_passes, 2)
        late_s = [(0.5, 0.0, 0.0), (0.0, 0.0, 0.0)]
        sends_s = sends_beside_passes(walk, first_s, of_passes, late_s, [4.0, 0.0])
        assert sends_s[0] == first_lasts_s


def walk_of(
    times: dict[str, list[float]],
    micro_batches: int,
    of_kinds_s: Sequence[Sequence[float]] | None = None,
) -> Walk:
    """The walk through a pipeline; ``of_kinds_s`` are the times of its stages' kinds of passes."""
    of_kinds_s = of_kinds_s or like_others(len(times["point_to_point_s"]))
    return walked(free_at_first(times), times_of_passes(times, of_kinds_s), micro_batches)


def times_of(stages: int, **seconds: float) -> dict[str, list[float]]:
    """The times of equal stages whose micro-batches take as long to go through as a pass."""
    known = {**seconds, **{f"through_{name}": one for name, one in seconds.items()}}
    return {name: [known.get(name, 0.0)] * stages for name in PLAYED_TIMES}


def like_others(stages: int, **seconds: float) -> list[list[float]]:
    """Rows of stages of which only the first has passes that differ from others of their kind."""
    rows = [[0.0] * len(TIMES_OF_KINDS) for _ in range(stages)]
    for name, one_s in seconds.items():
        rows[0][TIMES_OF_KINDS.index(name)] = one_s
    return rows
