"""Texts that are tokenized while a run trains on them, by processes that work ahead. Nothing of them is kept.

The rows of a batch are parted among lanes, and each lane reads units of the source one after another, in an order that
is drawn from the seed. A unit is tokenized in chunks, whose rows are shuffled. So a row is a function of the seed and
the step, and a process tokenizes the units of the lanes that its devices read, and no others. Where a lane stands is
saved with a checkpoint, so that a run that goes on does not begin each lane anew.
"""

import collections
import contextlib
import dataclasses
import hashlib
import json
import logging
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np
from grain.experimental import index_shuffle

from gspmd_lm.config import Config
from gspmd_lm.data import ahead_process, encoders, making, packing, sources, token_files, tokenizer, tokens
from gspmd_lm.data.ahead_process import Chunk, Request, Work
from gspmd_lm.data.loader import Loader, epoch_seed, open_loaders, token_masks
from gspmd_lm.errors import InputError, RunFailed
from gspmd_lm.runtime import host
from gspmd_lm.runtime.quiet import environment_without_accelerators
from gspmd_lm.units import human_short, plural

MOST_LANES = 32  # a process may read all of them, and holds two chunks of each
UNITS = 4 * MOST_LANES  # of a source at least, where they are not smaller than LEAST_UNIT_BYTES
LEAST_UNIT_BYTES = 1024 * 1024
CHUNK_BYTES = 4 * 1024 * 1024  # of texts
_RATE_STEPS = 8  # steps after which the rate is said; the first one is not measured
_KEPT_PLACES = 4096  # of a lane: a checkpoint needs an earlier place, since batches are read ahead of its step
_log = logging.getLogger(__name__)


class Place(NamedTuple):
    """Where a chunk of a lane stands."""

    first: int = 0  # the number of its first row in the lane
    epoch: int = 0
    unit: int = 0  # in the order of the lane in this epoch
    chunk: int = 0  # of the unit


class Process:
    """A process that tokenizes, and what is known of its speed. Requests wait for those before them."""

    def __init__(self, work: bytes, threads: int):
        environment = environment_without_accelerators(()) | {"RAYON_NUM_THREADS": str(threads)}
        command = [sys.executable, "-c", f"from {ahead_process.__name__} import main; main()"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
        )
        self._pool = ThreadPoolExecutor(1)
        self._pool.submit(self._write, work)
        self.tokens, self.taken_s = 0, 0.0

    def ask(self, request: Request) -> Future[Chunk]:
        """The chunk, when it is tokenized. Its result raises what made that impossible."""
        return self._pool.submit(self._answer, request)

    def _write(self, content: bytes) -> None:
        assert self._process.stdin
        self._process.stdin.write(content)
        self._process.stdin.flush()

    def _answer(self, request: Request) -> Chunk:
        assert self._process.stdout
        try:
            self._write(pickle.dumps(request))
            answer = pickle.load(self._process.stdout)
        except (EOFError, pickle.UnpicklingError, BrokenPipeError) as error:
            raise RunFailed(
                f"data.tokenize=ahead: a process that tokenizes ended with code {self._process.wait()}\n"
                "  fix   see its lines above, and that there is memory; then the same command goes on"
            ) from error
        if isinstance(answer, Exception):
            raise answer
        self.tokens += len(answer.tokens)
        self.taken_s += answer.taken_s
        return answer

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self._pool.shutdown(cancel_futures=True)
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):  # what was not written yet
                assert pipe
                pipe.close()


