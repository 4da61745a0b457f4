"""The bill of a training run: the model's parameters, the duration by a formula, GPU hours, energy
and money.
"""

from dataclasses import dataclass, field, replace

from mistlab.core.values import Checked, bounded
from mistlab.graph.stage_model import StageModel
from mistlab.machine.consistency import OF_BOARD
from mistlab.plan.plan import Plan, StagePlan
from mistlab.plan.workload import Workload
from mistlab.stages.stage_batch import StageBatch

# Counts the parameters of a model, from its layer graphs.


def model_parameters(workload: Workload) -> int:
    """The number of parameters of a workload's model, all layers together. What only some engines
    train in does not change it.
    """
    counted = replace(
        workload,
        precision="bf16",
        optimizer="adamw",
        gradients="usual",
        expert_capacity=None,
        expert_padding=False,
    )
    whole = StagePlan(
        layers=workload.model.layers, data_parallel=1, tensor_parallel=1, micro_batch=1
    )
    batch = StageBatch.of_plan(Plan(micro_batches=1, stages=(whole,)))
    return round(float(StageModel.of(counted).figures(batch).parameters[0]))


# The duration of a training run by a formula: 8 T P / (N F U) (Narayanan et al., SC 2021, section
# 5.1).
#
# T tokens through P parameters take 8 T P operations with full recomputation: per parameter and
# token two forward, four backward, and two for the second forward pass. N GPUs have a peak of F
# operations per second, and sustain the share U of it.


# The compute-optimal number of training tokens per parameter (Hoffmann et al. 2022, arXiv
# 2203.15556).
CHINCHILLA_TOKENS_A_PARAMETER = 20.0
OPERATIONS_RECOMPUTED = 8.0
# Without the second forward pass.
OPERATIONS_ONCE = 6.0
# Frozen weights need no weight gradients, which saves two operations per parameter and token.
OPERATIONS_FROZEN = 6.0


def operations_of(workload: Workload) -> float:
    """The operations per parameter and token with full recomputation: eight, or six where the
    weights are frozen.
    """
    return OPERATIONS_FROZEN if workload.train == "adapters" else OPERATIONS_RECOMPUTED


def training_s(
    *,
    tokens: float,
    parameters: float,
    gpus: int,
    peak_flop_per_s: float,
    utilisation: float,
    operations: float = OPERATIONS_RECOMPUTED,
) -> float:
    """The seconds of a training run by the formula 8 T P / (N F U), where its GPUs sustain the
    share U of their peak; ``operations`` stands in place of 8.

    >>> seconds = training_s(
    ...     tokens=300e9, parameters=175e9, gpus=1024, peak_flop_per_s=312e12, utilisation=0.44
    ... )
    >>> round(seconds / 86400, 1)
    34.6
    """
    return operations * tokens * parameters / (gpus * peak_flop_per_s * utilisation)


def utilisation_of(
    *,
    tokens: float,
    parameters: float,
    gpus: int,
    peak_flop_per_s: float,
    seconds: float,
    operations: float = OPERATIONS_RECOMPUTED,
) -> float:
    """The share U of the GPUs' peak with which the formula 8 T P / (N F U) gives this duration."""
    at_peak_s = training_s(
        tokens=tokens,
        parameters=parameters,
        gpus=gpus,
        peak_flop_per_s=peak_flop_per_s,
        utilisation=1.0,
        operations=operations,
    )
    return at_peak_s / seconds


def chinchilla_tokens(parameters: float) -> float:
    """The compute-optimal number of training tokens for a model with this many parameters."""
    return CHINCHILLA_TOKENS_A_PARAMETER * parameters


def batch_of(batch_tokens: float, sequence_length: int) -> int:
    """The number of sequences of an optimizer step with about ``batch_tokens`` tokens, rounded to
    half of the largest power of two in it, so that many data-parallel degrees divide it.

    >>> batch_of(3.2e6, 2048), batch_of(4e6, 2048), batch_of(0.5e6, 2048)
    (1536, 2048, 256)
    """
    sequences = max(1, round(batch_tokens / sequence_length))
    step = 1 << max(0, sequences.bit_length() - 2)
    return max(1, round(sequences / step) * step)


def steps_of(tokens: float, tokens_a_step: int) -> float:
    """The number of optimizer steps that train on this many tokens."""
    return tokens / tokens_a_step


# The cost of GPU hours: money, energy and carbon, at given prices and intensities.


WATTS_A_KILOWATT = 1000.0
# The range in which the price of a GPU hour must lie, in dollars.
OF_AN_HOUR = bounded(
    minimum=0, most=40, usual="dollars of one GPU (250 cents are 2.5; a node of 8 for 98 is 12.25)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices(Checked):
    """The price, power and carbon intensity of one GPU for an hour.

    ``watts`` is the power of a GPU's board. ``overhead`` is what the whole building draws for each
    watt of its machines (power usage effectiveness), ``kg_per_kwh`` the carbon dioxide of a
    kilowatt hour.
    """

    usd_per_gpu_hour: float = field(metadata=OF_AN_HOUR)
    watts: float = field(metadata=bounded(minimum=0, least=5, most=5000, usual=OF_BOARD))
    overhead: float = field(metadata=bounded(minimum=1, most=10, usual="a factor (120 % are 1.2)"))
    kg_per_kwh: float = field(metadata=bounded(minimum=0, most=5, usual="kg (414 g are 0.414)"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """What a number of GPU hours costs: money, energy and carbon."""

    gpu_hours: float
    usd: float
    kwh: float
    carbon_kg: float


def bill_of(gpu_hours: float, prices: Prices) -> Bill:
    """The money, energy and carbon of a number of GPU hours at these prices."""
    kwh = gpu_hours * prices.watts / WATTS_A_KILOWATT * prices.overhead
    return Bill(
        gpu_hours=gpu_hours,
        usd=gpu_hours * prices.usd_per_gpu_hour,
        kwh=kwh,
        carbon_kg=kwh * prices.kg_per_kwh,
    )


def gpu_hours_of(gpus: int, seconds: float) -> float:
    """The GPU hours of a number of GPUs that are used for this many seconds."""
    return gpus * seconds / 3600
