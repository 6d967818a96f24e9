"""A tokenizer that a run trains on its source, and the size of a vocabulary that follows the tokenizer."""

import dataclasses
import hashlib
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import tokenizers
from etils import epath

from gspmd_lm import files
from gspmd_lm.config import Config, core_yaml
from gspmd_lm.config.paths import cache_entry, cache_folder, read_text, unwritable
from gspmd_lm.data import corpus, sources, special_tokens, token_files, tokens
from gspmd_lm.data.readers import TokenIds
from gspmd_lm.data.sources import DocumentSource, Progress, random_rows
from gspmd_lm.data.tokenizer import END_OF_TEXT, FILE, MASK, Tokenizer, load_tokenizer, tokenizer_path, trained_size
from gspmd_lm.errors import InputError
from gspmd_lm.workdir import layout

PADDED_TO = 128  # rows of a vocabulary whose size follows the tokenizer; it divides over any usual mesh
MOST_BYTES = 2_000_000_000  # of documents that a tokenizer is trained on


def check_vocabulary(config: Config, size: int) -> None:
    """Raises InputError if a tokenizer has more tokens than the model: `size`."""
    named, vocab = config.data.tokenizer, config.model.vocab
    if size > vocab:
        raise InputError(
            f"data.tokenizer={named} has {size:,} tokens, more than model.vocab={vocab:,}\n"
            "  fix   --set model.vocab=0, which means the tokenizer's size, or set data.tokenizer to that of the model"
        )


