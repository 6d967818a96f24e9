"""Expected times of whole jobs, beside jobs that are simulated from one interruption to the next one."""

import dataclasses
import math

import pytest

from benchmarks import preemptions
from gspmd_lm.errors import InputError
from gspmd_lm.foresight import whole_job
from gspmd_lm.foresight.whole_job import Assumptions
from gspmd_lm.hardware import target as targets

USUAL, _ = preemptions.CASES["256 chips, failures alone"]


@pytest.mark.parametrize("case", preemptions.CASES)
def test_expected_time_is_that_of_simulated_jobs(case):
    """Within four standard errors of the runs that are simulated here, and 0.3% for what the expectation leaves out."""
    (row,) = preemptions.compare([case], runs=200, seed=3)
    assert row["standard_error"] < 0.005
    assert abs(row["error"]) < 0.003 + 4 * row["standard_error"]


def test_best_interval_is_the_best_of_simulated_jobs():
    """Where the copy takes long, so that the interval matters, and writing takes no time."""
    work = dataclasses.replace(USUAL, copied_bytes=600_000_000_000, checkpoint_bytes=0)  # 40 s
    job = whole_job.predict(work, Assumptions(preemptions_per_day=24, notice_s=1))
    assert job.copy_s == 40 and not job.fits_notice

    def days(interval_s):
        return preemptions.simulate(dataclasses.replace(job, interval_s=interval_s), 300, seed=0).mean() / 86400

    best_s = job.on_spot.best_interval_s
    assert math.isclose(best_s, math.sqrt(2 * 40 * 3600), rel_tol=0.1)  # Young
    best = days(best_s)
    assert best < days(best_s / 2) * 0.99 and best < days(best_s * 2) * 0.99
    assert math.isclose(best, USUAL.work_s / 86400 / job.on_spot.best_goodput, rel_tol=0.01)


def test_notice_that_suffices_for_a_save():
    short, long = (whole_job.predict(USUAL, Assumptions(preemptions_per_day=8, notice_s=s)) for s in (103, 104))
    # 6 s of a step, 0.025 s of a copy, 1.5 s of 64 hosts that write, and 96 s in which the first one reads all of it.
    assert math.isclose(short.copy_s + short.save_s, 97.525)
    assert not short.fits_notice and long.fits_notice
    assert long.on_spot.goodput > short.on_spot.goodput


def test_time_and_price_are_those_of_the_steps_and_what_interrupts_them():
    job = whole_job.predict(USUAL, Assumptions(preemptions_per_day=4, away_s=3600), usd=300.0, spot_usd=100.0)
    assert job.on_demand.days * 24 * 300 == pytest.approx(job.on_demand.usd)
    # On spot nobody pays while hosts are away: an hour for each six hours in which they are there.
    assert job.on_spot.days * 24 * 6 / 7 * 100 == pytest.approx(job.on_spot.usd)
    assert job.on_spot.goodput == pytest.approx(USUAL.work_s / 86400 / job.on_spot.days)
    assert job.return_s == 3600 + 30 + job.restore_s


def test_a_job_that_is_interrupted_too_often_never_ends():
    job = whole_job.predict(USUAL, Assumptions(preemptions_per_day=1e6), 1.0, 1.0)
    assert job.on_spot.days is None and job.on_spot.usd is None and job.on_spot.goodput == 0
    assert job.on_demand.days


def test_interval_is_that_of_the_clock_of_a_run():
    def interval_s(**changes):
        return whole_job.predict(dataclasses.replace(USUAL, **changes), Assumptions()).interval_s

    assert interval_s() == pytest.approx(600 + 97.5)  # ten minutes after the last one was whole
    assert interval_s(checkpoint_minutes=0.0, checkpoint_every=50) == 300
    assert interval_s(checkpoint_minutes=0.0) == USUAL.work_s  # none before the end
    assert interval_s(checkpoint_minutes=0.1) == pytest.approx(2 * 97.5)  # writing for half of the time at most


def test_assumptions_are_read():
    assert whole_job.read_assumptions("notice_s=120, preemptions_per_day=4") == Assumptions(
        notice_s=120, preemptions_per_day=4
    )
    assert whole_job.read_assumptions("") == Assumptions()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("notice=120", "--assume=notice=120: no such key (did you mean notice_s?)"),
        ("notice_s=long", "--assume=notice_s=long: 'long' is no number of at least 0"),
        ("notice_s", "'' is no number"),
        ("notice_s=-1", "at least 0"),
        ("storage_gb_per_s=0", "more than 0"),
        ("away_s=inf", "no number"),
    ],
)
def test_wrong_assumptions_are_refused(text, said):
    with pytest.raises(InputError) as error:
        whole_job.read_assumptions(text)
    assert said in str(error.value) and "\n  fix   " in str(error.value)


@pytest.mark.parametrize(
    ("target", "chips", "hosts"),
    [
        ("v5e:1x1", 1, 1),
        ("v5e:4x4", 16, 4),
        ("2@v5e:4x4", 32, 8),
        ("v5p:4x4x4", 64, 16),
        ("tpu7x:2x2x1", 4, 1),
        ("h100:8", 8, 1),
        ("h100:4x8", 32, 4),
        ("cpu:8", 8, 1),
    ],
)
def test_chips_and_hosts_of_a_target(target, chips, hosts):
    found = targets.parse(target)
    assert (found.chips, found.hosts) == (chips, hosts)
    assert found.usd_per_hour(2.5) == 2.5 * chips and found.usd_per_hour(None) is None
