"""The section `model.vision` of a config: the stack of blocks that sees images beside one that reads texts."""

import dataclasses
from typing import Any, ClassVar

from pydantic.dataclasses import dataclass

from gspmd_lm.config.encoder import OtherStack
from gspmd_lm.config.images import Patches
from gspmd_lm.config.types import STRICT, Count, Size


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Vision(OtherStack):
    """A stack of blocks that sees an image, whose text the stack of the model reads (CLIP, arXiv 2103.00020).

    It is like that of texts but for its mask, which is full, a norm before the first block, and the sizes here; 0 means
    the text's. A text is read at its last token, and an image at its first row. A matrix brings each to a common space.
    """

    SIZES: ClassVar = ("layers", "embed", "heads", "kv_heads", "head_dim", "mlp")

    patches: Patches
    projection: Size  # numbers of the common space
    layers: Count = 0  # how many blocks
    embed: Count = 0  # the width of the residual stream
    heads: Count = 0  # query heads
    kv_heads: Count = 0  # key and value heads
    head_dim: Count = 0  # the size of one head
    mlp: Count = 0  # the hidden width of the feed-forward network
    temperature: float = 2.6592  # what cosines are multiplied by begins as the exponential of it

    def of(self, model: Any) -> Any:
        """The settings of the stack that sees images, from those of the model."""
        own = {"vision": None, "mask": "full", "layer_pattern": (), "vocab": 0, "padded_vocab": 0, "position_offset": 0,
               "embedding_norm": True, "context": self.patches.rows, "patches": self.patches}  # fmt: skip
        return dataclasses.replace(model, **own, **self.sizes)

    def problems(self, model: Any) -> list[str]:
        """What of a model does not go with images beside texts."""
        keys = ("embedding_width", "encoder", "patches", "classes", "relative_positions", "layer_pattern",
                "head_transform", "unembedding_bias", "tied_embeddings", "layer_scale", "shared_layers")  # fmt: skip
        problems = {
            **self.in_no_other_stack(model, "vision"),
            **{key: getattr(model, key) for key in keys},
            f"positions: {model.positions}": model.positions != "learned",
            "mask: full": model.mask == "full",
            "lora: adapters would leave the projections as they are": model.lora,
            "patches.distillation and patches.pool: mean": (self.patches.first, self.patches.pool) != (1, "first"),
        }  # fmt: skip
        return [f"vision does not go with {what}" for what, is_wrong in problems.items() if is_wrong]
