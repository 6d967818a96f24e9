"""The HTML page: what stands in it, that it loads nothing and trusts no text, and that it works in a browser."""

import collections
import dataclasses
import functools
import itertools
import json
import re

import pytest

from gspmd_lm.foresight.timing.predict import Span
from gspmd_lm.show import comparison, html, report, svg
from gspmd_lm.units import human_bytes, human_seconds
from tests.foresight import sample
from tests.reader import Reader, run_in_a_browser

SEVERAL = [sample.LLAMA, sample.REFUSED, sample.FSDP]


def test_spans_that_run_at_the_same_time_have_rows_of_their_own():
    times = (2, 4), (0, 2), (1, 3), (4, 5)
    placed, count = svg._rows([Span(*map(float, at), "ici fsdp", "all-gather", "a", "forward") for at in times])
    assert [row for _, row in placed] == [0, 1, 0, 0] and count == 2


@pytest.mark.parametrize("reports", [[sample.LLAMA], [sample.CPU], [sample.REFUSED], [sample.SLICES], SEVERAL])
def test_the_page_is_whole(reports):
    found = Reader(comparison.page(reports))
    assert not found.unclosed and not found.open
    assert len(found.find("h1")) == 1 and found.find("title")[0]["text"] == found.find("h1")[0]["text"]
    levels = [int(one["tag"][1]) for one in found.elements if re.fullmatch("h[1-6]", one["tag"])]
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels)), levels
    names = [one["id"] for one in found.elements if "id" in one]
    assert len(names) == len(set(names))
    for head in found.find("th"):
        assert head.get("scope") in ("col", "row", "rowgroup") and head["text"].strip()


