"""Prices follow from shapes: identities that hold exactly."""

import collections

import jax
import pytest

from gspmd_lm import config as configs
from gspmd_lm.config import Lora, Queries, Vision
from gspmd_lm.config.media import Patches
from gspmd_lm.foresight import hlo
from gspmd_lm.foresight.timing import attention, gathers, op_time
from gspmd_lm.hardware import target as targets
from gspmd_lm.hardware.chips import CHIPS
from gspmd_lm.plan import operations, overlap, timed_ops
from gspmd_lm.plan.estimate import Estimator
from gspmd_lm.plan.space import Space
from gspmd_lm.plan.traces import TraceCache
from gspmd_lm.sharding import rules_file
from gspmd_lm.sharding.rules import Remat
from gspmd_lm.train import state
from gspmd_lm.train.step import build_step
from tests.courses import trace_gradients

B, T, D, L, N, K, H, F = 8, 8192, 4096, 32, 32, 8, 128, 14336
FSDP = {
    "mesh": {"fsdp": 8},
    "rules": {"batch": "fsdp"},
    "weights": {"embed": "fsdp"},
    "attention": {"gpu": "cudnn", "tpu": "splash"},
}
DATA = {"mesh": {"data": 8}, "rules": {"batch": "data"}, "attention": {"gpu": "cudnn"}}


def test_products_of_a_step_are_those_of_its_gradients(mixer, read):
    """Operations of the forward pass and what each costs backward, against the traced gradients themselves."""
    traces = TraceCache(mixer)
    rules = rules_file.from_dict({"mesh": {"data": 1}}, "one", vocabulary=mixer.vocabulary)
    operations = traces.trace(rules).op_graph(False).ops
    total = sum(one.flops * (1 + one.backward) * one.trip_count for one in operations)
    assert next(one.backward for one in operations if one.flops) == 1  # images have no gradient
    step = build_step(mixer, rules.fill(1), traces.arrays, jax.devices()[:1])
    assert total == read(step).model_flops


def test_what_a_policy_computes_again(llama, traces_of, monkeypatch):
    """Under `block` all products of a layer but the last; under `dots` none; with names those before them."""
    monkeypatch.setitem(timed_ops.FUSED_PASSES, "tpu", 0.0)  # products alone
    estimator = Estimator(llama, targets.parse("v5p:2x2x2"), traces_of(llama))

    def products_s(remat):
        return estimator.estimate(rules_file.from_dict({**FSDP, "remat": remat}, "fsdp").fill(8)).matmul_s

    def again_s(elements):  # of the matrices of a layer
        chip = CHIPS["v5p"]
        slower = chip.matmul_slowdown / op_time.MATMUL_SHARE["tpu"]
        return pytest.approx(2 * T * elements * L * slower / chip.peak_bf16_flops_per_s, rel=1e-6)

    once = products_s("none")
    assert products_s("dots") == once
    assert products_s("block") - once == again_s(D * (2 * N + 2 * K) * H + 2 * D * F)
    assert products_s({"save": ["q", "k", "v", "attention_out", "residual"]}) - once == again_s(2 * D * F)


# Not so small that XLA makes sums of products.
ROW = {"data": {"batch": 4, "seq": 64}, "context": 64, "layers": 4, "embed": 64, "heads": 4, "kv_heads": 2,
       "head_dim": 16, "mlp": 192}  # fmt: skip
ADAPTERS = Lora(rank=16, targets=("wq", "w_up"))
CAPTIONS = {**ROW, "feed_forward.kind": "plain", "positions": "learned", "frozen": ("vision", "layers"),
            "vision": Vision(
    patches=Patches(image=16, size=4), embed=48, head_dim=6, queries=Queries(rows=8, layers=4, embed=40, head_dim=5)),
    "data": {"batch": 4, "seq": 64, "source_seq": 24}}  # fmt: skip
EXPERTS = {**ROW, "experts.count": 4, "experts.per_token": 2, "experts.balance": "batch"}


