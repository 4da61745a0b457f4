"""Checks by dry runs of pip whether pinned packages install on other Pythons and platforms.

    make pins                    # Linux on x86-64, each Python that requires-python admits
    make pins ARGS=--everywhere  # Linux on ARM, macOS and Windows too

Of its configuration pip uses only how to reach the package index: no folder of wheels and no second
index, which another machine would lack. It downloads no wheel: it reads a wheel's metadata as a
file where the index offers one, elsewhere (``fast-deps``) from the last bytes of the wheel, by
range requests.

``--python-version`` and ``--platform`` choose wheels, but pip would still evaluate environment
markers for this machine, so the script ``MARKERS`` runs pip with those of the other machine.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.specifiers import SpecifierSet
from pip._vendor.packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PINS = ROOT / "constraints.txt"
CONTAINERFILE = ROOT / "Containerfile"
MAKEFILE = ROOT / "Makefile"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
INSTALLS = (
    *("base", "dev", "runtime", "kernels", "huggingface", "cluster", "cbc", "megatron"),
    *("agents", "docs", "images", "page", "pandas"),
)
# Extras whose packages are compiled on the machine that trains, for its CUDA; they have no pins.
UNPINNED = ("flash", "baselines")
# Extras that may be added to the Containerfile's image, whose torch is not the pinned version.
ADDED_TO_IMAGE = ("base", "runtime", "kernels", "megatron")
SIZED = ("base", "dev", "runtime")
SHOWN = ("numpy", "torch", "triton", "ray", "transformers", "megatron-core")
# The share by which a download size in the Makefile may be wrong: it has one decimal, and platforms
# differ.
NEAR = 0.2
# The settings of pip by which it reaches its package index; a check uses no other settings of this
# machine.
REACHING = (
    "index-url",
    "cert",
    "client-cert",
    "proxy",
    "timeout",
    "default-timeout",
    "trusted-host",
)
MARKERS = """
import json, sys
from functools import cache
from pip._internal.cli.main import main
from pip._internal.models.link import Link
from pip._internal.network.lazy_wheel import LazyZipOverHTTP
from pip._vendor.packaging import markers
from pip._vendor.packaging.utils import canonicalize_name, canonicalize_version
here = markers.default_environment()
other = {**here, **json.loads(sys.argv.pop(1))}
markers.default_environment = lambda: dict(other)
# A wheel's list of files in two requests rather than a dozen.
LazyZipOverHTTP.__init__.__defaults__ = (100_000,)
# The index lists a thousand files for most packages. The constraint would leave those of a version.
canonical, version = cache(canonicalize_name), cache(canonicalize_version)
pins = dict(line.split("==") for line in sys.argv.pop(1).splitlines() if "==" in line)
pinned = {canonical(name): version(pin) for name, pin in pins.items()}
from_json = Link.from_json
def link(file, *rest):
    parts = file.get("filename", "").split("-")
    pin = pinned.get(canonical(parts[0]))
    if pin is None or len(parts) < 2 or version(parts[1]) == pin:
        return from_json(file, *rest)
Link.from_json = link
sys.exit(main())
"""


@dataclass(frozen=True, kw_only=True)
class Platform:
    """A kind of machine: the tags of the wheels that it takes, and its environment markers."""

    tags: tuple[str, ...]
    sys_platform: str
    platform_system: str
    platform_machine: str
    os_name: str = "posix"

    def markers(self, python: str) -> dict[str, str]:
        """The environment markers of a Python version on this platform."""
        return {
            "python_version": python,
            "python_full_version": f"{python}.0",
            "sys_platform": self.sys_platform,
            "platform_system": self.platform_system,
            "platform_machine": self.platform_machine,
            "os_name": self.os_name,
        }


def _linux(machine: str) -> Platform:
    """The platform of Linux with glibc 2.28 or newer, on this kind of processor."""
    tags = [*(f"manylinux_2_{minor}_{machine}" for minor in range(28, 4, -1))]
    tags += [f"{name}_{machine}" for name in ("manylinux2014", "manylinux2010", "manylinux1")]
    return Platform(
        tags=tuple(tags),
        sys_platform="linux",
        platform_system="Linux",
        platform_machine=machine,
    )


PLATFORMS: Mapping[str, Platform] = {
    "Linux x86-64": _linux("x86_64"),
    "Linux ARM": _linux("aarch64"),
    "macOS 15 on ARM": Platform(
        tags=("macosx_15_0_arm64",),
        sys_platform="darwin",
        platform_system="Darwin",
        platform_machine="arm64",
    ),
    "Windows x86-64": Platform(
        tags=("win_amd64",),
        sys_platform="win32",
        platform_system="Windows",
        platform_machine="AMD64",
        os_name="nt",
    ),
}
Package = Mapping[str, Any]


def main(arguments: Sequence[str]) -> int:
    """Print what each machine would install, or why it cannot; returns 1 if any cannot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--everywhere", action="store_true", help="all platforms")
    options = parser.parse_args(arguments)
    names = [*PLATFORMS] if options.everywhere else [next(iter(PLATFORMS))]
    machines = [(name, python) for name in names for python in admitted()]
    # Most of the time is spent waiting for the index, so several machines are checked at once.
    with ThreadPoolExecutor(4) as pool:
        lines_of = [*pool.map(lambda machine: checked(*machine), machines)]
    for lines in lines_of:
        print("\n".join(lines))  # noqa: T201
    print(f"Not pinned, as they are compiled where they are used: {', '.join(UNPINNED)}.")  # noqa: T201
    return int(any("FAILS" in line for lines in lines_of for line in lines))


