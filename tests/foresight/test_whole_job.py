"""Expected times of whole jobs, beside jobs that are simulated from one interruption to the next one."""

import dataclasses
import math

import jax
import pytest

from benchmarks import measure, preemptions
from gspmd_lm import api
from gspmd_lm.errors import InputError
from gspmd_lm.foresight import whole_job
from gspmd_lm.hardware import capacity
from gspmd_lm.hardware import target as targets
from gspmd_lm.hardware.capacity import Assumptions, Price
from gspmd_lm.train import decoder
from tests.launched import ROOT

USUAL, _ = preemptions.CASES["256 chips, failures alone"]


@pytest.mark.parametrize("case", preemptions.CASES)
def test_expected_time_is_that_of_simulated_jobs(case):
    """Within four standard errors of the runs that are simulated here, and 0.3% for what the expectation leaves out."""
    (row,) = preemptions.compare([case], runs=200, seed=3)
    assert row["standard_error"] < 0.005
    assert abs(row["error"]) < 0.003 + 4 * row["standard_error"]


def test_the_table_is_what_was_simulated():
    rows = measure.read("preemptions")
    assert preemptions.table(rows) in (ROOT / "benchmarks/README.md").read_text()
    assert [row["case"] for row in rows] == list(preemptions.CASES)
    assert all(row["runs"] == 10_000 and abs(row["error"]) < 0.002 for row in rows)


def test_best_interval_is_the_best_of_simulated_jobs():
    """Where the copy takes long, so that the interval matters, and writing takes no time."""
    work = dataclasses.replace(USUAL, copied_bytes=600_000_000_000, checkpoint_bytes=0)  # 40 s
    job = whole_job.predict(work, Assumptions(preemptions_per_day=24, notice_s=1), Price())
    assert job.copy_s == 40 and not job.fits_notice

    def days(interval_s):
        return preemptions.simulate(dataclasses.replace(job, interval_s=interval_s), 300, seed=0).mean() / 86400

    best_s = job.on_spot.best_interval_s
    assert math.isclose(best_s, math.sqrt(2 * 40 * 3600), rel_tol=0.1)  # Young
    best = days(best_s)
    assert best < days(best_s / 2) * 0.99 and best < days(best_s * 2) * 0.99
    assert math.isclose(best, USUAL.work_s / 86400 / job.on_spot.best_goodput, rel_tol=0.01)


def test_notice_that_suffices_for_a_save():
    short, long = (whole_job.predict(USUAL, Assumptions(preemptions_per_day=8, notice_s=s), Price()) for s in (9, 10))
    # 6 s of a step, 0.025 s of a copy, 1.5 s in which each of 64 hosts writes its share, and as long to read it back.
    assert math.isclose(short.copy_s + short.save_s, 3.025)
    assert not short.fits_notice and long.fits_notice
    assert long.on_spot.goodput > short.on_spot.goodput


def test_facts_are_those_of_the_state_that_a_run_saves():
    config, rules = api.load_config("tiny", ["data.batch=32"]), api.load_rules("fsdp8")
    step, target = api.build(config, rules), targets.parse("h100:4x2")
    task = decoder.task(config)
    work = whole_job.describe_work(task, rules, step.arrays, target, 0.5, 1000.0)
    saved = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(step.abstract_state))
    assert saved - 100 < work.checkpoint_bytes <= saved  # besides counters of steps
    assert work.steps == config.train.steps and (work.chips, work.hosts) == (8, 4)
    assert work.copied_bytes == pytest.approx(work.checkpoint_bytes / 8) and work.restored_bytes == 2000
    assert work.rows_per_s == 32 / 4 / 0.5
    batch_bytes = sum(math.prod(one.shape) * 4 for one in task.inputs.values())
    assert work.read_bytes_per_s == batch_bytes / 4 / 0.5
    # Under tensor parallelism all hosts read the same rows.
    alike = whole_job.describe_work(task, api.load_rules("tp8"), step.arrays, target, 0.5, 1000.0)
    assert alike.rows_per_s == 32 / 0.5
    assert whole_job.describe_work(task, rules, step.arrays, targets.parse("cpu:8"), 0.5, 1000.0) is None


def test_time_and_price_are_those_of_the_steps_and_what_interrupts_them():
    job = whole_job.predict(USUAL, Assumptions(preemptions_per_day=4, away_s=3600), Price(2.0, 0.5))
    assert job.on_demand.days * 24 * 256 * 2.0 == pytest.approx(job.on_demand.usd)
    # On spot nobody pays while hosts are away: an hour for each six hours in which they are there.
    assert job.on_spot.days * 24 * 6 / 7 * 256 * 0.5 == pytest.approx(job.on_spot.usd)
    assert job.on_spot.goodput == pytest.approx(USUAL.work_s / 86400 / job.on_spot.days)
    assert job.return_s == 3600 + 30 + job.restore_s


def test_a_job_that_is_interrupted_too_often_never_ends():
    job = whole_job.predict(USUAL, Assumptions(preemptions_per_day=1e6), Price(1.0, 1.0))
    assert job.on_spot.days is None and job.on_spot.usd is None and job.on_spot.goodput == 0
    assert job.on_demand.days


def test_interval_is_that_of_the_clock_of_a_run():
    def interval_s(**changes):
        return whole_job.predict(dataclasses.replace(USUAL, **changes), Assumptions(), Price()).interval_s

    assert interval_s() == pytest.approx(600 + 3)  # ten minutes after the last one was whole
    assert interval_s(checkpoint_minutes=0.0, checkpoint_every=50) == 300
    assert interval_s(checkpoint_minutes=0.0) == USUAL.work_s  # none before the end
    assert interval_s(checkpoint_minutes=0.01) == pytest.approx(2 * 3)  # writing for half of the time at most


def test_assumptions_are_read():
    assert capacity.read_assumptions("notice_s=120, preemptions_per_day=4") == Assumptions(
        notice_s=120, preemptions_per_day=4
    )
    assert capacity.read_assumptions("") == Assumptions()


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
        capacity.read_assumptions(text)
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
