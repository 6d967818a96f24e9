"""Attention kernels against each other, on one device. Splash runs in Pallas's interpreter."""

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspmd_lm import config
from gspmd_lm.config import from_values, value_at
from gspmd_lm.model.kernels import attention, common, distances
from gspmd_lm.model.parts import windows

B, T, N, K, H = 2, 128, 4, 2, 128


def settings(**changes):
    usual = {"layers": 1, "embed": 8, "heads": N, "kv_heads": K, "head_dim": H, "mlp": 8, "vocab": 8, "context": T}
    return from_values(config.ModelConfig, usual | changes)


PLAIN = settings()
RELATIVE = config.RelativePositions(ranges=16, distance=24)
SINKS = np.array([[0.5, -1.0, 2.0, 1.0]], np.float32)
attend = jax.jit(attention.attend, static_argnames="cfg")


@pytest.fixture(scope="module")
def qkv():
    rng = np.random.default_rng(0)
    return tuple(rng.standard_normal((B, T, heads, H), np.float32) for heads in (N, K, K))


@pytest.fixture(scope="module")
def segments():
    return np.where(np.arange(T) < [[40], [100]], 1, 2)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "changes",
    [{}, {"attention.softcap": 5.0}, {"attention.window": 20, "attention.scale": 0.2}, {"attention.mask": "full"}],
)
def test_splash_computes_what_xla_does(qkv, segments, packed, changes):
    segments, cfg = segments if packed else None, settings(**changes)

    @jax.jit
    def both(*qkv):
        plain = attention.attend(*qkv, segments, cfg)
        return attention.fused(*qkv, SINKS, segments, kernel="splash", cfg=cfg), plain

    np.testing.assert_allclose(*both(*qkv), atol=2e-5)


@pytest.mark.parametrize(
    "cfg",
    [
        *(pytest.param(cfg, marks=pytest.mark.slow) for cfg in (PLAIN, settings(**{"attention.mask": "full"}))),
        settings(**{"attention.sinks": True, "attention.window": 20}),
        settings(**{"attention.sinks": True, "attention.mask": "full"}),
    ],
)
def test_splash_has_the_gradients_of_xla(qkv, segments, cfg):
    weigh = np.cos(np.arange(B * T * N * H, dtype=np.float32)).reshape(B, T, N, H)

    def of(function):
        total = lambda *arguments: (function(*arguments) * weigh).sum()  # noqa: E731
        return jax.jit(jax.grad(total, argnums=(0, 1, 2, 3)))(*qkv, SINKS)

    got = of(lambda *a: attention.fused(*a, segments, kernel="splash", cfg=cfg))
    want = of(lambda *qkv: attention.attend(*qkv[:3], segments, cfg, own_RN=qkv[3]))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-4)
    assert np.asarray(got[3]).any() == cfg.attention.sinks


@pytest.mark.parametrize("changes", [{}, {"attention.softcap": 5.0}, {"positions": "alibi"}, {"attention.sinks": True}])
def test_scores_in_bfloat16_differ_by_its_rounding_alone(qkv, segments, changes):
    rounded, exact = (
        attend(*qkv, segments, cfg=settings(**{"attention.scores_dtype": dtype}, **changes),
               own_RN=SINKS if "attention.sinks" in changes else None)
        for dtype in ("bfloat16", "float32")
    )  # fmt: skip
    assert 0 < np.abs(np.asarray(rounded) - np.asarray(exact)).max() < 0.1  # scores of up to 4 have steps of 2^-6
    assert rounded.dtype == exact.dtype


@pytest.mark.parametrize(("dtype", "hlo_dtype"), [("bfloat16", "bf16"), ("float32", "f32")])
def test_scores_have_the_dtype_that_is_asked_for(qkv, dtype, hlo_dtype):
    """They are the largest arrays of attention, and its first product."""
    q, k, v = (x.astype(jnp.bfloat16) for x in qkv)
    text = (
        jax.jit(lambda: attention.attend(q, k, v, None, settings(**{"attention.scores_dtype": dtype})))
        .lower()
        .as_text()
    )
    assert re.findall(r"stablehlo.dot_general.*-> tensor<[x\d]*x(\w+)>", text) == [hlo_dtype, "bf16"]


