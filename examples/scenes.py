"""python examples/scenes.py FOLDER: four of scikit-learn's handwritten digits in an image, and the mask of one of them.

An image has 32 x 32 grey pixels. FOLDER/train has 3,000 images, and FOLDER/test 300, of digits that are in no image of
training. A point of the mask, or the box around it, is the prompt. Then

    python main.py train --config=examples/scenes.yaml --rules=none --workdir=RUN \\
        --set data.source=FOLDER/train --set data.held_out=FOLDER/test
"""

import json
import sys
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

TEST, SIDE, DIGIT = 360, 32, 12  # digits that are kept for the test, and pixels on a side of an image and of a digit
COUNTS = {"train": 3000, "test": 300}


def main(folder: str) -> None:
    images = load_digits().images
    split = {"train": images[:-TEST], "test": images[-TEST:]}
    for name, count in COUNTS.items():
        rng, lines = np.random.default_rng(len(name)), []
        Path(folder, name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            record = {what: f"{number:04}-{what}.png" for what in ("image", "mask")}
            for what, pixels in zip(record, scene(split[name], rng), strict=True):
                Image.fromarray(pixels).save(Path(folder, name, record[what]))
            lines.append(json.dumps(record))
        Path(folder, name, "table.jsonl").write_text("\n".join(lines) + "\n")


def scene(digits: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """A digit somewhere in each quarter of an image, with noise, and the ink of one of them."""
    image, mask = rng.integers(0, 60, (SIDE, SIDE)).astype(np.uint8), np.zeros((SIDE, SIDE), np.uint8)
    meant = rng.integers(4)
    for quarter, digit in enumerate(digits[rng.choice(len(digits), 4, replace=False)]):
        small = Image.fromarray(np.round(digit * 255 / 16).astype(np.uint8))
        ink = np.asarray(small.resize((DIGIT, DIGIT), Image.Resampling.BICUBIC))
        top, left = np.array(divmod(quarter, 2)) * SIDE // 2 + rng.integers(0, SIDE // 2 - DIGIT + 1, 2)
        place = slice(top, top + DIGIT), slice(left, left + DIGIT)
        image[place] = np.maximum(image[place], ink)
        if quarter == meant:
            mask[place] = 255 * (ink > 100)
    return image, mask


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(sys.argv[1])
