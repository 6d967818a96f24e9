"""What a run writes down, and what the trackers that it opens take with them."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from gspmd_lm.config import (
    Encoder,
    Frames,
    LatentAttention,
    Masks,
    Patches,
    Queries,
    RelativePositions,
    Vision,
    Windows,
)  # fmt: skip
from gspmd_lm.config.windows import Level
from gspmd_lm.foresight.equations import model_flops as jaxpr_flops
from gspmd_lm.sharding.shapes import pairs
from gspmd_lm.train import decoder, state
from gspmd_lm.train.metrics import keys_seen, model_flops

ROOT = Path(__file__).parent.parent.parent
PROGRAM = """
import sys
from etils import epath
from gspmd_lm.config import Train
from gspmd_lm.workdir.log import Log
log = Log(epath.Path(sys.argv[1]), 0, Train(steps=4, trackers=("tensorboard",)), {})
log.write(3, {"loss": 0.25})
log.close()
assert "torch" not in sys.modules
import torch
print(torch.HERE)
"""


def test_tensorboard_gets_scalars_and_does_not_import_torch(tmp_path):
    (tmp_path / "torch.py").write_text("HERE = 'found afterwards'\nclass Tensor: pass\n")
    (tmp_path / "run").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "run")],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "found afterwards\n"
    (events,) = (tmp_path / "run" / "tensorboard").iterdir()
    assert b"\n\x04loss" in events.read_bytes() and b"\x15\x00\x00\x80>" in events.read_bytes()  # tag, 0.25 as a float


@pytest.mark.parametrize("seq", [3, 8, 20])
def test_the_keys_that_tokens_see(small, seq):
    """In a window, in a chunk, and before a token; counted one by one."""
    model = small(layers=3, layer_pattern=("sliding", "chunked", "nope"), sliding_window=5, attention_chunk=8).model
    seen = [[min(t + 1, 5), t % 8 + 1, t + 1] for t in range(seq)]
    assert keys_seen(model, seq) == pytest.approx(sum(map(sum, seen)) / seq)
    assert keys_seen(model, seq, last=True) == sum(seen[-1])


def test_with_a_full_mask_a_token_sees_all_of_its_row_or_chunk(small):
    settings = small(objective="masked", mask="full", layers=2, layer_pattern=("full", "chunked"), attention_chunk=8)
    assert keys_seen(settings.model, 20) == 20 + (2 * 8 * 8 + 4 * 4) / 20


NEAR = RelativePositions(ranges=8, distance=12)
BERT = {
    "objective": "masked", "mask": "full", "positions": "learned", "token_types": 2, "tied_embeddings": True,
    "mlp_kind": "plain", "head_transform": True, "unembedding_bias": True, "relative_positions": NEAR,
}  # fmt: skip


T5 = {
    "objective": "seq2seq", "encoder": Encoder(layers=3, heads=16, kv_heads=16, mlp=32, context=24),
    "positions": "none", "relative_positions": NEAR, "tied_embeddings": True, "data": {"source_seq": 24},
}  # fmt: skip
WHISPER = {
    "objective": "seq2seq", "frames": Frames(bands=6), "encoder": Encoder(context=20), "positions": "learned",
    "tied_embeddings": True, "mlp_kind": "plain", "norm": "layernorm", "norm_bias": True, "data": {"source_seq": 24},
}  # fmt: skip


@pytest.mark.parametrize("settings", [T5, WHISPER], ids=["T5", "Whisper"])
def test_model_flops_have_those_of_an_encoder_and_of_attention_to_it(small, settings):
    """As below. The trace makes three frames of each row of a sound where two are new."""
    config = small(**settings)
    task, model, data = decoder.task(config), config.model, config.data
    arrays, of_source = state.arrays(task), config.source_seq
    forward = jax.make_jaxpr(lambda params, batch: task.sums(params, batch, None))(arrays.params, task.batch(task.rows))
    tokens, sources = data.batch * data.seq, data.batch * of_source
    unseen_keys = data.seq * model.layers - keys_seen(model, data.seq)
    wanted = 3 * jaxpr_flops(forward.jaxpr) - tokens * 6 * model.heads * 2 * model.head_dim * unseen_keys
    for leaf, like in pairs(arrays.named_params, arrays.params):
        if len({*leaf.axes} - {"layers"}) == 1:  # a norm or a bias, which multiplies nothing
            of_encoder = leaf.path.startswith("encoder.") or leaf.path.endswith(("cross.bk", "cross.bv"))
            wanted += 6 * like.size * (sources if of_encoder else tokens)
    if model.frames:
        wanted -= 6 * sources * 3 * model.frames.bands * model.embed
    assert model_flops(config, arrays) == pytest.approx(wanted)


def test_model_flops_of_texts_and_images_are_those_of_both_towers_and_of_their_products(small):
    """As below. Each tower has a matrix that one row of it goes through. The trace has all products of texts and images
    twice, once for each side's loss.
    """
    vision = Vision(patches=Patches(image=16, size=4), projection=24, embed=48, layers=1, head_dim=6)
    config = small(objective="contrastive", vision=vision, positions="learned", norm="layernorm", norm_bias=True,
                   data={"source_seq": 24})  # fmt: skip
    task, model, data = decoder.task(config), config.model, config.data
    arrays = state.arrays(task)
    forward = jax.make_jaxpr(lambda params, batch: task.sums(params, batch, None))(arrays.params, task.batch(task.rows))
    unseen_keys = data.seq * model.layers - keys_seen(model, data.seq)
    wanted = 3 * jaxpr_flops(forward.jaxpr) - 6 * data.batch**2 * vision.projection
    wanted -= data.batch * data.seq * 6 * model.heads * 2 * model.head_dim * unseen_keys
    for leaf, like in pairs(arrays.named_params, arrays.params):
        if len({*leaf.axes} - {"layers"}) == 1:  # a norm or a bias, which multiplies nothing
            wanted += 6 * data.batch * like.size * (24 if leaf.path.startswith("vision.") else data.seq)
    assert model_flops(config, arrays) == pytest.approx(wanted, rel=1e-6)


def test_model_flops_of_rows_that_read_an_image_are_those_of_all_stacks(small):
    """As below."""
    queries = Queries(rows=8, layers=3, embed=40, head_dim=5, mlp=56)
    vision = Vision(patches=Patches(image=16, size=4), embed=48, layers=1, head_dim=6, queries=queries)
    config = small(vision=vision, data={"source_seq": 24})
    task, model, data = decoder.task(config), config.model, config.data
    arrays = state.arrays(task)
    forward = jax.make_jaxpr(lambda params, batch: task.sums(params, batch, None))(arrays.params, task.batch(task.rows))
    unseen_keys = data.seq * model.layers - keys_seen(model, data.seq)
    wanted = 3 * jaxpr_flops(forward.jaxpr) - data.batch * data.seq * 6 * model.heads * 2 * model.head_dim * unseen_keys
    rows = {"vision": 24, "queries": 8, "query_projection_bias": 8}
    sizes = {leaf.path: like.size for leaf, like in pairs(arrays.named_params, arrays.params)}
    of_keys = {path for path in sizes if path.startswith("queries.") and path.split(".")[-2:-1] == ["cross"] and (
        path.endswith(("k", "v")))}  # fmt: skip
    for leaf, _ in pairs(arrays.named_params, arrays.params):  # a norm or a bias multiplies nothing
        if len({*leaf.axes} - {"layers"}) == 1 or leaf.path.endswith(("bq", "bk", "bv")):
            count = 24 if leaf.path in of_keys else rows.get(leaf.path.partition(".")[0], data.seq)
            wanted += 6 * data.batch * sizes[leaf.path] * count
    assert model_flops(config, arrays) == pytest.approx(wanted, rel=1e-6)


def test_model_flops_of_images_are_those_of_all_but_the_head(small):
    """As below. The head reads one row of an image."""
    beit = {
        "objective": "classes", "classes": 3, "mask": "full", "vocab": 0, "padded_vocab": 0, "context": 17,
        "patches": Patches(image=16, size=4, pool="mean"), "positions": "learned", "final_norm": False,
        "layer_scale": 0.1, "relative_positions": RelativePositions(side=4, ranges=52, shared=False),
    }  # fmt: skip
    config = small(**beit, data={"seq": 24})
    task, rows = decoder.task(config), config.data.batch
    arrays = state.arrays(task)
    forward = jax.make_jaxpr(lambda params, batch: task.sums(params, batch, None))(arrays.params, task.batch(rows))
    vectors = [like for leaf, like in pairs(arrays.named_params, arrays.params) if len({*leaf.axes} - {"layers"}) == 1]
    head = 6 * rows * config.model.embed * config.model.classes
    wanted = 3 * jaxpr_flops(forward.jaxpr) - head + 6 * rows * 24 * sum(like.size for like in vectors)
    assert model_flops(config, arrays) == pytest.approx(wanted)


def test_model_flops_of_levels_are_those_of_the_rows_of_each(small):
    """As above. Rows of padding are multiplied with weights, and attend to nothing."""
    windows = Windows(size=2, shift=1, levels=(Level(layers=3, embed=64, heads=4, mlp=32),))
    swin = {
        "objective": "classes", "classes": 3, "mask": "full", "vocab": 0, "padded_vocab": 0, "context": 16,
        "patches": Patches(image=16, size=4, class_row=False, pool="mean"), "positions": "none", "windows": windows,
        "layer_pattern": ("full", "shifted"), "row_multiple": 8,
        "relative_positions": RelativePositions(side=2, ranges=9, shared=False, learned_row=False),
    }  # fmt: skip
    config = small(**swin, data={"seq": 24})
    task, rows = decoder.task(config), config.data.batch
    arrays = state.arrays(task)
    forward = jax.make_jaxpr(lambda params, batch: task.sums(params, batch, None))(arrays.params, task.batch(rows))
    vectors = {0: 0, 1: 0}
    for leaf, like in pairs(arrays.named_params, arrays.params):
        if len({*leaf.axes} - {"layers"}) == 1:
            vectors[leaf.path.startswith(("level_1", "classifier"))] += like.size
    head = 6 * rows * 64 * config.model.classes
    counted = 6 * rows * (24 * vectors[0] + 8 * vectors[1])
    assert model_flops(config, arrays) == pytest.approx(3 * jaxpr_flops(forward.jaxpr) - head + counted)


def test_model_flops_of_masks_are_those_of_the_image_and_of_the_tokens_of_a_prompt(small):
    """As above. The trace looks up kinds of points by a product, and it multiplies ones in place of a key's place."""
    config = small(
        objective="masks", masks=Masks(embed=32, mlp=40), mask="full", vocab=0, padded_vocab=0, context=36,
        patches=Patches(image=24, size=4, class_row=False, pool="mean"), positions="learned", data={"seq": 36},
        windows=Windows(size=3, vectors=True), layer_pattern=("full", "whole"), final_norm=False,
    )  # fmt: skip
    task, rows, model = decoder.task(config), config.data.batch, config.model
    arrays = state.arrays(task)
    forward = jax.make_jaxpr(lambda params, batch: task.sums(params, batch, None))(arrays.params, task.batch(rows))
    vectors = [
        like.size for leaf, like in pairs(arrays.named_params, arrays.params)
        if len({*leaf.axes} - {"layers"}) == 1 and not leaf.path.startswith("masks.")
    ]  # fmt: skip
    places = 36 * model.heads * (2 * 3 * 3**2 + 2 * 6 * 6**2)
    wanted = 3 * jaxpr_flops(forward.jaxpr) + 6 * rows * (36 * sum(vectors) - places - 2 * 4 * 32)
    assert model_flops(config, arrays) == pytest.approx(wanted)


