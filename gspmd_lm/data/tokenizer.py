"""Tokenizers, from bytes to token ids and back: plain bytes, or a Hugging Face tokenizer.json."""

import functools
import hashlib
import os
import re
import types
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import tokenizers

from gspmd_lm import files
from gspmd_lm.config.paths import cache_folder, download, unwritable
from gspmd_lm.data import formats, remote, special_tokens, tiktoken_files
from gspmd_lm.data.encodings import byte_names, count_dropped, encode_texts
from gspmd_lm.errors import InputError
from gspmd_lm.units import plural, whole_number

FILE = "tokenizer.json"
END_OF_TEXT = "<|endoftext|>"
# Tried in this order if no file beside the tokenizer.json names the end of a text. It is a guess, which is said.
_END_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<｜end▁of▁sentence｜>", "[EOS]", "[SEP]")
MASK = "<mask>"
_MASK_NAMES = ("[MASK]", MASK)  # likewise for mask_token
_NOT_UTF8 = re.compile("([\udc80-\udcff]+)")  # surrogateescape shows bytes that it cannot decode so
NO_CHARACTER = re.compile("[\ud800-\udfff]")  # such bytes, and halves of escaped characters


class Bytes:
    """The 256 bytes and one end token."""

    vocab_size = 257  # the largest id plus one
    end = 256  # the id that closes a document
    before: tuple[int, ...] = ()  # the ids that begin a document, and those between its text and `end`
    after: tuple[int, ...] = ()
    spelled_end = b""  # what stands for `end` in the text of a file; nothing does
    mask = 0  # the id in the place of a token that is to be guessed: a byte that texts do not have
    special_ids = (mask, end)  # ids that are never to be guessed
    fingerprint = "bytes"  # equal for two tokenizers only if they give equal ids
    special: Mapping[str, int] = types.MappingProxyType({})  # the tokens that have no text of their own: name -> id
    joined_bytes: Mapping[int, int] = types.MappingProxyType({})  # see HuggingFace
    replaced_bytes = 0  # how many bytes were replaced by U+FFFD or characters dropped: no token stands for them

    def encode(self, document: bytes) -> np.ndarray:
        """The int32 ids of the text of one document, without `before`, `after` and `end`."""
        return np.frombuffer(document, np.uint8).astype(np.int32)

    def encode_all(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        """The int32 ids of each document, as by `encode`."""
        return [self.encode(document) for document in documents]

    def encode_prompt(self, text: str) -> np.ndarray:
        """The int32 ids of a text to continue."""
        return self.encode(text.encode("utf-8", "replace"))

    def decode(self, ids: Sequence[int] | np.ndarray, special: bool = True) -> bytes:
        """The bytes of the ids. End tokens, and ids that only pad the vocabulary, have none."""
        ids = np.asarray(ids)
        return ids[ids < 256].astype(np.uint8).tobytes()

    def is_text(self, token: int, special: bool = True) -> bool:
        """Whether `decode` gives any text for the token."""
        return token < 256

    def template(self) -> tokenizers.Tokenizer:
        """A tokenizer of texts and pairs of texts. `end` follows each text, and a second text is of type 1."""
        made = tokenizers.Tokenizer(tokenizers.models.BPE({name: byte for byte, name in enumerate(byte_names())}, []))
        made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.post_processor = _ends(self.end)
        return made


class HuggingFace:
    """A tokenizer.json. Special tokens that are spelled out in a document are encoded as ordinary text.

    `before`, `after` and `end` are what the file's template puts around a text, such as a token that begins one.
    """

    def __init__(self, path: Path):
        """Reads a file. Raises InputError if it is not a readable tokenizer.json or has no end-of-text token."""
        try:
            raw = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"data.tokenizer: {path}: cannot be read ({error})") from error
        sha256 = hashlib.sha256(raw.encode()).hexdigest()
        self.named = special_tokens.named_tokens(path)  # eos_token and others -> its text
        declared = special_tokens.declared_tokens(path)
        ends, self._end_place = special_tokens.end_ids(path)
        try:
            self._tokenizer, added = _parse_file(path.absolute(), sha256, repr((self.named, declared, ends)))
        except Exception as error:  # the library raises nothing more precise
            raise InputError(
                f"data.tokenizer: {path}: not a Hugging Face tokenizer.json ({error})\n"
                "  fix   give the path of a tokenizer.json, or bytes"
            ) from error
        # The file may carry these settings for inference. They would cut or pad every document.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        self.path = path
        self.replaced_bytes = 0
        self._byte_ids = self._find_byte_ids(raw)
        model = self._tokenizer.model  # the only kind that drops an unknown character, where others fail
        self._drops = isinstance(model, tokenizers.models.BPE) and model.unk_token is None and self._byte_ids is None
        special_tokens.add_declared(self._tokenizer, declared, path)
        special_tokens.mark_special(self._tokenizer, [*self.named.values()])
        self.special = self._find_special()
        self.end = self._find_end(ends)
        special_tokens.mark_special(self._tokenizer, [str(self._tokenizer.id_to_token(self.end))])
        self.special = self._find_special()
        self.special_ids = tuple(self.special.values())
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.before, appended = self._find_frame()
        self._appended = len(appended)
        self.after = appended[:-1] if appended[-1:] == (self.end,) else appended
        self.spelled_end = str(self.text_of(self.end)).encode()
        self.fingerprint = f"{sha256}-{self.end}" + (
            f"-{self.before}-{self.after}" if self.before or self.after else ""
        )
        if (changed := _added_tokens(self._tokenizer)) != added:
            self.fingerprint += f"-{hashlib.sha256(changed.encode()).hexdigest()[:12]}"
        # The bytes of tokens such as "<0xE6>", id -> byte, that a decoder with byte fallback joins to characters. It
        # replaces every byte of a run of such tokens by U+FFFD if the whole run is not UTF-8.
        found = {self._tokenizer.token_to_id(name): byte for byte, name in enumerate(_fallback_names())}
        joins = '"ByteFallback"' in raw
        self.joined_bytes = {i: byte for i, byte in found.items() if joins and i is not None}

    def encode(self, document: bytes) -> np.ndarray:
        return self.encode_all([document])[0]

    def encode_all(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        """The int32 ids of each document, as by `encode` but faster."""
        ids: list[np.ndarray | None] = []
        texts = []
        for document in documents:
            try:
                texts.append(document.decode())
                ids.append(None)
            except UnicodeDecodeError:
                ids.append(self._encode_mixed(document))
        encoded = iter(self._encode_texts(texts))
        return [next(encoded) if item is None else item for item in ids]

    def template(self) -> tokenizers.Tokenizer:
        """A tokenizer of texts and pairs of texts, with the special tokens and the types of the file's template.

        If the template adds no tokens, `end` follows each text, and a second text is of type 1.
        """
        made = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
        made.encode_special_tokens = True
        if not made.num_special_tokens_to_add(is_pair=True):
            made.post_processor = _ends(self.end)
        return made

    @property
    def mask(self) -> int:
        """The id in the place of a token that is to be guessed. Raises InputError if there is none."""
        named = self.id_of("mask_token")
        return self._guess_id("mask_token", _MASK_NAMES, "mask token", MASK) if named is None else named

    def id_of(self, name: str) -> int | None:
        """The id of a named token such as bos_token; None if no file names it.

        Raises InputError if a file names a token that the vocabulary does not have.
        """
        if name not in self.named:
            return None
        text = self.named[name]
        found = self._tokenizer.token_to_id(text)
        if found is None:
            raise InputError(
                f"data.tokenizer: {self.path}: the files beside it name {text} as the {name}, and it has no such token"
                f"\n  fix   correct {name} in {special_tokens.SETTINGS} or {special_tokens.SPECIAL_TOKENS_MAP},\n"
                "        or take all files from the same model"
            )
        return found

    def text_of(self, number: int) -> str | None:
        """The text of the token with an id; None if there is none."""
        return self._tokenizer.id_to_token(number)

    def encode_marked(self, texts: Sequence[str], in_template: bool = False) -> list[tokenizers.Encoding]:
        """Encodings of texts, with offsets. Special tokens that are spelled out are encoded as special tokens.

        in_template: with those that the file's template puts around a text.
        """
        self._tokenizer.encode_special_tokens = False
        try:
            return self._encode_counted(texts, add_special_tokens=in_template)
        finally:
            self._tokenizer.encode_special_tokens = True

    def encode_prompt(self, text: str) -> np.ndarray:
        """The int32 ids of a text, with the special tokens that begin a text and those that are spelled out in it.

        Special tokens that the file's template puts after a text are left out: this one goes on.
        """
        (encoding,) = self.encode_marked([text], in_template=True)
        return np.asarray(encoding.ids[: len(encoding.ids) - self._appended], np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray, special: bool = True) -> bytes:
        """The text of the ids as UTF-8, with special tokens spelled out or left out.

        A character that is cut in half becomes U+FFFD.
        """
        known = [int(i) for i in ids if i < self.vocab_size]
        return self._tokenizer.decode(known, skip_special_tokens=not special).encode()

    def is_text(self, token: int, special: bool = True) -> bool:
        name = self._tokenizer.id_to_token(token)
        return name is not None and (special or name not in self.special)

    def _encode_texts(self, texts: list[str]) -> list[np.ndarray]:
        encodings = self._encode_counted(texts, self._drops, add_special_tokens=False)
        return [np.asarray(encoding.ids, np.int32) for encoding in encodings]

    def _encode_counted(
        self, texts: Sequence[str], offsets: bool = True, *, add_special_tokens: bool
    ) -> list[tokenizers.Encoding]:
        """The encodings of texts. Characters that are dropped are counted. Without offsets it is faster."""
        encode = self._tokenizer.encode_batch if offsets else self._tokenizer.encode_batch_fast
        encode = functools.partial(encode, add_special_tokens=add_special_tokens)
        encodings = encode_texts(encode, texts, f"data.tokenizer: {self.path}")
        if self._drops:
            self.replaced_bytes += sum(map(count_dropped, texts, encodings))
        return encodings

    def _encode_mixed(self, document: bytes) -> np.ndarray:
        """The ids of a document that is not UTF-8. Its foreign bytes become byte tokens if the vocabulary has them."""
        if self._byte_ids is None:
            self.replaced_bytes += len("".join(_NOT_UTF8.findall(document.decode("utf-8", "surrogateescape"))))
            return self._encode_texts([document.decode("utf-8", "replace")])[0]
        pieces = _NOT_UTF8.split(document.decode("utf-8", "surrogateescape"))
        texts = self._encode_texts(pieces[::2])
        foreign = [
            self._byte_ids[np.frombuffer(piece.encode("utf-8", "surrogateescape"), np.uint8)] for piece in pieces[1::2]
        ]
        parts = [part for pair in zip(texts, [*foreign, np.empty(0, np.int32)], strict=True) for part in pair]
        return np.concatenate(parts)

    def _find_byte_ids(self, raw: str) -> np.ndarray | None:
        """The ids of the 256 single bytes in a byte-level or byte-fallback vocabulary; None for another one."""
        names = byte_names() if '"ByteLevel"' in raw else _fallback_names()
        ids = [self._tokenizer.token_to_id(name) for name in names]
        return None if None in ids else np.asarray(ids, np.int32)

    def _find_frame(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The special tokens that the file's template puts before a text, and after it."""
        alone = self._tokenizer.id_to_token(self.end)  # a text of one token in any vocabulary
        assert alone
        (encoding,) = self.encode_marked([alone], in_template=True)
        of_text = [i for i, sequence in enumerate(encoding.sequence_ids) if sequence is not None]
        ids = tuple(encoding.ids)
        return (ids[: of_text[0]], ids[of_text[-1] + 1 :]) if of_text else ((), ())

    def _find_special(self) -> dict[str, int]:
        added = self._tokenizer.get_added_tokens_decoder()
        return {token.content: i for i, token in added.items() if token.special}

    def _find_end(self, ids: Sequence[int]) -> int:
        """The id of the token that closes a text: the eos_token, or the first one at which the model beside it ends."""
        if (named := self.id_of("eos_token")) is not None:
            return named
        if ids and self._tokenizer.id_to_token(ids[0]) is None:
            raise InputError(
                f"{self._end_place}: eos_token_id={ids[0]}, and {self.path} has no such token\n"
                f"  fix   name the token that ends a text as eos_token in {special_tokens.SETTINGS} beside it"
            )
        if ids:
            return ids[0]
        if (named := self.id_of("sep_token")) is not None:  # BERT's texts end so
            return named
        return self._guess_id("eos_token", _END_NAMES, "end-of-text token", END_OF_TEXT)

    def _guess_id(self, key: str, names: Sequence[str], what: str, usual: str) -> int:
        """The id of the first special token of `names`. It is said, unless no other special token could be meant."""
        for name in names:
            if name in self.special:
                if not self.special.keys() <= {END_OF_TEXT, MASK, name}:
                    formats.say_once(
                        f"{self.path}: no file beside it names the {key}; {name} is taken for it, because it is often "
                        f'named so. A {special_tokens.SETTINGS} with "{key}" says it.'
                    )
                return self.special[name]
        raise InputError(
            f"data.tokenizer: {self.path}: has no {what} (special tokens: {', '.join(self.special) or 'none'})\n"
            f"  fix   add a special token named {usual} to its added_tokens, or name one of its tokens\n"
            f'        as "{key}" in a {special_tokens.SETTINGS} beside it'
        )


Tokenizer = Bytes | HuggingFace


def dropped_characters_note(tokenizer: Tokenizer) -> list[str]:
    """A sentence about what a tokenizer has read and could not encode, if there was anything."""
    count = tokenizer.replaced_bytes
    return [f"warning: the tokenizer has no token for {count:,} bytes or characters of the texts"] if count else []


def about_spelled_ends(tokenizer: Tokenizer, count: int) -> str:
    """For the user: that `count` documents spell an end which is ordinary text there, and what would make it an end."""
    end = tokenizer.spelled_end.decode() or END_OF_TEXT
    in_txt, with_token = "documents end there in .txt files", "--set data.tokenizer=bpe:4096 makes documents end there"
    instead = in_txt if tokenizer.spelled_end else with_token
    return f"{end} is ordinary text in {plural(count, 'document')} ({instead})"


def encode_source(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """The int32 ids of a text that an encoder reads, as `template` makes them."""
    (encoding,) = encode_texts(_template(tokenizer).encode_batch, [text], "data.tokenizer")
    return np.asarray(encoding.ids, np.int32)


@functools.lru_cache(maxsize=1)
def _template(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    return tokenizer.template()


def _fallback_names() -> list[str]:
    """The names of the 256 bytes in a vocabulary with byte fallback."""
    return [f"<0x{byte:02X}>" for byte in range(256)]


def _ends(end: int) -> tokenizers.processors.TemplateProcessing:
    """A template with the token `end` after each text."""
    return tokenizers.processors.TemplateProcessing(
        single=["$A", "end"],
        pair=["$A", "end", "$B:1", "end:1"],
        special_tokens=[{"id": "end", "ids": [end], "tokens": ["end"]}],
    )


@functools.lru_cache(maxsize=1)
def _parse_file(path: Path, sha256: str, beside: str) -> tuple[tokenizers.Tokenizer, str]:
    """The tokenizer of a file with this content, which each caller changes alike, and its added tokens before that.

    beside: what the files beside it say.

    It is kept, because a run asks for it several times: for the size of the vocabulary, for its data, for its samples.
    A tokenizer of 128,000 tokens takes half a second to parse.
    """
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    return tokenizer, _added_tokens(tokenizer)


def _added_tokens(tokenizer: tokenizers.Tokenizer) -> str:
    return str(tokenizer.get_added_tokens_decoder())


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names: bytes, or the path of a tokenizer.json or of its folder.

    Raises InputError if there is none.
    """
    if name == "bytes":
        return Bytes()
    if trained_size(name):
        raise InputError(
            f"data.tokenizer={name} is trained by the run that uses it\n"
            "  fix   name the run with --workdir, or set data.tokenizer to its tokenizer.json"
        )
    return HuggingFace(tokenizer_path(name))


def tokenizer_path(name: str) -> Path:
    """The path of the tokenizer.json that `name`, its path or its folder, means. Raises InputError if there is none.

    A file of tiktoken is written as a tokenizer.json, which is kept.
    """
    if name.endswith(tiktoken_files.ENDING):
        return _keep_files(tiktoken_files.convert(name))
    if "://" in name:
        return _copy_files(name if name.endswith(".json") else f"{name.rstrip('/')}/{FILE}")
    path = files.expand_user(name)
    path = path / FILE if os.path.isdir(path) else path  # Path.is_dir raises OSError for a name that is too long
    if not os.path.isfile(path):
        fix = download(name, "give the path of a tokenizer.json, or bytes")
        raise InputError(f"data.tokenizer: {path}: no such file\n  fix   {fix}")
    return path


def _copy_files(address: str) -> Path:
    """The copy of a tokenizer.json from elsewhere, in a folder with copies of the files about it."""
    (path,) = remote.copies(address, "data.tokenizer")
    contents = remote.beside(address, special_tokens.SMALL_FILES, "data.tokenizer")
    return _keep_files(contents | {FILE: path.read_bytes()})


def _keep_files(contents: Mapping[str, bytes]) -> Path:
    """The tokenizer.json among files, which are written to a folder of their own in the cache."""
    sums = hashlib.sha256(repr(sorted(contents.items())).encode())
    folder = cache_folder("tokenizers") / sums.hexdigest()[:24]
    try:
        for name, content in contents.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            if not (folder / name).is_file() or (folder / name).read_bytes() != content:
                files.replace(folder / name, content)
    except OSError as error:
        raise unwritable(folder, error.strerror) from error
    return folder / FILE


def trained_size(name: str) -> int | None:
    """TOKENS of a tokenizer `bpe:TOKENS`; None for another one. Raises InputError if TOKENS is not a number above 256.

    There are 256 bytes and an end token.
    """
    kind, colon, given = name.partition(":")
    if kind != "bpe" or not colon:
        return None
    size = whole_number(given) or 0
    if not 257 <= size < 2**31:
        raise InputError(
            f"data.tokenizer: {name}: write bpe:TOKENS, with TOKENS a number of at least 257 (256 bytes and an end)"
        )
    return size
