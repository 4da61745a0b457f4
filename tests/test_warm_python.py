"""A process that is forked does what one that Python starts would do."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

SAYS = """
import json, os, sys
print(json.dumps([sys.argv[1:], sys.stdin.read(), os.environ["SAYS"], os.getcwd(), __name__]))
print("complains", file=sys.stderr)
sys.exit(7)
"""


def test_it_has_the_same_arguments_streams_environment_folder_and_status(
    tmp_path: Path, warm_python: str
) -> None:
    forked, started = (
        subprocess.run(
            [program, "-c", SAYS, "one", "two words"],
            input="given",
            cwd=tmp_path,
            env={**os.environ, "SAYS": "something"},
            capture_output=True,
            text=True,
            check=False,
        )
        for program in (warm_python, sys.executable)
    )
    assert json.loads(forked.stdout)[:2] == [["one", "two words"], "given"]
    assert (forked.stdout, forked.stderr) == (started.stdout, started.stderr)
    assert forked.returncode == started.returncode == 7


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("raise ValueError(3)", 1),
        ("import sys; sys.exit('no')", 1),
        ("import os; os._exit(4)", 4),
        ("import os; os.kill(os.getpid(), 9)", -9),
        ("import warnings; warnings.warn('a')", 1),
    ],
)
def test_it_ends_alike(code: str, status: int, warm_python: str) -> None:
    command = [warm_python, "-W", "error", "-c", code]
    assert subprocess.run(command, capture_output=True, check=False).returncode == status


def test_it_prints_lines_at_once_where_asked(warm_python: str) -> None:
    command = [warm_python, "-u", "-c", "import os; print('at once'); os._exit(0)"]
    assert subprocess.run(command, capture_output=True, check=True).stdout == b"at once\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_it(number: signal.Signals, warm_python: str) -> None:
    if signal.getsignal(number) == signal.SIG_IGN:
        pytest.skip("started in the background, where shells let programs ignore interrupts")
    code = "import time; print(1, flush=True); time.sleep(60); print(2)"
    process = subprocess.Popen([warm_python, "-c", code], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "1\n"
        process.send_signal(number)
        # The end of its output is the end of the fork too.
        assert process.stdout.read() == ""
        assert process.wait() == -number
