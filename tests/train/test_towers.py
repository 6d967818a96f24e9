"""Texts and their images: the loss is that of the whole batch under every layout, and wrong settings are refused."""

import dataclasses

import jax
import numpy as np
import pytest

from gspmd_lm import InputError
from gspmd_lm.config import Encoder, Images, Lora, Patches, Queries, RelativePositions, Vision
from gspmd_lm.model.families import apply, clip
from gspmd_lm.plan.variants import layers
from gspmd_lm.program.supported import Pass, attention_lacks
from gspmd_lm.sharding import rules_file
from gspmd_lm.train import decoder, progress, state
from tests.courses import agree, weights

CLIP = {
    "objective": "contrastive", "vision": Vision(patches=Patches(image=16, size=4, bias=False), projection=24, embed=48,
                                                 layers=1, head_dim=6, mlp=40),
    "norm.kind": "layernorm", "norm.bias": True, "feed_forward.kind": "plain", "feed_forward.activation": "silu",
    "feed_forward.slope": 1.702,
    "positions": "learned", "attention.qkv_bias": True, "attention.out_bias": True, "feed_forward.bias": True,
    "data": {"source_seq": 24},
}  # fmt: skip
DROPOUT = CLIP | {"dropout": 0.1}
UNCLIPPED = {"clip_norm": 0.0, "learning_rate": 3.0e-3}
CASES = [(layout, CLIP, 1) for layout in ("fsdp2_tp4", "fsdp8", "tp8", "zero1_8", "cp8", "cp8_ulysses")]
CASES += [("cp8", DROPOUT, 1), ("fsdp2_tp4", CLIP, 2)]


@pytest.mark.slow  # below, a stack that sees images and one that reads texts have a layout by default
@pytest.mark.parametrize(("layout", "kind", "interleave"), CASES)
def test_a_layout_changes_nothing(layout, kind, interleave, small, course):
    config, rules = small(optimizer=UNCLIPPED, **kind), rules_file.load(layout)
    alone, found = course(config, "single", unroll=1), course(config, rules, interleave=interleave)
    # Softmax does not know what all keys have in common.
    agree(found, alone, rtol=1e-6, atol=0, unseen=("attention.bk",))


# Widths, heads and layers of each stack differ, and the third layer of the queries stands behind their loop.
BLIP2 = {
    "objective": "causal", "positions": "learned", "frozen": ("vision",), "data": {"seq": 24, "source_seq": 24},
    "vision": Vision(
        patches=Patches(image=16, size=4), embed=48, layers=1, head_dim=6, mlp=40,
        queries=Queries(rows=8, layers=3, embed=40, head_dim=5, mlp=56, token=60, start_token=2),
    ),
}  # fmt: skip
BLIP2_T5 = BLIP2 | {
    "objective": "seq2seq", "encoder": Encoder(layers=1), "positions": "none", "data": {"source_seq": 16},
    "attention.relative_positions": RelativePositions(ranges=8, distance=6), "row_multiple": 8,
}  # fmt: skip
# By default with one layer of queries, which reads the image.
LEAN_BLIP2 = BLIP2 | {"vision": dataclasses.replace(BLIP2["vision"], queries=dataclasses.replace(
    BLIP2["vision"].queries, layers=1, every=1))}  # fmt: skip
LAYOUTS = ("fsdp8", "tp8", "fsdp2_tp4", "zero1_8", "cp8", "cp8_ulysses")


