"""Reads and writes order files, which give the order of a pipeline's forward and backward passes: a
line for each stage and a word such as ``F0m3`` for each pass.

``F0m3`` is the forward pass of chunk 0 for micro-batch 3. ``B`` is the backward pass. If a stage
also has ``W``, ``B`` computes only the gradient of the input, and ``W`` the gradients of the
weights. The chunk may be left out if there is only one. The model is cut into S v parts, for S
stages with v chunks each; chunk c of stage s is part c S + s. A text whose parts lie otherwise
begins with a line that says on which stage each part is, as ``parts 0 1 1 0``.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, NoReturn, get_args

from mistlab.core.values import InputError, reject
from mistlab.schedule.placement import Placement, StageChunk, loop

PassKind = Literal["F", "B", "W"]
_KINDS: Mapping[str, PassKind] = {kind: kind for kind in get_args(PassKind)}

_NUMBER = "0|[1-9][0-9]{0,8}"
_WORD = re.compile(rf"([FBW])({_NUMBER})?m({_NUMBER})")
# If the first line of an order file begins with this word, it says which stage holds each part of
# the model.
_PLACED = "parts"
# An error message shows at most this many characters of a faulty word.
_SHOWN = 24


class OrderedPass(NamedTuple):
    """A pass of a micro-batch through a chunk of a stage, which a word of an order file (``F0m3``)
    stands for.
    """

    kind: PassKind
    chunk: int
    micro_batch: int


StageOrder = tuple[OrderedPass, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOrder:
    """The order in which each stage of a pipeline runs its forward and backward passes; it may
    contain a deadlock until it is checked.
    """

    stages: tuple[StageOrder, ...]
    micro_batches: int
    placement: Placement

    @property
    def num_stages(self) -> int:
        """The number of stages of the pipeline."""
        return len(self.stages)

    @property
    def chunks(self) -> int:
        """The number of chunks (separate pieces of the model) of each stage."""
        return self.placement.chunks

    def line(self, stage: int) -> int:
        """The number of the line in an order file that lists a stage's passes, from 1."""
        return stage + 1 + (not self.placement.is_loop)

    def source(self, stage: int, of: OrderedPass) -> StageChunk | None:
        """The stage and chunk that compute the input of a stage's pass, or None if no pass computes
        it.

        None is returned for a forward pass of the model's first part, a backward pass of the last
        part, and weight gradients.
        """
        return self._beside(stage, of, -1)

    def destination(self, stage: int, of: OrderedPass) -> StageChunk | None:
        """The stage and chunk that use the output of a stage's pass, or None if no pass uses it."""
        return self._beside(stage, of, 1)

    def _beside(self, stage: int, of: OrderedPass, step: int) -> StageChunk | None:
        if of.kind == "W":
            return None
        places = self.placement.places
        part = self.placement.of_stage(stage)[of.chunk] + (step if of.kind == "F" else -step)
        return places[part] if 0 <= part < len(places) else None

    def word(self, of: OrderedPass) -> str:
        """The word that stands for a pass in an order file, such as ``F0m3``."""
        chunk = of.chunk if self.chunks > 1 else ""
        return f"{of.kind}{chunk}m{of.micro_batch}"

    def __str__(self) -> str:
        """The text of an order file for this order: a line for each stage."""
        lines = [" ".join(map(self.word, stage)) for stage in self.stages]
        if not self.placement.is_loop:
            lines.insert(0, placement_line(self.placement))
        return "".join(f"{line}\n" for line in lines)


def placement_line(placement: Placement) -> str:
    """The line of an order file that says which stage holds each part of the model, such as ``parts
    0 1 1 0``.
    """
    return " ".join((_PLACED, *map(str, placement.stages)))


def order_from_text(text: str, *, num_stages: int, micro_batches: int) -> PipelineOrder:
    """Read the order of passes from the text of an order file.

    Whether stages can run in this order is not checked yet.
    """
    lines = text.rstrip().splitlines()
    placement = _placement(lines, num_stages)
    before = 1 if placement is None else 2
    lines = lines[before - 1 :]
    if len(lines) != num_stages:
        reject(
            f"has {_counted(len(lines), 'line')} for {_counted(num_stages, 'stage')}: give one "
            "line for each stage of the plan"
        )
    parsed = [_words(number, line) for number, line in enumerate(lines, before)]
    chunks = _chunks(parsed, before)
    if chunks > 1:
        _check_named(parsed, chunks, before)
    if placement is not None and placement.chunks != chunks:
        reject(
            f"line 1: gives each stage {_counted(placement.chunks, 'chunk')}, but the passes below "
            f"name {chunks}: list {num_stages * chunks} parts in line 1, or write passes of "
            f"{_counted(placement.chunks, 'chunk')}"
        )
    return PipelineOrder(
        stages=tuple(tuple(ordered for _, ordered, _ in words) for words in parsed),
        micro_batches=micro_batches,
        placement=placement or loop(num_stages, chunks),
    )


