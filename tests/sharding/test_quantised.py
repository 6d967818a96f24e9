"""Products whose operands have 8 bits: what they compute, beside a plain reference, and that layouts change nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspmd_lm.foresight.equations import inner_jaxprs
from gspmd_lm.model.weights import first_output
from gspmd_lm.sharding import annotate, mesh, rules_file
from gspmd_lm.sharding.annotate import placed_by
from gspmd_lm.sharding.matmuls import gathered, project, unreduced_matmul
from gspmd_lm.sharding.partial_sums import reduced
from gspmd_lm.sharding.placement import MeshPlacement
from gspmd_lm.sharding.quantised import at_rest, quantise, whole
from tests.sharding.test_partial_sums import BLOCK_INPUT, HIDDEN, RESIDUAL, SPLITS, B, T, drawn, placement_of, weight

DTYPES = {"int8": (jnp.int8, jnp.int8), "fp8": (jnp.float8_e4m3fn, jnp.float8_e5m2)}  # forward, and of gradients


def rounded(x, axis, dtype, bits=1):
    """`x` in numpy, rounded to what 8 bits and a scale hold, and the scale, which is one along `axis`.

    The inverse of a scale has so many bits.
    """
    top = 127 if dtype == jnp.int8 else float(jnp.finfo(dtype).max)
    mantissa, exponent = np.frexp(top / np.abs(x).max(axis, keepdims=True))
    inverse = np.ldexp(np.floor(mantissa * 2**bits) / 2**bits, exponent)
    values = np.round(x * inverse) if dtype == jnp.int8 else (x * inverse).astype(dtype)
    return values.astype(np.float64) / inverse, 1 / inverse


def quantised(x, dtype):
    """The rows of a matrix in 8 bits, on the host."""
    return jax.device_get(jax.jit(lambda x: quantise(x, "AB", "B", dtype))(x))


def plain_product(x_MK, w_KN, dy_MN, dtypes):
    """A product and both of its gradients, of operands that are rounded and then multiplied in float64."""
    forward, backward = dtypes
    (x_MK, x_scale_M1), (w_KN, w_scale_1N) = rounded(x_MK, 1, forward), rounded(w_KN, 0, forward)
    for_x_MN, _ = rounded(dy_MN * w_scale_1N, 1, backward)
    for_w_MN, _ = rounded(dy_MN * x_scale_M1, 0, backward, bits=4)
    return x_MK @ w_KN, for_x_MN @ (w_KN / w_scale_1N).T, (x_MK / x_scale_M1).T @ for_w_MN


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_and_its_gradients_are_those_of_rounded_operands(dtype):
    (arrays, x_BTD), rng = drawn(("w_up", "w_down")), np.random.default_rng(1)
    up, down = (weight(name, array, matmul_dtype=dtype) for name, array in arrays.items())
    hidden_BTF, dy_BTF = (rng.normal(size=(B, T, up.array.shape[1])).astype(np.float32) for _ in range(2))

    def inward(x_BTD, w_DF):
        with gathered(x_BTD, BLOCK_INPUT, RESIDUAL) as in_BTD:
            return project(in_BTD, up.holding(w_DF))

    def outward(x_BTF, w_FD):
        return reduced(unreduced_matmul(x_BTF, down.holding(w_FD)), BLOCK_INPUT, RESIDUAL)

    for function, x, w, dy in ((inward, x_BTD, up.array, dy_BTF), (outward, hidden_BTF, down.array, x_BTD)):
        y, pull = jax.vjp(jax.jit(function), x, w)
        found = y, *pull(dy)
        rows = (one.reshape(-1, one.shape[-1]).astype(np.float64) for one in (x, w, dy))
        for got, want in zip(found, plain_product(*rows, DTYPES[dtype]), strict=True):
            np.testing.assert_allclose(got.reshape(want.shape), want, rtol=0, atol=1e-6 * np.abs(want).max())


@pytest.mark.parametrize("dtype", DTYPES)
def test_operands_of_8_bits_are_close_to_those_they_are_made_of(dtype):
    """Another product than that of the operands themselves, but by no more than their rounding."""
    x, (small, _) = np.random.default_rng(0).normal(size=(64, 512)).astype(np.float32), DTYPES[dtype]
    found = quantised(x, small)
    assert found.values.dtype == small and found.scale.shape == (64,)
    error = np.linalg.norm(found.values.astype(np.float32) * found.scale[:, None] - x) / np.linalg.norm(x)
    assert 0.003 < error < {"int8": 0.02, "fp8": 0.04}[dtype]


@pytest.mark.parametrize(("dtype", "top"), [(jnp.int8, 127), (jnp.float8_e4m3fn, 448), (jnp.float8_e5m2, 57344)])
def test_the_largest_value_becomes_the_largest_number(dtype, top):
    found = quantised(np.array([[top, 1.0]], np.float32), dtype)
    assert found.scale == 1 and found.values.astype(np.float32).tolist() == [[top, 1]]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_stays_so_and_zeros_stay_zeros(dtype, bad):
    x = np.array([[1.0, bad, 2.0], [0.0, 0.0, 0.0], [1.0, -127.0, 3.0]], np.float32)
    found = quantised(x, DTYPES[dtype][0])
    with np.errstate(invalid="ignore"):
        product = found.values.astype(np.float32).sum(1) * found.scale
    assert not np.isfinite(product[0]) and product[1] == 0
    np.testing.assert_allclose(product[2], -123, rtol=0.05)


@pytest.mark.parametrize("dtype", DTYPES)
def test_replicas_share_the_scales_of_what_they_add_to_the_gradient_of_a_weight(dtype):
    """Each has some of the tokens, and is rounded as all tokens are on one device."""
    x_RMN = np.random.default_rng(0).normal(size=(2, 4, 3)).astype(np.float32) * np.array([[[1]], [[5]]], np.float32)
    rules = rules_file.from_dict({"mesh": {"data": 2}, "rules": {"batch": "data"}}, "here.yaml")
    placement = MeshPlacement(rules, mesh.build(rules, jax.devices()[:2]), replicas="copies")

    def one(x_MN):
        return quantise(x_MN, "MN", "M", DTYPES[dtype][1], over_tokens=True)

    with placed_by(placement):
        found = jax.vmap(one, axis_name="copies")(x_RMN)
    with placed_by(None):
        wanted = one(x_RMN.reshape(8, 3))
    np.testing.assert_array_equal(found.scale, np.stack([wanted.scale] * 2))
    np.testing.assert_array_equal(np.float32(found.values).reshape(8, 3), np.float32(wanted.values))


def block(arrays, x_BTD, dtype):
    """The matmuls of attention and an MLP, side by side, with operands of 8 bits."""
    w = {name: weight(name, array, matmul_dtype=dtype) for name, array in arrays.items()}
    with gathered(x_BTD, BLOCK_INPUT, RESIDUAL) as in_BTD:
        heads = [project(in_BTD, w[name]) for name in ("wq", "wk", "wv")]
        hidden = annotate.shard(jnp.sin(project(in_BTD, w["w_up"])), HIDDEN)
    y = unreduced_matmul(heads[0] * heads[1] + heads[2], w["wo"]) + unreduced_matmul(hidden, w["w_down"])
    return x_BTD + reduced(y, BLOCK_INPUT, RESIDUAL)


NAMES = ("wq", "wk", "wv", "wo", "w_up", "w_down")
SOME = [("both axes of a weight", "int8")]
PAIRS = [(split, list(DTYPES)[i % 2]) for i, split in enumerate(SPLITS)]
MORE = [pytest.param(*pair, marks=pytest.mark.slow) for pair in PAIRS if pair not in SOME]


@pytest.mark.parametrize(("split", "dtype"), [*(pytest.param(*pair, marks=pytest.mark.long) for pair in SOME), *MORE])
def test_no_split_changes_how_an_operand_is_rounded(split, dtype):
    """One step of rounding would change a gradient by 1e-3."""
    arrays, x_BTD = drawn(NAMES)

    def both(arrays, x_BTD):
        y, pull = jax.vjp(lambda *inputs: block(*inputs, dtype), arrays, x_BTD)
        return y, pull(y)

    def run(placement):
        with placed_by(placement):
            return jax.jit(both)(arrays, x_BTD)

    def compare(found, wanted):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())

    jax.tree.map(compare, run(placement_of(SPLITS[split])), run(None))


@pytest.mark.parametrize(("split", "dtype"), [*((SOME[0][0], dtype) for dtype in DTYPES), *MORE])
def test_a_weight_that_rests_in_8_bits_is_multiplied_as_the_numbers_that_it_stands_for(split, dtype):
    """Forward, without a derivative; in matmuls, and whole where it is no matmul's."""
    arrays, x_BTD = drawn(NAMES)

    @jax.jit
    def rounded_at_rest(arrays):
        return {name: at_rest(w, tuple(range(-w.ndim, first_output(axes_of(name)) - w.ndim)), DTYPES[dtype][0])
                for name, w in arrays.items()}  # fmt: skip

    small = jax.device_get(rounded_at_rest(arrays))
    exact = {name: np.asarray(one.values, np.float32) * np.expand_dims(one.scale, one.over)
             for name, one in small.items()}  # fmt: skip

    def run(placement, arrays):
        with placed_by(placement):
            y = jax.jit(lambda arrays, x_BTD: block(arrays, x_BTD, ""))(arrays, x_BTD)
            return y, jax.jit(lambda array: whole(weight("wq", array)))(arrays["wq"])

    wanted = run(None, exact)
    for placement in (None, placement_of(SPLITS[split])):
        for found, want in zip(run(placement, small), wanted, strict=True):
            np.testing.assert_allclose(found, want, rtol=0, atol=1e-5 * np.abs(want).max())


def axes_of(name):
    return weight(name, None).axes


def rounds(jaxpr):
    """How many arrays a program rounds."""
    own = sum(equation.primitive.name == "round" for equation in jaxpr.eqns)
    return own + sum(rounds(inner) for equation in jaxpr.eqns for inner in inner_jaxprs(equation.params))


def test_an_input_is_quantised_once_for_all_weights_that_it_is_multiplied_with():
    """For wq, wk, wv and w_up; what wo and w_down read, and each weight, are quantised too."""
    program = jax.make_jaxpr(lambda *inputs: block(*inputs, "int8"))(*drawn(NAMES)).jaxpr
    assert rounds(program) == 1 + 2 + len(NAMES)
