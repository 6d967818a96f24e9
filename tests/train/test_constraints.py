"""Every shard() of the model is in the program, with the sharding that the rules give it."""

import collections

import jax
import numpy as np
import pytest

from gspmd_lm.config import Lora
from gspmd_lm.infer import programs
from gspmd_lm.sharding import axes, rules_file
from gspmd_lm.train import state

# What each dimension of an activation is, in words of its own: the model is compared with this table.
ARRAYS = {
    "tokens": "batch seq",
    "residual": "batch seq embed",
    "block_input": "batch seq embed",
    "q": "batch seq heads head_dim",
    "k": "batch kv_seq kv_heads head_dim",
    "v": "batch kv_seq kv_heads head_dim",
    "attention_out": "batch seq heads head_dim",
    "hidden": "batch seq mlp",
    "low_rank": "batch seq rank",
    "logits": "batch seq vocab",
    "cache": "layers batch kv_seq kv_heads head_dim",
}
SIZES = {
    "batch": 40, "seq": 16, "kv_seq": 16, "embed": 32, "heads": 12, "kv_heads": 6, "head_dim": 10, "mlp": 64,
    "vocab": 62, "rank": 4, "layers": 2,
}  # fmt: skip
ADAPTERS = Lora(rank=4, targets=("wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down"))
OTHERS = "dp8", "zero1_8", "fsdp8", "tp8", "dp2_tp4", "fsdp", "fsdp_tp"
# How often a forward pass names each: the layers' body, which stands once in a program, and what is around it.
FORWARD = {
    "tokens": 1,
    "residual": 3,  # after the table, after attention and after the MLP
    "block_input": 3,  # of attention, of the MLP, of the loss
    "q": 2,  # before and after rotary positions
    "k": 2,
    "v": 1,
    "attention_out": 1,
    "hidden": 3,  # gate, up and their product
    "low_rank": 5,  # of each adapter of what reads a block's input
    "logits": 1,
}
# What a backward pass names besides: the cotangent of the logits.
BACKWARD = {"logits": 1}


@pytest.fixture(scope="module")
def sized(small):
    """A config whose sizes are all different, so that no dimension passes for another one."""
    model = {name: SIZES[name] for name in ("layers", "embed", "heads", "kv_heads", "head_dim", "mlp")}
    return lambda **more: small(**model, **more, padded_vocab=62, data={"batch": 40, "seq": 16})


def equations(jaxpr):
    """Every equation of a program and of the programs within it, each with the equations beside it by output."""
    made = {var: equation for equation in jaxpr.eqns for var in equation.outvars}
    for equation in jaxpr.eqns:
        yield equation, made
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


def constraints(traced):
    """Each named activation of a program that comes out of a constraint: its name, shape, split and what makes it."""
    for equation, made in equations(traced.jaxpr.jaxpr):
        if equation.primitive.name != "name":
            continue
        name, value = equation.params["name"], equation.invars[0]
        constraint = made.get(value)
        if constraint is None or constraint.primitive.name == "name":
            continue  # a layer's input, which was placed at the end of the layer before
        assert constraint.primitive.name == "sharding_constraint", name
        spec = constraint.params["sharding"].spec
        split = [() if names is None else (names,) if isinstance(names, str) else tuple(names) for names in spec]
        split += [()] * (value.aval.ndim - len(split))
        maker = made.get(constraint.invars[0])
        yield name, value.aval.shape, tuple(split), maker and maker.primitive.name


def test_the_dimensions_of_activations(sized):
    config, one = sized(lora=Lora(rank=4, targets=("wq",))), rules_file.load("single")
    arrays = state.arrays(config)
    found = state.record_arrays(config, arrays, 1, one).arrays
    found["cache"] = programs.record_arrays(config, arrays, programs.whole_context(config), one)["prefill"].arrays[
        "cache"
    ]
    of_others = {
        "embedded", "routing", "state", "q_latent", "kv_latent", "k_rope", "patches", "memory", "transformed",
        "class_scores", "vectors", "merged", "compared", "frames", "frames_hidden", "around", "prompts", "upscaled",
        "drawn", "decode_q", "decode_out",
    }  # fmt: skip
    assert found.keys() == ARRAYS.keys() == axes.ACTIVATIONS.keys() - of_others
    for name, (names, shape) in found.items():
        assert names == tuple(ARRAYS[name].split()), name
        assert shape == tuple(SIZES[axis] for axis in names), name


