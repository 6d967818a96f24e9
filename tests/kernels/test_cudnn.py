"""What cuDNN's attention is given where the sequence is split. Its calls are computed by plain products on the CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from einops import rearrange, repeat
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.interpreters import mlir
from test_context import arrays, both, placement, settings


def weights(q, k, scale, mask_type, sums=None):
    """[B, N, T, S]: the share of each key, and the logarithm of the softmax sums [B, N, T]; or the shares of these."""
    s = scale * jnp.einsum("btnh,bsnh->bnts", q, k)
    if mask_type == cudnn.MaskType.CAUSAL:
        s = jnp.where(jnp.tri(q.shape[1], k.shape[1], dtype=bool), s, -jnp.inf)
    sums = jax.nn.logsumexp(s, -1) if sums is None else sums
    return jnp.exp(s - sums[..., None]), sums


def wide(x, q):
    return repeat(x, "b s k h -> b s (k g) h", g=q.shape[2] // x.shape[2])


def forward(q, k, v, *_, scale, mask_type, **_options):
    p, sums = weights(q, wide(k, q), scale, mask_type)
    return jnp.einsum("bnts,bsnh->btnh", p, wide(v, q)), sums


def backward(q, k, v, *others, scale, mask_type, **_options):
    """As the kernel does it: from the sums and the result that it is given."""
    *_, sums, out, dout = others
    p, _ = weights(q, wide(k, q), scale, mask_type, sums)
    off = jnp.einsum("btnh,btnh->bnt", out, dout)[..., None]
    ds = scale * p * (jnp.einsum("btnh,bsnh->bnts", dout, wide(v, q)) - off)
    dk, dv = jnp.einsum("bnts,btnh->bsnh", ds, q), jnp.einsum("bnts,btnh->bsnh", p, dout)
    dkv = (rearrange(x, "b s (k g) h -> b s k g h", k=k.shape[2]).sum(3) for x in (dk, dv))
    return jnp.einsum("bnts,bsnh->btnh", ds, wide(k, q)), *dkv


@pytest.mark.parametrize("form", ["ring", "ulysses"])
def test_cudnn_over_a_split_sequence_computes_what_xla_does(form, monkeypatch):
    """Four devices in a ring: some turns stand in a loop. Key heads under ulysses allow for two."""
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91200)
    monkeypatch.setattr(cudnn, "check_layout", lambda *_: None)  # it refuses float32
    calls = []
    for name, plain in (("fwd", forward), ("bwd", backward)):

        def lowered(*args, name=name, plain=plain, **options):
            calls.append((name, options["mask_type"].name))
            return plain(*args, **options)

        primitive = getattr(cudnn, f"_dot_product_attention_{name}_p_wrapper")
        mlir.register_lowering(primitive, mlir.lower_fun(lowered, multiple_results=True), platform="cpu")
    qkv, weigh, batch = arrays(2, 64, 8)
    del batch["segment_ids"]
    size = 4 if form == "ring" else 2
    want, (got, _) = both(settings(8), placement(form, "cudnn", size), qkv, weigh, batch)
    masks = ["CAUSAL", "NO_MASK"] if form == "ring" else ["CAUSAL"]
    assert {*calls} == {(name, mask) for name in ("fwd", "bwd") for mask in masks}
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
