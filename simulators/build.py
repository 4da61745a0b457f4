"""The graph of an iteration: every pass of every micro-batch through every stage, linked up.

Layers count through the whole model, the embedding first: 0, the blocks from 1 on, the head last.
A send is an action of the stage that sends, with the layer whose output it is; its receipt takes no
time of its own. A send that blocks is on the compute stream of the sender, which goes on when it is
done, and the receiver waits for it.
"""

from collections.abc import Sequence
from itertools import pairwise

from mistlab.machine.slowdowns import STREAMS
from mistlab.schedule.orders import Order, pipeline_order
from mistlab.schedule.slot_table import Action, Phase, Template
from simulators.graph import TaskGraph
from simulators.pass_pattern import Name, Pattern, StageTasks, pattern_of


def build_graph(
    stages: Sequence[StageTasks], template: Template, micro_batches: int, order: Order = "1f1b"
) -> TaskGraph:
    """The tasks of one iteration of a pipeline."""
    graph = TaskGraph(stages=len(stages))
    orders = pipeline_order(len(stages), micro_batches, order)
    built = [
        _Stage(graph, stages, stage.stage, template).build(actions, micro_batches)
        for stage, actions in zip(stages, orders, strict=True)
    ]
    for sender, receiver in pairwise(built):
        for kind, here, there in (("F", sender, receiver), ("B", receiver, sender)):
            for micro_batch in range(micro_batches):
                key = kind, micro_batch
                graph.wait(there.begins[key], end_of=here.sent[key])
                if graph.labels[here.sent[key]][0] == "X":
                    graph.sends.append((here.sent[key], there.begins[key]))
    first, last = built[0], built[-1]
    if first.tied is not None and last.tied is not None:
        graph.wait(first.tied, end_of=last.reduced)
        graph.wait(last.tied, end_of=first.reduced)
    return graph


def build_stage(
    stages: Sequence[StageTasks], stage: int, template: Template, micro_batches: int
) -> TaskGraph:
    """The tasks of one stage of a 1F1B pipeline, which waits for no other."""
    graph = TaskGraph(stages=len(stages))
    actions = pipeline_order(len(stages), micro_batches)[stage]
    _Stage(graph, stages, stage, template).build(actions, micro_batches)
    return graph