@pytest.mark.parametrize("reports", [[sample.LLAMA], [sample.SLICES], SEVERAL])
def test_the_page_loads_nothing(reports):
    text = comparison.page(reports)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|@import|url\((?!#)", text)
    found = Reader(text)
    assert not found.find("link") and not found.find("img")
    assert not [one for one in found.elements if "src" in one or "href" in one]
    (policy,) = [one["content"] for one in found.find("meta") if one.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'")


def test_text_from_files_is_no_markup():
    text = comparison.page([sample.SLICES])
    assert text.count("<script") == comparison.page([sample.LLAMA]).count("<script") == 2
    assert "<!--" not in text
    found = Reader(text)
    assert found.find("title")[0]["text"].startswith(sample.HOSTILE)
    (data,) = json.loads(found.find("script", type="application/json")[0]["text"])
    assert data["arrays"][1]["path"] == sample.HOSTILE
    assert [one["data-about"] for one in found.find("svg") if sample.HOSTILE in one.get("data-about", "")]


def test_every_collective_and_span_is_there():
    found = Reader(comparison.page([sample.LLAMA]))
    (table,) = found.find("table", **{"class": "stack sortable"})
    sources = [one["text"] for one in found.find("code")]
    for one in sample.COLLECTIVES:
        assert one.source in sources and f"{one.times_per_step:,}" in table["text"]
    assert len(found.find("svg", **{"class": "span"})) == len(sample.PREDICTION.timeline)
    lanes = {one["text"] for one in found.find("li") if "top:" in one.get("style", "")}
    assert lanes == {span.lane for span in sample.PREDICTION.timeline}


def test_bars_are_to_scale():
    text = comparison.page([sample.LLAMA])
    memory = re.findall(r'class="k-(\w+)" style="width:([\d.]+)%"', text)
    widths = {kind: float(width) for kind, width in memory[:4]}
    for part in report.memory_parts(sample.LLAMA):
        assert widths[part.kind] == pytest.approx(100 * part.amount / sample.LLAMA.memory.limit_bytes, abs=0.001)
    assert re.search(r'style="left:100.000%"><small>limit 102.0 GB', text)
    refused = comparison.page([sample.REFUSED])  # here the need is longer than the limit
    at = re.findall(r'style="left:([\d.]+)%"><small>limit', refused)
    assert float(at[0]) == pytest.approx(100 * 16_909 / 230_451, abs=0.01)


def test_spans_are_to_scale():
    text = comparison.page([sample.LLAMA])
    spans = re.findall(r'<svg class="span" x="([\d.]+)%" y="\d+" width="([\d.]+)%"', text)
    drawn = sorted((float(x), float(width)) for x, width in spans)
    wanted = sample.PREDICTION.timeline
    whole = max(span.end_s for span in wanted) / 100
    assert len(drawn) == len(wanted)
    for place, width in sorted((span.start_s / whole, (span.end_s - span.start_s) / whole) for span in wanted):
        assert drawn.pop(0) == pytest.approx((place, width), abs=0.002)


def test_every_section_says_how_it_knows():
    found = Reader(comparison.page([sample.LLAMA]))
    heads = dict(one["text"].rsplit(" ", 1) for one in found.find("h2"))
    assert heads["Memory per device"] == heads["Collectives (16)"] == "compiled"
    assert heads["Step time"] == heads["One layer, in time"] == "predicted"
    assert heads["Mesh and arrays"] == "counted"


def test_without_a_prediction_the_reason_stands_there():
    text = comparison.page([sample.CPU])
    assert sample.CPU.no_prediction in text and 'class="span"' not in text
    assert sample.REFUSED.memory.refusal in comparison.page([sample.REFUSED])


def test_collectives_stand_in_groups_with_their_sums():
    found = Reader(comparison.page([sample.LLAMA]))
    groups = [one["text"] for one in found.find("tbody", **{"class": "group"})]
    sums = collections.Counter[tuple[str, str]]()
    for one in sample.COLLECTIVES:
        sums["+".join(one.mesh_axes), one.phase] += one.bytes_per_device_per_step
    assert len(groups) == len(sums)
    for said, ((axes, phase), size) in zip(groups, sums.most_common(), strict=True):
        assert said.startswith(f"{axes}, {phase}") and human_bytes(size) in said
    (whole,) = [one["text"] for one in found.find("div") if one["text"].startswith("sent per step compiled")]
    assert human_bytes(sums.total()) in whole


def test_lists_add_up():
    text = comparison.page([sample.LLAMA])
    memory, prediction = sample.LLAMA.memory, sample.PREDICTION
    others = memory.temporaries_bytes - sum(one.bytes for one in memory.largest)
    assert re.search(f">{re.escape(human_bytes(others))}</td><td[^>]*><code>all others", text)
    computed_s = prediction.matmul_s + prediction.attention_s + prediction.other_s
    rest_s = computed_s - sum(seconds for _, seconds in prediction.fusions)
    assert rest_s > 0 and re.search(f"all others</td><td[^>]*>{re.escape(human_seconds(rest_s))}", text)


def test_the_command_and_the_rules_file_are_there():
    one = dataclasses.replace(sample.LLAMA, rules_text="mesh: {data: 8}  # a <b> comment\n")
    found = Reader(comparison.page([one], "python main.py explain --rules=a"))
    assert found.find("pre")[0]["text"] == one.rules_text
    assert "python main.py explain --rules=a" in [one["text"] for one in found.find("code")]
    assert not Reader(comparison.page([sample.LLAMA])).find("pre")


def test_words_say_what_they_mean():
    found = Reader(comparison.page(SEVERAL))
    told = {one["text"]: one["title"] for one in found.find("abbr")}
    assert told and told.items() <= html.MEANINGS.items()
    assert {one["title"] for one in found.find("span", **{"class": "known"})} <= set(html.MEANINGS.values())
    assert [one["text"] for one in found.find("summary")].count("What the words mean") == 1


def test_several_are_ranked():
    found = Reader(comparison.page(SEVERAL))
    assert [one["data-name"] for one in found.find("article")] == ["fsdp", "fsdp_tp", "tp8"]
    data = json.loads(found.find("script", type="application/json")[0]["text"])
    assert [dict(one["mesh"]) for one in data] == [{"fsdp": 64}, {"fsdp": 16, "tensor": 4}, {"tensor": 8}]


# ---- in a browser

# Runs in the page once its own scripts have: uses it as a reader would, and tells what came of it.
VISIT = """<script>
{
const told = {}, press = (node, key) => node.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
const shown = () => [...document.querySelectorAll(".layout")].findIndex((layout) => !layout.hidden);
const article = () => document.querySelectorAll(".layout")[Math.max(0, shown())];
const $ = (selector) => article().querySelector(selector);
told.width = innerWidth;
told.overflow = document.documentElement.scrollWidth - innerWidth;
told.spans = article().querySelectorAll(".span").length;
told.chosen = [shown()];
told.picks = [...document.querySelectorAll(".pick")].map((pick) => pick.textContent);
document.querySelectorAll(".pick")[1]?.click();
told.chosen.push(shown());
const theme = document.getElementById("theme"), ground = () => getComputedStyle(document.body).backgroundColor;
told.grounds = [ground()]; theme.click(); told.grounds.push(ground()); theme.click(); told.grounds.push(ground());
const times = $(".sortable thead th:nth-child(4) button");
const groups = () => [...article().querySelectorAll(".members")].map((group) => [...group.rows]);
const column = () => groups().map((rows) => rows.map((row) => row.cells[3].textContent));
told.folded = $(".members").classList.contains("folded");
$(".fold").click(); told.folded = [told.folded, $(".members").classList.contains("folded")];
article().querySelectorAll("details").forEach((one) => { one.open = true; });
const boxes = [...article().querySelectorAll(".scroll, .strip, pre, dl")];
told.cut = boxes.filter((one) => one.scrollWidth > one.clientWidth + 1)
  .map((one) => one.getAttribute("aria-label") || one.tagName);
told.sorts = [0, 1].map(() => { times.click(); return [times.parentElement.getAttribute("aria-sort"), column()]; });
$(".sortable thead th:nth-child(1) button").click();
told.kinds = groups().map((rows) => rows.map((row) => row.cells[0].textContent));
const strip = $(".strip"), spoken = () => $(".timeline").parentElement.querySelector(".status").textContent;
press(strip, "ArrowRight"); told.spoken = [spoken()]; press(strip, "ArrowRight"); told.spoken.push(spoken());
const select = $(".choice select"), where = () => $(".mesh > .status").textContent;
select.selectedIndex = [...select.options].findIndex((one) => one.text === "layers.mlp.w_gate");
select.dispatchEvent(new Event("change"));
told.cells = article().querySelectorAll("td[data-device]").length;
told.colours = new Set([...article().querySelectorAll("td[data-device]")].map((one) => one.style.background)).size;
told.pieces = article().querySelectorAll(".whole rect").length;
$("td[data-device='21']").click();
told.where = [where()];
press($("td[data-device='21']"), "ArrowDown"); told.where.push(where());
$(".choice label:last-child input").click();
told.state = [where()];
$(".choice label:nth-child(3) input").click();
told.where.push(where());
told.same = article().querySelectorAll("td.same").length;
$(".choice label:last-child input").click();
select.selectedIndex = select.options.length - 1;
select.dispatchEvent(new Event("change"));
told.state.push($(".choice label:nth-child(3) input").checked, $(".choice label:last-child input").disabled);
$(".choice label:nth-child(2) input").click();
$("td[data-device='256']")?.click();
told.where.push(where());
told.hidden = [...document.querySelectorAll(".layout")].map((layout) => layout.hidden);
parent.postMessage(JSON.stringify(told), "*");
}
</script>"""


@pytest.fixture(scope="module")
def visit(tmp_path_factory):
    """A function that opens a page of samples in a browser, `width` pixels wide, and gives what VISIT tells."""

    @functools.cache
    def open_page(width, *names):
        text = comparison.page([getattr(sample, name) for name in names])
        return run_in_a_browser(tmp_path_factory.mktemp("page"), text, VISIT, width)

    return open_page


@pytest.mark.parametrize("width", [375, 1280, pytest.param(1400, marks=pytest.mark.slow)])
def test_in_a_browser(visit, width):
    told = visit(width, "LLAMA")
    assert told["width"] == width and told["overflow"] <= 0
    assert told["spans"] == len(sample.PREDICTION.timeline)
    assert len(set(told["grounds"])) == 2 and told["grounds"][0] == told["grounds"][2]
    (down, most), (up, least) = told["sorts"]
    assert (down, up) == ("descending", "ascending")
    assert most == [sorted(group, key=int, reverse=True) for group in most] and sum(map(len, most)) == 16
    assert least == [sorted(group, key=int) for group in least]
    assert told["kinds"] == [sorted(group) for group in told["kinds"]]
    assert sorted(itertools.chain(*told["kinds"])) == sorted(one.kind for one in sample.COLLECTIVES)
    assert told["folded"] == [True, False]
    assert not told["cut"]
    first, second = told["spoken"]
    assert first.startswith("compute: other layers.attention_norm, 1.1 ms") and second != first


@pytest.mark.parametrize("width", [375, 1280])
def test_the_mesh_in_a_browser(visit, width):
    """w_gate [layers 32, embed 4096, mlp 14336] rests split over fsdp=16 x tensor=4, and is used split over tensor."""
    told = visit(width, "LLAMA")
    assert told["cells"] == told["colours"] == told["pieces"] == 64
    clicked, moved, in_use, activation = told["where"]
    assert clicked == (
        "Device 21 (fsdp=5, tensor=1) holds layers.mlp.w_gate[0:32, 1280:1536, 3584:7168]; no other device holds it."
    )
    # The longer axis goes across on a wide screen and down on a narrow one.
    at, device = ("fsdp=5, tensor=2", 22) if width > 640 else ("fsdp=6, tensor=1", 25)
    assert moved.startswith(f"Device {device} ({at}) holds")
    assert in_use.endswith("15 other devices hold the same part.") and told["same"] == 15
    assert told["state"] == [moved, True, True], "as at rest; and an activation, which has none, is shown in use"
    rows, words = divmod(device, 4)
    wanted = f"holds logits[{32 * rows}:{32 * rows + 32}, 0:1024, {32064 * words}:{32064 * words + 32064}]"
    assert wanted in activation  # in use, although at rest was asked for


@pytest.mark.long
def test_several_in_a_browser(visit):
    told = visit(375, "LLAMA", "FSDP")
    assert told["picks"] == ["fsdp", "fsdp_tp"]
    assert told["chosen"] == [0, 1] and told["hidden"] == [True, False] and told["overflow"] <= 0


def test_many_devices_in_a_browser(visit):
    told = visit(1280, "SLICES")  # 2 x 64 x 4, of which the first seven and the last along fsdp are drawn
    assert told["cells"] == told["pieces"] / 4 == 64
    assert told["where"][0].startswith("Device 21 (data=0, fsdp=5, tensor=1)")
    assert told["where"][2].endswith("127 other devices hold the same part.") and told["same"] == 15
    # embed rests split over data x fsdp, data the outer one
    assert told["where"][3] == (
        f"Device 256 (data=1, fsdp=0, tensor=0) holds {sample.HOSTILE}[0:32, 0:8, 0:128, 2048:2080]; "
        "no other device holds it."
    )
