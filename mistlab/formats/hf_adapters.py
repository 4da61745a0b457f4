"""Reads settings of low-rank adapters (LoRA) in the forms of PEFT, axolotl and LLaMA-Factory.

Left-out ranks are PEFT's and LLaMA-Factory's own, 8. TRL's is 16 (``ModelConfig``).
"""

import re
from collections.abc import Sequence
from dataclasses import replace

from mistlab.core.units import GIB_BYTES
from mistlab.core.values import reject
from mistlab.engines.adapters import Base
from mistlab.export.found import Found, Section, checked_whole
from mistlab.export.given import Imported, Remark
from mistlab.formats.checkpoints import stored_bits
from mistlab.plan.workload import ModelSpec

# Names of the argument of ms-swift that gives the tuning method; its adapters are on all linear
# layers and of rank 8.
_OF_SWIFT = ("tuner_type", "train_type")
# The tuning methods with adapters: plain ones, and adapters on quantised weights.
_LORA = ("lora", "qlora")
_RANKS = ("lora_r", "lora_rank", "lora_dim", "peft_lora_r")
_TARGETS = (
    *("lora_target_modules", "lora_target", "target_modules", "lora_modules"),
    *("trainable", "lora_trainable"),
)
_SWITCHES = (
    *("use_peft", "use_lora", "lora_enable", "use_peft_lora", "q_lora", "qlora"),
    *("use_qlora",),
)
# The first switches turn adapters on and off, the others quantise their base too.
_PLAIN_SWITCHES = 4
_FOUR = ("load_in_4bit", "use_4bit_quantization", "q_lora", "qlora", "use_qlora")
_EIGHT = ("load_in_8bit", "use_8bit_quantization")
# Keys for the bits of frozen weights; 16 and 32 leave them as they are.
_BITS = ("quantization_bit", "quant_bit", "load_in_kbits", "bits")
_WHOLE_BITS = (16, 32)
# Parts of the names of feed-forward layers; below, words that stand for all linear layers of a
# block.
_NETWORKS = ("gate", "up_proj", "down_proj", "mlp", "fc", "w1", "w2", "w3", "dense_", "experts")
_OF_ATTENTION = frozenset(("q_proj", "k_proj", "v_proj", "o_proj"))
_OF_NETWORKS = frozenset(("gate_proj", "up_proj", "down_proj"))
_ALL = ("all", "all-linear", "all_linear")
# Options of DeepSpeed-Chat: a part of the names of blocks, whose linear layers all have adapters,
# and the switch without which all other weights, such as embeddings, are trained too.
_BLOCKS, _ALONE = "lora_module_name", "only_optimize_lora"
# Keys for modules that are trained in full beside the adapters, in a copy of their own; and the
# names of modules that hold a weight for each channel of each token.
_SAVED = ("lora_modules_to_save", "modules_to_save", "additional_target")
_TABLES = re.compile(r"embed|wte|lm_head|^output$")
# The least and the most bytes that each weight of such a module takes: copy, gradient and moments,
# all of 16 or all of 32 bits.
_SAVED_BYTES = (2 + 2 + 2 * 2, 4 + 4 + 2 * 4)
# All keys of adapter settings; this module reads each of them.
KEYS = frozenset(
    (
        *(*_RANKS, *_TARGETS, *_SWITCHES, *_FOUR, *_EIGHT),
        *(
            "adapter",
            "finetuning_type",
            *_OF_SWIFT,
            "lora_target_linear",
            _BLOCKS,
            _ALONE,
            *_BITS,
            *_SAVED,
        ),
    )
)


def read_adapters(top: Section, draft: Found, *, rank: int = 8, usual: bool = False) -> None:
    """Read the adapters of a run: their rank, the layers that have them, and the bits of the frozen
    weights.

    Without a word for them all is trained, or adapters if this is ``usual``; a left-out rank is
    ``rank``.
    """
    kind = _kind(top)
    rank = 8 if any(top.has(key) for key in _OF_SWIFT) else rank
    are_on = [_switch(top, name) for name in _SWITCHES if top.has(name)]
    is_off = any(_switch(top, name) is False for name in _SWITCHES[:_PLAIN_SWITCHES])
    given = [top.whole(name) for name in _RANKS if top.has(name)]
    base = _base(top)
    # A rank alone means adapters, unless a switch says that there are none.
    may_be = kind != "full" and not is_off
    if not (kind in _LORA or any(are_on) or (may_be and (given or usual))):
        _check_base(kind, base)
        return
    draft.trained |= {"train": "adapters", "adapter_rank": next(iter(given), None) or rank}
    draft.trained["base"] = "4bit" if kind == "qlora" and base == "16bit" else base
    draft.trained["adapter_targets"] = "all" if _are_all(top) else "attention"
    _tell_of_targets(top, draft)
    if not given:
        draft.remark("assumed", "adapter_rank", f"{rank}, the default, because the file gives none")


def take_stored_bits(draft: Found, path: str) -> None:
    """Read from the name of a run's checkpoint how many bits its frozen weights have, where the run
    itself does not say; refuses a run that trains all weights of 4 bits.
    """
    bits = stored_bits(path)
    if bits == "16bit" or draft.trained.get("base", "16bit") != "16bit":
        return
    if draft.trained.get("train") == "adapters":
        draft.trained["base"] = bits
        draft.remark("assumed", "base", f"{bits}, as the checkpoint's name says")
    elif bits == "8bit":
        text = "the checkpoint's 8-bit weights are predicted as widened before training"
        draft.remark("assumed", "base", text)
    else:
        reject(
            f"{path}: has weights of 4 bits, and a run without adapters trains all of them: give "
            "LoRA adapters too, or a checkpoint of 16 bits"
        )


