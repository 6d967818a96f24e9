"""Mixtures of experts on one device, against a dense reference in which every expert computes every token."""

import dataclasses
import functools
import importlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from gspmd_lm.config import with_values
from gspmd_lm.foresight import hlo
from gspmd_lm.hardware import target as targets
from gspmd_lm.model.block import BLOCK_INPUT, RESIDUAL
from gspmd_lm.model.cache import empty_cache
from gspmd_lm.model.compose import mlp_part
from gspmd_lm.model.families import decode, extend, init
from gspmd_lm.model.kernels import grouped as kernels
from gspmd_lm.model.kernels import grouped_gpu
from gspmd_lm.model.kernels.grouped import grouped, outer
from gspmd_lm.model.moe import balance_experts
from gspmd_lm.model.tokens import Tokens
from gspmd_lm.sharding import quantised
from gspmd_lm.sharding.matmuls import gathered
from gspmd_lm.sharding.partial_sums import reduced

SIZES = {"experts.count": 8, "experts.per_token": 3, "experts.mlp": 16, "init_std": 0.5}
GROUPS = {"experts.groups": 4, "experts.groups_per_token": 2}
VARIANTS = {
    "softmax": {},
    "as scored": {"experts.normalized_weights": False, "feed_forward.bias": True, "experts.router_bias": True},
    "sigmoid in groups": {"experts.routing": "sigmoid", "experts.scale": 2.5, "experts.balance": "bias", **GROUPS},
    "softmax in groups": {
        **GROUPS,
        "feed_forward.kind": "plain",
        "experts.shared_mlp": 24,
        "experts.shared_gate": True,
    },
    "dropping": {"experts.capacity_factor": 0.5, "feed_forward.bias": True},
    "weighted input": {
        "experts.weighted_input": True,
        "experts.routing": "sigmoid",
        "experts.normalized_weights": False,
        "feed_forward.bias": True,
    },
}


def alone(module, x):
    """What a layer of experts adds to the stream, and what its router did."""
    with gathered(x, BLOCK_INPUT, RESIDUAL) as in_BTD:
        y, tokens = module(in_BTD, Tokens())
    return reduced(y, BLOCK_INPUT, RESIDUAL), tokens.routed


@pytest.mark.parametrize("rows", [1, 3, 200])
@pytest.mark.parametrize("kernel", ["blocks", pytest.param("megablox", marks=pytest.mark.slow)])
def test_grouped_products(rows, kernel, monkeypatch):
    """Experts without rows, and rows after those of the last expert, are among them. megablox is interpreted."""
    if kernel == "megablox":
        monkeypatch.setattr(kernels, "_blocks", lambda x, w, s, how, _: kernels._megablox(x, w, s, "FD" in how, True))
        monkeypatch.setattr(kernels, "_outer_blocks", lambda x, y, s: kernels._megablox_outer(x, y, s, True))
    rng = np.random.default_rng(rows)
    x, w = rng.normal(size=(rows, 5)).astype("f4"), rng.normal(size=(4, 5, 3)).astype("f4")
    dy = rng.normal(size=(rows, 3)).astype("f4")
    cuts = sorted(rng.integers(0, rows + 1, 3))
    sizes = np.diff([0, cuts[0], cuts[0], cuts[1], cuts[2]]).astype("i4")  # expert 1 has none
    expert = np.repeat(np.arange(4), sizes)
    y, dx, dw = np.zeros((rows, 3)), np.zeros((rows, 5)), np.zeros((4, 5, 3))
    for row, e in enumerate(expert):
        y[row], dx[row] = x[row] @ w[e], w[e] @ dy[row]
        dw[e] += np.outer(x[row], dy[row])

    @jax.jit
    def found(x, w, dy, sizes):
        return grouped(x, w, sizes), grouped(dy, w, sizes, transposed=True), outer(x, dy, sizes)

    with jax.default_matmul_precision("highest"):
        for got, want in zip(found(x, w, dy, sizes), (y, dx, dw), strict=True):
            np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "columns"), [(20, 48), (200, 304), (200, 4)])
