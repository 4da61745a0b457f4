"""Holds the table of Hugging Face model types, and reads keys of a configuration with the defaults
of its model type.

The rows are the files in ``types/``. They are facts of the configuration classes of transformers
5.23.0, by which ``python -m experiments.check_models`` measures them again.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from mistlab.core.files import parse_yaml
from mistlab.core.values import refuse, shown

FOLDER, RELEASES = "types", "releases.yaml"
REFUSED = "refused.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeRow:
    """An entry of the table of model types: how a ``config.json`` of this type describes a model.

    ``model`` holds fields of the model description that all models of the type have. ``when`` maps
    keys of the file to further fields, which hold if the key is true. ``names`` are the type's own
    names for keys that most types name otherwise. ``defaults`` are the values of keys that a file
    leaves out.

    Several fields name keys of the file. If all keys of ``biases`` are true, all GEMMs have biases;
    those of ``part_biases`` turn on biases of some GEMMs, which are left out with a remark.
    ``qk_norm`` and ``post_norms`` are the keys that turn these norms on. ``ffn`` is the key of the
    feed-forward network's width; if ``ffn_times`` is given, it is instead the key of the ratio of
    that width to the hidden size, and with ``ffn_is_sum`` it counts both halves of a gated network.
    If the key ``shared_heads`` is true, all heads share one head of
    keys and values, unless the key ``unless`` is true. ``positions`` is the key of the number of
    learned positions; tokens never use the first ``unused_positions`` of them. ``dropout`` has two
    keys: of the dropout rate in general (``all``) and in attention (``attention``). ``later`` is
    the key of the number of blocks that predict tokens after the next.

    ``experts`` holds the keys of the experts' sizes, ``window`` those of sliding windows.
    ``latent`` tells whether the type has latent attention. ``turns`` names the rule by which blocks
    of different kinds take turns, if they do.

    A file is refused if its values differ from those of ``requires``, or if two keys that form a
    pair of ``equal`` have different values. If a key of ``lacking`` is true, the part that it turns
    on is left out, with a remark. ``remarks`` hold for all models of the type.
    """

    model: Mapping[str, Any]
    defaults: Mapping[str, Any]
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    biases: tuple[str, ...] = ()
    part_biases: tuple[str, ...] = ()
    experts: Mapping[str, Any] = field(default_factory=dict)
    window: Mapping[str, Any] = field(default_factory=dict)
    latent: bool = False
    turns: str = ""
    qk_norm: str = ""
    post_norms: str = ""
    shared_heads: str = ""
    unless: str = ""
    ffn: str = "intermediate_size"
    ffn_times: str = ""
    ffn_is_sum: bool = False
    positions: str = ""
    unused_positions: int = 0
    dropout: Mapping[str, str] = field(default_factory=dict)
    later: str = ""
    when: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    requires: Mapping[str, Any] = field(default_factory=dict)
    equal: Mapping[str, str] = field(default_factory=dict)
    lacking: Mapping[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()


@cache
def model_types() -> Mapping[str, TypeRow]:
    """Return the table of supported model types, by name."""
    rows: dict[str, TypeRow] = {}
    for entry in sorted((files(__package__) / FOLDER).iterdir(), key=lambda entry: entry.name):
        if entry.name == REFUSED or not entry.name.endswith(".yaml"):
            continue
        content = parse_yaml(entry.read_text(encoding="utf-8"), entry.name)
        rows |= {kind: _row(plain) for kind, plain in content.items()}
    return dict(sorted(rows.items()))


@cache
def refused_types() -> Mapping[str, str]:
    """Return the model types that are known but not supported, each with the reason."""
    file = files(__package__) / FOLDER / REFUSED
    content = parse_yaml(file.read_text(encoding="utf-8"), REFUSED)
    return {kind: reason for reason, kinds in content.items() for kind in kinds}


@cache
def release_configs() -> Mapping[str, Mapping[str, Any]]:
    """Return the configurations of released models by the words of their names."""
    text = (files(__package__) / RELEASES).read_text(encoding="utf-8")
    configs = dict[str, Mapping[str, Any]]()
    for group in parse_yaml(f"groups:\n{text}", RELEASES)["groups"]:
        shared = {"model_type": group["type"], **group.get("keys", {})}
        for name, row in group["rows"].items():
            sizes = [value for value in row if not isinstance(value, Mapping)]
            more = row[len(sizes)] if len(row) > len(sizes) else {}
            configs[name] = {**shared, **dict(zip(group["columns"], sizes, strict=True)), **more}
    return configs


def _row(plain: Mapping[str, Any]) -> TypeRow:
    names = {key: tuple(own) for key, own in plain.get("names", {}).items()}
    lists = {key: tuple(plain.get(key, ())) for key in ("biases", "part_biases", "remarks")}
    return TypeRow(**{**plain, **lists, "names": names})


# Reads keys of a configuration; a key that the file lacks has the default of its model type.


# Newer and older key for the mapping of rotary parameters.
_ROPE = ("rope_parameters", "rope_scaling")
# The largest accepted size of a model, since lists have an entry for each block.
_MOST = 10_000_000
# If each kind of block has its own rotary embedding, that of this kind is read.
_FULL = "full_attention"


# The name in configurations for a rotary embedding without scaling.
UNSCALED = "default"


def scaling_kind(mapping: Mapping[str, Any]) -> Any:
    """Return the type of scaling that a mapping of rotary parameters names."""
    return mapping.get("rope_type", mapping.get("type")) or UNSCALED


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeKeys:
    """Reads the keys of a ``config.json``, with defaults of its model type for missing keys.

    A key is asked for by the name that most types give it; the type's own name is looked up first.
    """

    row: TypeRow
    config: Mapping[str, Any]

    def name(self, key: str) -> str:
        """Return the name of a key in this file, which may differ between model types."""
        names = (*self.row.names.get(key, ()), key)
        known = (name for given in (self.config, self.row.defaults) for name in names)
        where = [name for name in names if name in self.config]
        of_type = [name for name in known if name in self.row.defaults]
        return next(iter((*where, *of_type)), names[0])

    def get(self, key: str) -> Any:
        """Return the value of a key, of any type; a key that the file lacks has its model type's
        default.
        """
        name = self.name(key)
        return self.config[name] if name in self.config else self.row.defaults.get(name)

    def has(self, key: str) -> bool:
        """Whether the file or its model type defines this key."""
        name = self.name(key)
        return name in self.config or name in self.row.defaults

    def whole(self, key: str, minimum: int = 1) -> int | None:
        """Return the value of a key as a whole number, or None if neither the file nor its model
        type defines it.
        """
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            refuse(
                self.name(key),
                f"{shown(value)} is not a whole number: give the number that the model has",
            )
        if value < minimum:
            refuse(self.name(key), f"{value} is too small: give a number of at least {minimum}")
        if value > _MOST:
            refuse(
                self.name(key),
                f"{shown(value)} is too large: give the number that the model has, at most "
                f"{_MOST:,}",
            )
        return value

    def needed(self, key: str, minimum: int = 1) -> int:
        """Return the value of a key that every model of this type must have, as a whole number."""
        value = self.whole(key, minimum)
        if value is None:
            refuse(
                self.name(key),
                f"{'null is not a whole number' if self.has(key) else 'missing'}: give the number "
                "that the model has",
            )
        return value

    def flag(self, key: str) -> bool:
        """Return the value of a key as True or False; a key that is not defined is False, as in
        transformers.
        """
        value = self.get(key)
        if value is None:
            return False
        if not isinstance(value, bool):
            refuse(self.name(key), f"{shown(value)} is neither true nor false: give one of them")
        return value

    def items(self, key: str) -> list[Any] | None:
        """Return the value of a key as a list, or None if neither the file nor its model type
        defines it.
        """
        value = self.get(key)
        if value is not None and not isinstance(value, list):
            refuse(self.name(key), f"{shown(value)} is not a list: give one entry for each block")
        return value

    def rotary(self, key: str) -> float | None:
        """Return a parameter of the rotary embedding, which newer files have in a mapping; that
        mapping takes precedence, as in transformers.
        """
        for holder in _ROPE:
            mapping = self._mapping(holder)
            if mapping.get(key) is not None:
                return self._number(f"{holder}.{key}", mapping[key])
        for name in (*self.row.names.get(key, ()), key):
            if self.config.get(name) is not None:
                return self._number(name, self.config[name])
        value = self.row.defaults.get(key)
        return None if value is None else float(value)

    @property
    def scaling(self) -> Mapping[str, Any]:
        """Return the mapping with the parameters of rotary scaling, empty without scaling."""
        mappings = (self._mapping(holder) for holder in _ROPE)
        return next((one for one in mappings if scaling_kind(one) != UNSCALED), {})

    def given(self, key: str) -> float | None:
        """Return a number that the file itself states, or None; the model type's default does not
        count.
        """
        value = self.config.get(key)
        return None if value is None else self._number(key, value)

    def _mapping(self, holder: str) -> Mapping[str, Any]:
        mapping = self.config.get(holder)
        if mapping is None:
            return {}
        if not isinstance(mapping, Mapping):
            refuse(holder, f"{shown(mapping)} is not a mapping: give a mapping, or null")
        of_blocks = mapping.get(_FULL)
        return of_blocks if isinstance(of_blocks, Mapping) else mapping

    def _number(self, name: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            refuse(name, f"{shown(value)} is not a number: give the number that the model has")
        if not 0 < value < math.inf:
            refuse(name, f"{shown(value)} is not a positive number: give the model's value")
        return float(value)
