"""The catalogue: models, hardware and cluster profiles that the package ships, by name."""

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
    """Return the model of this name in the catalogue."""
    content, file = _read("model", "models", name)
    return ModelSpec.from_mapping({"name": name, **content}, file)


def model_names() -> tuple[str, ...]:
    """List the names of the catalogue's models in alphabetical order."""
    return tuple(_files("models"))


def models_path() -> str:
    """The path of the folder with the catalogue's models."""
    return str(files(__name__) / "models")


def hardware(name: str) -> Hardware:
    """Return the hardware of this name in the catalogue; figures that its file lacks are scaled
    from those of the nearest calibrated GPU.
    """
    return _completed(stated_hardware(name))


@cache
def stated_hardware(name: str) -> Hardware:
    """Return the hardware of this name with only the figures that its file states."""
    return from_mapping(Hardware, *_read("hardware", "hardware", name))


def hardware_names() -> tuple[str, ...]:
    """List the names of the catalogue's hardware in alphabetical order."""
    return tuple(_files("hardware"))


def calibrated_names() -> tuple[str, ...]:
    """List the hardware in the catalogue whose files have all measured figures, in alphabetical
    order.
    """
    names = hardware_names()
    return tuple(name for name in names if is_calibrated(stated_hardware(name)))


def with_all_groups(hardware: Hardware) -> Hardware:
    """Complete a hardware description: missing figures come from the nearest calibrated hardware,
    and measured curves are scaled to its datasheet.
    """
    return _completed(hardware)


@cache
def profile(name: str) -> Profile:
    """Return the cluster profile of this name in the catalogue."""
    return from_mapping(Profile, *_read("profile", "profiles", name))


def profile_names() -> tuple[str, ...]:
    """List the names of the catalogue's cluster profiles."""
    return tuple(_files("profiles"))


def sureness() -> dict[str, Any]:
    """Return how far measured runs lie from predictions, for each kind of run, as ``sureness.yaml``
    states it.
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
    """Return content and file name of a catalogue entry; refuses an unknown name."""
    if name not in _files(folder):
        names_memory = re.fullmatch(r"\d+gi?b", name.lower().replace(" ", ""))
        is_strange = kind == "hardware" and bool(
            names_memory or not did_you_mean(name, _files(folder))
        )
        near = _of_same_words(name, _files(folder)) if is_strange else ""
        near = near or near_matches(name, _files(folder), str(files(__name__) / folder))
        meant = hardware_called(name) if kind == "hardware" else ()
        if meant:
            near = f": did you mean {' or '.join(map(repr, meant))}?"
        elif kind == "hardware" and not names_memory:
            near = f"{near.removesuffix('?')}; {_OTHER_GPUS}"
        refuse(kind, f"{shown(name)} is unknown{near}")
    file = _files(folder)[name]
    return parse_yaml(file.read_text(encoding="utf-8"), file.name), file.name


@cache
def _files(folder: str) -> Mapping[str, Traversable]:
    """Return the files in a folder of the catalogue by entry name, in alphabetical order."""
    entries = sorted((files(__name__) / folder).iterdir(), key=lambda entry: entry.name)
    return {one.name.removesuffix(ENDING): one for one in entries if one.name.endswith(ENDING)}


# How many entries an error suggests for an unknown name; and a pattern of words that contain a
# digit, such as h100 or 80gb.
_FEW, _WORD = 3, re.compile(r"[a-z]*[0-9][a-z0-9]*")


# The memory in a GPU's name; and words that name who sells it or how it is mounted by default.
_MEMORY = re.compile(r"(?<![a-z0-9])\d+ ?gi?b?\b")
_SELLERS = re.compile(
    r"\b((nvidia|geforce|rtx|quadro|tesla|amd|radeon|instinct|sxm\d?|oam)\b|rtx(?=\d))"
)
_OTHER_GPUS = (
    "another GPU is given as a file of some ten figures of its datasheet "
    "(docs/reference/hardware-file.md); Apple's GPUs, Gaudi and TPUs are not modelled"
)


def hardware_called(name: str) -> tuple[str, ...]:
    """List the hardware of the catalogue that a name means if its seller, memory and separators may
    be left out: ``3090`` and ``NVIDIA RTX 3090`` mean ``rtx-3090-24gb``.
    """
    model, memory = _model_and_memory(name)
    entries = {entry: _model_and_memory(entry) for entry in hardware_names()}
    same = [entry for entry, (called, _) in entries.items() if model and called == model]
    return tuple(entry for entry in same if not memory or entries[entry][1] == memory)


def _model_and_memory(name: str) -> tuple[str, str]:
    """Return a GPU's name without its seller, memory and separators, and its GB of memory."""
    spaced = re.sub(r"[-_ ]+", " ", name.lower())
    memory = _MEMORY.search(spaced)
    rest = _SELLERS.sub("", _MEMORY.sub("", spaced))
    return rest.replace(" ", ""), re.sub(r"\D", "", memory[0]) if memory else ""


def _of_same_words(name: str, names: Iterable[str]) -> str:
    """Return the end of an error about an unknown hardware: entries that share words such as
    ``h100`` with the given name; empty if there is none.
    """
    parts = set(_WORD.findall(name.lower().replace("gib", "gb").replace(" gb", "gb")))
    shared = {one: len(parts & set(_WORD.findall(one))) for one in names}
    best = max(shared.values(), default=0)
    near = sorted((one for one in names if shared[one] == best), key=len)[:_FEW]
    return f": did you mean {' or '.join(map(repr, near))}?" if best else ""
