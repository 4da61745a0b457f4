"""The exit status and the message of everything that can end a command."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from experiments import will_it_fit
from experiments.bench.machine_names import hardware_here
from experiments.cli.command import parser_for
from experiments.cli.commandline import NoAnswerError, parser_of, run
from experiments.cli.other_programs import OWN_WORDS, value_here
from experiments.commands import COMMANDS
from mistlab import catalog
from mistlab.core.values import InputError
from mistlab.formats.recipes.exports import EXPORTS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (NoAnswerError("nothing fits"), 1, "error: nothing fits\n"),
        (InputError("field: value: remedy"), 2, "error: field: value: remedy\n"),
        (
            PermissionError(13, "Permission denied", "a/b"),
            1,
            (
                "error: a/b: Permission denied: give a file that you may read and write, or "
                "change its permissions\n"
            ),
        ),
        (OSError("odd"), 1, "error: odd\n"),
        (
            ModuleNotFoundError("no torch", name="torch"),
            2,
            "error: torch is not installed, and this command needs it: pip install '.[runtime]'\n",
        ),
        (
            ModuleNotFoundError("no part", name="transformers.models"),
            2,
            (
                "error: transformers is not installed, and this command needs it: "
                "pip install '.[huggingface]'\n"
            ),
        ),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_what_ends_a_command(
    error: BaseException, status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def main(_arguments: Sequence[str]) -> int:
        raise error

    assert run(main, []) == status
    assert capsys.readouterr().err == message


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--train", "qlora"], "): qlora is --train lora --base 4bit here ("),
        (["--base", "NF4"], "): NF4 is --base 4bit here ("),
        (["--attention", "sdpa"], "): sdpa is --attention flash here ("),
        (["--precision", "int4"], "): int4 is --train lora --base 4bit here ("),
        (["--optimizer", "adamw_torch"], "): adamw_torch is --optimizer adamw here ("),
        (["--train", "grpo"], "): grpo trains by preferences or rewards, which is not modelled: "),
        (["--train", "some"], "'some' (choose from"),
    ],
)
def test_a_value_of_another_program_is_told_in_words_of_these_options(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("train", "base", "precision", "attention", "optimizer")
    parser = parser_of("python -m experiments.some", None, **dict.fromkeys(names))
    with pytest.raises(SystemExit):
        parser.parse_args(words)
    said = capsys.readouterr().err
    assert message in said
    assert ("here" in said) == ("here" in message)


def test_a_gpu_s_own_name_is_no_machine_s() -> None:
    assert not [name for name in catalog.hardware_names() if hardware_here(name)]


def test_programs_that_are_no_target_have_one() -> None:
    words = {word: ours for (option, word), ours in OWN_WORDS.items() if option == "--to"}
    assert value_here("--to", "Unsloth") == "Unsloth is --to trl here"
    assert {ours.removeprefix("--to ") for ours in words.values()} < {*EXPORTS}
    assert not words.keys() & {*EXPORTS}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--batch-size", "4"], "--batch-size 4: give --global-batch, the sequences of a whole"),
        (["--max_seq_length=8"], "--max_seq_length=8: give --sequence-length ("),
        (["--load-in-4bit"], "--load-in-4bit: give --train lora --base 4bit ("),
        (["--rl", "dpo"], "--rl dpo: rl trains by preferences or rewards, which is not modelled:"),
        (["--method=DPO"], "--method=DPO: DPO trains by preferences or rewards, which is not"),
        (["--dpo"], "--dpo: dpo trains by preferences or rewards, which is not modelled:"),
        (["--modle", "x"], "--modle x: did you mean '--model'? ("),
        # The value is a searcher's name and a folder's, too.
        (["--modle", "rl"], "--modle rl: did you mean '--model'? ("),
        (["--output", "rl"], "--output rl ("),
        # Neither the dashes nor --help is like what was meant.
        (["--path", "x"], "--path x ("),
        (["--micro-batch", "2"], "--micro-batch 2: the search chooses it: to limit what it may"),
        (["--epochs", "3"], "--epochs 3: give it to estimate, with --plan ("),
        (["--lora-alpha=32"], "--lora-alpha=32: it has no effect on a step's time and memory"),
        (["--packing"], "--packing: all sequences are counted as full"),
    ],
)
def test_an_option_of_another_program_is_told_by_its_name_here(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"train": "all", "base": None, "global_batch": 8, "sequence_length": 8}
    names |= {"model": "llama3-8b", "space": "mist"}
    parser = parser_of("python -m experiments.some", None, **names)
    with pytest.raises(SystemExit):
        parser.parse_args(words)
    assert message in capsys.readouterr().err


def test_predict_takes_the_problem_from_its_plan(capsys: pytest.CaptureFixture[str]) -> None:
    parser = parser_for(COMMANDS["predict"], "predict")
    for words in (["--hardware", "a40-48gb"], ["--gpu", "a40"], ["--load-in-4bit"]):
        with pytest.raises(SystemExit):
            parser.parse_args(["plan.yaml", *words])
        assert f"{' '.join(words)}: the plan's file has it: give" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nodes", "x"], "--nodes: 'x' is not a whole number: write its digits, such as 1000"),
        (["--nodes", "1.5"], "--nodes: '1.5' is not a whole number"),
        (["--nodes"], "--nodes expects one argument"),
        (["--share", "a half"], "--share: 'a half' is not a number: write it such as 0.5"),
        (["--precision", "fp17"], "--precision: invalid choice: 'fp17' (choose from"),
        (["--node", "1"], "unrecognized arguments: --node 1: did you mean '--nodes'?"),
        (["--zzz", "1"], "unrecognized arguments: --zzz 1 ("),
        (["--seed", "-1"], "--seed: -1 is too small: give a whole number of at least 0"),
    ],
)
def test_a_wrong_option_is_refused_in_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = parser_of("python -m experiments.some", None, nodes=1, precision="fp16", seed=0)
    parser.add_argument("--share", type=float)
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(words)
    said = capsys.readouterr()
    assert ended.value.code == 2
    assert said.err.startswith(f"error: {message}")
    assert said.err.endswith(" (python -m experiments.some --help explains the options)\n")
    assert said.err.count("\n") == 1
    assert said.out == ""


def test_a_bug_is_not_hidden() -> None:
    def main(_arguments: Sequence[str]) -> int:
        raise ModuleNotFoundError(name="numpi")

    with pytest.raises(ModuleNotFoundError):
        run(main, [])


def test_output_may_be_cut_short() -> None:
    command = f"{sys.executable} -m experiments.analyse {'missing.yaml ' * 3000} --json | head -1"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (("--train", "lora", "--rank", "5000"), "--rank: 5000 is above the model's width 2048"),
        (("--rank", "8"), "--rank: 8, but train is all: give --train adapters, or leave it out"),
        (
            ("--base", "4bit"),
            "--base: 4bit weights cannot be trained, but train is all: give --train",
        ),
    ],
)
def test_what_is_trained_is_refused_by_its_options(
    line: tuple[str, ...], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(will_it_fit.main, ["--model", "llama3.2-1b", *line]) == 2
    assert problem in capsys.readouterr().err
