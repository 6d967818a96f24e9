"""What the reader says of programs of other people, beside what their compiled programs compute and send."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from benchmarks.collectives import count, ring_bytes
from gspmd_lm.foresight import any_step, hlo
from gspmd_lm.foresight.graph import DataflowGraph
from gspmd_lm.foresight.propagation import read_step
from gspmd_lm.foresight.propagation.arguments import Share, needed_shares

FSDP, TENSOR = 2, 4
ROWS, ROWS_AND_CHANNELS = PartitionSpec("fsdp"), PartitionSpec("fsdp", None, "tensor")


def like(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def read(function, *arguments):
    """The reading, and the FLOPs of the compiled program."""
    traced = jax.jit(function).trace(*arguments)
    module = hlo.parse(traced.lower().compile().as_text())
    flops = sum(instruction.flops * instruction.executions for instruction in module.operations)
    return read_step(traced.jaxpr, arguments, traced.out_info), flops


def read_sharded(function, result, *arguments):
    """The reading, and the bytes that a device sends in the compiled program. arguments: shapes and their splits."""
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(FSDP, TENSOR), ("fsdp", "tensor"),
                axis_types=(AxisType.Auto,) * 2)  # fmt: skip
    placed = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec)) for shape, spec in arguments]
    with jax.set_mesh(mesh):
        traced = jax.jit(function, out_shardings=NamedSharding(mesh, result)).trace(*placed)
        found = read_step(traced.jaxpr, placed, traced.out_info, mesh.shape)
        return found, ring_bytes(count(traced.lower().compile().as_text()))


@jax.custom_vjp
def both_gradients(x, w):
    return x @ w


both_gradients.defvjp(
    lambda x, w: (x @ w, (x, w)), lambda kept, dy: jax.lax.optimization_barrier((dy @ kept[1].T, kept[0].T @ dy))
)


def test_a_gradient_that_nothing_reads_does_not_count_though_a_barrier_holds_it():
    def step(x, frozen):
        def layer(x, w):
            return jnp.tanh(both_gradients(x, w)), None

        return jax.grad(lambda x: (jax.lax.scan(jax.checkpoint(layer), x, frozen)[0] ** 2).sum())(x)

    found, compiled = read(step, like(16, 32), like(5, 32, 32))
    one = 2 * 16 * 32 * 32
    assert found.flops == compiled == 5 * 3 * one  # forward, once more, and backward
    assert found.model_flops == 5 * 2 * one


def test_what_a_function_computes_in_vain_does_not_count():
    found, compiled = read(lambda x, w: jax.jit(lambda x, w: (x @ w, (x @ w) @ w))(x, w)[0], like(8, 16), like(16, 16))
    assert found.model_flops == found.flops == compiled == 2 * 8 * 16 * 16


def test_the_condition_of_a_loop_counts_as_its_body_does():
    found, compiled = read(lambda x, w: jax.lax.while_loop(lambda x: (x @ w).sum() < 5, lambda x: x @ w, x),
                           like(16, 16), like(16, 16))  # fmt: skip
    assert found.flops == found.model_flops == compiled == 2 * 2 * 16**3


def test_of_functions_for_several_platforms_that_of_the_target_counts():
    def power(x, w):
        return jax.lax.platform_dependent(
            x, w, cpu=lambda x, w: x @ w, cuda=lambda x, w: x @ w @ w, default=lambda x, w: x @ w @ w @ w
        )

    traced, one = jax.jit(power).trace(like(8, 16), like(16, 16)), 2 * 8 * 16 * 16
    read = {platform: read_step(traced.jaxpr, platform=platform) for platform in ("cpu", "cuda", "tpu", "")}
    assert [found.flops / one for found in read.values()] == [1, 2, 3, 3]
    assert [found.model_flops / one for found in read.values()] == [1, 2, 3, 3]
    found = any_step.read(traced, traced.lower(), Mesh(jax.devices()[:1], ("data",)))
    assert found.flops == read["cpu"].flops


def batched_by_hand(function):
    """A function of which jax is told what a batch of it is."""
    found = jax.custom_batching.custom_vmap(function)
    found.def_vmap(lambda *_: NotImplemented)
    return found


@pytest.mark.parametrize("wrap", [functools.partial(jax.lax.composite, name="of.mine"), batched_by_hand])
def test_a_function_under_another_name_is_read_as_if_it_stood_there(wrap):
    def product(x, w):
        return x @ w

    arguments = ((8, 16), PartitionSpec(None, "tensor")), ((16, 16), PartitionSpec("tensor"))
    found, _ = read_sharded(wrap(product), ROWS, *arguments)
    plain, _ = read_sharded(product, ROWS, *arguments)
    assert found.flops == found.model_flops / TENSOR == 2 * 8 * 16 * 16 / TENSOR and not found.unknown
    assert found.bytes_by_axes == plain.bytes_by_axes


def test_a_function_that_says_itself_how_it_is_split_is_read_and_named():
    product = custom_partitioning(lambda x, w: x @ w)
    product.def_partition(lambda *_: NotImplemented, sharding_rule="i j, j k -> i k")
    traced = jax.jit(product).trace(like(8, 16), like(16, 16))
    found = read_step(traced.jaxpr)
    assert found.flops == 2 * 8 * 16 * 16 and set(found.unknown) == {"custom_partitioning"}


def test_a_loop_that_captures_nothing_is_no_call():
    """It reads what it carries in its body as in its condition, and the graph of a model has it whole."""

    def thirds(x):
        return jax.lax.while_loop(lambda carry: carry[0] < 3, lambda carry: (carry[0] + 1, carry[1] / 3), (0, x))[1]

    jaxpr = jax.make_jaxpr(thirds)(like(16, 16))
    assert needed_shares(jaxpr.jaxpr, [Share(0.0, 1.0)]) == [Share(1.0, 1.0)]
    assert [node.primitive for node in DataflowGraph(jaxpr, ()).nodes if node.inputs] == ["while"]


def test_of_a_cache_that_a_step_changes_the_new_part_alone_is_written():
    """Layer by layer, or at once, or in a function of its own."""
    cache, row, at = like(4, 64, 16), like(16), jax.ShapeDtypeStruct((), jnp.int32)

    def by_layer(cache, row, at):
        def layer(cache, number):
            return jax.lax.dynamic_update_slice(cache, row[None, None], (number, at, 0)), None

        return jax.lax.scan(layer, cache, jnp.arange(4))[0]

    def at_once(cache, row, at):
        return jax.jit(lambda cache: cache.at[:, at].set(row).at[0, 0].add(row))(cache)

    def read_too(cache, row, at):
        return cache.at[0, at].set(row) + 1

    given = 4 * (16 + 1)  # the row and its place
    for function, more in ((by_layer, 4 * 4 * 16), (at_once, 4 * 5 * 16), (read_too, 4 * 4 * 64 * 16)):
        held = read_step(jax.make_jaxpr(function)(cache, row, at)).held_bytes
        assert held == given + more, function


def test_a_product_that_no_iteration_changes_counts_once():
    """XLA takes it out of the loop."""

    def turns(x, w):
        return jax.lax.scan(lambda carry, _: (jnp.tanh(carry @ w + jnp.sin(x @ w)), None), x, length=5)[0]

    mesh = AbstractMesh((1,), ("fsdp",), axis_types=(AxisType.Auto,))
    on_devices = jax.shard_map(turns, mesh=mesh, in_specs=(PartitionSpec(),) * 2, out_specs=PartitionSpec())
    found, compiled = read(turns, like(16, 16), like(16, 16))
    mapped = read_step(jax.make_jaxpr(on_devices)(like(16, 16), like(16, 16)), mesh=mesh.shape)
    assert mapped.model_flops == found.model_flops == compiled == 6 * 2 * 16**3


def test_of_a_linear_system_what_solves_it_is_read():
    def solved(a, b):
        return jax.lax.custom_linear_solve(lambda x: a @ x, b, lambda _, b: a.T @ (a @ b), symmetric=True)

    found, compiled = read(solved, like(16, 16), like(16, 8))
    assert found.flops == found.model_flops == compiled == 2 * 2 * 16 * 16 * 8
    assert not found.unknown


def test_a_kernel_of_pallas_is_no_part_of_the_flops_of_the_model():
    def kernel(x, w, y):
        y[...] = x[...] @ w[...]

    call = pl.pallas_call(kernel, out_shape=like(16, 16), cost_estimate=pl.CostEstimate(99, 0, 0))
    jaxpr = jax.make_jaxpr(lambda x, w: call(x, w) @ w)(like(16, 16), like(16, 16))
    assert read_step(jaxpr).flops - 99 == read_step(jaxpr).model_flops == 2 * 16**3


def conv(x, kernel, groups=8):
    dimensions = ("NWC", "WIO", "NWC")
    return jax.lax.conv_general_dilated(x, kernel, (1,), "SAME", dimension_numbers=dimensions,
                                        feature_group_count=groups)  # fmt: skip


def mapped(function, into, out, **kwargs):
    return lambda *arrays: jax.shard_map(function, in_specs=into, out_specs=out, check_vma=False, **kwargs)(*arrays)


def branch_and_gather(x, _):
    chosen = jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x)
    return jax.lax.with_sharding_constraint(
        jnp.tanh(jax.lax.with_sharding_constraint(chosen, PartitionSpec())), ROWS
    ), None


def decompositions(x):
    factor, (q, r), (values, _) = jnp.linalg.cholesky(x), jnp.linalg.qr(x), jnp.linalg.eigh(x)
    return jax.scipy.linalg.solve_triangular(factor, q @ r) + jnp.linalg.solve(x, x) + values[:, None]


KERNEL = (3, 1, 8), PartitionSpec(None, None, "tensor")


@pytest.mark.parametrize(
    ("function", "result", "arguments"),
    [
        pytest.param(lambda x: jax.lax.scan(branch_and_gather, x, None, length=5)[0], ROWS, [((8, 16), ROWS)],
                     id="branches in a loop"),
        pytest.param(lambda x: jax.ops.segment_max(x, jnp.arange(16) // 2, 8), PartitionSpec(None, "tensor"),
                     [((16, 32), PartitionSpec("fsdp", "tensor"))], id="the largest rows of groups"),
        pytest.param(lambda x: x.at[jnp.arange(4)].mul(2.0), ROWS, [((16, 32), ROWS)], id="rows that are multiplied"),
        pytest.param(conv, ROWS_AND_CHANNELS, [((8, 8, 8), ROWS_AND_CHANNELS), KERNEL], id="a convolution by channel"),
        pytest.param(lambda x, k: jax.grad(lambda k: (conv(x, k) ** 2).sum())(k), KERNEL[1],
                     [((8, 8, 8), ROWS_AND_CHANNELS), KERNEL], id="the gradient of its kernel"),
        pytest.param(mapped(lambda x: jax.lax.psum(x, "tensor", axis_index_groups=[[0, 1], [2, 3]]),
                            PartitionSpec("fsdp", "tensor"), PartitionSpec("fsdp", "tensor")),
                     PartitionSpec("fsdp", "tensor"), [((8, 16), PartitionSpec("fsdp", "tensor"))],
                     id="a sum over groups"),
        pytest.param(decompositions, ROWS, [((8, 16, 16), ROWS)], id="matrices of a batch"),
        pytest.param(lambda x: jax.grad(lambda x: (jnp.tile(x, (1, 3)) ** 2).sum())(x), ROWS, [((8, 16), ROWS)],
                     id="rows that are repeated"),
    ],
)  # fmt: skip
def test_what_is_sent_is_what_the_compiled_program_sends(function, result, arguments):
    found, compiled = read_sharded(function, result, *arguments)
    assert found.communication_bytes == compiled and not found.unknown and not found.estimated_because


def test_what_a_loop_takes_apart_is_gathered_along_the_dimension_that_it_runs_over():
    """Another dimension could be split instead: the reader's choice is XLA's."""
    layers = (8, 16, 16), PartitionSpec("tensor")
    found, compiled = read_sharded(lambda x, ws: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0], ROWS,
                                   ((32, 16), ROWS), layers)  # fmt: skip
    assert found.communication_bytes == found.chosen_bytes == compiled == 8 * 16 * 16 * 4 * 3 / 4


def test_what_is_repeated_or_transformed_is_gathered_along_that_dimension():
    both, rows_bytes = PartitionSpec("fsdp", "tensor"), 4 * 16 * 4
    found, compiled = read_sharded(lambda x: jnp.tile(x, (2, 1)), ROWS, ((8, 16), ROWS))
    assert found.communication_bytes == found.chosen_bytes == compiled == rows_bytes
    found, compiled = read_sharded(lambda x: jnp.abs(jnp.fft.fft(x)), ROWS, ((8, 16), both))
    assert found.communication_bytes == found.chosen_bytes == rows_bytes * 3 / 4 < compiled
    found, compiled = read_sharded(lambda x: jnp.abs(jax.lax.fft(x, "RFFT", (16, 16))), ROWS, ((8, 16, 16), both))
    assert found.communication_bytes == 16 * rows_bytes * 3 / 4 < compiled and not found.unknown  # XLA gathers all rows


@pytest.mark.parametrize("layout", [0, 1])
def test_rows_and_heads_of_attention_of_cudnn_stay_split(monkeypatch, layout):
    answers = {"check_cudnn_version": 91_000, "check_compute_capability": True}
    for question, answer in (answers | {"is_cuda_compute_capability_equal": False}).items():
        monkeypatch.setattr(fused_attention_stablehlo, question, lambda *_, answer=answer: answer)
    mesh, length = mesh_of_eight(AxisType.Auto), 128

    def array(*shape, split):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec(*split)))

    def per_head(heads):
        dims = [(4, "fsdp"), (length, None), (heads, "tensor"), (64, None)]
        dims[1:3] = dims[1:3][:: -1 if layout else 1]
        return array(*(size for size, _ in dims), split=[name for _, name in dims])

    def attention(queries, keys, bias):
        return fused_attention_stablehlo.dot_product_attention(
            queries, keys, keys, bias, qkv_layout=["BTNH", "BNTH"][layout]
        )

    def found(heads, bias):
        arrays = per_head(8), per_head(heads), bias
        gradients = jax.jit(jax.grad(lambda *arrays: attention(*arrays).astype(jnp.float32).sum(), (0, 1, 2)))
        return read_step(gradients.trace(*arrays).jaxpr, arrays, arrays, mesh.shape)

    reading = found(4, array(1, 8, length, length, split=(None, "tensor")))
    of_bias = 2 * length * length * 2  # two heads of a device; only the gradient of what all rows share is sent
    assert reading.communication_bytes == 2 * of_bias / 2 and not reading.unknown and not reading.estimated_because
    assert found(2, array(1, 8, length, length, split=())).estimated_because  # two heads are not split in four


def test_mesh_axes_that_a_function_of_one_device_leaves_to_the_compiler_stay_and_are_named():
    into = PartitionSpec(None, "tensor"), PartitionSpec("tensor")
    function = mapped(lambda x, w: jax.lax.psum(x @ w, "tensor"), into, PartitionSpec(), axis_names={"tensor"})
    found, compiled = read_sharded(
        function, ROWS, ((8, 16), PartitionSpec("fsdp", "tensor")), ((16, 32), PartitionSpec("tensor"))
    )
    assert found.communication_bytes == compiled and found.flops == found.model_flops / 8
    assert [*found.unknown] == ["a shard_map that leaves mesh axes to the compiler"]


def test_channels_in_fewer_groups_than_devices_are_gathered():
    split = KERNEL[1]
    found, compiled = read_sharded(lambda x, k: conv(x, k, 2), split, ((8, 8, 8), split), ((3, 4, 8), split))
    assert found.communication_bytes == compiled > 0


def test_what_stands_behind_a_barrier_is_sent_again_in_the_program_of_one_device_too():
    turned = functools.partial(jax.lax.ppermute, axis_name="fsdp", perm=[(0, 1), (1, 0)])
    rows, mesh = PartitionSpec("fsdp"), AbstractMesh((2,), ("fsdp",), axis_types=(AxisType.Auto,))
    x = jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=NamedSharding(mesh, rows))
    for again, times in ((lambda x: x, 1), (jax.lax.optimization_barrier, 2)):
        function = jax.shard_map(
            lambda x, again=again: turned(x) + turned(again(x)), mesh=mesh, in_specs=rows, out_specs=rows
        )
        assert read_step(jax.make_jaxpr(function)(x), (x,)).communication_bytes == times * 4 * 16 * 4


def mesh_of_eight(kind):
    return Mesh(np.array(jax.devices()[:8]).reshape(FSDP, TENSOR), ("fsdp", "tensor"), axis_types=(kind,) * 2)


def test_a_program_whose_types_say_how_arrays_are_sharded():
    spec, mesh = PartitionSpec, mesh_of_eight(AxisType.Explicit)

    def update(weights, x):
        def loss(weights):
            up, down = (
                jax.sharding.reshard(w, p) for w, p in zip(weights, (spec(None, "tensor"), spec("tensor")), strict=True)
            )
            hidden = jnp.tanh(jnp.einsum("bd,df->bf", x, up, out_sharding=spec("fsdp", "tensor")))
            return (jnp.einsum("bf,fd->bd", hidden, down, out_sharding=spec("fsdp", None)) ** 2).mean()

        return [w - g for w, g in zip(weights, jax.grad(loss)(weights), strict=True)]

    shapes = ((64, 128), spec("fsdp", "tensor")), ((128, 64), spec("tensor", "fsdp")), ((32, 64), spec("fsdp", None))
    up, down, x = (jax.ShapeDtypeStruct(n, jnp.float32, sharding=NamedSharding(mesh, p)) for n, p in shapes)
    with jax.set_mesh(mesh):
        traced = jax.jit(update).trace([up, down], x)
        text = traced.lower().compile().as_text()
    found = read_step(traced.jaxpr, ([up, down], x), traced.out_info, mesh.shape)
    weights, rows = 4 * 64 * 128 / 8, 2 * 4 * 16 * 64 * (TENSOR - 1) / TENSOR
    # Both weights are gathered, their gradients scattered, and the partial sums of the rows added up.
    assert found.communication_bytes == 2 * weights + 2 * weights + rows <= ring_bytes(count(text))
    assert found.flops == found.model_flops / 8 and not found.unknown and not found.estimated_because


def test_a_constraint_that_leaves_a_dimension_open_moves_nothing_there():
    mesh, spec = mesh_of_eight(AxisType.Auto), PartitionSpec
    x = jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=NamedSharding(mesh, spec("fsdp")))

    def read_at(*places):
        put = jax.jit(lambda x: jax.lax.with_sharding_constraint(jnp.sin(x), NamedSharding(mesh, spec(*places))))
        return read_step(put.trace(x).jaxpr, (x,)).communication_bytes

    assert read_at(spec.UNCONSTRAINED, "tensor") == 0
    assert read_at(spec.UNCONSTRAINED, "fsdp") == read_at(None, "fsdp") > 0