@pytest.mark.parametrize(("changes", "remat"), [
    (ROW, "none"),  # scores are computed again, as they are in any case
    pytest.param(EXPERTS, "block", marks=pytest.mark.long),  # the result of w_down is not
    ({**ROW, "frozen": ("embedding", "layers")}, "block"),  # nothing is, nor is there a gradient of any layer
    pytest.param({**ROW, "frozen": ("layers", "final_norm", "unembedding")}, "block", marks=pytest.mark.slow),
    pytest.param(CAPTIONS, "block", marks=pytest.mark.slow),
    pytest.param({**ROW, "lora": ADAPTERS}, {"save": ["residual", "q"]}, marks=pytest.mark.slow),
    pytest.param({**ROW, "embedding.tied": True, "feed_forward.kind": "plain"}, "dots", marks=pytest.mark.slow),
    pytest.param({**ROW, "block": "parallel"}, {"save": ["attention_out", "hidden"]}, marks=pytest.mark.slow),
])  # fmt: skip
def test_each_product_is_priced_as_often_as_the_compiled_step_runs_it(small, built, changes, remat):
    """Forward, again, and backward."""
    config, rules = small(**changes), {"mesh": {"data": 1}, "remat": remat, "unroll": 1}
    compiled = trace_gradients(built(config, rules_file.from_dict(rules, "one"))).lower().compile()
    module = hlo.parse(compiled.as_text())
    ran: dict[tuple, float] = collections.Counter()
    once: dict[tuple, float] = collections.Counter()
    for instruction in module.operations:
        name = instruction.name_in_model
        key = name.owners or ((name.array,) if name.array else name.modules[:2])
        done = instruction.executions * instruction.flops
        ran[key] += done
        once[key] += done if name.phase == "forward" else 0.0
    filled = rules_file.from_dict(rules, "one")
    found = TraceCache(config).trace(filled).op_graph(False)
    again = found.saved_activations(filled.remat).recomputed
    told, alone = collections.Counter(), collections.Counter()
    for one in found.ops:
        name = next(iter(one.nodes)).name
        if one.flops and name.modules:
            told[name.owners or name.modules[:2]] += one.flops * (1 + one.backward + (one in again))
            alone[name.owners or name.modules[:2]] += one.flops
    told.pop(("layers.mlp.router",), None)  # XLA makes a sum of one of its products
    assert len(told) >= 7
    for key, often in told.items():  # the loop of experts on CPUs fills blocks with zeros, in each run alike
        assert often / alone[key] == pytest.approx(ran[key] / once[key]), key


def test_scores_are_never_kept_and_experts_keep_what_their_derivative_reads(small):
    def kept(config, remat):
        rules = rules_file.from_dict({"mesh": {"data": 1}, "remat": remat}, "one")
        return TraceCache(config).trace(rules).op_graph(False).saved_activations(rules.remat)

    config = small(**ROW)
    scores_bytes = 4 * 4 * config.model.heads * 64 * 64 * 4  # float32, of all layers
    assert max(size for size, _ in kept(config, "none").on_device) < scores_bytes
    saved = kept(small(**EXPERTS), {"save": ["hidden"]})
    grouped = [one for one in saved.recomputed if isinstance(one, operations.Op) and one.is_grouped]
    names = {next(iter(one.nodes)).name.owners for one in grouped}
    assert names == set()  # neither w_gate nor w_up
    everything = kept(small(**EXPERTS), "dots")  # jax keeps what dot_general gives, which grouped kernels are not
    assert sum(one.is_grouped for one in everything.recomputed if isinstance(one, operations.Op)) == 2


def test_what_is_kept_of_rows_at_their_experts_has_the_room_of_their_buffers(small):
    config = small(**EXPERTS)
    estimator, raw = Estimator(config, targets.parse("cpu:4")), {"mesh": {"expert": 4}}
    raw["rules"] = {"batch": "expert", "expert": "expert"}
    kept = {
        room: estimator.estimate_remat(rules_file.from_dict({**raw, "expert_buffer": room}, "one"), Remat())
        for room in (1, 1.5, 2, 3)
    }
    rows, numbers = 64 * 2, 64 + 2 * 192  # of the one row of each device; of what is sent, and of gate and up
    assert kept[1.5].device_bytes - kept[1].device_bytes == 0.5 * 4 * rows * numbers * 4
    assert kept[2].device_bytes - kept[1].device_bytes == 4 * rows * numbers * 4
    assert kept[3] == kept[2]  # no more can arrive: a token has one expert at most on each of four devices
    assert kept[2].peak_bytes - kept[1].peak_bytes > kept[2].device_bytes - kept[1].device_bytes


