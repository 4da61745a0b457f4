"""Imports YAML files that hold Megatron-LM's options: those for ``--yaml-cfg``, functional tests,
and FlagScale's files.

Left-out fields take the options' defaults (megatron/training/yaml_arguments.py).
"""

import re
from collections.abc import Mapping
from typing import Any

from mistlab.core.values import reject
from mistlab.export.found import checked_whole
from mistlab.export.given import Given, Imported
from mistlab.export.megatron.tokenizer_sizes import has_word_pieces
from mistlab.formats.content import settings_of
from mistlab.formats.flags import Flags
from mistlab.formats.launched import resolved
from mistlab.shell.session import LaunchFile

_YAML_SECTIONS = ("language_model", "model_parallel")
_ACTIVATIONS = {"swiglu": "--swiglu", "squaredrelu": "--squared-relu"}
# Fields of ``--yaml-cfg`` files that are no options of Megatron-LM, or have another name there.
_OWN = (
    "activation_func gated_linear_unit params_dtype perform_initialization init_method timers "
    "output_layer_init_method layernorm_zero_centered_gamma bias_activation_fusion "
    "memory_efficient_layer_norm clone_scatter_output_in_embedding moe_token_dropping spec "
    "tp_comm_split_ag tp_comm_split_rs tp_comm_bulk_dgrad tp_comm_bulk_wgrad tp_comm_atomic_ag"
)


def recognises_yaml(source: LaunchFile) -> bool:
    """Whether a file has the two sections of files for ``--yaml-cfg``."""
    settings = settings_of(source)
    return all(isinstance(settings.get(name), Mapping) for name in _YAML_SECTIONS)


def read_yaml(source: LaunchFile, given: Given) -> Imported:
    """Import a file for Megatron-LM's option ``--yaml-cfg`` as a job."""
    settings = resolved(settings_of(source), source.settings)
    flags = Flags(where="language_model")
    _put_fields(
        {key: value for key, value in settings.items() if key not in _YAML_SECTIONS}, flags, ""
    )
    for name in _YAML_SECTIONS:
        _put_fields(settings[name], flags, f"{name}.")
    model = settings["language_model"]
    kind = str(model.get("activation_func", "gelu")).lower()
    if kind in _ACTIVATIONS or (kind == "silu" and model.get("gated_linear_unit")):
        flags.options[_ACTIVATIONS.get(kind, "--swiglu")] = None
    elif kind != "gelu":
        flags.remark("language_model.activation_func", f"{kind} is predicted as gelu")
    if model.get("num_query_groups"):
        flags.put("group_query_attention", True)
    return flags.read(given)


def _put_fields(section: Mapping[str, Any], flags: Flags, where: str) -> None:
    own_names = _OWN.split()
    for key, value in section.items():
        if key not in own_names and not isinstance(value, Mapping):
            flags.put(str(key), value, f"{where}{key}")


# Imports Megatron-LM's functional tests: YAML in which ``MODEL_ARGS`` are the options of a run.
#
# A test starts ``pretrain_gpt.py``, or ``pretrain_bert.py`` if its folder is BERT's, on one node of
# eight GPUs, unless its environment says otherwise
# (tests/functional_tests/shell_test_utils/_run_training.sh).


GPUS_PER_NODE = 8
_RANKS = re.compile(r"(\d+)N(\d+)G(?=[/_.]|$)", re.IGNORECASE)
# Options, and parts of paths, that tell that a test trains no decoder, each with what it does
# instead.
_OTHERS: Mapping[str, str] = {
    "--encoder-seq-length": "T5, an encoder with a decoder",
    "--encoder-num-layers": "T5, an encoder with a decoder",
    "--img-h": "a model of images",
    "--retro-project-dir": "a retrieval model",
    "--inference-max-requests": "inference",
    "--max-tokens-to-oom": "inference",
    "--grpo-prompts-per-step": "reinforcement learning",
    "--perform-rl-step": "reinforcement learning",
    "--model-provider": "inference, or a program of its own",
    "--language-model-type": "a vision-language model",
}
_FOLDERS = {
    "t5": "T5, an encoder with a decoder",
    "multimodal-llava": "a vision-language model",
    "mimo": "a vision-language model",
    "ict": "a retrieval model",
    "retro": "a retrieval model",
}
_BERT = "pretrain_bert.py"
_MODES = {"inference": "inference", "rl": "reinforcement learning"}


def recognises_test(source: LaunchFile) -> bool:
    """Whether a file is a functional test of Megatron-LM."""
    return isinstance(settings_of(source).get("MODEL_ARGS"), Mapping)


