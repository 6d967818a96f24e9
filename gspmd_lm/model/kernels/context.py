"""Attention over a sequence that the rules split: context parallelism, in one of three forms.

gather   each device gathers all keys and values; their gradients are a reduce-scatter (arXiv 2407.21783, 3.3.2)
ring     keys and values go round, and are used on the way: see kernels/ring.py (arXiv 2310.01889)
ulysses  sequences are exchanged for heads, and back: all-to-alls (arXiv 2309.14509)

A causal mask leaves little work to the first tokens and much to the last ones. So a training step shards its rows in
zigzag: with n devices and 2n pieces of a row, device i works on pieces i and 2n-1-i. The step does so itself, by
`zigzag_sharded`. Rows come in their usual order from whoever makes them, and what is computed does not depend on the
order: each token carries its position in the row.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gspmd_lm import config
from gspmd_lm.model.kernels import attention, common
from gspmd_lm.model.kernels.attention import HEAD, OUT, TokenPlaces
from gspmd_lm.model.tokens import Tokens
from gspmd_lm.sharding.annotate import Split, attention_kernel, context, per_device, shard, split
from gspmd_lm.sharding.permutes import permute

# Arrays as each device has them within attention: of heads, and of tokens.
HEADS = "q: batch seq heads whole"
TOKENS = "q: batch seq"
ALIKE = ("tokens", "block_input", "q", "k", "v", "attention_out")


def sequence() -> Split:
    """The split of the sequence within a block; one piece where rules split some of its arrays otherwise."""
    splits = {split(array, "seq") for array in ALIKE}
    return splits.pop() if len(splits) == 1 else Split()


def keys_spec(array: str, of_memory: bool = False) -> str:
    """The spec of keys or values: of the tokens that a device has, or of those that its queries read.

    Those of encoder output are read whole.
    """
    split_tokens = sequence().num_shards > 1 and not of_memory
    return f"{array}: batch {'seq' if split_tokens else 'kv_seq'} kv_heads head_dim"


def gathered_early(specs: Sequence[str], arrays: Sequence[jax.Array], tokens: Tokens) -> Any:
    """Specs and arrays from which keys are computed, where devices gather these instead of the keys.

    Of n devices that share a row, each then makes the keys of all its tokens. So an array has n times as many tokens as
    before, and the shard of each device is the whole row, in the order of the text.
    """
    over = sequence()
    if not over.over or arrays[0].shape[1] == 1 or _form(over, tokens) != "gather":
        return specs, arrays
    if any(split(spec.partition(":")[0], "seq") != over for spec in specs):  # rules have it whole already
        return specs, arrays
    if over.num_shards == 1:  # where nothing runs
        specs = [spec.replace(" seq", " kv_seq") for spec in specs]
        return specs, [shard(x, spec) for x, spec in zip(arrays, specs, strict=True)]
    whole = functools.partial(_whole, over, tokens.places_BT is not None)
    return specs, per_device(lambda *local: tuple(whole(x[None])[0] for x in local), specs, specs)(*arrays)


def _form(over: Split, tokens: Tokens) -> str:
    """The form of context parallelism for these tokens. A ring needs rows in zigzag: see `attend`.

    Where nothing runs, no row is in zigzag.
    """
    form, runs = context(), over.num_shards > 1
    return "gather" if form == "ring" and runs and tokens.places_BT is None else form


def zigzag_order(length: int, devices: int) -> np.ndarray:
    """The positions in a row of `length` tokens that each device has, one device after the other."""
    piece = np.arange(length).reshape(2 * devices, -1)
    return np.concatenate([np.r_[piece[i], piece[-1 - i]] for i in range(devices)])


def zigzag_supported(length: int, num_shards: int, form: str, mask: str) -> bool:
    """Whether rows of `length` tokens, in so many shards, are sharded in zigzag: with a full mask all work is equal."""
    return num_shards > 1 and form != "ulysses" and mask == "causal" and length % (2 * num_shards) == 0


def zigzag_sharded(batch: dict[str, Any], mask: str = "causal") -> dict[str, Any]:
    """The batch with its tokens sharded in zigzag, and `places`: the position of each token in its row, [B, T].

    Sources, which an encoder reads with a full mask, stay as they are. Without `places`, tokens are in order.
    """
    over, names = sequence(), [name for name, x in batch.items() if x.ndim == 2 and not name.startswith("source_")]
    B, T = batch["tokens"].shape
    if over.num_shards == 1 or not zigzag_supported(T, over.num_shards, context(), mask):
        return batch
    stacked = "q: whole batch seq"

    def exchange_pieces(x_ABT: jax.Array) -> jax.Array:
        """Device i has the pieces 2i and 2i+1; piece p goes to device p or, from p = n on, to 2n-1-p."""
        to = [*range(over.num_shards), *reversed(range(over.num_shards))]
        sent = [
            permute(half, over, dict(enumerate(to[first::2]))) for first, half in enumerate(jnp.split(x_ABT, 2, -1))
        ]
        even = jax.lax.axis_index(over.over) % 2 == 0
        return jnp.concatenate([jnp.where(even, *sent), jnp.where(even, *sent[::-1])], axis=-1)

    moved = per_device(exchange_pieces, [stacked], stacked)(jnp.stack([batch[name] for name in names]))
    places_BT = jnp.broadcast_to(jnp.asarray(zigzag_order(T, over.num_shards), jnp.int32), (B, T))
    return batch | dict(zip(names, moved, strict=True)) | {"places": places_BT}


def attend(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    tokens: Tokens,
    cfg: config.ModelConfig,
    own_RN: jax.Array | None = None,
) -> jax.Array:
    """Attention to keys and values that are placed as `keys_spec` says, [B, T, N, H]: see `attention.attend`.

    With a slot, a single token of each row attends to the row's cache. A ring can go round only in the order of zigzag.
    So the keys of other rows, such as prompts, are gathered. Each device may have the keys of whole rows already: see
    `gathered_early`.
    """
    if tokens.slot is not None and q_BTNH.shape[1] == 1:
        return attention.attend_to_cache(q_BTNH, k_BSKH, v_BSKH, tokens.slot, tokens.start_B, cfg, own_RN)
    k_BSKH, v_BSKH = _repeat_for_query_heads(q_BTNH, k_BSKH, v_BSKH)
    over, segments_BT, positions_BT = sequence(), tokens.segments_BT, tokens.positions_BT
    form = _form(over, tokens) if over.over else "gather"
    if over.num_shards == 1 or q_BTNH.shape[1] == 1:
        one_text = rows_are_texts(tokens, cfg)
        return attention.attend(q_BTNH, k_BSKH, v_BSKH, segments_BT, cfg, positions_BT, own_RN, one_text)
    how: dict[str, Any] = {"over": over, "kernel": attention_kernel(), "cfg": cfg}
    if form == "ulysses":
        local: Any = functools.partial(_ulysses, **how)
    elif form == "ring":
        from gspmd_lm.model.kernels import ring

        local = functools.partial(ring.attend, **how)
    else:
        local = functools.partial(_gather, **how, zigzag=tokens.places_BT is not None)
    of_tokens = [positions_BT] if segments_BT is None else [positions_BT, segments_BT]
    inputs = [HEADS, HEADS, HEADS, HEAD, *(TOKENS for _ in of_tokens)]
    heads_RN = attention.head_numbers(cfg, own_RN)
    return shard(per_device(local, inputs, HEADS)(q_BTNH, k_BSKH, v_BSKH, heads_RN, *of_tokens), OUT)


def rows_are_texts(tokens: Tokens, cfg: config.ModelConfig) -> bool:
    """Whether each row is one text, so that its segments only tell it from padding: see `documents.runs`."""
    return not cfg.attention.chunk and (cfg.one_text or tokens.slot is not None)


def attend_to_memory(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    tokens: Tokens,
    cfg: config.ModelConfig,
    own_RN: None = None,
) -> jax.Array:
    """Cross-attention to the keys of encoder output, [B, T, N, H]. It has no learned numbers of heads.

    A token attends to the keys of the segment with its own's number. A token without any, such as padding, gets 0.
    XLA computes what the kernel of the rules cannot, and queries whose sequence is split.
    """
    k_BSKH, v_BSKH = _repeat_for_query_heads(q_BTNH, k_BSKH, v_BSKH, of_memory=True)
    heads_RN, kernel = attention.head_numbers(cfg, own_RN), attention_kernel()
    segments = tokens.segments_BT, tokens.memory_segments_BS
    lengths = q_BTNH.shape[1], k_BSKH.shape[1]
    # Rules have a kernel only where a GPU can do packed documents with it: see `supported.settle_rules`.
    lacks = [common.unsupported_setting(kernel, cfg, seq=length, segments=True) for length in lengths]
    known = [of for of in segments if of is not None]
    if kernel == "xla" or any(lacks) or len(known) < 2 or split("q", "seq").num_shards > 1:
        at = (jnp.arange(length)[None] for length in lengths)
        queries, keys = (TokenPlaces(*one, None) for one in zip(at, segments, strict=True))
        return shard(attention.attend_masked(q_BTNH, k_BSKH, v_BSKH, queries, keys, heads_RN, cfg), OUT)
    how: dict[str, Any] = {"kernel": kernel, "cfg": cfg, "one_text": rows_are_texts(tokens, cfg)}
    return attention.fused_per_device(q_BTNH, k_BSKH, v_BSKH, heads_RN, *known, **how)


def _repeat_for_query_heads(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, of_memory: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Keys and values with the axis of heads that a kernel reads: those of each query head where it is `heads`."""
    if attention.keys_axis() != "heads":
        return k_BSKH, v_BSKH
    group, specs = q_BTNH.shape[2] // k_BSKH.shape[2], [keys_spec(name, of_memory) for name in "kv"]
    k_BSNH, v_BSNH = (
        shard(jnp.repeat(x, group, axis=2), spec.replace("kv_heads", "heads"))
        for x, spec in zip((k_BSKH, v_BSKH), specs, strict=True)
    )
    return k_BSNH, v_BSNH


