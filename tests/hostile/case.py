"""A hostile input: a command line and the files beside it, and what its answer must say."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Things that stand in a file's place: their content is a word of this table.
FOLDER, LOOP, ENDLESS, FULL = "folder", "loop", "endless", "full"
Content = bytes | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One call of a command. It is counted in its ``kind``; ``about`` says what is hostile.

    ``files`` lie in the folder in which the command runs: bytes are content, texts what stands in a
    file's place. ``echo`` has what an answer must say of its input, by key. A case that ``must``
    end with exit status 2 has a command whose honest work takes longer than a case may.
    """

    command: str
    kind: str
    about: str
    arguments: Sequence[str]
    files: Mapping[str, Content] = field(default_factory=dict)
    echo: Mapping[str, Any] = field(default_factory=dict)
    must_refuse: bool = False

    def lay_out(self, folder: Path) -> None:
        """Make the files of the case in a folder."""
        for name, content in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, bytes):
                path.write_bytes(content)
            elif content == FOLDER:
                path.mkdir(exist_ok=True)
            else:
                target = {LOOP: path, ENDLESS: "/dev/zero", FULL: "/dev/full"}[content]
                path.symlink_to(target)
