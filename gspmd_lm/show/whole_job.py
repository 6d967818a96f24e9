"""The section on a whole job: what it takes in days and dollars, and what its checkpoints, restarts and data need."""

import dataclasses

from gspmd_lm.foresight.whole_job import Course, WholeJob
from gspmd_lm.show.document import Cell, Fact, Folded, Notes, Section, figure, table_of
from gspmd_lm.units import human_amount, human_bytes, human_clock, human_seconds, plural

WORTH_SAYING = 0.005  # of goodput, which another interval between checkpoints gives


def section(job: WholeJob) -> Section:
    """What a terminal and a page show of a whole job. Where preemptions are known, it is on spot."""
    courses = {"on demand": job.on_demand} | ({"on spot": job.on_spot} if job.on_spot else {})
    table = table_of("The whole job", [_row(name, course) for name, course in courses.items()], ("capacity",))
    course = job.on_spot or job.on_demand
    facts = [
        Fact("expected goodput", f"{course.goodput:.1%}"),
        Fact("time", time_words(course), plural(job.work.steps, "step")),
    ]
    more = Folded("Restarts, data, and what is assumed", [Notes(_more(job))])
    return Section("The whole job", "predicted", [table, Notes(_notes(job, course)), more], facts)


def _row(name: str, course: Course) -> dict[str, Cell | str]:
    return {
        "capacity": name,
        "interrupted": f"{human_amount(course.interruptions_per_day)} a day",
        "goodput": f"{course.goodput:.1%}",
        "days": figure(course.days, human_amount),
        "dollars": figure(course.usd, human_amount),
        "best interval": f"{_time(course.best_interval_s)} ({course.best_goodput:.1%})",
    }


def words(job: WholeJob) -> str:
    """The time and the price of a job in a line: on spot, where preemptions are known."""
    where = " on spot" if job.on_spot else ""
    return f"{plural(job.work.steps, 'step')}{where}: {course_words(job.on_spot or job.on_demand)}"


def course_words(course: Course) -> str:
    """'17.3 days, 111,458 dollars, goodput 95.9%'"""
    usd = "" if course.usd is None else f", {human_amount(course.usd)} dollars"
    return f"{time_words(course)}{usd}, goodput {course.goodput:.1%}"


def time_words(course: Course) -> str:
    """'12.3 days', or that it never ends."""
    return "it never ends" if course.days is None else f"{human_amount(course.days)} days"


def checkpoint_words(job: WholeJob) -> str:
    """The size of a checkpoint, how long a save takes, and whether the notice of a preemption suffices for one."""
    notice = f"a notice of {human_clock(job.assumed.notice_s)}"
    enough = f"within {notice}" if job.fits_notice else f"too late for {notice}"
    size = human_bytes(job.work.checkpoint_bytes)
    return f"{size}, every {_time(job.interval_s)}; each is whole after {_time(job.copy_s + job.save_s)}, {enough}"


def _notes(job: WholeJob, course: Course) -> list[tuple[str, str]]:
    notes = [("checkpoints", checkpoint_words(job))]
    if course.best_goodput > course.goodput + WORTH_SAYING:
        minutes = (course.best_interval_s - job.save_s) / 60
        notes.append(("would help", f"--set train.checkpoint_minutes={minutes:.2g}: goodput {course.best_goodput:.1%}"))
    return notes


def _more(job: WholeJob) -> list[tuple[str, str]]:
    work, assumed = job.work, job.assumed
    parts = (assumed.away_s, "until there are hosts"), (assumed.start_s, "start"), (job.restore_s, "restore")
    return [
        ("a save", f"stands still {_time(job.copy_s)}; each host takes {_time(job.seal_s)} for its checksums"),
        ("way back", f"{_time(job.return_s)}: {', '.join(f'{_time(seconds)} {name}' for seconds, name in parts)}"),
        ("first start", f"compiles for {_time(work.compile_s)}" if work.compile_s else "compiles"),
        ("each host", f"reads {work.rows_per_s:.3g} rows, {human_bytes(work.read_bytes_per_s)} a second"),
        ("assumed", f"--assume={','.join(f'{name}={value:g}' for name, value in dataclasses.asdict(assumed).items())}"),
    ]


def _time(seconds: float) -> str:
    return human_clock(seconds) if seconds >= 100 else human_seconds(seconds)
