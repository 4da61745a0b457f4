"""Which version of the project a process has: answers of different versions must not mix.

``told`` may be sent by value to a machine that has another version of this project, or none. So it
imports only what every Python has, and answers in plain texts.
"""

from collections.abc import Mapping
from functools import cache

from mistlab.core.values import InputError

# What must be equal, by the word for it.
Version = Mapping[str, str]


class OtherVersionError(InputError):
    """A worker has another version than the process that gives it work."""


def told() -> dict[str, str]:
    """The versions of mistlab, Python and NumPy of this process, and a hash of the sources that
    decide what a search answers."""
    import hashlib  # noqa: PLC0415 (sent by value, with its imports)
    import importlib.metadata  # noqa: PLC0415
    import importlib.util  # noqa: PLC0415
    import pathlib  # noqa: PLC0415
    import platform  # noqa: PLC0415

    found = {"python": platform.python_version()}
    for package in ("mistlab", "numpy"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    digest = hashlib.sha256()
    for package in ("mistlab", "simulators", "searchers", "experiments"):
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            for path in sorted(pathlib.Path(folder).rglob("*")):
                if path.suffix in (".py", ".yaml", ".json"):
                    digest.update(f"{package}/{path.relative_to(folder)}".encode())
                    digest.update(path.read_bytes())
    return {**found, "sources": digest.hexdigest()[:12]}


@cache
def here() -> Version:
    """The version of this process."""
    return told()


def check_equal(worker: str, theirs: Version, ours: Version) -> None:
    """Refuse a worker of another version."""
    other = [
        f"{name} {theirs.get(name)} instead of {version}"
        for name, version in ours.items()
        if theirs.get(name) != version
    ]
    if other:
        message = (
            f"worker {worker} has {', '.join(other)}: install there what is here, since answers "
            "of two versions do not belong in one table"
        )
        raise OtherVersionError(message)
