"""SAM segments objects: it turns patches of an image and a prompt into masks (arXiv 2304.02643)."""

import dataclasses
import math
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from einops import rearrange

from gspmd_lm import config
from gspmd_lm.config import with_values
from gspmd_lm.config.masks import PARTS, POINTS
from gspmd_lm.model.addresses import layer_name
from gspmd_lm.model.block import BLOCK_INPUT, RESIDUAL
from gspmd_lm.model.compose import mlp_parts
from gspmd_lm.model.families import vit
from gspmd_lm.model.kernels.attention import OUT, K, Q, TokenPlaces, V, attend_masked, head_numbers
from gspmd_lm.model.mlp import Mlp
from gspmd_lm.model.norm import Norm
from gspmd_lm.model.objectives import Batch, Input, Shape, mean_objective, output
from gspmd_lm.model.parts.activations import ACTIVATIONS
from gspmd_lm.model.parts.classes import TRANSFORMED
from gspmd_lm.model.stack import Stack
from gspmd_lm.model.tokens import Tokens
from gspmd_lm.model.weights import bias, matrix, weight
from gspmd_lm.sharding.annotate import like, shard, use
from gspmd_lm.sharding.matmuls import gathered, project, unreduced_matmul
from gspmd_lm.sharding.partial_sums import reduced

AROUND = "around: batch seq taps stream_width"
PROMPTS = "prompts: batch prompt embed"
UPSCALED = "upscaled: batch seq taps stream_width"
DRAWN = "drawn: batch masks seq pixels"
QUARTERS = 4  # a patch is upscaled to 4 parts, and each part to 4 pixels
MASK_CHANNELS = 16  # channels of each patch of a mask that is a prompt
# Focal loss (arXiv 1708.02002) counts 20 times as much as dice loss (arXiv 2304.02643, "Training"), and the pixels of
# the object a quarter of it.
FOCAL, OF_OBJECT = 20.0, 0.25
NECK_EPS, LAST_EPS = 1e-6, 1e-5  # added to the variance in norms of the neck and of pixels, and in the last norm


class Drawn(NamedTuple):
    """Masks, float32: the first one for a prompt that means one object, the others for one that may mean several.

    A patch has its 4 x 4 pixels, row by row from the top left one. A pixel above 0 is of the object.
    """

    masks_BMTP: jax.Array
    iou_BM: jax.Array  # the intersection of each mask and the object over their union, as the model guesses it


class Masker(Stack):
    """An image encoder, its neck and the mask decoder."""

    @nn.compact
    def __call__(self, batch: dict[str, jax.Array], dropout_key: jax.Array | None = None) -> Drawn:
        """`batch` holds row [B] and patches [B, T, X] as `vit.ImageClassifier` reads them, and a prompt.

        points [B, P, 2], float32: the coordinates of points, to the right and down, from 0 to 1. point_kinds [B, P],
        int32: 1 for a point of the object, 0 for one outside of it, 2 and 3 for the top left and the bottom right
        corner of a box around it, -1 for none. prompt_mask [B, T, 16], if a mask is a prompt: pixels as in `Drawn`.
        """
        assert self.cfg.masks
        of_masks = self.cfg.masks.of(self.cfg)
        x_BTD = apply_neck(self, self.cfg, of_masks, vit.encode_image(self, batch, dropout_key))
        return MaskDecoder(of_masks, self.cfg, name="masks")(x_BTD, batch)


