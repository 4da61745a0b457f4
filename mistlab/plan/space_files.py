"""Reads search spaces from names, files and mappings."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mistlab.core.files import in_file, is_path, joined, read_yaml
from mistlab.core.values import THIS_VALUE, InputError, from_mapping, refuse, shown, to_mapping
from mistlab.engines.engine import names_for_plans
from mistlab.plan.dimensions import counts_of_blocks
from mistlab.plan.named_spaces import space_of
from mistlab.plan.space import SearchSpace

# A search space names under this key another space, from which it takes all other choices.
LIKE = "like"


def space_from(plain: object, folder: Path) -> SearchSpace:
    """The search space given by a name, a YAML file's path, or a mapping.

    A mapping takes its choices from the space that it names under ``like``, and changes those that
    it lists. As with an engine given by name, other choices are those that its engines can run.
    """
    if isinstance(plain, str) and is_path(plain, (".yaml", ".yml")):
        path = joined(folder, plain)
        with in_file("", path):
            return space_from(read_yaml(Path(path)), Path(path).parent)
    if isinstance(plain, str):
        return space_of(plain)
    if not isinstance(plain, Mapping) or not isinstance(plain.get(LIKE), str):
        refuse(
            THIS_VALUE,
            f"{shown(plain)} is not a search space: give a space's name, a .yaml file, or a "
            f"mapping with name, and {LIKE}: SPACE",
        )
    changes = {key: value for key, value in plain.items() if key != LIKE}
    if "name" not in changes:
        refuse("name", "missing: give the search space a name, which tables show")
    try:
        base = to_mapping(_on_engines(space_of(plain[LIKE]), changes))
    except InputError as error:
        refuse(LIKE, str(error))
    if isinstance(changes.get("offload"), Mapping):
        changes["offload"] = {**base["offload"], **changes["offload"]}
    space = from_mapping(SearchSpace, {**base, **changes})
    runs = to_mapping(space.on(*space.engines))
    for key in changes.keys() & {"recomputation", *counts_of_blocks()}:
        if runs[key] != to_mapping(space)[key]:
            refuse(
                key,
                f"{shown(changes[key])}, but engine {space.engine} recomputes all blocks of a "
                f"stage or none: give {shown(runs[key])}, or leave {key} out",
            )
    return space.holding(space.base)


def _on_engines(space: SearchSpace, changes: Mapping[str, Any]) -> SearchSpace:
    """A named search space on the engines that a mapping gives it, as option ``--engine`` restricts
    it; the space as it is if the mapping names none, or names that are refused later.
    """
    others = changes.get("other_engines", space.other_engines)
    engines = [changes.get("engine", space.engine), *(others if isinstance(others, list) else ())]
    are_known = all(isinstance(name, str) and name in names_for_plans() for name in engines)
    return space.on(*dict.fromkeys(engines)) if are_known else space
