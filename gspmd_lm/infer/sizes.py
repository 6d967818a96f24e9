"""The sizes of a batch of prompts and of its cache, which are fixed when programs are built."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax

from gspmd_lm.config import ModelConfig
from gspmd_lm.model.families import family
from gspmd_lm.model.kernels.common import LANES
from gspmd_lm.program.supported import split_sequence
from gspmd_lm.sharding.rules import KERNELS, Rules


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes that are fixed when the programs are built."""

    rows: int  # of a batch, padding included
    prompt: int  # slots of the longest prompt; 1, for the start token, if an encoder reads the prompts
    slots: int  # of the cache
    source: int = 0  # tokens of the longest prompt that an encoder reads, or rows of a sound
    image: int = 0  # rows of an image, if prompts are images: of the slots, or of the source, the last stand for it

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt."""
        return self.image or self.source or self.prompt

    def prompts(self, model: ModelConfig) -> jax.ShapeDtypeStruct:
        """The shape of the prompts of a batch: see `Prompts`."""
        prompts = family(model).prompts(model, self.rows, self.longest_prompt)
        return jax.ShapeDtypeStruct(prompts.shape, prompts.dtype)

    def hold(self, longest: int, new: int) -> bool:
        """Whether there is room for prompts of up to `longest` tokens, and `new` tokens more."""
        return longest <= self.longest_prompt and self.prompt + new - 1 <= self.slots


class Prompts(NamedTuple):
    """A batch of prompts, padded on the left: slot s of a row holds its token s - start.

    An image is padded on the right. Of what stands for it, and the token behind that, slot s holds the one s - start.
    """

    tokens_BT: Any  # int32; float32 frames of each row of sounds, [B, T, window, bands], or patches of images [B, T, X]
    start_B: Any  # int32
    number_B: Any  # int32: of the prompt among all, for random numbers
    length_B: Any  # int32: tokens of the prompt, and all that may follow it but the last one


def sizes(
    rules: Rules, rows: int, prompt: int, new: int, platform: str = "cpu", model: ModelConfig | None = None
) -> Sizes:
    """The sizes for `rows` prompts of up to `prompt` tokens and `new` tokens more, rounded up for mesh axes to divide.

    The last new token needs no slot: nothing attends to it. An encoder of `model`, if there is one, reads the prompts.
    """
    rows, given = rounded_up(rules, rows, prompt, platform)
    image = 0
    if model and model.vision and model.vision.queries:
        image, given = given, rounded_up(rules, rows, model.vision.queries.rows + 1, platform)[1]
    prompt, source = (1, given) if model and model.encoder else (given, 0)
    return Sizes(rows, prompt, _up(prompt + new - 1, _num_shards(rules, "kv_seq")), source, image)


def rounded_up(rules: Rules, rows: int, seq: int, platform: str, zigzag: bool = False) -> tuple[int, int]:
    """`rows` and `seq`, each rounded up so that the mesh axes and the attention kernel divide it.

    Where the rules choose no kernel, a row of as many tokens as a block of splash attention has is made whole blocks,
    and a shorter one is left to XLA. zigzag: each device has two pieces of a row (kernels/context.py).
    """
    shards = _num_shards(rules, "seq") * (2 if zigzag and split_sequence(rules) else 1)
    chosen = rules.attention.get(platform, KERNELS[platform][0] if seq >= shards * LANES else "xla")
    block = math.lcm(shards * (LANES if chosen == "splash" else 1), _num_shards(rules, "kv_seq"))
    return _up(rows, _num_shards(rules, "batch")), _up(seq, block)


def _num_shards(rules: Rules, axis: str) -> int:
    """The number that must divide the size of an axis, so that all activations can be split along it."""
    splits = (rules.split("rules", array, axis) for array in rules.vocabulary.activations)
    return math.lcm(*map(rules.num_shards, splits))


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
