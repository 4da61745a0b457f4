"""Simulates logs of served requests with their arrival times, and compares the latencies with the
measured ones.
"""

import argparse
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.cli.commandline import DONE, print_json
from experiments.pages.tables import table
from experiments.runs.runs_table import count_of, text_of
from experiments.serve.served_rows import MODEL_LENGTH, model_named
from mistlab.core.arrays import Floats
from mistlab.core.files import read_csv
from mistlab.core.values import refuse, shown
from mistlab.serving.engine_constants import ServedRun, fitted_constants
from mistlab.serving.gpu_facts import gpu_named
from mistlab.serving.load import LoadFile
from mistlab.serving.serving_plan import check_layout
from mistlab.serving.steady import capacity_tokens
from mistlab.serving.step_cost import LayoutColumns, RankLayout
from simulators.serving.continuous import Batching, play_continuous
from simulators.serving.step_clock import StepClock

BUDGET, SEQUENCES = 8192, 1024
_PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "": "bf16"}


def play_logs(options: argparse.Namespace) -> int:
    """Simulate logs of served requests, with each run's arrivals, lengths, parallel degrees and
    limits, and compare the latencies with the measured ones.

    RUNS.csv has a row for each run (run, model, hardware, tp, dp, ep, engine, dtype, max_num_seqs,
    max_num_batched_tokens, kv_tokens), LOGS.csv a row for each request (run, arrival_s,
    prompt_tokens, output_tokens, and e2e_s if it was measured). Constants of engines are the
    catalogue's; none of them was fitted to logs.
    """
    logs: dict[str, list[Mapping[str, str]]] = defaultdict(list)
    for row in read_csv(options.logs):
        logs[row.get("run", "")].append(row)
    answers = []
    for run in read_csv(options.runs):
        name = text_of(run, "run")
        if name not in logs:
            refuse(
                f"{options.runs}: run",
                f"{shown(name)} has no requests in {options.logs}: "
                "add some there, or remove the run",
            )
        answers.append(_played(name, run, logs[name]))
    if options.json:
        for answer in answers:
            print_json(answer)
    else:
        print(table(_HEAD, [_line(answer) for answer in answers]))
    return DONE


_HEAD = ["run", "mean s", "measured", "95 % s", "measured", "requests/s", "measured"]


def _line(answer: Mapping[str, Any]) -> list[str]:
    cells = [answer["run"]]
    for name in ("latency_mean_s", "latency_95_s", "requests_per_s"):
        measured = answer[f"measured_{name}"]
        cells += [f"{answer[name]:.2f}", "-" if measured is None else f"{measured:.2f}"]
    return cells


def _played(name: str, run: Mapping[str, str], rows: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    weights = _PRECISIONS.get(text_of(run, "dtype"), text_of(run, "dtype"))
    layout = RankLayout(
        model=model_named(text_of(run, "model")),
        gpu=gpu_named(text_of(run, "hardware")).name,
        engine=text_of(run, "engine") or "vllm",
        weights=weights,
        cache="fp8" if text_of(run, "kv_dtype").startswith("fp8") else "bf16",
        tp=count_of(run, "tp") or 1,
        dp=count_of(run, "dp") or 1,
        ep=count_of(run, "ep") or 1,
    )
    check_layout(layout)
    served = ServedRun(
        engine=layout.engine,
        version=".".join(text_of(run, "engine_version").split(".")[:2]),
        gpu=layout.gpu,
        model=layout.model.name,
        weights=weights,
        kind="rate",
    )
    constants = {key: float(value[0]) for key, value in fitted_constants().of([served]).items()}
    by = {key: np.array([value]) for key, value in constants.items()}
    columns = LayoutColumns.of([layout])
    capacity = count_of(run, "kv_tokens") or int(capacity_tokens(columns, by)[0])
    # With attention data parallelism, each rank has these limits on tokens and requests for its own
    # batch, also if ranks step together.
    together = layout.dp * layout.pp // int(columns.batches[0])
    batching = Batching(
        capacity=capacity,
        budget=(count_of(run, "max_num_batched_tokens") or BUDGET) * together,
        sequences=(count_of(run, "max_num_seqs") or SEQUENCES) * layout.dp,
    )
    context = count_of(run, MODEL_LENGTH) or layout.model.context
    remedy = f"{MODEL_LENGTH} of the weights that ran"
    load = LoadFile(rows=rows, name=name, context=context, remedy=remedy).trace()
    most = batching.sequences
    done = play_continuous(load, StepClock.of(layout, constants, most), batching)
    latencies = np.array([(one.end_s or 0.0) - one.arrival_s for one in done.requests])
    return {
        "run": name,
        **_figures(latencies, done.seconds, ""),
        **_measured(rows),
        "dropped": sum(one.dropped for one in done.requests),
    }


def _measured(rows: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """The latency that was measured for a log of requests; None if it was not measured."""
    if any(not row.get("e2e_s") for row in rows):
        names = ("latency_mean_s", "latency_95_s", "requests_per_s")
        return {f"measured_{name}": None for name in names}
    latencies = np.array([float(row["e2e_s"]) for row in rows])
    arrivals = np.array([float(row["arrival_s"]) for row in rows])
    return _figures(latencies, float(np.max(arrivals + latencies)), "measured_")


def _figures(latencies: Floats, seconds: float, prefix: str) -> dict[str, float]:
    return {
        f"{prefix}latency_mean_s": float(np.mean(latencies)),
        f"{prefix}latency_95_s": float(np.quantile(latencies, 0.95)),
        f"{prefix}requests_per_s": len(latencies) / seconds,
    }
