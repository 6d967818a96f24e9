"""An encoder and a decoder that reads it: the loss is the same under every layout, and pairs do not see each other."""

import dataclasses

import jax
import numpy as np
import pytest

from gspmd_lm.config import Encoder, Frames, RelativePositions
from gspmd_lm.foresight.propagation import read_step
from gspmd_lm.model.families import decode
from gspmd_lm.model.parts import dropout
from gspmd_lm.program.supported import Pass, attention_lacks
from gspmd_lm.sharding import rules_file
from tests.courses import agree, weights

T5 = {
    "objective": "seq2seq", "encoder": Encoder(layers=1, heads=16, kv_heads=16, mlp=32, context=24),
    "head_dim": 6, "positions": "none", "attention.relative_positions": RelativePositions(ranges=8, distance=12),
    "attention.scale": 1.0, "embedding.tied": True, "logits.scale": 32**-0.5, "feed_forward.kind": "plain",
    "feed_forward.activation": "relu",
    "dropout": 0.1, "data": {"source_seq": 24},
}  # fmt: skip
BART = {
    "objective": "seq2seq", "encoder": Encoder(), "norm.pre": False, "norm.sum": True, "norm.final": False,
    "norm.kind": "layernorm", "norm.bias": True, "embedding.norm": True, "feed_forward.kind": "plain",
    "feed_forward.activation": "gelu",
    "positions": "learned", "embedding.position_offset": 2, "attention.qkv_bias": True, "attention.out_bias": True,
    "feed_forward.bias": True,
    "embedding.tied": True, "logits.bias": True,
}  # fmt: skip
WHISPER = {
    "objective": "seq2seq", "frames": Frames(bands=6), "encoder": Encoder(context=20, mlp=32), "norm.kind": "layernorm",
    "norm.bias": True, "feed_forward.kind": "plain", "feed_forward.activation": "gelu", "positions": "learned",
    "attention.qkv_bias": True,
    "attention.key_bias": False, "attention.out_bias": True, "feed_forward.bias": True, "embedding.tied": True,
    "data": {"source_seq": 24},
}  # fmt: skip
KINDS = {"T5": T5, "BART": BART}
OF_EACH_LAYER = RelativePositions(ranges=8, distance=12, shared=False)
ALIKE = {
    "UMT5": T5 | {"attention.relative_positions": OF_EACH_LAYER},
    "mBART": BART | {"norm.pre": True, "norm.sum": False, "norm.final": True, "embedding.scale": 32**0.5},
    "Whisper": WHISPER,
}
# What no stack without a source has. test_promise.py has dropout, and test_image_layouts.py the biases and norms.
LEAN = {"T5 without dropout": T5 | {"dropout": 0.0}}
LAYOUTS = ("fsdp8", "tp8", "fsdp2_tp4", "zero1_8", "cp8", "cp8_ulysses")


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        *((kind, "fsdp2_tp4") for kind in LEAN),
        *(
            pytest.param(kind, layout, marks=pytest.mark.slow)
            for i, kind in enumerate(KINDS | ALIKE)
            for j, layout in enumerate(LAYOUTS)
            if (i + j) % 3 == 0 or (kind, layout) == ("T5", "fsdp2_tp4")
        ),
    ],
)
def test_a_layout_changes_nothing(kind, layout, small, course):
    config = small(optimizer={"clip_norm": 0.0, "learning_rate": 3.0e-3}, **(KINDS | ALIKE | LEAN)[kind])
    alone, found = course(config, "single", unroll=1), course(config, layout, int(config.model.frames is not None))
    # Softmax does not know what all keys have in common.
    agree(found, alone, rtol=1e-6, atol=0, unseen=("attention.bk", "cross.bk"))
    if config.model.frames:  # positions that are fixed
        before, after = (params["encoder"]["sinusoids"] for params in (found.before, found.after))
        assert np.array_equal(before, after)


@pytest.mark.long
def test_the_gradient_of_a_bias_by_distance_is_that_of_its_table_before_devices_add_it_up(small, built):
    """Not of all pairs of tokens, which are many more."""
    made = built(small(**T5), "fsdp8")
    traced = made.trace_train()
    found = read_step(traced.jaxpr, (made.abstract_state, made.abstract_batch), traced.out_info)
    sums = [one for one in found.transfers if one.kind == "all-reduce" and one.phase == "backward"]
    assert {one.array: one.shape for one in sums} == {"relative_bias": (8, 8), "encoder": (8, 16)}  # ranges, heads


@pytest.mark.long
def test_where_a_source_is_split_what_the_encoder_made_is_gathered_once_and_no_keys_are(small, built, read):
    rows, tokens, width = 32, 16, 32
    found = [one for one in read(built(small(**BART), "cp8")).transfers if one.array.startswith("layers.cross")]
    gathered = [one for one in found if one.kind == "all-gather" and one.shape[:2] == (rows, tokens)]
    gathered = [one for one in gathered if len(one.shape) > 2]  # besides a number for each token, which masks compare
    assert [(one.shape, one.times_per_step) for one in gathered] == [((rows, tokens, width), 1)]


