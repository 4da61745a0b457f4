"""What names of clouds' machines, and of several GPUs at once, are here."""

import re
from collections.abc import Mapping

from mistlab import catalog

# The names that clouds have for machines, by how they begin, each with the GPUs in them: AWS's EC2,
# Azure's and Google's.
MACHINES: Mapping[str, str] = {
    r"p3\.": "v100-16gb",
    r"p4d\.|standard_nd96asr|a2-(high|mega)gpu": "a100-40gb",
    r"p4de\.|standard_nd96amsr|a2-ultragpu": "a100-80gb",
    r"p5\.|standard_nd96isr_h100|a3-(high|mega)gpu": "h100-80gb",
    r"p5en?\.|standard_nd96isr_h200|a3-ultragpu": "h200-141gb",
    r"p6-b200\.|a4-highgpu": "b200-180gb",
    r"g4dn\.": "t4-16gb",
    r"g5\.": "a10g-24gb",
    r"g6\.|g2-standard": "l4-24gb",
    r"g6e\.": "l40s-48gb",
}
# A number of GPUs before or behind their name.
_COUNTED = re.compile(r"(?P<before>\d+) ?x ?(?P<named>.+)|(?P<name>.+?) ?x ?(?P<behind>\d+)", re.I)


def hardware_here(name: str) -> str:
    """Tell what to give in place of a cloud's machine or a counted GPU; an empty text for any other
    name.

    >>> hardware_here("8xH100")
    'give --hardware h100-80gb --gpus-per-node 8'
    """
    for begin, hardware in MACHINES.items():
        if re.match(begin, name, re.I):
            return f"is a machine with such GPUs: give --hardware {hardware}, and --gpus-per-node"
    match = _COUNTED.fullmatch(name.strip())
    called = () if match is None else catalog.hardware_called(match["named"] or match["name"])
    if match is None or not called:
        return ""
    count = match["before"] or match["behind"]
    return f"give --hardware {' or '.join(called)} --gpus-per-node {count}"
