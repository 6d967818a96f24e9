"""Stacks that see all of a text, or read another stack: the loss is the same under every layout."""

import dataclasses
import functools
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict

import gspmd_lm
from gspmd_lm import Input, InputError, Task
from gspmd_lm.config import ModelConfig, RelativePositions
from gspmd_lm.infer import programs
from gspmd_lm.model.ends import embedded
from gspmd_lm.model.loss import losses
from gspmd_lm.model.stack import Stack
from gspmd_lm.model.transformer import decode, init
from gspmd_lm.sharding import rules_file
from gspmd_lm.sharding.annotate import shard
from gspmd_lm.sharding.axes import DECODER
from tests.courses import begun

BERT = {
    "mask": "full", "pre_norms": False, "sum_norms": True, "final_norm": False, "norm": "layernorm", "norm_bias": True,
    "embedding_norm": True, "mlp_kind": "plain", "activation": "gelu", "positions": "learned", "token_types": 2,
    "qkv_bias": True, "attention_out_bias": True, "mlp_bias": True,
}  # fmt: skip
MASKED = {"objective": "masked", "head_transform": True, "unembedding_bias": True, "tied_embeddings": True, **BERT}
NEAR = RelativePositions(ranges=8, distance=12)
KINDS = {
    "masked": MASKED,
    "classes": {"objective": "classes", "classes": 3, "dropout": 0.1, **BERT},
    "relative": {"objective": "masked", "mask": "full", "positions": "none", "relative_positions": NEAR},
    "relative of each layer": {"relative_positions": dataclasses.replace(NEAR, shared=False)},
}
LAYOUTS = ("fsdp8", "tp8", "fsdp2_tp4", "zero1_8", "cp8", "cp8_ulysses")
CASES = [(layout, kind) for layout in LAYOUTS for kind in KINDS] + [("pp2_fsdp2_tp2", "masked")]
DEFAULT = (("fsdp2_tp4", "masked"), ("cp8", "relative"))


@pytest.mark.parametrize(
    ("layout", "kind"), [case if case in DEFAULT else pytest.param(*case, marks=pytest.mark.slow) for case in CASES]
)
def test_a_layout_changes_nothing(layout, kind, small, course):
    settings = small(optimizer={"clip_norm": 0.0, "learning_rate": 3.0e-3}, **KINDS[kind])
    alone, found = course(settings, "single", 3, unroll=1), course(settings, layout, 3)
    np.testing.assert_allclose(found.losses, alone.losses, rtol=1e-6)
    got, want = (flatten_dict(one.gradients, sep=".") for one in (found, alone))
    for name in want.keys() - {"layers.attention.bk"}:  # softmax does not know what all keys have in common
        size = np.linalg.norm(want[name])
        assert size > 0 and np.linalg.norm(got[name] - want[name]) < 1e-5 * size


@pytest.fixture(scope="module")
def bert(small):
    cfg = small(**MASKED).model
    params = jax.tree.map(lambda x: 5 * x, nn.unbox(jax.jit(init, static_argnums=0)(cfg, jax.random.key(3))))
    rng = np.random.default_rng(0)
    tokens, lengths = rng.integers(0, cfg.vocab, (4, 12)), np.array([[12], [9], [5], [3]])
    places = np.broadcast_to(np.arange(12), tokens.shape)
    batch = {"tokens": tokens, "positions": places, "segment_ids": (places < lengths).astype(int),
             "token_types": (places > 2).astype(int), "row": np.arange(4)}  # fmt: skip
    hidden = jax.jit(lambda batch: decode(cfg, params, batch)[0])
    return hidden, batch


def test_a_token_sees_what_comes_after_it_and_no_padding(bert):
    hidden, batch = bert
    first, real = hidden(batch), batch["segment_ids"] == 1
    assert (np.asarray(hidden(batch | {"tokens": np.where(real, batch["tokens"], 7)}))[real] == first[real]).all()
    changed = batch["tokens"].copy()
    changed[:, 2] += 1
    assert (np.abs(hidden(batch | {"tokens": changed}) - first).max(-1)[real] > 1e-4).all()
    assert np.abs(hidden(batch | {"token_types": 1 - batch["token_types"]}) - first)[real].max() > 1e-2


