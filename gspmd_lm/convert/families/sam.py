"""SAM, which cuts objects out of images."""

from typing import Any

from gspmd_lm import config
from gspmd_lm.convert.config_reader import ConfigReader
from gspmd_lm.convert.families.vit import SEES_ALL, ImagePatches, stack_sizes
from gspmd_lm.convert.family import GELU_NEW, PLAIN_LAYERNORM, Family, Part
from gspmd_lm.convert.fields import Activation, Fixed, Flag, Given, Values, shortest_pattern
from gspmd_lm.convert.layout import Tensor, linear, norm, plain_mlp, separate_qkv
from gspmd_lm.model.families.sam import MASK_CHANNELS, QUARTERS

_VISION, _PROMPT, _MASKS = "vision_config", "prompt_encoder_config", "mask_decoder_config"
_EPS = 1e-6


class WholeLayers:
    """SAM's windows, and the layers in which a patch attends to the whole image."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        size = reader.get("window_size", 14)
        numbers = reader.get("global_attn_indexes", [2, 5, 8, 11])
        if type(size) is not int or not 0 <= size < 2**16:
            reader.refuse("window_size", size, "must be a whole number")
        elif not isinstance(numbers, list) or any(type(one) is not int or one < 0 for one in numbers):
            reader.refuse("global_attn_indexes", numbers, "must be a list of whole numbers")
        else:
            kinds = ["whole" if number in numbers else "full" for number in range(values["layers"])]
            if size == 0:
                kinds, size = ["full"], config.Patches(**values["patches"]).side
            values["layer_pattern"] = shortest_pattern(kinds)
            values["windows"] = {"size": size, "vectors": reader.flag("use_rel_pos", True)}

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        if not model.windows or not model.patches:
            return {}
        whole = [number for number, kind in enumerate(model.kind_of_each_layer) if kind == "whole"]
        size = 0 if config.is_whole(model) and not whole else model.windows.size
        return {"window_size": size, "global_attn_indexes": whole, "use_rel_pos": model.windows.vectors}


class MlpWidth:
    """The hidden width of the blocks, as a number or as a multiple of theirs."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        ratio = reader.number("mlp_ratio", 4.0)
        values["mlp"] = reader.number("mlp_dim", int(ratio * values["embed"]))

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        return {"mlp_dim": model.mlp, "mlp_ratio": model.mlp / model.embed}


# Fields of the decoder of masks, the settings that they state, and their defaults.
_MASK_SIZES = (
    ("hidden_size", "embed", 256), ("num_hidden_layers", "layers", 2), ("num_attention_heads", "heads", 8),
    ("mlp_dim", "mlp", 2048), ("attention_downsample_rate", "narrowing", 2), ("num_multimask_outputs", "several", 3),
)  # fmt: skip


