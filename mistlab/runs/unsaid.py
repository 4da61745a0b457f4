"""What a row does not say of a run that its users chose for speed."""

from collections.abc import Mapping

from mistlab.engines.engine import ENGINES
from mistlab.runs.cells import count_of
from mistlab.runs.megatron_arguments import are_arguments
from mistlab.schedule.orders import INTERLEAVED


def unsaid_of(cells: Mapping[str, str], remarks: str, engine: str, stages: int) -> tuple[str, ...]:
    """The columns of a benchmark's row that are empty though its batch is said: the micro-batch,
    and the chunks of stages that may have several. Megatron's arguments have defaults instead, and
    training as users do it is not tuned."""
    if are_arguments(remarks) or "phase " in remarks or count_of(cells, "global_batch") is None:
        return ()
    has_chunks = stages > 1 and set(INTERLEAVED) <= set(ENGINES[engine].orders)
    asked = {"micro_batch": count_of(cells, "grad_accumulation") is None, "vpp": has_chunks}
    return tuple(name for name, is_open in asked.items() if is_open and not count_of(cells, name))