@pytest.mark.parametrize(
    ("kernel", "asked", "words"),
    [
        ("cudnn", {"segments": True, "capability": (8, 0)}, "packing: documents on compute capability 8.0"),
        ("cudnn", {"attention.chunk": 64, "capability": (8, 6)}, "attention.chunk: 64 on compute capability 8.6"),
        ("cudnn", {"attention.softcap": 30.0}, "attention.softcap: 30"),
        ("cudnn", {"compute_dtype": "float32"}, "compute_dtype: float32"),
        ("cudnn", {"head_dim": 264}, "head_dim: 264 (only multiples of 8 up to 256)"),
        ("cudnn", {"head_dim": 136, "capability": (8, 9)}, "head_dim: 136 (only multiples of 8 up to 128)"),
        ("cudnn", {"head_dim": 256, "capability": (10, 0)}, "head_dim: 256 (only multiples of 8 up to 128)"),
        ("cudnn", {"head_dim": 100}, "head_dim: 100"),
        ("cudnn", {"seq": 1}, "data.seq: 1 (only 2 and more)"),
        ("cudnn", {"capability": (7, 5)}, "compute capability 7.5 (only 8.0 and newer)"),
        ("cudnn", {"capability": (0, 0)}, "GPUs without CUDA"),
        ("cudnn", {"positions": "alibi"}, "positions: alibi"),
        ("cudnn", {"attention.scores_dtype": "bfloat16"}, "attention.scores_dtype: bfloat16"),
        ("splash", {"attention.scores_dtype": "bfloat16"}, "attention.scores_dtype: bfloat16"),
        ("splash", {"positions": "alibi"}, "positions: alibi"),
        ("cudnn", {"attention.relative_positions": RELATIVE}, "attention.relative_positions"),
        ("splash", {"attention.relative_positions": RELATIVE}, "attention.relative_positions"),
        ("splash", {"seq": 100}, "seq: 100"),
    ],
)
def test_what_a_kernel_cannot_do_is_named(kernel, asked, words):
    usual = {"seq": 256, "segments": False, "capability": (9, 0)}
    rows = usual | {name: value for name, value in asked.items() if name in usual}
    cfg = settings(**{name: value for name, value in asked.items() if name not in usual})
    assert common.unsupported_setting(kernel, PLAIN, **usual) is None
    assert words in common.unsupported_setting(kernel, cfg, **rows)
    assert common.unsupported_setting("xla", cfg, **rows) is None


KERNELS = {
    "`cudnn` on 8.x (A100)": ("cudnn", (8, 0)),
    "`cudnn` on 9.0 (H100, H200)": ("cudnn", (9, 0)),
    "`cudnn` on 10.0 (B200)": ("cudnn", (10, 0)),
    "`splash`": ("splash", ()),
}
ASKED = {
    "`data.packing: documents`, and padding": {"segments": True},
    "`model.attention.window`": {"attention.window": 64},
    "`model.attention.chunk`": {"attention.chunk": 128},
    "`model.attention.sinks`": {"attention.sinks": True},
    "`model.attention.softcap`": {"attention.softcap": 30.0},
    "`model.positions: alibi`": {"positions": "alibi"},
    "`model.attention.mask: full`": {"attention.mask": "full"},
    "`model.attention.relative_positions`, `model.attention.relative_vectors`, `model.windows`": {
        "attention.relative_positions": RELATIVE
    },
    "`model.head_dim` above 128, up to 256": {"head_dim": 256},
    "`model.head_dim` that is not a multiple of 8": {"head_dim": 100},
    "`model.compute_dtype: float32`": {"compute_dtype": "float32"},
    "`model.attention.scores_dtype: bfloat16`": {"attention.scores_dtype": "bfloat16"},
    "`data.seq` that is not a multiple of 128": {"seq": 100},
}


