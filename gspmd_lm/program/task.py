"""What is computed, as plain functions: a model, its loss, its batch and its optimizer."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict

from gspmd_lm.config import Config, Train
from gspmd_lm.errors import InputError
from gspmd_lm.model.objectives import Batch as Batch
from gspmd_lm.model.objectives import Input as Input
from gspmd_lm.sharding import of_flax, products, shapes
from gspmd_lm.sharding.annotate import Spec, placed_by
from gspmd_lm.sharding.names import Vocabulary
from gspmd_lm.sharding.placement import Recorder
from gspmd_lm.sharding.shapes import Arrays


class Losses(NamedTuple):
    """The sums of a task that says the loss of each row and no more."""

    loss: jax.Array


class Generation(NamedTuple):
    """The functions with which a model of one's own writes tokens. They see one device and all rows.

    Their state is any tree of arrays, such as the tokens so far, or keys and values.
    """

    begin: Callable[[Any, Batch], tuple[jax.Array, Any]]  # (parameters, batch) -> logits [B, V], state
    extend: Callable[[Any, Any, jax.Array], tuple[jax.Array, Any]]  # (parameters, state, tokens [B]) -> the same
    end: int | None = None  # the token that ends a text


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A model, its loss and its optimizer, and the names of their arrays. The functions see one device and all rows.

    `explain` compiles in another process, which imports the functions, or is sent those of a script or a notebook.
    """

    name: str
    inputs: Mapping[str, Input]
    # A random key -> parameters: those of a linen module, or nnx.state(model, nnx.Param), annotated with logical axes.
    # Or all variables of a model with state, such as batch statistics, of which `params` or nnx.Param are trained. Or a
    # module of NNX, which functions of the model are then given in place of parameters.
    init: Callable[[jax.Array], Any]
    # (parameters, batch, key or None) -> a NamedTuple of float32 sums over the batch, one of them `loss`; or the loss
    # of each row. A parameter is placed for use where a module of flax reads it. With state, a pair: that, and the
    # variables that the step changes.
    sums: Callable[[Any, Batch, jax.Array | None], Any]
    # An optimizer of optax, or a function that makes it of a tree of placement.Named, shaped like what is trained. Axes
    # and paths may decide who decays.
    optimizer: Any
    vocabulary: Vocabulary | None = None  # None: the names that the model uses; `names` has them
    count: Callable[[Batch], jax.Array] | None = None  # what the sums are divided by; None: the number of rows
    evaluate: Callable[[Any, Batch], dict[str, jax.Array]] | None = None  # totals; None: the sums and the count
    metrics: Callable[[Any, jax.Array, jax.Array], dict[str, jax.Array]] | None = None  # (sums, count, step) -> means
    scores: Callable[[Mapping[str, float]], dict[str, float]] | None = None  # totals -> eval_...; None: of each a mean
    # Parameters -> those that gradients do not change, and those that they change.
    partition: Callable[[Any], tuple[Any, Any]] = of_flax.split_trained
    # (those that gradients do not change, sums) -> these parameters after the step, if they change by another rule.
    moved: Callable[[Any, Any], Any] | None = None
    generation: Generation | None = None  # how it writes tokens: for `gspmd_lm.load_task(...).generate`
    random: bool = False  # whether training gives `sums` a random key, a new one in each step: see `draws`
    seed: int = 0
    matmul_precision: str = "default"
    compute_dtype: str = "float32"  # of activations
    float32: tuple[str, ...] = ()  # activations that are float32 whatever `compute_dtype` says
    tokens: int = 0  # of a batch, for speeds; 0: the number of rows
    train: Train | None = None  # for `gspmd_lm.train`: how long, and how often it logs, evaluates and saves
    # Of the decoder, the config that it was made from: `train.decoder.task` sets it. A changed copy has none, since its
    # functions may be others.
    config: Config | None = dataclasses.field(default=None, init=False)

    def __getstate__(self) -> dict[str, Any]:
        """The fields alone: what is worked out of them is not sent to other processes."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def __post_init__(self):
        if not self.inputs:
            raise InputError(f"task {self.name}: a batch has no arrays\n  fix   name them in inputs")
        specs = self.specs()
        rows = self.vocabulary.rows if self.vocabulary else (*next(iter(specs.values())).axes, "batch")[0]
        wrong = [
            f"  {name}: {tuple(one.shape)} has another number of dimensions than its spec {one.spec!r}"
            for name, one in self.inputs.items()
            if len(one.shape) != len(specs[name].axes)
        ]
        wrong += [
            f"  {name}: the first axis of {one.spec!r} is not {rows}"
            for name, one in self.inputs.items()
            if specs[name].axes[:1] != (rows,)
        ]
        if len({one.shape[:1] for one in self.inputs.values()}) > 1:
            wrong.append("  inputs have different numbers of rows")
        if wrong:
            lines = "\n".join(wrong)
            raise InputError(
                f"task {self.name}: inputs\n{lines}\n"
                f'  fix   Input((rows, 16), "float32", "name: {rows} axis"), alike for all in rows'
            )

    @property
    def rows(self) -> int:
        """Rows of a batch, over all devices."""
        return next(iter(self.inputs.values())).shape[0]

    @functools.cached_property
    def names(self) -> Vocabulary:
        """The names of the model's axes and arrays, which rules files use."""
        if self.vocabulary:
            return self.vocabulary
        return shapes.used_names(self.initial, self.specs(), self._placing, self.batch(self.rows))

    @property
    def batch_size(self) -> tuple[int, str]:
        """The size of a batch, for speeds: in tokens, or in rows if the task does not say how many tokens it has."""
        return (self.tokens, "tokens") if self.tokens else (self.rows, "rows")

    @functools.cached_property
    def weights(self) -> Arrays:
        """The shapes and names of the parameters. Raises InputError for those that no rules can place."""
        return shapes.arrays(self.initial, self.names, lambda params: self.partition(params)[1])

    @functools.cached_property
    def records(self) -> list[tuple[int, Recorder]]:
        """Numbers of rows, and what the model places in such a batch; `train.state.record_arrays` keeps both here."""
        return []

    @functools.cached_property
    def _initial(self) -> tuple[Any, bool, bool]:
        """The shapes of what `init` gives, in its own kind of tree; whether it is a module of NNX; whether it draws."""
        facts: list[tuple[bool, bool]] = []

        def draw_variables(key: jax.Array) -> Any:
            made = self._init(key)
            facts.append((of_flax.is_module(made), of_flax.is_module(made) and of_flax.draws_randomly(made)))
            return of_flax.variables(made)

        with jax.default_matmul_precision(None):  # as for `weights`: where both are alike, jax traces `init` once
            return jax.eval_shape(draw_variables, jax.eval_shape(jax.random.key, 0)), *facts[-1]

    @property
    def is_module(self) -> bool:
        """Whether `init` gives a module of NNX."""
        return self._initial[1]

    @property
    def draws(self) -> bool:
        """Whether training gives the model a random key, a new one in each step."""
        return self.random or self._initial[2]

    def _init(self, key: jax.Array) -> Any:
        with placed_by(None), of_flax.reading():  # the shapes may be asked for while a program is traced
            return self.init(key)

    def initial(self, key: jax.Array) -> Any:
        """The parameters at step 0: nested dicts of arrays, in boxes with their logical axes."""
        return of_flax.box_params(of_flax.variables(self._init(key)))

    def sum_batch(self, params: Any, batch: Batch, key: jax.Array | None, training: bool = True) -> tuple[Any, Any]:
        """The sums over a batch, a NamedTuple, and the new state, nested dicts. Raises InputError where `sums` gives
        something else. A module of NNX is told where it is not trained.
        """
        function = functools.partial(self._sums, training)
        called = function if self.config else products.summing_once(function, _rows(batch))
        sums, changed = called(params, batch, key)
        state = self._check_state(params, changed) if changed else changed
        if getattr(sums, "shape", None) == (_rows(batch),):
            return Losses(sums.sum(dtype=jnp.float32)), state
        if getattr(getattr(sums, "loss", None), "shape", None) != () or not hasattr(sums, "_asdict"):
            raise InputError(
                f"task {self.name}: sums() must return a NamedTuple with a scalar field named loss, or the loss of "
                "each row\n"
                "  fix   class Sums(NamedTuple): loss: jax.Array; and return Sums(losses.sum())"
            )
        return sums, state

    def _sums(self, training: bool, params: Any, batch: Batch, key: jax.Array | None) -> tuple[Any, Any]:
        """The result of `sums`, and the state that it leaves, nested dicts."""
        with of_flax.reading():
            given, state = self._readable(params, key)
            if self.is_module and not training:
                given.eval()
            made: Any = self.sums(given, batch, key)
            sums, changed = made if type(made) is tuple and len(made) == 2 else (made, None)
            if changed is None:
                changed = of_flax.read_changes(given, state) if self.is_module else {}
            return sums, of_flax.state(changed)

    def _readable(self, params: Any, key: jax.Array | None = None) -> tuple[Any, Any]:
        """The parameters as functions of the model take them, and its variables. A module of NNX is made anew."""
        state = of_flax.readable(self._initial[0], params)
        return (of_flax.fill_module(self._init(jax.random.key(0)), state, key) if self.is_module else state), state

    def _check_state(self, params: Any, state: Any) -> Any:
        """The new state. Raises InputError for an array that is not one of what gradients leave."""
        before, after = (_describe(tree) for tree in (self.partition(params)[0], state))
        wrong = [
            f"  {path}: {new}, and init gives {before.get(path, 'none that gradients leave')}"
            for path, new in after.items()
            if new != before.get(path)
        ]
        if wrong:
            fix = "have init return all variables: model.init(...), or nnx.state(model, (nnx.Param, nnx.BatchStat))"
            raise InputError("\n".join([f"task {self.name}: sums() returned new state", *wrong, f"  fix   {fix}"]))
        return state

    @functools.cached_property
    def changed_paths(self) -> frozenset[str]:
        """The paths of the arrays that each step leaves new, besides what gradients change."""
        if not jax.tree.leaves(self.partition(self.weights.params)[0]):
            return frozenset()  # without tracing the model
        return frozenset(_describe(jax.eval_shape(self.sum_batch, self.weights.params, self.batch(self.rows), None)[1]))

    def begin_generation(self, params: Any, batch: Batch) -> tuple[jax.Array, Any]:
        """The logits of the first token of each row, float32 [B, V], and the state of generation. The model must say
        how it generates. Raises InputError where `begin` gives something else.
        """
        assert self.generation
        return self._logits(self._call_model(self.generation.begin, params, batch), _rows(batch))

    def extend_generation(self, params: Any, state: Any, tokens_B: jax.Array) -> tuple[jax.Array, Any]:
        """The logits and the state after one more token of each row.

        Raises InputError if `extend` changes the shapes or dtypes of the state.
        """
        assert self.generation
        rows = len(tokens_B)
        logits_BV, new = self._logits(self._call_model(self.generation.extend, params, state, tokens_B), rows)
        before, after = (jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", tree) for tree in (state, new))
        if before != after:
            raise InputError(
                f"task {self.name}: extend() returned the state {after}, and it was given {before}\n"
                "  fix   return a state of the same shapes and dtypes"
            )
        return logits_BV, new

    def _logits(self, made: tuple[jax.Array, Any], rows: int) -> tuple[jax.Array, Any]:
        logits_BV, state = made
        if logits_BV.ndim != 2 or len(logits_BV) != rows:
            raise InputError(
                f"task {self.name}: generation gave logits of {logits_BV.shape} for {rows} rows\n"
                "  fix   return logits_BV, state: one row of logits for each row of the batch"
            )
        return logits_BV.astype(jnp.float32), jax.tree.map(jnp.asarray, state)

    def _placing(self, params: Any, batch: Batch) -> Any:
        """Calls all functions of the task that place arrays."""
        return self.sum_batch(params, batch, None), self.generation and self.first_tokens(params, batch)

    def first_tokens(self, params: Any, batch: Batch) -> Any:
        """The first logits and state of generation, and those after token 0 in each row."""
        logits_BV, state = self.begin_generation(params, batch)
        return logits_BV, self.extend_generation(params, state, jnp.zeros(_rows(batch), jnp.int32))

    def _call_model(self, function: Callable[..., Any], params: Any, *arguments: Any) -> Any:
        """The result of a function of the model that does not train it."""
        with of_flax.reading():
            given, _ = self._readable(params)
            if self.is_module:
                given.eval()
            return function(given, *arguments)

    def specs(self) -> dict[str, Spec]:
        """The array's name and the logical axes of each input."""
        return {name: Spec.from_text(one.spec) for name, one in self.inputs.items()}

    def batch(self, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes of a batch of `rows` rows."""
        return {
            name: jax.ShapeDtypeStruct((rows, *one.shape[1:]), jnp.dtype(one.dtype))
            for name, one in self.inputs.items()
        }

    def divisor(self, batch: Batch) -> jax.Array:
        """The number by which the sums over a batch are divided."""
        return self.count(batch) if self.count else jnp.asarray(_rows(batch), jnp.float32)

    def totals(self, params: Any, batch: Batch) -> dict[str, jax.Array]:
        """The totals of one batch. Evaluation adds up those of all batches."""
        if self.evaluate:
            return self._call_model(self.evaluate, params, batch)
        sums, state = self.sum_batch(params, batch, None, training=False)
        if state:
            raise InputError(
                f"task {self.name}: sums() changes the model's state, and nothing says how it is evaluated\n"
                "  fix   Task(..., evaluate=totals): (parameters, batch) -> a dict of sums, with loss and count"
            )
        return sums._asdict() | {"count": self.divisor(batch)}

    def evaluation_values(self, totals: Mapping[str, float]) -> dict[str, float]:
        """The values that evaluation logs, from its totals. The lowest `eval_loss` is the best."""
        if self.scores:
            return self.scores(totals)
        count = max(totals["count"], 1.0)
        return {f"eval_{name}": total / count for name, total in totals.items() if name != "count"}

    def means(self, sums: Any, count: jax.Array, step: jax.Array) -> dict[str, jax.Array]:
        """The metrics of a step, from its sums."""
        if self.metrics:
            return self.metrics(sums, count, step)
        return {name: total / count for name, total in sums._asdict().items()} | {"count": count}


def _describe(tree: Any) -> dict[str, str]:
    """The path of each array of nested dicts, and its dtype and shape."""
    flat: dict[Any, Any] = flatten_dict(tree)
    return {".".join(path): f"{x.dtype}{list(x.shape)}" for path, x in flat.items()}


def _rows(batch: Batch) -> int:
    return next(iter(batch.values())).shape[0]
