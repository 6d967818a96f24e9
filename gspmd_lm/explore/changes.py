"""What changes from a pinned layout to the one that is shown, row by row."""

from typing import Any

from gspmd_lm.explore.layout import Layout


def changes(pinned: Layout, current: Layout) -> list[dict[str, Any]] | None:
    """The rows that differ, each as `{"row": "+ residual.seq: tensor", "lines": [...]}` with what it changes.

    None where the two layouts cannot be compared row by row.
    """
    return None
