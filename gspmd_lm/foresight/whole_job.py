"""The course of a whole job, predicted from its step: checkpoints, restarts, rows that hosts read, days and dollars.

A job is interrupted at random moments, independent of each other. It then goes on from its newest whole checkpoint.
The expected time of such a job, and its best interval between checkpoints, are those of J. T. Daly, "A higher order
estimate of the optimum checkpoint interval for restart dumps", FGCS 22 (2006), after J. W. Young, CACM 17 (1974).
Daly's job stands still while it writes. Here it stands still for a copy alone, and writes in the background. So a
checkpoint counts later, by the time of writing. In the renewal equations of the job that time is added to the time of a
restart, and the best interval stays as it is. `python -m benchmarks.preemptions` compares this with simulated jobs.
"""

import dataclasses
import math

import jax

from gspmd_lm.hardware.capacity import Assumptions, Price
from gspmd_lm.hardware.target import Target
from gspmd_lm.program.task import Task
from gspmd_lm.sharding.rules import Rules
from gspmd_lm.sharding.shapes import Arrays
from gspmd_lm.train.saving import SHARE

HOUR_S, DAY_S = 3600, 86400


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """The facts of a job on which its checkpoints, restarts and data depend. Bytes are counted from shapes."""

    steps: int
    step_time_s: float
    compile_s: float  # of its program, before the first step
    chips: int
    hosts: int
    checkpoint_bytes: int
    restored_bytes: int  # that one host reads to restore
    state_bytes: int  # on one device
    copied_bytes: int  # by one device to its host, for one checkpoint
    host_bytes_per_s: float  # between a device and its host; 0 where nothing is copied
    rows_per_s: float  # that one host reads
    read_bytes_per_s: float  # that these rows have as arrays
    checkpoint_minutes: float  # of the config
    checkpoint_every: int

    @property
    def work_s(self) -> float:
        """The time of all steps."""
        return self.steps * self.step_time_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class Course:
    """How a job fares on capacity of one kind. None for days: it is interrupted too often to ever end."""

    interruptions_per_day: float
    goodput: float  # the share of steps that are kept in all time
    days: float | None
    usd: float | None  # None: no price is known
    best_interval_s: float  # between checkpoints
    best_goodput: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pauses:
    """A job with the times that it spends beside its steps, however often it is interrupted."""

    work: Work
    assumed: Assumptions
    copy_s: float  # in which the run stands still for a checkpoint
    save_s: float  # from then until the checkpoint is whole
    seal_s: float  # the part of it in which each host reads back, for its checksums, what it has written
    fits_notice: bool  # whether a run that is asked to stop can end its step and save
    interval_s: float  # between checkpoints, as the config says
    restore_s: float
    return_s: float  # from an interruption until the run goes on


@dataclasses.dataclass(frozen=True, kw_only=True)
class WholeJob(Pauses):
    """What a job takes from its first minute to its last dollar."""

    on_demand: Course
    on_spot: Course | None  # None: nobody has said how often it is preempted


def describe_work(
    task: Task,
    rules: Rules,
    arrays: Arrays,
    target: Target,
    step_time_s: float,
    state_bytes: float,
    compile_s: float = 0.0,
) -> Work | None:
    """The facts of a training job; None for one that does not say how many steps it has.

    rules: filled. state_bytes: of weights and optimizer on one device.
    """
    train = task.config.train if task.config else task.train
    if train is None or target.chip is None or not step_time_s:
        return None
    name, spec = next(iter(task.specs().items()))
    splits_rows, *_ = rules.resolve("rules", spec.array, spec.axes, task.inputs[name].shape)[0]
    readers = min(target.hosts, rules.num_shards(splits_rows))  # hosts that read different rows
    sizes = [math.prod(like.shape) * like.dtype.itemsize for like in jax.tree.leaves((arrays.params, arrays.optimizer))]
    batch_bytes = sum(math.prod(one.shape) * jax.numpy.dtype(one.dtype).itemsize for one in task.inputs.values())
    return Work(
        steps=train.steps,
        step_time_s=step_time_s,
        compile_s=compile_s,
        chips=target.chips,
        hosts=target.hosts,
        checkpoint_bytes=sum(sizes),
        restored_bytes=round(state_bytes * target.devices / target.hosts),
        state_bytes=round(state_bytes),
        copied_bytes=round(sum(sizes) / target.devices),  # Orbax parts what several devices hold among them
        host_bytes_per_s=target.chip.host_bytes_per_s,
        rows_per_s=task.rows / readers / step_time_s,
        read_bytes_per_s=batch_bytes / readers / step_time_s,
        checkpoint_minutes=train.checkpoint_minutes,
        checkpoint_every=train.checkpoint_every,
    )


