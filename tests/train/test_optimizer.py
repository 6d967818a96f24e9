"""Update rules, schedules and the placement of their state, all chosen by logical axes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gspmd_lm import config as configs
from gspmd_lm.errors import InputError
from gspmd_lm.sharding.placement import Named
from gspmd_lm.sharding.shapes import pairs
from gspmd_lm.train import optimizer, state
from tests.courses import begun

NAMES = ["adamw", "adafactor", "lion", "muon"]


def updated(rule, gradients, params):
    """The first updates of a rule."""
    update, begun = rule.transform.update, rule.transform.init
    return jax.device_get(jax.jit(lambda g, p: update(g, begun(p), p)[0])(gradients, params))


def drawn(abstract, seed=0):
    """Random arrays of these shapes on the host, for which no program is compiled."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda like: rng.normal(size=like.shape).astype(np.float32), abstract)


def leaves(named, abstract):
    return [(leaf.path, leaf.axes, like.shape) for leaf, like in pairs(named, abstract)]


@pytest.mark.parametrize("name", NAMES)
def test_state_is_named_by_the_parameters_axes(name, small):
    """Each array of the state has the axes of its parameter, or those that its factors keep."""
    config = small(layers=3, kv_heads=2, **{"norm.kind": "layernorm", "norm.bias": True}, optimizer={"name": name})
    found = state.arrays(config)
    sizes = {"embed": 32, "mlp": 64, "vocab": 64, "layers": 3, "head_dim": 4, "positions": 32}
    flattened = {("layers", "heads"): (3, 32), ("layers", "kv_heads"): (3, 8)}
    for path, axes, shape in leaves(found.named_optimizer, found.optimizer):
        if "" in axes or not axes:
            continue
        want = flattened.get(axes) or tuple({"heads": 8, "kv_heads": 2}.get(axis, sizes.get(axis)) for axis in axes)
        assert shape == want, (path, axes, shape)
    factored = {(path, axes) for path, axes, _ in leaves(found.named_optimizer, found.optimizer)}
    if name == "adafactor":
        assert ("layers.attention.wk", ("layers", "kv_heads")) in factored
        assert ("layers.attention.wk", ("layers", "embed")) in factored
        assert ("layers.attention_norm.scale", ("layers", "embed")) in factored  # two dimensions, yet no matrix
    else:
        assert ("layers.attention.wk", ("layers", "embed", "kv_heads", "head_dim")) in factored


@pytest.mark.parametrize("name", ["adamw", "lion", "muon"])
def test_the_mean_of_gradients_is_kept_in_its_own_type(name, small):
    """Of all state, only the mean is narrower; what it changes in an update is no more than its rounding."""
    kept, taken = {}, {}
    for mu_dtype in (None, "bfloat16"):
        config = small(optimizer={"name": name, "mu_dtype": mu_dtype, "clip_norm": 0.0})
        found = state.arrays(config)
        kept[mu_dtype] = sum(like.size * like.dtype.itemsize for like in jax.tree.leaves(found.optimizer))
        narrow = [like for like in jax.tree.leaves(found.optimizer) if like.dtype == jnp.bfloat16]
        weights = sum(like.size for like in jax.tree.leaves(found.params))
        assert sum(like.size for like in narrow) == (weights if mu_dtype else 0)
        rule = optimizer.build_optimizer(config.optimizer, 10, found.named_params)
        params, gradients = drawn(found.params), drawn(found.params, seed=1)
        taken[mu_dtype] = jax.jit(lambda g, p, rule=rule: rule.update(g, rule.init(p), p)[0])(gradients, params)
    assert kept[None] - kept["bfloat16"] == 2 * weights
    far = jax.tree.map(lambda a, b: np.abs(a - b).max() / np.abs(a).max(), *jax.device_get([*taken.values()]))
    assert max(jax.tree.leaves(far)) < 2**-6


def test_adafactor_keeps_no_mean():
    with pytest.raises(InputError, match="adafactor keeps no mean of gradients"):
        configs.load("tiny", ["optimizer.name=adafactor", "optimizer.mu_dtype=bfloat16"])


def test_matrices_are_told_by_their_axes():
    assert optimizer.is_matrix(("layers", "embed", "heads", "head_dim"))
    assert optimizer.is_matrix(("vocab", "embed"))
    assert not optimizer.is_matrix(("layers", "embed"))  # a norm's scale
    assert not optimizer.is_matrix(("layers", "heads", "head_dim"))  # a bias
    assert not optimizer.is_matrix(("vocab",))


@pytest.mark.parametrize("name", NAMES)
def test_decay_is_of_matrices_only(name, small):
    config = small(
        **{"norm.kind": "layernorm", "norm.bias": True, "attention.qkv_bias": True},
        optimizer={"name": name, "weight_decay": 0.1, "warmup_steps": 0, "schedule": "constant"},
    )
    found = state.arrays(config)
    params = jax.tree.map(lambda like: np.ones(like.shape, np.float32), found.params)
    updates = updated(found, jax.tree.map(np.zeros_like, params), params)
    for leaf, update in zip(
        jax.tree.leaves(found.named_params, is_leaf=lambda x: isinstance(x, Named)),
        jax.tree.leaves(updates),
        strict=True,
    ):
        assert bool((np.asarray(update) < 0).all()) == optimizer.is_matrix(leaf.axes), leaf
        assert bool((np.asarray(update) == 0).all()) != optimizer.is_matrix(leaf.axes), leaf


