"""How images and sounds are prepared, as the files beside weights say it: read, and written for transformers."""

import dataclasses
import json

import pytest

from gspmd_lm import InputError
from gspmd_lm.config import Encoder, Frames, ModelConfig, from_values
from gspmd_lm.config.media import Images, Patches
from gspmd_lm.convert import images, pretrained
from gspmd_lm.convert.families import whisper
from tests.convert.kinds import folder


def test_the_preprocessor_says_how_images_are_prepared(tmp_path):
    at = folder("vit", tmp_path / "in")
    path = at / "preprocessor_config.json"
    path.write_text(json.dumps({
        "do_resize": True, "size": {"height": 14, "width": 14}, "resample": 3, "do_normalize": True,
        "image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225], "rescale_factor": 1 / 255,
    }))  # fmt: skip
    found = pretrained.open_folder(at, []).config.data.images
    assert found == Images(resize=14, resample="bicubic", mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    path.write_text(json.dumps({"size": {"longest_edge": 14}, "resample": 1}))
    with pytest.raises(InputError, match=r"longest_edge(.|\n)*resample: 1 is not"):
        pretrained.open_folder(at, [])


@pytest.mark.parametrize(
    "prepared", [Images(), Images(resize=14, resample="bicubic", mean=(0.1, 0.2, 0.3)), Images(pad=True)]
)
def test_what_is_written_about_images_is_read_again(prepared, tmp_path):
    for name, content in images.write_preprocessing(Patches(image=12, size=4), prepared).items():
        (tmp_path / name).write_bytes(content)
    side = 0 if prepared.pad else prepared.resize or 12
    resize = {"resize": side, "mean": prepared.mean * (3 // len(prepared.mean)), "std": (0.5,) * 3}
    read = images.read_preprocessing(tmp_path)
    found = Images(**{key: tuple(value) if isinstance(value, list) else value for key, value in read.items()})
    assert found == dataclasses.replace(prepared, **resize)


@pytest.mark.parametrize(
    ("kind", "size"),
    [("CLIPFeatureExtractor", 224), ("CLIPFeatureExtractor", {"shortest_edge": 224}), ("BitImageProcessor", 224)],
)
def test_the_shorter_side_of_an_image_gets_the_size(kind, size, tmp_path):
    at = folder("clip", tmp_path / "in")
    prepared = {"feature_extractor_type": kind, "size": size, "resample": 3, "image_mean": [0.4] * 3,
                "crop_size": 224, "do_center_crop": True, "image_std": [0.2] * 3}  # fmt: skip
    (at / "preprocessor_config.json").write_text(json.dumps(prepared))
    opened = pretrained.open_folder(at, [])
    found = opened.config.data.images
    assert found == Images(resize=224, keep_ratio=True, resample="bicubic", mean=(0.4,) * 3, std=(0.2,) * 3)
    written = images.write_preprocessing(opened.config.model.vision.patches, found)
    (at / "preprocessor_config.json").write_bytes(written["preprocessor_config.json"])
    assert pretrained.open_folder(at, []).config.data.images == found


def test_sounds_that_are_prepared_otherwise_are_refused(tmp_path):
    at = folder("whisper", tmp_path / "in")
    (at / "preprocessor_config.json").write_text(json.dumps({"sampling_rate": 8000, "feature_size": 8}))
    with pytest.raises(InputError, match="sampling_rate: 8000 is not 16000"):
        pretrained.open_folder(at, [])


def test_what_is_written_for_transformers_is_read_again(tmp_path):
    sizes = {"layers": 1, "embed": 8, "heads": 1, "kv_heads": 1, "head_dim": 8, "mlp": 8, "vocab": 257, "context": 8}
    encoder = Encoder(context=1500, start_token=4, first_tokens=(5, 6), suppressed=(7,))
    model = from_values(ModelConfig, {**sizes, "frames": Frames(bands=80), "encoder": encoder})
    for name, content in whisper.write_sidecars(model, {"eos_token_id": 9}, 256).items():
        (tmp_path / name).write_bytes(content)
    settings = json.loads((tmp_path / "generation_config.json").read_text())
    assert (settings["decoder_start_token_id"], settings["eos_token_id"]) == (4, 9)
    found = whisper.read_generation(tmp_path)
    assert found == {"first_tokens": [5, 6], "suppressed": [7], "suppressed_first": []}
    whisper.check_preprocessing(tmp_path, 80)
    assert "generation_config.json" not in whisper.write_sidecars(model, settings, 256)  # it says the same


def test_a_text_begins_in_english_where_the_language_is_left_open(tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps({
        "lang_to_id": {"<|de|>": 7, "<|en|>": 8}, "task_to_id": {"transcribe": 9}, "no_timestamps_token_id": 11,
        "suppress_tokens": [1, 2], "forced_decoder_ids": [[1, None], [2, 9]],
    }))  # fmt: skip
    assert whisper.read_generation(tmp_path) == {
        "first_tokens": [8, 9, 11], "suppressed": [1, 2], "suppressed_first": [],
    }  # fmt: skip
