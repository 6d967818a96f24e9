"""The files of the workbench's page: all that they name is there, and nothing comes from the network."""

import re
from pathlib import Path

import pytest

import gspmd_lm
from gspmd_lm import units

PAGE = Path(gspmd_lm.__file__).parent / "explore" / "page"
WRITTEN = sorted(path for path in PAGE.rglob("*") if path.suffix in (".js", ".css", ".html"))
NAMESPACES = ("http://www.w3.org/2000/svg",)


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: path.name)
def test_nothing_comes_from_the_network(path):
    found = re.findall(r"(?:https?:|wss?:)?//[\w-]+\.[\w./-]+", path.read_text())
    assert [one for one in found if one not in NAMESPACES] == []


def test_every_file_that_is_named_is_there():
    index = (PAGE / "index.html").read_text()
    named = re.findall(r'"/static/([\w./-]+)"', index)
    assert {"page.css", "main.js"} <= {*named}
    for path in PAGE.glob("*.js"):
        named += re.findall(r'^(?:import|\} from|import .* from) "\./([\w./-]+)"', path.read_text(), re.MULTILINE)
    assert [name for name in named if not (PAGE / name).is_file()] == []
    modules = {path.name for path in PAGE.glob("*.js")}
    assert modules <= {*named}, "a module that nothing imports"


def test_every_element_that_a_module_looks_for_is_in_the_page():
    index = (PAGE / "index.html").read_text()
    ids = {*re.findall(r'id="([\w-]+)"', index)}
    for path in PAGE.glob("*.js"):
        made = {*re.findall(r'\bid: "([\w-]+)"', path.read_text())}
        looked_for = {*re.findall(r'find\("#([\w-]+)"\)', path.read_text())}
        assert looked_for <= ids | made, path.name


def test_the_bundle_has_what_its_entry_names():
    entry = (PAGE / "vendor" / "entry.js").read_text()
    names = re.findall(r"\w+", " ".join(re.findall(r"export \{([^}]*)\}", entry)))
    bundle = (PAGE / "vendor" / "codemirror.js").read_text()
    (exported,) = re.findall(r"export\{([^}]*)\};?\s*$", bundle)
    assert sorted(one.partition(" as ")[2] or one for one in exported.split(",")) == sorted(names)
    used = {name for path in PAGE.glob("*.js") for name in re.findall(r"\bcm\.(\w+)", path.read_text())}
    assert used == {*names}


def test_units_are_those_of_the_reports():
    """units.js writes bytes with the units of gspmd_lm.units; the browser's tests compare the numbers."""
    text = (PAGE / "units.js").read_text()
    for size, unit in re.findall(r'\[(1e\d+), "(\w+)"\]', text):
        assert units.human_bytes(float(size)) == f"1.0 {unit}"
