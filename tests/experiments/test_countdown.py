"""What a countdown says, on a clock of its own."""

import pytest

from experiments.cli.commandline import Countdown


def test_what_is_left_goes_by_the_parts_after_the_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    times = iter([0.0, 60.0, 61.0, 63.0, 64.0])
    countdown = Countdown(what="links", total=4, clock=lambda: next(times))
    for _ in range(4):
        countdown.step()
    # The first part took a minute to make ready; parts are told of every two seconds.
    assert capsys.readouterr().err.splitlines() == [
        "links: 2 of 4, about 2 s left",
        "links: 3 of 4, about 2 s left",
        "links: 4 of 4",
    ]
