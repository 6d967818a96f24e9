"""Tokens that were made of a source once: a folder of shards, or several, and the manifest that says what is in it."""

import dataclasses
import hashlib
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gspmd_lm import files
from gspmd_lm.config import Data
from gspmd_lm.data import corpus, formats
from gspmd_lm.data.chat import Chat
from gspmd_lm.data.folders import Folder
from gspmd_lm.data.labelled import Labelled
from gspmd_lm.data.packing import InMemory
from gspmd_lm.data.pairs import Pairs
from gspmd_lm.data.shards import Shard, Shards, Stream
from gspmd_lm.data.sources import file_version
from gspmd_lm.data.tokenizer import Tokenizer
from gspmd_lm.errors import InputError

FORMAT = 5  # to be raised when the same source and tokenizer give other files
MANIFEST = "tokens.json"
SOURCE = "source.json"  # the files of this machine of which the tokens were made, and what tells of changes
HELD_OUT = "held_out"
COUNTS = ("replaced_bytes", "left_out", "spelled_ends", "spelled_texts")
Encoder = Tokenizer | Chat | Labelled | Pairs  # what makes tokens of documents; the last three of records


@dataclasses.dataclass(frozen=True)
class TokenSplit:
    """The tokens of one side of a source: of records, or documents that end with the tokenizer's end token."""

    name: str  # of what it was made, for the user
    weight: float | None  # rows are drawn from splits in proportion to it
    # Conversations have the bits of data/packing.py, labelled texts those of data/labelled.py.
    stream: Stream
    # How many tokens have no target after them: the ends of documents, all tokens of conversations but those before the
    # assistant's, all of labelled texts, and those of the sources of pairs.
    ends: int = 0
    cut: int = 0  # labelled texts and pairs of which something was cut


@dataclasses.dataclass(frozen=True)
class Tokens:
    """What a run reads: the splits to train on, and the one to evaluate on, which may be empty."""

    train: tuple[TokenSplit, ...]
    held_out: TokenSplit
    description: str  # of what they were made, for the user
    notes: str  # lines about files that were skipped or are odd
    fingerprint: str  # equal only for equal tokens
    replaced_bytes: int = 0  # bytes or characters that no token stands for
    left_out: int = 0  # documents that are not used for training because they are in the files for evaluation
    spelled_ends: int = 0  # how often a text file spells the token that ends a text
    spelled_texts: int = 0  # how many documents spell it where it ends none
    classes: tuple[str, ...] = ()  # of labelled texts
    has_own_held_out: bool = False  # whether evaluation has files of its own, not a share of the documents


def shard_seed(plan: str, name: str) -> int:
    """What the checksums of a shard begin with: another number for each shard of each folder."""
    return zlib.crc32(f"{plan} {name}".encode())


def read_manifest(folder: Folder) -> dict[str, Any] | None:
    """What a folder of tokens says of itself; None for another folder.

    Raises InputError if it is damaged or of another version.
    """
    content = folder.read(MANIFEST)
    if content is None:
        return None
    place = folder.path(MANIFEST)
    manifest = files.checked_value(content, place)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        version = manifest.get("format") if isinstance(manifest, dict) else None
        raise InputError(
            f"{place}: tokens of the format {version}, and this version reads the format {FORMAT}\n"
            "  fix   make them anew with tokenize, or read them with the version that made them"
        )
    return manifest


def open_folder(folder: Folder, manifest: Mapping[str, Any]) -> Tokens:
    """The tokens of a folder, of which nothing but the names and sizes of its shards is looked at.

    Raises InputError if a shard is missing or has another size.
    """
    dtype, sizes = np.dtype(manifest["dtype"]), folder.sizes()
    splits = []
    for split in manifest["splits"]:
        shards = []
        for facts in split["shards"]:
            name = facts["name"]
            shard = Shard(folder, name, facts["tokens"], dtype, shard_seed(manifest["plan"], name), sizes_name(name))
            for each, wanted in ((name, shard.size_bytes), (shard.sizes_name, facts["sizes_bytes"])):
                if sizes.get(each) != wanted:
                    is_there = f"has {sizes[each]:,} bytes in place of {wanted:,}" if each in sizes else "is missing"
                    raise InputError(
                        f"{folder.path(each)}: this shard of tokens {is_there}\n"
                        "  fix   put it back, or make the tokens anew with tokenize"
                    )
            shards.append(shard)
        totals = {key: sum(facts[key] for facts in split["shards"]) for key in ("ends", "cut")}
        splits.append(TokenSplit(split["of"], split["weight"], Shards(shards, dtype), **totals))
    return Tokens(
        train=tuple(splits[:-1]),
        held_out=splits[-1],
        description=manifest["description"],
        notes=manifest["notes"],
        fingerprint=_content_sum(manifest),
        classes=tuple(manifest["classes"]),
        has_own_held_out=manifest["held_out"] is None,
        **{key: manifest[key] for key in COUNTS},
    )


