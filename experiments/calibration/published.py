"""Published measurements of training runs, as values: what was trained, and how long an iteration
took.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from mistlab import catalog
from mistlab.calibration.table_rows import Row, positive, read_rows
from mistlab.core.files import parse_yaml
from mistlab.core.units import MIB_BYTES, MILLISECONDS, TFLOP
from mistlab.core.values import InputError, check_field, reject, shown
from mistlab.cost.kernels import megatron_flop
from mistlab.engines.baselines import ACESO, DEEPSPEED, MEGATRON
from mistlab.engines.engine import Engine
from mistlab.engines.mistlab import MIST, MISTLAB
from mistlab.machine.cluster import Cluster
from mistlab.machine.hardware import Hardware
from mistlab.plan.dimensions import DIMENSIONS, OFFLOADS
from mistlab.plan.plan import Plan, StagePlan
from mistlab.plan.workload import ModelSpec, Workload
from mistlab.schedule.orders import in_flight
from mistlab.schedule.placement import even_shares
from mistlab.stages.stage_batch import StageBatch

# A training run whose measurement was published: its workload, cluster and plan, and its seconds an
# iteration.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PublishedRun:
    """A training run that was measured: its workload, cluster and plan, and how long an iteration
    took.

    If the run made choices for single operators, ``stages`` have fractional layers and ``plan`` is
    None. Reports group runs by ``set``; cross-validation leaves out all runs of a ``fold`` at once.
    ``ran_by`` is the engine that ran the training, ``engine`` is the engine of plans that are
    compared with it.
    """

    name: str
    set: str
    fold: str
    workload: Workload
    cluster: Cluster
    engine: str
    ran_by: Engine
    overlap_communication: bool
    micro_batches: int
    stages: StageBatch
    plan: Plan | None
    iteration_s: float
    allocated_bytes: tuple[float, ...] = ()
    reserved_bytes: tuple[float, ...] = ()


def stage_columns(*, ratios: np.ndarray, micro_batches: int, **values: np.ndarray) -> StageBatch:
    """The names of the columns of a table of runs that describe pipeline stages; ``ratios`` are the
    columns of offload ratios, in the order of ``OFFLOADS``.
    """
    num_stages = len(values["layers"])
    stages = np.arange(num_stages)
    gpus = values["data_parallel"] * values["tensor_parallel"]
    return StageBatch(
        **values,
        **dict(zip(OFFLOADS, ratios.T, strict=True)),
        in_flight=np.array([in_flight(int(i), num_stages, micro_batches) for i in stages]),
        has_embedding=(stages == 0).astype(int),
        has_head=(stages == num_stages - 1).astype(int),
        first_rank=np.cumsum(gpus) - gpus,
    )


def plan_of(batch: StageBatch, micro_batches: int, engine: str, overlaps: bool) -> Plan:
    """The plan that a row's columns of pipeline stages describe; each stage has whole layers."""
    stages = tuple(
        StagePlan.of_values({name: batch.value(name)[i] for name in DIMENSIONS})
        for i in range(len(batch))
    )
    return Plan(
        engine=engine, micro_batches=micro_batches, overlap_communication=overlaps, stages=stages
    )


# Published runs of Megatron-LM, with equal stages and full recomputation.


MEGATRON_COLUMNS = (
    *("gpus", "global_batch", "micro_batch", "hidden", "heads", "layers", "sequence_length"),
    *("tensor_parallel", "data_parallel", "pipeline_parallel", "iteration_ms"),
)
WEAK_SCALING = (
    *("heads", "hidden", "layers", "tensor_parallel", "pipeline_parallel", "gpus"),
    *("global_batch", "tflop_per_s_per_gpu"),
)
# Megatron-LM's engine until 2023, which differs in one thing: each tensor-parallel rank sends only
# a part of the activations to the next stage (option scatter-gather-tensors-in-pipeline; in
# DeepSpeed, pipe-partitioned tensors).
SENDING_PARTS = replace(MEGATRON, sends="split")
GPUS_A_NODE = 8
# The vocabulary size that Megatron-LM trains with by default.
MEGATRON_VOCAB = 50257
WEAK_SCALING_VOCAB = 51200
WEAK_SCALING_SEQUENCE = 2048


def megatron_runs(row: Row, number: int, hardware: Hardware) -> Iterator[PublishedRun]:
    """The training run in a row of a table of Megatron-LM runs with full recomputation."""
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
    """The training runs in a row of Megatron-LM's weak scaling table: the row does not state the
    micro-batch size, so there is one run for each possible size.
    """
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
    """A Megatron-LM run with equal stages, full recomputation and no collectives overlapped with
    computation.
    """
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


# Reads published runs: each row of a measurement table becomes a workload, a cluster and pipeline
# stages.
#
# The tables are described in docs/reference/measurement-tables.md: ``end_to_end.csv``, two tables
# of Megatron-LM on A100 80 GB, and Megatron-LM's weak scaling.


