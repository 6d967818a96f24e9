"""What changes from a pinned layout to the one that is shown, row by row."""

from typing import Any

from gspmd_lm.explore.layout import Layout
from gspmd_lm.plan.row_changes import compare_rows
from gspmd_lm.show.row_changes import list_effects, name_rows


def changes(pinned: Layout, current: Layout) -> list[dict[str, Any]] | None:
    """The rows that differ, each as `{"row": "+ residual.seq: tensor", "lines": [...]}` with what it changes.

    None where the two are of different models or targets, for then rows are not all that differs.
    """
    if pinned.task is not current.task or pinned.target.text != current.target.text:
        return None
    compared = compare_rows(current.task, pinned.rules, current.rules, current.target, current.estimator)
    return [
        {
            "row": name_rows(change),
            "lines": [f"{label}: {words}" for label, words in list_effects(change, compared.timed)],
        }
        for change in compared.changes
    ]