@pytest.fixture(scope="module", params=["T5", pytest.param("BART", marks=pytest.mark.slow)])
def model(request, small):
    """Hidden states of a batch of pairs, with weights that make each token matter."""
    cfg = dataclasses.replace(small(**KINDS[request.param]).model, dropout=0.0)
    params = weights(cfg)
    return jax.jit(lambda batch: decode(cfg, params, batch)[0])


def pairs(source_lengths, lengths, S=12, T=10):
    """Pairs of random tokens, one in a row, with padding behind both."""
    rng, rows = np.random.default_rng(0), len(lengths)
    places, of_source = (np.tile(np.arange(length), (rows, 1)) for length in (T, S))
    return {
        "tokens": rng.integers(0, 61, (rows, T)), "source_tokens": rng.integers(0, 61, (rows, S)),
        "positions": places, "source_positions": of_source, "row": np.arange(rows),
        "segment_ids": (places < np.array(lengths)[:, None]).astype(int),
        "source_segment_ids": (of_source < np.array(source_lengths)[:, None]).astype(int),
    }  # fmt: skip


def test_a_text_sees_all_of_its_source_and_no_padding(model):
    batch = pairs([12, 9, 5], [8, 6, 7])  # padding of the first text has no padding of a source to see
    first, real = model(batch), batch["segment_ids"] == 1
    padded = np.where(batch["source_segment_ids"] == 1, batch["source_tokens"], 7)
    assert (np.asarray(model(batch | {"source_tokens": padded}))[real] == first[real]).all()
    changed = batch["source_tokens"].copy()
    changed[:, 4] += 1
    assert (np.abs(model(batch | {"source_tokens": changed}) - first).max(-1)[real] > 1e-4).all()
    later = batch["tokens"].copy()
    later[:, 5] += 1
    moved = np.abs(model(batch | {"tokens": later}) - first).max(-1)
    assert (moved[:, :5] == 0).all() and (moved[:, 5] > 1e-3).all()


def test_pairs_that_share_a_row_are_as_if_they_were_alone(model):
    batch = pairs([7, 3], [4, 5])
    apart = model(batch)
    cuts = {"": (4, 5, 1), "source_": (7, 3, 2)}
    together = {"row": np.arange(1)}
    for prefix, (first, second, rest) in cuts.items():
        for name in ("tokens", "positions"):
            x = batch[prefix + name]
            together[prefix + name] = np.concatenate([x[0, :first], x[1, :second], x[0, :rest]])[None]
        together[f"{prefix}segment_ids"] = np.repeat([1, 2, 0], (first, second, rest))[None]
    want = np.concatenate([apart[0, :4], apart[1, :5]])
    np.testing.assert_allclose(model(together)[0, :9], want, atol=2e-5)


def test_a_source_and_its_text_are_dropped_apart(small, monkeypatch):
    """Each has keys of its own, where their tokens have the same place."""
    cfg, batch = small(**T5).model, pairs([10], [10], S=10)
    params, token_keys = weights(cfg), dropout.token_keys

    def keys(key):
        seen = []

        def note(*arguments):
            seen.append(token_keys(*arguments))
            return seen[-1]

        monkeypatch.setattr(dropout, "token_keys", note)
        decode(cfg, params, batch, key)
        return [*map(jax.random.key_data, seen)]

    one_BTX, other_BTX = jax.jit(keys)(jax.random.key(0))
    assert (one_BTX != other_BTX).any(-1).all()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"encoder": Encoder(), "objective": "causal"}, "With model.encoder, it is seq2seq: leave objective out"),
        ({"objective": "seq2seq"}, "objective: seq2seq needs model.encoder"),
        ({**T5, "attention.mask": "full"}, "encoder does not go with attention.mask: full"),
        ({**T5, "data": {"source_seq": 25}}, "data.source_seq=25 is longer than model.encoder.context=24"),
        ({**T5, "attention.window": 4}, "encoder does not go with attention.window"),
        ({**T5, "encoder": Encoder(heads=6)}, "encoder.heads=6 and encoder.kv_heads=0, which do not divide"),
        ({**T5, "encoder": Encoder(start_token=61)}, "encoder.start_token=61, which is not below vocab=61"),
        ({**T5, "encoder": Encoder(first_tokens=(61,))}, "encoder.first_tokens=61, which is not below vocab=61"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(changes, words, small):
    with pytest.raises(ValueError, match=words):
        small(**changes)


def test_a_kernel_is_asked_for_both_stacks(small):
    config = small(**BART | {"compute_dtype": "bfloat16", "context": 256, "data": {"seq": 128, "source_seq": 192}})
    rules = rules_file.load("single")
    lacks = attention_lacks("splash", config, rules, Pass(128, segments=True))
    assert lacks == "data.source_seq: 192 (only multiples of 128) of the encoder"
    assert attention_lacks("splash", config, rules, Pass(100)) == "data.seq: 100 (only multiples of 128)"
