"""The page in a browser: clicked through, with the figures of the commands, for every user."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.page.conftest import RunningPage
from tests.page.test_questions import CONFIG, command

PHONE = {"width": 380, "height": 800}
SERIOUS = ("serious", "critical")


class Seen:
    """A tab of the browser: its console, and the requests that left the machine."""

    def __init__(self, browser: Any, **settings: Any) -> None:
        self.context = browser.new_context(**settings)
        self.tab = self.context.new_page()
        self.tab.set_default_timeout(60_000)
        self.said: list[str] = []
        self.left: list[str] = []
        self.tab.on("console", lambda message: self.said.append(message.text))
        self.tab.on("pageerror", lambda error: self.said.append(str(error)))
        self.tab.on("request", self._see)

    def _see(self, request: Any) -> None:
        if not request.url.startswith(("http://127.0.0.1:", "data:", "blob:")):
            self.left.append(request.url)

    def opened(self, address: str) -> Any:
        """The tab, once it shows an answer."""
        self.tab.goto(address)
        self.tab.locator("#iteration, #layout").first.wait_for()
        return self.tab


@pytest.fixture
def seen(browser: Any, running: RunningPage) -> Iterator[Seen]:
    one = Seen(browser)
    one.opened(running.address)
    one.tab.locator("#verdict", has_text="Proven").wait_for()
    yield one
    assert one.said == []
    assert one.left == []
    one.context.close()


def test_the_first_plan_is_that_of_tune(seen: Seen, tmp_path: Path, capsys: Any) -> None:
    line = ["--model", "llama3-8b", "--hardware", "h100-80gb", "--gpus-per-node", "8"]
    line += ["--global-batch", "64", "--precision", "bf16", "--out", str(tmp_path / "p.yaml")]
    assert command("tune", *line, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    shown = seen.tab.locator("#iteration")
    assert float(shown.get_attribute("data-seconds")) == told["predicted_s"]
    assert shown.inner_text() == f"{told['predicted_s']:.3f} s"


# Whether the theme's tint, on which tasks are drawn, is on the canvas.
TINTED = """() => {
  const canvas = document.querySelector("#timeline canvas");
  if (!canvas) return false;
  const tint = getComputedStyle(document.documentElement).getPropertyValue("--tint").slice(1);
  const wanted = [0, 2, 4].map((at) => parseInt(tint.slice(at, at + 2), 16)).join();
  const copy = new OffscreenCanvas(canvas.width, canvas.height);
  const pen = copy.getContext("2d", { willReadFrequently: true });
  pen.drawImage(canvas, 0, 0);
  const pixels = pen.getImageData(0, 0, canvas.width, canvas.height).data;
  for (let at = 0; at < pixels.length; at += 4)
    if (wanted === pixels.slice(at, at + 3).join()) return true;
  return false;
}"""


def test_every_button_is_clicked_through(seen: Seen) -> None:
    tab = seen.tab
    tab.get_by_role("button", name="Pin this plan").click()
    tab.locator("[data-field=knob-zero]").focus()
    tab.keyboard.press("ArrowRight")
    tab.locator("#compared", has_text="faster").or_(
        tab.locator("#compared", has_text="equally")
    ).first.wait_for()
    tab.get_by_role("button", name="Back to the plan").click()
    tab.get_by_role("button", name="Back to the plan").wait_for(state="hidden")
    tab.get_by_role("button", name="Play one iteration").click()
    for scheme in ("light", "dark", "light"):
        tab.emulate_media(color_scheme=scheme)
        tab.wait_for_function(TINTED)
    tab.get_by_role("button", name="Ask what would buy").click()
    tab.locator("#gains table").first.wait_for()
    tab.get_by_role("button", name="Search other numbers").click()
    tab.get_by_role("button", name="Take 2 nodes").click()
    tab.locator("#plan", has_text="16 data").wait_for()
    tab.get_by_role("button", name="Launch line").click()
    tab.locator("#take pre", has_text="torchrun").wait_for()
    for name, ending in (("Plan file", "plan.yaml"), ("Trace", "trace.json")):
        with tab.expect_download() as got:
            tab.get_by_role("button", name=name).click()
        assert got.value.suggested_filename.endswith(ending)
    tab.get_by_role("tab", name="Serving").click()
    tab.locator("#layout").wait_for()
    tab.locator("#played", has_text="each further token, 95 %").wait_for()


def test_a_link_restores_the_page(seen: Seen, browser: Any) -> None:
    tab = seen.tab
    tab.locator("[data-slider=nodes]").focus()
    tab.keyboard.press("ArrowRight")
    tab.locator("#verdict", has_text="all 16 GPUs").wait_for()
    tab.locator("[data-field=knob-micro_batch]").focus()
    tab.keyboard.press("ArrowRight")
    tab.get_by_role("button", name="Back to the plan").wait_for()
    again = Seen(browser)
    other = again.opened(tab.url)
    for part in ("#iteration", "#plan p"):
        assert other.locator(part).first.inner_text() == tab.locator(part).first.inner_text()
    assert again.said == []
    again.context.close()


def test_fine_tuning_is_predicted_as_it_trains(seen: Seen) -> None:
    tab = seen.tab
    before = tab.locator("#iteration").inner_text()
    tab.get_by_role("tab", name="Fine-tuning").click()
    tab.locator("#verdict", has_text="on 1 GPU").wait_for()
    tab.get_by_label("frozen weights").select_option("4bit")
    tab.locator("#plan", has_text="no blocks recomputed").wait_for()
    tab.get_by_label("what is trained").select_option("all")
    tab.locator("#problem", has_text="No plan of space fsdp").wait_for()
    tab.get_by_role("tab", name="Training").click()
    tab.locator("#iteration", has_text=before).wait_for()


def test_pasted_content_becomes_the_question(seen: Seen) -> None:
    tab = seen.tab
    tab.get_by_text("Your own: pick or paste a file").click()
    tab.locator("#paste").fill(json.dumps(CONFIG))
    tab.get_by_role("button", name="Read it").click()
    tab.locator("#read-as", has_text="Read as the model").wait_for()
    tab.locator("#plan", has_text="blocks 0 to 7").wait_for()
    deeper = json.dumps({**CONFIG, "num_hidden_layers": 12}).encode()
    file = {"name": "config.json", "mimeType": "application/json", "buffer": deeper}
    tab.locator("#pick").set_input_files([file])
    tab.locator("#plan", has_text="blocks 0 to 11").wait_for()


def test_on_a_phone_the_answer_stays_in_sight(browser: Any, running: RunningPage) -> None:
    one = Seen(browser, viewport=PHONE)
    tab = one.opened(running.address)
    tab.locator("#brief", has_text="proven").wait_for()
    assert tab.locator("#iteration").bounding_box()["y"] > PHONE["height"]
    before, address = tab.locator("#brief strong").inner_text(), tab.url
    assert before == tab.locator("#iteration").inner_text()
    tab.locator("[data-slider=global_batch]").focus()
    tab.keyboard.press("ArrowRight")
    tab.locator("#brief strong", has_not_text=before).wait_for()
    for words, place in (("Answer", "#iteration"), ("Question", "[data-field=model]")):
        tab.locator("#brief").get_by_role("link", name=words).click()
        tab.wait_for_function(
            "place => { const top = document.querySelector(place).getBoundingClientRect().top;"
            " return top > 0 && top < innerHeight / 2; }",
            arg=place,
        )
        brief, shown = tab.locator("#brief").bounding_box(), tab.locator(place).bounding_box()
        assert 0 <= brief["y"] <= shown["y"]
        assert tab.locator("#problem").is_hidden()
    # The address still restores the page.
    assert tab.url.startswith(address[: address.index("#") + 9])
    # A plan that was turned is not the plan that was proven.
    tab.locator("#brief", has_text="proven").wait_for()
    proven = tab.locator("#brief strong").inner_text()
    tab.locator("[data-field=knob-zero]").focus()
    tab.keyboard.press("ArrowRight")
    tab.locator("#brief strong", has_not_text=proven).wait_for()
    assert "proven" not in tab.locator("#brief").inner_text()
    assert one.said == []
    one.context.close()


# The first prediction never answers, and the search goes on after its first plan.
ONLY_A_SEARCH = """
const sent = window.fetch, until = () => new Promise(() => {});
let isFirst = true;
window.fetch = async (path, options) => {
  if (path === "/api/predict" && isFirst) {
    isFirst = false;
    return until();
  }
  const answer = await sent(path, options);
  if (path !== "/api/search") return answer;
  const isLast = (chunk) => new TextDecoder().decode(chunk).includes('"answer"');
  const transform = (chunk, kept) => { if (!isLast(chunk)) kept.enqueue(chunk); };
  return new Response(answer.body.pipeThrough(new TransformStream({ transform, flush: until })));
};
"""


def test_a_refusal_during_the_first_search_leads_back_to_its_plan(
    browser: Any, running: RunningPage
) -> None:
    one = Seen(browser)
    one.tab.add_init_script(ONLY_A_SEARCH)
    tab = one.opened(running.address)
    tab.locator("#iteration").wait_for()
    field = tab.locator("input[type=number][data-field=global_batch]")
    field.fill("0")
    field.press("Tab")
    tab.locator("#results", has_text="The question was refused").wait_for()
    tab.get_by_role("button", name="Back to the last answer").click()
    tab.locator("#iteration").wait_for()
    assert field.input_value() == "64"
    one.context.close()


def test_what_is_wrong_is_said_beside_its_field(browser: Any, running: RunningPage) -> None:
    one = Seen(browser)
    tab = one.opened(running.address)
    # Without a first answer there is none to go back to.
    tab.locator("#iteration").wait_for()
    field = tab.locator("input[type=number][data-field=global_batch]")
    field.fill("0")
    field.press("Tab")
    tab.locator("#problem", has_text="global_batch").wait_for()
    assert field.get_attribute("aria-invalid") == "true"
    told = tab.locator(f"#{field.get_attribute('aria-describedby')}")
    assert "global_batch: 0 is too small" in told.inner_text()
    # No answer to another question stands beside it, and the last one comes back when asked.
    tab.locator("#results", has_text="The question was refused").wait_for()
    assert tab.locator("#iteration, #verdict").count() == 0
    tab.get_by_role("button", name="Back to the last answer").click()
    tab.locator("#iteration").wait_for()
    assert field.input_value() == "64"
    assert tab.locator("#wrong").count() == 0
    tab.get_by_text("Your own: pick or paste a file").click()
    tab.locator("#paste").fill(json.dumps({**CONFIG, "model_type": "resnet"}))
    tab.get_by_role("button", name="Read it").click()
    tab.locator("#results", has_text="The pasted text was refused").wait_for()
    assert "resnet" in tab.locator(".field", has=tab.locator("#paste")).inner_text()
    assert tab.locator("#iteration, #verdict").count() == 0
    # The browser itself notes an answer with status 400.
    assert all("400" in said for said in one.said)
    one.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("tab", ["Training", "Serving"])
def test_no_serious_finding_of_accessibility(
    browser: Any, running: RunningPage, scheme: str, tab: str
) -> None:
    from axe_playwright_python.sync_playwright import Axe  # noqa: PLC0415 (starts slowly)

    # The checker is a script that the page itself would refuse.
    one = Seen(browser, bypass_csp=True, color_scheme=scheme, viewport=PHONE)
    shown = one.opened(running.address)
    if tab == "Serving":
        shown.get_by_role("tab", name=tab).click()
        shown.locator("#layout").wait_for()
    else:
        shown.locator("#verdict", has_text="Proven").wait_for()
    found = Axe().run(shown).response["violations"]
    assert [rule["id"] for rule in found if rule["impact"] in SERIOUS] == []
    sizes = shown.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
    assert sizes[0] <= sizes[1] == PHONE["width"]
    one.context.close()


def test_without_scripts_the_page_says_what_to_run(browser: Any, running: RunningPage) -> None:
    context = browser.new_context(java_script_enabled=False)
    tab = context.new_page()
    tab.goto(running.address)
    assert "mistlab tune" in tab.locator("noscript, .alert").first.inner_text()
    context.close()
