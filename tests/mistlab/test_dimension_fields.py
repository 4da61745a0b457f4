"""Stages and spaces are made from rows: their stub, their order, pickles."""

import pickle
from dataclasses import fields, replace

from benchmarks.stubs import PACKAGE_STUB, STUB, package_stub, stub
from mistlab.plan.dimension_fields import Offload, OffloadRatios
from mistlab.plan.dimensions import DIMENSIONS
from mistlab.plan.named_spaces import space_of
from mistlab.plan.plan import StagePlan
from mistlab.plan.space import SearchSpace

STAGE = StagePlan(
    layers=8, data_parallel=2, tensor_parallel=1, micro_batch=1, offload=Offload(weights=0.5)
)


def test_the_stub_is_what_the_command_writes() -> None:
    assert STUB.read_text("utf-8") == stub(), "write it again: make stubs"
    assert PACKAGE_STUB.read_text("utf-8") == package_stub(), "write it again: make stubs"


def test_every_row_is_a_field_of_stages_and_of_spaces() -> None:
    of_stage = {entry.name for entry in fields(StagePlan)} - {"offload"}
    of_offload = {f"offload_{entry.name}" for entry in fields(Offload)}
    assert of_stage | of_offload == DIMENSIONS.keys()
    of_space = {entry.name for entry in fields(SearchSpace)}
    of_space |= {f"offload_{entry.name}" for entry in fields(OffloadRatios)}
    assert of_space & DIMENSIONS.keys() == {
        name for name, row in DIMENSIONS.items() if row.is_listed
    }


def test_made_values_survive_a_pickle() -> None:
    for value in (STAGE, STAGE.offload, space_of("mist"), space_of("mist").offload):
        again = pickle.loads(pickle.dumps(value))
        assert again == value
        assert hash(again) == hash(value)


def test_a_stage_shows_its_fields_in_order() -> None:
    assert repr(replace(STAGE, zero=1)).startswith(
        "StagePlan(layers=8, data_parallel=2, tensor_parallel=1, micro_batch=1, context_parallel=1"
    )
