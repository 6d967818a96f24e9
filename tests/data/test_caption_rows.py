"""Images with texts: what a row holds, what is held out, what is refused, and a run that learns which are together."""

import json

import numpy as np
import pytest

import gspmd_lm
from gspmd_lm import InputError
from gspmd_lm.data import loader
from tests.data import configs, media
from tests.data.test_image_rows import drawn

pytest.importorskip("PIL.Image", reason="pip install 'gspmd_lm[vision]'")
COLOURS = ("red", "green", "blue")


QUERIES = {"rows": 2, "layers": 1, "token": 254, "start_token": 255}
READING = {"objective": "causal", "vision": {"patches": {"image": 8, "size": 4}, "queries": QUERIES}}


def config_of(source, *, held_out=0.0, fields=("file", "text"), steps=3, model=(), **data):
    own = {"vocab": 257, "context": 16, "vision": {"patches": {"image": 8, "size": 4}, "projection": 8}} | dict(model)
    of_data = {"source": str(source), "batch": 4, "seq": 12, "source_seq": 8, "held_out": held_out, "fields": fields}
    how = {"optimizer": {"learning_rate": 1e-2, "warmup_steps": 5}, "steps": steps, "eval_batches": 9, "trackers": []}
    return configs.config_of(of_data | data, own, own.pop("objective", "contrastive"), configs.MEDIA, **how)


@pytest.fixture
def folder(tmp_path):
    """Nine images, and a table that names them."""
    (tmp_path / "seen" / "png").mkdir(parents=True)
    lines = ["file,text"]
    for number in range(9):
        drawn(number).save(tmp_path / "seen" / "png" / f"{number}.png")
        lines.append(f"png/{number}.png,{COLOURS[number % 3]} {number}")
    (tmp_path / "seen" / "table.csv").write_text("\n".join(lines))
    return tmp_path / "seen"


def test_a_row_has_the_patches_of_an_image_and_its_text(folder):
    train, held_out = loader.open_loaders(config_of(folder))
    assert held_out is None and len(train.rows) == 9
    assert "9 images with texts" in train.description and "skipped" not in train.description
    found = train.rows.read([1, -1])
    whole = (np.asarray(drawn(1), np.float32) / 255 - 0.5) / 0.5
    np.testing.assert_allclose(found["patches"][0, 2], whole[:4, 4:].transpose(2, 0, 1).ravel(), atol=1e-6)
    assert found["patches"].shape == (2, 8, 48) and found["patches"].dtype == np.float32
    assert not found["patches"][0, [0, 5, 6, 7]].any() and not found["patches"][1].any()
    assert found["tokens"].tolist() == [[*b"green 1", 256, 0, 0, 0, 0], [0] * 12]
    assert found["segment_ids"].tolist() == [[1] * 8 + [0] * 4, [0] * 12]
    assert found["positions"][0].tolist() == [*range(8), 0, 0, 0, 0]


def test_a_text_that_is_too_long_is_cut_before_its_end(folder):
    (folder / "table.csv").write_text("file,text\npng/0.png,a text of many letters\npng/1.png,short")
    train = loader.open_loaders(config_of(folder))[0]
    assert train.rows.read([0])["tokens"].tolist() == [[*b"a text of m", 256]]
    assert "texts cut to data.seq=12 tokens: 1" in train.description


def test_a_text_that_is_predicted_stands_behind_what_stands_for_its_image(folder):
    (folder / "table.csv").write_text("file,text\npng/0.png,abc\npng/1.png,a text of many letters")
    train = loader.open_loaders(config_of(folder, model=READING))[0]
    found = train.rows.read([0, 1, -1])
    assert found["tokens"].tolist()[0] == [254, 254, 255, *b"abc", 0, 0, 0, 0, 0, 0]
    assert found["targets"].tolist()[0] == [-1, -1, *b"abc", 256, -1, -1, -1, -1, -1, -1]
    assert found["segment_ids"].tolist()[0] == [1] * 6 + [0] * 6
    assert found["tokens"].tolist()[1] == [254, 254, 255, *b"a text of"]
    assert found["targets"].tolist()[1] == [-1, -1, *b"a text of "]
    assert (found["targets"][2] == -1).all() and not found["segment_ids"][2].any()
    assert "texts cut to data.seq=12 tokens: 1" in train.description


