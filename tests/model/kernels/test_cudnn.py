"""What cuDNN's attention is given, and what is made of what it gives. Its calls are computed on the CPU.

They are computed by plain products as the kernels do it: from what they are given, and no more of the result is written
than a document has.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from einops import rearrange, repeat
from jax._src.cudnn import fused_attention_stablehlo as kernels
from jax.interpreters import mlir
from test_context import arrays, both, placement, settings

from benchmarks import on_device
from gspmd_lm import config
from gspmd_lm.errors import InputError
from gspmd_lm.model.kernels import attention, blocks, context, documents
from gspmd_lm.model.parts.chunks import in_chunks
from gspmd_lm.model.tokens import Tokens
from gspmd_lm.sharding.annotate import placed_by

CAUSAL = kernels.MaskType.CAUSAL, kernels.MaskType.PADDING_CAUSAL
SINKS = np.array([[0.5, -1.0, 2.0, 1.0]], np.float32)


def forward(scale, mask, window, q, k, v, _, *packed):
    at, keys_at, exist, keys_exist = where(q, k, *packed[:4])
    s, seen = scores(scale, mask, window, flat(q)[at], wide(k, q)[keys_at], exist, keys_exist)
    sums = jax.nn.logsumexp(jnp.where(seen, s, -jnp.inf), -1)
    out = jnp.einsum("dnts,dsnh->dtnh", shares(s, seen, sums), wide(v, q)[keys_at])
    return in_rows(out, at, exist, q), jnp.where(exist[:, None], sums, jnp.nan)


def backward(scale, mask, window, q, k, v, _, *others):
    """From the sums and the result that it is given."""
    *packed, sums, out, dout = others
    at, keys_at, exist, keys_exist = where(q, k, *packed[:4])
    q_, out, dout, k_, v_ = *(flat(x)[at] for x in (q, out, dout)), *(wide(x, q)[keys_at] for x in (k, v))
    s, seen = scores(scale, mask, window, q_, k_, exist, keys_exist)
    p, off = shares(s, seen, sums), jnp.einsum("dtnh,dtnh->dnt", out, dout)[..., None]
    ds = scale * p * (jnp.einsum("dtnh,dsnh->dnts", dout, v_) - off)
    dkv = jnp.einsum("dnts,dtnh->dsnh", ds, q_), jnp.einsum("dnts,dtnh->dsnh", p, dout)
    dkv = (rearrange(x, "d s (k g) h -> d s k g h", k=k.shape[2]).sum(3) for x in dkv)
    dq = in_rows(jnp.einsum("dnts,dsnh->dtnh", ds, k_), at, exist, q)
    return dq, *(in_rows(x, keys_at, keys_exist, k) for x in dkv)


def where(q, k, lengths, key_lengths, begins, key_begins):
    """Where the queries [D, T] and keys [D, S] of each document lie, counted through all rows; which of them exist."""

    def tokens(x, lengths, begins):
        B, T, heads, size = x.shape
        if not lengths.size:  # each row is one
            return jnp.arange(B * T).reshape(B, T), jnp.ones((B, T), bool)
        at = jnp.arange(T)
        return begins.ravel()[: lengths.size, None] // (heads * size) + at, at < lengths.reshape(-1, 1)

    (at, exist), (keys_at, keys_exist) = tokens(q, lengths, begins), tokens(k, key_lengths, key_begins)
    return at, keys_at, exist, keys_exist


def scores(scale, mask, window, q, k, exist, keys_exist):
    """[D, N, T, S], and which of them count."""
    T, S = q.shape[1], k.shape[1]
    ahead = jnp.arange(T)[:, None] - jnp.arange(S)
    seen = (ahead >= 0) & (ahead < (window or T)) if mask in CAUSAL else jnp.ones((T, S), bool)
    return scale * jnp.einsum("dtnh,dsnh->dnts", q, k), seen & (exist[:, :, None] & keys_exist[:, None])[:, None]


def shares(s, seen, sums):
    return jnp.where(seen, jnp.exp(jnp.where(seen, s - sums[..., None], 0)), 0)


def flat(x):
    return x.reshape(-1, *x.shape[2:])


def wide(x, q):
    return flat(repeat(x, "b s k h -> b s (k g) h", g=q.shape[2] // x.shape[2]))


def in_rows(x, at, exist, like):
    rows = jnp.full_like(flat(like), jnp.nan)
    return rows.at[jnp.where(exist, at, len(rows))].set(x, mode="drop").reshape(like.shape)


@pytest.fixture
def calls(monkeypatch):
    """(pass, mask, window) of each call that is compiled."""
    monkeypatch.setattr(kernels, "check_cudnn_version", lambda: 91200)
    found = []
    for name, plain in (("fwd", forward), ("bwd", backward)):

        def lowered(*args, name=name, plain=plain, mask_type, sliding_window_length, scale, **_):
            found.append((name, mask_type.name, sliding_window_length))
            exact = [x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in args]
            results, dtype = plain(scale, mask_type, sliding_window_length, *exact), args[0].dtype
            dtypes = (dtype, jnp.float32) if name == "fwd" else (dtype,) * 3
            return [x.astype(to) for x, to in zip(results, dtypes, strict=True)]

        primitive = getattr(kernels, f"_dot_product_attention_{name}_p")
        mlir.register_lowering(primitive, mlir.lower_fun(lowered, multiple_results=True), platform="cpu")
    return found


def packed_rows():
    """Documents of one token and of many, padding at the end of a row, and a row that is one document."""
    row = np.repeat([1, 2, 3, 4, 5, 6, 7, 0], [1, 3, 1, 6, 5, 2, 1, 5])
    return np.array([row, np.ones(24), np.repeat([1, 2, 3], [8, 15, 1])], np.int32)


@pytest.mark.parametrize(
    ("changes", "packed", "at_once", "width"),
    [
        ({"attention.window": 7, "attention.scale": 0.2}, False, 0, 6),
        ({"attention.window": 7}, True, 3, 6),
        ({"attention.sinks": True, "attention.window": 2}, True, 5, 8),
        ({"attention.mask": "full"}, False, 0, 8),
        ({"attention.mask": "full"}, True, 3, 8),
    ],
)
def test_cudnn_computes_what_xla_does(packed, at_once, width, changes, calls, monkeypatch):
    """The rows have 12 documents: more than two calls take, or fewer than one. width: of a value; keys have 8."""
    monkeypatch.setattr(documents, "FEWEST", at_once)
    (q, k, v), weigh, _ = arrays(3, 24, 8)
    qkv, weigh = (q, k, v[..., :width]), weigh[..., :width]
    segments, cfg = packed_rows() if packed else None, settings(8, **changes)

    def xla(q, k, v, sinks_1N):
        return attention.attend(q, k, v, segments, cfg, own_RN=sinks_1N)

    def fused(*arguments):
        return attention.fused(*arguments, segments, kernel="cudnn", cfg=cfg)

    @jax.jit
    def both():
        found = [jax.vjp(function, *qkv, SINKS) for function in (fused, xla)]
        return [(out, *pull(weigh)) for out, pull in found]

    with jax.default_matmul_precision("highest"):
        got, want = both()
    masks = ("NO_MASK", "PADDING") if cfg.attention.mask == "full" else ("CAUSAL", "PADDING_CAUSAL")
    mask, window = masks[packed], changes.get("attention.window")
    assert {*calls} == {("fwd", mask, window), ("bwd", mask, window)}
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
    assert np.asarray(got[4]).any() == cfg.attention.sinks


@pytest.mark.parametrize("replicas", [1, 2])
def test_replicas_are_computed_one_after_the_other(replicas, calls):
    """As data parallelism over several microbatches asks for: `jax.vmap`, for which jax has no rule here."""
    qkv, weigh, _ = arrays(2 * replicas, 24, 8)
    parts = [np.asarray(x).reshape(replicas, 2, *x.shape[1:]) for x in (*qkv, weigh)]

    def gradients(q, k, v, weigh):
        function = functools.partial(attention.fused, segments_BT=None, kernel="cudnn", cfg=settings(8))
        out, pull = jax.vjp(lambda *arrays: function(*arrays, None), q, k, v)
        return out, *pull(weigh)

    together = jax.jit(gradients)(*qkv, weigh)
    apart = jax.jit(jax.vmap(gradients))(*parts)
    for a, b in zip(apart, together, strict=True):
        np.testing.assert_allclose(np.asarray(a).reshape(b.shape), b, atol=2e-6)


@pytest.mark.parametrize(("length", "of_a_row"), [(24, 2), (1024, 2), (8192, 16), (2**15, 32)])
def test_longer_rows_have_more_documents_in_a_call(length, of_a_row):
    """A backward pass holds float32 gradients of all queries of a row for each, so images have room for few."""
    segments = jax.ShapeDtypeStruct((3, length), jnp.int32)
    found = jax.eval_shape(
        lambda ids: documents.each(
            documents.runs(ids), lambda _, part: part.keys.lengths, jnp.zeros(3 * of_a_row, int)
        ),
        segments,
    )
    assert found.shape == (3 * of_a_row,)


def test_a_window_is_jaxs_own_of_one_key_less():
    """Where jax is asked for a window it tells cuDNN this length, and masks so without cuDNN."""
    (q, k, v), *_ = arrays(1, 24, 8)

    @jax.jit
    def both():
        ours = attention.attend(q, k, v, None, settings(8, **{"attention.window": 7}))
        return ours, jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=(6, 0))

    np.testing.assert_allclose(*both(), atol=1e-6)


def test_keeping_the_output_spares_the_second_forward_pass(monkeypatch):
    monkeypatch.setattr(kernels, "check_cudnn_version", lambda: 91200)
    qkv, _, _ = arrays(3, 24, 8)

    def forward_passes(policy):
        call = functools.partial(attention.fused, kernel="cudnn", cfg=settings(8))
        block = jax.checkpoint(lambda *qkv: call(*qkv, SINKS, packed_rows()).sum(), policy=policy)
        return str(jax.make_jaxpr(jax.grad(block, (0, 1, 2)))(*qkv)).count("= dot_product_attention_fwd[")

    policies = jax.checkpoint_policies
    assert forward_passes(policies.save_only_these_names("attention_out")) == 1
    assert forward_passes(policies.nothing_saveable) == 2


@pytest.mark.slow
def test_the_comparison_that_cards_run_tells_right_from_wrong(calls, monkeypatch):
    monkeypatch.setattr(on_device, "ATTENTION", {"plain": {"head_dim": 8}})
    found = on_device.kernel_cases("cudnn", (9, 0), T=64)
    assert [row["packed"] for row in found] == [False, True, True, True] and all(row["right"] for row in found)
    monkeypatch.setattr(blocks, "shared_documents", lambda ids, _: documents.runs(ids))
    assert [row["right"] for row in on_device.kernel_cases("cudnn", (9, 0), T=64)] == [True, True, True, False]


def test_more_numbers_than_cudnn_counts_are_refused(monkeypatch):
    monkeypatch.setattr(kernels, "check_cudnn_version", lambda: 91200)
    q, k = (jax.ShapeDtypeStruct((2, 2**18, heads, 128), jnp.bfloat16) for heads in (32, 8))
    call = functools.partial(attention.fused, kernel="cudnn", cfg=settings(128))
    with pytest.raises(
        InputError, match=r"2 rows of 262144 tokens with 32 heads of 128 numbers.*(.|\n)*fix   use more microbatches"
    ):
        jax.eval_shape(call, q, k, k, SINKS, jax.ShapeDtypeStruct((2, 2**18), jnp.int32))


@pytest.mark.long
@pytest.mark.parametrize(
    ("form", "packed"), [pytest.param("ring", False, marks=pytest.mark.slow), ("ring", True), ("ulysses", True)]
)
def test_cudnn_over_a_split_sequence_computes_what_xla_does(form, packed, calls):
    """Four devices in a ring: some turns stand in a loop. Key heads under ulysses allow for two."""
    qkv, weigh, batch = arrays(2, 64, 8)
    if not packed:
        del batch["segment_ids"]
    size = 4 if form == "ring" else 2
    want, (got, _) = both(settings(8), placement(form, "cudnn", size), qkv, weigh, batch)
    plain, causal = ("PADDING", "PADDING_CAUSAL") if packed else ("NO_MASK", "CAUSAL")
    masks = [causal, plain] if form == "ring" else [causal]
    assert {*calls} == {(name, mask, None) for name in ("fwd", "bwd") for mask in masks}
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


MEMORY_CASES = {
    "cudnn": ([1, 3, 9, 2, 4, 0], [1, 3, 7, 6, 5, 2], [7, 1, 9, 3, 8, 0], [2, 1, 15, 4, 7, 3]),
    # Splash works on 128 tokens at a time.
    "splash": ([1, 3, 9, 2, 4, 0], [1, 63, 17, 16, 15, 16], [7, 1, 9, 3, 8, 0], [2, 61, 85, 64, 37, 7]),
}


@pytest.mark.parametrize("kernel", ["cudnn", "splash"])
def test_what_another_stack_made_is_read_as_xla_reads_it(kernel, calls, monkeypatch):
    """A row reads segments that begin elsewhere, in another order, and have other lengths; some read none."""
    monkeypatch.setattr(documents, "FEWEST", 2)  # so that it takes several calls
    numbers, lengths, of_keys, key_lengths = MEMORY_CASES[kernel]
    rows = [np.repeat(of, count).astype(np.int32) for of, count in ((numbers, lengths), (of_keys, key_lengths))]
    names, seq = ("segment_ids", "memory_segment_ids"), [len(row) for row in rows]
    batch = {name: jax.device_put(np.stack([row, np.full_like(row, 1)])) for name, row in zip(names, rows, strict=True)}
    drawn = [arrays(2, length, 8)[:2] for length in seq]
    qkv, weigh = (drawn[0][0][0], *drawn[1][0][1:]), drawn[0][1]
    cfg = settings(8, compute_dtype="bfloat16", memory_width=8).memory_config

    tokens = Tokens.from_batch(batch)

    def found(kernel):
        with placed_by(placement("gather", kernel, 1)):
            out, pull = jax.vjp(functools.partial(context.attend_to_memory, tokens=tokens, cfg=cfg), *qkv)
            return out, *pull(weigh)

    with jax.default_matmul_precision("highest"):
        want, got = (jax.jit(found, static_argnums=0)(one) for one in ("xla", kernel))
    assert {*calls} == ({("fwd", "PADDING", None), ("bwd", "PADDING", None)} if kernel == "cudnn" else set())
    assert not np.asarray(got[0])[0, rows[0] == 2].any()
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.parametrize(
    ("changes", "one_text"),
    [
        ({"encoder": config.Encoder(layers=1), "frames": config.Frames(bands=8)}, True),
        (
            {
                "patches": config.Patches(image=4, size=2),
                "vocab": 0,
                "context": 5,
                "classes.count": 3,
                "attention.mask": "full",
            },
            True,
        ),
        ({"classes.count": 3, "attention.mask": "full"}, False),
        ({}, False),
    ],
)
def test_models_of_sounds_and_images_have_rows_of_one_text(changes, one_text):
    assert settings(8, **changes).one_text == one_text


def test_a_prompt_in_chunks_has_more_documents_than_one_call_takes(calls):
    """Its chunks are documents, of which each call takes two of a row."""
    (q, k, v), _, _ = arrays(1, 24, 8)
    rows = np.ones((1, 24), np.int32)
    cfg = settings(8, compute_dtype="bfloat16", **{"attention.chunk": 4})

    def found(kernel):
        tokens = in_chunks(4, Tokens(np.arange(24)[None], rows))._replace(slot=np.int32(0))
        with placed_by(placement("gather", kernel, 1)):
            return context.attend(q, k, v, tokens, cfg)

    with jax.default_matmul_precision("highest"):
        want, got = (jax.jit(found, static_argnums=0)(kernel) for kernel in ("xla", "cudnn"))
    assert {*calls} == {("fwd", "PADDING_CAUSAL", None)}
    np.testing.assert_allclose(got, want, atol=2e-5)


@pytest.mark.parametrize("memory", [False, True])
def test_rows_of_one_text_are_computed_in_one_call_without_a_loop(memory, calls):
    """One row attends to all encoder output but padding, and another one to nothing."""
    (q, k, v), weigh, _ = arrays(2, 24, 8)
    rows = np.array([np.repeat([0, 1], [5, 19]), np.repeat([1, 0], [20, 4])], np.int32)
    tokens, attend = Tokens(np.zeros_like(rows), rows, slot=np.int32(0)), context.attend
    if memory:
        attend = context.attend_to_memory
        of_memory = np.array([np.repeat([0, 1], [3, 21]), np.full(24, 7)], np.int32)
        tokens = tokens._replace(memory_segments_BS=of_memory)
    cfg = settings(8, compute_dtype="bfloat16", **{"attention.mask": "full"}, memory_width=8 * memory)

    def found(kernel, *qkv):
        with placed_by(placement("gather", kernel, 1)):
            out, pull = jax.vjp(functools.partial(attend, tokens=tokens, cfg=cfg), *qkv)
            return out, *pull(weigh)

    with jax.default_matmul_precision("highest"):
        want, got = (jax.jit(found, static_argnums=0)(kernel, q, k, v) for kernel in ("xla", "cudnn"))
    assert {*calls} == {("fwd", "PADDING", None), ("bwd", "PADDING", None)}
    assert " while[" not in str(jax.make_jaxpr(found, static_argnums=0)("cudnn", q, k, v))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
