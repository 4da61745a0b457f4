"""Notes in a trace which bytes every running operator reads and writes, and on which stream."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from runtime.checks.races.clocked import ClockedDriver
from runtime.checks.races.memory import Memory
from runtime.checks.races.trace import HOST_LANE, Trace

# Operators that touch no bytes: they allocate, or make a view.
_UNTOUCHING = frozenset(
    f"aten::{name}"
    for name in (
        "set_",
        "empty",
        "empty_like",
        "new_empty",
        "empty_strided",
        "detach",
        "_unsafe_view",
        "lift_fresh",
    )
)
# Operators that give the host a value, so that the host comes after the current stream's work.
_ASKING = frozenset({"aten::_local_scalar_dense", "aten::item", "aten::equal", "aten::nonzero"})


class Recorder(TorchDispatchMode):
    """A mode that notes every operator in the trace."""

    def __init__(self, trace: Trace, memory: Memory, driver: ClockedDriver) -> None:
        super().__init__()
        self.trace, self.memory, self.driver = trace, memory, driver

    def __torch_dispatch__(
        self,
        operator: OpOverload,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Note the operator's uses of memory, run it, then note the memory that it has made."""
        kwargs = kwargs or {}
        name = operator._schema.name
        touches = not (operator.is_view or name in _UNTOUCHING)
        given = list(_given(operator, args, kwargs))
        actor = self._actor([tensor for tensor, _ in given], kwargs)
        stretch = self.trace.work(actor, self.driver.host) if touches else -1
        if touches:
            for tensor, writes in given:
                self.memory.touched(tensor, stretch, writes=writes, operator=name)
        result = operator(*args, **kwargs)
        for tensor in _tensors(result):
            if tensor.nbytes and not self.memory.known(tensor):
                self._note_made(tensor, actor, name, touches=touches)
        if name in _ASKING:
            self.trace.follow(self.driver.host, self.trace.reached(actor))
        return result

    def _note_made(self, tensor: Tensor, actor: str, operator: str, *, touches: bool) -> None:
        self.memory.allocated(tensor, actor)
        if touches:
            stretch = self.trace.work(actor, self.driver.host)
            self.memory.touched(tensor, stretch, writes=True, operator=operator)

    def _actor(self, tensors: list[Tensor], kwargs: Mapping[str, Any]) -> str:
        """The actor that runs an operator: the host's lane, the host or the current stream.

        The host runs an operator if all its tensors are in host memory.
        """
        if self.driver.host == HOST_LANE:
            return HOST_LANE
        is_host = bool(tensors) and all(self.memory.is_host(tensor) for tensor in tensors)
        # A factory that names a device works there, wherever the tensor is whose shape it copies.
        if is_host and kwargs.get("device") is None:
            return self.driver.host
        return self.driver.current.name


def _given(
    operator: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[Tensor, bool]]:
    """The tensors among an operator's arguments, and whether it writes to each."""
    arguments = operator._schema.arguments
    values = [*zip(args, arguments, strict=False)]
    if kwargs:
        values += [(kwargs[one.name], one) for one in arguments if one.name in kwargs]
    for value, argument in values:
        for tensor in _tensors(value):
            if tensor.untyped_storage().nbytes():
                yield tensor, argument.alias_info is not None and argument.alias_info.is_write


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in an argument or result, which is a tensor or a list of tensors."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        yield from (one for one in value if isinstance(one, Tensor))
