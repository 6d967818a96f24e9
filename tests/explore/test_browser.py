"""The workbench as a person uses it: a real browser, the real server, the tiny model on eight simulated devices.

pip install -e ".[browser]", and a Chromium: apt-get install chromium. Without them these tests are skipped.
"""

import contextlib
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gspmd_lm import units

playwright = pytest.importorskip("playwright.sync_api", reason="the tests in a browser need .[browser]")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="the tests in a browser need Chromium: apt-get install chromium"),
]
ROOT = Path(__file__).parent.parent.parent
RULES = """\
# A layout of my own.
mesh: {fsdp: -1, tensor: 4} # tensor: heads and hidden units
rules:
  batch: fsdp
  vocab: tensor
  heads: tensor # query heads

  kv_heads: tensor
  mlp: tensor
weights:
  embed: fsdp # ZeRO-3
"""
PATIENCE_MS = 180_000  # for a trace or a compile on two busy cores
WIDTHS = (1280, 1920)
SCHEMES = ("light", "dark")
SIZES = [0, 7, 999, 1000, 15_400, 999_900, 1_000_000, 246_300_000, 1.6e9, 2.5e12]
TIMES = [0, 4e-6, 19.7e-6, 616e-6, 1e-3, 8.05e-3, 0.1, 0.999, 1, 1.72, 15, 150]


@pytest.fixture(scope="module")
def rules(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("rules") / "mine.yaml"
    path.write_text(RULES)
    return path


@pytest.fixture(scope="module")
def address(rules: Path) -> Iterator[str]:
    log, words = rules.with_name("log"), ("explore", "--config=tiny", f"--rules={rules}", "--target=cpu:8", "--noopen")
    with log.open("w") as file:
        process = subprocess.Popen([sys.executable, ROOT / "main.py", *words], stdout=file, stderr=file, cwd=ROOT)
    try:
        deadline = time.monotonic() + PATIENCE_MS / 1e3
        while not (found := re.search(r"http://\S+", log.read_text())):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield found[0]
    finally:
        process.terminate()
        process.wait()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        launched = started.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield launched
        launched.close()


class Workbench:
    """A page that is open, and what a person does on it. What goes wrong in the page's own code fails the test."""

    def __init__(self, page: Any):
        self.page = page
        self.errors: list[str] = []
        page.set_default_timeout(PATIENCE_MS)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)

    def expect(self, selector: str) -> Any:
        """What is expected of the only element of a selector; it waits until that is true."""
        playwright.expect.set_options(timeout=PATIENCE_MS)
        return playwright.expect(self.page.locator(selector))

    def state(self) -> dict[str, Any]:
        return self.page.request.get(f"{self.page.url}state").json()

    def settle(self, text: str | None = None) -> None:
        """Waits until the figures are those of the text, or of what stands in the editor."""
        wanted, deadline = self.text() if text is None else text, time.monotonic() + PATIENCE_MS / 1e3
        while not _is_settled(state := self.state(), wanted):
            assert time.monotonic() < deadline, (state["inputs"]["text"], wanted)
            self.page.wait_for_timeout(50)
        self.expect("body").not_to_have_class(re.compile(r"\bold\b"))

    def text(self) -> str:
        return "\n".join(line.removesuffix("\n") for line in self.page.locator(".cm-line").all_inner_texts())

    def figure(self, name: str) -> str:
        return self.page.locator(f".figure[data-name={name}] b").first.inner_text()

    def write_row(self, before: str, row: str) -> None:
        """Types a row below the line with `before`."""
        self.page.locator(".cm-line", has_text=before).first.click()
        self.page.keyboard.press("End")
        self.page.keyboard.type(f"\n{row}")
        self.page.keyboard.press("Escape")  # the list of completions

    def change_word(self, row: str, word: str, new: str) -> None:
        """Types another word in place of the first one of a row."""
        line = self.page.locator(".cm-line", has_text=row).first
        line.get_by_text(word, exact=True).first.dblclick()
        self.page.keyboard.type(new)
        self.page.keyboard.press("Escape")  # the list of completions

    def drag(self, axis: str, size: int) -> None:
        """Drags the slider of a mesh axis until it says a size."""
        slider = self.page.locator(f"[id='control-mesh.{axis}']")
        box, (least, most) = slider.bounding_box(), (0, int(slider.get_attribute("max")))
        output = self.page.locator(f"output[for='control-mesh.{axis}']")
        choice, middle = int(slider.input_value()), box["y"] + box["height"] / 2
        thumb = 16  # pixels: its middle goes from half of it to half of it before the end
        place = lambda at: box["x"] + thumb / 2 + (box["width"] - thumb) * (at - least) / (most - least)  # noqa: E731
        self.page.mouse.move(place(choice), middle)
        self.page.mouse.down()
        while output.inner_text() != str(size) and choice < most:
            choice += 1
            self.page.mouse.move(place(choice), middle, steps=4)
        self.page.mouse.up()
        assert output.inner_text() == str(size)


