"""Finds compilations of torch extensions that were interrupted: the next one would wait for ever.

DeepSpeed compiles its optimizers when they are first used. A compilation holds a lock file, which
stays where the compilation is killed, and others wait for the file to go.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from mistlab.values.errors import InputError


def check_builds(environment: Mapping[str, str] = os.environ) -> None:
    """Refuse to go on while a lock file of a compilation is there."""
    said = environment.get("TORCH_EXTENSIONS_DIR")
    root = Path(said) if said else Path.home() / ".cache" / "torch_extensions"
    locks = sorted(lock for depth in ("*", "*/*") for lock in root.glob(f"{depth}/lock"))
    if locks:
        message = (
            f"{locks[0]}: a compilation was interrupted, and DeepSpeed would wait for it for ever: "
            f"delete {locks[0].parent}, unless another process compiles there just now"
        )
        raise InputError(message)
