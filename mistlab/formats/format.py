"""A format of launch files: how its files are recognised, and how they become a job."""

from collections.abc import Callable
from dataclasses import dataclass

from mistlab.export.given import Given, Imported
from mistlab.shell.source import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A kind of file that launches or configures training.

    ``name`` is the word for ``--format``, ``title`` the framework's name. ``recognises`` tells
    whether a text is of this format by the format's own keys. ``read`` gives the job of a text.
    ``target`` is the export target (``mistlab.export.table.TARGETS``) whose engines stand for the
    framework.
    """

    name: str
    title: str
    recognises: Callable[[Source], bool]
    read: Callable[[Source, Given], Imported]
    target: str
