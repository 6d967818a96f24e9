"""The batches of a run. The place of each row is a function of the seed and the step alone."""

import dataclasses
import functools
import hashlib
import sys
from collections.abc import Generator, Mapping, Sequence

import grain
import jax
import numpy as np
from grain.experimental import index_shuffle

from gspmd_lm.config import Config
from gspmd_lm.data import cache, chat, packing, sources, tokenizer
from gspmd_lm.errors import InputError

MOST_RANDOM_TOKENS = 2**30  # the limit of random:ROWS
_AHEAD = 4  # batches read before they are asked for


@dataclasses.dataclass(frozen=True, eq=False)
class Loader:
    """Rows in batches. Row `step * batch + b` of an endless sequence of shuffled epochs is row b of that step.

    If there are fewer rows than a batch has places, a batch holds rows of several epochs. With `repeat=False` there is
    one epoch. Rows of padding fill its last batch; they have no targets.
    """

    rows: packing.Rows
    batch: int
    seed: int
    repeat: bool
    tokens_per_epoch: int  # targets in all rows
    description: str  # one line for the user
    fingerprint: str  # equal only for equal rows; it must be equal in every process

    @property
    def steps_per_epoch(self) -> int:
        """How many batches it takes to read each row once; the last one is filled up."""
        return -(-len(self.rows) // self.batch)

    def indices_at(self, step: int, batch_rows: Sequence[int] | np.ndarray) -> np.ndarray:
        """The rows at the places `batch_rows` of a step's batch; -1 for padding."""
        count = len(self.rows)
        indices = []
        for place in batch_rows:
            epoch, i = divmod(step * self.batch + int(place), count)
            if epoch and not self.repeat:
                indices.append(-1)
            else:
                seed = _epoch_seed(self.seed, epoch)
                indices.append(index_shuffle(i, max_index=count - 1, seed=seed, rounds=4))
        return np.asarray(indices, np.int64)

    def rows_at(self, step: int, batch_rows: slice | Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        """A part of a step's batch: int32 tokens, targets, segment_ids and positions [rows, seq], and row [rows].

        `row` is the row's place in the global batch. See packing.Rows.read for the others.
        """
        places = np.arange(self.batch, dtype=np.int32)[batch_rows]
        return self.rows.read(self.indices_at(step, places)) | {"row": places}

    def batches(
        self, start_step: int, shardings: Mapping[str, jax.sharding.Sharding], stop_step: int | None = None
    ) -> Generator[tuple[int, dict[str, jax.Array]], None, None]:
        """Pairs of a step and its arrays, from `start_step` to before `stop_step`, read ahead by a thread.

        `shardings` names the wanted arrays, which are [batch, seq], or [batch] for `row`. Each process reads only the
        rows that its own devices hold. Without `repeat` the pairs end after one epoch at the latest. A caller that
        leaves early must close the generator. An error in the thread is raised here.
        """
        shapes = {name: (self.batch,) if name == "row" else (self.batch, self.rows.seq) for name in shardings}
        places = _local_places(shardings, shapes)
        stop = sys.maxsize if stop_step is None else stop_step
        if not self.repeat:
            stop = min(stop, self.steps_per_epoch)
        steps = grain.MapDataset.range(start_step, max(start_step, stop))
        reads = steps.map(lambda step: (step, self.rows_at(step, places)))
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=_AHEAD)
        ahead = iter(reads.to_iter_dataset(options))
        try:
            for step, local in ahead:
                arrays = {}
                for name, sharding in shardings.items():
                    part = functools.partial(_part, local[name], places)
                    arrays[name] = jax.make_array_from_callback(shapes[name], sharding, part)
                yield step, arrays
        finally:
            ahead.close()


def open(config: Config, progress: sources.Progress | None = None) -> tuple[Loader, Loader | None]:
    """The loaders of the training rows and of the held-out rows; the latter is None with `data.held_out: 0`.

    A source that has no cache yet is tokenized, and `progress` is told about it. Evaluation reads its rows once, in an
    order that does not depend on the seed. Raises InputError if the source, the tokenizer or their sizes do not fit.
    """
    data = config.data
    count = sources.random_rows(data.source)
    if count is not None:
        return _open_random(config, count)
    tokens = chat.Chat(data.tokenizer) if data.messages_field else tokenizer.load(data.tokenizer)
    if tokens.vocab_size > config.model.vocab:
        raise InputError(
            f"data.tokenizer={data.tokenizer} has {tokens.vocab_size:,} tokens, more than model.vocab="
            f"{config.model.vocab:,} (rows of the embedding: {config.model.vocab_rows:,})\n"
            f"  fix   set model.vocab to {tokens.vocab_size}"
            + (" and model.padded_vocab to 0 or at least that" if config.model.padded_vocab else "")
        )
    conversation = None
    if isinstance(tokens, chat.Chat):
        conversation = functools.partial(tokens.document, field=data.messages_field)
    source = sources.open(data, progress, conversation)
    cached = cache.open(source, tokens, data.held_out, progress)
    replaced = f", {cached.replaced_bytes:,} bytes not UTF-8 replaced" if cached.replaced_bytes else ""
    origin = f"{source.description}{replaced}"

    def split_loader(split: cache.Split, training: bool) -> Loader:
        use = "training" if training else "evaluation"
        targets, notes = len(split.stream) - split.ends, ""
        if isinstance(tokens, chat.Chat):
            rows, cut = packing.conversations(split.stream, data.seq)
            notes = f", {targets:,} of them the assistant's" + (f", {cut:,} conversations cut into rows" if cut else "")
        elif data.packing == "stream":
            rows = packing.text(split.stream, data.seq)
            targets = len(rows) * data.seq
        else:
            rows = packing.documents(split.stream, data.seq, tokens.end)
        # Conversations and held-out documents may fill less than a row. A text for training may not.
        if not len(rows) or (training and not conversation and len(split.stream) <= data.seq):
            fix = "lower data.seq, or add text" + ("" if training else ", or change data.held_out (0 holds none out)")
            raise InputError(
                f"data.source={data.source}: {len(split.stream):,} tokens for {use} are less than one row, "
                f"data.seq + 1 = {data.seq + 1:,}\n  fix   {fix}"
            )
        return Loader(
            rows=rows,
            batch=data.batch,
            seed=data.seed if training else 0,
            repeat=training,
            tokens_per_epoch=targets,
            description=f"{use}: {len(rows):,} rows, {len(split.stream):,} tokens{notes} ({origin})",
            fingerprint=f"{cached.folder.name}-{data.packing}-{data.seq}-{use}",
        )

    return split_loader(cached.train, True), split_loader(cached.held_out, False) if data.held_out else None


def _open_random(config: Config, count: int) -> tuple[Loader, Loader | None]:
    """The loaders of random rows. Held-out rows are drawn anew, as many as there are for training."""
    data, vocab = config.data, config.model.vocab
    if count * (data.seq + 1) > MOST_RANDOM_TOKENS:
        raise InputError(
            f"data.source: random:{count} in rows of data.seq={data.seq:,} is more than {MOST_RANDOM_TOKENS:,} tokens, "
            f"which would be drawn at once\n  fix   random:{max(MOST_RANDOM_TOKENS // (data.seq + 1), 1)} or less"
        )

    def split_loader(training: bool) -> Loader:
        use = "training" if training else "evaluation"
        return Loader(
            rows=packing.random(count, data.seq, vocab, (data.seed % 2**63, int(not training))),
            batch=data.batch,
            seed=data.seed if training else 0,
            repeat=training,
            tokens_per_epoch=count * data.seq,
            description=f"{use}: {count:,} rows of {data.seq + 1:,} random tokens below {vocab:,}",
            fingerprint=f"random-{count}-{data.seq}-{vocab}-{data.seed}-{use}",
        )

    return split_loader(True), split_loader(False) if data.held_out else None


@functools.lru_cache(maxsize=4096)
def _epoch_seed(seed: int, epoch: int) -> int:
    """A seed of 32 bits that differs between epochs of one seed and between neighbouring seeds."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{epoch}".encode()).digest()[:4], "big")


def _local_places(shardings: Mapping[str, jax.sharding.Sharding], shapes: Mapping[str, tuple[int, ...]]) -> np.ndarray:
    """The places in the global batch that this process's devices hold in any of the arrays, ascending."""
    needed = np.zeros(next(iter(shapes.values()))[0], bool)
    for name, sharding in shardings.items():
        for index in sharding.addressable_devices_indices_map(shapes[name]).values():
            assert index is not None
            needed[index[0]] = True
    return np.flatnonzero(needed)


def _part(local: np.ndarray, places: np.ndarray, index: tuple[slice, ...] | None) -> np.ndarray:
    """The part of a global array that one device holds: its `index`, taken from the rows at `places`."""
    assert index is not None
    start, stop, _ = index[0].indices(int(places[-1]) + 1)
    first = int(np.searchsorted(places, start))
    return local[(slice(first, first + stop - start), *index[1:])]
