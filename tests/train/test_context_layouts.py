"""Context parallelism never changes the loss: every form, beside every other way of splitting, and what it sends."""

import dataclasses

import pytest

from benchmarks.collectives import count
from gspmd_lm.config import AttentionTemperature, LatentAttention, LinearAttention
from gspmd_lm.errors import InputError
from gspmd_lm.sharding import rules_file
from gspmd_lm.train import state
from tests.courses import agree, trace_gradients

B, T, L, K, H = 8, 32, 2, 4, 4
TENSOR = {"heads": "tensor", "kv_heads": "tensor", "mlp": "tensor", "vocab": "tensor"}


def rules_of(form, mesh, rules, **more):
    raw = {"mesh": mesh, "rules": {"seq": "context", **rules}, "context": form, **more}
    return rules_file.from_dict(raw, "here.yaml")


@pytest.fixture(scope="module")
def settings(small):
    def make(**model):
        data = {"batch": B, "seq": T, "packing": model.pop("packing", "documents")}
        unclipped = {"clip_norm": 0.0, "warmup_steps": 0}
        usual = {"kv_heads": K, "dropout": 0.1, "logits.z_loss": 1e-3, "layers": L, "context": 64}
        return small(data=data, optimizer=unclipped, **usual | model)

    return make


@pytest.fixture(scope="module")
def same(settings, course):
    """A function that compares a layout with one device and returns its program."""

    def check(rules, **model):
        found = course(settings(**model), rules)
        agree(found, course(settings(**model), "single", unroll=1))
        return found.program

    return check


# What a form sends of attention in a step: (collective, elements on a device, times). remat: save attention_out.
HERE = B // 2 * (T // 4) * H  # of one head of a device's tokens
SENT = {
    "gather": {("all-gather", 2 * 4 * HERE * K, 2 * L), ("reduce-scatter", 2 * HERE * K, L)},
    # Keys and values forward and backward, and their gradients: 3 of 4 devices' in turn, and never a turn in vain.
    "ring": {("collective-permute", HERE * K, 6 * 3 * L)},
    # Queries and result, and keys and values: forward, again, and their gradients; the result is kept.
    "ulysses": {("all-to-all", HERE * 8, (3 + 2) * L), ("all-to-all", HERE * K, 6 * L)},
}


@pytest.mark.long
@pytest.mark.parametrize("form", ["gather", "ring", "ulysses"])
def test_a_form_changes_nothing_and_sends_the_least(form, same):
    """Beside fully sharded weights, with packed documents, dropout, z-loss and blocks that are computed again."""
    weights, kept = {"embed": ["fsdp", "context"]}, {"save": ["attention_out"]}
    rules = rules_of(form, {"fsdp": 2, "context": 4}, {"batch": "fsdp"}, weights=weights, remat=kept)
    found = [c for c in count(same(rules).as_text()) if "attention/shard_map" in c.op_name and c.dtype == "f32"]
    sent = {}
    for c in found:
        sent[c.kind, c.elements] = sent.get((c.kind, c.elements), 0) + c.times
    assert {(kind, elements, times) for (kind, elements), times in sent.items()} == SENT[form]


LATENT = {
    "attention.latent": LatentAttention(kv_rank=16, q_rank=24, v_head_dim=4), "head_dim": 6, "attention.rope.dim": 2,
    "kv_heads": 8,
}  # fmt: skip


def latent_rules():
    weights, kept = {"embed": ["fsdp", "context"]}, {"save": ["attention_out"]}
    return rules_of("gather", {"fsdp": 2, "context": 4}, {"batch": "fsdp"}, weights=weights, remat=kept)


@pytest.mark.long
def test_of_latent_attention_the_vectors_are_gathered_that_keys_are_made_from(settings, built):
    """16 and 2 numbers for each token, not 6 + 4 for each of its heads; and their gradients are a reduce-scatter."""
    found = count(trace_gradients(built(settings(**LATENT), latent_rules())).lower().compile().as_text())
    sent = {}
    for c in found:
        if "attention" in c.op_name and "keys" in c.op_name and c.dtype == "f32":
            sent[c.kind, c.elements] = sent.get((c.kind, c.elements), 0) + c.times
    here = B // 2 * (T // 4)
    both = {}
    for width in (16, 2):
        both |= {("all-gather", 4 * here * width): 2 * L, ("reduce-scatter", here * width): L}
    assert sent == both


@pytest.mark.slow
@pytest.mark.parametrize("whole", [{}, {"kv_latent.seq": None}, {"kv_latent.seq": None, "k_rope.seq": None}], ids=str)
@pytest.mark.parametrize("mesh", [{"fsdp": 2, "context": 4}, {"context": 4, "tensor": 2}], ids=str)
def test_latent_attention_whose_vectors_are_gathered_stays_the_same(mesh, whole, same):
    """With packed documents, dropout and blocks that are computed again. Vectors may be whole by the rules."""
    rules = {"batch": "fsdp"} if "fsdp" in mesh else {name: TENSOR[name] for name in ("heads", "mlp", "vocab")}
    rules |= whole
    same(rules_of("gather", mesh, rules, remat="block"), **LATENT)


TWO_KINDS = {"layer_pattern": ("sliding", "chunked"), "attention.window": 7, "attention.chunk": 5}


@pytest.mark.long
def test_gradients_of_weights_are_summed_over_tokens_at_once(settings, built):
    """A reduce-scatter over both axes for each matrix, and no all-reduce of one."""
    rules = rules_of("gather", {"fsdp": 2, "context": 4}, {"batch": "fsdp"}, weights={"embed": ["fsdp", "context"]})
    config = settings(packing="stream", positions="learned", dropout=0.0, **TWO_KINDS)
    found = count(trace_gradients(built(config, rules)).lower().compile().as_text())
    assert not [c for c in found if c.kind == "all-reduce" and c.elements > 64 * 32]
    assert {c.group_size for c in found if c.kind == "reduce-scatter" and "optimizer.layers" in c.op_name} == {8}


