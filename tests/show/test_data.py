"""The rows of a run as text: in a terminal with and without colours, on a page, and as JSON."""

import io
import json

from rich.console import Console

from gspmd_lm.data.overview import Overview, Piece, ShownRow, Side
from gspmd_lm.data.speed import Speed
from gspmd_lm.show import data

CHAT = ShownRow(7, [("", [Piece("Hi\t<b>\x1b[31m", False), Piece("there\n", True)]), ("", [Piece("x" * 900, True)])],
                1024, 900, 3)  # fmt: skip
PAIR = ShownRow(8, [("source", [Piece("un", False)]), ("text", [Piece("one", True)])], 9, 4, 0)
LOOKED = Overview(
    batch=64,
    training=Side(32, 4096, "32 rows, 4,096 tokens (texts: 1 file)"),
    evaluation=Side(2, 99, "2 rows, 99 tokens (texts: 1 file)"),
    notes=["skipped, binary: a.txt"],
    tokenizer="256 tokens; /a/tokenizer.json",
    speed=Speed(512, 0.1, 4500.0),
    rows=[CHAT, PAIR],
    warnings=["32 rows are less than one batch"],
)


def _printed(**options):
    console = Console(file=io.StringIO(), width=100, **options)
    data.show(LOOKED, console)
    return console.file.getvalue()


def test_what_is_predicted_stands_in_brackets_or_in_green():
    plain = _printed(color_system=None)
    assert "Hi    <b>\ufffd[31m[[there\n]]\n---\n[[" + "x" * 700 in plain and "\x1b" not in plain
    assert "x" * 800 not in plain and "]] ... --html=FILE shows the rest" in plain
    assert "Row 7: 1,024 tokens, 900 predicted, 2 segments, 3 positions of padding" in plain
    assert "source: un\ntext: [[one]]" in plain and "warning: 32 rows are less than one batch" in plain
    assert "5.12k rows/s and 23.0 MB/s, measured on 512 rows" in plain and "skipped, binary: a.txt" in plain
    assert "evaluation  2 rows, 99 tokens\n" in "\n".join(map(str.rstrip, plain.splitlines()))
    assert "[[" not in (coloured := _printed(force_terminal=True, color_system="standard"))
    assert "\x1b[32mthere" in coloured and "\ufffd[31m" in coloured


def test_a_page_has_whole_rows_and_runs_nothing_of_them():
    page = data.page(LOOKED, "gspmd-lm data")
    assert "Hi    &lt;b&gt;\ufffd[31m<mark>there\n</mark>" in page and f"<mark>{'x' * 900}</mark>" in page
    assert "<b>source</b>\nun" in page and "0.50 batches of 64" in page and "<code>gspmd-lm data</code>" in page


def test_json_has_all_that_is_known():
    plain = json.loads(json.dumps(data.to_json(LOOKED)))
    assert plain["rows"][1]["segments"][1] == ["text", [{"text": "one", "is_learnt": True}]]
    assert plain["training"]["rows"] == 32 and plain["speed"]["bytes_per_s"] == 5120 * 4500.0 and plain["schema"] == 1
