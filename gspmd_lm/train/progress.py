"""The progress of a run: values and a line at each log, a bar on terminals, and traces of steps."""

import contextlib
import logging
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
from etils import epath
from rich.bar import Bar
from rich.console import Console
from rich.progress import Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn

from gspmd_lm import files
from gspmd_lm.train.programs import MeasuredStep
from gspmd_lm.units import human_clock, human_short
from gspmd_lm.workdir.wall_time import WallTime

_log = logging.getLogger(__name__)
SHORT = {"tokens": "tok", "rows": "rows"}  # the unit of a speed -> its abbreviation
HEADED = 20  # a heading stands above every so many lines
WAITING, WAITING_S = 0.1, 0.005  # a step that waits for data for such a share of its time, and so long, says so
# Heading, width, and how a value is shown. A line has 80 columns at most: docs/monitoring.md explains the columns.
_COLUMNS: tuple[tuple[str, int, str, Callable[[float], str]], ...] = (
    ("|grad|", 7, "gradient_norm", lambda value: _digits(value, 4)),
    ("time", 8, "step_time_s", lambda value: _time(value)),
    ("tok/s", 7, "tokens_per_s", human_short),
    ("rows/s", 7, "rows_per_s", human_short),
    ("MFU", 5, "mfu", lambda value: f"{value:.0%}"),
    ("tokens", 8, "tokens", human_short),
    ("rows", 8, "rows", human_short),
    ("epoch", 7, "epoch", lambda value: _digits(value, 3)),
    ("left", 7, "left_s", human_clock),
)


def clock(console: Console, what: str, main: bool = True) -> Progress:
    """A context that shows how long something takes, while it does. It shows nothing where there is no terminal."""
    columns = TextColumn("{task.description} ..."), TimeElapsedColumn()
    shown = Progress(
        *columns, console=console, transient=True, refresh_per_second=2, disable=not (main and console.is_terminal)
    )
    shown.add_task(what, total=None)
    return shown


class _StepsColumn(ProgressColumn):
    """The share of steps that are done. The rest is blank: a line of another colour may look like steps, too."""

    def render(self, task: Task) -> Bar:
        return Bar(task.total or 1, 0, task.completed, color="blue")


class Meter:
    """Turns the results of steps and the clock into the values that are logged.

    The first step also waits for its rows and for devices that start, so it has no speed. Neither have evaluation and
    saving, after which a new interval begins.
    """

    def __init__(
        self,
        start: int,
        stop: int,
        counted: tuple[int, str],
        epochs: float,
        flops: float,
        peak_flops_per_s: float | None,
    ):
        """counted, epochs, flops: of one step. peak_flops_per_s: of all devices together; None if it is not known.

        counted: how many tokens, or rows, and which of the two words.
        """
        self.start, self.stop = start, stop
        self.count, self.unit = counted
        self.epochs, self.flops, self.peak_flops_per_s = epochs, flops, peak_flops_per_s
        self.first_step_s: float | None = None  # from the beginning until the first step had ended
        self.per_s: float | None = None  # tokens or rows, in the last interval
        self.intervals: list[tuple[int, float, float]] = []  # the last step of each, and seconds of a step and its wait
        self.device = _Device()
        self.begin()

    def begin(self) -> None:
        """Begins before the first step."""
        self.began, self.once_s = time.perf_counter(), 0.0
        self.restart(self.start)

    def restart(self, step: int) -> None:
        """Begins a new interval, so that evaluation and saving are not counted as steps."""
        self.interval_began, self.at, self.wait_s = time.perf_counter(), step, 0.0

    @contextlib.contextmanager
    def once(self) -> Iterator[None]:
        """A context for what happens only once, such as compiling: the time left does not count it."""
        before = time.perf_counter()
        yield
        self.once_s += time.perf_counter() - before

    def waiting(self, batches: Iterable[Any], wall_time: WallTime) -> Iterator[Any]:
        """The batches. Recorded, and counted as `data`, is how long the devices had nothing to do until each came."""
        batches = iter(batches)
        while True:
            began = time.perf_counter()
            with wall_time.spending("data"):
                batch = next(batches, None)
            waited_s = time.perf_counter() - began
            idle_s = min(waited_s, self.device.idle_s(began))
            wall_time.move("data", "steps", waited_s - idle_s)
            self.wait_s += idle_s
            if batch is None:
                return
            yield batch

    def read(self, step: int, values: Mapping[str, jax.Array]) -> dict[str, float]:
        """The values of the step just dispatched, and the speed since the last read. Waits for the step."""
        logged = {name: float(value) for name, value in jax.device_get(values).items()}
        now, steps = time.perf_counter(), step - self.at
        if "cross_entropy" in logged:
            logged["perplexity"] = math.exp(min(logged.pop("cross_entropy"), 700.0))
        logged |= {self.unit: float(step * self.count)} | ({"epoch": step * self.epochs} if self.epochs else {})
        if self.first_step_s is None:
            self.first_step_s = now - self.began
        else:
            step_time_s = (now - self.interval_began) / steps
            self.per_s = self.count / step_time_s
            logged |= {
                "step_time_s": step_time_s,
                f"{self.unit}_per_s": self.per_s,
                "data_wait_s": self.wait_s / steps,
            }
            self.intervals.append((step, step_time_s, self.wait_s / steps))
            if self.peak_flops_per_s:
                logged["mfu"] = self.flops / step_time_s / self.peak_flops_per_s
        self.restart(step)
        return logged

    def measured_step(
        self, workdir: epath.Path, profile: tuple[int, int] | None, trace: Path | None
    ) -> MeasuredStep | None:
        """The step of the run so far; None after fewer than two steps.

        profile: the steps of the trace, which slows them down. trace: its file, if it is written.
        """
        if not self.intervals:
            return None
        last, (first, end) = self.intervals[-1][0], profile or (self.stop, self.stop)
        untraced = [interval for interval in self.intervals if not first < interval[0] <= end]
        _, seconds, wait_s = map(statistics.median, zip(*(untraced or self.intervals), strict=True))
        return MeasuredStep(workdir, seconds, wait_s, last - self.start, trace, min(last, end) - first)

    def left_s(self, step: int) -> float | None:
        """The time until the last step, at the speed since the first one, evaluation and saving included."""
        steps = step - self.start - 1
        if self.first_step_s is None or not steps:
            return None
        taken_s = time.perf_counter() - self.began - self.first_step_s - self.once_s
        return taken_s / steps * (self.stop - step)


