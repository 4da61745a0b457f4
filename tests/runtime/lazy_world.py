"""One process of a world whose groups refuse what hangs where communicators are made lazily."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, distributed

from runtime.comm import topology
from runtime.comm.group import Group, Pending
from runtime.comm.processes import World, maker
from tests.runtime.process_world import cases_of, train

PATIENCE_S = 20.0


class LazyGroup:
    """A group of processes whose first call makes it, as NCCL's does: a collective by all ranks."""

    def __init__(self, group: Group, name: str, ranks: Sequence[int]) -> None:
        self._group, self._ranks = group, ranks
        self._key = f"{name} {ranks}"
        self._is_made = False
        self.size, self.rank = group.size, group.rank

    def all_reduce(self, tensor: Tensor, operation: str = "sum") -> Pending | None:
        self._enter()
        return self._group.all_reduce(tensor, operation)

    def all_gather(self, whole: Tensor, own: Tensor) -> Pending | None:
        self._enter()
        return self._group.all_gather(whole, own)

    def reduce_scatter(self, whole: Tensor) -> Pending | None:
        self._enter()
        return self._group.reduce_scatter(whole)

    def all_to_all(
        self, received: Tensor, sent: Tensor, from_each: Sequence[int], to_each: Sequence[int]
    ) -> Pending | None:
        self._enter()
        return self._group.all_to_all(received, sent, from_each, to_each)

    def exchange(
        self, sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]]
    ) -> Pending | None:
        assert self._is_made or not (sends or receives), f"{self._key} begins with a message"
        return self._group.exchange(sends, receives)

    def _enter(self) -> None:
        """Wait until all ranks have come, as NCCL does without an end."""
        if self._is_made:
            return
        store = distributed.distributed_c10d._get_default_store()
        store.set(f"{self._key} has {self.rank}", "")
        keys = [f"{self._key} has {rank}" for rank in range(self.size)]
        deadline = time.monotonic() + PATIENCE_S
        while not store.check(keys):
            assert time.monotonic() < deadline, f"{self._key} is not entered by all its ranks"
            time.sleep(0.01)
        self._is_made = True


def main() -> None:
    rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    if sys.argv[4] == "unconnected":
        topology.enter = topology.greet = lambda *_: None
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
    make = maker(World(rank=rank, size=size, local_rank=rank), timeout_s=PATIENCE_S)
    made: list[str] = []

    def make_lazy(name: str, ranks: Sequence[int]) -> Group | None:
        group = make(name, ranks)
        made.append(name)
        return group and LazyGroup(group, f"{len(made)} {name}", ranks)

    train(cases_of(size).values(), rank, folder, make_lazy)
    distributed.destroy_process_group()
