"""The interface to the functions of ``torch.distributed`` that groups of processes call.

Through this interface, a check can run the groups' own code on a library that only records calls.
``torch.distributed`` itself needs the other processes and, for NCCL, their GPUs.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol, final

from torch import Tensor, distributed

# The most multiprocessors that messages between stages occupy. NCCL's default may take 32, and a
# receive that is posted early is a kernel that spins while others compute.
LINK_CTAS = 4


class Work(Protocol):
    """A running asynchronous call of ``torch.distributed``."""

    def wait(self) -> Any:
        """With NCCL, let the current stream wait for the end of the call; with gloo, block until
        the end.
        """


class Library(Protocol):
    """The part of ``torch.distributed`` that groups of ranks use, with its names and arguments."""

    def new_group(
        self, ranks: Any, timeout: Any = None, *, pg_options: Any = None, group_desc: Any = None
    ) -> Any:
        """Create a group of some processes; all processes must call this."""

    def world(self) -> Any:
        """The group of all processes of the run."""

    def link_options(self) -> Any:
        """The options for a group of neighbouring pipeline stages; None if the backend has none."""

    def get_process_group_ranks(self, group: Any) -> list[int]:
        """The global ranks of a group's processes."""

    def get_backend(self, group: Any) -> str:
        """The name of a group's backend, such as nccl."""

    def all_reduce(
        self, tensor: Tensor, op: Any = ..., group: Any = None, async_op: bool = False
    ) -> Work | None:
        """Reduce over the group, in place; without ``async_op`` it runs on the current stream."""

    def all_gather_single(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> Work | None:
        """Gather the tensors of all ranks of the group, concatenated."""

    def reduce_scatter_single(
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002 (torch's name)
        op: Any = ...,
        group: Any = None,
        async_op: bool = False,
    ) -> Work | None:
        """Reduce-scatter: sum ``input`` over the group, and write this rank's part to
        ``output``.
        """

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002 (torch's name)
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        group: Any = None,
        async_op: bool = False,
    ) -> Work | None:
        """Send each rank its rows of ``input``, and receive in ``output`` the rows for this
        rank.
        """

    def message(self, *, is_sent: bool, tensor: Tensor, peer: int, group: Any) -> Any:
        """A message (a send or a receive) to or from a global rank, for ``batch_isend_irecv``."""

    def batch_isend_irecv(self, p2p_op_list: list[Any]) -> Sequence[Work]:
        """Send and receive messages as one batch; NCCL does so on its own stream."""


@final
class TorchLibrary:
    """The interface ``Library``, implemented by ``torch.distributed``."""

    new_group = staticmethod(distributed.new_group)
    get_process_group_ranks = staticmethod(distributed.get_process_group_ranks)
    get_backend = staticmethod(distributed.get_backend)
    all_reduce = staticmethod(distributed.all_reduce)
    # Torch 2.13 renamed these functions and warns about the old names, which are the only names in
    # torch 2.11.
    all_gather_single = staticmethod(
        getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
    )
    reduce_scatter_single = staticmethod(
        getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor
    )
    all_to_all_single = staticmethod(distributed.all_to_all_single)
    batch_isend_irecv = staticmethod(distributed.batch_isend_irecv)

    def world(self) -> distributed.ProcessGroup:
        """The group of all processes, which exists once they are connected."""
        group = distributed.group.WORLD
        assert group is not None
        return group

    def link_options(self) -> Any:
        """NCCL's options that limit the multiprocessors of messages between stages; None with
        gloo.
        """
        if distributed.get_backend() != "nccl":
            return None
        options = distributed.ProcessGroupNCCL.Options()
        options.config.max_ctas = LINK_CTAS
        return options

    def message(
        self, *, is_sent: bool, tensor: Tensor, peer: int, group: distributed.ProcessGroup
    ) -> distributed.P2POp:
        """A message (a send or a receive) for ``batch_isend_irecv``."""
        call = distributed.isend if is_sent else distributed.irecv
        return distributed.P2POp(call, tensor, peer, group)


def with_timeout(options: Any, timeout: timedelta) -> Any:
    """NCCL's options for a group with the group's timeout, without which torch warns; None for
    other backends.
    """
    if options is not None:
        options._timeout = timeout
    return options


TORCH: Library = TorchLibrary()
