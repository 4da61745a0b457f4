"""Reductions that send less: costs equal what is played, compressors keep their bounds, averages
are those of a reference written apart."""

import itertools
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.cli.command import main_of
from experiments.cli.commandline import run
from experiments.commands import COMMANDS
from experiments.reductions.image_training import (
    WORKERS,
    Digits,
    ImageWorkers,
    accuracy,
    first_weights,
    gradient,
)
from experiments.reductions.published_reductions import published_rows
from mistlab.core.arrays import Floats
from mistlab.core.values import FieldError
from mistlab.reduction.calculators import OuterClock
from mistlab.reduction.compression import Compressor, matrix_shape
from mistlab.reduction.compressors import KINDS, compressed, quantised
from mistlab.reduction.convergence import Noise
from mistlab.reduction.feedbacks import FEEDBACKS, averaging
from mistlab.reduction.graphs import contraction, mixing_matrix
from mistlab.reduction.neighbours import TOPOLOGIES, degree_of, offsets_of
from mistlab.reduction.outer_steps import OuterRun, OuterSteps
from mistlab.reduction.reduction_costs import RankLink, Reduction, fitted_rate
from simulators.messages import played_exchange_s

LINK = RankLink(latency_s=1e-4, bytes_per_s=1e9)
TOP_K = Compressor(kind="top_k", share=0.05)
SHAPES = [
    Reduction(),
    Reduction(kind="server"),
    Reduction(kind="server", shards=4),
    Reduction(kind="server", asynchronous=True),
    Reduction(trimmed=1, liars=(0,)),
    *(Reduction(kind="gossip", topology=topology) for topology in TOPOLOGIES),
    Reduction(kind="local", every=4),
    Reduction(kind="outer", every=8, outer_bits=4),
    Reduction(compressor=TOP_K, feedback="memory"),
    Reduction(compressor=Compressor(kind="power", rank=2)),
]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 32])
@pytest.mark.parametrize("how", SHAPES, ids=lambda how: f"{how.kind}-{how.topology}")
def test_the_closed_form_is_what_messages_take(how: Reduction, ranks: int) -> None:
    played = played_exchange_s(how, 100_000, ranks, LINK)
    assert how.exchange_s(100_000, ranks, LINK) == pytest.approx(played, rel=1e-9)


def test_costs_grow_as_their_kind() -> None:
    def seconds(how: Reduction, ranks: int, link: RankLink = LINK) -> float:
        return how.exchange_s(1_000_000, ranks, link)

    server, ring, gossip = Reduction(kind="server"), Reduction(), Reduction(kind="gossip")
    assert seconds(server, 4096) == pytest.approx(1024 * seconds(server, 4))
    assert seconds(gossip, 4096) == seconds(gossip, 4)
    slow = RankLink(latency_s=1.0, bytes_per_s=1e15)
    assert seconds(ring, 4097, slow) == pytest.approx(1024 * seconds(ring, 5, slow), rel=1e-3)
    assert degree_of("exponential", 1024) == 10
    assert [degree_of(name, 64) for name in ("ring", "grid", "one_peer", "complete")] == [
        2,
        4,
        1,
        63,
    ]


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("ranks", [1, 2, 6, 16])
def test_mixing_keeps_the_mean_and_brings_ranks_together(topology: str, ranks: int) -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((ranks, 3))
    mean = values.mean(axis=0)
    for step in range(400):
        matrix = mixing_matrix(topology, ranks, step)
        assert matrix.sum(axis=0) == pytest.approx(np.ones(ranks))
        values = matrix @ values
    assert values == pytest.approx(np.tile(mean, (ranks, 1)), abs=1e-6)
    assert 0 <= contraction(topology, ranks) < 1


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("ranks", [2, 5, 6, 16, 30])
def test_a_contraction_is_the_second_singular_value_of_the_matrix(
    topology: str, ranks: int
) -> None:
    name = "exponential" if topology == "one_peer" else topology
    second = np.linalg.svd(mixing_matrix(name, ranks), compute_uv=False)[1]
    assert contraction(topology, ranks) == pytest.approx(second, abs=1e-12)


def test_a_contraction_of_any_number_of_ranks_takes_no_matrix() -> None:
    ranks = 2**20
    assert contraction("ring", ranks) == pytest.approx((1 + 2 * math.cos(2 * math.pi / ranks)) / 3)
    assert contraction("exponential", ranks) == pytest.approx(1 - 2 / 21, rel=0.01)


