"""Text from tokens that come one by one: only what no later token changes, and nothing from a stop string on."""

import itertools
from collections.abc import Sequence

import numpy as np

from gspmd_lm.data.tokenizer import Tokenizer
from gspmd_lm.errors import InputError

_CUT = "\ufffd"  # the replacement of bytes that are not a character, or not yet
_CONTEXT = 6  # tokens before the new ones that decide how the first of these is spelled (a space before it, or none)
_LONGEST = 4 * _CONTEXT  # tokens decoded at a time where bytes that are no characters follow each other without end


class Detokenizer:
    """The text of a growing list of tokens, chunk by chunk.

    All chunks together are the text of all tokens less that of the prompt. A decoder may still change two things at the
    end of a text: a character of which bytes are missing, and a run of byte tokens ("<0xE6>"). All bytes of such a run
    are U+FFFD if one of them belongs to no character. So both are held back until another token ends them.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] | np.ndarray, special: bool = False):
        """special: whether special tokens are a part of the text."""
        self._tokenizer, self._special = tokenizer, special
        self._byte_of = tokenizer.joined_bytes
        self._run = b""  # the bytes of the tokens that came last, if they are byte tokens
        # Only the last tokens are decoded. Of their text, `_emitted` was emitted already, or belongs to the prompt.
        self._ids = [i for i in map(int, prompt) if tokenizer.is_text(i, special)]
        self._keep_context()
        self._emitted = self._text()

    def add(self, token: int) -> str:
        """The text that is certain with this token, and was not before."""
        if not self._tokenizer.is_text(token, self._special):
            return ""
        self._ids.append(token)
        if token in self._byte_of:
            self._run += bytes([self._byte_of[token]])
            return ""
        self._run = b""
        text = self._text()
        certain = text.removesuffix(_CUT)  # bytes before the last character's are what they are
        chunk = self._after(certain)
        if chunk:
            self._emitted = certain
        if certain == text or len(self._ids) > _LONGEST:
            self._keep_context()
            self._emitted = self._text().removesuffix(_CUT)
        return chunk

    @property
    def pending_text(self) -> str:
        """The characters that follow unless a later token changes them; "" while one of them is not whole."""
        try:
            return self._run.decode()
        except UnicodeDecodeError:
            return ""

    def rest(self) -> str:
        """The rest of the text when no token follows: U+FFFD for a character that never became whole."""
        return self._after(self._text())

    def _text(self) -> str:
        return self._tokenizer.decode(self._ids, special=self._special).decode("utf-8", "replace")

    def _after(self, text: str) -> str:
        """The rest of `text` after what was emitted. The prompt may end within a character that is now whole."""
        alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(self._emitted, text, strict=False))
        return text[sum(1 for _ in alike) :]

    def _keep_context(self) -> None:
        """Forgets all tokens but the last ones, which do not begin within a run of byte tokens."""
        first = max(len(self._ids) - _CONTEXT, 0)
        while first and self._ids[first] in self._byte_of:
            first -= 1
        self._ids = self._ids[first:]


class Stops:
    """Text up to the first of some strings, which may be spread over chunks. They are not part of it."""

    def __init__(self, strings: Sequence[str]):
        """Raises InputError for an empty string, with which every text begins."""
        if "" in strings:
            raise InputError("an empty stop string would stop every text at once\n  fix   drop it")
        self._strings = strings
        self._held = ""

    def add(self, chunk: str, following: str = "") -> tuple[str, bool]:
        """The text that is certain now, and whether it ends here. Text that may begin a stop string is held back.

        following: what comes next, unless a later token changes it. A stop string ends the text in it, too.
        """
        self._held += chunk
        text = self._held + following
        starts = [at for at in (text.find(string) for string in self._strings) if at >= 0]
        if starts:
            return text[: min(starts)], True
        held = max((_overlap(self._held, string) for string in self._strings), default=0)
        certain = self._held[: len(self._held) - held]
        self._held = self._held[len(certain) :]
        return certain, False

    def rest(self) -> str:
        """The text that was held back and did not become a stop string."""
        return self._held


def special_stops(strings: Sequence[str], tokenizer: Tokenizer, special: bool = False) -> frozenset[int]:
    """The ids of the special tokens among some stop strings. They end a text whether or not it shows them.

    Raises InputError for a string that holds a special token beside other text, unless the text shows special tokens.
    """
    for string in () if special else strings:
        held = next((name for name in tokenizer.special if name in string and name != string), None)
        if held is not None and string not in tokenizer.special:
            raise InputError(
                f"stop {string!r} holds the special token {held}, which the text leaves out\n"
                f"  fix   stop at {held!r} alone, or show special tokens (--special, or special=True)"
            )
    return frozenset(tokenizer.special[string] for string in strings if string in tokenizer.special)


def _overlap(text: str, string: str) -> int:
    """The length of the longest proper prefix of `string` that `text` ends with."""
    most = min(len(text), len(string) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(string[:n])), 0)
