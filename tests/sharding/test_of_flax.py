"""Parameters of flax as their models hold them: with few names, with none, and read in every way that flax has."""

import dataclasses
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import gspmd_lm
from gspmd_lm import InputError
from gspmd_lm.sharding import of_flax, placement, rules_file
from tests import own_models
from tests.courses import begun
from tests.quick import QUICK

ANNOTATED = nn.with_logical_partitioning
NORMAL = nn.initializers.lecun_normal()


class Partly(nn.Module):
    """Layers of flax as published models have them: with all names, with those of flat kernels, and with none."""

    kernel: tuple[str, ...] = ("width", "wide")

    @nn.compact
    def __call__(self, x_BPW):
        y = nn.LayerNorm()(nn.Dense(256, kernel_init=ANNOTATED(NORMAL, self.kernel))(x_BPW))
        # As in flax's lm1b: the kernel is initialised flat, with two names, and has three dimensions.
        y += nn.MultiHeadDotProductAttention(4, kernel_init=ANNOTATED(NORMAL, ("wide", "head")))(y)
        layer = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        return nn.Dense(own_models.LABELS)(layer()(y, None)[0]).mean(1)


class Layer(nn.Module):
    """A layer that is scanned, of which nothing has a name."""

    @nn.compact
    def __call__(self, x, _):
        return nn.Dense(256)(x), None


def partly(**names):
    return dataclasses.replace(own_models.task("partly", Partly(**names)), vocabulary=None)


FSDP = {"mesh": {"fsdp": 2}, "rules": {"batch": "fsdp"}, "weights": {"width": "fsdp", "wide": "fsdp"}}


def layout(task, raw):
    quick = {**raw, "compiler_options": {"cpu": QUICK}}
    return rules_file.from_dict(quick, "layout.yaml", vocabulary=task.names)


def test_dimensions_without_names_stay_whole_with_one_warning(caplog):
    task = partly()
    assert "warning" not in gspmd_lm.dry_run(task, layout(task, {"mesh": {"data": 1}}))
    page = gspmd_lm.dry_run(task, layout(task, FSDP | {"weights": {"wide": "fsdp"}}))
    head, table = page.split("\nweights ")
    assert head.startswith("warning: task partly: parameters with dimensions that have no logical axis (15, 1.6 MB).")
    assert "\n  MultiHeadDotProductAttention_0.query.kernel: wide=256 x head=4 x 64\n" in head
    assert "\n  LayerNorm_0.scale: 256\n" in head and "\n  Dense_1.kernel: 256 x 8\n" in head
    assert "\n  ScanLayer_0.Dense_0.kernel: 2 x 256 x 256\n" in head and head.count("warning") == 1
    assert "\n  Dense_0.kernel" not in head
    for path, axes, at_rest in (
        ("Dense_0.kernel", "width wide", "wide/fsdp"),
        ("MultiHeadDotProductAttention_0.query.kernel", "wide head _2", "wide/fsdp"),
        ("ScanLayer_0.Dense_0.kernel", "_0 _1 _2", "replicated"),
    ):
        (row,) = [line for line in table.splitlines() if line.startswith(path)]
        assert axes in row and at_rest in row


@pytest.mark.long
def test_a_model_with_few_names_has_the_losses_of_one_device():
    task, found = partly(), []
    rows = np.random.default_rng(0).normal(size=(32, own_models.POSITIONS, own_models.WIDTH)).astype(np.float32)
    labels = np.arange(32, dtype=np.int32) % own_models.LABELS
    for raw in ({"mesh": {"data": 1}}, FSDP | {"weights": {"wide": "fsdp"}}):
        step = gspmd_lm.build(task, layout(task, raw))
        program, state, losses = step.compile(step.lower_train()), begun(step), []
        for _ in range(2):
            state, metrics = program(state, jax.device_put({"rows": rows, "labels": labels}, step.batch_shardings))
            losses.append(float(metrics["loss"]))
        found.append(losses)
    assert abs(found[0][0] - found[0][1]) > 0.1
    np.testing.assert_allclose(*found, rtol=0, atol=1e-5)


def test_alike_layers_share_a_line_of_the_warning():
    def init(key):
        return nnx.state(nnx.Sequential(*(nnx.Linear(128, 128, rngs=nnx.Rngs(key)) for _ in range(3))), nnx.Param)

    task = own_models.task("alike", None)
    task = dataclasses.replace(task, vocabulary=None, init=init, sums=lambda *_: jnp.zeros(32))
    page = gspmd_lm.dry_run(task, layout(task, {"mesh": {"data": 2}, "rules": {"batch": "data"}}))
    assert "alike: parameters with dimensions that have no logical axis (6, 198.1 kB)" in page
    assert "\n  layers.*.kernel: 128 x 128, 3 of them\n" in page and "\n  layers.*.bias: 128, 3 of them\n" in page


@pytest.mark.parametrize("raw", [{"mesh": {"data": 1}}, FSDP])
def test_more_names_than_dimensions_are_refused_in_words(raw):
    with pytest.raises(InputError) as error:
        layout(partly(kernel=("width", "wide", "head")), raw)
    assert "Dense_0.kernel: 3 names, width, wide, head, for 2 dimensions, 128 x 256\n  fix   " in str(error.value)