def with_vocab_size(config: Config) -> Config:
    """The config, with model.vocab: 0 replaced by the size of its tokenizer, and padded_vocab by a multiple of 128.

    A padded_vocab that is larger stays. A tokenizer that is yet to be trained counts with the size that it is to have.
    Raises InputError if the tokenizer cannot be read.
    """
    data, model = config.data, config.model
    if model.patches:
        return config
    size = trained_size(data.tokenizer)
    if size and random_rows(data.source):
        raise InputError(
            f"data.tokenizer={data.tokenizer}: {data.source} has no text to train it on\n  fix   name a source of texts"
        )
    are_here = not any(files.is_remote(one.path) for one in data.sources)  # a config is read without a network
    if size and are_here and (folders := tokens.find_folders(data)):
        folder, manifest = folders[0]
        raise InputError(
            f"data.tokenizer={data.tokenizer}: {folder.address} has tokens already, of {manifest['tokenizer']}\n"
            f"  fix   --set data.tokenizer={tokens.kept_tokenizer(folder, manifest)}"
        )
    if size and are_here and (name := token_files.name_of_files(data)):
        raise InputError(
            f"data.tokenizer={data.tokenizer}: {name} has tokens already\n"
            "  fix   set data.tokenizer to the one that they were made with"
        )
    if size and data.conversations:
        raise InputError(
            f"data.tokenizer={data.tokenizer} has no chat template, which conversations need\n"
            "  fix   set data.tokenizer to the folder of a model's tokenizer.json and tokenizer_config.json"
        )
    if size and data.fields:
        raise InputError(
            f"data.tokenizer={data.tokenizer} is trained on texts, and data.fields says that there are records\n"
            "  fix   set data.tokenizer to a tokenizer.json, or to bytes"
        )
    if size and config.train.init_from:
        raise InputError(
            f"data.tokenizer={data.tokenizer}: the weights of train.init_from know the tokens of another tokenizer\n"
            "  fix   set data.tokenizer to the tokenizer.json that they were trained with"
        )
    if model.vocab:
        check_vocabulary(config, size or 0)
        return config
    vocab = size or load_tokenizer(data.tokenizer).vocab_size
    padded = max(model.padded_vocab, -(-vocab // PADDED_TO) * PADDED_TO)
    return dataclasses.replace(config, model=dataclasses.replace(model, vocab=vocab, padded_vocab=padded))


def keeps_tokenizer(config: Config, workdir: epath.Path) -> bool:
    """Whether a run is to keep the files of its tokenizer in its workdir: unless they are there already."""
    name = config.data.tokenizer
    if name == "bytes" or trained_size(name) or files.is_remote(name):
        return name != "bytes"
    path = files.expand_user(name)
    is_inside = not files.is_remote(workdir) and Path(workdir).absolute() in path.absolute().parents
    return os.path.exists(path) and not is_inside


def files_to_keep(config: Config, workdir: epath.Path, made: Path | None) -> dict[str, bytes]:
    """The files of a run's tokenizer that its workdir lacks, name -> content.

    made: the tokenizer.json that the run trained.
    """
    if not keeps_tokenizer(config, workdir):
        return {}
    return special_tokens.files_of(made or tokenizer_path(config.data.tokenizer))


def with_places(config: Config, workdir: epath.Path) -> Config:
    """The config with what it names from this folder named from anywhere: data, weights, and the tokenizer of a run."""
    data, train = config.data, config.train
    held_out = data.held_out if isinstance(data.held_out, int | float) else corpus.with_places(data.held_out)
    tokenizer = data.tokenizer if data.tokenizer == "bytes" else _absolute(data.tokenizer)
    source = corpus.with_places(data.source)
    data = dataclasses.replace(data, source=source, held_out=held_out, tokenizer=tokenizer)
    train = dataclasses.replace(train, init_from=train.init_from and _absolute(train.init_from))
    placed = dataclasses.replace(config, data=data, train=train)
    return with_kept_tokenizer(placed, workdir) if keeps_tokenizer(config, workdir) else placed


def _absolute(path: str) -> str:
    """The absolute path of a file or folder, which may have spaces in its name; an address as it is."""
    return path if files.is_remote(path) else str(files.expand_user(path).absolute())


def with_kept_tokenizer(config: Config, workdir: epath.Path) -> Config:
    """The config, with the tokenizer.json that a run keeps in its workdir."""
    path = (workdir if files.is_remote(workdir) else epath.Path(Path(workdir).absolute())) / layout.TOKENIZER
    return dataclasses.replace(config, data=dataclasses.replace(config.data, tokenizer=str(path)))


def with_workdir_tokenizer(config: Config, workdir: str) -> Config:
    """The config, with the tokenizer that an earlier run keeps in its workdir, if it keeps one.

    The config may name it as it was when the run began, as the run's own config does, or as one that is yet to be
    trained. Raises InputError if it names another tokenizer, or if the workdir cannot be looked into.
    """
    name = config.data.tokenizer
    path = files.open_path(workdir)
    kept = path / layout.TOKENIZER
    if name == "bytes":
        return config
    try:
        if not kept.exists():
            return config
        sha256 = hashlib.sha256(kept.read_bytes()).hexdigest()
    except Exception as error:  # the packages of remote stores have no common class
        raise InputError(f"--workdir={workdir}: cannot be read ({error})\n  fix   correct it, or log in") from error
    is_named = trained_size(name) is None and (files.is_remote(name) or os.path.exists(files.expand_user(name)))
    if is_named and name != _tokenizer_of_run(workdir):
        other = hashlib.sha256(tokenizer_path(name).read_bytes()).hexdigest()
        if other != sha256:
            raise InputError(
                f"data.tokenizer={name} is not the tokenizer of the run in {workdir}: its sha256 is {other[:12]}..., "
                f"and that of {kept} is {sha256[:12]}...\n"
                "  fix   leave data.tokenizer out, which takes the run's, or use another --workdir"
            )
        return config
    return with_kept_tokenizer(config, path)


def _tokenizer_of_run(workdir: str) -> str | None:
    """data.tokenizer in the config.yaml of a workdir; None where there is none."""
    if not (path := layout.find_earlier(workdir, layout.CONFIG)):
        return None
    try:
        described = core_yaml.parse(read_text(files.open_path(path)), path)
    except InputError:  # a run writes it anew
        return None
    data = described.get("data") if isinstance(described, dict) else None
    return data.get("tokenizer") if isinstance(data, dict) else None


def with_trained_tokenizer(config: Config, progress: Progress | None = None) -> Config:
    """The config, with a tokenizer that is yet to be trained replaced by that of `tokenizer_of_source`."""
    size = trained_size(config.data.tokenizer)
    if size is None:
        return config
    path = tokenizer_of_source(sources.open_source(config.data, progress), size, progress)
    return dataclasses.replace(config, data=dataclasses.replace(config.data, tokenizer=str(path)))


def tokenizer_of_source(
    source: DocumentSource, size: int, progress: Progress | None = None, masked: bool = False
) -> Path:
    """The file of a tokenizer of at most `size` tokens that is trained on a source, now or by an earlier run.

    masked: one of the tokens is a mask. One of several processes trains the tokenizer, and the others wait for it. The
    same source gives the same tokenizer. Raises InputError if the source cannot be read or the file cannot be written.
    """
    special = (END_OF_TEXT, MASK) if masked else (END_OF_TEXT,)
    facts = f"{source.fingerprint} {size} {tokenizers.__version__}" + " masked" * masked
    key = hashlib.sha256(facts.encode()).hexdigest()[:24]
    path = cache_folder("tokenizers") / key / FILE
    try:
        if path.exists() and not files.damage(path.parent, (FILE,)):
            return path
        path = cache_entry(path.parent) / FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.lock(path.with_suffix(".lock")):
            if not path.exists() or files.damage(path.parent, (FILE,)):
                path.unlink(missing_ok=True)
                train_tokenizer(_sample(source, progress), size, path, special)
                files.seal(path.parent, (FILE,))
    except OSError as error:
        raise unwritable(path.parent, error.strerror) from error
    return path


def _sample(source: DocumentSource, progress: Progress | None) -> Iterator[bytes]:
    """The documents to train a tokenizer on: of a large source every second, every third, ..."""
    every = -(-source.size_bytes // MOST_BYTES)
    return itertools.islice(source.walk(source.parts, "training the tokenizer", progress), every - 1, None, every)


def train_tokenizer(
    documents: Iterable[bytes], vocab_size: int, path: str | Path, special: Sequence[str] = (END_OF_TEXT,)
) -> Tokenizer:
    """A byte-level BPE tokenizer of at most `vocab_size` tokens, trained on the documents and saved as `path`.

    special: its special tokens, an end token among them. A small source may give fewer tokens. Raises InputError if
    `path` exists, if `vocab_size` is too small for 256 bytes and the special tokens, or if a document is tokens.
    """
    path = files.expand_user(path)
    if path.exists():
        raise InputError(f"{path}: exists already\n  fix   remove it, or choose another name")
    least = 256 + len(special)
    if vocab_size < least:
        names = " and ".join(special)
        raise InputError(
            f"a vocabulary of {vocab_size} is too small for a byte-level tokenizer (256 bytes and {names})\n"
            f"  fix   set model.vocab to {least} or more"
        )
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(map(_decode_text, documents), trainer)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.replace(path, bpe.to_str())
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({files.reason(error)})\n  fix   choose another name") from error
    return load_tokenizer(str(path))


def _decode_text(document: bytes) -> str:
    if isinstance(document, TokenIds):
        raise InputError(
            f"{document.place}: tokens, on which no tokenizer is trained\n"
            "  fix   set data.tokenizer to the one that they were made with"
        )
    return document.decode("utf-8", "replace")
