"""Compiled expressions that are kept: whatever becomes of the folder, answers are the same."""

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from mistlab.graph import compiled as folders
from mistlab.graph.compiled import (
    MOST_VERSIONS,
    CacheWarning,
    Compiled,
    KeptFolder,
    RefusedError,
    compile_expressions,
    function_of,
    kept,
    kept_folder,
    version,
)
from mistlab.graph.symbols import size_symbol

ROOT = Path(__file__).parents[2]
PREDICT = (sys.executable, "-m", "experiments.predict", "--json")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder of this version, which nobody has used."""
    monkeypatch.setenv("MISTLAB_CACHE", str(tmp_path / "cache"))
    folders._say.cache_clear()
    yield tmp_path / "cache" / version()
    folders._say.cache_clear()


def product(calls: list[str], factor: int) -> Compiled:
    calls.append("made")
    return compile_expressions(
        {"x": factor * size_symbol("b")}, columns=("b",), constants={}, numbers={"n": factor}
    )


def made(folder: Path, factor: int = 3) -> int:
    """How often expressions are made by a process that has to know them."""
    calls: list[str] = []

    def doubled(factor: int) -> Compiled:
        return product(calls, factor)

    doubled.__module__, doubled.__qualname__ = "mistlab.tests", "doubled"
    compiled = kept(doubled)(factor)
    assert compiled.numbers == {"n": factor}
    assert eval(compiled.source.partition("return")[2], {"b": 2}) == [2 * factor]
    return len(calls)


def the_file(folder: Path) -> Path:
    (path,) = folder.glob("*.json")
    return path


def test_what_one_process_made_the_next_one_reads(folder: Path) -> None:
    assert [made(folder), made(folder), made(folder, 4), made(folder, 4)] == [1, 0, 1, 0]
    assert len([*folder.iterdir()]) == 2


def test_nothing_is_kept_where_the_folder_has_no_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MISTLAB_CACHE", "")
    assert [made(folder), made(folder)] == [1, 1]
    assert not folder.exists()


def test_the_folder_may_go_at_any_time(folder: Path) -> None:
    made(folder)
    the_file(folder).unlink()
    folder.rmdir()
    assert [made(folder), made(folder)] == [1, 0]


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: text.replace("3*b", "4*b"),
        lambda text: "\0" * 100,
        lambda text: "[" * 100_000,
    ],
    ids=["empty", "cut off", "changed", "zeros", "deep"],
)
def test_a_damaged_file_is_said_once_and_made_again(folder: Path, damage: object) -> None:
    made(folder)
    path = the_file(folder)
    whole = path.read_text()
    path.write_text(damage(whole))  # type: ignore[operator]
    with pytest.warns(CacheWarning, match="is damaged: its expressions are compiled again") as said:
        assert made(folder) == 1
    assert len(said) == 1
    assert path.read_text() == whole
    assert made(folder) == 0


def test_many_damaged_files_are_said_once(folder: Path) -> None:
    made(folder)
    made(folder, 4)
    for path in folder.glob("*.json"):
        path.write_text("")
    with pytest.warns(CacheWarning, match="is damaged") as said:
        assert [made(folder), made(folder, 4)] == [1, 1]
    assert len(said) == 1


def test_a_file_that_says_more_than_arithmetic_is_not_run(folder: Path) -> None:
    made(folder)
    path = the_file(folder)
    _, _, content = path.read_text().partition("\n")
    told = folder / "told"
    planted = json.loads(content)
    planted["source"] = (
        f"def compiled(b):\n    return [__import__('pathlib').Path({str(told)!r}).touch()]"
    )
    content = json.dumps(planted)
    path.write_text(f"{folders._digest(content)}\n{content}")
    with pytest.warns(CacheWarning, match="is damaged"):
        assert made(folder) == 1
    assert not told.exists()


@pytest.mark.parametrize(
    "source",
    [
        "import os",
        "def compiled(b):\n    import os\n    return [b]",
        "def compiled(b):\n    return [b.__class__]",
        "def compiled(b):\n    return [open('x')]",
        "def compiled(b):\n    return [numpy.load('x')]",
        "def compiled(b):\n    return ['text']",
        "def compiled(b):\n    return [[x for x in b]]",
        "def compiled(b=numpy.fromfile('x')):\n    return [b]",
        "@numpy.load\ndef compiled(b):\n    return [b]",
        "def compiled(b):\n    while True: pass",
        "def compiled(b):\n    return [(lambda: b)()]",
        "def compiled(b):\n    return [b]\nprint(1)",
        "def compiled(b) return",
    ],
)
def test_other_sources_are_refused(source: str) -> None:
    with pytest.raises(RefusedError):
        function_of(source)


def test_a_folder_that_others_may_write_to_is_not_used(folder: Path) -> None:
    made(folder)
    folder.chmod(0o777)
    with pytest.warns(
        CacheWarning, match="users may write to this cache, so it is not used"
    ) as said:
        assert [made(folder), made(folder)] == [1, 1]
    assert len(said) == 1


def test_a_file_that_others_may_write_to_is_not_used(folder: Path) -> None:
    made(folder)
    the_file(folder).chmod(0o666)
    with pytest.warns(CacheWarning, match="users may write to this cache"):
        assert made(folder) == 1


def test_a_file_where_the_folder_should_be_is_survived(folder: Path) -> None:
    folder.parent.write_text("a file")
    with pytest.warns(CacheWarning, match="this cache cannot be written|Not a directory"):
        assert [made(folder), made(folder)] == [1, 1]
    assert folder.parent.read_text() == "a file"


def test_a_folder_that_may_not_be_written_to_is_read(folder: Path) -> None:
    made(folder)
    folder.chmod(0o500)
    if os.access(folder, os.W_OK):
        pytest.skip("this user may write everywhere")
    try:
        with pytest.warns(CacheWarning, match="cannot be written") as said:
            assert [made(folder), made(folder, 4), made(folder, 5)] == [0, 1, 1]
        assert len(said) == 1
    finally:
        folder.chmod(0o700)


@pytest.mark.parametrize("error", [OSError(28, "No space left"), OSError(30, "Read-only file")])
def test_a_folder_that_takes_nothing_is_survived(
    error: OSError, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.warns(CacheWarning, match=rf"cache cannot be written \({error.strerror}"):
        assert made(folder) == 1
    monkeypatch.undo()
    assert [*folder.iterdir()] == []


def test_who_is_killed_while_writing_leaves_nothing_that_is_read(folder: Path) -> None:
    made(folder)
    text = the_file(folder).read_text()
    the_file(folder).rename(folder / "tmpabc.part")
    (folder / "tmpabc.part").write_text(text[:40])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [made(folder), made(folder)] == [1, 0]


def test_another_version_is_neither_read_nor_lost(folder: Path) -> None:
    other = KeptFolder(path=folder.parent / "another")
    other.write("recipe", {"x": 1})
    assert [made(folder), made(folder)] == [1, 0]
    assert other.read("recipe") == {"recipe": "recipe", "x": 1}


def test_folders_of_old_versions_go(folder: Path) -> None:
    for number in range(2 * MOST_VERSIONS):
        old = folder.parent / f"old{number}"
        old.mkdir(parents=True)
        os.utime(old, (number, number))
    made(folder)
    left = {one.name for one in folder.parent.iterdir()}
    assert len(left) == MOST_VERSIONS
    assert {folder.name, f"old{2 * MOST_VERSIONS - 1}"} <= left


def test_what_a_test_made_up_has_no_recipe(folder: Path) -> None:
    calls: list[str] = []
    assert kept(lambda factor: product(calls, factor))(3).numbers == {"n": 3}
    assert len(calls) == 1
    assert not folder.exists()


def test_the_folder_is_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MISTLAB_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kept_folder() == KeptFolder(path=tmp_path / "mistlab" / version())


def answers(cache: Path) -> list[subprocess.Popen[str]]:
    environment = {**os.environ, "MISTLAB_CACHE": str(cache)}
    return [
        subprocess.Popen(
            PREDICT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment,
        )
        for _ in range(2)
    ]


def test_processes_share_the_folder_and_answer_alike(tmp_path: Path) -> None:
    cold = [process.communicate() for process in answers(tmp_path / "cache")]
    assert len({out for out, _ in cold}) == 1
    assert {error for _, error in cold} == {""}
    files = sorted((tmp_path / "cache").rglob("*.json"))
    assert len(files) == 5
    assert not [*(tmp_path / "cache").rglob("*.part")]
    warm = [process.communicate() for process in answers(tmp_path / "cache")]
    assert warm == cold


def test_a_warm_question_does_not_import_sympy(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from experiments import analyse, predict\n"
        "assert predict.main(['--json']) == 0\n"
        "assert analyse.main(['--json']) == 0\n"
        "heavy = 'sympy scipy pandas matplotlib optuna sqlalchemy joblib pulp simpy'\n"
        "print([name for name in heavy.split() if name in sys.modules])"
    )
    environment = {**os.environ, "MISTLAB_CACHE": str(tmp_path / "cache")}
    told = [
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=environment,
            check=True,
        ).stdout.splitlines()
        for _ in range(2)
    ]
    assert [lines[-1] for lines in told] == ["['sympy']", "[]"]
    assert told[0][:-1] == told[1][:-1]
