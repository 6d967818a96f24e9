"""Fields of config.json that are passed over, that may be, and that contradict each other."""

import re

import pytest

from gspmd_lm.convert import architecture
from gspmd_lm.convert.families import FAMILIES
from gspmd_lm.errors import InputError
from tests.convert.published_configs import LLAMA31, PUBLISHED
from tests.convert.test_architecture import model_of, refused, sizes_alone

# Published configs that have a field of no meaning: family -> field -> value.
NOTES = {
    "llama-2": {
        "is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"dtype": "q4"},
        "_from_model_config": True, "neftune_noise_alpha": 5, "pixel_shuffle_factor": 4, "_flash_attn_2_enabled": True,
        "perceiver_config": {"qk_layer_norms_perceiver": True}, "use_resampler": False, "pruned_heads": {},
        "max_new_tokens": 9,
    },
    "gpt2": {
        "_num_labels": 1, "predict_special_tokens": True, "output_past": True, "add_cross_attention": False,
        "n_special": 0, "head_dim": 64, "attention_bias": True, "attention_probs_dropout_prob": 0.1,
    },
    "opt": {"learned_embeddings": True, "scale_embeddings": False},
    "pythia": {"custom_pipelines": {"text-generation": {"impl": "instruct_pipeline.Pipeline"}}},
    "mistral-nemo": {"document_attention": True, "attention_bias": False, "num_experts": 0},
    "qwen3-moe": {"use_qk_norm": True, "shared_expert_intermediate_size": 0, "qkv_bias": False, "bias": False},
    "gpt-oss": {"use_bias": True, "use_sliding_window": True, "n_routed_experts": 128},
    "phi-3": {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False},
}  # fmt: skip


@pytest.mark.parametrize("name", NOTES)
def test_notes_of_tools_change_nothing(name):
    raw, _ = PUBLISHED[name]
    assert model_of(raw | NOTES[name]) == model_of(raw)
    for field, value in NOTES[name].items():
        assert model_of(raw | {field: value}) == model_of(raw), field


@pytest.mark.parametrize(
    ("name", "changed", "setting"),
    [
        ("qwen3-moe", {"use_qk_norm": False}, "attention.qk_norm is True"),
        ("qwen3-moe", {"shared_expert_intermediate_size": 768}, "experts.shared_mlp is 0"),
        ("llama-2", {"use_qk_norm": True}, "attention.qk_norm is False"),
        ("llama-2", {"use_sliding_window": True}, "attention.window is 0"),
        ("gpt2", {"use_bias": False}, "attention.qkv_bias is True"),
        ("gpt2", {"head_dim": 128}, "head_dim is 64"),
        ("gpt2", {"head_dim": True}, "head_dim is 64"),
        ("qwen2.5", {"attention_bias": True}, "attention.out_bias is False"),
        ("gpt-oss", {"n_routed_experts": 64}, "experts.count is 128"),
    ],
)
def test_a_field_of_another_family_agrees_or_is_refused(name, changed, setting):
    raw, _ = PUBLISHED[name]
    ((field, value),) = changed.items()
    assert f"{field}: {value} contradicts this family, where model.{setting}" in refused(raw | changed)


def test_what_is_off_is_passed_over_and_what_is_on_is_not():
    for family, name in (("gpt2", "n_special"), ("opt", "scale_embeddings"), ("llama-2", "num_nextn_predict_layers")):
        raw, _ = PUBLISHED[family]
        assert model_of(raw | {name: 0}) == model_of(raw)
        assert f"{name}: " in refused(raw | {name: 1})


def test_dropout_belongs_to_training_and_is_told():
    for family in PUBLISHED:
        raw, _ = PUBLISHED[family]
        row, rates = architecture.family_of(raw, "x"), {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0.25}
        assert model_of(raw | rates) == model_of(raw)
        (note,) = architecture.notes(
            row, {"x_pdrop": 0.5, "summary_first_dropout": 0.5, "bias_dropout_fusion": True} | sizes_alone(raw) | rates
        )
        assert note == (
            "x_pdrop: 0.5, attention_probs_dropout_prob: 0.25: training drops nothing until model.dropout is set"
        )


def test_attention_that_is_not_causal_is_refused_for_every_family():
    for raw, _ in PUBLISHED.values():
        for value in (False, None, 0, "", []):  # transformers reads null as false here
            assert "is_causal: " in refused(raw | {"is_causal": value})
        assert "is_causal: False lets tokens see later ones" in refused(raw | {"is_causal": False})
        assert model_of(raw | {"is_causal": True}) == model_of(raw)


def test_what_is_not_set_is_passed_over_and_what_is_set_is_not():
    for value in (None, "", [], {}):
        assert model_of(LLAMA31 | {"some_feature": value}) == model_of(LLAMA31)
    for value in (True, False, 0, 0.0, 1, -1, 0.5, "x", [0], {"a": None}):
        message = refused(LLAMA31 | {"some_feature": value, "other": 1})
        assert f"\n  some_feature: {value!r} is an unknown field, which may change" in message
        assert message.endswith(
            "\n  fix   --ignore=other --ignore=some_feature  if nothing that is computed depends on it"
        )


