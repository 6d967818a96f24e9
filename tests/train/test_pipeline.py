"""Pipelines: losses and gradients of every weight against one device, and what stages send to each other."""

import collections
import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.collectives import count, ring_bytes
from examples import mixer
from gspmd_lm import config as configs
from gspmd_lm.config import Lora
from gspmd_lm.foresight import advice, explain, hlo
from gspmd_lm.hardware import target as targets
from gspmd_lm.infer import programs, score
from gspmd_lm.program.supported import pipeline_problems
from gspmd_lm.sharding import mesh as meshes
from gspmd_lm.sharding import permutes, pipeline, rules_file
from gspmd_lm.sharding.annotate import Spec, Split
from gspmd_lm.sharding.partial_sums import Sum, gradient_slot
from gspmd_lm.sharding.placement import MeshPlacement
from gspmd_lm.sharding.problems import ShardingError
from gspmd_lm.sharding.rules import GATHERS
from gspmd_lm.sharding.shapes import pairs
from gspmd_lm.train import state
from tests import courses
from tests.courses import agree

UNCLIPPED = {"clip_norm": 0.0, "learning_rate": 3.0e-3}
TENSOR = dict.fromkeys(("vocab", "heads", "kv_heads", "mlp", "residual.seq"), "tensor")
B, T, D = 32, 16, 32

