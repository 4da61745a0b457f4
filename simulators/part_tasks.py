"""The times of the tasks of each part of a plan's model, for the event simulator.

A part is a chunk of a stage; a stage that is not cut into chunks is one part.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from mistlab.cost.figures_at import groups_of
from mistlab.cost.host_waits import of_ranks, peculiar_s
from mistlab.cost.tasks import TaskModel, TaskSeconds, task_columns
from mistlab.cost.weight_gradients import weight_gradients_s
from mistlab.engines.engine_parts import HostTime
from mistlab.machine.cluster import Cluster
from mistlab.schedule.orders import DEFAULT_ORDER
from mistlab.schedule.placement import HERE, PREVIOUS, Placement
from mistlab.schedule.slot_table import Kind, Template
from mistlab.schedule.stage_chunks import parts_of_plan
from mistlab.schedule.stage_passes import StagePasses
from mistlab.values.parts import batch_of_parts
from mistlab.values.plan import Plan
from mistlab.values.stages import StageBatch
from simulators.network import Use
from simulators.pass_pattern import Name, StageTasks
from simulators.play import ALONE, Factors

_COMPUTING: Mapping[Kind, str] = {"F": "forward", "B": "backward"}


def tasks_of_parts(
    models: Sequence[TaskModel], plan: Plan, passes: Sequence[StagePasses], cluster: Cluster
) -> tuple[list[StageTasks], list[Factors]]:
    """The times of each part's tasks, and the factors by which the streams of each stage slow one
    another; ``models`` has the tasks of each group of the cluster's nodes."""
    batch = StageBatch.of_plan(plan)
    columns = {name: batch.value(name) for name in task_columns()}
    group_of = groups_of(cluster, batch.first_rank).tolist()
    of_group = {group: models[group].seconds(columns) for group in dict.fromkeys(group_of)}
    of_stages = [of_group[group] for group in group_of]
    placement, model = passes[0].placement, models[0]
    later_s = peculiar_s(batch.value, cluster)
    parts = parts_of_plan(plan, placement)
    of_parts = model.types.of_stages(batch_of_parts([plan], placement).value)
    networks, names = _networks(of_stages, batch, placement), _names(model.template)
    awaits = model.host is not None and model.host.waits_for_sends
    is_awaited = awaits and plan.num_stages > 1 and plan.order == DEFAULT_ORDER
    tied_ends = plan.num_stages > 1 and not placement.ends_meet
    tasks = []
    for number, (part, types, uses) in enumerate(zip(parts, of_parts, networks, strict=True)):
        stage = part.stage
        seconds = of_stages[stage]
        of_name = {name: _seconds(seconds, name, stage, types) for name in names}
        host = _host_of(model, batch, stage)
        issues, late_s = _issues(model, host, types), float(later_s[stage])
        if late_s or is_awaited:
            of_name |= _as_issued(model, issues, of_name, types, late_s)
        if passes[stage].splits_backward:
            of_name |= _split(seconds, of_name["B", None], stage, types)
        is_end = part.has_embedding or part.has_head
        tasks.append(
            StageTasks(
                stage=stage,
                first_layer=part.first_layer,
                zero=plan.stages[stage].zero,
                seconds=of_name,
                send_s=_send_s(of_stages, placement, number),
                networks=uses,
                tied_s=float(seconds.tied_s[stage]) if tied_ends and is_end else 0.0,
                # Passes that take as long as their host wait for nothing else of it.
                issues={} if is_awaited else issues,
            )
        )
    return tasks, _factors(of_stages)


def _split(
    seconds: TaskSeconds, whole: Sequence[float], stage: int, types: Sequence[int]
) -> dict[Name, list[float]]:
    """Divide ``whole`` backward passes into passes for inputs and passes for weights.

    Tensor-parallel ranks then wait for one another where products for weights hid their messages.
    """
    weights, hidden = weight_gradients_s(seconds)[:, stage], seconds.hidden_s[:, stage]
    of_weights = [float(weights[layer_type]) for layer_type in types]
    of_inputs = [
        both - float(weights[layer_type]) + float(hidden[layer_type])
        for both, layer_type in zip(whole, types, strict=True)
    ]
    return {("B", None): of_inputs, ("W", None): of_weights}


def _host_of(model: TaskModel, batch: StageBatch, stage: int) -> HostTime | None:
    """The host of a stage, whose context-parallel ranks launch more kernels than a single rank."""
    if model.host is None:
        return None
    ranks, way = (batch.value(name)[[stage]] for name in ("context_parallel", "context_exchange"))
    (forward_s,), (backward_s,) = of_ranks(model.host, ranks, way)
    return replace(model.host, forward_s=float(forward_s), backward_s=float(backward_s))


