"""What `transformers` computes for tiny models of each family, as small golden files.

    python -m tests.convert.references [NAME ...]

needs torch and transformers (.[parity]). Weights are a function of a tensor's name and shape, so that a file holds only
results. golden/NAME.npz has

    about        JSON: config (config.json as transformers writes it), tensors (name -> shape, as on disk), salt,
                 versions, loss, and for generation `prompts` (token ids), `tokens` (the 64 that greedy decoding adds to
                 each prompt on its own, end of text ignored) and `gaps` (for each prompt, the smallest distance between
                 the best two logits of a step)
    logits       float32 [rows, seq, vocab] of `batch`, zero where there is no token
    norms        float32, the norm of the loss's gradient by each tensor, in the order of `tensors`
    samples      float32 [tensors, 32], entries of these gradients at `sampled`
"""

import copy
import dataclasses
import functools
import hashlib
import json
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gspmd_lm.convert import safetensors

GOLDEN = Path(__file__).parent / "golden"
SEQ, NEW_TOKENS, SAMPLES = 16, 64, 32
FLOAT32 = "e_score_correction_bias"  # what transformers keeps in float32
NOT_IN_TRANSFORMERS = ("chatglm",)  # families whose reference is an implementation of our own
MOST_ROUNDING = 4e-5  # that the last bit of the weights may change in a logit
LEAST_GAP = 5e-3  # between the best two logits of a greedy step, so that rounding decides nothing
# Rows of the batch: the lengths of its documents, side by side; or what is left free before or after one.
PACKED = ((9, 7), (5, 11))
PADDED = ((5, 0), (0, 4))
PROMPTS = (5, 9)

