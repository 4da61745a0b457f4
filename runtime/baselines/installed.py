"""Whether a framework is installed at the version that this package knows."""

from importlib.metadata import PackageNotFoundError, version

from mistlab.values.errors import InputError


def check_installed(package: str) -> None:
    """Refuse to go on without a distribution, such as ``deepspeed==0.19.8``, at that version."""
    name, _, wanted = package.partition("==")
    try:
        found = version(name)
    except PackageNotFoundError:
        message = f"{name} is not installed, and this needs it: pip install {package}"
        raise InputError(message) from None
    if found != wanted:
        message = f"{name} {found} is installed, and this knows {wanted}: pip install {package}"
        raise InputError(message)
