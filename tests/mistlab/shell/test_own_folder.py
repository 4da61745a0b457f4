"""A script's own folder, and a script that starts itself."""

from collections.abc import Mapping

import pytest

from mistlab.shell.launch import Launch, launch_of
from mistlab.shell.session import LaunchFile

FOLDER = '"$(dirname "${BASH_SOURCE[0]}")"'


def launched(text: str, files: Mapping[str, str] | None = None) -> Launch:
    name = "/runs/scripts/launch.sh"
    here = {f"/runs/{path}": content for path, content in (files or {}).items()}
    return launch_of(LaunchFile(text=text, name=name, beside={**here, name: text}.get))


def argv(launch: Launch) -> list[str]:
    return [word.text for word in launch.arguments]


@pytest.mark.parametrize(
    "folder",
    [
        f"$(cd {FOLDER} && pwd)",
        f"$(cd -- {FOLDER} >/dev/null 2>&1 ; pwd -P)",
        f"$(cd {FOLDER}; echo $PWD)",
        "$(dirname $(readlink -f $0))",
        "$(dirname $(realpath $0))",
        "$(cd $(dirname $0)/../scripts && pwd)",
    ],
)
def test_a_script_s_own_folder_is_known(folder: str) -> None:
    text = f"""\
HERE={folder}
source $HERE/../sizes.sh
torchrun pretrain_gpt.py --num-layers $LAYERS --config $HERE/a.yaml
"""
    launch = launched(text, {"sizes.sh": "LAYERS=24\n"})
    assert argv(launch) == ["--num-layers", "24", "--config", "/runs/scripts/a.yaml"]


def test_the_folder_of_the_user_is_not_known() -> None:
    launch = launched("X=$(pwd)\ncd $DATA\nY=$(pwd)\npython pretrain_gpt.py --save $X --load $Y\n")
    (x, y) = launch.arguments[1], launch.arguments[3]
    assert x.unknown is not None
    assert y.unknown is not None


def test_a_folder_that_one_branch_enters_is_not_known() -> None:
    text = "if [ $A = 1 ]; then cd /data; fi\npython pretrain_gpt.py --save $(pwd)\n"
    assert launched(text).arguments[1].unknown is not None


@pytest.mark.parametrize(
    "start",
    [
        'if [ -z "$SLURM_JOB_ID" ]; then sbatch "$0"; exit; fi',
        'cp "$0" /tmp/out/cmd.sh; chmod +x /tmp/out/cmd.sh',
        "if [ $RESUME = 1 ]; then sbatch --dependency=afterany:1 $0 --resume; fi",
        'srun --overlap bash "$0" "$@"',
    ],
)
def test_a_script_that_starts_itself_is_followed_once(start: str) -> None:
    launch = launched(f"{start}\ntorchrun pretrain_gpt.py --num-layers 24\n")
    assert argv(launch) == ["--num-layers", "24"]
