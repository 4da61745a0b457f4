"""Hybrid models as Megatron-LM's options: a letter for each block, and the state-space mixer.

Its letters are those of patterns here: ``M`` the mixer of Mamba-2, ``*`` attention, ``-`` the
network, ``E`` experts. A plain pattern is what core 0.16 and all later ones take, beside other
numbers of blocks of the first and the last stage. One that is cut into segments, for stages that
are unlike otherwise or have several chunks, is what core 0.17 and later take. Whole blocks are
recomputed from core 0.18 on; before, the option is taken and ignored.
"""

from collections.abc import Iterator, Sequence

from mistlab.core.values import refuse
from mistlab.job.job import Job
from mistlab.plan.plan import Plan
from mistlab.plan.workload import ModelSpec
from mistlab.schedule.orders import INTERLEAVED
from mistlab.schedule.placement import even_shares

_LETTERS = frozenset("M*-E")
_SPEC = "megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec"
# The programs that train models without and with a pattern.
PLAIN_PROGRAM, HYBRID_PROGRAM = "pretrain_gpt.py", "pretrain_mamba.py"


def check_hybrid(model: ModelSpec) -> None:
    """Refuse kinds of blocks, and gates, that no option builds."""
    others = sorted(set(model.pattern) - _LETTERS)
    if others:
        _refuse("pattern", f"{model.pattern!r} has blocks of kind {' '.join(others)}")
    if model.state_space is not None and model.state_space.delta_rule:
        _refuse("state_space.delta_rule", "true")
    if model.attention_gate:
        _refuse("attention_gate", "true")


def _refuse(field: str, what: str) -> None:
    problem = (
        f"{what}, which the launch line cannot say, and without it the model would be another: "
        "give --to deepspeed or accelerate, where the script brings the model"
    )
    refuse(f"workload.model.{field}", problem)


def program_of(model: ModelSpec) -> str:
    """The program of Megatron-LM that trains a model."""
    return HYBRID_PROGRAM if model.pattern else PLAIN_PROGRAM


def hybrid_options(job: Job) -> Iterator[str]:
    """The options of a hybrid model's blocks; none of another model's."""
    model, mixer = job.workload.model, job.workload.model.state_space
    if not model.pattern:
        return
    letters = (model.pattern * model.layers)[: model.layers]
    yield f"--spec {_SPEC} --is-hybrid-model"
    if is_cut(job.plan):
        segments = _cut(letters, segment_sizes(job.plan))
        yield f'--hybrid-layer-pattern "{"|".join(segments)}"'
    else:
        yield f'--hybrid-override-pattern "{letters}"'
        yield from _ends(job.plan)
    if mixer is not None:
        yield f"--mamba-num-heads {mixer.heads} --mamba-head-dim {mixer.channels}"
        yield f"--mamba-num-groups {mixer.groups} --mamba-state-dim {mixer.states}"


def is_cut(plan: Plan) -> bool:
    """Whether a pattern has to say where stages begin: those between the first and the last are
    unlike, or stages have chunks."""
    inner = {stage.layers for stage in plan.stages[1:-1]}
    return len(inner) > 1 or plan.order in INTERLEAVED


def _ends(plan: Plan) -> Iterator[str]:
    """The options for the blocks of the first and the last stage, where stages are unlike."""
    layers = [stage.layers for stage in plan.stages]
    if len(set(layers)) > 1:
        yield f"--decoder-first-pipeline-num-layers {layers[0]}"
        yield f"--decoder-last-pipeline-num-layers {layers[-1]}"


def segment_sizes(plan: Plan) -> list[int]:
    """The number of blocks in each part of the model: first chunks of all stages, then second."""
    chunks = INTERLEAVED.get(plan.order, 1)
    parts = [even_shares(stage.layers, chunks) for stage in plan.stages]
    return [parts[stage][chunk] for chunk in range(chunks) for stage in range(plan.num_stages)]


def _cut(letters: str, sizes: Sequence[int]) -> Iterator[str]:
    begin = 0
    for size in sizes:
        yield letters[begin : begin + size]
        begin += size


def hybrid_notes(job: Job) -> Iterator[str]:
    """The versions of Megatron-core that a hybrid's line needs."""
    if not job.workload.model.pattern:
        return
    if is_cut(job.plan):
        yield "a pattern that is cut into segments needs Megatron-core 0.17 or later"
    if any(stage.checkpointed_layers for stage in job.plan.stages):
        yield "blocks of hybrids are recomputed from Megatron-core 0.18 on; 0.16 and 0.17 keep all"
