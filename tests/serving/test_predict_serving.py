"""Tables of measured serving runs: read, refused by name, answered without what was measured."""

import json
from pathlib import Path
from typing import Any

import pytest

from experiments.cli.command import main_of
from experiments.commands import COMMANDS
from mistlab.core.values import InputError
from mistlab.serving.gpu_facts import gpu_named

HEAD = (
    "engine,engine_version,hardware,gpus,model,weights,mode,tp,pp,ep,dp,prefill_workers,prefill_tp,"
    "decode_workers,decode_tp,isl,osl,length_factor,concurrency,ttft_s,tpot_s,spec"
)
PLAIN = "vllm,0.19.0,H100,4,Llama-3.1-70B,fp8,aggregated,4,1,1,1,,,,,1024,1024,0.9,16,{},{},none"
SPLIT = "trtllm,,B200,16,DeepSeek-R1,nvfp4,disaggregated,,,,,1,8,1,8,8192,1024,0.9,64,,,none"
OFFLINE = "hardware,gpus,model,precision,tp,pp,isl,osl,tokens_per_s,version,batch"
NUMBERS = ("ttft_s", "tpot_s", "requests_per_s", "output_tokens_per_s_per_gpu")


def answers(
    folder: Path, capsys: pytest.CaptureFixture[str], head: str, *lines: str
) -> list[dict[str, Any]]:
    table = folder / "runs.csv"
    table.write_text("\n".join((head, *lines)) + "\n", encoding="utf-8")
    main_of("predict_serving", COMMANDS["predict_serving"])([str(table), "--json"])
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_every_number_has_its_bounds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for answer in answers(tmp_path, capsys, HEAD, PLAIN.format("", ""), SPLIT):
        assert answer["fits"] is True
        for name in NUMBERS:
            assert 0 < answer[f"{name}_low"] < answer[name] < answer[f"{name}_high"]


def test_what_was_measured_changes_no_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = PLAIN.format("", ""), PLAIN.format("99", "0.5")
    blank, filled = answers(tmp_path, capsys, HEAD, *lines)
    assert {**blank, "row": 2} == filled


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (PLAIN.format("", "").replace(",none", ",likely_mtp"), "speculative decoding is not built"),
        (PLAIN.format("", "").replace("Llama-3.1-70B", "Lama"), "model: 'Lama' is unknown"),
        (PLAIN.format("", "").replace("H100", "H1000"), "hardware: 'H1000' is no GPU"),
        (PLAIN.format("", "").replace("fp8,", "fp7,"), "weights: 'fp7' is unknown"),
        (PLAIN.format("", "").replace(",4,1,1,1,", ",3,1,1,1,"), "tp: 3 does not divide heads 64"),
        (PLAIN.format("", "").replace(",4,1,1,1,", ",4,1,4,1,"), "has no experts"),
        (PLAIN.format("", "").replace("1024,1024", ",1024"), "isl: is empty"),
        (PLAIN.format("", "").replace("aggregated", "static"), "mode: 'static' is unknown"),
        (PLAIN.format("", "").replace("Llama-3.1-70B", "bert-base"), "generates no tokens"),
        (PLAIN.format("", "").replace("0.9,16", "0.9,"), "concurrency: is empty"),
    ],
)
def test_a_wrong_row_is_refused_by_field_and_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, told: str
) -> None:
    (answer,) = answers(tmp_path, capsys, HEAD, line)
    assert told in answer["error"]
    assert "give" in answer["error"] or "did you mean" in answer["error"]


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("H100", "NVIDIA H100-SXM5-80GB"),
        ("H100", "h100"),
        ("vllm", "vLLM"),
        ("Llama-3.1-70B", "meta-llama/Meta-Llama-3.1-70B-Instruct"),
        ("aggregated", "Aggregated"),
    ],
)
def test_names_are_read_as_others_write_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, other: str
) -> None:
    line = PLAIN.format("", "")
    own, others = answers(tmp_path, capsys, HEAD, line, line.replace(name, other))
    assert {**own, "row": 2} == others


@pytest.mark.parametrize("name", ["H100-PCIe", "H1000", "A1000", "B20"])
def test_another_gpu_is_no_spelling_of_a_known_one(name: str) -> None:
    with pytest.raises(InputError, match="is no GPU that serves"):
        gpu_named(name)


def test_precisions_of_caches_are_read_or_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (f"{PLAIN.format('', '')},{kv}" for kv in ("fp8", "fp8_e4m3", "bf16", "auto", "int3"))
    fp8, also, bf16, auto, wrong = answers(tmp_path, capsys, f"{HEAD},kv", *lines)
    assert {**fp8, "row": 2} == also
    assert fp8["tpot_s"] < bf16["tpot_s"]
    assert auto["notes"] == ["kv unsaid: fp8 assumed"]
    assert "kv: 'int3' is unknown" in wrong["error"]


def test_prefix_caching_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = f"{PLAIN.format('', '')},true"
    (answer,) = answers(tmp_path, capsys, f"{HEAD},prefix_caching", line)
    assert "prefix caching is not built" in answer["error"]


def test_weights_beyond_memory_do_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = PLAIN.format("", "").replace("70B,fp8", "405B,bf16")
    (answer,) = answers(tmp_path, capsys, HEAD, line)
    assert answer["fits"] is False
    assert any("memory is short" in note for note in answer["notes"])


def test_offline_tables_and_static_batches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (
        "H100,2,LLaMA-3.1-70B,fp8,2,1,128,128,,0.20,",
        "H100,2,LLaMA-3.1-70B,fp8,2,1,128,128,,0.9.0,16",
    )
    offline, batch = answers(tmp_path, capsys, OFFLINE, *lines)
    name = "output_tokens_per_s_per_gpu"
    assert offline[name] > batch[name] > 0
