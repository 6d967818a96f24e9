"""What a run would read, looked at before it runs."""

import json
import os
from pathlib import Path

import pytest

from gspmd_lm.data import making, overview
from gspmd_lm.data.tokenize import tokenize
from tests.data import conversations, test_image_rows, test_sound_rows
from tests.data.test_tokens import FULL, KINDS
from tests.data.test_tokens import _config as config_of


@pytest.fixture(autouse=True)
def folder(folder):
    conversations.write_tokenizer(folder / "chatty", conversations.CHATML)
    chats = [{"messages": conversations.turns(f"question {i}", f"answer {i}")} for i in range(60)]
    records = [{"a": f"one {i}", "b": "two " * (i % 9), "label": ("no", "yes", "maybe")[i % 3]} for i in range(60)]
    texts = [{"text": f"the {'very ' * (i % 5)}old text {i} is here"} for i in range(300)]
    for name, lines in (("chat", chats), ("records", records), ("a", texts)):
        Path(f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def _rows(looked):
    """The rows as text, with brackets around what is predicted."""
    marked = (
        (row, name, "".join(f"[{piece.text}]" if piece.is_learnt else piece.text for piece in pieces))
        for row in looked.rows for name, pieces in row.segments
    )  # fmt: skip
    return [(row.number, name, text) for row, name, text in marked]


def _whole(text):
    """Whether a document stands whole in a text, whose first token nothing predicts."""
    first, rest = text[0], text[1:]
    return first == "t" and rest.startswith("[he ") and rest.endswith(" is here<end>]")


SEEN = {
    "texts": lambda row, name, text: _whole(text) or text.startswith(("[", "t[he ")) or "[" in text,
    "stream": lambda row, name, text: text[1] == "[" and text.endswith("]") and "<end>the " in text,
    "masked": lambda row, name, text: "[" in text or len(text) < 30,
    "conversations": lambda row, name, text: (
        f"question {text.split('question ')[1].split('<')[0]}<|im_end|>" in text
        and f"assistant\n[answer {text.split('[answer ')[1].split('<')[0]}<|im_end|>]\n" in text
    ),
    "labels": lambda row, name, text: (
        text.startswith(("one ", "two ")[name == "b"]) if name in "ab" else text in ("[no]", "[yes]", "[maybe]")
    ),
    "pairs": lambda row, name, text: (name, text[:4]) in (("source", "one "), ("text", "[two")) or text == "[<end>]",
}


@pytest.mark.parametrize("kind", KINDS)
def test_rows_as_text_of_a_source_and_of_its_tokens(kind):
    """Each kind of row shows its text, and brackets around what is predicted."""
    source, settings = KINDS[kind]
    tokenize(config_of(source, held_out=0.1, **settings), "made")
    looked, of_tokens = (overview.look(config_of(name, held_out=0.1, **settings)) for name in (source, "made"))
    found = _rows(looked)
    assert found == _rows(of_tokens) and len(looked.rows) == 3, "the tokens are shown as the texts are"
    assert all(SEEN[kind](*one) for one in found), found
    assert looked.training.rows == of_tokens.training.rows > looked.evaluation.rows > 0
    assert looked.training.tokens == of_tokens.training.tokens > 500
    assert looked.notes == ["classes: 0 = maybe, 1 = no, 2 = yes"] * (kind == "labels")
    assert looked.speed.rows_per_s > 0 and looked.speed.row_bytes > 0
    name = settings.get("tokenizer")
    assert looked.tokenizer.endswith(f"</s>; {os.getcwd()}/{name}/tokenizer.json" if name else "there is no file")
    assert bool(looked.warnings) == (looked.training.rows < 8)


def test_few_rows_skipped_files_and_a_trained_tokenizer(folder):
    os.mkdir("texts")
    Path("texts/a.txt").write_text("words of a text\n" * 80)
    Path("texts/b.bin").write_text("x")
    settings = {"tokenizer": "bpe:270", "model": {"vocab": 270}, "held_out": 0, "seq": 256, "batch": 8}
    looked = overview.look(config_of("texts", **settings))
    assert looked.warnings == [f"{looked.training.rows} rows are less than one batch: each step reads rows "
                               f"{8 / looked.training.rows:.2g} times (data.batch=8)"]  # fmt: skip
    assert looked.evaluation is None and looked.notes == ["skipped, unknown ending: texts/b.bin"]
    assert "bpe:270, trained on the source: " in looked.tokenizer and "/cache/tokenizers/" in looked.tokenizer
    assert len(_rows(looked)) == len({row for row, _, _ in _rows(looked)}) == min(3, looked.training.rows)


def test_images_and_sounds_are_named_with_what_belongs_to_them(folder):
    (folder / "pictures/cat").mkdir(parents=True)
    (folder / "pictures/dog").mkdir()
    for number, name in enumerate(("cat", "dog")):
        test_image_rows.drawn(number).save(folder / "pictures" / name / "a.png")
    (folder / "table.csv").write_text("file,text\na.wav,hello\n")
    test_sound_rows.written(folder / "a.wav", test_sound_rows.spoken(1, 0.1))
    images = test_image_rows.config_of("pictures", held_out=0, model={"classes.count": 2}, batch=2)
    looked = overview.look(images)
    assert sorted(_rows(looked)) == [(0, "file", "pictures/cat/a.png"), (0, "label", "[cat]"),
                                     (1, "file", "pictures/dog/a.png"), (1, "label", "[dog]")]  # fmt: skip
    assert looked.tokenizer == "" and looked.training.tokens == 0 and looked.speed.row_bytes > 100
    assert overview.check(images) == ["data: images and sounds are read when a run starts; the verb data looks at them"]
    looked = overview.look(test_sound_rows.config_of("table.csv"))
    assert _rows(looked) == [(0, "file", f"table.csv:2: {Path('a.wav')}"), (0, "text", "[\x05\x06hello<end>]")]
    assert looked.tokenizer.startswith("bytes: ")


def test_a_check_tokenizes_nothing_and_names_what_is_wrong(monkeypatch):
    tokenize(config_of("a.jsonl"), "made")
    monkeypatch.setattr(making, "make_tokens", lambda *_, **__: pytest.fail("tokenized"))
    (said,) = overview.check(config_of("a.jsonl"))
    assert said.startswith("data: a.jsonl: 1 file, 0.0 MB, version ") and " rows for training, by the first 1" in said
    counted = overview.look(config_of("made")).training.rows
    assert abs(int(said.split(" tokens and ")[1].split(" ")[0]) / counted - 1) < 0.5
    assert overview.check(config_of("made"))[0].startswith(f"data: training: {counted:,} rows, ")
    assert overview.check(config_of("a.jsonl", batch=4096))[1].startswith("warning: data: about ")
    assert overview.check(config_of("random:9")) == ["data: 9 random rows"]
    assert overview.check(config_of("a.jsonl", tokenizer="bpe:300"))[0].startswith("data: a.jsonl: 1 file")
    for settings, message in (
        ({"source": "none"}, "warning: data: data.source: none matches no file"),
        ({"source": "a.jsonl", "tokenizer": "chatty", "messages_field": "m"}, "warning: data: a.jsonl:1: no field m"),
        ({"source": "records.jsonl", "model": FULL | {"classes.count": 3}, "objective": "classes"},
         "warning: data: objective: classes: data.fields and data.label do not say"),
    ):  # fmt: skip
        (said,) = overview.check(config_of(**settings))
        assert said.startswith(message) and "\n  fix   " in said
