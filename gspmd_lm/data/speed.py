"""How fast rows can be read, and how many bytes they have in their source."""

import dataclasses
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from gspmd_lm.data import media, packing
from gspmd_lm.data.loader import BLOCK, Loader, Rows
from gspmd_lm.units import human_bytes, human_short

_BATCHES = 8  # are read, or fewer if that takes longer than _ENOUGH_S
_ENOUGH_S = 0.25
_MOST_ROWS = 64  # of a batch
_LOOKED_AT = 64  # files of images or sounds whose sizes stand for all


@dataclasses.dataclass(frozen=True)
class Speed:
    """A measurement of a source: some of its rows were read, as many at once as a run reads."""

    rows: int
    seconds: float
    row_bytes: float  # on average, over all rows

    @property
    def rows_per_s(self) -> float:
        return self.rows / self.seconds

    @property
    def bytes_per_s(self) -> float:
        return self.rows_per_s * self.row_bytes


def measure_speed(loader: Loader, batch_rows: np.ndarray, step: int = 0) -> Speed:
    """Reads the first of the rows `batch_rows` of some batches, from `step` on.

    The first batch does not count, because files are opened for it. Raises InputError or RunFailed if rows cannot be
    read.
    """
    batch_rows = batch_rows[:_MOST_ROWS]
    loader.rows_at(step, batch_rows)
    first, stop = step + 1, step + 1 + _BATCHES
    began = time.perf_counter()
    with ThreadPoolExecutor(loader.read_threads) as pool:
        while first < stop and (first == step + 1 or time.perf_counter() - began < _ENOUGH_S):
            together = range(first, min(stop, first + loader.read_threads))
            list(pool.map(lambda at: loader.rows_at(at, batch_rows), together))
            first = together.stop
    seconds = time.perf_counter() - began
    return Speed((first - step - 1) * len(batch_rows), seconds, mean_row_bytes(loader))


def describe_speed(speed: Speed) -> str:
    """'5.60k rows/s and 23.0 MB/s'"""
    size = f" and {human_bytes(speed.bytes_per_s)}/s" if speed.row_bytes else ""
    return f"{human_short(speed.rows_per_s)} rows/s{size}"


def mean_row_bytes(loader: Loader) -> float:
    """The bytes that a row has in its source, on average over the rows of a run; 0 if it has none there."""
    if not isinstance(loader.rows, packing.Joined):
        return _mean_bytes(loader.rows)
    parts = zip(loader.shares, loader.rows.parts, strict=True)
    return sum(share / BLOCK * _mean_bytes(part) for share, part in parts)


def _mean_bytes(rows: Rows) -> float:
    if isinstance(rows, media.Rows):
        contents = [item.encoded.content for item in rows.items[:_LOOKED_AT]]
        return float(np.mean([len(one) if isinstance(one, bytes) else Path(one).stat().st_size for one in contents]))
    stream = rows.stream
    return 0.0 if isinstance(stream, packing.InMemory) else len(stream) * stream.dtype.itemsize / len(rows)