def _content_sum(manifest: Mapping[str, Any]) -> str:
    """A sha256 that is equal for equal tokens in equal shards, wherever they lie and of whatever they were made."""
    facts = [[(shard["tokens"], shard["tokens_sha256"]) for shard in split["shards"]] for split in manifest["splits"]]
    return hashlib.sha256(json.dumps([manifest["dtype"], manifest["classes"], facts]).encode()).hexdigest()[:24]


def sizes_name(shard: str) -> str:
    """The name of the file with the sizes of the documents of a shard."""
    return f"{shard.removesuffix('.npy')}.sizes.npy"


def damage(folder: Folder, manifest: Mapping[str, Any]) -> str:
    """The first difference between a folder on this machine and its manifest, all bytes compared; '' for none."""
    for facts in (facts for split in manifest["splits"] for facts in split["shards"]):
        for name, sha256 in ((facts["name"], facts["sha256"]), (sizes_name(facts["name"]), facts["sizes_sha256"])):
            try:
                found = files.sum_of(Path(folder.address, name))[1]
            except OSError as error:
                return f"{name}: {files.reason(error)}"
            if found != sha256:
                return f"{name}: its sha256 has changed"
    return ""


def find_folders(data: Data) -> list[tuple[Folder, dict[str, Any]]]:
    """The folders of tokens that data.source names, with their manifests; [] if it names texts.

    Raises InputError if it names both, or if it names texts and data.held_out names such folders.
    """
    found = [_find(one.path, "data.source") for one in data.sources]
    folders = [one for one in found if one]
    for one in data.held_out_sources:
        if not folders and _find(one.path, "data.held_out"):
            raise InputError(
                f"data.held_out: {one.path} has tokens, and data.source has none\n"
                "  fix   name texts for evaluation, or make tokens of data.source, too"
            )
    if folders and len(folders) < len(found):
        other = next(source.path for source, one in zip(data.sources, found, strict=True) if not one)
        corpus.files([other], "data.source", corpus.FileNotes(), uncopied={})  # says it if there is nothing at all
        raise InputError(
            f"data.source: {folders[0][0].address} has tokens, and {other} does not: they are not read together\n"
            f"  fix   make tokens of the other, too: tokenize --set data.source={other} --out=FOLDER"
        )
    return folders


def _find(path: str, place: str) -> tuple[Folder, dict[str, Any]] | None:
    """The folder of tokens at a path or an address, and its manifest; None if there is none."""
    if not files.is_remote(path):
        path = str(files.expand_user(path))
        if not os.path.isfile(os.path.join(path, MANIFEST)):  # a name that is too long is none, and no error
            return None
    elif any(character in path for character in "*?[") or formats.format_of(Path(path)):
        return None
    folder = Folder(path, place)
    manifest = read_manifest(folder)
    return (folder, manifest) if manifest else None


def open_tokens(data: Data, folders: Sequence[tuple[Folder, Mapping[str, Any]]], encoder: Encoder) -> Tokens:
    """The tokens of several folders, read as `data` says.

    Raises InputError if they were made with another tokenizer or for other settings, or if a shard is missing.
    """
    opened = []
    for folder, manifest in folders:
        _check_encoder(folder, manifest, encoder, data)
        opened.append(open_folder(folder, manifest))
    train = tuple(split for one in opened for split in one.train)
    if data.sources[0].weight:
        named = zip(data.sources, folders, opened, strict=True)
        train = tuple(_join(one.train, folder.address, source.weight) for source, (folder, _), one in named)
    elif len(opened) > 1:
        train = (_join(train, ", ".join(folder.address for folder, _ in folders), None),)
    first = opened[0]
    if any(one.classes != first.classes for one in opened):
        raise InputError(
            f"data.source: {folders[0][0].address} and the others have other classes\n"
            "  fix   make the tokens of all sources together"
        )
    named = [(folder.address, one) for (folder, _), one in zip(folders, opened, strict=True)]
    notes = [one.notes for one in opened] + [_say_changes(folder) for folder, _ in folders]
    if data.held_out_sources or not data.held_out_share:
        why = "names others" if data.held_out_sources else "is 0"
        notes += [
            f"not read, since data.held_out {why}: {count:,} tokens that {address} keeps for evaluation"
            for address, one in named
            if (count := len(one.held_out.stream))
        ]
    return Tokens(
        train=train,
        held_out=_held_out(data, folders, opened, encoder),
        description="; ".join(f"tokens in {address} of {one.description}" for address, one in named),
        notes="\n".join(filter(None, notes)),
        fingerprint="-".join(one.fingerprint for one in opened),
        classes=first.classes,
        has_own_held_out=bool(data.held_out_sources) or first.has_own_held_out,
        **{key: sum(getattr(one, key) for one in opened) for key in COUNTS},
    )