def trained_by_adapters(
    imported: Imported, *, rank: object, where: str, usual: int, title: str, are_wide: bool
) -> Imported:
    """Return an imported job whose run trains low-rank adapters: of the rank that the setting
    ``where`` gives, or else of the ``usual`` rank, which a remark says by ``title``; on all layers
    of a block if they ``are_wide``, otherwise on attention's.
    """
    remarks = imported.remarks
    if rank is None:
        remark = Remark(kind="assumed", choice="adapter_rank", text=f"{usual}, {title}")
        remarks = (remark, *remarks)
    workload = replace(
        imported.job.workload,
        train="adapters",
        adapter_rank=usual if rank is None else checked_whole(where, rank),
        adapter_targets="all" if are_wide else "attention",
    )
    return Imported(job=replace(imported.job, workload=workload), remarks=remarks)


def tell_of_saved_modules(top: Section, draft: Found, model: ModelSpec) -> None:
    """Add a remark on modules that are trained in full beside the adapters, which predictions do
    not count, with the memory that they take.
    """
    for key in _SAVED:
        names = _listed(top, key)
        if not names or draft.trained.get("train") != "adapters":
            continue
        tables = [name for name in names if _TABLES.search(name)]
        weights = len(tables) * model.vocab * model.hidden
        low, high = (weights * size / GIB_BYTES for size in _SAVED_BYTES)
        bytes_text = (
            f": {weights / 1e9:.2f} billion weights, {low:.1f} to {high:.1f} GiB more on a GPU "
            "that shards none of them"
        )
        text = (
            f"{' '.join(names)}: the run trains these in full (copies, gradients, moments), the "
            f"prediction keeps them frozen{bytes_text if weights else ''}"
        )
        draft.remark("ignored", key, text)


def _kind(top: Section) -> str:
    """Return the tuning method of a run; refuses methods that predictions do not support."""
    for key in ("adapter", "finetuning_type", *_OF_SWIFT):
        word = top.text(key).lower()
        if word not in ("", "none", "full", *_LORA):
            reject(f"{key}: {word} is not supported: give lora, qlora or full")
        if word not in ("", "none"):
            return word
    return ""


def _switch(top: Section, name: str) -> bool | None:
    """Return whether a switch is on, None if it is not given; 0 and 1 stand for off and on."""
    value = top.get(name)
    if value in (0, 1):
        return bool(value)
    return top.switch(name) if value is not None else None


def _base(top: Section) -> Base:
    numbers = {key: bits for key in _BITS if (bits := top.whole(key)) is not None}
    for key, bits in numbers.items():
        if bits not in (4, 8, *_WHOLE_BITS):
            reject(f"{key}: {bits} is not supported: give 4, 8 or 16")
    # Read every switch, even if the first one is on: a setting that nothing reads would be reported
    # as ignored.
    are_four = [_switch(top, name) for name in _FOUR]
    are_eight = [_switch(top, name) for name in _EIGHT]
    if 8 in numbers.values():
        return "8bit"
    if 4 in numbers.values() or any(are_four):
        return "4bit"
    return "8bit" if any(are_eight) else "16bit"


def _check_base(kind: str, base: Base) -> None:
    if base != "16bit":
        reject(
            f"load_in_{base[0]}bit: freezes all weights in {base[0]} bits, but "
            f"{kind + ' training asks to train them' if kind else 'no adapters are given'}: give "
            "LoRA adapters too, or leave it out"
        )


def _are_all(top: Section) -> bool:
    """Whether a fine-tuning run has adapters on all linear layers, not on attention's alone.

    Without a setting, LLaMA-Factory and ms-swift adapt all of them, and PEFT those of attention.
    """
    if top.switch("lora_target_linear") or top.has(_BLOCKS):
        return True
    names = [name for key in _TARGETS for name in _listed(top, key)]
    if not names:
        return any(top.has(key) for key in ("finetuning_type", *_OF_SWIFT))
    return any(name in _ALL or any(part in name for part in _NETWORKS) for name in names)


def _tell_of_targets(top: Section, draft: Found) -> None:
    """Add a remark if the run adapts only some of the layers that are predicted with adapters."""
    if top.has(_BLOCKS) and not top.switch(_ALONE):
        text = f"embeddings, norms and head are trained too without {_ALONE}: predicted as frozen"
        draft.remark("ignored", _BLOCKS, text)
    key = next((key for key in _TARGETS if _listed(top, key)), "")
    names = set(_listed(top, key)) if key else set[str]()
    are_all = draft.trained["adapter_targets"] == "all"
    if not key and not are_all:
        text = (
            "attention's four layers, because the file names none: PEFT's default is fewer for "
            "most models (q_proj v_proj), unless the program names others"
        )
        draft.remark("assumed", "adapter_targets", text)
    layers = _OF_ATTENTION | _OF_NETWORKS if are_all else _OF_ATTENTION
    if key and names < layers:
        text = (
            f"{' '.join(sorted(names))}: predicted with adapters on "
            f"{'all linear layers' if are_all else 'all four layers of attention'}, which "
            "take more memory"
        )
        draft.remark("assumed", key, text)


def _listed(top: Section, key: str) -> Sequence[str]:
    value = top.get(key)
    names = value if isinstance(value, list) else str(value or "").replace(",", " ").split()
    return [str(word).lower() for word in names]
