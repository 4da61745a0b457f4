"""SymPy, imported when something of it is first asked for.

Importing SymPy takes longer than a small question does. Modules whose functions make expressions
take ``sympy`` from here; whoever finds their results kept never asks.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import sympy as sympy  # noqa: PLC0414 (for others to import from here)
else:

    class _OnUse:
        """A module that is imported by looking for one of its names."""

        def __getattr__(self, name: str) -> Any:
            return getattr(import_module("sympy"), name)

    sympy = _OnUse()
