"""The catalogue: the models, hardware and cluster profiles that are shipped with the package, by
name.
"""

import re
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

from mistlab.core.files import parse_yaml
from mistlab.core.values import did_you_mean, from_mapping, near_matches, refuse, shown
from mistlab.machine.cluster import Profile
from mistlab.machine.hardware import Hardware, can_lend, is_calibrated
from mistlab.plan.workload import ModelSpec

ENDING = ".yaml"


@cache
def model(name: str) -> ModelSpec:
    """The catalogue's model with this name."""
    content, file = _read("model", "models", name)
    return ModelSpec.from_mapping({"name": name, **content}, file)


def model_names() -> tuple[str, ...]:
    """The names of the catalogue's models, in alphabetical order."""
    return tuple(_files("models"))


def hardware(name: str) -> Hardware:
    """The catalogue's hardware with this name; groups of figures that its file lacks are scaled
    from the nearest calibrated GPU.
    """
    return _completed(stated_hardware(name))


@cache
def stated_hardware(name: str) -> Hardware:
    """The catalogue's hardware with this name, with only the figures that its file states."""
    return from_mapping(Hardware, *_read("hardware", "hardware", name))


def hardware_names() -> tuple[str, ...]:
    """The names of the catalogue's hardware, in alphabetical order."""
    return tuple(_files("hardware"))


def calibrated_names() -> tuple[str, ...]:
    """The names of the catalogue's hardware whose files have all measured groups of figures, in
    alphabetical order.
    """
    names = hardware_names()
    return tuple(name for name in names if is_calibrated(stated_hardware(name)))


def with_all_groups(hardware: Hardware) -> Hardware:
    """The hardware with its measured curves scaled to the datasheet figures of its file, and with
    missing groups of figures taken from the nearest calibrated hardware.
    """
    return _completed(hardware)


@cache
def profile(name: str) -> Profile:
    """The catalogue's cluster profile with this name."""
    return from_mapping(Profile, *_read("profile", "profiles", name))


def profile_names() -> tuple[str, ...]:
    """The names of the catalogue's cluster profiles, in alphabetical order."""
    return tuple(_files("profiles"))


def sureness() -> dict[str, Any]:
    """How far measured runs lie from predictions, by kind of run, as the mapping of the file
    ``sureness.yaml``.
    """
    file = files(__name__) / f"sureness{ENDING}"
    return parse_yaml(file.read_text(encoding="utf-8"), file.name)


@cache
def _completed(hardware: Hardware) -> Hardware:
    if is_calibrated(hardware) and hardware.measured_with in (None, hardware.figures):
        return hardware
    from mistlab.catalog.completed import completed, restated  # noqa: PLC0415 (seldom needed)

    hardware = restated(hardware)
    if is_calibrated(hardware):
        return hardware
    calibrated = map(stated_hardware, calibrated_names())
    return completed(hardware, [one for one in calibrated if can_lend(one)])


def _read(kind: str, folder: str, name: str) -> tuple[dict[str, Any], str]:
    """The content and the file name of a catalogue entry of this ``kind``; refuses an unknown
    name.
    """
    if name not in _files(folder):
        is_strange = kind == "hardware" and not did_you_mean(name, _files(folder))
        near = _of_same_words(name, _files(folder)) if is_strange else ""
        near = near or near_matches(name, _files(folder), str(files(__name__) / folder))
        refuse(kind, f"{shown(name)} is unknown{near}")
    file = _files(folder)[name]
    return parse_yaml(file.read_text(encoding="utf-8"), file.name), file.name


@cache
def _files(folder: str) -> Mapping[str, Traversable]:
    """The files in a folder of the catalogue, by the entry's name, in alphabetical order."""
    entries = sorted((files(__name__) / folder).iterdir(), key=lambda entry: entry.name)
    return {one.name.removesuffix(ENDING): one for one in entries if one.name.endswith(ENDING)}


# The most entries that a message about an unknown name suggests, and a pattern of words with a
# digit, which name a chip, a size or a version.
_FEW, _WORD = 3, re.compile(r"[a-z]*[0-9][a-z0-9]*")


def _of_same_words(name: str, names: Iterable[str]) -> str:
    """The end of a message about an unknown hardware: the entries that share most words with a
    digit with the given name (``h100`` of ``NVIDIA H100 SXM``); empty if none does.
    """
    parts = set(_WORD.findall(name.lower()))
    shared = {one: len(parts & set(_WORD.findall(one))) for one in names}
    best = max(shared.values(), default=0)
    near = sorted((one for one in names if shared[one] == best), key=len)[:_FEW]
    return f": did you mean {' or '.join(map(repr, near))}?" if best else ""
