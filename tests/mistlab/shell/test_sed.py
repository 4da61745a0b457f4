"""Configurations that scripts make from templates by ``sed``."""

import pytest

from mistlab.shell.launch import Launch, launch_of
from mistlab.shell.session import LaunchFile, known_part

TEMPLATE = '{"train_batch_size": BATCH, "dir": "OUT", "stage": STAGE, "again": STAGE}\n'


def launched(text: str) -> Launch:
    script = f"{text}\ndeepspeed pretrain_gpt.py --deepspeed_config ds.json\n"
    files = {"template.json": TEMPLATE}
    return launch_of(LaunchFile(text=script, name="run.sh", beside=files.get))


@pytest.mark.parametrize(
    "command",
    [
        'sed "s/BATCH/$B/" template.json | sed "s|OUT|/data/x|" | sed "s/STAGE/1/g" > ds.json',
        'cat template.json | sed -e "s/BATCH/$B/" -e "s#OUT#/data/x#" -e s/STAGE/1/g > ds.json',
    ],
)
def test_plain_replacements_make_the_file(command: str) -> None:
    launch = launched(f"B=8\n{command}")
    expected = TEMPLATE.replace("BATCH", "8").replace("OUT", "/data/x").replace("STAGE", "1")
    assert launch.written["ds.json"].strip() == expected.strip()
    assert not launch.unknown_in


def test_without_g_the_first_of_a_line_is_replaced() -> None:
    launch = launched('sed "s/STAGE/1/" template.json > ds.json')
    assert launch.written["ds.json"].count("STAGE") == 1


def test_an_unknown_replacement_leaves_an_unknown_part() -> None:
    launch = launched('sed "s/BATCH/$GLOBAL/" template.json > ds.json')
    assert "GLOBAL" in launch.unknown_in["ds.json"].expression


def test_an_unknown_part_does_not_end_a_text_of_the_file() -> None:
    command = 'sed "s|OUT|$(date "+%H:%M")|" template.json | sed "s/BATCH/8/;" > ds.json'
    launch = launched(command.replace(";", ""))
    assert '"dir": "$(date +%H:%M)"' in launch.written["ds.json"]


@pytest.mark.parametrize("pattern", ["s/B.*H/8/", "s/^BATCH/8/", "s/BATCH/&0/", "y/AB/CD/"])
def test_patterns_that_mean_more_are_not_guessed(pattern: str) -> None:
    assert "ds.json" not in launched(f"sed '{pattern}' template.json > ds.json").written


@pytest.mark.parametrize("folder", ["$(pwd)/", "`pwd`/", "${BASE}/", "$X/", ""])
def test_unknown_folders_before_a_path_are_left_out(folder: str) -> None:
    assert known_part(f"{folder}a/ds.json") == "a/ds.json"