def test_grouped_products_of_triton(rows, columns, monkeypatch):
    """In Pallas's interpreter, against the loop that CPUs run, which the test above compares with plain products.

    The interpreter has tiles of any width, a GPU has none below 16. Tiles reach past the last of 48 and 304 columns.
    """

    def checked(kernel, x, y, *args):
        assert min(x.shape[-1], *y.shape[1:]) >= grouped_gpu.LEAST
        return kernel(x, y, *args)

    for name in ("product", "outer"):
        monkeypatch.setattr(grouped_gpu, name, functools.partial(checked, getattr(grouped_gpu, name)))
    assert grouped_gpu.takes(jnp.bfloat16, 96, columns) and not grouped_gpu.takes(jnp.bfloat16, 96, 24)
    for side in (16, 176):  # rows of int8 in tiles of 16 inner columns would be multiplied twice
        assert grouped_gpu.takes(jnp.bfloat16, 96, side, rows=jnp.dtype(jnp.int8)) == (side == 16)  # which is padded
    rng = np.random.default_rng(rows)
    x, w, dy = (jnp.asarray(rng.normal(size=n), jnp.bfloat16) for n in ((rows, 96), (4, 96, columns), (rows, columns)))
    sizes = jnp.asarray([rows // 2, 0, rows // 3, 1], jnp.int32)  # and rows of no expert behind them
    kept = jnp.arange(rows)[:, None] < sizes.sum()
    close = functools.partial(np.testing.assert_allclose, rtol=1e-2, atol=0.3)  # bfloat16, of sums up to 60
    for x_MD, transposed in ((x, False), (dy, True)):
        found = kernels._triton(x_MD, w, (), sizes, transposed, x.dtype, interpret=True)
        wanted = grouped(x_MD, w, sizes, transposed=transposed).astype("float32")
        close(jnp.where(kept, found, 0).astype("float32"), wanted)
    found = kernels._triton_outer(x, dy, sizes, interpret=True)
    close(found.astype("float32"), outer(x, dy, sizes).astype("float32"))


@pytest.mark.parametrize(("kernel", "dtype"), [
    ("blocks", jnp.int8), ("blocks", jnp.float8_e4m3fn), ("tpu", jnp.int8),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("gpu", jnp.int8), ("tpu", jnp.float8_e4m3fn), ("gpu", jnp.float8_e4m3fn))),
])  # fmt: skip
def test_grouped_products_of_8_bits(kernel, dtype, monkeypatch):
    """Of rows and weights of 8 bits, of rows that are wider, and of weights whose scales are in the rows already.

    Kernels are interpreted. A tile of a TPU's, here of 16 x 16 x 8, reaches past the last of 40 columns.
    """
    rows, D, F = 50, 40, 16
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(rows, D)).astype("f4"), rng.normal(size=(3, D, F)).astype("f4")
    sizes = np.array([20, 0, 25], np.int32)
    small_x = jax.jit(lambda x: quantised.quantise(x, "MD", "D", dtype))(x)
    small_w = jax.jit(lambda w: quantised.at_rest(w, (-2,), dtype))(w)
    exact_x = np.asarray(small_x.values, "f8") * np.asarray(small_x.scale)[:, None]
    exact_w = np.asarray(small_w.values, "f8") * np.asarray(small_w.scale)[:, None]
    expert = np.repeat([0, 2, 2], [20, 25, rows - 45])
    if kernel != "blocks":
        monkeypatch.setattr(kernels, "_tile", lambda *_: (16, 16, 8))
        monkeypatch.setattr(kernels, "platform", lambda: kernel)
        monkeypatch.setattr(kernels, "device_kind", lambda: "NVIDIA H100" if kernel == "gpu" else "TPU v5")
        monkeypatch.setattr(grouped_gpu, "takes", lambda *_, rows: True)
        for name in ("_eight_bits", "_triton"):
            monkeypatch.setattr(kernels, name, functools.partial(getattr(kernels, name), interpret=True))

    @jax.jit
    def products(small_x, small_w, x, sizes):
        back = grouped(small_x, small_w.values.mT, sizes, transposed=True)
        return grouped(small_x, small_w, sizes), grouped(x, small_w, sizes), back

    with jax.default_matmul_precision("highest"):
        both, wide, back = jax.device_get(products(small_x, small_w, x, sizes))
    values_w = np.asarray(small_w.values, "f8")
    for found, of_x, of_w in ((both, exact_x, exact_w), (wide, x, exact_w), (back, exact_x, values_w)):
        wanted = np.einsum("MD,MDF->MF", of_x, of_w[expert])
        wanted[45:] = 0
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())
    plain = np.einsum("MD,MDF->MF", x, w[expert])[:45]
    error = np.linalg.norm(both[:45] - plain) / np.linalg.norm(plain)
    assert 0.003 < error < 2**0.5 * (0.02 if dtype == jnp.int8 else 0.04)  # that of two operands: test_quantised.py