class _Stage:
    """One stage's passes, one after another."""

    def __init__(
        self, graph: TaskGraph, stages: Sequence[StageTasks], stage: int, template: Template
    ) -> None:
        self.graph = graph
        self.stages = stages
        self.stage = stage
        self.tasks = stages[stage]
        self.template = template
        self.patterns: dict[Phase, Pattern] = {}
        # The last task of each name, and the last that the computing of the next pass waits for.
        self.last: dict[Name, int] = {}
        self.computed = self.holding = -1
        # What frees the buffers of each layer passed, latest last.
        self.releases: list[list[int]] = [[] for _ in range(template.depth + 1)]
        # What was swapped out and not yet in again: by kind, layer, and micro-batch if it matters.
        self.outside: dict[tuple[str, int, int | None], int] = {}
        self.begins: dict[tuple[str, int], int] = {}
        self.sent: dict[tuple[str, int], int] = {}
        # The last backward or reduction, and the reduction of what two stages tie, if they do.
        self.reduced = -1
        self.tied: int | None = None

    def build(self, actions: Sequence[Action], micro_batches: int) -> "_Stage":
        for action in actions:
            self._pass(action, micro_batches)
        self._step(micro_batches)
        return self

    def _pass(self, action: Action, micro_batches: int) -> None:
        phase = _phase(action, micro_batches)
        pattern = self.patterns.get(phase)
        if pattern is None:
            pattern = self.patterns[phase] = pattern_of(self.tasks, self.template, phase)
        send = self._send(action)
        graph, base = self.graph, len(self.graph)
        graph.labels += pattern.labels
        graph.micro_batches += [action.micro_batch] * len(pattern.labels)
        graph.lanes += [len(STREAMS) * self.stage + stream for stream in pattern.streams]
        graph.seconds += pattern.seconds
        graph.waits += pattern.waits
        graph.after_end += pattern.after_end
        graph.after_start += pattern.after_start
        self._link(pattern, base)
        self._swap(pattern, base, action.micro_batch)
        self.computed = self.holding = base + pattern.computing[-1]
        key = action.kind, action.micro_batch
        self.begins[key] = base + pattern.computing[0]
        self.sent[key] = self.computed
        if send is not None:
            graph.wait(send, end_of=self.computed)
            self.sent[key] = send
            if self.template.sends == "blocking":
                self.holding = send

    def _link(self, pattern: Pattern, base: int) -> None:
        """Let the pass go on from the pass before."""
        graph, held = self.graph, len(self.releases)
        for name, task in pattern.first.items():
            if name in self.last and name[0] not in "FB":
                graph.wait(base + task, end_of=self.last[name])
        if self.computed >= 0:
            for task in pattern.opening:
                graph.wait(base + task, end_of=self.computed)
            graph.wait(base + pattern.computing[0], end_of=self.holding)
        left = self.last.pop(("O", ">"), None)
        if left is not None:
            graph.wait(base + pattern.computing[0], end_of=left)
        for task, fetch, before in zip(
            pattern.computing, pattern.fetching, self.releases, strict=False
        ):
            for release in before:
                is_activations = graph.labels[release][0] == "A"
                graph.wait(base + (fetch if is_activations else task), end_of=release)
        for name, task in pattern.last.items():
            self.last[name] = base + task
        freed = [[base + task for task in tasks] for tasks in pattern.releases]
        self.releases = [*self.releases, *freed][-held:]

    def _swap(self, pattern: Pattern, base: int, micro_batch: int) -> None:
        """Let what comes back to the GPU wait until it has left it."""
        for ((kind, direction), layer), task in pattern.by_layer.items():
            if direction is not None:
                key = kind, layer, micro_batch if kind == "A" else None
                if direction == ">":
                    self.outside[key] = base + task
                elif key in self.outside:
                    self.graph.wait(base + task, end_of=self.outside.pop(key))

    def _send(self, action: Action) -> int | None:
        """A task that sends the outcome of a pass on, if it goes anywhere and takes any time.

        Numbered before the pass's own tasks: the neighbour waits for it, for reductions nobody.
        """
        sends_forward = action.kind == "F"
        link = self.stage if sends_forward else self.stage - 1
        if not 0 <= link < len(self.stages) - 1 or not self.stages[link].send_s:
            return None
        last = self.tasks.first_layer + (self.tasks.num_layers - 1 if sends_forward else 0)
        send = self.graph.add(
            Action(stage=self.stage, kind="X", layer=last, micro_batch=action.micro_batch),
            "compute" if self.template.sends == "blocking" else "gpu_to_gpu",
            self.stages[link].send_s,
        )
        uses = self.tasks.networks.get(action.kind)
        if uses:
            self.graph.networks[send] = uses
        name: Name = ("X", None)
        if name in self.last:
            self.graph.wait(send, end_of=self.last[name])
        self.last[name] = send
        return send

    def _step(self, micro_batches: int) -> None:
        """What follows the last backward, one after another."""
        self.reduced = self.last.get(("R", None), self.computed)
        before = [self.holding, self.reduced]
        if self.tasks.tied_s:
            action = Action(stage=self.stage, kind="R", micro_batch=micro_batches - 1)
            self.tied = self.graph.add(action, "gpu_to_gpu", self.tasks.tied_s)
            for source in before:
                self.graph.wait(self.tied, end_of=source)
            before = [self.tied]
        for row in self.template.phases["step"]:
            if self.tasks.zero < row.from_zero:
                continue
            for layer, seconds in enumerate(self.tasks.seconds[row.kind, row.direction]):
                if seconds > 0:
                    action = Action(
                        stage=self.stage,
                        kind=row.kind,
                        direction=row.direction,
                        layer=self.tasks.first_layer + layer,
                        micro_batch=micro_batches - 1,
                    )
                    task = self.graph.add(action, row.stream, seconds)
                    for source in before:
                        self.graph.wait(task, end_of=source)
                    before = [task]


def _phase(action: Action, micro_batches: int) -> Phase:
    if action.kind == "F":
        return "first_forward" if action.micro_batch == 0 else "forward"
    return "last_backward" if action.micro_batch == micro_batches - 1 else "backward"