class _Device:
    """Notes when the devices finish the step that was dispatched last.

    A step is dispatched while earlier ones run, so a wait for its rows costs nothing as long as these are not done.
    """

    def __init__(self) -> None:
        self._thread, self._end = ThreadPoolExecutor(1), None

    def follow(self, values: Any) -> None:
        """From now on, the end of the step whose results these are counts."""
        self._end = self._thread.submit(_end_of, values)

    def idle_s(self, began: float) -> float:
        """For how many seconds since `began` there was nothing to do."""
        now, end = time.perf_counter(), self._end
        if end is None:
            return now - began
        return now - max(began, end.result()) if end.done() and not end.exception() else 0.0


def _end_of(values: Any) -> float:
    """The time at which values are computed."""
    jax.block_until_ready(values)
    return time.perf_counter()


class Shown:
    """The lines and the bar of a run from step `start` to step `stop`. Other processes than the first tell of waits."""

    def __init__(self, console: Console, start: int, stop: int, *, main: bool, mfu: bool, unit: str = "tokens"):
        """mfu: whether the peak of the devices is known, so that lines have that column. unit: tokens or rows."""
        self.console, self.stop, self.main, self.mfu, self.unit = console, stop, main, mfu, unit
        self.lines, self.skipped, self.loss = 0, 0.0, ""
        columns = (
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            _StepsColumn(),
            TextColumn("{task.fields[loss]}"),
            TextColumn("{task.fields[speed]}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
        )
        watched = main and console.is_terminal
        # A context, in which the bar is on the terminal.
        self.bar = Progress(*columns, console=console, transient=True, disable=not watched, expand=True)
        self.task = self.bar.add_task("", total=stop, completed=start, loss="", speed="", left="")

    def advance(self, step: int, speed: float | None, left_s: float | None) -> None:
        """Moves the bar to `step`. speed: tokens or rows per second; None where it is not known yet, as `left_s` is."""
        if self.bar.disable:
            return
        self.bar.update(
            self.task,
            completed=step,
            loss=self.loss,
            speed=f"{human_short(speed)} {SHORT[self.unit]}/s" if speed else "",
            left=f"{human_clock(left_s)} left" if left_s is not None else "",
        )

    def line(self, step: int, values: Mapping[str, float], left_s: float | None) -> None:
        """Prints the line of a step, with the heading where it is due, and says what was skipped since the last one."""
        values = values if left_s is None else {**values, "left_s": left_s}
        self.loss = f"loss {_digits(values['loss'], 5)}"
        if not self.main:
            if waiting := describe_wait(values):  # the line of the first process shows its own share alone
                _log.warning("process %d, step %d:%s", jax.process_index(), step, waiting)
            return
        self.bar.update(self.task, loss=self.loss)
        if self.lines % HEADED == 0:
            self._print(heading(self.stop, self.mfu, self.unit))
        self.lines += 1
        self._print(line(step, self.stop, values, self.mfu, self.unit))
        if values["skipped_steps"] > self.skipped:
            self._print(
                f"step {step}: {values['skipped_steps']:.0f} steps so far changed nothing, because the loss or "
                "gradient was not finite"
            )
        self.skipped = values["skipped_steps"]

    def _print(self, text: str) -> None:
        self.console.print(text, soft_wrap=True, highlight=False, markup=False)


COUNTS = ("eval_tokens", "eval_labels", "eval_pairs", "eval_objects")  # of what an evaluation has scored


def heading(stop: int, mfu: bool, unit: str = "tokens") -> str:
    """The names of the columns of `line`, which have MFU only where it is known, and tokens or rows."""
    return " " * len(_step(stop, stop, 0.0)) + "".join(f"{name:>{width}}" for name, width, _, _ in _columns(mfu, unit))


def line(step: int, stop: int, values: Mapping[str, float], mfu: bool, unit: str = "tokens") -> str:
    """The line of a step: at most 80 columns. A dash stands for what is not known, as no speed is at the first step.

    Behind them stands the share of the time in which the devices waited for data, if it is large.
    """
    cells = [f"{show(values[key]) if key in values else '-':>{width}}" for _, width, key, show in _columns(mfu, unit)]
    return _step(step, stop, values["loss"]) + "".join(cells) + describe_wait(values)


def describe_wait(values: Mapping[str, float]) -> str:
    """'  31% waiting for data', if steps did so for a share of their time that should be known; '' if not."""
    waited_s, step_time_s = values.get("data_wait_s", 0.0), values.get("step_time_s", 1.0)
    is_long = waited_s >= max(WAITING_S, WAITING * step_time_s)
    return f"  {waited_s / step_time_s:.0%} waiting for data" if is_long else ""


def scores(values: Mapping[str, float]) -> str:
    """The scores of an evaluation in words: 'loss 2.3456, perplexity 10.44, accuracy 0.532'."""
    digits = {"loss": 4, "perplexity": 2}
    names = {name.removeprefix("eval_"): value for name, value in values.items() if name not in COUNTS}
    return ", ".join(f"{name} {value:.{digits.get(name, 3)}f}" for name, value in names.items())


def describe_scored(values: Mapping[str, float]) -> str:
    """The size of an evaluation in words: '1,024 tokens were scored'."""
    name = next(name for name in COUNTS if name in values)
    return f"{values[name]:,.0f} {name.removeprefix('eval_')} were scored"


def sample(prompt: str, text: str) -> str:
    """A text that the model wrote, below its prompt. What would control a terminal is shown as U+FFFD."""
    lines = "".join(char if char.isprintable() or char == "\n" else "\ufffd" for char in prompt + text).split("\n")
    return "sample: " + "\n        ".join(lines)


def _columns(mfu: bool, unit: str) -> list[tuple[str, int, str, Callable[[float], str]]]:
    others = [other for other in SHORT if other != unit]
    left_out = {*others, *(f"{other}_per_s" for other in others), *([] if mfu else ["mfu"])}
    return [column for column in _COLUMNS if column[2] not in left_out]


def _step(step: int, stop: int, loss: float) -> str:
    of = f"/{stop}" if stop < 1_000_000 else ""
    return f"step {step:>{len(str(stop))}}{of}  loss {_digits(loss, 5):<6}"


def _digits(value: float, most: int) -> str:
    """A number with `most` digits: '2.3456', '12.346', '0.532', '1e+09'."""
    if not math.isfinite(value):
        return str(value)
    before = len(f"{abs(value):.0f}") if abs(value) >= 1 else 1
    return f"{value:.{most - before}f}" if before <= most else f"{value:.0e}"


def _time(value: float) -> str:
    """The time of a step in at most 6 characters: '412 ms', '1.23 s', '0.9 ms'."""
    if value < 0.01:
        return f"{value * 1e3:.1f} ms"
    if value < 1:
        return f"{value * 1e3:.0f} ms"
    return f"{_digits(value, 3)} s" if value < 1000 else f"{value:.0f} s"


@contextlib.contextmanager
def profile_steps(
    profile: tuple[int, int] | None, begin: int, end: int, folder: epath.Path, say: Callable[[str], None]
) -> Iterator[Callable[[int | None], Path | None]]:
    """A context of a function that is called before each step, with its number. It traces the steps in `profile`.

    It gives the file of this process's trace once that is written; the file is there as long as the context. None in
    place of a number ends a trace early.
    begin, end: of the run. folder: may be remote, because a trace is written elsewhere first, and then copied there.
    `say` warns where the run does not come to the first step of the trace. It also warns where the trace cannot be
    written, and the run goes on without it.
    """
    start, stop = profile or (-1, -1)
    tracing = False
    if profile and not begin <= start < end:
        say(f"warning: --profile={start}:{stop} traces nothing, because the run goes from step {begin} to {end}")

    def at(step: int | None) -> Path | None:
        nonlocal tracing
        try:
            if tracing and step in (stop, None):
                tracing = False
                jax.profiler.stop_trace()
                _copy(Path(local), folder)
                say(f"trace of steps {start} to {stop}: {folder}")
                return next(Path(local).rglob("*.xplane.pb"), None)
            if step == start:
                jax.profiler.start_trace(local)
                tracing = True
        except Exception as error:  # the profiler and stores raise what they like
            why = " ".join(str(error).split())[:300]
            say(f"warning: the trace of steps {start} to {stop} cannot be written to {folder} ({why}); the run goes on")
        return None

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as local:
        try:
            yield at
        finally:
            at(None)


def _copy(local: Path, folder: epath.Path) -> None:
    """Copies the files of a local folder, and of the folders in it, to another one."""
    for file in filter(Path.is_file, local.rglob("*")):
        copy = folder / file.relative_to(local).as_posix()
        copy.parent.mkdir(parents=True, exist_ok=True)
        files.replace(copy, file.read_bytes())
