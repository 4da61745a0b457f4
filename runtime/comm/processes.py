"""The processes of a run: their groups, the objects that they exchange, and attempts after a
launcher restarts them.
"""

import os
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from time import monotonic, sleep
from typing import Any, TypeVar
from uuid import uuid4

import torch
from torch import Tensor, distributed
from torch.distributed import (  # type: ignore[attr-defined]
    PrefixStore,
    Store,
    TCPStore,
)
from torch.distributed.distributed_c10d import _abort_process_group

from mistlab.core.values import reject
from runtime.comm.group import (
    Alone,
    Group,
    GroupMaker,
    Pending,
    RankLostError,
    own_part,
    refusal_in,
    then,
)
from runtime.comm.library import TORCH, Library, Work, with_timeout
from runtime.devices.cuda import driver_of, why_no_gpu

# Gives the processes of each attempt a new store, since torchrun may restart them.
#
# torchrun gives processes its own store, which outlives them. After a restart it still has the
# addresses of ended processes, and a process that reads such an address fails to connect, or blocks
# (pytorch #135712). The number of restarts differs between nodes, so it cannot identify the
# attempt. Instead, each process sends rank 0 a random word, and rank 0 answers every word with the
# name of the attempt.


MOMENT_S = 0.01


def attempt_store(rank: int, size: int, timeout_s: float) -> Store | None:
    """A store that only this attempt of the run uses; None if the launcher provides no store."""
    environment = os.environ
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    lent = TCPStore(
        environment["MASTER_ADDR"],
        int(environment["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(seconds=timeout_s),
    )
    return PrefixStore(attempt_name(lent, rank, size, timeout_s), lent)


def attempt_name(store: Store, rank: int, size: int, timeout_s: float) -> str:
    """A name on which all processes of this attempt agree, and that no other attempt has."""
    token = uuid4().hex
    if rank == 0:
        _answer_all(store, token, size, timeout_s)
        return token
    store.set(_greeting(rank), token)
    name: str = store.get(_answer(token)).decode()
    store.set(_presence(name, rank), "")
    return name


def _answer_all(store: Store, name: str, size: int, timeout_s: float) -> None:
    """On rank 0: answer the greetings that ranks leave in the store, until every rank has received
    its answer.

    A greeting may be left over from a process that has ended; it is answered like any other.
    """
    deadline = monotonic() + timeout_s
    answered = dict.fromkeys(range(1, size), "")
    while answered:
        for rank, before in [*answered.items()]:
            if store.check([_presence(name, rank)]):
                del answered[rank]
            elif store.check([_greeting(rank)]):
                greeting = store.get(_greeting(rank)).decode()
                if greeting != before:
                    store.set(_answer(greeting), name)
                    answered[rank] = greeting
        if monotonic() > deadline:
            late = ", ".join(map(str, answered))
            message = (
                f"rank 0 waited {timeout_s:g} s for ranks {late}, which did not connect: start all "
                f"{size} ranks, or give a longer --timeout"
            )
            raise RankLostError(message)
        sleep(MOMENT_S)


def _greeting(rank: int) -> str:
    return f"greeting of {rank}"


def _answer(greeting: str) -> str:
    return f"answer to {greeting}"


def _presence(name: str, rank: int) -> str:
    return f"{name}: {rank} is here"


# Ranks as processes that communicate by torch.distributed, over NCCL (GPUs) or gloo (CPUs).

REDUCTIONS = {"sum": distributed.ReduceOp.SUM, "max": distributed.ReduceOp.MAX}


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """This process's rank, global and on its node, among the processes that a launcher started."""

    rank: int
    size: int
    local_rank: int


def world_of_launcher() -> World:
    """This process's rank, read from torchrun's environment variables; that of a single process if
    they are unset.
    """
    environment = os.environ
    return World(
        rank=int(environment.get("RANK", "0")),
        size=int(environment.get("WORLD_SIZE", "1")),
        local_rank=int(environment.get("LOCAL_RANK", "0")),
    )


def device_of(name: str, world: World) -> torch.device:
    """This rank's device of the kind ``name``; raises an error if it should be a GPU that does not
    exist.
    """
    driver = driver_of(torch.device(name))
    if driver is None:
        return torch.device(name)
    present, kind = driver.count(), name.upper()
    if world.local_rank >= present:
        if not present:
            why = why_no_gpu() if name == "cuda" else ""
            reject(
                f"--device {name}: there is no {kind} device ({why or 'none is visible'}): "
                "give --device cpu"
            )
        reject(
            f"--device {name}: torch sees {present} {kind} device{'s' if present > 1 else ''}, "
            f"fewer than this node's ranks, of which each needs one (rank {world.rank} has none): "
            "start fewer ranks on this node, or give --device cpu (of a GPU divided by MIG, a "
            "process sees one slice)"
        )
    device = torch.device(name, world.local_rank)
    driver.choose(device)
    return device


def join(world: World, device: torch.device, timeout_s: float) -> None:
    """Connect this process to the others of the run; raises an error after the timeout.

    The process group is bound to the device. So NCCL creates the communicator of all processes now,
    and a group's communicator when the group is created, with all processes taking part. Each group
    has one communicator, for collectives and messages alike.
    """
    if world.size > 1:
        driver = driver_of(device)
        with heard_from(range(world.size)):
            store = attempt_store(world.rank, world.size, timeout_s)
            distributed.init_process_group(
                driver.backend if driver else "gloo",
                timeout=timedelta(seconds=timeout_s),
                device_id=device if driver else None,
                store=store,
                rank=-1 if store is None else world.rank,
                world_size=-1 if store is None else world.size,
            )


def leave(world: World) -> None:
    """Disconnect this process from the others of the run."""
    if world.size > 1:
        distributed.destroy_process_group()


def abandon() -> None:
    """Disconnect without waiting for other processes, after this process has failed.

    NCCL's communicators are aborted, since their unfinished work would otherwise occupy the device.
    Gloo's connections are left open, because torch waits for unfinished work before it closes them;
    they close when the process ends, which it should do now.
    """
    if distributed.is_initialized() and distributed.get_backend() == "nccl":
        _abort_process_group()


def meet() -> None:
    """Wait until all processes have reached this call."""
    if distributed.is_initialized():
        with heard_from(range(distributed.get_world_size())):
            distributed.barrier()


def maker(world: World, timeout_s: float, library: Library = TORCH) -> GroupMaker:
    """A function that creates groups of processes; all processes must create the same groups in the
    same order.
    """
    # A new group does not inherit the timeout of the processes: torch would use its default.
    timeout = timedelta(seconds=timeout_s)

    def make(name: str, ranks: Sequence[int]) -> Group | None:
        if len(ranks) == 1:
            return Alone()
        if name == "world":
            # The communicator of all processes is reused, since a second one would take memory on
            # each device.
            return everybody(library)
        is_link = name.startswith(("forward", "backward"))
        options = with_timeout(library.link_options(), timeout) if is_link else None
        with heard_from(range(world.size)):
            group = library.new_group(
                list(ranks), timeout=timeout, pg_options=options, group_desc=name
            )
        return ProcessGroup(group, library) if world.rank in ranks else None

    return make


@contextmanager
def heard_from(ranks: Sequence[int]) -> Iterator[None]:
    """Within the ``with`` block, turn torch.distributed's errors about lost ranks into
    ``RankLostError``.

    An error that reports lack of memory is passed on, since then no rank is lost.
    """
    try:
        yield
    except RuntimeError as error:
        if refusal_in(error) is not None:
            raise
        raise _lost_error(ranks, error) from error


class ProcessGroup:
    """A group of processes that communicates by torch.distributed.

    NCCL runs a collective on the current stream, so the host need not wait. Gloo runs a collective
    in another thread, so the caller must wait for it.
    """

    def __init__(self, group: distributed.ProcessGroup, library: Library = TORCH) -> None:
        self._group, self._library = group, library
        self._ranks = library.get_process_group_ranks(group)
        self.size, self.rank = group.size(), group.rank()
        self._is_ordered = library.get_backend(group) == "nccl"

    def all_reduce(self, tensor: Tensor, operation: str = "sum") -> Pending | None:
        """All-reduce a tensor over the processes of the group, in place."""
        reduction = REDUCTIONS[operation]
        with heard_from(self._ranks):
            work = self._library.all_reduce(tensor, reduction, self._group, not self._is_ordered)
        return self._started(work)

    def all_gather(self, whole: Tensor, part: Tensor) -> Pending | None:
        """Fill ``whole`` with the parts of all ranks, in the order of ranks."""
        # For gloo the part is copied: gloo may overwrite it in ``whole`` with other ranks' parts
        # before reading it.
        part = part if self._is_ordered else part.clone()
        with heard_from(self._ranks):
            work = self._library.all_gather_single(
                whole, part, group=self._group, async_op=not self._is_ordered
            )
        return self._started(work)

    def reduce_scatter(self, whole: Tensor, into: Tensor | None = None) -> Pending | None:
        """Sum ``whole`` over the group's ranks, and keep this rank's part of the sum."""
        part = own_part(whole, self) if into is None else into
        result = part if self._is_ordered else torch.empty_like(part)
        with heard_from(self._ranks):
            work = self._library.reduce_scatter_single(
                result, whole, group=self._group, async_op=not self._is_ordered
            )
        started = self._started(work)
        return started if self._is_ordered else then(started, lambda: part.copy_(result))

    def all_to_all(
        self, received: Tensor, sent: Tensor, from_each: Sequence[int], to_each: Sequence[int]
    ) -> Pending | None:
        """Send each rank its rows, and receive the rows that all ranks send to this rank."""
        with heard_from(self._ranks):
            work = self._library.all_to_all_single(
                *(received, sent, list(from_each), list(to_each)),
                group=self._group,
                async_op=not self._is_ordered,
            )
        return None if work is None else _PendingWorks([work], [received, sent], self._ranks)

    def exchange(
        self, sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]]
    ) -> Pending | None:
        """Send and receive all messages as one batch."""
        operations = [
            self._library.message(
                is_sent=is_sent, tensor=tensor, peer=self._ranks[peer], group=self._group
            )
            for is_sent, messages in ((True, sends), (False, receives))
            for tensor, peer in messages
        ]
        peers = {self._ranks[peer] for _, peer in (*sends, *receives)}
        with heard_from(sorted(peers)):
            works = self._library.batch_isend_irecv(operations) if operations else []
        if not self._is_ordered:
            return _PendingWorks(
                works, [tensor for tensor, _ in (*sends, *receives)], sorted(peers)
            )
        for work in works:
            work.wait()
        return None

    def _started(self, work: Work | None) -> Pending | None:
        return None if work is None else _PendingWorks([work], [], self._ranks)


