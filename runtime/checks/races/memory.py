"""Follows the memory that operators touch, from its allocation to its end.

CUDA's caching allocator hands memory out to one stream. It has two rules for memory that several
streams use. Another stream may use the memory only after the point of the allocating stream at
which it was allocated. The memory may be freed only when the allocating stream has waited for every
user.
"""

import weakref
from dataclasses import dataclass, field

import torch
from torch import Tensor

from runtime.checks.races.trace import HOST, Access, Deed, Need, Trace


@dataclass(slots=True, kw_only=True, eq=False)
class _Storage:
    """Live memory; ``owner`` is the stream that allocated it, or the host.

    It is None for memory from before the trace, to which the allocator's rules are not applied.
    """

    number: int
    owner: str | None
    made_at: int | None = None
    made: str = ""
    is_host: bool = False
    # The last use of each actor.
    users: dict[str, Access] = field(default_factory=dict)
    watch: weakref.ref[torch.UntypedStorage] | None = None


class Memory:
    """Notes in a trace which bytes are touched; finds storages by their identity."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._live: dict[int, _Storage] = {}
        self._noted: set[tuple[int, int, int, int, bool]] = set()

    def known(self, tensor: Tensor) -> bool:
        """Whether a tensor's memory is known already."""
        return tensor.untyped_storage()._cdata in self._live

    def is_host(self, tensor: Tensor) -> bool:
        """Whether a tensor is in host memory that the device copies from or to."""
        storage = self._live.get(tensor.untyped_storage()._cdata)
        return storage is not None and storage.is_host

    def name(self, tensor: Tensor, name: str) -> None:
        """Give a name to the bytes of a tensor."""
        begin, end = _bytes_of(tensor)
        if end > begin:
            part = (begin, end, name)
            self.trace.parts.setdefault(self._storage_of(tensor).number, []).append(part)

    def made_on_host(self, memory: Tensor) -> None:
        """Note new host memory that the device copies from or to."""
        number = self._number(f"host memory of {memory.nbytes:,} bytes")
        self._follow(memory, _Storage(number=number, owner=HOST, is_host=True))

    def allocated(self, tensor: Tensor, actor: str) -> None:
        """Note new memory for a stream, allocated after all work that the stream has by now."""
        trace = self.trace
        shape = "x".join(map(str, tensor.shape)) or "1"
        made = f"{shape} {str(tensor.dtype).removeprefix('torch.')} made by {trace.task}"
        storage = _Storage(
            number=self._number(made),
            owner=actor,
            made_at=trace.reached(actor),
            made=trace.task,
            is_host=actor == HOST,
        )
        self._follow(tensor, storage)

    def touched(self, tensor: Tensor, stretch: int, *, writes: bool, operator: str) -> None:
        """Note that an operator of a stretch reads or writes a tensor."""
        begin, end = _bytes_of(tensor)
        storage = self._storage_of(tensor)
        key = (stretch, storage.number, begin, end, writes)
        if key in self._noted or begin == end:
            return
        self._noted.add(key)
        trace = self.trace
        access = Access(stretch, storage.number, begin, end, writes, operator, trace.task)
        trace.accesses.append(access)
        self._check_allocation(storage, access)
        storage.users[trace.stretches[stretch].actor] = access

    def _storage_of(self, tensor: Tensor) -> _Storage:
        """A tensor's storage; a storage from before the trace has no owner."""
        storage = self._live.get(tensor.untyped_storage()._cdata)
        if storage is None:
            storage = _Storage(number=self._number("memory of before"), owner=None)
            self._follow(tensor, storage)
        return storage

    def _check_allocation(self, storage: _Storage, access: Access) -> None:
        actor = self.trace.stretches[access.stretch].actor
        is_first = actor != storage.owner and actor not in storage.users
        if is_first and not storage.is_host and storage.made_at is not None:
            self.trace.needs.append(
                Need(
                    earlier=storage.made_at,
                    later=access.stretch,
                    kind="used before allocated",
                    first=Deed(storage.made, str(storage.owner), "allocates it"),
                    second=access,
                    memory=access,
                )
            )

    def _follow(self, tensor: Tensor, storage: _Storage) -> None:
        memory = tensor.untyped_storage()
        key = memory._cdata

        def ended(_: object) -> None:
            if self._live.get(key) is storage:
                del self._live[key]
                self._check_end(storage)

        storage.watch = weakref.ref(memory, ended)
        self._live[key] = storage

    def _check_end(self, storage: _Storage) -> None:
        trace, owner = self.trace, storage.owner
        others = [access for actor, access in storage.users.items() if actor != owner]
        if owner is None or not others:
            return
        end = trace.moment(owner, HOST)
        for access in others:
            trace.needs.append(
                Need(
                    earlier=access.stretch,
                    later=end,
                    kind="freed while used",
                    first=access,
                    second=Deed(trace.task, owner, "may use it again: the last tensor is gone"),
                    memory=access,
                )
            )

    def _number(self, name: str) -> int:
        self.trace.storages.append(name)
        return len(self.trace.storages) - 1


def _bytes_of(tensor: Tensor) -> tuple[int, int]:
    """The bytes in its storage at which a tensor begins and ends."""
    begin = int(tensor.storage_offset()) * tensor.element_size()
    if tensor.numel() == 0:
        return begin, begin
    if tensor.is_contiguous():
        return begin, begin + int(tensor.nbytes)
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.element_size()
