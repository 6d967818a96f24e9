"""A trace of some steps of a run, for xprof and Perfetto."""

import contextlib
from collections.abc import Callable, Iterator

import jax
from etils import epath


@contextlib.contextmanager
def steps(
    profile: tuple[int, int] | None, begin: int, end: int, folder: epath.Path, say: Callable[[str], None]
) -> Iterator[Callable[[int], None]]:
    """A function to call with each step before the step runs. It writes a trace of the steps in `profile`.

    begin, end: of the run. `say` warns where the run does not come to the first step of the trace.
    """
    start, stop = profile or (-1, -1)
    tracing = False
    if profile and not begin <= start < end:
        say(f"warning: --profile={start}:{stop} traces nothing, because the run goes from step {begin} to {end}")

    def told(step: int | None) -> None:
        nonlocal tracing
        if tracing and step in (stop, None):
            jax.profiler.stop_trace()
            tracing = False
            say(f"trace of steps {start} to {stop}: {folder}")
        elif step == start:
            jax.profiler.start_trace(str(folder))
            tracing = True

    try:
        yield told
    finally:
        told(None)