MANY, WIDE, INT8, FP8 = grouped_gpu.MANY_ROWS, jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("kind", "rows", "operands", "multiplied"), [
    ("H100", MANY, (WIDE, INT8), (WIDE, WIDE)), ("H100", MANY, (WIDE, FP8), (WIDE, WIDE)),
    ("H100", MANY, (FP8, FP8), (WIDE, WIDE)), ("H100", MANY, (INT8, INT8), (INT8, INT8)),
    ("H200", MANY - 1, (WIDE, INT8), (WIDE, INT8)), ("H200", MANY - 1, (FP8, FP8), (WIDE, FP8)),
    ("B200", MANY, (WIDE, FP8), (WIDE, FP8)), ("B200", MANY, (FP8, FP8), (FP8, FP8)),
    ("A100", MANY, (WIDE, INT8), (WIDE, INT8)), ("A100", 1, (WIDE, FP8), (WIDE, WIDE)),
])  # fmt: skip
def test_what_a_kernel_of_a_gpu_multiplies(kind, rows, operands, multiplied, transposed, monkeypatch):
    """So many rows for each of two experts, with weights of 8 bits that are widened before the kernel, or in it."""
    monkeypatch.setattr(kernels, "platform", lambda: "gpu")
    monkeypatch.setattr(kernels, "device_kind", lambda: f"NVIDIA {kind}")
    seen, product = [], grouped_gpu.product
    monkeypatch.setattr(
        grouped_gpu, "product", lambda x, w, *args: seen.append((x.dtype, w.dtype)) or product(x, w, *args)
    )
    x = np.zeros((2 * rows, 64), operands[0])
    x = x if operands[0] == WIDE else quantised.Quantised(x, np.ones(len(x), np.float32), (-1,), WIDE)
    w = np.zeros((2, 128, 64) if transposed else (2, 64, 128), operands[1])
    w = quantised.Quantised(w, np.ones((2, 128), np.float32), (-2,), WIDE)
    y = jax.eval_shape(functools.partial(grouped, transposed=transposed), x, w, np.full(2, rows, np.int32))
    assert seen == [multiplied] and (y.shape, y.dtype) == ((2 * rows, 128), WIDE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "dtype"), [("v5p:2x2x1", jnp.int8), ("v6e:2x2", jnp.int8), ("tpu7x:2x2x1", jnp.float8_e4m3fn),
                          ("h100:1", jnp.int8), ("h100:1", jnp.float8_e4m3fn),
                          ("b200:1", jnp.float8_e4m3fn)])  # fmt: skip
def test_grouped_products_of_8_bits_compile(target, dtype, monkeypatch):
    """For hardware that is not here. Weights and rows of 8 bits are read as they are, and wider rows with weights of 8
    bits too, so that no copy of the weights is made. Rows of float8 are widened on Hopper, which has no faster way, and
    weights with them where there are many rows."""
    where = targets.parse(target)
    mesh = jax.sharding.Mesh(targets.devices(where)[:1], ("one",))
    one = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    monkeypatch.setattr(kernels, "platform", lambda: where.platform)
    monkeypatch.setattr(kernels, "device_kind", lambda: where.chip.kinds[0])
    (D, F, E), wide = (256, 384, 4), jnp.bfloat16

    def made(dtypes, transposed, M=512):
        shapes = (M, D), (M,), (E, F, D) if transposed else (E, D, F), (E, F), (E,)
        kinds = (dtypes[0], jnp.float32, dtypes[1], jnp.float32, jnp.int32)
        args = [jax.ShapeDtypeStruct(shape, kind, sharding=one) for shape, kind in zip(shapes, kinds, strict=True)]

        def product(x, scale_M, w, scale_EF, sizes):
            rows = quantised.Quantised(x, scale_M, (-1,), wide) if x.dtype == dtype else x
            return grouped(rows, quantised.Quantised(w, scale_EF, (-2,), wide), sizes, transposed)

        name = "cuda" if where.platform == "gpu" else where.platform
        with jax.set_mesh(mesh):
            lowered = jax.jit(product).trace(*args).lower(lowering_platforms=(name,))
        module = hlo.parse(lowered.compile().as_text())
        (call,) = (
            one for one in module.instructions if one.opcode == "custom-call" and one.shape.arrays[0].dtype == "bf16"
        )
        arrays = [operand.shape.arrays[0] for operand in call.operands]
        return [array.dtype for array in arrays if len(array.dimensions) > 1 and array.dimensions[-1] in (D, F)][:2]

    narrow = {"int8": "s8", "float8_e4m3fn": "f8e4m3fn"}[jnp.dtype(dtype).name]
    for transposed in (False, True):
        widened = target == "h100:1" and dtype != jnp.int8
        assert made((dtype, dtype), transposed) == ["bf16" if widened else narrow, narrow]
        assert made((wide, dtype), transposed) == ["bf16", narrow]
    if target == "h100:1":
        assert made((wide, dtype), False, E * grouped_gpu.MANY_ROWS) == ["bf16", "bf16"]


