"""A workdir that changes while a run writes to it: pytest -n 0 -m slow tests/attacks/test_workdirs.py"""

import re
import shutil
import subprocess
import time

import pytest

from tests.attacks.runs import PATIENCE_S, RANDOM, SMALL, checkpoints, finished, start
from tests.launched import ROOT

OFTEN = ["--set=train.checkpoint_every=2", "--set=train.steps=100000", "--rules=none"]
ORDINARY = ["setpriv", "--bounding-set=-dac_override,-dac_read_search,-fowner"]  # permissions hold for root, too
MAY_DROP = shutil.which("setpriv") and not subprocess.run([*ORDINARY, "true"], capture_output=True).returncode


def moved(workdir):
    workdir.rename(workdir.with_name("elsewhere"))


def deleted(workdir):
    shutil.rmtree(workdir, ignore_errors=True)


def emptied(workdir):
    """As an unmounted disk leaves its folder."""
    moved(workdir)
    workdir.mkdir()


def read_only(workdir):
    for folder in (workdir, workdir / "checkpoints"):
        folder.chmod(0o555)


HARMS = {
    moved: "run: config.yaml and lock.json are gone",
    deleted: "run",
    emptied: "run: config.yaml and lock.json are gone",
    read_only: "was not written to",
}


@pytest.mark.slow
@pytest.mark.parametrize("harm", HARMS, ids=lambda harm: harm.__name__)
def test_one_message_names_what_is_gone_and_the_run_goes_on_where_it_was(harm, tmp_path):
    if harm is read_only and not MAY_DROP:
        pytest.skip("not run: permissions do not hold here")
    workdir, log = tmp_path / "run", tmp_path / "log"
    command = [*SMALL, *RANDOM, *OFTEN, f"--workdir={workdir}"]
    process = start(command, tmp_path, log, before=ORDINARY if harm is read_only else ())
    until = time.monotonic() + PATIENCE_S
    while not (workdir / "checkpoints" / "6").exists():
        assert process.poll() is None and time.monotonic() < until, log.read_text()
        time.sleep(0.05)
    harm(workdir)
    code, said = process.wait(PATIENCE_S), log.read_text()
    assert code == 1 and f'File "{ROOT}' not in said and HARMS[harm] in said, said
    message, fix = said.rstrip().splitlines()[-2:]
    assert str(workdir) in message and re.search(r"; steps? \d+( to \d+)? (is|are) not saved$", message), said
    assert fix.startswith("  fix   "), said
    if harm is not read_only:
        shutil.rmtree(workdir, ignore_errors=True)  # of the save that was being written
    if harm in (moved, emptied):
        workdir.with_name("elsewhere").rename(workdir)
    elif harm is read_only:
        for folder in (workdir, workdir / "checkpoints"):
            folder.chmod(0o755)
    stop = 4 if harm is deleted else checkpoints(workdir)[-1] + 2
    finished([*command, f"--set=train.steps={stop}"], tmp_path, log)
    assert checkpoints(workdir)[-1] == stop
