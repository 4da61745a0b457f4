"""Published runs of Megatron-LM: equal stages, everything computed again."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from experiments.calibrating.published_run import PublishedRun, plan_of, stage_columns
from mistlab.calibration.tables import Row
from mistlab.core.files import MILLISECONDS, TFLOP
from mistlab.cost.kernels import megatron_flop
from mistlab.engines.baselines import MEGATRON
from mistlab.machine.cluster import Cluster
from mistlab.machine.hardware import Hardware
from mistlab.plan.workload import ModelSpec, Workload
from mistlab.schedule.placement import even_shares

MEGATRON_COLUMNS = (
    *("gpus", "global_batch", "micro_batch", "hidden", "heads", "layers", "sequence_length"),
    *("tensor_parallel", "data_parallel", "pipeline_parallel", "iteration_ms"),
)
WEAK_SCALING = (
    *("heads", "hidden", "layers", "tensor_parallel", "pipeline_parallel", "gpus"),
    *("global_batch", "tflop_per_s_per_gpu"),
)
# Tensor-parallel ranks of Megatron-LM sent a part of the activations each (until 2023
# scatter-gather-tensors-in-pipeline, in DeepSpeed pipe-partitioned tensors).
SENDING_PARTS = replace(MEGATRON, sends="split")
GPUS_A_NODE = 8
# Megatron's own vocabulary, and what it trains with.
MEGATRON_VOCAB = 50257
WEAK_SCALING_VOCAB = 51200
WEAK_SCALING_SEQUENCE = 2048


def megatron_runs(row: Row, number: int, hardware: Hardware) -> Iterator[PublishedRun]:
    """The run of a row of a table of Megatron runs with full recomputation."""
    sizes = {name: int(row[name]) for name in MEGATRON_COLUMNS if name != "iteration_ms"}
    gpus = sizes["gpus"]
    yield _uniform(
        sizes,
        sizes["micro_batch"],
        name=f"{gpus} GPUs, row {number + 1}",
        set=f"{hardware.name}, megatron, {'one node' if gpus <= GPUS_A_NODE else 'many nodes'}",
        vocab=MEGATRON_VOCAB,
        iteration_s=float(row["iteration_ms"]) * MILLISECONDS,
        hardware=hardware,
    )


def weak_scaling_runs(row: Row, hardware: Hardware) -> Iterator[PublishedRun]:
    """A row of Megatron's weak scaling, with each micro-batch that it may have had."""
    sizes = {name: int(row[name]) for name in WEAK_SCALING if name != "tflop_per_s_per_gpu"}
    gpus = sizes["gpus"]
    sizes |= {
        "sequence_length": WEAK_SCALING_SEQUENCE,
        "data_parallel": gpus // (sizes["tensor_parallel"] * sizes["pipeline_parallel"]),
    }
    flop = megatron_flop(
        batch=sizes["global_batch"],
        sequence_length=sizes["sequence_length"],
        layers=sizes["layers"],
        hidden=sizes["hidden"],
        vocab=WEAK_SCALING_VOCAB,
    )
    seconds = flop / (gpus * float(row["tflop_per_s_per_gpu"]) * TFLOP)
    for micro_batch in (1, 2, 4, 8):
        if sizes["global_batch"] % (micro_batch * sizes["data_parallel"]) == 0:
            yield _uniform(
                sizes,
                micro_batch,
                name=f"{row.get('parameters_billion', '?')} billion",
                set=f"{hardware.name}, megatron, weak scaling",
                vocab=WEAK_SCALING_VOCAB,
                iteration_s=seconds,
                hardware=hardware,
            )


def _uniform(
    sizes: Mapping[str, int],
    micro_batch: int,
    *,
    name: str,
    set: str,  # noqa: A002
    vocab: int,
    iteration_s: float,
    hardware: Hardware,
) -> PublishedRun:
    """A Megatron run: equal stages, everything computed again, no collective overlapped."""
    num_stages, gpus = sizes["pipeline_parallel"], sizes["gpus"]
    layers = np.array(even_shares(sizes["layers"], num_stages))
    micro_batches = sizes["global_batch"] // (micro_batch * sizes["data_parallel"])

    def same(value: int) -> np.ndarray:
        return np.full(num_stages, value)

    batch = stage_columns(
        layers=layers,
        checkpointed_layers=layers,
        data_parallel=same(sizes["data_parallel"]),
        tensor_parallel=same(sizes["tensor_parallel"]),
        micro_batch=same(micro_batch),
        zero=same(0),
        ratios=np.zeros((num_stages, 4)),
        micro_batches=micro_batches,
    )
    return PublishedRun(
        name=name,
        set=set,
        fold=f"{gpus}x{sizes['layers']}",
        workload=Workload(
            model=ModelSpec.of(
                family="gpt",
                hidden=sizes["hidden"],
                layers=sizes["layers"],
                heads=sizes["heads"],
                vocab=vocab,
                biases=True,
                dropout=0.1,
                tied_embeddings=True,
            ),
            sequence_length=sizes["sequence_length"],
            global_batch=sizes["global_batch"],
            attention="math",
            precision="fp16",
        ),
        cluster=Cluster(
            hardware=hardware,
            nodes=-(-gpus // GPUS_A_NODE),
            gpus_per_node=min(gpus, GPUS_A_NODE),
        ),
        engine="megatron",
        overlap_communication=False,
        ran_by=SENDING_PARTS,
        micro_batches=micro_batches,
        stages=batch,
        plan=plan_of(batch, micro_batches, "megatron", overlaps=False),
        iteration_s=iteration_s,
    )
