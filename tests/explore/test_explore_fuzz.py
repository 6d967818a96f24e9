"""Texts and requests that nobody would write: no traceback, no hang, and the last good layout stays shown."""

import json
import random

import pytest

from gspmd_lm.config.paths import find_file, known_names
from gspmd_lm.explore import workbench

GOOD = "mesh: {tensor: 8}\nrules: {heads: tensor, kv_heads: tensor, mlp: tensor, vocab: tensor}\n"
PIECES = (
    "mesh: {data: -1}", "mesh:", "mesh: {data: 99999999999999999999}", "mesh: {data: 0, fsdp: -5}", "mesh: [1]",
    "mesh: {tensor: 8, data: 1e9}", "rules: {batch: [data, data]}", "rules: {x.y.z: tensor}", "weights: 7",
    "optimizer: {embed: null}", "remat: {save: [q], offload: [q]}", "remat: []", "microbatches: 1000000000",
    "pipeline: {microbatches: 4, schedule: 1f1b}", "context: ring", "interleave: 2", "expert_buffer: .nan",
    "unroll: all", "attention: {tpu: xla, moon: x}", "compiler_options: {tpu: {a: {b: [c]}}}", "dcn: {tensor: 3}",
    "&a [*a, *a]", "? [complex, key]\n: value", "!!python/object:os.system x", "--- a\n--- b", "\t", "\0", "\ufeff",
    "'", '"', "# only a comment", "a: " + "[" * 40, "{" * 30, "ключ: значение", "\u2028", "mesh: {🦄: 2}", "null",
)  # fmt: skip
WORDS = (
    "tensor",
    "data",
    "fsdp",
    "8",
    "-1",
    ":",
    "{",
    "}",
    "[",
    "]",
    ",",
    "\n",
    "  ",
    "#",
    "null",
    "mesh",
    "'",
    "&",
    "*",
)


def mutate(draw, text):
    """A text with a few changes: of what people type by mistake, and of what nobody would."""
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(text) + 1)
        match draw.randrange(5):
            case 0:
                text = text[:at] + draw.choice(WORDS) + text[at:]
            case 1:
                text = text[:at] + text[at + draw.randint(1, 6) :]
            case 2:
                text = text + draw.choice(PIECES) + "\n"
            case 3:
                text = text.replace(draw.choice(WORDS), draw.choice(WORDS), draw.randint(1, 3))
            case 4:
                text = (
                    text[:at]
                    + chr(draw.choice((0, 7, 32, 126, 0x85, 0x2028, 0x1F984, draw.randrange(0xD000))))
                    + text[at:]
                )
    return text


def requests(draw, text):
    """A request of each kind, with values of any kind."""
    anything = None, True, -1, 7, 2**70, 1.5, "", "x", "\0", [], {}, ["a=b"], "rules/../x.yaml", text
    names = "mesh.tensor", "mesh.data", "remat", "microbatches", "context", "attention.tpu", "interleave"
    yield "control", {"name": draw.choice((*names, *anything)), "value": draw.choice(("block", 4, 8, *anything))}
    yield "fix", {"problem": draw.choice((0, 1, *anything))}
    yield "load", {"rank": draw.choice(anything)}
    yield "save", {"path": draw.choice(anything[:-1]), "overwrite": draw.choice(anything)}
    yield "pin", {"clear": draw.choice(anything)}
    yield "edit", {draw.choice(("batch", "seq", "set", "config", "target", "nothing")): draw.choice(anything)}


@pytest.mark.long
@pytest.mark.parametrize("count", [40, pytest.param(2000, marks=pytest.mark.slow)])
def test_no_text_and_no_request_ends_the_workbench(open_bench, count, tmp_path, monkeypatch):
    monkeypatch.setattr(workbench, "RULES", tmp_path)
    files = [find_file(name, "rules").read_text() for name in known_names("rules")]
    draw, seen = random.Random(8), {"good": 0, "wrong": 0}
    mine = tmp_path / "mine.yaml"
    mine.write_text(GOOD)
    with open_bench(str(mine), "cpu:8", "tiny") as bench:
        bench.finished()
        job = bench.workbench._layouts._job
        for number in range(count):
            text = mutate(draw, draw.choice([GOOD, *files]))
            answer = bench.post("edit", text=text, config="tiny", target="cpu:8", set=[], batch=None, seq=None)
            assert answer.status_code in (200, 400), answer.text
            state = bench.until(lambda state: state["busy"] != "estimating")
            good = state["shown_version"] == state["version"]
            seen["good" if good else "wrong"] += 1
            assert good or state["problems"], text
            assert state["headline"], text
            assert not [one["message"] for one in state["problems"] if "cannot be estimated" in one["message"]], text
            for path, values in requests(draw, text) if number % 10 == 0 else ():
                answer = bench.http.post(f"/{path}", content=json.dumps(values))
                assert answer.status_code in (200, 400, 409), (path, values, answer.text)
                assert answer.status_code == 200 or answer.json()["error"], (path, values)
            for index, one in enumerate(state["problems"] if state["version"] == bench.state()["version"] else ()):
                if one["fix_text"]:
                    assert bench.post("fix", problem=index).status_code in (200, 400)
        assert bench.workbench._layouts._job is job, "the process that estimates has ended, or took longer"
        shown = bench.edit(text=GOOD, config="tiny", target="cpu:8", set=[], batch=None, seq=None)
        assert shown["problems"] == [] and shown["shown_version"] == shown["version"]
    assert min(seen.values()) > count // 20
    assert {path.name for path in tmp_path.iterdir()} == {"mine.yaml"}
