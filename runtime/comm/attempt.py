"""Gives the processes of one attempt a store of their own, when torchrun starts them repeatedly.

torchrun lends the processes its own store. The store outlives them: after a restart it still holds
the addresses of processes that are gone, and a process that reads such an address fails to connect
or waits (pytorch #135712). The number of restarts differs from node to node, so it cannot name the
attempt. Instead, each process greets rank 0 with a random word of its own, and rank 0 answers every
greeting with the name of the attempt.
"""

import os
from datetime import timedelta
from time import monotonic, sleep
from uuid import uuid4

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

MOMENT_S = 0.01


def attempt_store(rank: int, size: int, timeout_s: float) -> Store | None:
    """A store that only this attempt uses; None if the launcher lends no store."""
    said = os.environ
    if said.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    lent = TCPStore(
        said["MASTER_ADDR"],
        int(said["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(seconds=timeout_s),
    )
    return PrefixStore(attempt_name(lent, rank, size, timeout_s), lent)


def attempt_name(store: Store, rank: int, size: int, timeout_s: float) -> str:
    """A name that all processes of this attempt agree on, and that no other attempt has."""
    own = uuid4().hex
    if rank == 0:
        _answer_all(store, own, size, timeout_s)
        return own
    store.set(_greeting(rank), own)
    name: str = store.get(_answer(own)).decode()
    store.set(_presence(name, rank), "")
    return name


def _answer_all(store: Store, name: str, size: int, timeout_s: float) -> None:
    """Answer every greeting until all ranks have come.

    Greetings of processes that are gone are answered too: nobody can tell them apart.
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
            message = f"ranks {', '.join(map(str, answered))} did not come"
            raise RuntimeError(message)
        sleep(MOMENT_S)


def _greeting(rank: int) -> str:
    return f"greeting of {rank}"


def _answer(greeting: str) -> str:
    return f"answer to {greeting}"


def _presence(name: str, rank: int) -> str:
    return f"{name}: {rank} is here"
