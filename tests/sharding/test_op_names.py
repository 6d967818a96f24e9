"""What is written into the names of operations, and what is read from them."""

import re

import jax
import jax.numpy as jnp
import pytest

from gspmd_lm.sharding import op_names


@pytest.fixture(autouse=True)
def names_tell_programs_apart():
    """Otherwise the compile cache of the tests gives a program that differs in nothing but its names."""
    jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
    yield
    jax.config.update("jax_compilation_cache_include_metadata_in_key", False)


def written(function, *shapes):
    """The name of the last instruction of a compiled function that has one."""
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    text = jax.jit(function).lower(*arguments).compile().as_text() or ""
    return re.findall(r'op_name="([^"]*)"', text)[-1]


@pytest.mark.parametrize(
    ("role", "names", "expected"),
    [
        ("of", ("a.wq", "a.wk", "a.wq"), {"owners": ("a.wq", "a.wk")}),
        ("sum", ("a.wo.heads",), {"summed_axes": ("a.wo.heads",)}),
        ("sees", ("128",), {"mask_window": "128"}),
        ("turns", ("1",), {"trip_count": "1"}),
        ("kind", ("attention",), {"kind": "attention"}),
        ("weights", ("a.wq",), {"table": "weights", "array": "a.wq"}),
        ("of", (), {}),
    ],
)
def test_what_a_scope_writes_is_read(role, names, expected):
    def function(x):
        with op_names.scope(role, *names):
            return jnp.sin(x)

    assert op_names.parse(written(function, (4,))) == op_names.OpName("other", (), **expected)


def test_a_scope_that_nothing_reads_is_refused():
    with pytest.raises(AssertionError, match="owner"):
        op_names.scope("owner", "a.wq")


@pytest.mark.parametrize(
    ("equation", "shapes", "expected"),
    [
        ("BTNH,NHD->BTD", ((2, 3, 4, 5), (4, 5, 6)), "BTNH,NHD->BTD"),
        ("rBtTD,rBtTF->rtDF", ((2, 3, 2, 5, 6), (2, 3, 2, 5, 7)), "BTD,BTF->DF"),
        ("BTzF,zFD->zBTD", ((2, 3, 2, 5), (2, 5, 6)), "BTF,FD->BTD"),
        ("btf,fh->bth", ((2, 3, 4), (4, 5)), "btf,fh->bth"),
    ],
)
def test_equations_are_read_without_shards(equation, shapes, expected):
    name = written(lambda x, y: jnp.einsum(op_names.einsum_equation(equation), x, y), *shapes)
    assert op_names.parse(name).einsum == expected


def test_scores_are_attention():
    scores = written(lambda q, k: jnp.einsum("BTNH,BSNH->BNTS", q, k), (2, 3, 4, 5), (2, 3, 4, 5))
    assert op_names.parse(scores).kind == "attention"


@pytest.mark.parametrize(
    ("op_name", "count", "expected"),
    [
        ("jit(f)/a/b", 1, ["jit(f)/a/b"]),
        ("jit(f)/x/(a/b:c:jit(g)/d)", 3, ["jit(f)/x/a/b", "jit(f)/x/c", "jit(f)/x/jit(g)/d"]),
        ("jit(f)/(transpose(jvp(a))/b:(c:d)/e)", 3, ["jit(f)/transpose(jvp(a))/b", "jit(f)/c/e", "jit(f)/d/e"]),
        ("jit(f)/a", 2, []),
    ],
)
def test_names_of_merged_tensors(op_name, count, expected):
    assert op_names.tensor_names(op_name, count) == expected


@pytest.mark.parametrize(
    ("op_name", "phase", "parts"),
    [
        (
            "jit(_train)/jvp(Decoder)/while/body/closed_call/layers/attention_norm/mul",
            "forward",
            (("layers", "attention_norm"), (), (), ("", "")),
        ),
        (
            "jit(_train)/transpose(jvp(Decoder))/while/body/checkpoint/rematted_computation/layers/of.a.wq+a.wk/"
            "rules.a.wq/convert_element_type",
            "recomputation",
            (("layers",), ("a.wq", "a.wk"), (), ("rules", "a.wq")),
        ),
        (
            "jit(_train)/transpose(jvp(Decoder))/checkpoint/layers/of.a.wo/sum.q.heads+k.kv_heads/rules.residual/"
            "shard_map/reduce_scatter",
            "backward",
            (("layers",), ("a.wo",), ("q.heads", "k.kv_heads"), ("rules", "residual")),
        ),
        (
            "jit(_train)/jvp(of.loss)/sum.logits.vocab/rules.residual/shard_map/psum",
            "backward",
            ((), ("loss",), ("logits.vocab",), ("rules", "residual")),
        ),
        ("jit(_train)/jvp(of.loss)/reduce_max", "forward", ((), ("loss",), (), ("", ""))),
        ("jit(_train)/of.gradient_norm/reduce_sum", "optimizer", ((), ("gradient_norm",), (), ("", ""))),
        ("jit(_train)/jit(clip)/min", "optimizer", ((), (), (), ("", ""))),
        # Not below the derivative: what is known of a loop without what is trained, and the update.
        (
            "jit(_train)/layers/cross/rules.memory/sharding_constraint",
            "forward",
            (("layers", "cross"), (), (), ("rules", "memory")),
        ),
        (
            "jit(_train)/layers/attention/keys/all_gather",
            "forward",
            (("layers", "attention", "keys"), (), (), ("", "")),
        ),
        (
            "jit(_train)/of.update/optimizer.layers.mlp.w_up/sharding_constraint",
            "optimizer",
            ((), ("update",), (), ("optimizer", "layers.mlp.w_up")),
        ),
    ],
)
def test_what_names_say(op_name, phase, parts):
    name = op_names.parse(op_name)
    assert (name.phase, (name.modules, name.owners, name.summed_axes, (name.table, name.array))) == (phase, parts)


@pytest.mark.parametrize(
    ("op_name", "path"),
    [
        # As jax 0.10.2 writes the gradient of a jax.checkpoint, and flax what a method of a module traces.
        ("jit(_train)/transpose(jvp(Decoder))/while/body/closed_call/layers/mlp_norm/layers/mlp_norm/checkpoint/mul",
         "layers.mlp_norm"),
        ("jit(_train)/transpose(jvp(Decoder))/final_norm/final_norm/checkpoint/reduce_sum", "final_norm"),
        ("layers/attention/layers/attention/checkpoint/rematted_computation/kind.attention/exp", "layers.attention"),
        ("jit(_train)/jvp(M)/block/attn/block/attn/q_proj/checkpoint/mul", "block.attn.q_proj"),
        ("jit(_train)/jvp(Decoder)/while/body/closed_call/layers/mlp/mlp._router_output/reduce_sum", "layers.mlp"),
        ("jit(_train)/jvp(Decoder)/layers/mlp/mlp._choose_experts/shard_map/mlp._highest/top_k", "layers.mlp"),
        # Two modules of one name, the second below the first.
        ("jit(_train)/jvp(M)/encoder/encoder/layer_0/mul", "encoder.encoder.layer_0"),
    ],
)  # fmt: skip
def test_no_module_is_named_twice(op_name, path):
    assert op_names.parse(op_name).path == path


def test_arguments_of_the_step():
    assert op_names.state_array("state.params['layers']['attention']['wk']") == ("params", "layers.attention.wk")
    assert op_names.state_array("state.optimizer[0].mu['embedding']") == ("optimizer", "embedding")
    assert op_names.state_array("jit(_train)/jvp(Decoder)/mul") == ("", "")
