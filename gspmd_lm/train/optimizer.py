"""Optax update rules that find the matrices, and the placement of their state, by logical axes.

The number of dimensions does not tell which parameters are matrices: layers are stacked, so a norm's scale has two, and
heads have an axis of their own, so a projection has three or four. A matrix is a parameter that maps `embed` or, in an
adapter, `rank` to or from something else.
"""

import math
from collections.abc import Hashable
from typing import Any

import jax
import numpy as np
import optax
from optax import contrib

from gspmd_lm import config
from gspmd_lm.errors import InputError
from gspmd_lm.sharding.axes import HIDDEN, NARROW, STACKED
from gspmd_lm.sharding.placement import Named


def is_matrix(axes: tuple[str, ...]) -> bool:
    """Whether a parameter with these logical axes maps `embed` or `rank` to or from something else."""
    return bool(NARROW & set(axes)) and len(set(axes) - {*STACKED}) > 1


def sides(axes: tuple[str, ...]) -> int:
    """The number of axes, without those of STACKED, on the left side of a matrix; the others are on its right side."""
    return 1 if axes[0] in NARROW else len(axes) - 1


def schedule(cfg: config.Optimizer, steps: int) -> optax.Schedule:
    """The learning rate as a function of the step."""
    peak, warmup = cfg.learning_rate, cfg.warmup_steps
    rise = optax.linear_schedule(peak / max(warmup, 1), peak, max(warmup - 1, 1))  # the first step already learns
    if cfg.schedule == "constant":
        after: optax.Schedule = optax.constant_schedule(peak)
    elif cfg.schedule == "warmup_cosine":
        after = optax.cosine_decay_schedule(peak, max(steps - warmup, 1), cfg.final_fraction)
    elif cfg.schedule == "warmup_exponential":
        after = optax.exponential_decay(peak, 1, cfg.decay_rate)
    else:
        decay = _decay_steps(cfg, steps)
        stable = max(steps - warmup - decay, 0)
        fall = optax.linear_schedule(peak, peak * cfg.final_fraction, decay)
        after = optax.join_schedules([optax.constant_schedule(peak), fall], [stable])
    return optax.join_schedules([rise, after], [warmup]) if warmup else after


def unfinished_schedule_note(cfg: config.Optimizer, steps: int) -> str:
    """A warning about a schedule that is longer than a run of `steps` steps; '' for any other."""
    warmup, decay = cfg.warmup_steps, _decay_steps(cfg, steps)
    if warmup > steps:
        return (
            f"warning: optimizer.warmup_steps={warmup:,}: more than train.steps={steps:,}, so the learning rate "
            "does not come to optimizer.learning_rate"
        )
    if warmup + decay > steps:
        return (
            f"warning: optimizer.warmup_steps={warmup:,} and a decay over {decay:,} steps: more than "
            f"train.steps={steps:,}, so the decay does not come to its end"
        )
    return ""


