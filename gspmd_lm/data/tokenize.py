"""Makes a folder of tokens from what a config names, for runs that read it in place of the texts."""

from pathlib import Path

from gspmd_lm import files
from gspmd_lm.config import Config
from gspmd_lm.data import encoders, making, special_tokens, token_files, tokens
from gspmd_lm.data.folders import Folder
from gspmd_lm.data.sources import Progress
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
    folder = Folder(out, "--out")
    name = data.tokenizer if data.tokenizer == "bytes" else Path(data.tokenizer).name
    settings = {"tokenizer": name, **tokens.describe_settings(data)}
    making.make_tokens(folder, source, encoder, data.held_out_share, progress, settings)
    if data.tokenizer != "bytes":
        for name, content in special_tokens.files_of(made or tokenizer_path(data.tokenizer)).items():
            folder.write(name, content)
    here = [file for part in source.every for file in part.files if not file.far]
    versions = {str(file.path.absolute()): file.current_version() for file in here}
    folder.write(tokens.SOURCE, files.with_sum(versions).encode())
    manifest = tokens.read_manifest(folder)
    assert manifest
    opened = tokens.open_folder(folder, manifest)
    counts = [len(split.stream) for split in (*opened.train, opened.held_out)]
    shards = sum(len(split["shards"]) for split in manifest["splits"])
    named = "" if data.tokenizer == "bytes" else f" --set data.tokenizer={out} --set model.vocab=0"
    return [
        f"{out}: {sum(counts):,} tokens of {manifest['documents']:,} documents in {plural(shards, 'shard')}, "
        f"{counts[-1]:,} of them for evaluation ({opened.description})",
        *opened.notes.splitlines(),
        f"train on them: --set data.source={out}{named}",
    ]
