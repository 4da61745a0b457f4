"""Every command: short, quick to explain itself, listed, and imported by nothing."""

import ast
import importlib.util
import inspect
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from experiments.__main__ import listing, main
from experiments.cli.command import parser_for
from experiments.cli.other_programs import COMMANDS_HERE
from experiments.commands import COMMANDS, GROUPS
from mistlab.core.values import InputError

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "experiments"
# Commands about a table or a model of the user's.
NEED_FILES = {
    *("calibrate", "calibrate_runs", "check_imports", "predict_runs", "report_runs", "trace"),
    *(
        "play_logs",
        "predict_collectives",
        "predict_operators",
        "predict_serving",
        "serving_errors",
        "show",
    ),
}
# What only the work of a command needs, never its options.
HEAVY = ("numpy", "sympy", "scipy", "pandas", "matplotlib", "optuna", "pulp", "torch", "yaml")


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, check=False
    )


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_explains_itself_and_loads_nothing_for_it(command: str) -> None:
    code = (
        f"import runpy, sys; sys.argv = ['x', '--help']\n"
        f"try: runpy.run_module('experiments.{command}', run_name='__main__')\n"
        f"except SystemExit: print([m for m in {HEAVY} if m in sys.modules])"
    )
    done = python("-c", code)
    assert done.stdout.startswith(f"usage: python -m experiments.{command}")
    assert done.stdout.endswith("[]\n")
    assert done.stderr == ""


@pytest.mark.parametrize("command", COMMANDS)
def test_every_example_is_read_by_the_command(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    row = COMMANDS[command]
    assert row.examples
    parser = parser_for(row, f"mistlab {command}")
    told = parser.format_help()
    for purpose, words in row.examples.items():
        assert f"mistlab {command} {words}" in told
        assert purpose in told
        line, _, _ = words.partition(" -- ")
        parser.parse_args(shlex.split(line))
    assert capsys.readouterr().err == ""


def test_commands_ask_for_nothing_but_files_that_only_the_user_has() -> None:
    """All others run without arguments, on a sensible default."""
    code = f"""
import argparse, runpy, sys
parse = argparse.ArgumentParser.parse_args
def stop(self, *rest):
    parse(self, *rest)
    print(name)
    sys.exit()
argparse.ArgumentParser.parse_args, sys.argv = stop, ["x"]
for name in {[*COMMANDS]}:
    try:
        runpy.run_module(f"experiments.{{name}}", run_name="__main__")
    except SystemExit:
        pass
"""
    done = python("-c", code)
    assert {*COMMANDS} - {*done.stdout.split()} == NEED_FILES, done.stderr


def test_no_file_stands_in_the_way_of_a_command() -> None:
    """Python asks for files before it asks for rows."""
    assert not {*COMMANDS} & {path.stem for path in FOLDER.iterdir()}


def test_the_module_of_a_command_is_one_and_says_what_it_is() -> None:
    module = importlib.import_module("experiments.tune")
    assert module is importlib.import_module("experiments.tune")
    assert module.__doc__ is not None
    assert module.__doc__.startswith("The command tune")
    assert "command tune of experiments.commands" in repr(module)
    assert importlib.util.find_spec("experiments.tuna") is None


def test_a_process_that_a_command_spawns_runs_no_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python runs the module again in it, by another name."""
    monkeypatch.setattr(sys, "argv", ["x", "--help"])
    # Another test may have imported it, of which runpy warns.
    monkeypatch.delitem(sys.modules, "experiments.analyse", raising=False)
    names = runpy.run_module("experiments.analyse", run_name="__mp_main__", alter_sys=True)
    assert callable(names["main"])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("path", [*FOLDER.rglob("*.py")], ids=lambda path: path.stem)
def test_nothing_imports_a_command(path: Path) -> None:
    assert not {f"experiments.{name}" for name in COMMANDS} & {*imported(path)}


def test_a_command_is_listed_once_by_the_first_sentence_of_its_function() -> None:
    text = "\n".join(listing())
    assert len(COMMANDS) == sum(map(len, GROUPS.values()))
    for name, command in COMMANDS.items():
        module, _, function = command.function.partition(":")
        doc = inspect.getdoc(getattr(importlib.import_module(module), function))
        assert doc == command.description
        assert text.count(f"\n  {name} ") == 1
        assert command.summary in text


def test_a_command_is_called_as_it_is_asked_for() -> None:
    """Its help names the program, by which it can be called again."""
    by_module = python("-m", "experiments.tune", "--help").stdout
    by_name = python("-m", "experiments", "tune", "--help").stdout
    code = "import sys; sys.argv = ['mistlab', 'tune', '--help']\n"
    by_console = python("-c", f"{code}from experiments.__main__ import console; console()").stdout
    for text, program in (
        (by_module, "python -m experiments.tune"),
        (by_name, "python -m experiments tune"),
        (by_console, "mistlab tune"),
    ):
        assert text.startswith(f"usage: {program} [-h]")
        assert "experiments." not in text.replace(program, "")


def test_without_a_name_all_commands_are_listed() -> None:
    done = python("-m", "experiments")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "\n".join(listing()) + "\n"


def test_an_unknown_command_gets_near_matches() -> None:
    done = python("-m", "experiments", "survy")
    assert done.returncode == 2
    assert done.stderr == "error: command 'survy' is unknown: did you mean 'survey'?\n"


def test_what_users_call_a_command_is_a_line_that_it_takes() -> None:
    for name, line in COMMANDS_HERE.items():
        assert name not in COMMANDS
        ours, *more = line.split()
        options = {flag for flag in more if flag.startswith("--")}
        assert options <= {*parser_for(COMMANDS[ours], ours)._option_string_actions}
        with pytest.raises(InputError, match=rf"{name.upper()!r} is unknown: give {line}$"):
            main([name.upper()])


def test_a_way_to_train_that_is_not_modelled_is_no_misspelt_command() -> None:
    with pytest.raises(InputError, match=r"'dpo' is unknown: dpo trains by preferences .* tune"):
        main(["dpo"])


def test_python_runs_commands_by_the_package_s_name() -> None:
    listed, ran = python("-m", "mistlab"), python("-m", "mistlab", "survey", "--help")
    assert (listed.returncode, listed.stderr) == (0, "")
    assert listed.stdout == "\n".join(listing()) + "\n"
    assert ran.returncode == 0
    assert ran.stdout.startswith("usage: python -m experiments survey")


def test_the_console_command_is_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    module, name = tomllib.loads(text)["project"]["scripts"]["mistlab"].split(":")
    console = getattr(importlib.import_module(module), name)
    monkeypatch.setattr(sys, "argv", ["mistlab"])
    assert console() == 0
    assert capsys.readouterr().out == "\n".join(listing()) + "\n"
    monkeypatch.setattr(sys, "argv", ["mistlab", "estimat"])
    assert console() == 2
    assert "did you mean 'estimate'" in capsys.readouterr().err


def test_a_command_runs_by_its_name() -> None:
    by_name, by_module = python("-m", "experiments", "analyse"), python("-m", "experiments.analyse")
    assert by_name.stdout == by_module.stdout != ""
    assert by_name.returncode == by_module.returncode == 0