def test_the_complete_graph_averages_at_once_and_one_peer_in_a_round() -> None:
    assert contraction("complete", 16) == 0
    whole = np.eye(16)
    for step in range(4):
        whole = mixing_matrix("one_peer", 16, step) @ whole
    assert whole == pytest.approx(np.full((16, 16), 1 / 16))


VECTORS = st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=40).map(
    lambda numbers: np.array(numbers, dtype=float)
)


def test_six_tenths_are_quantised_to_its_neighbours_by_chance() -> None:
    draws = quantised(np.full(200_000, 0.6), 5, 1.0, np.random.default_rng(0))
    assert set(np.unique(draws)) == {0.5, 0.75}
    assert (draws == 0.5).mean() == pytest.approx(0.6, abs=0.005)


@settings(max_examples=60, deadline=None)
@given(vector=VECTORS, levels=st.integers(2, 17))
def test_quantisation_is_unbiased_within_omega(vector: np.ndarray, levels: int) -> None:
    how, rng = Compressor(kind="qsgd", levels=levels), np.random.default_rng(1)
    draws = np.stack([compressed(how, vector, rng) for _ in range(600)])
    norm = float(vector @ vector)
    spread = (how.omega(vector.size) * norm / 600) ** 0.5
    assert np.linalg.norm(draws.mean(axis=0) - vector) <= 6 * spread + 1e-9
    errors = ((draws - vector) ** 2).sum(axis=1)
    slack = 6 * errors.std() / 600**0.5
    assert errors.mean() <= how.omega(vector.size) * norm + slack + 1e-9


@settings(max_examples=80, deadline=None)
@given(vector=VECTORS, kind=st.sampled_from(["top_k", "sign"]), share=st.floats(0.01, 1))
def test_contractive_compressors_keep_delta(vector: np.ndarray, kind: str, share: float) -> None:
    how = Compressor(kind=kind, share=share)
    left = vector - compressed(how, vector, np.random.default_rng(0))
    most = (1 - how.delta(vector.size)) * float(vector @ vector)
    assert float(left @ left) <= most * (1 + 1e-9) + 1e-12


def test_power_keeps_delta_in_the_mean() -> None:
    rng = np.random.default_rng(3)
    how = Compressor(kind="power", rank=2)
    vector = rng.standard_normal(100)
    kept = [
        1 - ((vector - compressed(how, vector, rng)) ** 2).sum() / (vector @ vector)
        for _ in range(50)
    ]
    assert np.mean(kept) >= how.delta(100)
    low_rank = np.outer(np.arange(10.0), np.arange(10.0)).ravel()
    assert compressed(how, low_rank, rng) == pytest.approx(low_rank)


def test_top_k_of_all_is_the_vector_and_of_some_the_largest() -> None:
    vector = np.array([1.0, -5.0, 3.0, 0.5])
    rng = np.random.default_rng(0)
    assert compressed(Compressor(kind="top_k", share=1.0), vector, rng) == pytest.approx(vector)
    half = Compressor(kind="top_k", share=0.5)
    assert compressed(half, vector, rng).tolist() == [0, -5, 3, 0]
    assert half.delta(4) == 0.5
    assert half.sent_bytes(4) == 2 * 8


@pytest.mark.parametrize("kind", KINDS)
def test_messages_are_smaller_than_what_they_say(kind: str) -> None:
    size = 10_000
    told = Compressor(kind=kind).sent_bytes(size)
    assert told == 4 * size if kind == "none" else told < 4 * size / 4


@pytest.mark.parametrize("feedback", FEEDBACKS)
def test_without_compression_every_feedback_is_the_mean(feedback: str) -> None:
    rng = np.random.default_rng(0)
    mean = averaging(feedback, Compressor())
    for _ in range(3):
        gradients = rng.standard_normal((4, 10))
        assert mean.average(gradients, rng) == pytest.approx(gradients.mean(axis=0))


def top(vector: list[float], kept: int) -> list[float]:
    order = sorted(range(len(vector)), key=lambda place: -abs(vector[place]))[:kept]
    return [value if place in order else 0.0 for place, value in enumerate(vector)]


