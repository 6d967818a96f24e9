"""CLIP against transformers: features, their products, and folders there and back. `pytest -m parity` does it anew.

With GSPMD_LM_RECORD=1 that run writes golden/towers.json: config.json, shapes of tensors and features of each case.
"""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from einops import rearrange

from gspmd_lm import InputError
from gspmd_lm.config.media import Images
from gspmd_lm.convert import architecture, export, image_families, pretrained
from gspmd_lm.model.families import apply
from tests.convert import ours

GOLDEN = Path(__file__).parent / "golden" / "towers.json"
END, LENGTHS = 98, (9, 4, 7, 12)  # the token that ends a text, and the tokens of the texts of a batch
SIZES = {"num_attention_heads": 4, "intermediate_size": 64}
TEXT = {
    "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "max_position_embeddings": 16, "bos_token_id": 97,
    "eos_token_id": END, "pad_token_id": 0, **SIZES,
}  # fmt: skip
VISION = {"hidden_size": 48, "num_hidden_layers": 1, "image_size": 12, "patch_size": 4, **SIZES}
CASES = {
    "clip": {"text_config": TEXT, "vision_config": VISION, "projection_dim": 24},
    # As files of 2021 have it, where the token that ends a text is the one with the highest number.
    "clip-old": {
        "text_config": TEXT | {"eos_token_id": 2, "hidden_act": "gelu", "hidden_size": 48},
        "vision_config": VISION | {"hidden_act": "gelu", "num_channels": 1}, "projection_dim": 16,
        "logit_scale_init_value": 1.5,
    },
}  # fmt: skip


def drawn(config):
    """Texts with padding at their right, and images."""
    rng, vision = np.random.default_rng(0), config["vision_config"]
    tokens = rng.integers(3, 97, (len(LENGTHS), max(LENGTHS) + 2))
    mask = np.arange(tokens.shape[1]) < np.array(LENGTHS)[:, None]
    tokens = np.where(mask, tokens, 0)
    tokens[np.arange(len(LENGTHS)), np.array(LENGTHS) - 1] = END
    shape = len(LENGTHS), vision["num_channels"], vision["image_size"], vision["image_size"]
    return tokens, mask, rng.standard_normal(shape).astype(np.float32)


def compared(opened, seq, source_seq):
    """The features of our model and their products, with so many tokens of a text and rows of an image."""
    patches, (tokens, mask, images) = opened.config.model.vision.patches, drawn(opened.like)
    cut = rearrange(images, "B c (h p) (w q) -> B (h w) (c p q)", p=patches.size, q=patches.size)
    padding = ((0, 0), (0, seq - tokens.shape[1]))
    batch = {
        "tokens": np.pad(tokens, padding, constant_values=5), "segment_ids": np.pad(mask.astype(np.int32), padding),
        "positions": np.tile(np.arange(seq), (len(tokens), 1)) * np.pad(mask, padding), "row": np.arange(len(tokens)),
        "patches": np.pad(cut, ((0, 0), (1, source_seq - patches.rows), (0, 0)), constant_values=7.0),
    }  # fmt: skip
    run = jax.jit(lambda params, batch: apply(opened.config.model, params, batch))
    text_BP, image_BP, scale = jax.device_get(run(ours.on_one_device(opened), batch))
    return {"text": text_BP, "image": image_BP, "logits": scale * text_BP @ image_BP.T}


def check(found, want):
    for name, array in want.items():
        assert np.abs(found[name] - array).max() <= 1e-5 * np.abs(array).max(), name


@pytest.fixture(scope="module")
def golden():
    return json.loads(GOLDEN.read_text())


@pytest.mark.parametrize("name", CASES)
def test_features_are_those_of_transformers_and_files_come_back(name, golden, tmp_path):
    case = golden[name]
    opened = pretrained.open_folder(ours.folder_of(case, tmp_path / "in"), [ours.EXACT])
    data = opened.config.data
    assert (opened.family.name, opened.config.objective, data.seq, data.source_seq) == ("CLIP", "contrastive", 16, 16)
    check(compared(opened, data.seq, data.source_seq), {key: np.array(one) for key, one in case["features"].items()})
    params = jax.device_get(ours.on_one_device(opened))
    for like in (opened.like, None):
        out = tmp_path / f"out {like is None}"
        export.write_folder(out, opened.config.model, params, like, ends=() if like else (END, 7))
        written, original = ours.tensors(out), ours.tensors(tmp_path / "in")
        assert written.keys() == original.keys()
        assert all(np.array_equal(written[tensor], original[tensor]) for tensor in original)
        config = json.loads((out / "config.json").read_text())
        assert config["architectures"] == ["CLIPModel"]
        assert config["text_config"]["eos_token_id"] == (case["config"]["text_config"]["eos_token_id"] if like else END)
        assert pretrained.open_folder(out, [ours.EXACT]).config.model == opened.config.model
    assert config == json.loads((out / "config.json").read_text())


