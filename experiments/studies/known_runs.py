"""Published runs whose plan is known, as predicted: weak scaling, and a trained model."""

from collections.abc import Iterator
from dataclasses import asdict
from importlib.resources import files

from experiments.calibration.published import PublishedRun, carried
from experiments.calibration.whole_runs import is_said_to_fit, predicted_s
from experiments.pages.groups import grouped
from experiments.pages.tables import Row
from mistlab import catalog
from mistlab.core.units import TFLOP
from mistlab.cost.kernels import megatron_flop
from mistlab.cost.pipeline import Terms
from mistlab.machine.cluster import Cluster
from mistlab.plan.dimensions import num_gpus
from mistlab.plan.plan import Plan, StagePlan
from mistlab.plan.workload import Workload
from mistlab.schedule.orders import DEFAULT_ORDER
from searchers.meshes import even_layers
from simulators.symbolic import SymbolicPredictor

PETA_IN_TERA = 1000
# Of the model on each stage, which take turns.
CHUNKS = (1, 2, 4)


def weak_scaling_rows() -> Iterator[Row]:
    """Megatron-LM's weak scaling with all columns of its table, published and predicted."""
    place = files("experiments.calibration").joinpath("published.yaml")
    text = place.read_text(encoding="utf-8")
    _, runs = carried(text, catalog.hardware("a100-80gb"))
    for name, alike in grouped(runs, lambda run: run.name).items():
        # The table gives no micro-batch: the fastest that fits.
        timed = [
            (predicted_s(run, run.cluster.hardware), place)
            for place, run in enumerate(alike)
            if is_said_to_fit(run)
        ]
        seconds, chosen = min(timed)
        yield _weak_scaling_row(name, alike[chosen], seconds)


def _weak_scaling_row(name: str, run: PublishedRun, seconds: float) -> Row:
    workload, gpus = run.workload, int(num_gpus(run.stages.value).sum())
    model = workload.model
    flop = megatron_flop(
        batch=workload.global_batch,
        sequence_length=workload.sequence_length,
        layers=model.layers,
        hidden=model.hidden,
        vocab=model.vocab,
    )
    peak = run.cluster.peak_flop_per_s(workload.precision) / TFLOP
    rates = {"published_": run.iteration_s, "": seconds}
    tflop = {key: flop / (gpus * taken * TFLOP) for key, taken in rates.items()}
    return {
        "chapter": "published",
        "billion_parameters": float(name.split(maxsplit=1)[0]),
        "heads": model.heads,
        "hidden": model.hidden,
        "layers": model.layers,
        "tensor_parallel": int(run.stages.tensor_parallel[0]),
        "pipeline_parallel": len(run.stages),
        "gpus": gpus,
        "global_batch": workload.global_batch,
        "micro_batch": int(run.stages.micro_batch[0]),
        **{f"{key}tflop_per_s_per_gpu": rate for key, rate in tflop.items()},
        **{f"{key}share_of_peak": rate / peak for key, rate in tflop.items()},
        **{f"{key}pflop_per_s": rate * gpus / PETA_IN_TERA for key, rate in tflop.items()},
        # Of the time, as elsewhere.
        "error": seconds / run.iteration_s - 1,
    }


def llama3_405b() -> Iterator[Row]:
    """Llama 3 405B on 16,384 H100 by its published degrees, with ever more chunks a stage."""
    cluster = Cluster(hardware=catalog.hardware("h100-80gb"), nodes=2048, gpus_per_node=8)
    workload = Workload(
        model=catalog.model("llama3-405b"),
        sequence_length=8192,
        global_batch=2048,
        attention="flash",
        precision="bf16",
    )
    predictor = SymbolicPredictor(workload=workload, cluster=cluster)
    stages, data, tensor = 16, 128, 8
    micro_batches = workload.global_batch // data
    for chunks in CHUNKS:
        plan = Plan(
            order=f"interleaved-{chunks}" if chunks > 1 else DEFAULT_ORDER,
            micro_batches=micro_batches,
            stages=tuple(
                StagePlan(
                    layers=layers,
                    data_parallel=data,
                    tensor_parallel=tensor,
                    sequence_parallel=1,
                    micro_batch=1,
                    zero=1,
                )
                for layers in even_layers(workload.model.layers, stages)
            ),
        )
        found = predictor.predict(plan)
        yield {
            "chapter": "trained",
            "gpus": cluster.num_gpus,
            "global_batch": workload.global_batch,
            "chunks": chunks,
            "iteration_s": found.iteration_s,
            "low_s": found.iteration_s_low,
            "high_s": found.iteration_s_high,
            "share_of_peak": found.mfu,
            "tflop_per_s_per_gpu": found.mfu * cluster.peak_flop_per_s("bf16") / TFLOP,
            "terms_s": asdict(Terms.of(plan, found)),
            "fits": found.fits,
            "peak_reserved_bytes": found.peak_reserved_bytes,
        }