END_TO_END = (
    *("id", "hardware", "nodes", "gpus", "system", "model", "flash", "seq", "vocab"),
    *("global_batch", "grad_accum", "num_stages", "layers", "ckpt_layers", "mbs", "dp", "tp"),
    *("zero_wgo", "offload_wgoa", "iter_s", "peak_alloc_mb", "peak_reserved_mb", "dropout"),
)
# The names of two columns that a table may lack. Runs without them are in fp16, and accumulate
# gradients in the precision that is the engine's default.
PRECISION, GRADIENTS = "precision", "gradients"
# The family in the catalogue for each model family of the published tables, which use other names
# for GPT-3's shapes.
CATALOGUE_FAMILY = {"gpt2": "gpt3", "gpt": "gpt3"}
CATALOGUE_SIZE = {"1_3B": "1.3b", "2_6B": "2.7b"}
CATALOGUE_HARDWARE = {"a10g": "a10g-24gb", "a100-sxm4-40gb": "a100-40gb"}
# Aceso recomputes single operators, first those that save the most memory. These are attention's
# scores, softmax and dropout: three of the thirteen operators of a layer. If a run recomputes a
# larger share of its operators, the excess counts as whole layers.
CORE_SHARE = 3 / 13
# For each training system in the tables, the engine that models it, and whether it overlapped
# communication with computation.
SYSTEMS: Mapping[str, tuple[Engine, bool]] = {
    "mistlab": (MISTLAB, True),
    "mist": (MIST, True),
    "megatron-lm": (MEGATRON, True),
    "deepspeed": (DEEPSPEED, True),
    "aceso": (ACESO, False),
    "megatron": (ACESO, False),
}
README_BASE = {
    "id": "mist-l4-readme-small-base",
    "hardware": "l4-24gb",
    "nodes": "1",
    "gpus": "2",
    "system": "mist",
    "model": "gpt2-1.3b",
    "flash": "False",
    "seq": "2048",
    "vocab": "50304",
    "dropout": "0",
    "global_batch": "32",
    "grad_accum": "2",
    "num_stages": "1",
    "layers": "24",
    "ckpt_layers": "24",
    "mbs": "8",
    "dp": "2",
    "tp": "1",
    "zero_wgo": "001",
    "offload_wgoa": "0",
    "peak_alloc_mb": "",
    "peak_reserved_mb": "",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The training runs of a measurement table, and a digest of the file's bytes."""

    path: Path
    sha256: str
    runs: tuple[PublishedRun, ...] = field(default=())


def read_end_to_end(path: Path, hardware: Hardware | None = None) -> Table:
    """Read the training runs of ``end_to_end.csv``; if a hardware is given, only the runs on it."""
    return _read(path, END_TO_END, lambda row, _: _end_to_end(row, hardware))


def read_megatron(path: Path, hardware: Hardware) -> Table:
    """Read a table of Megatron-LM runs on A100 80 GB with full recomputation."""
    return _read(path, MEGATRON_COLUMNS, lambda row, number: megatron_runs(row, number, hardware))


def carried(text: str, megatron: Hardware) -> tuple[list[PublishedRun], list[PublishedRun]]:
    """The published runs that are part of this project: Megatron-LM's base case and its weak
    scaling.
    """
    content = parse_yaml(text, "published.yaml")
    base = {**README_BASE, "iter_s": str(content["readme_base"]["iteration_s"])}
    weak_scaling = [
        run
        for row in content["weak_scaling"]["runs"]
        for run in weak_scaling_runs({name: str(value) for name, value in row.items()}, megatron)
    ]
    return [*_end_to_end(base, None)], weak_scaling


# How Python's messages about a text that is not a number begin.
_CONVERTING = ("invalid literal", "could not convert")


class _WatchedRow(dict[str, str]):
    """A row of a table that remembers which column was read last."""

    last = ""

    def __getitem__(self, name: str) -> str:
        """The text of a column's cell."""
        self.last = name
        return super().__getitem__(name)


def _read(
    path: Path,
    needed: Sequence[str],
    runs_of: Callable[[Row, int], Iterator[PublishedRun]],
) -> Table:
    origin, rows = read_rows(path, needed, all_hardware=True)
    runs: list[PublishedRun] = []
    for number, (where, row) in enumerate(rows):
        for name in needed:
            if name == "nodes" or name.endswith(("_ms", "iter_s", "_gpu")):
                positive(where, row, name)
        watched = _WatchedRow(row)
        try:
            runs += runs_of(watched, number)
        except InputError as error:
            reject(f"{where}: {error}")
        except (ValueError, IndexError, KeyError) as error:
            if isinstance(error, ValueError) and not str(error).startswith(_CONVERTING):
                reject(f"{where}: {error}: correct the row")
            cell = shown(row[watched.last])
            reject(f"{where}: {watched.last}: {cell} is unknown or malformed: correct this cell")
    return Table(path=path, sha256=origin.sha256, runs=tuple(runs))


def _end_to_end(row: Row, hardware: Hardware | None) -> Iterator[PublishedRun]:
    name = CATALOGUE_HARDWARE.get(row["hardware"], row["hardware"])
    if hardware is not None and hardware.name != name:
        return
    system = row["system"].split()[0]
    ran_by, overlaps = SYSTEMS[system]
    engine = ran_by.family
    nodes, gpus = int(row["nodes"]), int(row["gpus"])
    batch = _stage_columns(row)
    plan = plan_of(batch, int(row["grad_accum"]), engine, overlaps) if _is_whole(batch) else None
    # If the memory peaks of several ranks of a stage were measured, the first rank's peaks of
    # allocated and of reserved bytes count.
    peaks = {
        key: tuple(float(t) * MIB_BYTES for t in row[key].split("/")[0].split())
        for key in ("peak_alloc_mb", "peak_reserved_mb")
    }
    # Memory peaks are used only if the row has one for each stage.
    has_peaks = all(len(peak) == len(batch) for peak in peaks.values())
    yield PublishedRun(
        name=row["id"],
        set=f"{name}, {system}",
        fold=row["id"],
        workload=Workload(
            model=_model(row),
            sequence_length=int(row["seq"]),
            global_batch=int(row["global_batch"]),
            attention="flash" if row["flash"] == "True" else "math",
            precision=check_field(Workload, "precision", row.get(PRECISION) or "fp16"),
            gradients=check_field(Workload, "gradients", row.get(GRADIENTS) or "usual"),
        ),
        cluster=Cluster(
            hardware=hardware or catalog.hardware(name), nodes=nodes, gpus_per_node=gpus // nodes
        ),
        engine=engine,
        overlap_communication=overlaps,
        ran_by=ran_by,
        micro_batches=int(row["grad_accum"]),
        stages=batch,
        plan=plan,
        iteration_s=float(row["iter_s"]),
        allocated_bytes=peaks["peak_alloc_mb"] if has_peaks else (),
        reserved_bytes=peaks["peak_reserved_mb"] if has_peaks else (),
    )


def _model(row: Row) -> ModelSpec:
    family, _, size = row["model"].partition("-")
    size = CATALOGUE_SIZE.get(size, size.lower())
    model = catalog.model(f"{CATALOGUE_FAMILY.get(family, family)}-{size}")
    dropout = float(row["dropout"])
    return replace(model, name="", vocab=int(row["vocab"]), dropout=dropout, biases=dropout > 0)


def _stage_columns(row: Row) -> StageBatch:
    num_stages = int(row["num_stages"])

    def of_stages(text: str) -> list[str]:
        texts = text.replace(" each", "").split()
        return texts * num_stages if len(texts) == 1 else texts

    layers = np.array([float(text) for text in of_stages(row["layers"])])
    core = np.zeros(num_stages)
    if row["ckpt_layers"].startswith("all"):
        checkpointed = layers
    elif "per-op" in row["ckpt_layers"]:
        shares = np.array([float(share) for share in row["ckpt_layers"].split(":")[1].split()])
        checkpointed, core = layers * _recomputed(shares)
    else:
        checkpointed = np.array([float(text) for text in of_stages(row["ckpt_layers"])])
    ratios = np.array(
        [([float(r) for r in text.split("/")] * 4)[:4] for text in of_stages(row["offload_wgoa"])]
    )
    return stage_columns(
        layers=layers,
        checkpointed_layers=checkpointed,
        core_recomputed_layers=core,
        data_parallel=_degrees(row["dp"], num_stages),
        tensor_parallel=_degrees(row["tp"], num_stages),
        micro_batch=np.array([int(text) for text in of_stages(row["mbs"])]),
        zero=np.array([text.count("1") for text in of_stages(row["zero_wgo"])]),
        ratios=ratios,
        micro_batches=int(row["grad_accum"]),
    )


def _recomputed(shares: np.ndarray) -> np.ndarray:
    """The share of a stage's layers that is recomputed in full, and the share in which only the
    attention core is recomputed.

    ``shares`` are the shares of their operators that the stages recompute.
    """
    everything = np.maximum(0.0, (shares - CORE_SHARE) / (1 - CORE_SHARE))
    return np.array([everything, np.minimum(shares / CORE_SHARE, 1 - everything)])


def _degrees(text: str, num_stages: int) -> np.ndarray:
    """The parallel degree of each stage. Runs that parallelise each operator by itself write a
    stage as ``degree x operators``.
    """
    texts = text.replace("|", " ").split()
    texts = texts * num_stages if len(texts) == 1 else texts
    return np.array([int(one.split("x")[0]) for one in texts])


def _is_whole(batch: StageBatch) -> bool:
    return all(
        bool((column == np.round(column)).all())
        for column in (batch.layers, batch.checkpointed_layers)
    )