def everybody(library: Library = TORCH) -> ProcessGroup:
    """The group of all processes, which exists once they are connected."""
    return ProcessGroup(library.world(), library)


class _PendingWorks:
    """Running collectives of gloo, and the tensors that must live until they end.

    Some of gloo's collectives end only while a thread waits for them, so a thread of this process
    waits.
    """

    def __init__(self, works: Sequence[Work], held: list[Tensor], ranks: Sequence[int]) -> None:
        self._works = works
        self._held = held
        self._ranks = ranks
        self._error: RuntimeError | None = None
        self._waiter = threading.Thread(target=self._wait, daemon=True)
        self._waiter.start()

    def is_ready(self) -> bool:
        """Whether all of the running gloo collectives have ended."""
        return not self._waiter.is_alive()

    def wait_a_moment(self) -> None:
        """Sleep for a moment, in which gloo's threads can run."""
        self._waiter.join(MOMENT_S)

    def finish(self) -> None:
        """Raise the error of a gloo collective, if one failed."""
        if self._error is not None:
            raise _lost_error(self._ranks, self._error) from self._error

    def _wait(self) -> None:
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            self._error = error


def _lost_error(ranks: Sequence[int], error: RuntimeError) -> RankLostError:
    """The error for a call that some of these ranks did not answer; which of them is not known."""
    this_rank = distributed.get_rank() if distributed.is_initialized() else None
    others = [str(rank) for rank in ranks if rank != this_rank]
    is_alone = len(others) == 1
    waited = f"rank {others[0]}, which" if is_alone else f"ranks {', '.join(others)}, one of which"
    where = f"rank {others[0]} printed" if is_alone else "one of these ranks printed"
    message = str(error).partition("\n")[0].partition(" This is typically")[0]
    reason = re.sub(r"^\[\S+\] ", "", message).rstrip(".")
    by = "a rank" if this_rank is None else f"rank {this_rank}"
    return RankLostError(
        f"{by} waited for {waited} has ended or did not answer in time ({reason}): correct the "
        f"error that {where}, then start all ranks again"
    )


# Exchanges Python objects (pickled) between all processes of a run.


T = TypeVar("T")


def is_distributed() -> bool:
    """Whether this process is connected to other processes."""
    return bool(distributed.is_initialized())


def gathered(value: T) -> list[T]:
    """The objects ``value`` of all processes, in the order of ranks; a single process gets only its
    own.
    """
    if not is_distributed():
        return [value]
    size = distributed.get_world_size()
    everybodys: list[Any] = [None] * size
    with heard_from(range(size)):
        distributed.all_gather_object(everybodys, value)
    return everybodys