@pytest.mark.long
@pytest.mark.parametrize(
    ("layout", "kind", "interleave"),
    [
        ("fsdp2_tp4", LEAN_BLIP2, 1),
        *(pytest.param(layout, BLIP2, 1, marks=pytest.mark.slow) for layout in LAYOUTS),
        *(pytest.param(layout, BLIP2_T5, 1, marks=pytest.mark.slow) for layout in LAYOUTS),
        pytest.param("fsdp2_tp4", BLIP2, 2, marks=pytest.mark.slow),
        pytest.param("cp8", BLIP2 | {"dropout": 0.1}, 1, marks=pytest.mark.slow),
        pytest.param("fsdp2_tp4", BLIP2 | {"frozen": (), "positions": "rope"}, 1, marks=pytest.mark.slow),
    ],
)
def test_rows_that_read_an_image_change_nothing_under_a_layout(layout, kind, interleave, small, course):
    config = small(optimizer=UNCLIPPED, **kind)
    found, alone = course(config, layout, 1, interleave=interleave), course(config, "single", unroll=1)
    agree(found, alone, rtol=1e-6, atol=0, unseen=(".bk",))
    frozen = {name for name in found.before if name in kind["frozen"]}
    assert ("vision" in found.gradients) == (not frozen)
    before, after = ({name: weights[name] for name in frozen} for weights in (found.before, found.after))
    jax.tree.map(np.testing.assert_array_equal, before, after)


@pytest.mark.parametrize(
    ("frozen", "words"),
    [
        (("layrs",), r"\['layrs'\]: no weights are named layrs \(did you mean layers\?\)\n  fix   some of embedding"),
        (("embedding", "layers", "final_norm", "unembedding"), "no weights are left to train"),
    ],
)
def test_frozen_weights_have_names_and_others_are_left(frozen, words, small):
    with pytest.raises(InputError, match=words):
        state.arrays(small(frozen=frozen))


@pytest.fixture(scope="module")
def model(small):
    return dataclasses.replace(small(**CLIP).model, dropout=0.0)


def batch_of(lengths, T=10):
    """Rows with a text and an image in each; one without a text is padding."""
    rng, rows, places = np.random.default_rng(0), len(lengths), np.arange(T)
    return {
        "tokens": rng.integers(0, 61, (rows, T)), "positions": np.tile(places, (rows, 1)), "row": np.arange(rows),
        "segment_ids": (places < np.array(lengths)[:, None]).astype(int),
        "patches": rng.standard_normal((rows, 20, 48)).astype(np.float32),
    }  # fmt: skip


@pytest.mark.long
def test_a_text_is_read_at_its_last_token_and_an_image_without_its_padding(model):
    run, batch = jax.jit(lambda batch: apply(model, weights(model), batch)[:2]), batch_of([4, 10])
    text, image = run(batch)
    np.testing.assert_allclose(np.square([text, image]).sum(-1), 1, rtol=1e-5)
    patches, tokens = batch["patches"].copy(), batch["tokens"].copy()
    patches[:, 17:], tokens[0, 4:] = 9.0, 7  # 17 rows of an image: one that is learned, and its patches
    assert all((one == other).all() for one, other in zip(run(batch | {"patches": patches, "tokens": tokens}),
                                                          (text, image), strict=True))  # fmt: skip
    patches[:, 16], tokens[0, 3] = 9.0, 8
    for one, other in zip(run(batch | {"patches": patches, "tokens": tokens}), (text, image), strict=True):
        assert np.abs(one[0] - other[0]).max() > 1e-3


