"""Imports SymPy only when one of its names is first used.

Importing SymPy takes longer than answering a small question. Modules that make expressions take
``sympy`` from here. If their results are kept already, SymPy is never imported.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import sympy as sympy  # noqa: PLC0414 (for others to import from here)
else:

    class _OnUse:
        """Stands for a module, and imports it when one of its names is used."""

        def __getattr__(self, name: str) -> Any:
            return getattr(import_module("sympy"), name)

    sympy = _OnUse()