def test_texts_that_share_a_row_are_as_if_they_were_alone(bert):
    hidden, batch = bert
    apart = hidden(batch)
    of = {name: np.concatenate([x[2, :5], x[3, :3], x[0, :4]])[None] for name, x in batch.items() if x.ndim == 2}
    together = hidden(of | {"segment_ids": np.repeat([1, 2, 0], [5, 3, 4])[None], "row": np.arange(1)})
    np.testing.assert_allclose(together[0, :8], np.concatenate([apart[2, :5], apart[3, :3]]), atol=2e-5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mask": "full"}, "model.mask: full shows a token what objective: causal asks for"),
        ({"objective": "masked"}, "objective: masked needs model.mask: full"),
        ({"objective": "classes", "mask": "full"}, "objective: classes needs model.classes"),
        ({"classes": 2}, "objective: classes needs model.classes, and model.classes needs objective: classes"),
        ({"mask": "full", "sliding_window": 4}, "mask: full does not go with sliding_window"),
        ({"mask": "full", "positions": "alibi"}, "mask: full does not go with positions: alibi"),
        ({"reads": 32}, "model.reads needs a stack to read"),
        ({"objective": "masked", "mask": "full", "data": {"packing": "stream"}}, "needs data.packing: documents"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(changes, words, small):
    with pytest.raises(ValueError, match=words):
        small(**changes)


def test_an_encoder_is_not_asked_for_the_next_token(small):
    rules = rules_file.load("single")
    with pytest.raises(InputError, match=r"objective: masked(.|\n)*use a config of objective: causal"):
        programs.arrays_and_warnings(small(**MASKED), rules, "cpu", programs.Sizes(2, 8, 16))
    with pytest.raises(InputError, match="sources of data give rows for objective: causal alone"):
        gspmd_lm.train(small(**MASKED), "none")


# An encoder and a decoder that reads it, with one token table.


class Translator(Stack):
    encoder: ModelConfig | None = None

    @nn.compact
    def __call__(self, batch, key=None):
        x_BTD, table, keys_BT = embedded(self, self.cfg, batch, key)
        source = {"tokens": batch["source"], "positions": batch["positions"], "row": batch["row"]}
        source["segment_ids"] = batch["memory_segment_ids"]
        encoder = Reader(self.encoder, name="encoder")
        memory_BSD = shard(encoder(source, key), "memory: batch seq embed")
        return self.blocks(x_BTD, batch | {"memory": memory_BSD}, keys_BT)[0], table


class Reader(Stack):
    @nn.compact
    def __call__(self, batch, key=None):
        x_BTD, _, keys_BT = embedded(self, self.cfg, batch, key)
        return self.blocks(x_BTD, batch, keys_BT)[0]


class Sums(NamedTuple):
    loss: jax.Array


def translated(model, params, batch, key):
    x_BTD, table = model.apply({"params": params}, dict(batch), key)
    return Sums(losses(x_BTD, table, None, batch["targets"], model.cfg).loss)


def first(model, key):
    tokens = jnp.zeros((1, 4), jnp.int32)
    names = ("tokens", "source", "positions", "memory_segment_ids", "segment_ids")
    return model.init(key, dict.fromkeys(names, tokens) | {"row": tokens[0, :1]})["params"]


def adamw(_):
    return optax.adamw(1e-3)


def translation(small, B=16, T=16):
    sizes = {"tied_embeddings": True, "relative_positions": NEAR, "positions": "none"}
    decoder = dataclasses.replace(small(**sizes).model, reads=32)
    model = Translator(decoder, encoder=dataclasses.replace(decoder, reads=0, mask="full"))
    arrays = ("tokens", "source", "targets", "positions", "segment_ids", "memory_segment_ids")
    inputs = {name: Input((B, T), "int32", "tokens: batch seq") for name in arrays}
    return Task(
        name="translation", inputs=inputs | {"row": Input((B,), "int32", "tokens: batch")}, vocabulary=DECODER,
        init=functools.partial(first, model), sums=functools.partial(translated, model), optimizer=adamw,
        matmul_precision="highest",
    )  # fmt: skip


def pairs(B=16, T=16):
    """Two pairs in a row: the first has one length on each side, and what follows the second is padding."""
    rng, places = np.random.default_rng(0), np.arange(T)[None]
    cut, end, source_cut = rng.integers(2, 8, (B, 1)), rng.integers(10, T + 1, (B, 1)), rng.integers(2, 8, (B, 1))
    segments, of_source = ((1 + (places >= at)) * (places < end) for at in (cut, source_cut))
    arrays = {name: rng.integers(0, 61, (B, T)) for name in ("tokens", "source", "targets")}
    arrays |= {"segment_ids": segments, "memory_segment_ids": of_source, "row": np.arange(B)}
    arrays["targets"] = np.where(segments > 0, arrays["targets"], -1)
    return {name: x.astype(np.int32) for name, x in (arrays | {"positions": np.tile(places, (B, 1))}).items()}


def course_of(task, layout, steps=3):
    rules = rules_file.load(layout)
    rules = rules.fill(8) if layout != "single" else rules
    built = gspmd_lm.build(task, rules)
    program, state, values = built.lower_train().compile(), begun(built), []
    for _ in range(steps):
        state, metrics = program(state, jax.device_put(pairs(), built.batch_shardings))
        values.append(float(metrics["loss"]))
    return values, built


@pytest.mark.parametrize(
    "layout", ["fsdp2_tp4", *(pytest.param(one, marks=pytest.mark.slow) for one in ("fsdp8", "tp8", "cp8", "zero1_8"))]
)
def test_two_stacks_live_in_one_model_under_any_layout(layout, small):
    task = translation(small)
    want, alone = course_of(task, "single")
    np.testing.assert_allclose(course_of(task, layout)[0], want, rtol=1e-6)
    named = dict(flatten_dict(alone.arrays.named_params, sep="."))
    assert {name: named[name].axes for name in ("encoder.layers.attention.wk", "layers.cross.wk")} == dict.fromkeys(
        ("encoder.layers.attention.wk", "layers.cross.wk"), ("layers", "embed", "kv_heads", "head_dim")
    )
