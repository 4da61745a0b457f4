"""Groups of processes over NCCL, with their own code: values by ranks as threads, order by the
trace; NCCL itself is the stand-in of the checks."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, distributed  # noqa: E402

from mistlab.plan.plan import Plan  # noqa: E402
from runtime.checks.races.judge import Judge  # noqa: E402
from runtime.checks.races.recorded_rank import trace_of  # noqa: E402
from runtime.checks.recorded_library import (  # noqa: E402
    Messages,
    RecordedGroup,
    RecordedLibrary,
    RowsOfEach,
)
from runtime.comm.group import Alone, Group  # noqa: E402
from runtime.comm.library import LINK_CTAS, TORCH  # noqa: E402
from runtime.comm.processes import ProcessGroup  # noqa: E402
from runtime.comm.topology import connected  # noqa: E402
from tests.runtime.planted import plant  # noqa: E402
from tests.runtime.thread_ranks import Meeting, run_threads  # noqa: E402
from tests.runtime.worlds import TRAINING, stage, workload  # noqa: E402

RANKS = (1, 3, 4)
SIZE = 5


class Later:
    """A call that happens when somebody waits for it, and never else."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def wait(self) -> None:
        self._call()


class MeetingRanks:
    """Ranks that are threads; a call waits for those of the others."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting, self._calls = meeting, 0

    def all_reduce(self, group: RecordedGroup, tensor: Tensor, operation: str) -> None:
        whole = torch.stack(self._gathered(group, tensor))
        tensor.copy_(whole.sum(0) if operation == "sum" else whole.amax(0))

    def all_gather(self, group: RecordedGroup, whole: Tensor, own: Tensor) -> None:
        whole.copy_(torch.cat(self._gathered(group, own)))

    def reduce_scatter(self, group: RecordedGroup, result: Tensor, whole: Tensor) -> None:
        size, rank = result.numel(), group.rank()
        total = torch.stack(self._gathered(group, whole)).sum(0)
        result.copy_(total[rank * size : (rank + 1) * size])

    def all_to_all(
        self, group: RecordedGroup, received: Tensor, sent: Tensor, rows: RowsOfEach
    ) -> None:
        for peer, one in zip(group.ranks, sent.split(rows[1]), strict=True):
            self._meeting.leave(("rows", group.seen_by, peer), 0, one)
        for peer, place in zip(group.ranks, received.split(rows[0]), strict=True):
            (message,) = self._taken(("rows", peer, group.seen_by), 1, takers=1)
            place.copy_(message)

    def exchange(self, group: RecordedGroup, sends: Messages, receives: Messages) -> None:
        own = group.seen_by
        for tensor, peer in sends:
            self._meeting.leave(("message", own, peer), 0, tensor)
        for tensor, peer in receives:
            (message,) = self._taken(("message", peer, own), 1, takers=1)
            tensor.copy_(message)

    def aside(self, group: RecordedGroup, call: Callable[[], None]) -> Later:
        return Later(call)

    def _gathered(self, group: RecordedGroup, tensor: Tensor) -> list[Tensor]:
        self._calls += 1
        key = (group.name, self._calls)
        self._meeting.leave(key, group.rank(), tensor)
        return self._taken(key, group.size(), takers=group.size())

    def _taken(self, key: tuple[object, ...], count: int, *, takers: int) -> list[Tensor]:
        with self._meeting.changed:
            self._meeting.changed.wait_for(lambda: self._meeting.has(key, count), timeout=5)
        return self._meeting.take(key, takers)


def group_of(number: int, meeting: Meeting) -> ProcessGroup:
    """A group of three of five ranks, made as in a run."""
    library = RecordedLibrary(RANKS[number], SIZE, MeetingRanks(meeting))
    group = library.maker()("some", RANKS)
    assert isinstance(group, ProcessGroup)
    return group


def by_threads(work: Callable[[ProcessGroup], Tensor]) -> list[Tensor]:
    return run_threads(len(RANKS), lambda number, meeting: work(group_of(number, meeting)))


@pytest.mark.parametrize("operation", ["sum", "max"])
def test_a_reduction_is_there_when_the_call_returns(operation: str) -> None:
    def work(group: ProcessGroup) -> Tensor:
        tensor = torch.tensor([1.0 + group.rank, 5.0 - group.rank])
        assert group.all_reduce(tensor, operation) is None
        return tensor

    expected = [6.0, 12.0] if operation == "sum" else [3.0, 5.0]
    assert [found.tolist() for found in by_threads(work)] == [expected] * 3


@pytest.mark.parametrize("lies_in_whole", [True, False])
def test_parts_are_gathered_in_order_of_rank(lies_in_whole: bool) -> None:
    def work(group: ProcessGroup) -> Tensor:
        whole = torch.zeros(6)
        own = whole[2 * group.rank : 2 * group.rank + 2] if lies_in_whole else torch.empty(2)
        own.fill_(group.rank + 1)
        assert group.all_gather(whole, own) is None
        return whole

    assert [found.tolist() for found in by_threads(work)] == [[1.0, 1, 2, 2, 3, 3]] * 3


def test_a_part_of_a_sum_lies_in_its_place_of_the_whole() -> None:
    def work(group: ProcessGroup) -> Tensor:
        whole = torch.arange(6.0) * (group.rank + 1)
        assert group.reduce_scatter(whole) is None
        return whole[2 * group.rank : 2 * group.rank + 2]

    assert [found.tolist() for found in by_threads(work)] == [[0.0, 6], [12, 18], [24, 30]]


def test_messages_are_there_when_the_call_returns() -> None:
    """Each rank sends to the next, and receives from the one before."""

    def work(group: ProcessGroup) -> Tensor:
        received = torch.zeros(2)
        sent = torch.full((2,), float(group.rank))
        peers = (group.rank + 1) % 3, (group.rank - 1) % 3
        assert group.exchange([(sent, peers[0])], [(received, peers[1])]) is None
        return received

    assert [found.tolist() for found in by_threads(work)] == [[2.0, 2], [0, 0], [1, 1]]


def test_rows_are_there_when_the_call_returns() -> None:
    """Each rank sends one row to the first, two to the second and three to the third."""

    def work(group: ProcessGroup) -> Tensor:
        sent = torch.arange(6.0)[:, None] + 10 * group.rank
        from_each, received = [group.rank + 1] * 3, torch.zeros(3 * (group.rank + 1), 1)
        assert group.all_to_all(received, sent, from_each, [1, 2, 3]) is None
        return received.flatten()

    expected = [[0.0, 10, 20], [1, 2, 11, 12, 21, 22], [3, 4, 5, 13, 14, 15, 23, 24, 25]]
    assert [found.tolist() for found in by_threads(work)] == expected


PIPELINE = Plan(micro_batches=3, stages=(stage(2, tensor_parallel=2), stage(2, tensor_parallel=2)))
NOT_WAITED = {
    "messages": (
        ProcessGroup.exchange,
        "        for work in works:\n            work.wait()\n        return None\n",
        "        return None\n",
    ),
    "reductions": (
        ProcessGroup.all_reduce,
        (
            "all_reduce(tensor, reduction, self._group, not self._is_ordered)\n"
            "        return self._started(work)"
        ),
        "all_reduce(tensor, reduction, self._group, True)\n        return None",
    ),
}


@pytest.mark.parametrize("name", NOT_WAITED)
def test_what_runs_by_itself_and_is_not_waited_for_is_a_race(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced = partial(trace_of, workload(layers=4, batch=6), PIPELINE, 2, TRAINING)
    assert Judge(traced()).findings() == []
    plant(monkeypatch, *NOT_WAITED[name])
    findings = Judge(traced()).findings()
    assert findings
    actors = {actor for one in findings for actor in (one.first.actor, one.second.actor)}
    assert any(actor.startswith("NCCL's") for actor in actors)


def test_the_stand_in_takes_what_torch_takes() -> None:
    """By the names of arguments, whatever calls them."""
    for name in ("all_reduce", "all_gather_single", "reduce_scatter_single", "new_group"):
        own, torchs = (
            [
                argument
                for argument in inspect.signature(getattr(of, name)).parameters
                if argument != "self"
            ]
            for of in (RecordedLibrary, TORCH)
        )
        assert own == [one for one in torchs if one in own], name
        call = getattr(RecordedLibrary, name)
        positional = [
            one.name
            for one in inspect.signature(call).parameters.values()
            if one.kind is not inspect.Parameter.KEYWORD_ONLY
        ][1:]
        assert positional == torchs[: len(positional)], name
    assert inspect.signature(distributed.P2POp.__new__).parameters.keys() >= {"op", "peer", "group"}


def test_links_take_few_multiprocessors_and_all_groups_the_runs_timeout() -> None:
    plan = replace(PIPELINE, stages=(stage(2, data_parallel=2, zero=1), stage(2)))
    library = RecordedLibrary(0, plan.num_gpus, Silent())
    connected(plan, 0, library.maker())
    links = {group.name: options for group, _, options in library.made if options is not None}
    assert set(links) == {"forward 0", "backward 0"}
    assert {options.config.max_ctas for options in links.values()} == {LINK_CTAS}
    assert len({timeout for _, timeout, _ in library.made}) == 1
    assert all(options._timeout == library.made[0][1] for options in links.values())


@pytest.mark.parametrize(("backend", "limits"), [("nccl", {"max_ctas": LINK_CTAS}), ("gloo", None)])
def test_nccl_gets_the_largest_number_of_multiprocessors_of_a_link(
    backend: str, limits: dict[str, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL alone: a torch for CPUs has no options of it."""
    nccl = SimpleNamespace(Options=lambda: SimpleNamespace(config=SimpleNamespace()))
    monkeypatch.setattr(distributed, "ProcessGroupNCCL", nccl, raising=False)
    monkeypatch.setattr(distributed, "get_backend", lambda: backend)
    options = TORCH.link_options()
    assert (None if options is None else vars(options.config)) == limits


class Silent:
    """Ranks that do nothing."""

    def all_reduce(self, *_: object) -> None: ...
    def all_gather(self, *_: object) -> None: ...
    def reduce_scatter(self, *_: object) -> None: ...
    def all_to_all(self, *_: object) -> None: ...
    def exchange(self, *_: object) -> None: ...

    def aside(self, _group: RecordedGroup, call: Callable[[], None]) -> Later:
        return Later(call)


def test_a_rank_has_the_groups_that_it_is_in() -> None:
    library = RecordedLibrary(2, SIZE, Silent())
    make = library.maker()
    alone: Group | None = make("alone", [2])
    assert isinstance(alone, Alone)
    assert make("others", [0, 1]) is None
    world = make("world", range(SIZE))
    assert world is not None
    assert (world.size, world.rank) == (SIZE, 2)