_SMALL = {"vocab_size": 96, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_LLAMA = _SMALL | {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8,
    "max_position_embeddings": 96,
}  # fmt: skip
_WIDTHS = _SMALL | {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 8, "max_position_embeddings": 96,
}  # fmt: skip
_GPT2 = _SMALL | {"n_embd": 32, "n_layer": 2, "n_head": 8, "n_positions": 96}
_NEOX = _LLAMA | {"hidden_size": 64}
_GLM = _LLAMA | {"hidden_size": 64, "num_key_value_heads": 2, "head_dim": 8}
_EXPERTS = _LLAMA | {"num_key_value_heads": 4, "intermediate_size": 48, "num_experts_per_tok": 2}
# Name -> model_type and fields. Values are such that every setting matters: windows shorter than the rows, heads that
# are not hidden_size / heads, few key heads, caps that are reached.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _LLAMA),
    "llama3": ("llama", _LLAMA | {
        "num_key_value_heads": 4, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True,
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
        },
    }),
    "mistral": ("mistral", _LLAMA | {"num_key_value_heads": 4, "head_dim": 8, "sliding_window": 6}),
    "qwen2": ("qwen2", _LLAMA | {
        "num_key_value_heads": 4, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1,
    }),
    "qwen3": ("qwen3", _LLAMA | {"num_key_value_heads": 8, "head_dim": 8}),
    "gemma": ("gemma", _LLAMA | {"num_key_value_heads": 1, "head_dim": 8}),
    "gemma2": ("gemma2", _LLAMA | {
        "num_key_value_heads": 4, "head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 12,
        "attn_logit_softcapping": 2.0, "final_logit_softcapping": 20.0,
    }),
    "gemma3": ("gemma3_text", _LLAMA | {
        "num_key_value_heads": 4, "head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 12,
        "num_hidden_layers": 7, "sliding_window_pattern": 3,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    }),
    "phi3": ("phi3", _LLAMA | {
        "num_key_value_heads": 4, "hidden_size": 64, "sliding_window": 6, "partial_rotary_factor": 0.75,
    }),
    "glm": ("glm", _GLM),
    "glm4": ("glm4", _GLM),
    "gpt2": ("gpt2", _GPT2 | {"vocab_size": 97}),
    "opt": ("opt", _WIDTHS | {"ffn_dim": 64}),
    "bloom": ("bloom", _SMALL | {"hidden_size": 48, "n_layer": 2, "n_head": 6}),
    "falcon-7b": ("falcon", _WIDTHS),
    "falcon-40b": ("falcon", _WIDTHS | {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    "gptj": ("gptj", _GPT2 | {"n_embd": 64, "rotary_dim": 4}),
    "gptneox": ("gpt_neox", _NEOX | {"rotary_pct": 0.5}),
    "gptneox-sequential": ("gpt_neox", _NEOX | {"use_parallel_residual": False}),
    # From here on, layouts and generation are checked where transformers is installed; see `cases`.
    "granite": ("granite", _LLAMA | {
        "num_key_value_heads": 4, "embedding_multiplier": 6.0, "residual_multiplier": 0.22, "logits_scaling": 0.75,
        "attention_multiplier": 0.4, "tie_word_embeddings": True,
    }),
    "cohere": ("cohere", _LLAMA | {
        "hidden_size": 64, "num_key_value_heads": 4, "logit_scale": 0.7, "use_qk_norm": True,
    }),
    "cohere2": ("cohere2", _LLAMA | {
        "num_key_value_heads": 4, "num_hidden_layers": 3, "sliding_window": 6, "sliding_window_pattern": 2,
        "logit_scale": 1.5,
    }),
    "olmo": ("olmo", _LLAMA | {"num_key_value_heads": 4}),
    "olmo2": ("olmo2", _LLAMA | {"num_key_value_heads": 4}),
    "olmo3": ("olmo3", _LLAMA | {
        "num_key_value_heads": 4, "num_hidden_layers": 3, "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_scaling": {
            "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 12, "beta_fast": 4.0,
            "beta_slow": 1.0,
        },
    }),
    "smollm3": ("smollm3", _LLAMA | {"num_key_value_heads": 4, "num_hidden_layers": 3, "no_rope_layer_interval": 2}),
    "starcoder2": ("starcoder2", _LLAMA | {"num_key_value_heads": 4, "sliding_window": 6}),
    "stablelm": ("stablelm", _LLAMA | {
        "hidden_size": 64, "num_key_value_heads": 4, "use_qkv_bias": True, "partial_rotary_factor": 0.5,
    }),
    "stablelm-parallel": ("stablelm", _NEOX | {"num_key_value_heads": 4, "use_parallel_residual": True}),
    "nemotron": ("nemotron", _LLAMA | {"hidden_size": 64, "num_key_value_heads": 4}),
    "seed-oss": ("seed_oss", _LLAMA | {
        "num_key_value_heads": 4, "head_dim": 8, "attention_bias": False, "attention_out_bias": True,
    }),
    "ernie": ("ernie4_5", _LLAMA | {"num_key_value_heads": 4, "head_dim": 8, "use_bias": True}),
    "arcee": ("arcee", _LLAMA | {"num_key_value_heads": 4}),
    "phi": ("phi", _NEOX | {"num_key_value_heads": 4, "qk_layernorm": True}),
    "chatglm": ("chatglm", _SMALL | {
        "architectures": ["ChatGLMModel"], "padded_vocab_size": 96, "hidden_size": 64, "num_layers": 2,
        "num_attention_heads": 8, "kv_channels": 8, "ffn_hidden_size": 48, "seq_length": 96,
        "multi_query_attention": True, "multi_query_group_num": 2, "add_qkv_bias": True, "add_bias_linear": False,
        "rmsnorm": True, "post_layer_norm": True, "layernorm_epsilon": 1e-5, "original_rope": True, "rope_ratio": 50,
        "apply_query_key_layer_scaling": True, "bias_dropout_fusion": True, "tie_word_embeddings": False,
        "transformers_version": "4.30.2", "dtype": "float32",
    }),
    "starcoder": ("gpt_bigcode", _GPT2),
    "starcoder-all-heads": ("gpt_bigcode", _GPT2 | {"multi_query": False}),
    "gptneo": ("gpt_neo", _SMALL | {
        "hidden_size": 32, "num_layers": 3, "num_heads": 8, "max_position_embeddings": 96, "window_size": 6,
        "attention_types": [[["global", "local", "global"], 1]],
    }),
    "falcon-rw": ("falcon", _WIDTHS | {
        "hidden_size": 64, "num_attention_heads": 16, "alibi": True, "multi_query": False, "parallel_attn": False,
        "bias": True,
    }),
    "yarn": ("llama", _LLAMA | {
        "num_key_value_heads": 4, "hidden_size": 64,
        "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 12},
    }),
    "longrope-long": ("phi3", _LLAMA | {
        "num_key_value_heads": 4, "hidden_size": 64, "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 4, "tie_word_embeddings": True,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.1, 1.2], "long_factor": [1.0, 2.5, 4.0]},
    }),
    "longrope-short": ("phi3", _LLAMA | {
        "num_key_value_heads": 4, "hidden_size": 64, "original_max_position_embeddings": 80,
        "rope_scaling": {
            "type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.5, 4.0, 9.0],
        },
    }),
    "dynamic": ("llama", _LLAMA | {
        "num_key_value_heads": 4, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0},
    }),
    "ministral3": ("ministral3", _LLAMA | {
        "num_key_value_heads": 4, "head_dim": 8, "sliding_window": None, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 5,
            "beta_fast": 4.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3,
        },
    }),
    "mixtral": ("mixtral", _EXPERTS | {"num_local_experts": 4}),
    "phimoe": ("phimoe", _EXPERTS | {
        "num_local_experts": 8, "router_jitter_noise": 0.3, "attention_bias": True, "lm_head_bias": True,
        "hidden_size": 64, "sliding_window": 6, "original_max_position_embeddings": 80,
        "rope_scaling": {
            "type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.5, 4.0, 9.0],
            "short_mscale": 1.2, "long_mscale": 1.2,
        },
    }),
    "qwen2-moe": ("qwen2_moe", _EXPERTS | {
        "num_experts": 8, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40, "num_hidden_layers": 3,
        "mlp_only_layers": [0], "use_sliding_window": True, "sliding_window": 6,
    }),
    "qwen3-moe": ("qwen3_moe", _EXPERTS | {
        "num_experts": 8, "moe_intermediate_size": 24, "head_dim": 8, "norm_topk_prob": True,
    }),
    "glm4-moe": ("glm4_moe", _EXPERTS | {
        "n_routed_experts": 8, "moe_intermediate_size": 24, "num_hidden_layers": 3, "n_shared_experts": 2,
        "routed_scaling_factor": 2.5, "n_group": 2, "topk_group": 1, "use_qk_norm": True, "attention_bias": True,
        "head_dim": 8,
    }),
    "olmoe": ("olmoe", _EXPERTS | {"num_experts": 8, "num_experts_per_tok": 3}),
    "granite-moe": ("granitemoe", _EXPERTS | {
        "num_local_experts": 8, "embedding_multiplier": 6.0, "residual_multiplier": 0.22, "logits_scaling": 0.75,
        "attention_multiplier": 0.4, "tie_word_embeddings": True,
    }),
    "granite-moe-shared": ("granitemoeshared", _EXPERTS | {"num_local_experts": 8, "shared_intermediate_size": 40}),
    "gpt-oss": ("gpt_oss", _EXPERTS | {
        "num_local_experts": 8, "num_hidden_layers": 3, "head_dim": 8, "sliding_window": 6, "swiglu_limit": 1.5,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 12, "beta_fast": 4.0,
            "beta_slow": 1.0, "truncate": False,
        },
    }),
    # Chunks that are shorter than the rows, dense layers between those with experts, and a last turn that is cut off.
    "llama4": ("llama4_text", _EXPERTS | {
        "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size": 24, "intermediate_size_mlp": 48,
        "num_hidden_layers": 5, "head_dim": 8, "attention_chunk_size": 6, "floor_scale": 3, "attn_scale": 0.5,
        "interleave_moe_layer_step": 2,
    }),
    "llama4-scout": ("llama4_text", _EXPERTS | {
        "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24, "intermediate_size_mlp": 48,
        "num_hidden_layers": 3, "head_dim": 8, "attention_chunk_size": 10, "floor_scale": 4, "use_qk_norm": False,
        "no_rope_layers": [1, 0, 1], "rope_scaling": {
            "rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 1.0, "original_max_position_embeddings": 32,
        },
    }),
    # A large eps, or rounding decides what linear attention reads at a first token: the norm of one value.
    # Rows that are longer than a chunk are in tests/model/test_delta.py.
    "qwen3-next": ("qwen3_next", _EXPERTS | {
        "num_experts": 8, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40, "head_dim": 16,
        "num_hidden_layers": 3, "full_attention_interval": 2, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
        "linear_key_head_dim": 6, "linear_value_head_dim": 6, "linear_conv_kernel_dim": 3, "rms_norm_eps": 1e-3,
    }),
    # Sparse layers, layers that share keys with one of each kind before them, and tokens without embeddings for layers.
    # transformers gives the token of padding no gradient.
    "gemma3n": ("gemma3n_text", _LLAMA | {
        "num_key_value_heads": 4, "head_dim": 8, "sliding_window": 6, "num_hidden_layers": 8, "pad_token_id": 1,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2 + ["sliding_attention"] * 2,
        "num_kv_shared_layers": 3, "activation_sparsity_pattern": [0.8] * 3 + [0.0] * 5, "altup_num_inputs": 3,
        "laurel_rank": 6, "hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 80,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    }),
    "opt-350m": ("opt", _WIDTHS | {"ffn_dim": 64, "word_embed_proj_dim": 24, "do_layer_norm_before": False}),
    "opt-no-last-norm": ("opt", _WIDTHS | {"ffn_dim": 64, "_remove_final_layer_norm": True}),
}  # fmt: skip


FIRST = list(CASES)[: list(CASES).index("granite")]
# Cases that are much like others: `pytest -m slow` has all of the first ones, and the longer tests of the second ones.
ALIKE = ("qwen3-moe", "olmoe", "granite-moe-shared", "opt-no-last-norm")
NEARLY = (*ALIKE, "qwen2-moe", "granite-moe")


def cases() -> list[Any]:
    """All cases, for a test that takes long: the default run has the first, `pytest -m parity` has most others."""
    return [*FIRST, *marked([name for name in CASES if name not in FIRST], NEARLY, "parity")]


def marked(names: Sequence[str], slow: Sequence[str], otherwise: str = "") -> list[Any]:
    """Cases, those in `slow` for `pytest -m slow`, the others with another mark."""
    import pytest

    others = [getattr(pytest.mark, otherwise)] if otherwise else []
    return [pytest.param(name, marks=[pytest.mark.slow] if name in slow else others) for name in names]


@dataclasses.dataclass(frozen=True)
class Golden:
    """What a golden file holds; see the top of this file."""

    about: Mapping[str, Any]
    logits: np.ndarray
    norms: np.ndarray
    samples: np.ndarray

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(shape) for name, shape in self.about["tensors"].items()}

    @property
    def batch(self) -> dict[str, np.ndarray]:
        return batch(self.about["config"]["vocab_size"])

    def folder(self, folder: Path, dtype: str = "float32") -> Path:
        """`folder` with the config and the weights of the model, in a dtype."""
        kind = self.about["config"]["model_type"]
        weights = {name: weight(name, shape, self.about["salt"], kind) for name, shape in self.tensors.items()}
        return save(folder, dict(self.about["config"]), weights, dtype)


