"""The families that see images: ViT, DeiT, BEiT and Swin, with a head of classes."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gspmd_lm import config
from gspmd_lm.config import paths
from gspmd_lm.config.masks import PARTS
from gspmd_lm.convert.config_reader import ConfigReader
from gspmd_lm.convert.encoder_families import Classes
from gspmd_lm.convert.family import PLAIN_LAYERNORM, Family, head_dim, heads
from gspmd_lm.convert.fields import MOST_LAYERS, Activation, Constant, FieldCodec, Fixed, Flag, Renamed, Values
from gspmd_lm.convert.layout import LEVEL, Tensor
from gspmd_lm.convert.names import QUERY_KEY_VALUE, linear, norm, separate_qkv
from gspmd_lm.convert.strict_json import parse_object, shown
from gspmd_lm.errors import InputError

_BIAS = "relative_position_bias.relative_position_bias_table"
PREPROCESSOR = "preprocessor_config.json"
_RESAMPLE = {2: "bilinear", 3: "bicubic"}  # Pillow's numbers
_ROWS_DIVIDE_BY = 8
MOST_LEVELS = 8  # a limit: published models have four


_NO_POSITIONS = "has two kinds of biases by distance, which is not supported"


@dataclasses.dataclass(frozen=True)
class BeitPositions:
    """BEiT's positions: a table of rows, biases by distance of each layer or of all layers, or none."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        learned = reader.flag(["use_absolute_position_embeddings"], False)
        own = reader.flag(["use_relative_position_bias"], False)
        shared = reader.flag(["use_shared_relative_position_bias"], False)
        if own and shared:
            reader.refuse("use_shared_relative_position_bias", shared, _NO_POSITIONS)
        values["positions"] = "learned" if learned else "none"
        if own or shared:
            side = values["patches"]["image"] // values["patches"]["size"]
            relative = {"side": side, "ranges": (2 * side - 1) ** 2 + 3, "shared": shared}
            values["relative_positions"] = relative

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        relative = model.relative_positions
        return {
            "use_absolute_position_embeddings": model.positions == "learned",
            "use_relative_position_bias": relative is not None and not relative.shared,
            "use_shared_relative_position_bias": relative is not None and relative.shared,
        }


