"""A plan in one short line, for tables."""

from itertools import groupby

from mistlab.values.plan import NO_OFFLOAD, Plan, StagePlan


def in_short(plan: Plan) -> str:
    """The plan's micro-batches and stages; stages alike that follow one another are said once.

    >>> stage = StagePlan(layers=8, data_parallel=2, tensor_parallel=1, micro_batch=1, zero=1)
    >>> in_short(Plan(micro_batches=4, stages=(stage, stage)))
    '4 micro-batches: 2 x (8 blocks, 2 data x 1 tensor, micro-batch 1, ZeRO-1)'
    """
    parts = []
    for words, alike in groupby(map(_stage, plan.stages)):
        count = len([*alike])
        parts.append(f"{count} x ({words})" if count > 1 else words)
    many = "1 micro-batch" if plan.micro_batches == 1 else f"{plan.micro_batches} micro-batches"
    return f"{many}: {'; '.join(parts)}"


def _stage(stage: StagePlan) -> str:
    words = [
        "1 block" if stage.layers == 1 else f"{stage.layers} blocks",
        f"{stage.data_parallel} data x {stage.tensor_parallel} tensor",
        f"micro-batch {stage.micro_batch}",
        f"ZeRO-{stage.zero}",
    ]
    if stage.sequence_parallel:
        words.append("sequence parallel")
    if stage.expert_parallel > 1:
        words.append(f"{stage.expert_parallel} expert parallel")
    if stage.state_replicas > 1:
        words.append(f"{stage.state_replicas} replicas of states")
    if stage.checkpointed_layers:
        words.append(f"{stage.checkpointed_layers} recomputed")
    if stage.offload != NO_OFFLOAD:
        off = stage.offload
        kinds = ("weights", "gradients", "optimizer", "activations")
        ratios = (f"{getattr(off, kind):g} of {kind}" for kind in kinds if getattr(off, kind))
        words.append(f"offloads {', '.join(ratios)}")
    return ", ".join(words)
