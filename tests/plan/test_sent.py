"""What a plan says that is sent is what the trace of the step says."""

import dataclasses

import pytest

from gspmd_lm import config as configs
from gspmd_lm.config import (
    Encoder,
    LatentAttention,
    Lora,
    Masks,
    Queries,
    RelativePositions,
    RelativeVectors,
    Vision,
    Windows,
)
from gspmd_lm.config.media import Patches
from gspmd_lm.config.windows import Level
from gspmd_lm.hardware import target as targets
from gspmd_lm.model.kernels import grouped
from gspmd_lm.plan.estimate import Estimator
from gspmd_lm.sharding import permutes, rules_file
from gspmd_lm.sharding.rules import Remat


@pytest.fixture(scope="module")
def simulated(llama):
    """One pricer for all layouts and policies: what they share must not be what sets them apart."""
    return Estimator(llama, targets.parse("cpu:8"))


@pytest.fixture(scope="module")
def sent(read):
    """A function that gives the bytes that a step sends by its trace, of each mesh axis alone."""
    return lambda step: {axes: size for axes, size in read(step).bytes_by_axes.items() if axes in step.rules.mesh}


REMATS = {
    "none": Remat(), "block": Remat("block"), "dots": Remat("dots"), "residual": Remat("names", ("residual",)),
    "q": Remat("names", ("q",)),
}  # fmt: skip
ROWS_ALONE, OF_TENSOR = ("fsdp8", "dp8", "zero1_8"), ("tp8", "whole keys", "fsdp2_tp4", "dp2_tp4")
# Each policy where sums and gathers both depend on it, each policy of sums alone, and what microbatches repeat.
BY_DEFAULT = {
    *(("fsdp2_tp4", remat, 1) for remat in REMATS if remat != "block"), ("fsdp2_tp4", "block", 2),
    ("dp2_tp4", "residual", 2), ("whole keys", "none", 2), ("fsdp8", "q", 1), ("zero1_8", "block", 1),
}  # fmt: skip
SENT = [(layout, remat, 1) for layout in (*ROWS_ALONE, *OF_TENSOR) for remat in REMATS]
SENT += [(layout, remat, 2) for layout in OF_TENSOR for remat in REMATS]


@pytest.mark.parametrize(
    ("layout", "remat", "microbatches"),
    [case if case in BY_DEFAULT else pytest.param(*case, marks=pytest.mark.slow) for case in SENT],
)
def test_what_is_sent_is_what_the_trace_says(llama, simulated, built, sent, layout, remat, microbatches):
    """`plan` has rules of its own for what a decoder sends, which are asked thousands of times."""
    if layout == "whole keys":  # queries are split finer than the keys that they share
        raw = {"mesh": {"tensor": 8}, "rules": {"heads": "tensor", "mlp": "tensor", "vocab": "tensor"}}
        file = rules_file.from_dict(raw, layout)
    else:
        file = rules_file.load(layout)
    step = built(llama, dataclasses.replace(file, microbatches=microbatches, remat=REMATS[remat]))
    # Scalars are left out, and scales of norms that are gathered again.
    assert simulated.estimate(step.rules).sent_by_axis == pytest.approx(sent(step), rel=1e-4)


LAYOUTS = {
    "fsdp8": {"mesh": {"fsdp": 8}, "rules": {"batch": "fsdp"}, "weights": {"width": "fsdp"}},
    "tp8": {"mesh": {"tensor": 8}, "rules": {"mixed": "tensor"}},
    "fsdp2_tp4": {"mesh": {"fsdp": 2, "tensor": 4}, "rules": {"batch": "fsdp", "mixed": "tensor"},
                  "weights": {"width": "fsdp"}},
    "dp2_tp4": {"mesh": {"data": 2, "tensor": 4}, "rules": {"batch": "data", "mixed": "tensor"}},
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_a_model_of_ones_own_sends_is_what_the_trace_says(mixer, traces_of, built, sent, layout):
    file = rules_file.from_dict(LAYOUTS[layout], layout, vocabulary=mixer.names)
    step = built(mixer, file)
    found = Estimator(mixer, targets.parse("cpu:8"), traces_of(mixer)).estimate(step.rules).sent_by_axis
    assert found == pytest.approx(sent(step), abs=32)  # scalars are left out


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["llama3_8b", "t5_11b"])
def test_what_a_published_model_sends_is_what_the_trace_says(traces_of, built, sent, name, layout):
    """A decoder, and a model with two stacks, at their own batch and length."""
    config = configs.load(name)
    step = built(config, layout)
    found = Estimator(config, targets.parse("cpu:8"), traces_of(config)).estimate(step.rules).sent_by_axis
    # The sums of each token's softmax are left out, and scales of norms that are gathered again. Of what two stacks
    # look up, the trace gives the least that suffices.
    two_stacks = (name, layout) == ("t5_11b", "fsdp2_tp4")
    assert found == pytest.approx(sent(step), rel=2e-3 if two_stacks else 1e-4)


