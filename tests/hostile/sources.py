"""Files that commands read, as they should be: what hostile files are made from."""

import csv
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from mistlab import catalog
from mistlab.core.values import to_mapping
from mistlab.job.job import job_from_mapping, job_to_mapping

SMALL_MODEL: Mapping[str, Any] = {
    "family": "llama",
    "hidden": 256,
    "layers": 4,
    "heads": 4,
    "vocab": 1024,
}


def plan() -> dict[str, Any]:
    """A plan file that gives every key: two stages of a small Llama on four GPUs."""
    stage = {"layers": 2, "data_parallel": 2, "tensor_parallel": 1, "micro_batch": 1, "zero": 1}
    job = job_from_mapping(
        {
            "workload": {
                "model": dict(SMALL_MODEL),
                "sequence_length": 256,
                "global_batch": 16,
                "attention": "flash",
                "precision": "bf16",
            },
            "cluster": {"hardware": "a100-80gb", "nodes": 1, "gpus_per_node": 4},
            "plan": {"micro_batches": 8, "stages": [stage, stage]},
        }
    )
    content = job_to_mapping(job, Path())
    content["workload"]["model"] = model()
    content["workload"] |= {"optimizer": "adamw", "expert_imbalance": 1.0}
    content["plan"] |= {"engine": "mistlab", "order": "1f1b", "overlap_communication": True}
    for own in content["plan"]["stages"]:
        own.setdefault("offload", {"weights": 0.0, "optimizer": 0.5, "activations": 0.0})
        own.setdefault("checkpointed_layers", 1)
    return content


def single_plan() -> dict[str, Any]:
    """A plan file for one GPU, which a CPU can run in a second."""
    content = plan()
    content["workload"] |= {"sequence_length": 32, "global_batch": 2, "precision": "fp32"}
    content["workload"]["model"] |= {"layers": 2, "vocab": 128}
    content["cluster"]["gpus_per_node"] = 1
    stage = {"layers": 2, "data_parallel": 1, "tensor_parallel": 1, "micro_batch": 1}
    content["plan"] |= {"micro_batches": 2, "stages": [stage]}
    return content


def model() -> dict[str, Any]:
    """A model's YAML with every key."""
    from mistlab.plan.workload import ModelSpec  # noqa: PLC0415

    whole = to_mapping(ModelSpec.of(**SMALL_MODEL))
    return {key: value for key, value in whole.items() if value is not None and key != "name"}


def hardware() -> dict[str, Any]:
    """A hardware file with every key that the catalogue's have."""
    content = to_mapping(catalog.hardware("a100-80gb"), omit_defaults=True)
    return {**content, "name": "hostile"}


def space() -> dict[str, Any]:
    """A space with many of its keys."""
    return {
        "like": "3d",
        "name": "hostile",
        "micro_batch": [1, 2],
        "tensor_parallel": [1, 2],
        "pipeline": [1, 2],
        "zero": [0, 1],
        "layers_off_balance": 0,
        "orders": ["1f1b"],
        "offload": {"optimizer": [0.0]},
    }


def sweep() -> dict[str, Any]:
    """A sweep of one cell."""
    return {
        "models": ["gpt3-125m"],
        "clusters": [{"hardware": "l4-24gb", "nodes": 1, "gpus_per_node": 2}],
        "global_batches": [8],
        "sequence_lengths": [512],
        "spaces": ["3d"],
        "searchers": ["mist"],
        "budget": {"evaluations": 50},
    }


def config() -> dict[str, Any]:
    """A Hugging Face config.json."""
    return {
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1024,
        "head_dim": 64,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "max_position_embeddings": 2048,
    }


ROW: Mapping[str, str] = {
    "engine": "megatron",
    "hardware": "H100",
    "gpus": "8",
    "model": "llama-like",
    "layers": "16",
    "hidden": "2048",
    "heads": "32",
    "kv_heads": "8",
    "ffn": "8192",
    "vocab": "131072",
    "sequence_length": "4096",
    "global_batch": "64",
    "micro_batch": "1",
    "tp": "2",
    "pp": "1",
    "dp": "4",
    "cp": "1",
    "vpp": "",
    "zero": "1",
    "experts": "",
    "topk": "",
    "ep": "",
    "grad_accumulation": "",
    "sequence_parallel": "1",
    "recompute": "none",
    "precision": "bf16",
    "offload": "",
    "step_s": "2.0",
    "memory_gib": "30",
    "status": "",
    "memory_kind": "",
    "gpus_per_node": "8",
    "notes": "",
    "date": "",
}


def table(rows: list[Mapping[str, str]]) -> bytes:
    """A table of runs."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [*ROW])
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode("utf-8", "surrogatepass")


def script() -> str:
    """A launch script of Megatron-LM."""
    return (Path("experiments/plans/pretrain-gpt3-2.7b.sh")).read_text(encoding="utf-8")


def as_yaml(content: Any) -> bytes:
    """A value as YAML."""
    text: str = yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return text.encode("utf-8", "surrogatepass")


def as_json(content: Any) -> bytes:
    """A value as JSON."""
    return json.dumps(content, default=str).encode("utf-8", "surrogatepass")


class _Dumper(yaml.SafeDumper):
    """Writes no aliases: the same list may stand in several places."""

    def ignore_aliases(self, data: Any) -> bool:
        return True
