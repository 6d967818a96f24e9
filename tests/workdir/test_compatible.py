"""Which settings of a model a checkpoint is refused for."""

import copy
import dataclasses
import json

import jax.numpy as jnp
import pytest

from gspmd_lm import config
from gspmd_lm.config.media import Patches
from gspmd_lm.errors import InputError
from gspmd_lm.workdir import checkpoint
from tests.workdir.saved import (
    abstract,
)

# Another value of every setting of a model: those that make another one of it, and those that do not.
OTHER = {
    "layers": 3, "embed": 64, "heads": 16, "kv_heads": 4, "head_dim": 8, "mlp": 128, "vocab": 60, "padded_vocab": 128,
    "padded_heads": 16, "block": "parallel", "shared_norm": False, "post_norms": True, "norm": "layernorm",
    "norm_scale": False, "norm_bias": True, "norm_eps": 1e-5, "norm_offset": 1.0, "embedding_norm": True,
    "embedding_scale": 2.0, "qk_norm": True, "mlp_kind": "plain", "activation": "relu", "positions": "none",
    "position_offset": 2, "rope_theta": 5e5, "rope_dim": 2, "rope_scaling": config.RopeScaling(), "sliding_window": 4,
    "sliding_rope_theta": 100.0, "layer_pattern": ("full", "full"), "query_scale": 0.5, "qkv_bias": True,
    "attention_out_bias": True, "mlp_bias": True, "unembedding_bias": True, "tied_embeddings": True,
    "sum_norms": True, "final_norm": False, "embedding_width": 16, "pre_norms": False, "residual_scale": 0.5,
    "qk_norm_kind": "per_head", "logit_scale": 0.5,
    "attention_softcap": 5.0, "logit_softcap": 3.0, "lora": config.Lora(targets=("wq",)), "attention_sinks": True,
    "activation_slope": 1.7, "mlp_limit": 7.0, "mlp_up_offset": 1.0, "experts": 16, "experts_per_token": 3,
    "expert_mlp": 48, "shared_mlp": 32, "shared_gate": True, "dense_layers": 1, "routing": "sigmoid",
    "normalized_weights": False, "expert_scale": 2.0, "expert_groups": 4, "groups_per_token": 2, "router_bias": True,
    "balance": "bias", "sparse_step": 2, "router_jitter": 0.02, "weighted_input": True, "attention_chunk": 4,
    "linear_attention": config.LinearAttention(key_heads=2, value_heads=2, head_dim=8), "attention_gate": True,
    "attention_temperature": config.AttentionTemperature(), "residual_streams": 3, "laurel_rank": 4, "layer_embed": 8,
    "layer_vocab": 50, "activation_sparsity": 0.9, "sparse_layers": 1, "shared_kv_layers": 1, "value_norm": True,
    "relative_positions": config.RelativePositions(), "mask": "full", "encoder": config.Encoder(), "token_types": 2,
    "relative_vectors": config.RelativeVectors(), "shared_layers": True, "embedding_in": "sum",
    "pooler_activation": "gelu", "classes_of": "tokens", "head_transform": True, "classes": 3,
    "patches": Patches(image=8, size=4),
    "latent_attention": config.LatentAttention(kv_rank=8, v_head_dim=4), "frames": config.Frames(), "key_bias": False,
    "layer_scale": 0.1, "convolution": config.Convolution(), "windows": config.Windows(size=2),
    "masks": config.Masks(), "memory_width": 8,
    "vision": config.Vision(patches=Patches(image=8, size=4), projection=8),
}  # fmt: skip
SAME = {
    "context": 64, "dropout": 0.1, "z_loss": 1e-3, "init_std": 0.5, "compute_dtype": "bfloat16",
    "weight_dtype": "bfloat16", "matmul_dtype": "int8", "matmul_precision": "default",
    "attention_scores_dtype": "bfloat16",
    "balance_weight": 0.1, "balance_rate": 0.1, "router_z_loss": 0.1, "capacity_factor": 2.0,
    "row_multiple": 8, "frozen": ("embedding",),
}  # fmt: skip
OF_EXPERTS = ("expert", "shared_m", "shared_g", "rout", "balance", "groups", "dense_", "capacity", "normalized",
              "sparse_", "weighted_")  # fmt: skip
