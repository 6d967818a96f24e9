"""Swin: windows that are shifted in turns, and levels of which each is twice as wide as the one before."""

import dataclasses
from typing import Any

from gspmd_lm import config
from gspmd_lm.convert.config_reader import ConfigReader
from gspmd_lm.convert.families.beit import IMAGE_UNUSED, OTHER_USES
from gspmd_lm.convert.families.bert import Classes
from gspmd_lm.convert.families.vit import SEES_ALL, ImagePatches, mlp_ratio
from gspmd_lm.convert.family import GELU, PLAIN_LAYERNORM, Family
from gspmd_lm.convert.fields import MOST_LAYERS, Fixed, Flag, Given, Values
from gspmd_lm.convert.images import ROWS_DIVIDE_BY
from gspmd_lm.convert.layout import QUERY_KEY_VALUE, Tensor, linear, norm, plain_mlp, separate_qkv
from gspmd_lm.model.addresses import level_name

MOST_LEVELS = 8  # a limit: published models have four


class SwinLevels:
    """Swin's windows, and the sizes of its levels, each of which is twice as wide as the level before."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        embed, size = reader.whole("embed_dim", 96, 1), reader.whole("window_size", 7, 2)
        ratio, side = reader.number("mlp_ratio", 4.0), values["patches"]["image"] // values["patches"]["size"]
        layers = self._numbers(reader, "depths", [2, 2, 6, 2])
        heads = self._numbers(reader, "num_heads num_attention_heads", [3, 6, 12, 24])
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
        values |= first | {"kv_heads": heads[0], "head_dim": head_dim, "row_multiple": ROWS_DIVIDE_BY}
        values |= {"layer_pattern": ["full", "shifted"], "windows": {"size": size, "shift": size // 2, "levels": rest}}
        ranges = (2 * size - 1) ** 2
        values["attention.relative_positions"] = {"side": size, "ranges": ranges, "shared": False, "learned_row": False}

    def _numbers(self, reader: ConfigReader, names: str, default: list[int]) -> list[int]:
        numbers = reader.get(names, default)
        whole = isinstance(numbers, list) and all(type(one) is int and 0 < one <= MOST_LAYERS for one in numbers)
        if whole and 0 < len(numbers) <= MOST_LEVELS:
            return numbers
        reader.refuse(names.split()[0], numbers, f"must be a list of up to {MOST_LEVELS} whole numbers above zero")
        return default

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        if not model.windows:
            return {}
        levels = config.levels(model)
        return {
            "embed_dim": model.embed, "window_size": model.windows.size, "depths": [level.layers for level in levels],
            "num_heads": [level.heads for level in levels], "mlp_ratio": mlp_ratio(model),
        }  # fmt: skip


_SWIN = (
    *(ImagePatches("none", size=4, class_row=False), SwinLevels(), PLAIN_LAYERNORM, GELU, Classes()),
    *(SEES_ALL, Given({"norm.eps": 1e-5, "positions": "none", "embedding.norm": True})),
    Flag("qkv_bias", ("attention.qkv_bias",), True),
    Fixed("layer_norm_eps", 1e-5, "is not the 1e-05 that the norms of patches have"),
    Fixed("use_absolute_embeddings", False, "adds a table of positions to the patches, which is not supported"),
)


def _level_tensors(number: int) -> tuple[Tensor, ...]:
    """The tensors of one level of Swin."""
    stage, ours = f"swin.encoder.layers.{number}", f"{level_name(number)}."
    layer, attention = f"{stage}.blocks.{{}}", f"{stage}.blocks.{{}}.attention"
    merge = f"swin.encoder.layers.{number - 1}.downsample"
    merged: Any = {"others": lambda level: dict.fromkeys("DO", 2 * level.embed)}
    return tuple(
        dataclasses.replace(tensor, exists_in=lambda model: len(config.levels(model)) > number)
        for tensor in (
            *norm(f"{layer}.layernorm_before", f"{ours}attention_norm", bias=True),
            *separate_qkv(f"{attention}.self", QUERY_KEY_VALUE, f"{ours}attention"),
            *linear(f"{attention}.output.dense", "D (N H)", f"{ours}attention.wo"),
            Tensor(f"{attention}.self.relative_position_bias_table", "r N", (f"{ours}attention.relative_bias",)),
            *norm(f"{layer}.layernorm_after", f"{ours}mlp_norm", bias=True),
            *plain_mlp(layer, "intermediate.dense", "output.dense", ours),
            *norm(f"{merge}.norm", f"{ours}merge_norm", bias=True, axis="O", **merged),
            Tensor(f"{merge}.reduction.weight", "D O", (f"{ours}merge",), others=lambda level: {"O": 2 * level.embed}),
            *norm("swin.layernorm", f"{ours}final_norm", bias=True),
        )
    )


_TENSORS = (
    *linear("swin.embeddings.patch_embeddings.projection", "D x", "stem", biases=("stem_bias",)),
    *norm("swin.embeddings.norm", "embedding_norm", bias=True),
    *(tensor for number in range(MOST_LEVELS) for tensor in _level_tensors(number)),
    *linear("classifier", "c D", "classifier", biases=("classifier_bias",),
            others=lambda model: {"D": config.levels(model)[-1].embed}),
)  # fmt: skip
# Those that repeat sizes, too.
_UNREAD = (*OTHER_USES, "encoder_stride", "hidden_size", "num_layers", "num_hidden_layers", "path_norm")
FAMILIES = (
    Family(
        "Swin",
        "swin",
        "SwinForImageClassification",
        _SWIN,
        _TENSORS,
        prefix="swin.",
        no_weights=IMAGE_UNUSED,
        irrelevant=_UNREAD,
        heads=(r"^classifier\.", r"^decoder\."),
    ),
)
