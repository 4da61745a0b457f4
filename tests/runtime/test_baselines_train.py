"""Megatron-core, DeepSpeed and FSDP2 train a tiny model on CPUs with the losses of a plain run."""

import inspect
import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from mistlab.export.targets import TARGETS
from mistlab.job.job import Job, dump_job, job_from_mapping
from runtime.baselines.baseline import (
    BaselineSettings,
    FirstWeights,
    megatron_weights,
    sequences_of,
)
from runtime.baselines.deepspeed_run import adam_of
from runtime.data import batches_of
from runtime.models.families import model_of
from tests.runtime.stand_ins.deepspeed_adam import adam_of_host, fused_adam
from tests.runtime.test_accepted_exports import needs

ROOT = Path(__file__).parents[2]
# Takes the place of Transformer Engine, which needs a GPU: with its arguments, in plain torch.
STAND_INS = Path(__file__).parent / "stand_ins"
ON_ENGINE = ", on Transformer Engine"
STEPS = 3
RANKS = 4
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"family": "gpt", "hidden": 64, "layers": 4, "heads": 4, "vocab": 256},
    "llama": {
        "family": "llama",
        "hidden": 64,
        "layers": 4,
        "heads": 4,
        "kv_heads": 2,
        "ffn": 128,
        "vocab": 256,
    },
}


def job_of(family: str, *stages: dict[str, Any]) -> Job:
    filled = [{"layers": 4, "data_parallel": 1, "tensor_parallel": 1, **one} for one in stages]
    for stage in filled:
        stage["micro_batch"] = 4 // stage["data_parallel"]
    return job_from_mapping(
        {
            "workload": {
                "model": MODELS[family],
                "sequence_length": 32,
                "global_batch": 8,
                "attention": "math",
                "precision": "fp32",
            },
            "cluster": {"hardware": "a100-80gb", "nodes": 1, "gpus_per_node": RANKS},
            "plan": {"micro_batches": 2, "stages": filled},
        }
    )


@cache
def plain_losses(family: str) -> tuple[float, ...]:
    """Losses of this package's model, trained in one process by torch's own AdamW."""
    job, settings = job_of(family, {}), BaselineSettings()
    model = model_of(job.workload)
    model.load_state_dict(FirstWeights(job.workload, settings.seed).all())
    optimizer = torch.optim.AdamW(model.parameters(), **settings.of_adam)
    losses = []
    for step in range(STEPS):
        batches = batches_of(sequences_of(job, settings.seed), job, step=step, replica=0)
        total = 0.0
        for tokens, targets in batches:
            loss = model(tokens, targets) / len(batches)
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return tuple(losses)


# By name: system, family, stages.
RUNS: dict[str, tuple[str, str, tuple[dict[str, Any], ...]]] = {
    "megatron, uneven pipeline": ("megatron", "gpt", ({"layers": 3}, {"layers": 1})),
    "megatron, tensor parallel, shared keys": ("megatron", "llama", ({"tensor_parallel": 2},)),
    "megatron, sharded optimizer, recomputed": (
        "megatron",
        "gpt",
        ({"data_parallel": 2, "zero": 1, "checkpointed_layers": 2},),
    ),
    f"megatron, tensor and sequence parallel{ON_ENGINE}": (
        "megatron",
        "llama",
        ({"tensor_parallel": 2, "sequence_parallel": 1},),
    ),
    f"megatron, sharded optimizer, recomputed{ON_ENGINE}": (
        "megatron",
        "gpt",
        ({"data_parallel": 2, "zero": 1, "checkpointed_layers": 2},),
    ),
    f"megatron, uneven pipeline{ON_ENGINE}": ("megatron", "gpt", ({"layers": 3}, {"layers": 1})),
    "deepspeed, ZeRO-1": ("deepspeed", "gpt", ({"data_parallel": 2, "zero": 1},)),
    "deepspeed, ZeRO-2, offloaded": (
        "deepspeed",
        "llama",
        ({"data_parallel": 2, "zero": 2, "offload": {"optimizer": 1.0, "gradients": 1.0}},),
    ),
    "deepspeed, ZeRO-3, recomputed": (
        "deepspeed",
        "gpt",
        ({"data_parallel": 2, "zero": 3, "checkpointed_layers": 4},),
    ),
    "fsdp, offloaded, recomputed": (
        "fsdp",
        "llama",
        (
            {
                "data_parallel": 2,
                "zero": 3,
                "checkpointed_layers": 4,
                "offload": {"optimizer": 1.0, "gradients": 1.0, "weights": 1.0},
            },
        ),
    ),
    "fsdp, ZeRO-2": ("fsdp", "llama", ({"data_parallel": 2, "zero": 2},)),
    "fsdp, two replicas of two shards": (
        "fsdp",
        "gpt",
        ({"data_parallel": 4, "zero": 3, "state_replicas": 2},),
    ),
}


