"""Products whose sums are made late equal plain einsums, however the rules split arrays; how many sums are made."""

import dataclasses
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.collectives import count
from gspmd_lm.errors import InputError
from gspmd_lm.sharding import mesh, rules_file
from gspmd_lm.sharding.annotate import Adapted, Weight, in_use, placed_by, shard
from gspmd_lm.sharding.matmuls import einsum, gathered, look_up, project, unreduced_matmul
from gspmd_lm.sharding.partial_sums import for_each_row, gradient, reduced
from gspmd_lm.sharding.placement import MeshPlacement

B, T, D, N, H, F, V, R = 8, 4, 16, 8, 4, 24, 32, 2
RESIDUAL, BLOCK_INPUT = "residual: batch seq embed", "block_input: batch seq embed"
QUERIES, HIDDEN = "q: batch seq heads head_dim", "hidden: batch seq mlp"
LOW_RANK = "low_rank: batch seq rank"
CUBE = {"data": 2, "fsdp": 2, "tensor": 2}
# Every weight of the tests: its axes and shape.
WEIGHTS = {
    "wq": ("embed heads head_dim", (D, N, H)),
    "wk": ("embed heads head_dim", (D, N, H)),
    "wv": ("embed heads head_dim", (D, N, H)),
    "wo": ("heads head_dim embed", (N, H, D)),
    "w_up": ("embed mlp", (D, F)),
    "w_down": ("mlp embed", (F, D)),
    "w_up_a": ("embed rank", (D, R)),
    "w_up_b": ("rank mlp", (R, F)),
    "w_down_a": ("mlp rank", (F, R)),
    "w_down_b": ("rank embed", (R, D)),
    "embedding": ("vocab embed", (V, D)),
}
BLOCK = tuple(name for name in WEIGHTS if name != "embedding")
# What the rules split -> mesh and tables.
SPLITS = {
    "output and summed letters": {"rules": {"batch": "data", "heads": "tensor", "mlp": "tensor"}},
    "both axes of a weight": {
        "rules": {"batch": "data", "heads": "tensor", "wq.embed": "fsdp", "wo.embed": "fsdp", "mlp": "tensor",
                  "w_up.embed": "fsdp", "w_down.embed": "fsdp"},
    },
    "two axes of a weight that are summed over": {
        "rules": {"batch": "data", "wo.heads": "tensor", "wo.head_dim": "fsdp"},
    },
    "no weight": {"rules": {"batch": "data"}},
    "the batch alone, over several mesh axes": {
        "rules": {"batch": ["data", "fsdp", "tensor"]}, "weights": {"embed": ["data", "fsdp"]}},
    "several mesh axes per dimension": {
        "rules": {"batch": "data", "heads": ["fsdp", "tensor"], "mlp": ["tensor", "fsdp"], "residual.seq": "tensor"},
    },
    "heads and mlp over different mesh axes": {"rules": {"batch": "data", "heads": "tensor", "mlp": "fsdp"}},
    "the residual over the sequence": {
        "rules": {"batch": "data", "heads": "tensor", "mlp": "tensor", "residual.seq": "tensor"},
        "weights": {"embed": "fsdp"},
    },
    "no activation": {"rules": {"heads": "tensor", "mlp": "tensor", "q": None, "hidden": None},
                      "weights": {"embed": ["data", "fsdp"]}},
    "a weight over the axis of the batch": {
        "rules": {"batch": ["data", "fsdp"], "wq.heads": "data", "wo.heads": "data", "w_up.mlp": "fsdp",
                  "w_down.mlp": "fsdp"},
    },
    "gradients elsewhere": {
        "rules": {"batch": ["data", "fsdp"], "heads": "tensor", "mlp": "tensor"},
        "optimizer": {"embed": ["fsdp", "data"]},
    },
    "blocks that are computed again": {
        "rules": {"batch": "data", "heads": "tensor", "mlp": "tensor"}, "weights": {"embed": "fsdp"}, "remat": "block"},
}  # fmt: skip


def some(cases, slowly):
    """The names of cases, of which some are for `pytest -m slow`."""
    return [pytest.param(name, marks=pytest.mark.slow) if name in slowly else name for name in cases]


