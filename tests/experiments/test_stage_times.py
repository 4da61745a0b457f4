"""What a timeline says of passes, by hand-made tasks."""

from collections.abc import Sequence

import pytest

pytest.importorskip("torch")

from experiments.training.run_results import stage_times
from mistlab.schedule.slots import Action
from runtime.session import MeasuredTask


def task(name: str, start_s: float, end_s: float, lane: str = "compute") -> MeasuredTask:
    is_action = name.startswith("1")
    what = Action.parse(name) if is_action else name
    return MeasuredTask(stage=1, task=what, lane=lane, start_s=start_s, end_s=end_s)


def passes(*lengths: tuple[str, int, float]) -> Sequence[MeasuredTask]:
    """Passes of two layers, one after another, with a second in between."""
    tasks, clock = [], 0.0
    for kind, micro_batch, seconds in lengths:
        for layer in (3, 4) if kind == "F" else (4, 3):
            name = f"1{kind}.{layer}m{micro_batch}"
            tasks.append(task(name, clock, clock + seconds / 2))
            clock += seconds / 2
        clock += 1.0
    return tasks


def test_first_and_last_passes_are_told_from_steady_ones() -> None:
    found = stage_times(
        [
            # Sends, swaps and sums beside it belong to no pass.
            *(task("1O<.3m0", -9.0, -2.0, "host_to_device"), task("report", 90.0, 99.0, "reduce")),
            *(task("open", -99.0, -50.0), task("1S.3m0", -2.0, -1.5), task("1S.4m0", -1.0, -0.5)),
            *passes(("F", 0, 2.0), ("F", 1, 2.0), ("B", 0, 4.0)),
            *passes(("F", 2, 2.5), ("B", 1, 4.5), ("F", 3, 9.0), ("B", 2, 4.25), ("B", 3, 7.0)),
        ]
    )
    # Medians of 2, 2.5 and 9, and of 4, 4.25 and 4.5.
    assert found == {"stable_s": 6.75, "delta_forward_s": 1.5, "delta_backward_s": 2.75}


def test_a_single_micro_batch_has_no_steady_pass() -> None:
    assert stage_times(passes(("F", 0, 2.0), ("B", 0, 4.0))) == {}
    assert stage_times([]) == {}


def test_of_two_micro_batches_one_of_each_pass_is_steady() -> None:
    found = stage_times(passes(("F", 0, 3.0), ("B", 0, 5.0), ("F", 1, 2.0), ("B", 1, 4.0)))
    assert found == {"stable_s": 7.0, "delta_forward_s": 1.0, "delta_backward_s": -1.0}


def test_passes_of_chunks_and_of_weights_add_up() -> None:
    """A micro-batch goes through layers 3 and 4, and through 7 and 8; the waits between its passes
    are of no pass."""
    clock, tasks = 0.0, []
    for words, seconds in (
        *(("S.3m0 F.3m0 F.4m0", 3.0), ("F.7m0 F.8m0", 1.5), ("F.3m1 F.4m1", 1.0)),
        *(("F.7m1 F.8m1", 1.0), ("B.8m0 B.7m0", 2.0), ("W.8m0 W.7m0", 0.5)),
        *(("B.8m1 B.7m1", 2.0), ("B.4m0 B.3m0", 2.0), ("W.4m0 W.3m0", 0.5)),
        *(("B.4m1 B.3m1", 2.0), ("W.8m1 W.7m1", 1.0), ("W.4m1 W.3m1", 1.0)),
    ):
        for word in words.split():
            each_s = seconds / len(words.split())
            tasks.append(task(f"1{word}", clock, clock + each_s))
            clock += each_s
        clock += 5.0
    found = stage_times(tasks)
    assert found == {"stable_s": 7.0, "delta_forward_s": 2.5, "delta_backward_s": 1.0}
