"""The bytes that a split must move: counts from the literature, and what compiled programs move."""

import dataclasses

import jax
import numpy as np
import pytest

from benchmarks.collectives import count, ring_bytes
from gspmd_lm import config as configs
from gspmd_lm.config import LatentAttention, Lora, Patches, Queries, Vision, with_values
from gspmd_lm.foresight.bounds import necessary_flops, program_bounds, step_flops, training_bounds
from gspmd_lm.foresight.graph import DataflowGraph
from gspmd_lm.foresight.propagation import read_step
from gspmd_lm.hardware.chips import CHIPS
from gspmd_lm.sharding import permutes, rules_file
from gspmd_lm.sharding.problems import check
from gspmd_lm.sharding.rules import Remat, Row
from gspmd_lm.sharding.shapes import pairs
from gspmd_lm.train import decoder, state

B, T, D, L, V = 8, 8192, 4096, 32, 128256
TOKENS = B * T
ACTIVATION_BYTES = 2 * TOKENS * D  # [B, T, D] in bfloat16
HEADS, KV, MLP = D * 32 * 128, D * 8 * 128, D * 14336
LATENT = {
    "attention.latent": LatentAttention(kv_rank=16, q_rank=24, v_head_dim=4), "head_dim": 6, "attention.rope.dim": 2,
}  # fmt: skip
MLPS = Lora(rank=4, alpha=8.0, targets=("w_gate", "w_up", "w_down"))
LAYER = 2 * HEADS + 2 * KV + 3 * MLP  # elements of the matrices of a layer


def graph(config, rules, arrays):
    return DataflowGraph.from_recorder(state.record_arrays(config, arrays, rules.microbatches, rules), arrays)


@pytest.fixture(scope="module")
def llama():
    """Llama 3 8B with 8 rows of 8192 tokens, and its arrays."""
    config = configs.load("llama3_8b", [f"data.batch={B}"])
    return config, state.arrays(config)


@pytest.fixture(scope="module")
def floor_of(llama, built, read):
    """A function that gives the floor of Llama 3 8B under rules that may be changed.

    Each step is traced only once, and the forward pass once for each number of rows.
    """
    config, arrays = llama
    traced, graphs = {}, {}

    def found(rules, chip=None, rows=(), **changes):
        loaded = rules_file.load(rules) if isinstance(rules, str) else rules
        placed = [Row(key, key.split(".")[0], *("", *key.split(".")[1:])[-2:], names) for key, names in rows]
        others = [row for row in loaded.rows if row.key not in dict(rows)]
        changed = dataclasses.replace(loaded, rows=(*others, *placed), **changes)
        step = built(config, changed)
        check(step.rules.problems)
        key = repr(step.rules.facts())
        if key not in traced:
            traced[key] = read(step)
        rows = step.rules.microbatches
        if rows not in graphs:
            graphs[rows] = graph(config, step.rules, arrays)
        return training_bounds(step.task, step.rules, arrays, chip, graphs[rows], traced[key])

    return found


@pytest.mark.long
def test_tensor_parallelism_is_megatrons_count(floor_of):
    all_reduce = 2 * 7 / 8
    of_layers = 4 * L * all_reduce * ACTIVATION_BYTES
    outside = 2 * all_reduce * ACTIVATION_BYTES + 3 * all_reduce * 4 * TOKENS  # embedding, loss; its [B, T] sums
    found = floor_of("tp8")
    assert found.communication_by_axis == {"tensor": pytest.approx(of_layers + outside)}
    wider = of_layers + 2 * all_reduce * ACTIVATION_BYTES  # the sums of [B, T] are float32 already
    assert found.float32_bytes == pytest.approx(found.communication_bytes + wider)
    recomputed = L * all_reduce * ACTIVATION_BYTES  # what attention adds to the residual stream
    assert floor_of("tp8", remat=Remat("block")).communication_bytes == pytest.approx(of_layers + outside + recomputed)
    assert floor_of("tp8", remat=Remat("dots")).communication_bytes == pytest.approx(of_layers + outside)