@pytest.mark.parametrize("axis", ["batch", "seq", "kv_seq", "embed", "heads", "head_dim", "mlp", "vocab"])
def test_a_forward_pass_names_every_activation_where_it_is_made(axis, sized, built):
    """Under rules for one axis, just the dimensions that are this axis are split, besides the batch."""
    wanted = {"batch": "data", axis: "tensor"}
    if axis == "heads":
        wanted["kv_heads"] = "tensor"  # or keys would be repeated for each device's heads
    step = built(sized(), rules_file.from_dict({"mesh": {"data": 4, "tensor": 2}, "rules": wanted}, "here.yaml"))
    seen = collections.Counter()
    traced = jax.jit(step.evaluate).trace(step.abstract_state.params, step.abstract_batch)
    for name, shape, split, maker in constraints(traced):
        names = ARRAYS[name].split()
        assert shape == tuple(SIZES[axis] for axis in names), name
        if axis == "seq":  # attention itself brings keys to queries
            names = [axis if one == "kv_seq" else one for one in names]
        assert split == tuple((wanted[axis],) if axis in wanted else () for axis in names), name
        seen[name, maker == "add" if name == "residual" else None] += 1
    assert seen.pop(("residual", True)) == 2, "the residual stream is a sum"
    assert seen.pop(("residual", False)) == 1
    assert {name: count for (name, _), count in seen.items()} == {
        name: count for name, count in FORWARD.items() if name not in ("residual", "low_rank")
    }


@pytest.mark.parametrize("lora", [None, pytest.param(ADAPTERS, marks=pytest.mark.long)])
def test_every_constraint_of_training_reaches_the_compiler(lora, sized, built):
    """On a mesh on which every activation is split somewhere."""
    rows = {"batch": "data", "vocab": "tensor", "heads": "tensor", "kv_heads": "tensor", "mlp": "tensor"}
    raw = {"mesh": {"data": 4, "tensor": 2}, "rules": rows | {"residual.seq": "tensor"}}
    step = built(sized(lora=lora), rules_file.from_dict(raw, "here.yaml"))
    traced = jax.jit(step._train).trace(step.abstract_state, step.abstract_batch)
    seen = collections.Counter()
    for name, shape, split, _ in constraints(traced):
        resolved, problems = step.rules.resolve("rules", name, ARRAYS[name].split(), shape)
        assert (split, problems) == (resolved, []), name
        assert any(split), name
        seen[name] += 1
    wanted = collections.Counter(FORWARD) + collections.Counter(BACKWARD)
    if not lora:
        del wanted["low_rank"]
    assert seen == wanted
    made = sum(equation.primitive.name == "sharding_constraint" for equation, _ in equations(traced.jaxpr.jaxpr))
    assert traced.lower().as_text().count("sdy.sharding_constraint") >= made - 2  # the compiler's own merging


@pytest.mark.long
def test_new_rules_are_not_mistaken_for_old_ones(small, built):
    """Two layouts of one config in one process give two programs."""
    config = small(layers=1)
    texts = [built(config, name).lower_train().as_text() for name in ("tp8", "fsdp8")]
    assert '"tensor"' in texts[0] and '"tensor"' not in texts[1]
    assert '"fsdp"' in texts[1] and '"fsdp"' not in texts[0]


@pytest.mark.long
@pytest.mark.parametrize("layout", ["fsdp2_tp4", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_the_initial_weights_do_not_depend_on_the_layout(layout, small, built):
    config = small(
        **{
            "embedding.tied": False,
            "norm.kind": "layernorm",
            "norm.bias": True,
            "attention.qkv_bias": True,
            "feed_forward.bias": True,
        }
    )
    states = [jax.device_get(built(config, name).lower_init().compile()().params) for name in ("single", layout)]
    # Bitwise with jax 0.10; XLA of jax 0.12 rounds the last bit by how it fuses.
    jax.tree.map(lambda a, b: np.testing.assert_array_max_ulp(a, b, 2), *states)
