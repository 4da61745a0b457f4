"""One played iteration of a plan, drawn: as a trace for Perfetto and as a picture."""

from pathlib import Path

from experiments.cli.commandline import progress
from mistlab.core.files import naming
from mistlab.cost.memory import reserved_bytes, room_of_plan
from mistlab.engines.table import ENGINES
from mistlab.graph.stage_model import StageModel
from mistlab.job.job import Job
from mistlab.stages.stage_batch import StageBatch
from simulators.events import Simulation
from simulators.memory import MemoryOverTime, memory_of
from simulators.timeline import trace_text


def draw(job: Job, simulation: Simulation, name: str, folder: Path) -> None:
    """One iteration as a trace and as a picture."""
    from experiments.reports.lanes import timeline  # noqa: PLC0415 (needs matplotlib)

    trace, picture = folder / f"{name}.trace.json", folder / f"{name}.svg"
    with naming(trace):
        trace.write_text(trace_text(simulation, _memory(job, simulation)), encoding="utf-8")
    timeline(simulation, picture, name)
    progress(f"{trace} (open it at ui.perfetto.dev), {picture}")


def _memory(job: Job, simulation: Simulation) -> list[MemoryOverTime]:
    """Memory of each stage over the iteration; what runs out is said."""
    model = StageModel.of(job.workload, job.plan.engine)
    batch = StageBatch.of_plan(job.plan)
    figures = model.figures(batch)
    reserved = reserved_bytes(figures, batch, job.cluster, ENGINES[job.plan.engine])
    beyond = reserved - figures.peak_bytes
    memory = memory_of(simulation, job.plan, model, room_of_plan(job.cluster, job.plan) - beyond)
    for stage in memory:
        if stage.overflow:
            progress(stage.overflow)
    return memory
