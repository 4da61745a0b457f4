"""Random models, pairs of layouts, tiers and requests that ranks serve by phases, and what must
hold of them: tokens, order and bytes."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mistlab import catalog
from mistlab.core.values import InputError
from mistlab.serving.changing import PhaseTimes
from mistlab.serving.changing_run import ChangingRun, changing_run
from mistlab.serving.phase_bytes import phase_bytes
from mistlab.serving.step_cost import RankLayout
from runtime.models.families import shapes_of_model
from runtime.serving.phased_rank import PhasedJob, PhasedRank, ServedRun
from runtime.serving.phased_session import drawn_prompts
from runtime.serving.served_weights import Start
from simulators.serving.changing_layouts import play_phases
from simulators.serving.step_clock import StepClock
from tests.runtime.plain_model import logits_of
from tests.runtime.thread_ranks import Meeting, ThreadGroup, run_threads
from tests.runtime.worlds import starting_tensor, thread_groups

LAYOUT = RankLayout(
    model=catalog.model("llama3-8b"), gpu="H100", engine="vllm", weights="bf16", cache="bf16"
)
# Large weights make logits that differ by far more than sums in another order do.
SCALE = 8.0
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama"},
    "qwen3": {"family": "llama", "qk_norm": True},
    "tied": {"family": "llama", "tied_embeddings": True, "biases": True},
    "gpt": {"family": "gpt", "biases": True},
    "falcon": {"family": "falcon"},
    "windowed": {"family": "llama", "window": {"size": 12}},
}


def start_of(run: ChangingRun) -> Start:
    tied = run.model.tied_embeddings

    def start(name: str, shape: tuple[int, ...]) -> Tensor:
        begun = starting_tensor(name, shape, tied=tied)
        return begun * SCALE if len(shape) > 1 else begun

    return start


def drawn_phases(seed: int, ranks: int) -> tuple[ChangingRun, PhasedJob]:
    """A random run on so many ranks, and its job; draws until both layouts fit the model."""
    draw = np.random.default_rng(seed)
    while True:
        content = _content(draw, ranks)
        try:
            run = changing_run(content, Path())
            load = run.load(int(draw.integers(1000)), Path())
        except InputError:
            continue
        if run.prefill != run.decode or draw.random() < 0.1:
            break
    job = PhasedJob(
        workload=run.workload,
        layouts=(run.prefill.layout, run.decode.layout),
        limits=run.limits,
        load=load,
        prompts=drawn_prompts(run, load, seed),
        start=start_of(run),
        weights_from_host=run.weights_from == "host",
    )
    return run, job


def _content(draw: np.random.Generator, ranks: int) -> dict[str, Any]:
    heads = int(draw.choice([4, 6, 8, 12]))
    kv_heads = int(draw.choice([one for one in (2, 4, 6, 8) if heads % one == 0]))
    model = {
        **FAMILIES[str(draw.choice(list(FAMILIES)))],
        "hidden": 8 * heads,
        "heads": heads,
        "kv_heads": kv_heads,
        "ffn": 12 * heads,
        "layers": int(draw.integers(2, 6)),
        "vocab": int(draw.choice([96, 97])),
    }
    return {
        "model": model,
        "prefill": _degrees(draw, ranks),
        "decode": _degrees(draw, ranks),
        "context": 160,
        "block": int(draw.choice([1, 4, 7])),
        "reading_tokens": int(draw.integers(120, 320)),
        "decoding_tokens": int(draw.integers(120, 320)),
        "host_tokens": int(draw.choice([0, 150, 400])),
        "threshold": float(draw.choice([0.0, 0.1, 0.5])),
        "budget": int(draw.integers(20, 120)),
        "sequences": int(draw.integers(2, 10)),
        "weights_from": str(draw.choice(["peers", "host"])),
        "requests": {
            "count": int(draw.integers(4, 14)),
            "prompt": float(draw.integers(4, 40)),
            "output": float(draw.integers(2, 12)),
        },
    }


def _degrees(draw: np.random.Generator, ranks: int) -> dict[str, int]:
    tp = int(draw.choice([one for one in range(1, ranks + 1) if ranks % one == 0]))
    rest = ranks // tp
    pp = int(draw.choice([one for one in range(1, rest + 1) if rest % one == 0]))
    return {"dp": rest // pp, "tp": tp, "pp": pp}


def served_by_threads(job: PhasedJob) -> list[ServedRun]:
    """All ranks of a job as threads of this process."""
    memory: dict[str, Tensor] = {}
    lock = threading.Lock()

    def host_memory(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        with lock:
            if name not in memory:
                memory[name] = torch.zeros(shape, dtype=dtype)
            return memory[name]

    ranks = job.layouts[0].gpus

    def work(rank: int, meeting: Meeting) -> ServedRun:
        return PhasedRank(
            job,
            world=ThreadGroup(meeting, "world", range(ranks), rank),
            maker=thread_groups(meeting, rank),
            host_memory=host_memory,
        ).run()

    return run_threads(ranks, work)


def tokens_of_plain(run: ChangingRun, job: PhasedJob) -> list[list[int]]:
    """What the plain model answers, one request after another, each token from the whole sequence
    so far; the two likeliest tokens are never nearly alike."""
    shapes = shapes_of_model(run.workload)
    weights = {name: job.start(name, shape) for name, shape in shapes.items()}
    answers = []
    for prompt, output in zip(job.prompts, job.load.outputs, strict=True):
        sequence = list(prompt)
        for _ in range(output):
            logits = logits_of(run.model, weights, torch.tensor([sequence]))[0, -1]
            largest = logits.topk(2).values
            assert largest[0] - largest[1] > 2e-5 * largest[0].abs(), "draw another seed"
            sequence.append(int(logits.argmax()))
        answers.append(sequence[len(prompt) :])
    return answers


def check_served(run: ChangingRun, job: PhasedJob, runs: Sequence[ServedRun]) -> None:
    """Tokens are the plain model's on every rank, actions those of the simulator, and bytes those
    predicted."""
    expected = tokens_of_plain(run, job)
    assert len({token for answer in expected for token in answer}) > 3
    clock = StepClock.of(LAYOUT, most=16)
    played = play_phases(job.load, (clock, clock), job.limits, PhaseTimes())
    predicted = phase_bytes(played.actions, job.layouts, run.workload)
    for done, foretold in zip(runs, predicted, strict=True):
        assert done.tokens == expected
        assert done.actions == played.actions
        assert done.weight_bytes == foretold.weights
        assert done.cache_bytes == foretold.cache
        assert (done.stored_bytes, done.fetched_bytes) == (foretold.stored, foretold.fetched)
