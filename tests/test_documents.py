"""The documents say what the code says: tables of names and options, and the messages of wrong rules files."""

import re
from pathlib import Path

import pytest
import yaml

from gspmd_lm import config as configs
from gspmd_lm import errors
from gspmd_lm.hardware import chips, target
from gspmd_lm.program import supported
from gspmd_lm.runtime import compiler
from gspmd_lm.sharding import axes, problems, rules_file
from gspmd_lm.sharding.rules import MESH_AXES, TABLES
from gspmd_lm.show import config_keys
from gspmd_lm.train import state

ROOT = Path(__file__).parent.parent
FORESIGHT = (ROOT / "docs/foresight.md").read_text()
RULES = "".join((ROOT / f"docs/{page}.md").read_text() for page in ("rules", "rules_reference"))
MESSAGES = RULES[RULES.index("## What wrong files say") : RULES.index("## What the model does with the rules")]
WRONG = re.findall(r"```yaml\n# (\w+\.yaml)\n(.*?)```\n\n```text\n(.*?)\n```", MESSAGES, re.DOTALL)
COMMANDS = re.findall(r"--config=(\w+) --rules=(\w+) --dry_run`:[^`]*```text\n(.*?)\n```", MESSAGES, re.DOTALL)
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")])


def test_axes_and_arrays():
    """The site has the table of all arrays (tests/test_site.py), and `keys` prints them."""
    wanted = [f"| `{name}` | {letter} | {meaning} |" for name, (letter, meaning) in axes.AXES.items()]
    section, _, arrays = RULES[RULES.index("## Logical axes") : RULES.index("## Every key")].partition("## Arrays")
    assert re.findall(r"^\| `\w+` \|.*\|$", section, re.M) == wanted
    named = {*re.findall(r"`(\w+)`", re.sub(r"```.*?```", "", arrays, flags=re.DOTALL))}
    assert named - {"remat", "embed", "seq", "kv_seq"} <= {*axes.ARRAYS, *axes.SCALES, *axes.IN_BLOCKS}
    assert named >= {*axes.IN_BLOCKS}
    printed = dict(re.findall(r"^  (\w+) +(.+)$", config_keys.text().partition("\nAxes and arrays")[2], re.M))
    assert printed == {name: meaning for name, (_, meaning) in axes.AXES.items()} | axes.ARRAYS
    assert ", ".join(f"`{name}`" for name in MESH_AXES) in RULES


def test_compiler_options():
    kinds = "cpu|cpu once|gpu|gpu generate|gpu train|gpu offload|tpu|tpu fusion|tpu 3d|tpu interleave"
    listed = re.findall(rf"^\| ({kinds}) \| `(\w+)` \| `([^`]+)` \| .+ \|$", RULES, re.M)
    wanted = [(platform, *row) for platform, rows in compiler.DEFAULT_OPTIONS.items() for row in rows.items()]
    assert [(platform, name, yaml.safe_load(value)) for platform, name, value in listed] == wanted


def test_keys_that_documents_name():
    """Those of a config, in full, or without `model.` where its section is named. What commands set is run."""
    keys = {*re.findall(r"^  ([a-z][\w.]*): ", config_keys.text(), re.M)}
    keys |= {key.rpartition(".")[0] for key in keys}
    sections = {key.split(".")[1] for key in keys if key.startswith("model.") and key.count(".") > 1}
    files = r"(?:bin|html|jsonl?|md|py|safetensors|svg|tsv|yaml)\b"  # such as `model.safetensors`
    for page in PAGES:
        for name in re.findall(rf"`(?!\S+\.{files})(\w+(?:\.\w+)+)(?=[`=:])", page.read_text()):
            first = name.partition(".")[0]
            if first in ("model", "data", "train"):
                assert name in keys, (page.name, name)
            elif first in sections - {"residual", "logits"}:  # which are names of arrays, too
                assert f"model.{name}" in keys or f"data.{name}" in keys, (page.name, name)
    table = (ROOT / "docs/experts.md").read_text().partition("## What is computed")[2].partition("**No token")[0]
    named = re.findall(r"`([\w.]+)`", "".join(re.findall(r"^\| (`.*?) \|", table, re.M)))
    assert len(named) > 10 and {f"model.{name}" for name in named} <= keys


def test_shipped_rules():
    listed = dict(re.findall(r"^\| `(\w+)` \| (.+\.) \|$", RULES, re.M))
    shipped = {
        path.stem: path.read_text().splitlines()[0].removeprefix("# ") for path in (ROOT / "rules").glob("*.yaml")
    }
    assert listed == shipped


def test_every_key_is_explained():
    for key in rules_file.SECTIONS:
        assert re.search(rf"^### .*`{key}`", RULES, re.M), key
        assert key in TABLES or f"(rules_reference.md#{key})" in RULES, key  # the overview has a row for it


