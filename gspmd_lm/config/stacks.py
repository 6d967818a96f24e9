"""The sections `model.encoder` and `model.vision` of a config: stacks of blocks beside those of the model."""

import dataclasses
from typing import Annotated, Any, ClassVar, Literal, Self, cast

import pydantic
from pydantic.dataclasses import dataclass

from gspmd_lm.config.media import Patches
from gspmd_lm.config.types import STRICT, BelowOne, Count, Size
from gspmd_lm.config.values import from_values, value_at, with_values

Token = Annotated[int, pydantic.Field(ge=0)]
# What stacks of BLIP-2 have in common, whatever the decoder has, and what they have like it.
_PLAIN: dict[str, Any] = {
    "vocab": 0, "attention.mask": "full", "norm.kind": "layernorm", "norm.bias": True, "feed_forward.kind": "plain",
    "attention.qkv_bias": True, "attention.out_bias": True, "feed_forward.bias": True,
}  # fmt: skip
_SHARED = ("compute_dtype", "weight_dtype", "matmul_dtype", "matmul_precision", "attention.scores_dtype", "dropout",
           "init_std", "frozen")  # fmt: skip


class OtherStack:
    """A stack of blocks beside those of the model, which it is like but for some sizes; 0 means the model's."""

    SIZES: ClassVar[tuple[str, ...]]  # the names of these settings
    heads: int
    kv_heads: int

    @property
    def sizes(self) -> dict[str, Any]:
        """The settings that differ from the model's, by their names."""
        return {name: size for name in self.SIZES if (size := getattr(self, name))}

    def all_sizes(self, model: Any) -> dict[str, Any]:
        """These settings by their names, with those of the model written out."""
        return {name: getattr(self, name) or getattr(model, name) for name in self.SIZES}

    def with_all_sizes(self, model: Any) -> Self:
        """These settings with every size written out that is by default the model's."""
        return dataclasses.replace(cast(Any, self), **self.all_sizes(model))

    def undivided_heads(self, model: Any, section: str) -> dict[str, Any]:
        """What is said of heads that do not divide -> whether they do not."""
        heads, kv_heads = self.heads, self.kv_heads
        said = f"{section}.heads={heads} and {section}.kv_heads={kv_heads}, which do not divide"
        return {said: (heads or model.heads) % (kv_heads or model.kv_heads)}


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Encoder(OtherStack):
    """A stack of blocks that sees all of a source, and whose output each layer of the decoder attends to (T5, BART).

    It is like the decoder but for its mask, which is full, and for the sizes here; 0 means the decoder's. Both look up
    tokens in one table, or, with model.frames, the encoder hears sounds (Whisper).
    """

    SIZES: ClassVar = ("layers", "heads", "kv_heads", "head_dim", "mlp", "context")

    layers: Count = 0  # how many blocks
    heads: Count = 0  # query heads
    kv_heads: Count = 0  # key and value heads
    head_dim: Count = 0  # the size of one head
    mlp: Count = 0  # the hidden width of the feed-forward network
    context: Count = 0  # the longest source
    start_token: Count = 0  # the token that stands before a text that is written
    # The tokens that each text begins with, which generation does not choose: that of the language (mBART), or those of
    # language, task and times (Whisper). Rows of sounds begin with them; others do if the tokenizer's template says so.
    first_tokens: tuple[Token, ...] = ()
    suppressed: tuple[Token, ...] = ()  # tokens that generation never chooses
    suppressed_first: tuple[Token, ...] = ()  # tokens that it does not choose first

    def of(self, model: Any) -> Any:
        """The settings of the encoder, from those of the decoder."""
        own: dict[str, Any] = {"encoder": None, "vision": None, "attention.mask": "full", "layer_pattern": ()}
        own |= {"positions": "learned", "embedding.position_offset": 0} if model.frames else {}
        return with_values(model, own | self.sizes)

    @property
    def tokens(self) -> dict[str, tuple[int, ...]]:
        """The settings that are tokens, by their names."""
        names = ("first_tokens", "suppressed", "suppressed_first")
        return {"start_token": (self.start_token,), **{name: getattr(self, name) for name in names}}

    def problems(self, model: Any) -> list[str]:
        """What of a model does not fit an encoder."""
        problems = {
            **self.undivided_heads(model, "encoder"),
            f"layer_pattern={list(model.layer_pattern)}": {*model.layer_pattern} - {"full"},
            **{f"encoder.{name}={max(ids)}, which is not below vocab={model.vocab}": 0 < model.vocab <= max(ids)
               for name, ids in self.tokens.items() if ids},
        }  # fmt: skip
        return [f"encoder does not go with {what}" for what, is_wrong in problems.items() if is_wrong]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Tower(OtherStack):
    """A stack with sizes of its own, which reads no text."""

    SIZES: ClassVar = ("layers", "embed", "heads", "kv_heads", "head_dim", "mlp")

    layers: Count = 0  # how many blocks
    embed: Count = 0  # the width of the residual stream
    heads: Count = 0  # query heads
    kv_heads: Count = 0  # key and value heads
    head_dim: Count = 0  # the size of one head
    mlp: Count = 0  # the hidden width of the feed-forward network


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Queries(Tower):
    """Query tokens that attend to an image; their outputs precede the tokens of its text (BLIP-2, arXiv 2301.12597).

    Their blocks are BERT's, whose norms come after the sums, and the first of each `every` attends to the image
    encoder's output. A matrix projects their output to the width of the model. Sizes that are 0 are the model's.
    """

    rows: Size  # how many
    every: Size = 2  # of so many layers, the first attends to the image
    token: Count = 0  # the placeholder token at their positions
    start_token: Count = 0  # the token between them and the text
    activation: Literal["silu", "gelu", "gelu_tanh", "relu"] = "gelu"  # of the feed-forward network
    norm_eps: BelowOne = 1e-12  # added to the variance in a norm

    def of(self, model: Any) -> Any:
        """The settings of their stack, from those of the model."""
        pattern: Any = ("reading", *["full"] * (self.every - 1))
        own = {"positions": "none", "context": self.rows, "embedding.norm": True, "norm.pre": False, "norm.sum": True,
               "norm.final": False, "layer_pattern": pattern, "memory_width": model.vision_config.embed}  # fmt: skip
        return _plain(self, model, own | {"feed_forward.activation": self.activation, "norm.eps": self.norm_eps})


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Vision(Tower):
    """A stack of blocks that sees an image, whose text the stack of the model reads (CLIP, arXiv 2103.00020).

    It is like that of texts but for its mask, which is full, a norm before the first block, and the sizes here; 0 means
    the text's. A text is read at its last token, and an image at its first row. A matrix brings each to a common space.

    With `queries`, the image encoder is a plain ViT whatever the text model is, and the query tokens attend to all its
    outputs.
    """

    patches: Patches
    projection: Count = 0  # numbers of the common space
    queries: Queries | None = None  # query tokens whose outputs precede the text, instead of a common space (BLIP-2)
    temperature: float = 2.6592  # the initial factor of cosines is the exponential of it
    activation: Literal["silu", "gelu", "gelu_tanh", "relu"] = "gelu"  # with queries: of the feed-forward network
    norm_eps: BelowOne = 1e-6  # with queries: added to the variance in a norm

    def with_all_sizes(self, model: Any) -> Self:
        """These settings with every size written out that is by default the model's, those of `queries` included."""
        queries = self.queries and self.queries.with_all_sizes(model)
        return dataclasses.replace(super().with_all_sizes(model), queries=queries)

    def of(self, model: Any) -> Any:
        """The settings of the stack that sees images, from those of the model."""
        own: dict[str, Any] = {"context": self.patches.rows, "patches": self.patches}
        if self.queries:
            more = {"positions": "learned", "feed_forward.activation": self.activation, "norm.eps": self.norm_eps}
            return _plain(self, model, own | more)
        own |= {"vision": None, "attention.mask": "full", "layer_pattern": (), "vocab": 0, "padded_vocab": 0,
                "embedding.position_offset": 0, "embedding.norm": True}  # fmt: skip
        return with_values(model, own | self.sizes)

    def problems(self, model: Any) -> list[str]:
        """What of a model does not fit images beside texts."""
        problems = {
            **self.undivided_heads(model, "vision"),
            "patches.distillation and patches.pool: mean": (self.patches.first, self.patches.pool) != (1, "first"),
            **{f"vision.queries.{name}={token}, which is not below vocab={model.vocab}": 0 < model.vocab <= token
               for name in ("token", "start_token") if (token := getattr(self.queries, name, 0))},
        }  # fmt: skip
        if self.queries:
            problems |= self.queries.undivided_heads(model, "vision.queries")
        else:
            problems |= {f"positions: {model.positions}": model.positions != "learned"}
        wrong = [f"vision does not go with {what}" for what, is_wrong in problems.items() if is_wrong]
        one_of_both = (self.projection > 0) != bool(self.queries)
        return wrong if one_of_both else [*wrong, "vision needs projection or queries, and not both"]


def _plain(part: Tower, model: Any, own: dict[str, Any]) -> Any:
    """The settings of a stack with the sizes of a section, which has of the model only how numbers are computed."""
    shared = {name: value_at(model, name) for name in _SHARED}
    return from_values(type(model), _PLAIN | shared | part.all_sizes(model) | own)