def reference(feedback: str, steps: list[list[list[float]]], kept: int) -> list[list[float]]:
    """The same averages, in plain lists."""
    ranks, size = len(steps[0]), len(steps[0][0])
    memory = [[0.0] * size for _ in range(ranks)]
    server, answers = [0.0] * size, []
    rounds = 2 if feedback == "neolithic" else 1
    for gradients in steps:
        received = []
        for rank, own in enumerate(gradients):
            sign = -1 if feedback == "ef21" else 1
            wanted = [g + sign * m for g, m in zip(own, memory[rank], strict=True)]
            sent = [0.0] * size
            for _ in range(rounds):
                left = [w - s for w, s in zip(wanted, sent, strict=True)]
                sent = [s + t for s, t in zip(sent, top(left, kept), strict=True)]
            if feedback == "ef21":
                memory[rank] = [m + s for m, s in zip(memory[rank], sent, strict=True)]
                sent = memory[rank]
            else:
                memory[rank] = [w - s for w, s in zip(wanted, sent, strict=True)]
            received.append(sent)
        mean = [sum(column) / ranks for column in zip(*received, strict=True)]
        if feedback in ("double", "neolithic"):
            wanted = [m + s for m, s in zip(mean, server, strict=True)]
            mean = [0.0] * size
            for _ in range(rounds):
                left = [w - m for w, m in zip(wanted, mean, strict=True)]
                mean = [m + t for m, t in zip(mean, top(left, kept), strict=True)]
            server = [w - m for w, m in zip(wanted, mean, strict=True)]
        answers.append(mean)
    return answers


@pytest.mark.parametrize("feedback", ["memory", "double", "ef21", "neolithic"])
def test_a_feedback_is_its_reference(feedback: str) -> None:
    rng = np.random.default_rng(5)
    steps = rng.standard_normal((6, 3, 8))
    expected = reference(feedback, steps.tolist(), kept=2)
    mean = averaging(feedback, Compressor(kind="top_k", share=0.25))
    for gradients, answer in zip(steps, expected, strict=True):
        assert mean.average(gradients, rng) == pytest.approx(np.array(answer), abs=1e-12)


def test_what_is_remembered_is_sent_in_the_end() -> None:
    rng = np.random.default_rng(0)
    mean = averaging("memory", Compressor(kind="top_k", share=0.25))
    total = np.zeros(8)
    constant = rng.standard_normal((2, 8))
    for _ in range(400):
        total += mean.average(constant, rng)
    assert total / 400 == pytest.approx(constant.mean(axis=0), abs=0.05)
    lost = averaging("none", Compressor(kind="top_k", share=0.25)).average(constant, rng)
    assert np.abs(lost - constant.mean(axis=0)).max() > 0.1


def streamed(delay: int, mixed: float, steps: int = 12) -> list[tuple[list[float], list[float]]]:
    """Histories of two scalar fragments, all ones, whose gradient is always 2: inner rate 1, outer
    rate 2, six steps."""
    how = OuterSteps(every=6, fragments=2, delay=delay, mixed=mixed, rate=2)
    states, run_ = [], OuterRun(how, np.ones((2, 2)))
    for _ in range(steps):
        run_.advance(lambda weights, _: np.full_like(weights, -2.0))
        states.append((run_.weights[0].tolist(), run_.shared.tolist()))
    return states


def test_streaming_outer_steps_have_the_published_history() -> None:
    states = streamed(0, 0.0)
    assert states[2][0] == [-11, -5]
    assert states[5][0] == [-17, -23]
    shared = {step: states[step - 1][1] for step in (3, 6, 9, 12)}
    assert shared == {3: [-11, 1], 6: [-11, -23], 9: [-35, -23], 12: [-35, -47]}


@pytest.mark.parametrize(("delay", "mixed"), [*itertools.product((0, 1), (0.0, 0.5, 1.0))])
def test_outer_steps_are_those_of_plain_arithmetic(delay: int, mixed: float) -> None:
    own, shared, change = [1.0, 1.0], [1.0, 1.0], [0.0, 0.0]
    for step, (weights, global_) in enumerate(streamed(delay, mixed), start=1):
        own = [value - 2 for value in own]
        for fragment, due in enumerate((3, 6)):
            if (step + delay) % 6 == due % 6:
                change[fragment] = shared[fragment] - own[fragment]
            if step % 6 == due % 6:
                shared[fragment] -= 2 * change[fragment]
                own[fragment] = mixed * own[fragment] + (1 - mixed) * shared[fragment]
        assert (weights, global_) == (own, shared)