def apply_neck(module: nn.Module, cfg: config.ModelConfig, of_masks: config.ModelConfig, x_BTD: jax.Array) -> jax.Array:
    """The neck: the output of the last block through a matrix and a convolution of 3 x 3 patches, each with a norm.

    [B, T, D] of the decoder's width. Rows beyond the patches hold nothing of use.
    """
    assert cfg.patches
    T, side, width, normed = x_BTD.shape[1], cfg.patches.side, of_masks.embed, _with_eps(of_masks, NECK_EPS)
    neck_in = matrix(module, "neck_in", "embed stream_width", (cfg.embed, width), cfg)
    with gathered(x_BTD, BLOCK_INPUT, RESIDUAL) as in_BTD:
        x_BTO = shard(project(in_BTD, neck_in), TRANSFORMED)
    x_BTO = Norm(normed, "stream_width", name="neck_in_norm")(x_BTO)
    x_ByxO = rearrange(x_BTO[:, : side**2], "B (y x) O -> B y x O", x=side)
    x_ByxO = jnp.pad(x_ByxO, ((0, 0), (1, 1), (1, 1), (0, 0)))
    around = [x_ByxO[:, y : y + side, x : x + side] for y in range(3) for x in range(3)]
    around_BTAO = rearrange(jnp.stack(around, 3), "B y x A O -> B (y x) A O")
    around_BTAO = shard(jnp.pad(around_BTAO, ((0, 0), (0, T - side**2), (0, 0), (0, 0))), AROUND)
    neck_out = matrix(module, "neck_out", "taps stream_width embed", (9, width, width), cfg)
    y_BTD = reduced(unreduced_matmul(around_BTAO, neck_out), BLOCK_INPUT, RESIDUAL)
    return shard(Norm(normed, name="neck_out_norm")(y_BTD), RESIDUAL)


