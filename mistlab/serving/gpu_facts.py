"""Datasheet facts of serving GPUs, and the fitted rates of single kernels on them, from the
catalogue.

``mistlab/catalog/serving.yaml`` has, for each GPU, the name of the catalogue's hardware or numbers
from a datasheet. ``mistlab/catalog/serving_kernels.yaml`` has the fits to tables of single kernels:

    seconds = floor + ((bytes / share / bandwidth)^4 + (operations / share / peak)^4
              + (depth x k)^4)^(1/4)

where ``k`` is the number of values that a GEMM sums for each output: a thread block goes through
them one after another, so a narrow GEMM takes as long as a wide one. A block of experts also
gathers the hidden states of its rows before its GEMMs, and adds up their outputs afterwards:

    seconds = ... + rows x hidden x ROW_BYTES / rows share / bandwidth
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from itertools import product
from typing import Any, Literal

import numpy as np

from mistlab import catalog
from mistlab.core.arrays import Floats
from mistlab.core.files import parse_yaml
from mistlab.core.units import GBYTES, GIB_BYTES, MICROSECONDS, NANOSECONDS, TFLOP
from mistlab.core.values import (
    Checked,
    InputError,
    bounded,
    near_matches,
    quantity,
    refuse,
    shown,
)

Work = Literal["products", "experts", "decode", "prefill", "all_reduce"]
# A kernel's memory time and arithmetic time are combined by a norm of this power: 1 would add them,
# infinity take the larger one.
ROOFS = 4
# Bytes that an expert moves for each hidden value of each token, in 16 bits: the input is read, and
# the output written.
ROW_BYTES = 4.0
# How evenly a router sends tokens to experts: experts' shares of the tokens follow a gamma
# distribution with this shape (larger is more even). Of 4, 2, 1 and 0.5, the shape 1 fits measured
# experts best (median error 10.7 %; 11.7 % with equal shares).
EVENNESS = 1.0
# If the median error of a fitted kernel rate exceeds this, the rate fitted for another engine is
# used instead.
WORST_FIT = 0.4


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """How weights of a precision are stored: the bytes per weight including its scales, and the
    precision in which GPUs that support it multiply them.
    """

    bytes_each: float
    runs_in: Literal["fp16", "fp8", "fp4"]
    # Whether only experts are stored in this precision, and other GEMMs in 16 bits.
    experts_alone: bool = False


FORMATS: Mapping[str, WeightFormat] = {
    "bf16": WeightFormat(bytes_each=2.0, runs_in="fp16"),
    "fp16": WeightFormat(bytes_each=2.0, runs_in="fp16"),
    "fp8": WeightFormat(bytes_each=1.0, runs_in="fp8"),
    "fp8_block": WeightFormat(bytes_each=1.0, runs_in="fp8"),
    "nvfp4": WeightFormat(bytes_each=0.5625, runs_in="fp4"),
    "mxfp4": WeightFormat(bytes_each=0.53125, runs_in="fp4", experts_alone=True),
    "int4": WeightFormat(bytes_each=0.53125, runs_in="fp16", experts_alone=True),
}
CACHE_BYTES: Mapping[str, float] = {"bf16": 2.0, "fp16": 2.0, "fp8": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingGpu(Checked):
    """A GPU for serving, from its datasheet; ``like`` names the GPU whose kernel rates are used for
    it.
    """

    name: str
    memory_gib: float = field(metadata=quantity())
    memory_gbytes_per_s: float = field(metadata=quantity())
    fp16_tflops: float = field(metadata=quantity())
    fp8_tflops: float | None = field(default=None, metadata=quantity())
    fp4_tflops: float | None = field(default=None, metadata=quantity())
    intra_node_gbytes_per_s: float = field(metadata=quantity())
    inter_node_gbytes_per_s: float = field(metadata=quantity())
    host_link_gbytes_per_s: float = field(metadata=quantity())
    host_memory_gib: float = field(metadata=quantity())
    gpus_per_node: int = field(metadata=bounded(minimum=1))
    dollars_an_hour: float | None = field(default=None, metadata=quantity())
    like: str = ""
    # The share of the 16-bit peak rate that GEMMs achieve, if it is not the same as on the GPU that
    # ``like`` names.
    fp16_share: float | None = field(default=None, metadata=bounded(above=0, maximum=1))

    @property
    def memory_bytes(self) -> float:
        """The bytes of memory that programs can use."""
        return self.memory_gib * GIB_BYTES

    @property
    def bytes_per_s(self) -> float:
        """The memory bandwidth of the GPU, in bytes per second."""
        return self.memory_gbytes_per_s * GBYTES

    def flop_per_s(self, precision: str) -> float:
        """The peak rate of GEMMs in a precision; if the GPU lacks the precision, in the next wider
        one that it supports.
        """
        eight = self.fp8_tflops or self.fp16_tflops
        peaks = {"fp16": self.fp16_tflops, "fp8": eight, "fp4": self.fp4_tflops or eight}
        return peaks[precision] * TFLOP


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRate:
    """The fitted rate of one kind of kernels on a GPU: a kernel's minimum time, and the achieved
    shares of memory bandwidth and peak arithmetic (for an all-reduce, of link bandwidth). A GEMM
    takes ``depth_s`` for each value that is summed into an output; experts read and write tokens at
    ``rows_share`` of the bandwidth (None: in no time).
    """

    floor_s: float
    memory_share: float
    arithmetic_share: float
    depth_s: float = 0.0
    rows_share: float | None = None


@cache
def gpu_named(name: str) -> ServingGpu:
    """The serving GPU with this name, as the catalogue or the GPU driver writes it."""
    known, plain = _gpus(), _spelled(name)
    gpu = known.get(name) or _by_spelling().get(plain)
    gpu = gpu or _by_spelling().get(_MEMORY.sub("", plain))
    if gpu is None:
        refuse(
            "hardware", f"{shown(name)} is not a GPU with serving rates{near_matches(name, known)}"
        )
    return gpu


# Matches the words around a GPU's name in drivers' and shops' names: vendors, sockets, form factors
# and memory sizes.
_AROUND = re.compile(r"nvidia|amd|instinct|geforce|tensor ?core|sxm\d?|hbm\w*|oam|[^a-z0-9]")
_MEMORY = re.compile(r"(?<=\d)(40|48|80|96|141|180|192|256|288)gb?$")


def _spelled(name: str) -> str:
    return _AROUND.sub("", name.casefold())


@cache
def _by_spelling() -> Mapping[str, ServingGpu]:
    return {_spelled(name): gpu for name, gpu in _gpus().items()}


def reached_share(share: Floats, tokens: Floats, evenness: float | Floats = EVENNESS) -> Floats:
    """The expected share of all experts that receive at least one token, where each token is sent
    to a ``share`` of the experts.
    """
    expected = -np.log1p(-share) * tokens
    with np.errstate(invalid="ignore"):
        uneven = -np.expm1(-evenness * np.log1p(expected / evenness))
    return np.asarray(np.where(np.isinf(evenness), -np.expm1(-expected), uneven))


def is_native(weights: str, gpu: str) -> bool:
    """Whether a GPU multiplies weights of this format directly; on other GPUs kernels
    dequantise them first.
    """
    runs_in, of = FORMATS[weights].runs_in, gpu_named(gpu)
    peaks = {"fp16": of.fp16_tflops, "fp8": of.fp8_tflops, "fp4": of.fp4_tflops}
    return peaks[runs_in] is not None


def gpu_names() -> tuple[str, ...]:
    """The names of all serving GPUs."""
    return tuple(_gpus())


def kernel_rate(gpu: str, engine: str, work: Work, kind: str) -> KernelRate:
    """The fitted rate of one kind of kernels on a GPU with an engine, for a precision of weights or
    caches or, for all-reduces, a number of GPUs.

    An engine without a fit gets the rate of another engine, a precision that of the nearest
    precision, and a GPU without any fit that of the GPU that it resembles.
    """
    kinds = (kind, *_INSTEAD.get(kind, ()))
    gpus = dict.fromkeys((gpu, gpu_named(gpu).like or gpu, "H100"))
    rates = _rates()
    for nearby in product(gpus, kinds, (engine, *_ENGINES)):
        name, of_kind, maker = nearby
        rate = rates.get((name, maker, work, of_kind))
        if rate is not None:
            return rate
    message = (
        f"hardware {gpu}: the rate of {work} in {kind} was never measured: run "
        "python -m experiments.calibrate_serving with measurements of it"
    )
    raise InputError(message)


def serving_data() -> dict[str, Any]:
    """The content of the catalogue's file on serving GPUs, as plain data."""
    return _data("serving.yaml")