def test_a_rank_that_was_away_goes_on_from_the_shared_weights() -> None:
    run_ = OuterRun(OuterSteps(every=2, momentum=0.9), np.ones((3, 1, 4)))
    others = OuterRun(OuterSteps(every=2, momentum=0.9), np.ones((2, 1, 4)))

    def step(weights: Floats, number: int) -> Floats:
        return np.full_like(weights, -0.1 * number) * (1 + np.arange(len(weights)))[:, None, None]

    run_.leave(2)
    for _ in range(4):
        run_.advance(step)
        others.advance(step)
    assert run_.shared == pytest.approx(others.shared)
    assert run_.weights[:2] == pytest.approx(others.weights)
    assert run_.weights[2] == pytest.approx(1.0)
    run_.rejoin(2)
    assert run_.weights[2] == pytest.approx(run_.shared)
    others.leave(0)
    with pytest.raises(FieldError, match="1 is the only active rank"):
        others.leave(1)


def test_the_calculators_formulas_to_three_digits() -> None:
    clock = OuterClock(
        parameters=8e9, bits=16, compression=16, nodes=8, bits_per_s=1e9, latency_s=0.1, every=500,
        step_s=2.0,
    )  # fmt: skip
    # 8e9 x 16 / 16 = 8e9 bits; (2 x 8 s + 0.1 s) x (1 + 0.05 x 3) = 18.515 s.
    assert clock.exchange_s == pytest.approx(18.515, rel=1e-3)
    assert clock.cycle_s(overlapped=False) == pytest.approx(1018.515, rel=1e-3)
    assert clock.cycle_s(overlapped=True) == pytest.approx(1000.0)
    assert clock.utilisation(overlapped=False) == pytest.approx(0.98182, rel=1e-3)
    # alpha = 0.08 / (1 + 0.90309 / 5) = 0.067760; 1 - alpha x 2.69897 = 0.81712.
    assert clock.worth == pytest.approx(0.8171, rel=1e-3)


def test_published_figures_are_within_what_was_asked() -> None:
    rows = {row["figure"]: row["error"] for row in published_rows()}
    assert len(rows) == 6
    for figure, error in rows.items():
        most = 0.08 if "ImageNet" in figure else 0.10 if "ResNet" in figure else 0.15
        assert abs(error) < most, figure


def test_one_rate_gives_the_published_all_reduce() -> None:
    rate = fitted_rate(0.278, 25_500_000, 256)
    link = RankLink(latency_s=0, bytes_per_s=rate)
    assert Reduction().exchange_s(25_500_000, 256, link) == pytest.approx(0.278)


def test_more_disagreement_takes_more_steps() -> None:
    noise = Noise(noise=1.0, unlike=1.0)
    steps = [
        noise.steps_to(0.01, how, 64, 1000)
        for how in (
            Reduction(),
            Reduction(kind="gossip", topology="exponential"),
            Reduction(kind="gossip", topology="grid"),
            Reduction(kind="gossip", topology="ring"),
        )
    ]
    assert steps == sorted(steps)
    # Averaging in every step: 1 / sqrt(64 T) + 1 / T is the goal.
    assert 1 / math.sqrt(64 * steps[0]) + 1 / steps[0] == pytest.approx(0.01)
    assert noise.steps_to(0.01, Reduction(kind="local"), 64, 1000) == steps[0]
    assert noise.steps_to(0.01, Reduction(kind="local", every=9), 64, 1000) > steps[0]


@pytest.mark.parametrize(
    ("make", "field", "told"),
    [
        (lambda: Reduction(kind="gosip"), "kind", "gossip"),
        (lambda: Reduction(topology="rign"), "topology", "ring"),
        (lambda: Reduction(feedback="memry"), "feedback", "memory"),
        (lambda: Reduction(every=0), "every", "at least 1"),
        (lambda: Reduction(every=4), "every", "local"),
        (lambda: Compressor(kind="topk"), "kind", "top_k"),
        (lambda: Compressor(share=0), "share", "above 0"),
        (lambda: OuterSteps(every=7, fragments=2), "every", "multiple"),
        (lambda: OuterSteps(every=6, fragments=2, delay=3), "delay", "at most 2"),
        (lambda: OuterRun(OuterSteps(every=2, fragments=2), np.ones((2, 3))), "weights", "ranks x"),
        (lambda: offsets_of("ring", 0), "ranks", "at least 1"),
    ],
)
def test_bad_input_is_told(make: object, field: str, told: str) -> None:
    with pytest.raises(FieldError, match=told) as caught:
        make()  # type: ignore[operator]
    assert str(caught.value).startswith(field)