@pytest.mark.long
def test_a_sequence_split_residual_has_gathers_and_scatters(floor_of):
    rows = [("rules.residual.seq", ("tensor",))]
    one = 7 / 8 * ACTIVATION_BYTES
    outside = 4 * one + 3 * 2 * 7 / 8 * 4 * TOKENS
    norms = 2 * 7 / 8 * 4 * (2 * L + 1) * D  # each device sees a part of the sequence
    kept, again = floor_of("tp8", rows=rows), floor_of("tp8", rows=rows, remat=Remat("dots"))
    assert kept.communication_bytes == pytest.approx(L * 8 * one + outside + norms)
    assert again.communication_bytes == pytest.approx(L * 10 * one + outside + norms)


@pytest.mark.long
def test_fully_sharded_weights_are_zeros_count(floor_of):
    n = 7 / 8
    layers = n * L * LAYER * 2 * 3  # bfloat16: gathered forward and backward, their gradients scattered
    tables = n * V * D * (2 + 4)  # the output matrix: bfloat16, gradient in float32
    lookups = n * (2 * ACTIVATION_BYTES / 8 + 4 * TOKENS)  # activations and ids are less than the table
    norms = n * 4 * (3 * 2 * L + 2) * D  # gathered once more where a layer is computed again
    assert floor_of("fsdp8").communication_by_axis == {"fsdp": pytest.approx(layers + tables + lookups + norms)}
    half = floor_of("fsdp8", mesh={"fsdp": 4}).communication_bytes * (7 / 8) / (3 / 4)
    twice = floor_of("fsdp8", mesh={"fsdp": 4}, microbatches=2).communication_bytes * (7 / 8) / (3 / 4)
    once = n * (V * D * 2 + 4 * D)  # the output matrix and the last norm are gathered once for both
    assert twice - half == pytest.approx(layers + norms + n * V * D * (2 + 4) - once, rel=1e-4)


def test_data_parallelism_reduces_each_gradient(floor_of, llama):
    tables, norms = 2 * V * D * 4, 4 * (2 * L + 1) * D
    found = floor_of("dp8").communication_by_axis
    assert found == {"data": pytest.approx(2 * 7 / 8 * (L * LAYER * 2 + tables + norms))}


@pytest.mark.long
def test_replicas_sum_their_gradients_once_for_all_microbatches(floor_of, llama):
    two = {"mesh": {"data": 2}}
    found = floor_of("dp8", microbatches=4, **two).communication_by_axis
    assert found == {"data": pytest.approx(2 * 1 / 2 * 4 * llama[1].parameter_count)}
    split = [floor_of("zero1_8", microbatches=count, **two).communication_bytes for count in (1, 4)]
    assert split[1] > 1.5 * split[0]


@pytest.mark.long
def test_zero_1_gathers_the_updated_weights_once(floor_of):
    one, four = (floor_of("zero1_8", mesh={"data": 2}, microbatches=count) for count in (1, 4))
    updated = 1 / 2 * 4 * (L * LAYER + 2 * V * D + (2 * L + 1) * D)
    scattered = one.communication_bytes - updated
    assert scattered > 1 / 2 * L * LAYER * 2
    lookups = 1 / 2 * (ACTIVATION_BYTES / 2 + 4 * TOKENS)  # of all microbatches together
    assert four.communication_bytes - updated == pytest.approx(4 * scattered - 3 * lookups, rel=1e-5)


def test_a_split_that_moves_nothing(floor_of):
    assert floor_of("none", mesh={"data": 8}).communication_bytes == 0


