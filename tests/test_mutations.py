"""Lists of faults fit the code: each can be planted, and its file has tests."""

from pathlib import Path

import pytest
import yaml

from benchmarks.mutations import CHECKS, LISTS, ROOT, Mutation, mutations, page, places

MOST_GONE = 0.25
SAID = yaml.safe_load(CHECKS.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", LISTS)
def test_nearly_all_faults_of_a_list_can_be_planted_and_are_python(name: str) -> None:
    listed = mutations(LISTS[name])
    counts = {"audited": 66, "drawn": 60, "recent": 30}
    assert len([one for one in listed if not one.equivalent]) == counts[name]
    assert len({one.key for one in listed}) == len(listed)
    gone = 0
    for one in listed:
        text = (ROOT / one.file).read_text(encoding="utf-8")
        planted = one.planted(text)
        gone += planted is None
        if planted is not None:
            assert planted != text
            compile(planted, one.file, "exec")
    # Code changes; the page tells which faults wait to be planted again in the new code.
    assert gone < MOST_GONE * len(listed)


def test_each_file_of_the_lists_has_tests_that_exist() -> None:
    files = {one.file for path in LISTS.values() for one in mutations(path)}
    assert files <= set(SAID["tests of files"])
    tests = {test for tests in SAID["tests of files"].values() for test in tests}
    assert [test for test in tests if not (ROOT / test.partition("::")[0]).exists()] == []


def test_places_are_those_of_the_four_kinds() -> None:
    text = (
        "def work(self, lane, event):\n"
        "    lane.wait_event(event)\n"
        "    rank = self.place.data - 1\n"
        "    return self.parts[rank : rank + 2]\n"
    )
    found = {
        (one.kind, text.splitlines()[one.line - 1][one.begin : one.end].strip(), one.instead)
        for one in places(text)
    }
    assert found >= {
        ("wait", "lane.wait_event(event)", "pass"),
        ("group", "self.place.data", "self.place.tensor"),
        ("sign", "-", "+"),
        ("sign", "+", "-"),
        ("slice", "self.parts[rank : rank + 2]", "self.parts[rank:]"),
    }


def test_a_piece_that_is_there_twice_is_not_planted() -> None:
    one = Mutation(fault="", file="", edits=(("a", "b"),))
    assert (one.planted("xax"), one.planted("aa"), one.planted("x")) == ("xbx", None, None)


def test_the_page_counts_what_is_found(tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    first, *_ = mutations(LISTS["audited"])
    caught = f'{{"{first.key}": {{"caught_by": "tests/t.py::t", "s": 1.0}}}}'
    kept.write_text(caught, encoding="utf-8")
    lines = list(page(kept))
    assert "| audited | 66 | 1 (2%) | 65 |" in lines
    assert f"| {first.fault} | `{first.file}` | `tests/t.py::t` |" in lines
