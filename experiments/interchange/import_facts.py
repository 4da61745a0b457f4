"""Facts of launch files, as a reader wrote them, held against an imported job."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mistlab.export.given import Imported
from mistlab.job.job import Job
from mistlab.plan.plan import StagePlan
from mistlab.plan.workload import ModelSpec

# Words of a remark that tell of a fact, by the fact's name.
_TOLD_BY: Mapping[str, tuple[str, ...]] = {
    "global_batch": ("batch",),
    "micro_batch": ("micro_batch", "micro-batch"),
    "nodes": ("nodes", "nnodes"),
    "gpus_per_node": ("gpus_per_node", "nproc"),
    "sequence_length": ("sequence_length", "seq"),
    "vocab": ("vocab",),
    "zero": ("zero", "shard", "optimizer"),
    "precision": ("precision", "fp8", "fp16", "bf16"),
    "recomputation": ("checkpointed", "recompute"),
    "offload_optimizer": ("offload",),
    "sequence_parallel": ("sequence_parallel", "sequence-parallel"),
    "tensor_parallel": ("tensor",),
    "pipeline_stages": ("pipeline", "stages"),
    "context_parallel": ("context", "cp_size"),
    "expert_parallel": ("expert",),
    "experts": ("expert",),
    "experts_active": ("expert", "topk"),
    "ffn": ("ffn",),
    "kv_heads": ("kv_heads", "query-groups"),
}


def wrong_facts(facts: Mapping[str, Any], imported: Imported) -> Iterator[tuple[str, str, bool]]:
    """Facts that an import has otherwise: name, both values in words, and whether a remark tells
    of it."""
    told = " ".join(map(str, imported.remarks))
    for name, wanted in facts.items():
        if name not in _READ:
            continue
        value = _READ[name](imported.job)
        if not _agrees(name, wanted, value):
            is_told = any(word in told for word in _TOLD_BY.get(name, (name,)))
            yield name, f"{wanted} in the file, {value} imported", is_told


def _agrees(name: str, wanted: Any, value: Any) -> bool:
    if name == "vocab":
        return bool(value is not None and wanted <= value < 1.05 * wanted + 1024)
    if isinstance(value, tuple):
        return wanted in value
    return bool(wanted == value)


def _first(job: Job) -> StagePlan:
    return job.plan.stages[0]


def _ffn(model: ModelSpec) -> tuple[int, ...]:
    return (model.ffn,) if model.experts is None else (model.ffn, model.experts.ffn)


def _recomputation(job: Job) -> tuple[str, ...]:
    """Words for the recomputation of the first stage; some recomputed blocks have two."""
    stage = _first(job)
    if stage.checkpointed_layers:
        return ("full", "selective") if stage.checkpointed_layers < stage.layers else ("full",)
    names = ("core_recomputed_layers", "products_recomputed_layers")
    return ("selective",) if any(stage.value(name) for name in names) else ("none",)


def _zero(job: Job) -> tuple[int, ...]:
    """ZeRO's level; a single replica has nobody to shard with at any level."""
    first = _first(job)
    return (0, 1, 2, 3) if first.data_parallel == 1 and not first.zero else (first.zero,)


_READ: Mapping[str, Callable[[Job], Any]] = {
    "layers": lambda job: job.workload.model.layers,
    "hidden": lambda job: job.workload.model.hidden,
    "heads": lambda job: job.workload.model.heads,
    "kv_heads": lambda job: job.workload.model.kv_heads,
    "ffn": lambda job: _ffn(job.workload.model),
    "vocab": lambda job: job.workload.model.vocab,
    "experts": lambda job: getattr(job.workload.model.experts, "count", 0),
    "experts_active": lambda job: getattr(job.workload.model.experts, "active", 0),
    "sequence_length": lambda job: job.workload.sequence_length,
    "global_batch": lambda job: job.workload.global_batch,
    "precision": lambda job: job.workload.precision,
    "nodes": lambda job: job.cluster.nodes,
    "gpus_per_node": lambda job: job.cluster.gpus_per_node,
    "micro_batch": lambda job: _first(job).micro_batch,
    "tensor_parallel": lambda job: _first(job).tensor_parallel,
    "pipeline_stages": lambda job: job.plan.num_stages,
    "context_parallel": lambda job: _first(job).degree("context_parallel"),
    "expert_parallel": lambda job: _first(job).degree("expert_parallel"),
    "sequence_parallel": lambda job: bool(_first(job).value("sequence_parallel")),
    "zero": _zero,
    "recomputation": _recomputation,
    "offload_optimizer": lambda job: _first(job).offload.optimizer > 0,
}
