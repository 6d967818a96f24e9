"""The process of a job: `python -m gspmd_lm.explore.worker KIND` reads requests from stdin, and answers on stdout."""

import base64
import json
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TextIO

from gspmd_lm.errors import InputError, RunFailed
from gspmd_lm.explore.inputs import SIMULATED, Inputs
from gspmd_lm.foresight.pickled import load_task

if TYPE_CHECKING:
    from gspmd_lm.explore.subject import Subject

Answer = Callable[[dict[str, Any]], None]


def main(kind: str) -> None:
    """Answers the requests of a job until stdin ends."""
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever prints, libraries in C too
    requests = sys.stdin

    def answer(message: dict[str, Any]) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    sent = base64.b64decode(json.loads(requests.readline()))
    _prepare()  # before a task is made, whose functions import jax
    subject = load_task(sent)
    _RUN[kind](subject, requests, answer)


def _prepare() -> None:
    """Imports jax for shapes alone."""
    from gspmd_lm.runtime import quiet

    quiet.import_jax()
    import jax

    from gspmd_lm.runtime import startup

    startup.simulate_later(SIMULATED)
    jax.config.update("jax_platforms", "cpu")
    quiet.collect_seldom()


class Newest:
    """The newest of the requests that have come. Older ones that nobody has begun to answer are dropped."""

    def __init__(self, requests: TextIO):
        self._requests, self._waiting = requests, queue.SimpleQueue[str]()
        threading.Thread(target=self._read, daemon=True).start()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while line := self._waiting.get():
            while not self._waiting.empty():
                line = self._waiting.get() or line
            yield json.loads(line)

    def _read(self) -> None:
        for line in self._requests:
            self._waiting.put(line)
        os._exit(0)  # whoever asked has ended


def _answer_layouts(subject: "Subject", requests: TextIO, answer: Answer) -> None:
    """Estimates layouts."""
    from gspmd_lm.explore.figures import Figures

    figures = Figures(subject)
    for request in Newest(requests):
        answer({"version": request["version"], **figures.estimate(Inputs.from_plain(request["inputs"]))})


def _answer_layers(subject: "Subject", requests: TextIO, answer: Answer) -> None:
    """Traces layers of layouts that have been estimated."""
    from gspmd_lm.explore.figures import Figures

    figures = Figures(subject)
    for request in Newest(requests):
        pinned = request["pinned"] and Inputs.from_plain(request["pinned"])
        answer({"version": request["version"], **figures.trace(Inputs.from_plain(request["inputs"]), pinned)})


def _compile(subject: "Subject", requests: TextIO, answer: Answer) -> None:
    """Compiles one layout."""
    from gspmd_lm.explore.compiling import explain_layout

    inputs = Inputs.from_plain(json.loads(requests.readline())["inputs"])
    _answer_or_refuse(lambda: explain_layout(subject, inputs, lambda line: answer({"progress": line})), answer)


def _search(subject: "Subject", requests: TextIO, answer: Answer) -> None:
    """Searches for the best layouts."""
    from gspmd_lm.explore.searching import search_layouts

    inputs = Inputs.from_plain(json.loads(requests.readline())["inputs"])
    _answer_or_refuse(lambda: search_layouts(subject, inputs, answer), answer)


def _answer_or_refuse(work: Callable[[], dict[str, Any]], answer: Answer) -> None:
    """Answers with what a job gives, or with the error that a user makes or meets."""
    try:
        answer({"done": work()})
    except (InputError, RunFailed) as error:
        answer({"error": str(error)})


_RUN: dict[str, Callable[[Any, TextIO, Answer], None]] = {
    "layouts": _answer_layouts,
    "layers": _answer_layers,
    "compile": _compile,
    "search": _search,
}


if __name__ == "__main__":
    from gspmd_lm.explore.worker import main as run  # not __main__'s: what is pickled knows the module's name

    run(sys.argv[1])