def admitted() -> list[str]:
    """The Python versions that the project's ``requires-python`` allows."""
    wanted = SpecifierSet(_project()["requires-python"])
    return [python for python in PYTHONS if f"{python}.0" in wanted]


def checked(name: str, python: str) -> list[str]:
    """Lines about one platform and Python: all extras together, or one by one if they do not
    resolve; on Linux also lines about the Containerfile's image.
    """
    platform, where = PLATFORMS[name], f"{name}, Python {python}"
    in_image = [*_in_image(where, platform, python)] if platform.sys_platform == "linux" else []
    return [*_of_pins(where, platform, python), *in_image]


def _in_image(where: str, platform: Platform, python: str) -> Iterator[str]:
    """Lines about the Containerfile's image: the versions that resolve with its torch and its pins,
    or why none do.
    """
    with tempfile.TemporaryDirectory() as folder:
        pins = Path(folder, "pins.txt")
        pins.write_text("\n".join(image_pins()), encoding="utf-8")
        packages, errors = resolved(ADDED_TO_IMAGE, platform, python, pins)
    versions = {_name(package): package["metadata"]["version"] for package in packages}
    shown = ", ".join(f"{name} {versions[name]}" for name in SHOWN if name in versions)
    yield from (f"{where}: the image FAILS: {error}" for error in errors)
    if not errors:
        yield f"{where}: the image: {shown}"


def image_pins() -> list[str]:
    """The torch version of the Containerfile's image, and the pins that the Containerfile keeps."""
    text = CONTAINERFILE.read_text(encoding="utf-8")
    torch = re.findall(r"^ARG TORCH=(\S+)$", text, re.M)[0]
    left_out = re.compile(re.findall(r"grep -vE '([^']+)' constraints.txt", text)[0])
    pins = PINS.read_text(encoding="utf-8").splitlines()
    return [f"torch=={torch}", *(line for line in pins if not left_out.match(line))]


def _of_pins(where: str, platform: Platform, python: str) -> list[str]:
    """Lines about installing all extras together, or one by one if together they do not resolve."""
    packages, errors = resolved(INSTALLS, platform, python)
    if not errors:
        told = _told(where, packages, platform.markers(python))
        return [*told, *_unpinned(where, packages)]
    lines = []
    for install in INSTALLS:
        packages, errors = resolved([install], platform, python)
        lines += [f"{where}: {install} FAILS: {error}" for error in errors]
        lines += _unpinned(where, packages)
    return lines or [f"{where}: each install resolves; together they FAIL: {errors}"]


