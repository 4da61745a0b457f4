"""The memory of stages for micro-batches in any order of passes, beyond what the closed form
counts.

The closed form counts the most micro-batches held at once, as if all blocks were equal, and the
head's activations for one micro-batch. But chunks hold different layers, and a head may hold
several micro-batches. Where gradients of weights have their own passes, recomputed blocks also stay
in memory until these passes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mistlab.schedule.placement import Placement
from mistlab.schedule.plan_orders import in_flight_of_plan, passes_of_plan, shortened
from mistlab.schedule.stage_passes import StagePasses
from mistlab.symbolic.layer import sum_name
from mistlab.symbolic.layer_types import HEAD, type_of
from mistlab.symbolic.stage_model import StageModel
from mistlab.symbolic.treatments import PLAIN
from mistlab.values.parts import batch_of_parts
from mistlab.values.plan import Plan
from mistlab.values.stages import StageBatch


def unlike_bytes(plan: Plan, model: StageModel) -> list[float]:
    """Bytes on a GPU of each stage that the closed form leaves out, or (below zero) counts too
    many."""
    plan = shortened(plan)
    passes = passes_of_plan(plan)
    placement, names = passes[0].placement, model.types.names
    splits = any(of_stage.splits_backward for of_stage in passes)
    whole = whole_types(plan, model) if splits else {}
    sums = model.layers_of(StageBatch.of_plan(plan))
    types = model.types.of_stages(batch_of_parts([plan], placement).value)
    found = []
    for stage, held in enumerate(in_flight_of_plan(plan)):
        saved = {name: float(sums[sum_name(name, "saved_bytes")][stage]) for name in names}
        away = plan.stages[stage].offload.activations
        stay = {name: 1 - away if name in model.types.of_blocks else 1.0 for name in names}
        own = [
            _Held.of([names[place] for place in layers], saved, stay, whole)
            for layers in (types[part] for part in placement.of_stage(stage))
        ]
        head = sum(one.head for one in own)
        counted = held * sum(one.between - one.head for one in own) + head
        sent = _sent_beyond(placement, stage) * max(0.0, held - 1)
        sent_bytes = sent * float(sums[sum_name(model.types.of_blocks[0], "output_bytes")][stage])
        found.append(_most(passes[stage], own) - counted + sent_bytes)
    return found


def _sent_beyond(placement: Placement, stage: int) -> float:
    """The share of a stage's chunks that send their outcome to another stage, beyond the share that
    the closed form counts: all of them, but none of the stage with the head."""
    if placement.is_loop:
        return 0.0
    sending = [placement.sends_away(part) for part in placement.of_stage(stage)]
    return sum(sending) / len(sending) - (stage != placement.last_stage)


def whole_types(plan: Plan, model: StageModel) -> Mapping[str, str]:
    """For each type of layers, the type that keeps as many bytes as this one keeps for the
    gradients of its weights.

    A block that was recomputed is whole then, but the backward pass has freed attention's scores,
    which no weight needs.
    """
    if not any(of_stage.splits_backward for of_stage in passes_of_plan(shortened(plan))):
        return {}
    found = {name: name for name in model.types.names}
    for kind in model.types.kinds:
        scoreless = type_of(kind, "core_recomputed")
        ways = (PLAIN, *model.types.treatments)
        found |= dict.fromkeys((type_of(kind, way) for way in ways), scoreless)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """Bytes that a chunk keeps on the GPU between its forward and its backward pass, and between
    its backward pass and its pass for weights; ``head`` are the head's bytes among them."""

    between: float
    afterwards: float
    head: float

    @classmethod
    def of(
        cls,
        layers: Sequence[str],
        saved: Mapping[str, float],
        stay: Mapping[str, float],
        whole: Mapping[str, str],
    ) -> "_Held":
        """A chunk of layers of these types, which keep a share ``stay`` of their activations on the
        GPU."""
        return cls(
            between=sum(stay[name] * saved[name] for name in layers),
            afterwards=sum(saved[whole.get(name, name)] for name in layers),
            head=sum(saved[name] for name in layers if name == HEAD),
        )


def _most(passes: StagePasses, chunks: Sequence[_Held]) -> float:
    held = most = 0.0
    for one in passes:
        of = chunks[one.chunk]
        if one.kind == "F":
            held += of.between
        elif one.kind == "W":
            held -= of.afterwards
        else:
            held += (of.afterwards if passes.splits_backward else 0.0) - of.between
        most = max(most, held)
    return most
