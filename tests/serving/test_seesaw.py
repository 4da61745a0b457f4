"""Seesaw's evaluation: pairs of layouts, what a change costs, and the command."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.cli.command import main_of
from experiments.commands import COMMANDS
from experiments.serve.serving import PlayedCase, SeesawCase, population
from mistlab import catalog
from mistlab.serving.changing import LayoutPair
from mistlab.serving.gpu_facts import gpu_named
from mistlab.serving.model_tensors import tensor_sizes
from mistlab.serving.resharding import (
    CHANGE_S,
    Layout,
    change_s,
    layouts_of,
    moved_bytes,
    width,
)
from mistlab.serving.step_cost import parameters_of


def test_a_change_takes_the_faster_of_peers_and_host() -> None:
    gpu, sizes = gpu_named("L4"), tensor_sizes(catalog.model("codellama-34b"), 2)
    before, after = Layout(pp=4), Layout(tp=4)
    most = max(moved_bytes(before, after, sizes))
    by_peers_s = most / (gpu.intra_node_gbytes_per_s * 1e9)
    by_host_s = most / (gpu.host_link_gbytes_per_s * 1e9 / 2)
    assert change_s(before, after, sizes, gpu) == CHANGE_S + min(by_peers_s, by_host_s)
    assert change_s(after, after, sizes, gpu) == 0.0


@pytest.mark.parametrize("name", ["llama-13b", "gpt3-1.3b", "llama3.2-1b"])
def test_tensors_are_all_parameters(name: str) -> None:
    model = catalog.model(name)
    sizes = tensor_sizes(model, 1)
    total = sum(one.split + one.whole for one in sizes)
    learned = 2048 * model.hidden if model.position_embedding == "absolute" else 0
    # Steps leave norms and biases out.
    assert total == pytest.approx(parameters_of(model) + learned, rel=0.001)


def test_all_ranks_of_a_replica_have_all_layers() -> None:
    for layout in layouts_of(8, 64, 80):
        layers = [layout.layers_of(rank, 80) for rank in range(0, layout.tp * layout.pp, layout.tp)]
        assert [layer for each in layers for layer in each] == list(range(82))
        assert sum(width(layout.part_of(rank)) for rank in layout.ranks_of(0, 0)) == 1


def test_the_population_is_the_published_kind() -> None:
    cases = list(population().cases())
    assert len(cases) == 36
    assert {case.gpu for case in cases} == {"A10", "L4", "A100"}


@pytest.fixture(scope="module")
def small() -> PlayedCase:
    case = SeesawCase(
        model="codellama-34b",
        gpu="L4",
        count=4,
        load="small",
        prompt=1000,
        output=150,
        population=population().__class__(
            **{
                **{name: getattr(population(), name) for name in population().__slots__},
                "requests": 120,
            }
        ),
    )
    return PlayedCase(case, 0)


def test_changing_pays_over_pcie(small: PlayedCase) -> None:
    pair = LayoutPair(reading=Layout(pp=4), decoding=Layout(tp=4))
    changes = small.played(pair)
    stays = max(small.static(mixes=True).values())
    assert changes.changes >= 1
    assert 1.0 < changes.requests_per_s / stays < 2.0


def test_more_changes_come_without_the_host(small: PlayedCase) -> None:
    pair = LayoutPair(reading=Layout(pp=4), decoding=Layout(tp=4))
    wide, narrow = small.played(pair), small.played(pair, has_host=False)
    assert narrow.changes > wide.changes
    assert narrow.peak_host == 0 < wide.peak_host


def test_a_pair_of_equal_layouts_changes_nothing(small: PlayedCase) -> None:
    run = small.played(LayoutPair(reading=Layout(tp=4), decoding=Layout(tp=4)))
    assert run.changing_s == run.changes == 0


def test_pairs_that_are_left_out_are_slower(small: PlayedCase) -> None:
    pairs = small.pairs()
    played = {pair: small.played(pair) for pair in pairs}
    assert all(small.least_s(pair) < played[pair].seconds for pair in pairs)
    best, rates = small.best_of(pairs)
    assert best == max(pairs, key=lambda pair: played[pair].requests_per_s)
    assert len(rates) < len(pairs)


def test_the_closed_form_is_near_what_is_played(small: PlayedCase) -> None:
    for pair in small.pairs():
        assert small.estimated(pair) == pytest.approx(small.played(pair).requests_per_s, rel=0.15)


def test_requests_of_a_case_end_at_the_context_of_the_weights() -> None:
    case = next(case for case in population().cases() if case.load == "long prompts")
    drawn = PlayedCase(case, 0).load
    ended = PlayedCase(replace(case, population=replace(population(), within_context=True)), 0).load
    totals = [
        max(map(sum, zip(load.prompts, load.outputs, strict=True))) for load in (drawn, ended)
    ]
    assert totals[0] > 4096 == totals[1]


def test_the_command_tells_gains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["--quick", "--json", "--out", str(tmp_path / "run")]
    assert main_of("serving", COMMANDS["serving"])(line) == 0
    answer = json.loads(capsys.readouterr().out)
    assert 0.5 < answer["gain"]["mean"] < 2
    assert len(answer["rows"]) == answer["cases"]