@pytest.mark.parametrize(("M", "E", "most"), [(4096, 8, 1.25), (64, 8, 1.25), (2, 128, 1.0), (16, 128, 1.0)])
def test_blocks_compute_little_more_than_the_chosen_experts(M, E, most):
    """Rows in all blocks, against rows; and a handful of rows reads the weights of no more experts than rows."""
    block, (expert, _, _) = jax.jit(kernels._cut)(np.zeros((M, 4), np.float32), np.full(E, M // E))
    assert block * len(expert) <= most * M
    assert len(expert) <= M


@pytest.mark.parametrize(
    ("kind", "sizes", "tile", "share", "read"),
    [
        ("TPU v5", (1024, 1, 1024, 1024), (256, 1024, 1024), 1, 1024 * (1024 + 1024 + 1024)),
        ("TPU v5", (1024, 5, 1024, 1024), (256, 1024, 1024), 0.5, 1024 * (2 * 1024 + 5 * 1024 + 1024)),
        ("TPU v5", (1024, 1, 4096, 1500), (256, 4096, 512), 1500 / 1536, 1024 * (3 * 4096 + 1500) + 4096 * 1536),
        ("TPU v5", (1024, 3, 6144, 2048), (512, 1024, 1024), 0.5, 6144 * (2 * 2048 + 4 * 2048) + 1024 * 2048),
        ("TPU v5", (128, 1, 64, 1024), (128, 64, 1024), 1, 128 * (64 + 1024) + 64 * 1024),
        ("TPU v6 lite", (1024, 1, 4096, 2048), (256, 4096, 1024), 1, 1024 * (2 * 4096 + 2048) + 4096 * 2048),
        ("TPU7x", (2048, 3, 9216, 4096), (1024, 1024, 2048), 0.5, 9216 * (2 * 4096 + 4 * 4096) + 2048 * 4096),
    ],
)  # fmt: skip
def test_what_megablox_computes_and_reads_in_vain_is_counted(kind, sizes, tile, share, read):
    """Weights are read once where a tile has all inner columns, and otherwise for each of 4 visited tiles of rows."""
    rows, _, inner, columns = sizes
    assert kernels._tile(rows, inner, columns, 2, kind) == tile
    assert kernels.work(*sizes, 2, kind) == (share, 2 * read)


def test_float32_fills_a_tile_with_half_as_many_columns():
    for kind in ("TPU v5", "TPU v6 lite", "TPU7x"):
        assert kernels._tile(1024, 2048, 2048, 4, kind)[1] == 2048
    assert kernels._tile(1024, 4096, 2048, 4, "TPU v5") == (512, 512, 512)


def test_an_outer_product_reads_its_rows_for_each_tile_of_its_result():
    share, read = kernels.work(1024, 5, 2048, 3072, 2, "TPU v5", outer=True)
    assert (share, read) == (0.5, 2 * (2 * 3 * 2048 * (1024 + 1024) + 5 * 2048 * 3072))


def test_the_tile_is_that_of_the_devices(monkeypatch):
    """What is traced for a chip has the tile that is priced for it."""
    gmm, seen = importlib.import_module("jax.experimental.pallas.ops.tpu.megablox.gmm"), []
    monkeypatch.setattr(gmm, "gmm", lambda *args, **_: seen.append(args[4]) or np.zeros((1024, 2048)))
    monkeypatch.setattr(gmm, "tgmm", lambda *args, **_: seen.append(args[4]))
    monkeypatch.setattr(kernels, "device_kind", lambda: "TPU v6 lite")
    x, w, dy = (np.zeros(shape, np.float32) for shape in ((1024, 4096), (2, 4096, 2048), (1024, 2048)))
    jax.eval_shape(functools.partial(kernels._megablox, transposed=False), x, w, np.array([512, 512]))
    jax.eval_shape(kernels._megablox_outer, x, dy, np.array([512, 512]))
    assert seen == [(256, 4096, 512), (256, 512, 1024)]


def drawn(module, x_BTD):
    """Random weights and biases of a layer, drawn on the host."""
    made = jax.eval_shape(lambda: module.init(jax.random.key(0), x_BTD, method=alone))
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda w: rng.normal(0, 0.5, w.shape).astype("f4"), nn.unbox(made)["params"])


def scored(p, x_BTD, cfg):
    logits = x_BTD @ p["router"] + p.get("router_bias", 0)
    return jax.nn.softmax(logits) if cfg.moe.routing == "softmax" else jax.nn.sigmoid(logits)


def shares(p, x_BTD, cfg):
    """[B, T, E]: 0 for an expert that is not chosen, 1 for one that is and drops the token, 2 for one that computes."""
    choice = np.asarray(jax.jit(scored, static_argnums=2)(p, x_BTD, cfg)) + p.get("balance_bias", 0)
    share, capacity = np.zeros(choice.shape), np.ceil(cfg.moe.capacity_factor * choice.shape[1] * 3 / 8) or np.inf
    for b in range(len(choice)):
        counts = np.zeros(cfg.num_experts)
        for t in range(choice.shape[1]):
            one = choice[b, t].reshape(cfg.moe.groups, -1)
            best = np.sort(one)[:, ::-1][:, : 2 if cfg.moe.routing == "sigmoid" else 1].sum(1)
            allowed = np.isin(np.arange(cfg.moe.groups), np.argsort(-best)[: cfg.moe.groups_per_token])
            chosen = np.argsort(-np.where(allowed[:, None], one, -np.inf).reshape(-1))[: cfg.moe.per_token]
            counts[chosen] += 1
            share[b, t, chosen] = 1 + (counts[chosen] <= capacity)
    return share


def reference(p, x_BTD, cfg, share):
    """The dense form: every expert computes every token, and is weighted with 0 where it is not chosen."""
    weights = jnp.where(share > 0, scored(p, x_BTD, cfg), 0)
    if cfg.moe.normalized_weights:
        weights /= weights.sum(-1, keepdims=True)
    weights = cfg.moe.scale * jnp.where(share > 1, weights, 0)
    names = [name for name in ("gate", "up") if f"w_{name}" in p]
    hidden = 1.0
    for i, name in enumerate(names):
        one = jnp.einsum("btd,edf->btef", x_BTD, p[f"w_{name}"]) + p.get(f"b_{name}", 0)
        hidden *= one if i else jax.nn.silu(one)
    y = jnp.einsum("btef,efd->bted", hidden, p["w_down"]) + p.get("b_down", 0)
    y = jnp.einsum("bted,bte->btd", y, weights)
    if "shared" in p:
        shared = jax.nn.silu(x_BTD @ p["shared"]["w_up"]) @ p["shared"]["w_down"]
        y += jax.nn.sigmoid(x_BTD @ p["shared_gate"])[..., None] * shared
    return y


@pytest.mark.long
@pytest.mark.parametrize(
    "variant", ["sigmoid in groups", "dropping", *(pytest.param(name, marks=pytest.mark.slow) for name in
                                                   ("softmax", "as scored", "softmax in groups"))]
)  # fmt: skip
def test_values_and_gradients(small, variant):
    cfg = small(**SIZES, **VARIANTS[variant]).model
    module, rng = mlp_part(cfg)(), np.random.default_rng(0)
    x, dy = rng.normal(size=(2, 2, 16, cfg.embed)).astype("f4")
    params = drawn(module, x)

    @functools.partial(jax.jit, static_argnums=0)
    def with_gradients(function, params, x, dy):
        y, pull = jax.vjp(function, params, x)
        return y, pull(dy)

    with jax.default_matmul_precision("highest"):
        share = shares(params, x, cfg)
        assert cfg.moe.capacity_factor == 0 or (share == 1).any()
        y, got = with_gradients(lambda p, x: module.apply({"params": p}, x, method=alone)[0], params, x, dy)
        want, wanted = with_gradients(lambda p, x: reference(p, x, cfg, share), params, x, dy)
    np.testing.assert_allclose(y, want, atol=2e-5, rtol=2e-5)
    wanted[0].pop("balance_bias", None)
    for path, one in jax.tree_util.tree_leaves_with_path(wanted):
        other = got
        for key in path:
            other = other[getattr(key, "key", getattr(key, "idx", None))]
        np.testing.assert_allclose(other, one, atol=1e-4, rtol=1e-4, err_msg=str(path))


def test_a_token_whose_weight_is_zero_gives_no_gradient_and_no_nan(small):
    """A router so sure of one expert that the scores of the other two chosen ones are exactly 0."""
    cfg = small(**SIZES).model
    module, x = mlp_part(cfg)(), np.random.default_rng(0).normal(size=(1, 4, cfg.embed)).astype("f4")
    params = drawn(module, x)
    params["router"] *= np.float32(1e4)
    logits = x @ params["router"]
    assert (np.sort(np.exp(logits - logits.max(-1, keepdims=True)))[..., -2] == 0).any()
    found = jax.jit(jax.grad(lambda p: module.apply({"params": p}, x, method=alone)[0].sum()))(params)
    assert all(np.isfinite(dw).all() for dw in jax.tree.leaves(found)) and np.asarray(found["w_down"]).any()


@pytest.mark.long
def test_penalties_and_loads(small):
    """Equal loads cost experts.balance_weight, whatever the router is sure of; rows are balanced by themselves."""
    cfg = small(
        **{
            "experts.count": 4,
            "experts.per_token": 1,
            "experts.balance": "row",
            "experts.balance_weight": 0.5,
            "experts.z_loss": 0.1,
        }
    ).model
    module, x = mlp_part(cfg)(), np.eye(cfg.embed, dtype=np.float32)[np.array([[0, 1, 2, 3], [0, 0, 0, 0]])]
    params = drawn(module, x) | {"router": 9 * np.eye(cfg.embed, 4, dtype=np.float32)}
    p = float(np.exp(9) / (np.exp(9) + 3))
    log_z = float(np.log(np.exp(9) + 3))

    def routed(module, params):
        return jax.jit(lambda params: module.apply({"params": params}, x, method=alone)[1])(params)

    row = routed(module, params)
    np.testing.assert_allclose(row.load_C, [5, 1, 1, 1])
    np.testing.assert_allclose(row.penalty_B, [0.5 + 0.1 * log_z**2, 0.5 * 4 * p + 0.1 * log_z**2], rtol=1e-5)
    with_bias = params | {"balance_bias": np.zeros(4, np.float32)}
    both = routed(mlp_part(with_values(cfg, {"experts.balance": "bias_row"}))(), with_bias)
    np.testing.assert_array_equal(both.penalty_B, row.penalty_B)
    both = routed(mlp_part(with_values(cfg, {"experts.balance": "batch", "experts.z_loss": 0.0}))(), params)
    share = np.array([(0.25 * (p + (1 - p)) + p) / 2] + [(0.25 + (1 - p) / 3) / 2] * 3)
    np.testing.assert_allclose(both.penalty_B, [0.5 * 4 * (share * [5 / 8, 1 / 8, 1 / 8, 1 / 8]).sum()] * 2, rtol=1e-5)


def moved_by_loads(frozen, cfg):
    """The biases of three layers with two experts each, after a step."""
    loads = np.array([[3.0, 1.0], [2.0, 2.0], [0.0, 4.0]], np.float32)
    return jax.jit(lambda frozen, loads: balance_experts(frozen, loads, cfg))(frozen, loads)


@pytest.mark.long
def test_the_bias_moves_against_the_load(small):
    """Layers after a dense one, in a pattern of two that does not divide them."""
    kinds = {"layer_pattern": ("full", "nope"), "experts.dense_layers": 1, "layers": 4}
    cfg = small(
        **{"experts.count": 2, "experts.per_token": 1, "experts.balance": "bias", "experts.balance_rate": 0.25}, **kinds
    ).model
    params = nn.unbox(jax.eval_shape(lambda: init(cfg, jax.random.key(0))))
    assert set(params) >= {"dense_layers", "layers", "layer_3"} and "block_1" in params["layers"]
    zeros = {"mlp": {"balance_bias": np.zeros((1, 2), np.float32)}}
    frozen = {"layers": {"block_0": zeros, "block_1": zeros}}
    frozen["layer_3"] = {"mlp": {"balance_bias": np.zeros(2, np.float32)}}
    moved = moved_by_loads(frozen, cfg)
    np.testing.assert_array_equal(moved["layers"]["block_0"]["mlp"]["balance_bias"], [[-0.25, 0.25]])
    np.testing.assert_array_equal(moved["layers"]["block_1"]["mlp"]["balance_bias"], [[0, 0]])
    np.testing.assert_array_equal(moved["layer_3"]["mlp"]["balance_bias"], [0.25, -0.25])
    cfg = dataclasses.replace(cfg, frozen=("layers",))
    still = moved_by_loads(frozen, cfg)
    assert not any(np.asarray(bias).any() for bias in jax.tree.leaves(still["layers"]))
    np.testing.assert_array_equal(still["layer_3"]["mlp"]["balance_bias"], [0.25, -0.25])


@pytest.mark.long
def test_the_bias_of_every_second_layer_moves(small):
    """Loads are of the layers with experts alone: layers 1, 3 and 5 of turns of four, of which the second is cut."""
    kinds = {"layer_pattern": ("full", "full", "full", "nope"), "experts.step": 2, "layers": 6}
    cfg = small(
        **{"experts.count": 2, "experts.per_token": 1, "experts.balance": "bias", "experts.balance_rate": 0.25}, **kinds
    ).model
    flat = flatten_dict(nn.unbox(jax.eval_shape(lambda: init(cfg, jax.random.key(0)))))
    paths = {path for path in flat if path[-1] == "balance_bias"}
    assert {path[:-2] for path in paths} == {("layers", "block_1"), ("layers", "block_3"), ("layer_5",)}
    moved = moved_by_loads(unflatten_dict({path: np.zeros(flat[path].shape, np.float32) for path in paths}), cfg)
    np.testing.assert_array_equal(moved["layers"]["block_1"]["mlp"]["balance_bias"], [[-0.25, 0.25]])
    np.testing.assert_array_equal(moved["layers"]["block_3"]["mlp"]["balance_bias"], [[0, 0]])
    np.testing.assert_array_equal(moved["layer_5"]["mlp"]["balance_bias"], [0.25, -0.25])


@pytest.mark.slow
def test_a_cache_counts_the_dense_layers(small):
    """One token after others, with a cache, as without one."""
    kinds = {"layers": 3, "experts.dense_layers": 1, "layer_pattern": ("sliding", "full"), "attention.window": 3}
    cfg = small(**SIZES, **kinds).model
    params = nn.unbox(jax.jit(lambda: init(cfg, jax.random.key(0)))())
    tokens = jax.random.randint(jax.random.key(1), (2, 8), 0, cfg.vocab)
    places = jnp.tile(jnp.arange(8), (2, 1))
    batch = {"tokens": tokens, "positions": places, "row": jnp.arange(2)}
    whole = jax.jit(lambda p: decode(cfg, p, batch)[0])(params)

    @jax.jit
    def in_two(params):
        rows = {"row": batch["row"], "start": jnp.zeros(2, jnp.int32)}
        first = {"tokens": tokens[:, :7], "positions": places[:, :7], "slot": jnp.array(0)}
        cache = extend(cfg, params, first | rows, empty_cache(cfg, 2, 8))[3]
        last = {"tokens": tokens[:, 7:], "positions": places[:, 7:], "slot": jnp.array(7)}
        return extend(cfg, params, last | rows, cache)[0]

    np.testing.assert_allclose(in_two(params)[:, 0], whole[:, 7], atol=2e-5, rtol=2e-4)
