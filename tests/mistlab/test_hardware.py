from dataclasses import replace
from typing import Any

import pytest

from mistlab import catalog
from mistlab.core.values import FieldError, from_mapping, to_mapping
from mistlab.machine.hardware import Hardware


def test_properties_are_in_si_units() -> None:
    hardware = catalog.hardware("a100-40gb")
    gpu, node = hardware.gpu, hardware.node
    assert gpu.memory_bytes == round(39.4 * 2**30)
    assert gpu.memory_bytes_per_s == 1555e9
    assert gpu.peak_flop_per_s("bf16") == 312e12
    assert node.host_memory_bytes == 680 * 2**30
    assert node.intra_node_bytes_per_s == 300e9
    assert node.inter_node_bytes_per_s == 12.5e9


def test_a_precision_that_the_gpu_lacks_is_refused() -> None:
    with pytest.raises(FieldError, match=r"precision: bf16 is not .*: give fp16 or fp32"):
        catalog.hardware("v100-16gb").gpu.peak_flop_per_s("bf16")


BAD = {
    "no bandwidth": (
        "gpu",
        {"memory_gbytes_per_s": 0},
        "gpu.memory_gbytes_per_s: 0.0 is too small",
    ),
    "no gpus": ("node", {"gpus": 0}, "node.gpus: 0 is too small: give a whole number of at least"),
    "unknown group": (
        "provenance",
        {"gpus": {"kind": "measured", "source": "x"}},
        "provenance.gpus: unknown key: did you mean 'gpu'?",
    ),
    "unknown kind": (
        "provenance",
        {"gpu": {"kind": "guess", "source": "x"}},
        "provenance.gpu.kind: 'guess' is unknown: give one of datasheet, measured, borrowed",
    ),
    "no source": (
        "provenance",
        {"node": {"kind": "measured", "source": " "}},
        "provenance.node.source: is empty: name the datasheet",
    ),
    "peak of an unknown precision": (
        "gpu",
        {"peak_tflops": {"fp61": 1}},
        "gpu.peak_tflops.fp61: unknown key: did you mean 'fp16'?",
    ),
}


@pytest.mark.parametrize(("section", "change", "message"), BAD.values(), ids=BAD.keys())
def test_bad_hardware_is_refused(section: str, change: dict[str, Any], message: str) -> None:
    mapping = to_mapping(catalog.hardware("l4-24gb"))
    mapping[section].update(change)
    with pytest.raises(FieldError) as caught:
        from_mapping(Hardware, mapping)
    assert str(caught.value).startswith(message)


def test_hardware_has_a_name() -> None:
    with pytest.raises(FieldError, match=r"^name: is empty: give"):
        replace(catalog.hardware("l4-24gb"), name="")