TRAVEL = {"mesh": {"expert": 4}, "rules": {"batch": "expert", "expert": "expert"}}


@pytest.mark.parametrize(
    "remat",
    [
        "block",
        pytest.param({"save": ["dispatched"]}, marks=pytest.mark.long),
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("none", "dots")),
    ],
)
def test_what_tokens_that_travel_send_is_what_the_trace_says(small, built, sent, monkeypatch, remat):
    """There and back in both passes, once more there where they are not kept, and the gradients of their weights home.

    This is traced as for a TPU. On CPUs, every device is sent all rows. Of rounds, the trace counts the first.
    """
    monkeypatch.setattr(permutes, "platform", lambda: "tpu")
    config = small(**{"experts.count": 8, "experts.per_token": 2, "experts.mlp": 16, "experts.balance": "row"})
    step = built(config, rules_file.from_dict({**TRAVEL, "remat": remat}, "here.yaml"))
    found = Estimator(config, targets.parse("cpu:4")).estimate(step.rules).sent_by_axis
    assert found == pytest.approx(sent(step), rel=2.5e-3)  # how many rows each expert gets is left out


@pytest.mark.long
def test_products_of_further_rounds_are_not_counted(small, built, read, monkeypatch):
    """Of a buffer, what even loads fill is counted; of rounds, the first."""
    monkeypatch.setattr(permutes, "platform", lambda: "tpu")
    monkeypatch.setattr(grouped, "platform", lambda: "recorded")
    config = small(
        **{"experts.count": 8, "experts.per_token": 2, "experts.mlp": 16, "experts.balance": "row"}, layers=1
    )
    rules = rules_file.from_dict({**TRAVEL, "remat": "block"}, "here.yaml")
    once, rounds = (read(built(config, rules, expert_buffer=room)) for room in (4.0, 1.0))
    assert rounds.flops == pytest.approx(once.flops)
    assert rounds.model_flops < once.model_flops  # which takes buffers as full


LATENT = {
    "attention.latent": LatentAttention(kv_rank=16, q_rank=24, v_head_dim=4),
    "head_dim": 6,
    "attention.rope.dim": 2,
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("layout", "remats"),
    [
        ("tp8", [Remat(), Remat("names", ("kv_latent", "k_rope"))]),
        pytest.param("tp8", [Remat("block")], marks=pytest.mark.slow),
        pytest.param("cp8", [Remat(), Remat("block"), Remat("names", ("kv_latent", "k_rope"))], marks=pytest.mark.slow),
    ],
)
def test_what_latent_attention_sends_is_what_the_trace_says(small, built, sent, layout, remats):
    config = small(**LATENT)
    estimator = Estimator(config, targets.parse("cpu:8"))
    for remat in remats:
        step = built(config, dataclasses.replace(rules_file.load(layout), remat=remat))
        assert estimator.estimate(step.rules).sent_by_axis == pytest.approx(sent(step), rel=9e-3)  # scales are left out


@pytest.mark.long
def test_forms_of_a_split_sequence_have_traces_of_their_own(small, built, sent):
    """Latent attention gathers vectors or keys, as the form says, so an estimate is none of another form's trace."""
    config = small(**LATENT)
    estimator = Estimator(config, targets.parse("cpu:8"))
    for layout in ("cp8", "cp8_ring", "cp8_ulysses"):
        step = built(config, layout)
        assert estimator.estimate(step.rules).sent_by_axis == pytest.approx(sent(step), rel=0.03), layout


