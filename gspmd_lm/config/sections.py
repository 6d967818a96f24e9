"""The sections of `model` that say what a block is made of, and what stands before and after the blocks."""

import dataclasses
from typing import Any, Literal

from pydantic.dataclasses import dataclass

from gspmd_lm.config.layers import (
    AttentionTemperature,
    LatentAttention,
    LinearAttention,
    RelativePositions,
    RelativeVectors,
    RopeScaling,
)
from gspmd_lm.config.types import STRICT, BelowOne, Count, NotNegative, Positive, Size
from gspmd_lm.config.values import Section


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Norm(Section):
    """The norms: what they compute and where they stand."""

    kind: Literal["rmsnorm", "layernorm"] = "rmsnorm"  # what all norms compute
    scale: bool = True  # whether norms have a learned scale
    bias: bool = False  # whether norms have a learned bias
    eps: BelowOne = 1e-6  # added to the variance in a norm
    offset: float = 0.0  # added to scales; 1 if the weights store scale - 1 (Gemma)
    pre: bool = True  # attention and MLP read the residual stream through a norm; OLMo 2 has `post` instead
    post: bool = False  # the outputs of attention and MLP go through a norm too (Gemma 2)
    sum: bool = False  # each sum with the residual stream goes through a norm (the first Transformer, OPT-350m)
    final: bool = True  # a norm after the last layer
    shared: bool = True  # whether attention and MLP of a parallel block read the same norm


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Rope(Section):
    """Rotary positions (RoPE, arXiv 2104.09864) of queries and keys."""

    theta: Positive = 10000.0  # the base of the frequencies
    dim: Count = 0  # how many dimensions of a head are rotated, the first ones; 0 means all
    scaling: RopeScaling | None = None  # for a context that is longer than in training
    window_theta: NotNegative = 0.0  # theta of layers with a window, which then have no scaling; 0 means theta


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Attention(Section):
    """What attention computes besides its sizes."""

    mask: Literal["causal", "full"] = "causal"  # the tokens of its text that a token sees: those up to itself, or all
    rope: Rope = dataclasses.field(default_factory=Rope)  # with positions: rope
    window: Count = 0  # how many tokens a token attends to, itself included; 0 means all before it
    # A token attends to those of its own chunk: a document is cut into chunks of so many tokens. 0 means no chunks.
    chunk: Count = 0
    scale: NotNegative = 0.0  # attention scores are multiplied by it; 0 means head_dim ** -0.5
    softcap: NotNegative = 0.0  # 0 means none; otherwise cap * tanh(scores / cap)
    sinks: bool = False  # each head has a learned logit of nothing in its softmax (gpt-oss)
    gate: bool = False  # the output of attention is multiplied by sigmoid(x w), before wo (Qwen3-Next)
    temperature: AttentionTemperature | None = None  # queries that grow with their position
    scores_dtype: Literal["float32", "bfloat16"] = "float32"  # of scores in XLA's attention
    qkv_bias: bool = False  # whether the query, key and value projections have biases
    key_bias: bool = True  # whether the key projection is one of those that have (Whisper, BEiT: not)
    out_bias: bool = False  # whether the projection after attention has a bias
    qk_norm: bool = False  # whether queries and keys go through a norm before they are rotated
    # shared: each head by itself, all with one scale. per_head: each by itself, with a scale of its own and no bias
    # (Cohere). joint: all heads together (OLMo 2). unscaled: each by itself, without a scale, and only in layers with
    # positions (Llama 4).
    qk_norm_kind: Literal["shared", "per_head", "joint", "unscaled"] = "shared"
    value_norm: bool = False  # whether values go through a norm without a scale (Gemma 3n)
    # The last `shared_kv_layers` layers compute no keys and values: each reuses those of the nearest earlier layer of
    # its kind.
    shared_kv_layers: Count = 0
    relative_positions: RelativePositions | None = None  # relative position biases (T5, BEiT)
    relative_vectors: RelativeVectors | None = None  # products of tokens and relative positions (DeBERTa)
    linear: LinearAttention | None = None  # of layers of kind linear
    latent: LatentAttention | None = None  # of all other layers


