"""ViT and DeiT, and the fields that all families of images share."""

import dataclasses
import math
from typing import Any

from gspmd_lm import config
from gspmd_lm.convert.config_reader import ConfigReader
from gspmd_lm.convert.families.bert import Classes
from gspmd_lm.convert.family import GELU, ONE_WIDTH, PLAIN_LAYERNORM, Family
from gspmd_lm.convert.fields import MOST_LAYERS, FieldCodec, Flag, Given, Renamed, Values
from gspmd_lm.convert.layout import QUERY_KEY_VALUE, Tensor, linear, norm, plain_mlp, separate_qkv


@dataclasses.dataclass(frozen=True)
class ImagePatches:
    """The sizes of an image and of its patches, from which the rows of an image follow."""

    distillation: str
    size: int = 16  # of a patch, where no field says it
    class_row: bool = True
    image: int = 224  # pixels on a side of an image, where no field says it

    def read(self, reader: ConfigReader, values: Values) -> None:
        image, size = self._side(reader, "image_size", self.image), self._side(reader, "patch_size", self.size)
        channels = reader.whole("num_channels", 3, 1)
        if image % size:
            reader.refuse("image_size", image, f"is not a multiple of patch_size: {size}")
            image = size
        values["patches"] = {"image": image, "size": size, "channels": channels, "distillation": self.distillation}
        values |= {"vocab": 0, "context": self.class_row + (self.distillation != "none") + (image // size) ** 2}
        if not self.class_row:
            values["patches"] |= {"class_row": False, "pool": "mean"}

    def _side(self, reader: ConfigReader, name: str, default: int) -> int:
        side = reader.get(name, default)
        if isinstance(side, list) and len(side) == 2 and side[0] == side[1]:
            side = side[0]
        if type(side) is int and 0 < side < 2**16:
            return side
        reader.refuse(name, side, "must be a whole number above zero, the pixels of both sides of a square")
        return default

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        if not (patches := model.patches):
            return {}
        return {"image_size": patches.image, "patch_size": patches.size, "num_channels": patches.channels}


def mlp_ratio(model: config.ModelConfig) -> float:
    """The field mlp_ratio, of which transformers takes the whole part of its product with the width."""
    ratio = model.mlp / model.embed
    return ratio if int(ratio * model.embed) == model.mlp else math.nextafter(ratio, math.inf)


def stack_sizes(embed: int = 768, heads: int = 12, layers: int = 12, eps: float = 1e-12) -> tuple[FieldCodec, ...]:
    """The sizes of a stack of blocks, with defaults, besides that of its feed-forward network."""
    return (
        Renamed("hidden_size", "embed", embed),
        Renamed("num_hidden_layers", "layers", layers, most=MOST_LAYERS),
        Renamed("num_attention_heads", "heads", heads),
        ONE_WIDTH,
        Renamed("layer_norm_eps", "norm.eps", eps),
    )


SEES_ALL = Given({"attention.mask": "full", "attention.out_bias": True, "feed_forward.bias": True})
IMAGE_FIELDS = (*stack_sizes(), Renamed("intermediate_size", "mlp", 3072), PLAIN_LAYERNORM, GELU, SEES_ALL)
_LEARNED = (*IMAGE_FIELDS, Given({"positions": "learned"}), Flag("qkv_bias", ("attention.qkv_bias",), True))
_BIAS = "relative_position_bias.relative_position_bias_table"


def image_tensors(base: str, *classifiers: str) -> tuple[Tensor, ...]:
    layer, embeddings = f"{base}encoder.layer.{{}}", f"{base}embeddings"
    attention = f"{layer}.attention.attention"
    ours = ("classifier", "distillation_classifier")
    return (
        Tensor(f"{embeddings}.cls_token", "1 1 D", ("class_row",)),
        Tensor(f"{embeddings}.distillation_token", "1 1 D", ("distillation_row",)),
        Tensor(f"{embeddings}.position_embeddings", "1 p D", ("position_embedding",)),
        *linear(f"{embeddings}.patch_embeddings.projection", "D x", "stem", biases=("stem_bias",)),
        *norm(f"{layer}.layernorm_before", "attention_norm", bias=True),
        *separate_qkv(attention, QUERY_KEY_VALUE),
        *linear(f"{layer}.attention.output.dense", "D (N H)", "attention.wo"),
        *norm(f"{layer}.layernorm_after", "mlp_norm", bias=True),
        *plain_mlp(layer, "intermediate.dense", "output.dense"),
        Tensor(f"{layer}.lambda_1", "D", ("attention_layer_scale",)),
        Tensor(f"{layer}.lambda_2", "D", ("mlp_layer_scale",)),
        Tensor(f"{attention}.{_BIAS}", "r N", ("attention.relative_bias",)),
        Tensor(f"{base}encoder.{_BIAS}", "r N", ("relative_bias",)),
        *norm(f"{base}layernorm", "final_norm", bias=True),
        *norm(f"{base}pooler.layernorm", "pooled_norm", bias=True),
        *(
            tensor
            for theirs, name in zip(classifiers, ours, strict=False)
            for tensor in linear(theirs, "c D", name, biases=(f"{name}_bias",))
        ),
    )


def _fields(distillation: str) -> tuple[FieldCodec, ...]:
    return (*_LEARNED, ImagePatches(distillation), Classes())


VIT = Family(
    "ViT",
    "vit",
    "ViTForImageClassification",
    _fields("none"),
    image_tensors("vit.", "classifier"),
    prefix="vit.",
    # Fields of an unused head, and of pictures that a decoder draws.
    irrelevant=("encoder_stride", "pooler_act", "pooler_output_size"),
    heads=(r"^(vit\.|deit\.)?pooler\.", r"^(cls_|distillation_)?classifier\."),
)
DEIT = VIT.relative(
    "DeiT", "deit", "DeiTForImageClassification", _fields("row"), image_tensors("deit.", "classifier"), prefix="deit."
)
FAMILIES = (
    VIT,
    DEIT,
    DEIT.relative(
        "DeiT",
        "deit",
        "DeiTForImageClassificationWithTeacher",
        _fields("head"),
        image_tensors("deit.", "cls_classifier", "distillation_classifier"),
    ),
)
