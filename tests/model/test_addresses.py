"""Where the weights of each layer lie in the tree."""

import flax.linen as nn
import jax
import pytest
from flax.traverse_util import flatten_dict

from gspmd_lm.convert import pretrained
from gspmd_lm.model.addresses import Address, addresses, held_layers
from gspmd_lm.model.families import init
from tests.convert import kinds


def test_each_layer_lies_where_the_tree_has_it(small):
    """Two layers to a turn, one layer left behind the loop, and a first layer of its own."""
    cfg = small(layers=6, **{"experts.dense_layers": 1, "attention.window": 4, "experts.count": 2,
                             "experts.per_token": 1}, layer_pattern=("sliding", "full")).model  # fmt: skip
    behind = Address(("layer_5",), None)
    turns = [Address(("layers", f"block_{i % 2}"), i // 2) for i in range(4)]
    assert addresses(cfg) == (Address(("dense_layers",), 0), *turns, behind)
    params = nn.unbox(jax.eval_shape(lambda: init(cfg, jax.random.key(0))))
    for module, (layers, stacked, _) in held_layers(cfg).items():
        tree = params
        for name in module:
            tree = tree[name]
        wq = tree["attention"]["wq"]
        assert wq.shape == (*[len(layers)] * stacked, cfg.embed, cfg.heads, cfg.head_dim)


@pytest.mark.parametrize(
    ("case", "stacks"),
    [
        pytest.param("sam", ["", "masks"], marks=pytest.mark.long),
        pytest.param("swin", ["level_0", "level_1"], marks=pytest.mark.long),
        ("clip", ["", "vision"]),
        ("whisper", ["", "encoder"]),
        pytest.param("blip2-t5", ["", "encoder", "queries", "vision"], marks=pytest.mark.long),
    ],
)
def test_the_layers_of_inner_stacks_lie_where_the_tree_has_them(case, stacks, tmp_path):
    cfg = pretrained.open_folder(kinds.folder(case, tmp_path / case)).config.model
    params = flatten_dict(nn.unbox(jax.eval_shape(lambda: init(cfg, jax.random.key(0)))))
    held = held_layers(cfg)
    assert sorted({one.stack for one in held.values()}) == stacks
    for module, (layers, stacked, _) in held.items():
        shapes = [x.shape for path, x in params.items() if path[: len(module)] == module]
        assert shapes and all(not stacked or shape[0] == len(layers) for shape in shapes)
    inside = [path for path in params if {"attention", "attention_norm", "mlp"} & {*path}]
    assert all(any(path[: len(module)] == module for module in held) for path in inside)