def _as_issued(
    model: TaskModel,
    issues: Mapping[Kind, Sequence[float]],
    of_name: Mapping[Name, Sequence[float]],
    types: Sequence[int],
    later_s: float,
) -> dict[Name, list[float]]:
    """The passes of a part whose host is never a pass ahead, and whose blocks hosts issue so much
    later."""
    if not issues:
        return {}
    blocks = sum(model.types.names[one] in model.types.of_blocks for one in types)
    issued_s = sum(map(sum, issues.values())) + blocks * later_s
    names: tuple[Name, Name] = ("F", None), ("B", None)
    longer = max(1.0, issued_s / sum(sum(of_name[name]) for name in names))
    return {name: [longer * seconds for seconds in of_name[name]] for name in names}


def _issues(
    model: TaskModel, host: HostTime | None, types: Sequence[int]
) -> dict[Kind, list[float]]:
    """The host's seconds to issue each layer's passes, where the GPU may wait for the host."""
    if host is None:
        return {}
    names = [model.types.names[one] for one in types]
    blocks = [name in model.types.of_blocks for name in names]
    again = [name not in model.types.kinds for name in names]
    return {
        "F": [host.forward_s if is_block else host.end_s for is_block in blocks],
        "B": [
            host.backward_s + host.forward_s * is_again if is_block else host.end_s
            for is_block, is_again in zip(blocks, again, strict=True)
        ],
    }


def _send_s(of_stages: Sequence[TaskSeconds], placement: Placement, part: int) -> float:
    """Seconds of a send between a part and the next one."""
    stage, step = placement.stages[part], placement.goes_to(part)
    if step == HERE:
        return 0.0
    seconds = of_stages[stage]
    return float((seconds.receive_s if step == PREVIOUS else seconds.send_s)[stage])


def _networks(
    of_stages: Sequence[TaskSeconds], batch: StageBatch, placement: Placement
) -> list[dict[Kind, tuple[Use, ...]]]:
    """The links across nodes that each part's sends use, and the share of each that they take.

    An even link is traffic out of a node, an odd link is traffic into it. A stage's first rank
    stands for all its ranks. A send takes an equal share of equal networks; the faster of two
    unlike networks has as many bytes to pass on as the slower one.
    """
    shapes = of_stages[0].shapes
    nodes = (batch.first_rank // of_stages[0].model.cluster.gpus_per_node).tolist()
    found: list[dict[Kind, tuple[Use, ...]]] = [{} for _ in placement.stages]
    for place, (sender, receiver) in enumerate(pairwise(placement.stages)):
        step = placement.goes_to(place)
        here, there = nodes[sender], nodes[receiver]
        # In a loop the last stage sends to the first, which is in its node where there is one
        # alone.
        stays = step == HERE or (receiver < sender and here == there)
        if shapes.crosses_to_next[receiver if step == PREVIOUS else sender] and not stays:
            ends = of_stages[sender], of_stages[receiver]
            of_sender = _shares(ends, sender)
            of_receiver = _shares(ends, receiver)
            found[place]["F"] = ((2 * here, of_sender[0]), (2 * there + 1, of_sender[1]))
            found[place + 1]["B"] = ((2 * there, of_receiver[1]), (2 * here + 1, of_receiver[0]))
    return found


def _shares(ends: tuple[TaskSeconds, TaskSeconds], stage: int) -> tuple[float, float]:
    """The shares of the networks at both ends of a send, with as many senders as a stage has in a
    node."""
    links = [end.model.links for end in ends]
    senders = int(ends[0].shapes.senders_of_node[stage])
    parts = [one.part_of_network(senders) for one in links]
    if links[0] is not links[1]:
        rates = [one.cluster.inter_node_bytes_per_s for one in links]
        bytes_per_s = min(part * rate for part, rate in zip(parts, rates, strict=True))
        parts = [bytes_per_s / rate for rate in rates]
    # A send that is late uses the network for the rest of its time.
    own = ends[0]
    in_time = 1 - float(own.late_s[stage] / own.send_s[stage])
    return parts[0] * in_time, parts[1] * in_time


def _names(template: Template) -> list[Name]:
    """The kinds and directions of tasks in a slot table."""
    rows = [row for phase in template.phases.values() for row in phase]
    return list(dict.fromkeys((row.kind, row.direction) for row in rows))


def _seconds(seconds: TaskSeconds, name: Name, stage: int, types: Sequence[int]) -> list[float]:
    """Seconds of a stage's tasks of one name, by layer."""
    kind, direction = name
    of_type = seconds.alone(kind, direction or "")[:, stage]
    if kind in _COMPUTING:
        of_type = of_type + seconds.tensor_s[_COMPUTING[kind]][:, stage]
    of_type_s: list[float] = of_type.tolist()
    return [of_type_s[layer_type] for layer_type in types]


def _factors(of_stages: Sequence[TaskSeconds]) -> list[Factors]:
    found: list[Factors] = [ALONE] * len(of_stages)
    for seconds in dict.fromkeys(of_stages):
        model = seconds.model
        if model.template.depth == 0 and model.cluster.hardware.interference is None:
            continue
        for rows, factors in seconds.factors():
            for stage in np.flatnonzero(rows).tolist():
                if of_stages[stage] is seconds:
                    found[stage] = factors.tolist()
    return found
