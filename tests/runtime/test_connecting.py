"""Ranks call every group together before anything else, so that none hangs that is made lazily."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.runtime.test_real_ranks import check_plans, run_world


def test_processes_of_unlike_degrees_train_with_groups_that_are_made_lazily(
    tmp_path: Path, warm_python: str
) -> None:
    assert run_world(warm_python, "lazy_world", 3, tmp_path, "connected") == {}
    check_plans(3, tmp_path)


def test_without_connecting_a_lazy_group_begins_with_a_message(
    tmp_path: Path, warm_python: str
) -> None:
    said = run_world(warm_python, "lazy_world", 3, tmp_path, "unconnected")
    assert any("begins with a message" in complaint for complaint in said.values())