OF_STREAMS = ("layer_embed", "sparse_layers")  # which have no effect alone
STREAMS = {"residual_streams": 2, "activation_sparsity": 0.5}
IMAGES = {
    "objective": "classes", "classes": 3, "mask": "full", "vocab": 0, "padded_vocab": 0, "context": 16,
    "patches": Patches(image=8, size=2, class_row=False, pool="mean"), "positions": "none",
}  # fmt: skip
MIXTURE = {"experts": 8, "experts_per_token": 2, "shared_mlp": 16, "expert_groups": 2}


def test_every_setting_that_makes_another_model_is_refused(small, tmp_path):
    assert sorted([*OTHER, *SAME]) == sorted(field.name for field in dataclasses.fields(config.ModelConfig))
    weights = {"params": {"w": jnp.ones(3)}}
    bases = {"dense": small(), "mixture": small(**MIXTURE), "streams": small(**STREAMS), "rotated": small(rope_dim=2),
             "narrow": small(embedding_width=24), "images": small(**IMAGES), "learned": small(positions="learned"),
             "full": small(objective="masked", mask="full", positions="none", qkv_bias=True)}  # fmt: skip
    for folder, base in bases.items():
        with checkpoint.run_checkpoints(tmp_path / folder, base) as checkpoints:
            checkpoints.save(1, weights, {})
    every = [*(OTHER | SAME).items(), ("balance", "batch")]
    for name, value in every:
        of_experts = any(word in name for word in OF_EXPERTS)
        base = "streams" if name in OF_STREAMS else "mixture" if of_experts else "dense"
        base = {"embedding_in": "narrow", "relative_vectors": "full", "convolution": "full", "vision": "learned",
                "windows": "images", "masks": "images"}.get(name, base)  # fmt: skip
        base = "rotated" if name == "latent_attention" else base  # which needs numbers that are rotated, and others
        folder, base = tmp_path / base, bases[base]
        assert getattr(base.model, name) != value
        model = config.ModelConfig(**{**vars(base.model), name: value})
        other = copy.copy(base)
        object.__setattr__(other, "model", model)  # whether it goes with the other sections is not asked here
        with checkpoint.run_checkpoints(folder, other) as checkpoints:
            if name in SAME or value == "batch":
                checkpoints.restore_weights(abstract(weights["params"]))
                continue
            with pytest.raises(InputError, match=rf"another architecture\n  {name}(\.\w+)*: "):
                checkpoints.restore_weights(abstract(weights["params"]))


def test_a_checkpoint_that_is_older_than_a_key_of_a_mapping_is_taken(small, tmp_path):
    """It was saved when rope_scaling had fewer keys, which had one meaning: that of their defaults."""
    base, weights = small(), {"params": {"w": jnp.ones(3)}}
    scaled = dataclasses.replace(base, model=dataclasses.replace(base.model, rope_scaling=config.RopeScaling()))
    with checkpoint.run_checkpoints(tmp_path, scaled) as checkpoints:
        checkpoints.save(1, weights, {})
    kept = tmp_path / "checkpoints/1/run/metadata"
    run = json.loads(kept.read_text())
    for key in ("truncate", "attention_factor", "short_factors", "long_factors"):
        del run["architecture"]["rope_scaling"][key]
    kept.write_text(json.dumps(run))
    with checkpoint.run_checkpoints(tmp_path, scaled) as checkpoints:
        checkpoints._described(1)
    doubled = dataclasses.replace(scaled.model, rope_scaling=config.RopeScaling(attention_factor=2.0))
    with (
        checkpoint.run_checkpoints(tmp_path, dataclasses.replace(scaled, model=doubled)) as checkpoints,
        pytest.raises(InputError, match=r"\n  rope_scaling.attention_factor: 1.0 in .*, 2.0 in the config\n  fix"),
    ):
        checkpoints._described(1)
