# ruff: noqa: E501  a program's line is one line
"""Floors and attribution know a model from its traced program: nothing of any family is unknown to them."""

import dataclasses
import functools
import itertools
import random
import types

import pytest
from test_attribution import collectives_of, program, simulated

from gspmd_lm.config import Lora, Queries, RelativePositions, RelativeVectors, Vision, Windows
from gspmd_lm.config.media import Patches
from gspmd_lm.config.windows import Level
from gspmd_lm.foresight.graph import DataflowGraph
from gspmd_lm.infer import programs
from gspmd_lm.sharding import rules_file
from gspmd_lm.sharding.problems import ShardingError
from gspmd_lm.sharding.rules import CONTEXTS
from gspmd_lm.train import state

BIASES = {
    name: True for name in ("attention.qkv_bias", "attention.out_bias", "feed_forward.bias", "logits.bias", "norm.bias")
}
FAMILIES = {
    "llama": {"kv_heads": 2},
    "gemma": {"norm.post": True, "attention.qk_norm": True, "attention.qk_norm_kind": "joint", "embedding.tied": True,
              "embedding.scale": 5.7, "attention.softcap": 50.0, "logits.softcap": 30.0, "layers": 3,
              "attention.window": 4, "layer_pattern": ("sliding", "nope")},
    "bloom": {"positions": "alibi", "embedding.norm": True, "norm.kind": "layernorm", "feed_forward.kind": "plain", **BIASES},
    "gpt2": {"positions": "learned", "embedding.tied": True, "norm.kind": "layernorm", "feed_forward.kind": "plain", "dropout": 0.1,
             **BIASES},
    "falcon": {"block": "parallel", "kv_heads": 1, "feed_forward.kind": "plain"},
    "neox": {"block": "parallel", "norm.shared": False, "norm.post": True, "positions": "sinusoidal", "dropout": 0.1,
             **BIASES},
    "z_loss": {"logits.z_loss": 1e-4, "norm.scale": False, "positions": "none", "compute_dtype": "bfloat16",
               "matmul_precision": "default"},
    "olmo": {"norm.pre": False, "norm.post": True, "attention.qk_norm": True, "attention.qk_norm_kind": "joint",
             "attention.window": 4, "layer_pattern": ("sliding", "nope"), "kv_heads": 4},
    "cohere": {"block": "parallel", "norm.kind": "layernorm", "attention.qk_norm": True, "attention.qk_norm_kind": "per_head", "kv_heads": 4,
               "logits.scale": 0.25, "residual.scale": 0.2, "feed_forward.activation": "relu2"},
    "opt": {"norm.pre": False, "norm.sum": True, "norm.final": False, "embedding.width": 24, "norm.kind": "layernorm",
            "embedding.tied": True, "feed_forward.kind": "plain", "positions": "learned", **BIASES},
    "gemma3n": {"residual.streams": 2, "residual.laurel_rank": 4, "residual.layer_embed": 8, "feed_forward.sparsity": 0.5,
                "attention.shared_kv_layers": 1, "attention.value_norm": True, "attention.qk_norm": True, "embedding.tied": True, "kv_heads": 4},
    "mixtral": {"experts.count": 8, "experts.per_token": 2, "kv_heads": 2, "experts.balance": "batch"},
    "qwen2_moe": {"experts.count": 8, "experts.per_token": 2, "experts.shared_mlp": 16, "experts.shared_gate": True, "experts.dense_layers": 1,
                  "experts.mlp": 16, "feed_forward.bias": True, "experts.router_bias": True, "experts.balance": "row", "experts.z_loss": 1e-3,
                  "lora": Lora(rank=4, alpha=8.0, targets=("wq", "w_gate", "w_up", "w_down"))},
    "mixtral_lora": {"experts.count": 8, "experts.per_token": 2, "experts.shared_mlp": 16, "feed_forward.bias": True,
                     "lora": Lora(rank=4, alpha=8.0, targets=("wq", "w_gate", "w_up", "w_down"))},
    "lora": {"lora": Lora(rank=4, alpha=8.0, targets=("wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down"))},
}  # fmt: skip


def graph(config, rules):
    """What is recorded of a train step, and the arrays of its model."""
    arrays = state.arrays(config)
    return DataflowGraph.from_recorder(state.record_arrays(config, arrays, rules.microbatches, rules), arrays), arrays


