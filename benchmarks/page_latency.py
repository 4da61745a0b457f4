"""Measures how long the live page takes to follow a slider, and to show the first plan of a search.

    python -m benchmarks.page_latency
    python -m benchmarks.page_latency --models

The server runs as users start it, and gets the page's questions over HTTP: for each problem the
first question (about a model that is new to it), then sliders that move, one question after
another. The figures are milliseconds of elapsed time. If other work runs on the machine, the CPU
milliseconds of the server's processes (on Linux) show what its own work takes.

``--models`` measures the first answer about every model of the catalogue. Each question goes to a
new process, which has been warmed up as the page's process is, but has seen no other model and has
no cached files.
"""

import argparse
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np

from mistlab.core.arrays import Floats

# Milliseconds of elapsed time and of CPU time for each of several answers, the first answer first.
Times = Floats
ROOT = Path(__file__).parents[1]
BASE: dict[str, Any] = {
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
# For each model, the first answer is timed on clusters with these numbers of nodes.
NODES = (1, 16, 256)
# For each model, the first answer is also timed for this fine-tuning (QLoRA), on one node.
ADAPTED = {"train": "adapters", "adapter_rank": 16, "base": "4bit"}
LOAD = {"model": "llama3-70b", "gpu": "H100", "gpus": 8, "prompt": 1000, "output": 500}
# How many models the result table lists: those with the slowest first answers.
SHOWN = 10


@dataclass(frozen=True, kw_only=True)
class Page:
    """A running server, asked one question after another."""

    connection: HTTPConnection
    process: int

    def timed(self, question: str, body: Any) -> tuple[Any, float, float]:
        """The answer to a question, with its milliseconds of elapsed time and of the server's CPU
        time.
        """
        began, began_cpu = time.perf_counter(), self._cpu_ms()
        answer = asked(self.connection, question, body)
        return answer, 1e3 * (time.perf_counter() - began), self._cpu_ms() - began_cpu

    def _cpu_ms(self) -> float:
        """The CPU time of all threads of the server and its processes; not a number if the system
        does not report it.
        """
        children = Path(f"/proc/{self.process}/task/{self.process}/children")
        if not children.exists():
            return float("nan")
        threads = [
            thread
            for process in (str(self.process), *children.read_text().split())
            for thread in Path(f"/proc/{process}/task").iterdir()
        ]
        return 1e-6 * sum(int((one / "schedstat").read_text().split()[0]) for one in threads)


@contextmanager
def page() -> Iterator[Page]:
    """A server that is running and has answered one question."""
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
        # Wait until the server has started its worker processes for searches and pictures.
        time.sleep(10)
        yield Page(connection=connection, process=process.pid)
    finally:
        process.terminate()
        process.wait()


def asked(connection: HTTPConnection, question: str, body: Any) -> Any:
    """The live page's answer to a question that is posted to it, as decoded JSON."""
    headers = {"content-type": "application/json"}
    connection.request("POST", f"/api/{question}", json.dumps(body), headers)
    return json.loads(connection.getresponse().read())


def moved(page: Page, problem: dict[str, Any]) -> Times:
    """The milliseconds until the live page answers for a problem, at first and after each move of a
    slider.
    """
    answer, *first = page.timed("predict", {"problem": problem})
    took = [first]
    for move in range(MOVES):
        turned = {"checkpointed_layers": (move % 9) / 8, "zero": move % 2}
        length = problem["sequence_length"] * (1, 2, 4)[move % 3] // 2
        question = {"problem": {**problem, "sequence_length": length}, "plan": answer["job"]}
        found, *own = page.timed("predict", {**question, "knobs": turned})
        took.append(own)
        assert "prediction" in found, found
    return np.array(took)


def load_moved(page: Page) -> Times:
    """The milliseconds until the live page answers for a serving load, at first and after each
    move of a slider.
    """
    took = []
    for move in range(MOVES + 1):
        load = {**LOAD, "prompt": 500 + 100 * move, "gpus": (8, 16, 32)[move % 3]}
        answer, *own = page.timed("serving", {"load": load})
        took.append(own)
        assert "best" in answer, answer
    return np.array(took)


def first_plan(connection: HTTPConnection, problem: dict[str, Any]) -> tuple[float, float]:
    """The milliseconds until a search shows its first plan, and until it ends."""
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


def first_answers() -> list[tuple[float, float, str]]:
    """The milliseconds (CPU and elapsed) of the first answer about every model, with its name and
    GPUs; the slowest first.
    """
    os.environ["MISTLAB_CACHE"] = ""
    # Imported after MISTLAB_CACHE is emptied, so that no compiled expression is read from disk.
    from experiments.live_page.worker import warm_up  # noqa: PLC0415
    from mistlab import catalog  # noqa: PLC0415

    warm_up()
    ways: list[tuple[int, dict[str, Any]]] = [*((nodes, {}) for nodes in NODES), (1, ADAPTED)]
    asked_of = [(name, *way) for way in ways for name in catalog.model_names()]
    forked = multiprocessing.get_context("fork")
    with forked.Pool(1, maxtasksperchild=1) as processes:
        return sorted(processes.imap(_first_answer, asked_of, chunksize=1), reverse=True)


def _first_answer(asked_of: tuple[str, int, dict[str, Any]]) -> tuple[float, float, str]:
    from experiments.live_page.questions import predict  # noqa: PLC0415 (after the folder)
    from mistlab import catalog  # noqa: PLC0415 (after the folder)

    model, nodes, further = asked_of
    batch = max(BASE["global_batch"], 8 * nodes)
    length = catalog.model(model).learned_positions or BASE["sequence_length"]
    problem = {**BASE, "model": model, "nodes": nodes, "global_batch": batch, **further}
    problem["sequence_length"] = length
    began, began_cpu = time.perf_counter(), time.process_time()
    answer = predict({"problem": problem}, lambda event: None)
    ended, ended_cpu = time.perf_counter(), time.process_time()
    assert "prediction" in answer, answer
    name = f"{model} on {8 * nodes:,} GPUs{', adapters' if further else ''}"
    return 1e3 * (ended_cpu - began_cpu), 1e3 * (ended - began), name


def write_models() -> None:
    """Write the slowest first answers, and their spread."""
    rows = first_answers()
    _write(f"{'first answer, ms':40}{'processor':>10}{'wall':>8}")
    for cpu, wall, name in rows[:SHOWN]:
        _write(f"{name:40}{cpu:10.0f}{wall:8.0f}")
    middle = np.percentile([row[:2] for row in rows], 50, axis=0)
    _write(f"{f'median of {len(rows)}':40}{middle[0]:10.0f}{middle[1]:8.0f}")
    _write(f"slowest on the wall: {max(row[1] for row in rows):.0f} ms")


def main() -> None:
    """Run the measurement that the options ask for."""
    reader = argparse.ArgumentParser(description=(__doc__ or "").partition(".")[0])
    reader.add_argument("--models", action="store_true", help="every model's first answer")
    if reader.parse_args().models:
        write_models()
    else:
        write_problems()


def write_problems() -> None:
    """Write a row for each problem, and the worst of all."""
    sliders = []
    head = ("first", "its CPU", "slider: median", "95 %", "its CPU", "search: first plan", "end")
    _write(f"{'':28}" + "".join(f"{name:>{2 + max(7, len(name))}}" for name in head))
    with page() as running:
        for name, own in PROBLEMS.items():
            problem = {**BASE, **own}
            took = moved(running, problem)
            shown = first_plan(running.connection, problem)
            sliders.append(_write_times(name, took, *shown))
        sliders.append(_write_times("70B served by 8 to 32 GPUs", load_moved(running)))
    high, cpu = np.percentile(np.concatenate(sliders), 95, axis=0)
    _write(f"all sliders: 95 % within {high:.0f} ms, of the processor {cpu:.0f}")


def _write_times(name: str, took: Times, *search: float) -> Times:
    """Write a line of milliseconds; returns the times of all answers but the first."""
    (first, first_cpu), sliders = took[0], took[1:]
    high, high_cpu = np.percentile(sliders, 95, axis=0)
    row = f"{name:28}{first:9.0f}{first_cpu:9.0f}{np.median(sliders[:, 0]):16.0f}"
    row += f"{high:9.0f}{high_cpu:9.0f}"
    _write(row + "".join(f"{ms:{width}.0f}" for ms, width in zip(search, (20, 9), strict=False)))
    return sliders


def _write(line: str) -> None:
    sys.stdout.write(line + chr(10))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
