"""The commands of the documents, configs and examples, and a folder in which they run on small inputs."""

import base64
import dataclasses
import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np

from gspmd_lm.config import ModelConfig, nest
from gspmd_lm.convert import export
from tests.convert import references
from tests.courses import weights
from tests.data import conversations

ROOT = Path(__file__).parent.parent
# What begins a command. Commands of other programs, such as pip and pytest, are not this project's.
BEGINS = re.compile(r"python main\.py\b|gspmd-lm\b|python -m (?:gspmd_lm|benchmarks|tests)\b|python examples/")
SOURCES = ("*.md", "docs/*.md", "benchmarks/*.md", "configs/*.yaml", "rules/*.yaml", "examples/*.py", "examples/*.yaml")
LINES = [f"the cat number {n} sat on the mat {n * n} times\n" for n in range(400)]
MODEL = ModelConfig(
    layers=2, embed=32, heads=8, kv_heads=8, head_dim=8, mlp=64, vocab=272, context=256, compute_dtype="float32"
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Command:
    """One command as a page has it. `text` begins with what starts it, such as `python main.py`."""

    page: str
    text: str

    @property
    def arguments(self) -> list[str]:
        """What follows its beginning, without a comment, without what is left to the reader (...) and a redirection."""
        begins = BEGINS.match(self.text)
        assert begins
        every = shlex.split(self.text[begins.end() :], comments=True)
        every = every[: every.index(">")] if ">" in every else every
        return [one for one in every if one != "..."]

    @property
    def is_of_main(self) -> bool:
        return self.text.startswith(("python main.py", "gspmd-lm", "python -m gspmd_lm"))


def commands() -> list[Command]:
    """Every command of the sources, each once for each page, in their order."""
    found: list[Command] = []
    for path in (path for pattern in SOURCES for path in sorted(ROOT.glob(pattern)) if path.name != "CHANGELOG.md"):
        page = path.relative_to(ROOT).as_posix()
        texts = _of_markdown(path.read_text()) if path.suffix == ".md" else _of_code(path.read_text())
        found += [Command(page, text) for text in texts if BEGINS.match(text)]
    return found


def sequences(of: list[Command]) -> list[list[Command]]:
    """Commands that go on from each other: a new sequence begins with each page, and where a folder is converted.

    None is twice in a sequence.
    """
    found: list[dict[Command, None]] = []
    for before, command in zip([None, *of], of, strict=False):
        if not before or before.page != command.page or "convert --from=" in command.text:
            found.append({})
        found[-1][command] = None
    return [list(one) for one in found]


def _of_markdown(text: str) -> list[str]:
    """Lines of shell blocks, and what stands between backticks."""
    lines, fenced = [], re.compile(r"^```(\w*)\n(.*?)^```\n?", re.M | re.S)
    for language, block in fenced.findall(text):
        for line in block.replace("\\\n", " ").splitlines() if language == "bash" else ():
            lines += [part.strip() for part in line.split(" && ")]
    return lines + [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", fenced.sub("", text))]


def _of_code(text: str) -> list[str]:
    """Lines of comments and docstrings. In prose, a command ends with a colon or a semicolon."""
    joined = re.sub(r"\\\\?\n#? *", "", text)
    found = [joined[one.start() :].partition("\n")[0] for one in BEGINS.finditer(joined)]
    return [re.split(r"[:;](?: |$)|\"\"\"|`", one)[0].strip() for one in found]


def make_folder(at: Path) -> Path:
    """A folder with the files that commands of the documents name, each as small as can be."""
    at.mkdir(parents=True, exist_ok=True)
    for name in ("text", "chats", "rules", "FOLDER"):
        (at / name).mkdir()
    for n in range(40):
        for folder in ("text", "FOLDER"):
            (at / folder / f"{n}.txt").write_text("".join(LINES[10 * n : 10 * n + 10]))
    (at / "book.txt").write_text("".join(LINES[:20]))
    (at / "text/a.jsonl").write_text("".join(f"{json.dumps({'text': line})}\n" for line in LINES))
    chats = ({"messages": conversations.turns(f"{n}+{n}?", str(2 * n))} for n in range(64))
    (at / "chats/a.jsonl").write_text("".join(f"{json.dumps(chat)}\n" for chat in chats))
    bytes_alone = (base64.b64encode(bytes([byte])) + b" %d" % byte for byte in range(256))
    (at / "gpt2.tiktoken").write_bytes(b"\n".join(bytes_alone))
    for name in ("train", "val"):
        np.frombuffer("".join(LINES).encode(), np.uint8).astype("<u2").tofile(at / f"{name}.bin")
    (at / "one.launch/1").mkdir(parents=True)
    (at / "one.launch/1/0.log").write_text("step 1/1\n")
    (at / "IN.jsonl").write_text('{"prompt": "01", "continuation": "23"}\n')
    (at / "prompts.jsonl").write_text('{"prompt": "01"}\n')
    shutil.copy(ROOT / "rules/tp8.yaml", at / "mine.yaml")
    shutil.copy(ROOT / "examples/any_step.py", at / "train.py")
    for folder in ("examples", "jobs"):
        (at / folder).symlink_to(ROOT / folder)
    little = {"layers": 2, "embed": 32, "heads": 8, "kv_heads": 8, "head_dim": 8, "mlp": 64, "vocab": 272,
              "context": 128, "compute_dtype": "float32"}  # fmt: skip
    config = {"model": nest(little), "data": {"source": "text/*.jsonl", "tokenizer": "bytes", "batch": 8, "seq": 32},
              "optimizer": {"warmup_steps": 0}, "train": {"steps": 2, "trackers": []}}  # fmt: skip
    (at / "small.yaml").write_text(json.dumps(config))  # JSON is YAML
    experts = {"experts.count": 8, "experts.per_token": 2, "experts.mlp": 32, "experts.balance": "batch"}
    (at / "experts.yaml").write_text(json.dumps(config | {"model": nest(little | experts)}))
    export.write_folder(at / "DIR", MODEL, jax.device_get(weights(MODEL)))
    conversations.write_tokenizer(at / "DIR", conversations.CHATML)
    shutil.copy(at / "DIR/tokenizer.json", at / "tokenizer.json")
    for name in ("ODD", "Qwen2.5-72B"):
        shutil.copytree(at / "DIR", at / name)
    published = json.loads((at / "ODD/config.json").read_text())
    (at / "ODD/config.json").write_text(json.dumps(published | {"some_feature": 1}))
    return at


def add_models(at: Path) -> None:
    """Adds the published models of docs/families.md, as small as can be, and rows to train each on."""
    from tests.convert import kinds, ours, test_encoder_families
    from tests.data import test_image_rows, test_object_rows, test_sound_rows

    def golden(name: str) -> dict[str, Any]:
        return json.loads((ROOT / f"tests/convert/golden/{name}.json").read_text())

    for name in ("bert-base-uncased", "MINILM"):
        kind = "BertForMaskedLM"
        raw = test_encoder_families._config(kind) | {"vocab_size": 272, "max_position_embeddings": 128}
        rows, model = test_encoder_families._model(raw)
        tensors = {}
        for tensor in rows.tensors:
            if tensor.weights != ("unembedding",) and tensor.exists_in(model):
                for layer in range(model.layers if "{}" in tensor.name else 1):
                    shape = tensor.shape(model)
                    tensors[tensor.name.format(layer)] = references.weight(tensor.name, tuple(shape), 0)
        test_encoder_families._folder(at / name, raw, tensors)
        conversations.write_tokenizer(at / name, None)
    kinds.folder("whisper", at / "whisper-tiny.en")
    ours.folder_of(golden("reading")["blip2-opt"], at / "blip2-opt-2.7b")
    ours.folder_of(golden("masks")["sam"], at / "sam-vit-base")
    clip = golden("towers")["clip"]
    clip["config"]["text_config"] |= {"vocab_size": 272, "bos_token_id": 256, "eos_token_id": 257}
    clip["tensors"]["text_model.embeddings.token_embedding.weight"][0] = 272
    ours.folder_of(clip, at / "clip-vit-base-patch32")
    conversations.write_tokenizer(at / "clip-vit-base-patch32", None)

    (at / "MRPC").mkdir()
    for name, first in (("train", 0), ("dev", 100)):  # rows that are held out are no others' equals
        rows = [(n % 2, n, n + 1, f"the cat {n}", f"the mat {n * (n % 2)}") for n in range(first, first + 64)]
        lines = "".join("\t".join(map(str, row)) + "\n" for row in rows)
        (at / f"MRPC/{name}.tsv").write_text(f"Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n{lines}")
    code = ({"code": f"def f(): return {n}", "docstring": f"Returns {n}.", "matched": n % 2} for n in range(64))
    (at / "pairs.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in code))
    for name in ("speech", "seen"):
        (at / name).mkdir()
    heard, seen = ["file,text"], ["file,text,image,mask"]
    for n in range(16):
        test_sound_rows.written(at / f"speech/{n}.wav", test_sound_rows.spoken(n, 0.1 + 0.01 * n))
        heard.append(f"{n}.wav,text {n}")
        test_image_rows.drawn(n).save(at / f"seen/{n}.png")
        (image, mask), _ = test_object_rows.boxed(n)
        (at / f"seen/image{n}.png").write_bytes(image)
        (at / f"seen/mask{n}.png").write_bytes(mask)
        seen.append(f"{n}.png,text {n},image{n}.png,mask{n}.png")
    (at / "speech/table.csv").write_text("\n".join(heard))
    (at / "seen/table.csv").write_text("\n".join(seen))
    shutil.copy(at / "speech/3.wav", at / "talk.wav")
    shutil.copy(at / "seen/3.png", at / "photo.jpg")
    for name, first in (("train", 0), ("test", 100)):
        words = ({"prompt": f"word {n}", "text": f"wd{n}"} for n in range(first, first + 32))
        (at / f"FOLDER/{name}.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in words))
