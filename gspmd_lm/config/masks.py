"""The section `model.masks` of a config: the decoder of the mask of the object that a prompt means."""

from typing import Any

from pydantic.dataclasses import dataclass

from gspmd_lm.config.types import STRICT, Size
from gspmd_lm.config.values import with_values

PARTS = 4  # pixels of a mask on each side of a patch
POINTS = 2  # of a prompt in a row of training: a point and none, or the corners of a box


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Masks:
    """A neck behind the blocks that see an image, and a decoder of masks (Segment Anything, arXiv 2304.02643).

    The tokens of a prompt, and one for each mask, attend to each other and to the image, and the image to them. A mask
    has 4 x 4 pixels for each patch.
    """

    embed: Size = 256  # the width of the image behind the neck, and of tokens
    layers: Size = 2  # how many layers tokens and image go through
    heads: Size = 8  # of attention
    mlp: Size = 2048  # the hidden width of the feed-forward network of tokens
    narrowing: Size = 2  # attention between tokens and image has embed / narrowing numbers for all heads
    # Masks for a prompt that may mean several objects, such as a part and its whole. One more is for a prompt that
    # means one.
    several: Size = 3

    @property
    def count(self) -> int:
        """How many masks are drawn."""
        return 1 + self.several

    def of(self, model: Any) -> Any:
        """The settings of the decoder as those of a stack of blocks, from those of the stack that sees the image."""
        own = {"masks": None, "patches": None, "windows": None, "layer_pattern": (), "positions": "none",
               "attention.mask": "full", "context": 1, "vocab": 1, "feed_forward.activation": "relu",
               "feed_forward.kind": "plain", "norm.eps": 1e-6, "dropout": 0.0, "layers": self.layers,
               "embed": self.embed, "heads": self.heads, "kv_heads": self.heads,
               "head_dim": self.embed // self.narrowing // self.heads, "mlp": self.mlp, "classes.count": self.count,
               "attention.scale": 0.0, "attention.softcap": 0.0}  # fmt: skip
        return with_values(model, own)

    def problems(self, model: Any) -> list[str]:
        """What of a model does not fit masks."""
        patches, narrow = model.patches, self.embed / self.narrowing / self.heads
        problems = {
            "masks needs patches without a row before them: set patches.class_row to false":
                not patches or patches.first,
            f"masks.embed={self.embed} / narrowing={self.narrowing} does not divide over heads={self.heads}":
                narrow % 1 or self.embed % self.heads,
            f"masks.embed={self.embed} must be a multiple of 8": self.embed % 8,
        }  # fmt: skip
        return [message for message, is_wrong in problems.items() if is_wrong]


def problems_of_masks(config: Any) -> list[str]:
    """What of a whole config does not go with its masks, or with its objective: masks."""
    data, masks, patches = config.data, config.model.masks, config.model.patches
    predicted = config.objective == "masks"
    problems = {
        "objective: masks needs model.masks, and model.masks needs objective: masks": predicted != bool(masks),
        "objective: masks needs data.fields=[image, mask] or [image, mask, prompt], without data.label":
            predicted and (data.label or len(data.fields) not in (0, 2, 3)),
        "model.masks does not go with data.images.resize and keep_ratio, which cut off what may be an object: set "
        "data.images.pad": masks and (data.images.keep_ratio or data.images.resize > patches.image),
    }  # fmt: skip
    return [message for message, is_wrong in problems.items() if is_wrong]
