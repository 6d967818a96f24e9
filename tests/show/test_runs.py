"""Runs that are read back and laid over each other: the table, the drawing, and the page in a browser."""

import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from gspmd_lm import cli
from gspmd_lm.errors import InputError
from gspmd_lm.show import run as shown
from gspmd_lm.show.svg import Axis, Plot, short
from gspmd_lm.workdir import history
from gspmd_lm.workdir.wall_time import KINDS
from tests.reader import Reader, run_in_a_browser

ROOT = Path(__file__).parent.parent.parent
HOSTILE = "<script>alert(1)</script>"


def row(step, **changes):
    found = {"loss": 4.0 - step / 100, "gradient_norm": 1.0, "learning_rate": 1e-3, "tokens": step * 512.0}
    speeds = {"step_time_s": 0.1, "tokens_per_s": 5120.0} if step > 1 else {}
    return {"step": step, **found, **speeds, **changes}


def write(workdir, rows, config="data: {batch: 8, seq: 64}\ntrain: {steps: 100}\n", samples=()):
    workdir.mkdir(parents=True)
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    (workdir / "config.yaml").write_text(config)
    (workdir / "rules.yaml").write_text("# the rules\nmesh: {data: 8}\n")
    (workdir / "versions.json").write_text(json.dumps({"command": f"python {HOSTILE}", "versions": {"jax": "0.10.2"}}))
    (workdir / "samples.jsonl").write_text("".join(json.dumps(one) + "\n" for one in samples))
    return workdir


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with two runs; the first has damaged rows, an evaluation that was best, and samples."""
    folder = tmp_path_factory.mktemp("runs")
    rows = [row(step) for step in (1, 10, 20, 30)]
    evaluated = [{"step": step, "eval_loss": loss} for step, loss in ((10, 3.95), (20, 3.9), (30, 3.97))]
    texts = [{"step": step, "prompt": "Once", "text": f" {HOSTILE} {step}"} for step in (10, 20)]
    write(folder / "a", [*rows, *evaluated], samples=texts)
    with (folder / "a" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 40, "lo\n{"step": 31, "loss": null, "gradient_norm": null}\n')
    changed = [row(step, loss=5.0 - step / 100, learning_rate=2e-3) for step in (1, 10, 20, 30, 40)]
    write(folder / "b", changed, "data: {batch: 16, seq: 64}\ntrain: {steps: 100}\n")
    (folder / "not a run").mkdir()
    return folder


def test_the_page_shows_where_the_time_went(tmp_path):
    took = dict.fromkeys(KINDS, 1.0) | {"steps": 20.0, "lost": 2.0}
    counted = [row(1), row(2, **{f"wall_{kind}_s": seconds for kind, seconds in took.items()})]
    run, without = write(tmp_path / "a", counted), write(tmp_path / "b", [row(1)])
    page = shown.page(history.read_runs([str(run)]), "plot a")
    assert "a: goodput 69%" in page and "20 s (69%)" in page and KINDS["lost"] in page
    assert 'title="lost 2 s"' in page and page.count('class="bar"') == 1
    assert "goodput" not in shown.page(history.read_runs([str(without)]), "plot b")
    both = shown.page(history.read_runs([str(run), str(without)]), "plot a b")
    assert both.count('class="bar"') == 1


def test_tokens_and_rows_of_runs_side_by_side_have_columns_of_their_own(tmp_path):
    write(tmp_path / "images", [row(2, rows=16.0, tokens_per_s=None, rows_per_s=80.0)])
    write(tmp_path / "texts", [row(2)])
    (table,) = shown._runs(history.read_runs([str(tmp_path)])).blocks
    images, texts = (dict(zip((column.name for column in table.columns), one, strict=True)) for one in table.rows)
    assert (images["rows"], images["rows/s"], images["tokens/s"]) == ("16", "80", "-")
    assert (texts["tokens"], texts["tokens/s"], texts["rows"]) == ("1.02k", "5.12k", "-")


def test_a_folder_of_runs_is_read_and_so_is_a_run(runs, tmp_path):
    both = history.read_runs([str(runs)])
    assert (
        [run.name for run in both] == ["a", "b"] == [run.name for run in history.read_runs([f"{runs}/a", f"{runs}/b"])]
    )
    first, second = both
    assert first.damage.endswith("a/metrics.jsonl: line 8 cannot be read and is left out")
    assert (first.step, first.best["step"], first.step_tokens) == (31, 20, 512)
    assert first.last("loss") == 4.0 - 0.3 and len(first.points("loss")) == 4
    assert [x for x, _ in first.points("step_time_s")] == [10, 20, 30]  # the first step has no speed
    assert second.best is None and not second.damage
    assert history.differences(both) == {"data.batch": ["8", "16"]}
    again = shutil.copytree(runs / "a", tmp_path / "elsewhere" / "a")
    assert [run.name for run in history.read_runs([str(runs / "a"), str(again)])] == [str(runs / "a"), str(again)]
    for folder, what in (
        ("nowhere", "there is no such folder"), ("elsewhere/a/not", "no such folder"),
        ("empty", "no metrics.jsonl in it"), ("rows", "metrics.jsonl: has no rows of training or evaluation"),
    ):  # fmt: skip
        if folder in ("empty", "rows"):
            (tmp_path / folder).mkdir()
        if folder == "rows":
            (tmp_path / folder / "metrics.jsonl").touch()
        with pytest.raises(InputError, match=rf"(?s){what}\n  fix   "):
            history.read_runs([str(tmp_path / folder)])


# File, what stands in it, and what is said about it; "" where nothing is lost.
NO_TEXT, DEEP = b"\xff\xfe\x00", b"[" * 100_000
LEFT_OUT = "metrics.jsonl: line 1 cannot be read and is left out"
DAMAGED = [
    ("versions.json", b"", "versions.json: not valid JSON: Expecting value"),
    ("versions.json", b"{", "versions.json: not valid JSON: Expecting property name"),
    ("versions.json", NO_TEXT, "versions.json: not UTF-8 text"),
    ("versions.json", DEEP, "versions.json: lists or objects within each other, over 500 levels deep"),
    ("versions.json", b"[1]", "versions.json: a list, not a JSON object"),
    ("versions.json", b'{"versions": 3, "command": []}', ""),
    ("versions.json", b'{"versions": {"jax": {"a": [1]}}}', ""),
    ("config.yaml", b"", "config.yaml: is null, and is left out"),
    ("config.yaml", b"[]", "config.yaml: is a list, and is left out"),
    ("config.yaml", b"3", "config.yaml: is a number, and is left out"),
    ("config.yaml", b"null", "config.yaml: is null, and is left out"),
    ("config.yaml", NO_TEXT, "config.yaml: not UTF-8 text"),
    ("config.yaml", b"data: {batch: [", "config.yaml: not valid YAML while parsing"),
    ("config.yaml", DEEP, "config.yaml: not valid YAML line 1: more than 32 levels"),
    ("config.yaml", b"data: 3\ntrain: [1]\n", ""),
    ("config.yaml", b"data: {batch: x, seq: [1]}\ntrain: {steps: {}}\n", ""),
    ("config.yaml", b"data: {batch: -8, seq: 0.5}\ntrain: {steps: .nan}\n", ""),
    ("rules.yaml", NO_TEXT, "rules.yaml: not UTF-8 text"),
    ("rules.yaml", b"[" * 50, ""),
    ("metrics.jsonl", b"", "metrics.jsonl: has no rows of training or evaluation"),
    ("metrics.jsonl", NO_TEXT * 9 + b"\n", LEFT_OUT),
    ("metrics.jsonl", DEEP + b"\n", LEFT_OUT),
    ("metrics.jsonl", b"3\n[]\nnull\n", "3 lines cannot be read and are left out, among them 1, 2, 3"),
    ("metrics.jsonl", b'{"loss": 1}\n', LEFT_OUT),
    *(("metrics.jsonl", b'{"step": %s, "loss": 1}\n' % step, LEFT_OUT)
      for step in (b'"3"', b"null", b"1e999", b"NaN", b"-1", b"true", b"[]", b"9" * 99)),
    *(("metrics.jsonl", b'{"step": 1, "loss": %s}\n' % loss, LEFT_OUT) for loss in (b'"NaN"', b"[]", b"{}", b"true")),
    *(("metrics.jsonl", b'{"step": 1, "loss": %s}\n{"step": 2, "eval_loss": %s}\n' % (loss, loss), "")
      for loss in (b"NaN", b"null", b"-Infinity", b"9" * 400, b"1e38", b"-1e38", b"5e-324", b"0")),
    ("metrics.jsonl", b'{"step": 1, "loss": 1, "tokens_per_s": -1e38}\n', ""),
    ("metrics.jsonl", b'{"step": 1, "loss": 1, "mfu": "x"}\n{"step": 2, "loss": 1}\n{"st', LEFT_OUT),
    ("samples.jsonl", b'{"step": 1}\n', "samples.jsonl: line 1 cannot be read and is left out"),
    ("samples.jsonl", b'{"step": 1, "prompt": 3, "text": "x"}\n', "samples.jsonl: line 1 cannot be read"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "message"), DAMAGED)
def test_a_damaged_file_hides_neither_its_run_nor_others(tmp_path, name, content, message):
    for run in ("bad", "good"):
        write(tmp_path / run, [row(1), row(2)])
    (tmp_path / "bad" / name).write_bytes(content)
    bad, good = found = history.read_runs([str(tmp_path)])
    assert (good.name, good.step, good.damage) == ("good", 2, "")
    assert message in bad.damage and (message or not bad.damage)
    console = Console(file=io.StringIO(), width=120)
    shown.show(found, console)
    assert console.file.getvalue().count("warning: ") == len(bad.damage.splitlines())
    for drawn in ([bad], found):
        whole = Reader(shown.page(drawn, ""))
        assert not whole.unclosed and not whole.open
        assert len(whole.find("p", **{"class": "bad"})) == len(bad.damage.splitlines())


def test_a_folder_in_the_place_of_a_file(tmp_path):
    for run in ("bad", "good"):
        write(tmp_path / run, [row(1)])
    for name in ("metrics.jsonl", "versions.json"):
        (tmp_path / "bad" / name).unlink()
        (tmp_path / "bad" / name).mkdir()
    bad, good = history.read_runs([str(tmp_path)])
    assert "metrics.jsonl: cannot be read (Is a directory)" in bad.damage and good.step == 1
    assert "versions.json: cannot be read (Is a directory)" in bad.damage


def test_speeds_are_of_the_last_rows_and_the_last_step_may_be_an_evaluation(tmp_path):
    rows = [row(step, step_time_s=float(step)) for step in range(1, 3 * history.LAST)]
    write(tmp_path / "a", [*rows, {"step": 99, "eval_loss": 3.0}])
    (run,) = history.read_runs([str(tmp_path)])
    last = range(2 * history.LAST, 3 * history.LAST)
    assert run.speed("step_time_s") == sum(last) / len(last)
    assert run.step == 99


def test_a_setting_that_only_the_last_run_has_otherwise_is_a_difference(tmp_path):
    for name, batch in (("a", 8), ("b", 8), ("c", 16)):
        write(tmp_path / name, [row(1)], f"data: {{batch: {batch}, seq: 64}}\n")
    assert history.differences(history.read_runs([str(tmp_path)])) == {"data.batch": ["8", "8", "16"]}


def test_the_table(runs):
    console = Console(file=io.StringIO(), width=120)
    shown.show(history.read_runs([str(runs)]), console)
    title, heading, *lines = console.file.getvalue().splitlines()
    assert title == "Runs, measured"
    assert re.split(r" {2,}", heading.strip()) == [
        "run", "step", "loss", "held-out", "best", "at step", "step time", "tokens/s", "tokens",
    ]  # fmt: skip
    assert lines[0].split() == ["a", "31", "3.7000", "3.9700", "3.9000", "20", "100", "ms", "5.12k", "15.9k"]
    assert lines[1].split() == ["b", "40", "4.6000", "-", "-", "-", "100", "ms", "5.12k", "41.0k"]
    assert "line 8 cannot be read" in lines[2]


@pytest.mark.parametrize("names", [["a"], ["b"], ["a", "b"]])
def test_the_page_is_whole_loads_nothing_and_trusts_no_text(runs, names):
    text = shown.page(history.read_runs([str(runs / name) for name in names]), f"python main.py plot {HOSTILE}")
    found = Reader(text)
    assert not found.unclosed and not found.open
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|@import|url\((?!#)", text)
    assert not [one for one in found.elements if one["tag"] in ("link", "img") or "src" in one or "href" in one]
    assert len(found.find("script")) == 2 and HOSTILE in found.find("p", **{"class": "about"})[0]["text"]
    titles = [one["text"].strip() for one in found.find("h2")]
    for title in ("Loss", "Learning rate", "Gradient norm", "Step time", "Tokens per second"):
        assert f"{title} measured" in titles
    assert "Model FLOPs utilization measured" not in titles  # no run has logged it
    assert ("Settings that differ" in titles) == (len(names) == 2) != ("Made with" in titles)
    assert len(found.find("polyline", **{"data-about": f"{'a ' * (len(names) == 2)}training"})) == 1


def test_what_is_drawn(runs):
    both = Reader(shown.page(history.read_runs([str(runs)]), ""))
    loss = both.find("div", **{"class": "area"})[0]
    left, right, low, high = map(float, loss["data-ends"].split())
    (line,) = both.find("polyline", **{"data-about": "a training"})
    drawn = [tuple(map(float, point.split(","))) for point in line["points"].split()]
    values = [(left + (right - left) * x / 1000, low + (high - low) * (1 - y / 1000)) for x, y in drawn]
    assert values == [(pytest.approx(step, abs=0.05), pytest.approx(4.0 - step / 100, abs=2e-3))
                      for step in (1, 10, 20, 30)]  # fmt: skip
    dots = [one["text"] for one in both.find("title") if "held-out" in one["text"]]
    assert dots == ["a held-out loss 3.9500 at step 10", "a held-out loss 3.9000 at step 20, the best",
                    "a held-out loss 3.9700 at step 30"]  # fmt: skip
    colours = {one["style"] for one in both.find("polyline") if one["data-about"] in ("a training", "b training")}
    assert len(colours) == 2


def test_long_runs_are_drawn_as_medians_with_their_range(tmp_path):
    rows = [row(step, step_time_s=30.0 if step == 700 else 0.1 + step % 2 / 100) for step in range(1, 1001)]
    found = Reader(shown.page(history.read_runs([str(write(tmp_path / "long", rows))]), ""))
    lines = {one["data-about"]: one["points"].split() for one in found.find("polyline")}
    assert {name: len(points) for name, points in lines.items()} == dict.fromkeys(lines, 250)
    area = found.find("div", **{"class": "area"})[3]
    assert float(area["data-ends"].split()[3]) < 0.2  # the outlier does not decide the scale
    drawn = [float(point.split(",")[1]) for point in lines["step time"]]
    assert all(0 <= y <= 1000 for y in drawn)  # nor its piece
    assert "1 value above is not drawn: up to 30 s." in [one["text"] for one in found.find("p")]
    bands = found.find("polygon")
    assert len(bands) == 4 + 1 and all(len(band["points"].split()) == 500 for band in bands)


def test_axes():
    assert Axis("", 0, 103, str).ticks() == [0, 50, 100]
    assert Axis("", 2.1, 6.2, str).ticks() == [3, 4, 5, 6]
    assert Axis("", 5, 5, str).ticks() and Axis("", 0, 0, str).ticks() == [0]
    assert Axis("", 0.4, 25, str, log=True).ticks() == [0.5, 1, 2, 5, 10, 20]
    assert Axis("", 1e-6, 1e3, str, log=True).ticks() == pytest.approx([10.0**power for power in range(-6, 4)])
    assert Axis("", 1, 100, str, log=True).share(10) == pytest.approx(0.5)
    assert [short(value) for value in (0, 50, 20_000, 100_000, 1_500_000)] == ["0", "50", "20k", "100k", "1.5M"]
    plot = Plot(Axis("x", 0, 10), Axis("y", 0, 10))
    plot.dot((5, 10), "red", "<b>")
    plot.word((8, 0), "<i>", before=True)
    plot.limit(2, "most")
    assert 'd="M200.0 0V1000"' in plot.html("it") and '<b style="left:20.00%;top:0.00%">most</b>' in plot.html("it")
    assert "<title>&lt;b&gt;</title>" in plot.html("it") and "M500.0 0.0h" in plot.html("it")
    assert '<b class="before" style="left:80.00%;top:100.00%">&lt;i&gt;</b>' in plot.html("it")


def test_the_verb_needs_no_jax(runs, tmp_path):
    program = "import sys; from gspmd_lm import cli\ntry: cli.main()\nfinally: print('jax' in sys.modules)"
    command = [sys.executable, "-c", program, "plot", f"--workdir={runs / 'a'}", str(runs / "b")]
    done = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
                          timeout=300)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == ["wrote plot.html", "False"]
    assert "<h1>2 runs</h1>" in (tmp_path / "plot.html").read_text()


def test_where_the_page_goes(runs, tmp_path, capsys):
    def verb(*arguments):
        with pytest.raises(SystemExit) as left:
            cli.main(["main.py", "plot", *arguments])
        return left.value.code, *capsys.readouterr()

    again = shutil.copytree(runs / "a", tmp_path / "a")
    code, out, _ = verb(f"--workdir={again}")
    assert code == 0 and f"wrote {again}/plot.html" in out and (again / "plot.html").exists()
    code, _, _ = verb(str(again), f"--html={tmp_path / 'one.html'}")
    assert code == 0 and (tmp_path / "one.html").read_text() == (again / "plot.html").read_text().replace(
        f"--workdir={again}", str(again)
    )
    assert verb()[::2] == (2, "plot needs a run\n  fix   plot --workdir=RUN, or plot RUN RUN2 to lay runs over each "
                              "other\n")  # fmt: skip
    assert verb(str(tmp_path / "none"))[0] == 2


VISIT = """<script>
const told = { overflow: document.documentElement.scrollWidth - innerWidth, said: [] };
for (const area of document.querySelectorAll(".plot .area")) {
  const box = area.getBoundingClientRect();
  area.dispatchEvent(new PointerEvent("pointermove", { clientX: box.left + box.width / 2, clientY: box.top + 5 }));
  told.said.push(area.nextElementSibling.firstElementChild.textContent);
}
const words = [...document.querySelectorAll(".plot i, .plot b")];
told.cut = words.filter((one) => one.getBoundingClientRect().right > innerWidth).length;
parent.postMessage(JSON.stringify(told), "*");
</script>"""


@pytest.mark.parametrize("width", [1400, 400])
def test_in_a_browser(runs, tmp_path, width):
    text = shown.page(history.read_runs([str(runs)]), "python main.py plot")
    told = run_in_a_browser(tmp_path, text, VISIT, width)
    assert told["overflow"] <= 0 and told["cut"] == 0
    assert told["said"][0] == "step 20: a training 3.8, a held-out 3.9, b training 4.8"
    assert told["said"][1] == "step 20: a 1.00e-3, b 2.00e-3"
