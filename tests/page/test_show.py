"""The page of runs: it holds what their folders hold, in one file that a browser shows."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from experiments.cli.commandline import run
from experiments.shown.show_runs import KeptRun, page_of
from mistlab.core.values import InputError
from tests.page.test_browser import SERIOUS
from tests.page.test_questions import command

NAMESPACE = "http://www.w3.org/2000/svg"
SVG = f'<svg xmlns="{NAMESPACE}" width="9" height="9"><rect width="9" height="9"/></svg>'


def made_run(folder: Path, name: str, rows: list[dict[str, Any]], report: str = "") -> Path:
    """A run's folder, as commands write it."""
    path = folder / name
    path.mkdir()
    config = {"command": "scaling", "options": {"seed": 3}, "revision": "abc", "versions": {}}
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    lines = [json.dumps(row) + "\n" for row in rows]
    (path / "rows.jsonl").write_text("".join(lines), encoding="utf-8")
    (path / "growth.svg").write_text(SVG, encoding="utf-8")
    if report:
        (path / "report.md").write_text(report, encoding="utf-8")
    return path


ROWS = [
    {"gpus": 8, "time": {"s": 4.0}, "plan": "one"},
    {"gpus": 16, "time": {"s": 2.5}, "plan": "</script><script>document.title='taken'</script>"},
]
REPORT = (
    "# How it grows\n\nMore GPUs <img src=x onerror=alert(1)> help.\n\n"
    "| GPUs | s |\n|---|---:|\n| 8 | 4.0 |\n\n![Time over GPUs](growth.svg)\n"
)


@pytest.fixture
def page(tmp_path: Path) -> str:
    first = made_run(tmp_path, "first", ROWS, REPORT)
    second = made_run(tmp_path, "second", [{"gpus": 32, "time": {"s": 1.75}, "plan": "two"}])
    return page_of([KeptRun.of(first), KeptRun.of(second)])


def test_the_page_holds_rows_words_and_pictures(page: str) -> None:
    found = [json.loads(one) for one in re.findall(r'"application/json">(.*?)</script>', page)]
    together, first, second = found
    assert first == {
        "columns": ["gpus", "time.s", "plan"],
        "rows": [[8, 4.0, "one"], [16, 2.5, ROWS[1]["plan"]]],
    }
    assert second["rows"] == [[32, 1.75, "two"]]
    assert [row[0] for row in together["rows"]] == ["first", "first", "second"]
    assert "How it grows (first)" in page
    assert page.count("data:image/svg+xml;base64,") == 2
    assert 'alt="Time over GPUs"' in page
    assert "<td style" in page or "<td>8</td>" in page
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")


def test_content_of_a_run_is_text_and_no_script(page: str) -> None:
    assert "<img src=x" not in page
    assert "</script><script>document" not in page


def test_a_browser_shows_it(browser: Any, page: str, tmp_path: Path) -> None:
    from axe_playwright_python.sync_playwright import Axe  # noqa: PLC0415 (starts slowly)

    file = tmp_path / "show.html"
    file.write_text(page, encoding="utf-8")
    context = browser.new_context(color_scheme="dark", viewport={"width": 380, "height": 800})
    tab = context.new_page()
    said: list[str] = []
    tab.on("console", lambda message: said.append(message.text))
    tab.on("pageerror", lambda error: said.append(str(error)))
    tab.goto(file.as_uri())
    assert tab.title() == "2 runs"
    first = tab.locator("#first-0")
    assert first.locator("circle").count() == 2
    first.get_by_role("button", name="time.s").click()
    assert first.locator(".asked tbody tr").first.locator("td").nth(1).inner_text() == "2.5"
    first.get_by_label("rows with the text").fill("one")
    assert first.locator(".asked tbody tr").count() == 1
    assert first.locator("circle").count() == 1
    tab.locator(".asked").first.get_by_label("coloured by").select_option("run")
    assert tab.locator(".legend li").all_inner_texts() == ["first", "second"]
    sizes = tab.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
    assert sizes[0] <= sizes[1]
    assert said == []
    context.close()
    context = browser.new_context(bypass_csp=True)
    tab = context.new_page()
    tab.goto(file.as_uri())
    found = Axe().run(tab).response["violations"]
    assert [rule["id"] for rule in found if rule["impact"] in SERIOUS] == []
    context.close()


def test_a_real_run_is_shown(tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert command("space_size", "--quick", "--out", str(out)) == 0
    shown = tmp_path / "deep" / "page.html"
    assert command("show", str(out), "--out", str(shown)) == 0
    text = shown.read_text(encoding="utf-8")
    assert KeptRun.of(out).title in text
    assert text.count("<figure>") == len(list(out.glob("*.svg"))) > 0


def test_what_is_no_run_is_refused_with_the_runs_that_lie_in_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made_run(tmp_path, "first", ROWS)
    with pytest.raises(InputError, match="give one of the runs in it: first"):
        KeptRun.of(tmp_path)
    with pytest.raises(InputError, match="is not a folder"):
        KeptRun.of(tmp_path / "gone")
    damaged = made_run(tmp_path, "damaged", ROWS)
    (damaged / "config.json").write_text("{", encoding="utf-8")
    assert run(lambda line: command("show", *line), [str(damaged)]) == 2
    assert "config.json" in capsys.readouterr().err