class MaskDecoder(nn.Module):
    """The mask decoder: prompt tokens and mask tokens attend to the image, and the image attends to them."""

    cfg: config.ModelConfig  # of this decoder
    of_image: config.ModelConfig

    @nn.compact
    def __call__(self, x_BTD: jax.Array, batch: dict[str, jax.Array]) -> Drawn:
        """Masks from `x_BTD`, the output of the neck. `batch`: see `Masker`."""
        cfg, masks, patches, (B, T, D) = self.cfg, self.of_image.masks, self.of_image.patches, x_BTD.shape
        assert masks and patches
        side, M, start = patches.side, masks.count, nn.initializers.normal(1.0)
        fourier_2O = use(weight(self, "fourier", "types stream_width", (2, D // 2), cfg, start), jnp.float32)
        prompt_BPD = shard(embed_prompt(self, cfg, batch, fourier_2O, M), PROMPTS)
        tokens = Side(prompt_BPD, prompt_BPD, (PROMPTS, PROMPTS))

        no_mask_D = use(matrix(self, "no_mask", "embed", (D,), cfg))
        of_prompt = embed_mask(self, cfg, batch["prompt_mask"]) if "prompt_mask" in batch else no_mask_D
        row_T, column_T = jnp.divmod(jnp.arange(T), side)
        places_TD = fourier_features((jnp.stack([column_T, row_T], -1) + 0.5) / side, fourier_2O).astype(x_BTD.dtype)
        places_BTD = like(jnp.broadcast_to(places_TD, x_BTD.shape), RESIDUAL)
        is_patch_BT = jnp.broadcast_to(row_T < side, (B, T)).astype(jnp.int32)
        image = Side(like(x_BTD + of_prompt, RESIDUAL), places_BTD, (BLOCK_INPUT, RESIDUAL), is_patch_BT)

        for number in range(cfg.layers):
            tokens, image = TwoWay(cfg, name=layer_name(number))(tokens, image, number == 0)
        tokens_BPD = tokens.x + Crossing(cfg, name="last")(tokens, image)
        tokens_BPD = Norm(_with_eps(cfg, LAST_EPS), name="last_norm")(tokens_BPD)
        pixels_BTPK = upscale(self, cfg, image.x)
        hyper_BMK = mlp(self, cfg, "hyper", tokens_BPD[:, 1 : 1 + M], "channels", pixels_BTPK.shape[-1], M)
        masks_BMTP = jnp.einsum("BMK,BTPK->BMTP", hyper_BMK, pixels_BTPK, preferred_element_type=jnp.float32)
        iou_BM = mlp(self, cfg, "iou", tokens_BPD[:, 0], "classes", M)
        return Drawn(shard(masks_BMTP, DRAWN), iou_BM.astype(jnp.float32))


def embed_prompt(
    module: nn.Module, cfg: config.ModelConfig, batch: dict[str, jax.Array], fourier_2O: jax.Array, masks: int
) -> jax.Array:
    """The tokens before the first layer, [B, P, D]: one for the masks' IoU, one for each mask, one for each point."""
    D, kind_BP1 = cfg.embed, batch["point_kinds"][..., None]
    kinds_4D = use(matrix(module, "point_kinds", "types embed", (4, D), cfg))
    no_point_D = use(matrix(module, "no_point", "embed", (D,), cfg))
    points_BPD = fourier_features(batch["points"], fourier_2O).astype(kinds_4D.dtype)
    points_BPD += (kind_BP1 == jnp.arange(4)).astype(kinds_4D.dtype) @ kinds_4D
    points_BPD = jnp.where(kind_BP1 < 0, no_point_D, points_BPD)
    iou_1D = use(matrix(module, "iou_token", "embed", (D,), cfg))[None]
    own_OD = jnp.concatenate([iou_1D, use(matrix(module, "mask_tokens", "masks embed", (masks, D), cfg))])
    return jnp.concatenate([jnp.broadcast_to(own_OD, (len(points_BPD), *own_OD.shape)), points_BPD], 1)


def _with_eps(cfg: config.ModelConfig, eps: float) -> config.ModelConfig:
    return with_values(cfg, {"norm.eps": eps})


def fourier_features(places_X2: jax.Array, fourier_2O: jax.Array) -> jax.Array:
    """Sines and cosines of coordinates from 0 to 1 at random frequencies, [..., D], float32 (arXiv 2006.10739)."""
    x, y = (2 * places_X2[..., number, None].astype(jnp.float32) - 1 for number in range(2))
    angles = 2 * math.pi * (x * fourier_2O[0] + y * fourier_2O[1])
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)


def embed_mask(module: nn.Module, cfg: config.ModelConfig, mask_BTP: jax.Array) -> jax.Array:
    """The embedding of a mask that is a prompt, to be added to each patch, [B, T, D]: two convolutions, a matrix."""
    few, many, gelu = MASK_CHANNELS // QUARTERS, MASK_CHANNELS, ACTIVATIONS["gelu"]
    parts_BTAP = rearrange(
        mask_BTP.astype(jnp.dtype(cfg.compute_dtype)), "B T (y v x w) -> B T (y x) (v w)", y=2, v=2, x=2
    )
    w_in = use(matrix(module, "mask_in", "taps channels", (QUARTERS, few), cfg))
    x = parts_BTAP @ w_in + bias(module, "mask_in_bias", "channels", (few,), cfg)
    x = gelu(Norm(cfg, "channels", name="mask_in_norm")(x))
    w_middle = use(matrix(module, "mask_middle", "taps channels stream_width", (QUARTERS, few, many), cfg))
    x = jnp.einsum("BTAK,AKO->BTO", x, w_middle) + bias(module, "mask_middle_bias", "stream_width", (many,), cfg)
    x = gelu(Norm(cfg, "stream_width", name="mask_middle_norm")(x))
    w_out = use(matrix(module, "mask_out", "stream_width embed", (many, cfg.embed), cfg))
    return x @ w_out + bias(module, "mask_out_bias", "embed", (cfg.embed,), cfg)


def upscale(module: nn.Module, cfg: config.ModelConfig, image_BTD: jax.Array) -> jax.Array:
    """The pixels of each patch, [B, T, 16, D / 8]: a patch becomes four parts, and each part four pixels."""
    wide, narrow, gelu = cfg.embed // 4, cfg.embed // 8, ACTIVATIONS["gelu"]
    w_in = matrix(module, "upscale_in", "embed taps stream_width", (cfg.embed, QUARTERS, wide), cfg)
    with gathered(image_BTD, BLOCK_INPUT, RESIDUAL) as in_BTD:
        x_BTAO = shard(project(in_BTD, w_in), UPSCALED)
    x_BTAO += bias(module, "upscale_in_bias", "stream_width", (wide,), cfg)
    x_BTAO = gelu(Norm(_with_eps(cfg, NECK_EPS), "stream_width", name="upscale_norm")(x_BTAO))
    w_out = use(matrix(module, "upscale_out", "stream_width taps channels", (wide, QUARTERS, narrow), cfg))
    x = jnp.einsum("BTAO,OEK->BTAEK", x_BTAO, w_out) + bias(module, "upscale_out_bias", "channels", (narrow,), cfg)
    return rearrange(gelu(x), "B T (y x) (v w) K -> B T (y v x w) K", y=2, v=2)


def mlp(
    module: nn.Module, cfg: config.ModelConfig, name: str, x: jax.Array, out_axis: str, out: int, count: int = 0
) -> jax.Array:
    """Three matrices with relu between them, from tokens [B, D], or [B, M, D] of which each has matrices of its own."""
    each, lead = ("masks ", (count,)) if count else ("", ())
    matrices = ("in", "embed", "stream_width"), ("middle", "stream_width", "embed"), ("out", "embed", out_axis)
    for place, before, after in matrices:
        to = out if place == "out" else cfg.embed
        w = use(matrix(module, f"{name}_{place}", f"{each}{before} {after}", (*lead, cfg.embed, to), cfg))
        x = jax.nn.relu(x) if place != "in" else x
        x = jnp.einsum("BMD,MDO->BMO" if count else "BD,DO->BO", x, w)
        x += bias(module, f"{name}_{place}_bias", f"{each}{after}", (*lead, to), cfg)
    return x


class Side(NamedTuple):
    """One side of the decoder's attention: the tokens, or the image."""

    x: jax.Array  # [B, P, D] or [B, T, D]
    places: jax.Array  # their position embeddings, which are added for queries and keys
    specs: tuple[str, str]  # their specs as a matmul gathers them, and elsewhere
    is_real: jax.Array | None = None  # int32, 0 for padding; None: all are

    def name_rows(self, spec: str) -> str:
        """The spec of an array with rows of this kind, from the spec for the image's rows."""
        return spec.replace("kv_seq", "seq").replace("seq", "prompt") if self.specs[0] == PROMPTS else spec


class TwoWay(nn.Module):
    """One layer: tokens attend to each other and to the image, and the image to tokens."""

    cfg: config.ModelConfig

    @nn.compact
    def __call__(self, tokens: Side, image: Side, first: bool) -> tuple[Side, Side]:
        """Both sides after the layer. In the first layer, self-attention replaces the tokens: it has no residual."""
        cfg, wide = self.cfg, dataclasses.replace(self.cfg, head_dim=self.cfg.embed // self.cfg.heads)
        alike = tokens._replace(places=jnp.zeros_like(tokens.x)) if first else tokens
        y_BPD = Crossing(wide, name="attention")(alike, alike)
        tokens = tokens._replace(x=Norm(cfg, name="attention_norm")(y_BPD if first else tokens.x + y_BPD))
        y_BPD = Crossing(cfg, name="to_image")(tokens, image)
        tokens_BPD = Norm(cfg, name="to_image_norm")(tokens.x + y_BPD)
        with gathered(tokens_BPD, PROMPTS, PROMPTS) as in_BPD:
            y, _ = Mlp(cfg, mlp_parts(cfg), name="mlp")(in_BPD, Tokens())
        tokens = tokens._replace(x=Norm(cfg, name="mlp_norm")(tokens_BPD + reduced(y, PROMPTS, PROMPTS)))
        y_BTD = Crossing(cfg, name="to_tokens")(image, tokens)
        return tokens, image._replace(x=shard(Norm(cfg, name="to_tokens_norm")(image.x + y_BTD), RESIDUAL))


class Crossing(nn.Module):
    """Attention of one side to the other, or to itself. Values get no position embeddings."""

    cfg: config.ModelConfig

    @nn.compact
    def __call__(self, queries: Side, keys: Side) -> jax.Array:
        """The output for the queries, with the shape of `queries.x`."""
        cfg, sizes = self.cfg, (self.cfg.embed, self.cfg.heads, self.cfg.head_dim)

        def heads(name: str, side: Side, x: jax.Array, spec: str) -> jax.Array:
            axes = f"{spec.split()[-2]} head_dim"
            w, b = matrix(self, f"w{name}", f"embed {axes}", sizes, cfg), bias(self, f"b{name}", axes, sizes[1:], cfg)
            with gathered(x, *side.specs) as in_x:
                return shard(project(in_x, w) + b, side.name_rows(spec))

        q = heads("q", queries, queries.x + queries.places, Q)
        k = heads("k", keys, keys.x + keys.places, K)
        v = heads("v", keys, keys.x, V)
        is_real, every = keys.is_real, None if keys.is_real is None else jnp.ones(q.shape[:2], jnp.int32)
        asking, asked = (TokenPlaces(jnp.arange(x.shape[1])[None], of, None) for x, of in ((q, every), (k, is_real)))
        out = shard(attend_masked(q, k, v, asking, asked, head_numbers(cfg, None), cfg), queries.name_rows(OUT))
        wo = matrix(self, "wo", "heads head_dim embed", (*sizes[1:], sizes[0]), cfg)
        return reduced(unreduced_matmul(out, wo) + bias(self, "bo", "embed", sizes[:1], cfg), *queries.specs)


def _inputs(cfg: config.ModelConfig, shape: Shape) -> dict[str, Input]:
    prompt = shape.batch, POINTS
    points = Input((*prompt, 2), "float32", "prompts: batch prompt channels")
    kinds = Input(prompt, "int32", "prompts: batch prompt")
    return vit.image_inputs(cfg, shape) | {"points": points, "point_kinds": kinds}


# The objective: the mask of the object that a prompt means


class MaskSums(NamedTuple):
    """Sums over the rows that hold an object."""

    loss: jax.Array  # of the first mask, of the best of the others, and of the predicted IoU of each
    iou: jax.Array  # the intersection of the first mask and the object over their union


def _sums_of_masks(module: Any, params: Any, batch: Batch, key: jax.Array | None) -> MaskSums:
    drawn, holds_B = output(module, params, batch, key), _holds_object(batch)
    loss_BM, iou_BM = _mask_losses(drawn, batch["object"])
    # Only the best mask gets a gradient: its index is chosen, which has no gradient.
    best_B = loss_BM[:, 1:].argmin(1)
    of_best_B = jnp.where(jnp.arange(loss_BM.shape[1] - 1) == best_B[:, None], loss_BM[:, 1:], 0).sum(1)
    guess_B = jnp.square(drawn.iou_BM - iou_BM).mean(1)
    loss_B = loss_BM[:, 0] + of_best_B + guess_B
    return MaskSums(jnp.where(holds_B, loss_B, 0).sum(), jnp.where(holds_B, iou_BM[:, 0], 0).sum())


def _mask_losses(drawn: Drawn, object_BTP: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[B, M]: focal and dice loss of each mask, and its intersection with the object over their union."""
    x, pixels = drawn.masks_BMTP, (-2, -1)
    is_real, is_object = (object_BTP >= 0)[:, None], (object_BTP > 0)[:, None]
    sign = jnp.where(is_object, 1.0, -1.0)
    weight = jnp.where(is_object, OF_OBJECT, 1 - OF_OBJECT)
    focal = -weight * jnp.square(jax.nn.sigmoid(-sign * x)) * jax.nn.log_sigmoid(sign * x)
    counted = jnp.maximum(is_real.sum(pixels, dtype=jnp.float32), 1)
    focal_BM = jnp.where(is_real, focal, 0).sum(pixels) / counted
    share = jnp.where(is_real, jax.nn.sigmoid(x), 0)
    both = jnp.where(is_object, share, 0).sum(pixels)
    dice_BM = 1 - (2 * both + 1) / (share.sum(pixels) + is_object.sum(pixels, dtype=jnp.float32) + 1)
    found = (x > 0) & is_real
    shared, either = (each.sum(pixels, dtype=jnp.float32) for each in (found & is_object, found | is_object))
    return FOCAL * focal_BM + dice_BM, shared / jnp.maximum(either, 1)


def _holds_object(batch: Batch) -> jax.Array:
    return (batch["object"] >= 0).any((1, 2))


def _objects(batch: Batch) -> jax.Array:
    return _holds_object(batch).sum(dtype=jnp.float32)


def _object_inputs(shape: Shape) -> dict[str, Input]:
    """object [B, T, 16]: 1 for pixels of the object, 0 for others, and -1 for pixels that are not of the image."""
    return {"object": Input((shape.batch, shape.seq, PARTS**2), "float32", "drawn: batch seq pixels")}


MASKS = mean_objective(_object_inputs, _sums_of_masks, _objects, "objects", {"loss": "loss", "iou": "iou"})
FAMILY = dataclasses.replace(
    vit.FAMILY,
    module=Masker,
    fits=lambda cfg: cfg.masks,
    objective=lambda config: MASKS,
    inputs=_inputs,
    untrained_inputs=lambda cfg: {"prompt_mask": Input((1, cfg.context, PARTS**2), "float32", DRAWN)},
)
