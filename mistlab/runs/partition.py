"""How engines divide a model's blocks over the stages of a pipeline."""

from collections.abc import Sequence

from mistlab.core.values import refuse
from mistlab.engines.engine import ENGINES
from mistlab.runs.configuration import Configuration
from mistlab.schedule.placement import even_shares

LAST_PARTS = ("head", "cast", "loss")
# No pipeline that anybody trained with has more stages.
MOST_STAGES = 1024


def blocks_of_stages(run: Configuration, notes: list[str]) -> list[int]:
    """The blocks of each stage; a stage without blocks is left out, and noted."""
    stages, layers = run.pipeline_parallel, run.shape.layers
    if stages == 1:
        return [layers]
    is_by_cost = ENGINES[run.engine].system == "nanotron"
    most = MOST_STAGES if is_by_cost else layers
    if stages > most:
        refuse("pp", f"{stages} stages for {layers} blocks: give at most {most}")
    if is_by_cost:
        blocks = _by_cost(run)
    elif run.ends is not None and stages > 2:
        inner, rest = divmod(layers - sum(run.ends), stages - 2)
        if rest:
            refuse("pp", f"{layers} blocks do not divide over {stages} stages between such ends")
        blocks = [run.ends[0], *([inner] * (stages - 2)), run.ends[1]]
    elif run.short_ends:
        inner = -(-(layers + 2) // stages)
        blocks = [inner - 1, *([inner] * (stages - 2)), inner - 1]
        if sum(blocks) != layers:
            refuse("pp", f"{layers} blocks do not divide over {stages} stages with shorter ends")
    else:
        # The stages in front have the extra blocks: the last one has the head.
        blocks = [*even_shares(layers, stages)]
    if empty := blocks.count(0):
        notes.append(f"{empty} of {stages} stages have no blocks")
    return blocks


def _by_cost(run: Configuration) -> list[int]:
    """Blocks as nanotron divides them: by weights of blocks and of the head, in order.

    A stage takes parts until it has passed its share of all weights (nanotron/models/base.py). The
    head may come to a stage of its own, and the stages after it have nothing. Here the head is on
    the last stage wherever one has nothing: measured runs of 32 blocks on 16 stages take the time
    of three blocks, not that of two blocks and the head.
    """
    shape, stages = run.shape, run.pipeline_parallel
    block = 4 * shape.hidden * shape.hidden + 3 * shape.ffn * shape.hidden
    whole = shape.layers * block + shape.vocab * shape.hidden
    counts, reached = [0], 0
    for _ in range(shape.layers):
        if reached * stages > whole * len(counts):
            counts.append(0)
        counts[-1] += 1
        reached += block
    return counts + [0] * (stages - len(counts))


def unrunnable(run: Configuration, blocks: Sequence[int]) -> str:
    """Why an engine cannot run a pipeline with these blocks; empty if it can.

    Nanotron's pipeline ends with the head, a cast and the loss, each on a stage of its own where
    stages are left. A stage after these has nothing, and nanotron does not start. Of its runs whose
    stages share a table of tokens, without ZeRO and over several data-parallel ranks and
    micro-batches, five in six failed, whatever their memory.
    """
    if ENGINES[run.engine].system != "nanotron":
        return ""
    spare = list(blocks).count(0) - len(LAST_PARTS)
    if spare > 0:
        return f"{spare} of {len(blocks)} stages would have nothing: nanotron does not start"
    shares_table = run.shape.tied_embeddings and run.pipeline_parallel > 1
    if shares_table and run.zero == 0 and run.data_parallel > 1 and run.micro_batches > 1:
        return "stages share a table of tokens without ZeRO: most such runs of nanotron failed"
    return ""
