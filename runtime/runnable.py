"""Checks that the runtime can run a job, before memory is allocated or ranks are connected."""

from math import prod

from mistlab.core.values import reject
from mistlab.engines.adapters import BLOCK, BLOCKS_A_SCALE
from mistlab.engines.engine import ENGINES, SCALED_TOGETHER, SINGLE
from mistlab.graph.treatments import PLAIN, TREATMENTS, treatments_of
from mistlab.job.job import Job
from mistlab.plan.dimensions import DIMENSIONS, ranks_of
from mistlab.plan.plan import Plan
from mistlab.plan.workload import ModelSpec, Workload
from mistlab.schedule.context_ways import HEADS
from mistlab.stages.plan_orders import ends_of_plan, passes_of_plan
from mistlab.stages.stage_shape import StageShape, replicas_of, shares_table

# The treatments of blocks (ways to run them) that the runtime supports for a user's own code.
TREATED_OWN = frozenset({PLAIN, "recomputed"})


def check_started(job: Job, stage: int | None, started: int) -> None:
    """Refuse a job that the runtime cannot run, or that needs another number of ranks than were
    started.

    With a ``stage`` only this stage is to run.
    """
    check_runnable(job)
    ranks = job.plan.num_gpus
    if stage is not None:
        _check_alone(job.plan, stage, started)
    elif started != ranks:
        were = "1 was" if started == 1 else f"{started} were"
        reject(
            f"the plan takes {ranks} rank{'s' if ranks > 1 else ''}, {were} started: start "
            f"torchrun --nproc-per-node {ranks} -m experiments.run_plan ... (on several nodes, "
            "--nnodes too and fewer ranks on each)"
        )


def _check_alone(plan: Plan, stage: int, started: int) -> None:
    """Refuse to run a stage alone if the plan does not have it, or if it needs more than one
    rank.
    """
    if not 0 <= stage < plan.num_stages:
        if plan.num_stages == 1:
            reject(f"--stage {stage}: the plan has stage 0 alone: give 0")
        reject(f"--stage {stage}: the plan has stages 0 to {plan.num_stages - 1}: give one of them")
    gpus = plan.stages[stage].num_gpus
    if gpus > 1:
        reject(
            f"--stage {stage}: the stage takes {gpus} GPUs, but --stage runs it on one: give "
            f"plan.stages[{stage}] parallel degrees of 1, or leave --stage out"
        )
    if started > 1:
        reject(
            f"--stage {stage}: runs a stage in 1 rank, but {started} were started: start the "
            "command without torchrun"
        )


def check_runnable(job: Job) -> None:
    """Refuse plans of other engines, and choices or models that the runtime does not support."""
    if not ENGINES[job.plan.engine].runs_here:
        reject(
            f"plan.engine: {job.plan.engine} trains in its own framework, not by this command: "
            "give mistlab, or write the framework's files (python -m experiments.export)"
        )
    for number, stage in enumerate(job.plan.stages):
        for name, row in DIMENSIONS.items():
            value, is_trained = stage.value(name), row.is_trained or row.part == "layers"
            if not is_trained and value != row.default:
                reject(
                    f"plan.stages[{number}].{row.path or name}: {value:g} can be predicted but not "
                    f"trained yet: give {row.default:g}"
                )
    if job.workload.model.family == "custom":
        _check_own_model(job.plan, job.workload)
    _check_tokens(job.plan)
    check_model(job.workload)
    _check_blocks_of_moments(job.plan, job.workload)
    _check_reduction(job.plan, job.workload)
    _check_context(job.plan, job.workload)
    _check_encoder(job.plan, job.workload)
    _check_experts(job.plan, job.workload)
    _check_further(job.plan, job.workload)
    if job.workload.train == "adapters":
        _check_adapters(job.plan, job.workload)
    if job.workload.loss == "chunked":
        _check_chunks(job.plan, job.workload)


