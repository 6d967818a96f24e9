"""The model FLOPs of a train step: those of its trace, but of attention those of the keys that a token sees."""

import pytest

from gspmd_lm.config import (
    Encoder,
    Frames,
    LatentAttention,
    Lora,
    Masks,
    Patches,
    Queries,
    RelativePositions,
    Vision,
    Windows,
)  # fmt: skip
from gspmd_lm.config.windows import Level
from gspmd_lm.foresight.bounds import seen_share, step_flops
from gspmd_lm.foresight.graph import DataflowGraph
from gspmd_lm.foresight.propagation import read_step
from gspmd_lm.infer import programs
from gspmd_lm.sharding import rules_file
from gspmd_lm.train import state
from tests.courses import trace_gradients

NEAR = RelativePositions(ranges=8, distance=12)
BERT = {
    "objective": "masked", "attention.mask": "full", "positions": "learned", "embedding.token_types": 2,
    "embedding.tied": True,
    "feed_forward.kind": "plain", "logits.transform": True, "logits.bias": True, "attention.relative_positions": NEAR,
}  # fmt: skip
IMAGES = {"attention.mask": "full", "vocab": 0, "padded_vocab": 0}
T5 = {
    "objective": "seq2seq", "encoder": Encoder(layers=3, heads=16, kv_heads=16, mlp=32, context=24),
    "positions": "none", "attention.relative_positions": NEAR, "embedding.tied": True, "data": {"source_seq": 24},
}  # fmt: skip
SETTINGS = {
    "T5": T5,
    "Whisper": {
        "objective": "seq2seq", "frames": Frames(bands=6), "positions": "learned",
        "encoder": Encoder(layers=3, heads=16, kv_heads=16, mlp=32, context=20),
        "embedding.tied": True, "feed_forward.kind": "plain", "norm.kind": "layernorm", "norm.bias": True,
        "data": {"source_seq": 24},
    },
    "CLIP": {
        "objective": "contrastive", "positions": "learned", "norm.kind": "layernorm", "data": {"source_seq": 24},
        "vision": Vision(patches=Patches(image=16, size=4), projection=24, embed=48, layers=1, head_dim=6),
    },
    "BLIP-2": {
        "vision": Vision(patches=Patches(image=16, size=4), embed=48, layers=1, head_dim=6,
                         queries=Queries(rows=8, layers=2, embed=40, head_dim=5, mlp=56)),
        "data": {"source_seq": 24},
    },
    "BEiT": {
        **IMAGES, "objective": "classes", "classes.count": 3, "context": 17, "positions": "learned",
        "norm.final": False,
        "patches": Patches(image=16, size=4, pool="mean"), "residual.layer_scale": 0.1, "data": {"seq": 24},
        "attention.relative_positions": RelativePositions(side=4, ranges=52, shared=False),
    },
    "Swin": {
        **IMAGES, "objective": "classes", "classes.count": 3, "context": 16, "positions": "none", "row_multiple": 8,
        "patches": Patches(image=16, size=4, class_row=False, pool="mean"), "layer_pattern": ("full", "shifted"),
        "windows": Windows(size=2, shift=1, levels=(Level(layers=3, embed=64, heads=4, mlp=32),)),
        "attention.relative_positions": RelativePositions(side=2, ranges=9, shared=False, learned_row=False),
        "data": {"seq": 24},
    },
    "SAM": {
        **IMAGES, "objective": "masks", "masks": Masks(embed=32, layers=1, mlp=40), "context": 36,
        "patches": Patches(image=24, size=4, class_row=False, pool="mean"), "layer_pattern": ("full", "whole"),
        "windows": Windows(size=3, vectors=True), "positions": "learned", "norm.final": False, "data": {"seq": 36},
    },
    "BERT": BERT,
    "ALBERT": {**BERT, "shared_layers": True, "embedding.width": 16, "embedding.input": "sum", "embedding.tied": False},
    "ELECTRA": {"objective": "replaced", "attention.mask": "full", "classes.count": 1, "classes.of": "tokens"},
    "one key head": {"kv_heads": 1},
    "learned": {"embedding.tied": True, "positions": "learned", "feed_forward.kind": "plain",
                "attention.qkv_bias": True},
    "window": {"layer_pattern": ("sliding", "full"), "attention.window": 5},
    "a layer more than the pattern": {
        "layers": 3, "layer_pattern": ("sliding", "full"), "attention.window": 5, "kv_heads": 1,
    },
    "latent": {
        "attention.latent": LatentAttention(kv_rank=16, q_rank=12, v_head_dim=3), "head_dim": 6,
        "attention.rope.dim": 2,
    },
    "adapters": {"lora": Lora(rank=4, targets=("wq", "w_down"))},
}  # fmt: skip
# Whisper has what T5 has, BLIP-2 what CLIP has, Swin what BEiT has but for its scales, ALBERT what BERT has, and the
# layer more than the pattern what the last two have.
MARKS = dict.fromkeys(("T5", "CLIP", "BEiT", "BERT", "window", "one key head"), pytest.mark.slow)  # as others have it
MARKS |= dict.fromkeys(("SAM", "BLIP-2", "Swin", "Whisper"), pytest.mark.long)