MESHES = {
    "alone": ({"context": 8}, {}, {}),
    "over two axes": ({"context": 4, "tensor": 2}, {"seq": ["tensor", "context"]}, {}),
    "tensor": ({"context": 4, "tensor": 2}, TENSOR, {"remat": "dots"}),
    "tensor, split residual": (
        {"context": 4, "tensor": 2}, {**TENSOR, "residual.seq": ["context", "tensor"]}, {"remat": "block"}
    ),
    "data, microbatches": ({"data": 2, "context": 4}, {"batch": "data"}, {"microbatches": 2}),
    "repeated keys": ({"context": 2, "tensor": 4}, {**TENSOR, "kv_heads": None}, {}),
    "three": (
        {"fsdp": 2, "tensor": 2, "context": 2}, {"batch": "fsdp", **TENSOR},
        {"weights": {"embed": "fsdp"}, "remat": {"save": ["k", "v"]}},
    ),
}  # fmt: skip
KINDS = {
    "window, alibi": {"attention.window": 7, "positions": "alibi"},
    "chunks": {
        "attention.chunk": 5,
        "layer_pattern": ("chunked", "nope"),
        "attention.temperature": AttentionTemperature(every=3, offset=1, layers="nope"),
    },
    "rounded alibi": {"positions": "alibi_bf16"},
    "sinusoids, parallel": {"positions": "sinusoidal", "block": "parallel", "packing": "stream"},
    "learned, tied, capped": {"positions": "learned", "embedding.tied": True, "attention.softcap": 2.0},
}
# Each form with each mesh, and with each kind.
PAIRS = [
    (form, mesh, list(KINDS)[(i + j) % len(KINDS)]) for i, form in enumerate(SENT) for j, mesh in enumerate(MESHES)
]


@pytest.mark.slow
@pytest.mark.parametrize(("form", "mesh", "kind"), PAIRS)
def test_every_form_beside_every_other_split(form, mesh, kind, same, settings):
    sizes, rows, more = MESHES[mesh]
    rules, model = rules_of(form, sizes, rows, **more), {**KINDS[kind], "kv_heads": 8 if mesh != "repeated keys" else 4}
    if form == "ring" and "alibi" in model.get("positions", ""):
        model |= {"positions": "rope", "attention.window": 0}
    same(rules, **model)


REFUSED = {
    "heads": ("ulysses", {"kv_heads": 2}, "ulysses: 2 key heads of a device (kv_heads) do not divide over context=4"),
    "window": ("ring", {"attention.window": 8}, "ring cannot do model.attention.window: 8"),
    "alibi": ("ring", {"positions": "alibi"}, "ring cannot do model.positions: alibi"),
    "scores": ("ring", {"attention.scores_dtype": "bfloat16"}, "ring cannot do model.attention.scores_dtype: bfloat16"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_form_cannot_do_is_refused_with_row_and_fix(name, settings):
    form, model, words = REFUSED[name]
    rules = rules_of(form, {"data": 2, "context": 4}, {"batch": "data"})
    with pytest.raises(InputError) as raised:
        state.arrays_and_warnings(settings(**model), rules, "cpu")
    assert f"context: {words}\n  rule  here.yaml: context: {form}\n  fix   --set rules.context=gather" in str(
        raised.value
    )


def test_linear_attention_needs_whole_rows(settings):
    linear = LinearAttention(key_heads=4, value_heads=8, head_dim=4)
    with pytest.raises(InputError, match=r"model\.attention\.linear: a state goes from token to token"):
        state.arrays_and_warnings(
            settings(**{"attention.linear": linear}), rules_of("gather", {"context": 8}, {}), "cpu"
        )


def test_rows_that_cannot_be_dealt(settings):
    """A ring has no other order. Keys can be gathered in any, but then the last device has most of the work."""
    config = settings()
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, seq=20))
    (warning,) = state.arrays_and_warnings(
        config, rules_of("gather", {"data": 2, "context": 4}, {"batch": "data"}), "cpu"
    )[1]
    assert "data.seq=20 does not divide into 2 pieces for each of context=4" in str(warning)
    with pytest.raises(InputError, match=r"ring: data.seq=20 does not divide(.|\n)*make data.seq a multiple of 8"):
        state.arrays_and_warnings(config, rules_of("ring", {"data": 2, "context": 4}, {"batch": "data"}), "cpu")


def test_a_kernel_that_cannot_do_a_form_is_refused(settings):
    mesh, rows, kernels = {"data": 2, "context": 4}, {"batch": "data"}, {"gpu": "cudnn", "tpu": "splash"}
    model = {"packing": "stream", "compute_dtype": "bfloat16", "head_dim": 8}
    rules = rules_of("gather", mesh, rows, attention=kernels)
    with pytest.raises(InputError, match=r"cudnn cannot do context: gather(.|\n)*fix   .*or --set rules.context=ring"):
        state.arrays_and_warnings(settings(**model), rules, "gpu")
    with pytest.raises(InputError, match=r"splash cannot do pieces of 4 tokens of data\.seq: 32"):
        state.arrays_and_warnings(settings(**model), rules, "tpu")
    for form in ("ring", "ulysses"):
        state.arrays_and_warnings(settings(**model), rules_of(form, mesh, rows, attention={"gpu": "cudnn"}), "gpu")
    single = rules_of("ring", mesh, {**rows, "seq": None, "q.seq": "context"})
    with pytest.raises(InputError, match="ring needs a sequence that is split alike"):
        state.arrays_and_warnings(settings(), single, "cpu")
