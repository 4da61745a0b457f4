"""Precisions as Megatron-LM's options, and back: of products, and of an optimizer's moments.

Products of 8 bits are scaled by blocks where the tensor cores do that (GPUs with products of 4
bits), and by tensors elsewhere. Weights stay in 16 bits.
"""

from collections.abc import Iterator, Mapping

from mistlab.export.found import Found
from mistlab.export.megatron_flags import Options
from mistlab.machine.hardware import Hardware
from mistlab.values.precision import Optimizer
from mistlab.values.workload import Workload

# How products of 8 bits are scaled: by the tensor cores, by blocks of 32; or by whole tensors.
BY_BLOCKS, BY_TENSORS = "mxfp8", "tensorwise"
_RECIPES = ("tensorwise", "delayed", "mxfp8", "blockwise", "custom")
_NOT_SAID = "delayed"
_MOMENTS: Mapping[Optimizer, str] = {"adamw": "fp32", "adamw-bf16": "bf16", "adamw-8bit": "fp8"}
# Megatron-LM's optimizer for moments of few bits.
PRECISION_AWARE = "--use-precision-aware-optimizer"


def recipe_for(hardware: Hardware) -> str:
    """The recipe of 8-bit products that a machine's tensor cores are made for."""
    return BY_BLOCKS if hardware.gpu.peak_tflops.fp4 is not None else BY_TENSORS


def precision_options(workload: Workload, hardware: Hardware) -> Iterator[str]:
    """The options for the precision of products."""
    match workload.precision:
        case "fp8":
            yield f"--bf16 --fp8-format hybrid --fp8-recipe {recipe_for(hardware)}"
        case "fp4":
            yield "--bf16 --fp4-format e2m1 --fp4-recipe nvfp4"
        case "fp32":
            pass
        case precision:
            yield f"--{precision}"


def moment_options(optimizer: Optimizer) -> Iterator[str]:
    """The options for moments in fewer bits than 32."""
    if optimizer != "adamw":
        word = _MOMENTS[optimizer]
        yield f"{PRECISION_AWARE} --exp-avg-dtype {word} --exp-avg-sq-dtype {word}"


def read_precision(options: Options, found: Found, hardware: Hardware) -> None:
    """The precision of products and of moments."""
    halves = [name for name in ("bf16", "fp16") if options.has(f"--{name}")]
    if len(halves) > 1:
        found.remark("contradicting", "precision", "--bf16 and --fp16 are both given: took bf16")
    found.precision = "bf16" if "bf16" in halves else "fp16" if halves else "fp32"
    _narrow_products(options, found, hardware)
    _moments(options, found)


def _narrow_products(options: Options, found: Found, hardware: Hardware) -> None:
    eight = options.choice("--fp8-format", ("e4m3", "hybrid"))
    for name in ("e4m3", "hybrid"):
        # The switches of older versions.
        eight = name if options.has(f"--fp8-{name}") else eight
    four = options.choice("--fp4-format", ("e2m1",))
    recipe = options.choice("--fp8-recipe", _RECIPES) or _NOT_SAID
    options.choice("--fp4-recipe", ("nvfp4", "custom"))
    peaks = hardware.gpu.peak_tflops
    if four is not None and eight is not None:
        text = "--fp4-format and --fp8-format are both given: took --fp4-format"
        found.remark("contradicting", "precision", text)
    words = f"--fp4-format {four}" if four else f"--fp8-format {eight}"
    if (four or eight) and (peaks.fp4 if four else peaks.fp8) is None:
        text = f"products are taken in 16 bits: {hardware.name} has none of fewer"
        found.remark("ignored", words, text)
    elif (four or eight) and found.precision != "bf16":
        text = f"{words} beside {found.precision}: taken beside bf16"
        found.remark("contradicting", "precision", text)
        found.precision = "fp4" if four else "fp8"
    elif four:
        found.precision = "fp4"
    elif eight:
        found.precision = "fp8"
        if recipe != recipe_for(hardware):
            text = f"{recipe}: products are taken as those of {recipe_for(hardware)}"
            found.remark("ignored", "--fp8-recipe", text)


def _moments(options: Options, found: Found) -> None:
    said = [
        options.choice(f"--{name}-dtype", ("fp32", "fp16", "bf16", "fp8")) or "fp32"
        for name in ("exp-avg", "exp-avg-sq")
    ]
    known = {word: optimizer for optimizer, word in _MOMENTS.items()}
    if said[0] == said[1] and said[0] in known:
        found.optimizer = known[said[0]]
        if found.optimizer != "adamw" and not options.has(PRECISION_AWARE):
            text = f"--exp-avg-dtype {said[0]} without {PRECISION_AWARE}, which it needs"
            found.remark("contradicting", "optimizer", f"{text}: taken as it stands")
    else:
        text = f"--exp-avg-dtype {said[0]}, --exp-avg-sq-dtype {said[1]}: taken in 32 bits"
        found.remark("ignored", "optimizer", text)