def placement_of(split):
    rules = rules_file.from_dict({"mesh": CUBE} | split, "here.yaml")
    return MeshPlacement(rules, mesh.build(rules, jax.devices()))


def weight(name, array, **more):
    return Weight(array, f"layers.{name}", tuple(WEIGHTS[name][0].split()), jnp.dtype(jnp.float32), **more)


def drawn(names, rows=B):
    rng = np.random.default_rng(0)
    arrays = {name: rng.normal(size=WEIGHTS[name][1]).astype(np.float32) for name in names}
    return arrays, rng.normal(size=(rows, T, D)).astype(np.float32)


def matrices(arrays, frozen=()):
    """The weights, with their adapters if they have any."""
    w = {name: weight(name, array, frozen=name in frozen) for name, array in arrays.items()}
    adapters = {name: (w[f"{name}_a"], w[f"{name}_b"]) if f"{name}_a" in w else () for name in w}
    return {name: Adapted(w[name], adapters[name], 0.5) for name in w if name[-2:] not in ("_a", "_b")}


def block(arrays, x_BTD):
    """The matmuls of attention and an MLP, side by side, which may have adapters, through the words."""
    w = matrices(arrays)
    with gathered(x_BTD, BLOCK_INPUT, RESIDUAL) as in_BTD:
        q, k, v = (shard(project(in_BTD, w[name]), QUERIES) for name in ("wq", "wk", "wv"))
        with gathered(x_BTD, BLOCK_INPUT, RESIDUAL) as again_BTD:  # as an MLP beside attention reads what it reads
            hidden = shard(jnp.sin(project(again_BTD, w["w_up"])), HIDDEN)
    y = unreduced_matmul(jnp.sin(q) * k + v, w["wo"]) + 0.5
    y += unreduced_matmul(hidden, w["w_down"]) + 0.25
    return x_BTD + reduced(y + 0.25, BLOCK_INPUT, RESIDUAL)


def plain_block(w, x_BTD):
    q, k, v = (jnp.einsum("BTD,DNH->BTNH", x_BTD, w[name]) for name in ("wq", "wk", "wv"))
    up = jnp.einsum("BTD,DF->BTF", x_BTD, w["w_up"] + 0.5 * w["w_up_a"] @ w["w_up_b"])
    y = jnp.einsum("BTNH,NHD->BTD", jnp.sin(q) * k + v, w["wo"])
    return x_BTD + 1 + y + jnp.einsum("BTF,FD->BTD", jnp.sin(up), w["w_down"] + 0.5 * w["w_down_a"] @ w["w_down_b"])


def back(function, inputs, placement=None):
    """The value of a function, the gradients of half the sum of its squares, and the program of both."""

    def both(*inputs):
        with placed_by(placement), jax.default_matmul_precision("highest"):
            y, pull = jax.vjp(function, *inputs)
            return y, pull(y)

    program = jax.jit(both).lower(*inputs).compile()
    return program(*inputs), program.as_text()


def agree(results, wanted):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max()), results, wanted)


@pytest.fixture(scope="module")
def wanted():
    return back(plain_block, drawn(BLOCK))[0]


SLOWLY = ("output and summed letters", "no weight", "no activation")  # parts of others


@pytest.mark.parametrize("split", some(SPLITS, SLOWLY))
def test_values_and_gradients_are_those_of_plain_einsums(split, wanted):
    placement = placement_of(SPLITS[split])
    found, _ = back(block, drawn(BLOCK), placement)
    agree(found, wanted)
    (gradients, _) = found[1]
    for name, dw in gradients.items():  # the gradient of a weight is where the rules say, though nobody asked
        home = placement.sharding("optimizer", f"layers.{name}", tuple(WEIGHTS[name][0].split()), dw.shape)
        assert dw.sharding.is_equivalent_to(home, dw.ndim), name


def test_a_batch_of_one_row(wanted):
    arrays, x_BTD = drawn(BLOCK, rows=1)
    placement = placement_of({"rules": {"heads": "tensor", "mlp": "tensor", "seq": "data"}})
    agree(back(block, (arrays, x_BTD), placement)[0], back(plain_block, (arrays, x_BTD))[0])


