"""Imports torchtitan's configurations (TOML or Python functions), and scripts that start torchtitan
with one.
"""

from collections.abc import Mapping
from typing import Any

from mistlab.core.files import about
from mistlab.export import torchtitan_read
from mistlab.export.found import Found, parse_toml
from mistlab.export.given import Given, Imported
from mistlab.export.torchtitan_python import NAMES, sections_of
from mistlab.formats.content import content_of, settings_of
from mistlab.formats.launched import (
    Command,
    command_of,
    dotted_options,
    named_text,
    take_ranks,
    with_dotted,
)
from mistlab.shell.session import LaunchFile

_SECTIONS = {"training", "model"}
_OWN = {"job", "metrics", "parallelism", "activation_checkpoint", "profiling", "checkpoint"}


def recognises(source: LaunchFile) -> bool:
    """Whether a file is a torchtitan configuration in TOML or Python, or a script that starts
    torchtitan.
    """
    content = content_of(source)
    if content.kind == "python":
        return bool(NAMES.search(source.text))
    command = command_of(source)
    if command is not None:
        return _is_started(command)
    settings = content.settings
    training = settings.get("training")
    return (
        settings.keys() >= _SECTIONS
        and isinstance(training, Mapping)
        and bool(_OWN & settings.keys())
        and not {"trainer", "modules", "work_group"} & settings.keys()
    )


def _is_started(command: Command) -> bool:
    program = command.launch.program
    if "torchtitan" in program or "job.config_file" in command.options:
        return True
    environment = command.launch.environment
    return program.endswith("run_train.sh") and bool({"CONFIG_FILE", "CONFIG"} & environment.keys())


def read(source: LaunchFile, given: Given) -> Imported:
    """Import a torchtitan configuration as a job; of a script, the one that it names, with the
    script's overrides.
    """
    draft = Found()
    command = command_of(source)
    if command is None:
        sections = settings_of(source)
        if content_of(source).kind == "python":
            sections = sections_of(source.text, source.name, source.settings.get("CONFIG"))
        return torchtitan_read.read_mapping(sections, given, draft)
    take_ranks(command, source, draft, given)
    return torchtitan_read.read_mapping(_started(command, source), given, draft)


def _started(command: Command, source: LaunchFile) -> Mapping[str, Any]:
    """Return the sections of the configuration with which a script starts torchtitan, a TOML file
    or a Python function.
    """
    changes = dict(dotted_options(command, torchtitan_read.HARMLESS))
    path = command.text("job.config_file") or _variable(command, "CONFIG_FILE")
    if path is not None:
        text = named_text(path, command, source, "configures torchtitan's run")
        with about(path):
            return with_dotted(parse_toml(text), changes)
    module, name = command.text("module"), command.text("config")
    if module is None or name is None:
        return with_dotted({}, changes)
    registry = f"torchtitan/models/{module.rpartition('.')[2]}/config_registry.py"
    text = named_text(registry, command, source, f"has torchtitan's configuration {name}")
    return with_dotted(sections_of(text, registry, name), changes)


def _variable(command: Command, name: str) -> str | None:
    word = command.launch.environment.get(name)
    return None if word is None or word.unknown is not None else word.text
