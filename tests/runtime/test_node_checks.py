"""GPUs that cannot run a plan are refused, and slow ones told, before anything is allocated."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from experiments import (  # noqa: E402
    gpu_report,
    measure_speedup,
    profile_hardware,
    run_plan,
    run_plans,
    whole_loop,
)
from experiments.cli.commandline import WRONG_USAGE, run  # noqa: E402
from experiments.training import baseline_worker  # noqa: E402
from mistlab.core.files import read_yaml, write_yaml  # noqa: E402
from mistlab.core.values import InputError  # noqa: E402
from runtime import session  # noqa: E402
from runtime.comm.processes import World, device_of  # noqa: E402
from runtime.profiling import node_checks  # noqa: E402
from runtime.profiling.environment import devices_of  # noqa: E402
from runtime.profiling.node_checks import check_gpus, slow_settings  # noqa: E402
from tests.experiments.tiny_plans import plan_file  # noqa: E402
from tests.runtime.test_cuda_driver import StubCuda, cuda  # noqa: E402, F401 (a fixture)

GPUS = [torch.device("cuda", number) for number in range(4)]
A100, T4 = "NVIDIA A100-SXM4-80GB", "Tesla T4"
SLICE = f"{A100} MIG 1g.10gb"


@pytest.fixture
def node(cuda: StubCuda, monkeypatch: pytest.MonkeyPatch) -> StubCuda:  # noqa: F811 (a fixture)
    """Four equal GPUs of which nothing is taken, and NCCL."""
    cuda.answers |= {"get_device_name": A100, "mem_get_info": (79 * 2**30, 80 * 2**30)}
    cuda.answers |= {"memory_reserved": 0}
    told = {"memory.used": "600", "memory.total": "81920", "memory.free": "81320"}
    monkeypatch.setattr(node_checks, "answers_of", lambda asked, _: [told[one] for one in asked])
    monkeypatch.setattr(node_checks, "identity", lambda gpu: str(gpu.index))
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    cuda.told = told  # type: ignore[attr-defined]
    return cuda


def checked(precision: Any = "bf16", ranks: int = 4) -> None:
    check_gpus(GPUS, ranks=ranks, precision=precision, option="workload.precision")


def test_bf16_is_refused_if_one_gpu_lacks_it(node: StubCuda) -> None:
    checked()
    node.of_gpus = {("get_device_capability", 3): (7, 5), ("get_device_name", 3): T4}
    for precision in ("fp16", "fp32"):
        checked(precision)
    with pytest.raises(InputError, match=r"workload.precision: bf16, but Tesla T4 .* give fp16"):
        checked()
    assert devices_of("cuda", 3).precision == "bf16"
    assert devices_of("cuda", 4).precision == "fp16"


@pytest.mark.parametrize(
    ("capability", "cuda_version", "build"), [((7, 0), "13.0", "cu126"), ((12, 0), "12.6", "cu130")]
)
def test_a_gpu_without_kernels_is_refused_with_another_build(
    capability: tuple[int, int], cuda_version: str, build: str, node: StubCuda, monkeypatch: Any
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda_version)
    node.answers["get_arch_list"] = ["sm_75", "sm_80", "sm_90"]
    for has in ((8, 0), (8, 9), (9, 0)):
        node.answers["get_device_capability"] = has
        checked()
    node.answers["get_device_capability"] = capability
    words = ".".join(map(str, capability))
    with pytest.raises(InputError, match=rf"capability {words}, but torch .* pip .*{build}$"):
        checked("fp16")
    # An intermediate code runs on what came later, and on nothing before it.
    node.answers["get_arch_list"].append("compute_90")
    if capability > (9, 0):
        checked("fp16")
    else:
        with pytest.raises(InputError, match="has kernels only for"):
            checked("fp16")


def test_ranks_without_nccl_are_refused(node: StubCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    checked(ranks=1)
    with pytest.raises(InputError, match=r"4 ranks communicate by NCCL, .* built without it: pip"):
        checked()


def test_equal_gpus_of_ones_own_are_no_matter(node: StubCuda) -> None:
    assert [*slow_settings(4)] == []
    # A context on each GPU would take memory.
    assert "mem_get_info" not in {name for name, _, _ in node.calls}


def test_gpus_of_two_kinds_are_told_with_those_to_use(node: StubCuda) -> None:
    node.of_gpus = {("get_device_name", 1): T4}
    (told,) = slow_settings(4)
    assert told.startswith(f"GPUs of this node are of 2 kinds ({A100}: 0, 2, 3; {T4}: 1)")
    assert "CUDA_VISIBLE_DEVICES=0,2,3" in told
    assert [*slow_settings(1)] == []


def test_a_slice_of_a_gpu_is_told(node: StubCuda) -> None:
    node.answers |= {"get_device_name": SLICE, "device_count": 1}
    (told,) = slow_settings(1)
    assert told.startswith(f"cuda:0 is {SLICE}, a slice of a GPU")
    with pytest.raises(InputError, match=r"torch sees 1 CUDA device, fewer .*rank 1 .* by MIG"):
        device_of("cuda", World(rank=1, size=2, local_rank=1))


def test_memory_that_others_have_taken_is_told(node: Any) -> None:
    node.told |= {"memory.used": "61440", "memory.free": "20480"}
    first, *_ = slow_settings(4)
    assert first.startswith("60.0 of 80.0 GiB of cuda:0 are taken by other processes, 20.0 are")
    node.told |= dict.fromkeys(node.told, "")
    assert [*slow_settings(4)] == []


def test_a_profile_takes_no_cpu_for_gpus_with_an_old_driver(node: StubCuda) -> None:
    node.answers |= {"is_available": False, "init": RuntimeError("Found no NVIDIA driver")}
    assert devices_of(None, None).kind == "cpu"
    said = "The NVIDIA driver on your system is too old (found version 11040). Please"
    node.answers["init"] = RuntimeError(said)
    with pytest.raises(InputError, match=r"^--device: .* driver is too old: .* give --device cpu"):
        devices_of(None, None)


def to_run_plan(tmp_path: Path) -> list[str]:
    plan = plan_file(tmp_path)
    content = read_yaml(plan)
    content["workload"]["precision"] = "bf16"
    content["cluster"]["memory_gib"] = 20.0
    write_yaml(content, plan)
    return [str(plan), "--device", "cuda"]


COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], Callable[[Path], list[str]]]] = {
    "run_plan": (run_plan.main, to_run_plan),
    "gpu_report": (gpu_report.main, lambda folder: ["--out", str(folder / "out")]),
    "profile_hardware": (
        profile_hardware.main,
        lambda folder: ["--out", str(folder / "made.yaml"), "--device", "cuda"],
    ),
    "run_plans": (run_plans.main, lambda folder: [str(folder), "--device", "cuda"]),
    "measure_speedup": (
        measure_speedup.main,
        lambda folder: ["--systems", "mistlab", "--out", str(folder / "out")],
    ),
    "whole_loop": (
        whole_loop.main,
        lambda folder: [
            *("--systems", "mistlab", "--device", "cuda"),
            *("--out", str(folder / "out")),
        ],
    ),
}
FOUND: dict[str, tuple[dict[str, Any], str]] = {
    "kernels": ({"get_device_capability": (6, 0)}, "has compute capability 6.0"),
    "driver": (
        {"is_available": False, "init": RuntimeError("driver is too old (found version 12020).")},
        "the NVIDIA driver is too old",
    ),
}


@pytest.mark.parametrize("finding", FOUND)
@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_refuses_before_it_begins(
    command: str, finding: str, node: StubCuda, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    answers, words = FOUND[finding]
    node.answers |= answers
    monkeypatch.setattr(session, "join", no_further)
    main, arguments = COMMANDS[command]
    assert run(main, arguments(tmp_path)) == WRONG_USAGE
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert {name for name, _, _ in node.calls}.isdisjoint({"Stream", "cudaHostRegister"})


def no_further(*_: object) -> None:
    pytest.fail("ranks have connected")


def test_a_run_is_refused_where_others_take_its_memory(
    node: StubCuda, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setattr(session, "join", no_further)
    node.answers["mem_get_info"] = (50 * 2**30, 80 * 2**30)
    assert run(run_plan.main, to_run_plan(tmp_path)) == WRONG_USAGE
    said = capsys.readouterr().err
    assert "cluster.memory_gib: 20 is no more than the 30.00 GiB of cuda:0" in said


def test_a_baseline_is_refused_as_a_run_is(node: StubCuda, tmp_path: Path) -> None:
    plan, *_ = to_run_plan(tmp_path)
    asked = {"plan": plan, "system": "megatron", "steps": 1, "device": "cuda", "seed": 0}
    node.answers |= {"get_device_capability": (7, 5), "get_device_name": T4}
    with pytest.raises(InputError, match=r"workload.precision: bf16, but Tesla T4"):
        baseline_worker._trained(asked)
