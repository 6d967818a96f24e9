"""SAM against transformers: masks and their quality, and folders there and back. `pytest -m parity` does it anew.

With GSPMD_LM_RECORD=1 that run writes golden/masks.json: config.json, shapes of tensors and what is drawn.
"""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from einops import rearrange

from gspmd_lm import InputError
from gspmd_lm.convert import export, pretrained
from gspmd_lm.convert.image_families import padded_rows
from gspmd_lm.model.families import apply
from gspmd_lm.sharding.annotate import placed_by
from tests.convert import ours

GOLDEN = Path(__file__).parent / "golden" / "masks.json"
WIDTH = 32
VISION = {
    "hidden_size": 48, "output_channels": WIDTH, "num_hidden_layers": 3, "num_attention_heads": 8, "image_size": 24,
    "patch_size": 4, "window_size": 4, "global_attn_indexes": [2], "num_pos_feats": WIDTH // 2, "mlp_dim": 64,
}  # fmt: skip
PROMPT = {"hidden_size": WIDTH, "image_size": 24, "patch_size": 4}
DECODER = {"hidden_size": WIDTH, "mlp_dim": 40, "iou_head_hidden_dim": WIDTH}


def case_of(**vision):
    return {"vision_config": VISION | vision, "prompt_encoder_config": PROMPT, "mask_decoder_config": DECODER}


CASES = {
    # 6 x 6 patches: windows of 4 reach beyond them, with keys that are biases alone.
    "sam": case_of(),
    # Windows that fit, no positions of either kind, and a pattern that the layers repeat.
    "sam-plain": case_of(
        window_size=3, num_hidden_layers=4, global_attn_indexes=[1, 3], use_abs_pos=False, use_rel_pos=False,
        qkv_bias=False, num_channels=1,
    ),
    "sam-whole": case_of(window_size=0, num_hidden_layers=1, global_attn_indexes=[]),
}  # fmt: skip


