"""The parts that a model is cut into: of S stages with v chunks each, S v of them.

Part c S + s is chunk c of stage s. A stage's blocks are divided over its chunks as evenly as
possible, the first chunks taking the rest. The embedding is on the first part, the head on the
last.
"""

from dataclasses import dataclass

from mistlab.values.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePart:
    """Consecutive layers of a model on one stage, which count through the whole model."""

    stage: int
    chunk: int
    blocks: range
    checkpointed: int
    has_embedding: bool
    has_head: bool

    @property
    def first_layer(self) -> int:
        """The first of its layers, the embedding being layer 0."""
        return self.blocks.start - self.has_embedding


def blocks_of_chunks(blocks: int, chunks: int) -> tuple[int, ...]:
    """How many of a stage's blocks each of its chunks has.

    >>> blocks_of_chunks(8, 3)
    (3, 3, 2)
    """
    each, rest = divmod(blocks, chunks)
    return tuple(each + (chunk < rest) for chunk in range(chunks))


def parts_of_plan(plan: Plan, chunks: int) -> list[StagePart]:
    """The parts of a plan's model, in order; a stage's last blocks are the checkpointed ones."""
    shares = [blocks_of_chunks(stage.layers, chunks) for stage in plan.stages]
    left = [stage.checkpointed_layers for stage in plan.stages]
    checkpointed: dict[tuple[int, int], int] = {}
    for chunk in reversed(range(chunks)):
        for stage, share in enumerate(shares):
            checkpointed[chunk, stage] = min(left[stage], share[chunk])
            left[stage] -= checkpointed[chunk, stage]
    parts: list[StagePart] = []
    begin = 1
    for chunk in range(chunks):
        for stage, share in enumerate(shares):
            end = begin + share[chunk]
            parts.append(
                StagePart(
                    stage=stage,
                    chunk=chunk,
                    blocks=range(begin, end),
                    checkpointed=checkpointed[chunk, stage],
                    has_embedding=not parts,
                    has_head=(chunk, stage) == (chunks - 1, plan.num_stages - 1),
                )
            )
            begin = end
    return parts
