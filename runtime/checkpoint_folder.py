"""A folder of checkpoints: which there are. One that is complete is called ``step-N``."""

import re
from pathlib import Path

_NAME = re.compile(r"step-(\d+)")


def checkpoint_path(folder: Path, steps: int) -> Path:
    """The checkpoint after so many steps."""
    return folder / f"step-{steps}"


def complete(folder: Path) -> list[Path]:
    """All complete checkpoints, the newest first."""
    steps = [
        (int(match[1]), path)
        for path in (folder.iterdir() if folder.is_dir() else ())
        if (match := _NAME.fullmatch(path.name))
    ]
    return [path for _, path in sorted(steps, reverse=True)]


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint, if there is one."""
    return next(iter(complete(folder)), None)
