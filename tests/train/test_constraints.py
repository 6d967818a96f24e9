"""Every shard() of the model is in the program, with the sharding that the rules give it."""

import collections

import jax
import numpy as np
import pytest

from gspmd_lm import rules
from gspmd_lm.rules import Rules
from gspmd_lm.train import state

# A mesh on which every activation that the model names is split somewhere.
EVERYWHERE = """\
mesh: {data: 2, tensor: 4}
rules:
  batch: data
  vocab: tensor
  heads: tensor
  kv_heads: tensor
  mlp: tensor
  residual.seq: tensor
"""


@pytest.fixture
def everywhere(tmp_path) -> Rules:
    (tmp_path / "everywhere.yaml").write_text(EVERYWHERE)
    return rules.load(str(tmp_path / "everywhere.yaml"))


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


def test_every_shard_is_a_constraint_of_the_program(small, built, everywhere):
    """Each named activation comes out of a constraint with the sharding that the rules resolve to, and each of
    those constraints reaches the text that the compiler reads."""
    step = built(small(layers=2), everywhere)
    traced = jax.jit(step._train).trace(step.abstract_state, step.abstract_batch)
    axes_of = {name: axes for name, (axes, _) in state.activations(step.config, step.arrays, 1).items()}
    seen = collections.Counter()
    for equation, made in equations(traced.jaxpr.jaxpr):
        if equation.primitive.name == "name":
            name, value = equation.params["name"], equation.invars[0]
            constraint = made.get(value)
            if constraint is None or constraint.primitive.name == "name":
                continue  # a layer's input, which was placed at the end of the layer before
            assert constraint.primitive.name == "sharding_constraint", name
            resolved, problems = step.rules.resolve("rules", name, axes_of[name], value.aval.shape)
            assert not problems
            spec = constraint.params["sharding"].spec
            assert [names or None for names in resolved] == [
                (names,) if isinstance(names, str) else names
                for names in (*spec, *[None] * (len(resolved) - len(spec)))
            ], name
            seen[name] += any(resolved)
    assert seen.keys() == {"tokens", "residual", "block_input", "q", "k", "v", "attention_out", "hidden", "logits"}
    assert min(seen.values()) >= 1
    constraints = sum(equation.primitive.name == "sharding_constraint" for equation, _ in equations(traced.jaxpr.jaxpr))
    assert traced.lower().as_text().count("sdy.sharding_constraint") >= constraints - 2  # the compiler's own merging


def test_new_rules_are_not_mistaken_for_old_ones(small, built):
    """Two layouts of one config in one process give two programs."""
    config = small(layers=1)
    texts = [built(config, name).lower_train().as_text() for name in ("tp8", "fsdp8")]
    assert '"tensor"' in texts[0] and '"tensor"' not in texts[1]
    assert '"fsdp"' in texts[1] and '"fsdp"' not in texts[0]


def test_the_initial_weights_do_not_depend_on_the_layout(small, built):
    config = small(tied_embeddings=False, norm="layernorm", norm_bias=True, qkv_bias=True, mlp_bias=True)
    states = [jax.device_get(built(config, name).lower_init().compile()().params) for name in ("single", "fsdp2_tp4")]
    # Bitwise with jax 0.10; XLA of jax 0.12 rounds the last bit by how it fuses.
    jax.tree.map(lambda a, b: np.testing.assert_array_max_ulp(a, b, 2), *states)
