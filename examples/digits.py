"""python examples/digits.py FOLDER: scikit-learn's handwritten digits as FOLDER/train/CLASS/*.png and FOLDER/test/...

The digits come with scikit-learn: 1,797 images of 8 x 8 pixels, of which the last 360 are the test. Then

    python main.py train --config=examples/digits.yaml --rules=none --set data.source=FOLDER/train \\
        --set data.held_out=FOLDER/test
"""

import sys
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

TEST = 360


def main(folder: str) -> None:
    digits = load_digits()
    for number, (image, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        split = "train" if number < len(digits.images) - TEST else "test"
        path = Path(folder, split, str(label), f"{number:04}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.round(image * 255 / 16).astype(np.uint8)).save(path)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(sys.argv[1])
