"""The picture of a plan: areas and bars are as large as what they stand for, and it names all."""

import re
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as some

from experiments.cli.command import main_of
from experiments.commands import COMMANDS
from experiments.prediction.plan_picture import Area, squares
from mistlab.core.files import format_yaml
from mistlab.core.values import InputError

PLAN = {
    "workload": {
        "model": "gpt3-1.3b",
        "sequence_length": 4096,
        "global_batch": 64,
        "attention": "flash",
        "precision": "bf16",
    },
    "cluster": {"hardware": "h100-80gb", "nodes": 1, "gpus_per_node": 8},
    "plan": {
        "engine": "megatron",
        "micro_batches": 16,
        "stages": [{"layers": 6, "data_parallel": 1, "tensor_parallel": 2, "micro_batch": 4}] * 4,
    },
}
SVG = "{http://www.w3.org/2000/svg}"


@given(
    some.lists(some.floats(min_value=1e-3, max_value=1e3), min_size=1, max_size=12),
    some.floats(min_value=50, max_value=900),
    some.floats(min_value=50, max_value=900),
)
def test_areas_are_as_their_sizes_and_fill_the_whole(
    sizes: list[float], width: float, height: float
) -> None:
    sizes = sorted(sizes, reverse=True)
    whole = Area(x=3, y=5, width=width, height=height)
    found = squares(sizes, whole)
    shares = [one.width * one.height / (width * height) for one in found]
    assert shares == pytest.approx([size / sum(sizes) for size in sizes], rel=1e-6)
    for place, one in enumerate(found):
        assert one.x >= 3 - 1e-6
        assert one.y >= 5 - 1e-6
        assert one.x + one.width <= 3 + width * (1 + 1e-9)
        assert one.y + one.height <= 5 + height * (1 + 1e-9)
        for other in found[:place]:
            across = min(one.x + one.width, other.x + other.width) - max(one.x, other.x)
            down = min(one.y + one.height, other.y + other.height) - max(one.y, other.y)
            assert min(across, down) < 1e-6 * (width + height)


def predict(*line: str) -> int:
    """The exit status of the command."""
    return main_of("predict", COMMANDS["predict"])(line)


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> ET.Element:
    folder = tmp_path_factory.mktemp("picture")
    (folder / "plan.yaml").write_text(format_yaml(PLAN), encoding="utf-8")
    assert predict(str(folder / "plan.yaml"), "--picture", str(folder / "plan.svg")) == 0
    return ET.fromstring((folder / "plan.svg").read_text("utf-8"))


def test_memory_adds_up_to_what_a_gpu_has(picture: ET.Element) -> None:
    parts = [one.text for one in picture.iter(f"{SVG}title")]
    sizes = [float(text.split(": ")[1].removesuffix(" GiB")) for text in parts if text]
    assert len(sizes) >= 6
    # The profile's 80 GB as torch sees them, each part told to a tenth.
    assert sum(sizes) == pytest.approx(79.1, abs=0.05 * len(sizes))


def test_passes_of_a_lane_do_not_overlap(picture: ET.Element) -> None:
    lanes: dict[str, list[tuple[float, float]]] = {}
    for one in picture.findall(f"{SVG}rect"):
        # Bars of tasks alone are filled and as high as a lane.
        if one.get("fill") and one.get("height") == "10.0":
            begin, width = float(one.get("x", 0)), float(one.get("width", 0))
            lanes.setdefault(str(one.get("y")), []).append((begin, begin + width))
    assert len(lanes) >= 4
    for bars in lanes.values():
        bars.sort()
        # Half a pixel between bars, and tenths are rounded.
        assert all(one[1] <= other[0] + 0.2 for one, other in pairwise(bars))


def test_shares_are_those_of_the_breakdown(
    picture: ET.Element, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plan.yaml").write_text(format_yaml(PLAN), encoding="utf-8")
    assert predict(str(tmp_path / "plan.yaml"), "--breakdown") == 0
    told = dict(
        re.findall(
            r"^(\S.*?)(?:, bound by tier \w+)?  +([\d.]+)  ", capsys.readouterr().out, re.MULTILINE
        )
    )
    texts = [one.text or "" for one in picture.iter(f"{SVG}text")]
    shown = [(texts[place], text) for place, text in enumerate(texts[1:]) if " s, " in text]
    assert len(shown) >= 4
    for name, words in shown:
        assert words.startswith(f"{told[name]} s"), name


def test_a_picture_is_of_one_plan(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(format_yaml(PLAN), encoding="utf-8")
    with pytest.raises(
        InputError, match="can draw only one plan, but 2 are given: give one plan file"
    ):
        predict(str(plan), str(plan), "--picture", "x.svg")
