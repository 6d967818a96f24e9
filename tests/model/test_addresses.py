"""Where the weights of each layer lie in the tree."""

import flax.linen as nn
import jax

from gspmd_lm.model.addresses import Address, addresses, held_layers
from gspmd_lm.model.families import init


def test_each_layer_lies_where_the_tree_has_it(small):
    """Two layers to a turn, one layer left behind the loop, and a first layer of its own."""
    cfg = small(layers=6, **{"experts.dense_layers": 1, "attention.window": 4, "experts.count": 2,
                             "experts.per_token": 1}, layer_pattern=("sliding", "full")).model  # fmt: skip
    behind = Address(("layer_5",), None)
    turns = [Address(("layers", f"block_{i % 2}"), i // 2) for i in range(4)]
    assert addresses(cfg) == (Address(("dense_layers",), 0), *turns, behind)
    params = nn.unbox(jax.eval_shape(lambda: init(cfg, jax.random.key(0))))
    for module, (layers, stacked) in held_layers(cfg).items():
        tree = params
        for name in module:
            tree = tree[name]
        wq = tree["attention"]["wq"]
        assert wq.shape == (*[len(layers)] * stacked, cfg.embed, cfg.heads, cfg.head_dim)
