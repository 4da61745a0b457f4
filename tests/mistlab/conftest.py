"""A plan file's content, fresh for each test."""

from typing import Any

import pytest

PLAN_FILE: dict[str, Any] = {
    "workload": {
        "model": "gpt3-2.7b",
        "sequence_length": 4096,
        "global_batch": 8,
        "attention": "flash",
        "precision": "fp16",
    },
    "cluster": {"hardware": "l4-24gb", "nodes": 1, "gpus_per_node": 4},
    "plan": {"micro_batches": 4},
}
STAGE: dict[str, Any] = {
    "layers": 16,
    "data_parallel": 2,
    "tensor_parallel": 1,
    "micro_batch": 1,
    "zero": 1,
    "checkpointed_layers": 4,
}


@pytest.fixture
def plan_file() -> dict[str, Any]:
    sections = {name: dict(section) for name, section in PLAN_FILE.items()}
    sections["plan"]["stages"] = [{**STAGE, "offload": {"optimizer": 0.5}} for _ in range(2)]
    return sections
