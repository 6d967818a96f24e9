"""A field that a config.json leaves out means what it means to transformers, for every family."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from gspmd_lm.convert import architecture
from gspmd_lm.errors import InputError
from tests.convert import defaults

RECORDED = defaults.recorded()


def settings(row, raw):
    """The settings of a config.json, or the error."""
    try:
        return architecture.model_settings(row, raw, "x")
    except InputError as error:
        return str(error)


def without_each(raw: Mapping[str, Any], ahead: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Each field of a config.json and of its parts, and the config.json without it."""
    for name, value in raw.items():
        if name.endswith("_config") and isinstance(value, dict):
            for inner, part in without_each(value, f"{ahead}{name}."):
                yield inner, {**raw, name: part}
        else:
            yield ahead + name, {field: one for field, one in raw.items() if field != name}


@pytest.mark.parametrize("row", defaults.ROWS, ids=lambda row: f"{defaults.name_of(row)}-{row.architecture}")
def test_a_missing_field_means_what_it_means_to_transformers(row):
    for given, made in RECORDED[defaults.name_of(row)]:
        whole, differ, needed = settings(row, made), [], dict(given)
        assert isinstance(whole, dict), whole
        for name, less in without_each(made):
            found = settings(row, less)
            if isinstance(found, str) and "missing" in found:
                needed[name] = row.flatten(made)[name]
            elif found != whole and name not in row.flatten(given):
                differ.append(f"{name}: {changed(whole, found)}")
        assert not differ, "\n".join(differ)
        assert settings(row, row.nest(row.flatten(given) | needed)) == whole


def changed(whole: Mapping[str, Any], found: Mapping[str, Any] | str) -> Any:
    """What differs between two settings."""
    if isinstance(found, str):
        return found
    return {
        name: (whole.get(name), found.get(name)) for name in {**whole, **found} if whole.get(name) != found.get(name)
    }


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore")  # what transformers warns of is its own
def test_the_golden_file_is_what_transformers_makes():
    pytest.importorskip("transformers")
    assert {defaults.name_of(row): defaults.compute(row) for row in defaults.ROWS} == RECORDED
