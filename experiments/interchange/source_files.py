"""Finds launch files on disk: the file at a path, and the files that it refers to."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from mistlab.core.files import text_in
from mistlab.core.values import InputError, reject
from mistlab.formats.file_formats import format_of
from mistlab.shell.session import LaunchFile

MOST_BYTES = 4_000_000
# The number of folders above a script in which its references are looked up: scripts are often
# started from the root of their repository.
_FOLDERS_ABOVE = 4
# The largest number of files in a folder that are examined.
_MOST_FILES = 500
_ENDINGS = (".sh", ".bash", ".slurm", ".sbatch", ".json", ".toml", ".yaml", ".yml", ".py")


def source_of(
    path: Path,
    settings: Sequence[str] = (),
    arguments: Sequence[str] | None = None,
    line: int | None = None,
) -> LaunchFile:
    """The file at a path, or the only launch file in a folder, as a source to import a plan
    from.
    """
    if path.is_dir():
        path = _only_launch_file(path)
    return LaunchFile(
        text=text_of(path),
        name=str(path),
        beside=_beside(path),
        settings=_settings(settings),
        arguments=None if arguments is None else tuple(arguments),
        line=line,
    )


def text_of(path: Path) -> str:
    """The text of a file; refuses a file that cannot be read."""
    if path.is_file() and path.stat().st_size > MOST_BYTES:
        reject(f"is larger than {MOST_BYTES:,} bytes: give a launch script or configuration")
    return text_in(path)


def _settings(texts: Sequence[str]) -> Mapping[str, str]:
    settings = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            reject(f"--set {text}: is not an assignment: give a variable's value, such as NNODES=4")
        settings[name] = value
    return settings


def _beside(path: Path) -> Callable[[str], str | None]:
    """A function that finds a file to which the file at ``path`` refers, and returns its text. It
    looks relative to the folder of ``path``, to the folders above, and to the working directory.
    For an absolute path on the author's machine, at least the last folder and the file name must
    match.
    """
    folders = [path.absolute().parent, *list(path.absolute().parents)[1 : _FOLDERS_ABOVE + 1]]

    def text(reference: str) -> str | None:
        for ending in _endings(reference):
            for folder in (*folders, Path()):
                try:
                    candidate = folder / ending
                    if candidate.is_file() and candidate.stat().st_size <= MOST_BYTES:
                        return text_in(candidate)
                except (InputError, OSError, ValueError):
                    continue
        return None

    return text


def _endings(reference: str) -> list[str]:
    """The endings of a path under which its file is looked up: the path itself; for an absolute
    path, also every shorter ending that still has a folder and a file name.
    """
    parts = reference.split("/")
    longer = range(1, len(parts) - 1) if reference.startswith("/") else ()
    return [reference, *("/".join(parts[start:]) for start in longer)]


def _only_launch_file(folder: Path) -> Path:
    """The file of a folder that launches the training: the only one to which no other file
    refers.
    """
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in _ENDINGS)
    texts = {}
    for path in files[:_MOST_FILES]:
        try:
            text = text_of(path)
            format_of(LaunchFile(text=text, name=str(path)))
        except InputError:
            continue
        texts[path] = text
    first = [
        path
        for path in texts
        if not any(path.name in text for other, text in texts.items() if other != path)
    ]
    if len(first) == 1:
        return first[0]
    if not first:
        reject(
            f"{folder}: none of the files in this folder is a launch file of a known format: give "
            "the path of a launch script or configuration"
        )
    names = ", ".join(str(path.relative_to(folder)) for path in first[:8])
    more = f" and {len(first) - 8} more" if len(first) > 8 else ""
    message = f"{folder}: holds {len(first)} launch files ({names}{more}): give one of them"
    raise InputError(message)
