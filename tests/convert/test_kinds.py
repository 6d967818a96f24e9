"""Models of images, sounds, masks and captions against transformers, and folders there and back.

`pytest -m parity` computes everything anew, and with GSPMD_LM_RECORD=1 writes the golden files; see kinds.py.
"""

import dataclasses
import json
import re

import jax
import numpy as np
import pytest

import gspmd_lm
from gspmd_lm import InputError
from gspmd_lm.config import ModelConfig, from_values, with_values
from gspmd_lm.convert import architecture, export, pretrained
from gspmd_lm.convert.config_reader import ConfigReader
from gspmd_lm.convert.families import FAMILIES
from gspmd_lm.convert.families.dinov2 import Dinov2Sizes
from gspmd_lm.convert.images import padded_rows
from tests.convert import kinds, ours, references
from tests.convert.kinds import CASES, folder, golden

LONG = ("sam", "blip2-opt", "swin-one-window", "swin", "whisper-new", "clip-old")
ALIKE = ("sam-plain", "sam-whole", "blip2-opt-post", "swin-one-window")  # whose parts other cases have too
DEFAULT = [name for kind in kinds.KINDS for name in kind.default]


def check(found, want):
    assert found.keys() >= want.keys()
    for name, array in want.items():
        assert np.abs(found[name] - np.array(array)).max() <= 1e-5 * np.abs(array).max(), name


def test_every_architecture_of_these_kinds_has_a_case():
    types = {row.model_type for row in FAMILIES if row.architecture in {CASES[name].class_name(name) for name in CASES}}
    covered = {(CASES[name].class_name(name)) for name in CASES}
    assert {row.architecture for row in FAMILIES if row.model_type in types} == covered


@pytest.mark.parametrize("kind", kinds.KINDS, ids=lambda kind: kind.golden)
def test_a_folder_says_what_is_trained_and_on_what_rows(kind, tmp_path):
    opened = pretrained.open_folder(folder(kind.default[0], tmp_path / "in"))
    data = opened.config.data
    assert (opened.family.name, opened.config.objective, data.seq, opened.config.source_seq) == kind.expected


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in LONG else ()) for name in DEFAULT]
)
def test_numbers_are_those_of_transformers_and_files_come_back(name, tmp_path):
    kind, case = CASES[name], golden(name)
    opened = pretrained.open_folder(folder(name, tmp_path / "in"), [ours.EXACT])
    model = opened.config.model
    assert opened.family.architecture == kind.class_name(name)
    if model.patches:
        assert opened.config.data.seq == padded_rows(model.context)
    check(kind.recorded(kind.compute(opened, variant=kind.variants[0])), case["found"])
    params = jax.device_get(ours.on_one_device(opened))
    original = ours.tensors(tmp_path / "in")
    for like in (opened.like, None):
        out = tmp_path / f"out {like is None}"
        # What is frozen is no part of a config.json: it is as it came when a folder is read.
        export.write_folder(out, dataclasses.replace(model, frozen=()), params, like)
        written = ours.tensors(out)
        assert written.keys() == original.keys()
        assert all(np.array_equal(written[tensor], original[tensor]) for tensor in original)
        config = json.loads((out / "config.json").read_text())
        assert config["architectures"] == [kind.class_name(name)]
        if like is not None and not model.frames:  # Whisper's gets what generation_config.json says
            assert config == opened.like | {"torch_dtype": "float32"}
        assert pretrained.open_folder(out, [ours.EXACT]).config.model == model


