"""The page about published models: its table is made from results, and says what the code does."""

import re
from pathlib import Path

from gspmd_lm.convert.families import FAMILIES, IRRELEVANT, LEFT_OUT
from gspmd_lm.convert.fields import MOST_LAYERS
from gspmd_lm.convert.strict_json import DEEPEST
from tests.convert import references, table

DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "models.md"
RESULTS = """<testsuites><testsuite>
<testcase name="test_logits_loss_and_gradients_are_those_of_transformers[falcon-7b]" />
<testcase name="test_a_layout_changes_no_logit[falcon-7b-tp8]"><failure message="no" /></testcase>
<testcase name="test_a_layout_changes_no_logit[falcon-7b-fsdp2_tp4]"><skipped message="later" /></testcase>
<testcase name="test_there_and_back_is_bit_exact[falcon-7b-float32]" />
<testcase name="test_there_and_back_is_bit_exact[falcon-7b-float16]" />
</testsuite></testsuites>"""


def test_a_row_says_what_passed(tmp_path):
    (tmp_path / "results.xml").write_text(RESULTS)
    made = table.table(table.results([tmp_path / "results.xml"]))
    row = next(line for line in made.splitlines() if "falcon-7b" in line)
    assert row == "| Falcon | `falcon` | falcon-7b | yes | **no** | not run | not run | not run | not run |"
    assert made.count("\n| ") == len(references.CASES)
    # Without results, a row of the page stays; with any, it is made anew.
    kept, old = "| BLOOM | `bloom` | bloom |" + " yes |" * 6, "| Falcon | `falcon` | falcon-7b |" + " yes |" * 6
    again = table.table(table.results([tmp_path / "results.xml"]), f"{kept}\n{old}\n").splitlines()
    assert kept in again and row in again and old not in again


def test_the_page_holds_the_table_of_every_case_and_all_passed():
    page = table.PAGE.read_text()
    rows = {line.split(" | ")[2]: line for line in page.splitlines() if line.endswith("yes |")}
    assert rows.keys() == references.CASES.keys()
    for case, row in rows.items():
        family = next(family for family in FAMILIES if family.model_type == references.CASES[case][0])
        assert row.startswith(f"| {family.name} | `{family.model_type}` |")
        assert row.count(" yes ") == len(table.COLUMNS)
    versions = {str(references.load(case).about["versions"]["transformers"]) for case in references.CASES}
    assert all(f"transformers {version}" in page for version in versions)


def test_the_page_names_what_is_left_out():
    page = DOCUMENT.read_text()
    for kind in LEFT_OUT:
        assert f"`{kind}`" in page


def test_the_page_names_the_limits_of_the_code():
    page = " ".join(DOCUMENT.read_text().split())
    assert f"more than {DEEPEST} levels of lists" in page
    assert f"over {MOST_LAYERS:,} layers" in page
    (notes,) = re.findall(r"notes of tools such as (.*?) \|", page)
    assert set(re.findall("`(.*?)`", notes)) <= IRRELEVANT


def test_the_table_is_replaced():
    page = f"a\n{table.START}\nold\n{table.END}\nb\n"
    once = table.rewritten(page, "new \\1")
    assert once == f"a\n{table.START}\n\nnew \\1\n\n{table.END}\nb\n"
    assert table.rewritten(once, "new \\1") == once