def test_fields_of_old_files_are_read_and_written_again(golden):
    """They have each tower twice, and what text_config_dict does not say is as if no file said it."""
    raw = golden["clip"]["config"]
    texts = raw["text_config"] | {"hidden_size": 8, "add_cross_attention": False, "top_k": 50}
    old = raw | {"text_config": texts, "text_config_dict": {**raw["text_config"], "layer_norm_eps": 1e-3},
                 "vision_config_dict": {**raw["vision_config"], "layer_norm_eps": 1e-3}}  # fmt: skip
    row = architecture.family_of(old, "x")
    values = architecture.model_settings(row, old, "x")
    assert (values["embed"], values["vision"]["embed"], values["norm_eps"]) == (32, 48, 1e-3)
    model = architecture.config.from_dict(architecture._sections("x", values, 8) | {"train": {"steps": 1}}, "x").model
    assert architecture.describe(model, old) == (row, old)
    changed = dataclasses.replace(model, norm_eps=1e-4)
    written = architecture.describe(changed, old)[1]
    assert written["vision_config"]["layer_norm_eps"] == 1e-4 and "vision_config_dict" not in written
    assert written["text_config"]["bos_token_id"] == 97


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vision_config": {"hidden_act": "gelu"}}, "vision_config: model.activation is gelu, and silu by text_config"),
        ({"vision_config": {"image_size": [12, 16]}}, r"vision_config\.image_size: \[12, 16\] must be a whole number"),
        ({"text_config": {"eos_token_id": [98, 2]}}, r"text_config\.eos_token_id: \[98, 2\] must be a whole number"),
        ({"text_config": {"add_cross_attention": True}}, r"text_config\.add_cross_attention: attention to another"),
        ({"text_config": {"some": 1}}, r"text_config\.some: 1 is an unknown field(.|\n)*--ignore=text_config\.some"),
        ({"text_config": 3}, "text_config: a model of several parts"),
    ],
)
def test_what_is_not_supported_is_refused(changes, words, golden, tmp_path):
    case = golden["clip"]
    changed = {part: case["config"][part] | more if isinstance(more, dict) else more for part, more in changes.items()}
    folder = ours.folder_of({**case, "config": case["config"] | changed}, tmp_path / "in")
    with pytest.raises(InputError, match=words):
        pretrained.open_folder(folder, [])
    if "some" in words:
        pretrained.open_folder(folder, [], ["text_config.some"])


@pytest.mark.parametrize("size", [224, {"shortest_edge": 224}])
def test_the_shorter_side_of_an_image_gets_the_size(size, golden, tmp_path):
    folder = ours.folder_of(golden["clip"], tmp_path / "in")
    prepared = {"feature_extractor_type": "CLIPFeatureExtractor", "size": size, "resample": 3, "image_mean": [0.4] * 3,
                "crop_size": 224, "do_center_crop": True, "image_std": [0.2] * 3}  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(prepared))
    opened = pretrained.open_folder(folder, [])
    found = opened.config.data.images
    assert found == Images(resize=224, keep_ratio=True, resample="bicubic", mean=(0.4,) * 3, std=(0.2,) * 3)
    written = image_families.preprocessor(opened.config.model.vision.patches, found)
    (folder / "preprocessor_config.json").write_bytes(written["preprocessor_config.json"])
    assert pretrained.open_folder(folder, []).config.data.images == found


@pytest.mark.filterwarnings("ignore")  # what torch and transformers warn of is theirs
@pytest.mark.parity
@pytest.mark.parametrize("name", CASES)
def test_transformers_itself(name, tmp_path):
    import torch

    kind, case = ours.case_of("CLIPModel", CASES[name], tmp_path / "empty")
    folder = ours.folder_of(case, tmp_path / "in")
    tokens, mask, images = map(torch.from_numpy, drawn(case["config"]))

    def computed(folder):
        with torch.no_grad():
            found = ours.by_transformers(kind, folder)(
                input_ids=tokens, attention_mask=mask.long(), pixel_values=images
            )
        return {"text": found.text_embeds.numpy(), "image": found.image_embeds.numpy(),
                "logits": found.logits_per_text.numpy()}  # fmt: skip

    want = computed(folder)
    recorded = ours.recorded(GOLDEN, name, case | {"features": {key: array.tolist() for key, array in want.items()}})
    check({key: np.array(one) for key, one in recorded["features"].items()}, want)
    opened = pretrained.open_folder(folder, [ours.EXACT])
    for seq, source_seq in ((14, 10), (16, 24)):
        check(compared(opened, seq, source_seq), want)
    for out in ours.written(opened, tmp_path):
        for key, array in computed(out).items():
            np.testing.assert_array_equal(array, want[key])