def _say_changes(folder: Folder) -> str:
    """A line about files that are not what they were when the tokens of a folder were made; '' if none is known."""
    content = folder.read(SOURCE)
    if content is None:
        return ""
    found = [(Path(name), version) for name, version in files.checked_value(content, folder.path(SOURCE)).items()]
    # Where another user made them, os.path.isfile says False of a folder that may not be entered. Path.is_file raises.
    changed = [path for path, version in found if os.path.isfile(path) and file_version(path) != version]
    if not changed:
        return ""
    return f"warning: changed since the tokens in {folder.address} were made: {corpus.list_names(changed)}"


def _join(splits: Sequence[TokenSplit], name: str, weight: float | None) -> TokenSplit:
    """Several splits as one."""
    streams = [split.stream for split in splits]
    shards = [shard for stream in streams if isinstance(stream, Shards) for shard in stream.shards]
    joined = Shards(shards, streams[0].dtype)
    return TokenSplit(name, weight, joined, sum(one.ends for one in splits), sum(one.cut for one in splits))


def _held_out(
    data: Data, folders: Sequence[tuple[Folder, Mapping[str, Any]]], opened: Sequence[Tokens], encoder: Encoder
) -> TokenSplit:
    """The split to evaluate on: that which the folders keep apart, or the folders that data.held_out names."""
    if data.held_out_sources:
        apart = []
        for source in data.held_out_sources:
            found = _find(source.path, "data.held_out")
            if not found:
                raise InputError(
                    f"data.held_out: {source.path} has no tokens, as data.source has\n"
                    f"  fix   tokenize --set data.source={source.path} --set data.held_out=0 --out=FOLDER"
                )
            _check_encoder(*found, encoder, data)
            opened_apart = open_folder(*found)
            apart += opened_apart.train
            if found[1]["held_out"]:  # a share of the same texts
                apart.append(opened_apart.held_out)
        return _join(apart, ", ".join(one.path for one in data.held_out_sources), None)
    if not data.held_out_share:
        return TokenSplit("", None, InMemory(np.empty(0, opened[0].train[0].stream.dtype)))
    for folder, manifest in folders:
        if manifest["held_out"] not in (None, data.held_out_share):
            raise InputError(
                f"data.held_out={data.held_out_share:g}: {folder.address} was made with data.held_out="
                f"{manifest['held_out']:g}\n"
                f"  fix   --set data.held_out={manifest['held_out']:g}, or make the tokens anew"
            )
    return _join([one.held_out for one in opened], ", ".join(folder.address for folder, _ in folders), None)


def _check_encoder(folder: Folder, manifest: Mapping[str, Any], encoder: Encoder, data: Data) -> None:
    """Raises InputError if the tokens of a folder are not those that the encoder makes."""
    if manifest["encoder"] == encoder.fingerprint:
        return
    settings = {name: (was, now) for name, now in describe_settings(data).items() if (was := manifest[name]) != now}
    if settings:
        name, (was, now) = next(iter(settings.items()))
        raise InputError(
            f"data.{name}={now}: {folder.address} was made with data.{name}={was}\n"
            f"  fix   --set data.{name}={was}, or make the tokens anew with tokenize"
        )
    kept = kept_tokenizer(folder, manifest)
    raise InputError(
        f"data.tokenizer={data.tokenizer}: {folder.address} was made with another tokenizer, {manifest['tokenizer']}\n"
        f"  fix   --set data.tokenizer={kept} --set model.vocab=0"
    )


def kept_tokenizer(folder: Folder, manifest: Mapping[str, Any]) -> str:
    """What data.tokenizer has to name for the tokens of a folder, which keeps a copy of its tokenizer."""
    return manifest["tokenizer"] if manifest["tokenizer"] == "bytes" else folder.address


def describe_settings(data: Data) -> dict[str, Any]:
    """The settings that decide what the tokens of records are, as JSON has them."""
    of_rows = bool(data.fields)  # whose rows are cut when they are tokenized
    return {
        "messages_field": data.sources[0].messages_field,
        "fields": [*data.fields],
        "label_kind": data.label_kind,
        "seq": data.seq if of_rows else 0,
        "source_seq": data.source_seq if of_rows else 0,
    }
