"""Rows of engines: what plans and spaces may ask of them, and in which words they refuse."""

import ast
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mistlab.core.values import InputError
from mistlab.engines.engine import ENGINES, names_for_plans, names_that_wait
from mistlab.plan.dimensions import OFFLOADS, engine_problem
from mistlab.plan.named_spaces import space_of
from mistlab.plan.plan import Plan, StagePlan
from mistlab.schedule.slots import PHASES, Phase

ROOT = Path(__file__).parents[2]
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


def test_plans_name_every_row() -> None:
    assert names_for_plans() == tuple(ENGINES)
    assert "mistlab" not in names_that_wait()
    for name in names_for_plans():
        assert Plan(engine=name, micro_batches=1, stages=(STAGE,)).engine == name
    with pytest.raises(InputError, match="engine: 'mistlb' is unknown: did you mean 'mistlab'"):
        Plan(engine="mistlb", micro_batches=1, stages=(STAGE,))


def test_families_are_engines_that_runs_are_measured_of() -> None:
    families = {row.family for row in ENGINES.values()}
    assert families <= {*ENGINES}
    assert all(ENGINES[name].family == name for name in families)


def test_variants_have_the_facts_of_their_system() -> None:
    for name, row in ENGINES.items():
        assert ENGINES[row.system].system == row.system, name
        assert ENGINES[row.system].family == row.family, name


NAME_TESTS = ("startswith", "endswith", "partition", "rpartition", "removesuffix", "removeprefix")


def name_tests(source: str) -> list[str]:
    """The calls in a source that read a fact from the name of an engine."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    read = tuple(f"{name}.{way}" for name in ("engine", "engine.name") for way in NAME_TESTS)
    return [text for call in calls if (text := ast.unparse(call.func)).endswith(read)]


def test_no_fact_is_read_from_the_name_of_an_engine() -> None:
    assert name_tests('if job.plan.engine.startswith("fsdp"): pass') == [
        "job.plan.engine.startswith"
    ]
    for folder in ("mistlab", "searchers", "simulators", "runtime", "experiments"):
        for path in (ROOT / folder).rglob("*.py"):
            assert not name_tests(path.read_text(encoding="utf-8")), path


def test_a_name_alone_imports_no_row() -> None:
    code = (
        "import sys; from mistlab.engines.engine import names_for_plans; names_for_plans(); "
        "sys.exit('mistlab.engines.baselines' in sys.modules or 'yaml' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


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
    assert above.endswith("only in a pipeline: give 0 or 1")
    for name in OFFLOADS:
        assert engine_problem(name, 0.0, row, in_pipeline=True) == ""
        assert "is modelled with everything on the GPU" in engine_problem(
            name, 0.5, row, in_pipeline=True
        )
    with pytest.raises(InputError, match="bf16, but engine deepspeed does not train in it"):
        row.memory_in("bf16")


def test_a_space_needs_a_level_that_its_engine_has() -> None:
    sharding = replace(space_of("mist"), zero=(2, 3))
    with pytest.raises(InputError, match="zero: 2, but engine megatron shards optimizer state"):
        replace(sharding, engine="megatron")
