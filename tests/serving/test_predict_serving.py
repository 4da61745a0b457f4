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
        (
            PLAIN.format("", "").replace(",none", ",likely_mtp"),
            "speculative decoding cannot be predicted",
        ),
        (PLAIN.format("", "").replace("Llama-3.1-70B", "Lama"), "model: 'Lama' is unknown"),
        (PLAIN.format("", "").replace("H100", "H1000"), "hardware: 'H1000' is not a GPU"),
        (PLAIN.format("", "").replace("fp8,", "fp7,"), "weights: 'fp7' is unknown"),
        (PLAIN.format("", "").replace(",4,1,1,1,", ",3,1,1,1,"), "tp: 3 does not divide heads 64"),
        (PLAIN.format("", "").replace(",4,1,1,1,", ",4,1,4,1,"), "has no experts"),
        (PLAIN.format("", "").replace("1024,1024", ",1024"), "isl: is empty"),
        (PLAIN.format("", "").replace("aggregated", "static"), "mode: 'static' is unknown"),
        (PLAIN.format("", "").replace("Llama-3.1-70B", "bert-base"), "generates no tokens"),
        (PLAIN.format("", "").replace("0.9,16", "0.9,"), "concurrency: is empty"),
        (PLAIN.format("", "").replace("1024,1024", "1e300,1024"), "isl: '1e300' is not a number"),
        (PLAIN.format("", "").replace("0.9,16", "1e6,16"), "length_factor: '1e6' is not a mean"),
        (PLAIN.format("", "").replace("0.9,16", "0.9,1e12"), "concurrency: '1e12' requests"),
        (PLAIN.format("", "").replace("H100,4", "H100,7"), "gpus: 7 is not a multiple of the 4"),
        (PLAIN.format("", "").replace("4,1,1,1,", "4,1,1,99999,"), "dp: 99999 is too large"),
        (PLAIN.format("", "").replace("H100,4", "H100,1e300"), "gpus: 1e+300 is too large"),
        (
            PLAIN.format("", "").replace("1024,1024", "200000,1024"),
            "isl: 180000, with 921.6 of output, is more than the context of 131072 of llama3-70b",
        ),
        (
            PLAIN.format("", "").replace("Llama-3.1-70B", "gpt2-xl").replace(",4,1,1", ",1,1,1"),
            "isl: 921.6, with 921.6 of output, is more than the context of 1024 of gpt2-xl",
        ),
        (
            SPLIT.replace("B200,16", "B200,72"),
            "gpus: 72, but the prefill and decode workers of this row have 16 GPUs",
        ),
        (SPLIT.replace("1,8,1,8", "1,7,1,8"), "prefill_tp: 7 does not divide heads 128"),
        (f"{SPLIT},none", "1 more cells than columns"),
    ],
)
def test_a_wrong_row_is_refused_by_field_and_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, told: str
) -> None:
    (answer,) = answers(tmp_path, capsys, HEAD, line)
    assert told in answer["error"]
    assert "give" in answer["error"] or "did you mean" in answer["error"]


def test_an_engine_s_limit_is_stated_and_outputs_beyond_the_context_are_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = PLAIN.format("", "").replace("1024,1024", "200000,1024")
    outputs = PLAIN.format("", "").replace("1024,1024", "100000,90000")
    lines = (f"{long},262144", f"{long},131072", f"{outputs},")
    taken, short, noted = answers(tmp_path, capsys, f"{HEAD},max_model_len", *lines)
    assert "error" not in taken
    assert not any("exceed" in note for note in taken["notes"])
    assert "is more than max_model_len 131072: give fewer" in short["error"]
    assert any("exceed the context of 131072" in note for note in noted["notes"])


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
    with pytest.raises(InputError, match="is not a GPU with serving rates"):
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


def test_separate_gpus_for_prompts_under_a_rate_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "H100,4,LLaMA-3.1-70B,bf16,4,467,256,500,2,disaggregated"
    (answer,) = answers(tmp_path, capsys, f"{RATES},mode", line)
    assert "separate GPUs) cannot be predicted for a request rate: give" in answer["error"]


def test_prefix_caching_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = (f"{PLAIN.format('', '')},{one}" for one in ("true", "perhaps"))
    caching, unclear = answers(tmp_path, capsys, f"{HEAD},prefix_caching", *lines)
    assert "prefix caching cannot be predicted" in caching["error"]
    assert "prefix_caching: 'perhaps' is neither yes nor no" in unclear["error"]


RATES = "hardware,gpus,model,precision,tp,isl_mean,osl_mean,requests,request_rate"
WORDS = ("", "0", "-1", "1", "1.5", "1e6", "1e-9", "1e300", "1e-300", "nan", "INF", "4096", "abc")


@pytest.mark.parametrize(
    ("head", "line"),
    [
        (HEAD, PLAIN.format("", "")),
        (HEAD, SPLIT),
        (OFFLINE, "H100,2,LLaMA-3.1-70B,fp8,2,1,128,128,,0.9.0,16"),
        (RATES, "H100,4,LLaMA-3.1-70B,bf16,4,467,256,500,2"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_any_cell_is_answered_in_full_or_refused_by_its_column(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], head: str, line: str
) -> None:
    names, cells, lines = head.split(","), line.split(","), []
    for place in range(len(names)):
        lines += [",".join((*cells[:place], word, *cells[place + 1 :])) for word in WORDS]
    for place, answer in enumerate(answers(tmp_path, capsys, head, *lines)):
        if "error" in answer:
            assert answer["error"].partition(":")[0] in (*names, "gpus")
            assert "give" in answer["error"] or "did you mean" in answer["error"], lines[place]
        else:
            for name in NUMBERS:
                low, value, high = (answer[f"{name}{end}"] for end in ("_low", "", "_high"))
                assert 0 < low < value < high < float("inf"), lines[place]


def test_a_table_in_another_encoding_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "runs.csv"
    table.write_bytes(f"{HEAD}\n{PLAIN}\n".replace("vllm", "vllm\xe9").encode("latin-1"))
    assert main_of("predict_serving", COMMANDS["predict_serving"])([str(table)]) != 0
    assert "is not UTF-8: give a table in UTF-8" in capsys.readouterr().err


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
