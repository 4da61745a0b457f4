"""The bytes that a rank's states take are those that predictions count, class by class."""

import weakref
from collections.abc import Iterable

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from mistlab.graph.stage_model import StageModel  # noqa: E402
from mistlab.plan.plan import Offload, Plan  # noqa: E402
from mistlab.plan.workload import Workload  # noqa: E402
from mistlab.stages.stage_batch import StageBatch  # noqa: E402
from runtime.comm.topology import connected  # noqa: E402
from runtime.engine.storage.state import LayerState, StageState  # noqa: E402
from runtime.engine.storage.stepped import Split  # noqa: E402
from runtime.engine.streams.device_streams import SimulatedStreams  # noqa: E402
from tests.runtime.thread_ranks import Meeting, run_threads  # noqa: E402
from tests.runtime.worlds import (  # noqa: E402
    TRAINING,
    alone,
    begun,
    ratios,
    run_step,
    stage,
    thread_groups,
    workload,
)


def size(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def splits(state: LayerState) -> list[Split]:
    return [state.weights, state.gradients, *state.optimizer]


def states_of(work: Workload, plan: Plan) -> list[StageState]:
    """The states of all ranks before they train."""

    def state_of(rank: int, meeting: Meeting) -> StageState:
        connections = connected(plan, rank, thread_groups(meeting, rank))
        return begun(work, plan, connections, SimulatedStreams(), TRAINING).state

    return run_threads(plan.num_gpus, state_of)


@pytest.mark.parametrize("offload", [ratios(0, 0, 0, 0), ratios(0.5, 0.25, 0.75, 0)])
@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("vocab", [128, 4096])
def test_states_take_what_is_predicted(vocab: int, zero: int, offload: Offload) -> None:
    # Sizes of which neither padding nor rounded cuts add anything.
    work = workload(hidden=128, ffn=512, vocab=vocab, precision="bf16")
    data = 2 if zero else 1
    one = stage(3, data_parallel=data, zero=zero, offload=offload)
    other = stage(1, data_parallel=data, zero=zero, offload=offload)
    plan = Plan(micro_batches=2, stages=(one, other))
    figures = StageModel.of(work).figures(StageBatch.of_plan(plan))
    states = states_of(work, plan)
    for place, state in ((0, states[0]), (1, states[-1])):
        layers = state.layers.values()
        taken = {
            **state.held_bytes(),
            "host": size(split.tail for layer in layers for split in splits(layer)),
        }
        predicted = {name: getattr(figures, f"{name}_bytes")[place] for name in taken}
        assert taken == predicted
        state.staging.open()
        assert state.staging.size_bytes == figures.step_buffer_bytes[place]


@pytest.mark.parametrize("zero", [0, 1])
def test_embedding_and_head_of_one_stage_share_a_table(zero: int) -> None:
    work = workload(hidden=128, ffn=512, vocab=128, tied_embeddings=True, precision="bf16")
    one = stage(data_parallel=2, zero=zero)
    plan = Plan(micro_batches=2, stages=(one,))
    figures = StageModel.of(work).figures(StageBatch.of_plan(plan))
    for state in states_of(work, plan):
        held = state.held_bytes()
        assert held == {name: getattr(figures, f"{name}_bytes")[0] for name in held}


def test_full_precision_keeps_masters_beside_weights_as_is_predicted() -> None:
    work = workload(hidden=128, ffn=512, vocab=128, precision="fp32")
    plan = Plan(micro_batches=2, stages=(stage(4),))
    figures = StageModel.of(work).figures(StageBatch.of_plan(plan))
    held = alone(work, plan, "eager").state.held_bytes()
    assert held["weights"] == figures.weights_bytes[0]
    assert held["optimizer"] == figures.optimizer_bytes[0] == 3 * held["weights"]


@pytest.mark.parametrize("again", [0, 2])
@pytest.mark.parametrize("offload", [ratios(0, 0, 0, 0), ratios(0, 0, 0, 0.5), ratios(1, 0, 0, 1)])
def test_whatever_is_kept_is_let_go_of_and_every_iteration_keeps_as_much(
    offload: Offload, again: int
) -> None:
    work = workload()
    plan = Plan(
        micro_batches=2, stages=(stage(micro_batch=4, checkpointed_layers=again, offload=offload),)
    )
    executor = alone(work, plan, "eager")
    peaks = []
    for step in range(2):
        # Layers of which nothing moves are taken apart in the first forward pass only.
        executor.passes.peak_bytes = 0
        run_step(executor, work, executor.connections, step)
        assert executor.passes.held_bytes == 0
        peaks.append(executor.passes.peak_bytes)
    assert peaks[0] == peaks[1] > 0


class Ended:
    """A collective that has ended; ``held`` is memory that it needed."""

    def __init__(self, held: Tensor) -> None:
        self.held = held

    def is_ready(self) -> bool:
        return True

    def wait_a_moment(self) -> None:
        pass

    def finish(self) -> None:
        pass


def test_a_collective_that_has_ended_holds_no_memory_though_later_work_waited_for_it() -> None:
    streams, held = SimulatedStreams(), torch.zeros(8)
    dies = weakref.ref(held)
    pending = [Ended(held)]
    del held
    first = streams.submit("all_gather", pending.pop, [])
    later = streams.submit("compute", lambda: None, [first])
    assert first.is_done
    assert later.is_done
    assert dies() is None