def test_what_zero_goes_with_is_told() -> None:
    assert Reduction().sharding_problem(3) == ""
    assert "ZeRO-0 at most" in Reduction(kind="gossip").sharding_problem(3)
    assert "ZeRO-1 at most" in Reduction(compressor=TOP_K).sharding_problem(2)
    assert Reduction(kind="outer").sharding_problem(3) == ""


def test_buffers_are_counted() -> None:
    assert Reduction().buffer_bytes(1000, 8) == 0
    assert Reduction(compressor=TOP_K, feedback="memory").buffer_bytes(1000, 8) == 4000
    assert Reduction(kind="gossip").buffer_bytes(1000, 8) == 4000
    assert Reduction(kind="outer", every=8).buffer_bytes(1000, 8) == 8000


def test_a_gradient_is_the_slope() -> None:
    rng = np.random.default_rng(0)
    images, labels = rng.random((5, 64)), np.array([0, 3, 9, 1, 1])
    weights = first_weights(0)

    def loss(at: np.ndarray) -> float:
        from experiments.reductions import image_training  # noqa: PLC0415

        _, logits = image_training._forward(at, images)
        logits = logits - logits.max(axis=1, keepdims=True)
        shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        return float(-np.log(shares[np.arange(5), labels]).mean())

    slope = gradient(weights, images, labels)
    for place in rng.integers(len(weights), size=12):
        step = np.zeros_like(weights)
        step[place] = 1e-5
        measured = (loss(weights + step) - loss(weights - step)) / 2e-5
        assert slope[place] == pytest.approx(measured, abs=1e-7)


def test_plain_workers_are_one_process_with_their_batches_together() -> None:
    digits = Digits.loaded()
    images, labels = digits.training
    workers = ImageWorkers(way="plain", rate=0.1, seed=3)
    alone = first_weights(3)
    rng = np.random.default_rng([3, 1])
    for _ in range(5):
        workers.advance(images, labels)
        batch = rng.integers(len(labels), size=(WORKERS, 16)).ravel()
        alone = alone - 0.1 * gradient(alone, images[batch], labels[batch])
    assert workers.weights == pytest.approx(np.tile(alone, (WORKERS, 1)), abs=1e-12)


@pytest.mark.parametrize(
    "way", ["plain", "memory", "double", "neolithic", "ef21", "gossip", "local"]
)
def test_every_way_learns_digits(way: str) -> None:
    digits = Digits.loaded()
    workers = ImageWorkers(way=way, rate=0.4, seed=0)
    for _ in range(60):
        workers.advance(*digits.training)
    assert accuracy(workers.weights.mean(axis=0), *digits.test) > 0.8


def test_the_command_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main = main_of("communication", COMMANDS["communication"])
    line = ["--quick", "--costs-alone", "--json", "--out", str(tmp_path)]
    assert run(main, line) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["largest_difference_played"] < 1e-9
    assert {row["part"] for row in answer["rows"]} == {"cost", "growth", "published"}
    assert (tmp_path / "communication.svg").exists()
    assert "two trimmed" in {row.get("reduction", "").rpartition(", ")[2] for row in answer["rows"]}
    assert run(main, [*line, "--ranks", "4"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert "ring, two trimmed" not in {row.get("reduction") for row in answer["rows"]}
    page = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "No row of ring, two trimmed: trimmed 2 leaves out all of 4 values" in page


@pytest.mark.parametrize(
    ("option", "given"),
    [
        ("--gbytes-per-s", "0"),
        ("--gbytes-per-s", "nan"),
        ("--latency-us", "-1"),
        ("--compute-ms", "-1"),
        ("--compute-ms", "inf"),
        ("--goal", "0"),
        ("--ranks", "1"),
        ("--ranks", "100000000"),
        ("--values", "0"),
        ("--noise", "-1"),
        ("--unlike", "nan"),
    ],
)
def test_numbers_that_have_no_answer_are_refused_by_their_options(
    option: str, given: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main = main_of("communication", COMMANDS["communication"])
    assert run(main, ["--costs-alone", f"{option}={given}", "--out", str(tmp_path)]) == 2
    assert re.search(rf"error: {option}: {given}.* give ", capsys.readouterr().err)


def test_a_matrix_holds_all_values() -> None:
    for size in (1, 2, 10, 99, 1000):
        rows, columns = matrix_shape(size)
        assert size <= rows * columns < size + columns
