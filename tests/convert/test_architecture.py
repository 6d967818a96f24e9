"""What is made of config.json of published models, and what is refused."""

import contextlib
import dataclasses
import importlib
import json
from pathlib import Path

import pytest

from gspmd_lm import config
from gspmd_lm.config import nest, value_at, with_values
from gspmd_lm.convert import architecture, families, multimodal
from gspmd_lm.convert.config_reader import ConfigReader
from gspmd_lm.convert.families import FAMILIES, IRRELEVANT, LEFT_OUT
from gspmd_lm.errors import InputError
from tests.convert.published_configs import DEFAULTS, LLAMA31, PUBLISHED

SIZES = {
    "model_type", "vocab_size", "hidden_size", "n_embd", "n_embed", "num_hidden_layers", "n_layer",
    "num_attention_heads", "n_head", "num_key_value_heads", "num_kv_heads", "intermediate_size", "ffn_dim",
    "max_position_embeddings", "n_positions", "seq_length", "rotary_dim", "num_layers", "num_heads",
    "padded_vocab_size", "multi_query_group_num", "ffn_hidden_size",
}  # fmt: skip
OTHERS = ([], {}, [[]], {"type": []}, ["x"], "x", True, None, -1, 5e-324, 1e300)  # values of all types of JSON


def sizes_alone(raw):
    """A config.json without what has a default. A head's size has one only where heads divide the width."""
    odd = raw.get("hidden_size", 0) % raw.get("num_attention_heads", 1)
    return {name: value for name, value in raw.items() if name in SIZES or (odd and name == "head_dim")}


def model_of(raw):
    row = architecture.family_of(raw, "config.json")
    values = architecture.model_settings(row, raw, "config.json")
    return config.from_dict(
        {"name": "x", "model": nest(values), "data": {"seq": 1}, "train": {"steps": 1}}, "config.json"
    ).model


def refused(raw):
    with pytest.raises(InputError) as error:
        model_of(raw)
    return str(error.value)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config(name):
    raw, wanted = PUBLISHED[name]
    model = model_of(raw)
    assert {setting: plain(value_at(model, setting)) for setting in wanted} == wanted


def plain(value):
    """A setting as JSON has it."""
    is_section = dataclasses.is_dataclass(value) and not isinstance(value, type)
    return json.loads(json.dumps(dataclasses.asdict(value) if is_section else value))


def test_what_is_meant_by_fields_that_are_not_there():
    published = {raw["model_type"]: raw for raw, _ in reversed(PUBLISHED.values())}
    models = {kind: model_of(sizes_alone(raw)) for kind, raw in published.items()}
    names = "norm.eps", "attention.rope.theta", "embedding.tied", "feed_forward.activation", "head_dim"
    assert {kind: tuple(value_at(model, name) for name in names) for kind, model in models.items()} == DEFAULTS


@pytest.mark.parametrize("name", PUBLISHED)
def test_it_is_kept_on_export_and_can_be_written_anew(name):
    raw, _ = PUBLISHED[name]
    model = model_of(raw)
    row, kept = architecture.describe(model, raw)
    assert kept == raw
    found, fields = architecture.describe(model, None)
    # The first of the table that has the model: without a window, a Mistral is a Llama.
    assert found.model_type == {
        "mistral-nemo": "llama",
        "chatglm3-6b": "glm",
        "phi-3": "mistral",
        "yarn-llama-2": "llama",
    }.get(name, row.model_type)
    assert model_of(fields) == model


def test_the_form_of_transformers_5_says_the_same():
    newer = {
        name: value for name, value in LLAMA31.items() if name not in ("rope_theta", "rope_scaling", "torch_dtype")
    }
    newer |= {"rope_parameters": LLAMA31["rope_scaling"] | {"rope_theta": 500000.0}, "dtype": "bfloat16"}
    assert model_of(newer) == model_of(LLAMA31)
    older, _ = PUBLISHED["gemma-3"]
    gone = ("rope_theta", "rope_local_base_freq", "sliding_window_pattern")
    newer = {name: value for name, value in older.items() if name not in gone} | {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1000000},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000},
        },
        "layer_types": [("full" if i % 6 == 5 else "sliding") + "_attention" for i in range(26)],
    }
    assert model_of(newer) == model_of(older)
    older, _ = PUBLISHED["pythia"]
    newer = {name: value for name, value in older.items() if not name.startswith("rotary")}
    newer["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": 0.25}
    assert model_of(newer) == model_of(older)


def test_a_changed_setting_is_written_into_the_original():
    changed = model_of(LLAMA31 | {"rope_theta": 10.0, "max_position_embeddings": 64})
    _, fields = architecture.describe(changed, LLAMA31)
    assert fields["rope_theta"] == 10.0 and fields["max_position_embeddings"] == 64
    assert fields["eos_token_id"] == 128001 and model_of(fields) == changed


