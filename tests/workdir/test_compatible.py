"""Which settings of a model a checkpoint is refused for."""

import copy
import dataclasses
import json
import re

import jax.numpy as jnp
import pytest

from gspmd_lm import config
from gspmd_lm.config import value_at, with_values
from gspmd_lm.config.media import Patches
from gspmd_lm.errors import InputError
from gspmd_lm.workdir import checkpoint, compatible
from tests.workdir.saved import (
    abstract,
)

# Another value of every setting of a model: those that make another one of it, and those that do not.
OTHER = {
    "layers": 3, "embed": 64, "heads": 16, "kv_heads": 4, "head_dim": 8, "mlp": 128, "vocab": 60, "padded_vocab": 128,
    "padded_heads": 16, "block": "parallel", "norm.shared": False, "norm.post": True, "norm.kind": "layernorm",
    "norm.scale": False, "norm.bias": True, "norm.eps": 1e-5, "norm.offset": 1.0, "embedding.norm": True,
    "embedding.scale": 2.0, "attention.qk_norm": True, "feed_forward.kind": "plain", "feed_forward.activation": "relu",
    "positions": "none",
    "embedding.position_offset": 2, "attention.rope.theta": 5e5, "attention.rope.dim": 2,
    "attention.rope.scaling": config.RopeScaling(), "attention.window": 4,
    "attention.rope.window_theta": 100.0, "layer_pattern": ("full", "full"), "attention.scale": 0.5,
    "attention.qkv_bias": True,
    "attention.out_bias": True, "feed_forward.bias": True, "logits.bias": True, "embedding.tied": True,
    "norm.sum": True, "norm.final": False, "embedding.width": 16, "norm.pre": False, "residual.scale": 0.5,
    "attention.qk_norm_kind": "per_head", "logits.scale": 0.5,
    "attention.softcap": 5.0, "logits.softcap": 3.0, "lora": config.Lora(targets=("wq",)), "attention.sinks": True,
    "feed_forward.slope": 1.7, "feed_forward.limit": 7.0, "feed_forward.up_offset": 1.0, "experts.count": 16,
    "experts.per_token": 3,
    "experts.mlp": 48, "experts.shared_mlp": 32, "experts.shared_gate": True, "experts.dense_layers": 1,
    "experts.routing": "sigmoid",
    "experts.normalized_weights": False, "experts.scale": 2.0, "experts.groups": 4, "experts.groups_per_token": 2,
    "experts.router_bias": True,
    "experts.balance": "bias", "experts.step": 2, "experts.jitter": 0.02, "experts.weighted_input": True,
    "attention.chunk": 4,
    "attention.linear": config.LinearAttention(key_heads=2, value_heads=2, head_dim=8), "attention.gate": True,
    "attention.temperature": config.AttentionTemperature(), "residual.streams": 3, "residual.laurel_rank": 4,
    "residual.layer_embed": 8,
    "residual.layer_vocab": 50, "feed_forward.sparsity": 0.9, "feed_forward.sparse_layers": 1,
    "attention.shared_kv_layers": 1, "attention.value_norm": True,
    "attention.relative_positions": config.RelativePositions(), "attention.mask": "full", "encoder": config.Encoder(),
    "embedding.token_types": 2,
    "attention.relative_vectors": config.RelativeVectors(), "shared_layers": True, "embedding.input": "sum",
    "classes.pooler": "gelu", "classes.of": "tokens", "logits.transform": True, "classes.count": 3,
    "patches": Patches(image=8, size=4),
    "attention.latent": config.LatentAttention(kv_rank=8, v_head_dim=4), "frames": config.Frames(),
    "attention.key_bias": False,
    "residual.layer_scale": 0.1, "convolution": config.Convolution(), "windows": config.Windows(size=2),
    "masks": config.Masks(several=2), "memory_width": 8,
    "vision": config.Vision(patches=Patches(image=8, size=4), projection=8),
}  # fmt: skip
SAME = {
    "context": 64, "dropout": 0.1, "logits.z_loss": 1e-3, "init_std": 0.5, "compute_dtype": "bfloat16",
    "weight_dtype": "bfloat16", "matmul_dtype": "int8", "matmul_precision": "default",
    "attention.scores_dtype": "bfloat16",
    "experts.balance_weight": 0.1, "experts.balance_rate": 0.1, "experts.z_loss": 0.1, "experts.capacity_factor": 2.0,
    "row_multiple": 8, "frozen": ("embedding",),
}  # fmt: skip
OF_STREAMS = ("residual.layer_embed", "feed_forward.sparse_layers")  # which have no effect alone
STREAMS = {"residual.streams": 2, "feed_forward.sparsity": 0.5}
IMAGES = {
    "attention.mask": "full", "vocab": 0, "padded_vocab": 0, "context": 16,
    "patches": Patches(image=8, size=2, class_row=False, pool="mean"), "positions": "none",
}  # fmt: skip
MIXTURE = {"experts.count": 8, "experts.per_token": 2, "experts.shared_mlp": 16, "experts.groups": 2}


