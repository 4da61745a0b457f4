"""Runs plans on several nodes: the first node announces a run, and every node starts its own part
of it.

Under a torchrun of several nodes, the first process of each node leads it. The leader of the first
node measures; the leaders of the others run what it announces, until it announces the end. They
communicate through a store on the first node.
"""

import json
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Self

from mistlab.core.values import reject

# How long a node waits at most for the next run that the first node announces.
LONGEST_WAIT = timedelta(days=1)
# How many seconds after one node's part of a run has ended the parts on other nodes must end.
PARTING_S = 10.0
ENDED = "ended"


@dataclass(slots=True, kw_only=True)
class Nodes:
    """The nodes on which torchrun was started, as the leading process of a node sees them: their
    number, its own index, and the store that they share.
    """

    count: int = 1
    own: int = 0
    address: str = ""
    store: Any = None
    number: int = 0
    _over_since: float | None = field(default=None, init=False)

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Self:
        """The nodes that torchrun has; a single node without torchrun."""
        count = int(environment.get("GROUP_WORLD_SIZE", "1"))
        if count == 1:
            return cls()
        from torch import distributed  # noqa: PLC0415 (needs torch)

        rank, address = int(environment["GROUP_RANK"]), environment["MASTER_ADDR"]
        has_one = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        store = distributed.TCPStore(  # type: ignore[attr-defined]
            address,
            int(environment["MASTER_PORT"]),
            is_master=rank == 0 and not has_one,
            wait_for_workers=False,
            timeout=LONGEST_WAIT,
        )
        return cls(count=count, own=rank, address=address, store=store)

    def launcher(self, ranks: int, port: int | None) -> list[str]:
        """The command that launches this node's part of a run with this many ranks; the part on the
        first node listens at the port.
        """
        torchrun = ["-m", "torch.distributed.run"]
        if self.count == 1:
            return [*torchrun, "--standalone", "--nproc-per-node", str(ranks)]
        if ranks % self.count:
            reject(
                f"torchrun --nnodes {self.count}: the {ranks} ranks of a plan cannot be divided "
                f"equally among {self.count} nodes: start a number of nodes that divides {ranks}"
            )
        return [
            *torchrun,
            *("--nnodes", str(self.count), "--node-rank", str(self.own)),
            *("--master-addr", self.address, "--master-port", str(port)),
            *("--nproc-per-node", str(ranks // self.count)),
        ]

    def announce(self, run: Mapping[str, Any]) -> int | None:
        """Announce a run to the other nodes. Returns the port at which the run's first process
        listens, or None on a single node.
        """
        self.number += 1
        self._over_since = None
        if self.count == 1:
            return None
        with socket.socket() as free:
            free.bind(("", 0))
            port: int = free.getsockname()[1]
        self.store.set(f"run {self.number}", json.dumps({**run, "port": port}))
        return port

    def announced(self) -> Iterator[dict[str, Any]]:
        """Yields each run that the first node announces, until it announces the end."""
        while True:
            self.number += 1
            self._over_since = None
            run = json.loads(self.store.get(f"run {self.number}"))
            if run == ENDED:
                return
            yield run

    def end(self) -> None:
        """Announce to the other nodes that there are no more runs."""
        if self.count > 1:
            self.number += 1
            self.store.set(f"run {self.number}", json.dumps(ENDED))

    def over(self, outcome: str) -> None:
        """Report that this node's part of a run has ended, and how."""
        if self.count > 1:
            self.store.set(self._key(self.own), outcome)

    def others_are_over(self) -> bool:
        """Whether a part on another node ended so long ago that the part on this node must be
        hanging.
        """
        if self.count == 1:
            return False
        if self._over_since is None:
            if any(self.store.check([self._key(node)]) for node in self._others):
                self._over_since = time.monotonic()
            return False
        return time.monotonic() - self._over_since > PARTING_S

    def outcomes(self) -> list[str]:
        """For each other node on which the part of a run has ended, how it has ended."""
        keys = map(self._key, self._others)
        return [self.store.get(key).decode() for key in keys if self.store.check([key])]

    @property
    def _others(self) -> list[int]:
        return [node for node in range(self.count) if node != self.own]

    def _key(self, node: int) -> str:
        return f"over {self.number} {node}"