LONG = ("qwen2_moe", "gemma3n", "gemma")
# Those whose settings others of the list have as well, and one that takes minutes.
HELD_BY_OTHERS = (
    "llama", "falcon", "z_loss", "cohere", "olmo", "bloom", "gpt2", "mixtral", "mixtral_lora", "lora", "bert", "albert",
    "blip2", "vit", "deberta 1", "opt",
)  # fmt: skip


_FULL = {"attention.mask": "full", "norm.kind": "layernorm", "feed_forward.kind": "plain", "positions": "learned", "embedding.norm": True,
         "embedding.token_types": 2, "norm.pre": False, "norm.sum": True, "norm.final": False, **BIASES}  # fmt: skip
ENCODERS = {
    "bert": {**_FULL, "objective": "masked", "logits.transform": True, "embedding.tied": True},
    "albert": {**_FULL, "objective": "masked", "logits.transform": True, "embedding.tied": True, "shared_layers": True,
               "embedding.width": 24, "embedding.input": "sum", "layers": 3},
    "deberta": {**_FULL, "objective": "masked", "logits.transform": True, "embedding.tied": True, "positions": "none",
                "attention.relative_vectors": RelativeVectors(ranges=8, distance=10)},
    "deberta 1": {**_FULL, "objective": "masked", "logits.transform": True, "embedding.tied": True, "positions": "none",
                  "attention.relative_vectors": RelativeVectors(ranges=20, distance=10, own_projections=True)},
    "classes": {**_FULL, "objective": "classes", "logits.bias": False, "classes.count": 3,
                "attention.relative_positions": RelativePositions(ranges=8), "shared_layers": True, "embedding.width": 24,
                "embedding.input": "sum", "layers": 3},
    "vit": {**_FULL, "objective": "classes", "logits.bias": False, "classes.count": 3, "vocab": 0, "padded_vocab": 0,
            "embedding.token_types": 0, "embedding.norm": False, "patches": Patches(image=12, size=4, channels=1), "context": 10},
    "swin": {**_FULL, "objective": "classes", "logits.bias": False, "classes.count": 3, "vocab": 0, "padded_vocab": 0,
             "embedding.token_types": 0, "patches": Patches(image=16, size=4, class_row=False, pool="mean"), "context": 16,
             "positions": "none", "norm.pre": True, "norm.sum": False, "norm.final": True,
             "attention.relative_positions": RelativePositions(side=2, ranges=9, shared=False, learned_row=False),
             "windows": Windows(size=2, shift=1, levels=(Level(layers=1, embed=64, heads=8, mlp=64),)),
             "layer_pattern": ("full", "shifted"), "row_multiple": 8},
    "clip": {"objective": "contrastive", "norm.kind": "layernorm", "feed_forward.kind": "plain", "positions": "learned",
             **BIASES, "logits.bias": False, "data": {"source_seq": 24},
             "vision": Vision(patches=Patches(image=16, size=4, bias=False), projection=24, embed=48, layers=1, head_dim=6)},
    "blip2": {"positions": "learned", "frozen": ("vision",), "data": {"seq": 24, "source_seq": 24}, "vision": Vision(
        patches=Patches(image=16, size=4), embed=48, layers=1, head_dim=6, queries=Queries(
            rows=8, layers=3, embed=40, head_dim=5, mlp=56))},
}  # fmt: skip


def families(*held):
    marks = dict.fromkeys(LONG, pytest.mark.long) | dict.fromkeys(held, pytest.mark.slow)
    return [pytest.param(name, marks=marks.get(name, ())) for name in (*FAMILIES, *ENCODERS)]


@pytest.mark.parametrize("family", families(*HELD_BY_OTHERS))
def test_every_array_of_every_family_is_known(small, family):
    """To floor and attribution: each weight is multiplied, looked up or applied to an activation, and stands between
    some; each activation that is placed is made from others."""
    config, rules = small(**(FAMILIES | ENCODERS)[family]), rules_file.load("fsdp2_tp4").fill(8)
    found, arrays = graph(config, rules)
    for path in sorted(found.weights):
        both = path in found.looked_up and path in found.matrix_paths
        assert both == (config.model.embedding.tied and path == "embedding"), path
        assert path in found.looked_up or path in found.matrix_paths or found.applied_to(path), path
        assert path in found.matrix_paths or not path.rpartition(".")[2].startswith("w"), path
        assert found.activations_around(path), path
    modules = {node.name.modules for node in found.nodes if node.name.modules[-1:] and "norm" in node.name.modules[-1]}
    assert len(modules) >= 2 and all(found.activations_around(modules=names) for names in modules)
    for product in found.matmuls:
        assert product.input.placed and (product.group_axis or (product.output and product.output.placed)), (
            product.node.name
        )
    for node in found.activations:
        assert found.made_from(node.placed.array) or node.placed.array in ("tokens", "patches", "vectors")
    if config.objective != "causal":
        return
    for phase, recorded in programs.record_arrays(config, arrays, programs.whole_context(config), rules).items():
        forward, apart = DataflowGraph.from_recorder(recorded, arrays), ("vision.", "queries.", "query_")
        wanted = {path for path in found.matrix_paths if phase == "prefill" or not path.startswith(apart)}
        assert forward.matrix_paths == wanted and set(forward.looked_up) == set(found.looked_up)


