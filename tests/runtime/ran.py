"""The operators that run while a mode is entered."""

from typing import Any

from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode


class Ran(TorchDispatchMode):
    """Notes which operators run, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[OpOverload] = []

    def __torch_dispatch__(
        self, operator: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.operators.append(operator)
        return operator(*args, **(kwargs or {}))

    @property
    def names(self) -> list[str]:
        """Their names without overloads, as ``aten::mm``."""
        return [one._schema.name for one in self.operators]
