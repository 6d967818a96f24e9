"""A run on texts that are tokenized while it trains."""

import json
import re
from types import SimpleNamespace
from typing import Any

import pytest

from gspmd_lm import session
from gspmd_lm.data import ahead, making, tokenizer
from tests.data.answering import Here
from tests.train.runs import TRAIN, losses_of


@pytest.fixture
def open_run(run, small, tmp_path, monkeypatch):
    """A function that makes a run on eight files of texts, each of several chunks."""
    monkeypatch.setattr(making, "UNIT_BYTES", 300)
    monkeypatch.setattr(ahead, "CHUNK_BYTES", 1)
    monkeypatch.setattr(ahead, "Process", Here)
    monkeypatch.setattr(tokenizer.Bytes, "end", 60)  # the model has 61 tokens
    monkeypatch.setattr(tokenizer.Bytes, "vocab_size", 61)
    for name in "12345678":
        lines = [json.dumps({"text": f"{name} {i} " + name * 20}) for i in range(200)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    data = {"batch": 8, "source": str(tmp_path / "*.jsonl"), "held_out": 0, "tokenize": "ahead"}
    config = small(layers=1, data=data, train=dict(TRAIN))

    def make(workdir):
        made = run(workdir)
        opens: Any = SimpleNamespace(config=config, machine=made.machine, console=made.console, say=made.say)
        made.open_rows = lambda: session._open_rows(opens, workdir)
        return made

    return make


@pytest.mark.long
def test_a_run_goes_on_at_its_place_in_the_texts(open_run, tmp_path, caplog):
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    whole = open_run(straight)
    whole.train(12)
    open_run(resumed).train(9)
    (kept,) = json.loads((resumed / "checkpoints/9/run/metadata").read_text())["extra"]["positions"]
    assert min(place[0] for place in kept["lanes"].values()) > 0, "the first chunk of each lane is behind it"
    open_run(resumed).train(12)
    assert losses_of(straight) == losses_of(resumed) and len(losses_of(straight)) == 12
    assert "counted from its beginning" not in caplog.text
    said = whole.console.file.getvalue()
    assert "training: texts tokenized ahead, in 8 lanes" in said
    rate = r"tokenized ahead: up to \S+ tokens/s by \d+ \w+ here; the steps need \S+ tokens/s\n"
    assert len(re.findall(rate, said)) == 1