# What a trace multiplies with ones and zeros in place of a look-up: for the gradients of token types, for kinds of
# points, and for a key's place in its window.
_OF_TYPES = 2 * 32 * 16 * 2 * 32
LOOKED_UP = {
    "BERT": _OF_TYPES, "ALBERT": _OF_TYPES,
    "SAM": 4 * 32 * 2 * 4 * 32 + 6 * 32 * 36 * 8 * (2 * 3 * 3**2 + 2 * 6 * 6**2),
}  # fmt: skip


def graph(config):
    arrays = state.arrays(config)
    rules = rules_file.load("single").fill(1)
    return DataflowGraph.from_recorder(state.record_arrays(config, arrays, 1, rules), arrays)


def found(config):
    return step_flops(rules_file.load("single").fill(1), graph(config))


def keys_seen(config):
    """The keys that a token sees in all layers: of each kind of layer, the mean over a row, by the config's trace."""
    ops = graph(config).attention_ops
    return sum(seen_share(op) * op.keys.shape[1] * op.trip_count for op in ops)


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in SETTINGS])
def test_they_are_those_of_the_trace_without_keys_that_no_token_sees(small, built, name):
    config = small(**{"layers": 2} | SETTINGS[name])
    traced = read_step(trace_gradients(built(config, "single")).jaxpr).model_flops
    model, data = config.model, config.data
    seen = [min(t + 1, layer.attention.window or data.seq) for layer in model.each_layer for t in range(data.seq)]
    unseen_keys = data.seq * model.layers - sum(seen) / data.seq if model.attention.mask == "causal" else 0
    unseen = 6 * data.batch * data.seq * model.heads * (model.head_dim + model.v_head_dim) * unseen_keys
    assert found(config) == pytest.approx(traced - unseen - LOOKED_UP.get(name, 0))


def test_of_experts_those_of_the_chosen_ones_and_of_the_router_count(small):
    """Which bias an expert adds to a row is a look-up, though it is multiplied."""
    experts = {"experts.count": 8, "experts.per_token": 2}
    routed = 2 * 6 * 32 * 16 * 32 * 8
    assert (
        found(small(**experts))
        == found(small(mlp=2 * 64)) + routed
        == found(small(**experts, **{"feed_forward.bias": True}))
    )


def test_the_keys_that_tokens_see(small):
    """In a window, in a chunk, and before a token; counted one by one."""
    pattern = {
        "layers": 3,
        "layer_pattern": ("sliding", "chunked", "nope"),
        "attention.window": 5,
        "attention.chunk": 8,
    }
    seen = [[min(t + 1, 5), t % 8 + 1, t + 1] for t in range(20)]
    config = small(**pattern, data={"seq": 20})
    assert keys_seen(config) == pytest.approx(sum(map(sum, seen)) / 20)
    arrays, rules = state.arrays(config), rules_file.load("single").fill(1)
    decode = programs.record_arrays(config, arrays, programs.whole_context(config), rules)["decode"]
    ops = DataflowGraph.from_recorder(decode, arrays).attention_ops
    assert [seen_share(op) * op.keys.shape[1] for op in ops] == pytest.approx(seen[-1])


def test_with_a_full_mask_a_token_sees_all_of_its_row_or_chunk(small):
    config = small(objective="masked", **{"attention.mask": "full", "attention.chunk": 8}, layers=2,
                   layer_pattern=("full", "chunked"),
                   data={"seq": 20})  # fmt: skip
    assert keys_seen(config) == pytest.approx(20 + (2 * 8 * 8 + 4 * 4) / 20)
