"""The section `model` of a config: what one stack of blocks computes, and what stands before and after it."""

import dataclasses
import functools
import math
from typing import Any, Literal

from pydantic.dataclasses import dataclass

from gspmd_lm.config.exclusions import contradictions
from gspmd_lm.config.layers import Convolution, Lora
from gspmd_lm.config.masks import Masks
from gspmd_lm.config.media import Frames, Patches
from gspmd_lm.config.sections import Attention, Classes, Embedding, Experts, FeedForward, Logits, Norm, Residual
from gspmd_lm.config.stacks import Encoder, Vision
from gspmd_lm.config.types import STRICT, BelowOne, Count, LayerKind, NotNegative, Size, Stack, StackName
from gspmd_lm.config.values import value_at
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
    mlp: Size  # the hidden width of the feed-forward network, or of each expert if experts.mlp is 0
    # How many tokens there are. 0 means as many as data.tokenizer has, with padded_vocab raised to the next multiple of
    # 128. The config of a run holds the numbers.
    vocab: Count
    padded_vocab: Count = 0  # rows of the embedding table; 0 means vocab. The added rows are never predicted.
    padded_heads: Count = 0  # query heads in the weights; 0 means heads. Added heads, and their keys, add nothing.
    context: Size  # the longest sequence, and the rows of a learned position table

    block: Literal["sequential", "parallel"] = "sequential"  # parallel: x + attention(norm(x)) + mlp(norm(x))
    # How a token's position enters. alibi_bf16 is alibi that is rounded to bfloat16 and scaled as scores are (Falcon).
    positions: Literal["rope", "learned", "sinusoidal", "alibi", "alibi_bf16", "none"] = "rope"
    # Which layers have the window, the chunks, linear attention, or windows that are shifted or as large as the image,
    # and which (reading) also attend to encoder output. The pattern is repeated over the depth; () means all layers. A
    # layer of kind nope has none of these, and no positions.
    layer_pattern: tuple[LayerKind, ...] = ()
    embedding: Embedding = dataclasses.field(default_factory=Embedding)
    norm: Norm = dataclasses.field(default_factory=Norm)
    attention: Attention = dataclasses.field(default_factory=Attention)
    feed_forward: FeedForward = dataclasses.field(default_factory=FeedForward)
    experts: Experts | None = None
    residual: Residual = dataclasses.field(default_factory=Residual)
    logits: Logits = dataclasses.field(default_factory=Logits)
    classes: Classes | None = None
    dropout: BelowOne = 0.0  # the share of a block's outputs that is dropped in training

    convolution: Convolution | None = None  # over tokens, beside the first layer (DeBERTa v2 xlarge)
    encoder: Encoder | None = None  # each layer attends, after its own tokens, to what an encoder made of a source
    frames: Frames | None = None  # the encoder reads sounds, with fixed positions
    # The width of the encoder output that layers of kind reading attend to. vision.queries sets it by itself.
    memory_width: Count = 0
    patches: Patches | None = None  # the model sees images; vocab is 0, and context is the rows of one (ViT)
    windows: Windows | None = None  # attention is within windows of the patches, of which later levels have fewer
    # In later levels, and beside an encoder, padding that no patch sees makes the rows of an image a multiple of it.
    row_multiple: Size = 1
    vision: Vision | None = None  # the encoder of the images that belong to texts (CLIP)
    masks: Masks | None = None  # the decoder of the mask of the object that a prompt means (SAM)

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
        rope, attention = self.attention.rope, self.attention
        if self.positions == "rope" and (self.head_dim % 2 or rope.dim % 2 or rope.dim > self.head_dim):
            sizes = f"head_dim={self.head_dim}, attention.rope.dim={rope.dim}"
            wrong.append(f"positions: rope needs even sizes, and attention.rope.dim of at most head_dim: {sizes}")
        if rope.scaling:
            wrong += rope.scaling.problems(rope.dim or self.head_dim, rope.theta)
        if attention.qk_norm_kind in ("joint", "unscaled") and self.norm.kind != "rmsnorm":
            wrong.append(f"attention.qk_norm_kind: {attention.qk_norm_kind} needs norm.kind: rmsnorm")
        keys = dict(sliding="attention.window", chunked="attention.chunk", linear="attention.linear",
                    shifted="windows.shift", whole="windows", reading="memory_width")  # fmt: skip
        wrong += [f"layer_pattern has {kind} layers: set {key}" for kind, key in keys.items()
                  if kind in self.layer_pattern and not value_at(self, key)]  # fmt: skip
        if not self.layer_pattern and sum(map(bool, (attention.window, attention.chunk, attention.linear))) > 1:
            wrong.append("a layer has one of attention.window, chunk and linear: set layer_pattern")
        if self.lora and self.feed_forward.kind == "plain" and "w_gate" in self.lora.targets:
            wrong.append("lora.targets: a plain MLP has no w_gate, only w_up and w_down")
        if self.matmul_dtype and self.weight_dtype in ("int8", "fp8") and self.matmul_dtype != self.weight_dtype:
            wrong.append(f"matmul_dtype: {self.matmul_dtype} does not go with weight_dtype: {self.weight_dtype}")
        if not self.patches or self.patches.first:
            wrong += [f"{name} needs patches without a row before them: set patches, with class_row: false"
                      for name in ("windows", "masks") if value_at(self, name)]  # fmt: skip
        wrong += contradictions(self) + self._wrong_layers()
        parts = ["attention.latent", "experts", "encoder", "vision", "masks", "attention.relative_vectors", "windows"]
        wrong += [line for name in parts if (part := value_at(self, name)) for line in part.problems(self)]
        if wrong:
            raise ValueError("\n".join(wrong))

    def _wrong_layers(self) -> list[str]:
        """What is wrong with the keys of layers that differ by place."""
        attention, feed_forward, residual = self.attention, self.feed_forward, self.residual
        with_keys, kinds = max(self.layers - attention.shared_kv_layers, 0), self.kind_of_each_layer
        lacking = ", ".join(sorted({*kinds[with_keys:]} - {*kinds[:with_keys]}))
        problems = {
            f"residual.layer_vocab={residual.layer_vocab} is above vocab={self.vocab}":
                0 < self.vocab < residual.layer_vocab,
            f"feed_forward.sparse_layers={feed_forward.sparse_layers} is above layers={self.layers}":
                feed_forward.sparse_layers > self.layers,
            f"attention.shared_kv_layers={attention.shared_kv_layers}: no layer before them is of kind {lacking}":
                lacking,
            "attention.shared_kv_layers goes with layers of kind sliding and full":
                attention.shared_kv_layers and {*kinds} - {"sliding", "full"},
            "shared_layers does not go with a layer_pattern of several layers":
                self.shared_layers and len(self.layer_pattern) > 1,
            "attention.relative_positions does not go with attention.latent, unless it is shared":
                attention.relative_positions and not attention.relative_positions.shared and attention.latent,
        }  # fmt: skip
        return [message for message, is_wrong in problems.items() if is_wrong]

    @property
    def num_experts(self) -> int:
        """Routed experts of a layer; 0 means none."""
        return self.experts.count if self.experts else 0

    @property
    def num_classes(self) -> int:
        """Classes in place of the logits of tokens; 0 means none."""
        return self.classes.count if self.classes else 0

    @property
    def moe(self) -> Experts:
        """The experts of a model that has them."""
        assert self.experts
        return self.experts

    @property
    def balance_bias(self) -> bool:
        """Whether the scores of experts have a bias that gives them equal loads."""
        return self.experts is not None and self.experts.balance_bias

    @property
    def expert_width(self) -> int:
        """The hidden width of one expert."""
        return (self.experts.mlp if self.experts else 0) or self.mlp

    @functools.cached_property
    def stacks(self) -> tuple[Stack, ...]:
        """The layers in order. The first ones may be dense, sparse or beside a convolution; the last may share keys."""
        ends: dict[StackName, int] = {
            "layers": self.layers - self.attention.shared_kv_layers,
            "dense_layers": self.experts.dense_layers if self.experts else 0,
            "sparse_layers": self.feed_forward.sparse_layers, "shared_kv_layers": self.layers,
            "convolved_layers": 1 if self.convolution else 0,
        }  # fmt: skip
        step = self.experts.step if self.experts else 1
        turn, first, stacks = math.lcm(len(self.layer_pattern) or 1, step), 0, []
        for name in sorted(ends, key=ends.__getitem__):
            if (count := ends[name] - first) > 0:
                kinds = tuple(self._layer_config(first + i) for i in range(min(turn, count)))
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
        return self.attention.latent.v_head_dim if self.attention.latent else self.head_dim

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
        """The width of the encoder output that each layer attends to; 0 means none."""
        return self.memory_width or (self.embed if self.encoder else 0)

    @property
    def one_text(self) -> bool:
        """Whether each row is one image, or one sound or its text, with padding behind it."""
        return bool(self.frames or self.patches)

    @property
    def encoder_config(self) -> "ModelConfig | None":
        """The settings of the encoder, if there is one."""
        return self.encoder and self.encoder.of(self)

    @property
    def vision_config(self) -> "ModelConfig | None":
        """The settings of the stack that sees images beside texts, if there is one."""
        return self.vision and self.vision.of(self)

    @property
    def queries_config(self) -> "ModelConfig | None":
        """The settings of the stack whose query tokens attend to an image, if there is one."""
        return self.vision and self.vision.queries and self.vision.queries.of(self)

    @property
    def memory_config(self) -> "ModelConfig":
        """The settings of a layer's cross-attention to encoder output: it has no positions and no mask."""
        attention = dataclasses.replace(
            self.attention, mask="full", relative_positions=None, window=0, chunk=0, linear=None, latent=None,
            sinks=False, temperature=None, shared_kv_layers=0,
        )  # fmt: skip
        own: dict[str, Any] = {"positions": "none", "vision": None, "encoder": None, "memory_width": self.reads}
        return dataclasses.replace(self, attention=attention, **own)

    @property
    def layer_kinds(self) -> tuple["ModelConfig", ...]:
        """The settings of the layers of one turn of each stack: of all kinds of layers there are."""
        return tuple(kind for stack in self.stacks for kind in stack.kinds)

    @property
    def kind_of_each_layer(self) -> tuple[LayerKind, ...]:
        """The pattern, repeated over the depth."""
        attention = self.attention
        usual = "sliding" if attention.window else "chunked" if attention.chunk else "full"
        pattern = self.layer_pattern or ("linear" if attention.linear else usual,)
        return tuple(pattern[i % len(pattern)] for i in range(self.layers))

    def _layer_config(self, number: int) -> "ModelConfig":
        """The settings of one layer, of whose kind all layers are."""
        kind, attention, experts, more = self.kind_of_each_layer[number], self.attention, self.experts, {}
        own: dict[str, Any] = {
            "shared_kv_layers": 0 if number < self.layers - attention.shared_kv_layers else attention.shared_kv_layers,
            "window": attention.window if kind == "sliding" else 0,
            "chunk": attention.chunk if kind == "chunked" else 0,
            "linear": attention.linear if kind == "linear" else None,
        }  # fmt: skip
        if kind == "sliding" and attention.rope.window_theta:
            own["rope"] = dataclasses.replace(attention.rope, theta=attention.rope.window_theta, scaling=None)
        if kind == "nope":
            more["positions"], own["qk_norm"] = "none", attention.qk_norm and attention.qk_norm_kind != "unscaled"
        elif attention.temperature and attention.temperature.layers == "nope":
            own["temperature"] = None
        is_sparse = number < (self.feed_forward.sparse_layers or self.layers)
        sparsity = self.feed_forward.sparsity if is_sparse else 0.0
        if experts:
            dense = number < experts.dense_layers or (number + 1) % experts.step
            experts = None if dense else dataclasses.replace(experts, step=1)
        return dataclasses.replace(
            self, layer_pattern=(), attention=dataclasses.replace(attention, **own), experts=experts,
            feed_forward=dataclasses.replace(self.feed_forward, sparse_layers=0, sparsity=sparsity),
            memory_width=self.memory_width if kind == "reading" else 0,
            windows=self.windows and self.windows.layer_windows(kind, self), **more,
        )  # fmt: skip