@pytest.mark.long
@pytest.mark.parametrize("name", [kind.default[0] for kind in kinds.KINDS if kind.salted])
def test_texts_are_those_of_transformers(name, tmp_path):
    kind, case = CASES[name], golden(name)
    paths = [str(path) for path in kind.prompts(tmp_path)]
    loaded = gspmd_lm.load(folder(name, tmp_path / "in"), rules="none", overrides=[ours.EXACT])
    texts = loaded.generate(paths, max_new_tokens=len(case["tokens"][0]))
    assert texts == [bytes(tokens).decode(errors="replace") for tokens in case["tokens"]]
    with pytest.raises(InputError, match="chat_template: the prompts of this model are files"):
        loaded.generate(paths[0], chat_template=True)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("vit", {"image_size": [12, 16]}, "image_size: [12, 16] must be a whole number"),
        ("vit", {"patch_size": 5}, "image_size: 12 is not a multiple of patch_size: 5"),
        ("vit", {"hidden_act": "swish!"}, "hidden_act: 'swish!' is not known"),
        (
            "clip",
            {"vision_config": {"hidden_act": "gelu"}},
            "vision_config: model.feed_forward.activation is gelu, and silu by",
        ),
        ("clip", {"vision_config": {"image_size": [12, 16]}}, "vision_config.image_size: [12, 16] must be a whole"),
        ("clip", {"text_config": {"eos_token_id": [98, 2]}}, "text_config.eos_token_id: [98, 2] must be a whole"),
        (
            "clip",
            {"text_config": {"add_cross_attention": True}},
            "text_config.add_cross_attention: attention to",
        ),
        ("clip", {"text_config": {"some": 1}}, "text_config.some: 1 is an unknown field"),
        ("clip", {"text_config": {"some": 1}}, "--ignore=text_config.some"),
        ("clip", {"text_config": 3}, "text_config: a model of several parts"),
        ("whisper", {"suppress_tokens": ["a"]}, "suppress_tokens: ['a'] is not a list of tokens"),
        ("whisper", {"forced_decoder_ids": [1]}, "forced_decoder_ids"),
        ("whisper", {"scale_embedding": True}, "scales the token table"),
        ("sam", {"vision_config": {"window_size": -1}}, "vision_config.window_size: -1 must be a whole number"),
        ("sam", {"vision_config": {"output_channels": 64}}, "vision_config.output_channels: 64 is not 32"),
        ("sam", {"prompt_encoder_config": {"image_size": 28}}, "prompt_encoder_config.image_size: 28 is not 24"),
        ("sam", {"mask_decoder_config": {"iou_head_depth": 2}}, "mask_decoder_config.iou_head_depth: 2 is not 3"),
        ("blip2-opt", {"vision_config": {"qkv_bias": False}}, "vision_config.qkv_bias: False has no biases of queries"),
        (
            "blip2-opt",
            {"vision_config": {"num_channels": 1}},
            "vision_config.num_channels: 1 is another number",
        ),
        ("blip2-opt", {"vision_config": {"hidden_act": "quick_gelu"}}, "vision_config.hidden_act: 'quick_gelu' is not"),
        ("blip2-opt", {"qformer_config": {"use_qformer_text_input": True}}, "use_qformer_text_input: True also reads"),
        ("blip2-opt", {"qformer_config": {"some": 1}}, "qformer_config.some: 1 is an unknown field"),
        ("blip2-opt", {"qformer_config": {"some": 1}}, "--ignore=qformer_config"),
        ("blip2-opt", {"text_config": {"model_type": "llama"}}, "text_config.model_type: 'llama' is not supported in"),
        ("blip2-opt", {"text_config": {"ffn_dim": None}}, "text_config.ffn_dim: missing"),
        ("blip2-opt", {"num_query_tokens": 40}, "vision.queries has 40 rows, and a text has a token before it"),
    ],
)
def test_what_is_not_supported_is_refused(name, changes, words, tmp_path):
    config = golden(name)["config"]
    for field, more in changes.items():
        config[field] = config[field] | more if isinstance(more, dict) else more
    at = folder(name, tmp_path / "in", config=config)
    with pytest.raises(InputError, match=re.escape(words)):
        pretrained.open_folder(at, [])
    if words == "--ignore=text_config.some":
        pretrained.open_folder(at, [], ["text_config.some"])


def test_a_missing_tensor_is_named(tmp_path):
    shapes = golden("blip2-opt")["tensors"]
    kept = {tensor: shape for tensor, shape in shapes.items() if "layers.1.self_attn.qkv.bias" not in tensor}
    kept["query_tokens"] = [1, 3, 16]
    words = r"missing      vision_model\.encoder\.layers\.1\.self_attn\.qkv\.bias\n.*query_tokens is \[1, 3, 16\], not"
    with pytest.raises(InputError, match=words):
        pretrained.open_folder(folder("blip2-opt", tmp_path / "in", tensors=kept), [])


def test_images_of_one_colour_are_not_written(tmp_path):
    model = pretrained.open_folder(folder("blip2-opt", tmp_path / "in"), []).config.model
    grey = dataclasses.replace(model.vision.patches, channels=1)
    odd = dataclasses.replace(model, vision=dataclasses.replace(model.vision, patches=grey))
    words = "the nearest is BLIP-2, except for\n  model.vision.patches.channels: 1, BLIP-2 would have 3"
    with pytest.raises(InputError, match=words):
        architecture.describe(odd, None)


def test_sizes_of_query_tokens_that_are_the_models_are_written_out(tmp_path):
    model = pretrained.open_folder(folder("blip2-opt", tmp_path / "in"), []).config.model
    sizes = model.vision.queries.all_sizes(model)
    same = {name: 0 for name, size in sizes.items() if size == getattr(model, name)}
    assert same
    short = dataclasses.replace(model, vision=dataclasses.replace(
        model.vision, queries=dataclasses.replace(model.vision.queries, **same)))  # fmt: skip
    assert architecture.describe(short, None) == architecture.describe(model, None)


