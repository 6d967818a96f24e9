"""Conversations as tokens: a model's chat template renders them, and the assistant's tokens are marked."""

import datetime
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import numpy as np
import tokenizers

from gspmd_lm.config.paths import read_text
from gspmd_lm.data import special_tokens, tokenizer
from gspmd_lm.data.packing import LAST, TARGET
from gspmd_lm.errors import InputError, did_you_mean

Message = Mapping[str, Any]  # role, content, and other fields of a message that the template reads
Span = tuple[int, int]  # characters: start, stop

# In training data, a template that asks for today's date gets this one, so that rows do not depend on the day.
DATA_DATE = datetime.datetime(2025, 1, 1)
_TOGETHER = 256  # conversations encoded at once: an encoding with offsets takes about 100 bytes per token
_MARKS = "\ufdd0\ufdd1"  # put around the text in {% generation %}; Unicode gives these two characters no meaning


class _Generation(jinja2.ext.Extension):
    """The tag {% generation %} ... {% endgeneration %}, which puts two marks around the assistant's text."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        start, stop = (jinja2.nodes.Output([jinja2.nodes.TemplateData(mark)]) for mark in _MARKS)
        return jinja2.nodes.Scope([start, *body, stop], lineno=line)


class Template:
    """One chat template, rendered as transformers renders it (src/transformers/utils/chat_template_utils.py).

    A template is a program that runs in a sandbox. A template that loops without end is not stopped.
    """

    def __init__(self, text: str, place: str, special: Mapping[str, str]):
        """Compiles a template. `special`: the special tokens by the names that the template uses.

        Raises InputError for a syntax error, or if the template is nested too deeply.
        """
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        try:
            parsed = environment.parse(text)
            names = jinja2.meta.find_undeclared_variables(parsed)
            self._template = environment.from_string(text)
            self.has_generation = any(node.data == _MARKS[0] for node in parsed.find_all(jinja2.nodes.TemplateData))
        except jinja2.TemplateSyntaxError as error:
            raise InputError(
                f"{place}: line {error.lineno} of the chat template: {error.message}\n  fix   correct the template"
            ) from error
        except (RecursionError, SyntaxError) as error:  # SyntaxError: from the Python code that jinja generates
            raise InputError(
                f"{place}: the chat template is nested too deeply\n  fix   write it with fewer levels of nesting"
            ) from error
        self.place = place
        special = {name: text for name, text in special.items() if name in names}
        self.special = dict(special)
        # The fields of a record, beside its messages, that the template reads: tools, documents, ...
        self.fields = tuple(sorted(names - {"messages", "add_generation_prompt", "strftime_now", *special}))

    def render(
        self, messages: Sequence[Message], fields: Mapping[str, Any], now: datetime.datetime, prompt: bool = False
    ) -> tuple[str, list[Span]]:
        """The text of messages, and the spans that {% generation %} marks in it.

        prompt: the text ends with the beginning of the assistant's next turn. Raises InputError if the template
        refuses.
        """
        known = {"tools": None, "documents": None} | dict(fields) | self.special
        plain = [{name: value for name, value in message.items() if value is not None} for message in messages]
        try:
            text = self._template.render(known, messages=plain, add_generation_prompt=prompt, strftime_now=now.strftime)
        except Exception as error:  # a template is a program and may raise anything
            raise InputError(
                f"the chat template of {self.place} refuses the messages: {error or type(error).__name__}\n"
                "  fix   change what the messages hold, or correct the template"
            ) from error
        if not self.has_generation:
            return text, []
        pieces = re.split(f"([{_MARKS}])", text)
        if "".join(pieces[1::2]) != _MARKS * (len(pieces) // 4):
            raise InputError(
                f"{self.place}: a {{% generation %}} within another, or a message with the character U+FDD0 or U+FDD1\n"
                "  fix   take the inner one out of the template, or the character out of the message"
            )
        ends = np.cumsum([len(piece) for piece in pieces[::2]]).tolist()
        return "".join(pieces[::2]), list(zip(ends[:-1:2], ends[1::2], strict=True))


class Chat:
    """The tokenizer and the chat template of a folder. Encoded tokens carry the bits of data/packing.py."""

    def __init__(self, name: str):
        """Reads the tokenizer and the template. `name` is data.tokenizer. Raises InputError if one cannot be read."""
        if name == "bytes":
            raise InputError(
                "data.tokenizer=bytes has no chat template, which conversations need\n"
                "  fix   set data.tokenizer to the folder of a model's tokenizer.json and tokenizer_config.json,\n"
                "        or for text leave data.messages_field out"
            )
        path = tokenizer.tokenizer_path(name)
        self._tokenizer = tokenizer.HuggingFace(path)
        self._special_ids = np.asarray(list(self._tokenizer.special.values()))
        self._closers = tuple(self._tokenizer.special)
        self._templates, sources = _read_templates(path, self._tokenizer.named)
        for template in self._templates.values():
            for named in template.special:
                self._tokenizer.id_of(named)  # raises if the template would write a token that is none
        self.vocab_size = self._tokenizer.vocab_size
        self.fingerprint = (
            f"{self._tokenizer.fingerprint}-chat-{hashlib.sha256(json.dumps(sources).encode()).hexdigest()}"
        )
        self.replaced_bytes = 0

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = False, **fields: Any) -> str:
        """The text of the messages, with today's date. Raises InputError if a message is malformed or is refused."""
        _check(messages, "messages")
        now = datetime.datetime.now()
        return self._template(fields).render(messages, fields, now, add_generation_prompt)[0]

    def prompt(self, messages: Sequence[Message], **fields: Any) -> np.ndarray:
        """The int32 ids of the messages, ready for the assistant's answer. Raises InputError as `render` does."""
        text = self.render(messages, add_generation_prompt=True, **fields)
        return np.asarray(self._tokenizer.encode_marked([tokenizer.NO_CHARACTER.sub("\ufffd", text)])[0].ids, np.int32)

    def prompt_of(self, record: Mapping[str, Any]) -> np.ndarray:
        """The int32 ids of a record's messages, as by `prompt`, with the other fields that the template reads."""
        return self.prompt(record["messages"], **self._fields(record))

    def document(self, record: Mapping[str, Any], place: str, field: str) -> bytes:
        """The text of a record's conversation and the assistant's spans in it, as JSON for `encode_all`.

        Raises an InputError that names `place` if the record has no conversation, or the template cannot render it.
        """
        if field not in record:
            raise InputError(
                f"{place}: no field {field}{did_you_mean(field, record)}\n"
                f"  fix   set data.messages_field to one of {', '.join(record) or 'its fields'}"
            )
        messages = _check(record[field], f"{place}: {field}")
        if not any(message["role"] == "assistant" for message in messages):
            roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
            raise InputError(
                f"{place}: {field} has no message of the role assistant (roles: {roles}), so nothing can be learnt\n"
                "  fix   remove the line, or name the role assistant"
            )
        template = self._template(record)
        fields = self._fields(record)
        try:
            text, spans = template.render(messages, fields, DATA_DATE)
            if not template.has_generation:
                spans = self._spans(template, messages, fields, text)
        except InputError as error:
            raise InputError(f"{place}: {error}") from error
        if not any(stop > start for start, stop in spans):
            raise InputError(
                f"{place}: the chat template of {template.place} writes nothing for the assistant\n"
                "  fix   correct the template, or where it marks {% generation %}"
            )
        return json.dumps([text, spans]).encode()

    def encode_all(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        """The uint32 tokens of conversations that `document` returned, with the bits TARGET and LAST.

        The template says how a conversation ends. If it writes no special token in or after the last turn, the
        tokenizer's end is added, because a model that never saw an end in training would not stop when it generates.
        """
        tokens = []
        for start in range(0, len(documents), _TOGETHER):
            texts, spans = [], []
            for document in documents[start : start + _TOGETHER]:
                text, of_assistant = json.loads(document)
                text, replaced = tokenizer.NO_CHARACTER.subn("\ufffd", text)
                self.replaced_bytes += replaced
                texts.append(text)
                spans.append(of_assistant)
            encodings = self._tokenizer.encode_marked(texts)
            tokens += [self._marked(*pair) for pair in zip(encodings, spans, strict=True)]
        return tokens

    def _template(self, fields: Mapping[str, Any]) -> Template:
        with_tools = fields.get("tools") is not None and "tool_use" in self._templates
        return self._templates["tool_use" if with_tools else "default"]

    def _fields(self, record: Mapping[str, Any]) -> dict[str, Any]:
        return {name: record[name] for name in self._template(record).fields if name in record}

    def _spans(
        self, template: Template, messages: Sequence[Message], fields: Mapping[str, Any], text: str
    ) -> list[Span]:
        """The assistant's spans, each from its prompt to the end of its turn, found by rendering earlier messages."""
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            asked, _ = template.render(messages[:number], fields, DATA_DATE, prompt=True)
            is_last = number + 1 == len(messages)
            answered = text if is_last else template.render(messages[: number + 1], fields, DATA_DATE)[0]
            if not (text.startswith(answered) and answered.startswith(asked)):
                raise InputError(
                    f"the chat template of {template.place} writes message {number + 1} differently when others follow "
                    "or when it is asked for, so that the assistant's text cannot be told from the rest\n"
                    "  fix   in the template, put {% generation %} before and {% endgeneration %} after what the "
                    "assistant writes\n        (transformers reads them too), or give conversations with one answer"
                )
            turn = answered[len(asked) :].rstrip()
            # The line break that templates put after the token that ends a turn belongs to nobody.
            spans.append((len(asked), len(asked) + len(turn) if turn.endswith(self._closers) else len(answered)))
        return spans

    def _marked(self, encoding: tokenizers.Encoding, spans: Sequence[Span]) -> np.ndarray:
        ids = np.asarray(encoding.ids, np.uint32)
        starts, stops = np.asarray(encoding.offsets, np.int64).reshape(-1, 2).T
        # Byte-level tokenizers leave spaces out of the offsets, so that a token of spaces seems to have no width.
        before = np.concatenate([[0], stops[:-1]]) if len(ids) else stops
        starts = np.where(starts == stops, np.minimum(starts, before), starts)
        assistants = np.zeros(len(ids), bool)
        for start, stop in spans:
            assistants |= (starts < stop) & (stops > start)
        last_turn = stops > spans[-1][0]
        if not np.isin(ids[last_turn], self._special_ids).any():
            ids = np.append(ids, np.uint32(self._tokenizer.end))
            assistants = np.append(assistants, True)
        assistants[0] = False  # nothing comes before the first token to predict it from
        ids[assistants] |= TARGET
        ids[-1] |= LAST
        return ids


def stop_ids(name: str) -> tuple[int, ...]:
    """The ids that end a turn: the end of the tokenizer `name`, and those of the model beside it."""
    ids = [tokenizer.load_tokenizer(name).end]
    if name != "bytes":
        ids += special_tokens.end_ids(tokenizer.tokenizer_path(name))[0]
    return tuple(dict.fromkeys(ids))


def _check(messages: Any, place: str) -> Sequence[Message]:
    """The messages, checked. Raises an InputError that lists every malformed one."""
    if not isinstance(messages, list | tuple) or not messages:
        got = "empty" if isinstance(messages, list | tuple) else f"a {type(messages).__name__}"
        raise InputError(
            f'{place} is {got}\n  fix   give a list of objects such as {{"role": "user", "content": "Hi"}}'
        )
    wrong = [f"message {i} {problem}" for i, message in enumerate(messages, 1) if (problem := _malformed(message))]
    if wrong:
        raise InputError(
            f"{place}: " + "\n  ".join(wrong) + "\n  fix   each message is an object with role and content, both text"
        )
    return messages


def _malformed(message: Any) -> str:
    if not isinstance(message, Mapping):
        return f"is a {type(message).__name__}"
    if not isinstance(message.get("role"), str):
        return f"has no role (fields: {', '.join(message) or 'none'})"
    content = message.get("content")
    if content is None and not message.get("tool_calls"):
        return f"has neither content nor tool_calls (fields: {', '.join(message)})"
    if not isinstance(content, str | list | None):
        return f"has a {type(content).__name__} as its content"
    return ""


def _read_templates(path: Path, special: Mapping[str, str]) -> tuple[dict[str, Template], dict[str, Any]]:
    """The chat templates beside a tokenizer.json by name, and the texts of which they were made."""
    config_path, alone = path.with_name(special_tokens.SETTINGS), path.with_name("chat_template.jinja")
    settings = special_tokens.read_object(config_path)
    texts: dict[str, tuple[str, str]] = {}  # name -> text, place
    named = settings.get("chat_template") or []
    for entry in named if isinstance(named, list) else [{"name": "default", "template": named}]:
        if not isinstance(entry, dict) or not all(isinstance(entry.get(key), str) for key in ("name", "template")):
            raise InputError(
                f"{config_path}: chat_template is neither text nor a list of objects with name and template\n"
                "  fix   correct it, or write the template to a chat_template.jinja beside it"
            )
        texts[entry["name"]] = entry["template"], str(config_path)
    if alone.is_file():
        texts["default"] = read_text(alone), str(alone)
    for more in sorted(path.with_name("additional_chat_templates").glob("*.jinja")):
        texts[more.stem] = read_text(more), str(more)
    if "default" not in texts:
        others = f" named default (there are {', '.join(texts)})" if texts else ""
        raise InputError(
            f"data.tokenizer: {path.parent}: no chat template{others}: conversations need one\n"
            f"  fix   write the one the model was trained with to {alone},\n"
            "        or take the tokenizer of the model's instruction-tuned variant"
        )
    used = {name: texts[name] for name in ("default", "tool_use") if name in texts}
    templates = {name: Template(text, place, special) for name, (text, place) in used.items()}
    return templates, {"special": special} | {name: text for name, (text, _) in used.items()}


def _to_json(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """The JSON of a value. Jinja's own filter of this name would escape HTML, which templates do not expect."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