def _gather(q_BTNH, k_BTKH, v_BTKH, heads_RN, positions_BT, segments_BT=None, *, over, kernel, cfg, zigzag):
    """Attention of a device's queries to all keys. The keys' gradients are the transpose of the gather."""
    gather: Any = functools.partial(_whole, over, zigzag)

    def whole(x_BT: jax.Array) -> jax.Array:
        return gather(x_BT[None])[0]

    if k_BTKH.shape[1] > q_BTNH.shape[1]:
        k_BSKH, v_BSKH = k_BTKH, v_BTKH
    elif k_BTKH.shape == v_BTKH.shape:
        k_BSKH, v_BSKH = gather(jnp.stack([k_BTKH, v_BTKH]))
    else:
        k_BSKH, v_BSKH = whole(k_BTKH), whole(v_BTKH)
    T, device = k_BSKH.shape[1], jax.lax.axis_index(over.over)
    places_T = zigzag_order(T, over.num_shards) if zigzag else np.arange(T)
    segments = None if segments_BT is None else (segments_BT, whole(segments_BT))
    if kernel == "splash":
        from gspmd_lm.model.kernels import splash

        piece = T // over.num_shards // (2 if zigzag else 1)
        named: dict[str, Any] = {"residual_checkpoint_name": "attention_out"}
        if cfg.attention.mask == "full":  # the queries of all devices see the same
            made = splash.kernel(q_BTNH, T, cfg, **named)
        else:
            made = splash.kernel(q_BTNH, T, cfg, places_T=places_T, piece=piece, devices=over.num_shards, **named)
            made = splash.device_kernel(made, over.num_shards, device)
        return splash.attend(made, q_BTNH, k_BSKH, v_BSKH, heads_RN, cfg, segments)
    own_1T = jax.lax.dynamic_index_in_dim(jnp.asarray(places_T).reshape(over.num_shards, -1), device)
    whole_positions = whole(positions_BT) if cfg.positions == "alibi_bf16" else None
    queries = TokenPlaces(own_1T, segments and segments[0], None)
    keys = TokenPlaces(jnp.arange(T)[None], segments and segments[1], whole_positions)
    return attention.attend_masked(q_BTNH, k_BSKH, v_BSKH, queries, keys, heads_RN, cfg)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _whole(over: Split, zigzag: bool, x_ABT: jax.Array) -> jax.Array:
    """The tokens of all devices, in the order of the text, of several arrays."""
    with jax.named_scope("keys"):
        x_nABT = jax.lax.all_gather(x_ABT, over.over)
        if zigzag:
            early, late = jnp.split(x_nABT, 2, axis=3)
            x_nABT = jnp.concatenate([early, late[::-1]])
        return jnp.moveaxis(x_nABT, 0, 2).reshape(*x_ABT.shape[:2], -1, *x_ABT.shape[3:])


