"""Low-rank adapters, as a config asks for them."""

from typing import Literal

from pydantic.dataclasses import dataclass

from gspmd_lm.config.types import STRICT, Positive, Size


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Lora:
    """Low-rank adapters (LoRA, arXiv 2106.09685) beside the weights in `targets`. Only the adapters are trained."""

    rank: Size = 16  # the inner size of an adapter's two matrices
    alpha: Positive = 32.0  # an adapter's output is scaled by alpha / rank
    targets: tuple[Literal["wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down"], ...]  # the weights that get an adapter

    def __post_init__(self):
        if not self.targets or len(set(self.targets)) < len(self.targets):
            raise ValueError(f"targets={list(self.targets)} must name at least one weight, and each once")

    @property
    def scale(self) -> float:
        """The factor that an adapter's output is multiplied by."""
        return self.alpha / self.rank
