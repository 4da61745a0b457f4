"""Who computes fused attention: settled once, the same losses by whoever does, or a refusal."""

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.nn.functional import scaled_dot_product_attention  # noqa: E402

from mistlab.core.values import InputError  # noqa: E402
from mistlab.plan.plan import Plan  # noqa: E402
from runtime.determinism import strictly_deterministic  # noqa: E402
from runtime.models.attention_kernel import check_kernel, settle_kernel  # noqa: E402
from tests.runtime.worlds import CPU, MIXED, by_plan, stage, workload  # noqa: E402

CUDA = torch.device("cuda", 0)
BACKENDS = ("flash", "mem_efficient", "math", "cudnn")


def enabled() -> set[str]:
    return {name for name in BACKENDS if getattr(torch.backends.cuda, f"{name}_sdp_enabled")()}


@pytest.fixture(autouse=True)
def _settled_again() -> Iterator[None]:
    before = enabled()
    yield
    settle_kernel("flash", CPU)
    for name in BACKENDS:
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(name in before)


def test_pytorch_is_left_no_choice_that_depends_on_gpu_and_version() -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    settle_kernel("flash", CUDA)
    assert enabled() == {"flash", "mem_efficient", "math"}
    settle_kernel("cudnn", CUDA)
    assert enabled() == {"cudnn"}
    settle_kernel("flash", CUDA)
    assert enabled() == {"flash", "mem_efficient", "math"}


def test_a_cpu_keeps_its_switches() -> None:
    before = enabled()
    settle_kernel("cudnn", CPU)
    assert enabled() == before


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A stand-in for flash-attn that computes by PyTorch; what it was asked."""
    asked: list[dict[str, Any]] = []

    def flash_attn_func(query: Any, key: Any, value: Any, **options: Any) -> Any:
        asked.append(options)
        heads = [t.transpose(1, 2) for t in (query, key, value)]
        grouped = query.shape[2] != key.shape[2]
        mixed = scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=grouped)
        return mixed.transpose(1, 2)

    module = ModuleType("flash_attn")
    module.flash_attn_func = flash_attn_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    return asked


@pytest.mark.parametrize("family", ["gpt", "llama", "falcon"])
def test_losses_are_those_of_the_package(family: str, package: list[dict[str, Any]]) -> None:
    work = workload(family, kv_heads=2)
    plan = Plan(micro_batches=4, stages=(stage(offload=MIXED, checkpointed_layers=2),))
    plain = by_plan(work, plan)
    assert not package
    settle_kernel("flash-attn", CPU)
    assert by_plan(work, plan).losses == plain.losses
    # Each of four blocks, micro-batches and three steps; two blocks run forward again.
    assert len(package) == 6 * 4 * 3
    assert package[0] == {"dropout_p": 0.0, "causal": True, "deterministic": False}
    with strictly_deterministic():
        by_plan(work, plan, steps=1)
    assert package[-1]["deterministic"] is True


GPU: dict[str, Any] = {"device": "cuda", "precision": "bf16", "attention": "flash"}


def test_a_kernel_that_cannot_run_is_refused(package: list[dict[str, Any]]) -> None:
    check_kernel("flash-attn", **GPU)
    check_kernel("cudnn", **GPU)
    check_kernel("flash", device="cpu", precision="fp32", attention="math")
    cases = {
        ("device", "cpu"): "flash-attn: this kernel runs only on GPUs: give --device",
        ("precision", "fp32"): "flash-attn: this kernel has no 32-bit arithmetic \\(fp32\\): give",
        ("attention", "math"): "flash-attn: with workload.attention: math no fused kernel",
    }
    for (field, value), words in cases.items():
        with pytest.raises(InputError, match=words):
            check_kernel("flash-attn", **{**GPU, field: value})
    with (
        strictly_deterministic(),
        pytest.raises(InputError, match="leave out --attention-kernel or --det"),
    ):
        check_kernel("cudnn", **GPU)


def test_a_package_that_is_missing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(InputError, match=r"not installed: pip install --no-build-isolation '\.\["):
        check_kernel("flash-attn", **GPU)