def test_a_split_sequence_gathers_keys_and_values(floor_of):
    """Forward once; their gradients come from all queries."""
    context = dataclasses.replace(rules_file.load("dp2_tp4"), mesh={"data": 2, "context": 4}, rows=())
    rows = [("rules.batch", ("data",)), ("rules.seq", ("context",))]
    keys_bytes = 2 * TOKENS / 2 * 8 * 128
    assert floor_of(context, rows=rows).communication_by_axis["context"] == pytest.approx(
        L * 2 * 2 * 3 / 4 * keys_bytes, rel=1e-4
    )


def test_keys_that_split_heads_share_are_summed(floor_of):
    """8 keys, 32 heads on 8 devices: a device has all heads of one key, and the gradients of keys are gathered."""
    more = floor_of("tp8", rows=[("rules.kv_heads", ())]).communication_bytes - floor_of("tp8").communication_bytes
    assert more == L * 2 * 7 / 8 * 2 * TOKENS * 8 * 128


@pytest.mark.long
def test_a_weight_split_over_what_its_input_is_not_is_gathered(floor_of):
    plain, split = floor_of("dp8"), floor_of("dp8", rows=[("rules.w_up.embed", ("data",))])
    matrix = L * 7 / 8 * 2 * MLP  # gathered twice; its gradient is scattered instead of reduced to all
    assert split.communication_bytes - plain.communication_bytes == pytest.approx((2 - 1) * matrix)
    # A mesh axis that splits nothing else could also reduce what the matrix gives, which is more.
    mesh = dataclasses.replace(rules_file.load("dp2_tp4"), rows=())
    rows = [("rules.batch", ("data",)), ("rules.w_up.embed", ("tensor",))]
    forward, backward = 2 * MLP, 2 * TOKENS / 2 * D  # the matrix; the gradient of its input, each part of it once
    sent = floor_of(mesh, rows=rows)
    assert sent.communication_by_axis["tensor"] == pytest.approx(L * 3 / 4 * (forward + backward))
    assert sent.estimated_because  # where the matrix could be gathered instead


def test_compute_and_memory_on_a_chip(floor_of, llama):
    _, arrays = llama
    chip = CHIPS["h100"]
    found = floor_of("fsdp8", chip)
    looked_up, norms = V * D, (2 * L + 1) * D
    flops = (6 * (arrays.parameter_count - looked_up - norms) + 12 * L * 32 * 128 * (T + 1) / 2) * TOKENS / 8
    assert found.flops == pytest.approx(flops)
    assert found.compute_s == pytest.approx(flops / 989e12)
    # Per parameter: weight, gradient, two moments, float32, an eighth of each; and twice the layers in bfloat16.
    state_bytes = 2 * 4 * 4 * arrays.parameter_count / 8
    in_use = 2 * 2 * (arrays.parameter_count - looked_up)
    kept = 2 * L * ACTIVATION_BYTES / 8
    assert found.memory_s == pytest.approx((state_bytes + in_use + kept) / 3352.32e9, rel=1e-6)
    # Microbatches share the activations, but each reads all weights.
    one, two = (floor_of("fsdp8", chip, mesh={"fsdp": 4}, microbatches=count) for count in (1, 2))
    assert two.memory_s - one.memory_s == pytest.approx(in_use / 3352.32e9, rel=1e-6)
    assert floor_of("fsdp8").compute_s is None and floor_of("fsdp8").memory_s is None


@pytest.mark.long
def test_what_remat_saves_is_written_and_read(floor_of):
    """Beside the inputs of layers, in [B, T, D] of each layer."""
    chip = CHIPS["h100"]
    least = floor_of("fsdp8", chip, remat=Remat("block"))

    def saved(*policy, **names):
        more_s = floor_of("fsdp8", chip, remat=Remat(*policy, **names)).memory_s - least.memory_s
        return more_s * 3352.32e9 / (2 * L * ACTIVATION_BYTES / 8)

    wide, keys = MLP / HEADS, KV / HEADS
    assert saved("names", save=("q", "k", "layer_input")) == pytest.approx(1 + keys, rel=1e-5)
    assert saved("names", save=("hidden",), offload=("residual",)) == pytest.approx(3 * wide + 1, rel=1e-5)
    products = 2 + 2 * keys + 2 * wide  # q, the residual stream with attention, k, v, and both products of the MLP
    assert saved("dots") == pytest.approx(products, rel=1e-5)
    assert saved("none") > products


