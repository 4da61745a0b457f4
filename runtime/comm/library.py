"""The calls of ``torch.distributed`` that groups of processes make, behind one interface.

So a check can run the groups' own code over a library that only notes its calls, where
``torch.distributed`` would need the other processes and, for NCCL, their GPUs.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol, final

from torch import Tensor, distributed

# Messages between stages take as many of a GPU's multiprocessors at most: what is received early is
# a kernel that spins beside computing. NCCL's own choice for a group may be 32.
LINK_CTAS = 4


class Work(Protocol):
    """A call that runs by itself."""

    def wait(self) -> Any:
        """NCCL: let the current stream wait for the call's end. Gloo: wait for it."""


class Library(Protocol):
    """The part of ``torch.distributed`` that groups use, with the names and arguments there."""

    def new_group(
        self, ranks: Any, timeout: Any = None, *, pg_options: Any = None, group_desc: Any = None
    ) -> Any:
        """A group of some processes, made by all."""

    def world(self) -> Any:
        """The group of all processes."""

    def link_options(self) -> Any:
        """The options of a group of neighbouring stages; None if the library has none."""

    def get_process_group_ranks(self, group: Any) -> list[int]:
        """The ranks of a group among all processes."""

    def get_backend(self, group: Any) -> str:
        """The name of the library behind a group."""

    def all_reduce(
        self, tensor: Tensor, op: Any = ..., group: Any = None, async_op: bool = False
    ) -> Work | None:
        """Reduce over the group, in place; a call that is not ``async_op`` runs on the current
        stream, and its end is not told."""

    def all_gather_single(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> Work | None:
        """Concatenate the group's tensors."""

    def reduce_scatter_single(
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002 (torch's name)
        op: Any = ...,
        group: Any = None,
        async_op: bool = False,
    ) -> Work | None:
        """Sum over the group, and keep this rank's part."""

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002 (torch's name)
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        group: Any = None,
        async_op: bool = False,
    ) -> Work | None:
        """Send each rank its rows of the input, and receive everybody's in the output."""

    def message(self, *, is_sent: bool, tensor: Tensor, peer: int, group: Any) -> Any:
        """A message to or from a rank of the world, for ``batch_isend_irecv``."""

    def batch_isend_irecv(self, p2p_op_list: list[Any]) -> Sequence[Work]:
        """Send and receive messages at once; NCCL does so on a stream of its own."""


@final
class TorchLibrary:
    """``torch.distributed`` itself."""

    new_group = staticmethod(distributed.new_group)
    get_process_group_ranks = staticmethod(distributed.get_process_group_ranks)
    get_backend = staticmethod(distributed.get_backend)
    all_reduce = staticmethod(distributed.all_reduce)
    # Torch 2.13 gives these functions new names, and warns of the names that 2.11 has.
    all_gather_single = staticmethod(
        getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
    )
    reduce_scatter_single = staticmethod(
        getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor
    )
    all_to_all_single = staticmethod(distributed.all_to_all_single)
    batch_isend_irecv = staticmethod(distributed.batch_isend_irecv)

    def world(self) -> distributed.ProcessGroup:
        """The group of all processes; it exists once they have joined."""
        group = distributed.group.WORLD
        assert group is not None
        return group

    def link_options(self) -> Any:
        """NCCL's options with few multiprocessors; None where gloo connects the processes."""
        if distributed.get_backend() != "nccl":
            return None
        options = distributed.ProcessGroupNCCL.Options()
        options.config.max_ctas = LINK_CTAS
        return options

    def message(
        self, *, is_sent: bool, tensor: Tensor, peer: int, group: distributed.ProcessGroup
    ) -> distributed.P2POp:
        """A message of a batch."""
        call = distributed.isend if is_sent else distributed.irecv
        return distributed.P2POp(call, tensor, peer, group)


def with_timeout(options: Any, timeout: timedelta) -> Any:
    """NCCL's options with the group's timeout, without which torch warns; None stays None."""
    if options is not None:
        options._timeout = timeout
    return options


TORCH: Library = TorchLibrary()
