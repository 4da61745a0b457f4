"""Played serving: nothing is lost or served twice, memory never overflows, tokens keep their order,
and steady loads take what the closed form says."""

from collections.abc import Sequence
from dataclasses import replace
from time import process_time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mistlab import catalog
from mistlab.core.values import InputError
from mistlab.serving.load import Lengths, ServingLoad, drawn_load, load_of_trace
from mistlab.serving.resharding import Layout, layouts_of, moved_bytes, moved_shares
from mistlab.serving.step_cost import RankLayout
from simulators.serving.changing_layouts import Phases, play_phases
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
    gpu_tokens=st.integers(420, 3000),
    host_tokens=st.integers(420, 5000),
    threshold=st.floats(0, 0.9),
    change_s=st.floats(0, 2),
    copy_s=st.floats(0, 1e-3),
    sequences=st.integers(1, 32),
)
def test_changing_layouts_serve_each_token_once(
    drawn: list[tuple[int, int, float]],
    gpu_tokens: int,
    host_tokens: int,
    threshold: float,
    change_s: float,
    copy_s: float,
    sequences: int,
) -> None:
    load = load_of(drawn)
    phases = Phases(
        gpu_tokens=gpu_tokens,
        host_tokens=host_tokens,
        threshold=threshold,
        to_decode_s=change_s,
        to_prompts_s=change_s,
        copy_s=copy_s,
        budget=512,
        sequences=sequences,
    )
    played = play_phases(load, (PIPELINE, CLOCK), phases, keeps_tokens=True)
    check_served(load, played.requests)
    assert played.peak_gpu <= gpu_tokens
    assert played.peak_host <= host_tokens


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
    read_s = CLOCK.step_s(0, 0.0, 1000, 500.0)
    decoded_s = sum(CLOCK.decode_s(1, 1000 + step) for step in range(1, 50))
    assert done.first_s == pytest.approx(1.0 + read_s)
    assert done.end_s == pytest.approx(1.0 + read_s + decoded_s, rel=1e-3)


def test_steady_loads_take_what_the_closed_form_says() -> None:
    draw = np.random.default_rng(5)
    cases = [random_case(draw) for _ in range(25)]
    near = [abs(case.rate_ratio - 1) < 0.05 for case in cases]
    assert np.mean(near) >= 0.9


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
    phases = Phases(
        gpu_tokens=400,
        host_tokens=400,
        threshold=0,
        to_decode_s=0,
        to_prompts_s=0,
        copy_s=0,
    )
    plays = {
        "continuous": lambda: play_continuous(load, CLOCK, Batching(capacity=400)),
        "phases": lambda: play_phases(load, (CLOCK, CLOCK), phases),
    }
    with pytest.raises(InputError, match=r"prompts\[1\].*500.*give"):
        plays[play]()


def test_loads_are_refused_by_field_and_remedy() -> None:
    with pytest.raises(InputError, match=r"trace: output_tokens.*row 2.*give a number"):
        load_of_trace(
            [
                {"arrival_s": 0, "prompt_tokens": 3, "output_tokens": 4},
                {"arrival_s": 1, "prompt_tokens": 3},
            ],
            "trace",
        )
    load = ServingLoad(prompts=(4000,), outputs=(200,), arrivals_s=(0.0,))
    with pytest.raises(InputError, match=r"context of 4096: give shorter requests"):
        load.check_context(4096)
    with pytest.raises(InputError, match=r"arrivals_s: fall"):
        ServingLoad(prompts=(1, 1), outputs=(1, 1), arrivals_s=(2.0, 1.0))


def test_weights_that_a_rank_has_already_stay() -> None:
    pipeline, tensors = Layout(pp=4), Layout(tp=4)
    # Of its fourth of each tensor a rank has the fourth of the layers that it had before.
    assert [float(share) for share in moved_shares(pipeline, tensors)] == [3 / 16] * 4
    assert moved_bytes(pipeline, tensors, 16.0) == 12.0
    assert moved_bytes(tensors, tensors, 16.0) == 0


@pytest.mark.parametrize("gpus", [4, 8])
def test_a_change_and_its_way_back_leave_every_rank_whole(gpus: int) -> None:
    for before in layouts_of(gpus, 64, 80):
        for after in layouts_of(gpus, 64, 80):
            for shares, layout in ((moved_shares(before, after), after),):
                assert len(shares) == gpus
                assert all(0 <= share <= 1 / (layout.tp * layout.pp) for share in shares)