def test_the_table_of_what_fused_kernels_can_do_is_in_the_documents():
    def can(kernel, capability, asked):
        rows = {"seq": 256, "segments": False} | {k: v for k, v in asked.items() if k in ("seq", "segments")}
        cfg = settings(**{k: v for k, v in asked.items() if k not in rows})
        return "no" if common.unsupported_setting(kernel, cfg, capability=capability, **rows) else "yes"

    lines = [["asked", *KERNELS], ["---"] * (len(KERNELS) + 1)]
    lines += [[asked, *(can(*kernel, changes) for kernel in KERNELS.values())] for asked, changes in ASKED.items()]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines).replace("| ---", "|---").replace("--- |", "---|")
    text = (Path(__file__).parents[3] / "docs" / "rules_reference.md").read_text(encoding="utf-8")
    assert table in text, table


def test_vectors_of_distances_are_a_bias_that_a_fused_kernel_computes_too():
    """16 x 16 patches in one window. The fused kernel runs in Pallas's interpreter."""
    side, heads, rng = 16, 2, np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, side**2, heads, 8)).astype(np.float32) for _ in range(3))
    height, width = (rng.standard_normal((2 * side - 1, 8)).astype(np.float32) for _ in range(2))
    cfg = settings(
        heads=heads, kv_heads=heads, head_dim=8, **{"attention.mask": "full"}, positions="none", context=side**2,
        patches=config.Patches(image=side, size=1, class_row=False, pool="mean"),
        windows=config.Windows(size=side, vectors=True),
    )  # fmt: skip
    row, column = np.divmod(np.arange(side**2), side)
    apart = [place[:, None] - place + side - 1 for place in (row, column)]
    bias = sum(np.einsum("BTNH,TSH->BNTS", q, table[at]) for table, at in zip((height, width), apart, strict=True))
    weights = np.exp(np.einsum("BTNH,BSNH->BNTS", q, k) * 8**-0.5 + bias)
    want = np.einsum("BNTS,BSNH->BTNH", weights / weights.sum(-1, keepdims=True), v)
    in_one = settings(**{name: value_at(cfg, name) for name in ("heads", "kv_heads", "head_dim", "attention.mask",
                                                                "context")},
                      **{"attention.scale": 8**-0.5})  # fmt: skip

    @jax.jit
    def both(q, k, v, *vectors):
        plain = windows.attend_in_windows(q, k, v, cfg, None, vectors_RH=vectors)
        q, k = windows.with_places(q, k, vectors, jnp.arange(side)[None], 8**-0.5)
        return plain, attention.fused(q, k, v, SINKS, kernel="splash", cfg=in_one)

    for got in both(q, k, v, height, width):
        np.testing.assert_allclose(got, want, atol=2e-5)


@pytest.mark.parametrize(
    ("kernel", "capability", "changes", "reason"),
    [
        ("splash", (), {"size": 16}, None),
        ("splash", (), {"size": 14}, "model.windows"),
        ("cudnn", (9, 0), {"size": 16}, None),
        ("cudnn", (9, 0), {"size": 16, "head_dim": 68}, "model.head_dim: 68, 100 with places (only multiples of 8"),
        ("cudnn", (8, 0), {"size": 16, "head_dim": 104}, "model.head_dim: 104, 136 with places (only multiples of 8"),
    ],
)
def test_what_fused_kernels_can_do_in_windows(kernel, capability, changes, reason):
    cfg = settings(
        heads=2, kv_heads=2, head_dim=changes.get("head_dim", 64), **{"attention.mask": "full"}, positions="none",
        context=256,
        patches=config.Patches(image=16, size=1, class_row=False, pool="mean"),
        windows=config.Windows(size=changes["size"], vectors=True),
    )  # fmt: skip
    found = common.unsupported_setting(kernel, cfg, seq=256, segments=False, capability=capability)
    assert found == reason or (reason and found and found.startswith(reason))