@pytest.mark.long
def test_what_must_be_multiplied(llama):
    config, _ = llama
    rules = rules_file.load("fsdp8")

    def least(config):
        arrays = state.arrays(config)
        return necessary_flops(config, rules, graph(config, rules, arrays))

    per_token = 6 * (L * LAYER + V * D)  # the output matrix; tokens are only looked up
    full = TOKENS / 8 * (per_token + 12 * L * D * (T + 1) / 2)
    assert least(config) == pytest.approx(full)

    def of(**model):
        return dataclasses.replace(config, model=with_values(config.model, model))

    sliding = of(**{"attention.window": 1024}, layer_pattern=("sliding", "full"))
    seen = np.minimum(np.arange(T) + 1, 1024).mean()
    assert least(sliding) == pytest.approx(TOKENS / 8 * (per_token + 12 * L * D * (seen + (T + 1) / 2) / 2))
    tied, biased = (
        of(**{"embedding.tied": True}),
        of(**{"attention.qkv_bias": True, "norm.bias": True}, positions="learned"),
    )
    for other in (tied, biased):
        assert least(other) == pytest.approx(full)
    adapted = of(lora=Lora(rank=4, alpha=8.0, targets=("wq",)))
    frozen = per_token * (4 - 2 / L) / 6 + 12 * L * D * (T + 1) / 2
    assert least(adapted) == pytest.approx(TOKENS / 8 * (frozen + 6 * L * 4 * 2 * D))


MASKED = {
    "objective": "masked",
    "attention.mask": "full",
}  # each token sees all, so that the trace has no product too many
LAYERS = ("layers", "final_norm", "unembedding")


@pytest.mark.parametrize(
    "frozen",
    [
        pytest.param({"frozen": ("embedding",)}, marks=pytest.mark.slow),  # layers in a loop all pass a gradient on
        {"frozen": ("embedding", "layers")},  # no gradient goes farther than the last matrix
        {"frozen": LAYERS},  # the gradient of each token's row goes through all of them
        pytest.param({"frozen": ("embedding", *LAYERS[1:])}, marks=pytest.mark.slow),
        {"lora": Lora(rank=4, targets=("wq", "w_down"))},
    ],
)
def test_model_flops_are_those_of_the_gradients_that_a_step_computes(small, built, read, frozen):
    config, rules = small(**MASKED, **frozen), rules_file.from_dict({"mesh": {"data": 1}}, "one").fill(1)
    arrays = state.arrays(config)
    recorded = graph(config, rules, arrays)
    step, found = built(config, rules), step_flops(rules, recorded)
    reading = read(step)
    assert found == reading.model_flops
    assert training_bounds(step.task, rules, arrays, None, recorded, reading).flops == found
    # Gradients wait for their norm. XLA:TPU updates a weight in the fusion that makes its gradient, where it can.
    clipped, free = (
        training_bounds(decoder.task(with_values(config, {"optimizer.clip_norm": norm})), *rest).memory_s
        for norm in (1.0, 0.0)
        for rest in [(rules, arrays, CHIPS["v5p"], recorded, reading)]
    )
    trained = sum(like.size for _, like in pairs(arrays.named_trained, arrays.trained))
    assert clipped - free == pytest.approx(2 * 4 * trained / 2765e9)


