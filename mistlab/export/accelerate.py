"""Plans as the YAML configuration of Hugging Face Accelerate 1.15, which trains by FSDP2 or DDP.

There are no pipelines. Batch sizes are the training script's, so the file says them in comments
alone. FSDP2 recomputes all blocks or none, and can take their kept inputs to the host.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from mistlab.export.found import Found, checked_whole
from mistlab.export.fsdp import ENGINES, STATES, offloads, sharded, states_offloaded
from mistlab.export.given import Given, Imported
from mistlab.export.nearest import canonical
from mistlab.export.rules import (
    activations_of_recomputed,
    among_orders,
    equal_nodes,
    none_or_all_blocks,
    one_stage,
)
from mistlab.export.sections import Section
from mistlab.export.target import Row, Target
from mistlab.export.with_parts import with_values
from mistlab.export.words import names_in
from mistlab.schedule.orders import DEFAULT_ORDER
from mistlab.values.datafile import format_yaml, parse_yaml
from mistlab.values.errors import InputError
from mistlab.values.job import Job
from mistlab.values.workload import Precision

HARMLESS = names_in(
    """
    compute_environment debug downcast_bf16 enable_cpu_affinity machine_rank main_process_ip
    main_process_port main_training_function rdzv_backend same_network tpu_env tpu_use_cluster
    tpu_use_sudo use_cpu gpu_ids fsdp_auto_wrap_policy fsdp_transformer_layer_cls_to_wrap
    fsdp_state_dict_type fsdp_cpu_ram_efficient_loading fsdp_sync_module_states
    fsdp_use_orig_params fsdp_backward_prefetch fsdp_forward_prefetch fsdp_min_num_params
    """
)
# The precision of a run for each word for mixed precision.
PRECISIONS: Mapping[str, Precision] = {"no": "fp32", "bf16": "bf16", "fp16": "fp16", "fp8": "bf16"}


def _zero(job: Job) -> Job:
    """FSDP2 also where blocks are recomputed, and where ranks share layers."""
    job = sharded(job)
    first = job.plan.stages[0]
    needs = first.checkpointed_layers > 0 or first.tensor_parallel > 1
    job = with_values(job, {"zero": 2}) if needs and first.zero == 0 else job
    return canonical(job, shares_experts=False)


ROWS = (
    Row(
        choices=("order",),
        nearest=among_orders((DEFAULT_ORDER,)),
        because="has no pipelines",
    ),
    Row(
        choices=("layers", "data_parallel", "tensor_parallel", "micro_batch"),
        nearest=one_stage,
        because="has no pipelines",
    ),
    Row(choices=(), nearest=equal_nodes, because="starts equally many processes on every node"),
    Row(
        choices=("checkpointed_layers",),
        nearest=none_or_all_blocks("checkpointed_layers"),
        because="recomputes all blocks or none",
    ),
    Row(
        choices=("zero",),
        nearest=_zero,
        because="shards by FSDP2, ZeRO-2 or 3, which offloading, recomputation and tensor "
        "parallelism need",
    ),
    Row(choices=STATES, nearest=states_offloaded, because="offloads all states, or none"),
    Row(
        choices=("offload_activations",),
        nearest=activations_of_recomputed,
        because="offloads the kept inputs of recomputed blocks, all or none",
    ),
)


def write(job: Job) -> str:
    """The configuration as YAML, with the training script's own numbers in comments."""
    cluster, stage, workload = job.cluster, job.plan.stages[0], job.workload
    recomputes = stage.checkpointed_layers > 0
    uses_fsdp = stage.zero > 0 or recomputes or offloads(job) or stage.tensor_parallel > 1
    kind = "FSDP" if uses_fsdp else "MULTI_GPU" if job.plan.num_gpus > 1 else "NO"
    content: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": kind,
        "mixed_precision": "no" if workload.precision == "fp32" else workload.precision,
        "num_machines": cluster.nodes,
        "num_processes": job.plan.num_gpus,
        "machine_rank": 0,
        "use_cpu": False,
    }
    if uses_fsdp:
        content["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": stage.zero == 3,
            "fsdp_offload_params": offloads(job),
            "fsdp_activation_checkpointing": recomputes,
            "fsdp_activation_checkpointing_offload": stage.offload.activations > 0,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        }
        content["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": 1,
            "parallelism_config_dp_shard_size": stage.data_parallel,
            "parallelism_config_tp_size": stage.tensor_parallel,
            "parallelism_config_cp_size": 1,
        }
    return (
        f"# In the training script: {stage.micro_batch} sequences of "
        f"{workload.sequence_length} tokens a batch,\n"
        f"# Accelerator(gradient_accumulation_steps={job.plan.micro_batches})\n"
        f"{format_yaml(content)}"
    )


