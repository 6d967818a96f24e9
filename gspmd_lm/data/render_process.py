"""The process in which chat templates are rendered, with a limit of time and of memory. It imports jinja2 alone.

A template is a program from elsewhere. Its sandbox keeps it from files and from the network, but not from loops without
end, and a number such as 10 ** 10 ** 8 is computed where no signal handler of Python runs. So the system ends this
process when a rendering has taken too long. Requests come on stdin and answers go to stdout, both pickled.
"""

import contextlib
import datetime
import json
import pickle
import signal
import sys
from collections.abc import Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

LIMIT_S = 5  # of processor time for one rendering
LIMIT_BYTES = 1 << 29  # of addresses of this process
MARKS = "\ufdd0\ufdd1"  # put around the text in {% generation %}; Unicode gives these two characters no meaning


class _Generation(jinja2.ext.Extension):
    """The tag {% generation %} ... {% endgeneration %}, which puts two marks around the assistant's text."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        start, stop = (jinja2.nodes.Output([jinja2.nodes.TemplateData(mark)]) for mark in MARKS)
        return jinja2.nodes.Scope([start, *body, stop], lineno=line)


def environment() -> jinja2.Environment:
    """The environment that transformers renders in (src/transformers/utils/chat_template_utils.py)."""
    made = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    made.filters["tojson"] = _to_json
    made.globals["raise_exception"] = _raise
    return made


def _to_json(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """The JSON of a value. Jinja's own filter of this name would escape HTML, which templates do not expect."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


# The text of a template; messages; fields; the time that it is; and for each rendering how many of the messages it has,
# and whether it ends with the beginning of the assistant's next turn.
Request = tuple[str, list[dict[str, Any]], dict[str, Any], datetime.datetime, Sequence[tuple[int, bool]]]


def _answers(templates: dict[str, jinja2.Template], request: Request) -> list[Any]:
    """The texts of renderings; without any, the names that the template reads.

    The first rendering that fails is an exception, and the last answer.
    """
    text, messages, fields, now, renderings = request
    answers: list[Any] = []
    try:
        _limit_time()
        if text not in templates:
            templates[text] = environment().from_string(text)
        if not renderings:  # jinja2 computes constants for this, too
            answers.append(jinja2.meta.find_undeclared_variables(environment().parse(text)))
        for count, prompt in renderings:
            _limit_time()
            answers.append(
                templates[text].render(
                    fields, messages=messages[:count], add_generation_prompt=prompt, strftime_now=now.strftime
                )
            )
    except MemoryError:
        answers.append(MemoryError(f"it needs more than {LIMIT_BYTES >> 20} MiB of memory"))
    except Exception as error:  # a template is a program and may raise anything
        answers.append(RuntimeError(str(error) or type(error).__name__))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return answers


def _limit_time() -> None:
    signal.setitimer(signal.ITIMER_PROF, float(sys.argv[1]))  # then SIGPROF, whose default action ends the process


def main() -> None:
    """Answers requests until stdin is closed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # they are the other process's, which closes stdin
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    with contextlib.suppress(ImportError, ValueError, OSError):  # a system without such a limit
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    templates: dict[str, jinja2.Template] = {}
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # nothing else may write among the answers
    while True:
        try:
            request = pickle.load(requests)
        except EOFError:
            return
        pickle.dump(_answers(templates, request), answers)
        answers.flush()


if __name__ == "__main__":
    main()
