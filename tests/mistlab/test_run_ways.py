"""What a row does not say: which configurations it may stand for; runs that drop tokens."""

import pytest

from experiments.runs.configuration import Configuration, configuration_of
from experiments.runs.run_jobs import job_of, ways_of
from experiments.runs.runs_table import TableRow

ROW = {
    "engine": "Megatron-Core",
    "hardware": "H100",
    "gpus": "32",
    "model": "gpt",
    "layers": "24",
    "hidden": "2048",
    "heads": "16",
    "vocab": "50304",
    "sequence_length": "2048",
    "global_batch": "96",
    "micro_batch": "",
    "tp": "1",
    "pp": "4",
    "vpp": "",
    "notes": "",
}


def run(**changes: str) -> Configuration:
    return configuration_of(TableRow(file="runs.csv", number=1, line=2, cells={**ROW, **changes}))


@pytest.mark.parametrize(
    ("changes", "unsaid"),
    [
        ({}, ("micro_batch", "vpp")),
        ({"micro_batch": "1"}, ("vpp",)),
        ({"micro_batch": "1", "vpp": "1"}, ()),
        ({"pp": "1"}, ("micro_batch",)),
        # Without the batch there is nothing to divide, and its parts say the micro-batch.
        ({"global_batch": ""}, ()),
        ({"grad_accumulation": "12"}, ("vpp",)),
        # No chunks, not tuned, said by defaults, an order of its own, and known of no engine.
        ({"engine": "nanotron"}, ("micro_batch",)),
        ({"notes": "phase sft"}, ()),
        ({"notes": "transformer-impl=transformer_engine"}, ()),
        ({"engine": "Megatron-LM fork (zero bubble), schedule ZB-H1"}, ()),
        ({"engine": "somebody's"}, ()),
    ],
)
def test_what_a_benchmark_leaves_unsaid(changes: dict[str, str], unsaid: tuple[str, ...]) -> None:
    assert run(**changes).unsaid == unsaid


def test_a_row_stands_for_all_ways_of_what_it_leaves_unsaid() -> None:
    ways = ways_of(run())
    found = {(way.micro_batch, way.chunks) for way in ways}
    # Each of 8 data-parallel ranks has 12 sequences, and each of 4 stages 6 blocks.
    assert found == {(b, v) for b in (1, 2, 4) for v in (1, 2, 3, 4, 5, 6)}
    assert {way.micro_batch * way.micro_batches for way in ways} == {12}
    assert not any(way.unsaid for way in ways)
    said = [note for note in ways[-1].notes if "is empty" in note and "fastest" in note]
    assert said == [
        "micro_batch is empty: 4 is the fastest that fits",
        "vpp is empty: 6 is the fastest that fits",
    ]
    assert not any("1 assumed" in note for way in ways for note in way.notes if "micro" in note)
    whole = run(micro_batch="2", vpp="1")
    assert ways_of(whole) == (whole,)


@pytest.mark.parametrize(
    ("notes", "experts", "capacity"),
    [("tokendrop", "8", 1.0), ("recipe x", "8", None), ("tokendrop", "", None)],
)
def test_experts_that_drop_tokens_take_as_many_as_they_have_room_for(
    notes: str, experts: str, capacity: float | None
) -> None:
    row = {"model": "mixtral", "ffn": "4096", "experts": experts, "topk": experts and "2"}
    found = run(notes=notes, micro_batch="1", vpp="1", **row)
    workload = job_of(found).job.workload
    assert workload.expert_capacity == capacity
    assert workload.expert_padding == (capacity is not None)