class MaskParts:
    """The decoder of masks, and what reads prompts."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        values["masks"] = {ours: reader.whole(f"{_MASKS}.{name}", usual, 1) for name, ours, usual in _MASK_SIZES}
        wanted = self._repeated_sizes(values["masks"]["embed"], config.Patches(**values["patches"]))
        for name, value in wanted.items():
            if (found := reader.get(name, value)) != value:
                reader.refuse(name, found, f"is not {value}, as other fields have it, which is not supported")

    def _repeated_sizes(self, width: int, patches: config.Patches) -> dict[str, int]:
        """Fields that repeat a size."""
        return {
            f"{_VISION}.output_channels": width, f"{_VISION}.num_pos_feats": width // 2,
            f"{_PROMPT}.hidden_size": width, f"{_PROMPT}.image_size": patches.image,
            f"{_PROMPT}.patch_size": patches.size, f"{_PROMPT}.image_embedding_size": patches.side,
            f"{_MASKS}.iou_head_hidden_dim": width,
        }  # fmt: skip

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        if not (model.masks and model.patches):
            return {}
        written = {f"{_MASKS}.{name}": getattr(model.masks, ours) for name, ours, _ in _MASK_SIZES}
        return written | self._repeated_sizes(model.masks.embed, model.patches)


def _fixed_field(name: str, value: Any) -> Fixed:
    return Fixed(name, value, f"is not {value}, which is not supported")


_IMAGES = (
    *(*stack_sizes(eps=_EPS), MlpWidth(), PLAIN_LAYERNORM, SEES_ALL),
    Activation("hidden_act", "gelu", GELU_NEW),
    Given({"norm.final": False}),
    *(ImagePatches("none", class_row=False, image=1024), WholeLayers()),
    Flag("use_abs_pos", ("positions",), True, "learned", "none"),
    Flag("qkv_bias", ("attention.qkv_bias",), True),
)
_SAM = (
    Part(_VISION, _IMAGES),
    MaskParts(),
    _fixed_field(f"{_PROMPT}.layer_norm_eps", _EPS),
    _fixed_field(f"{_MASKS}.layer_norm_eps", _EPS),
    _fixed_field(f"{_PROMPT}.hidden_act", "gelu"),
    _fixed_field(f"{_MASKS}.hidden_act", "relu"),
    _fixed_field(f"{_MASKS}.iou_head_depth", 3),
    _fixed_field(f"{_PROMPT}.num_point_embeddings", 4),
    _fixed_field(f"{_PROMPT}.mask_input_channels", MASK_CHANNELS),
)


def _neck(model: config.ModelConfig) -> dict[str, int]:
    width = model.masks.embed if model.masks else 0
    return {"O": width, "A": 9, "s": 9}


def _neck_out(model: config.ModelConfig) -> dict[str, int]:
    return _neck(model) | {"D": _neck(model)["O"]}


def _parts(model: config.ModelConfig) -> dict[str, int]:
    """The sizes of convolutions over 2 x 2 parts of a patch, and over 2 x 2 pixels of each."""
    return {"A": QUARTERS, "s": QUARTERS, "O": model.embed // 4, "k": model.embed // 8}


def _mask(model: config.ModelConfig) -> dict[str, int]:
    return {"A": QUARTERS, "s": QUARTERS, "O": MASK_CHANNELS, "k": MASK_CHANNELS // QUARTERS}


def _vectors(of: str, side: Any) -> tuple[Tensor, ...]:
    return tuple(
        Tensor(f"{_LAYER}.attn.rel_pos_{name[0]}", "r H", (f"attention.{of}{name}_vectors",),
               others=lambda model: {"r": 2 * side(model) - 1})
        for name in ("height", "width")
    )  # fmt: skip


def _crossing(name: str, ours: str, **options: Any) -> tuple[Tensor, ...]:
    theirs, ours = f"mask_decoder.transformer.{name}", f"masks.{ours}"
    out = linear(f"{theirs}.out_proj", "D (N H)", f"{ours}.wo", **options)
    return (*separate_qkv(theirs, ours=ours, **options), *out)


def _mlp(name: str, ours: str, out: str, **options: Any) -> tuple[Tensor, ...]:
    """Three matrices, between two of which relu stands."""
    places = ("proj_in", "in", "O D"), ("layers.0", "middle", "D O"), ("proj_out", "out", f"{out} D")
    return tuple(
        tensor
        for theirs, place, axes in places
        for tensor in linear(f"mask_decoder.{name}.{theirs}", axes, f"masks.{ours}_{place}",
                             biases=(f"masks.{ours}_{place}_bias",), **options)
    )  # fmt: skip


_LAYER, _TWO_WAY = "vision_encoder.layers.{}", "layers.{}"
_EMBED = "prompt_encoder.mask_embed"
_TENSORS: tuple[Tensor, ...] = (
    Tensor("vision_encoder.pos_embed", "1 s D", ("position_embedding",)),
    *linear("vision_encoder.patch_embed.projection", "D x", "stem", biases=("stem_bias",)),
    *norm(f"{_LAYER}.layer_norm1", "attention_norm", bias=True),
    *linear(f"{_LAYER}.attn.qkv", "(R H) D", "attention.wq", "attention.wk", "attention.wv"),
    *linear(f"{_LAYER}.attn.proj", "D (N H)", "attention.wo"),
    *_vectors("", lambda model: model.windows.size if model.windows else 1),
    *_vectors("whole_", lambda model: model.patches.side),
    *norm(f"{_LAYER}.layer_norm2", "mlp_norm", bias=True),
    *plain_mlp(f"{_LAYER}.mlp", "lin1", "lin2"),
    Tensor("vision_encoder.neck.conv1.weight", "O D 1 1", ("neck_in",), others=_neck),
    *norm("vision_encoder.neck.layer_norm1", "neck_in_norm", bias=True, axis="O", others=_neck),
    Tensor("vision_encoder.neck.conv2.weight", "D O s", ("neck_out",), others=_neck_out),
    *norm("vision_encoder.neck.layer_norm2", "neck_out_norm", bias=True, others=_neck_out),
    Tensor("shared_image_embedding.positional_embedding", "t O", ("masks.fourier",),
           others=lambda model: {"t": 2, "O": model.embed // 2}),
    Tensor("prompt_encoder.point_embed.{stream}.weight", "1 D", ("masks.point_kinds",)),
    Tensor("prompt_encoder.not_a_point_embed.weight", "1 D", ("masks.no_point",)),
    Tensor("prompt_encoder.no_mask_embed.weight", "1 D", ("masks.no_mask",)),
    *linear(f"{_EMBED}.conv1", "k 1 s", "masks.mask_in", biases=("masks.mask_in_bias",), others=_mask),
    *norm(f"{_EMBED}.layer_norm1", "masks.mask_in_norm", bias=True, axis="k", others=_mask),
    *linear(f"{_EMBED}.conv2", "O k s", "masks.mask_middle", biases=("masks.mask_middle_bias",), others=_mask),
    *norm(f"{_EMBED}.layer_norm2", "masks.mask_middle_norm", bias=True, axis="O", others=_mask),
    *linear(f"{_EMBED}.conv3", "D O 1 1", "masks.mask_out", biases=("masks.mask_out_bias",), others=_mask),
    Tensor("mask_decoder.iou_token.weight", "1 D", ("masks.iou_token",)),
    Tensor("mask_decoder.mask_tokens.weight", "m D", ("masks.mask_tokens",)),
    *_crossing(f"{_TWO_WAY}.self_attn", "attention", others=lambda model: {"H": model.embed // model.heads}),
    *_crossing(f"{_TWO_WAY}.cross_attn_token_to_image", "to_image"),
    *_crossing(f"{_TWO_WAY}.cross_attn_image_to_token", "to_tokens"),
    *_crossing("final_attn_token_to_image", "last"),
    *(tensor for number, name in enumerate(("attention", "to_image", "mlp", "to_tokens"), 1)
      for tensor in norm(f"mask_decoder.transformer.{_TWO_WAY}.layer_norm{number}", f"masks.{name}_norm", bias=True)),
    *plain_mlp(f"mask_decoder.transformer.{_TWO_WAY}.mlp", "lin1", "lin2", "masks."),
    *norm("mask_decoder.transformer.layer_norm_final_attn", "masks.last_norm", bias=True),
    Tensor("mask_decoder.upscale_conv1.weight", "D O s", ("masks.upscale_in",), others=_parts),
    Tensor("mask_decoder.upscale_conv1.bias", "O", ("masks.upscale_in_bias",), others=_parts),
    *norm("mask_decoder.upscale_layer_norm", "masks.upscale_norm", bias=True, axis="O", others=_parts),
    Tensor("mask_decoder.upscale_conv2.weight", "O k s", ("masks.upscale_out",), others=_parts),
    Tensor("mask_decoder.upscale_conv2.bias", "k", ("masks.upscale_out_bias",), others=_parts),
    *_mlp("output_hypernetworks_mlps.{stream}", "hyper", "k", others=lambda model: {"k": model.embed // 8}),
    *_mlp("iou_prediction_head", "iou", "c"),
)  # fmt: skip
_FOURIER = "positional_embedding"
FAMILIES = (
    Family(
        "SAM",
        "sam",
        "SamModel",
        _SAM,
        _TENSORS,
        prefix="",
        twice={f"prompt_encoder.shared_embedding.{_FOURIER}": f"shared_image_embedding.{_FOURIER}"},
        irrelevant=("scale", "tie_word_embeddings"),
        parts=(_VISION, _PROMPT, _MASKS),
    ),
)
