"""Reads the rows of tables of measured serving runs, each as a layout (parallel degrees) and a
load.

A table's columns tell which of three kinds it is: closed-loop runs (``concurrency``), offline
throughput (``tokens_per_s``, all requests at once or a static batch), or runs at a rate of requests
(``request_rate``).
"""

import csv
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from experiments.runs.runs_table import count_of, flag_of, number_of, text_of
from mistlab import catalog
from mistlab.core.values import MOST_NODES, InputError, near_matches, refuse, reject, shown
from mistlab.plan.workload import ModelSpec
from mistlab.serving.engine_constants import ServedRun
from mistlab.serving.gpu_facts import CACHE_BYTES, FORMATS, gpu_named, serving_data
from mistlab.serving.serving_plan import MOST_DEGREE
from mistlab.serving.step_cost import RankLayout

Kind = Literal["closed loop", "offline", "static batch", "rate"]
# How many requests are assumed to be in flight in an offline run: more than fit in the memory of
# any GPUs.
OFFLINE_IN_FLIGHT = 4096.0
# How many prompt tokens a serving engine prefills per pass at most, by default.
BUDGET = 8192.0
# How many requests each serving engine runs at the same time at most, by default.
SEQUENCES = {"vllm": 1024.0, "sglang": 1024.0, "trtllm": 2048.0}
# Engines that by default prefill all waiting prompts before they decode.
READS_FIRST = frozenset(("sglang",))
DP_UNSAID = "dp unsaid"
# The column for an engine's limit on the tokens of prompt and output together; vLLM calls it by
# this name.
MODEL_LENGTH = "max_model_len"
# The label for runs whose row does not state the version of the engine.
UNSAID = "unsaid"
# Limits for the loads of rows, far beyond measured ones: the most tokens of a prompt or answer, the
# most requests in flight or per second, and the lowest request rate (one in twelve days).
MOST_LENGTH, MOST_REQUESTS, LEAST_RATE = 10**7, 10**6, 1e-6
# The precision of weights that each name in tables stands for.
_WEIGHTS = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "int4_wo": "int4",
    "fp4": "nvfp4",
}
_CACHES = {**_WEIGHTS, "fp8_e4m3": "fp8", "fp8_e5m2": "fp8", "auto": ""}
_ENGINES = {"tensorrt-llm": "trtllm", "trt-llm": "trtllm", "tensorrt_llm": "trtllm"}
_MODES = ("aggregated", "disaggregated")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRow:
    """A measured serving run: its layout, its load, and its measurements (None for what was not
    measured).

    If prefill has GPUs of its own, ``prefill`` is the layout of each worker that prefills prompts.
    """

    number: int
    kind: Kind
    run: ServedRun
    layout: RankLayout
    prefill: RankLayout | None
    workers: tuple[int, int]
    in_flight: float
    prompt: float
    output: float
    sequences: float
    rate: float | None
    requests: int | None
    notes: tuple[str, ...]
    # Whether all requests have equal lengths, so that many of them end at the same time.
    has_one_length: bool
    # Whether the row states that the run used no speculative decoding.
    is_sure: bool
    first_s: float | None
    token_s: float | None
    output_per_s: float | None

    @property
    def gpus(self) -> int:
        """The number of GPUs of the run."""
        if self.prefill is None:
            return self.layout.gpus * self.workers[1]
        readers, decoders = self.workers
        return self.prefill.gpus * readers + self.layout.gpus * decoders

    @property
    def says_dp(self) -> bool:
        """Whether the row states the degree of attention data parallelism, or its model cannot have
        it.
        """
        return not any(note.startswith(DP_UNSAID) for note in self.notes)

    @property
    def configuration(self) -> str:
        """A key that is equal for runs that differ only in concurrency, version, date or attention
        data parallelism.
        """
        layout = self.layout
        parts = (layout.model.name, layout.gpu, layout.engine, layout.weights, layout.tp)
        where = "split" if self.prefill else f"{layout.ep}"
        return " ".join(map(str, (*parts, where, round(self.prompt), round(self.output))))


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedRow:
    """A row of a serving table that cannot be predicted, and the reason."""

    number: int
    problem: str


