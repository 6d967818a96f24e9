"""Images of folders and of tables: their classes, their patches, and what is no image."""

import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

import gspmd_lm
from gspmd_lm import InputError
from gspmd_lm.config.media import Images, Patches
from gspmd_lm.data import images, loader, media
from tests.data import configs
from tests.quick import QUICK_FLAGS

Image = pytest.importorskip("PIL.Image", reason="pip install 'gspmd_lm[vision]'")
CLASSES = ("cat", "dog", "owl")


def drawn(number, side=8):
    """An image that tells its class by its colour, with noise of its own."""
    noise = np.random.default_rng(number).integers(0, 100, (side, side, 3))
    return Image.fromarray((noise + 150 * (np.arange(3) == number % 3)).astype(np.uint8))


@pytest.fixture
def folder(tmp_path):
    for number in range(12):
        path = tmp_path / "pictures" / CLASSES[number % 3] / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        drawn(number).save(path)
    return tmp_path / "pictures"


def config_of(source, *, held_out=0.25, steps=3, model=(), **data):
    own = {"vocab": 0, "context": 5, "attention.mask": "full", "classes.count": 3, "patches": {"image": 8, "size": 4}}
    of_data = {"source": str(source), "seq": 8, "held_out": held_out} | data
    how = {"optimizer": {"learning_rate": 1e-2}, "steps": steps, "eval_batches": 9, "trackers": []}
    return configs.config_of(of_data, own | dict(model), "classes", configs.MEDIA, **how)


def test_rows_are_patches_of_the_images_behind_the_learned_row(folder):
    train, held_out = loader.open_loaders(config_of(folder, held_out=0.0))
    assert held_out is None and train.classes == CLASSES and len(train.rows) == 12
    found = train.rows.read([1, -1])  # cat: 00 03 06 09
    whole = (np.asarray(drawn(3), np.float32) / 255 - 0.5) / 0.5
    for row, (top, left) in enumerate([(0, 0), (0, 4), (4, 0), (4, 4)], 1):
        corner = whole[top : top + 4, left : left + 4].transpose(2, 0, 1)
        np.testing.assert_allclose(found["patches"][0, row], corner.ravel(), atol=1e-6)
    assert not found["patches"][0, [0, 5, 6, 7]].any() and not found["patches"][1].any()
    assert found["labels"].tolist() == [0, -1]


def test_tables_hold_the_same_images(folder, tmp_path):
    paths = sorted(folder.glob("*/*.png"))
    columns = {
        "image": [{"bytes": path.read_bytes(), "path": path.name} for path in paths],
        "plain": [path.read_bytes() for path in paths],
        "label": [path.parent.name for path in paths],
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "train.parquet")
    want = loader.open_loaders(config_of(folder))
    for column in ("image", "plain"):
        found = loader.open_loaders(config_of(tmp_path / "train.parquet", fields=[column], label="label"))
        for one, other in zip(found, want, strict=True):
            for name, array in one.rows_at(0, slice(None)).items():
                np.testing.assert_array_equal(array, other.rows_at(0, slice(None))[name])
    (tmp_path / "train.parquet").unlink()
    lines = [json.dumps({"image": str(path), "label": path.parent.name, "wrong": 1}) for path in paths]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    named, _ = loader.open_loaders(config_of(tmp_path, fields=["image"], label="label"))
    np.testing.assert_array_equal(named.rows_at(0, slice(None))["labels"], want[0].rows_at(0, slice(None))["labels"])
    with pytest.raises(InputError, match=r"train\.jsonl:1: wrong is a number: there is no image"):
        loader.open_loaders(config_of(tmp_path, fields=["wrong"], label="label"))


def test_what_is_held_out_follows_from_the_contents(folder):
    before = loader.open_loaders(config_of(folder))
    assert [len(one.rows) for one in before] == [9, 3]
    held_out = {image.encoded.sha256 for image in before[1].rows.items}
    assert not held_out & {image.encoded.sha256 for image in before[0].rows.items}
    for path in folder.glob("*/*.png"):
        path.rename(path.with_name(f"x{99 - int(path.stem)}.png"))
    after = loader.open_loaders(config_of(folder))
    assert {image.encoded.sha256 for image in after[1].rows.items} == held_out
    assert before[0].fingerprint != loader.open_loaders(config_of(folder, images={"mean": [0.1]}))[0].fingerprint


def test_images_are_resized_and_their_middle_is_cut_out(tmp_path):
    drawn(1, side=20).save(tmp_path / "one.png")
    image = media.Encoded("one", b"", tmp_path / "one.png")
    found = images.pixels(image, Patches(image=8, size=4, channels=1), Images(resize=12, resample="bicubic"))
    whole = drawn(1, side=20).convert("L").resize((12, 12), Image.Resampling.BICUBIC)
    np.testing.assert_allclose(found[..., 0], np.asarray(whole, np.float32)[2:10, 2:10] / 127.5 - 1, atol=1e-6)


