"""Folders of models that also see images: their text part is read as a model of text."""

import json
import re

import jax
import numpy as np
import pytest

from gspmd_lm import load_config
from gspmd_lm.config import value_at
from gspmd_lm.convert import architecture, export, multimodal
from gspmd_lm.convert.families import FAMILIES
from gspmd_lm.errors import InputError
from tests.convert import ours, reference_cases, references
from tests.convert.published_configs import PUBLISHED

# As published: the folder's model_type, what its config.json says besides sizes, and its parameters of text.
GEMMA3_27B = {
    "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999, "image_token_index": 262144,
    "mm_tokens_per_image": 256, "model_type": "gemma3", "vision_config": {"hidden_size": 1152},
    "text_config": {
        "head_dim": 128, "hidden_size": 5376, "intermediate_size": 21504, "model_type": "gemma3_text",
        "num_attention_heads": 32, "num_hidden_layers": 62, "num_key_value_heads": 16, "query_pre_attn_scalar": 168,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    },
}  # fmt: skip
QWEN25_VL_7B = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"], "hidden_act": "silu", "hidden_size": 3584,
    "image_token_id": 151655, "intermediate_size": 18944, "max_position_embeddings": 128000, "max_window_layers": 28,
    "model_type": "qwen2_5_vl", "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06, "rope_scaling": {"mrope_section": [16, 24, 24], "type": "mrope"}, "rope_theta": 1000000.0,
    "sliding_window": 32768, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_sliding_window": False,
    "video_token_id": 151656, "vision_config": {"depth": 32}, "vision_end_token_id": 151653,
    "vision_start_token_id": 151652, "vision_token_id": 151654, "vocab_size": 152064,
}  # fmt: skip
MISTRAL_SMALL = {
    "architectures": ["Mistral3ForConditionalGeneration"], "image_token_index": 10, "model_type": "mistral3",
    "multimodal_projector_bias": False, "projector_hidden_act": "gelu", "spatial_merge_size": 2,
    "text_config": {
        "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120,
        "intermediate_size": 32768, "max_position_embeddings": 131072, "model_type": "mistral",
        "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
        "rope_theta": 1000000000.0, "sliding_window": None, "vocab_size": 131072,
    },
    "torch_dtype": "bfloat16", "vision_config": {"hidden_size": 1024}, "vision_feature_layer": -1,
}  # fmt: skip
LLAMA4_SCOUT = {
    "architectures": ["Llama4ForConditionalGeneration"], "boi_token_index": 200080, "eoi_token_index": 200081,
    "image_token_index": 200092, "model_type": "llama4", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "text_config": {
        "_attn_implementation_autoset": True, "attention_bias": False, "attention_chunk_size": 8192, "head_dim": 128,
        "hidden_size": 5120, "interleave_moe_layer_step": 1, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
        "max_position_embeddings": 10485760, "model_type": "llama4_text", "no_rope_layers": [],
        "num_attention_heads": 40, "num_experts_per_tok": 1, "num_hidden_layers": 48, "num_key_value_heads": 8,
        "num_local_experts": 16, "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "use_qk_norm": True,
        "rope_scaling": {
            "factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "vocab_size": 202048,
    },
    "vision_config": {"hidden_size": 1408},
}  # fmt: skip


GEMMA3N_E4B = {
    "architectures": ["Gemma3nForConditionalGeneration"], "audio_config": {"hidden_size": 1536},
    "audio_token_id": 262273, "boa_token_id": 256000, "eoa_token_id": 262272, "model_type": "gemma3n",
    "torch_dtype": "bfloat16", "vision_config": {"hidden_size": 2048}, "vision_soft_tokens_per_image": 256,
    "text_config": PUBLISHED["gemma-3n-e2b"][0] | {
        "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 25, "intermediate_size": [16384] * 35,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7, "num_hidden_layers": 35,
        "num_kv_shared_layers": 15,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("raw", "family", "wanted"),
    [
        (
            GEMMA3N_E4B,
            "gemma3n_text",
            {"attention.shared_kv_layers": 15, "feed_forward.sparse_layers": 10, "embedding.tied": True},
        ),
        (GEMMA3_27B, "gemma3_text", {"vocab": 262208, "context": 131072, "embedding.tied": True, "kv_heads": 16}),
        (QWEN25_VL_7B, "qwen2", {"attention.rope.scaling": None, "embedding.tied": False, "attention.rope.theta": 1e6}),
        (
            LLAMA4_SCOUT,
            "llama4_text",
            {"context": 10485760, "experts.step": 1, "attention.qk_norm": True, "experts.count": 16},
        ),
        (MISTRAL_SMALL, "mistral", {"embedding.tied": False, "attention.rope.theta": 1e9, "attention.window": 0}),
    ],
)
def test_a_published_config(raw, family, wanted, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(raw))
    model = load_config(str(tmp_path)).model
    assert {name: value_at(model, name) for name in wanted} == wanted
    assert multimodal.text_config(raw, "x")["model_type"] == family


def test_every_part_is_of_a_family():
    assert {kind for kinds, _ in multimodal.PARTS.values() for kind in kinds.split()} <= {
        row.model_type for row in FAMILIES
    }


def test_a_quantised_or_broken_whole_is_refused():
    text = multimodal.text_config(MISTRAL_SMALL | {"quantization_config": {"quant_method": "fp8"}}, "x")
    with pytest.raises(InputError, match="quantization_config: the weights are quantised"):
        architecture.model_settings(architecture.family_of(text, "x"), text, "x")
    with pytest.raises(InputError, match="text_config: is not an object"):
        multimodal.text_config(MISTRAL_SMALL | {"text_config": [1]}, "x")


@pytest.mark.parametrize(
    ("case", "kind", "renamed", "image"),
    [
        ("gemma3", "gemma3", "language_model.model.", "vision_tower.vision_model.post_layernorm.weight"),
        ("gemma3n", "gemma3n", "model.language_model.", "model.audio_tower.conformer.0.norm.weight"),
        ("mistral", "mistral3", "model.language_model.", "model.multi_modal_projector.linear_1.weight"),
        ("llama4", "llama4", "language_model.model.", "vision_model.class_embedding"),
        ("qwen2", "qwen2_5_vl", "model.", "visual.patch_embed.proj.weight"),
        ("qwen3", "qwen3_vl", "model.language_model.", "model.visual.merger.norm.weight"),
    ],
)
def test_the_text_part_is_read_and_written_as_a_model_of_text(case, kind, renamed, image, tmp_path):
    golden = references.load(case)
    plain = ours.read(golden, tmp_path / "plain")
    weights = ours.tensors(tmp_path / "plain")
    names = {name: renamed + name.removeprefix("model.") for name in weights if name.startswith("model.")}
    names["lm_head.weight"] = "language_model.lm_head.weight" if kind in ("gemma3", "llama4") else "lm_head.weight"
    whole = {names[name]: array for name, array in weights.items()} | {image: np.ones((3, 5), np.float32)}
    text = {field: value for field, value in golden.about["config"].items() if field != "architectures"}
    inner = text if kind == "qwen2_5_vl" else {"text_config": text, "tie_word_embeddings": text["tie_word_embeddings"]}
    references.save(tmp_path / "whole", inner | {"model_type": kind, "vision_config": {"depth": 2}}, whole)
    found = ours.pretrained.open_folder(tmp_path / "whole", [ours.EXACT])
    assert (found.config.model, found.left_out) == (plain.config.model, 1)
    params = jax.device_get(ours.on_one_device(found))
    jax.tree.map(np.testing.assert_array_equal, params, jax.device_get(ours.on_one_device(plain)))
    export.write_folder(tmp_path / "out", found.config.model, params, found.like)
    after = ours.tensors(tmp_path / "out")
    assert after.keys() == weights.keys() and all(np.array_equal(after[name], weights[name]) for name in weights)
    written = architecture.read_config_json(tmp_path / "out")
    assert (written["model_type"], written["architectures"]) == (text["model_type"], [plain.family.architecture])


def test_a_tensor_of_no_known_part_is_told(tmp_path):
    golden = references.load("mistral")
    golden.folder(tmp_path / "plain")
    weights = ours.tensors(tmp_path / "plain") | {"speech_tower.conv.weight": np.ones((3,), np.float32)}
    references.save(tmp_path / "whole", {"model_type": "mistral3", "text_config": golden.about["config"]}, weights)
    with pytest.raises(InputError, match=r"unexpected   speech_tower.conv.weight"):
        ours.pretrained.open_folder(tmp_path / "whole")


def test_a_text_part_of_another_family_is_refused(tmp_path):
    whole = {"model_type": "mistral3", "text_config": references.load("mistral").about["config"]}
    assert architecture.multimodal.text_config(whole, "x")["model_type"] == "mistral"
    whole["text_config"] = whole["text_config"] | {"model_type": "mistral4"}
    with pytest.raises(InputError, match=r"x: text_config.model_type: 'mistral4' is not supported in mistral3\n  fix "):
        architecture.multimodal.text_config(whole, "x")


def test_keys_that_a_layer_shares_are_left_out(tmp_path):
    """Published files have weights for them, which no layer reads."""
    golden = references.load("gemma3n")
    plain = ours.read(golden, tmp_path / "plain")
    weights = ours.tensors(tmp_path / "plain")
    unread = {name.replace(f".{of}.", f".{layer}."): array for name, array in weights.items()
              for of, layer in ((1, 3), (2, 4)) if re.search(rf"\.layers\.{of}\.self_attn\.[kv]_", name)}  # fmt: skip
    assert len(unread) == 6 and not unread.keys() & weights.keys()
    references.save(tmp_path / "more", golden.about["config"], weights | unread)
    found = ours.pretrained.open_folder(tmp_path / "more", [ours.EXACT])
    assert (found.config.model, found.left_out) == (plain.config.model, len(unread))
    beyond = {"model.layers.5.self_attn.k_norm.weight": np.ones((8,), np.float32)}
    references.save(tmp_path / "wrong", golden.about["config"], weights | beyond)
    with pytest.raises(InputError, match=r"unexpected   model.layers.5.self_attn.k_norm.weight"):
        ours.pretrained.open_folder(tmp_path / "wrong")


@pytest.mark.parametrize("case", ["glm4-moe", "deepseek-v3"])
def test_layers_that_predict_later_tokens_are_left_out(case, tmp_path):
    golden = references.load(case)
    plain = ours.read(golden, tmp_path / "plain")
    weights = ours.tensors(tmp_path / "plain")
    last = {name: array for name, array in weights.items() if ".layers.2." in name}
    later = {name.replace(".2.", ".3.", 1): array for name, array in last.items()}
    later["model.layers.3.eh_proj.weight"] = np.ones((4, 8), np.float32)
    raw = golden.about["config"] | {"num_nextn_predict_layers": 1}
    references.save(tmp_path / "whole", raw, weights | later)
    found = ours.pretrained.open_folder(tmp_path / "whole", [ours.EXACT])
    assert (found.config.model, found.left_out) == (plain.config.model, len(later))
    assert found.like["num_nextn_predict_layers"] == 0  # what an export writes has none
    assert found.notes[0].startswith("num_nextn_predict_layers: 1: what predicts later tokens stands behind the last")
    references.save(tmp_path / "whole", raw | {"num_nextn_predict_layers": 0}, weights | later)
    with pytest.raises(InputError, match=r"unexpected   model.layers.3.eh_proj.weight"):
        ours.pretrained.open_folder(tmp_path / "whole")


_TEXT = reference_cases._LLAMA | {"num_key_value_heads": 4, "hidden_size": 64, "head_dim": 8,
                                  "max_position_embeddings": 96}  # fmt: skip
_EYE = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1, "image_size": 28,
        "patch_size": 14}  # fmt: skip
_QWEN_EYE = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64}
_MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]}
_LLAMA4 = {"num_local_experts": 4, "intermediate_size_mlp": 48, "attention_chunk_size": 6, "floor_scale": 3}
_GROWING = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 5,
            "llama_4_scaling_beta": 0.3, "mscale": 1.0, "mscale_all_dim": 1.0}  # fmt: skip
