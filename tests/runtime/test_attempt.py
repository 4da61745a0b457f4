"""Processes that are started again find one another, not what is left of those before."""

from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("torch")
from torch.distributed import HashStore, Store

from runtime.comm.processes import attempt_name

SIZE = 4


def attempt(store: Store, ranks: list[int]) -> list[str]:
    """The names that processes find, begun in this order."""
    with ThreadPoolExecutor(len(ranks)) as threads:
        found = [threads.submit(attempt_name, store, rank, SIZE, 60) for rank in ranks]
        return [one.result() for one in found]


@pytest.mark.parametrize("ranks", [[0, 1, 2, 3], [3, 2, 1, 0]])
def test_each_attempt_has_a_name_of_its_own(ranks: list[int]) -> None:
    """On a store that keeps all that attempts before have said."""
    store, names = HashStore(), set()
    for _ in range(3):
        found = attempt(store, ranks)
        assert len(set(found)) == 1
        names.add(found[0])
    assert len(names) == 3


def test_who_does_not_come_is_said() -> None:
    """What those before have left stands for nobody."""
    store = HashStore()
    attempt(store, [0, 1, 2, 3])
    with ThreadPoolExecutor(1) as threads:
        came = threads.submit(attempt_name, store, 2, SIZE, 60)
        with pytest.raises(RuntimeError, match=r"^rank 0 waited 0.5 s for ranks 1, (2, )?3, which"):
            attempt_name(store, 0, SIZE, 0.5)
        assert came.result()
