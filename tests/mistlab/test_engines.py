"""Rows of engines: what plans and spaces may ask of them, and in which words they refuse."""

import pickle
from dataclasses import replace

import pytest

from mistlab.engines.table import ENGINES, names_for_plans, names_that_wait
from mistlab.schedule.slot_table import PHASES, Phase
from mistlab.values.dimensions import OFFLOADS, engine_problem
from mistlab.values.errors import InputError
from mistlab.values.plan import Plan, StagePlan
from mistlab.values.space import space_of

STAGE = StagePlan(layers=2, data_parallel=2, tensor_parallel=1, micro_batch=1)


@pytest.mark.parametrize("name", ENGINES)
def test_every_row_has_its_name_and_whole_tables(name: str) -> None:
    row = ENGINES[name]
    assert row.name == name
    for overlaps in (False, True):
        template = row.template(overlap_communication=overlaps)
        assert set(template.phases) == set(PHASES)
        assert template.sends == row.sends


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("name", ENGINES)
def test_gradients_are_reduced_once_an_iteration_or_once_a_backward_pass(
    name: str, overlaps: bool, zero: int
) -> None:
    phases = ENGINES[name].template(overlap_communication=overlaps).phases
    zero = min(zero, ENGINES[name].highest_zero)

    def reductions(*some: Phase) -> int:
        tasks = [task for phase in some for task in phases[phase]]
        return sum(task.kind == "R" and task.from_zero <= zero for task in tasks)

    assert reductions("last_backward", "step") == 1
    assert reductions("backward") == (zero >= 2)
    assert not reductions("first_forward", "forward")


@pytest.mark.parametrize("name", ENGINES)
def test_a_row_that_went_to_another_process_is_the_same(name: str) -> None:
    row = ENGINES[name]
    other = pickle.loads(pickle.dumps(row))
    assert (other, hash(other)) == (row, hash(row))
    assert replace(row, sends="split") != row


def test_plans_name_rows_for_plans_alone() -> None:
    assert set(names_for_plans()) == {*ENGINES} - {"mist"}
    assert "mistlab" not in names_that_wait()
    with pytest.raises(InputError, match="engine: 'mist' is unknown: did you mean 'mistlab'"):
        Plan(engine="mist", micro_batches=1, stages=(STAGE,))


def test_an_engine_that_always_overlaps_says_which_do_not() -> None:
    choice = f"give engine: {', '.join(names_that_wait()[:-1])} or {names_that_wait()[-1]}"
    with pytest.raises(InputError, match=choice):
        Plan(micro_batches=1, overlap_communication=False, stages=(STAGE,))


def test_a_row_refuses_levels_offloading_and_precisions_in_words() -> None:
    row = replace(
        ENGINES["deepspeed"],
        memory={"fp16": ENGINES["deepspeed"].memory["fp16"]},
        step_moved={"fp16": 62},
    )
    assert engine_problem("zero", 3, row, in_pipeline=False) == ""
    above = engine_problem("zero", 2, row, in_pipeline=True)
    assert above.endswith("alone in a pipeline: give 0 or 1")
    for name in OFFLOADS:
        assert engine_problem(name, 0.0, row, in_pipeline=True) == ""
        assert "keeps everything on the GPU" in engine_problem(name, 0.5, row, in_pipeline=True)
    with pytest.raises(InputError, match="bf16, but engine deepspeed does not train in it"):
        row.memory_in("bf16")


def test_a_space_needs_a_level_that_its_engine_has() -> None:
    sharding = replace(space_of("mist"), zero=(2, 3))
    with pytest.raises(InputError, match="zero: 2, but engine megatron shards optimizer state"):
        replace(sharding, engine="megatron")
