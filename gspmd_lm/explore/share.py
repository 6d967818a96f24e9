"""A page of a layout that stands alone: what a workbench shows as of now, without scripts."""

from collections.abc import Mapping
from typing import Any

from gspmd_lm.sharding.rules import describe_split
from gspmd_lm.show import html
from gspmd_lm.show.document import Cell, Column, Fact, Folded, Section, Table, Text, table_of

_ARRAYS = ("weights", "optimizer", "activations")


def share_page(state: Mapping[str, Any]) -> str:
    """The HTML of a state of a workbench."""
    inputs, headline = state["inputs"], state["headline"]
    under = f" under {inputs['path'].rpartition('/')[2].removesuffix('.yaml')}" if inputs["path"] else ""
    title = f"{inputs['program'] or inputs['config']}{under} for {inputs['target']}"
    sections = [_headline(headline)] if headline else []
    if state["shown_version"] != state["version"] or state["problems"]:
        old = [Text("The figures are those of the last layout without errors.")] * (
            state["shown_version"] != state["version"]
        )
        words = [Text(one["message"] + (f" Fix: {one['fix']}" if one["fix"] else "")) for one in state["problems"]]
        sections.append(Section("Problems", "", [*old, *words]))
    if layer := state["layer"]:
        sections.append(_layer(layer))
    if state["arrays"]:
        sections.append(_arrays(state["arrays"]))
    if state["not_known"]:
        sections.append(Section("Not known", "", [Text(one) for one in state["not_known"]]))
    body = html.facts(sections) + html.sections(sections)
    if inputs["text"]:
        body += html.sections([Section("The rules file", "", [html.file(inputs["text"])])])
    return html.page(title, state["command"], body)


def _headline(headline: Mapping[str, Any]) -> Section:
    facts = [
        Fact(one["label"], one["text"], f"compiled {one['compiled']['text']}" if one["compiled"] else "")
        for one in headline["figures"]
    ]
    memory = headline["memory"]
    facts.append(Fact("peak memory", memory["text"], "" if memory["fits"] else "does not fit"))
    rows = [{"part": one["name"], "bytes": one["text"]} for one in memory["parts"]]
    waits = [{"mesh axes": one["axis"], "exposed": one["text"]} for one in headline["exposed"]]
    blocks = [table_of("Memory", rows, ("part",))]
    blocks += [table_of("Exposed communication", waits, ("mesh axes",))] if waits else []
    return Section("Memory and waiting", "", blocks, facts)


def _layer(layer: Mapping[str, Any]) -> Section:
    rows = [
        {
            "pass": one["phase"],
            "collective": one["kind"],
            "over": one["axis"],
            "bytes": one["bytes_text"],
            "time": one["text"],
            "because of": one["because"],
        }
        for one in layer["collectives"]
    ]
    return Section(
        "What devices send", "", [table_of("Collectives", rows, ("pass", "collective", "over", "because of"))]
    )


def _arrays(arrays: Any) -> Section:
    columns = [Column("array", "code"), Column("shape"), Column("at rest"), Column("in use"), Column("bytes", "number")]
    folded = []
    for group in _ARRAYS:
        rows = [
            [
                Cell(one["path"]),
                Cell(" x ".join(map(str, one["shape"]))),
                Cell(describe_split(one["axes"], one["at_rest"]) if one["at_rest"] is not None else ""),
                Cell(describe_split(one["axes"], one["in_use"])),
                Cell(one["bytes_text"]),
            ]
            for one in arrays
            if one["group"] == group
        ]
        folded.append(Folded(group, [Table(group, columns, rows, labels=1)]))
    return Section("Arrays", "counted", folded)
