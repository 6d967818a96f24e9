"""What a traced step says of its communication and FLOPs, beside what its compiled program has."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core
from jax.interpreters import batching
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from benchmarks.collectives import count, ring_bytes
from gspmd_lm.foresight import hlo
from gspmd_lm.foresight.propagation import RULES, read_step
from gspmd_lm.sharding.shapes import bytes_per_device
from tests.foresight.plain_models import LAYOUTS, MODELS, train_step

FSDP, TENSOR = 2, 4


def abstract(sizes):
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


MESH = abstract({"fsdp": FSDP, "tensor": TENSOR})


def at(*dims):
    return NamedSharding(MESH, PartitionSpec(*dims))


def array(shape, *dims, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=at(*dims))


def put(x, *dims):
    return jax.lax.with_sharding_constraint(x, at(*dims))


def reading(function, *arguments):
    with jax.sharding.use_abstract_mesh(MESH):
        return read_step(jax.make_jaxpr(function)(*arguments), arguments)


def kinds(found):
    """(kind, mesh axes, bytes each time, times) of each collective."""
    return sorted((one.kind, one.mesh_axes, one.bytes, one.times_per_step) for one in found.transfers)


# Beside compiled programs


def compiled_text(name, sizes, rules):
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(tuple(sizes.values())), tuple(sizes),
                axis_types=(AxisType.Auto,) * len(sizes))  # fmt: skip
    jitted, arguments = train_step(name, rules, mesh)
    with jax.set_mesh(mesh):
        return jitted.lower(*arguments).compile().as_text()


# Of what a compiled program sends, how much its trace must show at least. XLA sends more where it adds up the
# gradients of q, k and v apart, and both of a tied table; where it looks up in a split table by a sum, instead of
# gathering the table; and, on CPU, where it reduces gradients to all instead of scattering them.
MARKS = {
    ("looped_recomputed", "fsdp2tp4"): pytest.mark.long,
    ("translator", "tp"): pytest.mark.long,
    ("classifier", "tp"): (),
}
AT_LEAST = {"dp": 0.8, "fsdp": 0.6, "tp": 0.6, "fsdp2tp4": 0.5}


@pytest.mark.parametrize(
    ("name", "layout"),
    [pytest.param(*case, marks=MARKS.get(case, pytest.mark.slow)) for case in itertools.product(MODELS, LAYOUTS)],
)
def test_a_plain_step_computes_what_is_read_and_sends_no_less(name, layout):
    sizes, rules = LAYOUTS[layout]
    mesh = abstract(sizes)
    jitted, arguments = train_step(name, rules, mesh)
    with jax.sharding.use_abstract_mesh(mesh):
        found = read_step(jax.make_jaxpr(jitted)(*arguments), arguments)
    text = compiled_text(name, sizes, rules)
    module = hlo.parse(text)
    assert found.unknown == {}
    assert found.flops == sum(instruction.flops * instruction.executions for instruction in module.operations)
    sent = ring_bytes(count(text))
    assert AT_LEAST[layout] * sent <= found.communication_bytes <= sent


# Rules


def test_a_contracted_dimension_that_is_split_gives_a_sum_which_is_made_where_it_is_wanted():
    x, w = array((8, 16), "fsdp", "tensor"), array((16, 32), "tensor", None)
    local = 8 / FSDP * 32 * 4
    ring = local * (TENSOR - 1) / TENSOR
    assert kinds(reading(lambda x, w: put(x @ w, "fsdp", None), x, w)) == [("all-reduce", "tensor", 2 * ring, 1)]
    assert kinds(reading(lambda x, w: put(x @ w, "fsdp", "tensor"), x, w)) == [("reduce-scatter", "tensor", ring, 1)]
    assert not reading(lambda x, w: x @ w, x, w).chosen_bytes
    assert reading(lambda x, w: x @ w, x, w).flops == 2 * 8 * 16 * 32 / 8


def test_sums_that_are_added_are_made_once_and_sums_that_are_squared_before():
    x, w = array((8, 16), None, "tensor"), array((16, 32), "tensor", None)
    one = 2 * 8 * 32 * 4 * (TENSOR - 1) / TENSOR
    assert kinds(reading(lambda x, w: 3 * (x @ w) - (2 * x) @ w, x, w)) == [("all-reduce", "tensor", one, 1)]
    assert reading(lambda x, w: jnp.tanh(x @ w) + (2 * x) @ w, x, w).communication_bytes == 2 * one
    # What is multiplied twice is multiplied and added up once.
    again = reading(lambda x, w: jnp.tanh(x @ w) + 2 * (x @ w), x, w)
    assert again.communication_bytes == one and again.flops == again.model_flops / TENSOR == 2 * 8 * 16 * 32 / TENSOR


def test_a_weight_split_as_the_rows_are_is_gathered_or_its_rows_are_exchanged_whichever_is_less():
    w = array((16, 32), "fsdp", None)
    few, many = (
        reading(lambda x, w: put(x @ w, "fsdp", None), array((rows, 16), "fsdp", None), w) for rows in (2, 512)
    )
    assert kinds(many) == [("all-gather", "fsdp", 16 / 2 * 32 * 4, 1)]
    assert {kind for kind, *_ in kinds(few)} == {"all-to-all", "reduce-scatter"}
    assert many.estimated_because and many.chosen_bytes == many.communication_bytes
    assert few.communication_bytes < many.communication_bytes


def test_a_loop_counts_each_time_but_sends_once_what_does_not_change():
    def looped(x, same, each):
        def body(x, w):
            return put(jnp.tanh(x @ put(same, None, None) @ put(w, None, None)), "fsdp", None), None

        return jax.lax.scan(body, x, each)[0]

    x, same, each = array((8, 16), "fsdp"), array((16, 16), "tensor"), array((5, 16, 16), None, "tensor")
    found = reading(looped, x, same, each)
    gathered = 16 / TENSOR * 16 * 4 * (TENSOR - 1)
    assert kinds(found) == [("all-gather", "tensor", gathered, 1), ("all-gather", "tensor", gathered, 5)]
    assert found.flops == 5 * 2 * 2 * 8 * 16 * 16 / FSDP
    assert not found.estimated_because


def test_a_loop_of_one_iteration_is_none():
    def nested(x, weights):
        def outer(x, _):
            return jax.lax.scan(lambda x, w: (jnp.tanh(x @ put(w, None, None)), None), x, weights)[0], None

        return put(jax.lax.scan(outer, x, None, length=3)[0], None, None)

    x = array((8, 16), None, None)
    one, two = (reading(nested, x, array((layers, 16, 16), None, "fsdp")) for layers in (1, 2))
    assert kinds(one) == [("all-gather", "fsdp", 16 * 16 * 4 / 2, 1)]  # as what stands before the loop
    assert kinds(two) == [("all-gather", "fsdp", 16 * 16 * 4 / 2, 6)]


def test_a_sum_that_a_loop_carries_is_made_after_it():
    def accumulated(xs, ys):
        return put(jax.lax.scan(lambda total, xy: (total + xy[0].T @ xy[1], None), jnp.zeros((16, 32)), (xs, ys))[0])

    found = reading(accumulated, array((5, 8, 16), None, "fsdp"), array((5, 8, 32), None, "fsdp"))
    assert kinds(found) == [("all-reduce", "fsdp", 2 * 16 * 32 * 4 / 2, 1)]


def test_a_sum_of_devices_that_a_loop_only_adds_up_is_made_once():
    local = jax.shard_map(
        lambda x: jax.lax.psum(x[0], "fsdp"), mesh=MESH, in_specs=PartitionSpec("fsdp"), out_specs=PartitionSpec()
    )

    def accumulated(kept, begin, xs):
        def body(total, x):
            summed = jax.checkpoint(local)(x)
            return total + summed, (summed if kept else None)

        return jax.lax.scan(body, begin, xs)

    xs = array((5, FSDP, 16), None, "fsdp")
    for kept, begin, times in ((False, jnp.zeros(16), 1), (False, array((16,)), 1), (True, jnp.zeros(16), 5)):
        found = reading(functools.partial(accumulated, kept), begin, xs)
        assert kinds(found) == [("all-reduce", "fsdp", 16 * 4, times)]


def test_an_array_is_gathered_once_unless_it_is_computed_again():
    def loss(w, x, again):
        function = jax.checkpoint(lambda x: jnp.sin(x @ put(w, None, None))) if again else lambda x: jnp.sin(x @ w)
        w = put(w, None, None)
        return function(jnp.sin(x)).sum()

    w, x = array((16, 16), "tensor", None), array((8, 16), None, None)
    gathered = 16 / TENSOR * 16 * 4 * (TENSOR - 1)
    kept, again = (reading(jax.grad(lambda w, x, a=a: loss(w, x, a)), w, x) for a in (False, True))
    assert sum(one.bytes for one in kept.transfers if one.kind == "all-gather") == gathered
    assert again.flops_by_phase["recomputation"] == 2 * 8 * 16 * 16
    assert "recomputation" not in kept.flops_by_phase
    rows, w = array((512, 16), "fsdp"), array((16, 16), "fsdp")
    twice = reading(lambda x, y, w: (put(x @ w, "fsdp"), put(y @ w, "fsdp")), rows, rows, w)
    assert kinds(twice) == [("all-gather", "fsdp", 16 / FSDP * 16 * 4, 1)]


def test_what_has_no_rule_is_named_and_its_operands_are_counted_as_gathered():
    found = reading(jax.lax.linalg.cholesky_update, array((16, 16), "fsdp", None), array((16,), None))
    assert found.unknown == {"cholesky_update": 1} and found.estimated_because
    assert found.bytes_by_axes == {"fsdp": 16 / 2 * 16 * 4}


def test_what_jax_computes_element_by_element_has_a_rule_in_each_version_of_jax():
    """jax names these primitives itself: it batches them without a rule of their own."""
    of_elements = ("vectorized_batcher", "broadcast_batcher")
    public = [p for p in vars(jax.lax).values() if isinstance(p, core.Primitive)]
    rules = {p.name: batching.fancy_primitive_batchers[p] for p in public if p in batching.fancy_primitive_batchers}
    names = {n for n, rule in rules.items() if getattr(getattr(rule, "func", None), "__name__", "") in of_elements}
    assert len(names) > 60
    # Whether an array is split is not theirs to say: they move it.
    assert names - set(RULES) <= {"stage", "tie"}


def test_a_loop_of_unknown_length_counts_once_and_says_so_and_of_branches_the_one_that_sends_least():
    x, w = array((16, 16), None, "tensor"), array((16, 16), "tensor", None)
    found = reading(lambda x, w: jax.lax.while_loop(lambda y: y.sum() < 9, lambda y: put(y @ w), put(x)), x, w)
    assert found.unknown == {"the trip count of a while loop": 1}
    assert found.flops == 2 * 16**3 / TENSOR

    def two_products(x, w):
        return put(put(x @ w, None, "tensor") @ w)

    def product(x, w):
        return put(x @ w)

    chosen = reading(lambda x, w: jax.lax.cond(x[0, 0] > 0, two_products, product, x, w), x, w)
    assert sum(one.bytes for one in chosen.transfers if one.shape == (16, 16)) == 2 * 16 * 16 * 4 * 3 / 4
    assert chosen.flops == 2 * 2 * 16**3 / TENSOR
    both = [reading(branch, x, w).communication_bytes for branch in (two_products, product)]
    assert chosen.branch_bytes == max(both) - min(both) > 0
    alike = reading(lambda x, w: jax.lax.cond(x[0, 0] > 0, product, lambda x, w: -product(x, w), x, w), x, w)
    assert found.branch_bytes == alike.branch_bytes == 0


def turns(begin, condition, step):
    """A product in each iteration of a loop with a counter."""
    loop = lambda counter, x, w: (counter + step, x @ w, w)  # noqa: E731
    return lambda x, w: jax.lax.while_loop(lambda state: condition(state[0]), lambda s: loop(*s), (begin, x, w))[1]


def of_a_limit_that_is_carried(x, w):
    return jax.lax.fori_loop(jnp.int32(0), jnp.int32(9), lambda _, x: x @ w, x)


def of_a_limit_that_is_computed(x, w):
    limit = jnp.int32(3) * 2 + 1
    return jax.vmap(lambda x: jax.lax.fori_loop(0, limit, lambda _, x: x @ w, x))(x[None])


COUNTED = {
    "up": (turns(0, lambda n: n < 100, 1), 100),
    "down": (turns(9, lambda n: jnp.less_equal(0, n), -2), 5),
    "to a number": (turns(0, lambda n: n != 9, 3), 3),
    "never": (turns(0, lambda n: n < 0, 1), 0),
    "a carried limit": (of_a_limit_that_is_carried, 9),
    "a computed limit": (of_a_limit_that_is_computed, 7),
    "within another": (lambda x, w: turns(0, lambda n: n < 4, 1)(x, turns(0, lambda n: n <= 4, 1)(w, w)), 9),
}


@pytest.mark.parametrize("name", COUNTED)
def test_the_trip_count_of_a_loop_that_counts_is_known(name):
    function, count = COUNTED[name]
    x = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    found = read_step(jax.make_jaxpr(function)(x, x))
    assert not found.unknown and found.flops == found.model_flops == count * 2 * 16**3


UNCOUNTED = {
    "any": turns(0, lambda n: True, 1),
    "runs away": turns(0, lambda n: n > -1, 1),
    "two conditions": turns(0, lambda n: (n < 9) & (jnp.sin(n) > 0), 1),
    "no counter": turns(0, lambda n: n * n < 9, 1),
    "wraps around": turns(jnp.uint8(0), lambda n: n < 250, jnp.uint8(100)),
    "a limit that wraps around": lambda x, w: turns(jnp.uint32(0), lambda n: n < jnp.uint32(3) - 5, jnp.uint32(1))(
        x, w
    ),
}


@pytest.mark.parametrize("name", UNCOUNTED)
def test_the_trip_count_of_a_loop_that_something_else_stops_is_unknown(name):
    x = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    found = read_step(jax.make_jaxpr(UNCOUNTED[name])(x, x))
    assert found.unknown == {"the trip count of a while loop": 1} and found.flops == 2 * 16**3


def test_a_limit_that_is_computed_of_itself_is_not_computed_twice():
    """Thirty times would be a thousand million times."""

    def doubled(x, w):
        limit = jnp.int32(0)
        for _ in range(30):
            limit = limit + limit
        return jax.lax.fori_loop(0, limit + 2, lambda _, x: x @ w, x)

    x = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    assert read_step(jax.make_jaxpr(doubled)(x, x)).flops == 2 * 2 * 16**3


def test_rows_of_a_split_table_are_added_up_or_the_table_is_gathered_whichever_is_less():
    table, few, many = array((64, 8), "tensor"), *(array((rows,), None, dtype=jnp.int32) for rows in (4, 4096))
    look_up = lambda table, ids: put(table[ids])  # noqa: E731
    assert [kind for kind, *_ in kinds(reading(look_up, table, few))] == ["all-reduce"]
    assert [kind for kind, *_ in kinds(reading(look_up, table, many))] == ["all-gather"]


def test_rows_are_found_in_columns_and_exchanged_or_the_table_is_gathered_whichever_is_less():
    table = array((64, 8), None, "fsdp")
    look_up = lambda table, ids: put(table[ids], "fsdp", None)  # noqa: E731
    few, many = (reading(look_up, table, array((rows,), "fsdp", dtype=jnp.int32)) for rows in (8, 4096))
    ids, rows = 8 * 4 / 2, 8 * 8 * 4 / 2 / 2
    assert kinds(few) == [("all-gather", "fsdp", ids, 1), ("all-to-all", "fsdp", rows, 1)]
    assert kinds(many) == [("all-gather", "fsdp", 64 * 8 * 4 / 2, 1)]
    assert not many.estimated_because  # both ways have the result where the program wants it


def test_the_gradient_of_a_looked_up_table_and_what_else_reads_the_rows_is_exchanged_once():
    def step(table, other, ids, dy):
        return [put(jnp.zeros_like(one).at[ids].add(dy), None, "fsdp") for one in (table, other)]

    # An index without a sign is not changed before it is used, so both look-ups have the same.
    table, ids, dy = array((64, 8), None, "fsdp"), array((8,), "fsdp", dtype=jnp.uint32), array((8, 8), "fsdp", None)
    found = reading(step, table, table, ids, dy)
    assert kinds(found) == [("all-gather", "fsdp", 8 * 4 / 2, 1), ("all-to-all", "fsdp", 8 * 8 * 4 / 2 / 2, 1)]
    descend = lambda table, ids, dy: put(jnp.zeros_like(table).at[ids].subtract(dy), None, "fsdp")  # noqa: E731
    subtracted = reading(descend, table, ids, dy)
    assert kinds(subtracted) == kinds(found) and not subtracted.unknown


def test_rows_are_sent_in_place_of_two_tables_though_each_table_is_less():
    def step(number):
        def sums(tables, ids, dy):
            return [put(jnp.zeros_like(tables[n]).at[ids[n]].add(dy), None, "fsdp") for n in range(number)]

        return sums

    table, ids, dy = array((8, 8), None, "fsdp"), array((16,), "fsdp", dtype=jnp.uint32), array((16, 8), "fsdp", None)
    one, two = (reading(step(number), [table] * 2, [ids] * 2, dy) for number in (1, 2))
    of_table, of_rows, of_ids = 8 * 8 * 4 / 2, 16 * 8 * 4 / 2 / 2, 16 * 4 / 2
    assert kinds(one) == [("reduce-scatter", "fsdp", of_table, 1)] and of_table < of_rows + of_ids < 2 * of_table
    assert kinds(two) == [("all-gather", "fsdp", of_ids, 1), ("all-to-all", "fsdp", of_rows, 1)]


def test_a_part_of_a_mesh_axis_splits_a_dimension_that_is_cut_in_two():
    """Four devices have one of eight heads each twice: two for each of two keys, over which the heads are added up."""
    sums = reading(lambda x: put(x.reshape(4, 2, 4).sum(2), None, "tensor"), array((4, 8), None, "tensor"))
    assert kinds(sums) == [("reduce-scatter", "tensor", 4 * 1 * 4 / 2, 1)]


def test_of_two_operands_the_one_leads_that_is_where_the_sum_is_wanted():
    x, y = array((8, 8), None, "fsdp"), array((8, 8), "fsdp", None)
    exchanged = [("all-to-all", "fsdp", 8 * 8 * 4 / 2 / 2, 1)]
    assert kinds(reading(lambda x, y: put(x + y, "fsdp", None), x, y)) == exchanged
    assert kinds(reading(lambda x, y: put(y + x, None, "fsdp"), x, y)) == exchanged


def test_a_weight_that_is_split_where_its_input_is_not_is_gathered_or_its_sums_are_added_up_whichever_is_less():
    x, w = array((8, 16)), array((16, 32), "fsdp", None)
    assert kinds(reading(lambda x, w: put(x @ w, None, None), x, w)) == [("all-reduce", "fsdp", 8 * 32 * 4, 1)]
    many = reading(lambda x, w: put(x @ w, None, None), array((512, 16)), w)
    assert kinds(many) == [("all-gather", "fsdp", 16 * 32 * 4 / 2, 1)]
    # To scatter the sums takes as much as to gather the weight. So they are not made first, and then sent to all.
    some = reading(lambda x, w: put(x @ w, None, None), array((16, 16)), w)
    assert kinds(some) == [("all-gather", "fsdp", 16 * 32 * 4 / 2, 1)]
    assert some.flops == 2 * 16 * 16 * 32 / 2  # each device could make its part of the sums
    scattered = reading(lambda x, w: put(x @ w, "fsdp", None), array((16, 16)), w)
    assert kinds(scattered) == [("reduce-scatter", "fsdp", 16 * 32 * 4 / 2, 1)]
    without_other = reading(lambda x, w: put(x @ w, None, None), array((16, 16), None, "fsdp"), w)
    assert kinds(without_other) == [("all-reduce", "fsdp", 16 * 32 * 4, 1)]


def test_a_partial_sum_is_added_up_before_it_grows():
    x = array((8, 16), "fsdp", None)
    grown = reading(lambda x: put(jnp.broadcast_to(x.sum(0), (64, 16)), "fsdp", None), x)
    assert kinds(grown) == [("all-reduce", "fsdp", 16 * 4, 1)]


def test_what_a_program_of_one_device_sends_is_what_it_says():
    def turn(carry):
        return jax.lax.ppermute(carry, "fsdp", [(0, 1), (1, 0)])

    def scanned(x):
        return jax.lax.scan(lambda carry, _: (turn(carry), None), x, None, length=3)[0]

    def counted(x):
        return jax.lax.while_loop(lambda state: state[0] < 3, lambda state: (state[0] + 1, turn(state[1])), (0, x))[1]

    local, result = 4 * 4 * 4, 4 * 4 * 4
    for rings in (scanned, counted):
        mapped = jax.shard_map(
            lambda x, rings=rings: jax.lax.psum(rings(x) @ x.T, "tensor"), mesh=MESH, check_vma=False,
            in_specs=PartitionSpec("fsdp", "tensor"), out_specs=PartitionSpec("fsdp"),
        )  # fmt: skip
        found = reading(mapped, array((8, 16), "fsdp"))
        summed = ("all-reduce", "tensor", 2 * result * 3 / 4, 1)
        assert kinds(found) == [summed, ("collective-permute", "fsdp", local, 3)]
        assert found.flops == 2 * 4 * 4 * 4 and not found.unknown


@pytest.mark.parametrize("pairs", [(), ((0, 0), (1, 1))])
def test_a_permute_to_nobody_else_sends_nothing(pairs):
    mapped = jax.shard_map(lambda x: jax.lax.ppermute(x, "fsdp", pairs), mesh=MESH, in_specs=PartitionSpec("fsdp"),
                           out_specs=PartitionSpec("fsdp"))  # fmt: skip
    assert kinds(reading(mapped, array((8, 16), "fsdp"))) == []


def test_an_array_is_sent_before_it_is_made_wider():
    x = array((8, 16), "fsdp", dtype=jnp.bfloat16)
    (gathered,) = reading(lambda x: put(x.astype(jnp.float32)), x).transfers
    assert (gathered.kind, gathered.bytes, gathered.dtype) == ("all-gather", 8 / 2 * 16 * 2, "bfloat16")
    w = array((16, 4), "tensor", dtype=jnp.bfloat16)
    sums = reading(lambda x, w: put((x @ w).astype(jnp.float32)), array((8, 16), None, "tensor", dtype=jnp.bfloat16), w)
    assert [one.dtype for one in sums.transfers] == ["bfloat16"]  # as on GPUs and TPUs


@pytest.mark.parametrize(("dtype", "size"), [(jnp.int4, 0.5), (jnp.float4_e2m1fn, 0.5), (jnp.bool_, 1), ("key", 8)])
def test_an_element_counts_as_large_as_it_is_on_a_device(dtype, size):
    """Two numbers of 4 bits have one byte, and the words of a random key have 8."""
    dtype = jax.eval_shape(lambda: jax.random.key(0)).dtype if dtype == "key" else dtype
    x = array((8, 16), "fsdp", dtype=dtype)
    found, local = reading(put, x), 8 / FSDP * 16 * size
    assert found.communication_bytes == local and found.bytes_if_wider(4) == local * max(1, 4 / size)
    assert bytes_per_device(x) == local and found.held_bytes == local + 2 * local  # it is read, and written whole


def test_where_a_transfer_stands_in_the_program():
    def loss(w, x):
        with jax.named_scope("of.layers.mlp.w_up"):
            return jnp.tanh(x @ put(w, None, None)).sum()

    found = reading(jax.grad(loss), array((16, 16), "fsdp"), array((8, 16)))
    (gathered,) = [one for one in found.transfers if one.kind == "all-gather" and one.phase == "forward"]
    assert (gathered.array, gathered.mesh_axes) == ("layers.mlp.w_up", "fsdp")
    assert math.isclose(gathered.bytes_per_step, 8 * 16 * 4)


@pytest.mark.parametrize(
    ("function", "rows"),
    [
        (lambda x: jnp.roll(x, 3, 1), 3),
        (lambda x: jnp.roll(x, -1, 1), 1),
        (lambda x: jnp.concatenate([x[:, 20:], x[:, :20]], 1), 8),  # past the next device: a device sends all it has
        (lambda x: jnp.flip(x, 1), 8),
        (lambda x: jnp.roll(x, 3, 2), 0),  # not along what is split
    ],
)
def test_what_is_rolled_or_reversed_goes_to_another_device(function, rows):
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(FSDP, TENSOR), ("fsdp", "tensor"),
                axis_types=(AxisType.Auto,) * 2)  # fmt: skip
    sharding = NamedSharding(mesh, PartitionSpec("fsdp", "tensor"))
    x = jax.ShapeDtypeStruct((8, 32, 16), jnp.float32, sharding=sharding)
    traced = jax.jit(function, out_shardings=sharding).trace(x)
    found = read_step(traced.jaxpr, (x,), traced.out_info)
    sent = ring_bytes(count(traced.lower().compile().as_text()))
    assert found.communication_bytes == sent == rows * 4 * 16 * 8 / FSDP and not found.estimated_because


def test_two_slices_that_are_no_roll():
    """One of them is of another array, or leaves out rows."""
    x = array((8, 32), None, "tensor")

    def rolled(join):
        return any(one.array == "roll" for one in reading(join, x, x).transfers)

    assert rolled(lambda x, y: jnp.concatenate([x[:, 8:], x[:, :8]], 1))
    assert not rolled(lambda x, y: jnp.concatenate([x[:, 24:], y[:, :24]], 1))
    assert not rolled(lambda x, y: jnp.concatenate([x[:, 25:], x[:, :24]], 1))


def test_what_is_joined_along_a_split_dimension_sends_the_rows_that_lie_elsewhere():
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(FSDP, TENSOR), ("fsdp", "tensor"),
                axis_types=(AxisType.Auto,) * 2)  # fmt: skip
    sharding = NamedSharding(mesh, PartitionSpec("fsdp", "tensor"))
    x, whole = (jax.ShapeDtypeStruct((8, 32, 16), jnp.float32, sharding=place)
                for place in (sharding, NamedSharding(mesh, PartitionSpec("fsdp"))))  # fmt: skip

    def sent(function, place, *arrays):
        traced = jax.jit(function, out_shardings=place).trace(*arrays)
        found = read_step(traced.jaxpr, arrays, traced.out_info)
        assert not found.estimated_because
        assert found.communication_bytes <= ring_bytes(count(traced.lower().compile().as_text()))
        return found.communication_bytes

    def join(*arrays):
        return jnp.concatenate(arrays, 1)

    def cut(x):
        return jnp.split(x, 2, 1)

    row_bytes, gathered = 4 * 16 * 8 / FSDP, 8 * (TENSOR - 1)
    moved = 8 * 3 / TENSOR  # of the 8 rows of each of 4 devices, those of three go elsewhere
    assert sent(join, sharding, x, x) == 2 * moved * row_bytes
    assert sent(join, sharding, x, whole) == moved * row_bytes
    assert sent(join, whole.sharding, x, x) == 2 * gathered * row_bytes
    # Of the first half, 4 + 8 of 16 rows go elsewhere, and as many of the second one.
    assert sent(cut, sharding, x) == 2 * 12 / TENSOR * row_bytes
    assert sent(cut, whole.sharding, x) == gathered * row_bytes


def test_the_gradient_of_a_maximum_over_windows_stays_split_as_its_array_is():
    """What is given back by a sum is the same on all devices."""

    def largest(x):
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID").sum()

    assert kinds(reading(jax.grad(largest), array((8, 16, 16, 4), "tensor"))) == []


@pytest.mark.parametrize(
    "function",
    [
        lambda x, e: (e[::-1], e.ravel(), e.reshape(16, 0), jnp.roll(e, 1, 0), jnp.sort(e), e[:, 4:]),
        lambda x, e: (e @ x, e.T @ e, jnp.concatenate([e, e]), e.sum(0), jnp.tanh(e) + e, put(e), x[:0]),
        lambda x, e: jax.lax.ragged_dot(e, x[None], jnp.zeros(1, jnp.int32)),
        lambda x, e: jax.lax.scan(lambda x, row: (x @ x + row.sum(), row), x, e),
        lambda x, e: jax.lax.cond(True, lambda e: e[::-1], lambda e: 2 * e, e),
        jax.grad(lambda x, e: (jnp.tanh(e @ x) ** 2).sum()),
    ],
)
def test_arrays_without_elements_are_neither_sent_nor_multiplied(function):
    found = reading(function, array((16, 16), "fsdp", "tensor"), array((0, 16), "fsdp", "tensor"))
    assert (kinds(found), found.flops, found.model_flops, found.unknown) == ([], 0, 0, {})


def test_beside_others_arrays_without_elements_change_nothing():
    x, e = array((16, 16), "fsdp"), array((0, 16), "fsdp")
    assert kinds(reading(lambda x, e: jnp.concatenate([e, x, e]), x, e)) == []
    joined = kinds(reading(lambda x, e: jnp.concatenate([x, e, x]), x, e))
    assert joined == kinds(reading(lambda x: jnp.concatenate([x, x]), x)) != []
    cut = kinds(reading(lambda x: jnp.split(x, [0, 8]), x))
    assert cut == kinds(reading(lambda x: jnp.split(x, [8]), x)) != []
    whole = reading(jax.lax.ragged_dot, x, array((0, 16, 16)), array((0,), dtype=jnp.int32))
    assert whole.flops == 0
