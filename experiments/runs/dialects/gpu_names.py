"""Matches the names of GPUs in tables of measured runs to the catalogue's hardware, or refuses
them.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NoReturn

from mistlab import catalog
from mistlab.core.values import did_you_mean, refuse, shown

# A chip's name must be a whole word: ``L40S`` is not L4, ``H1000`` is not H100. Other words may
# give memory and form factor; a name with words of another chip is refused, and unknown words are
# noted.


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """The GPUs that a table names: hardware of the catalogue, with another memory size if the table
    gives one.

    GEMMs in 16 bits sustain ``products_share`` of the hardware's rate.
    """

    hardware: str
    memory_gib: float | None = None
    products_share: float = 1.0
    note: str = ""


_ANY = 0


def _sized(hardware: str, *memories: int, note: str = "") -> dict[int, Gpus]:
    """The hardware of a chip for which there is a single hardware file, whether or not its name
    gives the memory size.
    """
    return dict.fromkeys((_ANY, *memories), Gpus(hardware=hardware, note=note))


_V100 = Gpus(hardware="v100-16gb", note="V100 of 16 GB assumed")
_A100 = Gpus(hardware="a100-80gb", note="A100 of 80 GB assumed")
_H100_96 = Gpus(hardware="h100-80gb", memory_gib=94.0, note="rates of the H100 with 80 GB taken")
_CLASS_184 = Gpus(hardware="gb200-186gb", note="184 GiB are those of a GB200")

# For each chip its hardware by memory size in GB, as vendors and tools state it; 0 stands for names
# without a memory size.
CHIPS: Mapping[str, Mapping[int, Gpus]] = {
    "l4": _sized("l4-24gb", 24),
    "a10g": _sized("a10g-24gb", 24),
    "v100": {_ANY: _V100, 16: replace(_V100, note=""), 32: Gpus(hardware="v100-32gb")},
    "a100": {_ANY: _A100, 40: Gpus(hardware="a100-40gb"), 80: replace(_A100, note="")},
    "h100": {**_sized("h100-80gb", 80), 96: _H100_96},
    "h200": _sized("h200-141gb", 140, 141, 144),
    "b200": {
        **_sized("b200-180gb", 180, 183, 186, 192),
        184: _CLASS_184,
    },
    "gb200": _sized("gb200-186gb", 184, 185, 186, 189, 192),
    "b300": {
        **_sized("b300-288gb", 262, 268, 270, 288),
        252: Gpus(hardware="b300-288gb", memory_gib=252.0, note="252 GiB are those of a station"),
    },
    "gb300": _sized("gb300-288gb", 278, 279, 284, 288),
    "gh200": _sized("gh200-96gb", 96),
    "mi300x": _sized("mi300x-192gb", 192),
    "mi325x": _sized("mi325x-256gb", 256),
    "a800": _sized("a800-80gb", 80),
    "h800": _sized("h800-80gb", 80),
    "h20": _sized("h20-96gb", 96),
    "a100 pcie": {
        40: Gpus(hardware="a100-pcie-40gb"),
        **_sized("a100-pcie-80gb", 80),
    },
    "h100 pcie": _sized("h100-pcie-80gb", 80),
    "h100 nvl": _sized("h100-nvl-94gb", 94),
    "l40s": _sized("l40s-48gb", 48),
    "l20": _sized("l20-48gb", 48),
    "a40": _sized("a40-48gb", 48),
    "a10": _sized("a10-24gb", 24),
    "a6000": _sized("rtx-a6000-48gb", 48),
    "a5000": _sized("rtx-a5000-24gb", 24),
    "6000 ada": _sized("rtx-6000-ada-48gb", 48),
    "3060": _sized("rtx-3060-12gb", 12),
    "4060 ti": _sized("rtx-4060-ti-16gb", 16),
    "4080": _sized("rtx-4080-16gb", 16),
    "4070 ti super": _sized("rtx-4070-ti-super-16gb", 16),
    "5060 ti": _sized("rtx-5060-ti-16gb", 16),
    "3090": _sized("rtx-3090-24gb", 24),
    "4090": _sized("rtx-4090-24gb", 24),
    "5090": _sized("rtx-5090-32gb", 32),
    "pro 6000": _sized("rtx-pro-6000-96gb", 96),
    "t4": _sized("t4-16gb", 15, 16),
    "mi210": _sized("mi210-64gb", 64),
    "mi250x": _sized("mi250x-64gb", 64, note="one die of two"),
    "mi350x": _sized("mi350x-288gb", 288),
    "mi355x": _sized("mi355x-288gb", 288),
}
DEFAULT_CHIP = "h100"
# The GPU that is meant if a text gives nothing but a memory size in GB.
BY_MEMORY: Mapping[int, str] = {
    16: "t4-16gb",
    24: "rtx-4090-24gb",
    32: "rtx-5090-32gb",
    40: "a100-40gb",
    48: "rtx-a6000-48gb",
    80: "a100-80gb",
    96: "rtx-pro-6000-96gb",
}
_ANY_GPU = frozenset(("card", "cards", "gpu", "gpus", "vram"))
_UNSAID = re.compile(r"not (?:stated|said|given)\b|unknown$")
# Types of cloud machines of AWS, Google, Azure and Oracle, by the beginnings of their names.
MACHINES = {
    "p3dn": "v100-32gb",
    "p3": "v100-16gb",
    "p4de": "a100-80gb",
    "p4d": "a100-40gb",
    "p5en": "h200-141gb",
    "p5e": "h200-141gb",
    "p5": "h100-80gb",
    "p6-b200": "b200-180gb",
    "p6-b300": "b300-288gb",
    "p6e-gb200": "gb200-186gb",
    "g4dn": "t4-16gb",
    "g5": "a10g-24gb",
    "g6e": "l40s-48gb",
    "g6": "l4-24gb",
    "g2": "l4-24gb",
    "a2-high": "a100-40gb",
    "a2-mega": "a100-40gb",
    "a2-ultra": "a100-80gb",
    "a3-high": "h100-80gb",
    "a3-mega": "h100-80gb",
    "a3-edge": "h100-80gb",
    "a3-ultra": "h200-141gb",
    "a4x": "gb200-186gb",
    "a4-high": "b200-180gb",
    "nd96asr": "a100-40gb",
    "nd96amsr": "a100-80gb",
    "nd h100 v5": "h100-80gb",
    "nd h200 v5": "h200-141gb",
    "nd mi300x v5": "mi300x-192gb",
    "ndm a100 v4": "a100-80gb",
    "nd a100 v4": "a100-40gb",
    "nc a100 v4": "a100-pcie-80gb",
    "nc h100 v5": "h100-nvl-94gb",
    "bm.gpu.h100": "h100-80gb",
    "bm.gpu.h200": "h200-141gb",
    "bm.gpu.b200": "b200-180gb",
    "bm.gpu.a100-v2": "a100-80gb",
    "bm.gpu4": "a100-40gb",
    "bm.gpu.mi300x": "mi300x-192gb",
}
# Words beside the name of a chip that do not change which chip is meant.
_MAKERS = frozenset(("nvidia", "amd", "tesla", "instinct", "geforce", "quadro", "rtx"))
_SAME = re.compile(
    r"sxm[2-6]?|hbm[23]e?|oam|gpus?|tensor|core|class|superchip|nvl72|nvlink|dgx|hgx|a3|[0-9]+w"
)
# Words beside the name of a chip that stand for a different chip with other rates.
_OTHERS = frozenset(("pcie", "nvl"))
_MEMORY = re.compile(r"(?<![a-z0-9])([0-9]+) ?g(?:i?b)?(?![a-z0-9])")


def gpus_of(
    text: str, of_caller: str = "", products_tflops: Mapping[str, tuple[float, float]] | None = None
) -> Gpus:
    """The GPUs that a text names; refuses a mixture of GPUs, and GPUs without a hardware file.

    ``of_caller`` is the name of a hardware that the caller gives: rows that name no GPU get it, and
    so do all rows if the catalogue does not have it. ``products_tflops`` has the GEMM rates of one
    machine, by hardware: the measured rate, and the rate in the hardware file.
    """
    if of_caller and (not text or of_caller not in catalog.hardware_names()):
        return Gpus(hardware=of_caller)
    if "+" in text:
        refuse(
            "hardware",
            f"{shown(text)} are heterogeneous GPUs, and a row does not say which stage has "
            "which: predict a plan file that lists them in cluster.hardware",
        )
    is_said = bool(text) and not _UNSAID.match(text.casefold())
    gpus = _named_gpu(text) if is_said else CHIPS[DEFAULT_CHIP][_ANY]
    if not is_said:
        what = f"{shown(text)} is not the name of a GPU" if text else "is empty"
        gpus = replace(gpus, note=f"hardware {what}: {gpus.hardware} assumed")
    reached, published = (products_tflops or {}).get(gpus.hardware, (1.0, 1.0))
    return replace(gpus, products_share=reached / published)


def _named_gpu(text: str) -> Gpus:
    """The GPUs that a name of one chip (or of a cloud machine) stands for; other words of the name
    may give memory size and form factor.
    """
    given = text.casefold()
    if machine := of_machine(given):
        return Gpus(hardware=machine)
    sizes = [int(size) for size in _MEMORY.findall(given)]
    parts = re.findall(r"[a-z0-9]+", _MEMORY.sub(" ", given))
    parts = [word for word in parts if word not in _MAKERS]
    for count in (3, 2):
        if " ".join(parts[:count]) in CHIPS:
            parts = [" ".join(parts[:count]), *parts[count:]]
    if sizes and sizes[0] in BY_MEMORY and _ANY_GPU.issuperset(parts):
        hardware = BY_MEMORY[sizes[0]]
        return Gpus(
            hardware=hardware, note=f"hardware {text} is not the name of a GPU: {hardware} assumed"
        )
    chip = _chip(parts[0]) if parts else ""
    further = [parts[0].removeprefix(chip), *parts[1:]] if parts else []
    if make := next((word for word in further if word in _OTHERS), None):
        chip, further = f"{chip} {make}", [word for word in further if word != make]
    memory = sizes[0] if sizes else _ANY
    if chip not in CHIPS or memory not in CHIPS[chip]:
        _refuse_name(text)
    gpus = CHIPS[chip][memory]
    strange = [word for word in further if word and not _SAME.fullmatch(word)]
    if not strange:
        return gpus
    taken = f"hardware {text} is taken as {gpus.hardware}"
    return replace(gpus, note=f"{taken}; {gpus.note}" if gpus.note else taken)


def of_machine(given: str) -> str:
    """The hardware of a cloud machine, with the machine's network; empty if the text does not name
    a type of machine.
    """
    machine = re.sub(r"^(?:aws|gcp|azure|oci)[ :]+|(?:^|\b)standard[_ ]", "", given)
    machine = re.sub(r"[_ ]+", " ", machine)
    longest_first = sorted(MACHINES, key=len, reverse=True)
    end = r"(?![a-z0-9])" if machine[:1] in "pg" else ""
    return next((MACHINES[one] for one in longest_first if re.match(one + end, machine)), "")


def _chip(word: str) -> str:
    """The chip that a word names, possibly joined with a form factor (``h100sxm5``)."""
    return re.sub(r"(?<=[0-9a-z])(sxm[2-6]?|pcie|nvl)$", "", word)


def _refuse_name(text: str) -> NoReturn:
    names = [_shown(chip, memory) for chip, sizes in CHIPS.items() for memory in sizes]
    near = did_you_mean(text.upper(), names)
    meant = f" ({near})" if near else ""
    known = ", ".join(CHIPS).upper()
    refuse(
        "hardware",
        f"{shown(text)} names no GPU with a hardware file{meant}: give one of {known}, or predict "
        "a plan file whose cluster.hardware is a hardware file of your own",
    )


def _shown(chip: str, memory: int) -> str:
    return f"{chip.upper()}-{memory}GB" if memory else chip.upper()