def test_what_stands_for_an_image_is_the_source_of_an_encoder(folder):
    model = READING | {"objective": "seq2seq", "encoder": {"start_token": 7}, "row_multiple": 8}
    train = loader.open_loaders(config_of(folder, model=model, source_seq=4))[0]
    found = train.rows.read([1, -1])
    assert found["source_tokens"].tolist() == [[254, 254, 255, 0], [0] * 4]
    assert found["source_segment_ids"].tolist() == [[1, 1, 1, 0], [0] * 4]
    assert found["source_positions"].tolist() == [[0, 1, 2, 0], [0] * 4]
    assert found["tokens"].tolist()[0] == [7, *b"green 1", 0, 0, 0, 0]
    assert found["targets"].tolist()[0] == [*b"green 1", 256, -1, -1, -1, -1]
    assert found["patches"].shape == (2, 8, 48) and found["patches"][0, 1:5].any() and not found["patches"][1].any()


def test_tables_of_other_kinds_hold_the_same_images(folder):
    contents = [(folder / "png" / f"{number}.png").read_bytes() for number in range(9)]
    texts = [f"{COLOURS[number % 3]} {number}" for number in range(9)]
    columns = {"image": [{"bytes": one, "path": "x.png"} for one in contents], "plain": contents, "text": texts,
               "file": [f"png/{number}.png" for number in range(9)]}  # fmt: skip
    media.check_columns(config_of, folder, columns, 9)


def test_rows_are_the_same_after_a_restart_and_equal_images_are_on_one_side(folder):
    (folder / "png" / "copy.png").write_bytes((folder / "png" / "0.png").read_bytes())
    with open(folder / "table.csv", "a") as table:
        table.write("\npng/copy.png,another text")
    config = config_of(folder, held_out=0.4)
    assert media.checked_restart(config, lambda rows: rows.items) == 10


def broken(folder, what):
    """Makes the first image, its text or the settings unusable."""
    path, table = folder / "png" / "0.png", folder / "table.csv"
    if what == "no image":
        path.write_bytes(b"no image at all")
    elif what == "no table":
        table.unlink()
    return {"no fields": {"fields": ()}, "vocabulary": {"model": {"vocab": 200}}}.get(what, {})


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("no image", r"table\.csv:2: .*0\.png: cannot be read as an image"),
        ("no table", r"data\.source: .*seen: nothing to read"),
        ("no fields", r"data\.fields: records have images and texts\n  fix   set it to the names of both fields"),
        ("vocabulary", r"data\.tokenizer=bytes has 257 tokens, more than model\.vocab=200\n  fix "),
    ],
)
def test_what_is_no_image_with_a_text_is_refused_with_its_place(what, words, folder):
    changes = broken(folder, what)
    with pytest.raises(InputError, match=words):
        loader.open_loaders(config_of(folder, **changes))


@pytest.mark.slow
def test_a_run_learns_which_image_belongs_to_a_text(tmp_path, folder):
    config = config_of(folder, steps=30, held_out=str(folder), batch=8)
    with pytest.raises(InputError, match="held_out has all images of data"):
        loader.open_loaders(config)
    (tmp_path / "other").mkdir()
    lines = ["file,text"]
    for number in range(3):
        drawn(30 + number).save(tmp_path / "other" / f"{number}.png")
        lines.append(f"{number}.png,{COLOURS[number]} 9")
    (tmp_path / "other" / "table.csv").write_text("\n".join(lines))
    config = config_of(folder, steps=30, held_out=str(tmp_path / "other"), batch=8)
    last = gspmd_lm.train(config, "none", tmp_path / "run", platform="cpu")
    assert last["loss"] < 1.2 < np.log(8) and last["pairs"] == 8
    logged = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    scores = next(row for row in reversed(logged) if "eval_image_of_text" in row)
    assert scores["eval_pairs"] == 3 and scores["eval_image_of_text"] == 1.0


@pytest.mark.slow
def test_a_run_learns_to_name_the_colour_of_an_image(tmp_path, folder):
    (folder / "table.csv").write_text("file,text\n" + "\n".join(f"png/{n}.png,{COLOURS[n % 3]}" for n in range(9)))
    config = config_of(folder, steps=400, batch=8, model=READING)
    last = gspmd_lm.train(config, "none", tmp_path / "run", platform="cpu")
    assert last["loss"] < 0.05 and last["accuracy"] == 1.0
    files = [str(folder / "png" / f"{n}.png") for n in range(6)]
    written = gspmd_lm.load(tmp_path / "run", platform="cpu").generate(files, max_new_tokens=8)
    assert written == [COLOURS[n % 3] for n in range(6)]
