"""Counts the operations and bytes of running operators, in the same way as layer graphs do."""

from typing import Any

from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from runtime.tracing.operators import Call, flop_of, read_bytes, written_bytes


class WorkCounter(TorchDispatchMode):
    """A dispatch mode that sums operations, and bytes read and written, of all operators."""

    def __init__(self) -> None:
        super().__init__()
        self.flop = 0
        self.moved_bytes = 0

    def __torch_dispatch__(
        self,
        operator: OpOverload,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operator, and count it unless it only makes a view."""
        result = operator(*args, **(kwargs or {}))
        call = Call(operator, args, kwargs or {}, result)
        if call.works:
            self.flop += flop_of(call)
            self.moved_bytes += read_bytes(call) + written_bytes(call)
        return result