def test_on_tpus_elementwise_operations_within_products_take_their_bytes(llama, traces_of, monkeypatch):
    """What is computed again comes again, and so do its elementwise operations."""

    def products_s(share, remat):
        monkeypatch.setitem(timed_ops.FUSED_PASSES, "tpu", share)
        rules = rules_file.from_dict({**FSDP, "remat": remat}, "fsdp").fill(8)
        return Estimator(llama, targets.parse("v5p:2x2x2"), traces_of(llama)).estimate(rules).matmul_s

    extra_s = {remat: products_s(0.7, remat) - products_s(0.0, remat) for remat in ("none", "block")}
    hidden_s = B / 8 * T * F * 2 / op_time.hbm_bytes_per_s(CHIPS["v5p"])  # to read or write it once, in one layer
    assert extra_s["none"] > 3 * 0.7 * hidden_s * L
    assert extra_s["block"] > extra_s["none"]


@pytest.mark.parametrize("target", ["v6e:2x4", "tpu7x:2x2x1"])
def test_tokens_move_to_experts_in_the_time_that_a_compiled_program_takes(small, target):
    """Each forward, again if what was dispatched is not kept, and backward. On tpu7x, SparseCores gather."""
    size = {"data": {"batch": 32, "seq": 4096}, "context": 4096, "embed": 1024, "heads": 8, "head_dim": 128}
    config, N = small(**EXPERTS | size, compute_dtype="bfloat16"), 32 * 4096 * 2 // 8
    on = "COMPUTE_TYPE_TILE" if "tpu7x" in target else "COMPUTE_TYPE_DEFAULT"
    module = hlo.parse(f"""HloModule jit__train

ENTRY %main (x: bf16[16384,1024], at: s32[{N}]) -> f32[16384,1024] {{
  %x = bf16[16384,1024]{{1,0:T(8,128)(2,1)}} parameter(0)
  %at = s32[{N}]{{0:T(1024)}} parameter(1)
  %sort = (s32[{N}]{{0:T(1024)}}, s32[{N}]{{0:T(1024)}}) sort(%at, %at), dimensions={{0}}
  ROOT %rows = bf16[{N},1024]{{1,0:T(8,128)(2,1)}} gather(%x, %at), slice_sizes={{1,1024}}, backend_config={{"compute_type":"{on}"}}
}}
""")  # noqa: E501
    chip, kept = targets.parse(target).chip, ("names", ("dispatched",))
    compiled = {one.opcode: op_time.op_time(one, chip).seconds for one in module.operations}
    estimator = Estimator(config, targets.parse(target))
    (costs,) = estimator._layout(rules_file.from_dict(FSDP, "fsdp").fill(8)).parts
    found = [one for one in costs.timed_ops if isinstance(one.op, operations.MoveOp) and one.in_loop]
    found = [one for one in found if one.op.node.primitive in compiled]
    assert [one.op.node.primitive for one in found] == ["sort", "sort", "gather", "gather"]
    for one in found:
        assert one.forward_s == one.backward_s == pytest.approx(compiled[one.op.node.primitive])
    again = {remat: costs.op_graph.saved_activations(Remat(*remat)).recomputed for remat in (("block",), kept)}
    assert [one.op in again["block",] for one in found] == [True, False, True, False]
    assert not any(one.op in again[kept] for one in found)


@pytest.mark.long
def test_sums_of_the_results_of_few_experts_take_their_tiles(small, monkeypatch):
    """Forward and backward, in each layer; more experts than 4 fill registers."""

    def others_s(experts, cycles):
        monkeypatch.setattr(gathers, "SUM_TILE", cycles)
        config = small(**EXPERTS | {"experts.count": 8, "experts.per_token": experts})
        rules = rules_file.from_dict({**FSDP, "mesh": {"fsdp": 4}}, "fsdp").fill(4)
        return Estimator(config, targets.parse("v6e:2x2")).estimate(rules).other_s

    tiles = 4 * 64 // 4  # one for each token of a device, of 64 numbers
    for experts in (2, 4):
        longer_s = others_s(experts, 3e6) - others_s(experts, 1e6)
        assert longer_s == pytest.approx(2 * 4 * tiles * 2e6 / CHIPS["v6e"].clock_hz)
    assert others_s(8, 3e6) == others_s(8, 1e6)