def drawn_inputs(config):
    """Images, two points of each, of and beside the object, a box, and a mask that is a prompt."""
    rng, vision = np.random.default_rng(0), config["vision_config"]
    side = vision["image_size"]
    images = rng.standard_normal((2, vision["num_channels"], side, side)).astype(np.float32)
    points = rng.integers(0, side, (2, 2, 2)).astype(np.float32)
    corner = rng.integers(0, side // 2, (2, 1, 2))
    boxes = np.concatenate([corner, corner + 5], -1).astype(np.float32)
    mask = rng.standard_normal((2, 1, 4 * side // vision["patch_size"], 4 * side // vision["patch_size"]))
    return images, points, boxes, mask.astype(np.float32)


def found_by(opened, prompts, seq, placed=None):
    """The masks [B, M, height, width] and their quality [B, M] of our model, with so many rows for each image."""
    model = opened.config.model
    patches, (images, points, boxes, mask) = model.patches, drawn_inputs(opened.like)
    cut = rearrange(images, "B c (h p) (w q) -> B (h w) (c p q)", p=patches.size, q=patches.size)
    padding = (0, 0), (0, seq - model.context), (0, 0)
    batch = {"patches": np.pad(cut, padding, constant_values=7.0), "row": np.arange(2)}
    kinds = np.tile(np.array([1, 0, -1], np.int32), (2, 1))
    batch |= {"points": np.pad((points + 0.5) / patches.image, ((0, 0), (0, 1), (0, 0))), "point_kinds": kinds}
    if prompts != "points":  # with a box, no token says that there is no further point
        corners = (boxes.reshape(2, 2, 2) + 0.5) / patches.image
        batch["points"] = np.concatenate([batch["points"][:, :2], corners], 1)
        batch["point_kinds"] = np.concatenate([kinds[:, :2], np.tile(np.array([2, 3], np.int32), (2, 1))], 1)
    if prompts == "mask":
        of_patches = rearrange(mask, "B 1 (h y) (w x) -> B (h w) (y x)", y=4, x=4)
        batch["prompt_mask"] = np.pad(of_patches, padding, constant_values=7.0)
    params = opened.load(ours.shardings(opened, placed)) if placed else ours.on_one_device(opened)

    def run(params, batch):
        with placed_by(placed):
            return apply(model, params, batch)

    masks, iou = jax.device_get(jax.jit(run)(params, batch))
    masks = masks[:, :, : model.context]
    return {"masks": rearrange(masks, "B M (h w) (y x) -> B M (h y) (w x)", h=patches.side, y=4), "iou": iou}


def check(found, want):
    for name, array in want.items():
        assert np.abs(found[name] - array).max() <= 1e-5 * np.abs(array).max(), name


@pytest.fixture(scope="module")
def golden():
    return json.loads(GOLDEN.read_text())


@pytest.mark.parametrize("name", ["sam"])
def test_masks_are_those_of_transformers_and_files_come_back(name, golden, tmp_path):
    case = golden[name]
    opened = pretrained.open_folder(ours.folder_of(case, tmp_path / "in"), [ours.EXACT])
    assert (opened.family.name, opened.config.objective, opened.config.data.seq) == ("SAM", "masks", 40)
    check(found_by(opened, "mask", 40), {key: np.array(one) for key, one in case["found"].items()})
    params = jax.device_get(ours.on_one_device(opened))
    for like in (opened.like, None):
        out = tmp_path / f"out {like is None}"
        export.write_folder(out, opened.config.model, params, like)
        written, original = ours.tensors(out), ours.tensors(tmp_path / "in")
        assert written.keys() == original.keys()
        assert all(np.array_equal(written[tensor], original[tensor]) for tensor in original)
        assert pretrained.open_folder(out, [ours.EXACT]).config.model == opened.config.model


@pytest.mark.parametrize(
    ("part", "changes", "words"),
    [
        ("vision_config", {"window_size": -1}, "vision_config.window_size: -1 must be a whole number"),
        ("vision_config", {"output_channels": 64}, "vision_config.output_channels: 64 is not 32"),
        ("prompt_encoder_config", {"image_size": 28}, "prompt_encoder_config.image_size: 28 is not 24"),
        ("mask_decoder_config", {"iou_head_depth": 2}, "mask_decoder_config.iou_head_depth: 2 is not 3"),
    ],
)
def test_what_is_not_supported_is_refused(part, changes, words, golden, tmp_path):
    case = golden["sam"]
    config = {**case["config"], part: case["config"][part] | changes}
    with pytest.raises(InputError, match=words):
        pretrained.open_folder(ours.folder_of({**case, "config": config}, tmp_path / "in"), [])


@pytest.mark.filterwarnings("ignore")  # what torch and transformers warn of is theirs
@pytest.mark.parity
@pytest.mark.parametrize("name", CASES)
def test_transformers_itself(name, tmp_path):
    import torch

    kind, case = ours.case_of("SamModel", CASES[name], tmp_path / "empty")
    folder = ours.folder_of(case, tmp_path / "in")
    images, points, boxes, mask = map(torch.from_numpy, drawn_inputs(case["config"]))

    def computed(folder, prompts):
        prompt = {"input_points": points[:, None], "input_labels": torch.tensor([[[1, 0]]] * 2)}
        prompt |= {} if prompts == "points" else {"input_boxes": boxes}
        prompt |= {"input_masks": mask} if prompts == "mask" else {}
        model = ours.by_transformers(kind, folder)
        with torch.no_grad():
            one, several = (model(pixel_values=images, multimask_output=some, **prompt) for some in (False, True))
        masks, iou = (
            torch.cat([getattr(found, name)[:, 0] for found in (one, several)], 1).numpy()
            for name in ("pred_masks", "iou_scores")
        )
        return {"masks": masks, "iou": iou}

    want = {prompts: computed(folder, prompts) for prompts in ("points", "box", "mask")}
    if name == "sam":
        ours.recorded(GOLDEN, name, case | {"found": {key: array.tolist() for key, array in want["mask"].items()}})
    opened = pretrained.open_folder(folder, [ours.EXACT])
    for prompts, of_prompts in want.items():
        check(found_by(opened, prompts, padded_rows(opened.config.model.context)), of_prompts)
    check(found_by(opened, "mask", opened.config.model.context), want["mask"])
    split = found_by(opened, "box", 40, ours.placement(opened.config.model, "fsdp2_tp4"))
    check(split, want["box"])
    for out in ours.written(opened, tmp_path):
        for key, array in computed(out, "mask").items():
            np.testing.assert_array_equal(array, want["mask"][key])
