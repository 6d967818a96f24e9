"""The loop around a JobSet, with a stand-in for kubectl."""

import pytest
import yaml

from gspmd_lm.errors import STOPPED, WRONG_INPUT, RunFailed
from gspmd_lm.launch import gke

FINISHED = 'echo "step 9/9"'


def job(cloud, **keys):
    return cloud.job("gke", image="image:tpu", **keys)


def test_the_set_restarts_its_pods_until_the_run_is_finished(cloud):
    cloud.attempts('echo "step 4/9"; exit 1', f'echo "step 5/9"; exit {STOPPED}', FINISHED)
    assert cloud.launch(job(cloud, spot=True, accelerator="2@v5e:4x4")) == 0
    assert len(cloud.started()) == 3 and "step 9/9" in cloud.said
    made = yaml.safe_load((cloud.at / "set.yaml").read_text())
    slices = made["spec"]["replicatedJobs"][0]
    pods = slices["template"]["spec"]
    assert slices["replicas"] == 2 and pods["parallelism"] == pods["completions"] == 4
    assert pods["template"]["spec"]["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5-lite-podslice", "cloud.google.com/gke-tpu-topology": "4x4",
        "cloud.google.com/gke-spot": "true",
    }  # fmt: skip


def test_wrong_input_ends_the_set(cloud):
    cloud.attempts(f'echo "model.heads: wrong"; exit {WRONG_INPUT}')
    assert cloud.launch(job(cloud)) == WRONG_INPUT
    assert len(cloud.started()) == 1 and "0: model.heads: wrong" in cloud.said
    policy = yaml.safe_load((cloud.at / "set.yaml").read_text())["spec"]["failurePolicy"]
    assert policy["rules"] == [{"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}]


def test_restarts_come_to_an_end(cloud):
    cloud.attempts(*['echo "step 4/9"; exit 1'] * 20)
    with pytest.raises(RunFailed, match="1 attempt failed at step 4"):
        cloud.launch(job(cloud, max_retries=3))
    assert len(cloud.started()) == 4


def test_a_budget_that_is_spent_deletes_the_set(cloud, monkeypatch):
    cloud.attempts("echo step 1/9; sleep 8")
    assert cloud.launch(job(cloud, max_hours=5.0), tell=cloud.spend_at("step 1/9", monkeypatch)) == STOPPED
    assert list(cloud.at.glob("set-*")) == []


@pytest.mark.long
@pytest.mark.parametrize("elastic", [True, False])
def test_a_set_whose_slice_does_not_come_back(cloud, monkeypatch, elastic):
    """An elastic job goes on with the slices that are there; any other one waits, until its budget is spent."""
    monkeypatch.setattr(gke, "MISSING_S", 0.5)
    (cloud.at / "ready").write_text("3")
    wait = "echo step 4/9; sleep 2; echo step 5/9; sleep 1"
    cloud.attempts(f"(cd $STAND_IN; ls set-*; grep replicas set.yaml) >> $STAND_IN/made; {wait}", FINISHED)
    tell = cloud.spend_at("step 5/9", monkeypatch)
    asked = job(cloud, accelerator="4@v5e:4x4", elastic=elastic, max_hours=5.0)
    assert cloud.launch(asked, tell=tell) == (0 if elastic else STOPPED)
    assert "replicas: 4" in (cloud.at / "made").read_text()
    assert ("one was lost; it is deleted and asked for again" in cloud.said) == elastic
    made = yaml.safe_load((cloud.at / "set.yaml").read_text())
    assert made["spec"]["replicatedJobs"][0]["replicas"] == (3 if elastic else 4)
    command = made["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]["command"]
    assert ("--elastic" in command) == elastic


@pytest.mark.long
def test_slices_that_come_back_in_time_keep_the_set(cloud, monkeypatch):
    monkeypatch.setattr(gke, "MISSING_S", 2.0)
    (cloud.at / "ready").write_text("3")
    back = 'sleep 1; echo 4 > "$STAND_IN/ready"; sleep 2; echo "step 9/9"'
    cloud.attempts(back)
    assert cloud.launch(job(cloud, accelerator="4@v5e:4x4", elastic=True)) == 0
    assert len(cloud.started()) == 1 and not any("was lost" in line for line in cloud.said)