class _Lane:
    """The rows of one lane, of which one chunk is held and the next one is being made."""

    def __init__(self, rows: "AheadRows", number: int, process: Process, start: Place):
        self.rows, self.number, self.process = rows, number, process
        self.places = collections.deque([start], _KEPT_PLACES)  # of the chunks so far
        self._coming, self._rowless = self._ask(start), 0
        self._held: packing.Rows | None = None  # of the chunk at the last place, once it is wanted

    def _ask(self, place: Place) -> Future[Chunk]:
        return self.process.ask(Request(self.number, self.rows.unit(self.number, place), place.chunk))

    def _take(self) -> packing.Rows:
        """The rows of the chunk at the last place. The one after it is asked for."""
        place, chunk = self.places[-1], self._coming.result()
        made = self.rows.pack(chunk.tokens)
        self.rows.tell(chunk)
        self._rowless = 0 if len(made) else self._rowless + chunk.is_last
        if self._rowless > len(self.rows.work.units):
            raise InputError(f"data.source: no unit of it has a row of data.seq + 1 = {self.rows.seq + 1:,} tokens")
        if not chunk.is_last:
            self._next = Place(place.first + len(made), place.epoch, place.unit, place.chunk + 1)
        elif place.unit + 1 < self.rows.units_of(self.number):
            self._next = Place(place.first + len(made), place.epoch, place.unit + 1)
        else:
            self._next = Place(place.first + len(made), place.epoch + 1)
        self._coming = self._ask(self._next)
        return made

    def read(self, wanted: Sequence[int]) -> list[dict[str, np.ndarray]]:
        """The arrays of some rows, whose numbers ascend."""
        found, at = [], 0
        while at < len(wanted):
            held = self._held = self._take() if self._held is None else self._held
            place, count = self.places[-1], len(held)
            if wanted[at] >= place.first + count:
                self.places.append(self._next)
                self._held = None
                continue
            seed = epoch_seed(self.rows.seed, f"lane {self.number} {place[1:]}")
            here = [one for one in wanted[at:] if one < place.first + count]
            drawn = [index_shuffle(one - place.first, max_index=count - 1, seed=seed, rounds=4) for one in here]
            found.append(held.read(drawn))
            at += len(here)
        return found


