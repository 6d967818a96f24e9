"""The controls beside the editor: each shows a key of the rules file, and writes it into the text."""

import functools
import math
from collections.abc import Mapping
from typing import Any

from gspmd_lm.config import core_yaml
from gspmd_lm.errors import InputError, either
from gspmd_lm.explore import rows
from gspmd_lm.hardware.target import Target
from gspmd_lm.sharding.axes import DECODER
from gspmd_lm.sharding.names import Vocabulary
from gspmd_lm.sharding.problems import flow
from gspmd_lm.sharding.rules import CONTEXTS, EXPERT_BUFFER, KERNELS, MESH_AXES, REMATS, divisors
from gspmd_lm.sharding.rules_keys import RulesFile
from gspmd_lm.show import config_keys

MICROBATCHES = (1, 2, 4, 8, 16, 32)
MESH_MEANINGS = {
    "data": "copies of the model, each of which computes other rows",
    "fsdp": "other rows for each device, and weights that rest split (ZeRO-3)",
    "tensor": "one matrix over several devices: heads, hidden units, vocabulary",
    "context": "one sequence over several devices",
    "expert": "experts over several devices",
    "stage": "layers over several devices, as stages of a pipeline",
}


@functools.cache
def meanings() -> dict[str, str]:
    """Key of a rules file, such as pipeline.microbatches -> its meaning."""
    return {key.name: key.meaning for group in config_keys.sections(RulesFile) for key in group.keys}


def list_controls(text: str, target: Target) -> list[dict[str, Any]]:
    """The controls of a text that is YAML; none of another."""
    try:
        plain = core_yaml.load(text)
    except core_yaml.YamlError:
        return []
    if not isinstance(plain, dict):
        return []
    mesh = plain.get("mesh")
    made = []
    for axis, size in mesh.items() if isinstance(mesh, dict) else ():
        about = MESH_MEANINGS.get(axis, "")
        made.append(_control(f"mesh.{axis}", "number", size, divisors(target.devices), about, label=axis))
    remat = plain.get("remat", REMATS[0])
    known = [*REMATS] if remat in REMATS else [*REMATS, flow(remat)]
    made += [
        _control("remat", "choice", remat if remat in REMATS else flow(remat), known),
        _control("microbatches", "number", plain.get("microbatches", 1), [*MICROBATCHES]),
    ]
    pipeline = plain.get("pipeline")
    if isinstance(pipeline, dict):
        made += [
            _control(f"pipeline.{key}", "number", pipeline.get(key, 1), [*MICROBATCHES])
            for key in ("microbatches", "repeats")
        ]
    if isinstance(mesh, dict) and "context" in mesh:
        made.append(_control("context", "choice", plain.get("context", CONTEXTS[0]), [*CONTEXTS]))
    kernels, attention = KERNELS[target.platform], plain.get("attention")
    if len(kernels) > 1:
        chosen = attention.get(target.platform) if isinstance(attention, dict) else None
        about = f"The attention kernel on {target.platform}; automatic takes the fastest that can compute it."
        made.append(
            _control(f"attention.{target.platform}", "choice", chosen or _AUTOMATIC, [_AUTOMATIC, *kernels], about)
        )
    made.append(_control("interleave", "number", plain.get("interleave", 1), [1, 2]))
    if isinstance(mesh, dict) and "expert" in mesh:
        made.append(_control("expert_buffer", "number", plain.get("expert_buffer", EXPERT_BUFFER), None))
    return made


_AUTOMATIC = "automatic"


def _control(
    name: str, kind: str, value: Any, choices: list[Any] | None, about: str = "", label: str = ""
) -> dict[str, Any]:
    return {
        "name": name,
        "label": label or name.replace("_", " "),
        "kind": kind,
        "value": value,
        "choices": choices,
        "meaning": about or meanings().get(name, ""),
    }


def set_control(text: str, target: Target, name: Any, value: Any) -> str:
    """The text with the value of a control. Raises InputError for a control or a value that there is none of."""
    if not isinstance(name, str):
        raise InputError("control: needs a name")
    path = tuple(name.split("."))
    known = {one["name"]: one for one in list_controls(text, target)}
    axis_of_mesh = len(path) == 2 and path[0] == "mesh" and path[1] in MESH_AXES
    if name not in known and not axis_of_mesh:
        raise InputError(f"{name}: there is no such control\n  fix   use {either(known) if known else 'the editor'}")
    kind = known[name]["kind"] if name in known else "number"
    if kind == "number" and (isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 2**31):
        raise InputError(f"{name}: {value!r} is no number")
    if kind == "choice" and value not in known[name]["choices"]:
        raise InputError(f"{name}: {value!r} is no choice\n  fix   use {either(known[name]['choices'])}")
    if value == _AUTOMATIC:
        return rows.remove(text, path) if path in rows.places(text) else text
    if kind == "choice" and name == "remat" and value not in REMATS:
        return text  # names of arrays, which stand there already
    changed = rows.set_value(text, path, value)
    return _fill_devices(text, changed, target.devices, path[1]) if axis_of_mesh else changed


def _fill_devices(before: str, text: str, devices: int, axis: str) -> str:
    """The text with another size changed too, if the mesh filled the devices before, and does not after one change."""
    old, new = (_sizes_of_mesh(one) for one in (before, text))
    if not new or math.prod(old.values()) != devices or math.prod(new.values()) in (0, devices):
        return text
    for other, size in new.items():
        others = math.prod(new.values()) // size
        if other != axis and devices % others == 0:
            return rows.set_value(text, ("mesh", other), devices // others)
    return text


def _sizes_of_mesh(text: str) -> Mapping[str, int]:
    """The sizes of a mesh of which each is a number from 1; none of any other, such as one that is filled by itself."""
    mesh = (core_yaml.load(text) or {}).get("mesh")
    if not isinstance(mesh, dict) or not all(isinstance(size, int) and size >= 1 for size in mesh.values()):
        return {}
    return mesh


def completion(names: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What an editor may complete, each word with its meaning. names: what `describe_names` gives of another model."""
    values: dict[str, list[Any]] = {"remat": [*REMATS], "context": [*CONTEXTS], "unroll": ["all"]}
    values |= {f"attention.{platform}": [*kernels] for platform, kernels in KERNELS.items()}
    values |= {
        key.name: key.kind.replace(" or ", ", ").split(", ")
        for group in config_keys.sections(RulesFile)
        for key in group.keys
        if key.name.startswith("pipeline.") and "number" not in key.kind
    }
    return {"keys": meanings(), **(names or describe_names(DECODER)), "mesh_axes": MESH_MEANINGS, "values": values}


def describe_names(names: Vocabulary) -> dict[str, Any]:
    """The axes and arrays of a vocabulary, with their meanings."""
    return {"axes": {axis: meaning for axis, (_, meaning) in names.axes.items()}, "arrays": names.arrays}
