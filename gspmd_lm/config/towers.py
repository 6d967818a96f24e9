"""The section `model.vision` of a config: a stack of blocks that sees images, and rows that stand for one in a text."""

import dataclasses
from typing import Any, ClassVar, Literal

from pydantic.dataclasses import dataclass

from gspmd_lm.config.encoder import OtherStack
from gspmd_lm.config.images import Patches
from gspmd_lm.config.types import STRICT, BelowOne, Count, Size

_SIZES = ("layers", "embed", "heads", "kv_heads", "head_dim", "mlp")
# What stacks of BLIP-2 have in common, whatever the decoder has, and what they have like it.
_PLAIN: dict[str, Any] = {
    "mask": "full", "vocab": 0, "norm": "layernorm", "norm_bias": True, "mlp_kind": "plain", "qkv_bias": True,
    "attention_out_bias": True, "mlp_bias": True,
}  # fmt: skip
_SHARED = ("compute_dtype", "weight_dtype", "matmul_dtype", "matmul_precision", "attention_scores_dtype", "dropout",
           "init_std", "frozen")  # fmt: skip


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Queries(OtherStack):
    """Learned rows that read an image, and then stand before the tokens of its text (BLIP-2, arXiv 2301.12597).

    Their blocks are BERT's, whose norms stand after the sums, and the first of each `every` attends to the rows of the
    image. A matrix brings their output to the width of the model. Sizes that are 0 are the model's.
    """

    SIZES: ClassVar = _SIZES

    rows: Size  # how many
    every: Size = 2  # of so many layers, the first attends to the image
    token: Count = 0  # the token that stands in their places
    start_token: Count = 0  # the token between them and the text
    layers: Count = 0  # how many blocks
    embed: Count = 0  # the width of the residual stream
    heads: Count = 0  # query heads
    kv_heads: Count = 0  # key and value heads
    head_dim: Count = 0  # the size of one head
    mlp: Count = 0  # the hidden width of the feed-forward network
    activation: Literal["silu", "gelu", "gelu_tanh", "relu"] = "gelu"  # of the feed-forward network
    norm_eps: BelowOne = 1e-12  # added to the variance in a norm

    def of(self, model: Any) -> Any:
        """The settings of their stack, from those of the model."""
        pattern: Any = ("reading", *["full"] * (self.every - 1))
        own = {"positions": "none", "context": self.rows, "embedding_norm": True, "pre_norms": False, "sum_norms": True,
               "final_norm": False, "layer_pattern": pattern, "memory_width": model.of_vision.embed}  # fmt: skip
        return _plain(self, model, own | {"activation": self.activation, "norm_eps": self.norm_eps})


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Vision(OtherStack):
    """A stack of blocks that sees an image, whose text the stack of the model reads (CLIP, arXiv 2103.00020).

    It is like that of texts but for its mask, which is full, a norm before the first block, and the sizes here; 0 means
    the text's. A text is read at its last token, and an image at its first row. A matrix brings each to a common space.

    With `queries` it is a plain ViT, whatever the stack of texts is, and they read all of its rows.
    """

    SIZES: ClassVar = _SIZES

    patches: Patches
    projection: Count = 0  # numbers of the common space
    queries: Queries | None = None  # what stands for an image before its text, in place of the common space (BLIP-2)
    layers: Count = 0  # how many blocks
    embed: Count = 0  # the width of the residual stream
    heads: Count = 0  # query heads
    kv_heads: Count = 0  # key and value heads
    head_dim: Count = 0  # the size of one head
    mlp: Count = 0  # the hidden width of the feed-forward network
    temperature: float = 2.6592  # what cosines are multiplied by begins as the exponential of it
    activation: Literal["silu", "gelu", "gelu_tanh", "relu"] = "gelu"  # with queries: of the feed-forward network
    norm_eps: BelowOne = 1e-6  # with queries: added to the variance in a norm

    def of(self, model: Any) -> Any:
        """The settings of the stack that sees images, from those of the model."""
        own: dict[str, Any] = {"context": self.patches.rows, "patches": self.patches}
        if self.queries:
            more = {"positions": "learned", "activation": self.activation, "norm_eps": self.norm_eps}
            return _plain(self, model, own | more)
        own |= {"vision": None, "mask": "full", "layer_pattern": (), "vocab": 0, "padded_vocab": 0,
                "position_offset": 0, "embedding_norm": True}  # fmt: skip
        return dataclasses.replace(model, **own, **self.sizes)

    def problems(self, model: Any) -> list[str]:
        """What of a model does not go with images beside texts."""
        keys = ("embedding_width", "patches", "classes", "layer_embed", "convolution", "frames")
        problems = {
            **{key: getattr(model, key) for key in keys},
            "mask: full": model.mask == "full",
            "residual_streams": model.residual_streams > 1,
            "lora: adapters would leave the projections as they are": model.lora,
            "patches.distillation and patches.pool: mean": (self.patches.first, self.patches.pool) != (1, "first"),
            "projection: set it, or queries, and not both": (self.projection > 0) == bool(self.queries),
            **{f"vision.queries.{name}={token}, which is not below vocab={model.vocab}": 0 < model.vocab <= token
               for name in ("token", "start_token") if (token := getattr(self.queries, name, 0))},
        }  # fmt: skip
        if not self.queries:
            keys = ("encoder", "relative_positions", "layer_pattern", "head_transform", "unembedding_bias",
                    "tied_embeddings", "layer_scale", "shared_layers")  # fmt: skip
            problems |= self.in_no_other_stack(model, "vision") | {key: getattr(model, key) for key in keys}
            problems |= {f"positions: {model.positions}": model.positions != "learned"}
        return [f"vision does not go with {what}" for what, is_wrong in problems.items() if is_wrong]


def _plain(part: OtherStack, model: Any, own: dict[str, Any]) -> Any:
    """The settings of a stack with the sizes of a section, which has of the model only how numbers are computed."""
    sizes = {name: getattr(part, name) or getattr(model, name) for name in _SIZES}
    return type(model)(**_PLAIN, **{name: getattr(model, name) for name in _SHARED}, **sizes, **own)
