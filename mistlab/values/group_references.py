"""A cluster of several groups of nodes, as a plan file and a command line say it.

In a plan file ``cluster.hardware`` is then a list with the hardware and the number of nodes of each
group. On a command line ``--hardware`` is ``l4-24gb:1,a100-40gb:2``.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mistlab.machine.cluster import Cluster
from mistlab.machine.node_group import NodeGroup
from mistlab.values.errors import FieldError, refuse
from mistlab.values.field_checks import shown
from mistlab.values.references import HARDWARE, hardware_from, plain_hardware
from mistlab.values.value import from_mapping


def with_groups(plain: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    """The content of ``cluster`` in a plan file in ``folder``, with a list of groups as fields of
    ``Cluster``; other content stays."""
    if "others" in plain:
        problem = "unknown key: give each group of nodes in a list in cluster.hardware"
        refuse("cluster.others", problem)
    listed = plain.get("hardware")
    if not isinstance(listed, list | tuple):
        return plain
    fields = fields_of([_group_from(one, place, folder) for place, one in enumerate(listed)])
    given = plain.get("nodes", fields["nodes"])
    if given != fields["nodes"]:
        problem = (
            f"{shown(given)}, but the groups in cluster.hardware have {fields['nodes']} nodes: "
            f"give {fields['nodes']}, or leave it out"
        )
        refuse("cluster.nodes", problem)
    return {**plain, **fields}


def fields_of(groups: Sequence[NodeGroup]) -> dict[str, Any]:
    """The fields of a ``Cluster`` that say its groups."""
    if not groups:
        refuse(HARDWARE, "is an empty list: give the hardware and the nodes of a group at least")
    return {
        "hardware": groups[0].hardware,
        "nodes": sum(group.nodes for group in groups),
        "others": tuple(groups[1:]),
    }


def plain_groups(cluster: Cluster) -> dict[str, Any]:
    """The content of ``cluster.hardware`` in a plan file: a list where there are several groups."""
    if not cluster.others:
        return {"hardware": plain_hardware(cluster.hardware)}
    return {
        "hardware": [
            {"hardware": plain_hardware(group.hardware), "nodes": group.nodes}
            for group in cluster.groups
        ]
    }


def groups_named(text: str, folder: Path) -> list[NodeGroup]:
    """The groups of a text such as ``l4-24gb:1,a100-40gb:2``; none where it names one hardware
    without nodes."""
    parts = [part.rpartition(":") for part in text.split(",")]
    if len(parts) == 1 and not parts[0][2].isdecimal():
        return []
    groups = []
    for name, colon, nodes in parts:
        if not (name and nodes.isdecimal()):
            problem = (
                f"{text!r}: {name + colon + nodes!r} does not say its nodes: give each group as "
                "hardware:nodes, such as l4-24gb:1,a100-40gb:2"
            )
            refuse(HARDWARE, problem)
        groups.append(NodeGroup(hardware=hardware_from(name, folder), nodes=int(nodes)))
    return groups


def _group_from(plain: object, place: int, folder: Path) -> NodeGroup:
    """A group of the list in ``cluster.hardware``; errors name its place in the list."""
    where = f"{HARDWARE}[{place}]"
    if not isinstance(plain, Mapping):
        problem = f"{shown(plain)} is not a group of nodes: give a mapping of hardware and nodes"
        refuse(where, problem)
    resolved = dict(plain)
    if "hardware" in plain:
        try:
            resolved["hardware"] = hardware_from(plain["hardware"], folder)
        except FieldError as error:
            path = f"{where}.hardware{error.path.removeprefix(HARDWARE)}"
            raise FieldError(path, error.problem) from None
    return from_mapping(NodeGroup, resolved, where)
