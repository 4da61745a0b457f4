"""The page that goes from a bare node to a table: its lines are valid, and of today's versions."""

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/how-to/bare-node.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
LINES = BLOCKS[0].splitlines()
# What nvidia-smi is asked for, as its manual lists it.
NVIDIA_SMI = {"-pm", "-lgc", "-rgc", "-q", "-d", "--query-gpu", "--format"}


def commands(text: str) -> list[list[str]]:
    """The words of each command of a line, without those that run others."""
    parts = re.split(r"&&|;|\bdo\b|\|\|", text.removeprefix("until "))
    return [shlex.split(part.replace("sudo ", "")) for part in parts if part.strip()]


def test_a_table_takes_ten_lines() -> None:
    assert len(LINES) == 10
    assert "results/node/README.md" in PAGE


def test_drivers_and_builds_are_those_that_a_refusal_names() -> None:
    pytest.importorskip("torch")
    from runtime.devices.cuda import NEEDED_DRIVERS, TESTED_TORCH  # noqa: PLC0415 (needs torch)

    index = "https://download.pytorch.org/whl/"
    installs = re.findall(r"pip install torch==(\S+) --index-url (\S+?)`?:? *$", PAGE, re.MULTILINE)
    installs += re.findall(r"`pip install torch==(\S+) --index-url (\S+)`", PAGE)
    assert {(version, url) for version, url in installs} == {
        (TESTED_TORCH, f"{index}{build}") for _, build in NEEDED_DRIVERS.values()
    }
    for driver, _ in NEEDED_DRIVERS.values():
        assert f"| {driver} " in PAGE


def test_nvidia_smi_is_asked_for_what_it_knows() -> None:
    lines = [words for line in LINES for words in commands(line) if words[0] == "nvidia-smi"]
    lines += [
        shlex.split(" ".join(one.split())) for one in re.findall(r"`(nvidia-smi [^`]+)`", PAGE)
    ]
    assert len(lines) == 5
    options = {word.partition("=")[0] for words in lines for word in words if word[0] == "-"}
    assert options <= NVIDIA_SMI
    # Pinned clocks are let go again.
    pinned, let_go = (
        [n for n, line in enumerate(LINES) if word in line] for word in ("-lgc", "-rgc")
    )
    assert pinned < let_go


def test_torchrun_takes_the_line_for_two_nodes() -> None:
    pytest.importorskip("torch")
    from torch.distributed.run import get_args_parser  # noqa: PLC0415 (needs torch)

    (words,) = commands(BLOCKS[1].strip())
    options = get_args_parser().parse_args(words[1:])
    assert (options.nnodes, options.nproc_per_node, options.module) == ("2", "8", True)
    assert options.training_script == "experiments.profile_hardware"
    assert "--between-nodes" in options.training_script_args