@dataclass(frozen=True, kw_only=True, config=STRICT)
class FeedForward(Section):
    """What the feed-forward network computes, whose hidden width is `mlp`."""

    kind: Literal["gated", "plain"] = "gated"  # gated: activation(x w_gate) * (x w_up); plain: activation(x w_up)
    # The nonlinearity of the feed-forward network. relu2 is the square of relu.
    activation: Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"] = "silu"
    slope: Positive = 1.0  # silu is x * sigmoid(slope x) (gpt-oss: 1.702)
    limit: NotNegative = 0.0  # x w_gate is cut off above it, and x w_up beyond it on both sides; 0 means neither
    up_offset: float = 0.0  # added to x w_up of a gated MLP (gpt-oss: 1)
    # About the share of x w_gate that is cut off below: what is under this quantile of a normal distribution with the
    # mean and deviation of a token's x w_gate (arXiv 2506.06644). 0 means none.
    sparsity: BelowOne = 0.0
    sparse_layers: Count = 0  # how many layers have it, the first ones; 0 means all
    bias: bool = False  # whether the feed-forward network has biases

    def __post_init__(self):
        if self.slope != 1 and self.activation != "silu":
            raise ValueError(f"slope={self.slope} belongs to activation: silu")
        if self.sparsity and self.kind == "plain":
            raise ValueError("sparsity goes with kind: gated")
        if self.sparse_layers and not self.sparsity:
            raise ValueError(f"sparse_layers={self.sparse_layers}: set sparsity")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Experts(Section):
    """Experts of a layer, in place of one feed-forward network, and the router that chooses among them."""

    count: Size  # routed experts of a layer
    per_token: Size  # how many of them compute each token: those with the highest scores
    mlp: Count = 0  # the hidden width of one expert; 0 means model.mlp
    shared_mlp: Count = 0  # the hidden width, together, of the experts that compute every token; 0 means none
    shared_gate: bool = False  # the shared experts' output is multiplied by sigmoid(x w) (Qwen2-MoE)
    dense_layers: Count = 0  # the first layers have one feed-forward network of width model.mlp in place of experts
    # Every so many layers, the last one has experts, and the others have one feed-forward network of width model.mlp.
    step: Size = 1
    # How the router's logits become scores, in float32: softmax over all experts, or each by itself (DeepSeek-V3).
    # sparsemixer (arXiv 2409.12136): an expert's weight is its share among those that come close to it (Phi-3.5-MoE).
    routing: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    jitter: NotNegative = 0.01  # sparsemixer: half of how far, relatively, a logit that comes close may be lower
    normalized_weights: bool = True  # the weights of a token's experts add up to 1; otherwise they are the scores
    scale: Positive = 1.0  # then they are multiplied by it (DeepSeek-V3: 2.5)
    weighted_input: bool = False  # the weights multiply what experts read, not what they compute (Llama 4)
    groups: Size = 1  # the experts of a layer form so many groups of neighbours ...
    # ... of which a token may use so many: those with the highest best score, or, with sigmoid, sum of the two best.
    groups_per_token: Size = 1
    router_bias: bool = False  # the router's logits have a learned bias (gpt-oss)
    # How experts get equal loads. batch: by the loss of arXiv 2101.03961, over the global batch. row: by the same loss
    # in each row. bias: by a bias on the scores, which only decides who is chosen; after each step it moves by
    # balance_rate, against the sign of the load above the mean (arXiv 2408.15664). bias_row: by both, as DeepSeek-V3
    # was trained, with a balance_weight of 0.0001 (arXiv 2412.19437).
    balance: Literal["none", "batch", "row", "bias", "bias_row"] = "none"
    # batch, row, bias_row: what the balancing loss, 1 for equal loads, is multiplied by
    balance_weight: NotNegative = 0.01
    balance_rate: NotNegative = 0.001  # bias, bias_row: how far it moves in a step
    z_loss: NotNegative = 0.0  # weight of the squared log of the sum of exp(logits) of the router
    # 0: every token is computed by all of its experts. Above 0: of each row, an expert computes at most capacity_factor
    # times the mean, the first ones. TOKENS BEYOND THAT ARE DROPPED, as some models were trained.
    capacity_factor: NotNegative = 0.0

    def __post_init__(self):
        E, k, groups, used, wrong = self.count, self.per_token, self.groups, self.groups_per_token, []
        if k > E:
            wrong.append(f"per_token={k} must be from 1 to count={E}")
        if E % groups or used > groups:
            wrong.append(f"groups={groups} must divide count={E} and be at least groups_per_token={used}")
        elif k > used * (E // groups):
            wrong.append(f"per_token={k} is more than groups_per_token={used} groups of {E // groups} have")
        elif groups > 1 and self.routing == "sigmoid" and E // groups < 2:
            wrong.append(f"groups={groups}: with sigmoid, a group needs at least two of the {E} experts")
        if self.routing == "sparsemixer" and (self.normalized_weights or groups > 1 or self.balance_bias):
            wrong.append("routing: sparsemixer goes with normalized_weights: false, one group, and no bias on scores")
        if self.shared_gate and not self.shared_mlp:
            wrong.append("shared_gate: there are no shared experts: set shared_mlp")
        if wrong:
            raise ValueError("\n".join(wrong))

    @property
    def balance_bias(self) -> bool:
        """Whether the scores of experts have a bias that gives them equal loads."""
        return self.balance in ("bias", "bias_row")

    def problems(self, model: Any) -> list[str]:
        """What of a model leaves no layer to experts."""
        if self.dense_layers // self.step < model.layers // self.step:
            return []
        name = "step" if self.dense_layers < model.layers else "dense_layers"
        return [f"experts.{name}={getattr(self, name)} leaves no layer of layers={model.layers} with experts"]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Embedding(Section):
    """What makes the first residual stream from tokens."""

    scale: Positive = 1.0  # rows of the token table are multiplied by it
    norm: bool = False  # a norm right after the token table (BLOOM)
    token_types: Count = 0  # rows of a table of types, which are added to tokens (BERT: sentence A or B); 0 means none
    # The width of the token table; 0 means embed. With another width, one matrix brings its rows to embed, and a second
    # one brings the output of the last layer back (OPT-350m).
    width: Count = 0
    # What the first matrix brings to embed. tokens: rows of the token table. sum: these with positions and types, and
    # normed by `norm`, all of the table's width; a bias is added (ALBERT).
    input: Literal["tokens", "sum"] = "tokens"
    position_offset: Count = 0  # rows of a learned position table that stand before position 0's (OPT: 2)
    tied: bool = False  # whether the logits are computed with the token table

    def __post_init__(self):
        if self.input == "sum" and not self.width:
            raise ValueError("input: sum needs width")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Logits(Section):
    """What is done to the logits of tokens, and their part of the loss."""

    bias: bool = False  # whether the logits have a bias
    transform: bool = False  # a matrix, the activation and a norm stand before the logits (BERT)
    scale: Positive = 1.0  # logits are multiplied by it, before the cap
    softcap: NotNegative = 0.0  # 0 means none; otherwise cap * tanh(logits / cap)
    z_loss: NotNegative = 0.0  # weight of the squared log-partition function


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Classes(Section):
    """Classes of texts, tokens or images in place of the logits of tokens."""

    count: Size  # how many
    # text: of a text, whose first token goes through a matrix and `pooler`; or of an image. tokens: of each token of a
    # text, as objective: replaced needs it (ELECTRA).
    of: Literal["text", "tokens"] = "text"
    pooler: Literal["tanh", "gelu"] = "tanh"  # the activation of the pooler. BERT: tanh; ELECTRA: gelu

    def __post_init__(self):
        if self.of == "tokens" and self.count != 1:
            raise ValueError("of: tokens needs count: 1")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Residual(Section):
    """What happens to the residual stream beside the sums with attention and MLP."""

    scale: Positive = 1.0  # the outputs of attention and MLP are multiplied by it (Granite)
    layer_scale: NotNegative = 0.0  # they are multiplied by learned numbers, which begin with it; 0 means none (BEiT)
    # Residual streams side by side, of which a block reads the first. A small matrix predicts all of them from each
    # other before the block, and corrects all of them after it (AltUp, arXiv 2301.13310).
    streams: Size = 1
    laurel_rank: Count = 0  # the rank of a product beside attention; 0 means none (LAuReL, arXiv 2411.07501)
    # The width of a token's embedding for each layer, which enters the other residual streams; 0 means none (Gemma 3n).
    layer_embed: Count = 0
    layer_vocab: Count = 0  # tokens with such embeddings; those after them have the first token's; 0 means vocab

    def __post_init__(self):
        if self.layer_embed and self.streams == 1:
            raise ValueError("layer_embed enters more residual streams: set streams")
