"""The table in which two stages add up the gradients of tied embeddings is compute's memory."""

from collections.abc import Callable
from dataclasses import replace

import pytest

pytest.importorskip("torch")

from mistlab.plan.plan import Plan
from mistlab.stages import stage_program
from mistlab.stages.stage_program import Op
from runtime.checks.races.judge import Judge
from runtime.checks.races.recorded_rank import trace_of
from runtime.engine import executor
from tests.runtime.worlds import TRAINING, stage, workload

WORK = workload(layers=2, batch=4, tied_embeddings=True)
PLAN = Plan(micro_batches=2, stages=(stage(1), stage(1)))


def kinds(rank: int) -> set[str]:
    """Of what is found wrong with a rank."""
    return {one.kind for one in Judge(trace_of(WORK, PLAN, rank, TRAINING)).findings()}


@pytest.mark.parametrize("rank", range(2))
def test_the_table_is_allocated_and_freed_in_order(rank: int) -> None:
    assert kinds(rank) == set()


def test_a_sum_in_memory_that_compute_still_uses_is_found(
    monkeypatch: pytest.MonkeyPatch, forget_programs: Callable[[], None]
) -> None:
    # The head's gradients are there before compute has come to its last task.
    monkeypatch.setattr(stage_program, "_AFTER_COMPUTE", ("Y", "A<"))
    forget_programs()
    assert kinds(1) == {"used before allocated"}


def test_a_table_that_is_dropped_while_it_is_added_up_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    iterations = executor.iterations

    def without_waiting(shape: object, count: int) -> list[list[Op]]:
        return [
            [replace(op, waits=()) if op.name == "drop table" else op for op in ops]
            for ops in iterations(shape, count)
        ]

    monkeypatch.setattr(executor, "iterations", without_waiting)
    assert "freed while used" in kinds(0)
