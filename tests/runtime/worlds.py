"""Small models, trained plainly and by plans: what tests of the runtime compare."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import inf, isclose
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from mistlab.plan.plan import Offload, Plan, StagePlan
from mistlab.plan.workload import ModelSpec, Workload
from mistlab.schedule.context_ways import GATHER, HEADS, RING
from runtime.comm.group import Alone, GroupMaker
from runtime.comm.topology import Connections, connected
from runtime.document_batches import documents_of, packed_batches
from runtime.documents import PackedSequences
from runtime.engine.executor import Executor, Report
from runtime.engine.streams.device_streams import Progress, SimulatedStreams
from runtime.engine.training import Training
from runtime.engine.work.stage_modules import INITIAL_STD, TABLE, initial_tensor
from runtime.models.families import model_of
from tests.runtime.lone_rank import own_groups
from tests.runtime.plain_bits import kept_coarsely
from tests.runtime.plain_masks import Masks
from tests.runtime.plain_model import Routing, corrected, loss_of
from tests.runtime.thread_ranks import Meeting, ThreadGroup, run_threads

# A parameter before training, by name and shape, and whether embeddings are tied.
Start = Callable[..., Tensor]

CPU = torch.device("cpu")
SEED = 7
STEPS = 3
# Adam's update is no steeper in a gradient than learning rate / epsilon. Where they are equal a
# weight is as near to another run's as its gradients are. A smaller epsilon magnifies the rounding
# of gradients that cancel out, and hides errors of large ones, whose updates are the learning rate
# whatever their size: gradients a thousandth too large change no tensor by 1e-6 at 1e-6.
LEARNING_RATE = EPSILON = 1e-4
TRAINING = Training(learning_rate=LEARNING_RATE, epsilon=EPSILON, dropout_seed=5)
# The first step's gradients overflow when they are squared, those of later ones do not.
OVERFLOWING = Training(learning_rate=LEARNING_RATE, epsilon=EPSILON, loss_scale=2.0**65)
ON_HOST = replace(TRAINING, steps_on_host=True)
TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trained:
    """Losses of all steps, and the weights after the last; of a plain run, also how near it came
    to a place where the model jumps (``Routing.nearest``)."""

    reports: Sequence[Report]
    weights: dict[str, Tensor]
    nearest: float = inf

    @property
    def losses(self) -> list[float]:
        return [report.loss for report in self.reports]


def workload(family: str = "gpt", *, layers: int = 4, batch: int = 8, **fields: Any) -> Workload:
    others: dict[str, Any] = {"hidden": 32, "heads": 4, "vocab": 96, "ffn": 64, **fields}
    precision = others.pop("precision", "fp32")
    sequence_length = others.pop("sequence_length", 16)
    attention = others.pop("attention", "flash")
    spec = ModelSpec.of(family=family, layers=layers, **others)
    return Workload(
        model=spec,
        sequence_length=sequence_length,
        global_batch=batch,
        attention=attention,
        precision=precision,
    )


def sequences(work: Workload, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    shape = (work.global_batch, work.sequence_length + 1)
    return torch.randint(work.model.vocab, shape, generator=generator)


def given(work: Workload, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens and targets of sequences; an encoder's hidden ones are every fifth, from any of the
    first five on."""
    if not work.model.is_encoder:
        return rows[:, :-1], rows[:, 1:]
    tokens = rows[:, :-1]
    count = tokens.shape[1] // 5 * 5
    places = torch.arange(tokens.shape[1])
    is_hidden = (places % 5 == rows[:, -1:] % 5) & (places < count)
    targets = torch.where(is_hidden, tokens, -100)
    return torch.where(is_hidden, work.model.vocab - 1, tokens), targets


def starting_tensor(name: str, shape: tuple[int, ...], *, tied: bool) -> Tensor:
    """A parameter before training, as the runtime has it; vectors are moved away from zeros and
    ones, so that each has a norm of its own, and a part in the wrong place shows."""
    tensor = initial_tensor(name, shape, SEED, tied=tied)
    if len(shape) > 1:
        return tensor
    generator = torch.Generator().manual_seed(crc32(name.encode()))
    return tensor + torch.empty(shape).normal_(std=INITIAL_STD, generator=generator)


def plainly(
    work: Workload,
    training: Training = TRAINING,
    steps: int = STEPS,
    start: Start = starting_tensor,
) -> Trained:
    """One process, the plain model, torch's own AdamW, the whole batch at once; with a loss scale,
    the first step is left out. Tests that train alike share the result, and leave it as it is."""
    # Models that differ in what costs nothing are equal.
    return _plainly(work, repr(work), training, steps, start)