def test_alibi_slopes_are_those_of_the_paper_and_of_bloom():
    np.testing.assert_allclose(attention.alibi_slopes(8), 0.5 ** np.arange(1, 9))
    np.testing.assert_allclose(attention.alibi_slopes(6), [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3])


@pytest.mark.parametrize(
    ("seq", "head_dim", "itemsize", "block"),
    [(8192, 128, 2, 1024), (8192, 64, 2, 1024), (2048, 256, 2, 512), (2048, 128, 4, 512), (1536, 128, 2, 768),
     (640, 128, 2, 640), (128, 512, 2, 128)],
)  # fmt: skip
def test_splash_blocks_divide_the_sequence_and_fit_the_memory(seq, head_dim, itemsize, block):
    assert common.splash_block(seq, head_dim, itemsize) == block


@pytest.mark.parametrize("changes", [{}, {"attention.softcap": 5.0}])
def test_the_backward_pass_keeps_no_scores_of_the_forward_pass(qkv, segments, changes):
    attend = functools.partial(attention.attend, segments_BT=segments, cfg=settings(**changes))
    _, back = jax.eval_shape(functools.partial(jax.vjp, attend), *qkv)
    kept = [leaf for leaf in jax.tree.leaves(back) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert sorted(leaf.size for leaf in kept) == sorted(x.size for x in qkv)


def test_attention_with_vectors_of_distances_adds_what_they_give_to_each_product(qkv, segments):
    """The products and what is added to them are scaled alike, once."""
    relative = config.RelativeVectors(ranges=16, distance=24)
    cfg = settings(
        **{"attention.mask": "full", "attention.qkv_bias": True, "attention.relative_vectors": relative},
        kv_heads=N,
        positions="none",
    )
    (q, k, v), places = qkv, np.arange(T)[None]
    k, v = (np.repeat(x, N // K, axis=2) for x in (k, v))
    own_RN = np.random.default_rng(1).standard_normal((2 * 16 * H, N), np.float32)
    products_BNTS = np.einsum("BTNH,BSNH->BNTS", q, k)
    by_distance = jax.jit(lambda *given: distances.scores_by_distance(*given, places, places, relative))
    scores_BNTS = H**-0.5 * (products_BNTS + by_distance(q, k, own_RN))
    weights_BNTS = np.exp(scores_BNTS) * (np.asarray(segments)[:, :, None] == np.asarray(segments)[:, None])[:, None]
    weights_BNTS /= weights_BNTS.sum(-1, keepdims=True)
    want = np.einsum("BNTS,BSNH->BTNH", weights_BNTS, v)
    for dtype, atol in (("float32", 2e-5), ("bfloat16", 6e-2)):
        given = (x.astype(dtype) for x in (q, k, v))
        found = np.asarray(attend(*given, segments, cfg=cfg, own_RN=own_RN.astype(dtype)))
        assert found.dtype == dtype
        np.testing.assert_allclose(found.astype("float32"), want, atol=atol)


def test_scores_with_what_is_added_have_the_derivatives_of_autodiff(qkv):
    (q, k, _), rng = qkv, np.random.default_rng(3)
    k = np.repeat(k, N // K, axis=2)
    added, weigh = (rng.standard_normal((len(q), N, T, T), np.float32) for _ in range(2))

    def plain(q, k, added):
        return 0.3 * (jnp.einsum("BTNH,BSNH->BNTS", q, k) + added)

    def hand_written(q, k, added):
        return attention.with_added(0.3, jnp.dtype("float32"), q, k, added)

    @functools.partial(jax.jit, static_argnums=0)
    def with_gradients(scores, *given):
        found, back = jax.vjp(scores, *given)
        return found, *back(weigh)

    pairs = zip(*(with_gradients(scores, q, k, added) for scores in (hand_written, plain)), strict=True)
    for one, other in pairs:
        np.testing.assert_allclose(one, other, atol=1e-5 * np.abs(other).max())


def test_a_bias_by_distance_is_that_of_the_range_that_holds_it(qkv, segments):
    """Of 16 ranges, 8 are of keys after the query, and 4 of each side hold one distance."""
    cfg = settings(**{"attention.mask": "full", "attention.relative_positions": RELATIVE})
    bias_RN = np.random.default_rng(1).standard_normal((16, N), np.float32)
    ahead = np.array([-200, -24, -23, -8, -4, -3, -1, 0, 1, 3, 4, 8, 23, 24, 200])
    wanted = [7, 7, 7, 5, 4, 3, 1, 0, 9, 11, 12, 13, 15, 15, 15]
    ranges = jax.jit(distances.ranges, static_argnums=1)
    np.testing.assert_array_equal(ranges(ahead, cfg), wanted)
    causal = settings(**{"attention.relative_positions": RELATIVE})
    np.testing.assert_array_equal(
        ranges(np.array([3, 0, -7, -8, -11, -23, -24, -99]), causal), [0, 0, 7, 8, 10, 15, 15, 15]
    )
    q, k, v = qkv
    places = np.arange(T)
    bias_NTS = np.moveaxis(bias_RN[ranges(places[None] - places[:, None], cfg)], -1, 0)
    scores_BNTS = np.einsum("BTNH,BSNH->BNTS", q, np.repeat(k, N // K, axis=2)) * H**-0.5 + bias_NTS
    seen_BTS = np.asarray(segments)[:, :, None] == np.asarray(segments)[:, None]
    weights_BNTS = np.where(seen_BTS[:, None], np.exp(scores_BNTS), 0)
    weights_BNTS /= weights_BNTS.sum(-1, keepdims=True)
    want = np.einsum("BNTS,BSNH->BTNH", weights_BNTS, np.repeat(v, N // K, axis=2))
    got = attend(q, k, v, segments, cfg=cfg, own_RN=bias_RN)
    np.testing.assert_allclose(got, want, atol=2e-5)


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        ({}, jnp.bfloat16),
        ({"attention.relative_positions": RELATIVE, "positions": "none"}, jnp.bfloat16),
        ({"positions": "alibi", "attention.softcap": 5.0}, jnp.float32),
    ],
)
def test_no_mask_as_large_as_the_scores_is_kept_before_a_loop_on_gpus(qkv, segments, changes, dtype, monkeypatch):
    """The results and gradients are those of other platforms, where XLA does better with the mask as it is."""
    cfg, (q, *kv) = settings(**changes), (x.astype(dtype) for x in qkv)
    table = None
    if "attention.relative_positions" in changes:
        table = np.random.default_rng(1).standard_normal((RELATIVE.ranges, N), np.float32)

    def loss(q):
        def layer(x, _):
            return attention.attend(x, *kv, segments, cfg, own_RN=table), None

        return jax.lax.scan(layer, q, length=2)[0].astype(jnp.float32).var()

    def kept():
        """The largest array that is made before the loops, as a share of the scores, and the gradients."""
        traced = jax.jit(jax.grad(loss)).trace(q)
        before = (out.aval for eqn in traced.jaxpr.eqns if eqn.primitive.name != "scan" for out in eqn.outvars)
        made = [aval.size for aval in before if aval.shape[-2:] == (T, T)]
        return max(made) / (B * N * T * T), np.asarray(traced.lower().compile()(q), np.float32)

    share, wanted = kept()
    monkeypatch.setattr(attention, "platform", lambda: "gpu")
    share_on_gpu, found = kept()
    assert share == 1 and share_on_gpu < 1
    np.testing.assert_allclose(found, wanted, atol=1e-6 if dtype == jnp.float32 else 3e-2 * np.abs(wanted).max())