@pytest.mark.long
def test_the_loss_is_the_mean_of_both_cross_entropies_and_rows_of_padding_are_not_in_it(model):
    params, batch = weights(model), batch_of([4, 0, 10, 7])
    run = jax.jit(lambda batch: (apply(model, params, batch), clip.PAIRS.evaluate(clip.Towers(model), params, batch)))
    (text, image, scale), found = run(batch)
    assert progress.describe_scored(clip.PAIRS.scores(found)) == "3 pairs were scored"
    real = [0, 2, 3]
    scores = np.asarray(scale * text[np.array(real)] @ image[np.array(real)].T, np.float64)
    both = [np.log(np.exp(one).sum(1)) - np.diag(one) for one in (scores, scores.T)]
    np.testing.assert_allclose(found["loss"], sum(both).sum() / 2, rtol=1e-5)
    assert found["correct_texts"] == (scores.argmax(1) == np.arange(3)).sum()
    assert found["correct_images"] == (scores.argmax(0) == np.arange(3)).sum()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"objective": "causal"},
            "objective: causal needs (.|\n)*With model.vision, it is contrastive: leave objective out",
        ),
        ({"vision": None}, "objective: contrastive needs model.vision"),
        ({"data": {"source_seq": 16}}, "model.vision gives 17 rows of an image: set data.source_seq=16 to 17 or more"),
        ({"data": {"images": Images(resize=8)}}, "data.images.resize=8 is below model.vision.patches.image=16"),
        ({"data": {"images": Images(std=(0.5, 0.5))}}, "mean and std need 1 number, or 3"),
        ({"data": {"packing": "stream"}}, "objective: contrastive needs data.packing: documents"),
        ({"positions": "rope"}, "vision does not go with positions: rope"),
        ({"attention.mask": "full"}, "vision does not go with attention.mask: full"),
        ({"experts.count": 4, "experts.per_token": 2}, "vision.projection does not go with experts"),
        ({"encoder": Encoder()}, "vision.projection does not go with encoder"),
        ({"shared_layers": True}, "vision.projection does not go with shared_layers"),
        ({"lora": Lora(targets=("wq",))}, "vision does not go with lora"),
        (
            {"vision": dataclasses.replace(CLIP["vision"], heads=6)},
            "vision.heads=6 and vision.kv_heads=0, which do not",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(changes, words, small):
    with pytest.raises(ValueError, match=words):
        small(**{**CLIP, **changes})


READING = BLIP2["vision"].queries


@pytest.mark.parametrize(
    ("of_vision", "changes", "words"),
    [
        ({"projection": 8}, {}, "vision needs projection or queries, and not both"),
        ({"queries": None}, {}, "vision needs projection or queries, and not both"),
        ({"heads": 6}, {}, "vision.heads=6 and vision.kv_heads=0, which do not divide"),
        (
            {"queries": dataclasses.replace(READING, heads=6)},
            {},
            "vision.queries.heads=6 and vision.queries.kv_heads=0",
        ),
        (
            {"queries": dataclasses.replace(READING, token=61)},
            {},
            "vision.queries.token=61, which is not below vocab=61",
        ),
        ({"queries": dataclasses.replace(READING, rows=23)}, {}, "vision.queries has 23 rows, and a text has a token"),
        (
            {},
            {"objective": "contrastive"},
            "objective: contrastive needs model.vision. With model.vision.queries, it is causal: leave objective out",
        ),
        (
            {},
            {"encoder": Encoder(), "objective": "seq2seq", "data": {"source_seq": 8}},
            "a token stands behind them: set",
        ),
        ({}, {"data": {"seq": 24, "source_seq": 16}}, "model.vision gives 17 rows of an image: set data.source_seq=16"),
        ({}, {"data": {"seq": 24, "packing": "stream"}}, r"model\.vision\.queries needs data\.packing: documents"),
        ({}, {"lora": Lora(targets=("wq",))}, "vision does not go with lora"),
        ({}, {"embedding.width": 16}, "vision does not go with embedding.width"),
    ],
)
def test_rows_that_read_an_image_need_settings_that_fit(of_vision, changes, words, small):
    with pytest.raises(ValueError, match=words):
        small(**{**BLIP2, "vision": dataclasses.replace(BLIP2["vision"], **of_vision), **changes})


def test_no_model_but_theirs_reads_what_another_stack_made(small):
    with pytest.raises(ValueError, match=r"model\.memory_width belongs to vision\.queries, which sets it"):
        small(memory_width=8, layer_pattern=("reading",))
    with pytest.raises(ValueError, match="layer_pattern has reading layers: set memory_width"):
        small(layer_pattern=("reading",))


def test_a_kernel_is_asked_for_both_towers(small):
    config = small(**CLIP | {"compute_dtype": "bfloat16", "context": 256, "data": {"seq": 128, "source_seq": 24}})
    lacks = attention_lacks("splash", config, rules_file.load("single"), Pass(128, segments=True))
    assert lacks == "data.source_seq: 24 (only multiples of 128) of images"


def test_no_pipeline_is_planned(small):
    assert layers(decoder.task(small(**CLIP))) == 1
