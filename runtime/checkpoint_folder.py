"""Finds the checkpoints in a folder; a complete checkpoint is a folder called ``step-N``."""

import re
from pathlib import Path

_NAME = re.compile(r"step-(\d+)")


def checkpoint_path(folder: Path, steps: int) -> Path:
    """The path of the checkpoint after ``steps`` steps."""
    return folder / f"step-{steps}"


def complete(folder: Path) -> list[Path]:
    """The paths of all complete checkpoints, the newest first."""
    steps = [
        (int(match[1]), path)
        for path in (folder.iterdir() if folder.is_dir() else ())
        if (match := _NAME.fullmatch(path.name))
    ]
    return [path for _, path in sorted(steps, reverse=True)]


def latest(folder: Path) -> Path | None:
    """The path of the newest complete checkpoint, if there is one."""
    return next(iter(complete(folder)), None)