def test_on_one_device_words_are_plain_einsums(wanted):
    agree(back(block, drawn(BLOCK))[0], wanted)
    arrays, x_BTD = drawn(BLOCK)
    made = Counter(equation.primitive.name for equation in jax.make_jaxpr(block)(arrays, x_BTD).eqns)
    assert made["dot_general"] == len(BLOCK)
    assert not {"sharding_constraint", "shard_map", "reshape", "broadcast_in_dim"} & made.keys()


def test_an_input_that_was_not_gathered_is_refused():
    """Its gradients would be reduced once for each weight."""
    w, x_BTD = weight("w_up", jnp.ones((D, F))), jnp.ones((B, T, D))
    with gathered(x_BTD, BLOCK_INPUT, RESIDUAL) as in_BTD, pytest.raises(InputError, match="not what gathered"):
        project(in_BTD + 0, w)
    with pytest.raises(InputError, match="fix   with gathered"):
        project(in_BTD, w)


PAIR = ("wq", "wk", "wv", "wo", "w_up", "w_down")  # what is read once and written once
WHOLE = B * T * D


@pytest.mark.parametrize(
    ("split", "sums"),
    [
        ({"mesh": {"tensor": 8}, "rules": {"heads": "tensor", "mlp": "tensor"}}, {("all-reduce", WHOLE): 2}),
        (
            {"mesh": {"data": 2, "tensor": 4},
             "rules": {"batch": "data", "heads": "tensor", "mlp": "tensor", "residual.seq": "tensor"}},
            {("reduce-scatter", WHOLE // 8): 2, ("all-gather", WHOLE // 2): 2,
             ("all-reduce", D * N * H // 4): 4, ("all-reduce", D * F // 4): 2},
        ),
        (  # what is split over other mesh axes is another sum
            {"mesh": {"fsdp": 2, "tensor": 4}, "rules": {"heads": "tensor", "mlp": "fsdp"}},
            {("all-reduce", WHOLE): 4},
        ),
        (
            {"mesh": {"data": 2, "tensor": 4}, "rules": {"batch": "data", "heads": "tensor", "mlp": "tensor"}},
            {("all-reduce", WHOLE // 2): 2, ("all-reduce", D * N * H // 4): 4, ("all-reduce", D * F // 4): 2},
        ),
        (  # weights are gathered once for each pass
            {"mesh": {"fsdp": 8}, "rules": {"batch": "fsdp"}, "weights": {"embed": "fsdp"}},
            {("reduce-scatter", D * N * H // 8): 4, ("reduce-scatter", D * F // 8): 2,
             ("all-gather", D * N * H): 2 * 4, ("all-gather", D * F): 2 * 2},
        ),
    ],
    ids=["Megatron", "Megatron, the residual over the sequence", "two ways to split", "two copies", "ZeRO-3"],
)  # fmt: skip
def test_one_reduction_pays_for_all_that_is_read_once_and_written_once(split, sums):
    placement = placement_of(split)
    arrays, x_BTD = drawn(PAIR)
    put = {
        name: jax.device_put(x, placement.sharding("weights", name, tuple(WEIGHTS[name][0].split()), x.shape))
        for name, x in arrays.items()
    }
    x_BTD = jax.device_put(x_BTD, placement.sharding("rules", "residual", ("batch", "seq", "embed"), x_BTD.shape))
    _, text = back(block, (put, x_BTD), placement)
    assert Counter((c.kind, c.elements) for c in count(text)) == sums


def test_tokens_are_not_cut_by_a_mesh_axis_that_splits_the_weight():
    """Cut twice by one mesh axis, the addends of the weight's gradient would be sent to and fro."""
    placement = placement_of({"mesh": {"data": 8}, "rules": {"batch": "data", "w_down.mlp": "data"}})
    (array,), hidden = drawn(("w_down",))[0].values(), np.random.default_rng(1).normal(size=(B, T, F))

    def down(array, hidden_BTF):
        return reduced(unreduced_matmul(shard(hidden_BTF, HIDDEN), weight("w_down", array)), BLOCK_INPUT, RESIDUAL)

    inputs = array, hidden.astype(np.float32)
    found, text = back(down, inputs, placement)
    agree(found, back(lambda w, hidden: jnp.einsum("BTF,FD->BTD", hidden, w), inputs)[0])
    pieces = {("all-to-all", B * T * F // 8): 3, ("reduce-scatter", WHOLE // 8): 1, ("all-gather", WHOLE): 1}
    assert Counter((c.kind, c.elements) for c in count(text)) == pieces


def test_the_gradients_of_a_weight_of_each_row_are_reduced_once():
    placement = placement_of({"mesh": {"data": 8}, "rules": {"batch": "data"}, "weights": {"embed": "data"}})
    (table,), x_BFD = drawn(("w_down",))[0].values(), np.random.default_rng(1).normal(size=(B, F, D))
    x_BFD = jax.device_put(x_BFD.astype(np.float32), placement.sharding("rules", "x", ("batch", "", ""), x_BFD.shape))
    found, text = back(lambda w, x: for_each_row(weight("w_down", w), B, jnp.sin) * x, (table, x_BFD), placement)
    agree(found, back(lambda w, x: jnp.sin(w) * x, (table, x_BFD))[0])
    sent = Counter((c.kind, c.elements) for c in count(text))
    assert sent == {("all-gather", F * D): 1, ("reduce-scatter", F * D // 8): 1}


def test_a_scan_keeps_one_copy_of_what_several_weights_read():
    placement, turns = placement_of({"rules": {"batch": "data", "heads": "tensor", "mlp": "tensor"}}), 3
    arrays, x_BTD = drawn(PAIR)
    arrays = {name: np.stack([array] * turns) for name, array in arrays.items()}

    def both(arrays, x_BTD):
        y, pull = jax.vjp(lambda *a: jax.lax.scan(lambda x, w: (block(w, x), None), a[1], a[0])[0], arrays, x_BTD)
        return pull(y)

    with placed_by(placement):
        forward, _ = (one for one in jax.make_jaxpr(both)(arrays, x_BTD).eqns if one.primitive.name == "scan")
    assert [out.aval.shape for out in forward.outvars].count((turns, B, T, D)) == 1


@pytest.mark.parametrize("remat", ["none", "block"])
def test_a_frozen_weight_costs_no_product(remat):
    placement = placement_of({"rules": {"batch": "data", "mlp": "tensor"}, "remat": remat})
    arrays, x_BTD = drawn(("w_up", "w_down", "w_down_a", "w_down_b"))

    def mlp(frozen, arrays, x_BTD):
        w = matrices(arrays, arrays if frozen else ())
        with gathered(x_BTD, BLOCK_INPUT, RESIDUAL) as in_BTD:
            hidden = shard(jnp.sin(project(in_BTD, w["w_up"])), HIDDEN)
        return reduced(unreduced_matmul(hidden, w["w_down"]), BLOCK_INPUT, RESIDUAL)

    def products(frozen):
        with placed_by(placement):
            return str(jax.make_jaxpr(lambda *a: jax.vjp(lambda *a: mlp(frozen, *a), *a)[1](x_BTD))(arrays, x_BTD))

    assert products(False).count("dot_general[") == 4 * 3 and products(True).count("dot_general[") == 4 * 2
    (y, (gradients, dx)), _ = back(lambda *a: mlp(True, *a), (arrays, x_BTD), placement)
    (wanted, (_, wanted_dx)), _ = back(lambda *a: mlp(False, *a), (arrays, x_BTD))
    agree((y, dx), (wanted, wanted_dx))
    assert not any(np.any(dw) for dw in gradients.values())


def test_a_loop_gathers_a_used_weight_once_and_makes_its_sums_after_it():
    """The products of the loss: of a weight that is in use before the loop, and of two activations."""
    placement = placement_of({"rules": {"batch": "data", "vocab": "tensor"}, "weights": {"embed": "fsdp"}})
    rng, turns = np.random.default_rng(1), 3
    table_VD = rng.normal(size=(V, D)).astype(np.float32)
    g_CBTV, x_CBTD = (rng.normal(size=(turns, B, T, n)).astype(np.float32) for n in (V, D))
    home = tuple(WEIGHTS["embedding"][0].split())

    def looped(table_VD, g_CBTV, x_CBTD):
        at_rest = weight("embedding", table_VD)
        table = in_use(at_rest)

        def turn(total, inputs):
            g_BTV, x_BTD = shard(inputs[0], "logits: batch seq vocab"), shard(inputs[1], BLOCK_INPUT)
            dw, dx = einsum("BTV,BTD->VD", g_BTV, x_BTD), einsum("BTV,VD->BTD", g_BTV, table)
            return jax.tree.map(jnp.add, total, dw), dx

        zeros = jax.tree.map(jnp.zeros_like, einsum("BTV,BTD->VD", g_CBTV[0], x_CBTD[0]))
        dw, dx = jax.lax.scan(turn, zeros, (g_CBTV, x_CBTD))
        dx_BTD = reduced(jax.tree.map(lambda x: x.sum(0), dx), BLOCK_INPUT, RESIDUAL)
        return gradient(dw, at_rest), dx_BTD

    def placed(*inputs):
        with placed_by(placement), jax.default_matmul_precision("highest"):
            return looped(*inputs)

    at = jax.device_put(table_VD, placement.sharding("weights", "embedding", home, (V, D)))
    program = jax.jit(placed).lower(at, g_CBTV, x_CBTD).compile()
    dw, dx = program(at, g_CBTV, x_CBTD)
    agree(dw, np.einsum("CBTV,CBTD->VD", g_CBTV, x_CBTD))
    agree(dx, np.einsum("CBTV,VD->BTD", g_CBTV, table_VD))
    assert dw.sharding.is_equivalent_to(placement.sharding("optimizer", "embedding", home, (V, D)), 2)
    (loop,) = (one for one in jax.make_jaxpr(placed)(at, g_CBTV, x_CBTD).eqns if one.primitive.name == "scan")
    assert f"f32[{V},{D}] = sharding_constraint" not in str(loop)  # or a compiler may gather the table in every turn
    moved = Counter((c.kind, c.times, c.elements) for c in count(program.as_text()))
    assert moved == {
        ("all-gather", 1, V * D // 2): 1,
        ("all-reduce", 1, V * D // 4): 1,  # over `data` of the gradient, which rests split over `tensor` and `fsdp`
        ("all-reduce", 1, WHOLE // 2): 1,
    }


TABLES = {
    "rows": {"rules": {"batch": "data", "vocab": "tensor"}},
    "rows, and embed at rest": {"rules": {"batch": "data", "vocab": "tensor"}, "weights": {"embed": "fsdp"}},
    "rows over several mesh axes": {"rules": {"batch": "data", "vocab": ["tensor", "fsdp"], "residual.seq": "tensor"}},
    "rows over the axis of the batch": {"rules": {"batch": ["data", "fsdp"], "embedding.vocab": "fsdp"}},
    "rows, of a batch and a sequence that are split": {"rules": {"batch": "data", "seq": "fsdp", "vocab": "tensor"}},
    "rows, of which each device reads all": {"rules": {"vocab": "tensor"}},
    "embed at rest": {"rules": {"batch": ["data", "fsdp"]}, "weights": {"embed": "fsdp"}},
    "nothing": {"rules": {"batch": "data"}},
}


@pytest.mark.parametrize("split", some(TABLES, ("rows", "nothing")))
def test_gradients_of_a_repeated_id_add_up_in_float32(split):
    """What is looked up is exact. Of the gradients of one row the first is 1 and the others 2^-9, lost in bfloat16."""
    table_VD = np.random.default_rng(2).normal(size=(V, D)).astype(np.float32)
    ids_BT = np.arange(B * T, dtype=np.int32).reshape(B, T) % V
    ids_BT[:, 1:] = V - 1
    placement = placement_of(TABLES[split])

    def both(table_VD, ids_BT):
        def rows(table_VD):
            table = dataclasses.replace(weight("embedding", table_VD), compute_dtype=jnp.dtype(jnp.bfloat16))
            return look_up(table, ids_BT, BLOCK_INPUT, RESIDUAL)

        with placed_by(placement):
            y, pull = jax.vjp(rows, table_VD)
            return y, pull(jnp.full(y.shape, 2.0**-9, y.dtype).at[0, 1].set(1))[0]

    y, dtable_VD = jax.jit(both)(table_VD, ids_BT)
    np.testing.assert_array_equal(y, table_VD.astype(jnp.bfloat16)[ids_BT])
    wanted = np.zeros((V, D), np.float32)
    np.add.at(wanted, ids_BT, 2.0**-9)
    wanted[V - 1] += 1 - 2.0**-9
    np.testing.assert_array_equal(dtable_VD, wanted)
