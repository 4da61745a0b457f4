"""How Megatron-LM's options divide experts among ranks and send tokens to them, and back.

Whatever the options say, routing is taken as even: a loss for balance, which they switch on, makes
it nearly so. Tokens are sent by the plain exchange (``alltoall``).
"""

from collections.abc import Iterator

from mistlab.core.values import InputError
from mistlab.export.found import Found
from mistlab.export.megatron_flags import Options, is_of_deepspeed
from mistlab.job.job import Job

# Where experts are not divided otherwise, tensor-parallel ranks divide each expert.
_PARTS, _RANKS = "--expert-tensor-parallel-size", "--expert-model-parallel-size"
# The strength of the loss for balance that Megatron-LM recommends to begin with.
_BALANCE = "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01"
_CAPACITY = "--moe-expert-capacity-factor"
# MindSpeed's switch for tensor-parallel ranks that divide experts, not each expert.
_EXPERTS_DIVIDED = "--moe-tp-extend-ep"
# Megatron-core's (0.8 to 0.9) for ranks of both degrees that divide each expert
# (megatron/core/transformer/moe/moe_layer.py and experts.py).
_EXPERT_DIVIDED = "--moe-extended-tp"
_EXCHANGES = ("allgather", "alltoall", "alltoall_seq", "flex")


def expert_options(job: Job) -> Iterator[str]:
    """The options of a job's experts beyond their sizes."""
    stage, workload = job.plan.stages[0], job.workload
    if workload.model.experts is None:
        return
    yield f"{_RANKS} {stage.expert_parallel} {_PARTS} {stage.expert_tensor_parallel}"
    yield f"--moe-grouped-gemm --moe-token-dispatcher-type alltoall {_BALANCE}"
    if workload.expert_capacity is not None:
        yield f"--moe-expert-capacity-factor {workload.expert_capacity!r}"
    if workload.expert_padding:
        yield "--moe-pad-expert-input-to-capacity"


def read_experts(options: Options, found: Found, *, has_experts: bool) -> None:
    """The degrees and the capacity of experts, where a model has any."""
    ranks, parts = _divisions(options, found)
    capacity, pads = _capacity(options)
    if not has_experts:
        if ranks > 1:
            where = options.where(_RANKS)
            message = f"{where} {ranks}: the model has no experts: give --num-experts, or 1"
            raise InputError(message)
        return
    found.values |= {"expert_parallel": ranks, "expert_tensor_parallel": parts}
    found.expert_capacity = capacity or None
    found.expert_padding = pads and capacity > 0
    if pads and not capacity:
        text = "--moe-pad-expert-input-to-capacity without --moe-expert-capacity-factor: ignored"
        found.remark("contradicting", "expert_padding", text)
    of_deepspeed = is_of_deepspeed(options)
    is_whole = found.values["tensor_parallel"] > 1 and not options.has("--sequence-parallel")
    if is_whole and not of_deepspeed:
        text = "off, but Megatron-LM trains experts with tensor parallelism only with it"
        found.remark("contradicting", "sequence_parallel", f"{text}: taken on")
        found.values["sequence_parallel"] = 1
    if not of_deepspeed:
        # DeepSpeed has one exchange, and balances by a loss of its own.
        _remark_exchange(options, found)
        _remark_balance(options, found)


def _divisions(options: Options, found: Found) -> tuple[int, int]:
    """Ranks that divide the experts, and ranks that divide each expert."""
    tensor = found.values["tensor_parallel"]
    ranks = options.whole(_RANKS) or 1
    if options.has(_EXPERTS_DIVIDED):
        text = f"{ranks * tensor}, as {_EXPERTS_DIVIDED} gives tensor-parallel ranks experts too"
        found.remark("noted", "expert_parallel", text)
        return ranks * tensor, 1
    if options.has(_EXPERT_DIVIDED):
        return 1, ranks * tensor
    if is_of_deepspeed(options):
        return ranks, tensor if options.has("--enable-expert-tensor-parallelism") else 1
    return ranks, options.whole(_PARTS) or tensor


def _capacity(options: Options) -> tuple[float, bool]:
    """The capacity factor of experts, 0 for none, and whether experts are filled up to it."""
    if is_of_deepspeed(options):
        if options.has("--disable-moe-token-dropping"):
            return 0.0, False
        return options.number(_CAPACITY, 1.0), True
    return options.number(_CAPACITY, 0.0), options.has("--moe-pad-expert-input-to-capacity")


def _remark_exchange(options: Options, found: Found) -> None:
    exchange = options.choice("--moe-token-dispatcher-type", _EXCHANGES) or "allgather"
    if exchange == "flex":
        text = (
            "flex: tokens are taken as sent by alltoall; --engine megatron-bridge has fused kernels"
        )
        found.remark("ignored", "--moe-token-dispatcher-type", text)
    elif exchange == "allgather":
        text = "allgather: tokens are taken as sent by alltoall"
        found.remark("ignored", "--moe-token-dispatcher-type", text)
    if not options.has("--moe-grouped-gemm"):
        text = "not given: the experts of a rank are taken as one grouped product all the same"
        found.remark("assumed", "--moe-grouped-gemm", text)


def _remark_balance(options: Options, found: Found) -> None:
    """Tell of routing that nothing balances, which is taken as even all the same."""
    kind = options.text("--moe-router-load-balancing-type")
    weight = options.number("--moe-aux-loss-coeff", 0.0)
    # The bias and forced routing balance without a loss.
    switches = [
        options.has(f"--moe-router-{name}")
        for name in ("enable-expert-bias", "force-load-balancing")
    ]
    has_loss = kind == "sinkhorn" or (kind != "none" and weight > 0)
    if not (has_loss or any(switches)):
        text = "1, though no option balances experts: --moe-aux-loss-coeff is 0"
        found.remark("assumed", "expert_imbalance", text)