def load(name: str) -> Golden:
    """The golden file of a case."""
    with np.load(GOLDEN / f"{name}.npz") as found:
        about = json.loads(bytes(found["about"]).decode())
        return Golden(about, found["logits"], found["norms"], found["samples"])


def weight(name: str, shape: tuple[int, ...], salt: int, kind: str = "") -> np.ndarray:
    """float32 values that depend on nothing else: scales about one, biases small, no matrix that does not matter."""
    rng = _rng(name, *shape, salt)
    drawn = rng.standard_normal(shape, np.float32)
    if len(shape) > 1:
        table = "embed" in name or "wte" in name or "wpe" in name
        return drawn * np.float32(0.3 if table else 1.2 * min(shape) ** -0.5)
    # With scales about two, and heads that forget at once, rounding would decide what linear attention reads.
    small = kind == "qwen3_next" and not name.endswith("linear_attn.norm.weight")
    return np.float32(0.2) * drawn + np.float32(0 if name.endswith("bias") or small else 1)


def sampled(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The entries of a flattened gradient that are kept."""
    return _rng("sample", name, *shape).integers(0, math.prod(shape), SAMPLES)


def _rng(*key: Any) -> np.random.Generator:
    return np.random.default_rng(int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], "little"))


def save(folder: Path, config: dict[str, Any], weights: Mapping[str, np.ndarray], dtype: str = "float32") -> Path:
    """`folder` with a config.json and one safetensors file."""
    folder.mkdir(parents=True, exist_ok=True)
    kind = safetensors.WEIGHT_DTYPES[dtype]
    kinds = {name: "F32" if name.endswith(FLOAT32) else kind for name in weights}
    (folder / "config.json").write_text(json.dumps(config))
    head = safetensors.header_bytes({name: (kinds[name], array.shape) for name, array in weights.items()})
    data = (array.astype(safetensors.DTYPES[kinds[name]]).tobytes() for name, array in weights.items())
    (folder / safetensors.SINGLE).write_bytes(head + b"".join(data))
    return folder


@functools.cache
def batch(vocab: int) -> dict[str, np.ndarray]:
    """Packed rows and padded rows, int32 [rows, SEQ]: tokens, positions, segment_ids (0: no token), targets (-1)."""
    rows = [[(0, a), (a, b)] for a, b in PACKED] + [[(before, SEQ - before - after)] for before, after in PADDED]
    tokens = _rng("batch", vocab).integers(3, vocab, (len(rows), SEQ)).astype(np.int32)
    positions, segments = np.zeros_like(tokens), np.zeros_like(tokens)
    targets = np.full_like(tokens, -1)
    for row, documents in enumerate(rows):
        for segment, (start, length) in enumerate(documents):
            at = slice(start, start + length)
            positions[row, at], segments[row, at] = np.arange(length), segment + 1
            targets[row, start : start + length - 1] = tokens[row, start + 1 : start + length]
    tokens[segments == 0] = 0
    return {"tokens": tokens, "positions": positions, "segment_ids": segments, "targets": targets}


def prompts(vocab: int) -> list[list[int]]:
    """Prompts of different lengths."""
    return [_rng("prompt", length, vocab).integers(3, vocab, length).tolist() for length in PROMPTS]


def build(name: str, folder: Path, salt: int) -> tuple[Any, dict[str, Any], dict[str, np.ndarray]]:
    """A transformers model with the weights of this file, its config.json, and its tensors as on disk.

    They are loaded by from_pretrained from a folder of ours, so that their names are those that it reads.
    """
    import torch
    import transformers

    from tests.convert import chatglm

    torch.set_num_threads(1)
    kind, fields = CASES[name]
    if kind in NOT_IN_TRANSFORMERS:
        config = fields | {"model_type": kind}
        parameters = chatglm.ChatGLM(config).named_parameters()
        weights = {tensor: weight(tensor, tuple(array.shape), salt, kind) for tensor, array in sorted(parameters)}
        return loaded(save(folder, config, weights))[0], config, weights
    empty = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **fields))
    empty.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    shapes = {tensor: where.shape for tensor, where in sorted(safetensors.stored_tensors(folder).items())}
    weights = {tensor: weight(tensor, shape, salt, kind) for tensor, shape in shapes.items()}
    return loaded(save(folder, config, weights))[0], config, weights


def loaded(folder: Path) -> tuple[Any, dict[str, Any]]:
    """The model of a folder as transformers loads it, or as tests/convert/chatglm.py does, and what was amiss."""
    import torch
    import transformers

    from tests.convert import chatglm

    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] in NOT_IN_TRANSFORMERS:
        return chatglm.load(folder, config), {}
    how: dict[str, Any] = {"attn_implementation": attention(config), "dtype": torch.float32}
    model, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **how)
    return model.eval(), report


def attention(config: Mapping[str, Any]) -> str:
    """How transformers computes attention. Its eager one, of version 5.23, adds Falcon's alibi twice."""
    return "sdpa" if config.get("alibi") else "eager"


def forward(model: Any, vocab: int) -> tuple[np.ndarray, float, dict[str, np.ndarray]]:
    """Logits, mean loss and its gradients by parameter: documents of packed rows each alone, padded rows as one batch.

    Keys of the gradients are transformers' names in memory.
    """
    import inspect

    import torch

    rows = {name: torch.from_numpy(array.astype(np.int64)) for name, array in batch(vocab).items()}
    placed = "position_ids" in inspect.signature(model.forward).parameters
    logits = torch.zeros((*rows["tokens"].shape, vocab))
    for row in range(len(PACKED)):
        for segment in (1, 2):
            at = rows["segment_ids"][row] == segment
            logits[row, at] = model(rows["tokens"][row, at][None]).logits[0]
    padded = slice(len(PACKED), None)
    mask = (rows["segment_ids"][padded] > 0).long()
    extra = {"position_ids": rows["positions"][padded]} if placed else {}
    if getattr(model.config, "attn_temperature_tuning", False):  # for it, transformers counts padding as tokens
        for row, real in enumerate(mask > 0, len(PACKED)):
            logits[row, real] = model(rows["tokens"][row, real][None]).logits[0]
    else:
        found = model(rows["tokens"][padded], attention_mask=mask, **extra).logits
        logits[padded] = torch.where(mask[..., None] > 0, found, 0)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows["targets"].flatten(), ignore_index=-1)
    model.zero_grad()
    loss.backward()
    gradients = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
    return logits.detach().numpy(), loss.item(), gradients


