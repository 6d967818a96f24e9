"""The special tokens that the files beside a tokenizer.json name, read as transformers reads them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from gspmd_lm.config.paths import read_text
from gspmd_lm.errors import InputError
from gspmd_lm.files import json_object

SETTINGS, SPECIAL_TOKENS_MAP = "tokenizer_config.json", "special_tokens_map.json"
GENERATION, MODEL = "generation_config.json", "config.json"
# The files beside a tokenizer.json that are read here.
SMALL_FILES = (
    SETTINGS,
    SPECIAL_TOKENS_MAP,
    GENERATION,
    MODEL,
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
)
# The files of a tokenizer, of chat templates, and of the tokens that end an answer.
FILES = (
    "tokenizer.json",
    *(name for name in SMALL_FILES if name != MODEL),
    "chat_template.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "tekken.json",
    "added_tokens.json",
)
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def named_tokens(tokenizer: Path) -> dict[str, str]:
    """The texts of the named tokens beside a tokenizer.json, such as eos_token; those without a text are left out.

    special_tokens_map.json counts for more than tokenizer_config.json, but not at all if this has added_tokens_decoder.
    """
    settings = read_object(tokenizer.with_name(SETTINGS))
    if "added_tokens_decoder" not in settings:
        settings |= read_object(tokenizer.with_name(SPECIAL_TOKENS_MAP))
    tokens = {name: token for name, token in settings.items() if name.endswith("_token")}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in tokens.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str) and text}


def declared_tokens(tokenizer: Path) -> dict[int, Mapping[str, Any]]:
    """The tokens that added_tokens_decoder of tokenizer_config.json declares, by id in ascending order.

    Raises InputError if an entry is no token.
    """
    place = tokenizer.with_name(SETTINGS)
    entries = read_object(place).get("added_tokens_decoder")
    entries = entries if isinstance(entries, Mapping) else {}
    for number, entry in entries.items():
        if not number.isdecimal() or not isinstance(entry, Mapping) or not isinstance(entry.get("content"), str):
            raise InputError(f"{place}: added_tokens_decoder: {number} is no token\n  fix   correct or remove it")
    return {int(number): entries[number] for number in sorted(entries, key=int)}


def add_declared(tokenizer: tokenizers.Tokenizer, declared: Mapping[int, Mapping[str, Any]], path: Path) -> None:
    """Adds the `declared_tokens` of the tokenizer.json `path`, with their flags.

    Raises InputError if one of them has another id there.
    """
    for number, entry in declared.items():
        text = entry["content"]
        flags = {flag: entry[flag] for flag in _FLAGS if isinstance(entry.get(flag), bool)}
        tokenizer.add_tokens([tokenizers.AddedToken(text, **flags)])
        if (found := tokenizer.token_to_id(text)) != number:
            raise InputError(
                f"{path.with_name(SETTINGS)}: added_tokens_decoder: {text} is token {number}, and {path.name} has it "
                f"as {found}\n  fix   take both files from the same model"
            )


def mark_special(tokenizer: tokenizers.Tokenizer, texts: Sequence[str]) -> None:
    """Makes special tokens of the tokens of these texts. A text that is no token is passed over."""
    added = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    for text in texts:
        if tokenizer.token_to_id(text) is not None and not (text in added and added[text].special):
            token = added.get(text) or tokenizers.AddedToken(text, normalized=False)
            token.special = True
            tokenizer.add_special_tokens([token])


def end_ids(tokenizer: Path) -> tuple[tuple[int, ...], Path | None]:
    """The ids that end a text for the model beside a tokenizer.json, and the file that says so; () and None for none.

    They are those of generation_config.json. If there is no such file, they are those of config.json, or of the text
    model in it. Raises InputError for a value that is no id.
    """
    path = tokenizer.with_name(GENERATION)
    if path.is_file():
        named = read_object(path).get("eos_token_id")
    else:
        path = tokenizer.with_name(MODEL)
        settings = read_object(path)
        inner = next((part for key in ("decoder", "generator", "text_config") if (part := settings.get(key))), {})
        named = settings.get("eos_token_id")
        named = inner.get("eos_token_id") if named is None and isinstance(inner, Mapping) else named
    ids = named if isinstance(named, list) else [] if named is None else [named]
    if not all(type(i) is int and i >= 0 for i in ids):
        raise InputError(f"{path}: eos_token_id={named} are not ids\n  fix   correct or remove it")
    return tuple(ids), path if ids else None


def files_of(tokenizer: Path) -> dict[str, bytes]:
    """The files beside a tokenizer.json that it needs, and its own: name -> content.

    If the ends of the model stand in config.json alone, generation_config.json has them.
    """
    folder = tokenizer.parent
    found = {path for pattern in FILES for path in folder.glob(pattern) if path.is_file()}
    contents = {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(found)}
    ends, place = end_ids(tokenizer)
    if ends and place and place.name == MODEL:
        contents[GENERATION] = json.dumps({"eos_token_id": ends[0] if len(ends) == 1 else ends}).encode()
    return contents | {"tokenizer.json": tokenizer.read_bytes()}


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object of a file beside a tokenizer; empty if there is no file. Raises InputError for another value."""
    return json_object(read_text(path), path, "correct or remove it") if path.is_file() else {}
