"""Stacks that see all of a text, or attend to encoder output: the loss is the same under every layout."""

import dataclasses

import jax
import numpy as np
import pytest

from gspmd_lm.config import Convolution, RelativePositions, RelativeVectors
from gspmd_lm.model.families import decode
from gspmd_lm.sharding import rules_file
from tests.courses import agree, weights

BERT = {
    "attention.mask": "full", "norm.pre": False, "norm.sum": True, "norm.final": False, "norm.kind": "layernorm",
    "norm.bias": True,
    "embedding.norm": True, "feed_forward.kind": "plain", "feed_forward.activation": "gelu", "positions": "learned",
    "embedding.token_types": 2,
    "attention.qkv_bias": True, "attention.out_bias": True, "feed_forward.bias": True,
}  # fmt: skip
MASKED = {"objective": "masked", "logits.transform": True, "logits.bias": True, "embedding.tied": True, **BERT}
DEBERTA = {**MASKED, "positions": "none", "attention.relative_vectors": RelativeVectors(ranges=8, distance=10),
           "convolution": Convolution(taps=3, activation="gelu"), "attention.scale": 12**-0.5}  # fmt: skip
NEAR = RelativePositions(ranges=8, distance=12)
KINDS = {
    "masked": MASKED,
    "shared": {
        **MASKED,
        "shared_layers": True,
        "embedding.width": 16,
        "embedding.input": "sum",
        "layers": 3,
    },
    "classes": {"objective": "classes", "classes.count": 3, "classes.pooler": "gelu", "dropout": 0.1, **BERT},
    "vectors": DEBERTA,
    "replaced": {"objective": "replaced", "classes.count": 1, "classes.of": "tokens", "classes.pooler": "gelu", **BERT},
    "relative": {
        "objective": "masked",
        "attention.mask": "full",
        "positions": "none",
        "attention.relative_positions": NEAR,
    },
    "own vectors": {
        **MASKED,
        "positions": "none",
        "attention.key_bias": False,
        "attention.relative_vectors": RelativeVectors(ranges=12, distance=6, own_projections=True),
    },
    "relative of each layer": {"attention.relative_positions": dataclasses.replace(NEAR, shared=False)},
}
LAYOUTS = ("fsdp8", "tp8", "fsdp2_tp4", "zero1_8", "cp8", "cp8_ulysses")
# Each layout with two of the kinds.
CASES = [(layout, kind) for i, layout in enumerate(LAYOUTS) for j, kind in enumerate(KINDS) if (i + j) % 3 == 0]
CASES += [("pp2_fsdp2_tp2", "masked")]


# By default test_image_layouts.py has a stack that sees all of a row, test_seq2seq.py one with relative positions, and
# what layers share is followed below. model/kernels/test_context.py has masks and biases of a split sequence.
@pytest.mark.slow
@pytest.mark.parametrize(("layout", "kind"), CASES)
def test_a_layout_changes_nothing(layout, kind, small, course):
    settings = small(optimizer={"clip_norm": 0.0, "learning_rate": 3.0e-3}, **KINDS[kind])
    alone, found = course(settings, "single", 3, unroll=1), course(settings, layout, 3)
    # Softmax does not know what all keys have in common.
    agree(found, alone, rtol=1e-6, atol=0, unseen=("layers.attention.bk",))


@pytest.mark.long
def test_what_all_layers_share_is_gathered_and_reduced_once(small, built, read):
    step = built(small(**KINDS["shared"], compute_dtype="bfloat16", matmul_precision="default"), "fsdp8")
    sent = [one for one in read(step).transfers if one.array.startswith("layers.") and ".w" in one.array]
    assert {one.times_per_step for one in sent} == {1}
    assert {(one.kind, one.dtype) for one in sent} == {("all-gather", "bfloat16"), ("reduce-scatter", "float32")}


@pytest.mark.long
def test_a_shared_matrix_that_is_split_over_what_splits_tokens_is_placed_by_each_layer(small, built, read):
    raw = {"mesh": {"data": 8}, "rules": {"batch": "data", "w_up.embed": "data"}}
    sent = read(built(small(**KINDS["shared"]), rules_file.from_dict(raw, "here.yaml"))).transfers
    reduced = [one.times_per_step for one in sent if (one.array, one.kind) == ("layers.mlp.w_up", "reduce-scatter")]
    assert reduced == [KINDS["shared"]["layers"]]


@pytest.fixture(scope="module")
def bert(small):
    cfg = small(**MASKED, convolution=Convolution(taps=5)).model
    params = weights(cfg)
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
        (
            {"objective": "causal", "attention.mask": "full"},
            "objective: causal needs model.vision.queries or model.attention.mask: causal. "
            "With model.attention.mask: full, it is masked: leave objective out, or change the model",
        ),
        (
            {"embedding.token_types": 2},
            "model.embedding.token_types goes with objective: masked, replaced or classes, not causal",
        ),
        ({"objective": "masked"}, "objective: masked needs model.attention.mask: full"),
        ({"objective": "classes", "attention.mask": "full"}, "objective: classes needs model.classes"),
        ({"classes.count": 2}, "attention.mask: causal does not go with classes"),
        (
            {"attention.mask": "full", "classes.count": 2, "logits.z_loss": 0.1},
            "classes does not go with logits.z_loss",
        ),
        (
            {"attention.mask": "full", "data": {"messages_field": "m"}},
            "objective: masked needs texts, without data.fields",
        ),
        (
            {"data": {"fields": ("a",), "label": "b"}},
            "objective: causal needs texts or conversations(.|\n)*data.label=b",
        ),
        ({"attention.mask": "full", "attention.window": 4}, "attention.mask: full does not go with attention.window"),
        ({"attention.mask": "full", "positions": "alibi"}, "attention.mask: full does not go with positions: alibi"),
        (
            {"objective": "masked", "attention.mask": "full", "data": {"packing": "stream"}},
            "needs data.packing: documents",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(changes, words, small):
    with pytest.raises(ValueError, match=words):
        small(**changes)