def check_documents(job: Job, device: str, *, kernel: str, captures: bool) -> None:
    """Refuse the option ``--lengths``, which packs documents into sequences, where the run cannot
    keep documents separate.
    """
    model, workload = job.workload.model, job.workload
    kinds = {
        "code of its own": model.family == "custom",
        "attention to all tokens (an encoder)": model.is_encoder,
        "latent attention": model.latent,
        "state-space layers": model.state_space,
        "heads for further tokens": model.further_tokens,
    }
    for kind, is_there in kinds.items():
        if is_there:
            reject(
                f"workload.model: a model with {kind} cannot be trained on packed documents yet: "
                "leave --lengths out"
            )
    if workload.averages_weights or workload.reduction.asynchronous:
        reject(
            f"workload.reduction.kind: with {workload.reduction.kind} each rank steps by the mean "
            "loss of its own tokens, and packed documents give ranks unequal numbers of them: "
            "leave workload.reduction or --lengths out"
        )
    for number, stage in enumerate(job.plan.stages):
        if (ranks := stage.token_split.ranks) > 1:
            reject(
                f"plan.stages[{number}].context_parallel: packed documents cannot be divided among "
                f"{ranks} ranks yet: give 1, or leave --lengths out"
            )
    if captures:
        reject(
            "--cuda-graphs: documents have other lengths in each step, and a captured step repeats "
            "its lengths: leave out --cuda-graphs or --lengths"
        )
    if device != "cpu" and workload.attention == "flash" and not (model.window or model.sinks):
        _check_varied(workload, device, kernel)


def _check_varied(workload: Workload, device: str, kernel: str) -> None:
    """Refuse documents of unequal lengths that FlashAttention-2 cannot compute."""
    if kernel != "flash":
        reject(
            f"--attention-kernel {kernel}: attention within packed documents has only the kernel "
            "flash: leave out --attention-kernel or --lengths"
        )
    if workload.precision in SINGLE:
        reject(
            f"workload.precision: {workload.precision}, but on {device} attention within packed "
            "documents has only a 16-bit kernel: give bf16 or workload.attention: math, or "
            "leave --lengths out"
        )
    if (channels := workload.model.head_dim) % 8:
        reject(
            f"workload.model.head_dim: {channels}, but on {device} the attention kernel for packed "
            "documents needs a multiple of 8: give one or workload.attention: math, or leave "
            "--lengths out"
        )