@pytest.mark.long
def test_nothing_of_a_frozen_stack_that_sees_images_has_a_gradient_nor_what_keys_are_made_of(small):
    queries = Queries(rows=8, layers=3, embed=40, head_dim=5, mlp=56)
    vision = Vision(patches=Patches(image=16, size=4), embed=48, layers=1, head_dim=6, queries=queries)
    config = small(vision=vision, data={"source_seq": 24})
    frozen = dataclasses.replace(config, model=dataclasses.replace(config.model, frozen=("vision",)))
    arrays, rules = state.arrays(config), rules_file.load("single").fill(1)
    matrices = {
        leaf.path: like.size for leaf, like in pairs(arrays.named_params, arrays.params)
        if (len({*leaf.axes} - {"layers"}) > 1 and leaf.path.split(".")[-1][0] == "w") or leaf.path == "vision.stem"
    }  # fmt: skip
    of_vision = sum(size for path, size in matrices.items() if path.startswith("vision."))
    of_keys = sum(size for path, size in matrices.items() if path.endswith(("cross.wk", "cross.wv")))
    scores = 4 * config.model.heads * 2 * 6 * 24
    stem = matrices["vision.stem"]  # the pixels that it reads have no gradient in any case
    wanted = config.data.batch * 24 * (4 * of_vision - 2 * stem + scores + 2 * of_keys)
    whole, part = (step_flops(rules, graph(one, rules, state.arrays(one))) for one in (config, frozen))
    assert whole - part == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("rules", "changes", "model"),
    [
        # test_said_once.py has a step of zero1_8 with biases and positions that are learned.
        pytest.param("fsdp8", {"microbatches": 2}, {}, marks=pytest.mark.slow),
        pytest.param("dp8", {"microbatches": 2}, {}, marks=pytest.mark.slow),
        pytest.param("dp2_tp4", {}, {"block": "parallel"}, marks=pytest.mark.slow),
        # train/test_context_layouts.py counts what compiled programs send of a split sequence.
        pytest.param("cp8", {"remat": Remat("block")}, {}, marks=pytest.mark.slow),
        pytest.param("cp8_ulysses", {"remat": Remat("block")}, {}, marks=pytest.mark.slow),
        pytest.param("cp8_ring", {}, {}, marks=pytest.mark.slow),
        pytest.param("expert4", {}, {"experts.count": 8, "experts.per_token": 2}, marks=pytest.mark.slow),
        # By default, a test below reads in the trace what an adapter sends.
        pytest.param(
            "fsdp2_tp4",
            {},
            {"block": "parallel", "embedding.tied": True, "attention.qk_norm": True,
             "lora": Lora(rank=4, alpha=8.0, targets=("wk", "w_up"))},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "fsdp2_tp4", {}, {"block": "parallel", "embedding.tied": True, "attention.qk_norm": True},
            marks=pytest.mark.slow
        ),
        ("fsdp2_tp4", {"remat": Remat("none"), "microbatches": 2}, LATENT),
        pytest.param("tp8", {}, LATENT, marks=pytest.mark.slow),
        pytest.param("fsdp8", {"remat": Remat("block")}, LATENT, marks=pytest.mark.slow),
        pytest.param("cp8", {}, LATENT, marks=pytest.mark.slow),
        pytest.param(
            "fsdp8", {}, {"lora": Lora(rank=4, alpha=8.0, targets=("wq", "wo", "w_down"))}, marks=pytest.mark.slow
        ),
        pytest.param("tp8", {}, {"lora": Lora(rank=4, alpha=8.0, targets=("wk", "w_up"))}, marks=pytest.mark.slow),
        pytest.param(
            "fsdp2_tp4",
            {"remat": Remat("none")},
            {"experts.count": 8, "experts.per_token": 2, "experts.balance": "row", "lora": MLPS},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "fsdp8", {}, {"experts.count": 8, "experts.per_token": 2, "feed_forward.bias": True, "lora": MLPS},
            marks=pytest.mark.slow
        ),
    ],
)  # fmt: skip
def test_compiled_programs_move_no_less_and_little_more(small, built, read, rules, changes, model):
    """On CPU in float32: XLA widens bfloat16 there. What they move more are scalars and the gradients of norms.

    Nor do they hold less than what waits for the backward pass.
    """
    step = built(small(embed=64, mlp=256, **model), rules, **changes)
    traced = step.trace_train()
    compiled, reading = traced.lower().compile(), read(step, traced)
    moved = ring_bytes(count(compiled.as_text()))
    temporary_bytes = compiled.memory_analysis().temp_size_in_bytes
    assert 0 < reading.saved_bytes / step.rules.microbatches < temporary_bytes
    assert reading.unknown == {} and not reading.estimated_because
    assert reading.communication_bytes <= moved <= 1.05 * reading.communication_bytes


