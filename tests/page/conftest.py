"""A running page, and a browser that sees nothing but this machine."""

import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
CHROMIUM = next(filter(None, map(shutil.which, BROWSERS)), None)


@dataclass(frozen=True, kw_only=True)
class RunningPage:
    """A page's server."""

    port: int
    process: subprocess.Popen[bytes]

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def send(
        self,
        path: str,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
        method: str = "POST",
    ) -> tuple[int, bytes]:
        """A request as it is, and its answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            given = {"content-type": "application/json", **(headers or {})}
            connection.request(method, path, body=body, headers=given)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def ask(self, question: str, body: Any) -> tuple[int, Any]:
        """A question and its answer."""
        status, content = self.send(f"/api/{question}", json.dumps(body).encode())
        return status, json.loads(content)


@pytest.fixture(scope="module")
def running() -> Iterator[RunningPage]:
    """A server in a process of its own, once for the tests of a file."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    line = [sys.executable, "-m", "experiments", "page", "--port", str(port), "--no-browser"]
    process = subprocess.Popen(line, env=environment, cwd=ROOT, stderr=subprocess.DEVNULL)
    page = RunningPage(port=port, process=process)
    for _ in range(600):
        try:
            page.ask("names", {})
            break
        except OSError:
            assert process.poll() is None, "the server ended"
            time.sleep(0.1)
    yield page
    process.terminate()
    process.wait(timeout=20)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless browser."""
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed")
    from playwright.sync_api import sync_playwright  # noqa: PLC0415 (starts slowly)

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()
