"""Seesaw's evaluation: pairs of layouts, what a change costs, and the command."""

import json
from pathlib import Path

import pytest

from experiments.cli.command import main_of
from experiments.commands import COMMANDS
from experiments.serve.serving import PlayedCase, SeesawCase, population
from mistlab.serving.changing import LayoutPair
from mistlab.serving.gpu_facts import gpu_named
from mistlab.serving.resharding import CHANGE_S, Layout, change_s, layouts_of, moved_shares


def test_a_change_takes_the_faster_of_peers_and_host() -> None:
    gpu = gpu_named("L4")
    before, after = Layout(pp=4), Layout(tp=4)
    most = float(max(moved_shares(before, after)))
    by_peers_s = most * 68e9 / (gpu.intra_node_gbytes_per_s * 1e9)
    by_host_s = most * 68e9 / (gpu.host_link_gbytes_per_s * 1e9 / 2)
    assert change_s(before, after, 68e9, gpu) == CHANGE_S + min(by_peers_s, by_host_s)
    assert change_s(after, after, 68e9, gpu) == 0.0


def test_shares_of_all_ranks_of_a_replica_are_the_whole() -> None:
    for layout in layouts_of(8, 64, 80):
        whole = sum(
            (high - low) * (end - begin)
            for (low, high), (begin, end) in map(layout.share_of, range(layout.tp * layout.pp))
        )
        assert whole == 1


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


def test_more_changes_come_of_smaller_tiers(small: PlayedCase) -> None:
    pair = LayoutPair(reading=Layout(pp=4), decoding=Layout(tp=4))
    wide, narrow = small.played(pair), small.played(pair, host_tokens=12000)
    assert narrow.changes > wide.changes
    assert narrow.peak_host <= 12000


def test_a_pair_of_equal_layouts_changes_nothing(small: PlayedCase) -> None:
    run = small.played(LayoutPair(reading=Layout(tp=4), decoding=Layout(tp=4)))
    assert run.changing_s == 0


def test_the_closed_form_is_near_what_is_played(small: PlayedCase) -> None:
    for pair in small.pairs():
        assert small.estimated(pair) == pytest.approx(small.played(pair).requests_per_s, rel=0.15)


def test_the_command_tells_gains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["--quick", "--json", "--out", str(tmp_path / "run")]
    assert main_of("serving", COMMANDS["serving"])(line) == 0
    answer = json.loads(capsys.readouterr().out)
    assert 0.5 < answer["gain"]["mean"] < 2
    assert len(answer["rows"]) == answer["cases"]