def _decay_steps(cfg: config.Optimizer, steps: int) -> int:
    """The steps of the final decay of warmup_stable_decay; 0 for other schedules."""
    return (cfg.decay_steps or max(steps // 10, 1)) if cfg.schedule == "warmup_stable_decay" else 0


def build_optimizer(cfg: config.Optimizer, steps: int, named: Any) -> optax.GradientTransformation:
    """The transformation of gradients to updates: clipping by global norm, the rule, decay of matrices, the schedule.

    named: a tree of placement.Named with the parameters' structure.
    """
    axes = jax.tree.map(lambda leaf: leaf.axes, named)
    matrices = jax.tree.map(is_matrix, axes, is_leaf=_is_axes)
    if cfg.name == "adamw":
        rule = optax.scale_by_adam(cfg.b1, cfg.b2, cfg.eps, mu_dtype=cfg.mu_dtype)
    elif cfg.name == "lion":
        rule = optax.scale_by_lion(cfg.b1, cfg.b2, cfg.mu_dtype)
    else:
        rule = _muon(cfg, axes) if cfg.name == "muon" else _adafactor(axes)
    return optax.chain(
        optax.clip_by_global_norm(cfg.clip_norm) if cfg.clip_norm else optax.identity(),
        rule,
        optax.add_decayed_weights(cfg.weight_decay, matrices) if cfg.weight_decay else optax.identity(),
        optax.scale_by_learning_rate(schedule(cfg, steps)),
    )


def _muon(cfg: config.Optimizer, axes: Any) -> optax.GradientTransformation:
    """Muon for the matrices inside blocks, Adam for everything else. Stacked matrices are separate ones."""

    def dimensions(names: tuple[str, ...]) -> contrib.MuonDimensionNumbers | None:
        if not (is_matrix(names) and HIDDEN & set(names)):
            return None
        inner = [i for i, name in enumerate(names) if name not in STACKED]
        left = sides(tuple(names[i] for i in inner))
        return contrib.MuonDimensionNumbers(tuple(inner[:left]), tuple(inner[left:]))

    numbers = jax.tree.map(dimensions, axes, is_leaf=_is_axes)
    muon = contrib.muon(
        1.0,
        beta=cfg.b1,
        adam_b1=cfg.b1,
        adam_b2=cfg.b2,
        eps=cfg.eps,
        mu_dtype=cfg.mu_dtype,
        muon_weight_dimension_numbers=numbers,
        consistent_rms=0.2,  # update sizes like Adam's, so that one learning rate serves both (arXiv 2502.16982)
    )
    return optax.chain(muon, optax.scale(-1.0))  # it was scaled by a learning rate of 1, which negates


def _adafactor(axes: Any) -> optax.GradientTransformation:
    """Adafactor (arXiv 1804.04235), which factors each layer's matrix as [left, right] (see `sides`).

    optax factors the two largest dimensions of an array, so it is given one layer's matrix at a time.
    """

    def depth(names: tuple[str, ...]) -> int:
        return len(_stack(names))

    def label(names: tuple[str, ...]) -> str:
        return f"{'stacked ' * depth(names)}{'matrices' if is_matrix(names) else 'vectors'}"

    def rule(stacked: int, matrix: bool) -> optax.GradientTransformation:
        # The schedule comes later. Without a learning rate, optax still changes the sign, which is undone here.
        inner = optax.chain(
            optax.adafactor(None, factored=matrix, min_dim_size_to_factor=1, decay_rate=0.8), optax.scale(-1.0)
        )
        inner = _as_matrices(inner, axes) if matrix else inner
        for _ in range(stacked):
            inner = _over_stack(inner)
        return inner

    labels = jax.tree.map(label, axes, is_leaf=_is_axes)
    rules: dict[Hashable, optax.GradientTransformation] = {
        label(names): rule(depth(names), is_matrix(names)) for names in jax.tree.leaves(axes, is_leaf=_is_axes)
    }
    return optax.partition(rules, labels)


def _stack(names: tuple[str, ...]) -> tuple[str, ...]:
    """The first axes, along which arrays of a parameter are stacked."""
    return tuple(name for name in names if name in STACKED)


def _over_stack(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """`inner` applied to each array of stacked parameters by itself."""
    return optax.GradientTransformation(
        jax.vmap(inner.init), lambda updates, state, params=None: jax.vmap(inner.update)(updates, state, params)
    )


def _as_matrices(inner: optax.GradientTransformation, axes: Any) -> optax.GradientTransformation:
    """`inner` applied to two-dimensional views, in which the axes of each side are flattened."""

    def view(path: Any, x: jax.Array) -> jax.Array:
        left = sides(tuple(name for name in _at(axes, path) if name not in STACKED))
        return x.reshape(math.prod(x.shape[:left]), -1)

    def views(tree: Any) -> Any:
        return jax.tree_util.tree_map_with_path(view, tree)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        new, state = inner.update(views(updates), state, views(params))
        return jax.tree.map(lambda y, x: y.reshape(x.shape), new, updates), state

    return optax.GradientTransformation(lambda params: inner.init(views(params)), update)


def named_state(abstract_state: Any, named: Any, abstract_params: Any) -> Any:
    """A tree of Named for the optimizer state: each array has the path and the axes of its parameter.

    Raises InputError for an array whose axes are not known, so that no array is replicated unnoticed.
    """
    by_path = {leaf.path: leaf.axes for leaf in jax.tree.leaves(named)}
    shapes = {_dotted_path(path): like.shape for path, like in jax.tree_util.tree_leaves_with_path(abstract_params)}

    def name(path: Any, like: Any) -> Named:
        param = _dotted_path(path)
        where = jax.tree_util.keystr(path, simple=True, separator=".")
        if param not in by_path:  # a counter or a constant, once per layer where the rule runs layer by layer
            if like.size > 16 and not np.issubdtype(like.dtype, np.integer):
                raise _untold(where, like)
            return Named(where, ("",) * like.ndim)
        axes, shape = by_path[param], shapes[param]
        if like.shape == shape:
            return Named(param, axes)
        stack = _stack(axes)
        if like.shape[len(stack) :] == (1,):  # the placeholder of a statistic that this parameter does not keep
            return Named(where, ("",) * like.ndim)
        inner, sizes = axes[len(stack) :], shape[len(stack) :]
        if len(inner) < 2:
            raise _untold(where, like)
        cut = sides(inner)
        left, right = (math.prod(sizes[:cut]), inner[0]), (math.prod(sizes[cut:]), inner[cut])
        smaller, larger = (left, right) if left[0] <= right[0] else (right, left)  # optax keeps the smaller in v_row
        size, axis = smaller if ".v_row." in f".{where}." else larger
        if like.shape != (*shape[: len(stack)], size):
            raise _untold(where, like)
        return Named(param, (*stack, axis))

    return jax.tree_util.tree_map_with_path(name, abstract_state)


def _untold(where: str, like: Any) -> InputError:
    return InputError(
        f"the optimizer's state {where}, {list(like.shape)}, does not have the shape of its parameter, so its "
        "logical axes are not known\n  fix   use an optimizer whose state has the shapes of the parameters, such as "
        "adamw, lion or sgd"
    )


def _is_axes(leaf: Any) -> bool:
    return isinstance(leaf, tuple) and all(isinstance(name, str) for name in leaf)


def _at(tree: Any, path: Any) -> Any:
    for key in path:
        tree = tree[key.key]
    return tree


def _dotted_path(path: Any) -> str:
    """The parameter's path at the end of a leaf's path: its last unbroken run of dictionary keys."""
    keys = []
    for key in reversed(path):
        if not isinstance(key, jax.tree_util.DictKey):
            break
        keys.append(str(key.key))
    return ".".join(reversed(keys))
