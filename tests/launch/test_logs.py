"""The verb logs: it finds the logs of a launch, and shows the new lines of each process."""

import pytest

from gspmd_lm import cli
from gspmd_lm.errors import InputError
from gspmd_lm.launch import launch_file, logs


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The logs of a launch, which has made two attempts."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs/one.launch"
    for attempt, processes in (("9", ("0",)), ("10", ("0", "2", "10"))):
        (folder / attempt).mkdir(parents=True)
        for process in processes:
            (folder / attempt / f"{process}.log").write_text(f"{attempt}: begins\nstep {process}\nhalf a li")
    (folder / "10/gcloud.txt").write_text("ssh\n")
    (folder / "launch.txt").write_text("attempt 10\n")
    return folder


def test_the_newest_attempt_is_followed(folder):
    follower = logs.RunFollower(folder, 1)
    first = [("launch", "attempt 10"), ("0", "step 0"), ("2", "step 2"), ("10", "step 10")]
    assert list(follower.lines()) == first and list(follower.lines()) == []
    with (folder / "10/2.log").open("a") as log:
        log.write("ne\nnext\n")
    assert list(follower.lines()) == [("2", "half a line"), ("2", "next")]
    (folder / "11").mkdir()
    (folder / "11/0.log").write_text("again\n")
    assert list(follower.lines()) == [("0", "again")]


def test_the_last_lines_of_a_file_that_grows_meanwhile_are_whole(folder, monkeypatch):
    file = folder / "10/2.log"
    stat = (kind := type(logs.epath.Path(file))).stat

    def grow(path):
        if str(path) == str(file):
            file.write_text(f"{file.read_text()}ne\n")
        return stat(path)

    monkeypatch.setattr(kind, "stat", grow)
    shown = [line for name, line in logs.RunFollower(folder / "10", 1).lines() if name == "2"]
    assert shown[0] == "half a line"


def test_more_lines_than_there_are(folder):
    assert [line for name, line in logs.RunFollower(folder / "10", 99).lines() if name == "2"] == [
        "10: begins",
        "step 2",
    ]
    assert list(logs.RunFollower(folder / "10", 0).lines()) == []


@pytest.mark.parametrize("place", ["one.yaml", "runs/one", "runs/one/", "gs://bucket/elsewhere/one", "runs/one.launch"])
def test_logs_are_found(folder, place, tmp_path):
    (tmp_path / "one.yaml").write_text("workdir: gs://bucket/runs/one\n")
    (tmp_path / "runs/one").mkdir()
    assert launch_file.find_logs(place).resolve() == folder


def test_logs_that_are_not_there(folder):
    with pytest.raises(InputError, match=r"runs/two: no logs of a launch in runs/two or runs/two.launch\n"):
        launch_file.find_logs("runs/two")


def test_lines_have_their_process_before_them(folder, capsys):
    (folder / "10/0.log").write_text("[bold]loss[/bold] 3\n")
    with pytest.raises(SystemExit) as end:
        cli.main(["main.py", "logs", "runs/one", "--stop", "--lines=1"])
    assert not end.value.code
    assert capsys.readouterr().out == "launch | attempt 10\n0 | [bold]loss[/bold] 3\n2 | step 2\n10 | step 10\n"


def test_one_launch_is_followed(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["main.py", "logs"])
    assert end.value.code == 2 and "logs needs one launch" in capsys.readouterr().err
