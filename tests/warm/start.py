"""Starts ``tests.warm.server``, and writes the script that asks it for processes."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[2]
CLIENT = Path(__file__).with_name("client.py")


@contextmanager
def warm_server() -> Iterator[str]:
    """The path of a program that takes the place of ``sys.executable`` as long as this lasts."""
    with TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        path = Path(folder, "socket")
        listener.bind(str(path))
        listener.listen(16)
        program = Path(folder, "python")
        text = CLIENT.read_text(encoding="utf-8").replace("@SOCKET@", str(path))
        program.write_text(f"#!{sys.executable} -IS\n{text}", encoding="utf-8")
        program.chmod(0o700)
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.warm.server", str(listener.fileno())],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )
        try:
            yield str(program)
        finally:
            server.communicate()