LAYOUTS = {
    "fsdp and tensor": {
        "mesh": {"stage": 2, "fsdp": 2, "tensor": 2}, "rules": {"batch": ["stage", "fsdp"], **TENSOR},
        "weights": {"embed": "fsdp"}, "pipeline": {"microbatches": 4},
    },
    "ring": {
        "mesh": {"stage": 4, "context": 2}, "context": "ring", "rules": {"batch": "stage", "seq": "context"},
        "pipeline": {"microbatches": 4}, "microbatches": 2,
    },
    "four stages": {
        "mesh": {"stage": 4, "fsdp": 2}, "rules": {"batch": ["stage", "fsdp"]}, "weights": {"embed": "fsdp"},
        "pipeline": {"microbatches": 8},
    },
    "experts": {
        "mesh": {"stage": 2, "expert": 2, "tensor": 2}, "pipeline": {"microbatches": 4},
        "rules": {"batch": ["stage", "expert"], "expert": "expert", **TENSOR},
    },
    "data outside of the stages, zero1": {
        "mesh": {"data": 2, "stage": 2, "tensor": 2}, "rules": {"batch": ["data", "stage"], **TENSOR},
        "optimizer": {"embed": "data"}, "pipeline": {"microbatches": 2}, "microbatches": 2,
    },
    "replicas within and outside of the stages": {
        "mesh": {"data": 2, "stage": 2, "fsdp": 2}, "rules": {"batch": ["fsdp", "stage", "data"]},
        "weights": {"embed": "fsdp"}, "pipeline": {"microbatches": 4}, "microbatches": 2,
    },
    "a batch that stages do not split": {
        "mesh": {"data": 2, "stage": 2, "tensor": 2}, "rules": {"batch": "data", **TENSOR},
        "pipeline": {"microbatches": 4},
    },
}  # fmt: skip
FIRST, RING, *_, REPLICAS, _ = LAYOUTS
MIXED = "pattern, dropout and a tied table"
EXPERTS = {"experts.count": 8, "experts.per_token": 2, "experts.mlp": 16, "init_std": 0.3}
MODELS = {
    "plain": {},
    "pattern, dropout and a tied table": {
        "layer_pattern": ("full", "nope"), "dropout": 0.1, "embedding.tied": True, "kv_heads": 4,
    },
    "a layer behind the pattern": {"layer_pattern": ("chunked", "nope", "full"), "attention.chunk": 5, "behind": 1},
    "dense, then experts": {**EXPERTS, "experts.dense_layers": 1, "experts.balance": "row", "experts.z_loss": 0.1},
    "experts in a pattern": {**EXPERTS, "experts.step": 2, "experts.balance": "bias", "experts.shared_mlp": 8},
    "adapters": {"lora": Lora(rank=4, alpha=8.0, targets=("wq", "w_down"))},
}  # fmt: skip
CLASSES = {"classes": {"objective": "classes", "classes.count": 3, "attention.mask": "full"}}
REMATS = ("none", "block", "dots", {"save": ["attention_out"]})
ALONE = ("dense, then experts", "experts in a pattern")  # whose weights are gathered in each turn
# Each model under three of the layouts, and each layout with three of the models.
PRODUCT = [
    (
        model,
        layout,
        1 + (i + j) // 2 % 2,
        REMATS[(i + j // 2) % 4],
        "turn" if model in ALONE else GATHERS[(i + j // 2) % 2],
    )
    for i, model in enumerate(MODELS)
    for j, layout in enumerate(LAYOUTS)
    if (i + j) % 2 == 0 and not (layout == RING and "attention.chunk" in MODELS[model])
]


ONE_BY_ONE = {"schedule": "1f1b"}  # one microbatch forward and another one backward in a turn
INPUTS = {"keep": "stage"}
EIGHT, FOUR = {"layers": 8, "optimizer": UNCLIPPED}, "stage=4,fsdp=1"  # eight layers; four stages of the first layout
KEPT = [  # in ways that keep less: model, layout, remat, parts of a device's rows
    (ONE_BY_ONE, MIXED, FIRST, "block", 1),
    (ONE_BY_ONE, "dense, then experts", "experts", "none", 1),
    (ONE_BY_ONE, "experts in a pattern", FIRST, "dots", 1),
    (ONE_BY_ONE, "a layer behind the pattern", "a batch that stages do not split", {"save": ["attention_out"]}, 1),
    (ONE_BY_ONE, "adapters", RING, "block", 1),
    (ONE_BY_ONE, "plain", "data outside of the stages, zero1", "none", 2),
    (ONE_BY_ONE, "classes", "four stages", "dots", 1),
    (ONE_BY_ONE, MIXED, REPLICAS, "block", 1),
    (INPUTS, "experts in a pattern", REPLICAS, "block", 1),
    (INPUTS, MIXED, RING, "none", 1),
    (INPUTS, "experts in a pattern", "experts", "block", 1),
    (INPUTS | {"repeats": 2}, "plain", FIRST, "dots", 2),
    (INPUTS | {"repeats": 2, "gather": "step"}, "adapters", FIRST, "block", 1),
]


def rules_of(layout, repeats=1, remat="block", gather="turn", mesh="", **pipeline):
    raw = LAYOUTS[layout]
    sizes = raw["pipeline"] | {"repeats": repeats, "gather": gather} | pipeline
    raw = raw | ({"microbatches": 1} if pipeline.get("schedule") == "1f1b" else {})
    raw = raw | {"weights": {"layers": "stage", **raw.get("weights", {})}, "pipeline": sizes, "remat": remat}
    return rules_file.from_dict(raw | {"mesh": raw["mesh"] | rules_file.read_sizes(mesh)}, "here.yaml")


def model_of(name, layout, repeats, small):
    """A model with two turns of its pattern, or one, in each part of a stage."""
    settings = dict((MODELS | CLASSES)[name])
    length = math.lcm(len(settings.get("layer_pattern", ("full",))), settings.get("experts.step", 1))
    layers = LAYOUTS[layout]["mesh"]["stage"] * repeats * length * (2 if length == repeats == 1 else 1)
    return small(
        layers=layers + settings.get("experts.dense_layers", 0) + settings.pop("behind", 0),
        optimizer=UNCLIPPED,
        **settings,
    )


@pytest.fixture(scope="module")
def first(small, course):
    """The course of the first layout, without repeats."""
    return course(model_of(MIXED, FIRST, 1, small), rules_of(FIRST))


def test_a_pipeline_changes_nothing(first, small, course):
    agree(first, course(model_of(MIXED, FIRST, 1, small), "single", unroll=1))


def once_for(config, stages, fsdp, replicas):
    """The bytes that a device sends over `data` if it sums the gradient of each weight of its stage once."""
    arrays = state.arrays(config)
    of_layers = sum(like.size for leaf, like in pairs(arrays.named_params, arrays.params) if "layers" in leaf.axes)
    return 2 * (replicas - 1) / replicas * 4 * of_layers / stages / fsdp


@pytest.mark.long
@pytest.mark.parametrize(
    "pipeline",
    [{}, *(pytest.param(one, marks=pytest.mark.slow) for one in (ONE_BY_ONE, INPUTS, {"gather": "step"}))],
    ids=str,
)  # fmt: skip
def test_replicas_are_summed_once_however_many_the_turns(pipeline, small, built, read):
    config = small(layers=4)
    for microbatches in (2, 8):
        reading = read(built(config, rules_of(REPLICAS, microbatches=microbatches, **pipeline), microbatches=1))
        sums = (one for one in reading.by_array if (one.mesh_axes, one.kind) == ("data", "all-reduce"))
        assert sum(one.bytes_per_device_per_step for one in sums) == once_for(config, 2, 2, 2)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_compiled_step_sums_replicas_once(schedule, small, built):
    config = small(layers=4)
    rules = rules_of(REPLICAS, mesh="data=4,fsdp=1", microbatches=8, schedule=schedule)
    program = courses.trace_gradients(built(config, rules, microbatches=1)).lower().compile()
    sums = [one for one in count(program.as_text()) if one.kind == "all-reduce" and one.elements > 1]
    assert not any(one.in_loop for one in sums)
    assert ring_bytes(one for one in sums if one.group_size == 4) == once_for(config, 2, 1, 4)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_replicas_share_the_scales_of_gradients_of_8_bits(schedule, small, course):
    """Each of them adds up partial sums that were scaled alike, as one device that has all their rows."""
    config = small(layers=4, matmul_dtype="int8", optimizer=UNCLIPPED)
    split = course(config, rules_of(REPLICAS, mesh="fsdp=1", schedule=schedule, microbatches=4), microbatches=1)
    whole = course(config, rules_of(REPLICAS, mesh="fsdp=1,data=1", schedule=schedule, microbatches=4), microbatches=1)
    agree(split, whole, gradients=0.05)


REPEATED = rules_of(RING, 2, {"save": ["attention_out"]}, "step")


@pytest.mark.slow
def test_nor_do_repeats_with_ring_attention_in_microbatches_of_microbatches(small, course, monkeypatch):
    """Four stages through which rows go twice, weights that are gathered once, and bubbles that nobody may read.

    Dropout knows the number of a layer.
    """
    config = small(layers=8, dropout=0.1, optimizer=UNCLIPPED)
    alone = course(config, "single", unroll=1)
    monkeypatch.setattr(pipeline, "BUBBLES", math.nan)
    agree(course(config, REPEATED), alone)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "layout", "repeats", "remat", "gather"), PRODUCT)
def test_nor_does_any_pair_of_what_layers_and_layouts_can_be(model, layout, repeats, remat, gather, small, course):
    config = model_of(model, layout, repeats, small)
    agree(course(config, rules_of(layout, repeats, remat, gather)), course(config, "single", unroll=1))


def test_cases_have_every_layout_and_policy_with_and_without_repeats():
    for values in (LAYOUTS, map(str, REMATS), GATHERS):
        met = {(value, case[2]) for case in PRODUCT for value in (case[1], str(case[3]), case[4])}
        assert {(value, repeats) for value in values for repeats in (1, 2)} <= met


@pytest.fixture(scope="module")
def turns_of_two(small, course):
    """A course whose stages compute one microbatch forward and another one backward in each turn."""
    return course(small(**EIGHT), rules_of(FIRST, mesh=FOUR, microbatches=8, **ONE_BY_ONE))


@pytest.mark.long
def test_nor_does_the_schedule(turns_of_two, small, course):
    agree(turns_of_two, course(small(**EIGHT), "single", unroll=1))


@pytest.mark.long
def test_memory_does_not_grow_with_the_microbatches(turns_of_two, small, built):
    half, rules = small(**EIGHT, data={"batch": B // 2}), rules_of(FIRST, mesh=FOUR, **ONE_BY_ONE)
    fewer, more = courses.trace_gradients(built(half, rules)).lower().compile(), turns_of_two.program
    less_bytes, more_bytes = (program.memory_analysis().temp_size_in_bytes for program in (fewer, more))
    rows = B // 8 * T // 2 * D * 4  # of a microbatch on a device, in bytes
    assert (
        more_bytes - less_bytes < 2 * rows
    )  # of the four microbatches more, a stage could keep the inputs of two layers


@pytest.mark.long
def test_stages_send_rows_and_their_gradients(turns_of_two, read):
    found = over_stages(turns_of_two.program.as_text(), stages=4)
    rows = B // 8 * T // 2 * D
    assert {what: times for what, times in found.items() if what[3]} == {
        ("collective-permute", "f32", rows, True): 2 * (8 + 2 * 3)
    }
    sent = ring_bytes(count(turns_of_two.program.as_text()))
    reading = read(turns_of_two.step, turns_of_two.traced)
    assert not reading.unknown and not reading.estimated_because
    assert reading.communication_bytes <= sent <= 1.05 * reading.communication_bytes


@pytest.mark.slow
def test_stages_that_keep_their_inputs_alone_give_the_same_gradients(small, course):
    """Four microbatches begin in each stage, so that rows wait in other places than those in which they began."""
    config = small(**EIGHT)
    agree(course(config, rules_of(FIRST, microbatches=8, **INPUTS)), course(config, "single", unroll=1))


@pytest.mark.long
def test_stages_that_keep_their_inputs_alone_keep_less(small, built, read):
    config, layers, inputs = small(**EIGHT), rules_of(FIRST), rules_of(FIRST, **INPUTS)
    rows = B // 4 // 2 * T // 2 * D * 4  # of a microbatch on a device, in bytes
    assert read(built(config, layers)).saved_bytes - read(built(config, inputs)).saved_bytes == 5 * (4 - 1) * rows


@pytest.mark.slow
@pytest.mark.parametrize(("pipeline", "model", "layout", "remat", "interleave"), KEPT)
def test_nor_does_what_is_kept_of_any_model(pipeline, model, layout, remat, interleave, small, course):
    rules = rules_of(layout, remat=remat, **pipeline)
    config = model_of(model, layout, pipeline.get("repeats", 1), small)
    agree(course(config, rules, interleave=interleave), course(config, "single", unroll=1))


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({"pipeline": {"microbatches": 4, "repeats": 2}}, "pipeline.repeats=2"),
        ({"pipeline": {"microbatches": 4, "gather": "step"}}, "pipeline.gather=step"),
        ({"pipeline": {"microbatches": 4, "keep": "stage"}}, "pipeline.keep=stage"),
        ({"microbatches": 2}, "microbatches=2"),
        ({"remat": {"offload": ["residual"]}}, "remat.offload=[residual]"),
    ],
)
def test_what_the_schedule_does_not_go_with_is_refused(raw, said):
    pipeline = {"microbatches": 4, **raw.get("pipeline", {}), "schedule": "1f1b"}
    rules = rules_file.from_dict({"mesh": {"stage": 2}, **raw, "pipeline": pipeline}, "here.yaml")
    (problem,) = rules.problems
    assert problem.message == f"pipeline: schedule: 1f1b does not go with {said}"
    assert problem.row.startswith(f"here.yaml: {said.partition('=')[0]}: ")
    assert problem.fix.startswith("--set rules.") and problem.fix.endswith(", or rules.pipeline.schedule=gpipe")


def test_each_stage_has_the_gradient_of_its_own_slot():
    """Of a weight that several products share, as those of the parts of a device's rows."""
    spec, x_SD = Spec("w", ("embed",), "optimizer"), jnp.arange(8.0).reshape(2, 4)

    def total(w_SD):
        return jax.vmap(lambda w_D, x_D: gradient_slot([Sum(Split())], spec, w_D.dtype, w_D) * x_D)(w_SD, x_SD).sum()

    np.testing.assert_array_equal(jax.grad(total)(jnp.ones((2, 4))), x_SD)


@pytest.mark.slow
def test_weights_that_are_gathered_once_give_the_same_gradients(first, small, course):
    once = course(model_of(MIXED, FIRST, 1, small), rules_of(FIRST, gather="step"))
    agree(first, once)
    within = [
        one.groups
        for instruction in hlo.parse(once.program.as_text()).operations
        for one in instruction.collectives
        if one.kind == "reduce-scatter" and instruction.loops
    ]
    # Gradients of matrices are summed over fsdp behind the turns.
    assert within and not any(len({device // 2 for device in group}) > 1 for groups in within for group in groups)


def test_what_cannot_be_gathered_once_is_refused(small):
    experts = model_of("dense, then experts", "experts", 1, small)
    for config, layout, said in (
        (experts, "experts", "layers with model.experts.count=8 gather their weights in each turn"),
        (model_of("plain", FIRST, 1, small), FIRST, ""),
    ):
        problems = pipeline_problems(config, rules_of(layout, gather="step").fill(8))
        assert any(said in problem.message for problem in problems) == bool(said)


def test_when_weights_are_gathered_is_one_of_two():
    (problem,) = rules_of(FIRST, gather="turns").problems
    assert problem.message == "pipeline: weights are gathered once in a turns (did you mean turn?)"
    assert problem.fix == "use turn or step"


@pytest.mark.parametrize(("remat", "matmuls"), [("dots", 3), ("block", 4)])
def test_matmuls_of_stages_are_kept_as_those_without_stages(remat, matmuls):
    place = MeshPlacement(
        rules_of(FIRST, remat=remat).fill(8), meshes.build(rules_of(FIRST).fill(8), jax.devices()[:8])
    )
    stage = jax.checkpoint(jax.vmap(lambda x, w: jnp.sin(x @ w)), policy=place.within_stage.setting("remat"))
    program = jax.make_jaxpr(jax.grad(lambda *given: stage(*given).sum(), (0, 1)))(*[jnp.ones((2, 4, 4))] * 2)
    assert str(program).count("dot_general[") == matmuls


@pytest.mark.slow
def test_what_stages_compute_without_rows_changes_no_bit(small, built, batch_of, monkeypatch):
    def run():
        return courses.once(built, batch_of)(model_of("plain", RING, 2, small), REPEATED, 1)

    repeated = run()
    monkeypatch.setattr(pipeline, "BUBBLES", math.nan)
    filled = run()
    assert filled.program.as_text() != repeated.program.as_text()
    assert filled.losses == repeated.losses
    jax.tree.map(np.testing.assert_array_equal, filled.gradients, repeated.gradients)


def over_stages(text, stages=2):
    """Of each collective between stages: kind, dtype, elements, in a loop, times."""
    found = collections.Counter()
    for instruction in hlo.parse(text).operations:
        for one in instruction.collectives:
            if any(len({device // (8 // stages) for device in group}) > 1 for group in one.groups):
                times = math.prod(loop.trip_count for loop in instruction.loops)
                for moved in one.inputs:
                    found[one.kind, moved.dtype, moved.elements, bool(instruction.loops)] += times
    return found


def test_what_stages_send(first):
    """Rows to the next stage and rows that wait to the one before, in each of 5 turns and of their derivatives. Outside
    of the turns there is the last exchange, what tells tokens apart, and the gradients of what all stages share."""
    found = over_stages(first.program.as_text())
    rows = B // 4 // 2 * T // 2 * D  # of a microbatch on a device
    table = 64 // 2 * D // 2  # its gradient where it rests, of the look-up and of the logits
    found = {what: times for what, times in found.items() if what[:3] != ("all-reduce", "f32", 1)}  # sums of a step
    assert found == {
        ("collective-permute", "f32", rows, True): 2 * 2 * 5,
        ("collective-permute", "f32", rows, False): 2,
        ("all-gather", "s32", B // 4 * T, False): 2,  # positions and documents
        ("all-gather", "u32", B // 4 * T * 2, False): 1,  # keys of dropout
        ("all-reduce", "f32", D, False): 1,  # the gradient of the last norm
        ("all-reduce", "f32", table, False): 2,
    }


def test_the_trace_says_what_is_sent(first, read):
    sent, reading = ring_bytes(count(first.program.as_text())), read(first.step, first.traced)
    assert not reading.unknown
    assert reading.communication_bytes <= sent <= 1.05 * reading.communication_bytes


@pytest.mark.parametrize(("stages", "repeats"), [(2, 2), (4, 3), (6, 4), (3, 7)])
def test_each_round_gives_each_stage_a_part(stages, repeats):
    rounds = permutes._rounds(stages, repeats)
    assert sorted(part for round_ in rounds for part in round_) == list(range(stages * repeats))
    for round_ in rounds:
        assert {part // repeats for part in round_} == {part % stages for part in round_} == set(range(stages))


def test_layers_outside_of_the_stages_rest_as_under_other_rules(small):
    arrays = state.arrays(small(layers=5, **EXPERTS, **{"experts.dense_layers": 1, "experts.balance": "row"}))
    rules = rules_of("experts")
    placed = {leaf.path: rules.resolve("weights", leaf.path, leaf.axes, like.shape)[0][0]
              for leaf, like in pairs(arrays.named_params, arrays.params) if "layers" in leaf.axes}  # fmt: skip
    assert placed["layers.attention.wq"] == ("stage",) and placed["dense_layers.attention.wq"] == ()
    assert set(placed.values()) == {("stage",), ()}
    assert all(bool(names) == path.startswith("layers.") for path, names in placed.items())


def test_within_a_stage_no_row_names_it():
    rules = rules_of(FIRST)
    inner = rules.within_stage
    assert rules.split("rules", "residual", "batch") == ("stage", "fsdp")
    assert inner.split("rules", "residual", "batch") == inner.split("weights", "layers.mlp.w_up", "embed") == ("fsdp",)
    assert inner.stages == () and inner.split("weights", "layers.mlp.w_up", "layers") == ()


def test_a_bubble_is_a_finding_unless_it_is_small():
    (finding,) = advice._bubble(rules_of(FIRST))
    assert finding.message == "in 1 of 5 turns, a stage computes what nobody reads: 20%"
    assert "--set rules.pipeline.microbatches=8" in finding.fix
    assert not list(advice._bubble(rules_of(FIRST, 3))) and not list(advice._bubble(rules_file.load("fsdp8")))


def test_texts_are_not_generated_or_scored_in_stages(small):
    config, rules = model_of("plain", FIRST, 1, small), rules_of(FIRST)
    with pytest.raises(ShardingError, match="pipeline: training and its evaluation have stages"):
        programs.arrays_and_warnings(config, rules, "cpu", programs.whole_context(config))
    with pytest.raises(ShardingError, match="pipeline: training and its evaluation have stages"):
        score.build_scoring(config, rules, jax.devices()[:8], "cpu", 8, 16)


def test_a_model_of_ones_own_is_told_that_it_has_no_stages():
    raw = {"mesh": {"data": 1}, "rules": {}, "pipeline": {"microbatches": 4}}
    rules = rules_file.from_dict(raw, "here.yaml", vocabulary=mixer.TASK.names)
    _, warnings = state.arrays_and_warnings(mixer.TASK, rules, "cpu")
    assert "pipeline: the model does not use this key, so the key has no effect" in [one.message for one in warnings]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_between_slices_stages_send_activations_and_the_gradients_of_tables(schedule):
    """Compiled for two slices of TPUs, one for each stage."""
    sizes = ["layers=2", "embed=512", "mlp=512", "head_dim=128", "heads=4", "kv_heads=4", "compute_dtype=bfloat16",
             "matmul_precision=default"]  # fmt: skip
    config = configs.load("tiny", [*(f"model.{one}" for one in sizes), "data.batch=16"])
    raw = {
        "mesh": {"stage": 2, "fsdp": 4}, "dcn": {"stage": 2}, "remat": "block", "rules": {"batch": ["stage", "fsdp"]},
        "weights": {"layers": "stage", "embed": "fsdp"}, "pipeline": {"microbatches": 4, "schedule": schedule},
    }  # fmt: skip
    (found,) = explain.reports(config, [rules_file.from_dict(raw, "here.yaml")], targets.parse("2@v5e:2x2"))
    between = [one for one in found.collectives if one.link == "dcn"]
    sent = collections.Counter()
    for one in between:
        sent[one.kind] += one.bytes_per_device_per_step
    assert all("stage" in one.mesh_axes for one in between)
    counted = sum(size for axes, size in found.floor.communication_by_axis.items() if "stage" in axes)
    assert sum(sent.values()) <= 1.05 * counted
    model = config.model
    tables_bytes = 2 * model.vocab_rows * model.embed * 4 // 4  # float32, split over fsdp; two stages send it once
    assert sent["all-reduce"] <= 1.05 * tables_bytes and sent["all-gather"] < 0.02 * sent["collective-permute"]
    activations_bytes = config.data.batch * config.data.seq * model.embed * 2 // 4
    assert sent["collective-permute"] >= activations_bytes


def test_what_crosses_slices_may_be_the_stages(small):
    rules = dataclasses.replace(rules_of(FIRST), dcn={"stage": 2}).fill(8)
    assert state.arrays_and_warnings(model_of("plain", FIRST, 1, small), rules, "cpu")[1] == []
