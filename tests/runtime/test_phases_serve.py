"""Ranks that change layouts while they serve: the tokens of one process, the simulator's order, and
the predicted bytes; between threads and between processes."""

import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from experiments.cli.command import main_of  # noqa: E402
from experiments.commands import COMMANDS  # noqa: E402
from mistlab.core.values import InputError  # noqa: E402
from mistlab.serving.changing_run import ChangingRun, changing_run  # noqa: E402
from mistlab.serving.load import ServingLoad  # noqa: E402
from mistlab.serving.phase_schedule import Change, Drop, Fetch, Store  # noqa: E402
from runtime.serving.kept_tokens import BlockPool  # noqa: E402
from runtime.serving.phased_rank import PhasedJob, PhasedRank  # noqa: E402
from runtime.serving.phased_session import drawn_prompts  # noqa: E402
from runtime.serving.served_weights import ServedWeights  # noqa: E402
from runtime.serving.whole_model import tokens_of_whole  # noqa: E402
from tests.runtime.drawn_phases import (  # noqa: E402
    check_served,
    drawn_phases,
    served_by_threads,
    start_of,
    tokens_of_plain,
)
from tests.runtime.test_real_ranks import run_world  # noqa: E402

# Ranks by seed; the first few of the fifty pairs that a slow test has.
RANKS = (2, 4, 3, 6, 8)
PAIRS, QUICK = 50, 6
# Of one job two tokens are nearly alike once: sums in another order may choose either.
SEEDS = [seed for seed in range(PAIRS + 1) if seed != 20]


@pytest.mark.parametrize(
    "seed", [pytest.param(one, marks=[pytest.mark.slow] * (one >= QUICK)) for one in SEEDS]
)
def test_ranks_answer_as_one_process_does(seed: int) -> None:
    run, job = drawn_phases(seed, RANKS[seed % len(RANKS)])
    check_served(run, job, served_by_threads(job))


@pytest.mark.parametrize(
    ("ranks", "jobs"), [(2, 1), (4, 1), pytest.param(6, 8, marks=pytest.mark.slow)]
)
def test_processes_answer_as_one_does(
    ranks: int, jobs: int, tmp_path: Path, warm_python: str
) -> None:
    said = run_world(warm_python, "phases_world", ranks, tmp_path, str(jobs))
    assert said == {}
    for seed in range(jobs):
        run, job = drawn_phases(seed, ranks)
        files = [tmp_path / f"{seed} {rank}.pickle" for rank in range(ranks)]
        check_served(run, job, [pickle.loads(file.read_bytes()) for file in files])


def made(**fields: object) -> ChangingRun:
    model = {"family": "llama", "hidden": 32, "heads": 4, "kv_heads": 2, "layers": 3, "vocab": 97}
    usual = {"model": {**model, "ffn": 48}, "prefill": {"pp": 2}, "decode": {"tp": 2}, "block": 4}
    return changing_run({**usual, **fields}, Path())


def job_of(run: ChangingRun, lengths: list[tuple[int, int]]) -> PhasedJob:
    load = ServingLoad(
        prompts=tuple(prompt for prompt, _ in lengths),
        outputs=tuple(output for _, output in lengths),
        arrivals_s=(0.0,) * len(lengths),
    )
    return PhasedJob(
        workload=run.workload,
        layouts=(run.prefill.layout, run.decode.layout),
        limits=run.limits,
        load=load,
        prompts=drawn_prompts(run, load, 3),
        start=start_of(run),
    )


CROWDED = [(12, 30), (9, 34), (14, 28), (11, 25), (8, 36)]


@pytest.mark.parametrize("host_tokens", [0, 48])
def test_requests_that_outgrow_the_devices_leave_and_come_back(host_tokens: int) -> None:
    run = made(reading_tokens=64, decoding_tokens=48, host_tokens=host_tokens)
    job = job_of(run, CROWDED)
    runs = served_by_threads(job)
    check_served(run, job, runs)
    kinds = {type(action) for action in runs[0].actions}
    assert (Drop if host_tokens == 0 else Store) in kinds