@dataclasses.dataclass(frozen=True)
class BeitPooling:
    """Where BEiT reads the class: at the mean of the patches, which has a norm, or at the first row of normed ones."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        mean = reader.flag(["use_mean_pooling"], True)
        values["final_norm"] = not mean
        values["patches"]["pool"] = "mean" if mean else "first"

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        return {"use_mean_pooling": not model.final_norm}


@dataclasses.dataclass(frozen=True)
class ImagePatches:
    """The sizes of an image and of its patches, from which the rows of an image follow."""

    distillation: str
    part: str = ""  # of config.json, with a dot behind it
    size: int = 16  # of a patch, where no field says it
    class_row: bool = True
    image: int = 224  # pixels on a side of an image, where no field says it

    def read(self, reader: ConfigReader, values: Values) -> None:
        sides = (f"{self.part}image_size", self.image), (f"{self.part}patch_size", self.size)
        image, size = (self._side(reader, *side) for side in sides)
        channels = reader.whole([f"{self.part}num_channels"], 3, 1)
        if image % size:
            reader.refuse(sides[0][0], image, f"is not a multiple of patch_size: {size}")
            image = size
        values["patches"] = {"image": image, "size": size, "channels": channels, "distillation": self.distillation}
        values |= {"vocab": 0, "context": self.class_row + (self.distillation != "none") + (image // size) ** 2}
        if not self.class_row:
            values["patches"] |= {"class_row": False, "pool": "mean"}

    def _side(self, reader: ConfigReader, name: str, default: int) -> int:
        side = reader.get([name], default)
        if isinstance(side, list) and len(side) == 2 and side[0] == side[1]:
            side = side[0]
        if type(side) is int and 0 < side < 2**16:
            return side
        reader.refuse(name, side, "must be a whole number above zero, the pixels of both sides of a square")
        return default

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        if not (patches := model.patches):
            return {}
        fields = {"image_size": patches.image, "patch_size": patches.size, "num_channels": patches.channels}
        return {f"{self.part}{name}": value for name, value in fields.items()}


@dataclasses.dataclass(frozen=True)
class Dinov2Sizes:
    """The hidden width as a multiple of the width, and that both the first row and the mean of patches are read.

    A token that stands for hidden patches is not read, and what is written has none.
    """

    def read(self, reader: ConfigReader, values: Values) -> None:
        reader.flag(["use_mask_token"], True)
        mlp = reader.number(["mlp_ratio"], 4) * values["embed"]
        if mlp != int(mlp):
            reader.refuse("mlp_ratio", mlp / values["embed"], f"times hidden_size: {values['embed']} is not whole")
        values["mlp"] = int(mlp)
        values["patches"]["pool"] = "both"

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        ratio = model.mlp / model.embed
        return {"mlp_ratio": int(ratio) if ratio == int(ratio) else ratio, "use_mask_token": False}


@dataclasses.dataclass(frozen=True)
class SwinLevels:
    """Swin's windows, and the sizes of its levels, each of which is twice as wide as the level before."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        embed, size = reader.whole(["embed_dim"], 96, 1), reader.whole(["window_size"], 7, 2)
        ratio, side = reader.number(["mlp_ratio"], 4.0), values["patches"]["image"] // values["patches"]["size"]
        layers = self._numbers(reader, ["depths"], [2, 2, 6, 2])
        heads = self._numbers(reader, ["num_heads", "num_attention_heads"], [3, 6, 12, 24])
        widths, head_dim = [embed * 2**number for number in range(len(layers))], embed // heads[0]
        if [head_dim * count for count in heads] != widths:
            reader.refuse("num_heads", heads, f"does not give heads of one size to levels of the widths {widths}")
            return
        if any(side / 2**number % size for number in range(len(layers))):
            why = (
                f"does not divide the {side} patches on a side in each of {len(layers)} levels, which is not supported"
            )
            reader.refuse("window_size", size, why)
            return
        first, *rest = [
            {"layers": depth, "embed": width, "heads": count, "mlp": int(ratio * width)}
            for depth, width, count in zip(layers, widths, heads, strict=True)
        ]
        values |= first | {"kv_heads": heads[0], "head_dim": head_dim, "row_multiple": _ROWS_DIVIDE_BY}
        values |= {"layer_pattern": ["full", "shifted"], "windows": {"size": size, "shift": size // 2, "levels": rest}}
        ranges = (2 * size - 1) ** 2
        values["relative_positions"] = {"side": size, "ranges": ranges, "shared": False, "learned_row": False}

    def _numbers(self, reader: ConfigReader, names: Sequence[str], default: list[int]) -> list[int]:
        numbers = reader.get(names, default)
        whole = isinstance(numbers, list) and all(type(one) is int and 0 < one <= MOST_LAYERS for one in numbers)
        if whole and 0 < len(numbers) <= MOST_LEVELS:
            return numbers
        reader.refuse(names[0], numbers, f"must be a list of up to {MOST_LEVELS} whole numbers above zero")
        return default

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        if not model.windows:
            return {}
        levels = config.levels(model)
        return {
            "embed_dim": model.embed, "window_size": model.windows.size, "depths": [level.layers for level in levels],
            "num_heads": [level.heads for level in levels], "mlp_ratio": model.mlp / model.embed,
        }  # fmt: skip


def padded_rows(context: int) -> int:
    """data.seq of the rows of an image: with padding, so that a split sequence divides."""
    return config.padded_rows(context, _ROWS_DIVIDE_BY)


def preprocessing(folder: Path) -> dict[str, Any]:
    """The section data.images, as the folder's preprocessor_config.json says it; {} without such a file.

    Raises InputError for preparations that are not supported.
    """
    path = folder / PREPROCESSOR
    if not path.is_file():
        return {}
    raw, wrong = parse_object(paths.read_text(path), path), []
    found: dict[str, Any] = {}
    if raw.get("do_resize", True) and "size" in raw:
        kind = raw.get("image_processor_type", raw.get("feature_extractor_type"))
        longest = raw["size"].get("longest_edge") if isinstance(raw["size"], dict) else None
        if longest and raw.get("do_pad") and raw.get("pad_size") == {"height": longest, "width": longest}:
            found["pad"] = True
        else:
            found |= _resized(raw["size"], str(kind).startswith("CLIP"), wrong)
    resample = raw.get("resample", 2)
    if isinstance(resample, int) and resample in _RESAMPLE:
        found["resample"] = _RESAMPLE[resample]
    else:
        wrong.append(f"resample: {shown(resample)} is not 2 (bilinear) or 3 (bicubic)")
    normalised = raw.get("do_normalize", True)
    for name, ours, plain in (("image_mean", "mean", 0.0), ("image_std", "std", 1.0)):
        numbers = raw.get(name, [0.5]) if normalised else [plain]
        if isinstance(numbers, list) and numbers and all(isinstance(one, int | float) for one in numbers):
            found[ours] = [float(one) for one in numbers]
        else:
            wrong.append(f"{name}: {shown(numbers)} is not a list of numbers")
    factor = raw.get("rescale_factor", 1 / 255)
    if not raw.get("do_rescale", True) or not isinstance(factor, float) or abs(factor * 255 - 1) > 1e-6:
        wrong.append(f"rescale_factor: {shown(factor)} does not bring pixels to 0 to 1")
    if wrong:
        lines = "\n".join(f"  {line}" for line in wrong)
        raise InputError(f"{path}: preparations of images that are not supported\n{lines}\n"
                         "  fix   take the file out of a copy of the folder, and set data.images")  # fmt: skip
    return found


def _resized(size: Any, keeps_ratio: bool, wrong: list[str]) -> dict[str, Any]:
    """The settings of a field size. keeps_ratio: whether a number alone is the shorter side, and not both sides."""
    if isinstance(size, int):
        size = {"shortest_edge": size} if keeps_ratio else {"height": size, "width": size}
    sides = [*size.values()] if isinstance(size, dict) else []
    if sides and {*size} == {"shortest_edge"} and isinstance(sides[0], int):
        return {"resize": sides[0], "keep_ratio": True}
    if sides and {*size} == {"height", "width"} and isinstance(sides[0], int) and sides[0] == sides[1]:
        return {"resize": sides[0]}
    wrong.append(f"size: {shown(size)} is neither the height and width of a square nor a shortest_edge")
    return {}


def preprocessor(patches: config.Patches, prepared: config.Images) -> dict[str, bytes]:
    """The preprocessor_config.json with which transformers prepares images as training did: name -> content."""
    side, cut = prepared.resize or patches.image, prepared.keep_ratio or prepared.resize > patches.image
    kind = "Sam" if prepared.pad else "CLIP" if prepared.keep_ratio else "DeiT" if cut else "ViT"
    fields = {
        "image_processor_type": f"{kind}ImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": side} if prepared.keep_ratio else {"height": side, "width": side},
        "resample": {name: number for number, name in _RESAMPLE.items()}[prepared.resample],
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [*prepared.mean] * (patches.channels // len(prepared.mean)),
        "image_std": [*prepared.std] * (patches.channels // len(prepared.std)),
    }
    if prepared.keep_ratio:  # otherwise CLIP's processor makes colours of grey
        fields["do_convert_rgb"] = patches.channels == 3
    if prepared.pad:
        fine = PARTS * patches.side
        fields |= {"size": {"longest_edge": side}, "do_pad": True, "pad_size": {"height": side, "width": side},
                   "do_convert_rgb": patches.channels == 3, "mask_size": {"longest_edge": fine},
                   "mask_pad_size": {"height": fine, "width": fine}}  # fmt: skip
    if cut:
        fields |= {"do_center_crop": True, "crop_size": {"height": patches.image, "width": patches.image}}
    return {PREPROCESSOR: (json.dumps(fields, indent=2) + "\n").encode()}


def _codecs(distillation: str) -> tuple[FieldCodec, ...]:
    return (
        Renamed("hidden_size", "embed", 768), Renamed("num_hidden_layers", "layers", 12, most=MOST_LAYERS),
        Renamed("num_attention_heads", "heads", 12), Renamed("intermediate_size", "mlp", 3072), *PLAIN_LAYERNORM,
        Constant("kv_heads", heads), Constant("head_dim", head_dim), Renamed("layer_norm_eps", "norm_eps", 1e-12),
        Activation("hidden_act", "gelu", {"gelu_tanh": "gelu_new"}), ImagePatches(distillation),
        Constant("mask", "full"), Constant("positions", "learned"), Flag("qkv_bias", ("qkv_bias",), True),
        Constant("attention_out_bias", True), Constant("mlp_bias", True), Classes(),
    )  # fmt: skip


_BEIT = (
    *(codec for codec in _codecs("none") if getattr(codec, "setting", "") != "positions"
      and getattr(codec, "name", "") != "qkv_bias"),
    BeitPositions(), BeitPooling(), Constant("qkv_bias", True), Constant("key_bias", False),
    Renamed("layer_scale_init_value", "layer_scale", 0.1, may_be_zero=True),
)  # fmt: skip


def _tensors(base: str, *classifiers: str) -> tuple[Tensor, ...]:
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
        *linear(f"{layer}.intermediate.dense", "F D", "mlp.w_up"),
        *linear(f"{layer}.output.dense", "D F", "mlp.w_down"),
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


_SWIN = (
    ImagePatches("none", size=4, class_row=False), SwinLevels(), *PLAIN_LAYERNORM, Constant("norm_eps", 1e-5),
    Fixed("layer_norm_eps", 1e-5, "is not the 1e-05 that the norms of patches have"),
    Activation("hidden_act", "gelu", {"gelu_tanh": "gelu_new"}), Constant("mask", "full"),
    Constant("positions", "none"),
    Fixed("use_absolute_embeddings", False, "adds a table of positions to the patches, which is not supported"),
    Flag("qkv_bias", ("qkv_bias",), True), Constant("attention_out_bias", True), Constant("mlp_bias", True),
    Constant("embedding_norm", True), Classes(),
)  # fmt: skip


_DINOV2 = (
    *(codec for codec in _codecs("none") if getattr(codec, "setting", "") not in ("mlp", "norm_eps")), Dinov2Sizes(),
    Renamed("layer_norm_eps", "norm_eps", 1e-6), Renamed("layerscale_value", "layer_scale", 1.0),
    Fixed("use_swiglu_ffn", False, "is a gated feed-forward network, which is not supported"),
)  # fmt: skip


def _dinov2_tensors() -> tuple[Tensor, ...]:
    layer, embeddings = "dinov2.encoder.layer.{}", "dinov2.embeddings"
    return (
        Tensor(f"{embeddings}.cls_token", "1 1 D", ("class_row",)),
        Tensor(f"{embeddings}.position_embeddings", "1 p D", ("position_embedding",)),
        *linear(f"{embeddings}.patch_embeddings.projection", "D x", "stem", biases=("stem_bias",)),
        *norm(f"{layer}.norm1", "attention_norm", bias=True),
        *separate_qkv(f"{layer}.attention.attention", QUERY_KEY_VALUE),
        *linear(f"{layer}.attention.output.dense", "D (N H)", "attention.wo"),
        Tensor(f"{layer}.layer_scale1.lambda1", "D", ("attention_layer_scale",)),
        *norm(f"{layer}.norm2", "mlp_norm", bias=True),
        *linear(f"{layer}.mlp.fc1", "F D", "mlp.w_up"),
        *linear(f"{layer}.mlp.fc2", "D F", "mlp.w_down"),
        Tensor(f"{layer}.layer_scale2.lambda1", "D", ("mlp_layer_scale",)),
        *norm("dinov2.layernorm", "final_norm", bias=True),
        *linear(
            "classifier", "c O", "classifier", biases=("classifier_bias",), others=lambda model: {"O": 2 * model.embed}
        ),
    )


def _of_level(number: int) -> tuple[Tensor, ...]:
    """The tensors of one level of Swin."""
    stage, ours = f"swin.encoder.layers.{number}", f"{LEVEL}{number}."
    layer, attention = f"{stage}.blocks.{{}}", f"{stage}.blocks.{{}}.attention"
    merge = f"swin.encoder.layers.{number - 1}.downsample"
    merged: Any = {"others": lambda level: dict.fromkeys("DO", 2 * level.embed)}
    return tuple(
        dataclasses.replace(tensor, is_of=lambda model: len(config.levels(model)) > number)
        for tensor in (
            *norm(f"{layer}.layernorm_before", f"{ours}attention_norm", bias=True),
            *separate_qkv(f"{attention}.self", QUERY_KEY_VALUE, f"{ours}attention"),
            *linear(f"{attention}.output.dense", "D (N H)", f"{ours}attention.wo"),
            Tensor(f"{attention}.self.relative_position_bias_table", "r N", (f"{ours}attention.relative_bias",)),
            *norm(f"{layer}.layernorm_after", f"{ours}mlp_norm", bias=True),
            *linear(f"{layer}.intermediate.dense", "F D", f"{ours}mlp.w_up"),
            *linear(f"{layer}.output.dense", "D F", f"{ours}mlp.w_down"),
            *norm(f"{merge}.norm", f"{ours}merge_norm", bias=True, axis="O", **merged),
            Tensor(f"{merge}.reduction.weight", "D O", (f"{ours}merge",), others=lambda level: {"O": 2 * level.embed}),
            *norm("swin.layernorm", f"{ours}final_norm", bias=True),
        )
    )


_SWIN_TENSORS = (
    *linear("swin.embeddings.patch_embeddings.projection", "D x", "stem", biases=("stem_bias",)),
    *norm("swin.embeddings.norm", "embedding_norm", bias=True),
    *(tensor for number in range(MOST_LEVELS) for tensor in _of_level(number)),
    *linear("classifier", "c D", "classifier", biases=("classifier_bias",),
            others=lambda model: {"D": config.levels(model)[-1].embed}),
)  # fmt: skip
# Tensors of pretraining, and numbers that follow from the sizes.
_BEIT_UNUSED = (r"embeddings\.mask_token$", r"relative_position_index$")
# Fields of training in transformers, and of other heads.
_BEIT_IRRELEVANT = (
    "use_mask_token", "vocab_size", "drop_path_rate", "add_fpn", "auxiliary_channels", "auxiliary_concat_input",
    "auxiliary_loss_weight", "auxiliary_num_convs", "out_features", "out_indices", "_out_features",
    "_out_indices", "stage_names", "pool_scales",
    "reshape_hidden_states", "semantic_loss_ignore_index", "use_auxiliary_head",
)  # fmt: skip
# Fields of training, of other heads, and those that repeat sizes.
_SWIN_IRRELEVANT = (
    "drop_path_rate", "encoder_stride", "out_features", "out_indices", "_out_features", "_out_indices", "stage_names",
    "hidden_size", "num_layers", "num_hidden_layers", "path_norm",
)  # fmt: skip
# Fields of training, and of other heads.
_DINOV2_IRRELEVANT = (
    "drop_path_rate", "apply_layernorm", "reshape_hidden_states", "out_features", "out_indices",
    "_out_features", "_out_indices", "stage_names",
)  # fmt: skip
# Fields of an unused head, and of pictures that a decoder draws.
_IRRELEVANT = ("encoder_stride", "pooler_act", "pooler_output_size")
_HEADS = (r"^(vit\.|deit\.)?pooler\.", r"^(cls_|distillation_)?classifier\.")
_TEACHER = "DeiTForImageClassificationWithTeacher"
IMAGE_FAMILIES: tuple[Family, ...] = (
    Family(
        "ViT", "vit", "ViTForImageClassification", "vit.", _codecs("none"), _tensors("vit.", "classifier"),
        irrelevant=_IRRELEVANT, heads=_HEADS,
    ),
    Family(
        "BEiT", "beit", "BeitForImageClassification", "beit.", _BEIT, _tensors("beit.", "classifier"),
        no_weights=_BEIT_UNUSED, irrelevant=_BEIT_IRRELEVANT,
        heads=(r"^(beit\.)?pooler\.layernorm\.", r"^classifier\."),
    ),
    Family(
        "DINOv2", "dinov2", "Dinov2ForImageClassification", "dinov2.", _DINOV2, _dinov2_tensors(),
        no_weights=(r"embeddings\.mask_token$",), irrelevant=_DINOV2_IRRELEVANT, heads=(r"^classifier\.",),
    ),
    Family(
        "Swin", "swin", "SwinForImageClassification", "swin.", _SWIN, _SWIN_TENSORS, no_weights=_BEIT_UNUSED,
        irrelevant=_SWIN_IRRELEVANT, heads=(r"^classifier\.", r"^decoder\."),
    ),
    Family(
        "DeiT", "deit", "DeiTForImageClassification", "deit.", _codecs("row"), _tensors("deit.", "classifier"),
        irrelevant=_IRRELEVANT, heads=_HEADS,
    ),
    Family(
        "DeiT", "deit", _TEACHER, "deit.", _codecs("head"),
        _tensors("deit.", "cls_classifier", "distillation_classifier"), irrelevant=_IRRELEVANT, heads=_HEADS,
    ),
)  # fmt: skip
