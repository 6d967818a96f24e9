"""The table of benchmarks/models.md, from the results of tests.

pytest tests/convert tests/infer/test_references.py --junit-xml=default.xml
pytest -m parity --junit-xml=parity.xml
pytest -m slow tests/convert tests/infer/test_references.py --junit-xml=slow.xml
python -m tests.convert.table default.xml parity.xml slow.xml

A row is kept as it is if none of its tests is in the results. So the rows of a new family are made by

pytest -m "slow or not slow" -k FAMILY tests/convert/test_families.py tests/convert/test_live.py \
    tests/infer/test_references.py --junit-xml=new.xml
python -m tests.convert.table new.xml
"""

import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from gspmd_lm.convert.families import FAMILIES
from tests.convert import references

PAGE = Path(__file__).parent.parent.parent / "benchmarks" / "models.md"
START, END = "<!-- The table is made by python -m tests.convert.table. -->", "<!-- End of the table. -->"
# Column -> the tests that must have passed, {} being the name of the case.
COLUMNS = {
    "logits, gradients": ["test_logits_loss_and_gradients_are_those_of_transformers[{}]"],
    "`tp8`": ["test_a_layout_changes_no_logit[{}-tp8]"],
    "`fsdp2_tp4`": ["test_a_layout_changes_no_logit[{}-fsdp2_tp4]"],
    "there and back": [
        f"test_there_and_back_is_bit_exact[{{}}-{dtype}]" for dtype in ("float32", "bfloat16", "float16")
    ],
    "greedy tokens": ["test_same_tokens_as_transformers[{}]"],
    "live": [
        "test_the_golden_file_is_what_transformers_computes[{}]",
        "test_all_gradients[{}]",
        "test_transformers_loads_what_we_write[{}-original config.json]",
        "test_transformers_loads_what_we_write[{}-config.json of ours]",
    ],
}


def results(paths: list[Path]) -> dict[str, bool]:
    """Name of a test -> whether it passed; tests that were skipped are not there."""
    found = {}
    for path in paths:
        for case in ElementTree.parse(path).iter("testcase"):
            if case.find("skipped") is None:
                found[case.get("name", "")] = case.find("failure") is None and case.find("error") is None
    return found


def table(passed: dict[str, bool], page: str = "") -> str:
    """One row for each case: the family, and for each column whether its tests passed.

    A row of `page` stays if none of its tests was run.
    """
    before = {line.split(" | ")[2]: line for line in page.splitlines() if line.count(" | ") > len(COLUMNS)}
    lines = [
        f"| family | `model_type` | case | {' | '.join(COLUMNS)} |",
        f"|---|---|---|{'---|' * len(COLUMNS)}",
    ]
    for family in FAMILIES:
        for case, (kind, _) in references.CASES.items():
            if kind == family.model_type:
                ran = [[passed.get(test.format(case)) for test in tests] for tests in COLUMNS.values()]
                made = f"| {family.name} | `{kind}` | {case} | {' | '.join(map(_verdict, ran))} |"
                lines.append(made if any({*one} != {None} for one in ran) else before.get(case, made))
    versions = {tuple(sorted(references.load(case).about["versions"].items())) for case in references.CASES}
    told = "; ".join(", ".join(f"{name} {version}" for name, version in pairs) for pairs in sorted(versions))
    return "\n".join([*lines, "", f"Reference: {told}, CPU, float32, eager attention (for falcon-rw: sdpa)."])


def _verdict(passed: list[bool | None]) -> str:
    return "**no**" if False in passed else "not run" if None in passed else "yes"


def rewritten(page: str, text: str) -> str:
    """The page with another table."""
    return re.sub(f"{re.escape(START)}.*{re.escape(END)}", lambda _: f"{START}\n\n{text}\n\n{END}", page, flags=re.S)


if __name__ == "__main__":
    now = PAGE.read_text()
    PAGE.write_text(rewritten(now, table(results([Path(path) for path in sys.argv[1:]]), now)))
