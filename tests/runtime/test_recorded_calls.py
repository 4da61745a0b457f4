"""The collectives that ranks really call are those that were derived without running them."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from mistlab.plan.plan import Plan  # noqa: E402
from mistlab.plan.workload import Workload  # noqa: E402
from mistlab.schedule.context_ways import GATHER, WORDS  # noqa: E402
from runtime.checks.collectives.calls import (  # noqa: E402
    COLUMNS,
    ITERATIONS,
    JOINED,
    OF_JOINED,
    OF_POSITIONS,
    OF_VECTORS,
    calls_of,
)
from runtime.checks.collectives.world_calls import Call, RankCalls  # noqa: E402
from runtime.comm.group import Group, Pending  # noqa: E402
from runtime.comm.topology import Topology, connected  # noqa: E402
from runtime.engine.streams.device_streams import SimulatedStreams  # noqa: E402
from tests.runtime.thread_ranks import Meeting, run_threads  # noqa: E402
from tests.runtime.worlds import (  # noqa: E402
    MIXED,
    TRAINING,
    begun,
    random_plan,
    run_step,
    stage,
    thread_groups,
    workload,
)

IN_ATTENTION = -1


class Recorded:
    """A group that notes what it is called with, in numbers."""

    def __init__(self, group: Group, name: str, ranks: Sequence[int], calls: list[Any]) -> None:
        self._group, self._name, self._ranks, self._calls = group, name, ranks, calls
        self.size, self.rank = group.size, group.rank

    def all_reduce(self, tensor: Tensor, operation: str = "sum") -> Pending | None:
        self._calls.append((self._name, "all_reduce", tensor.numel()))
        return self._group.all_reduce(tensor, operation)

    def all_gather(self, whole: Tensor, own: Tensor) -> Pending | None:
        self._calls.append((self._name, "all_gather", whole.numel()))
        return self._group.all_gather(whole, own)

    def reduce_scatter(self, whole: Tensor, into: Tensor | None = None) -> Pending | None:
        self._calls.append((self._name, "reduce_scatter", whole.numel()))
        return self._group.reduce_scatter(whole, into)

    def all_to_all(
        self, received: Tensor, sent: Tensor, from_each: Sequence[int], to_each: Sequence[int]
    ) -> Pending | None:
        self._calls.append((self._name, "all_to_all"))
        return self._group.all_to_all(received, sent, from_each, to_each)

    def exchange(
        self, sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]]
    ) -> Pending | None:
        numbers = [
            {self._ranks[peer]: self._size(tensor) for tensor, peer in messages}
            for messages in (sends, receives)
        ]
        if sends or receives:
            self._calls.append((self._name, "exchange", *numbers))
        return self._group.exchange(sends, receives)

    def _size(self, tensor: Tensor) -> int:
        """What ranks exchange inside attention is of several sizes."""
        return IN_ATTENTION if self._name == "context" and tensor.numel() > 1 else tensor.numel()


# The sizes of experts' sections are named so, before their layers.
OF_EXPERTS = "experts "
UNLIKE = Plan(
    micro_batches=3,
    stages=(
        stage(2, data_parallel=2, tensor_parallel=2, micro_batch=1, zero=1, checkpointed_layers=1),
        stage(2, micro_batch=2, offload=MIXED),
    ),
)
CASES = {
    "tied ends of unlike degrees": (workload("llama", tied_embeddings=True, batch=6), UNLIKE),
    "parallel blocks in one stage": (
        workload("falcon", tied_embeddings=True),
        Plan(
            micro_batches=2,
            stages=(stage(data_parallel=2, tensor_parallel=2, zero=3, checkpointed_layers=3),),
        ),
    ),
    **{
        f"{words} by tensor-parallel ranks": (
            workload("llama", batch=4),
            Plan(
                micro_batches=2,
                stages=(
                    stage(
                        2,
                        tensor_parallel=2,
                        context_parallel=2,
                        context_exchange=way,
                        checkpointed_layers=1,
                    ),
                    stage(2, context_parallel=2, context_exchange=way, zero=1),
                ),
            ),
        )
        for way, words in enumerate(WORDS)
    },
    **{f"random plan {seed}": random_plan(seed) for seed in (4, 11, 15)},
}
PARTS = stage(2, tensor_parallel=2, sequence_parallel=1, checkpointed_layers=1)
CASES |= {
    "parts of sequences, two stages": (
        workload("gpt", biases=True, batch=4),
        Plan(micro_batches=2, stages=(PARTS, PARTS)),
    ),
    "parts of sequences, parallel blocks, ZeRO-3": (
        workload("falcon", layers=2, batch=4),
        Plan(micro_batches=2, stages=(replace(PARTS, data_parallel=2, micro_batch=1, zero=3),)),
    ),
    "parts of sequences, passes for weights, one table": (
        workload("llama", tied_embeddings=True, batch=8),
        Plan(micro_batches=4, stages=(PARTS, PARTS), order="zb-h1"),
    ),
    "parts of sequences, gathered keys": (
        workload("llama", layers=2, batch=4),
        Plan(
            micro_batches=2,
            stages=(replace(PARTS, context_parallel=2, context_exchange=GATHER, zero=2),),
        ),
    ),
    "parts of sequences and of a table in a V": (
        workload("gpt", tied_embeddings=True, batch=8),
        Plan(micro_batches=4, stages=(PARTS, PARTS), order="zb-v"),
    ),
}


EXPERTS = {"count": 4, "active": 2, "ffn": 24, "shared_ffn": 20, "dense_blocks": 1}
MIXTURE = workload("llama", layers=3, batch=4, experts=EXPERTS)
OF_TWO = {"expert_parallel": 2, "expert_tensor_parallel": 1, "checkpointed_layers": 1}
CASES |= {
    "experts over data ranks": (
        MIXTURE,
        Plan(micro_batches=2, stages=(stage(3, data_parallel=2, micro_batch=1, zero=3, **OF_TWO),)),
    ),
    "experts over tensor ranks, copies over data ranks": (
        MIXTURE,
        Plan(
            micro_batches=2,
            stages=(stage(3, data_parallel=2, tensor_parallel=2, micro_batch=1, zero=1, **OF_TWO),),
        ),
    ),
    "experts and their widths, parts of sequences": (
        MIXTURE,
        Plan(
            micro_batches=2,
            stages=(
                replace(
                    *(PARTS,),
                    layers=3,
                    data_parallel=2,
                    micro_batch=1,
                    zero=2,
                    expert_parallel=2,
                    expert_tensor_parallel=2,
                ),
            ),
        ),
    ),
    "choices by parts of sequences of context ranks": (
        workload(
            "llama",
            layers=2,
            batch=4,
            experts={**EXPERTS, "router": {"balance_loss": 0.1, "z_loss": 0.1}},
        ),
        Plan(
            micro_batches=2,
            stages=(
                stage(
                    2,
                    tensor_parallel=2,
                    sequence_parallel=1,
                    context_parallel=2,
                    expert_parallel=2,
                    checkpointed_layers=1,
                ),
            ),
        ),
    ),
    "experts in a V": (
        workload("llama", batch=4, experts={**EXPERTS, "shared_ffn": 0}),
        Plan(
            micro_batches=4,
            stages=(
                stage(2, tensor_parallel=2, micro_batch=1, expert_parallel=2),
                stage(2, tensor_parallel=2, micro_batch=1, expert_tensor_parallel=2),
            ),
            order="zb-v",
        ),
    ),
}


CASES |= {
    "further tokens": (
        workload("llama", batch=4, further_tokens=2, qk_norm=True),
        Plan(micro_batches=2, stages=(stage(2), stage(2, tensor_parallel=2, zero=1))),
    ),
    "further tokens, parts of sequences": (
        workload("llama", batch=4, further_tokens=2, tied_embeddings=True),
        Plan(micro_batches=2, stages=(PARTS, replace(PARTS, checkpointed_layers=0))),
    ),
    "further tokens, parts of sequences, passes for weights": (
        workload("gpt", batch=8, further_tokens=1),
        Plan(micro_batches=4, stages=(PARTS, PARTS), order="zb-h1"),
    ),
    "further tokens, experts, ZeRO-3": (
        replace(MIXTURE, model=replace(MIXTURE.model, further_tokens=1)),
        Plan(
            micro_batches=2,
            stages=(
                stage(1, data_parallel=2, micro_batch=1),
                stage(2, data_parallel=2, micro_batch=1, zero=3, **OF_TWO),
            ),
        ),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_calls_that_are_made_are_those_that_were_derived(name: str) -> None:
    work, plan = CASES[name]
    tied = work.model.head_has_table

    def rank_of(rank: int, meeting: Meeting) -> tuple[list[Any], dict[str, int]]:
        calls: list[Any] = []
        make = thread_groups(meeting, rank)

        def recorded(name: str, ranks: Sequence[int]) -> Group | None:
            group = make(name, ranks)
            return group if len(ranks) == 1 else group and Recorded(group, name, ranks, calls)

        experts = work.model.experts is not None
        connections = connected(plan, rank, recorded, tied=tied, experts=experts)
        executor = begun(work, plan, connections, SimulatedStreams(), TRAINING)
        for step in range(ITERATIONS):
            run_step(executor, work, connections, step)
        sizes = {
            f"{words}{layer}": one.layout.numel
            for words, section in zip(("", OF_EXPERTS), executor.state.sections, strict=True)
            for layer, one in section.layers.items()
        }
        vectors = executor.passes.shared.sizes
        return calls, sizes | {f"{OF_VECTORS} {layer}": size for layer, size in vectors.items()}

    world = calls_of(plan, work)
    for rank, (calls, layers) in enumerate(run_threads(plan.num_gpus, rank_of)):
        connecting, training = world.connecting[rank], world.training[rank]
        derived = [
            *(as_recorded(connecting, call, lambda _: 1) for call in of(connecting)),
            *(
                as_recorded(training, call, Sizes(work, plan, rank, layers))
                for call in of(training)
            ),
        ]
        assert by_group(calls) == by_group(derived)


def of(rank: RankCalls) -> Iterator[Call]:
    for step in rank.steps:
        for call in step.calls:
            if call.kind != "exchange" or rank.sends[call.group] or rank.receives[call.group]:
                yield call


def as_recorded(rank: RankCalls, call: Call, size: Callable[[str], int]) -> Any:
    """A derived call in numbers."""
    if call.kind == "all_to_all":
        return call.group, call.kind
    if call.kind != "exchange":
        return call.group, call.kind, size(call.what)
    ways = rank.sends[call.group], rank.receives[call.group]
    if call.group == "context" and rank.steps[0].task != "connecting":
        return call.group, call.kind, *(dict.fromkeys(way, IN_ATTENTION) for way in ways)
    one = size("sequence")
    return (
        call.group,
        call.kind,
        *({peer: many * one for peer, many in way.items()} for way in ways),
    )


class Sizes:
    """How many numbers a rank's calls are of, by what they are called on."""

    def __init__(self, work: Workload, plan: Plan, rank: int, layers: Mapping[str, int]) -> None:
        own = plan.stages[Topology(plan=plan).place(rank).stage]
        tokens, hidden = own.micro_batch * work.sequence_length, work.model.hidden
        tokens //= own.context_parallel
        keys = tokens * work.model.head_dim * work.model.kv_heads // own.tensor_parallel
        one = own.micro_batch if own.sequence_parallel else 1
        parts = own.tensor_parallel if own.sequence_parallel else 1
        experts, noted, choices = work.model.experts, 0, 0
        if experts is not None:
            blocks = work.model.layers + work.model.further_tokens - experts.dense_blocks
            noted, choices = 1 + blocks * experts.count, 2 * tokens * experts.active
        self._layers = layers
        self._sizes = {
            # Parts of sequences are gathered and scattered sequence by sequence.
            "activations": tokens * hidden // one,
            "gradients of activations": tokens * hidden // one,
            JOINED: 2 * tokens * hidden // one,
            OF_JOINED: 2 * tokens * hidden // one,
            COLUMNS: tokens * hidden,
            OF_POSITIONS: work.sequence_length * hidden,
            "largest logits": tokens,
            "sums of powers and logits at targets": 2 * tokens,
            "gradients of a table": work.model.vocab * hidden,
            "losses and squares": 2 + noted,
            "choices of tokens by tensor ranks": choices,
            "choices of tokens by context ranks": choices * own.context_parallel,
            "sequence": work.sequence_length // own.context_parallel * hidden // parts,
            "keys and values": 2 * own.context_parallel * keys,
            "gradients of keys and values": 2 * own.context_parallel * keys,
        }

    def __call__(self, what: str) -> int:
        _, _, layer = what.partition(" of layer ")
        if " of experts " in what:
            layer = f"{OF_EXPERTS}{layer}"
        return self._layers.get(what) or self._layers.get(layer) or self._sizes[what]


def by_group(calls: Sequence[Any]) -> dict[str, list[Any]]:
    """Lanes run side by side: calls of one group are in one order."""
    found: dict[str, list[Any]] = defaultdict(list)
    for group, *call in calls:
        found[group].append(call)
    return found
