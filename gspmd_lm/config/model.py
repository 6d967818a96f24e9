"""The section `model` of a config: what one stack of blocks computes, and what stands before and after it."""

import dataclasses
import functools
import math
from typing import Any, Literal

from pydantic.dataclasses import dataclass

from gspmd_lm.config.layers import (
    AttentionTemperature,
    Convolution,
    LatentAttention,
    LinearAttention,
    Lora,
    RelativePositions,
    RelativeVectors,
    RopeScaling,
    problems_of_experts,
)
from gspmd_lm.config.masks import Masks
from gspmd_lm.config.media import Frames, Patches
from gspmd_lm.config.stacks import Encoder, Vision
from gspmd_lm.config.types import STRICT, BelowOne, Count, LayerKind, NotNegative, Positive, Size, Stack, StackName
from gspmd_lm.config.windows import Windows


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ModelConfig:
    """One model. Sizes carry the names of the logical axes they belong to (see axes.py)."""

    layers: Size  # how many blocks
    shared_layers: bool = False  # whether all blocks have the same weights (ALBERT)
    embed: Size  # the width of the residual stream
    heads: Size  # query heads
    kv_heads: Size  # key and value heads; each serves heads / kv_heads query heads
    head_dim: Size  # the size of one head
    mlp: Size  # the hidden width of the feed-forward network, or of each expert if expert_mlp is 0
    # How many tokens there are. 0 means as many as data.tokenizer has, with padded_vocab raised to the next multiple of
    # 128. The config of a run holds the numbers.
    vocab: Count
    padded_vocab: Count = 0  # rows of the embedding table; 0 means vocab. The added rows are never predicted.
    padded_heads: Count = 0  # query heads in the weights; 0 means heads. Added heads, and their keys, add nothing.
    context: Size  # the longest sequence, and the rows of a learned position table

    block: Literal["sequential", "parallel"] = "sequential"  # parallel: x + attention(norm(x)) + mlp(norm(x))
    shared_norm: bool = True  # whether attention and MLP of a parallel block read the same norm
    pre_norms: bool = True  # attention and MLP read the residual stream through a norm; OLMo 2 has post_norms instead
    post_norms: bool = False  # the outputs of attention and MLP go through a norm too (Gemma 2)
    sum_norms: bool = False  # each sum with the residual stream goes through a norm (the first Transformer, OPT-350m)
    final_norm: bool = True  # a norm after the last layer
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"  # the kind of all norms
    norm_scale: bool = True  # whether norms have a learned scale
    norm_bias: bool = False  # whether norms have a learned bias
    norm_eps: BelowOne = 1e-6  # added to the variance in a norm
    norm_offset: float = 0.0  # added to scales; 1 if the weights store scale - 1 (Gemma)
    embedding_norm: bool = False  # a norm right after the token table (BLOOM)
    token_types: Count = 0  # rows of a table of types, which are added to tokens (BERT: sentence A or B); 0 means none
    embedding_scale: Positive = 1.0  # rows of the token table are multiplied by it
    # The width of the token table; 0 means embed. With another width, one matrix brings its rows to embed, and a second
    # one brings the output of the last layer back (OPT-350m).
    embedding_width: Count = 0
    # What the first matrix brings to embed. tokens: rows of the token table. sum: these with positions and types, and
    # normed by embedding_norm, all of the table's width; a bias is added (ALBERT).
    embedding_in: Literal["tokens", "sum"] = "tokens"
    residual_scale: Positive = 1.0  # the outputs of attention and MLP are multiplied by it (Granite)
    layer_scale: NotNegative = 0.0  # they are multiplied by learned numbers, which begin with it; 0 means none (BEiT)
    # Residual streams side by side, of which a block reads the first. A small matrix predicts all of them from each
    # other before the block, and corrects all of them after it (AltUp, arXiv 2301.13310).
    residual_streams: Size = 1
    laurel_rank: Count = 0  # the rank of a product beside attention; 0 means none (LAuReL, arXiv 2411.07501)
    # The width of a token's embedding for each layer, which enters the other residual streams; 0 means none (Gemma 3n).
    layer_embed: Count = 0
    layer_vocab: Count = 0  # tokens with such embeddings; those after them have the first token's; 0 means vocab
    qk_norm: bool = False  # whether queries and keys go through a norm before they are rotated
    # shared: each head by itself, all with one scale. per_head: each by itself, with a scale of its own and no bias
    # (Cohere). joint: all heads together (OLMo 2). unscaled: each by itself, without a scale, and only in layers with
    # positions (Llama 4).
    qk_norm_kind: Literal["shared", "per_head", "joint", "unscaled"] = "shared"
    mlp_kind: Literal["gated", "plain"] = "gated"  # gated: activation(x w_gate) * (x w_up); plain: activation(x w_up)
    # The nonlinearity of the feed-forward network. relu2 is the square of relu.
    activation: Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"] = "silu"
    activation_slope: Positive = 1.0  # silu is x * sigmoid(slope x) (gpt-oss: 1.702)
    mlp_limit: NotNegative = 0.0  # x w_gate is cut off above it, and x w_up beyond it on both sides; 0 means neither
    mlp_up_offset: float = 0.0  # added to x w_up of a gated MLP (gpt-oss: 1)
    # About the share of x w_gate that is cut off below: what is under this quantile of a normal distribution with the
    # mean and deviation of a token's x w_gate (arXiv 2506.06644). 0 means none.
    activation_sparsity: BelowOne = 0.0
    sparse_layers: Count = 0  # how many layers have it, the first ones; 0 means all
    experts: Count = 0  # routed experts of a layer, in place of one feed-forward network; 0 means none
    experts_per_token: Count = 0  # how many of them compute each token: those with the highest scores
    expert_mlp: Count = 0  # the hidden width of one expert; 0 means mlp
    shared_mlp: Count = 0  # the hidden width, together, of the experts that compute every token; 0 means none
    shared_gate: bool = False  # the shared experts' output is multiplied by sigmoid(x w) (Qwen2-MoE)
    dense_layers: Count = 0  # the first layers have one feed-forward network of width mlp in place of experts
    # Every so many layers, the last one has experts, and the others have one feed-forward network of width mlp.
    sparse_step: Size = 1
    # How the router's logits become scores, in float32: softmax over all experts, or each by itself (DeepSeek-V3).
    # sparsemixer (arXiv 2409.12136): an expert's weight is its share among those that come close to it (Phi-3.5-MoE).
    routing: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    router_jitter: NotNegative = 0.01  # sparsemixer: half of how far, relatively, a logit that comes close may be lower
    normalized_weights: bool = True  # the weights of a token's experts add up to 1; otherwise they are the scores
    expert_scale: Positive = 1.0  # then they are multiplied by it (DeepSeek-V3: 2.5)
    weighted_input: bool = False  # the weights multiply what experts read, not what they compute (Llama 4)
    expert_groups: Size = 1  # the experts of a layer form so many groups of neighbours ...
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
    router_z_loss: NotNegative = 0.0  # weight of the squared log of the sum of exp(logits) of the router
    # 0: every token is computed by all of its experts. Above 0: of each row, an expert computes at most capacity_factor
    # times the mean, the first ones. TOKENS BEYOND THAT ARE DROPPED, as some models were trained.
    capacity_factor: NotNegative = 0.0
    # How a token's position enters. alibi_bf16 is alibi that is rounded to bfloat16 and scaled as scores are (Falcon).
    positions: Literal["rope", "learned", "sinusoidal", "alibi", "alibi_bf16", "none"] = "rope"
    position_offset: Count = 0  # rows of a learned table that stand before position 0's (OPT: 2)
    rope_theta: Positive = 10000.0  # the base of RoPE's frequencies
    rope_dim: Count = 0  # how many dimensions of a head are rotated, the first ones; 0 means all
    rope_scaling: RopeScaling | None = None  # for a context that is longer than in training
    relative_positions: RelativePositions | None = None  # a bias on scores that depends on distance (T5, BEiT)
    relative_vectors: RelativeVectors | None = None  # parts of scores that depend on distance and tokens (DeBERTa)
    convolution: Convolution | None = None  # over tokens, beside the first layer (DeBERTa v2 xlarge)
    mask: Literal["causal", "full"] = "causal"  # the tokens of its text that a token sees: those up to itself, or all
    encoder: Encoder | None = None  # each layer attends, after its own tokens, to what an encoder made of a source
    frames: Frames | None = None  # the encoder reads sounds, with fixed positions
    sliding_window: Count = 0  # how many tokens a token attends to, itself included; 0 means all before it
    sliding_rope_theta: NotNegative = 0.0  # layers with a sliding window then have no rope_scaling; 0 means rope_theta
    # A token attends to those of its own chunk: a document is cut into chunks of so many tokens. 0 means no chunks.
    attention_chunk: Count = 0
    # Which layers have the window, the chunks, linear attention, or windows that are shifted or as large as the image,
    # and which (reading) also attend to what another stack made. The pattern is repeated over the depth; () means all
    # layers. A layer of kind nope has none of these, and no positions.
    layer_pattern: tuple[LayerKind, ...] = ()
    memory_width: Count = 0  # layers of kind reading: the width of that, which vision.queries sets by itself
    linear_attention: LinearAttention | None = None  # of layers of kind linear
    latent_attention: LatentAttention | None = None  # of all other layers
    # So many layers, the last ones, attend to the keys and values of the last layer before them of the same kind.
    shared_kv_layers: Count = 0
    value_norm: bool = False  # whether values go through a norm without a scale (Gemma 3n)
    attention_gate: bool = False  # the output of attention is multiplied by sigmoid(x w), before wo (Qwen3-Next)
    attention_temperature: AttentionTemperature | None = None  # queries that grow with their position
    query_scale: NotNegative = 0.0  # attention scores are multiplied by it; 0 means head_dim ** -0.5
    qkv_bias: bool = False  # whether the query, key and value projections have biases
    key_bias: bool = True  # whether the key projection is one of those that have (Whisper, BEiT: not)
    attention_out_bias: bool = False  # whether the projection after attention has a bias
    mlp_bias: bool = False  # whether the feed-forward network has biases
    unembedding_bias: bool = False  # whether the logits have a bias
    head_transform: bool = False  # a matrix, the activation and a norm stand before the logits (BERT)
    # The classes of a text, whose first token goes through a matrix and pooler_activation, or of an image; 0: none.
    classes: Count = 0
    classes_of: Literal["text", "tokens"] = "text"  # tokens: each of a text, as objective: replaced needs it (ELECTRA)
    pooler_activation: Literal["tanh", "gelu"] = "tanh"  # BERT: tanh; ELECTRA: gelu
    patches: Patches | None = None  # the model sees images; vocab is 0, and context is the rows of one (ViT)
    windows: Windows | None = None  # attention is within windows of the patches, of which later levels have fewer
    # In later levels, and beside an encoder, padding that no patch sees makes the rows of an image a multiple of it.
    row_multiple: Size = 1
    vision: Vision | None = None  # a stack of blocks that sees the images of texts (CLIP)
    masks: Masks | None = None  # what cuts the object that a prompt means out of an image (SAM)
    tied_embeddings: bool = False  # whether the logits are computed with the token table
    dropout: BelowOne = 0.0  # the share of a block's outputs that is dropped in training
    attention_sinks: bool = False  # each head has a learned logit of nothing in its softmax (gpt-oss)
    attention_scores_dtype: Literal["float32", "bfloat16"] = "float32"  # of scores in XLA's attention
    attention_softcap: NotNegative = 0.0  # 0 means none; otherwise cap * tanh(scores / cap)
    logit_scale: Positive = 1.0  # logits are multiplied by it, before the cap
    logit_softcap: NotNegative = 0.0  # the same cap for the logits
    z_loss: NotNegative = 0.0  # weight of the squared log-partition function
    init_std: NotNegative = 0.02  # the standard deviation of new weights
    lora: Lora | None = None  # adapters that are trained in place of the weights
    frozen: tuple[str, ...] = ()  # weights that are not trained, by the first word of their names, such as vision
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"  # of activations, and of weights in use
    # Of weights at rest. int8, fp8: of block weights that are not trained, with a scale for each of their outputs.
    weight_dtype: Literal["int8", "fp8", "bfloat16", "float32"] = "float32"
    matmul_dtype: Literal["int8", "fp8"] | None = None  # of operands of matmuls with block weights; null: compute_dtype
    matmul_precision: Literal["default", "high", "highest"] = "default"  # of jax's matrix products

    def __post_init__(self):
        wrong = []
        if self.heads % self.kv_heads:
            wrong.append(f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}")
        if self.padded_vocab and self.padded_vocab < self.vocab:
            wrong.append(
                f"padded_vocab={self.padded_vocab} is smaller than vocab={self.vocab}: set padded_vocab to 0, or "
                "vocab to 0, which means the tokenizer's size with room to divide"
            )
        group = max(self.heads // self.kv_heads, 1)
        if self.padded_heads and (self.padded_heads < self.heads or (self.kv_heads > 1 and self.padded_heads % group)):
            of = f", and a multiple of {group}, the query heads of each key head" if self.kv_heads > 1 else ""
            wrong.append(f"padded_heads={self.padded_heads} must be at least heads={self.heads}{of}")
        if self.positions == "rope" and (self.head_dim % 2 or self.rope_dim % 2 or self.rope_dim > self.head_dim):
            sizes = f"head_dim={self.head_dim}, rope_dim={self.rope_dim}"
            wrong.append(f"positions: rope needs even sizes, and a rope_dim of at most head_dim: {sizes}")
        if self.rope_scaling:
            wrong += self.rope_scaling.problems(self.rope_dim or self.head_dim, self.rope_theta)
        if self.qk_norm_kind in ("joint", "unscaled") and self.norm != "rmsnorm":
            wrong.append(f"qk_norm_kind: {self.qk_norm_kind} needs norm: rmsnorm")
        keys = dict(sliding="sliding_window", chunked="attention_chunk", linear="linear_attention", shifted="windows",
                    whole="windows", reading="memory_width")  # fmt: skip
        wrong += [f"layer_pattern has {kind} layers: set {key}" for kind, key in keys.items()
                  if kind in self.layer_pattern and not getattr(self, key)]  # fmt: skip
        kinds = self.sliding_window, self.attention_chunk, self.linear_attention
        if not self.layer_pattern and sum(map(bool, kinds)) > 1:
            wrong.append("a layer has one of sliding_window, attention_chunk and linear_attention: set layer_pattern")
        if self.activation_slope != 1 and self.activation != "silu":
            wrong.append(f"activation_slope={self.activation_slope} belongs to activation: silu")
        if self.attention_sinks and self.positions in ("alibi", "alibi_bf16"):
            wrong.append(f"attention_sinks does not go with positions: {self.positions}")
        if self.lora and self.frozen:
            wrong.append("lora trains nothing but its adapters, also of frozen weights: set frozen to []")
        if self.lora and self.mlp_kind == "plain" and "w_gate" in self.lora.targets:
            wrong.append("lora.targets: a plain MLP has no w_gate, only w_up and w_down")
        if self.matmul_dtype and self.weight_dtype in ("int8", "fp8") and self.matmul_dtype != self.weight_dtype:
            wrong.append(f"matmul_dtype: {self.matmul_dtype} does not go with weight_dtype: {self.weight_dtype}")
        wrong += self._wrong_streams() + problems_of_experts(self, _EXPERTS) + self._wrong_masks()
        parts = ["latent_attention", "encoder", "vision", "masks", "relative_vectors", "windows", "convolution"]
        wrong += [line for name in parts if (part := getattr(self, name)) for line in part.problems(self)]
        if wrong:
            raise ValueError("\n".join(wrong))

    def _wrong_streams(self) -> list[str]:
        """What is wrong with the keys of the token table, of residual streams, and of layers that differ by place."""
        with_keys, kinds = max(self.layers - self.shared_kv_layers, 0), self.kind_of_each_layer
        lacking = ", ".join(sorted({*kinds[with_keys:]} - {*kinds[:with_keys]}))
        problems = {
            "embedding_in: sum needs embedding_width": self.embedding_in == "sum" and not self.embedding_width,
            "laurel_rank goes with block: sequential, pre_norms: true and sum_norms: false":
                self.laurel_rank and (self.block != "sequential" or not self.pre_norms or self.sum_norms),
            "layer_scale goes with block: sequential, and without encoder":
                self.layer_scale and (self.block == "parallel" or self.encoder),
            "layer_embed enters more residual streams: set residual_streams":
                self.layer_embed and self.residual_streams == 1,
            f"layer_vocab={self.layer_vocab} is above vocab={self.vocab}": 0 < self.vocab < self.layer_vocab,
            "activation_sparsity goes with mlp_kind: gated": self.activation_sparsity and self.mlp_kind == "plain",
            f"sparse_layers={self.sparse_layers}: set activation_sparsity, and at most layers={self.layers}":
                self.sparse_layers > (self.layers if self.activation_sparsity else 0),
            "experts do not go with shared_kv_layers": self.experts and self.shared_kv_layers,
            "experts do not go with activation_sparsity": self.experts and self.activation_sparsity,
            f"shared_kv_layers={self.shared_kv_layers}: no layer before them is of kind {lacking}": lacking,
            "shared_kv_layers goes with layers of kind sliding and full":
                self.shared_kv_layers and {*kinds} - {"sliding", "full"},
        }  # fmt: skip
        with_layers = {"experts": self.experts, "encoder": self.encoder, "sparse_layers": self.sparse_layers,
                       "shared_kv_layers": self.shared_kv_layers, "layer_embed": self.layer_embed,
                       "a layer_pattern of several layers": len(self.layer_pattern) > 1,
                       f"weight_dtype: {self.weight_dtype}": self.weight_dtype in ("int8", "fp8")}  # fmt: skip
        problems |= {f"shared_layers does not go with {key}": self.shared_layers and is_set
                     for key, is_set in with_layers.items()}  # fmt: skip
        return [message for message, is_wrong in problems.items() if is_wrong]

    def _wrong_masks(self) -> list[str]:
        """What does not go with a full mask, with a bias by distance, or with classes."""
        sided = {"sliding_window": self.sliding_window, "linear_attention": self.linear_attention,
                 f"positions: {self.positions}": self.positions in ("alibi", "alibi_bf16")}  # fmt: skip
        wrong = [f"mask: full does not go with {key}" for key in sided if self.mask == "full" and sided[key]]
        if self.relative_positions:
            own = not self.relative_positions.shared
            taken = {"attention_sinks": self.attention_sinks,
                     "latent_attention, unless it is shared": own and self.latent_attention,
                     f"positions: {self.positions}": self.positions in ("alibi", "alibi_bf16")}  # fmt: skip
            wrong += [f"relative_positions does not go with {key}" for key, is_set in taken.items() if is_set]
        heads = ("head_transform", "unembedding_bias", "logit_softcap", "experts", "encoder")
        return wrong + [f"classes does not go with {key}" for key in heads if self.classes and getattr(self, key)]

    @property
    def balance_bias(self) -> bool:
        """Whether the scores of experts have a bias that gives them equal loads."""
        return self.balance in ("bias", "bias_row")

    @property
    def expert_width(self) -> int:
        """The hidden width of one expert."""
        return self.expert_mlp or self.mlp

    @functools.cached_property
    def stacks(self) -> tuple[Stack, ...]:
        """The layers in order. The first ones may be dense, sparse or beside a convolution; the last may share keys."""
        ends: dict[StackName, int] = {
            "layers": self.layers - self.shared_kv_layers, "dense_layers": self.dense_layers,
            "sparse_layers": self.sparse_layers, "shared_kv_layers": self.layers,
            "convolved_layers": 1 if self.convolution else 0,
        }  # fmt: skip
        turn, first, stacks = math.lcm(len(self.layer_pattern) or 1, self.sparse_step), 0, []
        for name in sorted(ends, key=ends.__getitem__):
            if (count := ends[name] - first) > 0:
                kinds = tuple(self._of_layer(first + i) for i in range(min(turn, count)))
                stacks.append(Stack(name, first, count, kinds))
                first += count
        return tuple(stacks)

    @property
    def each_layer(self) -> tuple["ModelConfig", ...]:
        """The settings of each layer."""
        return tuple(stack.kinds[i % len(stack.kinds)] for stack in self.stacks for i in range(stack.layers))

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding table, padding included."""
        with_tokens = not (self.patches or self.memory_width)
        assert self.vocab or not with_tokens, "vocab is 0 until data.trained.with_vocab_size() has asked the tokenizer"
        return self.padded_vocab or self.vocab

    @property
    def v_head_dim(self) -> int:
        """The size of a value of a head."""
        return self.latent_attention.v_head_dim if self.latent_attention else self.head_dim

    @property
    def head_rows(self) -> int:
        """Query heads in the weights, padding included."""
        return self.padded_heads or self.heads

    @property
    def kv_head_rows(self) -> int:
        """Key heads in the weights, padding included; a single one serves all query heads."""
        return 1 if self.kv_heads == 1 else self.head_rows * self.kv_heads // self.heads

    @property
    def reads(self) -> int:
        """The width of what another stack made, which each layer attends to; 0 means none."""
        return self.memory_width or (self.embed if self.encoder else 0)

    @property
    def one_text(self) -> bool:
        """Whether each row is one image, or one sound or its text, with padding behind it."""
        return bool(self.frames or self.patches)

    @property
    def of_encoder(self) -> "ModelConfig | None":
        """The settings of the encoder, if there is one."""
        return self.encoder and self.encoder.of(self)

    @property
    def of_vision(self) -> "ModelConfig | None":
        """The settings of the stack that sees images beside texts, if there is one."""
        return self.vision and self.vision.of(self)

    @property
    def of_queries(self) -> "ModelConfig | None":
        """The settings of the stack whose learned rows read an image, if there is one."""
        return self.vision and self.vision.queries and self.vision.queries.of(self)

    @property
    def of_memory(self) -> "ModelConfig":
        """The settings of the attention of a layer to what another stack made: it knows no positions and no mask."""
        plain: dict[str, Any] = {
            "mask": "full", "positions": "none", "relative_positions": None, "sliding_window": 0, "attention_chunk": 0,
            "linear_attention": None, "latent_attention": None, "attention_sinks": False,
            "attention_temperature": None, "shared_kv_layers": 0, "vision": None,
        }  # fmt: skip
        return dataclasses.replace(self, **plain)

    @property
    def layer_kinds(self) -> tuple["ModelConfig", ...]:
        """The settings of the layers of one turn of each stack: of all kinds of layers there are."""
        return tuple(kind for stack in self.stacks for kind in stack.kinds)

    @property
    def kind_of_each_layer(self) -> tuple[LayerKind, ...]:
        """The pattern, repeated over the depth."""
        usual = "sliding" if self.sliding_window else "chunked" if self.attention_chunk else "full"
        pattern = self.layer_pattern or ("linear" if self.linear_attention else usual,)
        return tuple(pattern[i % len(pattern)] for i in range(self.layers))

    def _of_layer(self, number: int) -> "ModelConfig":
        """The settings of one layer, of whose kind all layers are."""
        kind, values = self.kind_of_each_layer[number], dict[str, Any](layer_pattern=(), sparse_step=1, sparse_layers=0)
        if number < self.layers - self.shared_kv_layers:
            values["shared_kv_layers"] = 0
        if number >= (self.sparse_layers or self.layers):
            values["activation_sparsity"] = 0.0
        if kind != "sliding":
            values["sliding_window"] = 0
        elif self.sliding_rope_theta:
            values |= {"rope_theta": self.sliding_rope_theta, "rope_scaling": None}
        values["attention_chunk"] = self.attention_chunk if kind == "chunked" else 0
        values["linear_attention"] = self.linear_attention if kind == "linear" else None
        values["memory_width"] = self.memory_width if kind == "reading" else 0
        values["windows"] = self.windows and self.windows.of_layer(kind, self)
        if kind == "nope":
            values |= {"positions": "none", "qk_norm": self.qk_norm and self.qk_norm_kind != "unscaled"}
        elif self.attention_temperature and self.attention_temperature.layers == "nope":
            values["attention_temperature"] = None
        if number < self.dense_layers or (number + 1) % self.sparse_step:
            values |= _EXPERTS
        return dataclasses.replace(self, **values)


# The keys of experts, from the first to the last, with their defaults: the settings of a layer without experts.
_KEYS = [field.name for field in dataclasses.fields(ModelConfig)]
_EXPERTS: dict[str, Any] = {
    field.name: field.default
    for field in dataclasses.fields(ModelConfig)[_KEYS.index("experts") : _KEYS.index("capacity_factor") + 1]
}
