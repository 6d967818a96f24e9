"""ChatGLM 2 and 3, which transformers does not have, in plain torch: what their published code computes."""

import math
import types
from pathlib import Path
from typing import Any

import torch
from torch import nn


class ChatGLM(nn.Module):
    """The decoder, with parameters that have the names of published tensors, and the calls that tests make."""

    def __init__(self, config: dict[str, Any]):
        super().__init__()
        self.config = types.SimpleNamespace(**{"is_encoder_decoder": False} | config)
        self.generation_config = types.SimpleNamespace()
        D, V, layers = config["hidden_size"], config["padded_vocab_size"], range(config["num_layers"])
        norm = RMSNorm(D, config["layernorm_epsilon"])
        encoder = nn.ModuleDict({"layers": nn.ModuleList(Layer(config) for _ in layers), "final_layernorm": norm})
        self.transformer = nn.ModuleDict({
            "embedding": nn.ModuleDict({"word_embeddings": nn.Embedding(V, D)}),
            "encoder": encoder,
            "output_layer": nn.Linear(D, V, bias=False),
        })  # fmt: skip

    def forward(self, tokens, attention_mask=None, position_ids=None):
        count = tokens.shape[1]
        if position_ids is None:
            position_ids = torch.arange(count)[None]
        seen = torch.ones(count, count, dtype=torch.bool).tril()[None, None]
        if attention_mask is not None:
            seen = seen & (attention_mask[:, None, None] > 0)
        x: Any = self.transformer
        hidden = x["embedding"]["word_embeddings"](tokens)
        for layer in x["encoder"]["layers"]:
            hidden = layer(hidden, position_ids, seen)
        return types.SimpleNamespace(logits=x["output_layer"](x["encoder"]["final_layernorm"](hidden)))

    def generate(self, tokens, max_new_tokens, **options):
        """Greedy decoding of one prompt; other options are those that have no effect on it."""
        logits = []
        with torch.no_grad():
            for _ in range(max_new_tokens):
                logits.append(self(tokens).logits[:, -1])
                tokens = torch.cat([tokens, logits[-1].argmax(-1, keepdim=True)], 1)
        return types.SimpleNamespace(sequences=tokens, logits=logits)


class Layer(nn.Module):
    """Attention with few key heads, and an MLP whose gate and up are one matrix."""

    def __init__(self, config: dict[str, Any]):
        super().__init__()
        D, F, eps = config["hidden_size"], config["ffn_hidden_size"], config["layernorm_epsilon"]
        self.heads, self.groups = config["num_attention_heads"], config["multi_query_group_num"]
        self.size, self.theta = config["kv_channels"], 10000.0 * config.get("rope_ratio", 1)
        together = (self.heads + 2 * self.groups) * self.size
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(D, eps), RMSNorm(D, eps)
        self.self_attention = nn.ModuleDict({
            "query_key_value": nn.Linear(D, together, bias=config["add_qkv_bias"]),
            "dense": nn.Linear(self.heads * self.size, D, bias=False),
        })  # fmt: skip
        self.mlp = nn.ModuleDict({
            "dense_h_to_4h": nn.Linear(D, 2 * F, bias=False), "dense_4h_to_h": nn.Linear(F, D, bias=False),
        })  # fmt: skip

    def forward(self, x, positions, seen):
        x = x + self.attention(self.input_layernorm(x), positions, seen)
        gate, up = self.mlp["dense_h_to_4h"](self.post_attention_layernorm(x)).chunk(2, -1)
        return x + self.mlp["dense_4h_to_h"](nn.functional.silu(gate) * up)

    def attention(self, x, positions, seen):
        sizes = [count * self.size for count in (self.heads, self.groups, self.groups)]
        q, k, v = (
            part.unflatten(-1, (-1, self.size)).transpose(1, 2)
            for part in self.self_attention["query_key_value"](x).split(sizes, -1)
        )
        q, k = self.rotated(q, positions), self.rotated(k, positions)
        k, v = (part.repeat_interleave(self.heads // self.groups, 1) for part in (k, v))
        scores = (q @ k.transpose(-1, -2) / math.sqrt(self.size)).masked_fill(~seen, torch.finfo(q.dtype).min)
        return self.self_attention["dense"]((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    def rotated(self, x, positions):
        """The first half of a head is rotated, each number with its neighbour."""
        turned = self.size // 2
        angle = positions[:, None, :, None] * self.theta ** (-torch.arange(0, turned, 2) / turned)
        even, odd = x[..., :turned:2], x[..., 1:turned:2]
        pairs = [even * angle.cos() - odd * angle.sin(), odd * angle.cos() + even * angle.sin()]
        return torch.cat([torch.stack(pairs, -1).flatten(-2), x[..., turned:]], -1)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


def load(folder: Path, config: dict[str, Any]) -> ChatGLM:
    """The model of a folder. Its tensors must be exactly those of the model."""
    from safetensors.torch import load_file

    model = ChatGLM(config)
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model.eval()
