"""Prints how fast documents become tokens and rows are read, on this machine.

    PYTHONPATH=. python benchmarks/data_loading.py

Takes about 20 s on two cores. The cache it fills is a temporary folder.
"""

import os
import tempfile
import time
from itertools import product
from pathlib import Path

import jax

from gspmd_lm import config
from gspmd_lm.data import cache, loader, packing, sources, tokenizer, trained


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["GSPMD_LM_CACHE"] = folder
        source = sources.open_source(config.Data())
        bpe = trained.train_tokenizer(source.documents(), 8192, Path(folder) / "tokenizer.json")
        for name, tokens in (("bytes", tokenizer.load_tokenizer("bytes")), ("BPE of 8192", bpe)):
            start = time.perf_counter()
            cached = cache.open_cache(source, tokens, 0.02)
            took_s = time.perf_counter() - start
            count = len(cached.train[0].stream) + len(cached.held_out.stream)
            rate = source.size_bytes / took_s / 1e6
            print(f"tokenize stdlib, {name}: {took_s:.2f} s, {rate:.1f} MB/s, {count:,} tokens")
        stream, end = cache.open_cache(source, tokenizer.load_tokenizer("bytes"), 0.02).train[0].stream, 256
        start = time.perf_counter()
        cache.open_cache(sources.open_source(config.Data()), tokenizer.load_tokenizer("bytes"), 0.02)
        print(f"open a cache that exists: {time.perf_counter() - start:.2f} s")
        for packed, (batch, seq) in product((True, False), ((32, 256), (32, 2048), (8, 8192))):
            rows = packing.documents(stream, seq, end) if packed else packing.text(stream, seq)
            feed = loader.Loader(rows, batch, 0, True, "", "")
            name = f"{'documents' if packed else 'stream'} packing, batch {batch}, seq {seq}"
            print(f"read {name}: {_read_rate(feed):.0f} M tokens/s, to the device {_device_rate(feed):.0f}")


def _read_rate(feed: loader.Loader, for_s: float = 1.0) -> float:
    """Million tokens per second that one thread reads."""
    start, step, tokens = time.perf_counter(), 0, 0
    while time.perf_counter() - start < for_s:
        tokens += feed.rows_at(step, slice(None))["tokens"].size
        step += 1
    return tokens / (time.perf_counter() - start) / 1e6


def _device_rate(feed: loader.Loader, for_s: float = 1.0) -> float:
    """The same with reading ahead and arrays on one device."""
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    names = (*packing.FIELDS, "row")
    batches = feed.batches(0, dict.fromkeys(names, sharding))
    jax.block_until_ready(next(batches))
    start, tokens = time.perf_counter(), 0
    while time.perf_counter() - start < for_s:
        tokens += jax.block_until_ready(next(batches)[1])["tokens"].size
    rate = tokens / (time.perf_counter() - start) / 1e6
    batches.close()
    return rate


if __name__ == "__main__":
    main()
