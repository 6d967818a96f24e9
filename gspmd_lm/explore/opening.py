"""A workbench from what a command or a program says: its inputs are read, and its server is made."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import cloudpickle

from gspmd_lm.config.paths import find_file, read_text
from gspmd_lm.explore.inputs import Inputs
from gspmd_lm.explore.server import Server
from gspmd_lm.explore.subject import Subject
from gspmd_lm.explore.workbench import Workbench
from gspmd_lm.hardware import target as targets
from gspmd_lm.sharding.rules import Rules

if TYPE_CHECKING:
    from gspmd_lm.config import Config


def open_server(
    load_config: "Callable[[str, Sequence[str]], Config]",
    rules: Rules | str | None,
    target: str,
    config: str = "",
    sets: Sequence[str] = (),
    given: Any = None,
    program: str | None = None,
    port: int = 0,
) -> Server:
    """The server of a workbench, which does not run yet.

    Args:
        load_config: what makes a config of a name and of what is laid over it.
        rules: the rules that are edited; None: there are none, since a step of one's own brings its shardings.
        config: the name of a config, where neither `given` nor `program` says what is computed.
        sets: what is laid over the config.
        given: a config, a task or a step of Python.
        program: where a task or a step stands.

    Raises:
        InputError: there is no such file, or no such target.
    """
    targets.parse(target)
    path, text = _rules_text(rules)
    name = program or getattr(given, "name", "") or getattr(given, "__name__", "") or config
    subject = Subject(name, load_config, given, program)
    own = program or (None if given is None or _is_config(given) else name)
    inputs = Inputs(name if own is None else "", tuple(sets), target, None, None, text, path, rules is not None, own)
    return Server(Workbench(inputs, cloudpickle.dumps(subject)), port)


def _is_config(given: Any) -> bool:
    from gspmd_lm.config import Config

    return isinstance(given, Config)


def _rules_text(rules: Rules | str | None) -> tuple[str, str]:
    """The path and the text of the rules file that is edited."""
    if rules is None:
        return "", ""
    if isinstance(rules, Rules):
        return rules.path, rules.text
    path = find_file("single" if rules == "none" else rules, "rules")
    return str(path), read_text(path)
