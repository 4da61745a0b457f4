"""Exports are taken by the frameworks' own classes, at the versions that are known here."""

import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

import pytest

from mistlab.core.values import InputError
from mistlab.export.nearest import nearest
from mistlab.export.targets import TARGETS
from mistlab.job.job import Job
from runtime.baselines import accepted
from runtime.baselines.accepted import check_accepted
from runtime.baselines.builds import check_installed
from tests.mistlab.drawn_plans import drawn_jobs
from tests.mistlab.plans_of_today import jobs_of_today


def needs(package: str) -> None:
    """Leave a test out where a framework is not there."""
    name, _, wanted = package.partition("==")
    remedy = "make extras" if name == "megatron-core" else "pip install '.[baselines]'"
    try:
        found = version(name)
    except PackageNotFoundError:
        pytest.skip(f"{name} is not installed: {remedy}")
    if found != wanted:
        pytest.skip(f"{name} {found} is installed, not {wanted}: {remedy}")


# Quick CI has Megatron-core; the others compile on the machine that trains.
FRAMEWORKS = [
    name if name == "megatron" else pytest.param(name, marks=pytest.mark.slow) for name in TARGETS
]


def text_of(name: str, job: Job) -> tuple[str, Job]:
    found = nearest(job, TARGETS[name]).job
    return TARGETS[name].write(found), found


@pytest.fixture(autouse=True)
def _one_distutils(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron-core imports setuptools, which puts its own distutils in the place of Python's, and
    fails where other tests of this process have been looking for modules in ways of their own."""
    if sys.version_info < (3, 12):
        monkeypatch.setenv("SETUPTOOLS_USE_DISTUTILS", "stdlib")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_framework_takes_every_export(name: str) -> None:
    needs(TARGETS[name].package)
    for job in drawn_jobs(12, seed=17):
        check_accepted(name, *text_of(name, job))


# A fault in each text, which its framework has to refuse.
FAULTS: dict[str, Callable[[str], str]] = {
    "megatron": lambda text: text.replace("--num-attention-heads 32", "--num-attention-heads 31"),
    "deepspeed": lambda text: text.replace('"stage": ', '"stage": 1'),
    "torchtitan": lambda text: text.replace("seq_len", "sequence_length"),
    "torchtitan-toml": lambda text: text.replace("seq_len", "sequence_length"),
    "accelerate": lambda text: text.replace("num_processes", "number_of_processes"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_framework_refuses_a_faulty_export(name: str) -> None:
    needs(TARGETS[name].package)
    (job,) = drawn_jobs(1, seed=17)
    text, found = text_of(name, job)
    faulty = FAULTS[name](text)
    assert faulty != text
    with pytest.raises(InputError, match=f"{TARGETS[name].title} refuses the exported file: "):
        check_accepted(name, faulty, found)


@pytest.mark.filterwarnings("ignore")
def test_megatron_takes_models_of_today_and_refuses_faulty_ones() -> None:
    needs(TARGETS["megatron"].package)
    for job in jobs_of_today(40, seed=7):
        text, found = text_of("megatron", job)
        check_accepted("megatron", text, found)
        if found.workload.model.experts is None:
            continue
        faulty = text.replace("--num-experts ", "--num-experts 1")
        with pytest.raises(InputError, match="Megatron-LM refuses the exported file: "):
            check_accepted("megatron", faulty, found)


def test_a_package_that_a_framework_lacks_is_told_with_its_install_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lacking(*_: object) -> None:
        version("no-such-part")

    monkeypatch.setattr(accepted, "check_installed", lambda _: None)
    monkeypatch.setattr(accepted, "_CHECKS", {"deepspeed": lacking})
    (job,) = drawn_jobs(1, seed=17)
    with pytest.raises(InputError) as missing:
        check_accepted("deepspeed", "", job)
    assert str(missing.value) == (
        "DeepSpeed needs no-such-part, which is not installed: pip install no-such-part"
    )


def test_a_framework_that_is_missing_or_another_version_is_told_with_its_install_command() -> None:
    with pytest.raises(InputError) as missing:
        check_installed("no-such-framework==1.2")
    assert str(missing.value) == (
        "no-such-framework is not installed, and this command needs it: "
        "pip install no-such-framework==1.2"
    )
    with pytest.raises(
        InputError,
        match=r"is installed, and this command supports only 0\.0\.1: pip install numpy==",
    ):
        check_installed("numpy==0.0.1")
