"""A workbench from what a command or a program says, and the check of what its server needs."""

import importlib.util
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gspmd_lm.config import Config
from gspmd_lm.config.paths import find_file, read_text
from gspmd_lm.errors import InputError
from gspmd_lm.explore import rows
from gspmd_lm.explore.inputs import Inputs
from gspmd_lm.explore.subject import Subject
from gspmd_lm.explore.workbench import Workbench
from gspmd_lm.foresight.pickled import pickle_task, read_jax_options
from gspmd_lm.hardware import target as targets
from gspmd_lm.sharding.rules import Rules

NEEDED = ("starlette", "uvicorn")


def check_installed() -> None:
    """Raises InputError where the libraries of the server are not installed, without which it cannot be imported."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(
            f"explore needs {' and '.join(missing)}, which the extra `explore` installs\n"
            "  fix   pip install 'gspmd_lm[explore]'"
        )


def make_workbench(
    load_config: Callable[[str, Sequence[str]], Config],
    rules: Rules | str | None,
    target: str,
    config: str = "",
    sets: Sequence[str] = (),
    given: Any = None,
    program: str | None = None,
    changes: Mapping[rows.Path, Any] = types.MappingProxyType({}),
) -> Workbench:
    """A workbench, which has not begun yet.

    Args:
        load_config: what makes a config of a name and of what is laid over it.
        rules: the rules that are edited; None: there are none, since a step of one's own brings its shardings.
        config: the name of a config, where neither `given` nor `program` says what is computed.
        sets: what is laid over the config.
        given: a config, a task or a step of Python.
        program: where a task or a step stands.
        changes: keys of the rules file and their values, which are written into its text.

    Raises:
        InputError: there is no such file, or no such target.
    """
    targets.parse(target)
    path, text = _rules_text(rules)
    for key, value in changes.items():
        text = rows.set_value(text, key, value)
    named = isinstance(given, Config) or not (given or program)
    name = config or getattr(given, "name", "") or getattr(given, "__name__", "") or program or "step"
    subject = Subject(name, load_config, given, program)
    inputs = Inputs(
        config=name if named else "",
        set=tuple(sets),
        target=target,
        batch=None,
        seq=None,
        text=text,
        path=path,
        editable=rules is not None,
        program=None if named else program or name,
    )
    return Workbench(inputs, pickle_task(subject, read_jax_options()))


def _rules_text(rules: Rules | str | None) -> tuple[str, str]:
    """The path and the text of the rules file that is edited."""
    if rules is None:
        return "", ""
    if isinstance(rules, Rules):
        return rules.path, rules.text
    path = find_file("single" if rules == "none" else rules, "rules")
    return str(path), read_text(path)
