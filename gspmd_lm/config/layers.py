"""The parts of the section `model` of a config that say what a layer is: its attention, experts and adapters."""

from typing import Any, Literal

from pydantic.dataclasses import dataclass

from gspmd_lm.config.types import STRICT, Count, Positive, Size


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RopeScaling:
    """RoPE whose frequencies are slowed by `factor`.

    linear (arXiv 2306.15595) slows all frequencies. llama3 slows those whose wavelength is above original_context /
    low_freq_factor, and blends those whose wavelength is between that and original_context / high_freq_factor. yarn
    (arXiv 2309.00071) has the same two limits and blends between them by the number of the frequency. dynamic raises
    rope.theta for rows that are longer than original_context. longrope (arXiv 2402.13753) divides each frequency by a
    number of its own: one of long_factors for rows that are longer than original_context, else one of short_factors.
    A row's length is data.seq in training; in generation it is the prompt and all that may follow.
    """

    kind: Literal["llama3", "linear", "yarn", "dynamic", "longrope"] = "llama3"  # which of them
    factor: Positive = 8.0  # by how much the slowed frequencies are divided; dynamic: the factor of theta's growth
    low_freq_factor: Positive = 1.0  # llama3, yarn (beta_slow): turns in original_context below which one is slowed
    high_freq_factor: Positive = 4.0  # llama3, yarn (beta_fast): turns in original_context above which one stays
    original_context: Size = 8192  # the context that the model was trained with before; linear does not use it
    truncate: bool = True  # yarn: the frequencies between which it blends have whole numbers
    attention_factor: Positive = 1.0  # rotated queries and keys are multiplied by it
    short_factors: tuple[Positive, ...] = ()  # longrope: what frequencies are divided by in rows up to original_context
    long_factors: tuple[Positive, ...] = ()  # longrope: what they are divided by in longer rows

    def __post_init__(self):
        if self.high_freq_factor < self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor={self.high_freq_factor} must not be below low_freq_factor={self.low_freq_factor}"
            )

    def problems(self, turned: int, theta: float) -> list[str]:
        """What does not fit `turned` rotated dimensions of a head, and a base of frequencies of `theta`."""
        wrong, pairs = [], turned // 2
        if self.kind == "dynamic" and pairs < 2:
            wrong.append("attention.rope.scaling.kind: dynamic needs a head_dim and a rope.dim of at least 4")
        if self.kind == "yarn" and theta <= 1:
            wrong.append(f"attention.rope.scaling.kind: yarn needs a rope.theta above 1, not {theta}")
        lists = (self.short_factors, self.long_factors) if self.kind == "longrope" else ()
        if any(len(factors) != pairs for factors in lists):
            wrong.append(
                f"attention.rope.scaling.short_factors and long_factors need {pairs} numbers each, half of what rotates"
            )
        return wrong


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RelativePositions:
    """Relative position biases: each head adds a learned one for each range to attention scores (arXiv 1910.10683).

    Half of the ranges hold one relative position each, beginning with 0. The others grow with its logarithm. With
    attention.mask: full, half of the ranges are of keys that come after the query.

    With a side, relative positions are those of the patches of an image in two dimensions, each of which has a range of
    its own (BEiT, arXiv 2106.08254).
    """

    ranges: Size = 32  # the number of ranges of relative positions
    distance: Size = 128  # from this distance on, all keys are in the last range
    shared: bool = True  # whether all layers have one table (T5), or each has its own
    side: Count = 0  # patches on a side of an image, or of a window of it; 0: relative positions are those in a row
    learned_row: bool = True  # whether a learned row stands before these patches

    @property
    def ranges_of_plane(self) -> int:
        """The number of ranges in two dimensions: three are those of a learned token, as query, as key, and as both."""
        return (2 * self.side - 1) ** 2 + 3 * self.learned_row

    def __post_init__(self):
        if self.side:
            if self.ranges != self.ranges_of_plane:
                raise ValueError(f"side={self.side} gives {self.ranges_of_plane} ranges: set ranges={self.ranges} to "
                                 f"{self.ranges_of_plane}")  # fmt: skip
        elif self.ranges % 4 or self.distance <= self.ranges // 2:
            raise ValueError(
                f"ranges={self.ranges} must be a multiple of 4, and distance={self.distance} above half of it"
            )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RelativeVectors:
    """A learned vector of the model's width for each range of relative positions, as in DeBERTa (arXiv 2006.03654).

    Each vector is normed and projected to a query and a key by each layer's own matrices. The score of a query and a
    key then includes the query times the key of their relative position, and the key times its query. Half of the
    ranges are of keys that come after the query, and half of these hold one relative position each. If `distance` is
    half of `ranges`, all of them do.
    """

    ranges: Size = 512  # the number of ranges of relative positions
    distance: Size = 512  # from this distance on, all keys are in the last range
    own_projections: bool = False  # each layer has projections for the vectors alone, and they have no norm (DeBERTa 1)

    def __post_init__(self):
        if self.ranges % 4 or self.distance < self.ranges // 2:
            raise ValueError(
                f"ranges={self.ranges} must be a multiple of 4, and distance={self.distance} at least half of it"
            )

    def problems(self, model: Any) -> list[str]:
        """The settings of a model that do not fit relative position vectors."""
        problems = {
            f"kv_heads={model.kv_heads}": model.kv_heads != model.heads,
            "attention.key_bias: false": not model.attention.key_bias and not self.own_projections,
        }
        wrong = [what for what, is_wrong in problems.items() if is_wrong]
        return [f"attention.relative_vectors does not go with {what}" for what in wrong]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Convolution:
    """A convolution over the tokens that the first layer reads. Its result is added to the output of that layer, and a
    norm follows (DeBERTa v2 xlarge).
    """

    taps: Size = 3  # how many tokens it sees: as many before a token as after it
    activation: Literal["tanh", "gelu"] = "tanh"  # of its output

    def __post_init__(self):
        if self.taps % 2 == 0:
            raise ValueError(f"taps={self.taps}: must be an odd number")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class AttentionTemperature:
    """Queries that grow with their position p (arXiv 2501.19399): times 1 + scale log(1 + floor((p + offset) / every)).

    every: so many positions have the same factor. layers: those that have it, all of them or those of kind nope.
    """

    scale: Positive = 0.1  # how fast the factor grows
    every: Size = 8192  # the length of a step, in positions
    offset: Count = 0  # added to a position, which is counted from 0 (Llama 4: 1)
    layers: Literal["all", "nope"] = "all"  # which layers have it


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LinearAttention:
    """Linear attention by the gated delta rule (arXiv 2412.06464), as Qwen3-Next has it."""

    key_heads: Size  # heads of queries and keys
    value_heads: Size  # heads of values; value_heads / key_heads of them share a query and a key
    head_dim: Size  # the size of one head of either kind
    taps: Size = 4  # how many tokens the short convolution of queries, keys and values sees, a token's own included

    def __post_init__(self):
        if self.value_heads % self.key_heads:
            raise ValueError(f"value_heads={self.value_heads} is not a multiple of key_heads={self.key_heads}")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LatentAttention:
    """Keys and values of all heads are made from one short vector of a token, as DeepSeek-V2 has it (arXiv 2405.04434).

    A key of a head has head_dim numbers. The first rope.dim of them are rotated, and all heads share them. So a cache
    keeps kv_rank + rope.dim numbers of a token in a layer.
    """

    kv_rank: Size  # the size of the vector that keys and values are made from (kv_lora_rank)
    q_rank: Count = 0  # the size of the vector that queries are made from (q_lora_rank); 0: they are made directly
    v_head_dim: Size  # the size of a value of a head

    def problems(self, model: Any) -> list[str]:
        """What of a model does not fit latent attention."""
        turned = model.attention.rope.dim
        problems = {
            f"kv_heads={model.kv_heads}: each of heads={model.heads} has keys of its own: set kv_heads to "
            f"{model.heads}": model.kv_heads != model.heads,
            f"attention.rope.dim={turned}: set the size of the key that all heads share, below head_dim="
            f"{model.head_dim}": not 0 < turned < model.head_dim,
            f"v_head_dim={self.v_head_dim} is above head_dim={model.head_dim}": self.v_head_dim > model.head_dim,
            "lora.targets: there are no wk and wv, and no wq with a q_rank":
                model.lora and {"wk", "wv", *(["wq"] * bool(self.q_rank))} & {*model.lora.targets},
        }  # fmt: skip
        return [f"attention.latent: {message}" for message, is_wrong in problems.items() if is_wrong]


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
