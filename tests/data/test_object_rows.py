"""Images with masks of objects and prompts: what a row holds, what is refused, and a run that learns to cut out."""

import io
import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from einops import rearrange

import gspmd_lm
from gspmd_lm import InputError
from gspmd_lm.data import loader
from tests.data import configs, media
from tests.data.test_image_rows import drawn

Image = pytest.importorskip("PIL.Image", reason="pip install 'gspmd_lm[vision]'")


def config_of(source, *, held_out=0.0, fields=("image", "mask", "prompt"), steps=3, model=(), **data):
    own = {"layers": 2, "embed": 32, "heads": 4, "kv_heads": 4, "mlp": 64, "vocab": 0, "context": 16,
           "attention.mask": "full", "patches": {"image": 16, "size": 4, "class_row": False, "pool": "mean"},
           "norm.final": False, "windows": {"size": 3, "vectors": True}, "layer_pattern": ["full", "whole"],
           "masks": {"embed": 32, "mlp": 64, "heads": 4}}  # fmt: skip
    of_data = {"source": str(source), "batch": 4, "seq": 16, "held_out": held_out, "fields": fields}
    how = {"optimizer": {"learning_rate": 3e-3, "warmup_steps": 5}, "steps": steps, "eval_batches": 9, "trackers": []}
    return configs.config_of(of_data | data, own | dict(model), "masks", configs.MEDIA, **how)


def boxed(number, size=(16, 16)):
    """An image and the mask of a bright box in it, as files, and the corners of the box."""
    rng = np.random.default_rng(number)
    width, height = size
    left, top = rng.integers(0, width - 6), rng.integers(0, height - 6)
    right, bottom = left + rng.integers(3, 6), top + rng.integers(3, 6)
    image = rng.integers(0, 100, (height, width, 3)).astype(np.uint8)
    mask = np.zeros((height, width), np.uint8)
    image[top : bottom + 1, left : right + 1] += 120
    mask[top : bottom + 1, left : right + 1] = 1
    files = []
    for array in (image, mask):
        files.append(io.BytesIO())
        Image.fromarray(array).save(files[-1], "png")
    return [file.getvalue() for file in files], [int(one) for one in (left, top, right, bottom)]


@pytest.fixture
def folder(tmp_path):
    """Six images with a mask and a prompt each: boxes and points in turn."""
    lines = []
    for number in range(6):
        files, corners = boxed(number)
        for name, content in zip(("image", "mask"), files, strict=True):
            (tmp_path / f"{name}{number}.png").write_bytes(content)
        prompt = corners if number % 2 else corners[:2]
        lines.append(json.dumps({"image": f"image{number}.png", "mask": f"mask{number}.png", "prompt": prompt}))
    (tmp_path / "table.jsonl").write_text("\n".join(lines))
    return tmp_path


def test_a_row_has_an_image_its_object_and_the_prompt(folder):
    train, held_out = loader.open_loaders(config_of(folder))
    assert held_out is None and "6 objects in images" in train.description
    found = train.rows.read([1, 2, -1])
    _, (left, top, right, bottom) = boxed(1)
    pixels = rearrange(found["object"][0], "(h w) (y x) -> (h y) (w x)", h=4, y=4)
    want = np.zeros((16, 16), int)
    want[top : bottom + 1, left : right + 1] = 1
    np.testing.assert_array_equal(pixels, want)
    assert found["point_kinds"].tolist() == [[2, 3], [1, -1], [-1, -1]]
    np.testing.assert_allclose(found["points"][0], (np.array([[left, top], [right, bottom]]) + 0.5) / 16)
    np.testing.assert_allclose(found["points"][1, 0], (np.array(boxed(2)[1][:2]) + 0.5) / 16)
    assert (found["object"][2] == -1).all() and not found["patches"][2].any()


@pytest.mark.parametrize(("prompt", "kinds"), [("point", [1, -1]), ("box", [2, 3])])
def test_a_mask_gives_the_prompt_that_a_record_lacks(prompt, kinds, folder):
    found = loader.open_loaders(config_of(folder, fields=("image", "mask"), prompt=prompt))[0].rows.read([0])
    (left, top, right, bottom), points = boxed(0)[1], found["points"][0] * 16 - 0.5
    assert found["point_kinds"].tolist() == [kinds]
    if prompt == "box":
        np.testing.assert_allclose(points, [[left, top], [right, bottom]], atol=1e-5)
    else:
        assert left <= points[0, 0] <= right and top <= points[0, 1] <= bottom