# Two processes that import Megatron-core take ten seconds; these cover its parts.
QUICK = ("megatron, tensor and sequence parallel, on Transformer Engine",)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in RUNS]
)
def test_first_losses_are_those_of_a_plain_run(name: str, tmp_path: Path, warm_python: str) -> None:
    system, family, stages = RUNS[name]
    has_engine = name.endswith(ON_ENGINE)
    if system in TARGETS:
        needs(TARGETS[system].package)
    plan, out = tmp_path / "plan.yaml", tmp_path / "out.json"
    job = job_of(family, *stages)
    dump_job(job, plan)
    said = {
        "plan": str(plan),
        "system": system,
        "steps": STEPS,
        "device": "cpu",
        "seed": BaselineSettings().seed,
        "cap_gib": None,
        "out": str(out),
    }
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    worker = ["-m", "experiments.training.baseline_worker", json.dumps(said)]
    done = subprocess.run(
        [warm_python, *launcher, str(job.plan.num_gpus), *worker],
        capture_output=True,
        text=True,
        cwd=ROOT,
        # torchrun starts its ranks by this program.
        env=os.environ
        | {"PYTHON_EXEC": warm_python}
        | ({"PYTHONPATH": str(STAND_INS)} if has_engine else {}),
        timeout=500,
        check=False,
    )
    assert out.exists(), done.stderr[-3000:]
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["losses"] == pytest.approx(plain_losses(family), rel=1e-6)
    # The second loss is one of weights that have moved.
    assert abs(found["losses"][1] - found["losses"][0]) > 1e-3
    said = found["configuration"]
    assert (said["sums"], said["decay"]) == ("32 bits", "0.1")
    if system == "megatron":
        assert ("local" in said["system"]) != has_engine
        assert ("apply_rope_fusion" in said["fusions"]) == (has_engine and family == "llama")
        assert said["optimizer"] == "transformer_engine FusedAdam" if has_engine else "torch AdamW"


@pytest.mark.parametrize("on_host", [False, True])
def test_optimizers_of_deepspeed_get_arguments_that_they_have(
    on_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ops = ModuleType("deepspeed.ops.adam")
    vars(ops).update(FusedAdam=fused_adam, DeepSpeedCPUAdam=adam_of_host)
    monkeypatch.setitem(sys.modules, ops.__name__, ops)
    settings = BaselineSettings(device="cuda")
    given = adam_of(settings, [], on_host=on_host)
    assert given.items() >= settings.of_adam.items()
    assert given["adamw_mode" if on_host else "adam_w_mode"]
    assert given["bias_correction"]
    assert not given["amsgrad"]


@pytest.mark.slow
def test_stand_ins_have_the_arguments_of_what_they_stand_for() -> None:
    needs(TARGETS["deepspeed"].package)
    adam = pytest.importorskip("deepspeed.ops.adam")
    for stand_in, real in ((fused_adam, adam.FusedAdam), (adam_of_host, adam.DeepSpeedCPUAdam)):
        ours, theirs = (inspect.signature(one).parameters for one in (stand_in, real))
        assert [*ours] == [*theirs]
        assert [one.default for one in ours.values()] == [one.default for one in theirs.values()]


@pytest.mark.parametrize("family", MODELS)
def test_parts_for_megatron_make_up_the_whole_weights(family: str) -> None:
    job = job_of(family, {})
    weights, model = FirstWeights(job.workload, 3), job.workload.model
    parts = [
        dict(megatron_weights(weights, model, blocks=range(4), rank=rank, ranks=2))
        for rank in range(2)
    ]
    whole = dict(megatron_weights(weights, model, blocks=range(4), rank=0, ranks=1))
    assert whole.keys() == parts[0].keys() == parts[1].keys()
    numbers = sum(tensor.numel() for tensor in weights.all().values())
    assert sum(tensor.numel() for tensor in whole.values()) == numbers
    for name, tensor in whole.items():
        if tensor.dim() == 1 or "position" in name:
            assert torch.equal(parts[0][name], tensor)
        elif "linear_proj" in name or "fc2" in name:
            assert torch.equal(torch.cat([part[name] for part in parts], 1), tensor)
        elif "fc1" in name and model.mlp_type == "gated_mlp":
            halves = [part[name].chunk(2) for part in parts]
            joined = [torch.cat([half[side] for half in halves]) for side in (0, 1)]
            assert torch.equal(torch.cat(joined), tensor)
        else:
            assert torch.equal(torch.cat([part[name] for part in parts]), tensor)


def test_queries_keys_and_values_lie_group_by_group() -> None:
    job = job_of("llama", {})
    weights, model = FirstWeights(job.workload, 0), replace(job.workload.model)
    ours = weights["blocks.0.attention.qkv.weight"]
    theirs = dict(megatron_weights(weights, model, blocks=range(1), rank=0, ranks=1))
    fused = theirs["decoder.layers.0.self_attention.linear_qkv.weight"]
    channels = model.head_dim
    # The first group: two heads of queries, one of keys, one of values.
    assert torch.equal(fused[: 2 * channels], ours[: 2 * channels])
    keys = model.heads * channels
    assert torch.equal(fused[2 * channels : 3 * channels], ours[keys : keys + channels])
