"""DINOv2: a ViT whose classes are read at the first row and at the mean of patches together."""

import dataclasses
from typing import Any

from gspmd_lm import config
from gspmd_lm.convert.config_reader import ConfigReader
from gspmd_lm.convert.families.bert import Classes
from gspmd_lm.convert.families.vit import ImagePatches, mlp_ratio
from gspmd_lm.convert.family import GELU, ONE_WIDTH, PLAIN_LAYERNORM, Family
from gspmd_lm.convert.fields import MOST_LAYERS, Fixed, Flag, Given, Renamed, Values
from gspmd_lm.convert.layout import QUERY_KEY_VALUE, Tensor, linear, norm, separate_qkv


@dataclasses.dataclass(frozen=True)
class Dinov2Sizes:
    """The hidden width as a multiple of the width, and that both the first row and the mean of patches are read.

    A token that stands for hidden patches is not read, and what is written has none.
    """

    def read(self, reader: ConfigReader, values: Values) -> None:
        reader.flag(["use_mask_token"], True)
        values["mlp"] = int(reader.number(["mlp_ratio"], 4) * values["embed"])
        values["patches"]["pool"] = "both"

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        ratio = mlp_ratio(model)
        return {"mlp_ratio": int(ratio) if ratio == int(ratio) else ratio, "use_mask_token": False}


_LAYER, _EMBEDDINGS = "dinov2.encoder.layer.{}", "dinov2.embeddings"
_FIELDS = (
    *(Renamed("hidden_size", "embed", 768), Renamed("num_hidden_layers", "layers", 12, most=MOST_LAYERS)),
    *(Renamed("num_attention_heads", "heads", 12), PLAIN_LAYERNORM, ONE_WIDTH, GELU),
    Given({"attention.mask": "full", "attention.out_bias": True, "feed_forward.bias": True, "positions": "learned"}),
    *(Flag("qkv_bias", ("attention.qkv_bias",), True), ImagePatches("none", size=14), Classes(), Dinov2Sizes()),
    *(Renamed("layer_norm_eps", "norm.eps", 1e-6), Renamed("layerscale_value", "residual.layer_scale", 1.0)),
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
    *linear(f"{_LAYER}.mlp.fc1", "F D", "mlp.w_up"),
    *linear(f"{_LAYER}.mlp.fc2", "D F", "mlp.w_down"),
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
        irrelevant=(  # fields of training, and of other heads
            *("drop_path_rate", "apply_layernorm", "reshape_hidden_states", "out_features", "out_indices"),
            *("_out_features", "_out_indices", "stage_names"),
        ),
        heads=(r"^classifier\.",),
    ),
)