def _is_settled(state: dict[str, Any], text: str) -> bool:
    known = state["layer"] and state["layer"]["version"] == state["version"]
    return bool(known and state["inputs"]["text"] == text and state["busy"] is None)


@contextlib.contextmanager
def open_page(
    browser: Any, address: str, width: int = 1280, scheme: str = "light", script: str = ""
) -> Iterator[Workbench]:
    """The page with the rules that the file had at first, and its figures. script: runs before the page's own."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    context.add_init_script(script)
    opened = Workbench(context.new_page())
    opened.page.goto(address)
    opened.page.request.post(f"{opened.page.url}edit", data={"text": RULES})
    opened.page.request.post(f"{opened.page.url}pin", data={"clear": True})
    opened.settle(RULES)
    yield opened
    assert not opened.errors
    context.close()


@pytest.fixture
def bench(browser, address) -> Iterator[Workbench]:
    with open_page(browser, address) as opened:
        yield opened


def test_a_wrong_row_is_marked_and_its_fix_applied(bench):
    bench.change_word("heads: tensor # query heads", "heads", "headz")
    bench.expect("#problems .message").to_contain_text("headz")
    bench.expect(".cm-lintRange-error").to_be_visible()
    bench.expect("#headline .figure").not_to_have_count(0)  # the last good layout stays
    bench.page.click("#problems .fix")
    bench.settle(RULES)
    bench.expect("#problems li").to_have_count(0)
    bench.page.locator(".cm-content").focus()
    bench.page.keyboard.press("Control+z")  # the fix is one edit
    bench.expect("#problems .message").to_contain_text("headz")


def test_a_mesh_axis_is_dragged_and_the_figures_follow(bench):
    before = bench.figure("sent_bytes")
    bench.drag("tensor", 8)
    wanted = RULES.replace("tensor: 4", "tensor: 8")
    bench.settle(wanted)
    assert bench.text() == wanted  # comments and order stay
    bench.expect(".of-mesh figcaption").to_contain_text("tensor 8")
    assert bench.figure("sent_bytes") != before
    bench.page.locator(".cm-content").focus()
    bench.page.keyboard.press("Control+z")  # what a control writes is one edit
    bench.settle(RULES)
    bench.expect("output[for='control-mesh.tensor']").to_have_text("4")


def test_an_empty_field_takes_the_batch_of_the_config(bench):
    field, first = bench.page.locator("input[name=batch]"), bench.state()["inputs"]["batch"]
    for written, batch in (("64", 64), ("", first)):
        field.fill(written)
        field.blur()
        bench.expect("input[name=batch]").to_have_value(str(batch))
        assert field.get_attribute("aria-invalid") is None
        bench.settle()
    assert bench.state()["inputs"]["batch"] == first != 64


def test_a_layout_is_pinned_and_compared(bench):
    bench.page.click("#pin")
    bench.expect("#pin").to_have_attribute("aria-pressed", "true")
    bench.write_row("mlp: tensor", "residual.seq: tensor")
    bench.expect(".figure .change.good, .figure .change.bad").not_to_have_count(0)
    bench.expect("#layer .flow").not_to_have_count(0)
    bench.expect("#layer .what:has-text('reduce-scatter')").not_to_have_count(0)
    bench.expect("#changes .rows > li").to_have_count(1)
    bench.expect("#changes .rows > li > code").to_have_text("+ rules.residual.seq: tensor")
    bench.expect("#changes .rows").to_contain_text("all-reduces")
    bench.page.click("#pin")
    bench.expect(".figure .change").to_have_count(0)


def test_a_transfer_leads_to_its_row_and_to_its_array(bench):
    bench.page.locator("#layer .collective", has_text="fsdp").first.click()
    bench.expect("#reason >> nth=0").to_contain_text("embed: fsdp")
    bench.page.locator("#reason .row", has_text="embed: fsdp").first.click()
    bench.expect(".cm-activeLine").to_contain_text("embed: fsdp")
    array = bench.page.locator("#reason li").first.inner_text().split(" array ")[1].split(":")[0]
    bench.page.locator("#reason [data-key^='reason array']").first.click()
    bench.expect("#array h3 code").to_have_text(array)


def test_pointing_at_a_device_marks_its_parts(bench):
    weight = next(one for one in bench.state()["arrays"] if one["path"] == "layers.mlp.w_up")
    assert weight["at_rest"][1:] == [["fsdp"], ["tensor"]]
    bench.page.click("#tree [data-path='layers.mlp.w_up']")
    bench.page.hover("[data-device='5']")
    bench.expect("#placement .about").to_contain_text("Device 5")
    bench.expect("[data-use='at rest'].chosen").to_have_count(1)
    bench.expect("[data-use='in use'].chosen").to_have_count(1)
    bench.page.hover("[data-use='in use'].chosen rect")  # two devices hold it: one of each half of fsdp
    bench.expect(".device.chosen").to_have_count(2)


def test_the_best_layout_of_a_search_is_loaded(bench):
    bench.page.click("#find")
    bench.expect("#find").to_have_text("Stop")
    bench.expect("#search circle").not_to_have_count(0)
    bench.expect("#find").to_have_text("Search")
    best = bench.state()["search"]["best"]
    bench.page.click(f"#search circle[data-rank='{best}']", force=True)
    bench.expect("#status").to_contain_text("Loaded")
    bench.settle()
    assert bench.text() != RULES
    assert not bench.state()["problems"]
    bench.page.locator(".cm-content").focus()
    bench.page.keyboard.press("Control+z")
    bench.settle(RULES)


def test_compiled_figures_stand_beside_the_estimates(bench):
    bench.page.click("#compile")
    bench.expect("#compile").to_have_text("Stop")
    bench.expect(".figure .compiled").not_to_have_count(0)
    bench.expect("#compile").to_have_text("Compile")
    figures = {one["name"]: one for one in bench.state()["headline"]["figures"]}
    compiled = [one["compiled"]["text"] for one in figures.values() if one["compiled"]]
    assert bench.page.locator(".figure .compiled b").all_inner_texts() == compiled
    bench.expect("#timeline").to_contain_text("simulated devices")  # which have no times to draw


@pytest.mark.parametrize("write, values", [(units.human_bytes, SIZES), (units.human_seconds, TIMES)])
def test_numbers_are_written_as_in_reports(bench, write, values):
    name = {units.human_bytes: "writeBytes", units.human_seconds: "writeSeconds"}[write]
    code = f"async (values) => {{ const {{ {name} }} = await import('/static/units.js'); return values.map({name}); }}"
    assert bench.page.evaluate(code, values) == [write(value) for value in values]


def test_an_edit_stops_the_compile(bench):
    bench.page.click("#compile")
    bench.expect("#compile").to_have_text("Stop")
    bench.drag("tensor", 8)
    bench.expect("#compile").to_have_text("Compile")


def test_a_saved_file_keeps_its_comments(bench, rules):
    bench.drag("tensor", 8)
    bench.settle(RULES.replace("tensor: 4", "tensor: 8"))
    bench.page.keyboard.press("Control+s")
    bench.expect("#save-path").to_have_value(re.compile("mine.yaml$"))
    bench.page.click("#save-go")
    bench.expect("#status").to_contain_text("Saved")
    assert rules.read_text() == RULES.replace("tensor: 4", "tensor: 8")
    rules.write_text(RULES)


def test_another_file_is_not_written(bench, tmp_path):
    bench.page.click("#save")
    bench.page.fill("#save-path", str(tmp_path / "other.yaml"))
    bench.errors.clear()
    bench.page.click("#save-go")
    bench.expect("#save-refusal").not_to_be_empty()
    assert not (tmp_path / "other.yaml").exists()
    bench.page.keyboard.press("Escape")
    bench.errors.clear()  # the browser reports the refused request


def test_no_key_is_lost_while_the_server_is_slow(browser, address):
    with open_page(browser, address, script=LATE_STATES) as bench:
        bench.page.locator(".cm-line", has_text="ZeRO-3").click()
        bench.page.keyboard.press("End")
        words = " and some more words of a comment, which take a while to type"
        bench.page.keyboard.type(words, delay=90)
        bench.settle(RULES.replace("# ZeRO-3", f"# ZeRO-3{words}"))


def test_names_are_completed_with_their_meanings(bench):
    bench.write_row("mlp: tensor", "residual.s")
    bench.page.keyboard.press("Control+Space")
    bench.expect(".cm-tooltip-autocomplete").to_be_visible()
    bench.page.keyboard.press("Escape")
    for _ in "residual.s":
        bench.page.keyboard.press("Backspace")
    bench.page.keyboard.type("exper")
    bench.expect(".cm-tooltip-autocomplete [aria-selected]").to_contain_text("expert")
    bench.page.keyboard.press("Escape")
    for _ in "exper":
        bench.page.keyboard.press("Backspace")
    bench.page.keyboard.type("batch: ten")
    bench.expect(".cm-tooltip-autocomplete [aria-selected]").to_contain_text("tensor")


def test_the_keyboard_alone_is_enough(bench):
    def go_to(selector: str) -> None:
        """Presses Tab until an element has the focus."""
        for _ in range(80):
            if bench.page.evaluate("(selector) => document.activeElement?.matches(selector)", selector):
                return
            bench.page.keyboard.press("Tab")
        raise AssertionError(f"Tab does not reach {selector}")

    bench.page.locator("body").press("Tab")
    go_to("#pin")
    bench.page.keyboard.press("Enter")
    bench.expect("#pin").to_have_attribute("aria-pressed", "true")
    go_to("[id='control-mesh.tensor']")
    bench.page.keyboard.press("ArrowRight")
    bench.settle(RULES.replace("tensor: 4", "tensor: 8"))
    bench.expect("[id='control-mesh.tensor']").to_be_focused()  # the new figures leave the focus where it is
    go_to("#layer .collective")
    bench.page.keyboard.press("Enter")
    bench.expect("#layer .collective[aria-pressed=true]").to_be_focused()
    go_to("#tree [role=treeitem]")
    first = bench.page.locator("#array h3 code").inner_text()
    bench.page.keyboard.press("ArrowDown")
    bench.expect("#array h3 code").not_to_have_text(first)
    go_to(".device")
    bench.page.keyboard.press("ArrowRight")
    bench.expect("#placement .about").to_contain_text("Device 1 ")


def test_a_frame_of_a_notebook_needs_no_cookie(browser, address):
    context = browser.new_context()
    framed = Workbench(context.new_page())
    framed.page.goto(f"{address}&frame=1")
    framed.expect("#headline .figure").not_to_have_count(0)
    framed.change_word("heads: tensor # query heads", "heads", "headz")
    framed.expect("#problems .message").to_contain_text("headz")
    framed.page.click("#problems .fix")
    framed.expect("#problems li").to_have_count(0)
    assert not framed.errors
    assert not context.cookies()
    context.close()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_widths_and_colours(browser, address, width, scheme):
    with open_page(browser, address, width, scheme) as bench:
        wide = bench.page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert wide <= 0, f"the page is {wide} pixels too wide"
        bench.expect("#layer .what").not_to_have_count(0)
        faint = bench.page.evaluate(CONTRASTS)
        assert not faint, json.dumps(faint)
        unnamed = bench.page.evaluate(UNNAMED)
        assert not unnamed, unnamed


# States arrive a while after they were sent, and answers still later: meanwhile other keys were pressed.
LATE_STATES = """
  const listen = EventSource.prototype.addEventListener;
  EventSource.prototype.addEventListener = function (type, act) {
    listen.call(this, type, (event) => setTimeout(() => act(event), 100));
  };
  const ask = window.fetch;
  window.fetch = async (...words) => {
    const answer = await ask(...words);
    await new Promise((resolve) => setTimeout(resolve, 300));
    return answer;
  };
