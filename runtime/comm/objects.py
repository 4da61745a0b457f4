"""What all processes say to one another besides tensors: whatever can be pickled."""

from typing import Any, TypeVar

from torch import distributed

from runtime.comm.processes import heard_from

T = TypeVar("T")


def is_distributed() -> bool:
    """Whether there are processes to talk to."""
    return bool(distributed.is_initialized())


def gathered(own: T) -> list[T]:
    """What every process gives, in the order of ranks; its own alone where there is one."""
    if not is_distributed():
        return [own]
    size = distributed.get_world_size()
    everybodys: list[Any] = [None] * size
    with heard_from(range(size)):
        distributed.all_gather_object(everybodys, own)
    return everybodys