TABLE, IDS = np.arange(12, dtype=np.float32).reshape(4, 3), np.array([2, 1])


@pytest.mark.parametrize(
    "read",
    [
        lambda w: w[IDS], lambda w: w[0], lambda w: w[1:, 0], lambda w: w[...], lambda w: w.get_value(),
        lambda w: w.get_value(index=0), lambda w: w.value, lambda w: w.T, lambda w: w.at[0].set(1),
        lambda w: w.astype("int32"), lambda w: w.sum(0), lambda w: w.take(IDS, axis=0), lambda w: 1 + w,
        lambda w: w @ jnp.ones(3), lambda w: jnp.ones(4) @ w, lambda w: -w, lambda w: next(iter(w)),
        lambda w: jnp.take(w, IDS, axis=0), lambda w: jnp.einsum("ab->ba", w), lambda w: jnp.asarray(w),
    ],
)  # fmt: skip
def test_a_variable_of_nnx_is_placed_whole_however_it_is_read(read):
    names = gspmd_lm.Vocabulary(axes={"row": ("", ""), "width": ("", "")}, weights={"w": ""}, activations={})
    one = rules_file.from_dict({"mesh": {"data": 1}}, "", vocabulary=names)
    with of_flax.reading():
        like = nnx.State({"w": nnx.Param(TABLE, out_sharding=("row", "width"))})

    def function(params):
        with of_flax.reading():
            return read(of_flax.readable(like, params)["w"])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # flax's, of `.value`
        recorded = placement.record(one, function, {"w": TABLE})
        np.testing.assert_array_equal(function({"w": jnp.asarray(TABLE)}), read(nnx.Param(jnp.asarray(TABLE))))
    assert recorded.used == {"w"} and "rules w: row width" in str(recorded.program)


def test_an_array_of_nnx_outside_of_tasks_is_read_as_flax_does():
    w = nnx.Param(jnp.asarray(TABLE))
    with of_flax.reading():
        assert w[0].shape == (3,) and w.T.shape == (3, 4) and w.shape == (4, 3)
    with pytest.raises(AttributeError):
        _ = w.transposed


class Dropping(nnx.Module):
    """A module that draws random numbers, keeps averages and has a constant beside its variables."""

    def __init__(self, rngs):
        self.layer, self.norm = nnx.Linear(4, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs)
        self.drop, self.scale = nnx.Dropout(0.5, rngs=rngs), jnp.arange(1.0, 5)

    def __call__(self, x):
        return self.drop(self.norm(self.layer(x))) * self.scale


@pytest.mark.long
def test_a_module_of_nnx_draws_keeps_state_and_is_evaluated_without_either():
    task = gspmd_lm.Task(
        name="dropping", init=lambda key: Dropping(nnx.Rngs(key)), optimizer=optax.sgd(0.1),
        sums=lambda model, batch, key: model(batch["x"]).sum(1),
        inputs={"x": gspmd_lm.Input((8, 4), "float32", "x: batch w")},
    )  # fmt: skip
    assert task.draws and task.is_module and task.changed_paths == {"batch_stats.norm.mean", "batch_stats.norm.var"}
    params = nn.unbox(task.initial(jax.random.key(0)))
    batch = {"x": jnp.asarray(np.random.default_rng(0).normal(size=(8, 4)), jnp.float32)}
    summed = jax.jit(task.sum_batch, static_argnums=3)
    (one, state), (same, _), (other, _) = (summed(params, batch, jax.random.key(n), True) for n in (1, 1, 2))
    assert one.loss == same.loss != other.loss
    kernel, mean = params["params"]["layer"]["kernel"], state["batch_stats"]["norm"]["mean"]
    np.testing.assert_allclose(mean, 0.01 * (batch["x"] @ kernel).mean(0), atol=1e-6)
    totals, made = jax.jit(task.totals)(params, batch), Dropping(nnx.Rngs(0))
    made.layer.kernel[...] = kernel
    made.eval()
    assert totals["loss"] == pytest.approx(float(made(batch["x"]).sum()), rel=1e-5)


@pytest.mark.slow
def test_few_steps_of_a_module_are_trained_and_evaluated(tmp_path):
    task = dataclasses.replace(
        own_models.task("module", None), vocabulary=None, train=gspmd_lm.config.Train(steps=2, eval_every=2),
        init=lambda key: nnx.Sequential(nnx.Linear(128, 8, rngs=nnx.Rngs(key)), nnx.BatchNorm(8, rngs=nnx.Rngs(key))),
        sums=lambda model, batch, key: optax.losses.squared_error(model(batch["rows"])[:, 0, 0], batch["labels"]),
    )  # fmt: skip
    shape = task.inputs["rows"].shape
    batch = {"rows": np.ones(shape, np.float32), "labels": np.zeros(len(np.ones(shape)), np.int32)}
    gspmd_lm.train(task, "none", tmp_path / "run", data=lambda step: batch, held_out=[batch])
    assert "eval_loss" in (tmp_path / "run" / "metrics.jsonl").read_text()