def test_a_model_that_no_family_has():
    model = model_of(LLAMA31)
    odd = with_values(model, {"norm.kind": "layernorm", "attention.qkv_bias": True, "layer_pattern": ()})
    with pytest.raises(InputError) as error:
        architecture.describe(odd, None)
    assert "the nearest is Qwen2" in str(error.value)
    assert "model.norm.kind: 'layernorm', Qwen2 would have 'rmsnorm'" in str(error.value)
    with pytest.raises(InputError, match=r"model.attention.out_bias"):
        architecture.describe(odd, LLAMA31)


def test_the_nearest_family_is_one_that_can_be_written():
    """A config.json that describes no model of a family has one problem, and other families have more differences."""
    mixture = model_of(PUBLISHED["gpt-oss"][0])
    odd = with_values(mixture, {"feed_forward.slope": 1.0, "experts.shared_mlp": 8, "attention.rope.scaling": None})
    with pytest.raises(InputError) as error:
        architecture.describe(odd, None)
    first, *lines = str(error.value).split("\n")
    assert first.endswith("the nearest is gpt-oss, except for")
    assert all(line.startswith("  model.") and ", gpt-oss would have " in line for line in lines)


def test_a_config_json_that_describes_no_model_is_named_with_its_field():
    row = next(row for row in FAMILIES if row.model_type == "gpt_oss")
    dense = model_of(LLAMA31)
    lines = architecture.differences(row, architecture.config_json_of(row, dense), dense)
    assert "config.json: num_local_experts: 0 must be a number above zero" in lines


def test_a_bias_on_scores_is_a_weight_and_how_else_experts_are_balanced_is_not():
    mixtral, glm = (model_of(PUBLISHED[name][0]) for name in ("mixtral", "glm-4.5"))
    row, _ = architecture.describe(with_values(mixtral, {"experts.balance": "row"}), None)
    assert row.model_type == "mixtral"
    for model, balance, said in ((mixtral, "bias", "'bias', Mixtral would have 'none'"),
                                 (glm, "none", "'none', GLM-4.5 would have 'bias'")):  # fmt: skip
        with pytest.raises(InputError, match=f"except for\n  model.experts.balance: {said}"):
            architecture.describe(with_values(model, {"experts.balance": balance}), None)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"rope_scaling": {"type": "proportional", "factor": 4.0}},
            "rope_scaling.rope_type: 'proportional' is not supported; use one of default, linear, dynamic, yarn",
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "low_freq_factor": 1.0}}, "are not fields of yarn"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_fast": 0.5}}, "beta_fast: 0.5 is below beta_slow: 1"),
        ({"rope_scaling": {"type": "longrope", "long_factor": 2, "short_factor": []}}, "long_factor: 2 is not a list"),
        ({"rope_scaling": {"type": "longrope", "long_factor": [], "short_factor": []}}, "need 64 numbers each"),
        ({"rope_scaling": {"type": "linear"}}, "lacks factor"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "attention_factor": 2.0}}, "are not fields of linear"),
        ({"rope_scaling": None, "rope_parameters": {"rope_type": "longrope"}}, "lacks long_factor, short_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5 is not a setting of this family"),
        ({"hidden_act": "quick_gelu"}, "hidden_act: 'quick_gelu' is not known; known are gelu"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: the weights are quantised"),
        ({"sliding_window": 512}, "sliding_window: 512 contradicts this family, where model.attention.window is 0"),
        ({"bias": True}, "bias: True contradicts this family, where model.attention.qkv_bias is False"),
        ({"alibi": True}, "alibi: True is an unknown field, which may change"),
        ({"hidden_size": None}, "hidden_size: missing"),
        ({"hidden_size": "4096"}, "hidden_size: '4096' must be a number above zero"),
        ({"hidden_size": 4096.5}, "model.embed: must be a whole number"),
        ({"num_hidden_layers": 2001}, "num_hidden_layers: 2001 is above 2,000, which no model reaches"),
        ({"rope_theta": -1}, "rope_theta: -1 must be a number above zero"),
        ({"num_attention_heads": 0}, "num_attention_heads: 0 must be a number above zero"),
        ({"num_key_value_heads": 5}, "heads=32 is not a multiple of kv_heads=5"),
    ],
)
def test_a_field_that_cannot_be_had(changed, message):
    assert message in refused(LLAMA31 | changed)