@pytest.mark.long
def test_every_setting_that_makes_another_model_is_refused(small, tmp_path):
    weights = {"params": {"w": jnp.ones(3)}}
    bases = {"dense": small(), "mixture": small(**MIXTURE), "streams": small(**STREAMS),
             "rotated": small(**{"attention.rope.dim": 2}),
             "narrow": small(**{"embedding.width": 24}), "images": small(**IMAGES, **{"classes.count": 3}),
             "objects": small(**IMAGES, masks=config.Masks()),
             "learned": small(positions="learned"),
             "classes": small(objective="classes", data={"label_kind": "number"},
                              **{"classes.count": 1, "attention.mask": "full"}),
             "full": small(objective="masked", **{"attention.mask": "full", "attention.qkv_bias": True},
                           positions="none")}  # fmt: skip
    assert {*OTHER, *SAME} == {path for base in bases.values() for path in config.flat(base.model)
                               if not re.match(r"(experts|classes|patches\..*)$", path)} | {"patches"}  # fmt: skip
    for folder, base in bases.items():
        with checkpoint.run_checkpoints(tmp_path / folder, base) as checkpoints:
            checkpoints.save(1, weights, {})
    every = [*(OTHER | SAME).items(), ("experts.balance", "batch")]
    for name, value in every:
        section = name.partition(".")[0]
        base = "streams" if name in OF_STREAMS else {"experts": "mixture", "classes": "classes"}.get(section, "dense")
        base = {"embedding.input": "narrow", "attention.relative_vectors": "full", "convolution": "full",
                "patches": "full", "vision": "learned", "windows": "images",
                "masks": "objects"}.get(name, base)  # fmt: skip
        base = "rotated" if name == "attention.latent" else base  # which needs numbers that are rotated, and others
        folder, base = tmp_path / base, bases[base]
        assert value_at(base.model, name) != value
        model = with_values(base.model, {name: value})
        other = copy.copy(base)
        object.__setattr__(other, "model", model)  # whether it goes with the other sections is not asked here
        with checkpoint.run_checkpoints(folder, other) as checkpoints:
            if name in SAME or value == "batch":
                checkpoints.restore_weights(abstract(weights["params"]))
                continue
            with pytest.raises(InputError, match=rf"another architecture\n  {name}(\.\w+)*: "):
                checkpoints.restore_weights(abstract(weights["params"]))


def test_a_checkpoint_that_is_older_than_a_key_of_a_mapping_is_taken(small, tmp_path):
    """It was saved when attention.rope.scaling had fewer keys, which had one meaning: that of their defaults."""
    base, weights = small(), {"params": {"w": jnp.ones(3)}}
    scaled = dataclasses.replace(base, model=with_values(base.model, {"attention.rope.scaling": config.RopeScaling()}))
    with checkpoint.run_checkpoints(tmp_path, scaled) as checkpoints:
        checkpoints.save(1, weights, {})
    kept = tmp_path / "checkpoints/1/run/metadata"
    run = json.loads(kept.read_text())
    for key in ("truncate", "attention_factor", "short_factors", "long_factors"):
        del run["architecture"]["attention"]["rope"]["scaling"][key]
    kept.write_text(json.dumps(run))
    with checkpoint.run_checkpoints(tmp_path, scaled) as checkpoints:
        checkpoints._read_description(1)
    doubled = with_values(scaled.model, {"attention.rope.scaling": config.RopeScaling(attention_factor=2.0)})
    with (
        checkpoint.run_checkpoints(tmp_path, dataclasses.replace(scaled, model=doubled)) as checkpoints,
        pytest.raises(
            InputError, match=r"\n  attention.rope.scaling.attention_factor: 1.0 in .*, 2.0 in the config\n  fix"
        ),
    ):
        checkpoints._read_description(1)


def test_other_padding_has_a_fix_for_runs_that_were_not_converted():
    with pytest.raises(InputError, match=r"keep that of the checkpoint, or .*--to\).*--set model.padded_vocab=272"):
        compatible.check_model({"padded_vocab": 264}, {"padded_vocab": 272}, "here")


def test_arrays_that_differ_in_nothing_but_dtypes_are_not_laid_to_another_optimizer():
    saved, cast = {"w": jnp.ones(3)}, {"w": jnp.ones(3, jnp.bfloat16)}
    with pytest.raises(InputError, match=r"\(another model\.weight_dtype, or optimizer\.mu_dtype\?\)"):
        compatible.compare(saved, cast, "here")
    with pytest.raises(InputError, match=r"\(another optimizer, or model\.frozen\?\)"):
        compatible.compare(saved, {"v": jnp.ones(3)}, "here")