@pytest.mark.long
def test_adafactor_treats_each_layer_as_it_would_alone(small):
    """Stacking layers changes no update: the third layer's is that of a model with this layer only."""
    options = dict(optimizer={"name": "adafactor", "weight_decay": 0.0, "clip_norm": 0.0})
    deep, shallow = state.arrays(small(layers=3, **options)), state.arrays(small(layers=1, **options))

    params, gradients = drawn(deep.params), drawn(deep.params, seed=1)
    third = lambda tree: tree | {"layers": jax.tree.map(lambda x: x[2:3], tree["layers"])}  # noqa: E731
    all_updates = updated(deep, gradients, params)
    alone = updated(shallow, third(gradients), third(params))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), third(all_updates), alone)


def test_muon_makes_each_layers_matrix_orthogonal(small):
    """Updates of one layer's projection, seen as [embed, heads * head_dim], have singular values near each other."""
    config = small(layers=2, optimizer={"name": "muon", "weight_decay": 0.0, "clip_norm": 0.0, "warmup_steps": 0})
    found = state.arrays(config)
    params = drawn(found.params)
    updates = updated(found, params, params)
    for layer in range(2):
        for name, shape in (("wq", (32, 32)), ("wo", (32, 32))):
            values = np.linalg.svd(
                np.asarray(updates["layers"]["attention"][name][layer]).reshape(shape), compute_uv=False
            )
            assert values.max() < 3 * values[:-4].min(), (name, values)  # five Newton-Schulz steps leave 0.7 to 1.2
    assert np.asarray(updates["embedding"]).std() > 0


@pytest.mark.long
def test_layouts_agree_on_the_updates_of_adafactor(small, built):
    """Its factors are sums over axes that a layout splits."""
    config = small(kv_heads=4, optimizer={"name": "adafactor"})

    def first_updates(layout):
        made = built(config, layout)
        before, homes = begun(made), made.state_shardings
        gradients = jax.device_put(drawn(made.arrays.params), homes.params)
        update = jax.jit(made.arrays.transform.update, out_shardings=(homes.params, homes.optimizer))
        return jax.device_get(update(gradients, before.optimizer, before.params))

    one, many = first_updates("single"), first_updates("fsdp2_tp4")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), many, one)


@pytest.mark.slow  # test_promise.py is about adamw
@pytest.mark.parametrize("name", ["adafactor", "muon", "lion"])
def test_layouts_agree_for_every_rule(name, small, course):
    config = small(kv_heads=4, optimizer={"name": name})
    one, many = (course(config, layout, steps=4, unroll=1).losses for layout in ("single", "fsdp2_tp4"))
    np.testing.assert_allclose(many, one, rtol=0, atol=2e-5)


def test_schedules(small):
    peak = 0.01
    rate = lambda step, steps=100, **options: float(  # noqa: E731
        optimizer.schedule(small(optimizer={"learning_rate": peak, "warmup_steps": 10, **options}).optimizer, steps)(
            step
        )
    )
    for name in ("warmup_cosine", "warmup_exponential", "warmup_stable_decay", "constant"):
        assert [rate(step, schedule=name) for step in (0, 4, 9)] == pytest.approx([0.001, 0.005, 0.01])
    assert rate(100, schedule="warmup_cosine", final_fraction=0.1) == pytest.approx(0.001)
    assert rate(55, schedule="warmup_cosine", final_fraction=0.0) == pytest.approx(0.005)
    assert rate(12, schedule="warmup_exponential", decay_rate=0.9) == pytest.approx(peak * 0.9**2)
    assert rate(79, schedule="warmup_stable_decay", decay_steps=20) == pytest.approx(peak)
    assert rate(100, schedule="warmup_stable_decay", decay_steps=20, final_fraction=0.0) == pytest.approx(0)
    assert rate(10**6, schedule="constant") == pytest.approx(peak)


def test_a_schedule_that_is_longer_than_the_run_is_a_warning():
    stable = configs.Optimizer(schedule="warmup_stable_decay", warmup_steps=5, decay_steps=6)
    cosine = configs.Optimizer(warmup_steps=5, decay_steps=6)
    assert optimizer.unfinished_schedule_note(stable, 11) == optimizer.unfinished_schedule_note(cosine, 5) == ""
    assert optimizer.unfinished_schedule_note(stable, 10) == (
        "warning: optimizer.warmup_steps=5 and a decay over 6 steps: more than train.steps=10, so the decay does not "
        "come to its end"
    )
    late = configs.Optimizer(schedule="constant", warmup_steps=5)
    assert "does not come to optimizer.learning_rate" in optimizer.unfinished_schedule_note(late, 4)


@pytest.mark.parametrize("wrong", [{"eps": 0.0}, {"eps": 1e-60}, {"b1": 1 - 1e-9}, {"b2": 1 - 1e-9}], ids=str)
def test_what_would_divide_by_zero_in_float32_is_refused(wrong):
    with pytest.raises(ValueError, match=r"should be (less|greater) than or equal to"):
        configs.Optimizer(**wrong)


def test_clipping_is_by_the_global_norm(small):
    config = small(optimizer={"clip_norm": 0.5, "weight_decay": 0.0, "warmup_steps": 0, "schedule": "constant"})
    found = state.arrays(config)
    gradients = jax.tree.map(lambda like: np.ones(like.shape, np.float32), found.params)
    params = jax.tree.map(np.zeros_like, gradients)
    update, begun = found.transform.update, found.transform.init
    _, new_state = jax.jit(lambda gradients, params: update(gradients, begun(params), params))(gradients, params)
    first_moment = jax.tree.leaves(jax.device_get(optax.tree.get(new_state, "mu")))
    assert np.sqrt(sum((x**2).sum() for x in first_moment)) == pytest.approx(0.5 * (1 - config.optimizer.b1), rel=1e-4)
