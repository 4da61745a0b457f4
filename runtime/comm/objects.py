"""Exchanges Python objects between all processes of a run; any object that can be pickled."""

from typing import Any, TypeVar

from torch import distributed

from runtime.comm.processes import heard_from

T = TypeVar("T")


def is_distributed() -> bool:
    """Whether this process has joined other processes."""
    return bool(distributed.is_initialized())


def gathered(own: T) -> list[T]:
    """The objects of all processes, in order of rank; just ``own`` for a process without others."""
    if not is_distributed():
        return [own]
    size = distributed.get_world_size()
    everybodys: list[Any] = [None] * size
    with heard_from(range(size)):
        distributed.all_gather_object(everybodys, own)
    return everybodys
