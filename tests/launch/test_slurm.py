"""The loop around jobs of Slurm, with stand-ins for its commands."""

import pytest

from gspmd_lm.errors import STOPPED, WRONG_INPUT, RunFailed
from gspmd_lm.launch import loop
from tests.launch.cloud import SAVES

FINISHED = 'echo "step 9/9"'


def job(cloud, **keys):
    workdir = str(cloud.at / "runs/one")
    return cloud.job("slurm", accelerator="h100:2x1", workdir=workdir, python=str(cloud.at / "trained"), **keys)


def submitted(cloud):
    return (cloud.at / "submitted").read_text().splitlines()


def test_a_job_that_stopped_at_its_time_limit_is_followed_by_another(cloud):
    cloud.attempts(f'echo "step 4/9"; exit {STOPPED}', FINISHED)
    assert cloud.launch(job(cloud)) == 0
    assert len(set(submitted(cloud))) == 2 and len(cloud.started(1)) == 2
    assert cloud.started()[0].endswith(f"main.py train --config=tiny --rules=fsdp8 --workdir={cloud.at}/runs/one")
    assert "attempt 1 stopped with work left at step 4" in cloud.said and "step 9/9" in cloud.said


def test_a_job_whose_node_failed_is_requeued_by_slurm(cloud):
    fails = 'test $SLURM_PROCID = 0 || sleep 60; touch "$STAND_IN/requeue"; kill -KILL $(cat "$STAND_IN/job")'
    cloud.attempts(f'echo "step 4/9"; {fails}; sleep 60', FINISHED)
    assert cloud.launch(job(cloud)) == 0
    assert len(submitted(cloud)) == 1 and len(cloud.started()) == 2


def test_a_job_that_was_killed_is_asked_for_again(cloud):
    """As Slurm ends one that does not stop in time."""
    cloud.attempts('echo "step 4/9"; test $SLURM_PROCID = 1 || { sleep 0.3; scancel; }; sleep 60', FINISHED)
    assert cloud.launch(job(cloud)) == 0
    assert len(submitted(cloud)) == 2 and "attempt 1 lost its processes at step 4" in cloud.said


WAIT = 'until test -e "$STAND_IN/answers_again"; do sleep 0.05; done'


def test_a_controller_that_does_not_answer_starts_nothing_twice(cloud):
    cloud.attempts('echo "step 4/9"; touch "$STAND_IN/no_answer"; ' + WAIT + '; echo "step 9/9"')
    assert cloud.launch(job(cloud)) == 0
    assert len(submitted(cloud)) == 1 and len(cloud.started()) == 1


def test_wrong_input_is_never_tried_again(cloud):
    cloud.attempts(f"test $SLURM_PROCID = 1 && exit {WRONG_INPUT}; sleep 60")
    assert cloud.launch(job(cloud, logs=str(cloud.at / "my logs"))) == WRONG_INPUT
    assert len(submitted(cloud)) == 1


def test_a_job_that_is_refused_comes_to_an_end(cloud, monkeypatch):
    monkeypatch.setattr(loop, "UNREACHABLE", 3)
    (cloud.at / "refused").touch()
    with pytest.raises(RunFailed, match="3 attempts failed"):
        cloud.launch(job(cloud))
    assert "Invalid account" in (cloud.at / "logs/1/slurm.txt").read_text()


def test_a_budget_that_is_spent_lets_the_tasks_save(cloud, monkeypatch):
    cloud.attempts(SAVES)
    assert cloud.launch(job(cloud, max_hours=5.0), tell=cloud.spend_at("step 1/9", monkeypatch)) == STOPPED
    assert "saved" in cloud.said and "saved" in (cloud.at / "logs/1/1.log").read_text()


@pytest.mark.parametrize(("elastic", "nodes"), [(True, "1-2"), (False, "2")])
def test_an_elastic_job_takes_the_nodes_that_there_are(cloud, elastic, nodes):
    cloud.attempts(FINISHED)
    assert cloud.launch(job(cloud, elastic=elastic)) == 0
    assert f"#SBATCH --nodes={nodes}\n" in (cloud.at / "logs/1/job.sbatch").read_text()
    assert (" --elastic " in cloud.started()[0]) == elastic