def served_rows(path: Path) -> Iterator[ServedRow | RefusedRow]:
    """The rows of a table of serving runs, in order, each as a run or as a refusal."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, restval="")
            names = [name.strip().casefold() for name in reader.fieldnames or ()]
            reader.fieldnames = names
            kind = _kind_of(path, names)
            for number, cells in enumerate(reader, 1):
                yield _row(number, kind, cells)
    except OSError as error:
        reject(f"{path}: {error.strerror}: give the path of a CSV file")
    except UnicodeDecodeError:
        reject(f"{path}: is not UTF-8: give a table in UTF-8")
    except csv.Error as error:
        reject(f"{path}: {error}: give a CSV file in UTF-8")


def _kind_of(path: Path, names: list[str]) -> Kind:
    if "concurrency" in names:
        return "closed loop"
    if "request_rate" in names:
        return "rate"
    if {"isl", "osl", "model", "hardware"} <= set(names):
        return "offline"
    message = (
        f"{path}: has no column concurrency or request_rate, nor the columns isl and osl: give a "
        "table of serving runs with one of them"
    )
    raise InputError(message)


def _row(number: int, kind: Kind, cells: dict[Any, Any]) -> ServedRow | RefusedRow:
    # csv.DictReader puts cells for which the header has no name under the key None.
    if beyond := cells.pop(None, None):
        problem = f"{len(beyond)} more cells than columns: give cells with commas in quotes"
        return RefusedRow(number=number, problem=problem)
    try:
        return _served(number, kind, cells)
    except InputError as error:
        return RefusedRow(number=number, problem=str(error))


def _served(number: int, kind: Kind, cells: Mapping[str, str]) -> ServedRow:
    notes: list[str] = []
    _refuse_unbuilt(cells, notes)
    engine = text_of(cells, "engine").casefold() or "trtllm"
    engine = _ENGINES.get(engine, engine)
    if engine not in SEQUENCES:
        refuse("engine", f"{shown(engine)} is unknown{near_matches(engine, SEQUENCES)}")
    model_name = text_of(cells, "model")
    model = model_named(model_name)
    if model.is_encoder:
        refuse(
            "model", f"{shown(model_name)} is an encoder, which generates no tokens: give a decoder"
        )
    gpu = gpu_named(text_of(cells, "hardware")).name
    weights = _weights(cells)
    cache_kind = _cache(cells, weights, notes)
    own_kind: Kind = "static batch" if kind == "offline" and count_of(cells, "batch") else kind
    split = _mode(cells) == "disaggregated"
    if split and own_kind in ("rate", "static batch"):
        refuse(
            "mode",
            "disaggregated (prefill and decoding on separate GPUs) cannot be predicted for a "
            f"{'request rate' if own_kind == 'rate' else own_kind}: give the requests in flight in "
            "a column concurrency",
        )
    layout, prefill, workers = _layouts(
        cells,
        RankLayout(model=model, gpu=gpu, engine=engine, weights=weights, cache=cache_kind),
        notes,
    )
    length, (prompt, output) = _factor(cells), _lengths(cells)
    _check_context(cells, model, (prompt * length, output * length), notes)
    version = text_of(cells, "version") or text_of(cells, "engine_version")
    in_flight, rate, requests = _load(own_kind, cells)
    return ServedRow(
        number=number,
        kind=own_kind,
        run=ServedRun(
            engine=engine,
            version=_short(version),
            gpu=gpu,
            model=model.name,
            weights=weights,
            kind=own_kind,
            mode="disaggregated" if split else "aggregated",
        ),
        layout=layout,
        prefill=prefill,
        workers=workers,
        in_flight=in_flight,
        prompt=max(1.0, prompt * length),
        output=max(1.0, output * length),
        sequences=SEQUENCES[engine],
        rate=rate,
        requests=requests,
        notes=tuple(notes),
        has_one_length=own_kind == "offline" or (length == 1.0 and "length_factor" in cells),
        is_sure=text_of(cells, "spec").casefold() == "none" or "spec" not in cells,
        first_s=number_of(cells, "ttft_s"),
        token_s=number_of(cells, "tpot_s") or number_of(cells, "itl_s"),
        output_per_s=_measured_output(kind, cells),
    )


def _refuse_unbuilt(cells: Mapping[str, str], notes: list[str]) -> None:
    spec = text_of(cells, "spec").casefold()
    if cells.get("spec", "").casefold() == "unknown":
        notes.append("spec unknown: predicted without speculative decoding")
    if spec not in ("", "none", "false", "0"):
        refuse(
            "spec",
            f"{shown(spec)}: speculative decoding cannot be predicted: give none, for "
            "runs without it",
        )
    if flag_of(cells, "prefix_caching"):
        prefix = text_of(cells, "prefix_caching")
        refuse("prefix_caching", f"{shown(prefix)}: prefix caching cannot be predicted: give false")


def _short(version: str) -> str:
    """The first two numbers of a version, as text; ``UNSAID`` if there are none."""
    match = re.match(r"v?(\d+\.\d+)", version)
    return match[1] if match else UNSAID


def _weights(cells: Mapping[str, str]) -> str:
    column = _column(cells, "weights", "precision", "dtype")
    text = text_of(cells, column)
    name = _WEIGHTS.get(text.casefold(), text.casefold())
    if name not in FORMATS:
        refuse(column, f"{shown(text)} is unknown{near_matches(name, FORMATS)}")
    return name


def _column(cells: Mapping[str, str], *names: str) -> str:
    """The first of these columns that is not empty; if all are empty, the first that the table
    has.
    """
    has = [name for name in names if name in cells]
    return next((name for name in has if text_of(cells, name)), (*has, names[0])[0])


def _limited(
    cells: Mapping[str, str], column: str, least: float, most: float, what: str
) -> float | None:
    """The number in a cell, None if it is empty; refuses a number outside the limits."""
    number = number_of(cells, column)
    if number is not None and not least <= number <= most:
        refuse(column, f"{shown(text_of(cells, column))} {what}: give {least:g} to {most:g}")
    return number


def _cache(cells: Mapping[str, str], weights: str, notes: list[str]) -> str:
    text = text_of(cells, "kv") or text_of(cells, "kv_dtype")
    name = _CACHES.get(text.casefold(), text.casefold())
    if name in ("bf16", "fp16", "fp8"):
        return "bf16" if name == "fp16" else name
    if name:
        refuse("kv", f"{shown(text)} is unknown{near_matches(name, CACHE_BYTES)}")
    narrow = weights in ("fp8", "fp8_block", "nvfp4")
    notes.append(f"kv unsaid: {'fp8' if narrow else 'bf16'} assumed")
    return "fp8" if narrow else "bf16"


def _mode(cells: Mapping[str, str]) -> str:
    mode = text_of(cells, "mode").casefold() or _MODES[0]
    if mode not in _MODES:
        refuse("mode", f"{shown(mode)} is unknown{near_matches(mode, _MODES)}")
    return mode


def _layouts(
    cells: Mapping[str, str], plain: RankLayout, notes: list[str]
) -> tuple[RankLayout, RankLayout | None, tuple[int, int]]:
    if _mode(cells) != "disaggregated":
        layout = _layout(cells, plain, "")
        if layout.ep > 1 and count_of(cells, "dp") is None:
            notes.append(f"{DP_UNSAID}: {layout.dp} assumed")
        replicas = 1
        gpus = _count(cells, "gpus", MOST_NODES)
        if gpus and gpus % layout.gpus:
            refuse(
                "gpus",
                f"{gpus} is not a multiple of the {layout.gpus} GPUs of a replica (tp x pp x dp): "
                "give a multiple, or leave it empty",
            )
        if gpus and gpus > layout.gpus:
            if count_of(cells, "dp") is None and layout.ep > layout.tp:
                layout = _with(layout, "", dp=gpus // (layout.tp * layout.pp), ep=layout.ep)
                notes[-1] = f"{DP_UNSAID}: {layout.dp} assumed"
            else:
                replicas = gpus // layout.gpus
                notes.append(f"{replicas} replicas of {layout.gpus} GPUs assumed")
        return layout, None, (0, replicas)
    readers, decoders = (
        _count(cells, f"{phase}_workers", MOST_DEGREE) for phase in ("prefill", "decode")
    )
    if readers is None or decoders is None:
        notes.append("workers unsaid: one for prompts and one for decoding assumed")
    decode, prefill = _layout(cells, plain, "decode_"), _layout(cells, plain, "prefill_")
    workers = readers or 1, decoders or 1
    of_workers = prefill.gpus * workers[0] + decode.gpus * workers[1]
    if (gpus := _count(cells, "gpus", MOST_NODES)) not in (None, of_workers):
        refuse(
            "gpus",
            f"{gpus}, but the prefill and decode workers of this row have {of_workers} GPUs "
            "together: give prefill_workers, decode_workers and degrees with that number of GPUs",
        )
    return decode, prefill, workers


def _count(cells: Mapping[str, str], column: str, most: int) -> int | None:
    count = count_of(cells, column)
    if count is not None and count > most:
        refuse(column, f"{count} is too large: give at most {most}, or leave it empty")
    return count


def _layout(cells: Mapping[str, str], plain: RankLayout, prefix: str) -> RankLayout:
    def degree(name: str) -> int:
        return _count(cells, f"{prefix}{name}", MOST_DEGREE) or 1

    tp, pp, ep, dp = degree("tp"), degree("pp"), degree("ep"), degree("dp")
    if prefix == "" and count_of(cells, "tp") is None and (gpus := count_of(cells, "gpus")):
        tp = gpus
    if dp == 1 and ep > tp:
        dp = ep // tp
    return _with(plain, prefix, tp=tp, pp=pp, ep=ep, dp=dp)


def _with(plain: RankLayout, prefix: str, **degrees: Any) -> RankLayout:
    layout = replace(plain, **degrees)
    model = layout.model
    experts = model.experts
    ranks = layout.tp * layout.dp
    if model.heads % layout.tp:
        refuse(
            f"{prefix}tp",
            f"{layout.tp} does not divide heads {model.heads}: give a divisor of {model.heads}",
        )
    if layout.ep > 1 and experts is None:
        refuse(f"{prefix}ep", f"{layout.ep}, but {model.name} has no experts: give 1")
    if layout.ep > ranks or ranks % layout.ep:
        refuse(
            f"{prefix}ep",
            f"{layout.ep} does not divide tp x dp = {ranks}: give a divisor of {ranks}",
        )
    if layout.pp > model.layers:
        refuse(
            f"{prefix}pp",
            f"{layout.pp} is more than the {model.layers} layers: give at most {model.layers}",
        )
    return layout


def _lengths(cells: Mapping[str, str]) -> tuple[float, float]:
    lengths = []
    for name in ("isl", "osl"):
        column = _column(cells, name, f"{name}_mean")
        tokens = _limited(cells, column, 1, MOST_LENGTH, "is not a number of tokens in a request")
        if tokens is None:
            refuse(column, "is empty: give the tokens of prompts and of outputs")
        lengths.append(tokens)
    return lengths[0], lengths[1]


def _check_context(
    cells: Mapping[str, str], model: ModelSpec, lengths: tuple[float, float], notes: list[str]
) -> None:
    """Refuse requests longer than the context length: the limit that the row states for its engine
    or, if it states none, the released model's. Models with rotary embedding may exceed the latter
    as long as the prompt alone does not.
    """
    stated = _count(cells, MODEL_LENGTH, MOST_LENGTH)
    context = stated or model.context
    prompt, output = lengths
    if context is None or prompt + output <= context:
        return
    of = f"{MODEL_LENGTH} {stated}" if stated else f"the context of {context} of {model.name}"
    if prompt > context or stated or model.learned_positions:
        refuse(
            _column(cells, "isl", "isl_mean"),
            f"{prompt:g}, with {output:g} of output, is more than {of}: give fewer tokens, or "
            f"a column {MODEL_LENGTH} of the weights that ran",
        )
    notes.append(f"prompt and output exceed {of}: costs are predicted, not what is answered")


def _factor(cells: Mapping[str, str]) -> float:
    what = "is not a mean length relative to isl and osl"
    return _limited(cells, "length_factor", 0.01, 10, what) or 1.0


def _load(kind: Kind, cells: Mapping[str, str]) -> tuple[float, float | None, int | None]:
    """The load of a row: its requests in flight, its requests per second, and its number of
    requests.
    """
    if kind == "closed loop":
        in_flight = _limited(cells, "concurrency", 1, MOST_REQUESTS, "requests cannot be in flight")
        if in_flight is None:
            refuse("concurrency", "is empty: give the requests in flight")
        return in_flight, None, None
    if kind == "static batch":
        return float(_count(cells, "batch", MOST_REQUESTS) or 1), None, None
    if kind == "offline":
        return OFFLINE_IN_FLIGHT, None, None
    requests = _count(cells, "requests", MOST_REQUESTS) or 500
    text = text_of(cells, "request_rate").casefold()
    if text in ("inf", "infinity"):
        return float(requests), math.inf, requests
    what = "is not a rate of requests a second"
    rate = _limited(cells, "request_rate", LEAST_RATE, MOST_REQUESTS, what)
    if rate is None:
        refuse("request_rate", "is empty: give requests a second, or INF")
    return 0.0, rate, requests


def _measured_output(kind: Kind, cells: Mapping[str, str]) -> float | None:
    """The measured output tokens per second over all GPUs; None if they were not measured, or were
    computed from other figures.
    """
    column = {"offline": "tokens_per_s", "rate": "output_tokens_per_s"}.get(kind)
    return None if column is None else number_of(cells, column)


# Matches what follows the size in a model's name: words for instruction tuning and precision, and
# dates.
_AFTER_SIZE = re.compile(
    r"-(instruct|chat|it|hf|base|exp|thinking|awq|gptq|w4a16|"
    r"fp8|fp4|nvfp4|mxfp4|int4|bf16|fp16|0528|0905|2507|v0\.\d).*$"
)


@cache
def model_named(name: str) -> ModelSpec:
    """The model of the catalogue for a name in a serving table, with or without its owner's prefix,
    and with the context length of the released weights.
    """
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        refuse("model", f"{shown(name)} is a path: give a name, such as llama3-8b")
    whole = text = name.casefold().rpartition("/")[2].removeprefix("meta-")
    aliases: Mapping[str, str] = serving_data()["models"]
    if text not in catalog.model_names() and text not in aliases:
        text = _AFTER_SIZE.sub("", text)
    known = aliases.get(text, text)
    if known not in catalog.model_names():
        names = dict.fromkeys((*aliases, *catalog.model_names()))
        refuse("model", f"{shown(name)} is unknown{near_matches(text, names)}")
    contexts: Mapping[str, int] = serving_data()["contexts"]
    model = catalog.model(known)
    return replace(model, context=contexts.get(whole, contexts.get(text, model.context)))
