"""The process of a job: `python -m gspmd_lm.explore.worker KIND` reads requests from stdin, and answers on stdout."""

import base64
import json
import os
import pickle
import sys
from collections.abc import Callable
from typing import Any, TextIO

Answer = Callable[[dict[str, Any]], None]


def main(kind: str) -> None:
    """Answers the requests of a job until stdin ends."""
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever prints, libraries in C too
    requests = sys.stdin

    def answer(message: dict[str, Any]) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    subject = pickle.loads(base64.b64decode(json.loads(requests.readline())))
    _prepare()
    _RUN[kind](subject, requests, answer)


def _prepare() -> None:
    """Imports jax for shapes alone."""
    from gspmd_lm.runtime import quiet

    quiet.import_jax()
    import jax

    from gspmd_lm.runtime import startup

    startup.simulate_later(8)
    jax.config.update("jax_platforms", "cpu")
    quiet.collect_seldom()


def _answer_layouts(subject: Any, requests: TextIO, answer: Answer) -> None:
    from gspmd_lm.explore.figures import Figures

    figures = Figures(subject)
    answer({"ready": True})
    for line in requests:
        request = json.loads(line)
        for part in figures.parts(request):
            answer({"version": request["version"], **part})


_RUN = {"layouts": _answer_layouts}


if __name__ == "__main__":
    from gspmd_lm.explore.worker import main as run  # not __main__'s: what is pickled knows the module's name

    run(sys.argv[1])
