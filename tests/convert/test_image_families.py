"""ViT, DeiT and BEiT against transformers: scores, and folders there and back. `pytest -m parity` computes them anew.

With GSPMD_LM_RECORD=1 that run writes golden/images.json: config.json, shapes of tensors and scores of each case.
"""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from einops import rearrange

from gspmd_lm import InputError
from gspmd_lm.config.media import Images, Patches
from gspmd_lm.convert import export, image_families, pretrained
from gspmd_lm.convert.image_families import padded_rows
from gspmd_lm.model.families import apply
from gspmd_lm.sharding.annotate import placed_by
from tests.convert import ours

GOLDEN = Path(__file__).parent / "golden" / "images.json"
SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 8, "intermediate_size": 64, "image_size": 12,
    "patch_size": 4,
}  # fmt: skip
LABELS = {"id2label": {"0": "one", "1": "two", "2": "three"}, "label2id": {"one": 0, "two": 1, "three": 2}}
CASES = {
    "vit": ("ViTForImageClassification", SIZES | LABELS),
    "vit-grey": ("ViTForImageClassification", SIZES | {"num_channels": 1, "qkv_bias": False, "num_labels": 5}),
    "deit": ("DeiTForImageClassification", SIZES | LABELS | {"hidden_act": "gelu_new"}),
    "beit": ("BeitForImageClassification", SIZES | LABELS | {"use_relative_position_bias": True}),
    "beit-shared": (
        "BeitForImageClassification",
        SIZES
        | LABELS
        | {
            "use_shared_relative_position_bias": True,
            "use_absolute_position_embeddings": True,
            "use_mean_pooling": False,
        },
    ),
    "dinov2": (
        "Dinov2ForImageClassification",
        {name: size for name, size in SIZES.items() if name != "intermediate_size"}
        | LABELS
        | {"mlp_ratio": 2, "use_mask_token": False},
    ),
    "swin": (
        "SwinForImageClassification",
        LABELS
        | {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 3], "num_heads": [4, 8], "window_size": 4},
    ),
    "swin-one-window": (
        "SwinForImageClassification",
        LABELS
        | {
            "image_size": 24,
            "patch_size": 2,
            "embed_dim": 8,
            "depths": [4, 1, 2],
            "num_heads": [4, 8, 16],
            "window_size": 3,
            "mlp_ratio": 2.5,
            "qkv_bias": False,
            "hidden_act": "gelu_new",
            "num_channels": 1,
        },
    ),
    "deit-teacher": ("DeiTForImageClassificationWithTeacher", SIZES | LABELS),
}


def images(config):
    shape = (4, config["num_channels"], config["image_size"], config["image_size"])
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def scores(opened, seq, placed=None):
    """The scores of our model, with so many rows for each image, on one device or as a placement says."""
    patches, model = opened.config.model.patches, opened.config.model
    cut = rearrange(images(opened.like), "B c (h p) (w q) -> B (h w) (c p q)", p=patches.size, q=patches.size)
    rows = np.pad(cut, ((0, 0), (patches.first, seq - model.context), (0, 0)), constant_values=7.0)
    batch = {"patches": rows, "row": np.arange(len(rows))}
    params = opened.load(ours.shardings(opened, placed)) if placed else ours.on_one_device(opened)

    def run(params, batch):
        with placed_by(placed):
            return apply(model, params, batch)

    return np.asarray(jax.jit(run)(params, batch))


@pytest.fixture(scope="module")
def golden():
    return json.loads(GOLDEN.read_text())


@pytest.mark.parametrize("name", CASES)
def test_scores_are_those_of_transformers_and_files_come_back(name, golden, tmp_path):
    case = golden[name]
    opened = pretrained.open_folder(ours.folder_of(case, tmp_path / "in"), [ours.EXACT])
    assert (opened.family.architecture, opened.config.objective) == (CASES[name][0], "classes")
    assert opened.config.data.seq == padded_rows(opened.config.model.context)
    found, want = scores(opened, opened.config.data.seq), np.array(case["scores"])
    assert np.abs(found - want).max() <= 1e-5 * np.abs(want).max()
    params = jax.device_get(ours.on_one_device(opened))
    for like in (opened.like, None):
        export.write_folder(tmp_path / f"out {like is None}", opened.config.model, params, like)
        written, original = ours.tensors(tmp_path / f"out {like is None}"), ours.tensors(tmp_path / "in")
        assert written.keys() == original.keys()
        assert all(np.array_equal(written[tensor], original[tensor]) for tensor in original)
        config = json.loads((tmp_path / f"out {like is None}" / "config.json").read_text())
        assert config["architectures"] == [CASES[name][0]]
    assert like is None