def test_the_attention_kernel_runs_again_unless_its_result_is_kept(estimated):
    once, again = (
        estimated({**FSDP, "remat": remat}, "v5p:2x2x2").attention_s for remat in ({"save": ["attention_out"]}, "block")
    )
    assert once == estimated(FSDP, "v5p:2x2x2").attention_s
    call = attention.Splash("fwd", heads=N, size=H, blocks=(8, 8), rows=1024, columns=1024, fused=True)
    assert again - once == pytest.approx(L * attention.splash_s(call, CHIPS["v5p"]))


def test_a_window_is_priced_by_its_scores():
    windowed = configs.load("llama3_8b", ["data.batch=8", "model.attention.window=1024"])
    estimator, chip = Estimator(windowed, targets.parse("h100:8")), CHIPS["h100"]
    found = estimator.estimate(rules_file.from_dict(FSDP, "fsdp").fill(8)).attention_s
    calls = [attention.Cudnn(backward, N, T, T, H, causal=True, window=1024) for backward in (False, True)]
    assert [one.flops for one in calls] == [2 * n * N * H * attention.masked_scores(T, 1024) for n in (2, 5)]
    passes = [attention.cudnn_s(one, chip) for one in calls]
    assert found == pytest.approx(L * (sum(passes) + 2 * op_time.LAUNCH_S["gpu"]))


def test_a_full_mask_is_priced_by_all_scores():
    sets = ["data.batch=8", "objective=masked", "model.attention.mask=full", "data.packing=documents"]
    of = {name: Estimator(configs.load("llama3_8b", sets), targets.parse(name)) for name in ("h100:8", "v5p:2x2x2")}
    found = {name: one.estimate(rules_file.from_dict(FSDP, "fsdp").fill(8)).attention_s for name, one in of.items()}
    h100, v5p = CHIPS["h100"], CHIPS["v5p"]
    calls = [attention.Cudnn(backward, N, T, T, H, causal=False) for backward in (False, True)]
    assert [one.flops for one in calls] == [2 * n * N * H * T**2 for n in (2, 5)]
    passes = [attention.cudnn_s(one, h100) for one in calls]
    assert found["h100:8"] == pytest.approx(L * (sum(passes) + 2 * op_time.LAUNCH_S["gpu"]))
    all_blocks = attention.splash_passes_s(N, (H, H), (T, T), 2, "all", 1, v5p)
    assert found["v5p:2x2x2"] == pytest.approx(L * sum(all_blocks), rel=0.01)
    assert sum(all_blocks) > 1.6 * sum(attention.splash_passes_s(N, (H, H), (T, T), 2, "", 1, v5p))


def test_kept_activations_are_counted_once_and_cost_traffic(estimated):
    block, queries, both = (
        estimated({**FSDP, "remat": {"save": names}}) for names in ([], ["q"], ["q", "attention_out"])
    )  # fmt: skip
    queries_bytes = 2 * T * N * H * L  # the second of the two arrays that are called q is what attention reads
    assert queries.peak_bytes - block.peak_bytes == queries_bytes
    assert both.peak_bytes - queries.peak_bytes == queries_bytes
    assert estimated(FSDP).other_s > estimated({**FSDP, "remat": "dots"}).other_s


@pytest.mark.parametrize("target", ["v6e:2x4", "v5p:2x2x2"])
def test_products_are_slower_in_programs_that_offload(estimated, target):
    save, offload = (
        estimated({**FSDP, "remat": {key: ["layer_input"]}}, target).matmul_s for key in ("save", "offload")
    )
    assert offload == pytest.approx(save * CHIPS[target.partition(":")[0]].offloading_slowdown)


def test_offloaded_activations_leave_the_device(estimated):
    here, there = (estimated({**FSDP, "remat": {key: ["layer_input"]}}) for key in ("save", "offload"))
    assert here.peak_bytes - there.peak_bytes == there.host_bytes == 2 * T * D * L
    assert here.host_bytes == 0


@pytest.mark.parametrize(("target", "free"), [("v5p:2x2x2", True), ("h100:8", False)])
def test_casts_of_weights_cost_nothing_on_tpus(llama, traces_of, target, free):
    estimator = Estimator(llama, targets.parse(target), traces_of(llama))
    (costs,) = estimator._layout(rules_file.from_dict(DATA, "data").fill(8)).parts
    estimated = {timed.op for timed in costs.timed_ops}
    cast = [operation for operation in costs.op_graph.ops if operation.only_casts]
    assert {"layers.attention.wq", "layers.mlp.w_down"} <= {
        near.placed.array for operation in cast for _, places in operation.moved for near in places
    }
    assert [operation in estimated for operation in cast] == [not free] * len(cast)


