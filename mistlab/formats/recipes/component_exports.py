"""Exports plans to fine-tuning recipes that name Python classes or functions: torchtune's, and NeMo
AutoModel's.

Keys are those of torchtune 0.7 (its distributed recipes and builders) and of AutoModel 0.5
(``RecipeConfig``, ``FSDP2Config``, ``PeftConfig``). In torchtune all of a run has one data type;
AutoModel keeps 32-bit states where weights are loaded in 32 bits and FSDP2 casts them.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mistlab.core.files import format_yaml
from mistlab.core.values import refuse
from mistlab.engines.engine import ENGINES as ENGINE_ROWS
from mistlab.export.accelerate import SPLITS_TOKENS, Sharing
from mistlab.export.given import Given, Imported
from mistlab.export.nearest import ENGINES, REPLICAS_OF_STATES, of_tuners
from mistlab.export.rules import Rule, with_workload
from mistlab.export.target import Row, Target
from mistlab.formats.checkpoints import release_of, repository_of
from mistlab.formats.component_recipes import read_automodel, read_torchtune
from mistlab.formats.recipes.recipe_rules import (
    ALL_INPUTS_OFFLOADED,
    ALL_OFFLOADED,
    ALL_RECOMPUTED,
    ALWAYS_SHARDED,
    ORDER_AND_NODES,
    RANK,
    SHARDED_WITH_AXES,
    attention_layers,
    bits_of_base,
    fused_kernel,
    header,
    of_switches,
    one_mesh,
    unsharded_bases,
    workload_row,
)
from mistlab.job.job import Job
from mistlab.shell.session import LaunchFile

# The torchtune function that builds each of the catalogue's models.
BUILDERS: Mapping[str, str] = {
    "llama3-8b": "llama3.llama3_8b",
    "llama3-70b": "llama3.llama3_70b",
    "llama3-405b": "llama3_1.llama3_1_405b",
    "llama3.2-1b": "llama3_2.llama3_2_1b",
    "llama3.2-3b": "llama3_2.llama3_2_3b",
    "qwen2.5-7b": "qwen2_5.qwen2_5_7b_base",
    "qwen2.5-14b": "qwen2_5.qwen2_5_14b_base",
    "qwen2.5-32b": "qwen2_5.qwen2_5_32b_base",
    "qwen2.5-72b": "qwen2_5.qwen2_5_72b_base",
    "qwen3-4b": "qwen3.qwen3_4b_base",
    "qwen3-8b": "qwen3.qwen3_8b_base",
    "qwen3-14b": "qwen3.qwen3_14b_base",
    "qwen3-32b": "qwen3.qwen3_32b",
}
# The functions of releases that share the sizes of a catalogue model, but not its context.
_OF_RELEASES: Mapping[str, str] = {
    "llama 3.1 8b": "llama3_1.llama3_1_8b",
    "deepseek r1 distill llama 8b": "llama3_1.llama3_1_8b",
    "llama 3.1 70b": "llama3_1.llama3_1_70b",
    "llama 3.3 70b": "llama3_3.llama3_3_70b",
    "deepseek r1 distill llama 70b": "llama3_3.llama3_3_70b",
}
# The default of LinearCrossEntropyLoss(num_output_chunks).
_USUAL_CHUNKS = 8
_WORDS = {"bf16": "bfloat16", "fp32": "float32"}


def _eight_bit(sharing: Sharing) -> str:
    """Return the class of 8-bit AdamW for a recipe: torchao's where FSDP2 shards weights, since
    bitsandbytes' cannot update sharded weights.
    """
    return "torchao.optim.AdamW8bit" if sharing.shards else "bitsandbytes.optim.AdamW8bit"


def _write_torchtune(job: Job) -> str:
    workload, sharing = job.workload, Sharing.of(job)
    usual = BUILDERS[workload.model.name]
    module, _, builder = _OF_RELEASES.get(release_of(workload.model), usual).partition(".")
    adapts = workload.train == "adapters"
    model: dict[str, Any] = {"_component_": f"torchtune.models.{module}.{builder}"}
    if adapts:
        model = {
            "_component_": f"torchtune.models.{module}.lora_{builder}",
            "lora_attn_modules": ["q_proj", "k_proj", "v_proj", "output_proj"],
            "apply_lora_to_mlp": workload.adapter_targets == "all",
            "lora_rank": workload.rank,
            "lora_alpha": 2 * workload.rank,
            "quantize_base": workload.base == "4bit",
        }
    # All of Llama 3's model builders in torchtune have the same tokenizer, in the module llama3.
    tokenizer = "llama3" if module.startswith("llama3") else module
    adamw = {"_component_": "torch.optim.AdamW", "fused": True}
    is_small = workload.optimizer == "adamw-8bit"
    # Torchtune's recipes for a single GPU have no FSDP, which offloads states.
    is_alone = job.plan.num_gpus == 1 and not sharing.offloads_states
    of_ranks = {
        "fsdp_cpu_offload": sharing.offloads_states,
        "fsdp_reshard_after_forward": sharing.level != 2,
        "data_parallel_replicate_dim": sharing.degrees["dp_replicate"],
    }
    content = {
        "model": model,
        "tokenizer": {
            "_component_": f"torchtune.models.{tokenizer}.{tokenizer}_tokenizer",
            "max_seq_len": workload.sequence_length,
        },
        "dataset": {"packed": True},
        "batch_size": sharing.sequences,
        "gradient_accumulation_steps": job.plan.micro_batches,
        "optimizer": {"_component_": _eight_bit(sharing)} if is_small else adamw,
        "loss": _torchtune_loss(job, sharing),
        "device": "cuda",
        "dtype": workload.precision,
        "enable_activation_checkpointing": sharing.recomputes,
        "enable_activation_offloading": sharing.offloads_inputs,
        **({} if is_alone else of_ranks),
        "compile": False,
    }
    recipe = "lora_finetune" if adapts else "full_finetune"
    weights = "checkpointer"
    if (repository := repository_of(workload.model)) is not None:
        weights += f" (of {repository})"
    missing = ("tokenizer.path", "dataset._component_", weights, "optimizer.lr")
    start = f"tune run {recipe}_single_device --config FILE"
    if not is_alone:
        gpus = job.cluster.gpus_per_node
        start = f"tune run --nproc_per_node {gpus} {recipe}_distributed --config FILE"
    return header((*missing, "output_dir"), start) + format_yaml(content)


def _torchtune_loss(job: Job, sharing: Sharing) -> dict[str, Any]:
    """Return the loss of a torchtune recipe. Chunks have at most as many tokens as the prediction
    assumes, and there are at least as many of them as by torchtune's default.
    """
    if job.workload.loss != "chunked":
        return {"_component_": "torch.nn.CrossEntropyLoss"}
    tokens = (sharing.sequences or 1) * job.workload.sequence_length
    chunks = max(_USUAL_CHUNKS, -(-tokens // ENGINE_ROWS[job.plan.engine].chunk_tokens))
    return {
        "_component_": "torchtune.modules.loss.LinearCrossEntropyLoss",
        "num_output_chunks": chunks,
    }


_LOSSES = "nemo_automodel.components.loss"
_FULL = f"{_LOSSES}.masked_ce.MaskedCrossEntropy"
_FUSED = f"{_LOSSES}.linear_ce.FusedLinearCrossEntropy"


def _write_automodel(job: Job) -> str:
    workload, sharing = job.workload, Sharing.of(job)
    in_16_bits = workload.states == "16bit"
    dtype = _WORDS[workload.precision]
    # With context parallelism, sequences are not packed.
    packs = sharing.degrees["cp"] == 1
    attention = fused_kernel(job, "flash_attention_2")
    peft: dict[str, Any] = {}
    if workload.train == "adapters":
        peft = {
            "_target_": "nemo_automodel.components._peft.lora.PeftConfig",
            "dim": workload.rank,
            "alpha": 2 * workload.rank,
        }
        if workload.adapter_targets == "all":
            peft["match_all_linear"] = True
        else:
            peft["target_modules"] = attention_layers(job)
    is_small = workload.optimizer == "adamw-8bit"
    content = {
        "recipe": "TrainFinetuneRecipeForNextTokenPrediction",
        "step_scheduler": {
            "global_batch_size": workload.global_batch,
            "local_batch_size": sharing.sequences,
        },
        "model": {
            "_target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained",
            "pretrained_model_name_or_path": repository_of(workload.model) or "MODEL",
            "torch_dtype": "bfloat16" if in_16_bits else "float32",
            "attn_implementation": "eager" if workload.attention == "math" else attention,
        },
        **of_switches({"peft": peft or None, "quantization": bits_of_base(workload) or None}),
        "distributed": _distributed(sharing, None if in_16_bits else dtype),
        "packed_sequence": {"packed_sequence_size": workload.sequence_length if packs else 0},
        "dataset": {} if packs else {"seq_length": workload.sequence_length},
        "optimizer": {"_target_": _eight_bit(sharing) if is_small else "torch.optim.AdamW"},
        "loss_fn": {"_target_": _FUSED if workload.loss == "chunked" else _FULL},
    }
    start = f"automodel FILE --nproc-per-node {job.cluster.gpus_per_node}"
    return header(("dataset", "optimizer.lr"), start) + format_yaml(
        {name: value for name, value in content.items() if value != {}}
    )


def _distributed(sharing: Sharing, dtype: str | None) -> dict[str, Any]:
    """Return the section on how ranks share a model; ``dtype`` is the precision of GEMMs where
    weights have 32 bits.
    """
    axes = {f"{word}_size": sharing.degrees[word] for word in ("tp", "cp", "dp_replicate")}
    is_plain = not sharing.shards and set(axes.values()) == {1}
    if is_plain:
        casts = {"autocast_dtype": dtype} if dtype == "bfloat16" else {}
        checkpointing = {"activation_checkpointing": sharing.recomputes}
        return {"strategy": "ddp", **axes, **checkpointing, **casts}
    policy = {
        "_target_": "torch.distributed.fsdp.MixedPrecisionPolicy",
        "param_dtype": dtype,
        "reduce_dtype": "float32",
    }
    offload = {"_target_": "torch.distributed.fsdp.CPUOffloadPolicy"}
    return {
        "strategy": "fsdp2",
        **axes,
        SPLITS_TOKENS: sharing.splits_tokens,
        "activation_checkpointing": sharing.recomputes,
        "reshard_after_forward": sharing.level != 2,
        **({} if dtype is None else {"mp_policy": policy}),
        **({"offload_policy": offload} if sharing.offloads_states else {}),
    }


def _with_builder(job: Job) -> Job:
    name = job.workload.model.name
    if name not in BUILDERS:
        refuse(
            "workload.model",
            f"{name or 'the mapping'} has no builder in torchtune: give one of "
            f"{', '.join(BUILDERS)}",
        )
    return job


def _in_bf16(job: Job) -> Job:
    is_half = job.workload.precision == "fp16"
    return with_workload(job, precision="bf16") if is_half else job


def _pure(job: Job) -> Job:
    """Return the job with gradients and optimizer states in the same precision as weights."""
    return with_workload(job, states="16bit" if job.workload.precision == "bf16" else "mixed")


def _pure_adapters(job: Job) -> Job:
    adapts = job.workload.train == "adapters"
    return _pure(job) if adapts or job.workload.precision == "fp32" else job


def _four_bits(job: Job) -> Job:
    if job.workload.base == "8bit":
        refuse(
            "workload.base",
            "8bit, but torchtune's builders quantise frozen weights to 4 bits only: give base: "
            "4bit or 16bit",
        )
    return job


_BF16 = workload_row(
    *("precision", "", "trains in bf16 or fp32: give precision: bf16"), where=_in_bf16
)


def _notes(job: Job) -> Iterator[str]:
    named = "" if repository_of(job.workload.model) else "MODEL, "
    yield f"fill in {named}data and learning rate; the launcher decides how many processes run"


def _target(
    rows: tuple[Row, ...],
    write: Callable[[Job], str],
    read: Callable[[LaunchFile, Given], Imported],
    engines: tuple[str, ...] = ENGINES,
    **words: Any,
) -> Target:
    return Target(
        engines=engines,
        rows=rows,
        write=write,
        read=lambda text, given: read(LaunchFile(text=text), given),
        notes=_notes,
        precisions=("fp16", "bf16", "fp32"),
        optimizers=("adamw", "adamw-8bit"),
        beside=("model", "nodes", "gpus_per_node"),
        always_overlaps=True,
        **words,
    )


def _check(choice: str, rule: Rule) -> Row:
    """Make an entry of a framework's table from a rule that only refuses a job and never changes
    it.
    """
    return Row(choices=(choice,), nearest=rule, because="cannot")


TORCHTUNE = _target(
    (
        *(one_mesh("torchtune"), *ORDER_AND_NODES, _check("model", _with_builder)),
        *(_check("base", _four_bits), _BF16),
        workload_row("states", "", "keeps states in the data type of the weights", where=_pure),
        workload_row("attention", "flash", "computes attention by SDPA: give attention: flash"),
        *(ALL_RECOMPUTED, ALWAYS_SHARDED, ALL_OFFLOADED, ALL_INPUTS_OFFLOADED),
        *(REPLICAS_OF_STATES, RANK),
    ),
    _write_torchtune,
    read_torchtune,
    of_tuners(ENGINES),
    name="torchtune",
    title="torchtune",
    package="torchtune==0.7.0",
)
AUTOMODEL = _target(
    (
        one_mesh("AutoModel", ("dp", "tp", "cp", "sp")),
        *(*ORDER_AND_NODES, _BF16),
        workload_row("states", "", "keeps adapters' states in bf16", where=_pure_adapters),
        *(ALL_RECOMPUTED, SHARDED_WITH_AXES, ALL_OFFLOADED),
        unsharded_bases("AutoModel", ("8bit",)),
        *(REPLICAS_OF_STATES, RANK),
    ),
    _write_automodel,
    read_automodel,
    name="automodel",
    title="AutoModel",
    package="nemo_automodel==0.5.0",
)