def predict(work: Work, assumed: Assumptions, price: Price) -> WholeJob:
    """The course of a job. price: of one of its chips."""
    storage = assumed.storage_gb_per_s * 1e9
    copy_s = _copy_s(work, work.copied_bytes)
    seal_s = work.checkpoint_bytes / work.hosts / storage
    save_s = 2 * seal_s  # each host writes its share, and reads it back
    restore_s = seal_s + work.restored_bytes / storage + _copy_s(work, work.state_bytes)
    fits_notice = work.step_time_s + copy_s + save_s <= assumed.notice_s
    pauses = Pauses(
        work=work,
        assumed=assumed,
        copy_s=copy_s,
        save_s=save_s,
        seal_s=seal_s,
        fits_notice=fits_notice,
        interval_s=_interval_s(work, copy_s, save_s),
        restore_s=restore_s,
        return_s=assumed.away_s + assumed.start_s + restore_s,
    )
    failures = work.chips / (assumed.failure_hours * HOUR_S)
    preemptions = assumed.preemptions_per_day / DAY_S
    return WholeJob(
        **vars(pauses),
        on_demand=_course(pauses, failures, 0.0, price.on_demand),
        on_spot=_course(pauses, failures, preemptions, price.spot) if preemptions else None,
    )


def _copy_s(work: Work, size_bytes: float) -> float:
    """The time of a copy between a device and its host; 0 for a CPU, which is its own host."""
    return size_bytes / work.host_bytes_per_s if work.host_bytes_per_s else 0.0


def _interval_s(work: Work, copy_s: float, save_s: float) -> float:
    """The time between the beginnings of two checkpoints, as `train.saving.Clock` and the config have it."""
    pause_s = max(60 * work.checkpoint_minutes, copy_s * (1 / SHARE - 1), save_s)
    by_time = save_s + pause_s if work.checkpoint_minutes else math.inf
    by_steps = work.checkpoint_every * work.step_time_s or math.inf
    return min(by_time, by_steps, work.work_s)


def _course(job: Pauses, failures: float, preemptions: float, usd_per_chip: float | None) -> Course:
    """failures, preemptions: how often in a second. A failure gives no notice."""
    least_s = min(2 * job.save_s, job.work.work_s)  # a run writes checkpoints for half of its time at most
    losing = failures + preemptions * (not job.fits_notice)
    best_s = min(max(best_interval_s(job.copy_s, 1 / losing), least_s), job.work.work_s)
    total_s, best_total_s = (
        expected_s(job, interval_s, failures, preemptions) for interval_s in (job.interval_s, best_s)
    )
    held_s = total_s / (1 + preemptions * job.assumed.away_s)  # nobody pays for a slice that is not there
    return Course(
        interruptions_per_day=(failures + preemptions) * DAY_S,
        goodput=job.work.work_s / total_s,
        days=total_s / DAY_S if total_s < math.inf else None,
        usd=None if usd_per_chip is None or total_s == math.inf else held_s / HOUR_S * job.work.chips * usd_per_chip,
        best_interval_s=best_s,
        best_goodput=job.work.work_s / best_total_s,
    )


def best_interval_s(copy_s: float, mean_s: float) -> float:
    """The time between two checkpoints with which a job ends first, by Daly's estimate.

    copy_s: in which the run stands still for one. mean_s: between two interruptions. Where copy_s is small this is
    Young's square root of 2 * copy_s * mean_s.
    """
    half = copy_s / (2 * mean_s)
    if half >= 1:
        return mean_s
    return math.sqrt(2 * copy_s * mean_s) * (1 + math.sqrt(half) / 3 + half / 9) - copy_s


def expected_s(job: Pauses, interval_s: float, failures: float, preemptions: float) -> float:
    """The expected time of a job whose interruptions come so often in a second; infinite if it never ends.

    Where the notice suffices, a preemption loses no step: the job stands still for a save and the way back.
    """
    kept = preemptions if job.fits_notice else 0.0
    total_s = _losing_s(job, interval_s, failures + preemptions - kept)
    stands_s = job.copy_s + job.save_s + _undisturbed_s(job.return_s, failures + preemptions)
    first_s = job.assumed.start_s + job.work.compile_s
    return first_s + total_s * (1 + (kept and kept * stands_s))


def _losing_s(job: Pauses, interval_s: float, rate: float) -> float:
    """The expected time of a job that loses what no whole checkpoint holds, as Daly has it."""
    back_s = job.return_s + job.save_s
    try:
        segment_s = math.exp(back_s * rate) * math.expm1((interval_s + job.copy_s) * rate) / rate
    except OverflowError:
        return math.inf
    return segment_s * job.work.work_s / interval_s


def _undisturbed_s(needed_s: float, rate: float) -> float:
    """The expected time until something that each interruption begins anew has gone on for `needed_s`."""
    try:
        return math.expm1(needed_s * rate) / rate
    except OverflowError:
        return math.inf