def test_state_is_held_as_the_tables_say(estimated, llama):
    whole, zero1 = estimated(DATA), estimated({**DATA, "optimizer": {"embed": "data"}})
    parameters = state.arrays(llama).parameter_count
    # Two moments and the gradients, float32; the optimizer's count is whole.
    assert whole.peak_bytes - zero1.peak_bytes == pytest.approx(12 * parameters * 7 / 8, abs=16)
    zero3 = estimated(FSDP)
    assert zero1.peak_bytes - zero3.peak_bytes == pytest.approx(4 * parameters * 7 / 8, abs=16)


def test_a_batch_that_is_not_split_is_computed_by_all(estimated):
    split, whole = (estimated(raw, "v5p:2x2x2") for raw in (FSDP, {**FSDP, "rules": {"mlp": None}}))
    assert whole.matmul_s > 7.9 * split.matmul_s


def test_activations_of_tensor_parallelism_wait_and_weights_hide(estimated):
    tensor = {"vocab": "tensor", "heads": "tensor", "kv_heads": "tensor", "mlp": "tensor"}
    splash = {"attention": {"tpu": "splash"}, "remat": "block"}
    waits = estimated({"mesh": {"tensor": 8}, "rules": tensor, **splash}, "v5p:2x2x2")
    waiting = overlap.ACTIVATIONS_EXPOSED[3][0]  # next to nothing is sent outside of loops
    assert waits.exposed_by_axis == {"tensor": pytest.approx(waiting * waits.communication_s, rel=5e-3)}
    hidden = estimated({**FSDP, **splash}, "v5p:2x2x2")
    assert sum(hidden.exposed_by_axis.values()) < 0.4 * hidden.communication_s


def test_between_slices_data_is_cheaper_than_fsdp(estimated):
    both = {**FSDP, "mesh": {"data": 2, "fsdp": 4}, "rules": {"batch": ["data", "fsdp"]},
            "attention": {"tpu": "splash"}, "remat": "block"}  # fmt: skip
    data, fsdp = (estimated({**both, "dcn": dcn}, "2@v6e:2x2") for dcn in ({"data": 2}, {"fsdp": 2}))
    assert sum(data.exposed_by_axis.values()) < sum(fsdp.exposed_by_axis.values())
    assert data.matmul_s == fsdp.matmul_s


def test_simulated_devices_have_bytes_and_no_times(llama, traces_of):
    estimator = Estimator(llama, targets.parse("cpu:8"), traces_of(llama))
    found = estimator.estimate(rules_file.load("fsdp8").fill(8))
    assert found.step_time_s == found.matmul_s == 0
    assert found.sent_bytes > 0
    assert found.peak_bytes > 0


def test_a_model_of_ones_own_is_priced_by_its_weights_and_sums(mixer):
    target = targets.parse("h100:8")
    traces = TraceCache(mixer)
    space, estimator = Space(mixer, target, traces), Estimator(mixer, target, traces)
    parameters = traces.arrays.parameter_count

    def of(raw):
        return estimator.estimate(space.rules(raw))

    # Gradients are reduced to all: twice 7/8 of their bytes; sharded ones are reduced once, and weights gathered once.
    # A sum of scores over the labels is no weight's.
    data = of({"mesh": {"data": 8}, "rules": {"batch": "data"}})
    assert data.sent_by_axis == {"data": round(2 * 7 / 8 * 4 * parameters)}
    rest = {"width": "fsdp", "patch": "fsdp"}
    fsdp = of({"mesh": {"fsdp": 8}, "rules": {"batch": "fsdp"}, "weights": rest})
    assert fsdp.sent_by_axis == {"fsdp": round(2 * 7 / 8 * 4 * parameters)}
    assert data.matmul_s == fsdp.matmul_s > 0
    # A hidden axis that is split leaves a sum of the stream in each of four blocks, and one of its gradient.
    tensor = of({"mesh": {"tensor": 8}, "rules": {"mixed": "tensor"}})
    stream_bytes = 4 * 32 * 16 * 32
    assert tensor.sent_by_axis["tensor"] == pytest.approx(4 * 2 * 2 * 7 / 8 * stream_bytes, rel=0.01)


LONG = {"mesh": {"fsdp": 8, "context": 8}, "rules": {"batch": "fsdp", "seq": "context"},
        "weights": {"embed": ["fsdp", "context"]}, "attention": {"tpu": "splash"}}  # fmt: skip