def generate(model: Any, vocab: int) -> tuple[list[list[int]], list[float]]:
    """The tokens that greedy decoding adds to each prompt, and the smallest gap of its steps."""
    import torch

    model.generation_config.eos_token_id = None
    tokens, gaps = [], []
    for prompt in prompts(vocab):
        out = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones((1, len(prompt)), dtype=torch.long), do_sample=False,
            max_new_tokens=NEW_TOKENS, return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        tokens.append(out.sequences[0, len(prompt) :].tolist())
        best = torch.cat(out.logits).topk(2).values
        gaps.append(float((best[:, 0] - best[:, 1]).min()))
    return tokens, gaps


def compute(name: str) -> Golden:
    """What the installed transformers computes for a case."""
    import torch
    import transformers

    for salt in range(50):
        with tempfile.TemporaryDirectory() as folder:
            model, config, weights = build(name, Path(folder), salt)
        vocab = config["vocab_size"]
        tokens, gaps = generate(model, vocab)
        logits, loss, gradients = forward(model, vocab)
        if min(gaps) >= LEAST_GAP and np.abs(logits - _rounded_otherwise(model, vocab)).max() <= MOST_ROUNDING:
            break
    else:
        raise RuntimeError(f"{name}: no weights for which rounding decides nothing")
    by_disk = on_disk(model, weights, gradients)
    about = {
        "config": config,
        "tensors": {tensor: list(array.shape) for tensor, array in weights.items()},
        "salt": salt,
        "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
        "loss": loss,
        "prompts": prompts(vocab),
        "tokens": tokens,
        "gaps": gaps,
    }
    norms = np.array([np.linalg.norm(by_disk[tensor]) for tensor in weights], np.float32)
    samples = np.stack([by_disk[tensor].ravel()[sampled(tensor, array.shape)] for tensor, array in weights.items()])
    return Golden(about, logits, norms, samples)