@pytest.mark.parametrize(
    "settings",
    [
        BERT,
        {"relative_positions": dataclasses.replace(NEAR, shared=False)},
        {**BERT, "shared_layers": True, "embedding_width": 16, "embedding_in": "sum", "tied_embeddings": False},
        {"objective": "replaced", "mask": "full", "classes": 1, "classes_of": "tokens"},
        {"kv_heads": 1},
        {"tied_embeddings": True, "positions": "learned", "mlp_kind": "plain", "norm": "layernorm", "norm_bias": True},
        {"layer_pattern": ("sliding", "full"), "sliding_window": 5},
        {"latent_attention": LatentAttention(kv_rank=16, q_rank=12, v_head_dim=3), "head_dim": 6, "rope_dim": 2},
    ],
)
def test_model_flops_are_three_times_those_of_the_traced_forward_pass(small, settings):
    """But for keys that a token does not see, which are traced, and for norms and biases, which multiply nothing."""
    config = small(layers=2, **settings)
    task, model, tokens = decoder.task(config), config.model, config.data.batch * config.data.seq
    arrays = state.arrays(task)
    forward = jax.make_jaxpr(lambda params, batch: task.sums(params, batch, None))(arrays.params, task.batch(task.rows))
    unseen_keys = config.data.seq * model.layers - keys_seen(model, config.data.seq)
    per_key = 6 * model.heads * (model.head_dim + model.v_head_dim)
    vectors = [
        like.size * (model.layers if model.shared_layers and leaf.path.startswith("layers") else 1)
        for leaf, like in pairs(arrays.named_params, arrays.params) if len({*leaf.axes} - {"layers"}) == 1
    ]  # fmt: skip
    not_multiplied = 6 * sum(vectors) - per_key * unseen_keys
    assert model_flops(config, arrays) == pytest.approx(3 * jaxpr_flops(forward.jaxpr) + tokens * not_multiplied)
