"""What names of clouds' machines, and of several GPUs at once, are here."""

import re

from experiments.runs.dialects.gpu_names import of_machine
from mistlab import catalog

# A number of GPUs before or behind their name.
_COUNTED = re.compile(r"(?P<before>\d+) ?x ?(?P<named>.+)|(?P<name>.+?) ?x ?(?P<behind>\d+)", re.I)


def hardware_here(name: str) -> str:
    """Tell what to give in place of a cloud's machine or a counted GPU; an empty text for any other
    name.

    >>> hardware_here("8xH100")
    'give --hardware h100-80gb --gpus-per-node 8'
    """
    if hardware := of_machine(name.casefold()):
        return f"is a machine with such GPUs: give --hardware {hardware}, and --gpus-per-node"
    match = _COUNTED.fullmatch(name.strip())
    called = () if match is None else catalog.hardware_called(match["named"] or match["name"])
    if match is None or not called:
        return ""
    count = match["before"] or match["behind"]
    return f"give --hardware {' or '.join(called)} --gpus-per-node {count}"
