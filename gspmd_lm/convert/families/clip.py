"""CLIP, whose towers of texts and of images are compared."""

from typing import Any

from gspmd_lm import config
from gspmd_lm.convert.config_reader import ConfigReader
from gspmd_lm.convert.families.vit import ImagePatches, stack_sizes
from gspmd_lm.convert.family import BIASES, GELU_NEW, PLAIN_LAYERNORM, Family, Part
from gspmd_lm.convert.fields import Activation, FieldCodec, Given, Renamed, Values
from gspmd_lm.convert.layout import Tensor, linear, norm, plain_mlp, separate_qkv

TEXT, VISION = "text_config", "vision_config"
_QUICK_GELU, _SLOPE = "quick_gelu", 1.702  # x * sigmoid(1.702 x)
# The eos_token_id of old files. To transformers it means that a text is read at the token with the highest number.
_HIGHEST = 2


class QuickActivation(Activation):
    """The activation, which may be quick_gelu: silu with a slope."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        super().read(reader, values)
        values["feed_forward.slope"] = _SLOPE if reader.get(self.names, self.default) == _QUICK_GELU else 1.0

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        return {self.names: _QUICK_GELU} if model.feed_forward.slope == _SLOPE else super().write(model)


class EndOfText:
    """The token at which a text is read. Here it is the last one, whose number only the tokenizer says."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        reader.whole("eos_token_id", _HIGHEST, 0)

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        return {"eos_token_id": _HIGHEST}


def tower_sizes(embed: int, heads: int, mlp: int, layers: int, eps: float) -> tuple[FieldCodec, ...]:
    """The sizes of a stack of blocks, with defaults."""
    return (*stack_sizes(embed, heads, layers, eps), Renamed("intermediate_size", "mlp", mlp))


def _tower(embed: int, heads_: int, mlp: int) -> tuple[FieldCodec, ...]:
    quick = QuickActivation("hidden_act", _QUICK_GELU, GELU_NEW, ((_QUICK_GELU, "silu"),))
    return (*tower_sizes(embed, heads_, mlp, 12, 1e-5), quick)


_VISION_TOWER = Part(VISION, (*_tower(768, 12, 3072), ImagePatches("none", 32)))


class Images:
    """The tower of images, and the space in which texts and images are compared."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        found = Values()
        _VISION_TOWER.read(reader, found)
        for setting in ("feed_forward.activation", "feed_forward.slope", "norm.eps"):
            if found[setting] != values[setting]:
                both = f"{found[setting]}, and {values[setting]} by {TEXT}"
                reader.problems.append(f"{VISION}: model.{setting} is {both}, which is not supported")
        sizes = ("layers", "embed", "heads", "kv_heads", "head_dim", "mlp")
        values["vision"] = {name: found[name] for name in sizes} | {
            "patches": found["patches"] | {"bias": False},
            "projection": reader.number("projection_dim", 512),
            "temperature": float(reader.number("logit_scale_init_value", 2.6592)),
        }

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        if not (model.vision and (vision := model.vision_config)):
            return {}
        written = {"projection_dim": model.vision.projection, "logit_scale_init_value": model.vision.temperature}
        return written | _VISION_TOWER.write(vision)


_TEXT_TOWER = (
    Renamed("vocab_size", "vocab", 49408),
    Renamed("max_position_embeddings", "context", 77),
    *(*_tower(512, 8, 2048), EndOfText()),
)
_CLIP = (Part(TEXT, _TEXT_TOWER), PLAIN_LAYERNORM, Given({"positions": "learned"}), BIASES, Images())


def tower_blocks(prefix: str, ours: str, last: str) -> tuple[Tensor, ...]:
    layer = f"{prefix}.encoder.layers.{{}}"
    attention = f"{layer}.self_attn"
    return (
        *separate_qkv(attention, ours=f"{ours}attention"),
        *linear(f"{attention}.out_proj", "D (N H)", f"{ours}attention.wo"),
        *norm(f"{layer}.layer_norm1", f"{ours}attention_norm", bias=True),
        *plain_mlp(f"{layer}.mlp", "fc1", "fc2", ours),
        *norm(f"{layer}.layer_norm2", f"{ours}mlp_norm", bias=True),
        *norm(f"{prefix}.{last}", f"{ours}final_norm", bias=True),
    )


IMAGE = "vision_model.embeddings"
_TENSORS = (
    Tensor("text_model.embeddings.token_embedding.weight", "V D", ("embedding",)),
    Tensor("text_model.embeddings.position_embedding.weight", "p D", ("position_embedding",)),
    *tower_blocks("text_model", "", "final_layer_norm"),
    Tensor("text_projection.weight", "j D", ("projection",)),
    Tensor("logit_scale", "", ("temperature",)),
    Tensor(f"{IMAGE}.class_embedding", "D", ("vision.class_row",)),
    Tensor(f"{IMAGE}.patch_embedding.weight", "D x", ("vision.stem",)),
    Tensor(f"{IMAGE}.position_embedding.weight", "p D", ("vision.position_embedding",)),
    *norm("vision_model.pre_layrnorm", "vision.embedding_norm", bias=True),
    *tower_blocks("vision_model", "vision.", "post_layernorm"),
    Tensor("visual_projection.weight", "j D", ("vision.projection",)),
)
FAMILIES = (
    Family(
        "CLIP",
        "clip",
        "CLIPModel",
        _CLIP,
        _TENSORS,
        prefix="",
        no_weights=(r"embeddings\.position_ids$",),
        irrelevant=("projection_dim", "tie_word_embeddings"),
        parts=(TEXT, VISION),
    ),
)
