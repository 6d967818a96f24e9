"""Text from tokens that come one by one: whole characters only, and nothing from a stop string on."""

from collections.abc import Sequence

from gspmd_lm.data.tokenizer import Tokenizer
from gspmd_lm.errors import InputError

_CUT = "\ufffd"  # the replacement of bytes that are not a character, or not yet
_LONGEST_CUT = 3  # bytes of a character that lacks its last one
_CONTEXT = 6  # tokens of the prompt that decide how the first new one is spelled (a space before it, or none)


class Detokenizer:
    """The text of a growing list of tokens, chunk by chunk. A chunk never ends within a character."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]):
        self._tokenizer = tokenizer
        # Only the tokens from `_first` on are decoded again; of their text, `_emitted` characters were emitted already.
        self._ids = [int(i) for i in prompt[-_CONTEXT:]]
        self._first, self._whole = 0, len(self._ids)
        self._emitted = len(self._text(self._ids))

    def add(self, token: int) -> str:
        """The text that the token adds; "" while a character is incomplete."""
        self._ids.append(token)
        text = self._text(self._ids[self._first :])
        whole = text.rstrip(_CUT)
        if len(text) - len(whole) > _LONGEST_CUT:  # these bytes will never be a character
            whole = text[:-_LONGEST_CUT]
        chunk = whole[self._emitted :]
        self._emitted = max(self._emitted, len(whole))
        if whole == text and chunk:
            self._first, self._whole = self._whole, len(self._ids)
            self._emitted = len(self._text(self._ids[self._first :]))
        return chunk

    def rest(self) -> str:
        """The rest of the text when no token follows: U+FFFD for a character that never became whole."""
        return self._text(self._ids[self._first :])[self._emitted :]

    def _text(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, special=False).decode("utf-8", "replace")


class Stops:
    """Text up to the first of some strings, which may be spread over chunks. They are not part of it."""

    def __init__(self, strings: Sequence[str]):
        """Raises InputError for an empty string, with which every text begins."""
        if "" in strings:
            raise InputError("an empty stop string would stop every text at once\n  fix   drop it")
        self._strings = strings
        self._held = ""

    def add(self, chunk: str) -> tuple[str, bool]:
        """The text that is certain now, and whether it ends here. Text that may begin a stop string is held back."""
        self._held += chunk
        starts = [at for at in (self._held.find(string) for string in self._strings) if at >= 0]
        if starts:
            return self._held[: min(starts)], True
        held = max((_overlap(self._held, string) for string in self._strings), default=0)
        certain = self._held[: len(self._held) - held]
        self._held = self._held[len(certain) :]
        return certain, False

    def rest(self) -> str:
        """The text that was held back and did not become a stop string."""
        return self._held


def _overlap(text: str, string: str) -> int:
    """The length of the longest proper prefix of `string` that `text` ends with."""
    most = min(len(text), len(string) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(string[:n])), 0)
