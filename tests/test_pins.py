"""The check of the pins: what it takes over from a machine, and what it promises of downloads."""

import importlib.util
import os
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
pytest.importorskip("pip")


@pytest.fixture(scope="module")
def pins() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pins", ROOT / ".ci" / "pins.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_of_a_machine_s_pip_only_the_way_to_the_index_is_taken_over(
    pins: ModuleType, tmp_path: Path
) -> None:
    configured = tmp_path / "pip.conf"
    configured.write_text(
        "[global]\nfind-links = wheels\nproxy = one.invalid:1\n", encoding="utf-8"
    )
    given = {
        **os.environ,
        "PIP_CONFIG_FILE": str(configured),
        "PIP_FIND_LINKS": "wheels",
        "PIP_EXTRA_INDEX_URL": "https://two.invalid/simple",
        "PIP_INDEX_URL": "https://three.invalid/simple",
    }
    taken = {key: value for key, value in pins.reaching(given).items() if key.startswith("PIP_")}
    assert taken["PIP_INDEX_URL"] == "https://three.invalid/simple"
    assert taken["PIP_PROXY"] == "one.invalid:1"
    assert taken["PIP_CONFIG_FILE"] == os.devnull
    assert {"PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"} & taken.keys() == set()


def test_packages_are_reached_by_markers_and_extras_of_the_other_machine(pins: ModuleType) -> None:
    def package(name: str, *lines: str) -> dict[str, object]:
        return {"metadata": {"name": name, "version": "1", "requires_dist": [*lines]}}

    packages = [
        package("a", "B[x]", "c; sys_platform == 'win32'"),
        package("b", "d; extra == 'x'", "e; extra == 'y'"),
        *(package(name) for name in "cde"),
    ]
    linux, windows = (
        pins.PLATFORMS[name].markers("3.14") for name in ("Linux x86-64", "Windows x86-64")
    )
    assert pins.reached(["a"], packages, linux) == {"a", "b", "d"}
    assert pins.reached(["a"], packages, windows) == {"a", "b", "c", "d"}


def test_every_install_is_checked_or_named_as_unpinned(pins: ModuleType) -> None:
    extras = pins._project()["optional-dependencies"]
    assert {*pins.INSTALLS, *pins.UNPINNED} == {"base", *extras}
    assert pins.admitted() == ["3.11", "3.12", "3.13", "3.14"]


def test_the_image_keeps_all_pins_but_those_that_its_own_torch_makes(pins: ModuleType) -> None:
    torch, *kept = pins.image_pins()
    assert f"ARG {torch.replace('==', '=').upper()}" in pins.CONTAINERFILE.read_text("utf-8")
    names = {line.partition("==")[0] for line in kept}
    assert {"numpy", "sympy", "megatron-core"} <= names
    assert not {"torch", "triton", "cuda-toolkit", "nvidia-nccl-cu13"} & names


def test_contributors_are_promised_the_downloads_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    figures = dict(re.findall(r"^(GB_\w+) := (.*)$", makefile, re.MULTILINE))
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert f"it downloads {figures['GB_WITH_CUDA']} GB" in page
    assert f"downloads {figures['GB_CPU_BUILD']} GB" in page
    assert f"download {figures['GB_WITHOUT']} GB" in page
