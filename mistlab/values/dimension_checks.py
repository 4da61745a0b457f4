"""The checks of dimensions: why a stage cannot have a value, with a remedy.

Each tells the problem of one dimension in a setting, in words that follow the dimension's key, and
is empty if there is none.
"""

from mistlab.values.context_ways import GATHER, HEADS, RING
from mistlab.values.dimension import Setting
from mistlab.values.model import ModelSpec


def batch_problem(setting: Setting) -> str:
    """Why data-parallel ranks and micro-batches do not make the global batch of these sequences."""
    batch, size = setting.workload.global_batch, setting.degree("micro_batch")
    replicas = setting.degree("data_parallel")
    others = replicas * setting.micro_batches
    if size * others == batch:
        return ""
    remedy = (
        f"give {batch // others}"
        if batch % others == 0
        else f"data_parallel x micro_batches = {others} must divide {batch}"
    )
    return (
        f"{size} x data_parallel {replicas} x micro_batches {setting.micro_batches} = "
        f"{size * others}, global_batch is {batch}: {remedy}"
    )


def tensor_problem(setting: Setting) -> str:
    """Why the model cannot be split over tensor-parallel ranks."""
    return degree_problem(setting.workload.model, setting.degree("tensor_parallel"))


def degree_problem(model: ModelSpec, degree: int) -> str:
    """Why a model cannot be split over ``degree`` ranks; empty if it can."""
    if model.tensor_parallel_degrees is not None:
        if degree in model.tensor_parallel_degrees:
            return ""
        can = ", ".join(map(str, model.tensor_parallel_degrees))
        return f"{degree}, but the traced model's own code can be split to {can}: give one of these"
    sizes = {"heads": model.heads, "kv_heads": model.kv_heads, "ffn": model.ffn}
    for name, size in sizes.items():
        if size % degree:
            return f"{degree} does not divide {name} {size}: give a divisor of {size}"
    return ""


def tokens_of_experts_problem(setting: Setting) -> str:
    """Why blocks with experts cannot split tokens over tensor-parallel ranks."""
    tokens, tensor = setting.workload.sequence_length, setting.degree("tensor_parallel")
    if setting.workload.model.experts is None or tokens % tensor == 0:
        return ""
    return (
        f"{tensor} does not divide sequence_length {tokens}, as blocks with experts need: give a "
        "divisor"
    )


def experts_problem(setting: Setting) -> str:
    """Why a stage's GPUs cannot divide the model's experts among them."""
    experts, ranks = setting.workload.model.experts, setting.degree("expert_parallel")
    if experts is None:
        return _without_experts(ranks)
    if experts.count % ranks:
        return f"{ranks} does not divide experts {experts.count}: give a divisor"
    parts = setting.degree("expert_tensor_parallel")
    # Parts that do not divide the experts' width are that dimension's own problem.
    if experts.ffn % parts == 0 and setting.gpus % (ranks * parts):
        return (
            f"{ranks} x expert_tensor_parallel {parts} does not divide the stage's {setting.gpus} "
            "GPUs: give degrees whose product does"
        )
    return ""


def expert_widths_problem(setting: Setting) -> str:
    """Why a stage's GPUs cannot divide the width of the model's experts among them."""
    experts, parts = setting.workload.model.experts, setting.degree("expert_tensor_parallel")
    if experts is None:
        return _without_experts(parts)
    if experts.ffn % parts:
        return f"{parts} does not divide experts' ffn {experts.ffn}: give a divisor"
    return ""


def _without_experts(degree: int) -> str:
    if degree == 1:
        return ""
    return f"{degree}, but the model has no experts: give 1, or a model with experts"


def replicas_problem(setting: Setting) -> str:
    """Why a stage's ranks cannot keep so many replicas of states."""
    replicas, data = setting.degree("state_replicas"), setting.degree("data_parallel")
    if data % replicas:
        return f"{replicas} does not divide data_parallel {data}: give a divisor"
    gpus = setting.gpus // replicas
    ranks = setting.degree("expert_parallel") * setting.degree("expert_tensor_parallel")
    if replicas > 1 and gpus % ranks:
        return (
            f"{replicas} leaves {gpus} GPUs to a replica, which expert_parallel x "
            f"expert_tensor_parallel {ranks} does not divide: give fewer replicas"
        )
    return ""


def replicas_are_nodes(setting: Setting) -> bool:
    """Whether there is one replica of states, or one in each node that a stage fills."""
    replicas = setting.degree("state_replicas")
    return replicas == 1 or setting.gpus == replicas * setting.gpus_per_node


def context_problem(setting: Setting) -> str:
    """Why context-parallel ranks cannot take two parts each of a sequence."""
    tokens, ranks = setting.workload.sequence_length, setting.degree("context_parallel")
    if setting.workload.model.family == "custom" and ranks > 1:
        return _traced_without(ranks, 1)
    if ranks > 1 and tokens % (2 * ranks):
        return (
            f"{ranks} ranks take two parts each of a sequence, but {2 * ranks} does not divide "
            f"sequence_length {tokens}: give half of a divisor of {tokens}"
        )
    return ""


def exchange_problem(setting: Setting) -> str:
    """Why context-parallel ranks cannot exchange tokens for heads."""
    if setting.degree("context_exchange") != HEADS:
        return ""
    model = setting.workload.model
    ranks = setting.degree("tensor_parallel") * setting.degree("context_parallel")
    for name, count in (("heads", model.heads), ("kv_heads", model.kv_heads)):
        if count % ranks:
            return (
                f"{HEADS}, but tensor_parallel x context_parallel {ranks} does not divide {name} "
                f"{count}: give {RING} or {GATHER}"
            )
    return ""


def sequence_problem(setting: Setting) -> str:
    """Why tensor-parallel ranks cannot split tokens."""
    tensor = setting.degree("tensor_parallel")
    if not setting.degree("sequence_parallel") or tensor == 1:
        return ""
    if setting.workload.model.family == "custom":
        return _traced_without(1, 0)
    tokens = setting.workload.sequence_length // setting.degree("context_parallel")
    if tokens % tensor:
        return (
            f"1, but tensor_parallel {tensor} does not divide sequence_length {tokens}: give 0, or "
            "a degree that divides it"
        )
    return ""


def _traced_without(value: int, default: int) -> str:
    return f"{value}, but a custom model is traced without: give {default}, or a model of a family"
