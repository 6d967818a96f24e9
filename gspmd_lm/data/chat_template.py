"""Chat templates: what one reads, and the text that it writes, which a process of its own renders."""

import atexit
import contextlib
import datetime
import pickle
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.nodes
import numpy as np

from gspmd_lm.config.paths import read_text
from gspmd_lm.data import render_process, special_tokens
from gspmd_lm.data.messages import Message
from gspmd_lm.data.render_process import MARKS
from gspmd_lm.errors import InputError

Span = tuple[int, int]  # characters: start, stop
_WHOLE = {"items", "values", "dictsort", "tojson", "string"}  # what reads every field of an object


class Template:
    """One chat template, rendered as transformers renders it, in another process and within limits."""

    def __init__(self, text: str, place: str, special: Mapping[str, str]):
        """Reads a template. `special`: the texts of special tokens, by the names that templates have for them.

        Raises InputError for a syntax error, or if the template cannot be compiled within the limits.
        """
        self._text, self.place = text, place
        try:
            parsed = render_process.environment().parse(text)
            (names,) = _renderer.render((text, [], {}, datetime.datetime.min, []))
        except jinja2.TemplateSyntaxError as error:
            raise InputError(
                f"{place}: line {error.lineno} of the chat template: {error.message}\n  fix   correct the template"
            ) from error
        except (RecursionError, _Failed) as error:
            if isinstance(error, RecursionError) or "nested" in str(error):  # by Python, for which jinja2 writes code
                raise InputError(
                    f"{place}: the chat template is nested too deeply\n  fix   write it with fewer levels of nesting"
                ) from error
            raise InputError(f"{place}: the chat template: {error}\n  fix   correct the template") from error
        self.has_generation = any(node.data == MARKS[0] for node in parsed.find_all(jinja2.nodes.TemplateData))
        self.special = {name: token for name, token in special.items() if name in names}
        # The fields of a record, beside its messages, that the template reads: tools, documents, ...
        self.fields = tuple(sorted(names - {"messages", "add_generation_prompt", "strftime_now", *special}))
        self.message_fields = _fields_of_messages(parsed)  # that it reads; None: every field

    def render(
        self,
        messages: Sequence[Message],
        fields: Mapping[str, Any],
        now: datetime.datetime,
        renderings: Sequence[tuple[int, bool]],
    ) -> list[tuple[str, list[Span]]]:
        """The text of each rendering, and the spans that {% generation %} marks in it.

        renderings: how many of the messages each has, and whether it ends with the beginning of the assistant's next
        turn. Raises InputError if the template refuses, or if it needs more time or memory than it may have.
        """
        known = {"tools": None, "documents": None} | dict(fields) | self.special
        plain = [{name: value for name, value in message.items() if value is not None} for message in messages]
        try:
            texts = _renderer.render((self._text, plain, known, now, renderings))
        except _Failed as error:
            raise InputError(
                f"the chat template of {self.place} refuses the messages: {error}\n"
                "  fix   change what the messages hold, or correct the template"
            ) from error
        return [self._cut_marks(text) for text in texts]

    def _cut_marks(self, text: str) -> tuple[str, list[Span]]:
        """A text without marks, and the spans between them."""
        if not self.has_generation:
            return text, []
        pieces = re.split(f"([{MARKS}])", text)
        if "".join(pieces[1::2]) != MARKS * (len(pieces) // 4):
            raise InputError(
                f"{self.place}: a {{% generation %}} within another, or a message with the character U+FDD0 or U+FDD1\n"
                "  fix   take the inner one out of the template, or the character out of the message"
            )
        ends = np.cumsum([len(piece) for piece in pieces[::2]]).tolist()
        return "".join(pieces[::2]), list(zip(ends[:-1:2], ends[1::2], strict=True))


def _fields_of_messages(template: jinja2.nodes.Template) -> Collection[str] | None:
    """The names that a template can read of a message: every attribute and every text in it. None: it reads them all.

    It does so if it writes a whole message, or goes through its fields.
    """
    lists = {"messages"}
    for assign in template.find_all(jinja2.nodes.Assign):  # {% set loop_messages = messages[1:] %}
        value = assign.node.node if isinstance(assign.node, jinja2.nodes.Getitem) else assign.node
        is_part = not isinstance(assign.node, jinja2.nodes.Getitem) or isinstance(assign.node.arg, jinja2.nodes.Slice)
        if is_part and isinstance(value, jinja2.nodes.Name) and value.name in lists:
            lists |= _names(assign.target)
    loops = [loop for loop in template.find_all(jinja2.nodes.For) if _names(loop.iter) & lists]
    objects = lists | {name for loop in loops for name in _names(loop.target)}
    for node in template.find_all((jinja2.nodes.Filter, jinja2.nodes.Getattr, jinja2.nodes.Output)):
        if isinstance(node, jinja2.nodes.Output):
            whole = any(isinstance(child, jinja2.nodes.Name) and child.name in objects for child in node.nodes)
        else:
            name = node.name if isinstance(node, jinja2.nodes.Filter) else node.attr
            whole = name in _WHOLE and isinstance(node.node, jinja2.nodes.Name) and node.node.name in objects
        if whole:
            return None
    attributes = {node.attr for node in template.find_all(jinja2.nodes.Getattr)}
    texts = {node.value for node in template.find_all(jinja2.nodes.Const) if isinstance(node.value, str)}
    return attributes | texts


def _names(node: jinja2.nodes.Node) -> set[str]:
    return (
        {node.name} if isinstance(node, jinja2.nodes.Name) else {one.name for one in node.find_all(jinja2.nodes.Name)}
    )


def read_templates(path: Path, special: Mapping[str, str]) -> tuple[dict[str, Template], dict[str, Any]]:
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
    return templates, {"special": dict(special)} | {name: text for name, (text, _) in used.items()}


class _Failed(Exception):
    """A rendering has failed."""


class _Renderer:
    """The process that renders: started when it is first needed, and again after a template that did not end."""

    def __init__(self):
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def render(self, request: render_process.Request) -> list[Any]:
        """The texts that a request asks for. Raises _Failed."""
        try:
            pickled = pickle.dumps(request)
        except Exception as error:  # what objects of other packages raise
            raise _Failed(f"they hold what is neither text, number, list nor object ({error})") from error
        with self._lock:
            process = self._process = self._process or self._start()
            assert process.stdin and process.stdout
            try:
                process.stdin.write(pickled)
                process.stdin.flush()
                answers = pickle.load(process.stdout)
            except (EOFError, pickle.UnpicklingError, BrokenPipeError) as error:
                code = process.wait()
                self.stop()
                raise _Failed(
                    f"one text needs more than {render_process.LIMIT_S} s of a processor's time"
                    if code == -signal.SIGPROF
                    else f"the process that renders it ended with code {code}"
                ) from error
            except BaseException:  # Ctrl-C: nobody waits for the answer
                self.stop()
                raise
        if answers and isinstance(answers[-1], Exception):
            raise _Failed(str(answers[-1]))
        return answers

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", render_process.__file__, str(render_process.LIMIT_S)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def stop(self) -> None:
        """Ends the process, if there is one."""
        process, self._process = self._process, None
        if process:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):  # what was not written yet
                    assert pipe
                    pipe.close()


_renderer = _Renderer()
atexit.register(_renderer.stop)
