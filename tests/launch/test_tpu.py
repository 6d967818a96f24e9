"""The loop around a run on a TPU slice, with stand-ins for gcloud and for the hosts."""

import os
import signal
import time

import pytest

from gspmd_lm.errors import STOPPED, WRONG_INPUT, InputError, RunFailed
from gspmd_lm.launch import logs, loop, places
from tests.launch.cloud import HOSTS, QUICK, SAVES

# One host tells the stand-in that it is time, when the other has begun too.
PREEMPTED = 'echo "step 3/9"; case $HOME in *host0) all_began; touch "$STAND_IN/preempt";; esac; sleep 60'
FINISHED = 'echo "step 9/9"'


SLOW = pytest.mark.slow


@pytest.mark.parametrize("place", ["queued-resource", pytest.param("tpu-vm", marks=SLOW)])
def test_a_preempted_slice_is_deleted_asked_for_again_and_the_run_goes_on(cloud, place):
    cloud.attempts(PREEMPTED, PREEMPTED, FINISHED)
    assert cloud.launch(cloud.job(place, spot=True)) == 0
    created, deleted = cloud.calls("create"), cloud.calls("delete")
    assert len(created) == 3 and len(deleted) == 2
    assert all("--spot" in words and "--accelerator-type=v5litepod-8" in words for words in created)
    assert len({word for words in created for word in words if word.startswith("--labels=")}) == 1
    assert len(cloud.started()) == len(cloud.started(1)) == 3
    assert cloud.started()[0] == ("main.py train --config=tiny --rules=fsdp8 --workdir=gs://bucket/runs/one "
                                  "--compile_cache=gs://bucket/runs/compiled")  # fmt: skip
    assert (cloud.at / "installed").read_text().count("pip install --quiet -e .[tpu,gcs]") == 3 * HOSTS
    assert "attempt 1 was preempted at step 3" in cloud.said
    assert "step 9/9" in cloud.said and "the run is finished" in cloud.said
    assert logs.exit_code(cloud.at / "logs/3/1.log") == 0


@pytest.mark.long
def test_a_queued_request_for_several_slices(cloud):
    """Each slice has hosts 0 and 1, and the log of each host is kept."""
    cloud.attempts('echo "step 3/9"; all_began 4; case $HOME in *host3) exit 1;; esac', FINISHED)
    assert cloud.launch(cloud.job(accelerator="2@v5e:2x4", autodelete=True)) == 0
    (created,) = cloud.calls("create")
    assert "--node-count=2" in created and "--accelerator-type=v5litepod-8" in created
    assert not any(word.startswith("--node-id") for word in created)
    assert [len(cloud.started(host)) for host in range(5)] == [2, 2, 2, 2, 0]
    assert (cloud.at / "installed").read_text().count("pip install") == 4
    assert any(line.startswith("slice1/1: ") and line.endswith("ended with 1") for line in cloud.said), cloud.said
    assert logs.exit_code(cloud.at / "logs/2/slice1/1.log") == 0
    assert len(cloud.calls("delete")) == 1


def test_a_run_is_not_finished_where_nothing_is_known_of_a_slice(cloud, tmp_path):
    place = places.find(cloud.job(accelerator="2@v5e:2x4"))
    for folder in (tmp_path, tmp_path / "slice1"):
        assert place.exit_code([], tmp_path) is None
        folder.mkdir(exist_ok=True)
        (folder / "0.log").write_text(f"step 9/9\n{logs.ENDED} 0\n")
    assert place.exit_code([], tmp_path) == 0


@pytest.mark.long
def test_a_lost_slice_of_several_loses_the_request(cloud):
    cloud.attempts(PREEMPTED.replace("all_began", "all_began 4"), FINISHED)
    cloud.behave(after=["ACTIVE"])
    assert cloud.launch(cloud.job(accelerator="2@v5e:2x4")) == 0
    assert len(cloud.calls("create")) == 2 and len(cloud.calls("delete")) == 1


@SLOW
def test_a_queue_is_waited_for(cloud):
    cloud.attempts(FINISHED)
    assert cloud.launch(cloud.job()) == 0
    assert [line for line in cloud.said if line.startswith("one is")][:3] == [
        "one is absent", "one is waiting", "one is ready"]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("node", ["PREEMPTED", *(pytest.param(node, marks=SLOW) for node in ("TERMINATED", None))])