def test_an_image_that_is_padded_has_no_object_beside_it(folder):
    for name, content in zip(("image0.png", "mask0.png"), boxed(0, (32, 20))[0], strict=True):
        (folder / name).write_bytes(content)
    config = config_of(folder, fields=("image", "mask"), images={"pad": True}, prompt="box")
    found = loader.open_loaders(config)[0].rows.read([0])
    pixels = rearrange(found["object"][0], "(h w) (y x) -> (h y) (w x)", h=4, y=4)
    assert (pixels[10:] == -1).all() and (pixels[:10] >= 0).all() and (pixels == 1).any()
    assert not rearrange(found["patches"][0], "(h w) (c y x) -> (h y) (w x) c", h=4, c=3, y=4)[10:].any()
    corners = np.array(boxed(0, (32, 20))[1]).reshape(2, 2)
    np.testing.assert_allclose(found["points"][0], (corners / 2 + 0.5) / 16)


def test_a_table_may_hold_the_files_and_rows_are_the_same_after_a_restart(folder):
    want = loader.open_loaders(config_of(folder))[0].rows.read(range(6))
    lines = [json.loads(line) for line in (folder / "table.jsonl").read_text().splitlines()]
    columns = {name: [(folder / line[name]).read_bytes() for line in lines] for name in ("image", "mask")}
    table = pyarrow.table(columns | {"prompt": [[float(one) for one in line["prompt"]] for line in lines]})
    pyarrow.parquet.write_table(table, folder / "all.parquet")
    found = loader.open_loaders(config_of(folder / "all.parquet"))[0].rows.read(range(6))
    assert all(np.array_equal(found[name], want[name]) for name in want)
    assert media.checked_restart(config_of(folder / "table.jsonl", held_out=0.4), lambda rows: rows.items) == 6


def broken(folder, what):
    """Makes the first record, its files or the settings unusable."""
    table = folder / "table.jsonl"
    first, *others = table.read_text().splitlines()
    record = json.loads(first)
    if what == "size":
        drawn(0).resize((5, 7)).save(folder / "mask0.png")
    elif what == "column":
        del record["mask"]
    elif what == "outside":
        record["prompt"] = [3, 16]
    elif what == "text":
        record["prompt"] = "3, 4"
    elif what == "turned":
        record["prompt"] = [5, 5, 2, 8]
    elif what == "black":
        Image.new("L", (16, 16)).save(folder / "mask0.png")
    table.write_text("\n".join([json.dumps(record), *others]))
    return {"fields": ()} if what == "no fields" else {}


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("size", r"mask0\.png: the mask has 5 x 7 pixels, and its image 16 x 16\n  fix   give a mask of the size"),
        ("column", r"table\.jsonl:1: mask is not one of image, prompt: there is no mask\n  fix   name in data\.fields"),
        ("outside", r"table\.jsonl:1: prompt \[3, 16\] is not within the image of 16 x 16 pixels\n  fix   give pixels"),
        ("text", r"table\.jsonl:1: prompt is '3, 4': there is no prompt\n  fix   give \[x, y\]"),
        ("turned", r"table\.jsonl:1: prompt \[5, 5, 2, 8\] has no width or height\n  fix   give \[left, top,"),
        ("black", r"mask0\.png: all of the mask is black: there is no object\n  fix   leave"),
        ("no fields", r"data\.fields: records have an image, the mask of an object, and maybe a prompt\n  fix "),
    ],
)
def test_what_is_no_object_in_an_image_is_refused_with_its_place(what, words, folder):
    changes = broken(folder, what)
    with pytest.raises(InputError, match=words):
        loader.open_loaders(config_of(folder, **changes))[0].rows.read(range(6))


@pytest.mark.slow
def test_a_run_learns_to_cut_out_what_a_prompt_means(tmp_path, folder):
    config = config_of(folder, steps=60, held_out=0.2, batch=8, fields=("image", "mask"), prompt="box")
    last = gspmd_lm.train(config, "none", tmp_path / "run", platform="cpu")
    logged = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    scores = next(row for row in reversed(logged) if "eval_iou" in row)
    assert last["iou"] > 0.7 > logged[0]["iou"] and scores["eval_objects"] == 1