@pytest.mark.long
@pytest.mark.parametrize("rules", ["tp8", "fsdp8"])
def test_an_adapter_sends_its_matrices_and_sums(small, built, read, rules):
    """Of one that reads the residual stream, and one that writes to it, beside a third that both configs have."""
    rank, n = 4, 7 / 8

    def sent(*targets):
        config = small(heads=8, kv_heads=8, compute_dtype="bfloat16", lora=Lora(rank=rank, alpha=8.0, targets=targets))
        return config, read(built(config, rules)).communication_bytes

    (config, without), (_, found) = sent("wk"), sent("wk", "wq", "wo")
    model, tokens = config.model, config.data.batch * config.data.seq
    across, width = 2 * rank * model.heads * model.head_dim, 2 * rank * model.embed  # in bfloat16
    wanted = {
        # The gradient of what lies between wq's matrices, and that of wo's second one.
        "tp8": 2 * n * (2 * rank * tokens + width),
        # Split along embed at rest: gathered, once more where a layer is computed again, and its gradient is scattered.
        # The gradient of the other one is summed.
        "fsdp8": 2 * (n * 3 * width + 2 * n * across),
    }
    assert found - without == pytest.approx(model.layers * wanted[rules])


def test_each_turn_of_a_loop_counts_and_of_branches_the_dearest():
    def program(x, w):
        y, _ = jax.lax.scan(lambda x, _: (x @ w, None), x, None, length=5)
        return jax.lax.cond(y.sum() > 0, lambda y: y @ w @ w, lambda y: y @ w, y)

    made = jax.make_jaxpr(program)(np.ones((4, 8)), np.ones((8, 8)))
    assert read_step(made).flops == (5 + 2) * 2 * 4 * 8 * 8


def test_of_a_program_per_device_each_piece_counts_and_what_is_computed_again_does_not():
    def product(x, w):
        return jax.nn.tanh(x @ w).sum()

    def gradient(x, w):
        return jax.value_and_grad(jax.checkpoint(product))(x, w)

    mesh = jax.sharding.Mesh(np.reshape(jax.devices()[:8], (4, 2)), ("data", "tensor"))
    split, whole = jax.P("data"), jax.P()
    on_devices = jax.shard_map(gradient, mesh=mesh, in_specs=(split, whole), out_specs=(whole, split),
                               check_vma=False)  # fmt: skip
    for function in (gradient, on_devices):
        made = jax.make_jaxpr(function)(np.ones((4, 8)), np.ones((8, 8)))
        assert read_step(made, mesh=mesh.shape).model_flops == 2 * 2 * 4 * 8 * 8


@pytest.mark.parametrize(
    ("chip", "dtype", "peak"),
    [
        ("v5e", "bfloat16", 197e12),
        ("v5e", "float32", 197e12),  # XLA multiplies it as bfloat16
        ("v5e", "int8", 393e12),
        ("h100", "float8_e4m3fn", 1979e12),
        ("v100", "bfloat16", 15.7e12),
        ("v100", "float16", 125e12),
    ],
)
def test_the_products_of_a_program_have_the_peak_of_their_dtype(chip, dtype, peak):
    one = jax.ShapeDtypeStruct((64, 64), dtype)
    found = program_bounds(CHIPS[chip], 1, read_step(jax.make_jaxpr(lambda x, y: jax.lax.dot(x, y))(one, one)))
    assert found.compute_s == pytest.approx(2 * 64**3 / peak) and found.flops == 2 * 64**3