@cache
def _plainly(work: Workload, said: str, training: Training, steps: int, start: Start) -> Trained:
    del said
    tied = work.model.tied_embeddings
    model = model_of(work)
    trains_all = work.train == "all"
    weights = {
        name: kept_coarsely(work, name, start(name, tuple(parameter.shape), tied=tied))
        for name, parameter in model.named_parameters()
    }
    trained = {
        name: one.requires_grad_()
        for name, one in weights.items()
        if trains_all or ".adapter." in name
    }
    corrections = {name: torch.zeros_like(one) for name, one in model.named_corrections()}
    optimizer = torch.optim.AdamW(
        trained.values(),
        betas=(training.beta1, training.beta2),
        eps=training.epsilon,
        weight_decay=training.weight_decay,
    )
    reports, nearest = [], inf
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = training.learning_rate_at(step)
        optimizer.zero_grad()
        masks = Masks(seed=training.dropout_seed, step=step, length=work.sequence_length)
        routing = Routing(capacity=work.expert_capacity)
        known, batch = {**weights, **corrections}, given(work, sequences(work, step))
        loss = loss_of(work.model, known, *batch, masks, routing=routing)
        nearest = min(nearest, routing.nearest)
        (loss + routing.loss).backward()
        norm = torch.nn.utils.clip_grad_norm_(trained.values(), training.clip_norm or float("inf"))
        skipped = training.loss_scale is not None and step == 0
        if not skipped:
            optimizer.step()
            if corrections:
                corrected(work.model, corrections, routing.choices)
        reports.append(
            Report(
                loss=loss.item(),
                gradient_norm=norm.item(),
                loss_scale=1.0,
                skipped=skipped,
                router_loss=routing.loss.item(),
            )
        )
    changed = {name: one.detach() for name, one in (trained | corrections).items()}
    return Trained(reports=reports, weights=changed, nearest=nearest)


def by_plan(  # noqa: PLR0913 (what a run has)
    work: Workload,
    plan: Plan,
    training: Training = TRAINING,
    *,
    progress: Progress = "random",
    seed: int = 0,
    steps: int = STEPS,
    start: Start = starting_tensor,
    packed: Callable[[], PackedSequences] | None = None,
) -> Trained:
    """All ranks of a plan as threads of this process, on simulated streams; with ``packed`` each
    trains on documents."""

    def rank_of(rank: int, meeting: Meeting) -> tuple[list[Report], Executor]:
        connections = connected(
            *(plan, rank, thread_groups(meeting, rank)),
            tied=work.model.head_has_table,
            experts=work.model.experts is not None,
        )
        streams = SimulatedStreams(progress=progress, seed=1000 * seed + rank)
        executor = begun(work, plan, connections, streams, training, start)
        documents = None if packed is None else packed()
        reports = [run_step(executor, work, connections, step, documents) for step in range(steps)]
        executor.flush()
        return reports, executor

    results = run_threads(plan.num_gpus, rank_of)
    for reports, _ in results:
        assert reports == results[0][0]
    return Trained(reports=results[0][0], weights=whole_weights(work, [one for _, one in results]))


def alone(
    work: Workload, plan: Plan, progress: Progress, training: Training = TRAINING
) -> Executor:
    """The only rank of a plan."""
    connections = connected(plan, 0, lambda _name, _ranks: Alone())
    streams = SimulatedStreams(progress=progress)
    return begun(work, plan, connections, streams, training)


def begun(
    work: Workload,
    plan: Plan,
    connections: Connections,
    streams: SimulatedStreams,
    training: Training,
    start: Start = starting_tensor,
) -> Executor:
    """A rank with the weights that a plain run starts with."""
    executor = Executor(work, plan, connections, streams, training, device=CPU, seed=SEED)
    tied = work.model.tied_embeddings
    for layer, one in executor.layers.items():
        tensors = {
            name: start(one.prefix + name, shape, tied=tied)
            for name, shape in one.whole_shapes.items()
        }
        executor.parameters.set_masters(layer, tensors)
    return executor


def thread_groups(meeting: Meeting, rank: int) -> GroupMaker:
    return own_groups(rank, lambda name, ranks: ThreadGroup(meeting, name, ranks, rank))


def run_step(
    executor: Executor,
    work: Workload,
    connections: Connections,
    step: int,
    packed: PackedSequences | None = None,
) -> Report:
    place, plan = connections.place, connections.topology.plan
    if packed is not None:
        where = {"step": step, "replica": place.data, "stage": place.stage}
        tensors = packed_batches(packed, plan, **where)
        executor.iterate(tensors, documents_of(packed, plan, tensors, **where))
        return executor.report()
    stage = plan.stages[place.stage]
    whole = sequences(work, step)

    batches = []
    for micro_batch in range(plan.micro_batches):
        first = (micro_batch * stage.data_parallel + place.data) * stage.micro_batch
        rows = whole[first : first + stage.micro_batch]
        batches.append(given(work, rows))
    executor.iterate(batches)
    return executor.report()


