"""Reads LLaMA-Factory's YAML of full training; other ways to tune are refused by name.

Left-out keys take the defaults of src/llamafactory/hparams (2026): LoRA, 2,048 tokens, and
recomputation unless it is turned off.
"""

from mistlab.core.values import InputError
from mistlab.export.given import Given, Imported
from mistlab.formats.content import settings_of
from mistlab.formats.hf_trainer import Trainer, arguments_of, read_arguments
from mistlab.formats.launched import Command, command_of
from mistlab.shell.source import Source

_TRAINER = Trainer(title="LLaMA-Factory", recomputes=True, length=2048)
_STAGES = {
    "rm": "a reward model",
    "ppo": "by reinforcement learning (PPO), which generates text",
    "dpo": "by preferences (DPO), beside a reference model",
    "kto": "by preferences (KTO), beside a reference model",
}


def recognises(source: Source) -> bool:
    """Whether a file has LLaMA-Factory's way to tune, or a script starts it."""
    command = command_of(source)
    if command is not None:
        return _is_started(command)
    keys = settings_of(source).keys()
    return {"stage", "model_name_or_path"} <= keys and bool(keys & {"finetuning_type", "template"})


def _is_started(command: Command) -> bool:
    words = [command.launch.program, *(word.text for word in command.launch.started)]
    if any(word.endswith(("llamafactory-cli", "llamafactory")) for word in words):
        return True
    return {"stage", "finetuning_type"} <= command.options.keys()


def read(source: Source, given: Given) -> Imported:
    """The job of a file, or of a script's arguments."""
    command = command_of(source)
    settings = settings_of(source) if command is None else arguments_of(command, source)
    stage = str(settings.get("stage", "sft"))
    if stage in _STAGES:
        message = f"stage: this is a LLaMA-Factory file that trains {_STAGES[stage]}: not read here"
        raise InputError(message)
    kind = str(settings.get("finetuning_type", "lora"))
    if kind != "full":
        message = (
            f"finetuning_type: this is a LLaMA-Factory file with {kind}: not read here, only full "
            "training is"
        )
        raise InputError(message)
    trainer = _TRAINER
    if stage == "pt" and settings.get("packing") is None:
        trainer = Trainer(title=_TRAINER.title, recomputes=True, length=2048, pads=False)
    return read_arguments(settings, trainer, source, given, command)