def read_test(source: LaunchFile, given: Given) -> Imported:
    """Import the first run of a functional test of Megatron-LM as a job."""
    settings = settings_of(source)
    arguments = settings["MODEL_ARGS"]
    _check_program(settings, arguments, source)
    flags = Flags(program=_BERT if _trains_bert(arguments, source) else "")
    for name, value in arguments.items():
        option = f"--{str(name).lstrip('-')}"
        if value is True or str(value).lower() == "true" or value is None or value == "":
            flags.options[option] = None
        elif value is not False and str(value).lower() != "false":
            # Remove backslashes: Megatron-LM passes the options of a test through a shell, so that
            # special characters are escaped.
            flags.options[option] = re.sub(r"\\(.)", r"\1", str(value))
    _take_ranks(settings, flags, source, given)
    if any(str(key).startswith("MODEL_ARGS_") for key in settings):
        flags.assume("options", "MODEL_ARGS, those of the first run; MODEL_ARGS_2 are not read")
    return flags.read(given)


def _check_program(
    settings: Mapping[str, Any], arguments: Mapping[str, Any], source: LaunchFile
) -> None:
    names = {str(name) for name in arguments}
    dotted = [name for name in sorted(names) if "." in name and not name.startswith("--")]
    if dotted:
        reject(
            f"MODEL_ARGS: {dotted[0]} changes a recipe of NeMo, which is not in this file: print "
            "the whole recipe and import that, or give the run's options as a launch line"
        )
    parts = re.split(r"[/\\]", source.name)
    reasons = [
        _MODES.get(str(settings.get("MODE", "")).lower(), ""),
        *(reason for option, reason in _OTHERS.items() if option in names),
        *(reason for folder, reason in _FOLDERS.items() if folder in parts[:-1]),
    ]
    for reason in filter(None, reasons):
        reject(f"is a test of {reason}, which is not supported: give a test of a decoder or BERT")


def _trains_bert(arguments: Mapping[str, Any], source: LaunchFile) -> bool:
    """Whether a functional test starts BERT: its folder is BERT's, or it has an option of BERT's
    alone.
    """
    kind = str(arguments.get("--tokenizer-type", ""))
    folders = re.split(r"[/\\]", source.name)[:-1]
    return "bert" in folders or "--bert-no-binary-head" in arguments or has_word_pieces(kind)


def _take_ranks(
    settings: Mapping[str, Any], flags: Flags, source: LaunchFile, given: Given
) -> None:
    """Read the number of ranks of a functional test from its environment or its folder's name; by
    default one node of eight GPUs.
    """
    environment = settings.get("ENV_VARS")
    environment = environment if isinstance(environment, Mapping) else {}
    match = _RANKS.search(source.name)
    nodes = environment.get("NUM_NODES") or (match[1] if match else None)
    gpus = environment.get("GPUS_PER_NODE") or (match[2] if match else None)
    flags.nodes = checked_whole("ENV_VARS.NUM_NODES", nodes or 1)
    flags.gpus_per_node = checked_whole("ENV_VARS.GPUS_PER_NODE", gpus or GPUS_PER_NODE)
    if given.nodes is not None:
        flags.nodes = given.nodes
    if given.gpus_per_node is not None:
        flags.gpus_per_node = given.gpus_per_node
    elif gpus is None:
        text = (
            f"{GPUS_PER_NODE} on {flags.nodes} node{'s' * (flags.nodes != 1)}, as in Megatron-LM's "
            "tests: --nodes and --gpus-per-node give others"
        )
        flags.assume("gpus_per_node", text)


# Imports FlagScale's training YAML, which has Megatron-LM's options in the sections system, model
# and data.


_FLAGSCALE_SECTIONS = ("system", "model", "data")
# Subsections of FlagScale's files that do not affect cost.
_CALM = ("logging", "checkpoint", "learning_rate_scheduler", "optimizer")


def recognises_flagscale(source: LaunchFile) -> bool:
    """Whether a file has FlagScale's sections and a number of blocks."""
    settings = settings_of(source)
    model = settings.get("model")
    return "system" in settings and isinstance(model, Mapping) and "num_layers" in model


def read_flagscale(source: LaunchFile, given: Given) -> Imported:
    """The job that a FlagScale file describes."""
    settings = resolved(settings_of(source), source.settings)
    flags = Flags(where="model")
    for name in _FLAGSCALE_SECTIONS:
        _put(settings.get(name), flags, name)
    return flags.read(given)


def _put(section: Any, flags: Flags, where: str) -> None:
    if not isinstance(section, Mapping):
        return
    for key, value in section.items():
        if isinstance(value, Mapping):
            if key not in _CALM:
                _put(value, flags, f"{where}.{key}")
        else:
            flags.put(str(key), value, f"{where}.{key}")
