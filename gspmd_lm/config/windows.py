"""The section `model.windows` of a config: attention within windows of an image, and levels of blocks."""

import dataclasses
import functools
from typing import Any

from pydantic.dataclasses import dataclass

from gspmd_lm.config.types import STRICT, Count, Size
from gspmd_lm.config.values import with_values


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Level:
    """Blocks of a width of their own. Before them, 2 x 2 neighbouring patches become one."""

    layers: Size  # how many blocks
    embed: Size  # the width of the residual stream
    heads: Size  # query heads, and key and value heads; one has the model's head_dim
    mlp: Size  # the hidden width of the feed-forward network


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Windows:
    """Attention within square windows of the patches of an image (Swin, arXiv 2103.14030).

    Beyond the image, a window sees patches of which the norm before attention gave zeros (SAM, arXiv 2304.02643).
    Windows that are shifted, or of several levels, must divide the image. The sizes of the model are those of its first
    level of blocks.
    """

    size: Size  # patches on a side of a window
    # By how many patches the windows of layers of kind shifted are moved, down and to the right. Those that would stand
    # beyond the image begin at its other side. No patch sees one that lies across this seam. A level that is a single
    # window has no layers that are moved.
    shift: Count = 0
    levels: tuple[Level, ...] = ()  # those after the first one (Swin's stages)
    # Whether scores have a decomposed relative position bias: the query times a learned vector for the relative
    # position in height, and one for that in width (SAM).
    vectors: bool = False

    def layer_windows(self, kind: str, model: Any) -> "Windows":
        """The windows of a layer of this kind; one that is whole has a single window, the image."""
        whole = {"size": model.patches.side} if kind == "whole" else {}
        return self if kind == "shifted" else dataclasses.replace(self, shift=0, **whole)

    def problems(self, model: Any) -> list[str]:
        """What of a model does not fit windows."""
        if not (patches := model.patches):  # which the model says it lacks
            return []
        sides = [patches.side / 2**number for number in range(1 + len(self.levels))]
        relative, kinds = model.attention.relative_positions, {*model.layer_pattern}
        problems = {
            "windows needs kv_heads equal to heads": model.kv_heads != model.heads,
            f"windows.size={self.size} does not divide the patches on a side of a level: "
            f"{', '.join(f'{side:g}' for side in sides)}":
                (self.shift or self.levels) and any(side % self.size for side in sides),
            f"windows.shift={self.shift} must be below windows.size={self.size}": self.shift >= self.size,
            f"layer_pattern={list(model.layer_pattern)}: windows goes with layers of kind full, shifted and whole":
                kinds - {"full", "shifted", "whole"},
            "windows.vectors and layers of kind whole do not go with attention.relative_positions and levels":
                (self.vectors or "whole" in kinds) and (relative or self.levels),
            f"windows has windows of {self.size} patches on a side: set attention.relative_positions.side to as many, "
            "learned_row and shared to false":
                relative and (relative.side != self.size or relative.learned_row or relative.shared),
        }  # fmt: skip
        return [message for message, is_wrong in problems.items() if is_wrong]


def is_whole(model: Any) -> bool:
    """Whether a layer has windows, of which one is all of an image."""
    return bool(model.windows) and model.windows.size == model.patches.side


def padded_rows(rows: int, multiple: int) -> int:
    """The rows of an image with padding, which makes them a multiple of a number."""
    return -(-rows // multiple) * multiple


@functools.lru_cache(maxsize=128)
def levels(model: Any) -> tuple[Any, ...]:
    """The settings of the blocks of each level of a model; those of the model itself where it has no windows."""
    if not model.windows:
        return (model,)
    found, last = [], len(model.windows.levels)
    for number, level in enumerate((None, *model.windows.levels)):
        patches = dataclasses.replace(model.patches, size=model.patches.size * 2**number)
        own: dict[str, Any] = {
            "windows": dataclasses.replace(model.windows, levels=()), "patches": patches, "context": patches.rows,
            "norm.final": model.norm.final and number == last, "classes": model.classes if number == last else None,
        }  # fmt: skip
        if patches.side == model.windows.size:
            own["layer_pattern"] = ()
        if level:
            own |= {"layers": level.layers, "embed": level.embed, "mlp": level.mlp}
            own |= {"heads": level.heads, "kv_heads": level.heads}
        found.append(with_values(model, own))
    return tuple(found)
