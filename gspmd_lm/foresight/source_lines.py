"""The lines of a model, or of a user's step, that operations of a program come from."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# Files whose lines say less than those that call them.
_GENERAL = ("gspmd_lm/sharding/", "gspmd_lm/model/weights.py")
# Paths whose lines tell little: libraries of layers and optimizers, Python's own, and what calls a step to compile it.
_TELL_LITTLE = re.compile(
    r"-packages/(jax|jaxlib|flax|optax|chex|einops|equinox|haiku|numpy)/|/lib/python[\d.]*/(?!(site|dist)-packages/)"
    r"|gspmd_lm/(foresight/|sharding/(of_flax|products)\.)|<frozen"
)
_PACKAGE = frozenset(entry.name for entry in Path(__file__).parents[1].iterdir())  # its folders and files


def in_package(file: str) -> str:
    """The path of a file of this package, from its root; '' for other files, such as an example in a clone.

    The folder of a clone may have the package's name too.
    """
    rest = file.rpartition("gspmd_lm/")[2]
    return f"gspmd_lm/{rest}" if rest != file and rest.split("/")[0] in _PACKAGE else ""


def source_line(file: str, line: int | str) -> str:
    """file:line of this package, from its root, or of other code, from its folder; '' for what tells little."""
    if _TELL_LITTLE.search(file):
        return ""
    return f"{in_package(file) or '/'.join(file.split('/')[-2:])}:{line}"


def choose_line(lines: Iterable[str]) -> str:
    """The innermost of some lines, which stands first, that is not one of the package's general functions.

    It is the innermost of all where there are only such; '' where there is none.
    """
    lines = list(lines)
    return next((line for line in lines if not line.startswith(_GENERAL)), next(iter(lines), ""))


def line_of_equation(equation: Any) -> str:
    """The line of the model that made an equation of a traced program; '' where none is known."""
    traceback = equation.source_info.traceback
    frames = traceback.frames if traceback else ()
    return choose_line(filter(None, (source_line(frame.file_name, frame.line_num) for frame in frames)))
