"""How long the live page takes to follow a slider, and to show the first plan of a search.

    python -m benchmarks.page_latency

The server runs as users start it, and is asked over HTTP as the page asks it: for each problem the
first answer (models that it was not asked before), then sliders that move, one question after
another, while nothing else runs. The figures are milliseconds.
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
BASE = {
    "hardware": "h100-80gb",
    "nodes": 1,
    "gpus_per_node": 8,
    "sequence_length": 4096,
    "global_batch": 128,
    "attention": "flash",
    "precision": "bf16",
}
PROBLEMS: dict[str, dict[str, Any]] = {
    "8B on 8 GPUs": {"model": "llama3-8b"},
    "72B on 128 GPUs": {"model": "qwen2.5-72b", "nodes": 16},
    "gpt-oss 20B on 16 GPUs": {"model": "gpt-oss-20b", "nodes": 2},
    "hybrid 8B on 16 GPUs": {"model": "nemotron-h-8b", "nodes": 2},
    "DeepSeek V3 on 2,048 GPUs": {"model": "deepseek-v3", "nodes": 256, "global_batch": 15360},
    "405B on 16,384 GPUs": {
        "model": "llama3-405b",
        "nodes": 2048,
        "global_batch": 2048,
        "sequence_length": 8192,
    },
}
MOVES = 60


@contextmanager
def page() -> Iterator[HTTPConnection]:
    """A connection to a server that has answered once."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    line = [sys.executable, "-m", "experiments", "page", "--port", str(port), "--no-browser"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(line, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL)
    try:
        connection = HTTPConnection("127.0.0.1", port, timeout=120)
        while True:
            try:
                asked(connection, "names", {})
                break
            except ConnectionRefusedError:
                connection.close()
                time.sleep(0.1)
        # Its processes for searches and pictures start meanwhile.
        time.sleep(10)
        yield connection
    finally:
        process.terminate()
        process.wait()


def asked(connection: HTTPConnection, question: str, body: Any) -> Any:
    """The answer to a question."""
    headers = {"content-type": "application/json"}
    connection.request("POST", f"/api/{question}", json.dumps(body), headers)
    return json.loads(connection.getresponse().read())


def moved(connection: HTTPConnection, problem: dict[str, Any]) -> tuple[float, list[float]]:
    """Milliseconds of a problem's first answer, and of answers while its sliders move."""
    began = time.perf_counter()
    plan = asked(connection, "predict", {"problem": problem})["job"]
    first = 1e3 * (time.perf_counter() - began)
    took = []
    for move in range(MOVES):
        turned = {"checkpointed_layers": (move % 9) / 8, "zero": move % 2}
        length = problem["sequence_length"] * (1, 2, 4)[move % 3] // 2
        question = {"problem": {**problem, "sequence_length": length}, "plan": plan}
        began = time.perf_counter()
        answer = asked(connection, "predict", {**question, "knobs": turned})
        took.append(1e3 * (time.perf_counter() - began))
        assert "prediction" in answer, answer
    return first, took


def first_plan(connection: HTTPConnection, problem: dict[str, Any]) -> tuple[float, float]:
    """Milliseconds until a search shows its first plan, and until it ends."""
    headers = {"content-type": "application/json"}
    began = time.perf_counter()
    body = json.dumps({"problem": problem, "seconds": 10})
    connection.request("POST", "/api/search", body, headers)
    answer, first = connection.getresponse(), float("nan")
    for line in answer:
        event = json.loads(line)
        figures = event.get("figures") or event.get("answer", {}).get("figures")
        if figures and np.isnan(first):
            first = 1e3 * (time.perf_counter() - began)
    return first, 1e3 * (time.perf_counter() - began)


def main() -> None:
    """Write a row for each problem, and the worst of all."""
    worst = []
    _write(f"{'':28}{'first':>8}{'median':>8}{'95 %':>8}{'search: first plan':>20}{'end':>9}")
    with page() as connection:
        for name, own in PROBLEMS.items():
            problem = {**BASE, **own}
            first, took = moved(connection, problem)
            shown, end = first_plan(connection, problem)
            middle, high = np.percentile(took, [50, 95])
            worst += took
            _write(f"{name:28}{first:8.0f}{middle:8.0f}{high:8.0f}{shown:20.0f}{end:9.0f}")
    _write(f"all sliders: 95 % within {np.percentile(worst, 95):.0f} ms")


def _write(line: str) -> None:
    sys.stdout.write(line + chr(10))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