def test_of_a_mixture_only_the_chosen_experts_count():
    """Mixtral 8x7B: 46.7B parameters, of which 12.9B compute a token (arXiv 2401.04088)."""
    mixtral = ["model.experts.count=8", "model.experts.per_token=2", "model.vocab=32000", "model.padded_vocab=32000"]
    model = configs.load("llama3_8b", mixtral).model
    found = state.arrays(configs.load("llama3_8b", mixtral))
    assert found.parameter_count == pytest.approx(46.7e9, rel=1e-3)
    assert found.active_count(model) == pytest.approx(12.88e9, rel=1e-3)
    layer, experts = 2 * HEADS + 2 * KV, L * MLP * 3
    assert found.active_count(model) == 2 * 32000 * D + L * (layer + 8 * D + 2 * D) + D + 2 * experts


CONTEXT = {"mesh": {"context": 8}, "rules": {"seq": "context"}, "remat": "none"}


@pytest.mark.long
def test_a_split_sequence_gathers_keys_or_passes_them_or_exchanges_heads(floor_of):
    """Of one layer: what attention sends beside the sums of gradients, which all forms have in common."""
    key_bytes = 2 * 2 * TOKENS * 8 * 128  # keys and values in bfloat16
    head_bytes = 2 * TOKENS * (32 + 8 + 8 + 32) * 128  # q, k, v and the result

    def sent(form, remat="none"):
        rules = rules_file.from_dict({**CONTEXT, "context": form, "remat": remat}, "here.yaml")
        return floor_of(rules).communication_by_axis["context"]

    gathered, again = sent("gather"), sent("gather", "block")
    passed, exchanged = L * 7 / 8 * key_bytes, L * 7 / 8 * head_bytes / 8
    assert again - gathered == pytest.approx(passed)  # gathered once more for what is computed again
    assert sent("ring") == pytest.approx(again)  # a ring goes round again in any case
    assert sent("ulysses") == pytest.approx(gathered - 2 * passed + 2 * exchanged, rel=1e-4)
    assert sent("ulysses", "block") == pytest.approx(gathered - 2 * passed + 3 * exchanged, rel=1e-4)


@pytest.mark.long
def test_tokens_travel_to_their_experts_and_back(built, read, monkeypatch):
    """Twice each way in a step, 2 experts of 8 for each token, and once more there for what is computed again.

    This is traced as for a TPU. On CPUs, every device is sent all rows.
    """
    monkeypatch.setattr(permutes, "platform", lambda: "tpu")
    config = configs.load("mixtral_8x7b", ["data.batch=8", "model.layers=2"])
    arrays = state.arrays(config)

    def moves(**more):
        raw = {"mesh": {"expert": 8}, "rules": {"batch": "expert", "expert": "expert"}, **more}
        return read(built(config, rules_file.from_dict(raw, "here.yaml"))).bytes_by_axes["expert"]

    rules = rules_file.load("expert4")
    assert necessary_flops(config, rules, graph(config, rules, arrays)) > 0
    nothing_again = moves()
    rows = 8 * 4096 * 2  # of all devices, those of each token's experts
    one_way = 2 * 7 / 8 * rows * 4096 * 2 / 8  # of both layers, in bfloat16
    assert moves(remat="block") - nothing_again == pytest.approx(one_way, rel=1e-5)
    assert moves(remat={"save": ["dispatched"]}) == pytest.approx(nothing_again)
    whole = {"rules": {"batch": "expert"}}  # no axis of experts: their gradients are summed instead
    experts = 2 * 3 * 8 * 4096 * 14336
    assert moves(**whole) - nothing_again == pytest.approx(2 * 7 / 8 * 2 * experts - 4 * one_way, rel=1e-3)
