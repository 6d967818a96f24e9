"""What the library `tokenizers` makes of texts: its encodings, an error that names the text, and what was dropped."""

import bisect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tokenizers import Encoding

from gspmd_lm.errors import InputError

_SHOWN = 30  # characters of a text in an error


def encode_texts(encode: Callable[[list[Any]], list[Encoding]], texts: Sequence[Any], place: str) -> list[Encoding]:
    """The encodings of texts, or of pairs of them, by a function such as `tokenizers.Tokenizer.encode_batch`.

    Raises an InputError that begins with `place` and shows the first text that cannot be encoded, because the
    vocabulary lacks a character of it and has no token for unknown ones.
    """
    try:
        return encode(list(texts))
    except Exception as error:  # the library raises nothing more precise
        wrong = next(text for text in texts if _error(encode, text))
        parts = wrong if isinstance(wrong, tuple) else (wrong,)
        part = next((part for part in parts if _error(encode, part)), parts[0])
        at = bisect.bisect_left(range(len(part)), True, key=lambda at: _error(encode, part[: at + 1]) is not None)
        raise InputError(
            f"{place}: cannot encode {part[at : at + 1]!r} in {part[max(at - _SHOWN, 0) : at + _SHOWN]!r} ({error})\n"
            "  fix   take another tokenizer, or one with an unknown token or with bytes, or leave the character out"
        ) from error


def count_dropped(text: str, encoding: Encoding) -> int:
    """How many characters of a text, but for white space, are in no token of its encoding, which has offsets."""
    is_in = np.array([one.isspace() for one in text], bool)
    for start, stop in encoding.offsets:  # within a word, they skip no character: those at its end are left over
        is_in[start:stop] = True
    return int(np.count_nonzero(~is_in))


def byte_names() -> list[str]:
    """GPT-2's names of the 256 bytes: printable ones stand for themselves, characters from 256 on for the others."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _error(encode: Callable[[list[Any]], list[Encoding]], text: Any) -> Exception | None:
    try:
        encode([text])
    except Exception as error:
        return error
    return None