def test_a_base_model_gets_a_new_head(tmp_path):
    case = golden("vit")
    tensors = {name.removeprefix("vit."): shape for name, shape in case["tensors"].items() if "classifier" not in name}
    tensors["pooler.dense.weight"] = [32, 32]
    config = {**case["config"], "architectures": ["ViTModel"]}
    at = folder("vit", tmp_path / "in", config=config, tensors=tensors)
    opened = pretrained.open_folder(at, [ours.EXACT, "model.classes.count=7"])
    assert set(opened.new) == {"classifier", "classifier_bias"}
    assert CASES["vit"].compute(opened)["scores"].shape == (4, 7)


def test_fields_of_old_files_are_read_and_written_again():
    """They have each tower twice, and what text_config_dict does not say is as if no file said it."""
    raw = golden("clip")["config"]
    texts = raw["text_config"] | {"hidden_size": 8, "add_cross_attention": False, "top_k": 50}
    both = {f"{part}_dict": {**raw[part], "layer_norm_eps": 1e-3} for part in ("text_config", "vision_config")}
    old = raw | {"text_config": texts} | both
    row = architecture.family_of(old, "x")
    values = architecture.model_settings(row, old, "x")
    assert (values["embed"], values["vision"]["embed"], values["norm.eps"]) == (32, 48, 1e-3)
    model = architecture.config.from_dict(architecture._sections("x", values, 8) | {"train": {"steps": 1}}, "x").model
    assert architecture.describe(model, old) == (row, old)
    changed = with_values(model, {"norm.eps": 1e-4})
    written = architecture.describe(changed, old)[1]
    assert written["vision_config"]["layer_norm_eps"] == 1e-4 and "vision_config_dict" not in written
    assert written["text_config"]["bos_token_id"] == 97


@pytest.mark.parametrize("like", ["new", "old", None])
def test_the_end_of_a_text_is_written_where_no_file_says_it(like, tmp_path):
    opened = pretrained.open_folder(folder("clip", tmp_path / "in"))
    old = {name.replace("text_config", "text_config_dict"): value for name, value in opened.like.items()}
    params, came = jax.device_get(ours.on_one_device(opened)), {"new": opened.like, "old": old}.get(like or "")
    export.write_folder(tmp_path / "out", opened.config.model, params, came, ends=() if like == "new" else (9, 7))
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert written["text_config"]["eos_token_id"] == (kinds.END if like == "new" else 9)
    assert "text_config_dict" not in written  # which would be what counts


def test_a_width_that_is_written_as_a_ratio_is_read_again():
    sizes = dict.fromkeys(("layers", "heads", "kv_heads", "head_dim", "vocab", "context"), 2)
    model = from_values(ModelConfig, {**sizes, "embed": 56, "mlp": 488})
    values = {"embed": 56, "patches": {}}
    assert int(488 / 56 * 56) == 487
    Dinov2Sizes().read(ConfigReader(Dinov2Sizes().write(model)), values)
    assert values["mlp"] == 488


def find_salt(kind, architecture, sizes, folder):
    """A case with weights by which the generated tokens depend on the prompts, with these tokens, and its folder."""
    for salt in range(50):
        case = sizes | {"salt": salt}
        at = kind.folder(case, folder / f"in {salt}")
        tokens = kind.generate(ours.by_transformers(architecture, at), pretrained.open_folder(at, [ours.EXACT]), folder)
        if kind.shows_something(tokens):
            return case | {"tokens": tokens}, at
    raise AssertionError("no weights with which a text does not repeat itself")


@pytest.mark.filterwarnings("ignore")  # what torch and transformers warn of is theirs
@pytest.mark.parametrize("name", references.marked(list(CASES), ALIKE, "parity"))
def test_transformers_itself(name, tmp_path):
    kind = CASES[name]
    architecture, case = ours.case_of(kind.class_name(name), kind.cases[name], tmp_path / "empty")
    kind.amend(case, name)
    if kind.salted:
        case, at = find_salt(kind, architecture, case, tmp_path)
    else:
        at = kind.folder(case, tmp_path / "in")

    def ask(folder, variant=kind.variants[0]):
        return kind.ask(ours.by_transformers(architecture, folder), case["config"], variant, tmp_path)

    want = ask(at)
    found = {key: array.tolist() for key, array in kind.recorded(want).items()}
    recorded = ours.recorded(kind.golden, name, case | {"found": found}) if name in kind.default or kind.salted else {}
    check({key: np.array(one) for key, one in recorded.get("found", {}).items()}, found if recorded else {})
    assert recorded.get("tokens") == case.get("tokens")
    opened = pretrained.open_folder(at, [ours.EXACT])
    for variant in kind.variants:
        check(kind.compute(opened, variant=variant), want if variant == kind.variants[0] else ask(at, variant))
    for more in (-kind.spare(opened), 8):
        check(kind.compute(opened, more, variant=kind.variants[0]), want)
    if kind.layout:
        placed = ours.placement(opened.config.model, kind.layout)
        check(kind.compute(opened, placed=placed, variant=kind.variants[0]), want)
    for out in ours.written(opened, tmp_path):
        for key, array in ask(out).items():
            np.testing.assert_array_equal(array, want[key])
