"""Prompts from JSONL files, and results to them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np

from gspmd_lm.config.paths import read_text
from gspmd_lm.data.tokenizer import Tokenizer
from gspmd_lm.errors import InputError
from gspmd_lm.files import has_half_characters, json_line, json_object
from gspmd_lm.infer.generate import TextChunk

Fields = dict[str, Any]
Render = Callable[[Fields], Sequence[int] | np.ndarray]  # a line with messages -> ids of the prompt; raises InputError
SHOWN = 20  # problems of one file


class PromptLine(NamedTuple):
    """One line of a file of prompts."""

    place: str  # prompts.jsonl:3
    fields: dict[str, Any]
    tokens: Sequence[int]


def objects(path: Path, wrong: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The place and the object of each line that is not blank. Lines without an object are added to `wrong`.

    Raises InputError if the file cannot be read or is not UTF-8.
    """
    for number, line in enumerate(read_text(path).split("\n"), 1):
        place = f"{path}:{number}"
        if not line.strip():
            continue
        try:
            fields = json_object(line, place)
        except InputError as error:
            wrong.append(str(error))
            continue
        if has_half_characters(line, fields):
            wrong.append(f"{place}: half a character (\\ud800 to \\udfff without its other half)")
        else:
            yield place, fields


def refuse(path: Path, wrong: Sequence[str], lines: Sequence[Any], fix: str) -> None:
    """Raises InputError if lines are wrong, or if there are none."""
    if wrong:
        more = [f"and {len(wrong) - SHOWN} more"] if len(wrong) > SHOWN else []
        raise InputError("\n".join([*wrong[:SHOWN], *more, f"  fix   {fix}"]))
    if not lines:
        raise InputError(f"{path}: no lines\n  fix   {fix}")


def read_prompts(
    path: str | Path,
    tokenizer: Tokenizer,
    render: Render | None = None,
    chat: bool = False,
    encode: Callable[[str], np.ndarray] | None = None,
) -> list[PromptLine]:
    """The prompts of a file. `render` makes prompts of "messages"; without `render`, they are an error. chat: a
    "prompt" is a user's message too. encode: gives what the model reads of a prompt, by default its tokens.

    Raises InputError that lists every line without a prompt that can be used.
    """
    path, wrong, prompts = Path(path), [], []
    encode = encode or tokenizer.encode_prompt
    for place, fields in objects(path, wrong):
        if "prompt" in fields and "messages" in fields:
            wrong.append(f"{place}: both prompt and messages")
        elif "messages" in fields and render is None:
            wrong.append(f"{place}: messages, but data.tokenizer has no chat template")
        elif "messages" in fields and render:
            try:
                prompts.append(PromptLine(place, fields, ids_of(render(fields))))
            except InputError as error:
                wrong.append(f"{place}: {error}")
        elif not isinstance(fields.get("prompt"), str):
            wrong.append(f"{place}: prompt is {'missing' if 'prompt' not in fields else 'not text'}")
        elif not fields["prompt"]:
            wrong.append(f"{place}: prompt is empty")
        elif chat and render:
            message = {"role": "user", "content": fields["prompt"]}
            prompts.append(PromptLine(place, fields, ids_of(render(fields | {"messages": [message]}))))
        else:
            prompts.append(PromptLine(place, fields, ids_of(encode(fields["prompt"]))))
    refuse(path, wrong, prompts, 'write one object such as {"prompt": "..."} or {"messages": [...]} on each line')
    return prompts


def ids_of(ids: Sequence[int] | np.ndarray) -> Any:
    """A list of tokens; the frames of a sound as they are."""
    array = np.asarray(ids)
    return array if array.ndim > 1 else array.tolist()


def write_results(lines: Sequence[PromptLine], chunks: Iterable[TextChunk], out: TextIO) -> None:
    """Writes each line's fields with its text, finish_reason and number of tokens, in order and as soon as they are
    known. `chunks`: the chunks that Generator.generate yields for the lines' tokens."""
    waiting: dict[int, TextChunk] = {}
    at = 0
    for chunk in chunks:
        if chunk.result:
            waiting[chunk.number] = chunk
        while at in waiting:
            result = waiting.pop(at).result
            assert result
            about = {"text": result.text, "finish_reason": result.finish_reason, "tokens": len(result.tokens)}
            out.write(json_line(lines[at].fields | about))
            out.flush()
            at += 1
