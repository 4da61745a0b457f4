"""A report's folder as one file, to carry: written after each call, and begun from elsewhere."""

import zipfile
from collections.abc import Iterator
from pathlib import Path

from experiments.cli.commandline import progress, writable
from mistlab.core.values import InputError

NAME = "report.zip"
# What a folder holds, by its parts; all that is not measured can be made again from what is.
MEASURED = ("runs.jsonl", "tables/*.csv", "tables/*.yaml")
MADE = ("plans/*.yaml", "*.yaml", "runs.csv", "README.md", "*.svg")


def pack(folder: Path) -> Path:
    """Write everything into one file of the folder, whole or not at all."""
    path = folder / NAME
    unfinished = path.with_suffix(".part")
    with zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED) as file:
        for one in _files(folder):
            file.write(one, one.relative_to(folder).as_posix())
    unfinished.replace(path)
    return path


def begin(folder: Path, path: Path | None) -> None:
    """Let a folder begin from a packed report, or from the one in it; one that has begun goes on as
    it is."""
    has_begun = any(True for pattern in MEASURED for _ in folder.glob(pattern))
    if has_begun and path is not None:
        progress(f"{folder}: has begun already: {path} is not read")
    elif path is not None or (not has_begun and (folder / NAME).exists()):
        _unpack(path or folder / NAME, folder)


def _unpack(path: Path, folder: Path) -> None:
    try:
        with zipfile.ZipFile(path) as file:
            known = {name: file.read(name) for name in file.namelist() if _is_known(name)}
    except (zipfile.BadZipFile, zipfile.LargeZipFile) as error:
        message = f"{path}: is no packed report ({error}): give the report.zip of a folder"
        raise InputError(message) from None
    except OSError as error:
        message = f"{path}: {error.strerror}: give the report.zip of a folder"
        raise InputError(message) from None
    if not known:
        message = f"{path}: has nothing of a report: give the report.zip of a folder"
        raise InputError(message)
    for name, content in known.items():
        writable(folder / name, "folder").write_bytes(content)
    progress(f"{folder}: going on from {path}")


def _files(folder: Path) -> Iterator[Path]:
    for pattern in (*MEASURED, *MADE):
        yield from sorted(one for one in folder.glob(pattern) if one.is_file())


def _is_known(name: str) -> bool:
    """Whether a report has a file of that name, so that nothing is written elsewhere."""
    path = Path(name)
    parts = len(path.parts)
    return ".." not in path.parts and any(
        path.match(pattern) and parts == pattern.count("/") + 1 for pattern in (*MEASURED, *MADE)
    )
