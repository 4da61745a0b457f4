"""Operators that a trace records and nobody runs: collectives of ranks that are only counted."""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch


def counted(
    name: str, result: Callable[..., Any], remedy: str, *, changes: Sequence[str] = ()
) -> Callable[..., Any]:
    """The operator ``mistlab::name``, with the arguments and the result of a function.

    It writes to the arguments ``changes``. Outside of a trace it is refused, with a remedy.
    """

    def never_run(*_: object) -> NoReturn:
        message = f"a counted rank cannot run {name}: {remedy}"
        raise RuntimeError(message)

    schema = torch.library.infer_schema(result, mutates_args=changes)
    made = torch.library.custom_op(
        f"mistlab::{name}", never_run, mutates_args=changes, schema=schema
    )
    made.register_fake(result)
    return made
