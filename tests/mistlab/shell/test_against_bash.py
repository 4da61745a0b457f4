"""Scripts with every construct: the words of their launch are those that a real bash gives."""

import shutil

import pytest

from mistlab.shell.launch import launch_of
from mistlab.shell.session import LaunchFile
from tests.mistlab.shell.bash_oracle import CASES, Script, launches_by_bash, scripts_of

SCRIPTS = [script for file in sorted(CASES.glob("*.sh")) for script in scripts_of(file)]
pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash as the oracle")


@pytest.fixture(scope="module")
def by_bash(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[str]]]:
    folder = tmp_path_factory.mktemp("oracle")
    launches = launches_by_bash(SCRIPTS, folder)
    return {script.name: each for script, each in zip(SCRIPTS, launches, strict=True)}


def test_there_are_enough_scripts_and_all_are_named() -> None:
    assert len(SCRIPTS) >= 150
    assert len({script.name for script in SCRIPTS}) == len(SCRIPTS)


@pytest.mark.parametrize("script", SCRIPTS, ids=[script.name for script in SCRIPTS])
def test_words_are_those_of_bash(script: Script, by_bash: dict[str, list[list[str]]]) -> None:
    expected = by_bash[script.name]
    assert expected, "bash starts nothing: the case is wrong"
    source = LaunchFile(
        text=script.text,
        name="script.sh",
        settings=script.settings,
        arguments=script.arguments,
    )
    launch = launch_of(source)
    words = [word.text for word in (*launch.started, *launch.arguments)]
    words.insert(len(launch.started), launch.program)
    assert words[words.index("torchrun") :] == expected[0]
    assert not [word.unknown for word in (*launch.started, *launch.arguments) if word.unknown]