# By default the family with most primitives that no other test reads; the test of a mixture reads one, plan/test_sent.py
# a step of each kind of encoder, and layers with soft caps, windows or biases are of the primitives that
# test_other_primitives.py has.
@pytest.mark.long
@pytest.mark.parametrize("family", families(*HELD_BY_OTHERS, "gemma", "neox", "qwen2_moe", *ENCODERS))
def test_a_step_of_every_family_is_read(small, built, read, family):
    config, rules = small(**(FAMILIES | ENCODERS)[family]), rules_file.load("fsdp2_tp4")
    if config.model.kv_heads % rules.mesh["tensor"]:
        rules = without(rules, "rules.kv_heads")
    reading = read(built(config, rules))
    assert reading.communication_bytes > 0 and not reading.estimated_because
    assert reading.saved_bytes > 0


def without(rules, key):
    return dataclasses.replace(rules, rows=tuple(row for row in rules.rows if row.key != key))


def tensors(moved):
    """How many tensors of each description move; their names change with what the compiler merges them with."""
    counts = {}
    for one in moved:
        key = one.kind, one.mesh_axes, one.phase, one.elements
        counts[key] = counts.get(key, 0) + one.times_per_step
    return counts


@pytest.fixture(scope="module")
def compiled(built, read):
    """A function that compiles a train step on simulated devices, once for each layout.

    It gives the collectives, the bytes of temporaries, and a function that reads the trace.
    """
    known = {}

    def find(config, rules):
        rules = rules.fill(8)
        key = repr((config, rules.rows, rules.remat, rules.microbatches, rules.mesh, rules.context))
        if key not in known:
            step = built(config, rules)
            traced = step.trace_train()
            program = traced.lower().compile()
            moved = collectives_of(step, program.as_text(), simulated(rules))
            temporary_bytes = program.memory_analysis().temp_size_in_bytes
            known[key] = moved, temporary_bytes, functools.partial(read, step, traced)
        return known[key]

    return find


@pytest.fixture(scope="module")
def moved_by(compiled):
    """A function that gives the collectives of a compiled train step."""
    return lambda config, rules: compiled(config, rules)[0]


def check_unnamed_rows(find, config, rules, keys=None):
    """A collective stays as it was when a row that is not named is dropped."""
    moved = find(config, rules)
    for key in keys or [row.key for row in rules.rows]:
        other = find(config, without(rules, key))
        names, counts = {(one.kind, one.mesh_axes, one.op, one.phase) for one in other}, tensors(other)
        for one in moved:
            stays = (one.kind, one.mesh_axes, one.op, one.phase) in names
            stays |= (one.kind, one.mesh_axes, one.phase, one.elements) in counts
            assert key in one.rules or stays, (key, one)
    return moved


@pytest.mark.long
def test_new_weights_are_gathered_from_where_the_optimizer_has_them(small, compiled):
    """And the floor is close to what is sent: also of biases and of positions that are learned."""
    biased = {name: True for name in ("norm.bias", "feed_forward.bias", "attention.qkv_bias")}
    config = small(embed=64, mlp=256, positions="learned", **biased)
    moved, temporary_bytes, reading_of = compiled(config, rules_file.load("zero1_8"))
    found = [one for one in moved if one.kind == "all-gather" and one.phase == "optimizer"]
    assert {"layers.attention.wq", "layers.mlp.w_down", "embedding", "final_norm.scale"} <= {one.op for one in found}
    assert {one.rules for one in found} == {("optimizer.embed",)}
    reading, sent = reading_of(), sum(one.bytes_per_device_per_step for one in moved)
    assert reading.communication_bytes <= sent <= 1.05 * reading.communication_bytes
    assert 0 < reading.saved_bytes < temporary_bytes and reading.unknown == {} and not reading.estimated_because