def test_what_is_no_image_is_named(folder):
    (folder / "cat" / "notes.txt").write_text("about cats")
    assert "skipped, no ending of an image: 1" in loader.open_loaders(config_of(folder))[0].description.replace(
        str(folder / "cat" / "notes.txt"), "1"
    )
    wrong = folder / "owl" / "wrong.png"
    wrong.write_bytes(b"no image at all")
    with pytest.raises(InputError, match=r"owl/wrong\.png: cannot be read as an image \(its format is unknown\)"):
        loader.open_loaders(config_of(folder))
    wrong.write_bytes((folder / "owl" / "02.png").read_bytes()[:-60])  # whole up to its header
    train, _ = loader.open_loaders(config_of(folder, held_out=0.0))
    with pytest.raises(InputError, match=r"owl/wrong\.png: cannot be read as an image"):
        train.rows.read(range(len(train.rows)))
    Image.fromarray(np.ones((4, 4), np.uint16)).save(wrong)
    with pytest.raises(InputError, match=r"owl/wrong\.png: has pixels of mode I;16"):
        loader.open_loaders(config_of(folder))
    wrong.rename(folder / "loose.png")
    with pytest.raises(InputError, match=r"loose\.png: lies in no folder of a class"):
        loader.open_loaders(config_of(folder))


def test_what_does_not_fit_the_model_is_refused(folder, tmp_path):
    with pytest.raises(
        InputError, match=r"images of 3 classes, and model\.classes\.count is 4(.|\n)*model\.classes\.count=3"
    ):
        loader.open_loaders(config_of(folder, model={"classes.count": 4}))
    with pytest.raises(InputError, match=r"nowhere: no folder(.|\n)*data\.fields"):
        loader.open_loaders(config_of(tmp_path / "nowhere"))
    other = tmp_path / "other" / "fox"
    other.mkdir(parents=True)
    drawn(40).save(other / "fox.png")
    with pytest.raises(InputError, match=r"fox\.png: the class=fox is no label of the training data"):
        loader.open_loaders(config_of(folder, held_out=str(tmp_path / "other")))
    with pytest.raises(InputError, match="12 distinct images leave none to train on"):
        loader.open_loaders(config_of(folder, held_out=0.99))


@pytest.mark.slow  # train/test_objectives.py has a run that learns classes of texts, and the tests above have images
def test_a_run_learns_the_classes_and_keeps_them(folder, tmp_path):
    quick = [flag.removeprefix("--set=") for flag in QUICK_FLAGS]
    rules = gspmd_lm.load_rules("none", overrides=quick)
    last = gspmd_lm.train(config_of(folder, steps=25), rules, tmp_path / "run", platform="cpu")
    assert json.loads((tmp_path / "run" / "classes.json").read_text()) == list(CLASSES)
    assert last["loss"] < 0.4
    logged = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    scores = next(row for row in reversed(logged) if "eval_accuracy" in row)
    assert scores["eval_labels"] == 3 and scores["eval_accuracy"] == 1.0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parity
@pytest.mark.parametrize(
    ("side", "resample", "kept"),
    [(16, "bilinear", False), (20, "bicubic", False), (19, "bicubic", True), (0, "bilinear", False)],
)
def test_pixels_are_those_of_the_processors_of_transformers(tmp_path, side, resample, kept):
    """kept: whether images keep the ratio of their sides, as CLIP's do. A side of 0: as SAM's do, which are padded."""
    import transformers

    drawn(5, side=37).crop((0, 0, 31, 37)).save(tmp_path / "one.png")
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    kind = transformers.CLIPImageProcessorPil if kept else transformers.DeiTImageProcessorPil
    kind = transformers.ViTImageProcessorPil if side == 16 else kind
    pad = {} if side else {"pad_size": {"height": 16, "width": 16}}
    kind = kind if side else transformers.SamImageProcessorPil
    crop = {"do_center_crop": True, "crop_size": {"height": 16, "width": 16}} if side > 16 else {}
    size = {"shortest_edge": side} if kept else {"height": side, "width": side}
    size = size if side else {"longest_edge": 16}
    theirs = kind(size=size, resample=3 if resample == "bicubic" else 2,
                  image_mean=list(mean), image_std=list(std), **crop, **pad)  # fmt: skip
    want = theirs(Image.open(tmp_path / "one.png"), return_tensors="np")["pixel_values"][0]
    image = media.Encoded("one", b"", tmp_path / "one.png")
    prepared = Images(resize=side, keep_ratio=kept, resample=resample, mean=mean, std=std, pad=not side)
    found = images.pixels(image, Patches(image=16, size=4), prepared)
    np.testing.assert_allclose(found.transpose(2, 0, 1), want, atol=2e-6)
