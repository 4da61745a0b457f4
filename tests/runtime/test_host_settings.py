"""What a rank sets for its process unless the user has: threads, connections, urgent streams."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from experiments import run_plan  # noqa: E402
from experiments.cli.commandline import WRONG_USAGE, run  # noqa: E402
from runtime.devices.cuda import CONNECTIONS, SETTINGS, CudaDriver  # noqa: E402
from runtime.threads import (  # noqa: E402
    allowed_cores,
    cores_of_device,
    share,
    with_share,
)
from tests.sweep import sweep  # noqa: E402

ROOT = Path(__file__).parents[2]
EIGHT = {"LOCAL_WORLD_SIZE": "8"}


def test_ranks_of_a_node_share_its_cores() -> None:
    def cores(own: int, node: int) -> int | None:
        return share(EIGHT, is_given=False, own_cores=own, node_cores=node)

    assert cores(128, 128) == 16
    assert cores(7, 7) == 1
    # Bound to a part of the node, a rank still has no more than its share, or than that part.
    assert cores(64, 128) == 16
    assert cores(4, 128) == 4


def test_one_rank_and_a_number_that_is_given_are_left_alone() -> None:
    cores = {"own_cores": 8, "node_cores": 8}
    assert share({}, is_given=False, **cores) is None
    assert share({"LOCAL_WORLD_SIZE": "1"}, is_given=False, **cores) is None
    assert share(EIGHT, is_given=True, **cores) is None


def test_each_device_of_a_cpu_has_cores_of_its_own() -> None:
    assert [cores_of_device(place, 2, {7, 5, 3, 1}) for place in range(2)] == [[1, 3], [5, 7]]
    # With too few cores, devices share them.
    assert [cores_of_device(place, 1, {4}) for place in range(2)] == [[4], [4]]


def test_a_rank_that_stands_in_for_a_gpu_stays_on_its_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, threads = allowed_cores(), torch.get_num_threads()
    monkeypatch.setenv("LOCAL_RANK", str(len(before) - 1))
    with with_share(1):
        assert allowed_cores() == {max(before)}
        assert torch.get_num_threads() == 1
    assert (allowed_cores(), torch.get_num_threads()) == (before, threads)


# As torchrun does: it sets the variable for its ranks after it has started, if it has none.
LAUNCHER = """
import os, subprocess, sys
os.environ.setdefault("OMP_NUM_THREADS", "1")
rank = "import os, torch; from runtime.threads import with_share; before = torch.get_num_threads()"
rank += "; os.sched_getaffinity = lambda _: range(8); share = with_share(); share.__enter__()"
rank += "; print(before, torch.get_num_threads())"
world = {"LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "some"}
subprocess.run([sys.executable, "-c", rank], env={**os.environ, **world}, check=True)
"""


@pytest.mark.parametrize(
    ("given", "threads"), sweep([(None, "1 4"), ("1", "1 1"), ("2", "2 2")], first=1)
)
def test_a_number_that_torchrun_has_set_is_not_the_users(given: str | None, threads: str) -> None:
    environment = {name: said for name, said in os.environ.items() if name != "OMP_NUM_THREADS"}
    if given is not None:
        environment["OMP_NUM_THREADS"] = given
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHER],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == threads


def test_cuda_starts_with_a_queue_for_each_stream_and_urgent_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCH_NCCL_HIGH_PRIORITY", "0")
    CudaDriver().count()
    assert os.environ[CONNECTIONS] == "32"
    assert os.environ["TORCH_NCCL_HIGH_PRIORITY"] == "0"


@pytest.mark.parametrize(("given", "is_told"), [("8", True), ("32", False), ("many", False)])
def test_too_few_queues_of_the_users_own_are_told(
    given: str, is_told: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(CONNECTIONS, given)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run(run_plan.main, ["--device", "cuda"]) == WRONG_USAGE
    assert ("warning: CUDA_DEVICE_MAX_CONNECTIONS=8" in capsys.readouterr().err) == is_told