def constants_data() -> dict[str, Any]:
    """The content of the catalogue's file of serving engines' fitted constants, as plain data."""
    return _data("serving_constants.yaml")


_ENGINES = ("vllm", "trtllm", "nccl")
_INSTEAD: Mapping[str, tuple[str, ...]] = {
    "fp16": ("bf16",),
    "fp8_block": ("fp8", "bf16"),
    "fp8": ("bf16",),
    "nvfp4": ("fp8", "bf16"),
    "mxfp4": ("nvfp4", "fp8", "bf16"),
    "int4": ("bf16",),
    "16": ("8",),
    "32": ("8",),
    "64": ("8",),
}


@cache
def _data(name: str) -> dict[str, Any]:
    text = (files("mistlab.catalog") / name).read_text(encoding="utf-8")
    return parse_yaml(text, name)


@cache
def _rates() -> Mapping[tuple[str, str, str, str], KernelRate]:
    rows = _data("serving_kernels.yaml")["rates"]
    return {
        (gpu, engine, work, str(kind)): KernelRate(
            floor_s=floor_us * MICROSECONDS,
            memory_share=memory,
            arithmetic_share=arithmetic,
            depth_s=depth_ns * NANOSECONDS,
            rows_share=rows_share or None,
        )
        for (
            gpu,
            engine,
            work,
            kind,
            floor_us,
            memory,
            arithmetic,
            depth_ns,
            rows_share,
            error,
            _,
        ) in rows
        if error <= WORST_FIT
    }


@cache
def _gpus() -> Mapping[str, ServingGpu]:
    return {name: _gpu(name, content) for name, content in serving_data()["gpus"].items()}


def _gpu(name: str, content: Mapping[str, Any]) -> ServingGpu:
    given = dict(content)
    hardware_name = given.pop("hardware", None)
    if hardware_name is None:
        return ServingGpu(name=name, **given)
    hardware = catalog.hardware(hardware_name)
    peaks, node = hardware.gpu.peak_tflops, hardware.node
    of_catalogue = {
        "memory_gib": hardware.gpu.memory_gib,
        "memory_gbytes_per_s": hardware.gpu.memory_gbytes_per_s,
        "fp16_tflops": peaks.fp16,
        "fp8_tflops": peaks.fp8,
        "fp4_tflops": peaks.fp4,
        "intra_node_gbytes_per_s": node.intra_node_gbytes_per_s,
        "inter_node_gbytes_per_s": node.inter_node_gbytes_per_s,
        "host_link_gbytes_per_s": node.host_link_gbytes_per_s,
        "host_memory_gib": node.host_memory_gib,
        "gpus_per_node": node.gpus,
    }
    return ServingGpu(name=name, **{**of_catalogue, **given})
