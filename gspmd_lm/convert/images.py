"""How images are prepared: preprocessor_config.json of a folder, read and written."""

from pathlib import Path
from typing import Any

from gspmd_lm import config
from gspmd_lm.config.masks import PARTS
from gspmd_lm.convert.sidecars import as_json
from gspmd_lm.convert.strict_json import read_object, show_value
from gspmd_lm.errors import InputError

PREPROCESSOR = "preprocessor_config.json"
_RESAMPLE = {2: "bilinear", 3: "bicubic"}  # Pillow's numbers
ROWS_DIVIDE_BY = 8


def padded_rows(context: int) -> int:
    """data.seq of the rows of an image: with padding, so that a split sequence divides."""
    return config.padded_rows(context, ROWS_DIVIDE_BY)


def read_preprocessing(folder: Path) -> dict[str, Any]:
    """The section data.images, as the folder's preprocessor_config.json says it; {} without such a file.

    Raises InputError for preparations that are not supported.
    """
    path = folder / PREPROCESSOR
    if not path.is_file():
        return {}
    raw, wrong = read_object(path), []
    found: dict[str, Any] = {}
    if raw.get("do_resize", True) and "size" in raw:
        kind = raw.get("image_processor_type", raw.get("feature_extractor_type"))
        longest = raw["size"].get("longest_edge") if isinstance(raw["size"], dict) else None
        if longest and raw.get("do_pad") and raw.get("pad_size") == {"height": longest, "width": longest}:
            found["pad"] = True
        else:
            found |= _read_size(raw["size"], str(kind).startswith(("CLIP", "Bit")), wrong)
    resample = raw.get("resample", 2)
    if isinstance(resample, int) and resample in _RESAMPLE:
        found["resample"] = _RESAMPLE[resample]
    else:
        wrong.append(f"resample: {show_value(resample)} is not 2 (bilinear) or 3 (bicubic)")
    normalised = raw.get("do_normalize", True)
    for name, ours, plain in (("image_mean", "mean", 0.0), ("image_std", "std", 1.0)):
        numbers = raw.get(name, [0.5]) if normalised else [plain]
        if isinstance(numbers, list) and numbers and all(isinstance(one, int | float) for one in numbers):
            found[ours] = [float(one) for one in numbers]
        else:
            wrong.append(f"{name}: {show_value(numbers)} is not a list of numbers")
    factor = raw.get("rescale_factor", 1 / 255)
    if not raw.get("do_rescale", True) or not isinstance(factor, float) or abs(factor * 255 - 1) > 1e-6:
        wrong.append(f"rescale_factor: {show_value(factor)} does not bring pixels to 0 to 1")
    if wrong:
        lines = "\n".join(f"  {line}" for line in wrong)
        raise InputError(f"{path}: preparations of images that are not supported\n{lines}\n"
                         "  fix   take the file out of a copy of the folder, and set data.images")  # fmt: skip
    return found


def _read_size(size: Any, keeps_ratio: bool, wrong: list[str]) -> dict[str, Any]:
    """The settings of a field size. keeps_ratio: whether a number alone is the shorter side, and not both sides."""
    if isinstance(size, int):
        size = {"shortest_edge": size} if keeps_ratio else {"height": size, "width": size}
    sides = [*size.values()] if isinstance(size, dict) else []
    if sides and {*size} == {"shortest_edge"} and isinstance(sides[0], int):
        return {"resize": sides[0], "keep_ratio": True}
    if sides and {*size} == {"height", "width"} and isinstance(sides[0], int) and sides[0] == sides[1]:
        return {"resize": sides[0]}
    wrong.append(f"size: {show_value(size)} is neither the height and width of a square nor a shortest_edge")
    return {}


def write_preprocessing(patches: config.Patches, prepared: config.Images) -> dict[str, bytes]:
    """The preprocessor_config.json with which transformers prepares images as training did: name -> content."""
    side, cut = prepared.resize or patches.image, prepared.keep_ratio or prepared.resize > patches.image
    kind = "Sam" if prepared.pad else "CLIP" if prepared.keep_ratio else "DeiT" if cut else "ViT"
    fields = {
        "image_processor_type": f"{kind}ImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": side} if prepared.keep_ratio else {"height": side, "width": side},
        "resample": {name: number for number, name in _RESAMPLE.items()}[prepared.resample],
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [*prepared.mean] * (patches.channels // len(prepared.mean)),
        "image_std": [*prepared.std] * (patches.channels // len(prepared.std)),
    }
    if prepared.keep_ratio:  # otherwise CLIP's processor makes colours of grey
        fields["do_convert_rgb"] = patches.channels == 3
    if prepared.pad:
        fine = PARTS * patches.side
        fields |= {"size": {"longest_edge": side}, "do_pad": True, "pad_size": {"height": side, "width": side},
                   "do_convert_rgb": patches.channels == 3, "mask_size": {"longest_edge": fine},
                   "mask_pad_size": {"height": fine, "width": fine}}  # fmt: skip
    if cut:
        fields |= {"do_center_crop": True, "crop_size": {"height": patches.image, "width": patches.image}}
    return {PREPROCESSOR: as_json(fields)}
