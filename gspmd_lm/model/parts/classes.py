"""The scores of the classes of texts, of their tokens, or of images."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from gspmd_lm import config
from gspmd_lm.model.block import BLOCK_INPUT, RESIDUAL
from gspmd_lm.model.parts.activations import ACTIVATIONS
from gspmd_lm.model.weights import bias, matrix
from gspmd_lm.sharding.annotate import like, shard
from gspmd_lm.sharding.matmuls import gathered, project

TRANSFORMED = "transformed: batch seq stream_width"
SCORES = "class_scores: batch seq classes"


def class_scores(module: nn.Module, cfg: config.ModelConfig, x_BTD: jax.Array) -> jax.Array:
    """The scores of each text's classes, [B, classes], float32, from the output of the last block (BERT).

    If tokens have classes, the scores are those of each token, [B, T, classes].
    """
    assert cfg.classes
    of_text = cfg.classes.of == "text"
    read_BTD = like(x_BTD[:, :1], RESIDUAL) if of_text else x_BTD
    pooled_BTO = ACTIVATIONS[cfg.classes.pooler](
        project_with_bias(module, cfg, read_BTD, "pooler", cfg.embed, TRANSFORMED)
    )
    scores_BTX = score_classes(module, cfg, pooled_BTO, "classifier", TRANSFORMED, TRANSFORMED)
    return scores_BTX[:, 0] if of_text else scores_BTX


def score_classes(
    module: nn.Module, cfg: config.ModelConfig, x_BTD: jax.Array, name: str, gathered_spec: str, reduced_spec: str
) -> jax.Array:
    """The scores of tokens of texts or images by the matrix `name`, [B, T, classes], float32."""
    axis = gathered_spec.rpartition(" ")[2]
    classifier = matrix(module, name, f"{axis} classes", (cfg.embed, cfg.num_classes), cfg)
    with gathered(x_BTD, gathered_spec, reduced_spec) as in_BTD:
        scores_BTX = shard(project(in_BTD, classifier), SCORES)
    return (scores_BTX + bias(module, f"{name}_bias", "classes", (cfg.num_classes,), cfg)).astype(jnp.float32)


def project_with_bias(
    module: nn.Module, cfg: config.ModelConfig, x_BTD: jax.Array, name: str, width: int, spec: str
) -> jax.Array:
    """A dense layer: `x_BTD` times a matrix to `width`, plus a bias, sharded as `spec` says."""
    axis = spec.rpartition(" ")[2]
    w = matrix(module, name, f"embed {axis}", (cfg.embed, width), cfg)
    with gathered(x_BTD, BLOCK_INPUT, RESIDUAL) as in_BTD:
        return shard(project(in_BTD, w) + bias(module, f"{name}_bias", axis, (width,), cfg), spec)