def _rounded_otherwise(model: Any, vocab: int) -> np.ndarray:
    """The logits of a model whose weights differ in their last bit."""
    import torch

    other, drawn = copy.deepcopy(model), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1 + 2**-24 * torch.randn(parameter.shape, generator=drawn))
    return forward(other, vocab)[0]


def on_disk(
    model: Any, weights: Mapping[str, np.ndarray], gradients: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The gradients by the names of the tensors on disk, which is where a parameter, or a part of it, has the same
    values."""
    parts = [
        (value, gradient)
        for name, parameter in model.named_parameters()
        for value, gradient in zip(_parts(parameter.detach().numpy()), _parts(gradients[name]), strict=True)
    ] + [(buffer.numpy(), np.zeros_like(buffer.numpy())) for _, buffer in model.named_buffers()]
    return {
        tensor: next(gradient for value, gradient in parts if np.array_equal(value, array))
        for tensor, array in weights.items()
    }


def _parts(array: np.ndarray) -> list[np.ndarray]:
    """An array and, if it is of several experts, that of each of them, and the halves of each, for gate and up."""
    experts = list(array) if array.ndim == 3 and array.shape[1] % 2 == 0 else []  # not a convolution
    return [array, *experts, *(half for expert in experts for half in np.split(expert, 2))]


def main(names: list[str]) -> None:
    GOLDEN.mkdir(exist_ok=True)
    for name in names or CASES:
        golden = compute(name)
        about = np.frombuffer(json.dumps(golden.about, sort_keys=True).encode(), np.uint8)
        path = GOLDEN / f"{name}.npz"
        np.savez_compressed(path, about=about, logits=golden.logits, norms=golden.norms, samples=golden.samples)
        size, gap = path.stat().st_size, min(golden.about["gaps"])
        print(f"{name}: {size} bytes, loss {golden.about['loss']:.4f}, smallest gap {gap:.4f}")


if __name__ == "__main__":
    main(sys.argv[1:])