ENCODER = {
    "attention.mask": "full",
    "positions": "learned",
    "embedding.token_types": 2,
    "feed_forward.kind": "plain",
    "attention.qkv_bias": True,
}
ENCODERS = {
    "masked": {"objective": "masked", "logits.transform": True, "embedding.tied": True, **ENCODER},
    "shared": {"objective": "masked", "logits.transform": True, "embedding.tied": True, **ENCODER,
               "shared_layers": True,
               "embedding.width": 16, "embedding.input": "sum", "layers": 4},
    "classes": {"objective": "classes", "classes.count": 3, **ENCODER},
    "replaced": {"objective": "replaced", "classes.count": 1, "classes.of": "tokens", **ENCODER},
    "images": {"objective": "classes", "classes.count": 3, **ENCODER, "embedding.token_types": 0, "vocab": 0,
               "padded_vocab": 0,
               "patches": Patches(image=12, size=4), "context": 10},
    "windows": {"objective": "classes", "classes.count": 3, "attention.mask": "full", "feed_forward.kind": "plain",
                "vocab": 0,
                "padded_vocab": 0, "patches": Patches(image=16, size=4, class_row=False, pool="mean"), "context": 16,
                "positions": "none", "windows": Windows(size=2, shift=1, levels=(
                    Level(layers=2, embed=64, heads=8, mlp=256),)), "layer_pattern": ("full", "shifted"),
                "row_multiple": 8},
    "texts and images": {"objective": "contrastive", "positions": "learned", "feed_forward.kind": "plain",
                         "attention.qkv_bias": True,
                         "vision": Vision(patches=Patches(image=16, size=4), projection=24, embed=48, head_dim=6),
                         "data": {"source_seq": 24}},
    "captions": {"positions": "learned", "feed_forward.kind": "plain", "attention.qkv_bias": True, "vision": Vision(
        patches=Patches(image=16, size=4), embed=48, head_dim=6, queries=Queries(rows=8, embed=40, head_dim=5)),
        "data": {"seq": 24, "source_seq": 24}},
    "summaries": {"objective": "seq2seq", "encoder": Encoder(layers=2), "positions": "none", "data": {"source_seq": 16},
                  "attention.relative_positions": RelativePositions(ranges=8, distance=6)},
    "objects": {"objective": "masks", "masks": Masks(embed=64, mlp=256), "attention.mask": "full",
                "feed_forward.kind": "plain",
                "vocab": 0, "padded_vocab": 0, "patches": Patches(image=24, size=4, class_row=False, pool="mean"),
                "context": 36, "positions": "none", "windows": Windows(size=4, vectors=True),
                "layer_pattern": ("full", "whole"), "norm.final": False, "data": {"seq": 40}},
    "near": {"objective": "masked", "attention.mask": "full",
             "attention.relative_positions": RelativePositions(ranges=8)},
    "vectors": {"objective": "masked", "attention.mask": "full", "positions": "none", "attention.qkv_bias": True,
                "attention.relative_vectors": RelativeVectors(ranges=8, distance=10)},
    "own vectors": {"objective": "masked", "attention.mask": "full", "positions": "none", "attention.qkv_bias": True,
                    "attention.key_bias": False,
                    "attention.relative_vectors": RelativeVectors(ranges=20, distance=10, own_projections=True)},
}  # fmt: skip
# "shared" has all that "masked" and "replaced" have, windows what images and classes have, and "summaries", below, what
# "near" has. What tensor parallelism sends is a part of what fsdp2_tp4 does.
LONG = ("windows", "texts and images")
HELD_BY_OTHERS = ("masked", "classes", "images", "replaced", "near")
RARE = ("captions", "summaries", "objects", "own vectors")
DEFAULT = [("cp8", "images"), *(("fsdp2_tp4", name) for name in ENCODERS if name not in (*HELD_BY_OTHERS, *RARE))]
OTHERS = [
    ("tp8", "masked"),
    ("cp8_ulysses", "summaries"),
    *(("fsdp2_tp4", name) for name in HELD_BY_OTHERS[1:]),
    *((layout, name) for name in RARE for layout in ("fsdp2_tp4", "fsdp8")),
    *(("cp8", name) for name in ENCODERS if name not in ("images", "windows", "objects")),
]


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        *(pytest.param(*case, marks=pytest.mark.long if case[1] in LONG else ()) for case in DEFAULT),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS),
    ],
)
def test_what_an_encoder_sends_is_what_the_trace_says(small, built, sent, layout, kind):
    config = small(**ENCODERS[kind])
    step = built(config, layout)
    found = Estimator(config, targets.parse("cpu:8")).estimate(step.rules).sent_by_axis
    of_axes = {axis: size for axis, size in found.items() if axis in step.rules.mesh}
    # Scales, biases and small tables are left out, and a first token is priced as its whole row: here they weigh much.
    assert of_axes == pytest.approx(sent(step), rel=0.04 if kind == "texts and images" else 0.14)


