"""Files and folders to import, what is given beside them, and how strict a user is."""

import json
import re
from pathlib import Path

import pytest

from experiments import check_imports, import_plan
from experiments.cli.commandline import run
from experiments.commands import COMMANDS
from experiments.interchange.source_files import source_of
from mistlab.core.values import InputError
from mistlab.formats.file_formats import FORMATS, REFUSED

SCRIPT = """\
torchrun --nnodes 1 --nproc-per-node 4 pretrain_gpt.py --num-layers 32 --hidden-size 2560 \\
  --num-attention-heads 32 --seq-length 2048 --max-position-embeddings 2048 \\
  --vocab-size 50304 --micro-batch-size 1 --global-batch-size 16 --bf16 {more} \\
  --attention-dropout 0 --hidden-dropout 0 --untie-embeddings-and-output-weights \\
  --disable-bias-linear --attention-backend flash
"""
GPUS = ["--hardware", "a100-80gb", "--engine", "megatron"]


def script(folder: Path, more: str = "", name: str = "launch.sh") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(SCRIPT.format(more=more), encoding="utf-8")
    return path


def test_the_sizes_that_were_read_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(import_plan.main, [str(script(tmp_path)), *GPUS]) == 0
    told = capsys.readouterr().err.splitlines()
    assert told[0] == (
        "read: model gpt3-2.7b, 32 layers, hidden 2560, 32 heads, vocabulary 50,304: "
        "2.78B parameters"
    )
    assert told[1] == "read: 1 x 4 GPUs, batch 16 x 2048 tokens, bf16"
    assert re.fullmatch(
        r"cost: on a100-80gb [\d.]+ s an iteration, [\d.]+ GiB on a GPU, (fits|does not fit) "
        r"\(probability of fitting \d+%\)",
        told[-1],
    )


def test_the_formats_to_choose_from_are_those_that_are_read() -> None:
    read = {name for name, row in FORMATS.items() if row not in REFUSED}
    options = dict(COMMANDS["import_plan"].options)
    assert {*options["--format"]["choices"]} == read


def test_the_only_launch_file_of_a_folder_is_imported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script(tmp_path, name="scripts/launch.sh")
    (tmp_path / "README.md").write_text("# torchrun", encoding="utf-8")
    assert run(import_plan.main, [str(tmp_path), *GPUS, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert plan["workload"]["global_batch"] == 16


def test_a_file_that_another_refers_to_is_no_launch_file(tmp_path: Path) -> None:
    first = script(tmp_path, more="--deepspeed_config ds.json")
    (tmp_path / "ds.json").write_text('{"train_batch_size": 8}', encoding="utf-8")
    assert source_of(tmp_path).name == str(first)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ((), "none of the files in this folder is a launch file of a known format"),
        (("a.sh", "b/c.sh"), "holds 2 launch files (a.sh, b/c.sh): give one of them"),
    ],
)
def test_a_folder_without_a_single_launch_file_is_refused(
    names: tuple[str, ...], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in names:
        script(tmp_path, name=name)
    assert run(import_plan.main, [str(tmp_path), *GPUS]) == 2
    assert words in capsys.readouterr().err


def test_files_beside_are_seen_from_the_folders_above_a_script(tmp_path: Path) -> None:
    path = script(tmp_path, name="examples/llama/launch.sh")
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "ds.json").write_text("{}", encoding="utf-8")
    source = source_of(path)
    assert source.beside("configs/ds.json") == "{}"
    assert source.beside("/repository/configs/ds.json") == "{}"
    assert source.beside("/ds.json") is None
    assert source.beside("no/such.json") is None
    assert source.beside("\0") is None


@pytest.mark.parametrize("text", ["NNODES", "=4", "a b=4", "3=4"])
def test_settings_that_are_no_assignments_are_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not an assignment: give a variable's value"):
        source_of(script(tmp_path), [text])


def test_settings_and_arguments_reach_the_reader(tmp_path: Path) -> None:
    source = source_of(script(tmp_path), ["NNODES=4", "A=b=c"], ["7b", ""], 3)
    assert dict(source.settings) == {"NNODES": "4", "A": "b=c"}
    assert (source.arguments, source.line) == (("7b", ""), 3)
    assert source_of(script(tmp_path)).arguments is None


def test_strict_counts_what_was_assumed_or_ignored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, odd = script(tmp_path), script(tmp_path, more="--rampup-batch-size 8 8 100", name="b.sh")
    assert run(import_plan.main, [str(plain), *GPUS, "--strict"]) == 0
    assert "rampup" not in capsys.readouterr().err
    assert run(import_plan.main, [str(odd), *GPUS, "--strict"]) == 1
    captured = capsys.readouterr()
    assert "--rampup-batch-size" in captured.err
    assert "global_batch: 16" in captured.out
    assert run(import_plan.main, [str(odd), *GPUS]) == 0


FACTS = """\
- file: owner__name/good.sh
  facts: {layers: 32, hidden: 2560, tensor_parallel: 1, global_batch: 16, zero: 0}
- file: owner__name/bad.sh
  facts: {layers: 40, hidden: 2560}
"""


def test_wrong_facts_of_real_files_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("good", "bad"):
        script(tmp_path / "files", name=f"owner__name/{name}.sh")
    (tmp_path / "files/owner__name/not.sh").write_text("echo hello\n", encoding="utf-8")
    names = ("good.sh", "bad.sh", "not.sh", "gone.sh")
    lines = ["repo,path,kind", *(f"owner/name,{name},megatron-sh" for name in names)]
    (tmp_path / "list.csv").write_text("\n".join(lines), encoding="utf-8")
    (tmp_path / "facts.yaml").write_text(FACTS, encoding="utf-8")
    paths = [str(tmp_path / "files"), "--list", str(tmp_path / "list.csv")]
    paths += ["--facts", str(tmp_path / "facts.yaml"), "--out", str(tmp_path / "out"), "--json"]
    assert run(check_imports.main, paths) == 0
    answer = json.loads(capsys.readouterr().out)
    rows = {row["path"]: row for row in answer["rows"]}
    assert [rows[name]["end"] for name in names] == ["as it is", "as it is", "refused", "missing"]
    assert rows["bad.sh"]["silent"] == "layers: 40 in the file, 32 imported"
    assert rows["good.sh"]["silent"] == ""
    summary = answer
    assert (summary["imported"], summary["judged"], summary["wrong_in_silence"]) == (2, 2, 1)