@pytest.mark.parametrize(
    ("page", "heading", "keys"),
    [
        ("rules_reference", "### `pipeline`", {*supported.BEYOND_ONE_STREAM, "vision"}),
        ("rules_reference", "### `interleave`", {*supported.BEYOND_ONE_STREAM}),
        ("context", "## Which one to take", {*supported.NOT_IN_A_RING}),
    ],
)
def test_settings_that_a_layout_refuses(page, heading, keys):
    section = (ROOT / f"docs/{page}.md").read_text().partition(f"{heading}\n")[2]
    (refused,) = re.findall(r"Refused are (.*?)\.\n", section.partition("\n##")[0], re.DOTALL)
    assert {*re.findall(r"`model\.([\w.]*\w)", refused)} == keys


def test_no_example_of_a_message_is_missed():
    assert WRONG and COMMANDS
    assert MESSAGES.count("```yaml") == len(WRONG)
    assert MESSAGES.count("```text") == len(WRONG) + len(COMMANDS)


@pytest.mark.parametrize(("config", "rules", "message"), COMMANDS)
def test_wrong_commands(config, rules, message, monkeypatch):
    monkeypatch.chdir(ROOT)  # messages name rules/<layout>.yaml
    with pytest.raises(errors.InputError) as found:
        state.arrays_and_warnings(configs.load(config), rules_file.load(rules).fill(8), "cpu")
    assert str(found.value) == message


@pytest.mark.parametrize(("name", "text", "message"), WRONG, ids=[name for name, _, _ in WRONG])
def test_wrong_files(name, text, message, tmp_path, monkeypatch):
    config = configs.load("tiny")
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(f"# {name}\n{text}")
    with pytest.raises(errors.InputError) as found:
        state.arrays_and_warnings(config, rules_file.load(name).fill(8), "cpu")
    assert str(found.value) == message


def test_the_message_in_the_readme():
    text = (ROOT / "README.md").read_text()
    with pytest.raises(errors.InputError) as found:
        state.arrays_and_warnings(configs.load("tiny", ["model.kv_heads=2"]), rules_file.load("tp8"), "cpu")
    assert re.sub(r"\S*(rules/tp8.yaml)", r"\1", str(found.value)) in re.findall(
        r"```text\n(.*?)\n```", text, re.DOTALL
    )
    assert (ROOT / "rules/tp8.yaml").read_text().rstrip() in text and (ROOT / "rules/tp8.yaml").read_text() in RULES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in link:
            continue
        path, _, heading = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not heading or heading in headings(target), link


def headings(page):
    """The names by which links find the headings of a page."""
    words = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in words}


def test_every_page_is_found_from_the_readme():
    """By links from page to page. The reference of rules begins with links to its own headings."""
    assert {"README.md", "CHANGELOG.md", "CONTRIBUTING.md"} <= {page.name for page in PAGES if page.parent == ROOT}
    left, found = {ROOT / "README.md"}, set()
    while left:
        found.add(page := left.pop())
        links = re.findall(r"\]\(([\w./]+\.md)[)#]", page.read_text())
        left |= {(page.parent / link).resolve() for link in links} & {*PAGES} - found
    assert found == {*PAGES}
    assert len(re.findall(r"\]\(#", RULES)) >= 5


def test_the_readme_is_short():
    assert 5000 <= len((ROOT / "README.md").read_text()) <= 6500


def test_ruff_has_one_version():
    (pinned,) = re.findall(r'"ruff==([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert f"rev: v{pinned}\n" in (ROOT / ".pre-commit-config.yaml").read_text()


def test_the_changelog_has_one_line_for_each_change():
    text = (ROOT / "CHANGELOG.md").read_text()
    assert all(line.startswith(("#", "- ")) and len(line) <= 160 for line in text.splitlines() if line)


def test_warnings():
    source = (ROOT / "gspmd_lm/foresight/advice.py").read_text()
    codes = re.findall(r'Finding\(\s*"([\w-]+)"', source)
    for path in (ROOT / "gspmd_lm").glob("*/*.py"):
        codes += re.findall(r'Problem\([^"]*.*code="([\w-]+)"', path.read_text())
    codes += [problems.Problem.code, problems.UNUSED]
    explained = re.findall(r"^\| `([\w-]+)` \|", FORESIGHT[FORESIGHT.index("## Warnings") :], re.M)
    assert set(explained) == set(codes) and len(explained) == len(set(explained))


def test_targets():
    examples = re.findall(r"`((?:\d+@)?\w+:[\dx]+)`", FORESIGHT[: FORESIGHT.index("## How to read the page")])
    assert {target.parse(text).chip.name for text in examples if text[:3] not in ("cpu", "my:")} == set(chips.CHIPS)