def _apart(over: Split, zigzag: bool, _: None, dx_ABT: jax.Array) -> tuple[jax.Array]:
    """The derivative of `_whole`. It is written here because autodiff would add up halves that are mostly zeros."""
    with jax.named_scope("keys"):
        pieces = over.num_shards * (2 if zigzag else 1)
        dx_nABT = jnp.moveaxis(dx_ABT.reshape(*dx_ABT.shape[:2], pieces, -1, *dx_ABT.shape[3:]), 2, 0)
        if zigzag:
            early, late = jnp.split(dx_nABT, 2)
            dx_nABT = jnp.concatenate([early, late[::-1]], axis=3)
        return (jax.lax.psum_scatter(dx_nABT, over.over),)


_whole.defvjp(lambda over, zigzag, x: (_whole(over, zigzag, x), None), _apart)


def _ulysses(q_BTNH, k_BTKH, v_BTKH, heads_RN, positions_BT, segments_BT=None, *, over, kernel, cfg):
    """Attention over the whole sequence. Each device computes a part of the heads that it has."""

    def exchange(x: jax.Array, have: int, want: int) -> jax.Array:
        return jax.lax.all_to_all(x, over.over, split_axis=have, concat_axis=want, tiled=True)

    def whole(x_BT: jax.Array) -> jax.Array:
        return jax.lax.all_gather(x_BT, over.over, axis=1, tiled=True)

    q_BTNH, k_BSKH, v_BSKH = (exchange(x, 2, 1) for x in (q_BTNH, k_BTKH, v_BTKH))
    segments_BT = None if segments_BT is None else whole(segments_BT)
    device = jax.lax.axis_index(over.over)
    own_RN = jax.lax.dynamic_index_in_dim(heads_RN.reshape(len(heads_RN), over.num_shards, -1), device, 1, False)
    if kernel != "xla":
        out_BTNH = attention.fused(q_BTNH, k_BSKH, v_BSKH, own_RN, segments_BT, kernel=kernel, cfg=cfg)
    else:
        rounded = whole(positions_BT) if cfg.positions == "alibi_bf16" else None
        tokens = TokenPlaces(jnp.arange(q_BTNH.shape[1])[None], segments_BT, rounded)
        out_BTNH = attention.attend_masked(q_BTNH, k_BSKH, v_BSKH, tokens, tokens, own_RN, cfg)
    return exchange(out_BTNH, 1, 2)