def split_queries():
    rows = {"batch": "data", "q.seq": "context", "residual.seq": "context"}
    return rules_file.from_dict({"mesh": {"data": 2, "context": 4}, "rules": rows}, "here.yaml")


@pytest.mark.long
def test_split_queries_are_the_cause(small, moved_by):
    moved = check_unnamed_rows(moved_by, small(), split_queries(), ["rules.residual.seq"])
    inside = [one for one in moved if one.mesh_axes == ("context",) and one.op.startswith("layers.attention")
              and not one.op.startswith("layers.attention_norm")]  # fmt: skip
    gradients = [
        one for one in inside if one.op in ("layers.attention.wk", "layers.attention.wv", "layers.attention.wq")
    ]
    assert {one.kind for one in gradients if one.phase == "backward"} >= {"all-reduce"}
    for one in inside:
        # What wq reads is split as the residual stream is. The gradient of the queries is split as they are: jax 0.12
        # gathers that instead of what wq makes of it.
        reads = one.kind == "all-gather" and "wq" in one.op and one.einsum != "BTNH,DNH->BTD"
        assert ("rules.q.seq" in one.rules) != (reads or "wo" in one.op), one


@pytest.mark.slow
def test_split_queries_by_counterfactual(small, moved_by):
    check_unnamed_rows(moved_by, small(), split_queries())


def test_a_sum_over_more_than_its_name_says_has_the_rows_of_both(small):
    """The unembedding's gradient is named a sum over the batch; a split sequence makes it one over tokens."""
    rows = {"batch": "data", "seq": "context", "vocab": None}
    rules = rules_file.from_dict({"mesh": {"data": 2, "context": 4}, "rules": rows}, "here.yaml").fill(8)
    body = """  %p = f32[64,32]{1,0} parameter(0)
  %g = f32[64,32]{1,0} tanh(%p), metadata={op_name="jit(_train)/jvp(of.loss)/sum.block_input.batch/optimizer.unembedding/dot"}
  ROOT %r = f32[64,32]{1,0} all-reduce(%g), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add"""
    step = types.SimpleNamespace(config=small(), rules=rules)
    (one,) = collectives_of(step, program(body), simulated(rules))
    assert one.mesh_axes == ("data", "context") and one.rules == ("rules.batch", "rules.seq")


def mixed(form):
    """Tokens that travel to experts; with a form, of a split sequence."""
    raw = {"mesh": {"data": 2, "expert": 4}, "remat": "block",
           "rules": {"batch": ["data", "expert"], "expert": "expert"}}  # fmt: skip
    if form:
        raw["rules"]["seq"], raw["context"], raw["mesh"] = "context", form, {"data": 2, "expert": 2, "context": 2}
    return rules_file.from_dict(raw, "here.yaml")


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("mixtral", ""),
        pytest.param("mixtral_lora", "", marks=pytest.mark.slow),
        *(pytest.param("mixtral", form, marks=pytest.mark.slow) for form in CONTEXTS),
    ],
)
def test_a_mixture_names_its_rows(small, compiled, family, form):
    """Those of tokens that travel to experts, and of a split sequence; and the floor is not beaten."""
    config, rules = small(**FAMILIES[family]), mixed(form)
    moved, _, reading_of = compiled(config, rules)
    assert all(one.rules and one.op != "step" for one in moved)
    for one in moved:
        causes = {axis for row in rules.rows if row.key in one.rules for axis in row.mesh_axes}
        assert causes >= {*one.mesh_axes}, one
    travels = [one for one in moved if one.mesh_axes == ("expert",) and one.op == "layers.mlp" and one.dtype == "f32"]
    assert travels and all({"rules.batch", "rules.expert"} <= {*one.rules} for one in travels)
    kind = {"ring": "collective-permute", "gather": "all-gather", "ulysses": "all-to-all", "": ""}[form]
    keys = [one for one in moved if one.op.startswith("layers.attention") and one.kind == kind
            and one.phase == "forward" and one.mesh_axes == ("context",)]  # fmt: skip
    assert bool(keys) == bool(form) and all(one.rules == ("rules.seq",) for one in keys)
    sent = sum(one.bytes_per_device_per_step for one in moved)
    assert reading_of().communication_bytes <= sent


NORMS = ("attention_post_norm", "mlp_post_norm", "embedding_norm", "attention_norm", "mlp_norm", "final_norm")


