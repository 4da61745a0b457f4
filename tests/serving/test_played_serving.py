"""Played serving: nothing is lost or served twice, memory never overflows, tokens keep their order,
and steady loads take what the closed form says."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from time import process_time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mistlab import catalog
from mistlab.core.values import InputError
from mistlab.serving.changing import PhaseTimes
from mistlab.serving.load import Lengths, LoadFile, ServingLoad, drawn_load
from mistlab.serving.phase_schedule import PhaseLimits
from mistlab.serving.resharding import (
    Layout,
    TensorSizes,
    common,
    layouts_of,
    moved_bytes,
    moved_of_cache,
    pieces_to,
    width,
)
from mistlab.serving.step_cost import RankLayout
from simulators.serving.changing_layouts import play_phases
from simulators.serving.continuous import Batching, PlayedRequest, play_continuous
from simulators.serving.step_clock import StepClock
from tests.serving.steady_cases import random_case

LAYOUT = RankLayout(
    model=catalog.model("llama3-8b"), gpu="H100", engine="vllm", weights="bf16", cache="bf16"
)
CLOCK = StepClock.of(LAYOUT, most=64)
PIPELINE = StepClock.of(replace(LAYOUT, pp=2), most=64)

REQUESTS = st.lists(
    st.tuples(st.integers(1, 300), st.integers(1, 120), st.floats(0, 3)), min_size=1, max_size=25
)


def load_of(drawn: Sequence[tuple[int, int, float]], in_flight: int | None = None) -> ServingLoad:
    ordered = sorted(drawn, key=lambda one: one[2])
    return ServingLoad(
        prompts=tuple(one[0] for one in ordered),
        outputs=tuple(one[1] for one in ordered),
        arrivals_s=tuple(0.0 if in_flight else one[2] for one in ordered),
        in_flight=in_flight,
    )


def check_served(load: ServingLoad, done: Sequence[PlayedRequest]) -> None:
    assert sorted(one.number for one in done) == list(range(len(load)))
    for one in done:
        assert one.made == one.output == load.outputs[one.number]
        assert len(one.token_times) == one.output
        assert one.first_s is not None
        assert one.arrival_s < one.token_times[0] == one.first_s
        assert all(np.diff(one.token_times) > 0)
        assert one.token_times[-1] == pytest.approx(one.end_s)


@settings(max_examples=400)
@given(
    drawn=REQUESTS,
    room=st.integers(27, 400),
    budget=st.integers(16, 1000),
    sequences=st.integers(1, 32),
    mixes=st.booleans(),
    in_flight=st.none() | st.integers(1, 20),
    replicas=st.integers(1, 3),
)
def test_continuous_batching_serves_each_token_once(
    drawn: list[tuple[int, int, float]],
    room: int,
    budget: int,
    sequences: int,
    mixes: bool,
    in_flight: int | None,
    replicas: int,
) -> None:
    load = load_of(drawn, in_flight)
    batching = Batching(capacity=16 * room, budget=budget, sequences=sequences, mixes=mixes)
    played = play_continuous(load, CLOCK, batching, replicas=replicas, keeps_tokens=True)
    check_served(load, played.requests)
    assert played.peak_tokens <= batching.capacity


@settings(max_examples=400)
@given(
    drawn=REQUESTS,
    blocks=st.tuples(*[st.integers(27, 200)] * 3),
    has_host=st.booleans(),
    threshold=st.floats(0, 0.9),
    seconds=st.tuples(st.floats(0, 2), st.floats(0, 1e-3)),
    sequences=st.integers(1, 32),
    replicas=st.tuples(st.integers(1, 3), st.integers(1, 3)),
)
def test_changing_layouts_serve_each_token_once(
    drawn: list[tuple[int, int, float]],
    blocks: tuple[int, int, int],
    has_host: bool,
    threshold: float,
    seconds: tuple[float, float],
    sequences: int,
    replicas: tuple[int, int],
) -> None:
    load = load_of(drawn)
    limits = PhaseLimits(
        reading_blocks=blocks[0],
        decoding_blocks=blocks[1],
        host_blocks=blocks[2] * has_host,
        threshold=threshold,
        budget=400,
        sequences=sequences,
        readers=replicas[0],
        decoders=replicas[1],
    )
    change_s, copy_s = seconds
    times = PhaseTimes(to_decode_s=change_s, to_prompts_s=change_s, store_s=copy_s, fetch_s=copy_s)
    played = play_phases(load, (PIPELINE, CLOCK), limits, times, keeps_tokens=True)
    check_served(load, played.requests)
    assert played.peak_gpu <= max(blocks[:2])
    assert played.peak_host <= blocks[2] * has_host


def test_blocks_come_back_whole() -> None:
    load = drawn_load(
        200,
        (Lengths(shape="uniform", tokens=300, low=0.1), Lengths(shape="uniform", tokens=90, low=0)),
        np.random.default_rng(3),
        rate=50.0,
    )
    tight = play_continuous(load, CLOCK, Batching(capacity=1600))
    loose = play_continuous(load, CLOCK, Batching(capacity=160000))
    assert sum(one.dropped for one in tight.requests) > 0
    assert sum(one.dropped for one in loose.requests) == 0
    assert tight.seconds > loose.seconds


def test_a_request_alone_takes_its_passes_and_steps() -> None:
    load = ServingLoad(prompts=(1000,), outputs=(50,), arrivals_s=(1.0,))
    (done,) = play_continuous(load, CLOCK, Batching(capacity=10000)).requests
    read_s = CLOCK.step_s(0, 0.0, [(1000, 500.0)])
    decoded_s = sum(CLOCK.decode_s(1, 1000 + step) for step in range(1, 50))
    assert done.first_s == pytest.approx(1.0 + read_s)
    assert done.end_s == pytest.approx(1.0 + read_s + decoded_s, rel=1e-3)


def test_steady_loads_take_what_the_closed_form_says() -> None:
    draw = np.random.default_rng(5)
    cases = [random_case(draw) for _ in range(25)]
    for case in cases:
        assert case.rate_ratio == pytest.approx(1, abs=0.05), case
        assert case.token_ratio == pytest.approx(1, abs=0.05), case


def test_ten_thousand_requests_play_in_seconds() -> None:
    load = drawn_load(
        10_000,
        (Lengths(shape="lognormal", tokens=1000), Lengths(shape="lognormal", tokens=300)),
        np.random.default_rng(0),
    )
    start_s = process_time()
    play_continuous(load, CLOCK, Batching(capacity=10**6, sequences=256))
    assert process_time() - start_s < 10


@pytest.mark.parametrize("play", ["continuous", "phases"])
def test_a_request_that_no_memory_holds_is_refused(play: str) -> None:
    load = ServingLoad(prompts=(10, 500), outputs=(5, 5), arrivals_s=(0.0, 0.0))
    limits = PhaseLimits(reading_blocks=40, decoding_blocks=25, host_blocks=40)
    plays = {
        "continuous": lambda: play_continuous(load, CLOCK, Batching(capacity=400)),
        "phases": lambda: play_phases(load, (CLOCK, CLOCK), limits, PhaseTimes()),
    }
    with pytest.raises(InputError, match=r"prompts\[1\].*500.*give"):
        plays[play]()


def test_loads_are_refused_by_field_and_remedy() -> None:
    with pytest.raises(InputError, match=r"trace: output_tokens.*row 2.*give a number"):
        LoadFile(
            rows=[
                {"arrival_s": 0, "prompt_tokens": 3, "output_tokens": 4},
                {"arrival_s": 1, "prompt_tokens": 3},
            ],
            name="trace",
        ).trace()
    load = ServingLoad(prompts=(4000,), outputs=(200,), arrivals_s=(0.0,))
    with pytest.raises(InputError, match=r"context of 4096: give shorter requests"):
        load.check_context(4096)
    with pytest.raises(InputError, match=r"arrivals_s: decrease"):
        ServingLoad(prompts=(1, 1), outputs=(1, 1), arrivals_s=(2.0, 1.0))


def test_a_histogram_is_drawn_in_its_shares() -> None:
    rows = [
        {"prompt_tokens": "100", "output_tokens": "10", "requests": "3"},
        {"prompt_tokens": "2000", "output_tokens": "400", "requests": "1"},
        {"prompt_tokens": "7", "output_tokens": "7", "requests": "0"},
    ]
    load = LoadFile(rows=rows, name="h.csv").histogram(4000, np.random.default_rng(0), 2.0)
    pairs = Counter(zip(load.prompts, load.outputs, strict=True))
    assert set(pairs) == {(100, 10), (2000, 400)}
    assert pairs[100, 10] / 4000 == pytest.approx(0.75, abs=0.02)
    assert load.arrivals_s[-1] == pytest.approx(2000, rel=0.05)


def test_requests_end_at_the_context() -> None:
    load = ServingLoad(prompts=(90, 99, 200, 10), outputs=(5, 20, 5, 500), arrivals_s=(0.0,) * 4)
    within = load.within(100)
    assert (within.prompts, within.outputs) == ((90, 99, 99, 10), (5, 1, 1, 90))


# An embedding, four blocks and a head, each with a tensor that ranks split and one that all have.
SIZES = [TensorSizes(layers=(layer,), split=64, whole=3) for layer in range(6)]


def test_weights_that_a_rank_has_already_stay() -> None:
    pipeline, tensors = Layout(pp=4), Layout(tp=4)
    # A fourth of each of six layers, and the whole tensors, but for the layers that it had before.
    assert moved_bytes(pipeline, tensors, SIZES) == [4 * 19, 5 * 19, 5 * 19, 4 * 19]
    # Three fourths of each layer that a rank's stage has; what all have is there already.
    assert moved_bytes(tensors, pipeline, SIZES) == [96, 48, 48, 96]
    assert moved_bytes(tensors, tensors, SIZES) == [0] * 4


def test_a_tied_table_moves_once() -> None:
    sizes = [TensorSizes(layers=(0, 3), split=64, whole=0)]
    sizes += [TensorSizes(layers=(layer,), split=0, whole=0) for layer in (1, 2)]
    assert moved_bytes(Layout(tp=2), Layout(pp=2), sizes) == [32, 32]
    assert moved_bytes(Layout(pp=2), Layout(tp=2), sizes) == [0, 0]


@pytest.mark.parametrize("gpus", [4, 6, 8])
def test_pieces_are_what_ranks_lack(gpus: int) -> None:
    for before in layouts_of(gpus, 24, 8):
        for after in layouts_of(gpus, 24, 8):
            for rank in range(gpus):
                old = before.replica_of(rank)
                peers = [(one, before.part_of(one)) for one in before.ranks_of(old, 0)]
                kept = before.part_of(rank) if before.stage_of(rank) == 0 else None
                wanted = after.part_of(rank)
                pieces = pieces_to(rank, wanted, kept, peers)
                covered = sum(width(one.part) for one in pieces)
                covered += width(common(wanted, kept)) if kept else 0
                assert covered == width(wanted)
                for one in pieces:
                    assert width(common(one.part, dict(peers)[one.source])) == width(one.part)


def test_keys_and_values_move_to_ranks_that_lack_them() -> None:
    pipeline, tensors = Layout(pp=2), Layout(tp=2)
    assert moved_of_cache((pipeline, 0), (tensors, 0), 4, 8) == [0.25, 0.25]
    # One head for both: each has all of it, and had half of the blocks.
    assert moved_of_cache((pipeline, 0), (tensors, 0), 1, 8) == [0.5, 0.5]
    # From one replica to the other everything moves.
    assert moved_of_cache((Layout(dp=2), 0), (Layout(dp=2), 1), 4, 8) == [0, 1]
    assert moved_of_cache((Layout(dp=2), 1), (Layout(dp=2), 1), 4, 8) == [0, 0]
