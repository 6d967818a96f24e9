"""Vocabularies of tiktoken, as the files of a tokenizer.json.

A file has the bytes of a token and its rank on each line. How texts are split into words, and the special tokens, are
known by its name.
"""

import base64
import binascii
import functools
import json
from pathlib import Path
from typing import NamedTuple

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from gspmd_lm import files
from gspmd_lm.data import remote, special_tokens
from gspmd_lm.data.encodings import byte_names
from gspmd_lm.errors import InputError

ENDING = ".tiktoken"
_END = "<|endoftext|>"


class _Encoding(NamedTuple):
    """What a file of tiktoken does not say (tiktoken_ext/openai_public.py)."""

    words: str  # the regular expression of the pieces of a text in which tokens are found
    special: dict[str, int]


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SUFFIX, _UPPER, _LOWER = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
    r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]",
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]",
)
_CL100K = _SUFFIX + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIX}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIX}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_FILL = {"<|fim_prefix|>": 100258, "<|fim_middle|>": 100259, "<|fim_suffix|>": 100260}
ENCODINGS = {
    "gpt2": _Encoding(_GPT2, {_END: 50256}),
    "r50k_base": _Encoding(_GPT2, {_END: 50256}),
    "p50k_base": _Encoding(_GPT2, {_END: 50256}),
    "cl100k_base": _Encoding(_CL100K, {_END: 100257, **_FILL, "<|endofprompt|>": 100276}),
    "o200k_base": _Encoding(_O200K, {_END: 199999, "<|endofprompt|>": 200018}),
}


def convert(name: str) -> dict[str, bytes]:
    """Converts a vocabulary file of tiktoken (a path or an address) to the files of a tokenizer.json: name -> content.

    Raises InputError if it cannot be read, or if its name is not that of a known encoding.
    """
    stem = Path(name).name.removesuffix(ENDING)
    known = ENCODINGS.get(stem)
    if not known:
        raise InputError(
            f"data.tokenizer={name}: how {stem} splits texts into words does not stand in the file\n"
            f"  fix   name the file after its encoding ({', '.join(ENCODINGS)}), or give a tokenizer.json,\n"
            "        which the package transformers writes of a vocabulary of tiktoken"
        )
    if "://" in name:
        content = remote.beside(name, [Path(name).name], "data.tokenizer").get(Path(name).name)
    else:
        try:
            content = files.expand_user(name).read_bytes()
        except FileNotFoundError:
            content = None
        except (OSError, ValueError) as error:
            raise InputError(f"data.tokenizer: {name}: cannot be read ({error})\n  fix   correct the path") from error
    if content is None:
        raise InputError(f"data.tokenizer: {name}: no such file\n  fix   correct the path")
    return _as_files(content, name, stem)


def _read_ranks(content: bytes, name: str) -> dict[bytes, int]:
    """The rank of the bytes of each token."""
    ranks = {}
    for number, line in enumerate(content.splitlines(), 1):
        token, _, rank = line.partition(b" ")
        try:
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (binascii.Error, ValueError) as error:
            raise InputError(
                f"{name}:{number}: not a token in base64 and its rank ({error})\n  fix   bring the file again"
            ) from error
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise InputError(
            f"{name}: has no token for the byte {missing[0]}, so it is not whole\n  fix   bring the file again"
        )
    return ranks


@functools.lru_cache(maxsize=1)
def _as_files(content: bytes, name: str, stem: str) -> dict[str, bytes]:
    """A byte-level BPE tokenizer that merges the two parts of the lowest rank first."""
    ranks, known, names = _read_ranks(content, name), ENCODINGS[stem], byte_names()

    def text(token: bytes) -> str:
        return "".join(names[byte] for byte in token)

    vocab = {text(token): rank for token, rank in ranks.items()}
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        parts = [(token[:at], token[at:]) for at in range(1, len(token))]
        merges += [(text(left), text(right)) for left, right in parts if left in ranks and right in ranks]
    made = tokenizers.Tokenizer(models.BPE(vocab | known.special, merges, ignore_merges=True))
    words = pre_tokenizers.Split(tokenizers.Regex(known.words), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([*known.special])
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": _END}
    return {"tokenizer.json": made.to_str().encode(), special_tokens.SETTINGS: json.dumps(settings).encode()}