def resolved(
    installs: Sequence[str], platform: Platform, python: str, pins: Path = PINS
) -> tuple[list[Package], list[str]]:
    """The packages that pip would install under some pins, and its errors if it cannot."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [sys.executable, "-c", MARKERS, json.dumps(platform.markers(python))]
        command += [pins.read_text(encoding="utf-8"), "install"]
        command += ["--dry-run", "--ignore-installed", "--target", str(Path(folder, "target"))]
        command += ["--python-version", python, "--only-binary=:all:", "--use-feature=fast-deps"]
        command += [f"--platform={tag}" for tag in platform.tags]
        command += ["--constraint", str(pins), "--report", str(report)]
        command += sorted({line for install in installs for line in requirements(install)})
        done = subprocess.run(
            command, env=reaching(), capture_output=True, text=True, check=False, timeout=600
        )
        if done.returncode == 0:
            return json.loads(report.read_text(encoding="utf-8"))["install"], []
    _, _, causes = done.stdout.partition("The conflict is caused by:")
    lines = causes.partition("To fix this")[0].splitlines() or done.stderr.splitlines()[-4:]
    return [], [line.strip() for line in lines if line.strip()]


def requirements(install: str) -> list[str]:
    """The requirements of an extra, together with those of the project; ``base`` is the project
    alone.
    """
    project = _project()
    extra = [] if install == "base" else project["optional-dependencies"][install]
    return [*project["dependencies"], *extra]


def reaching(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Environment variables with which pip uses nothing of its configuration but how to reach its
    index.
    """
    command = [sys.executable, "-m", "pip", "config", "list"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**environment})
    settings: dict[str, str] = {}
    for line in done.stdout.splitlines():
        key, _, value = line.partition("=")
        name = key.rpartition(".")[2]
        if name in REACHING:
            settings[f"PIP_{name.upper().replace('-', '_')}"] = value.strip("'\"")
    others = {key: value for key, value in environment.items() if not key.startswith("PIP_")}
    return {**others, **settings, "PIP_CONFIG_FILE": os.devnull}


def _told(where: str, packages: Sequence[Package], markers: Mapping[str, str]) -> Iterator[str]:
    """A line with the number of wheels, download sizes and important versions, and a line with an
    error if the Makefile's download size is wrong.
    """
    versions = {_name(package): package["metadata"]["version"] for package in packages}
    shown = [f"{name} {versions[name]}" for name in SHOWN if name in versions]
    gb = {install: _gb(requirements(install), packages, markers) for install in SIZED}
    sizes = [f"{install} {size:.2f} GB" for install, size in gb.items()]
    yield f"{where}: {len(packages)} wheels ({', '.join(sizes)}): {', '.join(shown)}"
    figure = "GB_WITH_CUDA" if "nvidia-cudnn-cu13" in versions else "GB_WITHOUT"
    promised = float(re.findall(rf"^{figure} := (.*)$", MAKEFILE.read_text(), re.M)[0])
    if abs(gb["dev"] - promised) > NEAR * promised:
        yield f"{where}: FAILS: {figure} of the Makefile is {promised}, not {gb['dev']:.2f}"


def _gb(asked: Sequence[str], packages: Sequence[Package], markers: Mapping[str, str]) -> float:
    names = reached(asked, packages, markers)
    urls = [package["download_info"]["url"] for package in packages if _name(package) in names]
    return sum(map(_bytes, urls)) / 1e9


def reached(
    asked: Sequence[str], packages: Sequence[Package], markers: Mapping[str, str]
) -> set[str]:
    """The names of all packages that the requirements need, directly or through one another."""
    metadata = {_name(package): package["metadata"] for package in packages}
    waiting = [(Requirement(line), "") for line in asked]
    seen: set[tuple[str, str]] = set()
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker and not requirement.marker.evaluate({**markers, "extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        for wanted in ("", *requirement.extras):
            if name in metadata and (name, wanted) not in seen:
                seen.add((name, wanted))
                lines = metadata[name].get("requires_dist", ())
                waiting += [(Requirement(line), wanted) for line in lines]
    return {name for name, _ in seen}


def _unpinned(where: str, packages: Sequence[Package]) -> Iterator[str]:
    """Lines with errors about packages without a pin, of which the newest version would be
    installed.
    """
    pinned = {
        canonicalize_name(name) for name in re.findall(r"^([\w.-]+)==", PINS.read_text(), re.M)
    }
    for name in sorted(set(map(_name, packages)) - pinned):
        yield f"{where}: FAILS: {name} is in no line of {PINS.name}"


def _name(package: Package) -> str:
    return canonicalize_name(package["metadata"]["name"])


@cache
def _bytes(url: str) -> int:
    request = urllib.request.Request(url, method="HEAD")
    with urllib.request.urlopen(request, timeout=60) as answer:
        return int(answer.headers["Content-Length"])


def _project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]  # type: ignore[no-any-return]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
