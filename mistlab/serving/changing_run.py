"""The input file of a real serving run that switches layouts (parallel degrees) between prefill and
decoding: a model, both layouts, memory capacities and requests.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mistlab.core.files import naming, read_csv, read_yaml
from mistlab.core.values import (
    MOST_TOKENS,
    Checked,
    bounded,
    check_fields,
    from_mapping,
    refuse,
    within,
)
from mistlab.job.job import model_from
from mistlab.plan.workload import ModelSpec, Workload
from mistlab.serving.load import Lengths, LoadFile, ServingLoad, Shape, drawn_load
from mistlab.serving.phase_schedule import PhaseLimits
from mistlab.serving.resharding import Layout

MOST_RANKS = 4096
LONGEST = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees(Checked):
    """The parallel degrees of a serving layout: the number of replicas, and each replica's tensor-
    and pipeline-parallel degrees.
    """

    dp: int = field(default=1, metadata=bounded(minimum=1, most=MOST_RANKS))
    tp: int = field(default=1, metadata=bounded(minimum=1, most=MOST_RANKS))
    pp: int = field(default=1, metadata=bounded(minimum=1, most=MOST_RANKS))

    @property
    def layout(self) -> Layout:
        """The serving layout that has the parallel degrees of these fields."""
        return Layout(dp=self.dp, tp=self.tp, pp=self.pp)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnRequests(Checked):
    """The requests of a serving run, which all arrive at once: their lengths are drawn at random
    around given means, or read from the file ``trace``.
    """

    count: int = field(default=16, metadata=bounded(minimum=1, most=10**6))
    prompt: float = field(default=32.0, metadata=bounded(above=0, most=MOST_TOKENS))
    output: float = field(default=16.0, metadata=bounded(above=0, most=MOST_TOKENS))
    lengths: Shape = "lognormal"
    trace: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangingRun:
    """The input of ``run_serving``: a model, the parallel degrees for prefill and for decoding, the
    requests, and how many tokens' keys and values fit in a replica's and in the host's memory.
    """

    model: ModelSpec
    prefill: Degrees
    decode: Degrees
    requests: DrawnRequests = field(default_factory=DrawnRequests)
    precision: Literal["fp32", "fp16", "bf16"] = "fp32"
    context: int = field(default=512, metadata=bounded(minimum=2, most=MOST_TOKENS))
    block: int = field(default=16, metadata=bounded(minimum=1, most=MOST_TOKENS))
    reading_tokens: int = field(default=2048, metadata=bounded(minimum=1, most=10**12))
    decoding_tokens: int = field(default=2048, metadata=bounded(minimum=1, most=10**12))
    host_tokens: int = field(default=8192, metadata=bounded(minimum=0, most=10**12))
    threshold: float = field(default=0.05, metadata=bounded(minimum=0, maximum=1))
    budget: int = field(default=512, metadata=bounded(minimum=1, most=MOST_TOKENS))
    sequences: int = field(default=64, metadata=bounded(minimum=1, most=10**6))
    weights_from: Literal["peers", "host"] = "peers"

    def __post_init__(self) -> None:
        check_fields(self)
        reading, decoding = self.prefill.layout.gpus, self.decode.layout.gpus
        if reading != decoding:
            refuse(
                "decode",
                f"{decoding} ranks decode, but {reading} prefill: give decode and prefill degrees "
                "with the same product",
            )
        for name in ("prefill", "decode"):
            self._check_layout(name, getattr(self, name))
        learned = self.model.learned_positions
        if learned is not None and self.context > learned:
            refuse(
                "context",
                f"{self.context} is more than the {learned} learned positions of the model: give "
                f"at most {learned}",
            )
        for name in ("reading_tokens", "decoding_tokens"):
            if getattr(self, name) < self.block:
                refuse(
                    name,
                    f"{getattr(self, name)} is less than block {self.block}: give at "
                    f"least {self.block}",
                )

    def _check_layout(self, name: str, degrees: Degrees) -> None:
        model = self.model
        for what in ("heads", "kv_heads"):
            count = getattr(model, what)
            if count % degrees.tp:
                refuse(
                    f"{name}.tp",
                    f"{degrees.tp} does not divide {what} {count}: give a divisor of {count}",
                )
        if model.ffn % degrees.tp:
            refuse(
                f"{name}.tp",
                f"{degrees.tp} does not divide ffn {model.ffn}: give a divisor of {model.ffn}",
            )
        if degrees.pp > model.layers:
            refuse(
                f"{name}.pp",
                f"{degrees.pp} is more than the {model.layers} layers: give at most {model.layers}",
            )
        unlike = {
            "experts": model.experts,
            "latent": model.latent,
            "pattern": model.pattern,
            "sinks": model.sinks,
        }
        for what, part in unlike.items():
            if part:
                refuse(
                    f"model.{what}",
                    "is not supported by serving that switches layouts: give a model without it",
                )

    @property
    def workload(self) -> Workload:
        """A training workload with this model, whose sequences are as long as the longest request
        may be.
        """
        return Workload(
            model=self.model,
            sequence_length=self.context,
            global_batch=1,
            attention="flash",
            precision=self.precision,
        )

    @property
    def limits(self) -> PhaseLimits:
        """The limits of a serving run: memory for keys and values, tokens of a prefill pass, and
        requests that run at once.
        """
        return PhaseLimits(
            block=self.block,
            reading_blocks=self.reading_tokens // self.block,
            decoding_blocks=self.decoding_tokens // self.block,
            host_blocks=self.host_tokens // self.block,
            threshold=self.threshold,
            budget=self.budget,
            sequences=self.sequences,
            readers=self.prefill.dp,
            decoders=self.decode.dp,
        )

    def load(self, seed: int, folder: Path) -> ServingLoad:
        """The requests of the run: those of the trace, all arriving together, or requests drawn
        with the seed.
        """
        of = self.requests
        if of.trace is not None:
            given = LoadFile(rows=read_csv(folder / of.trace), name=of.trace).trace()
            load = ServingLoad(
                prompts=given.prompts,
                outputs=given.outputs,
                arrivals_s=(0.0,) * len(given),
            )
        else:
            lengths = [
                Lengths(shape=of.lengths, tokens=mean, most=round(LONGEST * mean) + 1)
                for mean in (of.prompt, of.output)
            ]
            draw = np.random.default_rng(seed)
            load = drawn_load(of.count, (lengths[0], lengths[1]), draw)
        with within("requests"):
            load.check_context(self.context)
            self.limits.check(load)
        return load


def changing_run(content: Mapping[str, Any], folder: Path) -> ChangingRun:
    """The serving run that a mapping describes; paths in it are relative to ``folder``."""
    given = dict(content)
    if "model" not in given:
        refuse("model", "missing: give a catalogue name, a path or a mapping")
    given["model"] = model_from(given["model"], folder)
    return from_mapping(ChangingRun, given)


def load_changing_run(path: Path) -> ChangingRun:
    """The serving run that a YAML file describes."""
    with naming(path):
        return changing_run(read_yaml(path), path.parent)