class AheadRows:
    """The rows of a run. Each has a number, and rows must be read in ascending order of their numbers."""

    def __init__(self, work: Work, config: Config, encoder: tokenizer.Tokenizer):
        self.work, self.seq, self.seed, self.batch = work, config.data.seq, config.data.seed, config.data.batch
        self._is_one_text = config.data.packing == "stream"
        self._end, self._begins = encoder.end, encoder.before[-1:] == (encoder.end,)
        self.lanes = max(one for one in range(1, MOST_LANES + 1) if not self.batch % one and one <= len(work.units))
        self.starts: dict[int, Place] = {}  # where lanes begin that do not begin at their beginning
        self._open: dict[int, _Lane] = {}
        self.processes: list[Process] = []

    def unit(self, lane: int, place: Place) -> int:
        """The unit of the source that a lane reads at a place."""
        count, seed = len(self.work.units), epoch_seed(self.seed, f"units {place.epoch}")
        return index_shuffle(lane + place.unit * self.lanes, max_index=count - 1, seed=seed, rounds=4)

    def units_of(self, lane: int) -> int:
        """How many units a lane reads in an epoch."""
        return -(-(len(self.work.units) - lane) // self.lanes)

    def pack(self, stream: np.ndarray) -> packing.Rows:
        """Rows of `seq` tokens that are cut from the tokens of a chunk."""
        if self._is_one_text:
            return packing.text(packing.InMemory(stream), self.seq)
        return packing.documents(packing.InMemory(stream), self.seq, self._end, self._begins)

    def tell(self, chunk: Chunk) -> None:
        """Warns of what the tokenizer could not encode in a chunk, and of files of its unit that are skipped or odd."""
        if chunk.replaced_bytes:
            _log.warning("the tokenizer has no token for %d bytes or characters of a text", chunk.replaced_bytes)
        for line in chunk.notes.splitlines():
            _log.warning("%s", line)

    def read(self, indices: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        """The arrays of rows, as packing.Rows gives them; an index of -1 gives a row of padding."""
        empty = self.pack(np.empty(0, np.uint32))
        fields = empty.read([-1] * len(indices))
        size, by_lane = self.batch // self.lanes, collections.defaultdict[int, list[tuple[int, int]]](list)
        for i, index in enumerate(map(int, indices)):
            if index >= 0:
                step, row = divmod(index, self.batch)
                by_lane[row // size].append((step * size + row % size, i))
        self._begin({lane: rows[0][0] for lane, rows in by_lane.items()})
        for lane, rows in by_lane.items():
            numbers, places = zip(*rows, strict=True)
            parts = self._open[lane].read(numbers)
            for name, array in fields.items():
                array[list(places)] = np.concatenate([part[name] for part in parts])
        return fields

    def _begin(self, firsts: Mapping[int, int]) -> None:
        """Opens lanes that are not open yet. firsts: the row of each lane that is wanted first."""
        new = [lane for lane in firsts if lane not in self._open]
        if new and not self.processes:
            cpus = host.count_cpus()
            count = min(len(new), cpus)
            work = pickle.dumps(self.work)
            self.processes = [Process(work, max(1, cpus // count)) for _ in range(count)]
        for number, lane in enumerate(new):
            start = self.starts.get(lane)
            if start is None or start.first > firsts[lane]:
                start = Place()
                if firsts[lane]:
                    _log.warning("data.tokenize=ahead: lane %d is counted from its beginning to find its place", lane)
            self._open[lane] = _Lane(self, lane, self.processes[number % len(self.processes)], start)

    def places(self, step: int) -> dict[int, Place]:
        """Where the lanes of this process stand before a step that was read."""
        row = step * (self.batch // self.lanes)
        return self.starts | {
            lane: next((one for one in reversed([*opened.places]) if one.first <= row), Place())
            for lane, opened in [*self._open.items()]
        }

    def describe_rate(self, step_s: float) -> str:
        """A line for the user: the tokens/s that processes here can make, and those that steps of `step_s` s need."""
        rate = sum(one.tokens / one.taken_s for one in self.processes if one.taken_s)
        needed = self.batch * len(self._open) / self.lanes * self.seq / step_s  # of the rows that this process reads
        count = len(self.processes)
        return (
            f"tokenized ahead: up to {human_short(rate)} tokens/s by {count} process{'es' * (count != 1)} here; the "
            f"steps need {human_short(needed)} tokens/s"
        )

    def close(self) -> None:
        """Ends the processes. A thread that waits for one of them gets an error."""
        for process in self.processes:
            process.stop()
        self.processes.clear()
        self._open.clear()


@dataclasses.dataclass(frozen=True, eq=False)
class AheadLoader(Loader):
    """Rows in batches that are tokenized ahead. They are read from one step on, in the order of their numbers."""

    rows: AheadRows  # pyright: ignore[reportIncompatibleVariableOverride]  (it has no number of rows)
    say: Callable[[str], None] = lambda _: None

    @property
    def epochs_per_step(self) -> float:
        """0, because it is not known how many rows there are."""
        return 0.0

    def indices_at(self, step: int, batch_rows: Sequence[int] | np.ndarray) -> np.ndarray:
        numbers = np.asarray(batch_rows, np.int64)
        return np.where(numbers < self.batch, step * self.batch + numbers, -1)

    def batches(
        self, start_step: int, shardings: Mapping[str, jax.sharding.Sharding], stop_step: int | None = None
    ) -> Generator[tuple[int, dict[str, jax.Array]], None, None]:
        """Pairs of a step and its arrays, as `Loader.batches` gives them. The processes end with the generator.

        After some steps `say` is told how fast texts are tokenized, and how fast the steps use them without waiting.
        """
        used_s: list[float] = []  # by each step, until it asked for the next one
        try:
            for found in super().batches(start_step, shardings, stop_step):
                began = time.perf_counter()
                yield found
                used_s.append(time.perf_counter() - began)
                if len(used_s) == _RATE_STEPS:
                    self.say(self.rows.describe_rate(sum(used_s[1:]) / (_RATE_STEPS - 1)))
        finally:
            self.rows.close()

    def positions(self, step: int) -> dict[str, Any]:
        """Where this process stands in the source before a step: small JSON, which a checkpoint keeps."""
        return {"of": self._key, "lanes": {str(lane): [*place] for lane, place in self.rows.places(step).items()}}

    def resume(self, positions: Any) -> None:
        """Takes the positions of all processes from a checkpoint, so that no lane is counted from its beginning.

        Positions of other data, or of another order of it, are not taken.
        """
        for one in positions if isinstance(positions, list) else []:
            if one.get("of") == self._key:
                self.rows.starts |= {int(lane): Place(*place) for lane, place in one["lanes"].items()}

    @property
    def _key(self) -> str:
        return f"{self.fingerprint}-{self.rows.seed}-{self.rows.batch}-{self.rows.lanes}"


def open_ahead(
    config: Config, progress: sources.Progress | None = None, say: Callable[[str], None] = lambda _: None
) -> tuple[AheadLoader, Loader | None]:
    """The loader of the training rows of texts that are tokenized ahead, and that of the files for evaluation.

    The tokens for evaluation are made before the run, and kept. `say` is told the rate of tokenizing for training.
    Raises InputError if `data` names something else than texts, or asks for what is not known before they are read.
    """
    _check(config)
    train_rows = _open_training(config, progress, say)
    if not config.data.held_out_sources:
        return train_rows, None
    assert not isinstance(config.data.held_out, int | float)
    data = dataclasses.replace(config.data, source=config.data.held_out, held_out=0.0, tokenize="once")
    held_out, _ = open_loaders(dataclasses.replace(config, data=data), progress)
    about = held_out.description.replace("training", "evaluation", 1)
    return train_rows, dataclasses.replace(held_out, seed=0, repeat=False, description=about)


def _open_training(config: Config, progress: sources.Progress | None, say: Callable[[str], None]) -> AheadLoader:
    data = config.data
    source, encoder, _ = encoders.open_source(config, progress, hashed=False)
    assert isinstance(encoder, tokenizer.Tokenizer)
    apart = np.empty(0, np.uint64)
    if source.held_out:
        apart = making.ascending_hashes(source.walk([source.held_out], "reading documents", progress))
    to_train_on = dataclasses.replace(source, held_out=None)
    unit_bytes = min(making.UNIT_BYTES, max(source.size_bytes // UNITS, LEAST_UNIT_BYTES))
    units = tuple(making.plan_units(to_train_on, ["train"], unit_bytes))
    named = data.tokenizer if data.tokenizer == "bytes" else str(tokenizer.tokenizer_path(data.tokenizer))
    rows = AheadRows(Work(to_train_on, units, named, apart, CHUNK_BYTES), config, encoder)
    files = [file for unit in units for file in unit.files]
    facts = [[one.far.version if one.far else one.path.name, one.size_bytes, one.span, one.field] for one in files]
    left_out = hashlib.sha256(apart.tobytes()).hexdigest()
    kind = config.objective, data.masked_share
    about = json.dumps([facts, encoder.fingerprint, left_out, data.packing, data.seq, kind])
    lanes = plural(rows.lanes, "lane")
    notes = filter(None, [f"training: texts tokenized ahead, in {lanes} ({source.description})", source.notes])
    return AheadLoader(
        rows=rows,
        batch=data.batch,
        padded_batch=data.padded_batch,
        seed=data.seed,
        repeat=True,
        description="\n".join(notes),
        fingerprint=f"ahead-{hashlib.sha256(about.encode()).hexdigest()[:24]}",
        token_masks=token_masks(config, encoder),
        say=say,
    )


def _check(config: Config) -> None:
    """Raises InputError if what a config asks for cannot be tokenized ahead."""
    data = config.data
    reads_text = config.objective in ("causal", "masked", "replaced") and not config.model.vision
    if data.conversations or data.fields or not reads_text:
        what, fix = "records", "name texts and a model of texts, or leave data.tokenize out"
    elif sources.random_rows(data.source) is not None or tokens.find_folders(data) or token_files.name_of_files(data):
        what, fix = f"{data.sources[0].path}, which is no text", "leave data.tokenize out"
    elif data.sources[0].weight:
        what, fix = "sources with weights", "leave the weights out, or make tokens of each with the verb tokenize"
    elif data.held_out_share:
        what, fix = f"data.held_out={data.held_out}, a share", "--set data.held_out=FILE, or 0"
    elif tokenizer.trained_size(data.tokenizer):
        what, fix = f"data.tokenizer={data.tokenizer}", "train it on some of the texts before, with --train_tokenizer"
    else:
        return
    raise InputError(f"data.tokenize=ahead does not go with {what}\n  fix   {fix}")
