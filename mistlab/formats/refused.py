"""Files that are recognised by their keys and cannot be read here, and why."""

from collections.abc import Callable, Mapping
from typing import Any

from mistlab.core.values import InputError
from mistlab.export.given import Given, Imported
from mistlab.formats.content import settings_of
from mistlab.formats.format import Format
from mistlab.formats.launched import command_of
from mistlab.huggingface.configurations import KIND
from mistlab.shell.source import Source

_Test = Callable[[Mapping[str, Any]], bool]


def _has(*keys: str) -> _Test:
    return lambda settings: all(_below(settings, key) is not None for key in keys)


def _below(settings: Any, path: str) -> Any:
    for part in path.split("."):
        if not isinstance(settings, Mapping) or part not in settings:
            return None
        settings = settings[part]
    return settings


def _any(*tests: _Test) -> _Test:
    return lambda settings: any(test(settings) for test in tests)


# Name, title, keys, and why a file is not read. The first that matches counts.
_ROWS: tuple[tuple[str, str, _Test, str], ...] = (
    (
        "huggingface-model",
        "a model's configuration (Hugging Face)",
        _has(KIND, "hidden_size"),
        "it describes a model, not a run: give it by --model beside the file of a run",
    ),
    (
        "olmo",
        "OLMo",
        _any(
            _has("device_train_microbatch_size", "model.d_model", "fsdp.wrapping_strategy"),
            _has("device_train_microbatch_size", "model.d_model", "save_folder", "evaluators"),
            _has("global_train_batch_size", "model.mlp_ratio"),
        ),
        "give the model by --model and the rest as a configuration of Accelerate",
    ),
    (
        "olmo-core",
        "OLMo-core",
        _any(_has("train_module", "data_loader"), _has("trainer", "dataset", "model.block")),
        "its recipes are Python: give the model by --model and the rest as one of the formats read",
    ),
    (
        "nemo-automodel",
        "NeMo AutoModel",
        _any(_has("model._target_", "step_scheduler"), _has("step_scheduler", "distributed")),
        "give the model by --model and the rest as a configuration of Accelerate",
    ),
    (
        "nemo-rl",
        "a run of reinforcement learning",
        _any(
            _has("actor_rollout_ref"),
            _has("policy", "grpo"),
            _has("actor", "rollout"),
            _has("algorithm.adv_estimator"),
        ),
        "it generates text and trains several models in turn",
    ),
    (
        "torchtune",
        "torchtune",
        _has("model._component_", "optimizer._component_"),
        "give the model by --model and the rest as a configuration of Accelerate",
    ),
    (
        "maxtext",
        "MaxText",
        _any(_has("ici_fsdp_parallelism"), _has("base_config", "per_device_batch_size")),
        "it trains by JAX, which no engine stands for",
    ),
    (
        "levanter",
        "Levanter",
        _has("trainer.mp", "model.type"),
        "it trains by JAX, which no engine stands for",
    ),
    (
        "beaker",
        "an experiment of Beaker",
        _any(_has("tasks", "budget"), _has("tasks", "version")),
        "give the command that it starts as a script",
    ),
    (
        "kubernetes",
        "a manifest of Kubernetes",
        _has("apiVersion", "kind"),
        "give the command that it starts as a script",
    ),
    (
        "flagscale-experiment",
        "an experiment of FlagScale",
        _any(_has("experiment", "defaults"), _has("experiment.task", "experiment.runner")),
        "it names the file with the run's settings: import that",
    ),
    (
        "test-recipe",
        "a recipe of Megatron-LM's tests",
        _has("spec", "products"),
        "it names tests, whose model_config.yaml has the options: import that",
    ),
    (
        "model-card",
        "a card of a model",
        _has("base_model", "license"),
        "it describes a model, not a run",
    ),
    (
        "mindspeed",
        "MindSpeed's training by FSDP2",
        _any(_has("parallel.fsdp_plan"), _has("model.model_id", "parallel", "training")),
        "its plan of sharding has no reader here: give it as a configuration of Accelerate",
    ),
)
_PROGRAMS: Mapping[str, tuple[str, str]] = {
    "olmo": ("OLMo", "scripts/train.py"),
}


def _row(name: str, title: str, test: _Test, why: str) -> Format:
    def read(source: Source, given: Given) -> Imported:
        del source, given
        message = f"this is {title}: not read here: {why}"
        raise InputError(message)

    def recognises(source: Source) -> bool:
        return command_of(source) is None and test(settings_of(source))

    return Format(name=name, title=title, recognises=recognises, read=read, target="megatron")


REFUSED: tuple[Format, ...] = tuple(_row(*row) for row in _ROWS)
