"""The table of all formats of launch files, and the format of a given file."""

from pathlib import PurePath

from mistlab.export.table import TARGETS
from mistlab.formats.format import Format
from mistlab.shell.source import Source

# The endings of files of each format; any other file is a launch script.
_ENDINGS = {
    "deepspeed": (".json",),
    "torchtitan": (".toml",),
    "accelerate": (".yaml", ".yml"),
    "megatron": (),
}


def _row(name: str, endings: tuple[str, ...]) -> Format:
    target = TARGETS[name]
    return Format(
        name=name,
        title=target.title,
        recognises=lambda source: PurePath(source.name).suffix.lower() in endings,
        read=lambda source, given: target.read(source.text, given),
        target=name,
    )


FORMATS: dict[str, Format] = {name: _row(name, endings) for name, endings in _ENDINGS.items()}


def format_of(source: Source) -> Format:
    """The format of a file, by what the file holds."""
    known = (row for row in FORMATS.values() if row.recognises(source))
    return next(known, FORMATS["megatron"])
