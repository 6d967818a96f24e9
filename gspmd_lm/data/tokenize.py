"""Makes a folder of tokens from what a config names, for runs that read it in place of the texts."""

import json
import shlex
from pathlib import Path
from typing import Any

from gspmd_lm import files
from gspmd_lm.config import Config, Data
from gspmd_lm.data import encoders, making, special_tokens, token_files, tokens
from gspmd_lm.data.folders import Folder
from gspmd_lm.data.sources import Progress, file_version
from gspmd_lm.data.tokenizer import tokenizer_path
from gspmd_lm.errors import InputError
from gspmd_lm.units import plural


def tokenize(config: Config, out: str, progress: Progress | None = None) -> list[str]:
    """Makes the tokens of `data.source` in the folder or at the address `out`, and returns what to say of them.

    Several processes may do so at once. The folder has the files of the tokenizer, too. Raises InputError if the source
    cannot be tokenized, or if the folder has the tokens of another one.
    """
    data, model = config.data, config.model
    if model.patches or model.frames or model.vision:
        raise InputError(
            "tokenize: a model of images or sounds reads files, of which no tokens are made\n"
            "  fix   name a config that reads texts"
        )
    if tokens.find_folders(data) or token_files.name_of_files(data):
        raise InputError(f"data.source={data.source}: has tokens already\n  fix   name the texts")
    if not files.is_remote(out):
        out = str(files.expand_user(out).absolute())
        files.check_folder("--out=", Path(out))
        for one in data.sources:
            texts = files.expand_user(one.path).absolute()
            if texts.is_dir() and Path(out).is_relative_to(texts):
                raise InputError(f"--out={out}: lies among the texts of {one.path}\n  fix   name a folder elsewhere")
    source, encoder, made = encoders.open_source(config, progress, hashed=False)
    here = [file.path.absolute() for part in source.every for file in part.files if not file.far]
    if not files.is_remote(out) and (beside := [path for path in here if path.parent == Path(out)]):
        raise InputError(f"--out={out}: has the texts of data.source: {beside[0]}\n  fix   name a folder elsewhere")
    folder = Folder(out, "--out")
    name = data.tokenizer if data.tokenizer == "bytes" else Path(data.tokenizer).name
    settings = {"tokenizer": name, **tokens.describe_settings(data)}
    making.make_tokens(folder, source, encoder, data.held_out_share, progress, settings)
    if data.tokenizer != "bytes":
        for name, content in special_tokens.files_of(made or tokenizer_path(data.tokenizer)).items():
            folder.write(name, content)
    versions = {str(path): file_version(path) for path in here}
    folder.write(tokens.SOURCE, files.with_sum(versions).encode())
    manifest = tokens.read_manifest(folder)
    assert manifest
    opened = tokens.open_folder(folder, manifest)
    counts = [len(split.stream) for split in (*opened.train, opened.held_out)]
    shards = sum(len(split["shards"]) for split in manifest["splits"])
    return [
        f"{out}: {sum(counts):,} tokens of {manifest['documents']:,} documents in {plural(shards, 'shard')}, "
        f"{counts[-1]:,} of them for evaluation ({opened.description})",
        *opened.notes.splitlines(),
        f"train on them: {_flags(data, out)}",
    ]


def _flags(data: Data, out: str) -> str:
    """The flags with which a run reads the tokens in `out`: those of settings that are not the default ones."""
    settings: dict[str, Any] = {"data.source": out}
    if data.tokenizer != "bytes":
        settings |= {"data.tokenizer": out, "model.vocab": 0}
    made = tokens.describe_settings(data) | {"label": data.label, "held_out": data.held_out_share}
    usual = tokens.describe_settings(Data()) | {"label": "", "held_out": Data().held_out_share}
    if data.held_out_sources:  # the folder has them, whatever share a run names
        del made["held_out"]
    settings |= {f"data.{name}": value for name, value in made.items() if value != usual[name]}
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in settings.items()}
    return " ".join(f"--set {shlex.quote(f'{key}={text}')}" for key, text in texts.items())
