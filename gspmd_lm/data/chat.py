"""Conversations as tokens: a model's chat template renders them, and the assistant's tokens are marked."""

import datetime
import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tokenizers

from gspmd_lm.data import chat_template, special_tokens, tokenizer
from gspmd_lm.data.chat_template import Span, Template
from gspmd_lm.data.messages import FLAGS, KEYWORDS, LISTS, Message, check_messages, learnt, template_fields
from gspmd_lm.data.packing import LAST, TARGET
from gspmd_lm.errors import InputError, did_you_mean

Part = tuple[str, list[Span]]  # a text, and the spans of it that are learnt

# In training data, a template that asks for today's date gets this one, so that rows do not depend on the day.
DATA_DATE = datetime.datetime(2025, 1, 1)
_TOGETHER = 256  # conversations encoded at once: an encoding with offsets takes about 100 bytes per token
_log = logging.getLogger(__name__)


class Chat:
    """The tokenizer and the chat template of a folder. Encoded tokens carry the bits of data/packing.py."""

    def __init__(self, name: str):
        """Reads the tokenizer and the template. `name` is data.tokenizer. Raises InputError if one cannot be read."""
        if name == "bytes":
            raise InputError(
                "data.tokenizer=bytes has no chat template, which conversations need\n"
                "  fix   set data.tokenizer to the folder of a model's tokenizer.json and tokenizer_config.json,\n"
                "        or for text leave out what asks for conversations: data.messages_field, or --chat"
            )
        path = tokenizer.tokenizer_path(name)
        self._tokenizer = tokenizer.HuggingFace(path)
        self._templates, sources = chat_template.read_templates(path, self._tokenizer.named)
        for template in self._templates.values():
            for named in template.special:
                self._tokenizer.id_of(named)  # raises if the template would write a token that is none
        texts = [self._tokenizer.text_of(i) for i in stop_ids(name)]
        self._ends = tuple(text for text in texts if text)  # those at which `generate` stops
        # What may stand at the end of a turn.
        self._closers = tuple(sorted({*self._tokenizer.special, *self._ends}, key=len, reverse=True))
        self.vocab_size = self._tokenizer.vocab_size
        facts = json.dumps([sources, self._ends])
        self.fingerprint = f"{self._tokenizer.fingerprint}-chat2-{hashlib.sha256(facts.encode()).hexdigest()}"
        self.replaced_bytes = 0
        self._said: set[str] = set()

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = False, **fields: Any) -> str:
        """The text of the messages, with today's date. Raises InputError if a message is malformed or is refused."""
        return self._text(fields | {"messages": messages}, add_generation_prompt)

    def prompt(self, messages: Sequence[Message], **fields: Any) -> np.ndarray:
        """The int32 ids of the messages, ready for the assistant's answer. Raises InputError as `render` does."""
        return self.prompt_of(fields | {"messages": messages})

    def prompt_of(self, record: Mapping[str, Any]) -> np.ndarray:
        """The int32 ids of a record's messages, as by `prompt`, with the other fields that the template reads."""
        text = tokenizer.NO_CHARACTER.sub("\ufffd", self._text(record, prompt=True))
        return np.asarray(self._tokenizer.encode_marked([text])[0].ids, np.int32)

    def _text(self, record: Mapping[str, Any], prompt: bool) -> str:
        template = self._template(record)
        said = check_messages(record["messages"], "messages", template.message_fields)
        fields = template_fields(record, template.fields, "")
        return template.render(said, fields, datetime.datetime.now(), [(len(said), prompt)])[0][0]

    def document(self, record: Mapping[str, Any], place: str, field: str) -> bytes:
        """The texts of a record's conversation and what is learnt of each, as JSON for `encode_all`.

        Raises an InputError that names `place` if the record has no conversation, or the template cannot render it.
        """
        if field not in record:
            raise InputError(
                f"{place}: no field {field}{did_you_mean(field, record)}\n"
                f"  fix   set data.messages_field to one of {', '.join(record) or 'its fields'}"
            )
        template = self._template(record)
        said = check_messages(record[field], f"{place}: {field}", template.message_fields)
        if not any(message["role"] == "assistant" for message in said):
            roles = ", ".join(dict.fromkeys(message["role"] for message in said))
            raise InputError(
                f"{place}: {field} has no message of the role assistant (roles: {roles}), so nothing can be learnt\n"
                "  fix   remove the line, or name the role assistant"
            )
        known = {field, *template.fields, *LISTS, KEYWORDS}
        self._say(place, [name for name in record if name not in known], "nothing reads {}")
        try:
            numbers = [number for number, message in enumerate(said) if learnt(message, number + 1)]
            fields = template_fields(record, template.fields, "")
            parts = (self._marked_parts if template.has_generation else self._parts)(template, said, fields, numbers)
        except InputError as error:
            raise InputError(f"{place}: {error}") from error
        if not any(stop > start for _, spans in parts for start, stop in spans):
            flags = "" if numbers else f" that is learnt ({', '.join(FLAGS)} leave all answers out)"
            raise InputError(
                f"{place}: the chat template of {template.place} writes nothing for the assistant{flags}\n"
                "  fix   correct the template, or where it marks {% generation %}, or remove the line"
            )
        return json.dumps(parts).encode()

    def encode_all(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        """The uint32 tokens of conversations that `document` returned, with the bits TARGET and LAST."""
        tokens = []
        for start in range(0, len(documents), _TOGETHER):
            each: list[list[Part]] = [json.loads(document) for document in documents[start : start + _TOGETHER]]
            texts = []
            for text, _ in (part for parts in each for part in parts):
                text, replaced = tokenizer.NO_CHARACTER.subn("\ufffd", text)
                self.replaced_bytes += replaced
                texts.append(text)
            encodings = iter(self._tokenizer.encode_marked(texts))
            for parts in each:
                tokens.append(np.concatenate([_mark_targets(next(encodings), spans) for _, spans in parts]))
        return tokens

    def _template(self, fields: Mapping[str, Any]) -> Template:
        with_tools = fields.get("tools") is not None and "tool_use" in self._templates
        return self._templates["tool_use" if with_tools else "default"]

    def _marked_parts(
        self, template: Template, said: Sequence[Message], fields: Mapping[str, Any], numbers: Sequence[int]
    ) -> list[Part]:
        """The conversation, with the spans that {% generation %} marks, of the messages `numbers`."""
        ((text, spans),) = template.render(said, fields, DATA_DATE, [(len(said), False)])
        answers = [number for number, message in enumerate(said) if message["role"] == "assistant"]
        if len(numbers) < len(answers):
            if len(spans) != len(answers):
                raise InputError(
                    f"the chat template of {template.place} marks {len(spans)} texts of {len(answers)} answers, so "
                    "that those which are not to be learnt cannot be told\n"
                    "  fix   put one {% generation %} around each answer, or give conversations without such flags"
                )
            spans = [span for number, span in zip(answers, spans, strict=True) if number in numbers]
        if numbers[-1:] == [len(said) - 1] and spans and spans[-1][1] > spans[-1][0]:
            return [self._close(template, said[-1], text, spans)]
        return [(text, spans)]

    def _parts(
        self, template: Template, said: Sequence[Message], fields: Mapping[str, Any], numbers: Sequence[int]
    ) -> list[Part]:
        """The conversation with the answers `numbers` as what is learnt: what a model is to write after its prompt.

        An answer is found by rendering the messages before it as a prompt, and those up to it. Some templates write it
        otherwise when others follow, more than what stands after its end. It is then learnt as it was asked for, in a
        text of its own, which ends with it.
        """
        renderings = [(len(said), False)]
        for number in numbers:
            renderings += [(number, True), (number + 1, False)]
        whole, *texts = (text for text, _ in template.render(said, fields, DATA_DATE, renderings))
        spans: list[Span] = []
        parts: list[Part] = []
        for number, asked, answered in zip(numbers, texts[::2], texts[1::2], strict=True):
            if not answered.startswith(asked):
                raise InputError(
                    f"the chat template of {template.place} writes the beginning of message {number + 1} differently "
                    "when it is asked for, so that the assistant's text cannot be told from the rest\n"
                    "  fix   in the template, put {% generation %} before and {% endgeneration %} after what the "
                    "assistant writes\n        (transformers reads them too)"
                )
            start, stops = len(asked), self._stops(answered, len(asked))
            is_last = number + 1 == len(said)
            stop = next((stop for stop in stops if not is_last and whole.startswith(answered[:stop])), stops[0])
            if is_last or whole.startswith(answered[:stop]):
                spans.append((start, stop))
            else:
                parts.append(self._close(template, said[number], answered, [(start, stop)]))
        if spans and numbers[-1] + 1 == len(said):
            return [*parts, self._close(template, said[-1], whole, spans)]
        return [*parts, (whole, spans)] if spans else parts

    def _stops(self, text: str, start: int) -> list[int]:
        """The positions at which the last turn of a text may end, the likeliest first.

        They are those behind a token at which `generate` stops, and then those behind other special tokens. The line
        break that templates put there belongs to no turn.
        """
        found: list[tuple[int, str]] = []
        at = len(text)
        while closer := next((one for one in self._closers if text[start:at].rstrip().endswith(one)), ""):
            at = start + len(text[start:at].rstrip())
            found.append((at, closer))
            at -= len(closer)
        ends = [at for at, closer in reversed(found) if closer in self._ends]
        return [*ends[:1], *(at for at, _ in found)] or [len(text)]

    def _close(self, template: Template, message: Message, text: str, spans: list[Span]) -> Part:
        """A text that ends with `message`, and its spans, with the tokenizer's end if the template writes none.

        A model that never saw an end in training would not stop when it generates.
        """
        start, stop = spans[-1]
        turn, after, content = text[start:stop].rstrip(), text[stop:].strip(), message.get("content")
        written = next((token for token in self._closers if turn.endswith(token)), "")
        of_content = isinstance(content, str) and content.rstrip().endswith(written)
        if written and (written in self._ends or not of_content):
            if written not in self._ends and not after.startswith(self._ends):
                stops = f"the end of a turn, {{}}, is not where generate stops, which is at {' and '.join(self._ends)}"
                fix = "name it as eos_token_id in a generation_config.json beside it, so that answers end"
                self._say(template.place, [written], f"{stops}; {fix}")
            return text, spans
        if after.startswith(self._closers) or after.endswith(self._closers):
            self._say(template.place, ["the end of a turn"], "{} stands after {% endgeneration %}, and is not learnt")
            return text, spans
        end = str(self._tokenizer.text_of(self._tokenizer.end))
        return text + end, [*spans[:-1], (start, len(text + end))]

    def _say(self, place: str, names: Sequence[str], what: str) -> None:
        """Says something about names, which stand in the place of {}, once for each."""
        if new := [name for name in names if name not in self._said]:
            self._said.update(new)
            _log.warning("%s: %s", place, what.replace("{}", ", ".join(new)))


def _mark_targets(encoding: tokenizers.Encoding, spans: Sequence[Span]) -> np.ndarray:
    """The uint32 tokens of a text, with the bit TARGET in those of the spans, and LAST in the last one."""
    ids = np.asarray(encoding.ids, np.uint32)
    starts, stops = np.asarray(encoding.offsets, np.int64).reshape(-1, 2).T
    # Byte-level tokenizers leave spaces out of the offsets, so that a token of spaces seems to have no width.
    before = np.concatenate([[0], stops[:-1]]) if len(ids) else stops
    starts = np.where(starts == stops, np.minimum(starts, before), starts)
    assistants = np.zeros(len(ids), bool)
    for start, stop in spans:
        assistants |= (starts < stop) & (stops > start)
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
