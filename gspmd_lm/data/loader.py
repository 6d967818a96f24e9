"""The batches of a run. Which row stands where is a function of the seed and the step alone."""

import dataclasses
import functools
import hashlib
import math
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
from grain.experimental import index_shuffle

from gspmd_lm.config import Config
from gspmd_lm.data import (
    cache,
    chat,
    encoders,
    labelled,
    media,
    objects,
    packing,
    pairs,
    sources,
    token_files,
    tokenizer,
)
from gspmd_lm.data.tokens import TokenSplit, find_folders, open_tokens
from gspmd_lm.errors import InputError

Rows = packing.Rows | labelled.LabelledRows | pairs.PairRows | media.Rows
MOST_RANDOM_TOKENS = 2**30  # the limit of random:ROWS
_AHEAD = 4  # batches read before they are asked for
_FAR_READS = 8  # batches read from a bucket at once, since each waits for the store
# Of each BLOCK consecutive rows, a part with a weight gets its share exactly, in a random order.
BLOCK = 10_000


@dataclasses.dataclass(frozen=True, eq=False)
class Loader:
    """Rows in batches. Row `step * batch + b` of an endless sequence of shuffled epochs is row b of that step.

    If there are fewer rows than a batch holds, a batch has rows of several epochs. With `repeat=False` there is
    one epoch. Rows of padding fill its last batch; they have no targets.

    With `shares`, rows are drawn from several parts, and each part has epochs of its own.
    """

    rows: Rows | packing.Joined
    batch: int
    seed: int
    repeat: bool
    description: str  # for the user: a line, and more lines about files that were skipped
    fingerprint: str  # equal only for equal rows; it must be equal in every process
    shares: tuple[int, ...] = ()  # how many of BLOCK rows each part of packing.Joined gets
    tokenizer: Path | None = None  # the tokenizer.json that was trained on the source
    classes: tuple[str, ...] = ()  # the labels of labelled texts; the place of one is its number in `labels`
    token_masks: packing.Masks | None = None  # they are put among the tokens of rows
    padded_batch: int = 0  # rows of a batch with those of padding that follow the others in each; 0 means batch
    tokens: int = 0  # in all rows; 0 for images and sounds
    read_threads: int = 1  # how many batches are read at once

    @property
    def epochs_per_step(self) -> float:
        """The share of all rows that a batch has."""
        return self.batch / len(self.rows)

    @property
    def steps_per_epoch(self) -> int:
        """How many batches it takes to read each row once; the last one is filled up."""
        return -(-len(self.rows) // self.batch)

    def indices_at(self, step: int, batch_rows: Sequence[int] | np.ndarray) -> np.ndarray:
        """The source rows of the rows `batch_rows` of a step's batch; -1 for padding."""
        place = self._row_of_mixture if self.shares else self._row_of_epochs
        found = [place(step * self.batch + row) if row < self.batch else -1 for row in map(int, batch_rows)]
        return np.asarray(found, np.int64)

    def _row_of_epochs(self, number: int) -> int:
        """The source row that is row `number` of the endless sequence of epochs; -1 after the only one."""
        count = len(self.rows)
        epoch, i = divmod(number, count)
        if epoch and not self.repeat:
            return -1
        return index_shuffle(i, max_index=count - 1, seed=epoch_seed(self.seed, epoch), rounds=4)

    def _row_of_mixture(self, number: int) -> int:
        """The source row that is row `number` of the endless sequence that is drawn from several parts."""
        assert isinstance(self.rows, packing.Joined)
        block, at = divmod(number, BLOCK)
        at = index_shuffle(at, max_index=BLOCK - 1, seed=epoch_seed(self.seed, f"block {block}"), rounds=4)
        first = 0
        for i_part, (share, part) in enumerate(zip(self.shares, self.rows.parts, strict=True)):
            if at < share:
                epoch, i = divmod(block * share + at, len(part))
                seed = epoch_seed(self.seed, f"part {i_part} epoch {epoch}")
                return first + index_shuffle(i, max_index=len(part) - 1, seed=seed, rounds=4)
            at, first = at - share, first + len(part)
        raise AssertionError("the shares add up to BLOCK")

    def rows_at(self, step: int, batch_rows: slice | Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        """A part of a step's batch: the arrays that `read` of the rows gives, and int32 row [rows].

        `row` is the row's number in the global batch.
        """
        numbers = np.arange(self.padded_batch or self.batch, dtype=np.int32)[batch_rows]
        arrays = self.rows.read(self.indices_at(step, numbers))
        if self.token_masks:
            arrays = self.token_masks.put(arrays, step * self.batch + numbers.astype(np.int64))
        return arrays | {"row": numbers}

    def batches(
        self, start_step: int, shardings: Mapping[str, jax.sharding.Sharding], stop_step: int | None = None
    ) -> Generator[tuple[int, dict[str, jax.Array]], None, None]:
        """Pairs of a step and its arrays, from `start_step` to before `stop_step`, read ahead by a thread.

        `shardings` names the wanted arrays, whose first axis is the rows of the batch. Each process reads only the rows
        that its own devices hold. Without `repeat` the pairs end after one epoch at the latest. A caller that leaves
        early must close the generator. An error in the thread is raised here.
        """
        shapes, local_rows = self._shapes(shardings), self.local_rows(shardings)
        stop = sys.maxsize if stop_step is None else stop_step
        if not self.repeat:
            stop = min(stop, self.steps_per_epoch)

        def place(local: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
            parts = {name: functools.partial(_part, local[name], local_rows) for name in shardings}
            return {name: jax.make_array_from_callback(shapes[name], shardings[name], parts[name]) for name in parts}

        return ahead(start_step, stop, lambda step: self.rows_at(step, local_rows), place, self.read_threads)

    def local_rows(self, shardings: Mapping[str, jax.sharding.Sharding]) -> np.ndarray:
        """The rows of each batch that this process's devices hold of any of the arrays, ascending."""
        needed = np.zeros(self.padded_batch or self.batch, bool)
        for name, shape in self._shapes(shardings).items():
            for index in shardings[name].addressable_devices_indices_map(shape).values():
                assert index is not None
                needed[index[0]] = True
        return np.flatnonzero(needed)

    def _shapes(self, names: Iterable[str]) -> dict[str, tuple[int, ...]]:
        """The shapes of some arrays of a whole batch."""
        empty = self.rows_at(0, slice(0))
        return {name: (self.padded_batch or self.batch, *empty[name].shape[1:]) for name in names}


def ahead(
    start: int, stop: int, read: Callable[[int], Any], place: Callable[[Any], dict[str, jax.Array]], threads: int = 1
) -> Generator[tuple[int, dict[str, jax.Array]], None, None]:
    """Pairs of a step and its arrays. Each of `threads` reads a batch ahead, which `place` brings to the devices."""
    steps = grain.MapDataset.range(start, max(start, stop)).map(lambda step: (step, read(step)))
    reads = iter(
        steps.to_iter_dataset(grain.ReadOptions(num_threads=threads, prefetch_buffer_size=max(threads, _AHEAD)))
    )
    try:
        for step, found in reads:
            yield step, place(found)
    finally:
        reads.close()


def open_loaders(
    config: Config, progress: sources.Progress | None = None, known: Sequence[str] = ()
) -> tuple[Loader, Loader | None]:
    """The loader of the training rows and that of the held-out rows, which is None with `data.held_out: 0`.

    known: the classes that the model has learnt, in their order, which is that of the labels if they are the same.

    The rows have what `config.objective` predicts: next tokens; masked or replaced tokens, of which evaluation always
    has the same; a label; or the text that a source goes with. A source that has no cache yet is tokenized, and
    `progress` is told about it. Evaluation reads its rows once, in an order that does not depend on the seed. Raises
    InputError if the source, the tokenizer, the labels or their sizes do not fit.
    """
    data, masked = config.data, config.objective in ("masked", "replaced")
    if data.tokenize == "ahead":
        raise InputError(
            "data.tokenize=ahead: which rows there are is not known before a run reads them\n"
            "  fix   look at some of the files, with --set data.tokenize=once"
        )
    if found := objects.open_media(config, progress, known):
        return _media_loaders(config, found)
    check_objective(config)
    count = sources.random_rows(data.source)
    if count is not None and not data.fields:
        return _open_random(config, count, masked)
    folders, made = find_folders(data), None
    foreign = "" if folders else token_files.name_of_files(data)  # which lists a folder to see what it holds
    if foreign:
        tokens = encoders.open_encoder(config)
        assert isinstance(tokens, tokenizer.Tokenizer)
        opened = token_files.open_files(config, tokens)
    elif folders:
        tokens = encoders.open_encoder(config)
        opened = open_tokens(data, folders, tokens)
        if isinstance(tokens, labelled.Labelled):
            encoders.take_classes(config, tokens, opened.classes, known)
    else:
        source, tokens, made = encoders.open_source(config, progress, known)
        opened = cache.open_cache(source, tokens, data.held_out_share, progress)
    all_masks = token_masks(config, tokens) if isinstance(tokens, tokenizer.Tokenizer) else None
    lost = opened.replaced_bytes
    replaced = f", {lost:,} bytes or characters that no token stands for" if lost else ""
    if opened.spelled_ends and isinstance(tokens, tokenizer.Tokenizer):
        replaced += f", {opened.spelled_ends:,} ends of texts spelled {tokens.spelled_end.decode()}"
    if opened.spelled_texts and isinstance(tokens, tokenizer.Tokenizer):
        replaced += f", {tokenizer.about_spelled_ends(tokens, opened.spelled_texts)}"
    origin = f"{opened.description}{replaced}"

    def rows_of(split: TokenSplit, training: bool, place: str) -> tuple[Rows, int]:
        """The rows of a split, and how many of its conversations, labelled texts or pairs were cut."""
        cut = 0
        if isinstance(tokens, chat.Chat):
            rows, cut = packing.conversations(split.stream, data.seq)
        elif isinstance(tokens, labelled.Labelled):
            rows, cut = labelled.rows(split.stream, data.seq, numbers=data.label_kind == "number"), split.cut
        elif isinstance(tokens, pairs.Pairs):
            rows, cut = pairs.rows(split.stream, config), split.cut
        elif data.packing == "stream":
            rows = packing.text(split.stream, data.seq)
        else:
            begins = not foreign and tokens.before[-1:] == (tokens.end,)  # others may write one token between texts
            rows = packing.documents(split.stream, data.seq, tokens.end, begins)
        # Records and held-out documents may fill less than a row. A text for training may not.
        if not len(rows) or (training and isinstance(tokens, tokenizer.Tokenizer) and len(split.stream) <= data.seq):
            use, other = (
                ("training", "") if training else ("evaluation", ", or change data.held_out (0 holds none out)")
            )
            left_out = ""
            if training and opened.left_out:
                left_out = f"; {opened.left_out:,} documents are left out, since data.held_out has them, too"
                other = ", or take documents of data.source out of data.held_out"
            raise InputError(
                f"{place}: {len(split.stream):,} tokens for {use} are less than one row, "
                f"data.seq + 1 = {data.seq + 1:,}{left_out}\n  fix   lower data.seq, or add text{other}"
            )
        return rows, cut

    def loader_of(use: str, splits: Sequence[TokenSplit]) -> Loader:
        training = use == "training"
        seed = data.seed if training else 0
        key = "data.source" if training or not opened.has_own_held_out else "data.held_out"
        counted = [rows_of(split, training, f"{key}: {split.name}") for split in splits]
        shares = _shares(splits) if len(splits) > 1 else ()
        rows = packing.Joined([rows for rows, _ in counted]) if shares else counted[0][0]
        cut, size = sum(one[1] for one in counted), sum(len(split.stream) for split in splits)
        targets = size - sum(split.ends for split in splits)
        size -= labelled.LABEL_WORDS * len(rows) * isinstance(tokens, labelled.Labelled)
        about, more = f"{len(rows):,} rows, ", []
        if isinstance(tokens, chat.Chat):
            about += f"{size:,} tokens, {targets:,} of them the assistant's"
            about += f", {cut:,} conversations cut into rows" * (cut > 0)
        elif isinstance(tokens, pairs.Pairs):
            about += f"{size:,} tokens, {targets:,} of them of texts"
            about += f", {cut:,} pairs of which something was cut" * (cut > 0)
        elif isinstance(tokens, labelled.Labelled):
            about += f"{size:,} tokens"
            about += f", {cut:,} rows with texts cut to {data.seq:,} tokens" * (cut > 0)
            more = [labelled.about_classes(tokens.classes)] if training and tokens.classes else []
        else:
            about += f"{size:,} tokens" + f", {data.masked_share:.4g} of them {config.objective}" * masked
        lines = [f"{use}: {about} ({origin})", *more]
        for split, share, (part_rows, _) in zip(splits, shares, counted, strict=False):
            times = config.train.steps * data.batch * share / BLOCK / len(part_rows)
            lines.append(
                f"{split.name}: {100 * share / BLOCK:.4g}% of what is read; each of its {len(part_rows):,} rows "
                f"{times:,.2g} times in {config.train.steps:,} steps"
            )
        if training and opened.left_out:
            lines.append(f"left out of training: {opened.left_out:,} documents that are also in data.held_out")
        if training and opened.notes:
            lines.append(opened.notes)
        return Loader(
            rows=rows,
            batch=data.batch,
            padded_batch=data.padded_batch,
            seed=seed,
            repeat=training,
            description="\n".join(lines),
            fingerprint=f"{opened.fingerprint}-{data.packing}-{data.seq}-{use}"
            + (f"-{shares}" if shares else "")
            + (f"-{config.objective} {data.masked_share}" if masked else ""),
            shares=shares,
            tokenizer=made,
            classes=tokens.classes if isinstance(tokens, labelled.Labelled) else (),
            token_masks=dataclasses.replace(all_masks, seed=seed) if all_masks else None,
            tokens=size,
            read_threads=_FAR_READS if any(split.stream.is_far for split in splits) else 1,
        )

    train = loader_of("training", opened.train)
    if not data.held_out_sources and not data.held_out_share:
        return train, None
    return train, loader_of("evaluation", [opened.held_out])


def token_masks(config: Config, tokens: tokenizer.Tokenizer) -> packing.Masks | None:
    """The masks of the rows to train on; None if the objective asks for none."""
    if config.objective not in ("masked", "replaced"):
        return None
    mask, data = tokens.mask if config.objective == "masked" else None, config.data
    return packing.Masks(mask, tokens.vocab_size, tokens.special_ids, data.masked_share, data.seed)


def _media_loaders(config: Config, found: media.Opened) -> tuple[Loader, Loader | None]:
    """The loaders of images or sounds."""

    def loader_of(use: str, rows: media.Rows, seed: int) -> Loader:
        lines = [f"{use}: {len(rows):,} {found.what} ({found.names})"] + [found.notes] * (use == "training")
        return Loader(
            rows=rows,
            batch=config.data.batch,
            padded_batch=config.data.padded_batch,
            seed=seed,
            repeat=use == "training",
            description="\n".join(filter(None, lines)),
            fingerprint=f"{found.fingerprint}-{use}",
            classes=found.classes,
        )

    train = loader_of("training", found.train, config.data.seed)
    return train, loader_of("evaluation", found.held_out, 0) if found.held_out else None


def check_objective(config: Config) -> None:
    """Raises InputError if the data names no records, and the objective needs some."""
    data, objective = config.data, config.objective
    if objective == "seq2seq" and not data.fields and sources.random_rows(data.source) is None:
        raise InputError(
            "objective: seq2seq: records have a source and a text\n  fix   set data.fields to the names of both"
        )
    if objective == "classes" and not data.label:
        raise InputError(
            "objective: classes: data.fields and data.label do not say what a text and its label are\n"
            "  fix   --set data.fields=[text] --set data.label=label, with the names of the data's own fields"
        )


def _shares(parts: Sequence[TokenSplit]) -> tuple[int, ...]:
    """How many of BLOCK rows each part gets. Raises InputError for a weight that would get none."""
    weights = [part.weight or 0.0 for part in parts]
    exact = [weight / sum(weights) * BLOCK for weight in weights]
    shares = [math.floor(one) for one in exact]
    for i in sorted(range(len(parts)), key=lambda i: shares[i] - exact[i])[: BLOCK - sum(shares)]:
        shares[i] += 1
    for part, share in zip(parts, shares, strict=True):
        if not share:
            raise InputError(
                f"data.source: {part.name}: its weight {part.weight:g} is less than 1 in {BLOCK:,} of all weights\n"
                "  fix   raise it, or leave the source out"
            )
    return tuple(shares)


def _open_random(config: Config, count: int, masked: bool) -> tuple[Loader, Loader | None]:
    """The loaders of random rows. As many held-out rows are drawn as rows for training. The mask token is 0."""
    data, vocab, mask = config.data, config.model.vocab, 0 if config.objective == "masked" else None
    seq2seq = config.model.encoder is not None
    row_tokens = config.source_seq + data.seq if seq2seq else data.seq + 1
    if count * row_tokens > MOST_RANDOM_TOKENS:
        sizes = f"data.seq={data.seq:,}" + f" and data.source_seq={config.source_seq:,}" * seq2seq
        raise InputError(
            f"data.source: random:{count} in rows of {sizes} is more than {MOST_RANDOM_TOKENS:,} tokens, "
            f"which would be drawn at once\n  fix   random:{max(MOST_RANDOM_TOKENS // row_tokens, 1)} or less"
        )

    def split_loader(training: bool) -> Loader:
        use, seed = ("training", data.seed) if training else ("evaluation", 0)
        of_rows = data.seed % 2**63, int(not training)
        return Loader(
            rows=pairs.random(count, config, of_rows) if seq2seq else packing.random(count, data.seq, vocab, of_rows),
            batch=data.batch,
            padded_batch=data.padded_batch,
            seed=seed,
            repeat=training,
            description=f"{use}: {count:,} rows of {data.seq + 1:,} random tokens below {vocab:,}",
            fingerprint=f"random-{count}-{data.seq}-{vocab}-{data.seed}-{use}"
            + (f"-{config.source_seq}" if seq2seq else "")
            + (f"-{config.objective} {data.masked_share}" if masked else ""),
            token_masks=packing.Masks(mask, vocab, (), data.masked_share, seed) if masked else None,
            tokens=count * row_tokens,
        )

    return split_loader(True), split_loader(False) if data.held_out_share else None


@functools.lru_cache(maxsize=4096)
def epoch_seed(seed: int, epoch: int | str) -> int:
    """A seed of 32 bits that differs between epochs of one seed and between neighbouring seeds."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{epoch}".encode()).digest()[:4], "big")


def _part(local: np.ndarray, local_rows: np.ndarray, index: tuple[slice, ...] | None) -> np.ndarray:
    """The part of a global array that one device holds: its `index`, taken from the rows `local_rows`."""
    assert index is not None
    start, stop, _ = index[0].indices(int(local_rows[-1]) + 1)
    first = int(np.searchsorted(local_rows, start))
    return local[(slice(first, first + stop - start), *index[1:])]
