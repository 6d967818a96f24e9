"""Every shard() of the model is in the program, with the sharding that the rules give it."""

import collections
import dataclasses
import re

import jax
import pytest

from gspmd_lm import placement
from gspmd_lm.rules import Rules

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
    from gspmd_lm import rules

    (tmp_path / "everywhere.yaml").write_text(EVERYWHERE)
    return rules.load(str(tmp_path / "everywhere.yaml"))


def written(spec, rank):
    """A PartitionSpec as the program writes it: [{"data"}, {}, {"tensor"}]."""
    names = [() if entry is None else (entry,) if isinstance(entry, str) else entry for entry in spec]
    names += [()] * (rank - len(names))
    return "[" + ", ".join("{" + ", ".join(f'"{name}"' for name in dimension) + "}" for dimension in names) + "]"


def test_every_constraint_is_in_the_program(small, built, everywhere, monkeypatch):
    step = built(small(layers=2), everywhere)
    asked = collections.Counter()
    names = set()
    original = placement.MeshPlacement.constrain

    def noting(self, x, array, axes, table="rules"):
        sharding = self.sharding(table, array, axes, x.shape)
        asked["x".join(map(str, x.shape)), written(sharding.spec, x.ndim)] += 1
        if table == "rules" and sharding.spec != ():
            names.add(array)
        return original(self, x, array, axes, table)

    monkeypatch.setattr(placement.MeshPlacement, "constrain", noting)
    text = jax.jit(step._evaluate).trace(step.abstract_state().params, step.abstract_batch()).lower().as_text()
    found = collections.Counter(
        (shape, sharding)
        for sharding, shape in re.findall(
            r"sdy\.sharding_constraint %\S+ <@mesh, (\[.*?\])> : tensor<([\dx]+)x\w+>", text
        )
    )
    assert {"tokens", "residual", "block_input", "q", "k", "v", "attention_out", "hidden", "logits"} <= names
    missing = {key: (count, found[key]) for key, count in asked.items() if found[key] < min(count, 1)}
    assert missing == {}
    assert sum(found.values()) >= sum(asked.values()) * 0.9, (sum(found.values()), sum(asked.values()))


def test_new_rules_are_not_mistaken_for_old_ones(small, built):
    """Two layouts of one config in one process give two programs."""
    config = small(layers=1)
    texts = [built(config, name).lower_train().as_text() for name in ("tp8", "fsdp8")]
    assert '"tensor"' in texts[0] and '"tensor"' not in texts[1]
    assert '"fsdp"' in texts[1] and '"fsdp"' not in texts[0]


def test_the_initial_weights_do_not_depend_on_the_layout(small, built):
    import numpy as np

    config = small(tied_embeddings=False, norm="layernorm", norm_bias=True, qkv_bias=True, mlp_bias=True)
    states = [jax.device_get(built(config, name).lower_init().compile()().params) for name in ("single", "fsdp2_tp4")]
    jax.tree.map(np.testing.assert_array_equal, *states)
    assert dataclasses.is_dataclass(config)
