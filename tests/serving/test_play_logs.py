"""Logs of requests, played with their arrivals."""

import json
from pathlib import Path

import pytest

from experiments.cli.command import main_of
from experiments.commands import COMMANDS
from mistlab.core.values import InputError

RUNS = (
    "run,model,hardware,tp,dp,ep,engine,engine_version,dtype,max_num_seqs,max_num_batched_tokens,"
    "kv_tokens\na,meta-llama/Llama-3.1-8B,RTX4090,1,1,1,vllm,0.19.0,bfloat16,{},2048,41408\n"
)
LOGS = "run,arrival_s,prompt_tokens,output_tokens,e2e_s\n"


def answer(
    folder: Path, capsys: pytest.CaptureFixture[str], requests: str, sequences: int = 256
) -> dict[str, float]:
    runs, logs = folder / "runs.csv", folder / "logs.csv"
    runs.write_text(RUNS.format(sequences), encoding="utf-8")
    logs.write_text(LOGS + requests, encoding="utf-8")
    main_of("play_logs", COMMANDS["play_logs"])([str(logs), str(runs), "--json"])
    found: dict[str, float] = json.loads(capsys.readouterr().out)
    return found


def test_measured_latencies_stand_beside_played_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = answer(tmp_path, capsys, "a,0,800,100,3.0\na,1,500,100,4.0\n")
    assert found["measured_latency_mean_s"] == 3.5
    assert found["measured_requests_per_s"] == 2 / 5.0
    assert 1.0 < found["latency_mean_s"] < 6.0


def test_fewer_sequences_at_once_wait_longer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    requests = "".join(f"a,0.{number},400,200,\n" for number in range(10, 40))
    many = answer(tmp_path, capsys, requests)
    few = answer(tmp_path, capsys, requests, sequences=4)
    assert few["latency_mean_s"] > 1.5 * many["latency_mean_s"]
    assert many["measured_latency_mean_s"] is None


def test_a_run_without_requests_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InputError, match=r"run: 'a' has no requests"):
        answer(tmp_path, capsys, "b,0,1,1,\n")


def test_a_request_beyond_the_context_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InputError, match=r"prompt_tokens: 140000 in row 1.*or max_model_len of"):
        answer(tmp_path, capsys, "a,0,140000,10,\n")
