"""Comparing trees of arrays by the names, shapes and dtypes of their leaves."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gspmd_lm.errors import InputError

SHOWN = 6  # lines of each kind in a message


def compare(saved: Any, wanted: Any, place: str, casts: bool = False) -> None:
    """Raises InputError where the arrays of two trees differ in name, shape or, unless they are cast, dtype."""
    saved_arrays, wanted_arrays = dict(_arrays(saved)), dict(_arrays(wanted))

    def same(name: str) -> bool:
        pair = saved_arrays[name], wanted_arrays[name]
        return pair[0] == pair[1] or (casts and pair[0].partition("[")[2] == pair[1].partition("[")[2])

    problems = {
        "missing": [f"{name}: {wanted_arrays[name]}" for name in wanted_arrays if name not in saved_arrays],
        "unexpected": [f"{name}: {saved_arrays[name]}" for name in saved_arrays if name not in wanted_arrays],
        "different": [
            f"{name}: {saved_arrays[name]} in the checkpoint, {wanted_arrays[name]} wanted"
            for name in wanted_arrays
            if name in saved_arrays and not same(name)
        ],
    }
    lines = [f"{place}: the checkpoint holds another state than this run's (another optimizer?)"]
    for kind, found in problems.items():
        lines += [f"  {kind}: {line}" for line in found[:SHOWN]]
        lines += [f"  {kind}: {len(found) - SHOWN} more"] if len(found) > SHOWN else []
    if any(problems.values()):
        raise InputError("\n".join([*lines, "  fix   use the config it was saved with, or another --workdir"]))


def named(tree: Any) -> Iterator[tuple[str, Any]]:
    """The dotted name of each leaf, and the leaf."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        yield name_of(path), leaf


def name_of(path: Any) -> str:
    """'layers.attention.wq' for a path as jax gives it, whatever the kinds of its nodes."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _arrays(tree: Any) -> Iterator[tuple[str, str]]:
    """The dotted name and the dtype[shape] of each array; random keys as the integers that Orbax stores."""
    for name, leaf in named(tree):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.eval_shape(jax.random.key_data, leaf)
        yield name, f"{np.dtype(leaf.dtype).name}[{', '.join(map(str, leaf.shape))}]"
