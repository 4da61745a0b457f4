"""GPUs as tables of measured runs name them, each the hardware of the catalogue or refused."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NoReturn

from mistlab import catalog
from mistlab.core.values import did_you_mean, refuse, shown

# The name of the chip must be a whole word: ``L40S`` is no L4, and ``H1000`` no H100. Further
# words of a name tell its memory and its make; those that make no other chip of it are known, and
# what is not known is told in a note.


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """GPUs as a table names them: the hardware of the catalogue, with another memory if given.

    Products in 16 bits keep up ``products_share`` of the hardware's rate.
    """

    hardware: str
    memory_gib: float | None = None
    products_share: float = 1.0
    note: str = ""


_ANY = 0
_V100 = Gpus(hardware="v100-16gb", note="V100 of 16 GB assumed")
_A100 = Gpus(hardware="a100-80gb", note="A100 of 80 GB assumed")
_H100_96 = Gpus(hardware="h100-80gb", memory_gib=94.0, note="rates of the H100 with 80 GB taken")
_CLASS_184 = Gpus(hardware="gb200-186gb", note="184 GiB are those of a GB200")

# Chips, and the hardware of each memory in GB that makers and tools give them; 0 stands for a name
# without its memory.
CHIPS: Mapping[str, Mapping[int, Gpus]] = {
    "l4": dict.fromkeys((_ANY, 24), Gpus(hardware="l4-24gb")),
    "a10g": dict.fromkeys((_ANY, 24), Gpus(hardware="a10g-24gb")),
    "v100": {_ANY: _V100, 16: replace(_V100, note=""), 32: Gpus(hardware="v100-32gb")},
    "a100": {_ANY: _A100, 40: Gpus(hardware="a100-40gb"), 80: replace(_A100, note="")},
    "h100": {**dict.fromkeys((_ANY, 80), Gpus(hardware="h100-80gb")), 96: _H100_96},
    "h200": dict.fromkeys((_ANY, 140, 141, 144), Gpus(hardware="h200-141gb")),
    "b200": {
        **dict.fromkeys((_ANY, 180, 183, 186, 192), Gpus(hardware="b200-180gb")),
        184: _CLASS_184,
    },
    "gb200": dict.fromkeys((_ANY, 184, 185, 186, 189, 192), Gpus(hardware="gb200-186gb")),
    "b300": dict.fromkeys((_ANY, 262, 268, 270, 288), Gpus(hardware="b300-288gb")),
    "gb300": dict.fromkeys((_ANY, 278, 279, 284, 288), Gpus(hardware="gb300-288gb")),
    "gh200": dict.fromkeys((_ANY, 96), Gpus(hardware="gh200-96gb")),
    "mi300x": dict.fromkeys((_ANY, 192), Gpus(hardware="mi300x-192gb")),
    "mi325x": dict.fromkeys((_ANY, 256), Gpus(hardware="mi325x-256gb")),
    "a800": dict.fromkeys((_ANY, 80), Gpus(hardware="a800-80gb")),
    "h800": dict.fromkeys((_ANY, 80), Gpus(hardware="h800-80gb")),
    "h20": dict.fromkeys((_ANY, 96), Gpus(hardware="h20-96gb")),
    "a100 pcie": {
        40: Gpus(hardware="a100-pcie-40gb"),
        **dict.fromkeys((_ANY, 80), Gpus(hardware="a100-pcie-80gb")),
    },
    "h100 pcie": dict.fromkeys((_ANY, 80), Gpus(hardware="h100-pcie-80gb")),
    "h100 nvl": dict.fromkeys((_ANY, 94), Gpus(hardware="h100-nvl-94gb")),
    "l40s": dict.fromkeys((_ANY, 48), Gpus(hardware="l40s-48gb")),
    "l20": dict.fromkeys((_ANY, 48), Gpus(hardware="l20-48gb")),
    "a40": dict.fromkeys((_ANY, 48), Gpus(hardware="a40-48gb")),
    "a10": dict.fromkeys((_ANY, 24), Gpus(hardware="a10-24gb")),
    "a6000": dict.fromkeys((_ANY, 48), Gpus(hardware="rtx-a6000-48gb")),
    "3090": dict.fromkeys((_ANY, 24), Gpus(hardware="rtx-3090-24gb")),
    "4090": dict.fromkeys((_ANY, 24), Gpus(hardware="rtx-4090-24gb")),
    "5090": dict.fromkeys((_ANY, 32), Gpus(hardware="rtx-5090-32gb")),
    "pro 6000": dict.fromkeys((_ANY, 96), Gpus(hardware="rtx-pro-6000-96gb")),
    "t4": dict.fromkeys((_ANY, 15, 16), Gpus(hardware="t4-16gb")),
    "mi210": dict.fromkeys((_ANY, 64), Gpus(hardware="mi210-64gb")),
    "mi250x": dict.fromkeys((_ANY, 64), Gpus(hardware="mi250x-64gb", note="one die of two")),
    "mi355x": dict.fromkeys((_ANY, 288), Gpus(hardware="mi355x-288gb")),
}
DEFAULT_CHIP = "h100"
# Words before and after a chip's name that make no other of it.
_MAKERS = frozenset(("nvidia", "amd", "tesla", "instinct", "geforce", "quadro", "rtx"))
_SAME = re.compile(
    r"sxm[2-6]?|hbm[23]e?|oam|gpus?|tensor|core|class|superchip|nvl72|nvlink|dgx|hgx|a3|[0-9]+w"
)
# Words that make another chip of it, with other rates.
_OTHERS = frozenset(("pcie", "nvl"))
_MEMORY = re.compile(r"(?<![a-z0-9])([0-9]+) ?g(?:i?b)?(?![a-z0-9])")


def gpus_of(
    text: str, own: str = "", products_tflops: Mapping[str, tuple[float, float]] | None = None
) -> Gpus:
    """The GPUs that a text names; refuses unlike ones, and GPUs without a hardware file.

    With ``own``, the name of a hardware file of the caller's, rows that name nothing have its GPUs;
    if the catalogue has no such name, all rows have. ``products_tflops`` are those of a machine by
    hardware: what its products reach, and what the hardware file says.
    """
    if own and (not text or own not in catalog.hardware_names()):
        return Gpus(hardware=own)
    if "+" in text:
        problem = (
            f"{shown(text)} are unlike GPUs, and a row does not say which stage has which: predict "
            "a plan file that lists them in cluster.hardware"
        )
        refuse("hardware", problem)
    gpus = _named_gpu(text) if text else CHIPS[DEFAULT_CHIP][_ANY]
    if not text:
        gpus = replace(gpus, note=f"hardware is empty: {gpus.hardware} assumed")
    reached, published = (products_tflops or {}).get(gpus.hardware, (1.0, 1.0))
    return replace(gpus, products_share=reached / published)


def _named_gpu(text: str) -> Gpus:
    """The GPUs of a name: a chip's whole word, and what its further words say."""
    given = text.casefold()
    sizes = [int(size) for size in _MEMORY.findall(given)]
    words = re.findall(r"[a-z0-9]+", _MEMORY.sub(" ", given))
    words = [word for word in words if word not in _MAKERS]
    if words[:1] == ["pro"]:
        words = [" ".join(words[:2]), *words[2:]]
    chip = _chip(words[0]) if words else ""
    further = [words[0].removeprefix(chip), *words[1:]] if words else []
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


def _chip(word: str) -> str:
    """The chip that a word names, whose make may follow at once (``h100sxm5``)."""
    return re.sub(r"(?<=[0-9a-z])(sxm[2-6]?|pcie|nvl)$", "", word)


def _refuse_name(text: str) -> NoReturn:
    names = [_shown(chip, memory) for chip, sizes in CHIPS.items() for memory in sizes]
    near = did_you_mean(text.upper(), names)
    meant = f" ({near})" if near else ""
    known = ", ".join(CHIPS).upper()
    refuse("hardware", f"{shown(text)} has no hardware file{meant}: give {known}, or write a file")


def _shown(chip: str, memory: int) -> str:
    return f"{chip.upper()}-{memory}GB" if memory else chip.upper()