def test_a_base_model_gets_a_new_head(golden, tmp_path):
    case = golden["vit"]
    tensors = {name.removeprefix("vit."): shape for name, shape in case["tensors"].items() if "classifier" not in name}
    tensors["pooler.dense.weight"] = [32, 32]
    case = {"config": {**case["config"], "architectures": ["ViTModel"]}, "tensors": tensors}
    opened = pretrained.open_folder(ours.folder_of(case, tmp_path / "in"), [ours.EXACT, "model.classes=7"])
    assert set(opened.new) == {"classifier", "classifier_bias"}
    assert scores(opened, 16).shape == (4, 7)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"image_size": [12, 16]}, r"image_size: \[12, 16\] must be a whole number"),
        ({"patch_size": 5}, "image_size: 12 is not a multiple of patch_size: 5"),
        ({"hidden_act": "swish!"}, "hidden_act"),
    ],
)
def test_what_is_not_supported_is_refused(changes, words, golden, tmp_path):
    case = golden["vit"]
    folder = ours.folder_of({**case, "config": {**case["config"], **changes}}, tmp_path / "in")
    with pytest.raises(InputError, match=words):
        pretrained.open_folder(folder, [])


def test_the_preprocessor_says_how_images_are_prepared(golden, tmp_path):
    folder = ours.folder_of(golden["vit"], tmp_path / "in")
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps({
        "do_resize": True, "size": {"height": 14, "width": 14}, "resample": 3, "do_normalize": True,
        "image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225], "rescale_factor": 1 / 255,
    }))  # fmt: skip
    found = pretrained.open_folder(folder, []).config.data.images
    assert dataclasses.asdict(found) == {
        "resize": 14, "keep_ratio": False, "pad": False, "resample": "bicubic", "mean": (0.485, 0.456, 0.406),
        "std": (0.229, 0.224, 0.225),
    }  # fmt: skip
    path.write_text(json.dumps({"size": {"longest_edge": 14}, "resample": 1}))
    with pytest.raises(InputError, match=r"longest_edge(.|\n)*resample: 1 is not"):
        pretrained.open_folder(folder, [])


@pytest.mark.parametrize(
    "prepared", [Images(), Images(resize=14, resample="bicubic", mean=(0.1, 0.2, 0.3)), Images(pad=True)]
)
def test_what_is_written_about_images_is_read_again(prepared, tmp_path):
    for name, content in image_families.preprocessor(Patches(image=12, size=4), prepared).items():
        (tmp_path / name).write_bytes(content)
    side = 0 if prepared.pad else prepared.resize or 12
    resize = {"resize": side, "mean": prepared.mean * (3 // len(prepared.mean)), "std": (0.5,) * 3}
    found = Images(**{key: tuple(value) if isinstance(value, list) else value
                      for key, value in image_families.preprocessing(tmp_path).items()})  # fmt: skip
    assert found == dataclasses.replace(prepared, **resize)


@pytest.mark.filterwarnings("ignore")  # what torch and transformers warn of is theirs
@pytest.mark.parity
@pytest.mark.parametrize("name", CASES)
def test_transformers_itself(name, tmp_path):
    import torch

    kind, case = ours.case_of(*CASES[name], tmp_path / "empty")
    folder = ours.folder_of(case, tmp_path / "in")

    def computed(folder):
        model = ours.by_transformers(kind, folder)
        with torch.no_grad():
            return model(torch.from_numpy(images(case["config"]))).logits.numpy()

    want = computed(folder)
    recorded = ours.recorded(GOLDEN, name, case | {"scores": want.tolist()})
    np.testing.assert_allclose(recorded["scores"], want, rtol=0, atol=1e-5)
    opened = pretrained.open_folder(folder, [ours.EXACT])
    for seq in (opened.config.model.context, padded_rows(opened.config.model.context) + 8):
        assert np.abs(scores(opened, seq) - want).max() <= 1e-5 * np.abs(want).max()
    split = scores(opened, opened.config.data.seq, ours.placement(opened.config.model, "fsdp2_tp4"))
    assert np.abs(split - want).max() <= 1e-5 * np.abs(want).max()
    for out in ours.written(opened, tmp_path):
        np.testing.assert_array_equal(computed(out), want)
