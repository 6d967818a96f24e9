"""Texts that tests compare with files in tests/golden/, and shapes that several of them need.

A text that changed on purpose is recorded anew with GSPMD_LM_RECORD=1 pytest; read the difference before committing it.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from gspmd_lm.train import decoder, state

GOLDEN = Path(__file__).parent / "golden"
_arrays = {}


def same_as_recorded(file: str, title: str, text: str) -> None:
    """Fails unless `text` is what the section `title` of a golden file holds."""
    sections = _read(GOLDEN / file)
    if os.environ.get("GSPMD_LM_RECORD"):
        sections[title] = text
        joined = "\n".join(f"=== {name}\n{sections[name]}\n" for name in sorted(sections))
        (GOLDEN / file).write_text(joined, encoding="utf-8")
    assert title in sections, f"{file} has no section {title}; record it with GSPMD_LM_RECORD=1 pytest"
    assert text == sections[title]


def same_figures_as_recorded(file: str, title: str, figures: Mapping[str, float]) -> None:
    """Fails unless `figures` are those of a section of a golden file, one a line, to a millionth."""
    same = _read(GOLDEN / file).get(title, "")
    recorded = {name: float(value) for name, _, value in (line.rpartition(" ") for line in same.splitlines())}
    if os.environ.get("GSPMD_LM_RECORD") or recorded != pytest.approx(figures, rel=1e-6):
        same_as_recorded(file, title, "\n".join(f"{name} {value:.9g}" for name, value in figures.items()))


def titles(file: str) -> set[str]:
    """The sections of a golden file."""
    return set(_read(GOLDEN / file))


def _read(path: Path) -> dict[str, str]:
    if not path.exists():
        return {}
    parts = path.read_text(encoding="utf-8").removeprefix("=== ").split("\n=== ")
    pairs = (part.partition("\n") for part in parts)
    return {title: text.rstrip("\n") for title, _, text in pairs}


@pytest.fixture
def shapes_once(monkeypatch):
    """The shapes of a config's weights are found once in a session, instead of once for each of its rules files."""
    arrays = state.arrays

    def arrays_once(computed):
        config = decoder.task(computed).config
        if config is None:
            return arrays(computed)
        if config not in _arrays:
            _arrays[config] = arrays(config)
        return _arrays[config]

    monkeypatch.setattr(state, "arrays", arrays_once)