def whole_weights(work: Workload, executors: Sequence[Executor]) -> dict[str, Tensor]:
    """The model's tensors, put together from the masters of all ranks."""
    weights = {
        name: torch.full(parameter.shape, float("nan"))
        for name, parameter in model_of(work).state_dict().items()
    }
    for executor in executors:
        parameters = executor.parameters
        for layer in executor.layers:
            masters = parameters.masters(layer)
            for piece in parameters.pieces(layer):
                box = tuple(
                    slice(at, at + size)
                    for at, size in zip(piece.offsets, piece.sizes, strict=True)
                )
                flat = masters[piece.begin : piece.begin + piece.numel]
                weights[piece.name][box] = flat.view(piece.sizes)
        weights.update(executor.routers.corrections())
    if executors[0].shape.shares_table:
        weights[executors[0].parameters.twin] = weights[TABLE]
    return weights


def assert_alike(found: Trained, expected: Trained) -> None:
    """Losses within 1e-6, each tensor within 1e-6 of its norm."""
    np.testing.assert_allclose(found.losses, expected.losses, rtol=TOLERANCE)
    of_routers = [
        (mine.router_loss, its.router_loss)
        for mine, its in zip(found.reports, expected.reports, strict=True)
    ]
    for mine, its in of_routers:
        assert mine is None or (its is not None and isclose(mine, its, rel_tol=TOLERANCE))
    assert [r.skipped for r in found.reports] == [r.skipped for r in expected.reports]
    for name, tensor in expected.weights.items():
        error, size = (found.weights[name] - tensor).norm(), tensor.norm()
        # Corrections that nothing moves are zeros.
        assert error <= TOLERANCE * size, f"{name}: {error / size:.2e}"


def stage(layers: int = 4, **fields: Any) -> StagePlan:
    return StagePlan(
        **{
            "layers": layers,
            "data_parallel": 1,
            "tensor_parallel": 1,
            "micro_batch": 2,
            **fields,
        }
    )


def ratios(weights: float, gradients: float, optimizer: float, activations: float) -> Offload:
    return Offload(
        weights=weights, gradients=gradients, optimizer=optimizer, activations=activations
    )


MIXED = ratios(0.5, 0.37, 1.0, 0.5)


def random_plan(seed: int, *, most_ranks: int = 4) -> tuple[Workload, Plan]:
    """A workload and a plan of it, drawn from everything that a plan can say."""
    draw = np.random.default_rng(seed)
    while True:
        stages = int(draw.integers(1, 4))
        layers = int(draw.integers(max(2, stages), 7))
        cuts = np.sort(draw.choice(np.arange(1, layers), stages - 1, replace=False))
        sizes = np.diff([0, *cuts, layers])
        micro_batches, batch = int(draw.choice([1, 2, 3, 4])), int(draw.choice([2, 4]))
        made = [_random_stage(draw, int(size), batch) for size in sizes]
        if sum(one.num_gpus for one in made) <= most_ranks:
            break
    family = str(draw.choice(["gpt", "llama", "falcon"]))
    work = workload(
        family,
        layers=layers,
        batch=batch * micro_batches,
        tied_embeddings=bool(draw.random() < 0.3),
        biases=bool(draw.random() < 0.3),
        kv_heads=int(draw.choice([2, 4])),
        vocab=int(draw.choice([96, 97])),
    )
    made = _in_context(made, work, seed, most_ranks)
    return work, Plan(micro_batches=micro_batches, stages=tuple(made))


def _in_context(
    made: list[StagePlan], work: Workload, seed: int, most_ranks: int
) -> list[StagePlan]:
    """Some plans with two context-parallel ranks, which exchange keys in any way."""
    draw = np.random.default_rng((seed, 1))
    if draw.random() < 0.5 or 2 * sum(one.num_gpus for one in made) > most_ranks:
        return made
    splits_heads = all(work.model.kv_heads % (2 * one.tensor_parallel) == 0 for one in made)
    ways = (RING, GATHER, HEADS) if splits_heads else (RING, GATHER)
    return [
        replace(one, context_parallel=2, context_exchange=int(draw.choice(ways))) for one in made
    ]


def _random_stage(draw: np.random.Generator, layers: int, batch: int) -> StagePlan:
    data = int(draw.choice([1, 2, 2]))
    return stage(
        layers,
        data_parallel=data,
        tensor_parallel=int(draw.choice([1, 1, 2])),
        micro_batch=batch // data,
        zero=int(draw.integers(0, 4)),
        checkpointed_layers=int(draw.integers(0, layers + 1)),
        offload=ratios(*(float(draw.choice([0.0, 0.37, 0.5, 1.0])) for _ in range(4))),
    )