def test_a_field_is_ignored_where_that_is_said():
    raw = LLAMA31 | {"some feature": 1, "other": [1]}
    row = architecture.family_of(raw, "x")
    assert architecture.model_settings(row, raw, "x", ["some feature", "other"]) == architecture.model_settings(
        row, LLAMA31, "x"
    )
    with pytest.raises(InputError, match=r"1 problem\n  some feature: 1 is .*\n  fix   --ignore='some feature'  if"):
        architecture.model_settings(row, raw, "x", ["other"])
    architecture.check_ignored(row, raw, "x", ["some feature", "other"])
    for name, said in {
        "hidden_size": "--ignore=hidden_size: the meaning of this field is known\n  fix   drop it",
        "torch_dtype": "--ignore=torch_dtype: the meaning of this field is known\n  fix   drop it",
        "othr": r"--ignore=othr: not in x \(did you mean other\?\)\n  fix   drop it",
    }.items():
        with pytest.raises(InputError, match=said):
            architecture.check_ignored(row, raw, "x", ["other", name])


@pytest.mark.parametrize("name", ["is_causal", "quantization_config", "sliding_window", "head_dim", "per_layer_config"])
def test_what_changes_the_computation_cannot_be_ignored(name):
    raw, _ = PUBLISHED["gpt2"]
    raw = raw | {name: {"0": 1}}
    row = architecture.family_of(raw, "x")
    assert "--ignore" not in refused(raw)
    with pytest.raises(InputError, match="meaning of this field is known"):
        architecture.check_ignored(row, raw, "x", [name])
    with pytest.raises(InputError):
        architecture.model_settings(row, raw, "x", [name])


def test_an_ignored_field_is_kept_on_export():
    raw = LLAMA31 | {"some_feature": 1}
    row = architecture.family_of(raw, "x")
    assert row is FAMILIES[0] and architecture.describe(model_of(LLAMA31), raw) == (row, raw)
    _, changed = architecture.describe(model_of(LLAMA31 | {"rope_theta": 7.0}), raw)
    assert changed["some_feature"] == 1 and changed["rope_theta"] == 7.0


@pytest.mark.parametrize(
    ("name", "changed", "phrase"),
    [
        ("gpt2", {"num_attention_heads": 3}, "num_attention_heads: 3 contradicts n_head: 12"),
        ("gpt2", {"hidden_size": 64}, "hidden_size: 64 contradicts n_embd: 768"),
        ("bloom", {"num_hidden_layers": 3}, "num_hidden_layers: 3 contradicts n_layer"),
        ("gemma", {"hidden_activation": "silu", "hidden_act": "relu"}, "activation: 'silu' contradicts hidden_act"),
        ("llama-3.1", {"rope_parameters": {"rope_type": "default"}}, "rope_scaling: .* contradicts rope_parameters"),
        ("glm-4", {"partial_rotary_factor": None}, "partial_rotary_factor: None must be a number"),
        ("gemma-3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping: 50.0 caps attention scores, which"),
        ("gemma-3", {"final_logit_softcapping": 0}, "final_logit_softcapping: 0 must be a number above zero"),
        ("mistral-0.1", {"sliding_window": 0}, "sliding_window: 0 must be a number above zero"),
        ("gpt2", {"scale_attn_weights": None}, "scale_attn_weights: None leaves attention scores"),
        ("llama-2", {"attention_bias": "false"}, "attention_bias: 'false' must be true or false"),
        ("phi-3", {"full_attn_mod": 2}, "full_attn_mod: 2 has sparse attention"),
        ("gemma-3", {"sliding_window_pattern": 0}, "sliding_window_pattern: 0 must be a whole number from 1 on"),
        ("llama-2", {"vocab_size": 2**70}, "vocab_size: 1180591620717411303424 is above 9,007,199,254,740,992, which"),
        ("llama-2", {"num_hidden_layers": 10**9}, "num_hidden_layers: 1000000000 is above 2,000, which no model"),
        ("gemma-3", {"num_hidden_layers": 10**9}, "num_hidden_layers: 1000000000 is above 2,000, which no model"),
        ("gpt2", {"n_layer": 10**9}, "n_layer: 1000000000 is above 2,000, which no model"),
        ("gemma-3", {"rope_parameters": {"full_attention": 5}}, "rope_parameters.full_attention: 5 is not an object"),
        ("gemma-3", {"rope_parameters": {"sliding_attention": "x"}}, "sliding_attention: 'x' is not an object"),
        ("gemma-3", {"rope_parameters": 7}, "rope_parameters: 7 is not an object"),
        *(("llama-2", {"rope_scaling": one}, f"rope_scaling: {re.escape(repr(one))} is not an object")
          for one in (0, False, "", "linear", [], [2.0])),
        ("llama-2", {"rope_scaling": {"factor": "x"}}, "rope_scaling: .* has factor, and no rope_type says what they"),
        ("llama-2", {"rope_scaling": {"a": 1, "factor": 2}}, "has a, factor, and no rope_type says"),
        ("llama-2", {"rope_parameters": {"factor": 2.0, "rope_theta": 7.0}}, "rope_parameters: .* has factor, and no"),
        ("mistral-0.1", {"layer_types": 5}, "layer_types: 5 does not fit sliding_window"),
    ],
)  # fmt: skip
def test_what_transformers_reads_otherwise_or_not_at_all(name, changed, phrase):
    raw, _ = PUBLISHED[name]
    message = refused(raw | changed)
    assert re.search(phrase, message), message


def test_low_and_high_frequencies_are_in_their_order():
    scaling = LLAMA31["rope_scaling"]
    for wrong in ({"low_freq_factor": 5.0}, {"high_freq_factor": 0.5}):
        assert "is below low_freq_factor" in refused(LLAMA31 | {"rope_scaling": scaling | wrong})


def test_two_names_of_one_field_may_agree():
    raw, _ = PUBLISHED["gpt2"]
    assert model_of(raw | {"num_attention_heads": raw["n_head"], "hidden_size": None}) == model_of(raw)
    raw, _ = PUBLISHED["gemma"]
    assert model_of(raw | {"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"}) == model_of(raw)