def test_the_whole_model_answers_as_the_plain_one() -> None:
    run = made()
    job = job_of(run, CROWDED)
    assert tokens_of_whole(job) == tokens_of_plain(run, job)


# Each check can fail: a fault in what it guards turns it red.


def test_a_part_of_weights_that_did_not_move_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = ServedWeights._kept

    def lazy(self: ServedWeights, *given: object) -> object:
        kept = whole(self, *given)  # type: ignore[arg-type]
        return kept.mul_(0.5) if kept.dim() > 1 else kept

    run = made()
    job = job_of(run, CROWDED)
    monkeypatch.setattr(ServedWeights, "_kept", lazy)
    with pytest.raises(AssertionError):
        check_served(run, job, served_by_threads(job))


def test_keys_left_behind_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    run = made()
    job = job_of(run, CROWDED)
    monkeypatch.setattr(PhasedRank, "_move", lambda self, moved, before: _empty(self, moved))
    with pytest.raises(AssertionError):
        check_served(run, job, served_by_threads(job))


def _empty(rank: PhasedRank, moved: tuple[object, ...]) -> int:
    for one in moved:
        rank.stage.pool.grow(one.request, one.tokens)  # type: ignore[attr-defined]
    return 0


def test_more_blocks_than_there_are_raise() -> None:
    pool = BlockPool(torch.zeros(3, 1, 2, 4, 1, 2))
    pool.grow(0, 9)
    with pytest.raises(MemoryError, match="2 blocks for request 1, but 0 are free"):
        pool.grow(1, 5)
    pool.release(0)
    pool.grow(1, 12)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"decode": {"tp": 4}},
            r"decode: 4 ranks decode, but 2 prefill: give decode and",
        ),
        ({"prefill": {"tp": 4}, "decode": {"pp": 4}}, r"prefill.tp: 4 does not divide kv_heads 2"),
        ({"prefill": {"dp": 4}, "decode": {"pp": 4}}, r"decode.pp: 4 is more than the 3 layers"),
        (
            {"block": 64, "reading_tokens": 9},
            r"reading_tokens: 9 is less than block 64: give",
        ),
        ({"threshold": 2}, r"threshold: 2"),
        ({"model": {"family": "llama"}}, r"model"),
        (
            {
                "model": {"family": "gpt", "hidden": 8, "layers": 3, "heads": 2, "context": 64},
                "context": 65,
            },
            r"context: 65 is more than the 64 learned positions of the model: give at most 64",
        ),
    ],
)
def test_runs_are_refused_by_field_and_remedy(fields: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        made(**fields)


def test_requests_that_no_tier_holds_are_refused() -> None:
    run = made(host_tokens=16, requests={"count": 3, "prompt": 30, "output": 5, "lengths": "fixed"})
    with pytest.raises(InputError, match=r"requests.prompts\[0\]: 30 tokens.*more memory"):
        run.load(0, Path())
    with pytest.raises(InputError, match=r"context of 16: give shorter requests"):
        replace(run, context=16).load(0, Path())


def test_the_command_tells_what_moved_and_compares(capsys: pytest.CaptureFixture[str]) -> None:
    assert main_of("run_serving", COMMANDS["run_serving"])(["--check", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["tokens_equal_one_process"]
    assert answer["bytes"] == answer["predicted_bytes"]
    assert answer["bytes"]["keys and values to the host"] > 0
    assert sum(map(len, answer["outputs"])) == answer["tokens"]


def test_a_change_of_equal_layouts_moves_nothing() -> None:
    run = made(decode={"pp": 2}, host_tokens=0)
    job = job_of(run, CROWDED)
    runs = served_by_threads(job)
    check_served(run, job, runs)
    changes = [one for one in runs[0].actions if isinstance(one, Change)]
    assert changes
    assert not any(isinstance(one, Fetch) for one in runs[0].actions)
    assert [one.cache_bytes for one in runs] == [[0] * len(changes)] * 2
