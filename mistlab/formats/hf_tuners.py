"""Imports files of axolotl, LLaMA-Factory, ms-swift and Megatron-SWIFT; those that train by
preferences or rewards are refused.

Keys are turned into the Trainer's. Left-out keys take the defaults of src/axolotl/utils/schemas
(2026): one step of accumulation, no recomputation, no packing.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from mistlab.core.files import parse_yaml
from mistlab.core.values import InputError, reject
from mistlab.export.found import checked_whole, parse_json
from mistlab.export.given import Given, Imported, Remark
from mistlab.export.megatron.megatron_read import engine_told, read_launch
from mistlab.formats.checkpoints import needed_model
from mistlab.formats.content import settings_of
from mistlab.formats.hf_adapters import trained_by_adapters
from mistlab.formats.hf_trainer import Trainer, arguments_of, read_arguments, recipe_of
from mistlab.formats.launched import Command, command_of, known_text, named_text, with_files
from mistlab.shell.session import LaunchFile
from mistlab.shell.shell_text import Word

_AXOLOTL = Trainer(
    title="axolotl",
    names={
        "model_name_or_path": "base_model",
        "per_device_train_batch_size": "micro_batch_size",
        "max_seq_length": "sequence_len",
        "packing": "sample_packing",
        "optim": "optimizer",
    },
)
_DEGREES = {
    "tensor_parallel_size": "tensor_parallel",
    "context_parallel_size": "context_parallel",
    "sequence_parallel_degree": "context_parallel",
    "dp_replicate_size": "replicas of states",
}


def recognises_axolotl(source: LaunchFile) -> bool:
    """Whether a file has axolotl's keys, or is a script that starts axolotl."""
    command = command_of(source)
    if command is not None:
        words = [command.launch.program, *(word.text for word in command.launch.started)]
        return any(word == "axolotl" or word.startswith("axolotl.cli.train") for word in words)
    settings = settings_of(source)
    if not isinstance(settings.get("base_model"), str):
        return False
    return bool(settings.keys() & {"sequence_len", "datasets", "pretraining_dataset", "adapter"})


def read_axolotl(source: LaunchFile, given: Given) -> Imported:
    """Import an axolotl configuration, or the one that a script names, as a job."""
    command = command_of(source)
    settings: Mapping[str, Any] = settings_of(source)
    if command is not None:
        words = [word.text for word in command.launch.arguments]
        path = next((word for word in words if word.endswith((".yml", ".yaml"))), None)
        if path is None:
            reject("starts axolotl without a configuration: give its YAML")
        text = named_text(path, command, source, "configures axolotl's run")
        settings = {**parse_yaml(text, path), **_options(arguments_of(command, source))}
    if value := settings.get("rl"):
        reject(
            f"rl: {value} trains by preferences or rewards, which is not supported: give an "
            "axolotl file that trains by next-token prediction"
        )
    for key, choice in _DEGREES.items():
        if settings.get(key) not in (None, 1, "1"):
            reject(
                f"{key}: {settings[key]}, but axolotl's {choice} is not supported here: give 1, or "
                "leave it out"
            )
    settings = _without_plugins(settings)
    if not settings.get("adapter"):
        # Without adapters axolotl leaves their settings alone.
        settings = {k: v for k, v in settings.items() if not k.startswith("lora_")}
    if isinstance(settings.get("fsdp_config"), Mapping) and not settings.get("fsdp"):
        settings = {**settings, "fsdp": True}
    return read_arguments(settings, _AXOLOTL, source, given, command)


