"""What a workbench shows of the last layout that could be estimated, beside a pinned one and the compiled one."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from gspmd_lm.explore.inputs import Inputs


def describe_problem(
    message: str, fix: str = "", line: int | None = None, warning: bool = False, edits: Sequence[Any] = ()
) -> dict[str, Any]:
    """A problem as a page reads it. line: that of its row, counted from 1; None: it has no row. edits: see `fixes`."""
    words = {"line": line, "message": message, "fix": fix or None}
    return {**words, "fix_text": bool(edits), "warning": warning, "edits": list(edits)}


@dataclasses.dataclass
class Display:
    """The figures of the last layout that could be estimated, and the problems of the last edit."""

    version: int = 0  # of the edit that the figures belong to
    inputs: Inputs | None = None  # of that edit
    shown: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    layer: Mapping[str, Any] | None = None
    layer_version: int = 0  # of the edit that the layer belongs to
    layer_not_known: str = ""  # why there is none
    changes: Any = None  # against the pinned layout
    problems: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    checked: int = 0  # the edit that the problems belong to

    def take_layout(self, answer: Mapping[str, Any], inputs: Inputs | None, newest: bool) -> bool:
        """Takes the figures of an edit. Returns whether there are any."""
        if newest:
            self.problems, self.checked = answer["problems"], answer["version"]
        good = bool(answer["shown"]) and inputs is not None and answer["version"] > self.version
        if good:
            self.shown, self.version, self.inputs = answer["shown"], answer["version"], inputs
        return good

    def take_layer(self, answer: Mapping[str, Any]) -> None:
        """Takes the layer of an edit."""
        if answer["version"] >= self.layer_version:
            shown = answer["shown"]
            self.layer, self.layer_version = shown["layer"], answer["version"]
            self.layer_not_known, self.changes = shown.get("layer_not_known", ""), shown["changes"]

    def views(self, pinned: Mapping[str, Any] | None, compiled: Mapping[str, Any] | None) -> dict[str, Any]:
        """The views of the layout."""
        shown = self.shown
        return {
            "not_known": [*shown.get("not_known", []), *filter(None, [self.layer_not_known])],
            "headline": self._headline(pinned, compiled),
            "mesh": shown.get("mesh"),
            "arrays": shown.get("arrays", []),
            "layer": self.layer and {**self.layer, "version": self.layer_version},
            "timeline": bool(compiled and compiled["timeline"]),
            "changes": self.changes,
        }

    def _headline(self, pinned: Mapping[str, Any] | None, compiled: Mapping[str, Any] | None) -> Any:
        """The headline, each figure beside that of the pinned layout and the compiled one."""
        headline = self.shown.get("headline")
        if not headline:
            return None
        before = {one["name"]: one for one in pinned["headline"]["figures"]} if pinned else {}
        exact = {one["name"]: one for one in compiled["figures"]} if compiled else {}
        figures = []
        for one in headline["figures"]:
            name, beside = one["name"], dict(one)
            if name in exact:
                beside["compiled"] = {key: exact[name][key] for key in ("text", "value")}
            if name in before:
                beside["pinned"] = _change(one["value"], before[name])
            figures.append(beside)
        memory = dict(headline["memory"])
        memory["compiled"] = compiled["memory"] if compiled else None
        if pinned:
            of_pinned = pinned["headline"]["memory"]
            memory["pinned"] = _change(memory["peak_bytes"], {"value": of_pinned["peak_bytes"], **of_pinned})
        return {**headline, "figures": figures, "memory": memory}


def _change(value: float, before: Mapping[str, Any]) -> dict[str, Any]:
    """A figure of the pinned layout, and by how much the value differs from it, as a share."""
    share = value / before["value"] - 1 if before["value"] else 0.0
    return {"text": before["text"], "value": before["value"], "change": share, "change_text": f"{share:+.1%}"}
