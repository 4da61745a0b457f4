"""The table of model types: the defaults of each type, and how its blocks are built.

The rows are the files in ``types/``. They are facts of the configuration classes of transformers
5.23.0, by which ``python -m experiments.check_models`` measures them again.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from mistlab.core.files import parse_yaml

FOLDER = "types"
REFUSED = "refused.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeRow:
    """One model type.

    ``model`` are fields of the description that all models of the type have; where a flag of
    ``when`` is true, its fields hold too. ``names`` are the type's own keys of what most types call
    otherwise, ``defaults`` the values of keys that a file leaves out. Where all keys of ``biases``
    are true, all products have biases. Those that ``part_biases`` turn on, of some products, are
    left out. ``experts`` has the keys of the experts' sizes, ``window`` those of sliding windows;
    ``turns`` names how unlike blocks take turns. ``qk_norm`` and ``post_norms`` are flags that turn
    these parts on. ``ffn`` is the key of the network's width, or ``ffn_times`` of how many times
    the hidden size it is. With a flag of ``shared_heads`` all heads have the same keys and values,
    unless that of ``unless`` is on. ``positions`` is the key of the number of learned positions.

    Files whose keys differ from ``requires`` are refused, and so are those in which a pair of
    ``equal`` differs. What a flag of ``lacking`` turns on is left out, and a remark says so;
    ``remarks`` hold for all models of the type. ``later`` counts blocks for tokens after the next.
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
    positions: str = ""
    later: str = ""
    when: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    requires: Mapping[str, Any] = field(default_factory=dict)
    equal: Mapping[str, str] = field(default_factory=dict)
    lacking: Mapping[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()


@cache
def model_types() -> Mapping[str, TypeRow]:
    """The rows of all types that are read, by type."""
    rows: dict[str, TypeRow] = {}
    for entry in sorted((files(__package__) / FOLDER).iterdir(), key=lambda entry: entry.name):
        if entry.name == REFUSED or not entry.name.endswith(".yaml"):
            continue
        content = parse_yaml(entry.read_text(encoding="utf-8"), entry.name)
        rows |= {kind: _row(plain) for kind, plain in content.items()}
    return dict(sorted(rows.items()))


@cache
def refused_types() -> Mapping[str, str]:
    """The types that are refused by name, and the reason of each."""
    file = files(__package__) / FOLDER / REFUSED
    content = parse_yaml(file.read_text(encoding="utf-8"), REFUSED)
    return {kind: reason for reason, kinds in content.items() for kind in kinds}


def _row(plain: Mapping[str, Any]) -> TypeRow:
    names = {key: tuple(own) for key, own in plain.get("names", {}).items()}
    lists = {key: tuple(plain.get(key, ())) for key in ("biases", "part_biases", "remarks")}
    return TypeRow(**{**plain, **lists, "names": names})
