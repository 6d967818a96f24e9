"""Tokens that are made once and read by share: rates, bytes, memory, and what random kills leave.

    python -m benchmarks.data [--megabytes=1000] [--rate_megabytes=24] [--tokens=1e9] [--kills=20] [--write]

writes synthetic text: sections of the standard library's source, drawn at random. It tokenizes the text alone with
`tokenizers`, with `datasets.map` if that is installed, and with the verb tokenize, and reads the tokens in one process
and in four, beside Grain over the same rows as ArrayRecord files. Seconds are of CPU time, so that other work on the
machine counts little; what starting Python and importing takes is left out.
"""

import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import measure
from gspmd_lm import config, files
from gspmd_lm.config import Data, nest
from gspmd_lm.data import loader, making, sources, tokens, trained
from gspmd_lm.data.folders import Folder

VOCAB, SEQ, BATCH, MOST_STEPS = 8192, 2048, 64, 200
TOKENIZE = [sys.executable, str(measure.ROOT / "main.py"), "tokenize"]
ALONE = """
import json, sys, tokenizers
made = tokenizers.Tokenizer.from_file(sys.argv[2])
texts, size = [], 0
for line in open(sys.argv[1], encoding="utf-8"):
    texts.append(json.loads(line)["text"])
    size += len(line)
    if size > 4 << 20:
        made.encode_batch_fast(texts, add_special_tokens=False)
        texts, size = [], 0
made.encode_batch_fast(texts, add_special_tokens=False)
"""
DATASETS = """
import sys, datasets, tokenizers
made = tokenizers.Tokenizer.from_file(sys.argv[2])
texts = datasets.load_dataset("json", data_files=sys.argv[1], split="train", cache_dir=sys.argv[3])
texts.map(lambda batch: {"ids": [one.ids for one in made.encode_batch_fast(batch["text"])]},
          batched=True, remove_columns=texts.column_names)
"""
READ = """
import json, resource, sys
import numpy as np
from benchmarks import data
folder, process, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
opened = data.open_rows(folder)
before = data.read_bytes()
for step in range(opened.steps_per_epoch):
    opened.rows_at(step, np.arange(data.BATCH // count) + process * (data.BATCH // count))
used = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps([data.read_bytes() - before, used.ru_maxrss]))
"""


def write_text(path: Path, size_bytes: int) -> None:
    """Writes documents of random sections of the standard library, one JSON object on each line."""
    text = b"\n".join(sources.open_source(Data()).documents()).decode("utf-8", "replace")
    draw = random.Random(0)
    with path.open("w", encoding="utf-8") as out:
        while out.tell() < size_bytes:
            start = draw.randrange(len(text) - 20_000)
            for at in range(start, start + 20_000, 2_000):
                out.write(json.dumps({"text": f"{draw.random()}\n{text[at : at + draw.randrange(500, 3500)]}"}) + "\n")


def open_rows(folder: str) -> loader.Loader:
    """The rows of a folder of tokens, as a run reads them."""
    sizes = dict.fromkeys(("layers", "heads", "kv_heads"), 1) | dict.fromkeys(("embed", "head_dim", "mlp"), 8)
    sizes |= {"vocab": VOCAB, "context": SEQ}
    named = {"source": folder, "tokenizer": folder, "batch": BATCH, "seq": SEQ, "held_out": 0}
    return loader.open_loaders(
        config.from_dict({"name": "x", "model": nest(sizes), "data": named, "train": {"steps": 1}}, "x")
    )[0]


def read_bytes() -> int:
    """The bytes that this process has read from files."""
    return int(Path("/proc/self/io").read_text().split()[1])


def cpu_s(function: Callable[[], Any]) -> float:
    """The CPU time of a function, with that of the processes that it starts."""

    def now() -> float:
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(one.ru_utime + one.ru_stime for one in used)

    began = now()
    function()
    return now() - began


def command(source: Path, out: Path, tokenizer: Path) -> list[str]:
    sets = {"source": source, "tokenizer": tokenizer, "held_out": 0.02, "text_field": "text"}
    return [*TOKENIZE, f"--out={out}", "--set", f"model.vocab={VOCAB}", "--set", f"model.padded_vocab={VOCAB}",
            *(part for key, value in sets.items() for part in ("--set", f"data.{key}={value}"))]  # fmt: skip