def test_layer_types_that_say_nothing_new():
    """transformers 5 reads them in every family."""
    plain = architecture.model_settings(architecture.family_of(LLAMA31, ""), LLAMA31, "")
    layers = LLAMA31["num_hidden_layers"]
    said = LLAMA31 | {"layer_types": ["full_attention"] * layers}
    assert architecture.model_settings(architecture.family_of(said, ""), said, "") == plain
    for wrong in (["full_attention"] * (layers - 1), ["sliding_attention"] * layers, "full_attention"):
        assert "layer_types" in refused(LLAMA31 | {"layer_types": wrong})


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("opt", {"word_embed_proj_dim": 0}, "word_embed_proj_dim: 0 must be a number above zero"),
        ("opt", {"do_layer_norm_before": "yes"}, "do_layer_norm_before: 'yes' must be true or false"),
        ("falcon-7b", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn: 2"),
        ("falcon-40b", {"parallel_attn": False}, "contradicts new_decoder_architecture"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scales attention by layer"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "adds up after the norms"),
        ("gemma-3", {"use_bidirectional_attention": True}, "lets tokens see later ones"),
        ("gemma-3", {"layer_types": ["full_attention"] * 3}, "layer_types"),
        ("gpt-j", {"rotary_dim": None}, "rotary_dim"),
        ("qwen3-moe", {"mlp_only_layers": [3]}, "mlp_only_layers: [3] are not the first layers"),
        ("qwen3-moe", {"decoder_sparse_step": 0}, "decoder_sparse_step: 0 must be a whole number from 1 on"),
        ("qwen3-moe", {"decoder_sparse_step": 95}, "experts.step=95 leaves no layer of layers=94 with experts"),
        ("llama-4-maverick", {"moe_layers": [0, 3]}, "moe_layers: [0, 3] are not every n-th layer"),
        ("llama-4-maverick", {"layer_types": ["chunked_attention"] * 48}, "are not chunked_attention in layers with"),
        ("llama-4-maverick", {"attention_chunk_size": None}, "attention_chunk_size: None must be a number above zero"),
        ("gemma-3n-e2b", {"intermediate_size": [8192] * 29 + [16384]}, "is not one number, or 30 that are equal"),
        ("gemma-3n-e2b", {"intermediate_size": [8192] * 29}, "is not one number, or 30 that are equal"),
        ("gemma-3n-e2b", {"activation_sparsity_pattern": [0.0, 0.95] * 15}, "of which the first are equal"),
        ("gemma-3n-e2b", {"num_kv_shared_layers": 26}, "no layer before them is of kind full"),
        ("gemma-3n-e2b", {"altup_active_idx": 1}, "altup_active_idx: 1 makes another stream"),
        ("gemma-3n-e2b", {"altup_num_inputs": 1}, "set streams"),
        ("gemma-3n-e2b", {"altup_correct_scale": False}, "altup_correct_scale: False leaves a scale out"),
        ("gemma-3n-e2b", {"vocab_size": 262000}, "residual.layer_vocab=262144 is above vocab=262000"),
        ("mixtral", {"num_experts_per_tok": 9}, "per_token=9 must be from 1 to count=8"),
        ("mistral-0.1", {"layer_types": ["full_attention"] * 32}, "does not fit sliding_window"),
        ("glm-4.5", {"n_shared_experts": -1}, "n_shared_experts: -1 must be a whole number from 0 on"),
        ("glm-4.5", {"first_k_dense_replace": 92}, "experts.dense_layers=92 leaves no layer of layers=92 with experts"),
        ("phi-3.5-moe", {"num_experts_per_tok": 3}, "num_experts_per_tok: 3 is not the number that sparsemixer"),
        ("phi-3.5-moe", {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "is not longrope with short_mscale equal"),
        ("ministral-3-8b", {"rope_parameters": {"rope_type": "default"}}, "lacks llama_4_scaling_beta or original_max"),
        ("chatglm3-6b", {"_name_or_path": "x", "rope_ratio": 50}, "rope_ratio: 50 divides positions in ChatGLM 2"),
        ("chatglm3-6b", {"add_bias_linear": True}, "add_bias_linear: True has biases behind attention"),
        ("chatglm3-6b", {"multi_query_attention": False}, "multi_query_attention: False orders queries"),
        ("chatglm3-6b", {"pre_seq_len": 128}, "pre_seq_len: a trained prefix"),
    ],
)
def test_a_field_of_a_family_that_cannot_be_had(name, changed, message):
    assert message in refused(PUBLISHED[name][0] | changed)


def test_rope_ratio_multiplies_theta_where_the_model_is_known():
    raw, _ = PUBLISHED["chatglm3-6b"]
    assert model_of(raw | {"rope_ratio": 50}).attention.rope.theta == 5e5
    larger = {"vocab_size": 151552, "padded_vocab_size": 151552, "_name_or_path": "x"}  # GLM-4's
    assert model_of(raw | larger | {"rope_ratio": 500}).attention.rope.theta == 5e6


def test_no_shared_experts_and_no_dense_layers():
    raw, _ = PUBLISHED["glm-4.5"]
    model = model_of(raw | {"n_shared_experts": 0, "first_k_dense_replace": 0, "num_nextn_predict_layers": 0})
    assert (model.moe.shared_mlp, model.moe.dense_layers) == (0, 0)


def test_all_problems_are_listed_at_once():
    message = refused(LLAMA31 | {"hidden_act": "x", "vocab_size": None, "alibi": True, "num_experts": 8})
    assert "config.json: 4 problems" in message
    for name in ("hidden_act", "vocab_size", "alibi", "num_experts: 8 contradicts this family"):
        assert f"\n  {name}" in message


@pytest.mark.parametrize("kind", LEFT_OUT)
def test_a_family_that_is_left_out(kind):
    assert f"model_type: {kind!r} is not supported: {LEFT_OUT[kind]}" in refused({"model_type": kind})


def test_a_family_that_is_not_known():
    assert "'GPT-NeoX' is not a supported family (did you mean gpt_neox?)" in refused({"model_type": "GPT-NeoX"})
    for other in ("mpt", "mamba", "qwen", "ministral", "dbrx", "gemma4", "lama"):  # most are families of their own
        assert f"{other!r} is not a supported family\n" in refused({"model_type": other})
    assert "no model_type\n  fix   one of llama, llama4_text, mistral" in refused({})
    assert model_of({**LLAMA31, "model_type": None}) == model_of(LLAMA31)  # by its class


def test_the_token_that_generation_config_forces_at_the_beginning(tmp_path):
    """transformers 5 writes it there, and no longer into config.json."""
    (tmp_path / "config.json").write_text(json.dumps({
        "model_type": "bart", "vocab_size": 64, "d_model": 8, "max_position_embeddings": 16,
        **{f"{part}_{name}": 2 for part in ("encoder", "decoder") for name in ("layers", "attention_heads", "ffn_dim")},
    }))  # fmt: skip
    forced = tmp_path / "generation_config.json"
    for value, first in ((None, ()), (7, (7,))):
        forced.write_text(json.dumps({"forced_bos_token_id": value}))
        encoder = architecture.new_config(tmp_path).model.encoder
        assert encoder and encoder.first_tokens == first
    forced.write_text('{"forced_bos_token_id": "x"}')
    with pytest.raises(InputError, match=r"generation_config\.json: forced_bos_token_id=x: is not a token\n  fix "):
        architecture.new_config(tmp_path)


def test_files_without_a_config(tmp_path):
    with pytest.raises(InputError, match=r"no config.json\n  fix   give a folder"):
        architecture.read_config_json(tmp_path)
    with pytest.raises(InputError, match="no such folder"):
        architecture.read_config_json(tmp_path / "x")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match=r"config.json: not valid JSON"):
        architecture.read_config_json(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(InputError, match="not a JSON object but a list"):
        architecture.read_config_json(tmp_path)


def test_no_field_is_both_read_and_called_irrelevant():
    for row in FAMILIES:
        for raw, _ in PUBLISHED.values():
            if raw["model_type"] == row.model_type:
                reader = ConfigReader(raw)
                values = {}
                for codec in row.codecs:
                    codec.read(reader, values)
                assert not reader.names_read & (IRRELEVANT | set(row.irrelevant)), row.name
                assert json.dumps(sorted(reader.names_read))


@pytest.mark.parametrize("name", [*{raw["model_type"]: name for name, (raw, _) in PUBLISHED.items()}.values()])
def test_any_field_may_hold_a_value_of_any_type(name):
    """Such a file is read or refused; `model_of` raises nothing but InputError."""
    raw, _ = PUBLISHED[name]
    reader, values = ConfigReader({}), {}
    for codec in architecture.family_of(raw, "x").codecs:
        codec.read(reader, values)
    fields = {**raw, **dict.fromkeys(sorted(reader.names_read | {"model_type", "architectures"}))}
    for field, held in fields.items():
        inner = [raw[field] | {key: value} for key in held for value in OTHERS] if isinstance(held, dict) else []
        for value in (*OTHERS, *inner):
            changed = multimodal.text_config(raw | {field: value}, "x")
            with contextlib.suppress(InputError):
                model_of(changed)


def test_a_file_of_families_is_in_the_table_by_being_there():
    for path in Path(families.__file__).parent.glob("*.py"):
        if path.stem != "__init__":
            rows = importlib.import_module(f"{families.__name__}.{path.stem}").FAMILIES
            assert rows and all(row in FAMILIES for row in rows), path
