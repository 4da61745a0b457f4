"""How Megatron-LM's options divide blocks among the stages of a pipeline, and in which order."""

import re
from collections.abc import Sequence

from mistlab.core.values import InputError
from mistlab.export.found import Found, checked_whole
from mistlab.export.megatron_flags import Options, is_of_deepspeed
from mistlab.export.megatron_hybrid_read import PATTERN, segments_of
from mistlab.schedule.orders import INTERLEAVED, order_of_chunks
from mistlab.schedule.placement import even_shares

_MOST_BLOCKS = 1_000
_ENDS = ("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers")


def read_stages(options: Options, found: Found, layers: int) -> None:
    """The blocks of each stage, and the order of its chunks."""
    layout = options.text("--pipeline-model-parallel-layout")
    first, last = (options.whole(name) for name in _ENDS)
    chunks = _chunks(options, found, layers)
    segments = segments_of(options, layers) if PATTERN in options else []
    listed = _listed(options, found, layers)
    if layout is not None:
        parts = parts_of_layout(layout)
        chunks = _of_parts(parts, "--pipeline-model-parallel-layout", found)
    elif len(segments) > 1:
        chunks = _of_parts([len(part) for part in segments], PATTERN, found)
    elif listed is not None:
        found.layers = listed
    elif first is not None or last is not None:
        found.layers = _with_ends(found.num_stages, layers, first, last)
    elif by_ends := _beside_ends(options, found.num_stages, layers):
        found.layers = by_ends
    elif layers % found.num_stages and not is_of_deepspeed(options):
        message = (
            f"--num-layers {layers}: {found.num_stages} stages do not divide them: Megatron-LM "
            "refuses this; give --pipeline-model-parallel-layout, or another number of stages"
        )
        raise InputError(message)
    _order(options, chunks, found)


def _order(options: Options, chunks: int, found: Found) -> None:
    if chunks > 1:
        order = order_of_chunks(chunks)
        if order in INTERLEAVED:
            found.order = order
            if options.text("--recompute-method") == "block":
                text = f"of a stage, though Megatron-LM counts each of its {chunks} chunks"
                found.remark("assumed", "checkpointed_layers", text)
        else:
            text = f"{chunks} chunks a stage: no order is named {order}; taken as 1f1b"
            found.remark("ignored", "order", text)


def _of_parts(parts: Sequence[int], option: str, found: Found) -> int:
    """Set the blocks of stages by those of the parts of a pipeline; gives chunks of a stage."""
    if len(parts) % found.num_stages:
        message = (
            f"{option}: {len(parts)} parts are no multiple of {found.num_stages} stages: give a "
            "part for each chunk of each stage"
        )
        raise InputError(message)
    found.layers = [sum(parts[stage :: found.num_stages]) for stage in range(found.num_stages)]
    return len(parts) // found.num_stages


def _listed(options: Options, found: Found, layers: int) -> Sequence[int] | None:
    """Blocks stage by stage, as some relatives of Megatron-LM list them."""
    words = ",".join(options.all_words("--num-layer-list")).split(",")
    if words == [""]:
        return None
    where = options.where("--num-layer-list")
    listed = [checked_whole(where, word) for word in words if word]
    if len(listed) != found.num_stages or sum(listed) != layers:
        message = (
            f"{where}: {sum(listed)} blocks in {len(listed)} stages, but the model has {layers} in "
            f"{found.num_stages}: give a number for each stage"
        )
        raise InputError(message)
    return listed


def _beside_ends(options: Options, num_stages: int, layers: int) -> Sequence[int] | None:
    """Blocks of stages, where embedding and head count as blocks of the first and the last."""
    method = options.text("--pp-partition-method") or ""
    both = "embed" in method
    at_start = both or options.has("--account-for-embedding-in-pipeline-split")
    at_end = both or options.has("--account-for-loss-in-pipeline-split")
    if num_stages == 1 or not (at_start or at_end):
        return None
    shares = list(even_shares(layers + at_start + at_end, num_stages))
    if len(set(shares)) > 1 and not both:
        message = (
            f"--num-layers {layers}: with embedding and loss {sum(shares)} parts do not divide "
            f"over {num_stages} stages: Megatron-LM refuses this; give another number of stages"
        )
        raise InputError(message)
    shares[0] -= at_start
    shares[-1] -= at_end
    if 0 in shares:
        message = (
            f"--num-layers {layers}: beside embedding and loss a stage of {num_stages} has no "
            "blocks, which no plan says: give fewer stages"
        )
        raise InputError(message)
    return shares


def _chunks(options: Options, found: Found, layers: int) -> int:
    chunks = options.whole("--num-virtual-stages-per-pipeline-rank")
    each = options.whole("--num-layers-per-virtual-pipeline-stage")
    if each is not None and chunks is None:
        ends = ("embedding", "loss")
        counted = layers + sum(
            options.has(f"--account-for-{end}-in-pipeline-split") for end in ends
        )
        chunks, rest = divmod(counted, found.num_stages * each)
        if rest:
            message = (
                f"--num-layers-per-virtual-pipeline-stage {each}: {layers} blocks on "
                f"{found.num_stages} stages are no chunks of {each}: Megatron-LM refuses this; "
                "give a divisor of the blocks of a stage"
            )
            raise InputError(message)
    return chunks or 1


def _with_ends(
    num_stages: int, layers: int, first: int | None, last: int | None
) -> Sequence[int] | None:
    """Blocks of stages, of which the first and the last may have numbers of their own."""
    inner = num_stages - (first is not None) - (last is not None)
    left = layers - (first or 0) - (last or 0)
    if inner < 0 or left < 0 or (inner and left % inner) or (not inner and left):
        message = (
            f"--num-layers {layers}: {left} blocks are left for {max(inner, 0)} stages between the "
            "first and the last: give other --decoder-first- and --decoder-last-pipeline-num-layers"
        )
        raise InputError(message)
    middle = [left // inner] * inner if inner else []
    return [*([first] if first else []), *middle, *([last] if last else [])]


def _repeated(match: re.Match[str]) -> str:
    if len(match[2]) > len(str(_MOST_BLOCKS)) or int(match[2]) > _MOST_BLOCKS:
        message = (
            f"--pipeline-model-parallel-layout: {match[2]} times is too often: give at most "
            f"{_MOST_BLOCKS}"
        )
        raise InputError(message)
    return match[1] * int(match[2])


def parts_of_layout(layout: str) -> list[int]:
    """The blocks of each part of a layout such as ``Ett|(tt|)*2tL``.

    >>> parts_of_layout("Ett|(tt|)*2,t*3L")
    [2, 2, 2, 3]
    """
    text = layout.replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        text = re.sub(pattern, _repeated, text)
    if unknown := sorted(set(text) - set("EtmL|")):
        message = (
            f"--pipeline-model-parallel-layout: {''.join(unknown)!r} is not known here: give E, t, "
            "m, L and |, with (...)*N"
        )
        raise InputError(message)
    return [part.count("t") for part in text.split("|")]
