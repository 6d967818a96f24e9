"""What the backward pass waits for, counted by hand, and beside what compiled programs hold."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from gspmd_lm.foresight import bounds
from gspmd_lm.foresight.propagation import Reading, read_step
from gspmd_lm.hardware.chips import CHIPS
from tests.foresight.plain_models import LAYOUTS, MODELS, train_step

ROWS, WIDTH, WIDE, LAYERS = 32, 16, 64, 4
HIDDEN_BYTES, X_BYTES = 4 * ROWS * WIDE, 4 * ROWS * WIDTH
X, UP, DOWN = np.ones((ROWS, WIDTH), "f4"), np.ones((WIDTH, WIDE), "f4"), np.ones((WIDE, WIDTH), "f4")
STACKS = np.ones((LAYERS, WIDTH, WIDE), "f4"), np.ones((LAYERS, WIDE, WIDTH), "f4")


def saved(loss, *weights, x=X):
    def gradients(weights, x):
        return jax.grad(lambda weights: (loss(x, *weights) ** 2).sum())(weights)

    return read_step(jax.make_jaxpr(gradients)(weights, x)).saved_bytes


def layer(x, up, down):
    return jnp.exp(jnp.exp(x @ up)) @ down


def test_of_a_chain_of_elementwise_operations_one_value_waits():
    """jax keeps all of them. The first is enough, since the others can be made from it again."""
    after = np.ones((WIDTH, WIDTH), "f4")
    assert saved(lambda x, up, down, w: layer(x, up, down) @ w, UP, DOWN, after) == HIDDEN_BYTES + X_BYTES


def test_a_narrower_value_waits_instead():
    def loss(x, up, down):
        hidden = (x @ up).astype(jnp.bfloat16)
        return jnp.sin(hidden.astype(jnp.float32)) @ down

    assert saved(loss, UP, DOWN) == HIDDEN_BYTES / 2


def test_arguments_and_what_is_made_of_them_do_not_wait():
    assert saved(lambda x, up: jnp.exp(x) @ jnp.exp(up), UP) == 0
    assert saved(lambda x, up: jnp.exp(x) @ up, UP, x=X[0]) == 0


def test_what_is_read_at_the_turn_of_the_step_does_not_wait():
    """Nothing else is multiplied between the last matmul and the derivative of what follows."""
    assert saved(lambda x, up: jnp.exp(x @ up), UP) == 0
    assert saved(lambda x, up, down: jnp.exp(x @ up) @ down, UP, DOWN) == HIDDEN_BYTES


def loop(body):
    def loss(x, *weights):
        return jax.lax.scan(lambda x, weights: (body(x, *weights), None), x, weights)[0]

    return loss


def test_what_the_backward_pass_can_make_of_early_values_alone_waits_as_one():
    """Although three arrays go into it: one of them is made by a later matmul."""

    @jax.custom_vjp
    def scaled(x, *others):
        return x

    scaled.defvjp(lambda *values: (values[0], values), lambda values, dy: (dy * math.prod(values), None, None))

    def loss(x, up, beside, square, down):
        first, second = x @ up, jax.lax.stop_gradient(x @ beside)
        return scaled(first, second, jax.lax.stop_gradient(first @ square)) @ down

    weights = UP, UP, np.ones((WIDE, WIDE), "f4"), DOWN
    made = jax.make_jaxpr(lambda up: jax.grad(lambda up: (loss(X, up, *weights[1:]) ** 2).sum())(up))(UP)
    assert read_step(made).saved_bytes == HIDDEN_BYTES


def test_a_loop_keeps_what_it_stacks():
    inputs = LAYERS * X_BYTES
    hidden = LAYERS * HIDDEN_BYTES
    assert saved(loop(jax.checkpoint(layer)), *STACKS) == inputs
    assert saved(loop(layer), *STACKS) == inputs + 2 * hidden  # what each exp gives is its derivative

    def named(x, up, down):
        return jnp.tanh(checkpoint_name(x @ up, "hidden")) @ down

    policy = jax.checkpoint_policies.save_only_these_names("hidden")
    assert saved(loop(jax.checkpoint(named, policy=policy)), *STACKS) == inputs + hidden
    offloaded = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=["hidden"], offload_src="device",
        offload_dst="pinned_host",
    )  # fmt: skip
    assert saved(loop(jax.checkpoint(named, policy=offloaded)), *STACKS) == inputs + hidden


def test_layers_written_one_after_the_other_keep_their_inputs():
    """If they are computed again, of all but the last one: its input is made of the layers before."""

    def loss(x, ups, downs):
        for up, down in zip(ups, downs, strict=True):
            x = jax.checkpoint(layer)(x, up, down)
        return x

    assert saved(loss, *STACKS) == (LAYERS - 1) * X_BYTES


def test_each_microbatch_keeps_its_own():
    def loss(x, up, down):
        return jnp.exp(x @ up) @ down

    def step(weights, batches):
        def accumulate(total, x):
            return jax.tree.map(jnp.add, total, jax.grad(lambda w: (loss(x, *w) ** 2).sum())(weights)), None

        return jax.lax.scan(accumulate, weights, batches)[0]

    read = read_step(jax.make_jaxpr(step)((UP, DOWN), np.stack([X, X, X])))
    assert read.saved_bytes == 3 * HIDDEN_BYTES


def test_a_device_keeps_its_shard():
    mesh = AbstractMesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)

    def at(like, *dims):
        return jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=NamedSharding(mesh, PartitionSpec(*dims)))

    def gradients(up, down, x):
        return jax.grad(lambda up, down: ((jnp.exp(x @ up) @ down) ** 2).sum(), argnums=(0, 1))(up, down)

    arguments = at(UP, None, "tensor"), at(DOWN, "tensor"), at(X, "data")
    with jax.sharding.use_abstract_mesh(mesh):
        found = read_step(jax.make_jaxpr(gradients)(*arguments), arguments)
    assert found.saved_bytes == HIDDEN_BYTES / 8
    weights = 4 * WIDTH * WIDE / 4
    assert found.held_bytes == X_BYTES / 2 + 2 * weights + 2 * weights  # what is read, and the gradients


def test_arguments_in_which_rows_are_looked_up_are_not_read():
    def program(table, ids, passed_on):
        return table[ids].sum(), passed_on

    made = jax.make_jaxpr(program)(np.ones((1000, 8), "f4"), np.arange(3, dtype="i4"), np.ones(500, "f4"))
    assert read_step(made).held_bytes == 3 * 4 + 4


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=() if name == "classifier" and layout == "tp" else pytest.mark.slow)
        for i, name in enumerate(MODELS) for j, layout in enumerate(LAYOUTS) if i % 2 != j % 2
    ],
)  # fmt: skip
def test_a_compiled_step_of_others_holds_no_less(name, layout):
    sizes, rules = LAYOUTS[layout]
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(tuple(sizes.values())), tuple(sizes),
                axis_types=(AxisType.Auto,) * len(sizes))  # fmt: skip
    jitted, arguments = train_step(name, rules, mesh)
    with jax.set_mesh(mesh):
        traced = jitted.trace(*arguments)
        held = traced.lower().compile().memory_analysis()
    found = read_step(traced.jaxpr, arguments, traced.out_info)
    # Temporaries may lie where results will be written.
    assert 0 < found.saved_bytes <= held.temp_size_in_bytes + held.output_size_in_bytes - held.alias_size_in_bytes
    assert found.held_bytes <= held.argument_size_in_bytes + held.output_size_in_bytes


def test_what_waits_is_no_part_of_the_floor_where_the_program_leaves_open_how_it_is_split():
    sure = Reading((), {}, {}, saved_bytes=8e9, held_bytes=1e9)
    left_open = dataclasses.replace(sure, unknown={"fft": 1})
    chip = CHIPS["h100"]
    floors = [bounds.program_bounds(chip, 8, reading).memory_s * chip.hbm_bytes_per_s for reading in (sure, left_open)]
    assert floors == pytest.approx([1e9 + 2 * 8e9, 1e9])