def splits_backward(stage: StageOrder) -> bool:
    """Whether a stage computes weight gradients in passes of their own (W), apart from input
    gradients (B).
    """
    return any(one.kind == "W" for one in stage)


def refuse_word(line: int, word: str, problem: str) -> NoReturn:
    """Raise an ``InputError`` about a word in an order file; ``line`` is the line's number from
    1.
    """
    reject(f"line {line}: {word} {problem}")


def _placement(lines: Sequence[str], num_stages: int) -> Placement | None:
    """Read the stage of each part of the model from the first line of an order file; None if that
    line does not begin with ``parts``.
    """
    first, *places_told = lines[0].split() if lines and lines[0].strip() else [""]
    if first != _PLACED:
        return None
    for word in places_told:
        if re.fullmatch(_NUMBER, word) is None or int(word) >= num_stages:
            problem = f"is not a stage: write numbers from 0 to {num_stages - 1}"
            refuse_word(1, repr(word[:_SHOWN]), problem)
    if {*map(int, places_told)} != {*range(num_stages)}:
        reject(
            f"line 1: puts parts on {len({*places_told})} of {num_stages} stages: name every stage"
        )
    try:
        return Placement(tuple(map(int, places_told)))
    except InputError as error:
        reject(f"line 1: {error}")


# A word of an order file, the pass that it stands for, and whether the word gives a chunk number.
_Word = tuple[str, OrderedPass, bool]


def _words(number: int, line: str) -> list[_Word]:
    read_words: list[_Word] = []
    for word in line.split():
        read_word = _word(word)
        if read_word is None:
            problem = "is not a pass: write F, B or W, the chunk, m and the micro-batch, like F0m3"
            refuse_word(number, repr(word[:_SHOWN]), problem)
        read_words.append(read_word)
    return read_words


@lru_cache(maxsize=1 << 14)
def _word(word: str) -> _Word | None:
    """The pass that a word such as ``F0m3`` stands for, or None if the word is malformed; results
    are cached.
    """
    match = _WORD.fullmatch(word)
    if match is None:
        return None
    kind, chunk, micro_batch = match.groups()
    ordered = OrderedPass(_KINDS[kind], int(chunk or 0), int(micro_batch))
    return word, ordered, chunk is not None


def _check_named(lines: Sequence[Sequence[_Word]], chunks: int, before: int) -> None:
    """Refuse words of an order file without chunk numbers where stages have several chunks.

    ``before`` is the number of the first of ``lines`` in the file.
    """
    in_lines = [(number, *one) for number, words in enumerate(lines, before) for one in words]
    other, other_word = next((number, word) for number, word, one, _ in in_lines if one.chunk)
    for number, word, _, has_chunk in in_lines:
        if not has_chunk:
            have = f"stages have {chunks} chunks (line {other} has {other_word})"
            remedy = f"write {word[0]}0{word[1:]}, with the number of the chunk after {word[0]}"
            refuse_word(number, word, f"names no chunk, but {have}: {remedy}")


def _chunks(lines: Sequence[Sequence[_Word]], before: int) -> int:
    """The number of chunks of each stage, from the words of an order file.

    Refuses a gap in the chunks' numbers.
    """
    first = {
        ordered.chunk: (number, word)
        for number, line_words in enumerate(lines, before)
        for word, ordered, _ in line_words
    }
    chunks = next(chunk for chunk in range(len(first) + 1) if chunk not in first)
    for chunk, (number, word) in first.items():
        if chunk > chunks:
            have = "there is chunk 0 alone" if chunks == 1 else f"chunks are 0 to {chunks - 1}"
            have = have if chunks else "there is no chunk 0"
            refuse_word(number, word, f"is of chunk {chunk}, but {have}: number them without a gap")
    return max(1, chunks)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
