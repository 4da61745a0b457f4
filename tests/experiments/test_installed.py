"""The installed command: its version, and what it completes in a shell."""

import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from experiments.__main__ import main
from experiments.cli.installed import completion
from experiments.commands import COMMANDS
from mistlab.core.values import InputError

ROOT = Path(__file__).parents[2]


def completed(*words: str) -> list[str]:
    """What bash offers for the last of some words."""
    bash = shutil.which("bash")
    assert bash is not None
    script = f"""{completion("bash", COMMANDS)}
COMP_WORDS=({" ".join(f"'{word}'" for word in words)}); COMP_CWORD={len(words) - 1}
_mistlab; echo "${{COMPREPLY[@]}}"
"""
    done = subprocess.run([bash, "-c", script], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_commands_options_and_choices_are_completed() -> None:
    assert completed("mistlab", "tun") == ["tune", "tuning_time"]
    assert completed("mistlab", "tune", "--spa") == ["--space"]
    assert completed("mistlab", "tune", "--precision", "b") == ["bf16"]
    assert completed("mistlab", "predict", "plan") == []
    assert set(completed("mistlab", "")) == {*COMMANDS}


def test_zsh_has_bash_s_completion() -> None:
    assert completion("zsh", COMMANDS).startswith("autoload -U +X bashcompinit")


@pytest.mark.parametrize("line", [["completion"], ["completion", "fish"]])
def test_another_shell_is_refused(line: list[str]) -> None:
    with pytest.raises(InputError, match="give bash or zsh"):
        main(line)


def test_the_version_is_that_of_the_package() -> None:
    line = [sys.executable, "-m", "experiments", "--version"]
    done = subprocess.run(line, capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == f"mistlab {version('mistlab')}\n"