def test_a_request_that_is_still_active_without_its_slice_is_lost(cloud, node):
    """Seen by others: skypilot-org/skypilot, issue 1468."""
    cloud.behave(after=["ACTIVE"], node_after=node)
    cloud.attempts(PREEMPTED, FINISHED)
    assert cloud.launch(cloud.job()) == 0
    assert len(cloud.calls("create")) == 2 and len(cloud.started()) == 2


@SLOW
def test_a_connection_that_hangs_after_a_preemption_does_not_hold_the_loop(cloud):
    cloud.behave(hanging_ssh=1)
    cloud.attempts(PREEMPTED, FINISHED)
    began = time.monotonic()
    assert cloud.launch(cloud.job()) == 0
    assert time.monotonic() - began < 300 and len(cloud.started()) == 2


@pytest.mark.long
def test_a_request_whose_answer_was_lost_is_used(cloud):
    cloud.behave(lying_create=1, no_answer=1)
    cloud.attempts(FINISHED)
    assert cloud.launch(cloud.job(autodelete=True)) == 0
    assert len(cloud.calls("create")) == 1 and len(cloud.calls("delete")) == 1


@SLOW
def test_what_may_pass_is_tried_again(cloud):
    cloud.behave(no_capacity=2, refused_ssh=1, not_yet=1)
    cloud.attempts(PREEMPTED, FINISHED)
    assert cloud.launch(cloud.job()) == 0
    assert len(cloud.calls("create")) == 4 and len(cloud.calls("delete")) == 2


def test_what_will_not_pass_is_said_at_once(cloud):
    cloud.behave(no_rights=9)
    cloud.attempts(FINISHED)
    with pytest.raises(RunFailed, match=r"one cannot be had: .*PERMISSION_DENIED"):
        cloud.launch(cloud.job())
    assert len(cloud.calls("create")) == 1


@pytest.mark.long
def test_a_slice_that_cannot_be_used_is_not_paid_for_without_end(cloud, monkeypatch):
    monkeypatch.setattr(loop, "UNREACHABLE", 3)
    cloud.behave(refused_ssh=99)
    cloud.attempts(FINISHED)
    with pytest.raises(RunFailed, match="one is there and cannot be used"):
        cloud.launch(cloud.job(autodelete=True))
    assert len(cloud.calls("delete")) == 1 and len(cloud.calls("create")) == 1


def test_two_launches_of_one_run_are_refused(cloud):
    cloud.attempts(FINISHED)
    refused = []

    def launch_again(line):
        if line == "step 9/9":
            with pytest.raises(InputError, match="another launch of one is at work"):
                loop.Launch(places.find(cloud.job()), 0.0, print, QUICK).run()
            refused.append(line)

    assert cloud.launch(cloud.job(), tell=launch_again) == 0 and refused


def make_slice(cloud, job):
    """A slice that something else has created."""
    places.find(job).create("another")


def test_what_launch_did_not_create_is_used_and_never_deleted(cloud):
    make_slice(cloud, cloud.job())
    cloud.attempts(FINISHED)
    assert cloud.launch(cloud.job(autodelete=True)) == 0
    assert cloud.calls("delete") == [] and "one stays: launch did not create it" in cloud.said


@SLOW
def test_what_launch_did_not_create_stays_when_it_is_lost(cloud):
    make_slice(cloud, cloud.job())
    cloud.attempts(PREEMPTED, FINISHED)
    with pytest.raises(RunFailed, match="launch did not create it"):
        cloud.launch(cloud.job(autodelete=True))
    assert cloud.calls("delete") == [] and len(cloud.started()) == 1


@pytest.mark.long
def test_a_cut_connection_does_not_start_the_run_again(cloud):
    cut = 'case $HOME in *host0) all_began; touch "$STAND_IN/cut";; esac'
    cloud.attempts(f'echo "step 1/9"; {cut}; sleep 1; echo "step 9/9"')
    assert cloud.launch(cloud.job()) == 0
    assert len(cloud.started()) == 1
    assert any(line.startswith("attempt 1 lost its processes") for line in cloud.said)
    assert cloud.said.count(f"attempt 1: logs in {cloud.at}/logs/1") == 2


def test_a_step_that_fails_three_times_ends_the_loop(cloud):
    fail = 'echo "step 4/9"; echo boom; exit 1'
    cloud.attempts('echo "step 2/9"; exit 1', fail, fail, fail)
    with pytest.raises(RunFailed, match=r"3 attempts failed at step 4[^\0]*fix   read .*logs"):
        cloud.launch(cloud.job())
    assert len(cloud.started()) == 4 and "1: boom" in cloud.said
    assert len(cloud.calls("create")) == 1


