"""Folders of results: one run writes to each, and what cannot be written is named."""

import subprocess
import sys
from pathlib import Path

import pytest

from experiments.cli.commandline import run
from experiments.cli.rundir import RunDirectory
from mistlab.core.values import InputError

FULL = "No space left on device: free space on this disk, or write to another one\n"
# Makes a folder of results, tells so, and waits.
HOLDING = """
import sys
from pathlib import Path
from experiments.cli.rundir import RunDirectory
held = RunDirectory.make(Path(sys.argv[1]), "tune", {})
print("held", flush=True)
sys.stdin.read()
"""


def test_a_folder_of_a_run_that_goes_on_is_refused_until_the_run_is_gone(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDING, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        before = (tmp_path / "config.json").read_bytes()
        with pytest.raises(InputError, match="another run is writing to this folder: wait until"):
            RunDirectory.make(tmp_path, "tune", {"seed": 1})
        assert (tmp_path / "config.json").read_bytes() == before
        other.kill()
    RunDirectory.make(tmp_path, "tune", {"seed": 1})


def test_a_folder_is_free_for_its_own_process_and_again_where_its_run_has_ended(
    tmp_path: Path,
) -> None:
    first = RunDirectory.make(tmp_path, "tune", {})
    second = RunDirectory.make(tmp_path, "compare", {})
    assert second.path == first.path
    del first, second
    command = [sys.executable, "-c", HOLDING, str(tmp_path)]
    done = subprocess.run(command, input="", capture_output=True, text=True, check=True)
    assert done.stdout == "held\n"


@pytest.mark.parametrize("name", ["config.json", "rows.jsonl"])
def test_a_full_disk_names_the_file(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A link to a device that is always full stands in for a file on a full disk."""
    written = f"{name}.part" if name == "config.json" else name
    (tmp_path / written).symlink_to("/dev/full")

    def writing(_: object) -> int:
        RunDirectory.make(tmp_path, "tune", {}).add_row({"a": 1})
        return 0

    assert run(writing, ()) == 1
    assert capsys.readouterr().err == f"error: {tmp_path / name}: {FULL}"


def test_a_full_disk_behind_standard_output_is_named() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "experiments"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr == f"error: standard output: {FULL}"
