"""The catalogue: models, hardware and profiles of clusters that come with the package, by name."""

from collections.abc import Iterable, Iterator
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any, NoReturn

from mistlab.core.files import parse_yaml
from mistlab.core.values import from_mapping, near_matches, refuse, shown
from mistlab.machine.cluster import Profile
from mistlab.machine.hardware import Hardware, can_lend, is_calibrated
from mistlab.plan.workload import ModelSpec

ENDING = ".yaml"


def model(name: str) -> ModelSpec:
    """The model of this name."""
    if name not in _model_files():
        _refuse_name("model", name, "models", model_names())
    return _model(name)


def model_names() -> tuple[str, ...]:
    """The names of all models, in alphabetical order."""
    return tuple(_model_files())


def hardware(name: str) -> Hardware:
    """The hardware of this name; what its file lacks is that of the nearest GPU, scaled."""
    return _completed(stated_hardware(name))


def stated_hardware(name: str) -> Hardware:
    """The hardware of this name, with no more than what its file says."""
    if name not in _hardware_files():
        _refuse_name("hardware", name, "hardware", hardware_names())
    return _hardware(name)


def hardware_names() -> tuple[str, ...]:
    """The names of all hardware, in alphabetical order."""
    return tuple(_hardware_files())


def calibrated_names() -> tuple[str, ...]:
    """The names of hardware whose files have all groups of measured numbers, in that order."""
    names = hardware_names()
    return tuple(name for name in names if is_calibrated(stated_hardware(name)))


def with_all_groups(hardware: Hardware) -> Hardware:
    """The hardware with its curves as its figures say, and completed from the nearest of the
    catalogue's measured ones."""
    return _completed(hardware)


def profile(name: str) -> Profile:
    """The profile of this name."""
    if name not in _profile_files():
        _refuse_name("profile", name, "profiles", profile_names())
    return _profile(name)


def profile_names() -> tuple[str, ...]:
    """The names of all profiles, in alphabetical order."""
    return tuple(_profile_files())


def sureness() -> dict[str, Any]:
    """How far measured runs of each kind lie from their predictions, as plain data."""
    file = files(__name__) / f"sureness{ENDING}"
    return parse_yaml(file.read_text(encoding="utf-8"), file.name)


@cache
def _model(name: str) -> ModelSpec:
    file = _model_files()[name]
    content = parse_yaml(file.read_text(encoding="utf-8"), file.name)
    return ModelSpec.from_mapping({"name": name, **content}, file.name)


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


@cache
def _hardware(name: str) -> Hardware:
    file = _hardware_files()[name]
    content = parse_yaml(file.read_text(encoding="utf-8"), file.name)
    return from_mapping(Hardware, content, file.name)


@cache
def _profile(name: str) -> Profile:
    file = _profile_files()[name]
    content = parse_yaml(file.read_text(encoding="utf-8"), file.name)
    return from_mapping(Profile, content, file.name)


@cache
def _profile_files() -> dict[str, Traversable]:
    return dict(_files("profiles"))


@cache
def _model_files() -> dict[str, Traversable]:
    return dict(_files("models"))


@cache
def _hardware_files() -> dict[str, Traversable]:
    return dict(_files("hardware"))


def _refuse_name(kind: str, name: str, folder: str, names: Iterable[str]) -> NoReturn:
    near = near_matches(name, names, str(files(__name__) / folder))
    refuse(kind, f"{shown(name)} is unknown{near}")


def _files(folder: str) -> Iterator[tuple[str, Traversable]]:
    entries = (files(__name__) / folder).iterdir()
    for entry in sorted(entries, key=lambda entry: entry.name):
        if entry.name.endswith(ENDING):
            yield entry.name.removesuffix(ENDING), entry