def context_and_tensor(sequences, heads, **keys):
    """Rules that split sequences over one mesh axis, and heads, hidden units and the vocabulary over another."""
    rules = {"seq": "context", **dict.fromkeys(("heads", "kv_heads", "mlp", "vocab"), "tensor")}
    raw = {"mesh": {"context": sequences, "tensor": heads}, "rules": rules, "remat": "block", **keys}
    return rules_file.from_dict(raw, "mixed")


@pytest.mark.long
@pytest.mark.parametrize(
    ("context", "tensor", "form"),
    [
        (2, 4, "gather"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((4, 2, "gather"), (4, 2, "ulysses"))),
    ],
)
def test_two_stacks_send_over_context_and_tensor_what_the_trace_says(small, built, sent, context, tensor, form):
    """What the encoder made is gathered once for all layers that read it, and so is the sum of its gradients."""
    config = small(**ENCODERS["summaries"], **{"embedding.tied": True})
    step = built(config, context_and_tensor(context, tensor, context=form))
    found = Estimator(config, targets.parse("cpu:8")).estimate(step.rules).sent_by_axis
    assert found == pytest.approx(sent(step), rel=0.03)


@pytest.mark.parametrize("layout", ["zero1_8", pytest.param("fsdp8", marks=pytest.mark.slow)])
def test_a_tied_table_has_two_gradients_and_is_gathered_once(small, built, sent, layout):
    config = small(**{"embedding.tied": True})
    step = built(config, layout)
    found = Estimator(config, targets.parse("cpu:8")).estimate(step.rules).sent_by_axis
    assert found == pytest.approx(sent(step), rel=3e-3)  # scales are left out


@pytest.mark.long
def test_keys_go_round_a_ring_again_for_attention_that_is_computed_again(small, built, sent):
    step = built(small(), context_and_tensor(4, 2, context="ring"))
    found = Estimator(small(), targets.parse("cpu:8")).estimate(step.rules).sent_by_axis
    assert found == pytest.approx(sent(step), rel=0.02)


FROZEN = {
    "below": {"frozen": ("embedding", "layers")},  # no layer has a gradient
    "above": {"frozen": ("layers", "final_norm", "unembedding")},
    "adapters": {"lora": Lora(rank=2, targets=("wq", "w_down"))},
    "captions": {**ENCODERS["captions"], "frozen": ("vision",)},
    "captions, queries alone": {**ENCODERS["captions"], "frozen": (
        "vision", "layers", "embedding", "unembedding", "position_embedding", "final_norm")},
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("below", "fsdp2_tp4"),
        ("above", "fsdp2_tp4"),
        *(pytest.param(kind, "fsdp2_tp4", marks=pytest.mark.slow) for kind in [*FROZEN][2:]),
        *(pytest.param(kind, "cp8", marks=pytest.mark.slow) for kind in FROZEN),
    ],
)
def test_what_is_frozen_sends_no_gradients_and_what_lies_below_does_not_either(small, built, sent, kind, layout):
    config, file = small(**FROZEN[kind]), rules_file.load(layout)
    estimator, rel = Estimator(config, targets.parse("cpu:8")), 0.06 if "captions" in kind else 0.04
    for remat in (Remat("block"), Remat("names", ("q", "k", "v"))):
        step = built(config, dataclasses.replace(file, remat=remat))
        assert estimator.estimate(step.rules).sent_by_axis == pytest.approx(sent(step), rel=rel)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "dots", "residual"])
@pytest.mark.parametrize("kind", ["summaries", "objects"])
def test_what_two_stacks_send_depends_on_what_is_computed_again(small, built, sent, kind, remat):
    """Blocks alone are computed again: what stands behind them is gathered once for both passes."""
    config = small(**ENCODERS[kind])
    step = built(config, dataclasses.replace(rules_file.load("fsdp2_tp4"), remat=REMATS[remat]))
    found = Estimator(config, targets.parse("cpu:8")).estimate(step.rules).sent_by_axis
    for axis, size in sent(step).items():
        assert found[axis] == pytest.approx(size, rel=0.09)
