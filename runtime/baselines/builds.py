"""Checks what baselines need: installed packages, and no interrupted build of a torch extension,
which would block new builds.
"""

import os
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from mistlab.core.values import reject

# Finds interrupted builds of torch extensions, for which the next build would wait forever.
#
# DeepSpeed compiles its optimizers on first use. A build holds a lock file, which remains if the
# build is killed, and other builds wait for the file to disappear.


def check_builds(environment: Mapping[str, str] = os.environ) -> None:
    """Raise an error if a lock file of a build exists."""
    folder = environment.get("TORCH_EXTENSIONS_DIR")
    root = Path(folder) if folder else Path.home() / ".cache" / "torch_extensions"
    locks = sorted(lock for depth in ("*", "*/*") for lock in root.glob(f"{depth}/lock"))
    if locks:
        reject(
            f"{locks[0]}: a compilation was interrupted, and DeepSpeed would wait for it for ever: "
            f"delete {locks[0].parent}, unless another process compiles there just now"
        )


# Packages that Megatron-core usually runs with, for layers and kernels.
TRANSFORMER_ENGINE = "transformer_engine"
FUSED_GRADIENTS = "fused_weight_gradient_mlp_cuda"


def has_package(name: str) -> bool:
    """Whether a package can be imported."""
    return find_spec(name) is not None


# Checks that a framework is installed in the version that this package knows.


def check_installed(package: str) -> None:
    """Raise an error unless a package is installed in a given version, such as
    ``deepspeed==0.19.8``.
    """
    name, _, wanted = package.partition("==")
    try:
        installed = version(name)
    except PackageNotFoundError:
        reject(f"{name} is not installed, and this command needs it: pip install {package}")
    if installed != wanted:
        reject(
            f"{name} {installed} is installed, and this command supports only {wanted}: pip "
            f"install {package}"
        )