def read(text: str, given: Given) -> Imported:
    """The job of a configuration; model, sequences and batches are given beside it."""
    found = Found()
    top = Section(parse_yaml(text, "the configuration"), "", found)
    kind = top.get("distributed_type", "NO")
    if kind not in ("FSDP", "MULTI_GPU", "NO"):
        message = f"distributed_type: {kind!r} is not read here: give FSDP, MULTI_GPU or NO"
        raise InputError(message)
    processes, machines = top.whole("num_processes") or 1, top.whole("num_machines") or 1
    if processes % machines:
        message = (
            f"num_processes: {processes} is no multiple of num_machines {machines}: correct one of "
            "them"
        )
        raise InputError(message)
    found.nodes, found.gpus_per_node = machines, processes // machines
    found.precision = _precision(top, found)
    fsdp, degrees = top.section("fsdp_config"), top.section("parallelism_config")
    found.values["tensor_parallel"] = degrees.whole("parallelism_config_tp_size") or 1
    for name in ("dp_shard", "dp_replicate", "cp"):
        size = degrees.whole(f"parallelism_config_{name}_size") or 1
        if size > 1 and name != "dp_shard":
            found.remark("ignored", name, f"{size}: taken as sharded replicas")
    if kind == "FSDP":
        _read_fsdp(fsdp, found, given.model.layers if given.model else 0)
    top.tell_of_rest(HARMLESS)
    return found.job(given, ENGINES)


def _precision(section: Section, found: Found) -> Precision:
    said = section.get("mixed_precision", "no")
    if said not in PRECISIONS:
        message = f"mixed_precision: {said!r} is unknown: give {', '.join(PRECISIONS)}"
        raise InputError(message)
    if said == "fp8":
        found.remark("ignored", "mixed_precision", "fp8: products are taken in 16 bits")
    return PRECISIONS[said]


def _read_fsdp(section: Section, found: Found, layers: int) -> None:
    version = checked_whole("fsdp_config.fsdp_version", section.get("fsdp_version", 1))
    reshards = section.get("fsdp_reshard_after_forward", default=True)
    if version == 1:
        found.remark("assumed", "fsdp_config.fsdp_version", "1: taken as version 2")
    full = reshards in (True, "true", "FULL_SHARD")
    found.values["zero"] = 3 if full else 2
    if section.switch("fsdp_offload_params"):
        found.values |= dict.fromkeys(STATES, 1.0)
    if section.switch("fsdp_activation_checkpointing"):
        found.values["checkpointed_layers"] = layers
        if section.switch("fsdp_activation_checkpointing_offload"):
            found.values["offload_activations"] = 1.0


def _notes(job: Job) -> Iterator[str]:
    yield "the model, its sequences, batch and gradient accumulation are the training script's"
    if job.plan.stages[0].tensor_parallel > 1:
        yield "tensor parallelism needs a model with a plan for it (tp_plan)"


ACCELERATE = Target(
    name="accelerate",
    title="Accelerate",
    package="accelerate==1.15.0",
    engines=ENGINES,
    rows=ROWS,
    write=write,
    read=read,
    notes=_notes,
    beside=("model", "sequence_length", "attention", "global_batch", "micro_batch"),
    always_overlaps=True,
)
