"""The arrays of a model: paths, logical axes, shapes and activations, and the rules that do not fit them."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax

from gspmd_lm.config import ModelConfig
from gspmd_lm.errors import InputError, did_you_mean
from gspmd_lm.sharding import names, of_flax, placement, rules_file
from gspmd_lm.sharding.annotate import Spec
from gspmd_lm.sharding.names import Vocabulary
from gspmd_lm.sharding.placement import Named, Recorder
from gspmd_lm.sharding.problems import UNUSED, Problem, check
from gspmd_lm.sharding.rules import Row, Rules
from gspmd_lm.sharding.sizes import element_bits

Activations = dict[str, tuple[tuple[str, ...], tuple[int, ...]]]  # name -> logical axes, shape


@dataclasses.dataclass(frozen=True)
class Arrays:
    """The arrays of a model, from shapes alone: nothing is allocated."""

    named_params: Any  # trees of placement.Named
    params: Any  # trees of jax.ShapeDtypeStruct
    named_trained: Any  # the part of the parameters that is trained
    trained: Any
    named_optimizer: Any = ()  # where nothing is trained, the optimizer has no state
    optimizer: Any = ()
    transform: Any = None  # optax.GradientTransformation

    @property
    def parameter_count(self) -> int:
        return _count(self.params)

    @property
    def trained_count(self) -> int:
        return _count(self.trained)

    def active_count(self, model: ModelConfig) -> int:
        """The number of active parameters for one token: of routed experts, only the chosen ones count.

        Parameters that all layers share count once for each layer.
        """
        share = model.moe.per_token / model.num_experts if model.experts else 1.0

        def times(leaf: Named) -> float:
            if model.shared_layers and leaf.path.startswith("layers."):
                return model.layers
            return share if "expert" in leaf.axes else 1.0

        return round(sum(like.size * times(leaf) for leaf, like in pairs(self.named_params, self.params)))


def arrays(
    init: Callable[[jax.Array], Any], vocabulary: Vocabulary, trained: Callable[[Any], Any] = lambda params: params
) -> Arrays:
    """The parameters that `init` draws with a random key, annotated by `nn.with_logical_partitioning`.

    `trained` takes a tree shaped like the parameters and gives the part of it that training changes. Raises InputError
    for another tree than nested dicts, and for parameters and axes that the vocabulary does not have.
    """
    named, params = _name_params(jax.eval_shape(init, jax.eval_shape(jax.random.key, 0)))
    _check_names(pairs(named, params), vocabulary)
    return Arrays(named, params, trained(named), trained(params))


def used_names(
    init: Callable[[jax.Array], Any], inputs: Mapping[str, Spec], loss: Callable[[Any, Any], Any], batch: Any
) -> Vocabulary:
    """The names that a model uses: of the parameters that `init` draws, of its inputs, and of what `loss` places."""
    named, params = _name_params(jax.eval_shape(init, jax.eval_shape(jax.random.key, 0)))
    weights, specs = [leaf for leaf, _ in pairs(named, params)], [*inputs.values()]
    every = Vocabulary(axes=_Every(), weights={}, activations=_Every(), rows=specs[0].axes[0])
    recorder = placement.record(rules_file.from_dict({"mesh": {"data": 1}}, "", vocabulary=every), loss, params, batch)
    paths = {leaf.path for leaf in weights}
    placed = [Spec(array, axes) for array, axes in recorder.axes.items() if array not in paths]
    axes = itertools.chain(*(one.axes for one in (*specs, *weights, *placed)))
    return dataclasses.replace(
        every,
        axes={axis: ("", "") for axis in axes if not names.is_unnamed(axis)},
        weights={path.rpartition(".")[2]: "" for path in paths},
        activations={spec.array: "" for spec in (*specs, *placed) if not spec.is_constraint},
    )


class _Every(dict[str, Any]):
    """Names of which no name is unknown."""

    def __contains__(self, name: object) -> bool:
        return True


def _name_params(boxed: Any) -> tuple[Any, Any]:
    """Trees of the names and of the shapes of parameters. Raises InputError if they are not nested dicts, or if one has
    more names than dimensions.
    """
    params = nn.unbox(boxed)
    _check_dicts(params)
    with of_flax.reading():
        named = of_flax.name_params(boxed)
    if wrong := [
        f"  {leaf.path}: {len(leaf.axes)} names, {', '.join(leaf.axes)}, for {len(like.shape)} dimensions, "
        f"{' x '.join(map(str, like.shape)) or 'a scalar'}"
        for leaf, like in pairs(named, params)
        if len(leaf.axes) > len(like.shape)
    ]:
        raise InputError(
            "\n".join(["parameters have more logical axes than dimensions", *wrong])
            + "\n  fix   name each dimension once, the first one first, where the model annotates them"
        )
    return named, params


def pairs(named: Any, abstract: Any) -> list[tuple[Named, Any]]:
    """The leaves of a tree of Named, each with the leaf of `abstract` that it names."""
    return list(zip(jax.tree.leaves(named), jax.tree.leaves(abstract), strict=True))


def place_array(
    rules: Rules, table: str, leaf: Named, like: Any, itemsize: int = 0
) -> tuple[tuple[tuple[str, ...], ...], float]:
    """The split of an array under `table`, and its bytes on each device; in its own dtype if `itemsize` is 0."""
    spec = rules.resolve(table, leaf.path, leaf.axes, like.shape)[0]
    shards = rules.num_shards(itertools.chain(*spec))
    return spec, math.prod(like.shape) * (itemsize or element_bits(like.dtype) / 8) / shards


def bytes_per_device(like: Any) -> int:
    """The bytes of an array, of which a shape and a sharding are known, on each device."""
    return math.ceil(math.prod(like.sharding.shard_shape(like.shape)) * element_bits(like.dtype) / 8)


def check_layout(
    arrays: Arrays, rules: Rules, recorded: Iterable[Recorder] = (), more: Iterable[Problem] = ()
) -> list[Problem]:
    """The warnings about `rules` for the arrays of a model. Nothing is compiled or allocated.

    `recorded` are the activations that the model names in each of its programs under the same rules, and `more` the
    problems that its arrays do not show. Raises ShardingError that lists everything that does not fit.
    """
    params = pairs(arrays.named_params, arrays.params)
    optimizer = pairs(arrays.named_optimizer, arrays.optimizer)
    recorders = list(recorded) or [None]

    def problems(chosen: Rules) -> list[Problem]:
        each = [
            placement.problems(chosen, params, one.under(chosen) if one and chosen is not rules else one, optimizer)
            for one in recorders
        ]
        # A row that one of the programs has a use for is no row that does nothing.
        idle = [{one for one in found if one.code == UNUSED} for found in each]
        used_somewhere = set().union(*idle) - set.intersection(*idle)
        return [problem for found in each for problem in found if problem not in used_somewhere]

    found = problems(rules)
    causes = {(problem.place, problem.row) for problem in found}

    def fits(other: Rules) -> bool:  # as well as `rules` do
        return all(problem.warning or (problem.place, problem.row) in causes for problem in problems(other))

    return check(dict.fromkeys([*(_filling(problem, rules, fits) for problem in found), *more]))


def _filling(problem: Problem, rules: Rules, fits: Callable[[Rules], bool]) -> Problem:
    """A problem. Of a mesh that does not fill the devices, the fix is one with which the rules fit the model, too."""
    if not problem.sizes:
        return problem
    for name, size in problem.sizes:
        if fits(dataclasses.replace(rules, mesh={**rules.mesh, name: size}, problems=())):
            return dataclasses.replace(problem, fix=f"--mesh={name}={size}")
    fix, batch = "a rules file for these devices: plan writes one", rules.vocabulary.rows
    (name, size), *_ = problem.sizes
    if "data" not in rules.mesh and not any(row.axis == batch for row in rules.rows):
        times = size // rules.mesh[name]
        mesh, row = {**rules.mesh, "data": times}, Row("", "rules", "", batch, ("data",))
        if times > 1 and fits(dataclasses.replace(rules, mesh=mesh, rows=(*rules.rows, row), problems=())):
            fix = f"--set rules.mesh.data={times} --set rules.rules.{batch}=data"
    return dataclasses.replace(problem, fix=fix)


def _check_dicts(params: Any) -> None:
    """Raises InputError for parameters that are not nested dicts of arrays."""
    for path, _ in jax.tree_util.tree_leaves_with_path(params):
        if other := [key for key in path if not isinstance(key, jax.tree_util.DictKey)]:
            raise InputError(
                f"the model's parameters are not nested dicts of arrays: {other[0]} in {jax.tree_util.keystr(path)}\n"
                "  fix   have init return such dicts, as that of a linen module does, or nnx.state(model, nnx.Param)"
            )


def _check_names(params: Sequence[tuple[Named, Any]], vocabulary: Vocabulary) -> None:
    """Raises InputError for parameters whose names or axes are not the model's: no rule could speak of them."""
    wrong = []
    for leaf, _ in params:
        name, known = leaf.path.rpartition(".")[2], f"  {leaf.path}: {' '.join(leaf.axes)}"
        if name not in vocabulary.weights:
            wrong.append(f"{known}: no weight is named {name}{did_you_mean(name, vocabulary.weights)}")
        wrong += [
            f"{known}: unknown axis {axis}{did_you_mean(str(axis), vocabulary.axes)}"
            for axis in leaf.axes
            if axis not in vocabulary.axes and not names.is_unnamed(axis)
        ]
    if wrong:
        lines = "\n".join(dict.fromkeys(wrong))
        raise InputError(
            f"the model's parameters do not agree with its vocabulary\n{lines}\n"
            "  fix   make each with `parameter` or nn.with_logical_partitioning, and have its "
            "name and its axes in the vocabulary"
        )


def _count(tree: Any) -> int:
    return sum(like.size for like in jax.tree.leaves(tree))
