"""BEiT."""

from typing import Any

from gspmd_lm import config
from gspmd_lm.convert.config_reader import ConfigReader
from gspmd_lm.convert.families.bert import Classes
from gspmd_lm.convert.families.vit import IMAGE_FIELDS, ImagePatches, image_tensors
from gspmd_lm.convert.family import Family
from gspmd_lm.convert.fields import Given, Renamed, Values

_NO_POSITIONS = "has two kinds of biases by distance, which is not supported"


class BeitPositions:
    """BEiT's positions: a position table, relative position biases of each layer or of all layers, or none."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        learned = reader.flag("use_absolute_position_embeddings", False)
        own = reader.flag("use_relative_position_bias", False)
        shared = reader.flag("use_shared_relative_position_bias", False)
        if own and shared:
            reader.refuse("use_shared_relative_position_bias", shared, _NO_POSITIONS)
        values["positions"] = "learned" if learned else "none"
        if own or shared:
            side = values["patches"]["image"] // values["patches"]["size"]
            relative = {"side": side, "ranges": (2 * side - 1) ** 2 + 3, "shared": shared}
            values["attention.relative_positions"] = relative

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        relative = model.attention.relative_positions
        return {
            "use_absolute_position_embeddings": model.positions == "learned",
            "use_relative_position_bias": relative is not None and not relative.shared,
            "use_shared_relative_position_bias": relative is not None and relative.shared,
        }


class BeitPooling:
    """Where BEiT reads the class: at the mean of the patches, which has a norm, or at the first row of normed ones."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        mean = reader.flag("use_mean_pooling", True)
        values["norm.final"] = not mean
        values["patches"]["pool"] = "mean" if mean else "first"

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        return {"use_mean_pooling": not model.norm.final}


_BEIT = (
    *(*IMAGE_FIELDS, ImagePatches("none"), BeitPositions(), BeitPooling(), Classes()),
    Given({"attention.qkv_bias": True, "attention.key_bias": False}),
    Renamed("layer_scale_init_value", "residual.layer_scale", 0.1, may_be_zero=True),
)
# Tensors of pretraining, and numbers that follow from the sizes.
IMAGE_UNUSED = (r"embeddings\.mask_token$", r"relative_position_index$")
# Fields of training in transformers, and of other heads.
OTHER_USES = ("drop_path_rate", "out_features", "out_indices", "_out_features", "_out_indices", "stage_names")
_UNREAD = (
    *OTHER_USES, "use_mask_token", "vocab_size", "add_fpn", "auxiliary_channels", "auxiliary_concat_input",
    "auxiliary_loss_weight", "auxiliary_num_convs", "pool_scales", "reshape_hidden_states",
    "semantic_loss_ignore_index", "use_auxiliary_head",
)  # fmt: skip
FAMILIES = (
    Family(
        "BEiT",
        "beit",
        "BeitForImageClassification",
        _BEIT,
        image_tensors("beit.", "classifier"),
        prefix="beit.",
        no_weights=IMAGE_UNUSED,
        irrelevant=_UNREAD,
        heads=(r"^(beit\.)?pooler\.layernorm\.", r"^classifier\."),
    ),
)