def _check_blocks_of_moments(plan: Plan, workload: Workload) -> None:
    """Refuse 8-bit moments for a tied table on two stages, if the stages would quantise different
    blocks of the table: its two copies would drift apart.
    """
    model = workload.model
    if workload.optimizer != "adamw-8bit" or workload.train != "all" or not model.head_has_table:
        return
    degrees = [plan.stages[end].tensor_parallel for end in ends_of_plan(plan)]
    sizes = [model.padded_vocab(one) // one * model.hidden for one in degrees if one > 1]
    if len({*degrees}) > 1 and any(size % SCALED_TOGETHER for size in sizes):
        reject(
            f"workload.optimizer: adamw-8bit scales blocks of {SCALED_TOGETHER} values, and "
            f"{degrees[0]} tensor-parallel ranks of the first stage cut the tied embedding table "
            f"into other blocks than {degrees[1]} of the last: give both stages the same "
            "tensor_parallel, or optimizer: adamw-bf16"
        )


def _check_reduction(plan: Plan, workload: Workload) -> None:
    """Refuse settings with which an asynchronous server could not apply the gradients of a single
    rank.
    """
    how = workload.reduction
    if not how.asynchronous:
        return
    if how.shards > 1:
        reject(
            f"workload.reduction.shards: {how.shards} asynchronous servers, each with a part of "
            "the optimizer's states, can be predicted and simulated, but not trained yet: give 1"
        )
    if workload.model.head_has_table and not shares_table(plan):
        reject(
            "workload.model.tied_embeddings: with an asynchronous server the embedding table of "
            "the first stage and its copy on the last would get different gradients: give "
            "tied_embeddings: false, or one stage"
        )
    for number, stage in enumerate(plan.stages):
        if (ranks := ranks_of("context", stage.degree)) > 1:
            reject(
                f"plan.stages[{number}].context_parallel: {ranks} ranks would compute parts of a "
                "sequence with the different weights that an asynchronous server gives them: give 1"
            )


def check_norms(plan: Plan, workload: Workload, asked_by: str) -> None:
    """Refuse the option ``asked_by``, which needs gradient norms, with an asynchronous server for
    which a rank has no separate gradients in each stage.
    """
    if not (workload.reduction.asynchronous and asked_by):
        return
    first = plan.data_ranks[0]
    for number, stage in enumerate(plan.stages):
        if plan.data_ranks[number] != first:
            reject(
                f"{asked_by}: an asynchronous server needs the norm of each data-parallel rank's "
                f"gradients over all stages, but plan.stages[{number}].data_parallel is "
                f"{plan.data_ranks[number]}, and {first} in the first stage: give all stages the "
                f"same, or leave {asked_by} out"
            )
        tensor, *of_experts = (
            ranks_of(group, stage.degree) for group in ("tensor", "experts", "expert tensor")
        )
        if workload.model.experts and prod(of_experts) != tensor:
            reject(
                f"{asked_by}: an asynchronous server needs the norm of each data-parallel rank's "
                f"gradients, all experts included: give plan.stages[{number}] expert_parallel and "
                f"expert_tensor_parallel whose product is tensor_parallel {tensor}, or leave "
                f"{asked_by} out"
            )


def _check_own_model(plan: Plan, workload: Workload) -> None:
    """Refuse, for a user's own model, schedules and ways to divide it that only the runtime's
    layers support.
    """
    if not workload.reduces_plainly:
        reject(
            f"workload.reduction: {workload.reduction.kind} of a traced model can be predicted but "
            "not trained yet: leave it out"
        )
    for number, stage in enumerate(plan.stages):
        for name, row in DIMENSIONS.items():
            divides = row.axes and not {"data"} & {*row.axes}
            if divides and (value := stage.value(name)) > 1:
                reject(
                    f"plan.stages[{number}].{name}: {value:g} of a traced model can be predicted "
                    "but not trained yet: give 1; data parallelism and stages divide it"
                )
        for name in {*treatments_of(stage.value)} - TREATED_OWN:
            reject(
                f"plan.stages[{number}].{TREATMENTS[name].dimension}: {name} blocks of a traced "
                "model can be predicted but not trained yet: give 0"
            )
    if passes_of_plan(plan)[0].splits_backward:
        reject(
            f"plan.order: {plan.order} with a traced model, which has no separate weight-gradient "
            "passes, can be predicted but not trained yet: give 1f1b"
        )


def _check_tokens(plan: Plan) -> None:
    """Refuse neighbouring stages whose ranks split sequences into different numbers of parts."""
    parts = [stage.tensor_parallel if stage.sequence_parallel else 1 for stage in plan.stages]
    for number, (parts_here, before) in enumerate(zip(parts[1:], parts, strict=False), start=1):
        if parts_here != before:
            reject(
                f"plan.stages[{number}].sequence_parallel: this stage cuts sequences into "
                f"{parts_here} parts and the stage before into {before}, which can be predicted "
                "but not trained yet: give all stages equal sequence_parallel and tensor_parallel"
            )


def _check_context(plan: Plan, workload: Workload) -> None:
    """Refuse exchanges of keys over context-parallel ranks, and attention kernels for such ranks,
    that the runtime lacks.
    """
    model, first = workload.model, plan.stages[0].token_split.ranks
    for number, stage in enumerate(plan.stages):
        ranks, way = stage.token_split
        field = f"plan.stages[{number}].context_parallel"
        if ranks != first:
            reject(
                f"{field}: {ranks}, and {first} in stage 0, can be predicted but not trained yet: "
                "give all stages the same"
            )
        if ranks == 1:
            continue
        if workload.attention == "math":
            reject(
                f"{field}: {ranks} with attention math can be predicted but not trained yet: give "
                "workload.attention: flash"
            )
        if way != HEADS and (model.window or model.sinks):
            reject(
                f"{field}: {ranks} with windows or sinks is trained only where ranks exchange "
                f"heads: give context_exchange: {HEADS}"
            )
        if model.is_encoder:
            reject(
                f"{field}: {ranks} with an encoder, whose tokens attend to all tokens, is not "
                "trained: give 1"
            )


def _check_encoder(plan: Plan, workload: Workload) -> None:
    """Refuse sequence parallelism for an encoder, where a rank would have only a summand of the
    gradients of some biases.
    """
    for number, stage in enumerate(plan.stages):
        if workload.model.is_encoder and stage.splits_tokens:
            reject(
                f"plan.stages[{number}].sequence_parallel: 1 with an encoder can be predicted but "
                "not trained yet: give 0"
            )


def _check_experts(plan: Plan, workload: Workload) -> None:
    """Refuse experts that several tensor-parallel ranks would copy, without data or context
    parallelism.
    """
    for number, stage in enumerate(plan.stages):
        copies = ranks_of("reduce experts", stage.degree)
        if workload.model.experts and copies > 1 and replicas_of(stage) == 1:
            ranks = ranks_of("experts", stage.degree)
            reject(
                f"plan.stages[{number}].expert_parallel: {ranks} leaves {copies} tensor-parallel "
                "ranks with copies of the same experts, which is trained only with data or "
                f"context parallelism: give expert_parallel: {ranks * copies}"
            )


def _check_further(plan: Plan, workload: Workload) -> None:
    """Refuse multi-token prediction under schedules with separate backward passes for weights, if
    the head's pass for inputs accumulates the shared token table's gradient.
    """
    if not workload.model.further_tokens:
        return
    shapes = (StageShape.of(plan, number, tied=True) for number in range(plan.num_stages))
    if any(shape.adds_table_in_b(shape.last_layer) for shape in shapes):
        reject(
            f"plan.order: {plan.order} with further_tokens on a stage with embedding and head can "
            "be predicted but not trained yet: give 1f1b"
        )


def _check_adapters(plan: Plan, workload: Workload) -> None:
    """Refuse adapters for GEMMs that the runtime cannot adapt, and frozen weights that would be
    quantised differently on several ranks than on one.
    """
    model = workload.model
    kinds = {
        "experts": model.experts,
        "latent attention": model.latent,
        "gates of attention": model.attention_gate,
        "heads for further tokens": model.further_tokens,
        "code of its own": model.family == "custom",
    }
    for kind, has in kinds.items():
        if has:
            reject(
                f"workload.train: adapters of a model with {kind} can be predicted but not "
                "trained yet: give workload.train: all"
            )
    for number, stage in enumerate(plan.stages):
        if workload.adapter_targets != "all" and "lean" in treatments_of(stage.value):
            reject(
                f"plan.stages[{number}].{TREATMENTS['lean'].dimension}: lean blocks save nothing "
                "where some linear layers have no adapter: give 0, or workload.adapter_targets: all"
            )
        if workload.base != "16bit":
            _check_packing(f"plan.stages[{number}]", stage.tensor_parallel, workload)


def _check_chunks(plan: Plan, workload: Workload) -> None:
    """Refuse a loss in chunks if the model's code computes its own loss, or if separate backward
    passes for weights would keep the gradients of all logits.
    """
    if workload.model.family == "custom":
        reject(
            "workload.loss: chunked of a traced model, whose code computes its loss, is not "
            "trained: give whole"
        )
    if further := workload.model.further_tokens:
        reject(
            f"workload.loss: chunked with {further} further_tokens, whose blocks are in the head, "
            "is not trained: give whole"
        )
    if passes_of_plan(plan)[0].splits_backward:
        reject(
            f"plan.order: {plan.order} keeps gradients of all logits for weight-gradient passes, "
            "and workload.loss is chunked: give 1f1b, or workload.loss: whole"
        )


def _check_packing(where: str, ranks: int, workload: Workload) -> None:
    """Refuse quantised weights whose widths are not whole quantisation blocks, or of which ranks
    would cut groups of blocks.
    """
    model, group = workload.model, BLOCKS_A_SCALE[workload.base]
    heads = model.heads * model.head_dim, model.kv_heads * model.head_dim
    split_rows = [(size, model.hidden) for size in (*heads, model.ffn)]
    split_columns = [(model.hidden, size) for size in (heads[0], model.ffn)]
    widths = {"hidden": model.hidden, "heads x head_dim": heads[0], "ffn": model.ffn}
    for name, inputs in widths.items():
        if inputs % BLOCK:
            reject(
                f"workload.base: {workload.base} weights share a scale among {BLOCK} inputs of a "
                f"GEMM, and {name} {inputs} of workload.model is not a multiple of {BLOCK}: give "
                "workload.base: 16bit"
            )
    rows = [rows // ranks * (inputs // BLOCK) for rows, inputs in split_rows]
    columns = [inputs // ranks // BLOCK * rows for rows, inputs in split_columns]
    uneven = any(inputs // ranks % BLOCK for _, inputs in split_columns)
    if ranks > 1 and (uneven or any(blocks % group for blocks in (*rows, *columns))):
        reject(
            f"{where}.tensor_parallel: {ranks} ranks would cut groups of {BLOCK * group} weights "
            f"that share a scale (workload.base: {workload.base}): give 1, or workload.base: 16bit"
        )


def trains_here(model: ModelSpec) -> str:
    """Why the runtime cannot train a model; empty if it can."""
    if model.family == "custom":
        if model.factory:
            return ""
        reason = "it was traced from a configuration, or with --blocks, so its code is not known"
        return f"{reason}: trace package.module:function, without --blocks"
    experts, scaling = model.experts, model.rotary_scaling
    reasons = {
        "its pattern mixes unlike blocks, such as state spaces: give a model without a pattern": (
            model.is_hybrid
        ),
        "it has a window and a pattern, whose attention blocks have no window: leave window or "
        "pattern out": model.pattern and model.window,
        "its experts are computed beside attention: give parallel_block: false": (
            experts and model.parallel_block
        ),
        "rotary_scaling is other, known only to the model's code: give another kind, such as yarn, "
        "or leave rotary_scaling out": scaling and scaling.kind == "other",
        "dropout 1 would drop all values: give a dropout below 1": model.dropout == 1,
    }
    return next((why for why, holds in reasons.items() if holds), "")


def _check_dropped_shares(workload: Workload) -> None:
    """Refuse dropout inside attention kernels, whose masks would depend on the plan."""
    model = workload.model
    kinds = {"windows": model.window, "sinks": model.sinks, "latent attention": model.latent}
    with_parts = [kind for kind, has in kinds.items() if has]
    if model.dropped_shares and (with_parts or workload.attention != "math"):
        remedy = "" if with_parts else ", or workload.attention: math"
        reject(
            f"workload.model.attention_dropout: {model.dropped_shares:g} with "
            f"{with_parts[0] if with_parts else f'workload.attention: {workload.attention}'} can "
            f"be predicted but not trained yet: give 0{remedy}"
        )


def check_usual(workload: Workload) -> None:
    """Refuse adapters, losses in chunks, and optimizers other than AdamW, for models that run their
    own layers.
    """
    usual = {"train": "all", "loss": "whole", "optimizer": "adamw"}
    for name, value in usual.items():
        if (given := getattr(workload, name)) != value:
            reject(
                f"workload.{name}: {given} can be predicted, but this command cannot run it yet: "
                f"give {value}, or leave it out"
            )


def check_model(workload: Workload) -> None:
    """Refuse a model with layers that the runtime lacks."""
    if why := trains_here(workload.model):
        name = workload.model.name or "this model"
        reject(f"workload.model: {name} can be predicted but not trained yet: {why}")
    _check_dropped_shares(workload)
    if (further := workload.model.further_tokens) >= workload.sequence_length:
        reject(
            f"workload.model.further_tokens: {further} tokens predicted beyond the next need a "
            f"longer sequence than workload.sequence_length {workload.sequence_length}: give at "
            f"most {workload.sequence_length - 1}"
        )
    if workload.expert_padding:
        reject(
            "workload.expert_padding: True can be predicted but not trained yet: leave it out, so "
            "that experts are not padded"
        )
    if workload.states != "mixed":
        reject(
            f"workload.states: {workload.states} can be predicted but not trained yet: give mixed, "
            "or leave it out"
        )
    if workload.precision in ("fp8", "fp4"):
        reject(
            f"workload.precision: {workload.precision} can be predicted but not trained yet: "
            "give bf16"
        )