def test_wrong_input_is_never_tried_again(cloud):
    cloud.attempts(f'echo "model.heads: wrong"; exit {WRONG_INPUT}')
    assert cloud.launch(cloud.job(autodelete=True)) == WRONG_INPUT
    assert len(cloud.started()) == 1 and len(cloud.calls("delete")) == 1
    assert "0: model.heads: wrong" in cloud.said


@SLOW
def test_a_run_that_was_stopped_with_work_left_goes_on(cloud):
    stopped = f'echo "step 4/9"; exit {STOPPED}'
    cloud.attempts(stopped, stopped, stopped, stopped, FINISHED)
    assert cloud.launch(cloud.job()) == 0
    assert len(cloud.started()) == 5


@SLOW
def test_one_worker_that_dies_ends_the_others(cloud):
    alone = 'echo "step 4/9"; case $HOME in *host1) exit 1;; *) sleep 60;; esac'
    cloud.attempts(alone, FINISHED)
    assert cloud.launch(cloud.job()) == 0
    assert "the processes that have not ended are killed" in cloud.said and len(cloud.started()) == 2


@pytest.mark.long
@pytest.mark.parametrize("spent", ["max_hours: 5 h are over", pytest.param("max_usd: 2000.", marks=SLOW)])
def test_a_budget_that_is_spent_lets_the_run_save_and_gives_the_slice_back(cloud, spent, monkeypatch):
    tell = cloud.spend_at("step 1/9", monkeypatch)
    cloud.attempts(SAVES)
    most = {"max_hours": 5.0} if "hours" in spent else {"max_usd": 1000.0}
    assert cloud.launch(cloud.job(autodelete=True, **most), usd_per_hour=200.0, tell=tell) == STOPPED
    assert any(line.startswith(spent) for line in cloud.said) and "saved" in cloud.said
    assert len(cloud.calls("delete")) == 1 and "10h00m, 2000." in cloud.said[-1], cloud.said


def test_ctrl_c_lets_the_run_save(cloud):
    cloud.attempts(SAVES, FINISHED)

    def interrupt(line):
        if line == "step 1/9":
            os.kill(os.getpid(), signal.SIGINT)

    assert cloud.launch(cloud.job(autodelete=True), tell=interrupt) == STOPPED
    assert "saved" in cloud.said and len(cloud.started()) == 1 and len(cloud.calls("delete")) == 1


@pytest.mark.long
def test_a_second_ctrl_c_leaves_everything_as_it_is(cloud):
    cloud.attempts(SAVES)

    def interrupt(line):
        if line == "step 1/9" or line.startswith("asked to stop"):
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        cloud.launch(cloud.job(autodelete=True), tell=interrupt)
    assert cloud.calls("delete") == [] and cloud.said[-1] == "launch ends at once, and leaves one as it is"
    places.find(cloud.job()).kill(f"{loop.Launch(places.find(cloud.job()), 0.0, print, QUICK)._record.token}-1")


@SLOW
def test_retries_come_to_an_end(cloud):
    cloud.attempts(*[PREEMPTED] * 3)
    assert cloud.launch(cloud.job(max_retries=1, autodelete=True)) == STOPPED
    assert len(cloud.started()) == 2 and len(cloud.calls("delete")) == 2


class SwitchedOff(BaseException):
    """The machine of a launch was switched off: it does nothing more."""


def launch_and_switch_off(cloud, job):
    """A launch that ends when the run is at its first step."""

    def tell(line):
        cloud.said.append(line)
        if line == "step 1/9":
            raise SwitchedOff

    launch = loop.Launch(places.find(job), 0.0, tell, QUICK)
    launch._give_back = lambda: None
    with pytest.raises(SwitchedOff):
        print(launch.run(), cloud.said)


@pytest.mark.long
def test_the_same_command_given_again_finds_the_processes_that_go_on(cloud):
    cloud.attempts('echo "step 1/9"; sleep 1.5; echo "step 9/9"')
    launch_and_switch_off(cloud, cloud.job())
    assert cloud.launch(cloud.job()) == 0
    assert len(cloud.started()) == 1 and "step 9/9" in cloud.said
    assert len(cloud.calls("scp")) == 1 and len(cloud.calls("create")) == 1


@pytest.mark.long
def test_other_flags_end_the_processes_of_an_earlier_launch(cloud):
    cloud.attempts("echo step 1/9; sleep 60", FINISHED)
    launch_and_switch_off(cloud, cloud.job())
    assert cloud.launch(cloud.job(train="--config=tiny --rules=tp8")) == 0
    assert "--rules=tp8" in cloud.started()[1]