"""
# The texts whose contrast with what is behind them is below 4.5 to 1.
CONTRASTS = """() => {
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const read = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const linear = (part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  const luminance = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const colour = read(getComputedStyle(node).backgroundColor);
      if (colour[3] > 250) return colour;
    }
    return [255, 255, 255];
  };
  const faint = [];
  for (const node of document.querySelectorAll("body *")) {
    const text = [...node.childNodes].filter(({ nodeType }) => nodeType === 3).map(({ data }) => data.trim()).join("");
    if (!text || !node.checkVisibility({ visibilityProperty: true }) || node instanceof SVGElement) continue;
    const found = [read(getComputedStyle(node).color), behind(node)].map(luminance);
    const contrast = (Math.max(...found) + 0.05) / (Math.min(...found) + 0.05);
    if (contrast < 4.5) faint.push([text.slice(0, 40), node.className, contrast.toFixed(2)]);
  }
  return faint;
}"""
# What can be used or looked at and has no name that a screen reader could say.
UNNAMED = """() => {
  const kinds = "button, a, input, select, iframe, [role=img], [role=treeitem], section";
  const isNamed = (node) => node.ariaLabel || node.title || node.labels?.length || node.innerText?.trim();
  const nodes = [...document.querySelectorAll(kinds)].filter((node) => node.checkVisibility() && !isNamed(node));
  return nodes.map(({ outerHTML }) => outerHTML.slice(0, 120));
}"""