@pytest.fixture(scope="module")
def long():
    """A function that prices Llama 3 8B with 128k tokens on 64 chips, in a form of context parallelism."""
    estimator = Estimator(configs.load("llama3_8b_128k"), targets.parse("v5p:4x4x4"))
    return lambda form, **raw: estimator.estimate(
        rules_file.from_dict({**LONG, "context": form, **raw}, "here").fill(64)
    )


def test_a_ring_beats_gathered_keys_and_context_beats_tensor_where_sequences_are_long(long):
    """The order of the compiled programs too: 20.5, 20.9 and 21.0 s in the three forms (libtpu 0.0.42)."""
    tensor = {"mesh": {"fsdp": 8, "tensor": 8}, "weights": {"embed": "fsdp"}, "rules": {
        "batch": "fsdp", **dict.fromkeys(("heads", "kv_heads", "mlp", "vocab", "residual.seq"), "tensor")}}  # fmt: skip
    ring, ulysses, gather = (long(form, remat="block").step_time_s for form in ("ring", "ulysses", "gather"))
    assert ring < ulysses < gather < long("gather", remat="block", **tensor).step_time_s


def test_what_splash_moves_beside_its_kernels(long):
    """Each form adds up its own pieces of 128 blocks of keys; in a turn of a ring, half of a device's 16 are read."""
    layers, tokens, itemsize = 32, 2 * 131072, 2
    query_bytes, key_bytes = itemsize * tokens // 8 * N * H, itemsize * 2 * tokens * K * H
    ring, ulysses, gather = map(long, ("ring", "ulysses", "gather"))
    hbm = op_time.hbm_bytes_per_s(CHIPS["v5p"])
    assert gather.other_s - ulysses.other_s == pytest.approx(layers * (10 + 10) * key_bytes / hbm)
    pieces = 128 + 16 * (1 + 5)  # the gradients of queries: once for each block of keys, and 16 sums of them
    of_ring = 16 + 2 * (1 + 5) + 7 * (7 + 7 + 8 + 1)
    moved = (of_ring - pieces) * query_bytes + 7 * (2 + 10) * key_bytes / 8
    assert ring.other_s - ulysses.other_s == pytest.approx(layers * moved / hbm)
    assert attention.splash_moved_bytes(8, query_bytes, key_bytes, "gather", 1) == (0, 0)


def test_a_ring_computes_no_block_of_a_mask_in_vain(long):
    ring, gather = (long(form).attention_s for form in ("ring", "gather"))
    square = {"heads": 2 * N, "size": H, "rows": 1024, "columns": 1024, "fused": True}
    calls = [attention.Splash(part, blocks=(16, 16), **square) for part in ("fwd", "dkv")]
    calls += 7 * [attention.Splash(part, blocks=(16, 8), mask_window="all", **square) for part in ("fwd", "dkv")]
    assert ring == pytest.approx(32 * sum(attention.splash_s(call, CHIPS["v5p"]) for call in calls))
    assert ring < 0.98 * gather


OFFLOADED = ("layer_input", "attention_out", "q", "k", "v", "residual")


def test_copies_to_the_host_follow_the_order_in_which_an_iteration_makes_them(llama):
    def copies(**names):
        remat = Remat("names", **names)
        (loop,) = (
            TraceCache(llama).trace(rules_file.load("fsdp8").fill(8)).op_graph(True).saved_activations(remat).on_host
        )
        return [nodes[0].array for _, nodes in loop.arrays], loop.begins_with_input

    assert copies(offload=OFFLOADED) == (["residual", "q", "v", "k", "attention_out", "residual"], True)
    assert copies(offload=("k", "v")) == (["v", "k"], False)


def test_an_iteration_has_the_ops_left_that_stand_behind_an_array(llama):
    op_graph = TraceCache(llama).trace(rules_file.load("fsdp8").fill(8)).op_graph(True)

    def matmuls_left(name):
        (loop,) = op_graph.saved_activations(Remat("names", offload=(name,))).on_host
        return [sum(op.flops > 0 for op in later if isinstance(op, operations.Op)) for later in loop.made_later]

    assert matmuls_left("layer_input") == [7]
    assert matmuls_left("attention_out") == [4]
    assert set(matmuls_left("hidden")) <= {1, 2}