LIVE = {
    "llama4": {
        "text_config": _TEXT | _LLAMA4,
        "vision_config": _EYE | {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16},
    },
    "gemma3": {"text_config": _TEXT | {"sliding_window": 6}, "vision_config": _EYE, "mm_tokens_per_image": 4},
    "mistral3": {"text_config": _TEXT | {"model_type": "mistral"}, "vision_config": _EYE, "tie_word_embeddings": False},
    "mistral3, ministral3": {
        "text_config": _TEXT | {"model_type": "ministral3", "rope_parameters": _GROWING},
        "vision_config": _EYE, "tie_word_embeddings": False,
    },
    "qwen2_vl": {"text_config": _TEXT | {"rope_parameters": _MROPE},
                 "vision_config": {"depth": 1, "embed_dim": 16, "hidden_size": 64, "num_heads": 2}},
    "qwen2_5_vl": {"text_config": _TEXT | {"rope_parameters": _MROPE},
                   "vision_config": _QWEN_EYE | {"fullatt_block_indexes": [0]}},
    "qwen3_vl": {"text_config": _TEXT | {"rope_parameters": _MROPE | {"mrope_interleaved": True}},
                 "vision_config": _QWEN_EYE | {"deepstack_visual_indexes": [0], "num_position_embeddings": 4}},
}  # fmt: skip


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", LIVE)
def test_text_has_the_logits_of_the_whole_model(kind, tmp_path):
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind.partition(",")[0], **LIVE[kind])
    whole = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    for name, array in whole.named_parameters():
        array.data = torch.from_numpy(references.weight(name, tuple(array.shape), 0))
    whole.save_pretrained(tmp_path / "whole")
    found = ours.pretrained.open_folder(tmp_path / "whole", [ours.EXACT])
    assert found.left_out > 3
    tokens = references.batch(96)["tokens"][:2]
    batch = {"tokens": tokens, "positions": np.tile(np.arange(references.SEQ, dtype=np.int32), (2, 1))}
    params = ours.on_one_device(found)
    with torch.no_grad():
        want = whole(torch.from_numpy(tokens.astype(np.int64))).logits.numpy()
    np.testing.assert_allclose(ours.compiled(found.config.model, params, batch), want, rtol=0, atol=1e-4)
    export.write_folder(tmp_path / "out", found.config.model, jax.device_get(params), found.like)
    text = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    assert type(text).__name__ == found.family.architecture
    with torch.no_grad():
        got = text(torch.from_numpy(tokens.astype(np.int64))).logits.numpy()
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
