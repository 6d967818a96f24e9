"""Whether a checkpoint is one of a run: of its model, and with its arrays."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from gspmd_lm.config import ModelConfig, default_at, flat, nest
from gspmd_lm.config.types import dataclass_in
from gspmd_lm.errors import InputError
from gspmd_lm.files import json_object

SHOWN = 6  # lines of each kind in a message
_FIX = "  fix   use the config it was saved with, or another workdir"  # which --workdir or train.init_from names
# Fields of ModelConfig that change neither the tree of the parameters nor their meaning.
_FREE = {
    "compute_dtype",
    "weight_dtype",
    "attention.scores_dtype",
    "matmul_dtype",
    "matmul_precision",
    "dropout",
    "logits.z_loss",
    "init_std",
    "context",
    "experts.balance_weight",
    "experts.balance_rate",
    "experts.z_loss",
    "experts.capacity_factor",
    "row_multiple",
    "frozen",
}


def as_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy with the types that JSON gives back (tuples become lists). Raises TypeError if JSON cannot hold it."""
    return json.loads(json.dumps(values))


def facts(model: ModelConfig) -> dict[str, Any]:
    """The settings of a model that decide its weights, as plain values in sections."""
    values = {
        path: dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value
        for path, value in flat(model).items()
        if path not in _FREE
    }
    if model.experts:
        values["experts.balance"] = "bias" if model.balance_bias else "none"  # a loss adds no weights
    return nest(values)


def read_run(path: epath.Path, step: int) -> dict[str, Any]:
    """The JSON that a run saved beside the arrays of checkpoint `step`: `architecture` and `extra`, each an object.

    Raises InputError if the file says something else, or is of another step: a folder may be a copy or a link.
    """
    run = json_object(path.read_bytes(), path)
    wrong = [name for name in ("architecture", "extra") if not isinstance(run.get(name), dict)]
    if wrong:
        raise InputError(f"{path}: {' and '.join(wrong)}: not an object")
    if (saved := run.get("step", step)) != step:  # older checkpoints do not have it
        raise InputError(f"{path}: of step {saved}, not {step}: the folder is a copy of another checkpoint, or a link")
    return run


def check_model(saved: Mapping[str, Any], wanted: Mapping[str, Any], place: str) -> None:
    """Raises an InputError that begins with `place` and lists each difference of two models' facts."""
    every = sorted(_differences("", _complete(ModelConfig, saved, wanted), wanted))
    found = {
        name: f"  {name}: {one} in the checkpoint, {other} in the config"
        for name, one, other in every
        if name not in _FREE
    }
    if found:
        fix = _FIX
        if all(name.startswith("padded_") for name in found):
            sets = " ".join(f"--set model.{name}={wanted.get(name, 0)}" for name in found)
            fix = (
                "  fix   padding is part of the weights: keep that of the checkpoint, or write them to a folder "
                f"without it (convert --to), and convert that, with {sets}, into another --workdir"
            )
        raise InputError("\n".join([f"{place}: a checkpoint of another architecture", *found.values(), fix]))


def _differences(name: str, saved: Any, wanted: Any) -> Iterator[tuple[str, Any, Any]]:
    """The name of each entry that differs, with a dot before a key of a mapping, and its two values."""
    if not (isinstance(saved, Mapping) and isinstance(wanted, Mapping)):
        yield name, saved, wanted
        return
    for key in dict.fromkeys((*saved, *wanted)):
        one, other = saved.get(key, "absent"), wanted.get(key, "absent")
        if one != other:
            yield from _differences(f"{name}.{key}".lstrip("."), one, other)


def _complete(kind: Any, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Saved facts with the defaults of the wanted settings that are younger than the checkpoint."""
    defaults = {field.name: default_at(kind, field.name) for field in dataclasses.fields(kind) if field.name in wanted}
    known = {name: value for name, value in defaults.items() if value is not dataclasses.MISSING}
    hints = get_type_hints(kind)
    found: dict[str, Any] = {}
    for name, value in (known | {**saved}).items():
        section = dataclass_in(hints[name]) if name in hints else None
        value = dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value
        inner = wanted.get(name)
        if section and isinstance(value, Mapping) and isinstance(inner, Mapping):
            value = _complete(section, value, inner)
        found[name] = value
    return as_json(found)


def compare(saved: Any, wanted: Any, place: str, casts: bool = False, part: bool = False) -> None:
    """Raises InputError where the arrays of two trees differ in name, shape or, unless they are cast, dtype.

    part: `wanted` is a part of what was saved.
    """
    saved_arrays, wanted_arrays = dict(describe_arrays(saved)), dict(describe_arrays(wanted))

    def same(name: str) -> bool:
        pair = saved_arrays[name], wanted_arrays[name]
        return pair[0] == pair[1] or (casts and pair[0].partition("[")[2] == pair[1].partition("[")[2])

    problems = {
        "missing": [f"{name}: {wanted_arrays[name]}" for name in wanted_arrays if name not in saved_arrays],
        "unexpected": [
            f"{name}: {saved_arrays[name]}" for name in saved_arrays if name not in wanted_arrays and not part
        ],
        "different": [
            f"{name}: {saved_arrays[name]} in the checkpoint, {wanted_arrays[name]} wanted"
            for name in wanted_arrays
            if name in saved_arrays and not same(name)
        ],
    }
    other_names = problems["missing"] or problems["unexpected"]
    why = "another optimizer, or model.frozen" if other_names else "another model.weight_dtype, or optimizer.mu_dtype"
    lines = [f"{place}: the checkpoint holds another state than this run's ({why}?)"]
    for kind, lines_of_kind in problems.items():
        lines += [f"  {kind}: {line}" for line in lines_of_kind[:SHOWN]]
        lines += [f"  {kind}: {len(lines_of_kind) - SHOWN} more"] if len(lines_of_kind) > SHOWN else []
    if any(problems.values()):
        raise InputError("\n".join([*lines, _FIX]))


def name_leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    """The dotted name of each leaf, and the leaf."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        yield name_of(path), leaf


def name_of(path: Any) -> str:
    """'layers.attention.wq' for a path as jax gives it, whatever the kinds of its nodes."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def describe_arrays(tree: Any) -> Iterator[tuple[str, str]]:
    """The dotted name and the dtype[shape] of each array; random keys as the integers that Orbax stores."""
    for name, leaf in name_leaves(tree):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.eval_shape(jax.random.key_data, leaf)
        yield name, f"{np.dtype(leaf.dtype).name}[{', '.join(map(str, leaf.shape))}]"
