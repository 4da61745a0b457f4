"""Runs of plans that end early: what they say, and what is left of them."""

from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from experiments import run_plan  # noqa: E402
from experiments.cli.commandline import DONE, NO_ANSWER, WRONG_USAGE, run  # noqa: E402
from runtime.checkpoints.boxes import Loader  # noqa: E402
from runtime.devices.cuda import CudaDriver  # noqa: E402
from runtime.engine.storage import arena  # noqa: E402
from runtime.engine.work.layer_passes import Passes  # noqa: E402
from runtime.engine.work.parameters import Parameters  # noqa: E402
from tests.experiments.tiny_plans import MODEL, PIPELINE, plan_file, refusal  # noqa: E402

Ending = Callable[..., str]

SHORT = "CUDA out of memory. Tried to allocate 2.00 GiB."


def raising(error: Exception) -> Callable[..., None]:
    """A function that raises an error, whatever it is called with."""

    def raises(*_: object, **__: object) -> None:
        raise error

    return raises


@pytest.fixture
def ending(capfd: pytest.CaptureFixture[str]) -> Ending:
    """Runs a plan that ends with no answer; what it complains of."""

    def of(*arguments: object) -> str:
        assert run(run_plan.main, [str(argument) for argument in arguments]) == NO_ANSWER
        return capfd.readouterr().err

    return of


def test_a_checkpoint_that_cannot_be_written_ends_the_run(tmp_path: Path, ending: Ending) -> None:
    plan, out = plan_file(tmp_path), tmp_path / "out"
    out.mkdir()
    (out / "checkpoints").write_text("in the way")
    complaint = ending(plan, "--out", out, "--save-every", 1)
    assert "step-1: cannot be written" in complaint
    assert "there is no checkpoint" in complaint


def test_a_loss_that_is_no_number_ends_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    complaint = refusal(
        capsys, NO_ANSWER, plan_file(tmp_path), "--steps", 20, "--learning-rate", 1e30
    )
    assert "the loss is nan at step" in complaint
    assert "give a lower --learning-rate" in complaint


def test_a_shortage_of_memory_says_where_and_what_was_predicted(
    tmp_path: Path, ending: Ending, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Passes, "backward", raising(torch.OutOfMemoryError(f"{SHORT}\nAnd more.")))
    complaint = ending(plan_file(tmp_path))
    assert "stage 0 is out of memory at task 0B.4m0 (layer 4, micro-batch 0, backward" in complaint
    assert "GiB allocated: weights 0.00, gradients 0.00" in complaint
    assert "Tried to allocate 2.00 GiB" in complaint
    assert "GiB predicted at the peak: 0.00 (" in complaint
    assert "optimizer" in complaint


def test_a_stage_by_itself_is_named_by_its_place_in_the_plan(
    tmp_path: Path,
    ending: Ending,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = plan_file(tmp_path, *PIPELINE, model={**MODEL, "layers": 4})
    monkeypatch.setattr(Passes, "backward", raising(torch.OutOfMemoryError(SHORT)))
    complaint = ending(plan, "--stage", 2)
    assert "stage 2 is out of memory at task 2B.5m0 (layer 5, micro-batch 0, backward" in complaint
    assert "GiB predicted at the peak: 0.00 (" in complaint

    monkeypatch.setenv("WORLD_SIZE", "2")
    complaint = refusal(capfd, WRONG_USAGE, plan, "--stage", 2)
    assert "--stage 2: runs a stage in 1 rank, but 2 were started: start the command" in complaint


def test_a_shortage_while_weights_are_exported_is_told_too(
    tmp_path: Path, ending: Ending, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Parameters, "masters", raising(MemoryError()))
    complaint = ending(plan_file(tmp_path), "--export", tmp_path / "weights.safetensors")
    assert "stage 0 is out of memory at the export" in complaint


def test_a_shortage_while_a_checkpoint_is_read_is_told_too(
    tmp_path: Path, ending: Ending, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, out = plan_file(tmp_path), tmp_path / "out"
    saving = [str(plan), "--steps", "1", "--out", str(out), "--save-every", "1"]
    assert run(run_plan.main, saving) == DONE
    monkeypatch.setattr(Loader, "resolve_tensor", raising(torch.OutOfMemoryError(SHORT)))
    complaint = ending(plan, "--resume", out / "checkpoints")
    assert "stage 0 is out of memory at a checkpoint (CUDA out of memory." in complaint


def test_a_shortage_before_the_first_step_is_told_too(
    tmp_path: Path, ending: Ending, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_room = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to get much.")
    monkeypatch.setattr(arena.torch, "zeros", raising(no_room))
    complaint = ending(plan_file(tmp_path))
    assert "stage 0 is out of memory at its start" in complaint
    assert "can't allocate memory" in complaint


def test_host_memory_that_cannot_be_pinned_says_what_to_do(
    tmp_path: Path, ending: Ending, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing:
        def cudaHostRegister(self, *_: object) -> int:  # noqa: N802
            return 2

    begin = arena.Arena.__init__

    def pinned(self: arena.Arena, size: int, device: torch.device, **_: object) -> None:
        begin(self, size, device, pins_for=CudaDriver())

    monkeypatch.setattr(torch.cuda, "cudart", Refusing)
    monkeypatch.setattr(arena.Arena, "__init__", pinned)
    complaint = ending(plan_file(tmp_path, {"offload": {"optimizer": 1.0}}))
    assert "stage 0 is out of memory at its start" in complaint
    assert "GiB of host memory cannot be pinned (driver error 2)" in complaint
    assert "raise the limit of locked memory (ulimit -l), or offload less" in complaint
