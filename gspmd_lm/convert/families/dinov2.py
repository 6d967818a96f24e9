"""DINOv2: a ViT whose classes are read at the first row and at the mean of patches together."""

from typing import Any

from gspmd_lm import config
from gspmd_lm.convert.config_reader import ConfigReader
from gspmd_lm.convert.families.beit import OTHER_USES
from gspmd_lm.convert.families.bert import Classes
from gspmd_lm.convert.families.vit import SEES_ALL, ImagePatches, mlp_ratio, stack_sizes
from gspmd_lm.convert.family import GELU, PLAIN_LAYERNORM, Family
from gspmd_lm.convert.fields import Fixed, Flag, Given, Renamed, Values
from gspmd_lm.convert.layout import QUERY_KEY_VALUE, Tensor, linear, norm, plain_mlp, separate_qkv


class Dinov2Sizes:
    """The hidden width as a multiple of the width, and that both the first row and the mean of patches are read.

    A token that stands for hidden patches is not read, and what is written has none.
    """

    def read(self, reader: ConfigReader, values: Values) -> None:
        reader.flag("use_mask_token", True)
        values["mlp"] = int(reader.number("mlp_ratio", 4) * values["embed"])
        values["patches"]["pool"] = "both"

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        ratio = mlp_ratio(model)
        return {"mlp_ratio": int(ratio) if ratio == int(ratio) else ratio, "use_mask_token": False}


_LAYER, _EMBEDDINGS = "dinov2.encoder.layer.{}", "dinov2.embeddings"
_FIELDS = (
    *(*stack_sizes(eps=1e-6), PLAIN_LAYERNORM, GELU, SEES_ALL, Given({"positions": "learned"})),
    *(Flag("qkv_bias", ("attention.qkv_bias",), True), ImagePatches("none", size=14), Classes(), Dinov2Sizes()),
    Renamed("layerscale_value", "residual.layer_scale", 1.0),
    Fixed("use_swiglu_ffn", False, "is a gated feed-forward network, which is not supported"),
)
_TENSORS = (
    Tensor(f"{_EMBEDDINGS}.cls_token", "1 1 D", ("class_row",)),
    Tensor(f"{_EMBEDDINGS}.position_embeddings", "1 p D", ("position_embedding",)),
    *linear(f"{_EMBEDDINGS}.patch_embeddings.projection", "D x", "stem", biases=("stem_bias",)),
    *norm(f"{_LAYER}.norm1", "attention_norm", bias=True),
    *separate_qkv(f"{_LAYER}.attention.attention", QUERY_KEY_VALUE),
    *linear(f"{_LAYER}.attention.output.dense", "D (N H)", "attention.wo"),
    Tensor(f"{_LAYER}.layer_scale1.lambda1", "D", ("attention_layer_scale",)),
    *norm(f"{_LAYER}.norm2", "mlp_norm", bias=True),
    *plain_mlp(f"{_LAYER}.mlp", "fc1", "fc2"),
    Tensor(f"{_LAYER}.layer_scale2.lambda1", "D", ("mlp_layer_scale",)),
    *norm("dinov2.layernorm", "final_norm", bias=True),
    *linear(
        "classifier", "c O", "classifier", biases=("classifier_bias",), others=lambda model: {"O": 2 * model.embed}
    ),
)
FAMILIES = (
    Family(
        "DINOv2",
        "dinov2",
        "Dinov2ForImageClassification",
        _FIELDS,
        _TENSORS,
        prefix="dinov2.",
        no_weights=(r"embeddings\.mask_token$",),
        irrelevant=(*OTHER_USES, "apply_layernorm", "reshape_hidden_states"),
        heads=(r"^classifier\.",),
    ),
)