def _without_plugins(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return axolotl's settings without two plugins. Liger's kernels have settings of their own;
    the plugin for the cut cross-entropy loss becomes a setting that is on unless the file turns it
    off.
    """
    plugins = settings.get("plugins")
    if not isinstance(plugins, list):
        return settings
    cuts = any("cut_cross_entropy" in str(name) for name in plugins)
    fused = {"cut_cross_entropy": True} if cuts else {}
    others = [name for name in plugins if not re.search("liger|cut_cross_entropy", str(name))]
    return {**fused, **settings, "plugins": others or None}


def _options(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in arguments.items() if value is not True}


# Imports LLaMA-Factory's YAML; tuning methods other than LoRA and full training are refused.
#
# A key that the file lacks has LLaMA-Factory's default (src/llamafactory/hparams, 2026): LoRA,
# 2,048 tokens, and recomputation unless it is disabled.


_LLAMA_FACTORY = Trainer(title="LLaMA-Factory", recomputes=True, length=2048, adapts=True)
_STAGES = {
    "rm": "a reward model",
    "ppo": "by reinforcement learning (PPO), which generates text",
    "dpo": "by preferences (DPO), beside a reference model",
    "kto": "by preferences (KTO), beside a reference model",
}


def recognises_llama_factory(source: LaunchFile) -> bool:
    """Whether a file names a tuning method as LLaMA-Factory does, or is a script that starts
    LLaMA-Factory.
    """
    command = command_of(source)
    if command is not None:
        return _is_started(command, source)
    return _has_keys(settings_of(source))


def _has_keys(settings: Mapping[str, Any]) -> bool:
    keys = settings.keys()
    if {"stage", "model_name_or_path"} <= keys:
        return bool(keys & {"finetuning_type", "template"})
    return _is_new(settings)


def _is_new(settings: Mapping[str, Any]) -> bool:
    """Whether a file has the keys of LLaMA-Factory's version 1."""
    keys = settings.keys()
    return {"model", "train_dataset"} <= keys and bool(keys & _NEW_SECTIONS)


def _is_started(command: Command, source: LaunchFile) -> bool:
    """Whether a command starts LLaMA-Factory by its name, by its module, or by a program of any
    name with LLaMA-Factory's keys as options or in a file.
    """
    words = [command.launch.program, *(word.text for word in command.launch.started)]
    names = [PurePath(word).name for word in words]
    if any(re.fullmatch(r"llamafactory(-cli|[.].*)?", name) for name in names):
        return True
    if {"stage", "finetuning_type"} <= command.options.keys():
        return True
    path = recipe_of(command)
    text = with_files(source, command).beside(path) if path is not None else None
    try:
        settings = parse_yaml(text, path or "", []) if text is not None else {}
    except InputError:
        return False
    return isinstance(settings, Mapping) and _has_keys(settings)


def read_llama_factory(source: LaunchFile, given: Given) -> Imported:
    """Import a LLaMA-Factory configuration, or the arguments in a script, as a job."""
    command = command_of(source)
    settings = settings_of(source) if command is None else arguments_of(command, source)
    if _is_new(settings):
        batch = settings.get("global_batch_size")
        if batch is not None and given.global_batch is None:
            given = replace(given, global_batch=checked_whole("global_batch_size", batch))
        return read_arguments(_of_new(settings), _NEW, source, given, command)
    stage = str(settings.get("stage", "sft"))
    if stage in _STAGES:
        reject(
            f"stage: {stage} trains {_STAGES[stage]}, which is not supported: give a LLaMA-Factory "
            "file with pt or sft"
        )
    settings = {"finetuning_type": "lora", **settings}
    trainer = _LLAMA_FACTORY
    if stage == "pt" and settings.get("packing") is None:
        trainer = replace(trainer, pads=False)
    return read_arguments(settings, trainer, source, given, command)


# LLaMA-Factory's version 1 (src/llamafactory/v1) has a section for each plugin, and keeps all
# states in the checkpoint's data type.
_NEW = Trainer(
    title="LLaMA-Factory",
    names={
        "model_name_or_path": "model",
        "per_device_train_batch_size": "micro_batch_size",
        "gradient_checkpointing": "enable_activation_checkpointing",
    },
    recomputes=True,
    length=2048,
    usual_batch=1,
)
_NEW_SECTIONS = {"dist_config", "peft_config", "kernel_config", "quant_config", "model_class"}
_OF_SAMPLES = {
    "sample_backend",
    "max_new_tokens",
    "init_config",
    "train_dataset",
    "global_batch_size",
}
_PACKED = ("padding_free", "dynamic_padding_free")


def _of_new(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return settings of version 1 as those of the Trainer."""
    if (kind := settings.get("model_class", "llm")) != "llm":
        reject(f"model_class: {kind} is not supported: give a file that trains a decoder (llm)")
    plain = {k: v for k, v in settings.items() if k not in _NEW_SECTIONS | _OF_SAMPLES}
    sharing, peft, quant, kernels = (
        dict(settings.get(f"{name}_config") or {}) for name in ("dist", "peft", "quant", "kernel")
    )
    by_deepspeed = sharing.get("name") == "deepspeed"
    if by_deepspeed:
        plain["deepspeed"] = sharing.get("config_file")
    elif sharing:
        plain |= {"fsdp": _FSDP["fsdp"], "fsdp_config": {"fsdp_version": 2}}
    if (ranks := sharing.get("ep_size", 1)) not in (None, 1):
        reject(f"dist_config.ep_size: {ranks} is not supported here: give 1, or leave it out")
    half = str(plain.pop("bf16", True)).lower() == "true"
    plain["bf16" if by_deepspeed else "pure_bf16"] = half
    if (ranks := plain.pop("cp_size", 1)) != 1:
        plain["sequence_parallel_size"] = ranks
    if str(plain.pop("cp_mode", "ulysses")) != "ulysses":
        reject("cp_mode: only ulysses is supported: give ulysses")
    plain["packing"] = str(plain.pop("batching_strategy", "normal")) in _PACKED
    if peft:
        ranks = peft.get("r", 8)
        plain |= {"finetuning_type": peft.get("name"), "lora_rank": ranks}
        plain["lora_target"] = peft.get("target_modules", "all")
    if quant:
        plain["quantization_bit"] = quant.get("quantization_bit", 4)
    optimizer = (settings.get("optim_config") or {}).get("name")
    plain |= {"optim": optimizer} if optimizer else {}
    plain.pop("optim_config", None)
    is_liger = "liger" in str(kernels.get("name"))
    return plain | ({"kernel_config": "liger_kernel"} if is_liger else {})


# Imports ms-swift: ``swift sft`` takes arguments of Hugging Face's Trainer, with other names and
# defaults.
#
# ``NPROC_PER_NODE`` and ``NNODES`` start processes, of which there is otherwise one. Without
# ``gradient_accumulation_steps`` a step has at least 16 sequences.


_SWIFT = Trainer(
    title="ms-swift",
    names={"model_name_or_path": "model", "quantization_bit": "quant_bits"},
    recomputes=True,
    usual_batch=1,
    fewest=16,
)
_PROGRAMS = ("sft", "pt")
# The mixed precision of a run by its ``torch_dtype``; weights of 32 bits are trained in fp16.
_MIXED = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp16"}
_CHECKPOINT_S = "bf16, as {} takes the checkpoint's data type: torch_dtype is not given"
_SAID = ("bf16", "fp16")
_HALVED = "fp16, by which {} trains weights of torch_dtype float32: give bf16 or fp16 for another"
_PATH = re.compile(r"(^|[/.])swift[/.]cli[/.](sft|pt)(\.py)?$")
# The names that the arguments ``deepspeed`` and ``fsdp`` have for configurations of the package.
_DEEPSPEED = re.compile(r"zero([0-3])(_offload)?")
_FSDP: Mapping[str, Any] = {
    "fsdp": "full_shard auto_wrap",
    "fsdp_config": {
        "fsdp_version": 2,
        "reshard_after_forward": True,
        "activation_checkpointing": True,
    },
}


def recognises_swift(source: LaunchFile) -> bool:
    """Whether a script starts supervised fine-tuning or pre-training by ms-swift."""
    command = command_of(source)
    return command is not None and _starts_swift(command)


def _starts_swift(command: Command) -> bool:
    launch = command.launch
    is_short = launch.launcher == "swift" and launch.program in _PROGRAMS
    return is_short or _PATH.search(launch.program) is not None


def read_swift(source: LaunchFile, given: Given) -> Imported:
    """Import a launch line of ms-swift as a job."""
    command = command_of(source)
    assert command is not None
    # The name that the tuned model gives itself is not the model's.
    settings = {k: v for k, v in arguments_of(command, source).items() if k != "model_name"}
    _check_task(settings.pop("task_type", None), _SWIFT.title)
    kind = settings.get("tuner_type", settings.get("train_type"))
    settings |= {"tuner_type": "lora"} if kind is None else {}
    settings |= _sharing(settings, command, source)
    remarks = tuple(_tell_of_devices(command))
    stated = {word: _is_true(settings[word]) for word in _SAID if word in settings}
    if (dtype := _type(settings.get("torch_dtype"))) is None and not any(stated.values()):
        settings["torch_dtype"] = dtype = "bfloat16"
        remarks = (*remarks, _assumed("precision", _CHECKPOINT_S.format(_SWIFT.title)))
    if (mixed := _mixed(dtype, stated)) is not None:
        if dtype == "float32":
            remarks = (*remarks, _assumed("precision", _HALVED.format(_SWIFT.title)))
        if dtype == "float32" or kind != "full" or "deepspeed" in settings:
            # The run keeps 32-bit states of what it trains.
            settings[mixed] = True
    if name := settings.get("optimizer"):
        text = f"{name} is predicted as AdamW"
        remarks = (*remarks, Remark(kind="ignored", choice="optimizer", text=text))
    imported = read_arguments(settings, _SWIFT, source, given, command)
    return replace(imported, remarks=(*remarks, *imported.remarks))


def _check_task(task: object, title: str) -> None:
    """Refuse embeddings, classifiers and rerankers."""
    if task not in (None, "causal_lm"):
        reject(
            f"task_type: {task} is not supported: give a launch line of {title} that trains a "
            "decoder by next-token prediction"
        )


def _mixed(dtype: str | None, stated: Mapping[str, bool]) -> str | None:
    """Return the mixed precision that a run takes from its data type, the checkpoint's if it has
    none; None where the run states this precision, on or off, or has another on.
    """
    word = _MIXED.get(dtype or "bfloat16")
    return None if word in stated or any(stated.values()) else word


def _is_true(value: object) -> bool:
    return str(value).lower() in ("true", "1", "yes", "y", "t")


def _type(value: object) -> str | None:
    return None if value is None else str(value).removeprefix("torch.")


def _assumed(choice: str, text: str) -> Remark:
    return Remark(kind="assumed", choice=choice, text=text)


def _tell_of_devices(command: Command) -> Iterator[Remark]:
    """Yield a remark if the processes are fewer than the GPUs, so that each splits its model."""
    visible = command.launch.environment.get("CUDA_VISIBLE_DEVICES")
    processes = command.launch.environment.get("NPROC_PER_NODE")
    count = "1" if processes is None else processes.text
    if command.launch.launcher == "swift" and visible is not None and count.isdigit():
        gpus = len([device for device in visible.text.split(",") if device.strip()])
        if gpus > int(count):
            text = (
                f"{visible.text} for {count} process{'es' * (count != '1')}, which ms-swift splits "
                "by device_map: each is predicted with its whole model on one GPU"
            )
            yield Remark(kind="ignored", choice="CUDA_VISIBLE_DEVICES", text=text)


def _sharing(
    settings: Mapping[str, Any], command: Command, source: LaunchFile
) -> Mapping[str, Any]:
    """Return the settings of the configurations that ms-swift has by name, or of the JSON file that
    describes how FSDP shards.
    """
    path = str(settings.get("fsdp"))
    if path.endswith(".json"):
        content = parse_json(named_text(path, command, source, "configures FSDP"))
        return {key: content.get(key, usual) for key, usual in _FSDP.items()}
    match = _DEEPSPEED.fullmatch(str(settings.get("deepspeed")))
    if match is not None:
        level, parts = int(match[1]), ("optimizer", "param")[: int(match[1]) - 1]
        places = {f"offload_{part}": {"device": "cpu"} for part in parts if match[2]}
        return {"deepspeed": {"zero_optimization": {"stage": level, **places}}}
    return _FSDP if settings.get("fsdp") == "fsdp2" else {}


# Imports Megatron-SWIFT, which trains a checkpoint by Megatron-core.


# Options of Megatron-LM that Megatron-SWIFT has by default, each with the options that replace it.
_DEFAULTS: Mapping[str, tuple[str, ...]] = {
    "--use-distributed-optimizer": ("use_distributed_optimizer",),
    "--attention-backend flash": ("attention_backend",),
    "--recompute-granularity selective": ("recompute_granularity",),
    "--micro-batch-size 1": ("micro_batch_size",),
    "--global-batch-size 16": ("global_batch_size",),
    "--expert-tensor-parallel-size 1": ("expert_tensor_parallel_size",),
    "--moe-token-dispatcher-type alltoall": ("moe_token_dispatcher_type",),
    "--moe-grouped-gemm": ("moe_grouped_gemm",),
}
# Options of Megatron-SWIFT that this module reads, or that have no effect on cost.
_OWN = re.compile(
    r"--(packing|padding_free|task_type|modules_to_save|adapters|mcore_adapter|cross_entropy_(loss_fusion|fusion_impl)|model(_name|_author|_type)?|hf_model|tuner_type|train_type|target_modules|torch_dtype"
    r"|lora_(rank|alpha|dropout|bias|dtype)|merge_lora|save_safetensors|system|output_dir"
    r"|num_train_epochs|load_from_cache_file|(dataset|dataloader)_num_(proc|workers)|split_dataset_ratio)"
)
_ADAPTERS = ("adapters", "mcore_adapter")
_NETWORKS = ("all", "mlp", "gate", "up_proj", "down_proj", "linear_fc")


def recognises_megatron(source: LaunchFile) -> bool:
    """Whether a script starts supervised fine-tuning or pre-training by Megatron-SWIFT."""
    command = command_of(source)
    launch = None if command is None else command.launch
    return launch is not None and launch.launcher == "megatron" and launch.program in _PROGRAMS


def read_megatron(source: LaunchFile, given: Given) -> Imported:
    """Import a launch line of Megatron-SWIFT as a job."""
    command = command_of(source)
    assert command is not None
    _check_task(command.text("task_type"), "Megatron-SWIFT")
    if given.model is None:
        path = command.text("model", "hf_model") or ""
        given = replace(given, model=needed_model(path, "model", with_files(source, command)))
    if given.engine is None:
        given = replace(given, engine=engine_told(source.text) or _engine(command))
    arguments = tuple(_of_megatron(command))
    launch = replace(command.launch, program="", arguments=arguments)
    imported = _with_adapters(command, read_launch(launch, source, given))
    return replace(imported, remarks=(*_tell_of_defaults(command), *imported.remarks))


def _is_on(command: Command, name: str, *, usual: bool = False) -> bool:
    """Whether a switch of a command is on, by its name alone or by its value."""
    if name not in command.options:
        return usual
    return _is_true(command.text(name) or "true")


def _engine(command: Command) -> str:
    """Return the engine that predicts Megatron-SWIFT, which fuses the loss by default."""
    if _is_on(command, "use_megatron_fsdp"):
        return "megatron-fsdp"
    fuses = _is_on(command, "cross_entropy_loss_fusion", usual=True)
    return "megatron-core-fused-loss" if fuses else "megatron-core"


def _tell_of_defaults(command: Command) -> Iterator[Remark]:
    """Yield remarks on what Megatron-SWIFT does where the line says nothing."""
    dtype = _type(command.text("torch_dtype"))
    if dtype in (None, "float32") and _mixed_of(command) is not None:
        text = _CHECKPOINT_S if dtype is None else _HALVED
        yield _assumed("precision", text.format("Megatron-SWIFT"))
    names = _listed(command, "modules_to_save")
    if names and _has_adapters(command):
        text = f"{' '.join(names)}: the run trains these in full, the prediction keeps them frozen"
        yield Remark(kind="ignored", choice="modules_to_save", text=text)
    if not _is_on(command, "packing"):
        text = "all are predicted at full length, though without packing many are shorter"
        yield _assumed("sequences", text)


def _of_megatron(command: Command) -> Iterator[Word]:
    """Yield the options of Megatron-LM that a launch line of Megatron-SWIFT stands for."""
    is_own, recomputes = False, command.text("recompute_granularity") != "none"
    packs = _is_on(command, "packing") and "packing_length" in command.options
    for word in command.launch.arguments:
        if word.text.startswith("--"):
            name = word.text.partition("=")[0].replace("-", "_").replace("__", "--", 1)
            is_own = _OWN.fullmatch(name) is not None
            is_own |= name == "--recompute_granularity" and not recomputes
            is_own |= name == ("--max_length" if packs else "--packing_length")
        if not is_own:
            text = re.sub("^--(max|packing)[-_]length", "--seq-length", word.text)
            yield replace(word, text=text)
    for option, names in _DEFAULTS.items():
        if not any(name in command.options for name in names):
            yield from (Word(text=text) for text in option.split())
    sharding = "data_parallel_sharding_strategy"
    if _is_on(command, "use_megatron_fsdp") and sharding not in command.options:
        yield from (Word(text=text) for text in (f"--{sharding}", "optim_grads_params"))
    if (mixed := _mixed_of(command)) is not None:
        yield Word(text=f"--{mixed}")
    elif mixed := _of_weights(command):
        yield Word(text=f"--{mixed}")
        if mixed == "bf16":
            yield Word(text="--grad-reduce-in-bf16")


def _mixed_of(command: Command) -> str | None:
    stated = {word: _is_on(command, word) for word in _SAID if word in command.options}
    return _mixed(_type(command.text("torch_dtype")), stated)


def _of_weights(command: Command) -> str | None:
    """Return the 16-bit data type of the weights of a run that turns off the mixed precision of
    this type: GEMMs are in it all the same, and gradients are summed in it; None for other runs.
    """
    is_on = any(_is_on(command, word) for word in _SAID)
    dtype = _type(command.text("torch_dtype")) or "bfloat16"
    return None if is_on or dtype == "float32" else _MIXED.get(dtype)


def _has_adapters(command: Command) -> bool:
    kind = command.text("tuner_type", "train_type") or "full"
    return kind != "full" or not command.options.keys().isdisjoint(_ADAPTERS)


def _with_adapters(command: Command, imported: Imported) -> Imported:
    """Add low-rank adapters to an imported job, where the run trains these."""
    if not _has_adapters(command):
        return imported
    kind = command.text("tuner_type", "train_type") or "full"
    if kind not in ("lora", "full"):
        reject(f"tuner_type: {kind} is not supported: give lora or full")
    targets, path = _listed(command, "target_modules"), command.text(*_ADAPTERS)
    return trained_by_adapters(
        imported,
        rank=command.text("lora_rank"),
        where="lora_rank",
        usual=8,
        title=(
            f"as the rank of {path} is not read: give --lora_rank"
            if path
            else "Megatron-SWIFT's default"
        ),
        are_wide=not targets or any(part in name for name in targets for part in _NETWORKS),
    )


def _listed(command: Command, name: str) -> list[str]:
    """Return all values of an option of a command."""
    words, values = iter(command.launch.arguments), list[str]()
    for word in words:
        if word.text.replace("-", "_") == f"__{name}":
            for below in words:
                if below.text.startswith("--"):
                    break
                values.append(known_text(below, name))
    return values