def rates(at: Path, source: Path, tokenizer: Path) -> list[dict[str, Any]]:
    """MB of text per CPU-second."""
    megabytes = source.stat().st_size / 1e6
    (at / "empty.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    ways = {
        "tokenizers alone": [sys.executable, "-c", ALONE, "{}", str(tokenizer)],
        "tokenize": command(Path("{}"), Path("{}.tokens"), tokenizer),
        "datasets.map": [sys.executable, "-c", DATASETS, "{}", str(tokenizer), str(at / "datasets")],
    }
    rows = []
    for name, way in ways.items():
        taken_s = []
        for text in (at / "empty.jsonl", source):
            done = [part.replace("{}", str(text)) for part in way]
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            result = subprocess.run(done, capture_output=True, text=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            if result.returncode:
                break
            taken_s.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        if len(taken_s) < 2:
            rows.append({"measured": name, "value": "not run", "unit": result.stderr.strip().splitlines()[-1][:60]})
            continue
        rows.append({"measured": name, "value": megabytes / (taken_s[1] - taken_s[0]), "unit": "MB per CPU-second"})
    return rows


def tokenize_by_four(source: Path, out: Path, tokenizer: Path) -> float:
    """Tokenizes a source by four processes at once. Returns the memory of the largest one, GB."""
    with futures.ThreadPoolExecutor() as threads:
        taken = threads.map(measure.taken, [command(source, out, tokenizer)] * 4)
        return max(peak_gb for _, _, peak_gb in taken)


def bounds(at: Path, small: Path, large: Path, tokenizer: Path) -> list[dict[str, Any]]:
    """What four processes take for the same source: memory, disk, and the bytes that each of them reads of its tokens.

    That they make each part once, and the same files as a single process, is shown on the small source.
    """
    tokenize_by_four(small, at / "small4", tokenizer)
    measure.taken(command(small, at / "small1", tokenizer))
    assert sums(at / "small4") == sums(at / "small1")
    taken_gb = tokenize_by_four(large, at / "by4", tokenizer)
    kept_bytes = sum(path.stat().st_size for path in (at / "cache").rglob("*") if path.is_file())
    manifest = tokens.read_manifest(Folder(str(at / "by4")))
    assert manifest
    made = sum(shard["tokens"] for split in manifest["splits"] for shard in split["shards"])
    rows = [
        {"measured": "text", "value": large.stat().st_size / 1e9, "unit": "GB"},
        {"measured": "tokens", "value": made / 1e6, "unit": "million"},
        {"measured": "memory of each of 4 processes that tokenize", "value": taken_gb, "unit": "GB at most"},
        {"measured": "files in the cache after it", "value": kept_bytes / 1e6, "unit": "MB"},
        {"measured": "files of 4 processes that differ from those of one", "value": 0, "unit": "(smaller text)"},
    ]
    opened = open_rows(str(at / "by4"))
    whole = 2 * opened.steps_per_epoch * BATCH * (SEQ + 1)
    for count in (1, 4):
        shares, peaks_gb = [], []
        for process in range(count):
            done = subprocess.run([sys.executable, "-c", READ, str(at / "by4"), str(process), str(count)],
                                  capture_output=True, text=True, check=True, cwd=measure.ROOT)  # fmt: skip
            read, peak_kib = json.loads(done.stdout)
            shares.append(read / whole)
            peaks_gb.append(peak_kib * 1024 / 1e9)
        rows += [
            {"measured": f"bytes that each of {count} reads, of all that rows hold", "value": max(shares), "unit": ""},
            {"measured": f"memory of each of {count} that read", "value": max(peaks_gb), "unit": "GB at most"},
        ]
    return rows


def sums(folder: Path) -> dict[str, str]:
    """The sha256 of each file, since tokens of 10 GB of text do not fit in memory."""
    return {path.name: files.sum_of(path)[1] for path in folder.iterdir()}


def reading(at: Path) -> list[dict[str, Any]]:
    """Rows per CPU-second, in the order of a run: from shards, and from an ArrayRecord file of these rows by Grain."""
    import grain
    from array_record.python import array_record_module  # pyright: ignore[reportAttributeAccessIssue]  (compiled)

    opened = open_rows(str(at / "many"))
    steps = min(opened.steps_per_epoch, MOST_STEPS)
    indices = np.concatenate([opened.indices_at(step, np.arange(BATCH)) for step in range(steps)])
    stream = opened.rows.stream  # pyright: ignore[reportAttributeAccessIssue]
    writer = array_record_module.ArrayRecordWriter(str(at / "rows.array_record"), "group_size:1,uncompressed")
    spans = [opened.rows._span(int(one)) for one in indices]  # pyright: ignore[reportAttributeAccessIssue]
    for span in sorted(spans):
        (row,) = stream.read([span])
        writer.write(row.tobytes())
    writer.close()
    records = grain.sources.ArrayRecordDataSource(str(at / "rows.array_record"))
    places = np.argsort(np.argsort(indices))  # of the rows in that file

    def by_grain() -> None:
        for start in range(0, len(places), BATCH):
            found = records.__getitems__(  # pyright: ignore[reportAttributeAccessIssue]
                [int(one) for one in places[start : start + BATCH]]
            )
            assert all(len(np.frombuffer(one, "<u2")) for one in found)

    def by_shards() -> None:
        for start in range(0, len(spans), BATCH):
            assert all(map(len, stream.read(spans[start : start + BATCH])))

    def as_batches() -> None:
        for step in range(steps):
            opened.rows_at(step, np.arange(BATCH))

    taken = {name: [] for name in ("Grain, ArrayRecord", "shards", "shards, as batches of a run")}
    for _ in range(5):
        for name, function in zip(taken, (by_grain, by_shards, as_batches), strict=True):
            taken[name].append(cpu_s(function))
    return [{"measured": name, "value": len(indices) / float(np.median(each)), "unit": f"rows of {SEQ} per CPU-second"}
            for name, each in taken.items()]  # fmt: skip


def kills(at: Path, source: Path, tokenizer: Path, count: int) -> list[dict[str, Any]]:
    """Kills a process that tokenizes at random moments, `count` times, and compares what comes of it."""
    draw, killed = random.Random(0), 0
    began = time.monotonic()
    subprocess.run(command(source, at / "whole", tokenizer), check=True, capture_output=True)
    longest_s = time.monotonic() - began

    def in_parts(out: str) -> list[str]:
        program = "from gspmd_lm import cli; from gspmd_lm.data import making; making.UNIT_BYTES = 200_000; cli.main()"
        return [sys.executable, "-c", program, *command(source, at / out, tokenizer)[2:]]

    subprocess.run(in_parts("small"), check=True, capture_output=True, cwd=measure.ROOT)
    while killed < count:
        process = subprocess.Popen(in_parts("killed"), stderr=subprocess.DEVNULL, cwd=measure.ROOT)
        time.sleep(draw.uniform(0.3, 1.0) * longest_s)
        process.kill()
        killed += 1
        process.wait()
    subprocess.run(in_parts("killed"), check=True, capture_output=True, cwd=measure.ROOT)
    assert sums(at / "killed") == sums(at / "small")
    return [{"measured": "kills at random moments, after which all files were the same", "value": killed, "unit": ""}]


def start(at: Path, count: float, tokenizer: Path) -> list[dict[str, Any]]:
    """Opens a folder of so many random tokens and reads the first batch."""
    folder, per_shard = Folder(str(at / "many")), 16_000_000
    encoder = trained.load_tokenizer(str(tokenizer))
    draw, notes = np.random.default_rng(0), []
    for number in range(round(count / per_shard)):
        made = making._Made(
            [draw.integers(0, VOCAB, per_shard, np.uint16)],
            length=per_shard,
            stops=making.array.array("Q", [per_shard]),
        )
        work = making._Work(folder, sources.open_source(Data()), ["train"], [], encoder, 0, "many", None)
        notes.append({"shards": {"train": work._write(f"train-{number:05d}.npy", made)}})
    facts = {"name": "train", "of": "random", "weight": None, "shards": [note["shards"]["train"] for note in notes]}
    held_out = {"name": "held_out", "of": "random", "weight": None, "shards": []}
    manifest = {"format": tokens.FORMAT, "plan": "many", "dtype": "<u2", "splits": [facts, held_out], "held_out": 0.0,
                "encoder": encoder.fingerprint, "description": "random", "notes": "", "classes": [],
                **dict.fromkeys(tokens.COUNTS, 0)}  # fmt: skip
    folder.write(tokens.MANIFEST, files.with_sum(manifest).encode())
    folder.write("tokenizer.json", tokenizer.read_bytes())
    began = time.monotonic()
    taken_s = cpu_s(lambda: open_rows(str(at / "many")).rows_at(0, slice(None)))
    return [
        {"measured": f"start on {count:.2g} tokens in {len(notes)} shards, to the first batch",
         "value": time.monotonic() - began, "unit": f"s ({taken_s:.2f} of CPU)"},
    ]  # fmt: skip


def main() -> None:
    flags = measure.flags(__doc__)
    flags.add_argument("--megabytes", type=float, default=1000.0)
    flags.add_argument("--rate_megabytes", type=float, default=24.0)
    flags.add_argument("--tokens", type=float, default=1e9)
    flags.add_argument("--kills", type=int, default=20)
    flags.add_argument("--only", choices=("rates", "bounds", "kills", "start"))
    given = flags.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as made:
        at = Path(made)
        os.environ["GSPMD_LM_CACHE"] = str(at / "cache")
        write_text(at / "small.jsonl", round(given.rate_megabytes * 1e6))
        if given.only in (None, "bounds"):
            write_text(at / "large.jsonl", round(given.megabytes * 1e6))
        tokenizer = at / "tokenizer" / "tokenizer.json"
        trained.train_tokenizer(sources.open_source(Data(source=str(at / "small.jsonl"))).documents(), VOCAB, tokenizer)
        for name, part in {
            "rates": lambda: rates(at, at / "small.jsonl", tokenizer),
            "bounds": lambda: bounds(at, at / "small.jsonl", at / "large.jsonl", tokenizer),
            "kills": lambda: kills(at, at / "small.jsonl", tokenizer, given.kills),
            "start": lambda: [*start(at, given.tokens, tokenizer), *reading(at)],
        }.items():
            if given.only in (None, name):
                found = part()
                rows += found
                print(measure.markdown(found, {"measured": "measured", "value": "value", "unit": "unit"}), flush=True)
    if given.write:
        measure.keep("data", rows, "measured")


if __name__ == "__main__":
    main()