@pytest.mark.slow  # by default test_attribution.py has norms within layers and behind them
def test_every_norm_names_the_rows_that_split_what_it_reads(small, moved_by):
    for family, norms in (({"norm.post": True, "embedding.norm": True}, NORMS),):
        moved = moved_by(small(**family), rules_file.load("fsdp2_tp4"))
        for norm in norms:
            of = [one for one in moved if one.op.rpartition(".")[2] == norm and one.phase == "backward"]
            assert of, norm
            for one in of:
                if "tensor" in one.mesh_axes:
                    assert "rules.residual.seq" in one.rules, one
                assert set(one.rules) <= {"rules.batch", "rules.residual.seq", "weights.embed"}, one
        assert all(one.rules for one in moved)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", [{"norm.post": True, "embedding.norm": True}, {"norm.post": True, "block": "parallel"}]
)
def test_norms_of_families_by_counterfactual(small, moved_by, family):
    check_unnamed_rows(moved_by, small(**family), rules_file.load("fsdp2_tp4"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layout"),
    list(zip(FAMILIES, itertools.cycle(["fsdp2_tp4", "fsdp2_tp4", "zero1_8", "fsdp8"]), strict=False)),
)
def test_every_collective_of_every_family_has_a_row(small, moved_by, family, layout):
    config = small(**{"head_dim": 4, **FAMILIES[family]})
    rules = rules_file.load(layout)
    if config.model.kv_heads < 4 and layout == "fsdp2_tp4":
        rows = [dataclasses.replace(row, mesh_axes=()) if row.axis == "kv_heads" else row for row in rules.rows]
        rules = dataclasses.replace(rules, rows=tuple(rows))
    for one in moved_by(config, rules):
        assert one.rules and one.op != "step", one


MESHES = (
    {"data": 8},
    {"tensor": 8},
    {"data": 2, "tensor": 4},
    {"fsdp": 4, "context": 2},
    {"fsdp": 2, "tensor": 2, "context": 2},
)
IN_USE = ("seq", "heads", "kv_heads", "mlp", "vocab", "embed", "residual.seq", "residual.embed", "q.seq", "kv_seq",
          "k.kv_seq", "hidden.mlp", "logits.vocab", "attention_out.heads", "block_input.seq", "head_dim", "w_up.embed",
          "wq.embed", "embedding.vocab", "embedding.embed")  # fmt: skip
AT_REST = ("embed", "mlp", "vocab", "heads", "wo.heads")


def layout_at_random(config, number):
    """A layout that fits a config, of those that a seed draws."""
    draw = random.Random(number)
    while True:
        mesh = draw.choice(MESHES)
        axes = [None, *mesh, *mesh, list(mesh)[:2]]

        def table(keys, most, axes=axes):
            return {key: draw.choice(axes) for key in draw.sample(keys, draw.randint(0, most))}

        remat = draw.choice(["none", "block", "dots", {"save": ["q", "attention_out"]}])
        raw = {"mesh": mesh, "rules": {"batch": next(iter(mesh)), **table(IN_USE, 6)}, "weights": table(AT_REST, 2),
               "optimizer": table(AT_REST, 1), "remat": remat, "microbatches": draw.choice([1, 1, 2])}  # fmt: skip
        rules = rules_file.from_dict({key: value for key, value in raw.items() if value}, f"random_{number}.yaml").fill(
            8
        )
        try:
            state.arrays_and_warnings(config, rules, "cpu")
        except ShardingError:
            continue
        return rules


@pytest.mark.slow  # the tests of a mixture and of norms ask the same of layouts of theirs, and test_bounds.py of floors
@pytest.mark.parametrize("number", range(12))
def test_under_any_rules_every_collective_has_a_row(small, compiled, number):
    """And the floors are not beaten, neither that of what is sent nor that of what waits for the backward pass."""
    config = small(**[{}, FAMILIES["gpt2"], FAMILIES["gemma"], FAMILIES["neox"]][number % 4])
    rules = layout_at_random(config, number)
    moved, temporary_bytes, reading_of = compiled(config, rules)
    mapped = {axis for row in rules.rows for axis in row.mesh_axes}
    for one in moved:
        causes = {axis for row in rules.rows if row.key in one.rules for axis in row.mesh_axes}
        assert one.rules and causes >= mapped.intersection(one.mesh_axes), one
    sent, reading = sum(one.bytes_per_device_per_step for one in moved), reading_of()
    assert reading.communication_bytes <= sent or reading.estimated_because
    assert 0 < reading.saved_bytes / rules.microbatches <= temporary_bytes
