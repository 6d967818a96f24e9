"""The messages of conversations, and the fields beside them: what they may hold, and which of them are learnt."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from gspmd_lm.errors import InputError, did_you_mean, name_kind
from gspmd_lm.files import json_value

Message = Mapping[str, Any]  # role, content, and other fields of a message that the template reads
# Fields that say whether an assistant's message is learnt: 0 and false, or 1 and true.
FLAGS = ("weight", "train", "training")
LISTS = ("tools", "documents")  # fields beside the messages, each a list of objects
KEYWORDS = "chat_template_kwargs"  # an object: more fields for the template
# Fields of a message that link it to others. Templates may leave them out, since they are no text.
_LINKS = ("name", "tool_call_id")
_EMPTY: tuple[Any, ...] = (None, "", [], {})


def check_messages(value: Any, place: str, fields: Collection[str] | None) -> Sequence[Message]:
    """The messages of a list, or of the JSON text of one, whose lists are no longer JSON text.

    fields: those that the template reads of a message; None: all. Raises an InputError that lists every malformed
    message, and every field of a message that nothing reads.
    """
    messages = _parse_list(value, place)
    if not isinstance(messages, list | tuple) or not messages:
        got = "empty" if isinstance(messages, list | tuple) else name_kind(messages)
        raise InputError(
            f'{place} is {got}\n  fix   give a list of objects such as {{"role": "user", "content": "Hi"}}'
        )
    wrong = [f"message {i} {problem}" for i, message in enumerate(messages, 1) if (problem := _format_error(message))]
    if wrong:
        raise InputError(
            f"{place}: " + "\n  ".join(wrong) + "\n  fix   each message is an object with role and content, both text"
        )
    if fields is not None and (unread := _unread(messages, fields)):
        known = ("role", "content", *_LINKS, *FLAGS, *fields)
        listed = [f"message {i} has {name}{did_you_mean(name, known)}" for name, i in unread.items()]
        raise InputError(
            f"{place}: "
            + "\n  ".join(listed)
            + "\n  the chat template reads no such field of a message, so that it would be lost"
            + f"\n  fix   take {', '.join(unread)} out of the messages, or write the template so that it reads them"
        )
    return [_with_calls(message, f"{place}: message {i}") for i, message in enumerate(messages, 1)]


def _format_error(message: Any) -> str:
    if not isinstance(message, Mapping):
        return f"is {name_kind(message)}"
    if not isinstance(message.get("role"), str):
        return f"has no role (fields: {', '.join(message) or 'none'})"
    content = message.get("content")
    if content is None and not message.get("tool_calls"):
        return f"has neither content nor tool_calls (fields: {', '.join(message)})"
    if not isinstance(content, str | list | None):
        return f"has {name_kind(content)} as its content"
    return ""


def _unread(messages: Sequence[Message], fields: Collection[str]) -> dict[str, int]:
    """The fields with a value that nothing reads, each with the number of the first message that has it."""
    known = {"role", "content", *_LINKS, *FLAGS, *fields}
    unread: dict[str, int] = {}
    for number, message in enumerate(messages, 1):
        for name, value in message.items():
            if name not in known and value not in _EMPTY:
                unread.setdefault(name, number)
    return unread


def _with_calls(message: Message, place: str) -> Message:
    calls = message.get("tool_calls")
    return {**message, "tool_calls": list_of(calls, f"{place}: tool_calls")} if isinstance(calls, str) else message


def list_of(value: Any, place: str) -> Any:
    """A list of objects, which may be given as JSON text; None for none. Raises InputError for another value."""
    listed = _parse_list(value, place)
    if listed in (None, ""):
        return None
    if not isinstance(listed, list | tuple) or not all(isinstance(one, Mapping) for one in listed):
        got = f"a list with {listed[0]!r:.40}" if isinstance(listed, list | tuple) else name_kind(listed)
        raise InputError(f"{place} is {got}\n  fix   give a list of objects, or the JSON text of one")
    return listed


def _parse_list(value: Any, place: str) -> Any:
    """The value of a JSON text that begins as a list does; any other value as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    return json_value(value, f"{place}, which begins as a list in JSON", "correct it")


def template_fields(record: Mapping[str, Any], reads: Collection[str], place: str) -> dict[str, Any]:
    """The fields of a record that the template `reads`, those of chat_template_kwargs among them, and lists parsed.

    Raises InputError for a value of another type, or if there is something for the template that it does not read.
    """
    keywords = record.get(KEYWORDS)
    if not isinstance(keywords, Mapping | None):
        raise InputError(f"{place}{KEYWORDS} is {name_kind(keywords)}\n  fix   give an object, or leave it out")
    fields = dict(record) | dict(keywords or {})
    fields |= {name: list_of(fields[name], f"{place}{name}") for name in LISTS if name in fields}
    lost = [name for name in (*LISTS, *(keywords or {})) if name not in reads and fields.get(name) not in _EMPTY]
    if lost:
        raise InputError(
            f"{place}{' and '.join(lost)} would be lost: the chat template does not read this field\n"
            "  fix   leave it out, or take a template that reads it"
        )
    return {name: fields[name] for name in reads if name in fields}


def learnt(message: Message, number: int) -> bool:
    """Whether a message is one of the assistant that its flags do not leave out.

    Raises InputError for a flag with another meaning than yes or no, or for one that would have another role learnt.
    """
    said = {name: message[name] for name in FLAGS if message.get(name) is not None}
    for name, value in said.items():
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise InputError(
                f"message {number} has {name}={value!r}: a message is learnt or not\n"
                "  fix   write 1 or 0, or leave it out"
            )
        if value and message["role"] != "assistant":
            raise InputError(
                f"message {number} of the role {message['role']} has {name}={value!r}: only the assistant's messages "
                f"are learnt\n  fix   leave {name} out, or write 0"
            )
    if len({bool(value) for value in said.values()}) > 1:
        both = ", ".join(f"{name}={value!r}" for name, value in said.items())
        raise InputError(f"message {number} has {both}, which say both\n  fix   leave one of them out")
    return message["role"] == "assistant" and all(said.values())
